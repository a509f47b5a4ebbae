"""Documents by their ids, and whole collections, page by page, in the order of `_id`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from treadle.graph.pattern import Entry
from treadle.plan import Plan, Raw, find
from treadle.query.keys import freeze


def by_ids(collection: str, ids: Iterable[Any]) -> Plan[dict[Any, Raw]]:
    """The documents with these ids, by frozen id."""
    rows = yield from find(collection, {"_id": {"$in": list(ids)}})
    return {freeze(each["_id"]): each for each in rows}


def page(
    entry: Entry[Any],
    last: list[Any] | None,
    limit: int,
    projection: Raw | None = None,
    *,
    whole: bool = False,
) -> Plan[list[Raw]]:
    """The next documents in the order of `_id`, whatever types the ids have.

    Those of the model's very class, or of the `whole` collection. The id of
    the last one stands in a list, because it may itself be null.
    """
    chosen = {} if whole else entry.exactly
    shown = projection or projection_of(entry)
    if last is None:
        return (yield from find(entry.collection, chosen, shown, sort=[("_id", 1)], limit=limit))
    # A range query would end where the type of the ids changes; index bounds do not.
    bounds: Raw = {"min": {"_id": last[0]}, "hint": [("_id", 1)]}
    rows = yield from find(entry.collection, chosen, shown, sort=[("_id", 1)], limit=limit + 1, **bounds)
    return [each for each in rows if freeze(each["_id"]) != freeze(last[0])][:limit]


def projection_of(entry: Entry[Any]) -> Raw | None:
    """What is read of documents to examine them; None for all."""
    shown: Raw = {}
    for rule in entry.answering("shown"):
        shown.update(rule.shown())
    return shown or None
