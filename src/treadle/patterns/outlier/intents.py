"""Outlier arrays on a server without transactions.

The owner is the commit point. First everything that is to become of the
overflow is written down, as whole documents, in intents under one operation
id. Then one update changes the owner, if it is still as it was read, and
notes the id in it. From there on the write counts. Then the overflow is made
so, which can be done twice; then the note and the intents go.

Whoever holds the lease and finds a note in an owner finishes that operation
first. `recover` finishes or forgets what a crash left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import bson
from bson import ObjectId
from pymongo import DeleteMany, ReplaceOne

from treadle.engine.intents import COLLECTION
from treadle.engine.lease import acquire, release
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import Plan, Raw, bulk_write, by_id, delete_many, find, find_one, insert_one, update_one

if TYPE_CHECKING:
    from treadle.graph.graph import Graph
    from treadle.patterns.outlier.move import Move
    from treadle.patterns.outlier.rule import OutlierRule

KIND = "array"
# What one intent may hold, well below the 16 MB of a document.
PART_BYTES_MAX = 4_000_000
# An array of up to this many items is compared as a whole, a longer one by its length and its ends.
COMPARED_MAX = 20_000


def record(rule: OutlierRule, key: Any, gone: Sequence[Any], puts: Sequence[Raw]) -> Plan[Any]:
    """Write down what is to become of the overflow; the id of the operation."""
    operation = ObjectId()
    parts: list[list[Raw]] = [[]]
    size = 0
    for document in puts:
        length = len(bson.encode(document, codec_options=CODEC_OPTIONS))
        if parts[-1] and size + length > PART_BYTES_MAX:
            parts.append([])
            size = 0
        parts[-1].append(document)
        size += length
    for number, part in enumerate(parts):
        yield from insert_one(
            COLLECTION,
            {
                "_id": {"kind": KIND, "operation": operation, "part": number},
                "rule": rule.place.label,
                "key": key,
                "gone": list(gone) if not number else [],
                "puts": part,
            },
        )
    return operation


def perform(rule: OutlierRule, move: Move) -> Plan[bool]:
    """Do what a move says; False if the owner is no longer as it was read."""
    from treadle.patterns.outlier.move import owner_update

    owner = move.owner
    update = owner_update(rule, move)
    guard = {**by_id(owner["_id"]), **_as_read(rule, owner)}
    puts = [*move.changed, *({"_id": ObjectId(), **page} for page in move.made)]
    if not puts and not move.gone:
        return bool((yield from update_one(rule.target.collection, guard, update)).matched_count)
    operation = yield from record(rule, owner["_id"], move.gone, puts)
    update["$set"][rule.open_path] = operation
    result = yield from update_one(rule.target.collection, guard, update)
    if not result.matched_count:
        yield from forget(operation)
        return False
    yield from finish(rule, {"_id": owner["_id"]}, operation)
    return True


def _as_read(rule: OutlierRule, owner: Raw) -> Raw:
    """The condition that nobody has written the array since."""
    conditions: list[Raw] = []
    for path in (rule.last_path, rule.count_path, rule.open_path):
        value = rule.value(owner, path)
        conditions.append({path: {"$exists": False} if value is None else {"$eq": value}})
    array = rule.value(owner, rule.path)
    if not isinstance(array, list):
        conditions.append({f"{rule.path}.0": {"$exists": False}})
    elif len(array) <= COMPARED_MAX:
        conditions.append({rule.path: {"$eq": array}})
    else:
        conditions.append({rule.path: {"$size": len(array)}})
        conditions += [{f"{rule.path}.{n}": {"$eq": array[n]}} for n in (0, len(array) - 1)]
    return {"$and": conditions}


def finish(rule: OutlierRule, owner: Raw, operation: Any = None) -> Plan[bool]:
    """Finish the operation that is noted in an owner; whether there was one."""
    operation = operation or rule.value(owner, rule.open_path)
    if operation is None:
        return False
    for intent in (yield from _of(operation)):
        operations: list[Any] = [DeleteMany({"_id": {"$in": intent["gone"]}})] if intent["gone"] else []
        operations += [ReplaceOne({"_id": each["_id"]}, each, upsert=True) for each in intent["puts"]]
        if operations:
            yield from bulk_write(rule.collection, operations)
    done = {**by_id(owner["_id"]), rule.open_path: operation}
    yield from update_one(rule.target.collection, done, {"$unset": {rule.open_path: ""}})
    yield from forget(operation)
    return True


def _of(operation: Any) -> Plan[list[Raw]]:
    condition = {"_id.kind": KIND, "_id.operation": operation}
    return (yield from find(COLLECTION, condition, sort=[("_id.part", 1)]))


def forget(operation: Any) -> Plan[None]:
    yield from delete_many(COLLECTION, {"_id.kind": KIND, "_id.operation": operation})


def recover(graph: Graph, holder: str, is_dead: Callable[[str], bool]) -> Plan[int]:
    """Finish the operations that count, and forget those that do not; how many there were."""
    from treadle.engine.standalone import LEASE, LEASE_SECONDS, give_up

    rules = {rule.place.label: rule for entry in graph.entries.values() for rule in entry.outliers}
    mine = {"_id.kind": KIND, "rule": {"$in": list(rules)}}
    if not rules or (yield from find_one(COLLECTION, mine, {"_id": 1})) is None:
        return 0
    # Without the lease, what a living writer has just written down would be forgotten.
    who = f"{holder}/{ObjectId()}"
    try:
        token = yield from acquire(LEASE, who, LEASE_SECONDS, is_dead)
        left = yield from find(COLLECTION, mine, {"rule": 1, "key": 1})
        operations = {each["_id"]["operation"]: each for each in left}
        for operation, intent in operations.items():
            rule = rules[intent["rule"]]
            owner = yield from find_one(rule.target.collection, by_id(intent["key"]), rule.projection())
            if owner is not None and rule.value(owner, rule.open_path) == operation:
                yield from finish(rule, owner)
            else:
                yield from forget(operation)
        yield from release(LEASE, token)
    except Exception:
        # By name: the reply that would have brought the token may be what was lost.
        yield from give_up([who])
        raise
    return len(operations)
