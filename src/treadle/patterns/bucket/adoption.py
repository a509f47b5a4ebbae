"""Adoption: documents that are one reading each, moved to where readings are stored.

The documents of one bucket move in one transaction, which also makes sure that
they are still what was read. So whatever is interrupted can be begun again,
and writers that do not know of buckets yet may go on meanwhile.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, ClassVar

import bson
from pymongo.errors import OperationFailure

from treadle.engine.salvage import salvage
from treadle.errors import TreadleError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding, Progress, Report
from treadle.graph.quarantine import note_aside
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED
from treadle.model.text import escape_text, get_logger
from treadle.patterns.bucket.grouping import Batch, group, keep, split_large
from treadle.patterns.bucket.reading import Scan
from treadle.patterns.bucket.spec import ANY_ID, Spec
from treadle.patterns.bucket.writing import Writer
from treadle.plan import Plan, Raw, count_documents, delete_many, find, insert_many, server_facts
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze

# Attempts at one bucket, and at a batch of adoption.
BUCKET_UPKEEP_ATTEMPTS_MAX = 100
# Documents that are adopted at a time.
ADOPT_PAGE = 1_000
# Passes over a collection that is written meanwhile.
ADOPT_PASSES_MAX = 1_000
# Documents that cannot be adopted and are named.
ADOPT_NAMED_MAX = 10

# What is said of a document that no reading can be made of.
NOT_ADOPTED = "document-invalid"

log = get_logger(__name__)


class Adoption:
    """Moves single documents from another collection; `_move` is what the layouts do differently."""

    pattern: ClassVar[str]
    # What a document becomes.
    expected: ClassVar[str]

    def __init__(self, entry: ModelEntry, time: str, source: str | None) -> None:
        self.entry = entry
        self.name = entry.model.__name__
        self.time = time
        # The collection that holds one document per reading.
        self.source = source
        # Documents of this pass that no reading can be made of, and how many were named so far.
        self._unfit = self._named = 0
        # Documents that somebody changed while they were to be moved.
        self._busy = 0

    def _move(self, source: str, documents: list[Raw]) -> Plan[int]:
        """Move a page of documents; how many were moved."""
        raise NotImplementedError  # pragma: no cover

    def waiting(self) -> Plan[list[Finding]]:
        """The documents that are still to be moved."""
        findings: list[Finding] = []
        if self.source is None:
            return findings
        stored = f"a document of its own in {self.source}"
        scan = Scan(self.source, {}, ADOPT_PAGE, {"_id": 1}, self.name)
        while documents := (yield from scan.next()):
            findings += [
                Finding(self.pattern, self.name, each["_id"], "", stored, self.expected) for each in documents
            ]
        return findings

    def adopt(self, report: Report | None) -> Plan[int]:
        """Move documents that are one reading each; how many there were."""
        adopted, source = 0, self.source
        if source is None:
            return adopted
        total = (yield from count_documents(source, {})) if report else 0
        # Writers of single documents may go on, so it ends when a pass finds nothing.
        for number in range(ADOPT_PASSES_MAX):
            before, self._busy, self._unfit = adopted, 0, 0
            scan = Scan(source, {}, ADOPT_PAGE, label=self.name)
            while documents := (yield from scan.next()):
                fit = []
                for each in documents:
                    if (problem := self._problem_of(each, source)) is None:
                        fit.append(each)
                    elif not number:
                        yield from note_aside(self.name, source, each["_id"], str(problem), NOT_ADOPTED)
                adopted += sum((yield from self._move_around(source, fit)))
                if report and fit:
                    report(Progress(self.name, adopted, max(total, adopted)))
            if adopted == before and not self._busy:
                break
        if self._unfit > ADOPT_NAMED_MAX:
            log.warning("%s: %s documents of %s are not adopted", self.name, f"{self._unfit:,}", source)
        return adopted

    def _move_around(self, source: str, documents: list[Raw]) -> Plan[list[int]]:
        """Move documents; one that stands in the way is set aside."""

        def attempt(some: Sequence[Raw]) -> Plan[list[int]]:
            return [(yield from self._move(source, list(some)))]

        return (yield from salvage(self.name, source, documents, attempt, key_of=itemgetter("_id")))

    def _problem_of(self, document: Raw, source: str) -> Any:
        """Why a document cannot be read as a reading, and stays where it is; None where it can."""
        problem = self._problem(copy.deepcopy(document))
        if problem is not None:
            self._unfit += 1
            if self._named < ADOPT_NAMED_MAX:
                self._named += 1
                log.warning(
                    "%s: %s %s is not adopted: %s", self.name, source, escape_text(document["_id"]), problem
                )
        return problem

    def _problem(self, document: Raw) -> Any:
        """Why no reading can be made of a document; None where one can."""
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
    """Moves single documents into the buckets of one model."""

    pattern = "bucket"
    expected = "a reading in a bucket"

    def __init__(self, spec: Spec, writer: Writer) -> None:
        super().__init__(spec.entry, spec.time.stored, spec.declared.adopt)
        self.spec = spec
        self.writer = writer

    def _problem(self, document: Raw) -> Any:
        return super()._problem(document if self.spec.stores_id else {**document, "_id": ANY_ID})

    def _move(self, source: str, documents: list[Raw]) -> Plan[int]:
        """One transaction per bucket; on a server without any, only if repetitions are noticed."""
        server: Capabilities = yield from server_facts()
        if self.spec.unique is None:
            server.require_transactions(
                f"moving single documents into the buckets of {self.name}",
                "declare unique=, so that none is counted twice",
            )
        whole = dict.fromkeys(self.spec.outer_names)
        pending = group(self.spec, [{**whole, **each} for each in documents], range(len(documents)))
        moved = 0
        for _ in range(BUCKET_UPKEEP_ATTEMPTS_MAX):
            again: list[Batch] = []
            for batch in split_large(self.spec, pending):
                duplicates: list[int] = []
                located, later = yield from self.writer.placer.locate(batch, duplicates)
                # Not while the one that they repeat is still to be written: the next pass finds them again.
                if duplicates and not located and not later:
                    moved += yield from self._drop(source, duplicates, documents, server)
                again += later
                for part in located:
                    number = yield from self._move_part(source, part, documents, server)
                    moved += number
                    again += [] if number or not part.readings else [part]
            pending = again
            if not pending:
                break
        return moved

    def _move_part(
        self, source: str, part: Batch, documents: Sequence[Raw], server: Capabilities
    ) -> Plan[int]:
        """Move the documents of one bucket; 0 if others came between, and then `part` is what is left.

        The bucket is written first and nothing is read before, so that a
        writer who is busy with it does not make the transaction fail for ever.
        """
        number = len(part.places)

        def attempt() -> Plan[int]:
            if (yield from self.writer.write([part], [])):
                return 0
            if len((yield from self._unchanged(source, part.places, documents))) < number:
                raise _Taken
            keys = [documents[place]["_id"] for place in part.places]
            yield from delete_many(source, {"_id": {"$in": keys}})
            return number

        try:
            return (yield from server.transact(attempt))
        except OperationFailure as error:
            self.writer.collisions(error)
        except _Taken:
            kept = yield from self._unchanged(source, part.places, documents)
            self._busy += number - len(kept)
            keep(part, kept)
        return 0

    def _drop(
        self, source: str, places: list[int], documents: Sequence[Raw], server: Capabilities
    ) -> Plan[int]:
        """Delete documents whose reading is stored, if they are still what was read."""

        def attempt() -> Plan[int]:
            kept = yield from self._unchanged(source, places, documents)
            keys = [documents[places[number]]["_id"] for number in kept]
            return (yield from delete_many(source, {"_id": {"$in": keys}})).deleted_count

        return (yield from server.transact(attempt))

    def _unchanged(self, source: str, places: Sequence[int], documents: Sequence[Raw]) -> Plan[list[int]]:
        """Which readings of a batch come from documents that are still what was read."""
        read = [documents[place] for place in places]
        now = yield from find(source, {"_id": {"$in": [each["_id"] for each in read]}})
        stored = {freeze(each["_id"]): _bytes(each) for each in now}
        return [number for number, each in enumerate(read) if stored.get(freeze(each["_id"])) == _bytes(each)]


class SeriesAdoption(Adoption):
    """Moves single documents into the time series of one model.

    There are no transactions on a time series. A reading keeps its `_id`, so
    after a crash those that are there already are known and left out.
    """

    pattern = "time_series"
    expected = "a reading in the time series"

    def _move(self, source: str, documents: list[Raw]) -> Plan[int]:
        keys = [each["_id"] for each in documents]
        times = [each[self.time] for each in documents]
        stored = yield from find(
            self.entry.collection,
            {self.time: {"$gte": min(times), "$lte": max(times)}, "_id": {"$in": keys}},
            {"_id": 1},
        )
        known = {freeze(each["_id"]) for each in stored}
        fresh = [each for each in documents if freeze(each["_id"]) not in known]
        if fresh:
            yield from insert_many(self.entry.collection, fresh, ordered=False)
        yield from delete_many(source, {"_id": {"$in": keys}})
        return len(keys)


def _bytes(document: Raw) -> bytes:
    return bson.encode(document, codec_options=CODEC_OPTIONS)


class _Taken(Exception):
    """Somebody else changed or adopted a document meanwhile."""
