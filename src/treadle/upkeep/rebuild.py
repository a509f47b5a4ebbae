"""Making right what is not: whole collections (`rebuild`) or single findings (`repair`).

Both recompute from the sources in small commits that really write each
target, so that writers can go on: who collides starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from treadle.engine.commit import commit_on
from treadle.engine.contention import in_pieces
from treadle.engine.groups import differing, keys_found, require_indexes
from treadle.engine.pages import chunks, go_through
from treadle.engine.recompute import Recomputation
from treadle.engine.set_aside import around, set_aside
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Report
from treadle.graph.pattern import Entry, Rule
from treadle.plan import Plan, Raw, find
from treadle.plan.capabilities import Capabilities
from treadle.plan.decoding import RawId
from treadle.query.keys import distinct, freeze
from treadle.upkeep import fingerprints, position
from treadle.upkeep.closed import NOT_YET, is_closed, scheduled_bounds
from treadle.upkeep.verify import examined, own, verify, within


def in_order(entries: Iterable[Entry[Any]]) -> list[Entry[Any]]:
    """Models whose fields feed others before those others."""
    ruled = [entry for entry in entries if entry.rules and entry.layout is None]
    return sorted(ruled, key=lambda entry: min(rule.level for rule in entry.rules))


def rebuild(
    graph: Graph, server: Capabilities, entries: Iterable[Entry[Any]], report: Report | None = None
) -> Plan[int]:
    """Recompute every maintained value of these models; how many documents were visited."""
    visited = 0
    listed = list(entries)
    for entry in listed:
        if entry.layout is not None:
            visited += yield from entry.layout.rebuild(server, report)
    chosen = in_order(listed)
    streamed = [rule for entry in chosen for rule in entry.rules if rule.maintain == "stream"]
    if streamed and server.streams:
        # What changes from here on is the worker's; what was before is seen by the scan.
        yield from position.begin(graph.limits)
    for entry in chosen:
        visited += yield from _rebuild(graph, server, entry, report)
    if server.streams:
        yield from position.built(streamed)
    yield from fingerprints.rebuilt(listed)
    return visited


def _rebuild(graph: Graph, server: Capabilities, entry: Entry[Any], report: Report | None) -> Plan[int]:
    bounds = yield from scheduled_bounds(entry)
    if bounds is NOT_YET or not (examined(entry) or entry.answering("mend") or own(entry, "tidy")):
        # Of a scheduled model the first run computes it.
        return 0

    def visit(documents: Sequence[Raw]) -> Plan[None]:
        keys = [entry.key_of(each) for each in documents if within(entry, each, bounds)]
        yield from mend(graph, server, entry, keys)

    visited = yield from go_through(entry, _page(entry), visit, report)
    for rule in own(entry, "tidy"):
        yield from around(rule.place.label, entry.collection, None, rule.tidy())
    if entry.group is not None:
        # Groups that have no document yet, or too many.
        keys = [key for key in (yield from differing(entry)) if not bounds or is_closed(key, bounds)]
        yield from mend(graph, server, entry, keys)
        visited += len(keys)
    return visited


def _page(entry: Entry[Any]) -> int:
    """Documents at a time; fewer where they are recomputed in one commit."""
    return entry.limits.rebuild_page if Recomputation.of(entry).rules else entry.limits.verify_page


def repair(
    graph: Graph, server: Capabilities, entries: Iterable[Entry[Any]], report: Report | None = None
) -> Plan[int]:
    """Mend what `verify` finds, until it finds nothing more; how many documents were mended."""
    listed = list(entries)
    chosen = in_order(listed)
    mended: set[Any] = set()
    laid_out = 0
    for entry in listed:
        if entry.layout is not None:
            laid_out += yield from entry.layout.repair(server, report)
    for _ in range(graph.limits.rebuild_rounds_max):
        findings = yield from verify(graph, server, chosen, report)
        progress = False
        for entry in chosen:
            mine = [
                each
                for each in findings
                # What cannot even be named has been set aside by then.
                if each.model == entry.model.__name__ and not isinstance(each.document_id, RawId)
            ]
            keys = distinct(each.document_id for each in mine)
            if entry.group is not None:
                keys = yield from keys_found(entry, mine)
            done = yield from mend(graph, server, entry, keys)
            progress = progress or bool(done)
            mended.update((entry.collection, freeze(key)) for key in done)
        if not progress:
            yield from fingerprints.rebuilt(listed)
            break
    return len(mended) + laid_out


def repair_some(graph: Graph, server: Capabilities, entry: Entry[Any], ids: Sequence[Any]) -> Plan[list[Any]]:
    """Mend these documents of one model; the keys of those that changed."""
    chosen = {"_id": {"$in": distinct(ids)}, **entry.exactly}
    documents = yield from find(entry.collection, chosen, entry.key_projection())
    return (yield from mend(graph, server, entry, [entry.key_of(each) for each in documents]))


def mend(
    graph: Graph,
    server: Capabilities,
    entry: Entry[Any],
    keys: Sequence[Any],
    *,
    before: Callable[[], Plan[None]] | None = None,
) -> Plan[list[Any]]:
    """Bring these documents in order, and what they feed, a page at a time; the keys of those that changed.

    `before` is done first for each page.
    """
    if keys and entry.group is not None:
        yield from require_indexes([] if entry.group.key.identity else [entry.group])
    changed: list[Any] = []
    for some in chunks(keys, _page(entry)):
        if before is not None:
            yield from before()
        for rule in entry.answering("mend"):
            changed += yield from _mend_by_rule(graph, server, rule, some)
        if Recomputation.of(entry).rules:
            changed += yield from commit_on(graph, server).mend(entry, some)
    return distinct(changed)


def _mend_by_rule(graph: Graph, server: Capabilities, rule: Rule, keys: Sequence[Any]) -> Plan[list[Any]]:
    """Let a rule bring documents in order; one that stands in the way is set aside."""

    def attempt(some: Sequence[Any]) -> Plan[list[Any]]:
        return rule.mend(graph, server, some)

    def alone(key: Any, error: Exception) -> Plan[list[Any]]:
        yield from set_aside(rule.place.label, rule.target.collection, key, error)
        return []

    return (yield from in_pieces(rule.target.limits, keys, attempt, alone))
