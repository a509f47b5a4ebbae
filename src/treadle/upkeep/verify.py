"""Proof: every stored value that is not what its sources say.

Targets are read page by page, in the order of `_id`, and their values are
recomputed on the server. What looks wrong is looked at again inside one
snapshot before it is reported, so that a writer who is just at work is not
mistaken for a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import ceil
from typing import Any

from treadle.engine.derive import DerivedValues, derive
from treadle.engine.lease import holder
from treadle.engine.pages import projection_of
from treadle.engine.salvage import salvage
from treadle.graph.derived import DerivedRule
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding, Pace, Report
from treadle.graph.quarantine import around
from treadle.graph.rule import STATE, Rule
from treadle.graph.scope import Failed
from treadle.graph.stored_pages import chunks
from treadle.model.text import escape_text
from treadle.plan import Plan, Raw, wait
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import message_of
from treadle.query.comparison import same
from treadle.query.keys import distinct, freeze
from treadle.query.paths import overlap, plain, value_at
from treadle.upkeep.closed_windows import NOT_YET, Bounds, is_closed, scheduled_bounds
from treadle.upkeep.groups import differing, examine_groups, orphan
from treadle.upkeep.position import NAME as WORKER
from treadle.upkeep.sweep import Sweep

# Groups of a rollup that are computed in one query.
GROUP_PAGE = 200
# Further looks at a wrong value that an active worker may be about to correct.
VERIFY_LOOKS = 4
# The pause before each.
VERIFY_LOOK_SECONDS = 0.5
# On a sharded cluster, the periodicNoopIntervalSecs of its shards.
COLD_SHARD_SECONDS = 10.0


def verify(
    graph: Graph,
    server: Capabilities,
    entries: Iterable[ModelEntry],
    report: Report | None = None,
    sample: float | None = None,
) -> Plan[list[Finding]]:
    """All findings in the targets of these models.

    With `sample`, those in so many of the documents that are examined one by
    one; what is proven as a whole, such as a tree, is left out.
    """
    findings: list[Finding] = []
    for entry in entries:
        if sample is not None:
            bounds = yield from scheduled_bounds(entry)
            if entry.layout is None and bounds is not NOT_YET and examined(entry):
                findings += yield from _verify_pages(graph, server, entry, bounds, report, sample)
            continue
        if entry.layout is not None:
            findings += yield from entry.layout.verify(server, report)
            continue
        bounds = yield from scheduled_bounds(entry)
        if bounds is NOT_YET:
            # Nothing has been computed yet, so that nothing can be wrong.
            continue
        for rule in own(entry, "verify"):
            findings += (yield from around(rule.place.label, entry.collection, None, rule.verify(None))) or []
        if examined(entry):
            findings += yield from _verify_pages(graph, server, entry, bounds, report)
        if entry.rules.group is not None:
            findings += yield from _verify_groups(graph, server, entry, bounds)
    return findings


def own(entry: ModelEntry, method: str) -> list[Rule]:
    """The rules that answer a method and are bound at this very model, so that kinds do not repeat it."""
    return [rule for rule in entry.rules.implementing(method) if rule.target is entry]


def examined(entry: ModelEntry) -> bool:
    """Whether the documents of a model are looked at page by page."""
    by_rules = any(rule.page_projection is not None for rule in entry.rules.implementing("verify"))
    return by_rules or bool(DerivedValues.of(entry).rules)


def _verify_pages(
    graph: Graph,
    server: Capabilities,
    entry: ModelEntry,
    bounds: Bounds | None,
    report: Report | None,
    sample: float | None = None,
) -> Plan[list[Finding]]:
    findings: list[Finding] = []

    def visit(documents: Sequence[Raw]) -> Plan[None]:
        computed = documents
        if bounds is not None:
            computed = [each for each in documents if within(entry, each, bounds)]
        confirmed = yield from confirm(graph, server, entry, computed)
        findings.extend(confirmed)
        if confirmed and isinstance(report, Pace):
            yield from report.found(confirmed)

    def note(failed: Failed) -> None:
        findings.extend(_not_examined(entry, key, reason) for key, reason in failed)

    size = entry.limits.verify_page if entry.rules.group is None else GROUP_PAGE
    sweep = Sweep(entry, size, visit, report, note)
    yield from sweep.all() if sample is None else sweep.sample(sample)
    return findings


def confirm(
    graph: Graph, server: Capabilities, entry: ModelEntry, documents: Sequence[Raw]
) -> Plan[list[Finding]]:
    """The findings in these documents that are still there at a second look, at one moment."""
    suspects = yield from examine_each(server, entry, documents)
    if not suspects:
        return []
    confirmed = yield from _look_again(graph, server, entry, suspects)
    return (yield from _give_time(graph, server, entry, confirmed))


def _not_examined(entry: ModelEntry, key: Any, reason: str) -> Finding:
    """A document that cannot be verified; `status` lists it with the others."""
    return Finding("set-aside", entry.model.__name__, key, "", None, escape_text(reason))


def examine_each(server: Capabilities, entry: ModelEntry, documents: Sequence[Raw]) -> Plan[list[Finding]]:
    """The findings in these documents; one that cannot be examined is set aside, and is a finding itself."""

    def attempt(some: Sequence[Raw]) -> Plan[list[Finding]]:
        return examine(entry, some)

    def lost(document: Raw, error: Exception) -> list[Finding]:
        return [_not_examined(entry, document["_id"], message_of(error))]

    name, collection = entry.model.__name__, entry.collection
    return (yield from salvage(name, collection, documents, attempt, key_of=entry.key_of, lost=lost))


def within(entry: ModelEntry, document: Raw, bounds: Bounds | None) -> bool:
    """Whether a document is one that the last scheduled run computed; any, where none is scheduled."""
    return bounds is None or is_closed(entry.key_of(document), bounds)


def _verify_groups(
    graph: Graph, server: Capabilities, entry: ModelEntry, bounds: Bounds | None
) -> Plan[list[Finding]]:
    """Groups that have no document, or more than one."""
    findings: list[Finding] = []
    keys = [key for key in (yield from differing(entry)) if bounds is None or is_closed(key, bounds)]

    def attempt(some: Sequence[Any]) -> Plan[list[Finding]]:
        return server.transact(partial(examine_groups, entry, some))

    def lost(key: Any, error: Exception) -> list[Finding]:
        return [_not_examined(entry, tuple(key), message_of(error))]

    for chunk in chunks(keys, GROUP_PAGE):
        findings += yield from salvage(entry.model.__name__, entry.collection, chunk, attempt, lost=lost)
    return findings


def _look_again(
    graph: Graph, server: Capabilities, entry: ModelEntry, suspects: Sequence[Finding]
) -> Plan[list[Finding]]:
    """The findings that remain when target and sources are read at one moment."""
    quarantined = [each for each in suspects if each.pattern == "set-aside"]
    keys = distinct(each.document_id for each in suspects if each not in quarantined)

    def look(some: Sequence[Any]) -> Plan[list[Finding]]:
        chosen = {"_id": {"$in": list(some)}}
        images = yield from entry.targets.exact.find(chosen, projection=projection_of(entry))
        return (yield from examine(entry, [image.document for image in images]))

    def attempt(some: Sequence[Any]) -> Plan[list[Finding]]:
        return server.transact(partial(look, some))

    def lost(key: Any, error: Exception) -> list[Finding]:
        return [_not_examined(entry, key, message_of(error))]

    name = entry.model.__name__
    return quarantined + (yield from salvage(name, entry.collection, keys, attempt, lost=lost))


def _give_time(
    graph: Graph, server: Capabilities, entry: ModelEntry, findings: Sequence[Finding]
) -> Plan[list[Finding]]:
    """The findings without those that the worker is about to correct.

    What is maintained by stream is always a moment behind. While a worker is
    active, such a finding counts only if nothing about it changes for a while.
    """
    streamed = [rule.path.removeprefix(STATE + ".") for rule in entry.rules if rule.maintain == "stream"]
    late = [
        each
        for each in findings
        if any(overlap(plain(each.path).removeprefix(STATE + "."), path) for path in streamed)
    ]
    if not late or (yield from holder(WORKER)) is None:
        return list(findings)
    others = [each for each in findings if each not in late]
    for _ in range(_looks(server)):
        yield from wait(VERIFY_LOOK_SECONDS)
        again = yield from _look_again(graph, server, entry, late)
        late = [each for each in again if any(_same_finding(each, earlier) for earlier in late)]
        if not late:
            break
    return [*others, *late]


def _looks(server: Capabilities) -> int:
    """How often to look again; on a sharded cluster until a shard without writes has moved the stream on."""
    cold = ceil(COLD_SHARD_SECONDS / VERIFY_LOOK_SECONDS) if server.sharded else 0
    return VERIFY_LOOKS + cold


def _same_finding(one: Finding, other: Finding) -> bool:
    where = (freeze(one.document_id), one.path) == (freeze(other.document_id), other.path)
    return where and same(one.stored, other.stored) and same(one.expected, other.expected)


def examine(entry: ModelEntry, documents: Sequence[Raw]) -> Plan[list[Finding]]:
    """The findings in these current documents."""
    findings: list[Finding] = []
    for rule in entry.rules.implementing("verify"):
        findings += yield from rule.verify(documents)
    chosen, group = DerivedValues.of(entry), entry.rules.group
    for document, derived in zip(documents, (yield from derive(chosen, documents)), strict=True):
        if group is not None and not value_at(derived, group.path):
            findings.append(orphan(entry, document))
        elif not chosen.is_correct(document, derived):
            findings += _compare(chosen, document, derived)
    return findings


def _compare(chosen: DerivedValues, document: Raw, derived: Raw) -> Iterator[Finding]:
    """What of a document is not as it should be."""
    entry = chosen.entry
    for rule in chosen.rules:
        aggregate = rule.aggregate if isinstance(rule, DerivedRule) and not rule.is_copy else None
        pattern = (
            rule.pattern if aggregate is None or entry.rules.group is None else entry.rules.group.pattern
        )
        for (path, stored), (_, should) in zip(_values(rule, document), _values(rule, derived), strict=True):
            # What the field cannot hold cannot be stored, so that no stored value is correct.
            refused = aggregate is not None and aggregate.refuse({path: should}) is not None
            if refused or not same(stored, should):
                yield Finding(pattern, entry.model.__name__, document["_id"], path, stored, should)


def _values(rule: Rule, document: Raw) -> list[tuple[str, Any]]:
    if isinstance(rule, DerivedRule):
        return rule.values(document)
    return [(rule.path, value_at(document, rule.path))]
