"""Verify and repair of counters: numbers that are missing, and events that stayed in a durable buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pymongo import UpdateOne

from treadle.engine.write_path import commit_changes
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Finding
from treadle.graph.quarantine import log
from treadle.model.bson_types import to_bson
from treadle.patterns.approximation.add_amounts import BATCHES, AddAmounts, Added
from treadle.patterns.approximation.counter_field import CounterField
from treadle.patterns.approximation.durable_buffer import event_stages, flush_events
from treadle.plan import Plan, Raw, aggregate, bulk_write, delete_many, find
from treadle.query.keys import freeze
from treadle.query.paths import value_at

# Verify reports events that were buffered for so many times within=.
COUNTER_STALE_PERIODS = 3
# And at least so long.
COUNTER_STALE_SECONDS = 2.0
# Ids with such events that verify reports.
COUNTER_STALE_MAX = 1_000
# How long the last batch of a writer is remembered.
COUNTER_WRITERS_SECONDS = 7 * 24 * 3600.0


def find_missing(rule: CounterField, documents: Sequence[Raw]) -> list[Finding]:
    """Return the documents without a number."""
    missing = [each["_id"] for each in documents if value_at(each, rule.path) is None]
    return [rule.finding(key, rule.path, None, rule.zero) for key in missing]


def find_stale(rule: CounterField) -> Plan[list[Finding]]:
    """Return the counts whose events stay in the durable buffer, because no process flushes it."""
    if rule.declared.buffer != "durable" or rule.declared.within is None:
        return []
    seconds = max(COUNTER_STALE_SECONDS, COUNTER_STALE_PERIODS * rule.declared.within.total_seconds())
    # An id that tells no time is of another program; its event counts as old.
    created = {"$convert": {"input": {"$ifNull": ["$_id.t", "$_id"]}, "to": "date", "onError": None}}
    is_old = {"$expr": {"$lt": [created, _ago(seconds)]}}
    stages = [*event_stages(is_old), {"$limit": COUNTER_STALE_MAX}]
    rows = yield from aggregate(rule.buffer_collection, stages, allowDiskUse=True)
    condition = {rule.by_path: {"$in": [row["_id"] for row in rows]}}
    documents = yield from find(rule.target.collection, condition, {rule.path: 1, rule.by_path: 1})
    by_key = {freeze(value_at(each, rule.by_path)): each for each in documents}
    return [_stale(rule, row, by_key.get(freeze(row["_id"]))) for row in rows]


def _stale(rule: CounterField, row: Raw, document: Raw | None) -> Finding:
    if document is None:
        return rule.finding(row["_id"], rule.buffer_collection, row["n"], 0)
    stored = value_at(document, rule.path)
    expected = rule.plus(rule.load(stored), rule.load(row["n"]))
    return rule.finding(document["_id"], rule.path, stored, to_bson(expected, []))


def repair_counts(graph: Graph, rule: CounterField, keys: Sequence[Any]) -> Plan[list[Any]]:
    """Set missing counts to zero, and move what is buffered. Returns those documents that changed."""
    collection = rule.target.collection
    missing = {"_id": {"$in": list(keys)}, rule.path: None}
    changed = [each["_id"] for each in (yield from find(collection, missing, {"_id": 1}))]
    # Only where there is still none: a flush may have come first.
    zero = {"$set": {rule.path: rule.zero}}
    operations = [UpdateOne({"_id": {"$eq": key}, rule.path: None}, zero) for key in changed]
    if operations:
        yield from bulk_write(collection, operations, ordered=False)
    if rule.declared.buffer == "durable":
        moved = yield from _flush(graph, rule)
        documents = yield from find(collection, rule.filter_any(moved), {"_id": 1})
        counted = {freeze(each) for each in [*(each["_id"] for each in documents), *moved]}
        changed += [key for key in keys if freeze(key) in counted]
    return changed


def _flush(graph: Graph, rule: CounterField) -> Plan[list[Any]]:
    """Move what is buffered. Returns the keys of the amounts."""
    moved: dict[Any, Any] = {}

    def commit(write: AddAmounts) -> Plan[Added]:
        return commit_changes(graph, write.apply)

    def note(added: Added) -> None:
        moved.update(added.amounts)
        if added.refused:
            log.warning("%s: no document found for %s", rule.place.label, added.refused)

    yield from flush_events(rule, commit, note)
    return list(moved)


def delete_old_batches() -> Plan[None]:
    """Delete the notes of writers that have ended without deleting their own."""
    yield from delete_many(BATCHES, {"$expr": {"$lt": ["$at", _ago(COUNTER_WRITERS_SECONDS)]}})


def _ago(seconds: float) -> Raw:
    return {"$subtract": ["$$NOW", int(seconds * 1000)]}
