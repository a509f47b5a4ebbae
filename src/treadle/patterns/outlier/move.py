"""Parts of outlier arrays: what a write makes of one, and how that is stored.

A write is planned as a `Move`, from what was read, and performed in the same
transaction. What plans them is in `writes.py` and `order.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bson import ObjectId
from pymongo import DeleteMany, InsertOne, ReplaceOne

from treadle.errors import DataError
from treadle.graph.pattern import REVISION
from treadle.patterns.outlier.fields import OutlierFields
from treadle.plan import Plan, Raw, bulk_write, by_id, update_one


@dataclass(slots=True)
class Move:
    """What one write makes of an array; nothing is done yet."""

    owner: Raw
    embedded: list[Any] | None
    count: int
    last: int | None
    changed: list[Raw] = field(default_factory=list)
    made: list[Raw] = field(default_factory=list)
    gone: list[Any] = field(default_factory=list)
    # Items changed their place, which readers without a snapshot must notice.
    moved: bool = False


def missing(rule: OutlierFields, key: Any) -> DataError:
    return DataError(
        f"{rule.target.model.__name__} {key!r} is not stored (any more), so it has no {rule.python_path}; "
        "insert it first",
        code="array-owner-missing",
    )


def owned(rule: OutlierFields, key: Any) -> Raw:
    """The condition on overflow documents of one owner; an id never becomes an operator."""
    return {rule.owner: {"$eq": key}}


def holds(item: Any) -> Raw:
    """The condition that an array holds an item, itself and not one of its parts."""
    return {"$elemMatch": {"$eq": item}}


def perform(rule: OutlierFields, move: Move | None) -> Plan[None]:
    """Do what a move says; None is nothing to do."""
    if move is None:
        return
    yield from update_one(rule.target.collection, by_id(move.owner["_id"]), _owner_update(rule, move))
    # In this order, because numbers are unique.
    operations: list[Any] = [DeleteMany({"_id": {"$in": move.gone}})] if move.gone else []
    operations += [ReplaceOne({"_id": page["_id"]}, page) for page in move.changed]
    operations += [InsertOne({"_id": ObjectId(), **page}) for page in move.made]
    if operations:
        yield from bulk_write(rule.collection, operations)


def _owner_update(rule: OutlierFields, move: Move) -> Raw:
    """The update of the owner; it always writes, so that two writers meet."""
    sets, unsets = rule.owner_sets(move.count, move.last)
    if move.embedded is not None:
        sets[rule.path] = move.embedded
    update: Raw = {"$set": sets, "$inc": {REVISION: 1}}
    if unsets:
        update["$unset"] = unsets
    if move.moved:
        update["$inc"][rule.moves_path] = 1
    return update
