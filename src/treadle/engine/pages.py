"""Documents by their ids, and what is read of them to examine them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from treadle.graph.model_entry import ModelEntry
from treadle.plan import Plan, Raw, find
from treadle.query.keys import freeze


def by_ids(collection: str, ids: Iterable[Any]) -> Plan[dict[Any, Raw]]:
    """The documents with these ids, by frozen id."""
    rows = yield from find(collection, {"_id": {"$in": list(ids)}})
    return {freeze(each["_id"]): each for each in rows}


def next_ids(entry: ModelEntry, condition: Raw, last: Any, limit: int) -> Plan[list[Any]]:
    """The next ids of the documents that match, in order, after one of them; after None the first."""
    collection, order = entry.collection, [("_id", 1)]
    beyond = condition if last is None else {"$and": [{"_id": {"$gt": last}}, condition]}
    rows = yield from find(collection, beyond, {"_id": 1}, sort=order, limit=limit)
    if not rows and last is not None and entry.ids.shape.kind != "scalar":
        # A range ends where the type of the ids changes; an expression compares across types.
        beyond = {"$and": [{"$expr": {"$gt": ["$_id", {"$literal": last}]}}, condition]}
        rows = yield from find(collection, beyond, {"_id": 1}, sort=order, limit=limit)
    return [each["_id"] for each in rows]


def projection_of(entry: ModelEntry) -> Raw | None:
    """What is read of documents to examine them; None for all."""
    projection: Raw = {}
    for rule in entry.rules:
        projection.update(rule.page_projection or {})
    return projection or None
