"""Whether an applied plan holds what its trial said: values right, reads as much quicker.

A few of the recorded reads run on the real database in both ways, as they were recorded and as the models
allow, with a rest after each. The gain of each is compared with the interval that the trial gave. A read that
scanned a collection scans it again for that, so only one of its shape does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pymongo.database import Database

from treadle.advisor.loop.apply import Log, Report, following, open_store, row_of, silent, verify
from treadle.advisor.loop.compare import ROUNDS_MIN, compare_reads
from treadle.advisor.loop.plan import READS, AdoptionPlan
from treadle.advisor.loop.request_shape import Read
from treadle.advisor.loop.results import Measured
from treadle.advisor.loop.rewrite import Rewritten, rewrite, unchanged
from treadle.advisor.loop.units import Group, Unit, grouped
from treadle.advisor.loop.workload_file import MODE_PRIVATE, Request, Workload, end_line, header_line, read
from treadle.advisor.proposals import Draft
from treadle.engine.lease import holder
from treadle.errors import UsageError
from treadle.graph.outcomes import Finding
from treadle.store.blocking.store import Store
from treadle.upkeep import setup_record
from treadle.upkeep.position import NAME

# Of each shape, on a database that others use.
UNITS_MAX = 5
# The way that a read took before there was an index for it.
_NATURAL = {"$natural": 1}
# Collection -> index name -> its fields.
FormerIndexes = Mapping[str, Mapping[str, list[str]]]


@dataclass(frozen=True, slots=True)
class Proven:
    """One read: the gain in the trial, and the gain on the real database."""

    request: str
    after: str
    tried: Measured | None
    proven: Measured
    different: int
    compared: int

    @property
    def within(self) -> bool:
        """Whether the gain lies in the trial's interval."""
        return self.tried is not None and self.tried.holds(self.proven.value)

    @property
    def holds(self) -> bool:
        """Whether answers are the same, and it is, within the errors, as quick as the trial said."""
        quick = self.tried is None or self.proven.high >= self.tried.low
        return quick and not self.different


@dataclass(frozen=True, slots=True)
class Proof:
    """What `prove` found."""

    findings: tuple[Finding, ...]
    reads: tuple[Proven, ...]
    # Reads of the trial that could not be run here, and why.
    notes: tuple[str, ...]
    # Changes that had not been followed yet, and whether a worker follows now.
    behind: int
    followed: bool

    @property
    def holds(self) -> bool:
        return not self.findings and bool(self.reads) and all(each.holds for each in self.reads)


def prove(
    database: Database[Any],
    plan: AdoptionPlan,
    workload: Path,
    *,
    log: Log = silent,
    progress: Report | None = None,
) -> Proof:
    """Verify every value of the plan, then measure some of the recorded reads in both ways."""
    store = open_store(database, plan)
    row = row_of(database, plan)
    if row is None or row["state"] != "applied":
        raise UsageError(
            f"This plan is not applied to {database.name}; run treadle apply first.", code="plan-not-applied"
        )
    recorded = read(workload)
    groups = reads_of_plan(plan, recorded, _former_indexes(store))
    streamed = any(rule.maintain == "stream" for rule in store.graph.rules)
    followed = store.runner.run(holder(NAME)) is not None
    behind = store.worker().lag().events if streamed else 0
    log("Verifying every maintained value.")
    findings = verify(store, progress=progress)
    log("Running the recorded reads in both ways.")
    with following(store):
        # An answer may be of before a change that the worker had not followed yet.
        results, untried = compare_reads(
            database,
            database,
            groups,
            rewriter(plan),
            recorded.summary().seconds,
            rounds=ROUNDS_MIN,
            settle=lambda: None,
            rest=True,
        )
    expected = _expected(plan)
    reads = tuple(
        Proven(
            each.request,
            each.after,
            expected.get((each.request, each.after), expected.get((each.request, ""))),
            each.ratio,
            each.different,
            each.compared,
        )
        for each in results
    )
    return Proof(tuple(findings), reads, tuple(untried), behind, followed)


def _expected(plan: AdoptionPlan) -> dict[tuple[str, str], Measured]:
    """What the trial measured.

    By a read and what takes its place, since two may be the same in words, and
    by the read alone.
    """
    results = [request for result in plan.results for request in result.requests]
    reads = [each for each in results if each.kind == "read"]
    return {(each.request, after): each.ratio for each in reads for after in ("", each.after)}


