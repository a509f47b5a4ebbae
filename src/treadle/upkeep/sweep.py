"""One way through a collection: page by page, at the pace of a job, resumable, past unreadable documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.engine.pages import projection_of
from treadle.errors import UsageError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Pace, Progress, Report, resting
from treadle.graph.scope import Failed, Image
from treadle.graph.stored_pages import chunks
from treadle.plan import Plan, Raw, aggregate, count_documents
from treadle.plan.decoding import UndecodableId

# Documents of a sample.
VERIFY_SAMPLE_MAX = 1_000_000


class Sweep:
    """Passes the documents of exactly one model, upgraded, to `visit`.

    A report that is a `Pace` says where to begin, how large a page is and how
    long to rest. Documents that cannot be read are quarantined, and passed to
    `note`.
    """

    def __init__(
        self,
        entry: ModelEntry,
        size: int,
        visit: Callable[[Sequence[Raw]], Plan[None]],
        report: Report | None = None,
        note: Callable[[Failed], None] | None = None,
    ) -> None:
        self._name = entry.model.__name__
        self._collection = entry.collection
        self._scope = entry.targets.exact
        self._projection = projection_of(entry)
        self._size = report.sized(size) if isinstance(report, Pace) else size
        self._visit = visit
        self._report = report
        self._note = note
        self._done = 0

    def all(self) -> Plan[int]:
        """Visit all documents in the order of `_id`. Returns their number."""
        report = self._report
        total = (yield from count_documents(self._collection, self._scope.stored())) if report else 0
        last = report.begins_after(self._name) if isinstance(report, Pace) else None
        while True:
            page = yield from self._scope.page(last, self._size, projection=self._projection)
            last = page.last
            if last is None:
                return self._done
            begins_after = None if isinstance(last[0], UndecodableId) else last
            yield from self._page(page.images, page.failed, len(page.images), total, begins_after)

    def sample(self, part: float) -> Plan[int]:
        """Visit documents that are chosen with a chance each. Returns their number.

        One pass over the collection in its own order chooses the ids, which is
        much quicker than the order of `_id`.
        """
        stages: list[Raw] = [
            {"$match": {**self._scope.stored(), "$sampleRate": part}},
            {"$limit": VERIFY_SAMPLE_MAX + 1},
            {"$project": {"_id": 1}},
        ]
        ids = [row["_id"] for row in (yield from aggregate(self._collection, stages))]
        if len(ids) > VERIFY_SAMPLE_MAX:
            raise UsageError(
                f"sample={part:g} of {self._collection} is more than {VERIFY_SAMPLE_MAX:,} documents; "
                "choose a smaller part",
                code="verify-option",
            )
        for some in chunks(ids, self._size):
            failed: Failed = []
            chosen = {"_id": {"$in": list(some)}}
            images = yield from self._scope.find(chosen, projection=self._projection, failed=failed)
            yield from self._page(images, failed, len(some), len(ids), None)
        return self._done

    def _page(
        self, images: Sequence[Image], failed: Failed, number: int, total: int, last: list[Any] | None
    ) -> Plan[None]:
        if failed and self._note is not None:
            self._note(failed)
        yield from self._visit([image.document for image in images])
        self._done += number
        if self._report:
            self._report(Progress(self._name, self._done, max(total, self._done)))
        yield from resting(self._report, number, last)
