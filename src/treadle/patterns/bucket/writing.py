"""Appends: new readings into the buckets of their windows.

The key of a bucket is (series, start of the window, sequence number), and a
unique index holds it; without a span, the window is the whole series and the
key is (series, sequence number).

An append is one transaction. It reads the buckets of the windows, adds to the
last one of each that has room, and makes new ones. What it read cannot change
before it commits, because it writes each bucket that it decided on: a bucket
it adds to, the index entry of a bucket it makes, and under `unique` the first
bucket of the window, in the collection or in the archive.

Readings for a single bucket are tried as one upsert first, whose filter says
that there is room. Where there is none it collides with the index, and the
transaction follows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pymongo import UpdateOne
from pymongo.errors import OperationFailure

from treadle.engine.salvage import attempting
from treadle.errors import DataError, PartlyDone, TreadleError
from treadle.graph.rule import REVISION
from treadle.model.bson_types import RESERVED
from treadle.patterns.bucket.bucket_document import aggregate_of, derived_parts, in_64_bits, values_of
from treadle.patterns.bucket.grouping import BUCKET_BYTES_MAX, WindowBatch, count_fitting, cut
from treadle.patterns.bucket.spec import LIMIT_MAX, SEQUENCE, Spec, milliseconds, to_datetime
from treadle.plan import (
    Plan,
    Raw,
    aggregate,
    bulk_write,
    by_id,
    insert_many,
    is_inside,
    transact,
    update_many,
    update_one,
    wait,
)
from treadle.plan.server_errors import (
    DUPLICATE_KEY,
    TOO_LARGE,
    is_about_one_document,
    is_increment_overflow,
    refusals,
    surely_not_committed,
    translate,
)
from treadle.query.keys import freeze

# Buckets, and bytes of readings, that are written in one transaction.
BUCKET_TRANSACTION_MAX = 1_000
BUCKET_TRANSACTION_BYTES_MAX = 32 * 2**20
# Attempts at a transaction that collides with the index, and the pause between two of them.
BUCKET_ATTEMPTS_MAX = 100
BUCKET_PAUSE_SECONDS = 0.01

R = TypeVar("R")


@dataclass(slots=True)
class StoredBucket:
    """What an append has to know of a bucket."""

    collection: str
    identity: Any
    # Frozen key and metadata.
    values: Any
    sequence: int
    # Whether readings can be added: it is not archived, and neither its array nor its count is damaged.
    is_open: bool
    count: int
    bytes: int
    # The stored sum of each of the statistics.
    sums: list[Any]
    unique_values: list[Any]


@dataclass(slots=True)
class Window:
    """The buckets of one window, in the order of their sequence numbers; changes as readings are placed."""

    buckets: list[StoredBucket] = field(default_factory=list)
    sequence: int = -1
    unique_values: set[Any] = field(default_factory=set)
    is_guarded: bool = False

    def add(self, bucket: StoredBucket) -> None:
        self.buckets.append(bucket)
        self.sequence = max(self.sequence, bucket.sequence)
        self.unique_values.update(freeze(value) for value in bucket.unique_values)

    def open_bucket(self, values: Any) -> StoredBucket | None:
        """Return the last bucket with this key and metadata to which readings can be added."""
        return next((each for each in reversed(self.buckets) if each.is_open and each.values == values), None)


class HeldBuckets:
    """The buckets that an attempt has read; the next one writes them first, so that other writers wait."""

    def __init__(self) -> None:
        self._ids: dict[str, list[Any]] = {}

    def note(self, windows: Iterable[Window]) -> None:
        self._ids.clear()
        for bucket in (each for window in windows for each in window.buckets if each.is_open):
            self._ids.setdefault(bucket.collection, []).append(bucket.identity)

    def write(self) -> Plan[None]:
        for collection, ids in self._ids.items():
            yield from update_many(collection, {"_id": {"$in": ids}}, {"$inc": {REVISION: 1}})


class Writer:
    """Appends the readings of one model."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def append(self, batches: Sequence[WindowBatch]) -> Plan[list[int]]:
        """Store readings, all or none of them. Returns the positions of those that `unique` knows already.

        More buckets than one transaction holds are stored in several; then
        `PartlyDone` says how many readings were stored before one was refused.
        """
        inside = yield from is_inside()
        may_upsert = len(batches) == 1 and not inside and self._may_upsert(batches[0])
        if may_upsert and (yield from self._upsert(batches[0])):
            return []
        duplicates: list[int] = []
        done: list[int] = []
        for part in _parts(batches):
            plan = self.append_inside(part) if inside else self._append_part(part)
            duplicates += yield from partly(self.spec.label, done, plan)
            if not inside:
                done.append(sum(len(batch.readings) for batch in part))
        return duplicates

    # -- one upsert -----------------------------------------------------------------------

    def _may_upsert(self, batch: WindowBatch) -> bool:
        spec = self.spec
        fits = len(batch.readings) <= (spec.limit or LIMIT_MAX) and sum(batch.sizes) <= BUCKET_BYTES_MAX
        # Without a span, the upsert would have to walk through all full buckets of the series.
        return fits and spec.unique is None and spec.span is not None

    def _upsert(self, batch: WindowBatch) -> Plan[bool]:
        """Add readings to a bucket of their window with room, or open its first. Returns whether it could."""
        spec, names = self.spec, self.spec.names
        assert batch.start is not None
        filter: Raw = {
            name: {"$eq": value} for name, value in zip(spec.series_fields, batch.values, strict=True)
        }
        filter[names.start] = {"$eq": to_datetime(batch.start)}
        if spec.limit is not None:
            filter[names.count] = {"$lte": spec.limit - len(batch.readings)}
        # A damaged bucket is passed by.
        filter[names.readings] = {"$type": "array"}
        update = {
            **append_update(spec, batch.readings),
            "$setOnInsert": {names.end: to_datetime(spec.last(batch.start))},
        }
        try:
            yield from update_one(spec.collection, filter, update, upsert=True)
        except OperationFailure as error:
            (refusal,) = refusals(error)
            no_room = refusal.get("code") in TOO_LARGE or is_increment_overflow(refusal)
            if not no_room and not is_bucket_taken(error):
                raise
            return False
        return True

    # -- one transaction ------------------------------------------------------------------

    def _append_part(self, batches: Sequence[WindowBatch]) -> Plan[list[int]]:
        held = HeldBuckets()
        body = attempting(lambda: self.append_inside(batches, held), held.write, 1)
        for number in range(BUCKET_ATTEMPTS_MAX):
            try:
                return (yield from transact(body))
            except OperationFailure as error:
                if not is_bucket_taken(error):
                    raise
            # Another writer opened the same bucket first.
            if number:
                yield from wait(BUCKET_PAUSE_SECONDS)
        raise DataError(
            f"readings of {self.spec.label} found no bucket in {BUCKET_ATTEMPTS_MAX} attempts; "
            "run verify, and setup() if the unique index is missing",
            code="bucket-contended",
        )

    def append_inside(
        self, batches: Sequence[WindowBatch], held: HeldBuckets | None = None
    ) -> Plan[list[int]]:
        """Store readings within a transaction that is open. Notes in `held` the buckets that it read."""
        windows = yield from self._windows(batches)
        if held is not None:
            held.note(windows.values())
        return (yield from Append(self.spec, windows).write(batches))

    def _windows(self, batches: Sequence[WindowBatch]) -> Plan[dict[Any, Window]]:
        """Return the windows of batches, with their buckets."""
        spec = self.spec
        windows = {window_name(spec, batch.key, batch.start): Window() for batch in batches}
        needs_archive = spec.unique is not None or spec.span is None
        for collection in spec.collections if needs_archive else (spec.collection,):
            for stages in self._searches(batches):
                for row in (yield from aggregate(collection, [*stages, {"$project": self._projection()}])):
                    key, start = row["values"][: len(spec.keys)], row["start"]
                    name = window_name(spec, key, None if spec.span is None else milliseconds(start))
                    if name in windows:
                        windows[name].add(self._bucket(collection, row))
        for window in windows.values():
            # Of two with one number, the one in the collection comes first.
            window.buckets.sort(key=lambda bucket: bucket.sequence)
        return windows

    def _searches(self, batches: Sequence[WindowBatch]) -> Iterator[list[Raw]]:
        """Yield the first stages of the queries that find the buckets of windows."""
        spec = self.spec
        if spec.span is not None:
            yield [{"$match": {"$or": window_conditions(spec, batches)}}]
            return
        for key in {freeze(batch.key): batch.key for batch in batches}.values():
            # Only the last bucket of a series can be open.
            yield [{"$match": spec.key_filter(key)}, {"$sort": {SEQUENCE: -1}}, {"$limit": 1}]

    def _projection(self) -> Raw:
        spec, names = self.spec, self.spec.names
        readings = f"${names.readings}"
        unique: Raw = {} if spec.unique is None else {"unique": f"{readings}.{spec.unique.stored}"}
        return {
            "values": [f"${name}" for name in spec.series_fields],
            "start": f"${names.start}",
            "sequence": f"${SEQUENCE}",
            "count": f"${names.count}",
            "array": {"$isArray": readings},
            "bytes": {"$bsonSize": "$$ROOT"},
            # Only the sums of whole numbers can need more than 64 bits.
            "sums": [f"${names.stats}.{each.path}.sum" if each.type is int else None for each in spec.stats],
            **unique,
        }

    def _bucket(self, collection: str, row: Raw) -> StoredBucket:
        sequence, count, unique_values = row.get("sequence"), row.get("count"), row.get("unique")
        undamaged = row["array"] and type(count) is int
        return StoredBucket(
            collection=collection,
            identity=row["_id"],
            values=freeze(row["values"]),
            sequence=sequence if isinstance(sequence, int) else 0,
            is_open=undamaged and collection == self.spec.collection,
            count=count if isinstance(count, int) else 0,
            bytes=row["bytes"],
            sums=row["sums"],
            unique_values=unique_values if isinstance(unique_values, list) else [],
        )


