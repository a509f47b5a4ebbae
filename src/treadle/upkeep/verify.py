"""Proof: every stored value that is not what its sources say.

Targets are read page by page, in the order of `_id`, and their values are
recomputed on the server. What looks wrong is looked at again inside one
snapshot before it is reported, so that a writer who is just at work is not
mistaken for a fault.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pymongo.errors import OperationFailure

from treadle.engine.fill import fill_references
from treadle.engine.groups import PAGE as GROUPS_PAGE
from treadle.engine.groups import differing, examine_groups, orphan
from treadle.engine.intents import is_about_one_document, log
from treadle.engine.lease import holder
from treadle.engine.recompute import recompute
from treadle.graph.finding import Finding as Finding
from treadle.graph.pattern import STATE
from treadle.patterns.approximation import inspection as counts
from treadle.patterns.outlier import inspection as outliers
from treadle.plan import Plan, Raw, aggregate, count_documents, find, wait
from treadle.plan.capabilities import Capabilities
from treadle.query.comparison import same
from treadle.query.keys import freeze
from treadle.query.paths import Step, overlap, plain, put, value_at
from treadle.upkeep.closed import Bounds, is_closed, last_bounds
from treadle.upkeep.position import NAME as WORKER

if TYPE_CHECKING:
    from treadle.graph.graph import Entry, Graph

PAGE = 500
SECOND_LOOK_SECONDS = 0.05
# How long an active worker is given to put a value right.
PATIENCE_LOOKS = 4
PATIENCE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long run has come with one model."""

    model: str
    done: int
    total: int


Report = Callable[[Progress], None]


def verify(
    graph: Graph, server: Capabilities, entries: Iterable[Entry[Any]], report: Report | None = None
) -> Plan[list[Finding]]:
    """All findings in the targets of these models."""
    findings: list[Finding] = []
    for entry in entries:
        if entry.layout is not None:
            findings += yield from entry.layout.verify(server, report)
            continue
        if entry.tree is not None:
            from treadle.patterns.tree.inspection import verify_tree

            findings.extend((yield from verify_tree(server, entry.tree, report)))
        if not entry.derived:
            continue
        bounds: Bounds | None = None
        if entry.group is not None and entry.group.maintain == "schedule":
            bounds = yield from last_bounds(entry)
            if bounds is None:
                # Nothing has been computed yet, so that nothing can be wrong.
                continue
        total = (yield from count_documents(entry.collection, entry.exactly)) if report else 0
        done = 0
        last: list[Any] | None = None
        while True:
            documents = yield from page(entry, last, PAGE if entry.group is None else GROUPS_PAGE)
            if not documents:
                break
            last = [documents[-1]["_id"]]
            done += len(documents)
            documents = [each for each in documents if within(entry, each, bounds)]
            suspects = yield from examine(server, entry, documents)
            if suspects:
                confirmed = yield from _look_again(server, entry, suspects)
                findings.extend((yield from _give_time(server, entry, confirmed)))
            if report:
                report(Progress(entry.model.__name__, done, max(total, done)))
        findings.extend(Finding(*each) for each in (yield from outliers.orphans(entry)))
        findings.extend(Finding(*each) for each in (yield from counts.overdue(entry)))
        if entry.group is not None:
            findings.extend((yield from _verify_groups(server, entry, bounds)))
    return findings


def within(entry: Entry[Any], document: Raw, bounds: Bounds | None) -> bool:
    """Whether a document is one that the last scheduled run computed; any, where none is scheduled."""
    return bounds is None or is_closed(entry.key_of(document), bounds)


def _verify_groups(server: Capabilities, entry: Entry[Any], bounds: Bounds | None) -> Plan[list[Finding]]:
    """Groups that have no document, or more than one."""
    findings: list[Finding] = []
    keys = [key for key in (yield from differing(entry)) if bounds is None or is_closed(key, bounds)]
    for start in range(0, len(keys), GROUPS_PAGE):
        chunk = keys[start : start + GROUPS_PAGE]
        look = partial(examine_groups, server, entry, chunk)
        findings.extend((yield from server.together(look, SECOND_LOOK_SECONDS)))
    return findings


def page(
    entry: Entry[Any],
    last: list[Any] | None,
    limit: int,
    projection: Raw | None = None,
    *,
    whole: bool = False,
) -> Plan[list[Raw]]:
    """The next documents in the order of `_id`, whatever types the ids have.

    Those of the model's very class, or of the `whole` collection. The id of
    the last one stands in a list, because it may itself be null.
    """
    chosen = {} if whole else entry.exactly
    shown = projection or {rule.path: {"$slice": rule.limit + 1} for rule in entry.outliers} or None
    if last is None:
        return (yield from find(entry.collection, chosen, shown, sort=[("_id", 1)], limit=limit))
    # A range query would end where the type of the ids changes; index bounds do not.
    bounds: Raw = {"min": {"_id": last[0]}, "hint": [("_id", 1)]}
    found = yield from find(entry.collection, chosen, shown, sort=[("_id", 1)], limit=limit + 1, **bounds)
    return [each for each in found if freeze(each["_id"]) != freeze(last[0])][:limit]


def _look_again(server: Capabilities, entry: Entry[Any], suspects: Sequence[Finding]) -> Plan[list[Finding]]:
    """The findings that remain when target and sources are read at one moment."""
    keys = list({freeze(each.document_id): each.document_id for each in suspects}.values())

    def look() -> Plan[list[Finding]]:
        shown = {rule.path: {"$slice": rule.limit + 1} for rule in entry.outliers} or None
        documents = yield from find(entry.collection, {"_id": {"$in": keys}, **entry.exactly}, shown)
        return (yield from examine(server, entry, documents))

    # Without transactions, what a write came between is right after a little while.
    return (yield from server.together(look, SECOND_LOOK_SECONDS))


