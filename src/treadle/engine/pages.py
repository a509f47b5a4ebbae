"""Documents by their ids, and whole collections, page by page, in the order of `_id`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from treadle.errors import UsageError
from treadle.graph.outcomes import Pace, Progress, Report, resting
from treadle.graph.rule import ModelEntry
from treadle.graph.scope import Failed
from treadle.graph.stored_pages import chunks
from treadle.plan import Plan, Raw, aggregate, count_documents, find
from treadle.plan.decoding import UndecodableId
from treadle.query.keys import freeze

# Documents of a sample.
VERIFY_SAMPLE_MAX = 1_000_000


def by_ids(collection: str, ids: Iterable[Any]) -> Plan[dict[Any, Raw]]:
    """The documents with these ids, by frozen id."""
    rows = yield from find(collection, {"_id": {"$in": list(ids)}})
    return {freeze(each["_id"]): each for each in rows}


def go_through(
    entry: ModelEntry[Any],
    limit: int,
    visit: Callable[[Sequence[Raw]], Plan[None]],
    report: Report | None = None,
    note: Callable[[Failed], None] | None = None,
) -> Plan[int]:
    """Pass all documents of exactly this model to `visit`, page by page. Returns their number.

    A report that sets the pace also says where to begin. Those that cannot be
    read are quarantined, and passed to `note`.
    """
    name, scope = entry.model.__name__, entry.targets.exact
    total = (yield from count_documents(entry.collection, scope.stored())) if report else 0
    done = 0
    last: list[Any] | None = None
    if isinstance(report, Pace):
        last, limit = report.begins_after(name), report.sized(limit)
    while True:
        page = yield from scope.page(last, limit, projection=projection_of(entry))
        last = page.last
        if last is None:
            return done
        if note is not None and page.failed:
            note(page.failed)
        documents = [image.document for image in page.images]
        done += len(documents)
        yield from visit(documents)
        if report:
            report(Progress(name, done, max(total, done)))
        yield from resting(report, len(documents), None if isinstance(last[0], UndecodableId) else last)


def go_through_sample(
    entry: ModelEntry[Any],
    limit: int,
    sample: float,
    visit: Callable[[Sequence[Raw]], Plan[None]],
    report: Report | None = None,
    note: Callable[[Failed], None] | None = None,
) -> Plan[int]:
    """The same with documents that are chosen with a chance each; how many they were.

    One pass over the collection in its own order chooses the ids, which is
    much quicker than the order of `_id`.
    """
    name, most, scope = entry.model.__name__, VERIFY_SAMPLE_MAX, entry.targets.exact
    stages: list[Raw] = [
        {"$match": {**scope.stored(), "$sampleRate": sample}},
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
        failed: Failed = []
        chosen = {"_id": {"$in": list(some)}}
        images = yield from scope.find(chosen, projection=projection_of(entry), failed=failed)
        if note is not None and failed:
            note(failed)
        yield from visit([image.document for image in images])
        done += len(some)
        if report:
            report(Progress(name, done, len(ids)))
        yield from resting(report, len(some))
    return done


def projection_of(entry: ModelEntry[Any]) -> Raw | None:
    """What is read of documents to examine them; None for all."""
    projection: Raw = {}
    for rule in entry.rules:
        projection.update(rule.page_projection)
    return projection or None
