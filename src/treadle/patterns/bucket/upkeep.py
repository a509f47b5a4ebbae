"""Proof and repair of buckets.

Each bucket is mended by one guarded write. So whatever is interrupted can be
begun again, and writers go on meanwhile: a bucket that another writer changed
is read again.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable
from typing import Any, TypeVar

from treadle.errors import DataError, UsageError
from treadle.graph.layout import Layout
from treadle.graph.outcomes import Action, Finding, Progress, Report, resting
from treadle.graph.quarantine import around
from treadle.graph.stored_pages import Note
from treadle.model.document import Document
from treadle.model.text import get_logger
from treadle.patterns.bucket import prepare
from treadle.patterns.bucket.adoption import BUCKET_UPKEEP_ATTEMPTS_MAX, BucketAdoption
from treadle.patterns.bucket.changing import Changer
from treadle.patterns.bucket.contents import guard, parts_of, readings_of, start_of, window_of
from treadle.patterns.bucket.matching import Opened
from treadle.patterns.bucket.reading import Scan
from treadle.patterns.bucket.spec import NEXT, SEQUENCE, Spec, moment, state
from treadle.plan import Plan, Raw, by_id, count_documents, find, find_one, update_one
from treadle.plan.capabilities import Capabilities
from treadle.plan.decoding import Unreadable
from treadle.query.comparison import same
from treadle.query.keys import freeze
from treadle.query.paths import value_at

# Buckets that are verified or rebuilt at a time.
BUCKET_UPKEEP_PAGE = 50

D = TypeVar("D", bound=Document)

log = get_logger(__name__)


class BucketUpkeep(Layout[D]):
    """The calls that look after the buckets of one model."""

    pattern = "bucket"

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.entry = spec.entry
        self.collection = spec.collection
        self.changer = Changer(spec)
        self.writer = self.changer.writer

    # -- set-up ---------------------------------------------------------------------------

    def schema(self) -> Raw:
        return prepare.bucket_schema(self.spec, deep=True)

    def setup(self, existing: dict[str, Raw], actions: list[Action]) -> Plan[None]:
        return prepare.setup(self.spec, existing, actions)

    # -- all buckets ----------------------------------------------------------------------

    def verify(self, server: Capabilities, report: Report | None) -> Plan[list[Finding]]:
        """Every bucket that is not what its readings say, and every reading that is in none."""
        findings = yield from BucketAdoption(self.spec, self.writer).waiting()

        def visit(bucket: Raw) -> Plan[int]:
            findings.extend((yield from self._examine(bucket)))
            return 1

        def note(error: Unreadable) -> None:
            findings.extend(self._finding({"_id": key}, "", None, reason) for key, reason in error.failed)

        yield from self._visit_all(visit, report, note=note)
        return findings

    def repair(self, server: Capabilities, report: Report | None) -> Plan[int]:
        """Mend what `verify` finds; how many documents were mended."""
        adopted = yield from BucketAdoption(self.spec, self.writer).adopt(report)
        return adopted + (yield from self._visit_all(self._mend))

    def rebuild(self, server: Capabilities, report: Report | None) -> Plan[int]:
        """Adopt and mend everything; how many buckets were visited."""
        yield from BucketAdoption(self.spec, self.writer).adopt(report)

        def visit(bucket: Raw) -> Plan[int]:
            yield from self._mend(bucket)
            return 1

        return (yield from self._visit_all(visit, report))

    def _visit_all(
        self,
        visit: Callable[[Raw], Plan[int]],
        report: Report | None = None,
        note: Note | None = None,
    ) -> Plan[int]:
        """Visit each bucket, page by page; the sum of what the visits return."""
        total = (yield from count_documents(self.collection, {})) if report else 0
        done = result = 0
        page = BUCKET_UPKEEP_PAGE
        scan = Scan(self.collection, {}, page, label=self.spec.label, note=note)
        while buckets := (yield from scan.next()):
            for bucket in buckets:
                label, visiting = self.spec.label, visit(bucket)
                result += (yield from around(label, self.collection, bucket["_id"], visiting)) or 0
            done += len(buckets)
            if report:
                report(Progress(self.spec.label, done, max(total, done)))
            yield from resting(report, len(buckets))
        return result

    # -- proof of one bucket ----------------------------------------------------------------

    def _finding(self, bucket: Raw, path: str, stored: Any, expected: Any) -> Finding:
        return Finding(self.pattern, self.spec.label, bucket["_id"], path, stored, expected)

    def _examine(self, bucket: Raw) -> Plan[list[Finding]]:
        """The findings in one bucket."""
        spec, names = self.spec, self.spec.names
        try:
            readings = readings_of(spec, bucket)
            start = start_of(spec, bucket)
            outside = self._outside(bucket, readings)
        except DataError as error:
            return [self._finding(bucket, names.readings, str(error), "readings")]
        if not readings:
            return [self._finding(bucket, names.readings, [], "no empty bucket")]
        places: list[tuple[str, Any, Any]] = []
        for part, right in parts_of(spec, start, readings).items():
            if part == names.stats:
                places += self._statistics(bucket.get(part), right)
            else:
                places.append((part, bucket.get(part), right))
        findings = [self._finding(bucket, *each) for each in places if not same(each[1], each[2])]
        if spec.span is not None and spec.window(start) != start:
            findings.append(self._finding(bucket, names.start, moment(start), moment(spec.window(start))))
            outside = []
        repeated = yield from self._repeated(bucket, readings)
        for field, numbers, expected in (
            (spec.time, outside, "a time in its window"), (spec.unique, repeated, "only once in its window")
        ):  # fmt: skip
            for number in numbers:
                assert field is not None
                path, stored = f"{names.readings}.{number}.{field.stored}", readings[number][field.stored]
                findings.append(self._finding(bucket, path, stored, expected))
        if spec.span is None:
            findings += yield from self._overlap(bucket, start)
        return findings

    def _statistics(self, stored: Any, right: Raw) -> list[tuple[str, Any, Any]]:
        """Each part of the statistics: its path, what is stored, and what is right."""
        places = []
        for stat in self.spec.stats:
            for name in ("min", "max", "sum", *(("count",) if stat.optional else ())):
                path = f"{stat.path}.{name}"
                places.append(
                    (f"{self.spec.names.stats}.{path}", value_at(stored, path), value_at(right, path))
                )
        return places

    def _outside(self, bucket: Raw, readings: list[Raw]) -> list[int]:
        """The positions of readings that belong into another window."""
        time = self.spec.time.stored
        first, last = window_of(self.spec, bucket)
        return [number for number, each in enumerate(readings) if not first <= each[time] <= last]

    def _repeated(self, bucket: Raw, readings: list[Raw]) -> Plan[list[int]]:
        """The positions of readings that the window has elsewhere, or earlier in the same bucket."""
        spec, unique = self.spec, self.spec.unique
        if unique is None:
            return []
        earlier: list[Raw] = []
        if sequence := state(bucket, "sequence"):
            others = yield from find(
                self.collection,
                {
                    **spec.siblings(bucket),
                    spec.names.start: {"$eq": bucket[spec.names.start]},
                    "$or": [{SEQUENCE: {"$exists": False}}, {SEQUENCE: {"$lt": sequence}}],
                },
            )
            for other in others:
                # One that cannot be read is named when its turn comes.
                with contextlib.suppress(DataError):
                    earlier += readings_of(spec, other)
        known: set[Any] = {freeze(each.get(unique.stored)) for each in earlier} - {None}
        numbers = []
        for number, each in enumerate(readings):
            value = freeze(each.get(unique.stored))
            if value in known:
                numbers.append(number)
            elif value is not None:
                known.add(value)
        return numbers

    def _overlap(self, bucket: Raw, start: int) -> Plan[list[Finding]]:
        """Whether a window without a span ends where the next one begins."""
        name = self.spec.names.start
        later = {**self.spec.siblings(bucket), name: {"$gt": moment(start)}}
        after = yield from find(self.collection, later, {name: 1}, sort=[(name, 1)], limit=1)
        following = state(bucket, "next")
        if not after or not isinstance(after[0][name], dt.datetime):
            return []
        if following is not None and following <= after[0][name]:
            return []
        return [self._finding(bucket, NEXT, following, after[0][name])]

    # -- repair of one bucket --------------------------------------------------

    def _mend(self, bucket: Raw) -> Plan[bool]:
        """Make one bucket what its readings say, if it is not; readings of other windows move there."""
        spec = self.spec
        for attempt in range(BUCKET_UPKEEP_ATTEMPTS_MAX):
            current = (yield from find_one(self.collection, by_id(bucket["_id"]))) if attempt else bucket
            findings = [] if current is None else (yield from self._examine(current))
            if current is None or not findings:
                return attempt > 0
            try:
                readings = readings_of(spec, current)
                outside = set(self._outside(current, readings))
            except DataError as error:
                log.warning("%s", error)
                return False
            overlap = next((each for each in findings if each.path == NEXT), None)
            if overlap is not None:
                sets = {"$set": {NEXT: overlap.expected}}
                yield from update_one(self.collection, guard(spec, current), sets)
                continue
            surplus = set((yield from self._repeated(current, readings)))
            opened = Opened(current, readings, [], spec.series_of(current))
            try:
                if (yield from self.changer.sort_out(opened, outside - surplus, surplus)):
                    return True
            except UsageError as error:
                if error.code != "transactions-unavailable":
                    raise
                log.warning(
                    "%s: bucket %r has readings of other windows: %s", spec.label, bucket["_id"], error
                )
                return False
        return False