def _give_time(server: Capabilities, entry: Entry[Any], findings: Sequence[Finding]) -> Plan[list[Finding]]:
    """The findings without those that the worker is about to put right.

    What is maintained by stream is always a moment behind. While a worker is
    active, such a finding counts only if nothing about it changes for a while.
    """
    streamed = [rule.path for rule in entry.rules if rule.maintain == "stream"]
    late = [each for each in findings if any(overlap(_plain(each.path), path) for path in streamed)]
    if not late or (yield from holder(WORKER)) is None:
        return list(findings)
    others = [each for each in findings if each not in late]
    for _ in range(PATIENCE_LOOKS):
        yield from wait(PATIENCE_SECONDS)
        again = yield from _look_again(server, entry, late)
        late = [each for each in again if any(_same_finding(each, earlier) for earlier in late)]
        if not late:
            break
    return [*others, *late]


def _plain(path: str) -> str:
    bare = plain(path)
    return bare.removeprefix(STATE + ".")


def _same_finding(one: Finding, other: Finding) -> bool:
    where = (freeze(one.document_id), one.path) == (freeze(other.document_id), other.path)
    return where and same(one.stored, other.stored) and same(one.expected, other.expected)


def examine(server: Capabilities, entry: Entry[Any], documents: Sequence[Raw]) -> Plan[list[Finding]]:
    """The findings in these documents."""
    own = [*(yield from outliers.examine(entry, documents)), *counts.examine(entry, documents)]
    wanted = yield from expected(server, entry, documents)
    findings: list[Finding] = [Finding(*each) for each in own]
    for document, right in zip(documents, wanted, strict=True):
        if entry.group is not None and not value_at(right, entry.group.segments):
            findings.append(orphan(entry, document))
            continue
        for rule in entry.gathers:
            for path in rule.empty():
                pattern = rule.pattern if entry.group is None else entry.group.pattern
                _compare(findings, entry, pattern, document, right, path)
        for formula in entry.formulas:
            _compare(findings, entry, formula.pattern, document, right, formula.path)
        for reference in entry.references:
            wanted_places = dict(places_of(right, reference.steps, ""))
            for prefix, container in places_of(document, reference.steps, ""):
                stored, should = container.get(reference.name), wanted_places[prefix].get(reference.name)
                if not same(stored, should):
                    findings.append(
                        Finding(
                            reference.pattern,
                            entry.model.__name__,
                            document["_id"],
                            prefix + reference.name,
                            stored,
                            should,
                        )
                    )
    return findings


def _compare(
    findings: list[Finding], entry: Entry[Any], pattern: str, document: Raw, right: Raw, path: str
) -> None:
    segments = path.split(".")
    stored, should = value_at(document, segments), value_at(right, segments)
    if not same(stored, should):
        findings.append(Finding(pattern, entry.model.__name__, document["_id"], path, stored, should))


def places_of(raw: Any, steps: Sequence[Step], prefix: str) -> Iterable[tuple[str, Raw]]:
    """Each sub-document that the steps lead to, with its path, positions included."""
    if isinstance(raw, list):
        for number, item in enumerate(raw):
            yield from places_of(item, steps, f"{prefix}{number}.")
    elif isinstance(raw, dict):
        if not steps:
            yield prefix, raw
        elif steps[0].stored in raw:
            yield from places_of(raw[steps[0].stored], steps[1:], f"{prefix}{steps[0].stored}.")


def expected(server: Capabilities, entry: Entry[Any], documents: Sequence[Raw]) -> Plan[list[Raw]]:
    """The documents as they should be stored."""
    if not documents:
        return []
    ids = [each["_id"] for each in documents]
    keys = [entry.key_of(each) for each in documents]
    wanted = [copy.deepcopy(each) for each in documents]
    values = yield from recompute(entry.gathers, keys, server.version)
    for key, right in zip(keys, wanted, strict=True):
        for path, value in values[freeze(key)].items():
            put(right, path.split("."), value)
    pairs: list[tuple[Raw | None, Raw]] = list(zip(documents, wanted, strict=True))
    yield from fill_references(entry, pairs, look_only=True)
    if entry.formulas:
        rows = yield from formulas_now(entry, ids)
        for document, right in zip(documents, wanted, strict=True):
            row = rows.get(freeze(right["_id"]))
            for number, formula in enumerate(entry.formulas):
                segments = formula.path.split(".")
                # What the server cannot compute is neither right nor wrong.
                put(
                    right,
                    segments,
                    row.get(f"f{number}") if row is not None else value_at(document, segments),
                )
    return wanted


def formulas_now(entry: Entry[Any], keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
    """What the formulas of these documents give; nothing for one that the server cannot compute."""
    computed = {f"f{number}": formula.expression for number, formula in enumerate(entry.formulas)}
    # Not $project, where a plain number would mean to include a field.
    stages = [{"$match": {"_id": {"$in": list(keys)}}}, {"$replaceWith": {"_id": "$_id", **computed}}]
    try:
        rows = yield from aggregate(entry.collection, stages)
    except OperationFailure as error:
        if not is_about_one_document(error):
            raise
        if len(keys) == 1:
            log.warning("a formula of %s %r cannot be computed: %s", entry.model.__name__, keys[0], error)
            return {}
        found: dict[Any, Raw] = {}
        for key in keys:
            found.update((yield from formulas_now(entry, [key])))
        return found
    return {freeze(row["_id"]): row for row in rows}
