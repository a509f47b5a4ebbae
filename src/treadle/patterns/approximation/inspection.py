"""Proof and repair of counters: numbers that are missing, and events that stayed in a durable buffer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pymongo import UpdateOne
from pymongo.errors import OperationFailure

from treadle.engine.commit import commit_on
from treadle.engine.set_aside import log
from treadle.engine.work import Writer
from treadle.graph.graph import Graph
from treadle.graph.reports import Finding
from treadle.model.bson_types import to_bson
from treadle.patterns.approximation.events import WELL_FORMED, Drain
from treadle.patterns.approximation.fields import CounterFields
from treadle.patterns.approximation.flush import LEDGER, culprits
from treadle.plan import Plan, Raw, aggregate, bulk_write, delete_many, find
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze
from treadle.query.paths import value_at


def examine(rule: CounterFields, documents: Sequence[Raw]) -> list[Finding]:
    """Documents without a number where one is counted."""
    without = [each["_id"] for each in documents if value_at(each, rule.path) is None]
    return [_finding(rule, key, rule.path, None, rule.zero) for key in without]


def _finding(rule: CounterFields, key: Any, path: str, stored: Any, expected: Any) -> Finding:
    return Finding(rule.pattern, rule.target.model.__name__, key, path, stored, expected)


def overdue(rule: CounterFields) -> Plan[list[Finding]]:
    """A counter whose events stayed in the durable buffer, because nobody flushes it."""
    if rule.buffer_collection is None or rule.declared.within is None:
        return []
    rows = yield from _overdue(rule)
    condition = {rule.by_path: {"$in": [row["_id"] for row in rows]}}
    documents = yield from find(rule.target.collection, condition, {rule.path: 1, rule.by_path: 1})
    by_key = {freeze(value_at(each, rule.by_path)): each for each in documents}
    findings = []
    for row in rows:
        document = by_key.get(freeze(row["_id"]))
        if document is None:
            findings.append(_finding(rule, row["_id"], rule.buffer_collection, row["n"], 0))
            continue
        stored = value_at(document, rule.path)
        expected = to_bson(rule.number(_plain(stored or 0) + _plain(row["n"])), [])
        findings.append(_finding(rule, document["_id"], rule.path, stored, expected))
    return findings


def _plain(number: Any) -> Any:
    return number.to_decimal() if hasattr(number, "to_decimal") else number


def _overdue(rule: CounterFields) -> Plan[list[Raw]]:
    assert rule.buffer_collection is not None
    assert rule.declared.within is not None
    limits, within = rule.target.limits, rule.declared.within.total_seconds()
    seconds = max(limits.counter_overdue_seconds, limits.counter_overdue_periods * within)
    # An id that tells no time is somebody else's, and as good as old.
    born = {"$convert": {"input": "$_id", "to": "date", "onError": None}}
    old = {"$lt": [born, {"$subtract": ["$$NOW", int(seconds * 1000)]}]}
    return (
        yield from aggregate(
            rule.buffer_collection,
            [
                {"$match": {**WELL_FORMED, "$expr": old}},
                {"$unwind": "$d"},
                {"$group": {"_id": "$d.k", "n": {"$sum": "$d.n"}}},
                {"$limit": limits.counter_overdue_max},
            ],
            allowDiskUse=True,
        )
    )


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
    if rule.buffer_collection is not None:
        moved = yield from drain(graph, server, rule)
        condition = {rule.by_path: {"$in": [to_bson(key, []) for key in moved]}}
        documents = yield from find(collection, condition, {"_id": 1})
        counted = {freeze(each) for each in [*(each["_id"] for each in documents), *moved]}
        changed += [key for key in keys if freeze(key) in counted]
    return changed


def drain(graph: Graph, server: Capabilities, rule: CounterFields) -> Plan[list[Any]]:
    """Move everything that is buffered; the keys that were counted."""
    moved: dict[Any, Any] = {}
    left_out: dict[Any, Any] = {}
    for _ in range(rule.target.limits.counter_parts_max):
        work = Drain(rule, left_out)
        try:
            events, sums, unknown = yield from commit_on(graph, server).follow(
                partial(work.body, graph, server), Writer("repair")
            )
        except (OperationFailure, OverflowError) as error:
            bad = yield from culprits(rule, work.sums, error)
            if not bad or bad.keys() <= left_out.keys():
                raise
            left_out.update(bad)
            continue
        if unknown:
            log.warning("%s: no document found for %s", rule.place.label, unknown)
        if not events:
            break
        moved.update(sums)
    return list(moved)


def forget_old_writers(rule: CounterFields) -> Plan[None]:
    """Remove the notes of writers that ended without a word, and will not ask for their last batch."""
    kept = int(rule.target.limits.counter_writers_seconds * 1000)
    old = {"$lt": ["$at", {"$subtract": ["$$NOW", kept]}]}
    yield from delete_many(LEDGER, {"$expr": old})