class Append:
    """One attempt to place readings into windows that were read in the same transaction."""

    def __init__(self, spec: Spec, windows: dict[Any, Window]) -> None:
        self.spec = spec
        self.windows = windows
        self.made: list[Raw] = []
        self.updates: dict[str, list[tuple[Any, Raw]]] = defaultdict(list)
        self.duplicates: list[int] = []

    def write(self, batches: Sequence[WindowBatch]) -> Plan[list[int]]:
        """Write the readings. Returns the positions of those that `unique` knows already."""
        for batch in batches:
            self._place(batch)
        for collection, updates in self.updates.items():
            # In one order, so that one of two writers of the same buckets fails at its first.
            updates.sort(key=lambda pair: repr(pair[0]))
            operations = [UpdateOne(by_id(identity), update) for identity, update in updates]
            yield from bulk_write(collection, operations, ordered=False)
        if self.made:
            yield from insert_many(self.spec.collection, self.made, ordered=False)
        return self.duplicates

    def _place(self, batch: WindowBatch) -> None:
        window = self.windows[window_name(self.spec, batch.key, batch.start)]
        readings, sizes = batch.readings, batch.sizes
        if self.spec.unique is not None:
            chosen = self._new_readings(batch, window)
            readings, sizes = [readings[at] for at in chosen], [sizes[at] for at in chosen]
        taken = 0
        bucket = window.open_bucket(freeze(list(batch.values)))
        if bucket is not None:
            most = (self.spec.limit or LIMIT_MAX) - bucket.count
            taken = count_fitting(sizes, 0, most, BUCKET_BYTES_MAX - bucket.bytes)
        if bucket is not None and taken:
            update = append_update(self.spec, readings[:taken], bucket)
            self.updates[bucket.collection].append((bucket.identity, update))
            bucket.count += taken
            bucket.bytes += sum(sizes[:taken])
        if readings and self.spec.unique is not None:
            self._guard(window, bucket if taken else None)
        for piece in cut(sizes, taken, self.spec.limit or LIMIT_MAX):
            window.sequence += 1
            self.made.append(self._new_bucket(batch, window.sequence, readings[piece]))

    def _new_readings(self, batch: WindowBatch, window: Window) -> list[int]:
        """Return which readings of a batch the window does not hold; the others are duplicates."""
        assert self.spec.unique is not None
        name, chosen = self.spec.unique.stored, list[int]()
        for number, reading in enumerate(batch.readings):
            value = freeze(reading.get(name))
            if value is not None and value in window.unique_values:
                self.duplicates.append(batch.positions[number])
                continue
            window.unique_values.add(value)
            chosen.append(number)
        return chosen

    def _guard(self, window: Window, written: StoredBucket | None) -> None:
        """Write the first bucket of a window, so that concurrent appends to the window conflict."""
        if window.buckets and window.buckets[0] is not written and not window.is_guarded:
            first = window.buckets[0]
            self.updates[first.collection].append((first.identity, {"$inc": {REVISION: 1}}))
            window.is_guarded = True

    def _new_bucket(self, batch: WindowBatch, sequence: int, readings: list[Raw]) -> Raw:
        parts = derived_parts(self.spec, batch.start or 0, readings)
        names = self.spec.names
        bucket = dict(zip(self.spec.series_fields, batch.values, strict=True))
        bucket |= {name: parts[name] for name in (names.start, names.end, names.count)}
        bucket[names.readings] = readings
        if parts.get(names.stats):
            bucket[names.stats] = parts[names.stats]
        if sequence:
            bucket[RESERVED] = {"sequence": sequence}
        return bucket


