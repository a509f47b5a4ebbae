"""Documents by their ids, and whole collections, page by page, in the order of `_id`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from pymongo.errors import OperationFailure

from treadle.engine.set_aside import set_aside_unreadable
from treadle.errors import UsageError
from treadle.graph.outcomes import Pace, Progress, Report, resting
from treadle.graph.pattern import Entry
from treadle.plan import Plan, Raw, aggregate, count_documents, find, one_reply, outside
from treadle.plan.decoding import UndecodableId, Unreadable
from treadle.plan.server_errors import UNAUTHORIZED
from treadle.query.keys import freeze

# Documents of a sample.
VERIFY_SAMPLE_MAX = 1_000_000

T = TypeVar("T")
Note: TypeAlias = Callable[[Unreadable], None]


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
    """The next documents in the order of `_id`, whatever types the ids have; as many as fit into one reply.

    Those of the model's very class, or of the `whole` collection. The id of
    the last one stands in a list, because it may itself be null.
    """
    chosen = {} if whole else entry.exactly
    shown = projection or projection_of(entry)
    return (yield from matching(entry.collection, chosen, last, limit, shown))


def starting_at(last: list[Any] | None) -> Raw:
    """What makes a find start at an id; a range query would end where the type of the ids changes."""
    return {} if last is None else {"min": {"_id": last[0]}, "hint": [("_id", 1)]}


def matching(
    collection: str, condition: Raw, last: list[Any] | None, limit: int, projection: Raw | None = None
) -> Plan[list[Raw]]:
    """The next documents that match a condition, as many as fit into one reply; never the last one again."""
    if last is not None and isinstance(last[0], UndecodableId):
        beyond = {"$and": [condition, last[0].greater()]}
        return (yield from find(collection, beyond, projection, sort=[("_id", 1)], **one_reply(limit)))
    beyond = condition if last is None else {"$and": [condition, {"_id": {"$ne": last[0]}}]}
    options = {**one_reply(limit), **starting_at(last)}
    return (yield from find(collection, beyond, projection, sort=[("_id", 1)], **options))


def readable_page(
    label: str, reading: Plan[list[Raw]], last: list[Any] | None, note: Note | None = None
) -> Plan[tuple[list[Raw], list[Any] | None]]:
    """The documents of a page that can be decoded, and the id of its last one in a list; None at the end.

    The others are shown to `note` and set aside, unless the caller may only read.
    """
    try:
        documents = yield from reading
    except Unreadable as error:
        if last is not None and freeze(error.last) == freeze(last[0]):
            # Nothing follows the one with which it began.
            return [], None
        if note is not None:
            note(error)
        try:
            yield from outside(partial(set_aside_unreadable, label, error))
        except OperationFailure as refused:
            if refused.code not in UNAUTHORIZED:
                raise
        kept = [each for each in error.documents if last is None or freeze(each["_id"]) != freeze(last[0])]
        return kept, [error.last]
    return documents, [documents[-1]["_id"]] if documents else None


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Items in pieces of a size."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def go_through(
    entry: Entry[Any],
    limit: int,
    visit: Callable[[Sequence[Raw]], Plan[None]],
    report: Report | None = None,
    note: Note | None = None,
) -> Plan[int]:
    """Show all documents of a model's very class to `visit`, page by page; how many there were.

    A report that sets the pace also says where to begin. Those that cannot be
    decoded are set aside, and shown to `note`.
    """
    name = entry.model.__name__
    total = (yield from count_documents(entry.collection, entry.exactly)) if report else 0
    done = 0
    last: list[Any] | None = None
    if isinstance(report, Pace):
        last, limit = report.begins_after(name), report.sized(limit)
    while True:
        reading = page(entry, last, limit)
        documents, last = yield from readable_page(name, reading, last, note)
        if last is None:
            return done
        done += len(documents)
        yield from visit(documents)
        if report:
            report(Progress(name, done, max(total, done)))
        yield from resting(report, len(documents), None if isinstance(last[0], UndecodableId) else last)


def go_through_sample(
    entry: Entry[Any],
    limit: int,
    sample: float,
    visit: Callable[[Sequence[Raw]], Plan[None]],
    report: Report | None = None,
    note: Note | None = None,
) -> Plan[int]:
    """The same with documents that are chosen with a chance each; how many they were.

    One pass over the collection in its own order chooses the ids, which is
    much quicker than the order of `_id`.
    """
    name, most = entry.model.__name__, VERIFY_SAMPLE_MAX
    stages: list[Raw] = [
        {"$match": {**entry.exactly, "$sampleRate": sample}},
        {"$limit": most + 1},
        {"$project": {"_id": 1}},
    ]
    ids = [row["_id"] for row in (yield from aggregate(entry.collection, stages))]
    if len(ids) > most:
        raise UsageError(
            f"sample={sample:g} of {entry.collection} is more than {most:,} documents; choose a smaller part",
            code="verify-option",
        )
    done = 0
    for some in chunks(ids, report.sized(limit) if isinstance(report, Pace) else limit):
        chosen = {"_id": {"$in": list(some)}, **entry.exactly}
        reading = find(entry.collection, chosen, projection_of(entry))
        documents, _ = yield from readable_page(name, reading, None, note)
        yield from visit(documents)
        done += len(some)
        if report:
            report(Progress(name, done, len(ids)))
        yield from resting(report, len(some))
    return done


def projection_of(entry: Entry[Any]) -> Raw | None:
    """What is read of documents to examine them; None for all."""
    projection: Raw = {}
    for rule in entry.answering("shown"):
        projection.update(rule.shown())
    return projection or None
