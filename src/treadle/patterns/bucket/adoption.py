"""Adoption: documents that are one reading each, moved into buckets.

The documents of one bucket move in one transaction, which also makes sure that
they are still what was read. So whatever is interrupted can be begun again,
and writers that do not know of buckets yet may go on meanwhile.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import bson
from bson import ObjectId
from pymongo.errors import OperationFailure

from treadle.errors import TreadleError
from treadle.graph.gather import freeze
from treadle.graph.reports import Finding, Progress, Report
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.patterns.bucket.grouping import Batch, split_large
from treadle.patterns.bucket.reading import Scan
from treadle.patterns.bucket.spec import Spec
from treadle.plan import Plan, Raw, count_documents, delete_many, find
from treadle.plan.capabilities import Capabilities

if TYPE_CHECKING:
    from treadle.patterns.bucket.layout import BucketLayout

# In place of an id that the reading will not keep.
_ANY_ID = ObjectId(b"\0" * 12)

log = logging.getLogger("treadle")


class Adoption:
    """What moves single documents into the buckets of one model."""

    def __init__(self, layout: BucketLayout[Any]) -> None:
        self.layout = layout
        self.spec: Spec = layout.spec
        self.name = layout.entry.model.__name__
        # Documents of this pass that no reading can be made of, and how many were named so far.
        self._unfit = self._named = 0
        # Documents that somebody changed while they were to be moved.
        self._busy = 0

    def _sources(self) -> list[tuple[str, Raw]]:
        """The collections that may hold one document per reading, and how to know these."""
        collection = self.layout.collection
        own = (collection, {self.spec.names.start: {"$exists": False}})
        other = self.spec.declared.adopt
        return [own] if other is None or other == collection else [own, (other, {})]

    def waiting(self) -> Plan[list[Finding]]:
        """The documents that are still to be moved."""
        findings = []
        for source, filter in self._sources():
            scan = Scan(source, filter, self.spec.limits.adopt_page, {"_id": 1})
            while documents := (yield from scan.next()):
                findings += [
                    Finding(
                        self.layout.pattern, self.name, each["_id"], "",
                        f"a document of its own in {source}", "a reading in a bucket",
                    )
                    for each in documents
                ]  # fmt: skip
        return findings

    def adopt(self, server: Capabilities, report: Report | None = None) -> Plan[int]:
        """Move documents that are one reading each into buckets; how many there were."""
        adopted = 0
        for source, filter in self._sources():
            total = (yield from count_documents(source, filter)) if report else 0
            # Writers that do not know of buckets yet may go on, so it ends when a pass finds nothing.
            for _ in range(self.spec.limits.adopt_passes_max):
                before, self._busy, self._unfit = adopted, 0, 0
                scan = Scan(source, filter, self.spec.limits.adopt_page)
                while documents := (yield from scan.next()):
                    fit = [each for each in documents if self._is_reading(each, source)]
                    if fit:
                        adopted += yield from self._adopt_page(source, fit, server)
                        if report:
                            report(Progress(self.name, adopted, max(total, adopted)))
                if adopted == before and not self._busy:
                    break
            if self._unfit > self.spec.limits.adopt_named_max:
                log.warning("%s: %s documents of %s are not adopted", self.name, f"{self._unfit:,}", source)
        return adopted

    def _is_reading(self, document: Raw, source: str) -> bool:
        """Whether a document can be read as a reading; what cannot be stays where it is."""
        shown = copy.deepcopy(document)
        if not self.spec.stores_id:
            shown["_id"] = _ANY_ID
        try:
            self.layout.entry.codec.load(shown)
            self.layout.check_fields(document)
            return True
        except TreadleError as error:
            self._unfit += 1
            if self._named < self.spec.limits.adopt_named_max:
                self._named += 1
                log.warning("%s: %s %r is not adopted: %s", self.name, source, document["_id"], error)
            return False

    def _adopt_page(self, source: str, documents: list[Raw], server: Capabilities) -> Plan[int]:
        """Move these documents, one transaction per bucket; without any only if repetitions are noticed."""
        if self.spec.unique is None:
            server.require_transactions(
                f"moving single documents into the buckets of {self.name}",
                "declare unique=, so that none is counted twice",
            )
        writer = self.layout.writer
        pending = writer.group([self.layout.normal(each) for each in documents], range(len(documents)))
        moved = 0
        for _ in range(self.spec.limits.bucket_upkeep_attempts_max):
            again: list[Batch] = []
            for batch in split_large(self.spec, pending):
                duplicates: list[int] = []
                located, later = yield from writer.placer.locate(batch, duplicates)
                # Not while the one that they repeat is still to be written: the next pass finds them again.
                if duplicates and not located and not later:
                    moved += yield from self._drop(source, duplicates, documents, server)
                again += later
                for part in located:
                    number = yield from self._adopt_part(source, part, documents, server)
                    moved += number
                    again += [] if number or not part.readings else [part]
            pending = again
            if not pending:
                break
        return moved

    def _adopt_part(
        self, source: str, part: Batch, documents: Sequence[Raw], server: Capabilities
    ) -> Plan[int]:
        """Move the documents of one bucket; 0 if others came between, and then `part` is what is left.

        The bucket is written first and nothing is read before, so that a
        writer who is busy with it does not make the transaction fail for ever.
        """
        keys = [documents[place]["_id"] for place in part.places]

        def attempt() -> Plan[int]:
            if (yield from self.layout.writer.write([part])):
                return 0
            kept = yield from self._unchanged(source, part.places, documents)
            if len(kept) < len(keys):
                raise _Taken
            yield from delete_many(source, {"_id": {"$in": keys}})
            return len(keys)

        try:
            return (yield from server.together(attempt))
        except OperationFailure as error:
            if not self.layout.writer.answerable(error.code, error.details):
                raise
        except _Taken:
            kept = yield from self._unchanged(source, part.places, documents)
            self._busy += len(keys) - len(kept)
            part.readings = [part.readings[number] for number in kept]
            part.places = [part.places[number] for number in kept]
            part.counts = []
        return 0

    def _drop(
        self, source: str, places: list[int], documents: Sequence[Raw], server: Capabilities
    ) -> Plan[int]:
        """Delete documents whose reading is stored, if they are still what was read."""

        def attempt() -> Plan[int]:
            kept = yield from self._unchanged(source, places, documents)
            keys = [documents[places[number]]["_id"] for number in kept]
            return (yield from delete_many(source, {"_id": {"$in": keys}})).deleted_count

        return (yield from server.together(attempt))

    def _unchanged(self, source: str, places: Sequence[int], documents: Sequence[Raw]) -> Plan[list[int]]:
        """Which readings of a batch come from documents that are still what was read."""
        keys = [documents[place]["_id"] for place in places]
        found = yield from find(source, {"_id": {"$in": keys}})
        there = {freeze(each["_id"]): _bytes(each) for each in found}
        return [
            number
            for number, place in enumerate(places)
            if there.get(freeze(documents[place]["_id"])) == _bytes(documents[place])
        ]


def _bytes(document: Raw) -> bytes:
    return bson.encode(document, codec_options=CODEC_OPTIONS)


class _Taken(Exception):
    """Somebody else changed or adopted a document meanwhile."""