def append_update(spec: Spec, readings: Sequence[Raw], bucket: StoredBucket | None = None) -> Raw:
    """Return the update that adds readings to a bucket; with the bucket, its sums are kept in 64 bits."""
    names, time = spec.names, spec.time.stored
    increments: Raw = {names.count: len(readings)}
    least: Raw = {}
    greatest: Raw = {}
    if spec.span is None:
        least[names.start] = min(reading[time] for reading in readings)
        greatest[names.end] = max(reading[time] for reading in readings)
    for number, stat in enumerate(spec.stats):
        values = values_of(stat, readings)
        if not values:
            continue
        low, high, total = aggregate_of(values)
        if bucket is not None and isinstance(bucket.sums[number], int) and isinstance(total, int):
            bucket.sums[number] += total
            total = total if type(in_64_bits(bucket.sums[number])) is int else float(total)
        path = f"{names.stats}.{stat.path}"
        least[f"{path}.min"], greatest[f"{path}.max"], increments[f"{path}.sum"] = low, high, total
        if stat.optional:
            increments[f"{path}.count"] = len(values)
    update = {"$push": {names.readings: {"$each": list(readings)}}, "$inc": increments}
    return update | ({"$min": least} if least else {}) | ({"$max": greatest} if greatest else {})


def window_name(spec: Spec, key: Sequence[Any], start: int | None) -> Any:
    """Return what identifies a window; equal where the server takes all parts for equal."""
    return (start, *map(freeze, key))


