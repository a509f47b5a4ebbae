"""Adoption: documents that are one reading each, moved to where readings are stored.

An interrupted run can be started again, and writers that do not know of
buckets yet may continue.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Sequence
from typing import Any, ClassVar

from pymongo import DeleteOne

from treadle.engine.salvage import attempting, salvage
from treadle.errors import TreadleError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding, Progress, Report
from treadle.graph.quarantine import note_aside
from treadle.graph.stored_pages import matching, readable_page
from treadle.model.bson_types import RESERVED
from treadle.model.text import escape_text, get_logger
from treadle.patterns.bucket.grouping import group
from treadle.patterns.bucket.spec import ANY_ID, Spec
from treadle.patterns.bucket.writing import HeldBuckets, Writer
from treadle.plan import Plan, Raw, bulk_write, count_documents, delete_many, find, insert_many, transact
from treadle.query.comparison import identical
from treadle.query.keys import freeze

# Documents that are adopted at a time.
ADOPT_PAGE = 1_000
# Documents that cannot be adopted and are named in the log.
ADOPT_NAMED_MAX = 10

# The code of a document that is not a reading.
NOT_ADOPTED = "document-invalid"

log = get_logger(__name__)


class Adoption:
    """Moves single documents from another collection; `_move` is what the layouts do differently."""

    pattern: ClassVar[str]
    # What a document becomes.
    expected: ClassVar[str]

    def __init__(self, entry: ModelEntry, time: str, source: str | None) -> None:
        self.entry = entry
        self.label = entry.model.__name__
        self.time = time
        # The collection that holds one document per reading.
        self.source = source
        # Documents that are not readings.
        self._unfit = 0

    def _move(self, source: str, ids: list[Any]) -> Plan[list[Any]]:
        """Move these documents. Returns the ids of those that were moved."""
        raise NotImplementedError  # pragma: no cover

    def waiting(self) -> Plan[list[Finding]]:
        """Return a finding for each document that is still to be moved."""
        findings: list[Finding] = []
        if self.source is None:
            return findings
        stored, last = f"a document of its own in {self.source}", None
        while True:
            page = matching(self.source, {}, last, ADOPT_PAGE, {"_id": 1})
            documents, last = yield from readable_page(self.label, page, last)
            if last is None:
                return findings
            findings += [
                Finding(self.pattern, self.label, each["_id"], "", stored, self.expected)
                for each in documents
            ]

    def adopt(self, report: Report | None) -> Plan[int]:
        """Move all documents that are readings. Returns how many there were."""
        source, adopted = self.source, 0
        if source is None:
            return adopted
        total = (yield from count_documents(source, {})) if report else 0
        last: list[Any] | None = None
        while True:
            page = matching(source, {}, last, ADOPT_PAGE)
            documents, last = yield from readable_page(self.label, page, last)
            if last is None:
                break
            fit = []
            for each in documents:
                problem = self._problem(copy.deepcopy(each))
                if problem is None:
                    fit.append(each["_id"])
                else:
                    yield from self._pass_over(source, each["_id"], problem)
            moved = yield from salvage(self.label, source, fit, lambda ids: self._move(source, list(ids)))
            adopted += len(moved)
            if report and moved:
                report(Progress(self.label, adopted, max(total, adopted)))
        if self._unfit > ADOPT_NAMED_MAX:
            log.warning("%s: %s documents of %s are not adopted", self.label, f"{self._unfit:,}", source)
        return adopted

    def _pass_over(self, source: str, identity: Any, problem: Any) -> Plan[None]:
        """Leave a document where it is, and record why."""
        self._unfit += 1
        if self._unfit <= ADOPT_NAMED_MAX:
            log.warning("%s: %s %s is not adopted: %s", self.label, source, escape_text(identity), problem)
        yield from note_aside(self.label, source, identity, str(problem), NOT_ADOPTED)

    def _problem(self, document: Raw) -> Any:
        """Return why a document is not a reading; None where it is."""
        if RESERVED in document:
            return f"it has the field {RESERVED!r}, which is Treadle's own"
        if not isinstance(document.get(self.time), dt.datetime):
            return f"it has no date in {self.time!r}"
        try:
            self.entry.codec.load(document)
        except TreadleError as error:
            return error
        return None


class BucketAdoption(Adoption):
    """Moves single documents into the buckets of one model, in transactions."""

    pattern = "bucket"
    expected = "a reading in a bucket"

    def __init__(self, spec: Spec, writer: Writer) -> None:
        super().__init__(spec.entry, spec.time.stored, spec.declared.adopt)
        self.spec = spec
        self.writer = writer

    def _problem(self, document: Raw) -> Any:
        return super()._problem(document if self.spec.stores_id else {**document, "_id": ANY_ID})

    def _move(self, source: str, ids: list[Any]) -> Plan[list[Any]]:
        """Move documents in one transaction; a reading that `unique` knows already is only deleted."""
        whole, held = dict.fromkeys(self.spec.series_fields), HeldBuckets()

        def attempt() -> Plan[list[Any]]:
            # As they are now: a writer may have changed or deleted one since the page was read.
            documents = yield from find(source, {"_id": {"$in": ids}})
            fit = [each for each in documents if self._problem(copy.deepcopy(each)) is None]
            keys = [each["_id"] for each in fit]
            batches = group(self.spec, [{**whole, **each} for each in fit])
            yield from self.writer.append_inside(batches, held)
            yield from delete_many(source, {"_id": {"$in": keys}})
            return keys

        return (yield from transact(attempting(attempt, held.write, len(ids))))


class SeriesAdoption(Adoption):
    """Moves single documents into the time series of one model, which has no transactions.

    A reading keeps its `_id`, so that one which an interrupted run has copied
    is recognised. Only documents that equal their copy are deleted; one that
    was changed in between stays, and `verify` reports it.
    """

    pattern = "time_series"
    expected = "a reading in the time series"

    def _move(self, source: str, ids: list[Any]) -> Plan[list[Any]]:
        documents = yield from find(source, {"_id": {"$in": ids}})
        documents = [each for each in documents if self._problem(copy.deepcopy(each)) is None]
        stored = yield from self._copies(documents)
        fresh = [each for each in documents if freeze(each["_id"]) not in stored]
        if fresh:
            yield from insert_many(self.entry.collection, fresh, ordered=False)
        stored |= {freeze(each["_id"]): each for each in fresh}
        equal = [each for each in documents if identical(each, stored[freeze(each["_id"])])]
        # Unless it was changed since it was read.
        operations = [
            DeleteOne({"_id": each["_id"], "$expr": {"$eq": ["$$ROOT", {"$literal": each}]}})
            for each in equal
        ]
        if operations:
            yield from bulk_write(source, operations, ordered=False)
        return [each["_id"] for each in equal]

    def _copies(self, documents: Sequence[Raw]) -> Plan[dict[Any, Raw]]:
        """Return the readings that have the ids of documents, by frozen id."""
        if not documents:
            return {}
        times = [each[self.time] for each in documents]
        chosen = {
            self.time: {"$gte": min(times), "$lte": max(times)},
            "_id": {"$in": [each["_id"] for each in documents]},
        }
        return {freeze(each["_id"]): each for each in (yield from find(self.entry.collection, chosen))}
