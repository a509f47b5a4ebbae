"""Verify, repair and rebuild of buckets: one function examines a bucket for all three.

A bucket is repaired in a transaction of its own, which reads and examines it
again. So an interrupted run can be started again, and writers may continue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from treadle.engine.salvage import attempting
from treadle.errors import DataError
from treadle.graph.layout import Layout
from treadle.graph.outcomes import Action, Finding, Progress, Report, resting
from treadle.graph.quarantine import around
from treadle.graph.rule import REVISION
from treadle.graph.stored_pages import Note, matching, readable_page
from treadle.model.bson_types import RESERVED
from treadle.model.document import Document
from treadle.model.text import get_logger
from treadle.patterns.bucket import setup
from treadle.patterns.bucket.adoption import BucketAdoption
from treadle.patterns.bucket.bucket_document import derived_parts, readings_of, start_of, window_of
from treadle.patterns.bucket.spec import SEQUENCE, Spec, to_datetime
from treadle.patterns.bucket.updates import ReadingUpdater, write_readings
from treadle.patterns.bucket.writing import Writer
from treadle.plan import Plan, Raw, bulk_write, by_id, count_documents, find, find_one, transact, update_one
from treadle.plan.capabilities import Capabilities
from treadle.plan.decoding import Unreadable
from treadle.query.comparison import same
from treadle.query.keys import freeze
from treadle.query.paths import value_at

# Buckets that are examined at a time.
BUCKET_UPKEEP_PAGE = 50

D = TypeVar("D", bound=Document)

log = get_logger(__name__)


class Examination(NamedTuple):
    """What is wrong with a bucket."""

    findings: list[Finding]
    # Empty where the bucket is damaged, so that nothing can be repaired.
    readings: list[Raw]
    # Positions of readings that belong to another window, and of those that `unique` forbids.
    outside: list[int]
    repeated: list[int]


class BucketUpkeep(Layout[D]):
    """Set-up, verify, repair and rebuild of the buckets of one model."""

    pattern = "bucket"

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.entry = spec.entry
        self.collection = spec.collection
        self.writer = Writer(spec)
        self.updater = ReadingUpdater(spec, self.writer)

    def schema(self) -> Raw:
        return setup.bucket_schema(self.spec, deep=True)

    def setup(self, existing: dict[str, Raw], actions: list[Action]) -> Plan[None]:
        return setup.setup(self.spec, existing, actions)

    # -- all buckets ----------------------------------------------------------------------

    def verify(self, server: Capabilities, report: Report | None) -> Plan[list[Finding]]:
        """Return what differs from what the readings say, and the documents that wait to be adopted."""
        findings = yield from BucketAdoption(self.spec, self.writer).waiting()

        def visit(bucket: Raw) -> Plan[int]:
            findings.extend((yield from self._examine(bucket)).findings)
            return 1

        def note(error: Unreadable) -> None:
            findings.extend(self._finding(key, "", None, reason) for key, reason in error.failed)

        yield from self._visit_all(visit, report, note=note)
        return findings

    def repair(self, server: Capabilities, report: Report | None) -> Plan[int]:
        """Repair what `verify` finds. Returns the number of documents that were repaired."""
        adopted = yield from BucketAdoption(self.spec, self.writer).adopt(report)
        return adopted + (yield from self._visit_all(self._repair))

    def rebuild(self, server: Capabilities, report: Report | None) -> Plan[int]:
        """Adopt and repair everything. Returns the number of buckets that were visited."""
        yield from BucketAdoption(self.spec, self.writer).adopt(report)

        def visit(bucket: Raw) -> Plan[int]:
            yield from self._repair(bucket)
            return 1

        return (yield from self._visit_all(visit, report))

    def _visit_all(
        self, visit: Callable[[Raw], Plan[int]], report: Report | None = None, note: Note | None = None
    ) -> Plan[int]:
        """Visit each bucket, page by page. Returns the sum of what the visits return."""
        label = self.spec.label
        total = (yield from count_documents(self.collection, {})) if report else 0
        done = result = 0
        last: list[Any] | None = None
        while True:
            page = matching(self.collection, {}, last, BUCKET_UPKEEP_PAGE)
            buckets, last = yield from readable_page(label, page, last, note)
            if last is None:
                return result
            for bucket in buckets:
                result += (yield from around(label, self.collection, bucket["_id"], visit(bucket))) or 0
            done += len(buckets)
            if report:
                report(Progress(label, done, max(total, done)))
            yield from resting(report, len(buckets))

    # -- one bucket -----------------------------------------------------------------------

    def _finding(self, identity: Any, path: str, stored: Any, expected: Any) -> Finding:
        return Finding(self.pattern, self.spec.label, identity, path, stored, expected)

    def _examine(self, bucket: Raw) -> Plan[Examination]:
        """Return what is wrong with one bucket."""
        spec, names, identity = self.spec, self.spec.names, bucket["_id"]
        try:
            readings = readings_of(spec, bucket)
            start = start_of(spec, bucket)
            first, last = window_of(spec, bucket)
        except DataError as error:
            found = [self._finding(identity, names.readings, str(error), "readings")]
            return Examination(found, [], [], [])
        if not readings:
            found = [self._finding(identity, names.readings, [], "no empty bucket")]
            return Examination(found, [], [], [])
        outside = [at for at, each in enumerate(readings) if not first <= each[spec.time.stored] <= last]
        repeated = yield from self._repeated(bucket, readings)
        findings = [
            self._finding(identity, path, stored, expected)
            for path, stored, expected in self._parts(bucket, start, readings)
            if not same(stored, expected)
        ]
        is_misaligned = spec.span is not None and spec.window(start) != start
        if is_misaligned:
            findings.append(
                self._finding(identity, names.start, to_datetime(start), to_datetime(spec.window(start)))
            )
        wrong = [(spec.time, at, "a time in its window") for at in ([] if is_misaligned else outside)]
        if spec.unique is not None:
            wrong += [(spec.unique, at, "only once in its window") for at in repeated]
        for field, at, expected in wrong:
            path, stored = f"{names.readings}.{at}.{field.stored}", readings[at].get(field.stored)
            findings.append(self._finding(identity, path, stored, expected))
        return Examination(findings, readings, outside, repeated)

    def _parts(self, bucket: Raw, start: int, readings: list[Raw]) -> Iterator[tuple[str, Any, Any]]:
        """Yield the path of each derived part, what is stored, and what is expected."""
        names = self.spec.names
        expected = derived_parts(self.spec, start, readings)
        for name in (names.start, names.end, names.count):
            yield name, bucket.get(name), expected[name]
        for stat in self.spec.stats:
            for part in ("min", "max", "sum", *(("count",) if stat.optional else ())):
                path = f"{names.stats}.{stat.path}.{part}"
                yield path, value_at(bucket, path), value_at(expected, path)
        if not isinstance(bucket.get(RESERVED, {}), dict):
            yield RESERVED, bucket[RESERVED], {}

    def _repeated(self, bucket: Raw, readings: list[Raw]) -> Plan[list[int]]:
        """Return the positions of readings that another bucket of the window has, or the same one earlier."""
        spec, unique = self.spec, self.spec.unique
        if unique is None:
            return []
        own = value_at(bucket, SEQUENCE) or 0
        window = {**spec.key_filter(spec.key_of(bucket)), spec.names.start: {"$eq": bucket[spec.names.start]}}
        known: set[Any] = {None}
        for collection in spec.collections:
            for other in (yield from find(collection, window)):
                is_earlier = (value_at(other, SEQUENCE) or 0) < own
                if collection != spec.collection or is_earlier:
                    # A damaged one is reported when its turn comes.
                    with contextlib.suppress(DataError):
                        known.update(freeze(each.get(unique.stored)) for each in readings_of(spec, other))
        positions = []
        for position, each in enumerate(readings):
            value = freeze(each.get(unique.stored))
            if value is not None and value in known:
                positions.append(position)
            known.add(value)
        return positions

    def _repair(self, bucket: Raw) -> Plan[int]:
        """Make one bucket what its readings say; those of other windows move there. Returns 1 if it wrote."""
        if not (yield from self._examine(bucket)).findings:
            return 0
        identity = by_id(bucket["_id"])

        def hold() -> Plan[None]:
            yield from update_one(self.collection, identity, {"$inc": {REVISION: 1}})

        def attempt() -> Plan[int]:
            current = yield from find_one(self.collection, identity)
            return 0 if current is None else (yield from self._repair_inside(current))

        return (yield from transact(attempting(attempt, hold, 1)))

    def _repair_inside(self, bucket: Raw) -> Plan[int]:
        spec = self.spec
        findings, readings, outside, repeated = yield from self._examine(bucket)
        if not findings:
            return 0
        if not readings and bucket.get(spec.names.readings) != []:
            log.warning("%s", findings[0].stored)
            return 0
        leaving: dict[int, Raw | None] = dict.fromkeys([*outside, *repeated])
        yield from bulk_write(self.collection, [write_readings(spec, bucket, readings, leaving)])
        astray = [spec.to_reading(bucket, readings[at]) for at in outside if at not in repeated]
        if astray:
            yield from self.updater.append(astray)
        return 1
