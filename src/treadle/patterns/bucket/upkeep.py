"""Proof and repair of buckets; conversion between layouts.

Each bucket is mended, converted or packed by one guarded write. So whatever is
interrupted can be begun again, and writers go on meanwhile: who comes between
is read again.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from treadle.errors import DataError, TreadleError, UsageError
from treadle.graph.reports import Finding, Progress, Report
from treadle.model.bson_types import RESERVED
from treadle.patterns.bucket.adoption import Adoption
from treadle.patterns.bucket.changing import guard, rewritten
from treadle.patterns.bucket.contents import Form, derived_parts, form_of, readings_of, start_of
from treadle.patterns.bucket.grouping import frozen
from treadle.patterns.bucket.matching import Opened
from treadle.patterns.bucket.reading import Scan
from treadle.patterns.bucket.spec import NEXT, SEQUENCE, Spec, milliseconds, moment
from treadle.plan import (
    Plan,
    Raw,
    count_documents,
    database_command,
    find,
    find_one,
    update_one,
)
from treadle.plan.capabilities import Capabilities
from treadle.query.comparison import same
from treadle.query.paths import value_at

if TYPE_CHECKING:
    from treadle.patterns.bucket.layout import BucketLayout


log = logging.getLogger("treadle")


class Upkeep:
    """What looks after the buckets of one model."""

    def __init__(self, layout: BucketLayout[Any]) -> None:
        self.layout = layout
        self.spec: Spec = layout.spec
        self.collection = layout.collection
        self.name = layout.entry.model.__name__

    # -- proof ----------------------------------------------------------------------------

    def verify(self, server: Capabilities, report: Report | None) -> Plan[list[Finding]]:
        """Every bucket that is not what its readings say, and every reading that is in none."""
        findings = yield from Adoption(self.layout).waiting()
        done = self._progress(report, (yield from count_documents(self.collection, {})) if report else 0)
        scan = Scan(self.collection, self._buckets(), self.spec.limits.bucket_upkeep_page)
        while buckets := (yield from scan.next()):
            for bucket in buckets:
                findings += yield from self._examine(bucket)
            done(len(buckets))
        return findings

    def _buckets(self) -> Raw:
        return {self.spec.names.start: {"$exists": True}}

    def _finding(self, key: Any, path: str, stored: Any, expected: Any) -> Finding:
        return Finding(self.layout.pattern, self.name, key, path, stored, expected)

    def _progress(self, report: Report | None, total: int) -> Callable[[int], None]:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if report:
                report(Progress(self.name, done, max(total, done)))

        return advance

    def _examine(self, bucket: Raw) -> Plan[list[Finding]]:
        """The findings in one bucket."""
        spec, names = self.spec, self.spec.names
        key = bucket["_id"]
        try:
            readings = readings_of(spec, bucket)
            start = start_of(spec, bucket)
        except DataError as error:
            return [self._finding(key, names.readings, str(error), "readings")]
        findings: list[Finding] = []
        if not readings:
            return [self._finding(key, names.readings, [], "no empty bucket")]
        for part, right in derived_parts(spec, start, readings).items():
            if part == names.stats:
                findings += self._statistics(bucket, right)
            elif not same(bucket.get(part), right):
                findings.append(self._finding(key, part, bucket.get(part), right))
        if spec.span is not None and spec.window(start) != start:
            findings.append(self._finding(key, names.start, moment(start), moment(spec.window(start))))
        for place in self._outside(bucket, start, readings):
            path = f"{names.readings}.{place}.{spec.time.stored}"
            findings.append(
                self._finding(key, path, readings[place][spec.time.stored], "a time in its window")
            )
        for place in (yield from self._repeated(bucket, readings)):
            assert spec.unique is not None
            path = f"{names.readings}.{place}.{spec.unique.stored}"
            findings.append(
                self._finding(key, path, readings[place].get(spec.unique.stored), "only once in its window")
            )
        if spec.span is None:
            findings += yield from self._overlap(bucket, start)
        return findings

    def _statistics(self, bucket: Raw, right: Raw) -> list[Finding]:
        findings = []
        stored = bucket.get(self.spec.names.stats)
        for stat in self.spec.stats:
            there, wanted = value_at(stored, stat.path), value_at(right, stat.path)
            for name in ("min", "max", "sum", *(("count",) if stat.optional else ())):
                one = there.get(name) if isinstance(there, dict) else None
                other = wanted.get(name) if isinstance(wanted, dict) else None
                if not same(one, other):
                    path = f"{self.spec.names.stats}.{stat.path}.{name}"
                    findings.append(self._finding(bucket["_id"], path, one, other))
        return findings

    def _outside(self, bucket: Raw, start: int, readings: list[Raw]) -> list[int]:
        """The positions of readings that belong into another window."""
        spec, time = self.spec, self.spec.time.stored
        if spec.span is not None:
            first, last = moment(start), moment(spec.last(start))
        else:
            following = bucket.get(RESERVED, {}).get("next")
            first = moment(start)
            last = following - dt.timedelta(milliseconds=1) if following else _LAST
        return [place for place, each in enumerate(readings) if not first <= each[time] <= last]

    def _repeated(self, bucket: Raw, readings: list[Raw]) -> Plan[list[int]]:
        """The positions of readings that the window has elsewhere, or earlier in the same bucket."""
        unique = self.spec.unique
        if unique is None:
            return []
        known: set[Any] = set()
        sequence = bucket.get(RESERVED, {}).get("sequence") or 0
        if sequence:
            others = yield from find(
                self.collection,
                {
                    **self.spec.key_filter([bucket.get(name) for name in self.spec.key_names]),
                    self.spec.names.start: {"$eq": bucket[self.spec.names.start]},
                    "$or": [{SEQUENCE: {"$exists": False}}, {SEQUENCE: {"$lt": sequence}}],
                },
            )
            for other in others:
                known |= {frozen(each.get(unique.stored)) for each in readings_of(self.spec, other)}
        places = []
        for place, each in enumerate(readings):
            value = each.get(unique.stored)
            if value is None:
                continue
            if frozen(value) in known:
                places.append(place)
            known.add(frozen(value))
        return places

    def _overlap(self, bucket: Raw, start: int) -> Plan[list[Finding]]:
        """Whether a window without a span ends where the next one begins."""
        names = self.spec.names
        after = yield from find(
            self.collection,
            {
                **self.spec.key_filter([bucket.get(name) for name in self.spec.key_names]),
                names.start: {"$gt": moment(start)},
            },
            {names.start: 1},
            sort=[(names.start, 1)],
            limit=1,
        )
        following = bucket.get(RESERVED, {}).get("next")
        if not after or (following is not None and following <= after[0][names.start]):
            return []
        return [self._finding(bucket["_id"], NEXT, following, after[0][names.start])]

    # -- repair ---------------------------------------------------------------------------

    def repair(self, server: Capabilities, report: Report | None) -> Plan[int]:
        """Mend what `verify` finds; how many documents were mended."""
        mended = yield from Adoption(self.layout).adopt(server, report)
        scan = Scan(self.collection, self._buckets(), self.spec.limits.bucket_upkeep_page)
        while buckets := (yield from scan.next()):
            for bucket in buckets:
                if (yield from self._examine(bucket)):
                    mended += yield from self._mend(bucket["_id"], server)
        return mended

    def _mend(self, key: Any, server: Capabilities) -> Plan[bool]:
        """Make one bucket what its readings say; readings of other windows move there."""
        spec = self.spec
        for _ in range(spec.limits.bucket_upkeep_attempts_max):
            bucket = yield from find_one(self.collection, {"_id": {"$eq": key}})
            if bucket is None:
                return True
            findings = yield from self._examine(bucket)
            if not findings:
                return True
            try:
                readings = readings_of(spec, bucket)
                start = start_of(spec, bucket)
            except DataError as error:
                log.warning("%s", error)
                return False
            overlap = next((each for each in findings if each.path == NEXT), None)
            if overlap is not None:
                sets = {"$set": {NEXT: overlap.expected}}
                yield from update_one(self.collection, guard(spec, bucket), sets)
                continue
            astray = set(self._outside(bucket, start, readings))
            if spec.span is not None and spec.window(start) != start:
                astray = set(range(len(readings)))
            surplus = set((yield from self._repeated(bucket, readings)))
            opened = Opened(bucket, readings, range(len(readings)), spec.series_of(bucket))
            try:
                if (yield from self.layout.changer.sort_out(opened, astray - surplus, surplus, server)):
                    return True
            except UsageError as error:
                if error.code != "transactions-unavailable":
                    raise
                log.warning("%s: bucket %r has readings of other windows: %s", self.name, key, error)
                return False
        return False

    # -- rebuild --------------------------------------------------------------------------

    def rebuild(self, server: Capabilities, report: Report | None) -> Plan[int]:
        """Adopt, mend and convert everything; how many buckets were visited."""
        yield from Adoption(self.layout).adopt(server, report)
        now = yield from server_time()
        total = (yield from count_documents(self.collection, {})) if report else 0
        done = self._progress(report, total)
        visited = 0
        scan = Scan(self.collection, self._buckets(), self.spec.limits.bucket_upkeep_page)
        while buckets := (yield from scan.next()):
            for bucket in buckets:
                if (yield from self._examine(bucket)):
                    yield from self._mend(bucket["_id"], server)
                yield from self._convert(bucket["_id"], bucket, now)
            visited += len(buckets)
            done(len(buckets))
        return visited

    def wanted_form(self, bucket: Raw, now: dt.datetime) -> Form:
        """How the declaration wants a bucket to be stored at this moment."""
        if self.spec.layout != "packed":
            return self.spec.layout
        return "packed" if self._is_closed(bucket, now) else "columns"

    def _is_closed(self, bucket: Raw, now: dt.datetime) -> bool:
        spec = self.spec
        if bucket.get(RESERVED, {}).get("closed") or bucket.get(RESERVED, {}).get("next"):
            return True
        if spec.span is None:
            return False
        # Later readings open a bucket of their own.
        grace = dt.timedelta(seconds=spec.limits.bucket_grace_seconds)
        return moment(start_of(spec, bucket) + spec.span) + grace <= now

    def _convert(self, key: Any, bucket: Raw | None, now: dt.datetime) -> Plan[bool]:
        """Store a bucket in the form that the declaration wants; whether it had another."""
        spec = self.spec
        for attempt in range(spec.limits.bucket_upkeep_attempts_max):
            if attempt or bucket is None:
                bucket = yield from find_one(self.collection, {"_id": {"$eq": key}})
            if bucket is None:
                return False
            try:
                form, wanted = form_of(spec, bucket), self.wanted_form(bucket, now)
                if form == wanted:
                    return False
                readings = readings_of(spec, bucket)
                if not readings:
                    return False
                update = rewritten(spec, bucket, _in_order(spec, readings), wanted)
            except TreadleError as error:
                log.warning("%s", error)
                return False
            result = yield from update_one(self.collection, guard(spec, bucket), update)
            if result.matched_count:
                return True
        return False

    def due(self, now: dt.datetime) -> Raw:
        """The filter for buckets that are not packed yet and whose windows are over."""
        spec = self.spec
        held: Raw = {f"{spec.names.readings}.{spec.time.stored}": {"$exists": True}}
        if spec.span is None:
            # With the start, so that the index of open buckets serves.
            return {**held, spec.names.start: {"$exists": True}, NEXT: {"$exists": True}}
        over = milliseconds(now) - spec.span - int(spec.limits.bucket_grace_seconds * 1000)
        return {**held, spec.names.start: {"$lte": moment(over)}}

    def compact(self, now: dt.datetime) -> Plan[int]:
        """Pack the buckets whose windows are over; how many there were."""
        packed = 0
        scan = Scan(self.collection, self.due(now), self.spec.limits.bucket_upkeep_page)
        while buckets := (yield from scan.next()):
            for bucket in buckets:
                packed += yield from self._convert(bucket["_id"], bucket, now)
        return packed


_LAST = dt.datetime.max.replace(tzinfo=dt.UTC)


def _in_order(spec: Spec, readings: list[Raw]) -> list[Raw]:
    """Readings by time: what is packed is smaller then, and quicker to read."""
    return sorted(readings, key=lambda each: each[spec.time.stored])


def server_time() -> Plan[dt.datetime]:
    """The server's clock."""
    reply = yield from database_command({"hello": 1}, writes=False, admin=True)
    now: dt.datetime = reply["localTime"]
    return now if now.tzinfo else now.replace(tzinfo=dt.UTC)
