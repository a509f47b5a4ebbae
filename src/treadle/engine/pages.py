"""Documents by their ids, and whole collections, page by page, in the order of `_id`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from treadle.errors import UsageError
from treadle.graph.outcomes import Pace, Progress, Report, resting
from treadle.graph.pattern import Entry
from treadle.graph.stored_pages import Note, chunks, matching, readable_page
from treadle.plan import Plan, Raw, aggregate, count_documents, find
from treadle.plan.decoding import RawId
from treadle.query.keys import freeze

# Documents of a sample.
VERIFY_SAMPLE_MAX = 1_000_000


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
    chosen = {} if whole else entry.targets.exact.filter()
    shown = projection or projection_of(entry)
    return (yield from matching(entry.collection, chosen, last, limit, shown))


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
    total = (yield from count_documents(entry.collection, entry.targets.exact.filter())) if report else 0
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
        yield from resting(report, len(documents), None if isinstance(last[0], RawId) else last)


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
        {"$match": {**entry.targets.exact.filter(), "$sampleRate": sample}},
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
        chosen = {"_id": {"$in": list(some)}, **entry.targets.exact.filter()}
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
