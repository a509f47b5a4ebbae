"""Documents by their ids, and whole collections, page by page, in the order of `_id`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from treadle.graph.outcomes import Progress, Report
from treadle.graph.pattern import Entry
from treadle.plan import Plan, Raw, count_documents, find, in_one_reply
from treadle.query.keys import freeze

T = TypeVar("T")


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
    most = limit if last is None else limit + 1
    rows = yield from find(
        entry.collection, chosen, shown, sort=[("_id", 1)], limit=most, **starting_at(last)
    )
    return rows if last is None else [row for row in rows if freeze(row["_id"]) != freeze(last[0])][:limit]


def starting_at(last: list[Any] | None) -> Raw:
    """What makes a find start at an id; a range query would end where the type of the ids changes."""
    return {} if last is None else {"min": {"_id": last[0]}, "hint": [("_id", 1)]}


def matching(collection: str, condition: Raw, last: list[Any] | None, limit: int) -> Plan[list[Raw]]:
    """The next documents that match a condition, as many as fit into one reply; never the last one again."""
    beyond = condition if last is None else {"$and": [condition, {"_id": {"$ne": last[0]}}]}
    options = {**in_one_reply(limit), **starting_at(last)}
    return (yield from find(collection, beyond, sort=[("_id", 1)], **options))


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Items in pieces of a size."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def go_through(
    entry: Entry[Any],
    limit: int,
    visit: Callable[[Sequence[Raw]], Plan[None]],
    report: Report | None = None,
) -> Plan[int]:
    """Show all documents of a model's very class to `visit`, page by page; how many there were."""
    total = (yield from count_documents(entry.collection, entry.exactly)) if report else 0
    done = 0
    last: list[Any] | None = None
    while documents := (yield from page(entry, last, limit)):
        last = [documents[-1]["_id"]]
        done += len(documents)
        yield from visit(documents)
        if report:
            report(Progress(entry.model.__name__, done, max(total, done)))
    return done


def projection_of(entry: Entry[Any]) -> Raw | None:
    """What is read of documents to examine them; None for all."""
    shown: Raw = {}
    for rule in entry.answering("shown"):
        shown.update(rule.shown())
    return shown or None
