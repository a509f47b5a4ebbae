"""Proof: every stored value that is not what its sources say.

Targets are read page by page, in the order of `_id`, and their values are
recomputed on the server. What looks wrong is looked at again inside one
snapshot before it is reported, so that a writer who is just at work is not
mistaken for a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from treadle.engine.commit import commit_on
from treadle.engine.groups import differing, examine_groups, orphan
from treadle.engine.lease import holder
from treadle.engine.pages import chunks, go_through, projection_of
from treadle.engine.recompute import Recomputation
from treadle.graph.derived import CopyRule
from treadle.graph.gather import GatherRule
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Finding, Report
from treadle.graph.pattern import STATE, Entry, Rule
from treadle.plan import Plan, Raw, find, wait
from treadle.plan.capabilities import Capabilities
from treadle.query.comparison import same
from treadle.query.keys import distinct, freeze
from treadle.query.paths import overlap, places_of, plain, value_at
from treadle.upkeep.closed import NOT_YET, Bounds, is_closed, scheduled_bounds
from treadle.upkeep.position import NAME as WORKER


def verify(
    graph: Graph, server: Capabilities, entries: Iterable[Entry[Any]], report: Report | None = None
) -> Plan[list[Finding]]:
    """All findings in the targets of these models."""
    findings: list[Finding] = []
    for entry in entries:
        if entry.layout is not None:
            findings += yield from entry.layout.verify(server, report)
            continue
        bounds = yield from scheduled_bounds(entry)
        if bounds is NOT_YET:
            # Nothing has been computed yet, so that nothing can be wrong.
            continue
        for rule in own(entry, "examine_all"):
            findings += yield from rule.examine_all(server, report)
        if examined(entry):
            findings += yield from _verify_pages(graph, server, entry, bounds, report)
        if entry.group is not None:
            findings += yield from _verify_groups(graph, server, entry, bounds)
    return findings


def own(entry: Entry[Any], method: str) -> list[Rule]:
    """The rules that answer a method and are bound at this very model, so that kinds do not repeat it."""
    return [rule for rule in entry.answering(method) if rule.target is entry]


def examined(entry: Entry[Any]) -> bool:
    """Whether the documents of a model are looked at page by page."""
    return bool(entry.answering("examine") or Recomputation.of(entry).rules)


def _verify_pages(
    graph: Graph, server: Capabilities, entry: Entry[Any], bounds: Bounds | None, report: Report | None
) -> Plan[list[Finding]]:
    findings: list[Finding] = []

    def visit(documents: Sequence[Raw]) -> Plan[None]:
        computed = [each for each in documents if within(entry, each, bounds)]
        suspects = yield from examine(server, entry, computed)
        if suspects:
            confirmed = yield from _look_again(graph, server, entry, suspects)
            findings.extend((yield from _give_time(graph, server, entry, confirmed)))

    size = entry.limits.verify_page if entry.group is None else entry.limits.group_page
    yield from go_through(entry, size, visit, report)
    return findings


def within(entry: Entry[Any], document: Raw, bounds: Bounds | None) -> bool:
    """Whether a document is one that the last scheduled run computed; any, where none is scheduled."""
    return bounds is None or is_closed(entry.key_of(document), bounds)


def _verify_groups(
    graph: Graph, server: Capabilities, entry: Entry[Any], bounds: Bounds | None
) -> Plan[list[Finding]]:
    """Groups that have no document, or more than one."""
    findings: list[Finding] = []
    commit = commit_on(graph, server)
    keys = [key for key in (yield from differing(entry)) if bounds is None or is_closed(key, bounds)]
    for chunk in chunks(keys, entry.limits.group_page):
        findings += yield from commit.look(partial(examine_groups, server, entry, chunk))
    return findings


def _look_again(
    graph: Graph, server: Capabilities, entry: Entry[Any], suspects: Sequence[Finding]
) -> Plan[list[Finding]]:
    """The findings that remain when target and sources are read at one moment."""
    keys = distinct(each.document_id for each in suspects)

    def look() -> Plan[list[Finding]]:
        chosen = {"_id": {"$in": keys}, **entry.exactly}
        documents = yield from find(entry.collection, chosen, projection_of(entry))
        return (yield from examine(server, entry, documents))

    return (yield from commit_on(graph, server).look(look))


def _give_time(
    graph: Graph, server: Capabilities, entry: Entry[Any], findings: Sequence[Finding]
) -> Plan[list[Finding]]:
    """The findings without those that the worker is about to put right.

    What is maintained by stream is always a moment behind. While a worker is
    active, such a finding counts only if nothing about it changes for a while.
    """
    streamed = [rule.path for rule in entry.rules if rule.maintain == "stream"]
    late = [
        each
        for each in findings
        if any(overlap(plain(each.path).removeprefix(STATE + "."), path) for path in streamed)
    ]
    if not late or (yield from holder(WORKER)) is None:
        return list(findings)
    others = [each for each in findings if each not in late]
    for _ in range(entry.limits.verify_looks):
        yield from wait(entry.limits.verify_look_seconds)
        again = yield from _look_again(graph, server, entry, late)
        late = [each for each in again if any(_same_finding(each, earlier) for earlier in late)]
        if not late:
            break
    return [*others, *late]


def _same_finding(one: Finding, other: Finding) -> bool:
    where = (freeze(one.document_id), one.path) == (freeze(other.document_id), other.path)
    return where and same(one.stored, other.stored) and same(one.expected, other.expected)


def examine(server: Capabilities, entry: Entry[Any], documents: Sequence[Raw]) -> Plan[list[Finding]]:
    """The findings in these documents."""
    findings: list[Finding] = []
    for rule in entry.answering("examine"):
        findings += yield from rule.examine(documents)
    recomputation = Recomputation.of(entry)
    expected = yield from recomputation.expected(server, documents)
    for document, right in zip(documents, expected, strict=True):
        if entry.group is not None and not value_at(right, entry.group.path):
            findings.append(orphan(entry, document))
        else:
            findings += _compare(recomputation, document, right)
    return findings


def _compare(recomputation: Recomputation, document: Raw, right: Raw) -> Iterator[Finding]:
    """What of a document is not as it should be."""
    entry = recomputation.entry
    places: list[tuple[str, str, Any, Any]] = []
    for rule in recomputation.rules:
        pattern = (
            entry.group.pattern if entry.group is not None and rule.source is not entry else rule.pattern
        )
        if isinstance(rule, CopyRule):
            rights = dict(places_of(right, rule.steps))
            for prefix, container in places_of(document, rule.steps):
                stored, should = container.get(rule.name), rights[prefix].get(rule.name)
                places.append((rule.pattern, prefix + rule.name, stored, should))
            continue
        for path in rule.empty() if isinstance(rule, GatherRule) else [rule.path]:
            places.append((pattern, path, value_at(document, path), value_at(right, path)))
    for pattern, path, stored, should in places:
        if not same(stored, should):
            yield Finding(pattern, entry.model.__name__, document["_id"], path, stored, should)
