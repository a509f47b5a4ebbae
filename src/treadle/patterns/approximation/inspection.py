"""Proof and repair of counters: numbers that are missing, and events that stayed in a durable buffer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pymongo import UpdateOne
from pymongo.errors import OperationFailure

from treadle.engine.intents import log
from treadle.engine.ledger import Ledger
from treadle.model.bson_types import to_bson
from treadle.patterns.approximation.rule import ApproximateRule
from treadle.patterns.outlier.inspection import Found
from treadle.plan import Plan, Raw, aggregate, bulk_write, delete_many, find, transact
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze
from treadle.query.paths import value_at

if TYPE_CHECKING:
    from treadle.graph.graph import Graph
    from treadle.graph.pattern import Entry

# Events that are older than so many times `within` should have been moved.
OVERDUE = 3
OVERDUE_SECONDS_MIN = 2.0
OVERDUE_SHOWN_MAX = 1000
PARTS_MAX = 10_000
# A writer whose last batch is older than this will not ask for it any more.
WRITERS_KEPT_MILLISECONDS = 7 * 24 * 3600 * 1000


def examine(entry: Entry[Any], documents: Sequence[Raw]) -> list[Found]:
    """Documents without a number where one is counted."""
    found: list[Found] = []
    for rule in entry.counters:
        for document in documents:
            if value_at(document, rule.path.split(".")) is None:
                told = (rule.pattern, entry.model.__name__, document["_id"], rule.path, None, rule.zero)
                found.append(told)
    return found


def overdue(entry: Entry[Any]) -> Plan[list[Found]]:
    """Counters whose events stayed in the durable buffer, because nobody flushes it."""
    found: list[Found] = []
    for rule in entry.counters:
        if rule.buffer_collection is None or rule.declared.within is None:
            continue
        rows = yield from _overdue(rule)
        keys = [row["_id"] for row in rows]
        documents = yield from find(
            rule.target.collection, {rule.by_path: {"$in": keys}}, {rule.path: 1, rule.by_path: 1}
        )
        by_key = {freeze(value_at(each, rule.by_path.split("."))): each for each in documents}
        for row in rows:
            document = by_key.get(freeze(row["_id"]))
            name = entry.model.__name__
            if document is None:
                found.append((rule.pattern, name, row["_id"], rule.buffer_collection, row["n"], 0))
                continue
            stored = value_at(document, rule.path.split("."))
            expected = to_bson(rule.number(_plain(stored or 0) + _plain(row["n"])), [])
            found.append((rule.pattern, name, document["_id"], rule.path, stored, expected))
    return found


def _plain(number: Any) -> Any:
    return number.to_decimal() if hasattr(number, "to_decimal") else number


def _overdue(rule: ApproximateRule) -> Plan[list[Raw]]:
    assert rule.buffer_collection is not None
    assert rule.declared.within is not None
    from treadle.patterns.approximation.events import WELL_FORMED

    seconds = max(OVERDUE_SECONDS_MIN, OVERDUE * rule.declared.within.total_seconds())
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
                {"$limit": OVERDUE_SHOWN_MAX},
            ],
            allowDiskUse=True,
        )
    )


def mend(graph: Graph, server: Capabilities, entry: Entry[Any], keys: Sequence[Any]) -> Plan[list[Any]]:
    """Begin missing counts at zero, and move what is buffered; the documents among these that changed."""
    changed: dict[Any, Any] = {}
    for rule in entry.counters:
        missing = yield from find(entry.collection, {"_id": {"$in": list(keys)}, rule.path: None}, {"_id": 1})
        zero = {"$set": {rule.path: rule.zero}}
        if missing:
            # Only where there is still none: a flush may have come first.
            operations = [UpdateOne({"_id": {"$eq": each["_id"]}, rule.path: None}, zero) for each in missing]
            yield from bulk_write(entry.collection, operations, ordered=False)
        for each in missing:
            changed[freeze(each["_id"])] = each["_id"]
        if rule.buffer_collection is not None:
            moved = yield from drain(graph, server, rule)
            asked = {freeze(key) for key in keys}
            documents = yield from find(
                entry.collection, {rule.by_path: {"$in": [to_bson(key, []) for key in moved]}}, {"_id": 1}
            )
            ids = [*(each["_id"] for each in documents), *moved]
            changed.update({freeze(each): each for each in ids if freeze(each) in asked})
    return list(changed.values())


def drain(graph: Graph, server: Capabilities, rule: ApproximateRule) -> Plan[list[Any]]:
    """Move everything that is buffered; the keys that were counted."""
    from treadle.patterns.approximation.events import Drain
    from treadle.patterns.approximation.flush import culprits

    moved: dict[Any, Any] = {}
    left_out: dict[Any, Any] = {}
    for _ in range(PARTS_MAX):
        work = Drain(rule, left_out)
        try:
            events, sums, unknown = yield from transact(partial(_attempt, graph, server, work))
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


def _attempt(graph: Graph, server: Capabilities, work: Any) -> Plan[Any]:
    from treadle.engine.react import UNBOUNDED, react

    ledger = Ledger()
    outcome = yield from work.body(graph, server, ledger)
    yield from react(graph, server, ledger, copies_max=UNBOUNDED)
    return outcome


def forget_old_writers() -> Plan[None]:
    """Remove the notes of writers that ended without a word."""
    from treadle.patterns.approximation.flush import LEDGER

    old = {"$lt": ["$at", {"$subtract": ["$$NOW", WRITERS_KEPT_MILLISECONDS]}]}
    yield from delete_many(LEDGER, {"$expr": old})
