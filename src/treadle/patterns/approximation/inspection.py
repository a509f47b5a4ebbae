"""Proof and repair of counters: numbers that are missing, and events that stayed in a durable buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pymongo import UpdateOne

from treadle.engine.write_path import commit_changes
from treadle.graph.calls import Sums
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Finding
from treadle.graph.quarantine import log
from treadle.model.bson_types import to_bson
from treadle.patterns.approximation.events import WELL_FORMED, Drain, drain
from treadle.patterns.approximation.fields import CounterFields
from treadle.patterns.approximation.flush import LEDGER, plain
from treadle.plan import Plan, Raw, aggregate, bulk_write, delete_many, find
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze
from treadle.query.paths import value_at

# Verify names what was buffered for so many times within=.
COUNTER_OVERDUE_PERIODS = 3
# And at least so long.
COUNTER_OVERDUE_SECONDS = 2.0
# Overdue ids that verify names.
COUNTER_OVERDUE_MAX = 1_000
# How long the last batch of a writer is remembered.
COUNTER_WRITERS_SECONDS = 7 * 24 * 3600.0


def examine(rule: CounterFields, documents: Sequence[Raw]) -> list[Finding]:
    """Documents without a number where one is counted."""
    without = [each["_id"] for each in documents if value_at(each, rule.path) is None]
    return [rule.finding(key, rule.path, None, rule.zero) for key in without]


def overdue(rule: CounterFields) -> Plan[list[Finding]]:
    """A counter whose events stayed in the durable buffer, because nobody flushes it."""
    if rule.declared.buffer != "durable" or rule.declared.within is None:
        return []
    rows = yield from _overdue(rule)
    condition = {rule.by_path: {"$in": [row["_id"] for row in rows]}}
    documents = yield from find(rule.target.collection, condition, {rule.path: 1, rule.by_path: 1})
    by_key = {freeze(value_at(each, rule.by_path)): each for each in documents}
    findings = []
    for row in rows:
        document = by_key.get(freeze(row["_id"]))
        if document is None:
            findings.append(rule.finding(row["_id"], rule.buffer_collection, row["n"], 0))
            continue
        stored = value_at(document, rule.path)
        expected = to_bson(rule.number(plain(stored or 0) + plain(row["n"])), [])
        findings.append(rule.finding(document["_id"], rule.path, stored, expected))
    return findings


def _overdue(rule: CounterFields) -> Plan[list[Raw]]:
    periods = COUNTER_OVERDUE_PERIODS * rule.declared.within.total_seconds()
    seconds = max(COUNTER_OVERDUE_SECONDS, periods)
    # An id that tells no time is somebody else's, and as good as old.
    born = {"$convert": {"input": {"$ifNull": ["$_id.t", "$_id"]}, "to": "date", "onError": None}}
    old = {"$lt": [born, {"$subtract": ["$$NOW", int(seconds * 1000)]}]}
    stages: list[Raw] = [
        {"$match": {**WELL_FORMED, "$expr": old}},
        {"$unwind": "$d"},
        {"$group": {"_id": "$d.k", "n": {"$sum": "$d.n"}}},
        {"$limit": COUNTER_OVERDUE_MAX},
    ]
    return (yield from aggregate(rule.buffer_collection, stages, allowDiskUse=True))


def mend(graph: Graph, server: Capabilities, rule: CounterFields, keys: Sequence[Any]) -> Plan[list[Any]]:
    """Begin missing counts at zero, and move what is buffered; the documents among these that changed."""
    collection = rule.target.collection
    without = {"_id": {"$in": list(keys)}, rule.path: None}
    changed = [each["_id"] for each in (yield from find(collection, without, {"_id": 1}))]
    if changed:
        # Only where there is still none: a flush may have come first.
        zero = {"$set": {rule.path: rule.zero}}
        operations = [UpdateOne({"_id": {"$eq": key}, rule.path: None}, zero) for key in changed]
        yield from bulk_write(collection, operations, ordered=False)
    if rule.declared.buffer == "durable":
        moved: dict[Any, Any] = {}

        def commit(write: Drain) -> Plan[Any]:
            return commit_changes(graph, write.apply)

        def note(sums: Sums, unknown: Sums) -> None:
            moved.update(sums)
            if unknown:
                log.warning("%s: no document found for %s", rule.place.label, unknown)

        yield from drain(rule, commit, note)
        documents = yield from find(collection, rule.where_any(moved), {"_id": 1})
        counted = {freeze(each) for each in [*(each["_id"] for each in documents), *moved]}
        changed += [key for key in keys if freeze(key) in counted]
    return changed


def forget_old_writers(rule: CounterFields) -> Plan[None]:
    """Remove the notes of writers that ended without a word."""
    milliseconds = int(COUNTER_WRITERS_SECONDS * 1000)
    old = {"$lt": ["$at", {"$subtract": ["$$NOW", milliseconds]}]}
    yield from delete_many(LEDGER, {"$expr": old})