def window_conditions(spec: Spec, batches: Sequence[WindowBatch]) -> list[Raw]:
    """Return conditions for the buckets of these windows and no others, as few as there can be.

    Windows that differ in one part alone, such as the series, share a condition.
    """
    names = (*spec.key_names, spec.names.start)
    windows = [(*batch.key, to_datetime(batch.start or 0)) for batch in batches]
    best: list[Raw] | None = None
    for place, name in enumerate(names):
        groups: dict[Any, tuple[Any, dict[Any, Any]]] = {}
        for window in windows:
            rest = (*window[:place], *window[place + 1 :])
            groups.setdefault(tuple(map(freeze, rest)), (rest, {}))[1][freeze(window[place])] = window[place]
        if best is None or len(groups) < len(best):
            others = (*names[:place], *names[place + 1 :])
            best = [
                {other: {"$eq": value} for other, value in zip(others, rest, strict=True)}
                | {name: {"$in": list(values.values())}}
                for rest, values in groups.values()
            ]
    assert best is not None
    return best


def _parts(batches: Sequence[WindowBatch]) -> Iterator[list[WindowBatch]]:
    """Yield as many batches as one transaction holds."""
    part: list[WindowBatch] = []
    room = BUCKET_TRANSACTION_BYTES_MAX
    for batch in batches:
        size = sum(batch.sizes)
        if part and (size > room or len(part) == BUCKET_TRANSACTION_MAX):
            yield part
            part, room = [], BUCKET_TRANSACTION_BYTES_MAX
        part.append(batch)
        room -= size
    if part:
        yield part


def is_bucket_taken(error: OperationFailure) -> bool:
    """Whether a write collided with the unique index of buckets, and with nothing else."""
    reasons = refusals(error)
    return bool(reasons) and all(
        each.get("code") == DUPLICATE_KEY and SEQUENCE in (each.get("keyPattern") or {}) for each in reasons
    )


def partly(label: str, done: Sequence[int], plan: Plan[R]) -> Plan[R]:
    """Perform a plan; where it is refused, say how many readings were written before it, if any."""
    try:
        return (yield from plan)
    except (TreadleError, OperationFailure) as error:
        refused = isinstance(error, TreadleError) or is_about_one_document(error)
        if not any(done) or not refused or not surely_not_committed(error):
            raise
        raise PartlyDone(label, sum(done), translate(error, label)) from error
