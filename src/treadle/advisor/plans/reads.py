"""The recorded reads that a plan changes, in a workload file of its own beside it.

`prove` runs them on the real database. They hold values, so that only their
owner may read the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle.advisor.plans.folder import MODE_PRIVATE, READS, ChangePlan
from treadle.advisor.plans.models import load_models
from treadle.advisor.trials.declared import Patterns, patterns_of
from treadle.advisor.trials.rewrite import Rewritten, rewrite, unchanged
from treadle.advisor.trials.units import Group, Unit, chosen, grouped
from treadle.advisor.trials.workload_file import Request, Workload, end_line, header_line, read

# The way that a read took before there was an index for it.
_NATURAL = {"$natural": 1}


def write_reads(plan: ChangePlan, workload: Workload, folder: Path) -> int:
    """Copy the reads that the plan changes; how many."""
    groups = [*chosen(workload, patterns(plan)), *_scanning(plan, workload)]
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


def patterns(plan: ChangePlan) -> Patterns:
    return patterns_of(load_models(plan.models))


def recorded(plan: ChangePlan, path: Path, row: Mapping[str, Any]) -> tuple[list[Group], float]:
    """The reads that the plan changes, each on the way that it took before, and the recording's seconds."""
    workload = read(path)
    groups = [*chosen(workload, patterns(plan)), *_scanning(plan, workload)]
    former = {
        each["name"]: {index["name"]: list(index["key"]) for index in each["indexes"]}
        for each in row["before"]["indexes"]
        if row["indexes_made"].get(each["name"])
    }
    for group in groups:
        group.units = [tuple(_as_before(each, former) for each in unit) for unit in group.units]
    return groups, workload.summary().seconds


def _as_before(request: Request, former: Mapping[str, Mapping[str, list[str]]]) -> Request:
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
    stages = request.body.get("pipeline") or [{}]
    first = stages[0] if isinstance(stages[0], Mapping) else {}
    condition = request.body.get("filter") or first.get("$match") or {}
    sort = request.body.get("sort") or first.get("$sort") or {}
    for paths in (set(condition), set(sort)):
        served = {
            name: len(list(itertools.takewhile(paths.__contains__, keys))) for name, keys in indexes.items()
        }
        best = max(served, key=lambda name: served[name], default=None)
        if best is not None and served[best]:
            return best
    return None


def _scanning(plan: ChangePlan, requests: Iterable[Request]) -> list[Group]:
    """The reads that scanned a collection for which the plan makes an index."""
    places = [key.partition("@")[2] for key in plan.findings if key.startswith("query-without-index@")]

    declared = patterns(plan)

    def wanted(unit: Unit) -> bool:
        request = unit[0]
        about = any(place.startswith(f"{request.collection}.") for place in places)
        scans = about and request.operation in ("find", "aggregate") and request.plan == "COLLSCAN"
        # Another read takes its place, which is measured once.
        return scans and rewrite(unit, declared) is None

    return grouped(requests, Patterns({}), wanted)


def rewriter(plan: ChangePlan) -> Callable[[Unit], Rewritten | None]:
    """What takes the place of a unit once the plan is applied: another read, or the same by any index."""
    declared = patterns(plan)

    def after(unit: Unit) -> Rewritten | None:
        free = tuple(replace(each, body=_without_hint(each)) for each in unit)
        return rewrite(free, declared) or (unchanged(free) if unit != free else None)

    return after


def _without_hint(request: Request) -> dict[str, Any]:
    return {name: value for name, value in request.body.items() if name != "hint"}
