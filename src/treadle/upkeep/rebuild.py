"""Making right what is not: whole collections (`rebuild`) or single findings (`repair`).

Both recompute from the sources in small commits that really write each
target, so that writers can go on: who collides starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from treadle.engine import write_path
from treadle.engine.derive import DerivedValues
from treadle.engine.index_check import require_unique_indexes
from treadle.engine.salvage import salvage
from treadle.errors import UsageError
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding, Report
from treadle.graph.quarantine import around
from treadle.graph.rule import Rule
from treadle.graph.stored_pages import chunks
from treadle.plan import Plan, Raw
from treadle.plan.capabilities import Capabilities
from treadle.plan.decoding import UndecodableId
from treadle.query.keys import distinct, freeze
from treadle.upkeep import fingerprints, position
from treadle.upkeep.closed_windows import NOT_YET, is_closed, scheduled_bounds
from treadle.upkeep.findings import is_of
from treadle.upkeep.groups import differing, keys_found
from treadle.upkeep.jobs import Job
from treadle.upkeep.sweep import Sweep
from treadle.upkeep.verify import examined, own, verify, within

# How often repair verifies again.
REBUILD_ROUNDS_MAX = 5


def rules_of(entries: Sequence[ModelEntry], fields: Sequence[str]) -> frozenset[Rule]:
    """The rules that maintain these fields, by their Python or stored names."""
    chosen: set[Rule] = set()
    if isinstance(fields, str) or not isinstance(fields, Collection) or not fields:
        raise UsageError(
            f"fields={fields!r}; it takes a list of fields, such as fields=['review_count']",
            code="fields-invalid",
        )
    for field in fields:
        mine = {rule for entry in entries for rule in entry.rules if _is_named(rule, field)}
        if not mine:
            names = ", ".join(entry.model.__name__ for entry in entries)
            known = sorted({_python_path(rule) for entry in entries for rule in entry.rules})
            raise UsageError(
                f"{names} maintains no field {field!r}; it maintains {', '.join(known) or 'nothing'}",
                code="fields-invalid",
            )
        chosen |= mine
    return frozenset(chosen)


def _python_path(rule: Rule) -> str:
    return ".".join([*(step.name for step in rule.place.steps), rule.place.field.name])


def _is_named(rule: Rule, field: str) -> bool:
    paths = {rule.path, _python_path(rule)}
    return any(field == path or path.startswith(f"{field}.") for path in paths)


def is_about(rules: frozenset[Rule], finding: Finding) -> bool:
    """Whether a finding is about one of these rules."""
    return any(is_of(rule, finding.path) for rule in rules if rule.target.model.__name__ == finding.model)


def in_order(entries: Iterable[ModelEntry]) -> list[ModelEntry]:
    """Models whose fields feed others before those others."""
    ruled = [entry for entry in entries if entry.rules and entry.layout is None]
    return sorted(ruled, key=lambda entry: min(rule.level for rule in entry.rules))


def rebuild(
    graph: Graph, server: Capabilities, entries: Iterable[ModelEntry], report: Report | None = None
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
        yield from position.begin()
    job = report if isinstance(report, Job) else None
    for entry in chosen:
        if job is None or entry.model.__name__ not in job.finished:
            visited += yield from _rebuild(graph, server, entry, report)
        if job is not None:
            yield from job.model_done(entry.model.__name__)
    if server.streams:
        yield from position.built(streamed)
    yield from fingerprints.rebuilt(listed)
    return visited


def _rebuild(graph: Graph, server: Capabilities, entry: ModelEntry, report: Report | None) -> Plan[int]:
    bounds = yield from scheduled_bounds(entry)
    if bounds is NOT_YET or not (examined(entry) or entry.rules.implementing("repair")):
        # Of a scheduled model the first run computes it.
        return 0

    def visit(documents: Sequence[Raw]) -> Plan[None]:
        keys = [entry.key_of(each) for each in documents if within(entry, each, bounds)]
        yield from repair_documents(graph, server, entry, keys)

    visited = yield from Sweep(entry, _page(entry), visit, report).all()
    for rule in own(entry, "repair"):
        yield from around(rule.place.label, entry.collection, None, rule.repair(None))
    if entry.rules.group is not None:
        # Groups that have no document yet, or too many.
        keys = [key for key in (yield from differing(entry)) if not bounds or is_closed(key, bounds)]
        yield from repair_documents(graph, server, entry, keys)
        visited += len(keys)
    return visited


def _page(entry: ModelEntry) -> int:
    """Documents at a time; fewer where they are recomputed in one commit."""
    return entry.limits.rebuild_page if DerivedValues.of(entry).rules else entry.limits.verify_page


def repair(
    graph: Graph,
    server: Capabilities,
    entries: Iterable[ModelEntry],
    report: Report | None = None,
    only: frozenset[Rule] | None = None,
) -> Plan[int]:
    """Repair what `verify` finds, until it finds nothing more. Returns the number of repaired documents.

    With `only`, what is about these rules; the rest stays as it is.
    """
    listed = list(entries)
    chosen = in_order(listed)
    repaired: set[Any] = set()
    laid_out = 0
    for entry in listed:
        if entry.layout is not None and only is None:
            laid_out += yield from entry.layout.repair(server, report)
    for _ in range(REBUILD_ROUNDS_MAX):
        findings = yield from verify(graph, server, chosen, report)
        if only is not None:
            findings = [each for each in findings if is_about(only, each)]
        progress = False
        for entry in chosen:
            mine = [
                each
                for each in findings
                # What cannot even be named has been set aside by then.
                if each.model == entry.model.__name__ and not isinstance(each.document_id, UndecodableId)
            ]
            keys = distinct(each.document_id for each in mine)
            if entry.rules.group is not None:
                keys = yield from keys_found(entry, mine)
            done = yield from repair_documents(graph, server, entry, keys, only=only)
            progress = progress or bool(done)
            repaired.update((entry.collection, freeze(key)) for key in done)
        if not progress:
            if only is None:
                yield from fingerprints.rebuilt(listed)
            break
    return len(repaired) + laid_out


def repair_some(
    graph: Graph,
    server: Capabilities,
    entry: ModelEntry,
    ids: Sequence[Any],
    only: frozenset[Rule] | None = None,
) -> Plan[list[Any]]:
    """Repair these documents of one model. Returns the keys of those that changed."""
    images = yield from entry.targets.exact.find({"_id": {"$in": distinct(ids)}})
    keys = [entry.key_of(image.document) for image in images]
    return (yield from repair_documents(graph, server, entry, keys, only=only))


def repair_documents(
    graph: Graph,
    server: Capabilities,
    entry: ModelEntry,
    keys: Sequence[Any],
    *,
    before: Callable[[], Plan[None]] | None = None,
    only: frozenset[Rule] | None = None,
) -> Plan[list[Any]]:
    """Bring these documents in order, and what they feed, a page at a time; the keys of those that changed.

    `before` is done first for each page. With `only`, what these rules maintain.
    """
    without = frozenset[Rule]() if only is None else frozenset(entry.rules) - only
    if keys and entry.rules.group is not None:
        yield from require_unique_indexes(entry)
    changed: list[Any] = []
    for some in chunks(keys, _page(entry)):
        if before is not None:
            yield from before()
        for rule in entry.rules.implementing("repair"):
            if rule not in without:
                changed += yield from salvage(rule.place.label, rule.target.collection, some, rule.repair)
        if DerivedValues.of(entry, None, without).rules:
            changed += yield from write_path.repair(graph, entry, some, without)
    return distinct(changed)