# -- the recorded reads of a plan -----------------------------------------------------------


def write_reads(plan: AdoptionPlan, workload: Workload, folder: Path) -> int:
    """Copy the reads that the plan changes into a file for its owner alone. Returns their number."""
    groups = [*_changed(plan.draft, workload), *_scanning(plan, workload)]
    requests = [each for group in groups for unit in group.units for each in unit]
    requests.sort(key=lambda each: each.at)
    path = folder / READS
    path.unlink(missing_ok=True)
    path.touch(mode=MODE_PRIVATE)
    lines = [header_line(workload.database, workload.started)]
    lines += [each.as_line() for each in requests]
    lines.append(end_line(seconds=workload.summary().seconds, operations=len(requests)))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(requests)


def reads_of_plan(plan: AdoptionPlan, workload: Workload, former: FormerIndexes) -> list[Group]:
    """Some of the reads that the plan changes, each on the way that it took before."""
    groups = [*_changed(plan.draft, workload, UNITS_MAX), *_scanning(plan, workload, UNITS_MAX)]
    for group in groups:
        group.units = [tuple(_as_before(each, former) for each in unit) for unit in group.units]
        if any(each.body.get("hint") == _NATURAL for unit in group.units for each in unit):
            group.units = group.units[:1]
    return groups


def _former_indexes(store: Store) -> FormerIndexes:
    """Of the collections in which set-up made an index: the keys of the other indexes."""
    made = {
        each.collection: {index["name"] for index in each.indexes}
        for each in store.runner.run(setup_record.records())
        if each.indexes
    }
    return {
        collection: {
            index["name"]: list(index["key"])
            for index in store.database[collection].list_indexes()
            if index["name"] not in own
        }
        for collection, own in made.items()
    }


def _as_before(request: Request, former: FormerIndexes) -> Request:
    """The read on the way that it took: an index that the plan made would make it quicker as well."""
    indexes = former.get(request.collection)
    if indexes is None or request.operation not in ("find", "aggregate") or request.body.get("hint"):
        return request
    hint: Any = None
    if request.plan == "COLLSCAN":
        hint = _NATURAL
    elif request.plan.startswith("IXSCAN"):
        hint = _former_index(request, indexes)
    return request if hint is None else replace(request, body={**request.body, "hint": hint})


def _former_index(request: Request, indexes: Mapping[str, list[str]]) -> str | None:
    """The index of before that serves most of a read: of its filter, else of its sort."""
    asked = Read.of(request)
    for paths in (set(asked.filter), set(asked.sort)) if asked is not None else ():
        served = {
            name: len(list(itertools.takewhile(paths.__contains__, keys))) for name, keys in indexes.items()
        }
        best = max(served, key=lambda name: served[name], default=None)
        if best is not None and served[best]:
            return best
    return None


def _changed(draft: Draft, requests: Iterable[Request], most: int = 40) -> list[Group]:
    return grouped(requests, draft, lambda unit: rewrite(unit, draft) is not None, most)


def _scanning(plan: AdoptionPlan, requests: Iterable[Request], most: int = 40) -> list[Group]:
    """The reads that scanned a collection for which the plan makes an index."""
    indexes = {each.collection: {path for path, _ in each.keys} for each in plan.draft.indexes}

    def wanted(unit: Unit) -> bool:
        request = unit[0]
        scans = request.operation in ("find", "aggregate") and request.plan == "COLLSCAN"
        # Another read takes its place, which is measured once.
        return scans and request.collection in indexes and rewrite(unit, plan.draft) is None

    return grouped(requests, Draft(), wanted, most)


def rewriter(plan: AdoptionPlan) -> Callable[[Unit], Rewritten | None]:
    """What takes the place of a unit once the plan is applied: another read, or the same by any index."""

    def after(unit: Unit) -> Rewritten | None:
        free = tuple(replace(each, body=_without_hint(each)) for each in unit)
        return rewrite(free, plan.draft) or (unchanged(free) if unit != free else None)

    return after


def _without_hint(request: Request) -> dict[str, Any]:
    return {name: value for name, value in request.body.items() if name != "hint"}
