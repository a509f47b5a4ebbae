"""Writing: new readings into the buckets of their own windows, one update per bucket.

The key of a bucket is (series, start of its window, sequence number), and a
unique index holds it. Several readings for a window of which this process has
written nothing are tried as a new bucket. An append is one upsert whose filter says that there is
room. Where it meets a bucket that is full, packed or of other metadata, the
upsert collides with the index; then the window is read and the readings go on
in whichever bucket has room, or in the next number. Inside a transaction an
error would end everything, so there the windows are read first.

Windows without a span are those that `_treadle.next` says: a full bucket
names, once, where its successor starts, so that all writers open the same.

With `unique`, windows are always read first, and each append also says that
its bucket has none of the new values. A full bucket is closed for good before
the next one is opened; so a value cannot slip into one while it is looked for
in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import bson
from bson import ObjectId
from pymongo import UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure

from treadle.bson_types import CODEC_OPTIONS, RESERVED
from treadle.buckets.contents import (
    Form,
    aggregate_of,
    columns_of_batch,
    is_number,
    readings_of,
    stats_of,
    values_of,
)
from treadle.buckets.spec import CLOSED, NEXT, SEQUENCE, TIME_BITS, YEAR_ONE, Spec, milliseconds, moment
from treadle.errors import DataError, UsageError
from treadle.plan import (
    Plan,
    Raw,
    aggregate,
    bulk_write,
    find,
    find_one_and_update,
    insert_many,
    update_one,
    wait,
)

ATTEMPTS_MAX = 500
PAUSE_SECONDS = 0.001
PAUSE_MAX_SECONDS = 0.05
REMEMBERED_MAX = 20_000
OPERATIONS_MAX = 5_000
FRESH_MIN = 8
# A window may have many buckets; room is in the last ones.
LOOKED_AT_MAX = 8
BATCH_BYTES_MAX = 8 * 1024 * 1024
DUPLICATE_KEY = 11000
# An id from its bytes without the checks of its constructor, as unpickling does.
_new_id = ObjectId.__new__
TOO_LARGE = frozenset({10334, 17419, 17420})


@dataclass(slots=True)
class Batch:
    """Readings for one bucket: inner parts, in the order of arrival, and where they are to go."""

    key: tuple[Any, ...]
    outer: tuple[Any, ...]
    start: int | None
    readings: list[Raw]
    sequence: int = 0
    form: Form = "rows"
    # The start of the successor, where the window says so; None if it is open.
    next: int | None = None
    # Positions in what the caller gave, for `unique`.
    places: list[int] = field(default_factory=list)
    # The readings' times in milliseconds, where they are known already.
    counts: list[int] = field(default_factory=list)
    # Whether to try it as a new bucket first, which costs the server less than an upsert.
    fresh: bool = False
    # How often a bucket would have become too large for the server with these.
    crowded: int = 0


class Writer:
    """Appends the readings of one model; remembers which bucket of a window was the last."""

    def __init__(self, spec: Spec, collection: str) -> None:
        self.spec = spec
        self.collection = collection
        self.form: Form = "rows" if spec.layout == "rows" else "columns"
        self._sequences: dict[Any, int] = {}

    # -- grouping -----------------------------------------------------------------------

    def group(
        self, raws: Sequence[Raw], places: Iterable[int] | None = None, documents: Sequence[Any] | None = None
    ) -> list[Batch]:
        """The readings by bucket; takes the raw ones over, and gives `documents` their derived ids."""
        spec = self.spec
        if documents is not None and spec.one_key and spec.unique is None:
            return self._group_one_key(raws, documents)
        time, names, span, origin = spec.time.stored, spec.outer_names, spec.span, spec.origin
        drop_id, only = not spec.stores_id, names[0] if len(names) == 1 else None
        tracked = spec.unique is not None or places is not None
        # One loop for everything: bulk inserts live by it.
        groups: dict[Any, tuple[Batch, Callable[[Raw], None], int]] = {}
        for place, raw in zip(places or range(len(raws)), raws, strict=False):
            if drop_id:
                del raw["_id"]
            outer = (raw.pop(only),) if only is not None else tuple([raw.pop(name) for name in names])
            count = round(raw[time].timestamp() * 1000)
            start = None if span is None else count - (count - origin) % span
            known: Any = (outer, start)
            try:
                group = groups.get(known)
            except TypeError:
                known = (bson.encode({"": outer}, codec_options=CODEC_OPTIONS), start)
                group = groups.get(known)
            if group is None:
                key = outer[: len(spec.keys)]
                batch = Batch(key, outer, start, [], form=self.form)
                first = (spec.series(key) << TIME_BITS) + YEAR_ONE if drop_id else 0
                group = groups[known] = batch, batch.readings.append, first
            group[1](raw)
            if tracked:
                group[0].places.append(place)
            if documents is not None and drop_id:
                identity = _new_id(ObjectId)
                identity.__setstate__((group[2] + count).to_bytes(12, "big"))
                documents[place].__dict__["id"] = identity
        return [group[0] for group in groups.values()]

    def _group_one_key(self, raws: Sequence[Raw], documents: Sequence[Any]) -> list[Batch]:
        """The same for the ordinary declaration: one plain key, windows with a span, derived ids."""
        spec = self.spec
        time, only, span, origin = spec.time.stored, spec.outer_names[0], spec.span, spec.origin
        assert span is not None
        groups: dict[Any, tuple[Callable[[Raw], None], Callable[[int], None], int, Batch]] = {}
        last, count, start = None, 0, 0
        for document, raw in zip(documents, raws, strict=True):
            del raw["_id"]
            key, when = raw.pop(only), raw[time]
            if when != last:
                # Readings of many series often have the same time.
                last, count = when, round(when.timestamp() * 1000)
                start = count - (count - origin) % span
            group = groups.get((key, start))
            if group is None:
                batch = Batch((key,), (key,), start, [], form=self.form)
                first = (spec.series((key,)) << TIME_BITS) + YEAR_ONE
                group = groups[key, start] = batch.readings.append, batch.counts.append, first, batch
            group[0](raw)
            group[1](count)
            identity = _new_id(ObjectId)
            identity.__setstate__((group[2] + count).to_bytes(12, "big"))
            document.__dict__["id"] = identity
        return [group[3] for group in groups.values()]

    # -- appending ----------------------------------------------------------------------

    def append(self, batches: Sequence[Batch], *, careful: bool) -> Plan[list[int]]:
        """Store the readings; the positions of those that were there already, under `unique`.

        `careful` reads the windows before it writes, as a transaction needs.
        """
        spec = self.spec
        duplicates: list[int] = []
        careful = careful or spec.unique is not None or spec.span is None
        pending: list[Batch] = []
        located: list[Batch] = []
        for batch in split_large(batches):
            if careful or (spec.limit is not None and len(batch.readings) > spec.limit):
                pending.append(batch)
            else:
                located.append(self._guess(batch))
        if any(batch.fresh for batch in located):
            located = yield from self._write_fresh(located)
        pause = PAUSE_SECONDS
        for attempt in range(ATTEMPTS_MAX):
            later: list[Batch] = []
            for batch in pending:
                found, rest = yield from self.locate(batch, duplicates)
                located += found
                later += rest
            failed = yield from self.write(located)
            pending, located = [*failed, *later], []
            if not pending:
                return duplicates
            if failed and attempt > 2:
                # Others were quicker; each time one of them got on.
                yield from wait(pause)
                pause = min(PAUSE_MAX_SECONDS, pause * 1.5)
        raise DataError(
            f"readings of {spec.label} found no bucket in {ATTEMPTS_MAX} attempts; "
            "run verify, and setup() if the unique index is missing",
            code="bucket-contended",
        )

    def _guess(self, batch: Batch) -> Batch:
        """Aim at the last bucket that this process knows of the window; at a new one if it knows none."""
        try:
            known = self._sequences.get((batch.outer, batch.start))
        except TypeError:
            return batch
        batch.sequence = known or 0
        batch.fresh = known is None and len(batch.readings) >= FRESH_MIN
        if known is None:
            self.remember(batch)
        return batch

    def _write_fresh(self, batches: Sequence[Batch]) -> Plan[list[Batch]]:
        """Insert what are probably new buckets; the batches that are still to be appended."""
        rest = [batch for batch in batches if not batch.fresh]
        fresh = [batch for batch in batches if batch.fresh]
        for at in range(0, len(fresh), OPERATIONS_MAX):
            part = fresh[at : at + OPERATIONS_MAX]
            try:
                yield from insert_many(
                    self.collection, [self._bucket(batch) for batch in part], ordered=False
                )
            except BulkWriteError as error:
                refused = (error.details or {}).get("writeErrors", [])
                if not refused or not all(self.answerable(each["code"], each) for each in refused):
                    raise
                # Another process opened it; the ordinary append comes next.
                rest += [part[each["index"]] for each in refused]
        return rest

    def _bucket(self, batch: Batch) -> Raw:
        """A whole new bucket, the first of its window."""
        spec, names = self.spec, self.spec.names
        assert batch.start is not None
        held: Any = batch.readings
        if batch.form != "rows":
            held = columns_of_batch(spec, batch.start, batch.readings, batch.counts)
        stats = stats_of(spec, batch.readings)
        return {
            **dict(zip(spec.outer_names, batch.outer, strict=True)),
            names.start: moment(batch.start),
            names.end: moment(spec.last(batch.start)),
            names.count: len(batch.readings),
            names.readings: held,
            **({names.stats: stats} if stats else {}),
        }

    def write(self, batches: Sequence[Batch]) -> Plan[list[Batch]]:
        """Perform the appends; those that found no room."""
        failed: list[Batch] = []
        if not batches:
            return failed
        if len(batches) == 1:
            filter, update = self._operation(batches[0])
            try:
                yield from update_one(self.collection, filter, update, upsert=True)
            except OperationFailure as error:
                if not self.answerable(error.code, error.details):
                    raise
                self._noted(batches[0], error.code)
                failed.append(batches[0])
            return failed
        for at in range(0, len(batches), OPERATIONS_MAX):
            part = batches[at : at + OPERATIONS_MAX]
            operations = [UpdateOne(*self._operation(batch), upsert=True) for batch in part]
            try:
                yield from bulk_write(self.collection, operations, ordered=False)
            except BulkWriteError as error:
                refused = (error.details or {}).get("writeErrors", [])
                if not refused or not all(self.answerable(each["code"], each) for each in refused):
                    raise
                for each in refused:
                    self._noted(part[each["index"]], each["code"])
                    failed.append(part[each["index"]])
        return failed

    def answerable(self, code: Any, details: Any) -> bool:
        """Whether an append only met a bucket without room."""
        if code in TOO_LARGE:
            return True
        pattern = (details or {}).get("keyPattern") or {}
        return bool(code == DUPLICATE_KEY and SEQUENCE in pattern)

    def _noted(self, batch: Batch, code: Any) -> None:
        """A bucket that would become too large is as good as full."""
        if code in TOO_LARGE:
            if len(batch.readings) == 1 and batch.crowded:
                raise UsageError(
                    f"a reading of {self.spec.label} is too large even for a bucket of its own",
                    code="document-too-large",
                )
            batch.crowded += 1

    def remember(self, batch: Batch) -> None:
        if len(self._sequences) >= REMEMBERED_MAX:
            self._sequences.clear()
        try:
            self._sequences[batch.outer, batch.start] = batch.sequence
        except TypeError:
            return

    # -- one append ---------------------------------------------------------------------

    def _operation(self, batch: Batch) -> tuple[Raw, Raw]:
        """Filter and update of one append."""
        spec, names = self.spec, self.spec.names
        assert batch.start is not None
        readings, start = batch.readings, batch.start
        number = len(readings)
        filter: Raw = {
            name: {"$eq": value} for name, value in zip(spec.outer_names, batch.outer, strict=True)
        }
        filter[names.start] = {"$eq": moment(start)}
        filter[SEQUENCE] = {"$eq": batch.sequence} if batch.sequence else {"$exists": False}
        if spec.limit is not None:
            filter[names.count] = {"$lte": spec.limit - number}
        time = spec.time.stored
        if batch.form == "rows":
            filter[names.readings] = {"$type": "array"}
            push: Raw = {names.readings: {"$each": readings}}
        else:
            filter[f"{names.readings}.{time}"] = {"$type": "array"}
            held = columns_of_batch(spec, start, readings, batch.counts)
            push = {f"{names.readings}.{name}": {"$each": values} for name, values in held.items()}
        update: Raw = {"$push": push, "$inc": {names.count: number}}
        fresh: Raw = {}
        if spec.span is not None:
            fresh[names.end] = moment(spec.last(start))
        else:
            latest = max(reading[time] for reading in readings)
            update["$max"] = {names.end: latest}
            # Two values, or an upsert would store the one.
            filter[NEXT] = {"$exists": False} if batch.next is None else {"$in": [None, moment(batch.next)]}
            if batch.next is not None:
                fresh[NEXT] = moment(batch.next)
        if fresh:
            update["$setOnInsert"] = fresh
        if spec.unique is not None:
            self._guard_unique(filter, batch)
        self._add_statistics(update, readings)
        return filter, update

    def _add_statistics(self, update: Raw, readings: Sequence[Raw]) -> None:
        prefix = self.spec.names.stats
        for stat in self.spec.stats:
            values = values_of(stat, readings)
            if not values:
                continue
            low, high, total = aggregate_of(values)
            if low is None:
                continue
            path = f"{prefix}.{stat.path}"
            update.setdefault("$min", {})[f"{path}.min"] = low
            update.setdefault("$max", {})[f"{path}.max"] = high
            update["$inc"][f"{path}.sum"] = total
            if stat.optional:
                update["$inc"][f"{path}.count"] = len(values)

    def _guard_unique(self, filter: Raw, batch: Batch) -> None:
        unique = self.spec.unique
        assert unique is not None
        assert batch.start is not None
        filter[CLOSED] = {"$exists": False}
        values = [each.get(unique.stored) for each in batch.readings]
        present = [value for value in values if value is not None]
        if not present:
            return
        if batch.form == "columns" and unique is self.spec.time:
            present = [milliseconds(value) - batch.start for value in present]
        path = f"{self.spec.names.readings}.{unique.stored}"
        # Beside the condition on its type, if the field is the time.
        filter.setdefault("$and", []).append({path: {"$nin": present}})

    # -- finding the bucket -------------------------------------------------------------

    def locate(self, batch: Batch, duplicates: list[int]) -> Plan[tuple[list[Batch], list[Batch]]]:
        """Where the readings of one batch go now, and those that must wait for that."""
        if self.spec.span is None:
            return (yield from self._locate_by_limit(batch, duplicates))
        window = yield from self._window(batch, batch.start)
        if self.spec.unique is not None:
            if not (yield from self._drop_duplicates(batch, window, duplicates)):
                return [], []
            if (yield from self._close_full(window)):
                return [], [batch]
        return self._place(batch, window, batch.start, None), []

    def _window(self, batch: Batch, start: int | None) -> Plan[list[Raw]]:
        """The buckets of a window, the last one first, without their readings unless they are needed."""
        spec, names = self.spec, self.spec.names
        shown: Raw = {
            "sequence": f"${SEQUENCE}", "count": f"${names.count}", "next": f"${NEXT}",
            "closed": f"${CLOSED}", "form": {"$type": f"${names.readings}"}, "end": f"${names.end}",
            "start": f"${names.start}",
        }  # fmt: skip
        shown |= {f"outer{number}": f"${name}" for number, name in enumerate(spec.outer_names)}
        if spec.unique is not None:
            shown["bucket"] = "$$ROOT"
        assert start is not None
        match = {**spec.key_filter(batch.key), names.start: {"$eq": moment(start)}}
        # What is unique must be looked for in all of them.
        few: list[Raw] = [] if spec.unique is not None else [{"$limit": LOOKED_AT_MAX}]
        stages = [{"$match": match}, {"$sort": {SEQUENCE: -1}}, *few, {"$project": shown}]
        return (yield from aggregate(self.collection, stages))

    def _fits(self, batch: Batch, bucket: Raw) -> bool:
        """Whether readings can be added to a bucket at all."""
        if bucket["form"] not in ("array", "object") or bucket.get("closed"):
            return False
        return all(_equal(bucket.get(f"outer{number}"), value) for number, value in enumerate(batch.outer))

    def _place(
        self, batch: Batch, window: Sequence[Raw], start: int | None, following: int | None
    ) -> list[Batch]:
        """Fill a bucket that has room, then open new ones."""
        limit = self.spec.limit
        target = self._with_room(batch, window)
        highest = max((bucket.get("sequence") or 0 for bucket in window), default=-1)
        placed: list[Batch] = []
        at = 0
        total = len(batch.readings)
        if target is not None:
            at = total if limit is None else min(total, limit - int(target["count"]))
            form: Form = "rows" if target["form"] == "array" else "columns"
            part = _part(batch, 0, at)
            placed.append(
                replace(part, start=start, sequence=target.get("sequence") or 0, form=form, next=following)
            )
        size = limit or max(total, 1)
        if batch.crowded:
            size = max(1, min(size, total // 2))
        while at < total:
            highest += 1
            part = _part(batch, at, at + size)
            placed.append(replace(part, start=start, sequence=highest, form=self.form, next=following))
            at += size
        for part in placed:
            self.remember(part)
        return placed

    def _with_room(self, batch: Batch, window: Sequence[Raw]) -> Raw | None:
        limit = self.spec.limit
        if batch.crowded:
            return None
        for bucket in window:
            if self._fits(batch, bucket) and (limit is None or int(bucket["count"]) < limit):
                return bucket
        return None

    # -- windows that end with their limit --------------------------------------------------

    def _locate_by_limit(self, batch: Batch, duplicates: list[int]) -> Plan[tuple[list[Batch], list[Batch]]]:
        """The window of the earliest reading; the readings beyond it wait."""
        spec, names, time = self.spec, self.spec.names, self.spec.time.stored
        order = sorted(range(len(batch.readings)), key=lambda place: batch.readings[place][time])
        batch = replace(
            batch,
            readings=[batch.readings[place] for place in order],
            counts=[],
            places=[batch.places[place] for place in order] if batch.places else [],
        )
        first = milliseconds(batch.readings[0][time])
        before = yield from self._neighbour(batch, {"$lte": moment(first)}, -1)
        if before is None or (before.get("next") is not None and milliseconds(before["next"]) <= first):
            start = first if before is None else milliseconds(before["next"])
            after = yield from self._neighbour(batch, {"$gt": moment(start)}, 1)
            window: list[Raw] = []
            following = None if after is None else milliseconds(after[names.start])
        else:
            start = milliseconds(before[names.start])
            window = yield from self._window(batch, start)
            # As the window is now, not as it was a moment ago.
            named = next((each["next"] for each in window if each.get("next") is not None), None)
            following = None if named is None else milliseconds(named)
            if not window or (following is not None and following <= first):
                return [], [batch]
        now, later = _cut(batch, following, time)
        if spec.unique is not None and window:
            if not (yield from self._drop_duplicates(now, window, duplicates)):
                return [], later
            if (yield from self._close_full(window)):
                return [], [now, *later]
        elif spec.unique is not None:
            _drop_repeated(spec, now, duplicates)
        target = self._with_room(now, window)
        if window and following is None and target is None and not now.crowded:
            yield from self._name_successor(window, first)
            return [], [now, *later]
        if following is None and spec.limit is not None:
            # Only as many as fit; what follows opens the next window.
            room = spec.limit - (0 if target is None else int(target["count"]))
            rest = _part(now, room, len(now.readings))
            now = _part(now, 0, room)
            later = [rest, *later] if rest.readings else later
        return self._place(now, window, start, following), later

    def _neighbour(self, batch: Batch, range: Raw, direction: int) -> Plan[Raw | None]:
        names = self.spec.names
        found = yield from find(
            self.collection,
            {**self.spec.key_filter(batch.key), names.start: range},
            {names.start: 1, NEXT: 1},
            sort=[(names.start, direction), (SEQUENCE, direction)],
            limit=1,
        )
        if not found:
            return None
        return {**found[0], "next": found[0].get(RESERVED, {}).get("next")}

    def _name_successor(self, window: Sequence[Raw], first: int) -> Plan[None]:
        """Say where the window after a full one starts; whoever is first decides for all."""
        last = max(milliseconds(bucket["end"]) for bucket in window)
        named = moment(max(first, last + 1))
        yield from find_one_and_update(
            self.collection,
            {"_id": {"$in": [bucket["_id"] for bucket in window]}, NEXT: {"$exists": False}},
            {"$set": {NEXT: named}},
            sort=[(SEQUENCE, -1)],
        )

    # -- unique -----------------------------------------------------------------------------

    def _drop_duplicates(self, batch: Batch, window: Sequence[Raw], duplicates: list[int]) -> Plan[bool]:
        """Take out what the window holds already; whether anything is left."""
        unique = self.spec.unique
        assert unique is not None
        known = {
            frozen(reading.get(unique.stored))
            for bucket in window
            for reading in readings_of(self.spec, bucket["bucket"])
            if reading.get(unique.stored) is not None
        }
        _drop_repeated(self.spec, batch, duplicates, known)
        return bool(batch.readings)
        yield  # pragma: no cover (a plan, for the sake of its callers)

    def _close_full(self, window: Sequence[Raw]) -> Plan[bool]:
        """Close the last bucket of a window if it is full; whether it had to be."""
        if not window or self.spec.limit is None or self.spec.span is None:
            return False
        last = window[0]
        if last.get("closed") or int(last["count"]) < self.spec.limit:
            return False
        count = self.spec.names.count
        full = {"_id": last["_id"], count: {"$gte": self.spec.limit}}
        yield from update_one(self.collection, full, {"$set": {CLOSED: True}})
        return True


def _equal(one: Any, other: Any) -> bool:
    """Equality as the server's `$eq` has it."""
    return one is other or frozen(one) == frozen(other)


def _part(batch: Batch, begin: int, end: int) -> Batch:
    return replace(
        batch,
        readings=batch.readings[begin:end],
        places=batch.places[begin:end],
        counts=batch.counts[begin:end],
    )


def frozen(value: Any) -> Any:
    """A value that can stand in a set, with equal numbers equal."""
    if is_number(value):
        return value.to_decimal() if hasattr(value, "to_decimal") else value
    return bson.encode({"": value}, codec_options=CODEC_OPTIONS)


def _drop_repeated(spec: Spec, batch: Batch, duplicates: list[int], known: set[Any] | None = None) -> None:
    assert spec.unique is not None
    seen = set() if known is None else known
    readings, places = [], []
    for reading, place in zip(batch.readings, batch.places, strict=True):
        value = reading.get(spec.unique.stored)
        if value is not None and frozen(value) in seen:
            duplicates.append(place)
            continue
        if value is not None:
            seen.add(frozen(value))
        readings.append(reading)
        places.append(place)
    batch.readings, batch.places, batch.counts = readings, places, []


def _cut(batch: Batch, following: int | None, time: str) -> tuple[Batch, list[Batch]]:
    """The readings before the next window, and the others; the readings are in order."""
    if following is None:
        return batch, []
    edge = moment(following)
    at = next((place for place, each in enumerate(batch.readings) if each[time] >= edge), len(batch.readings))
    if at == len(batch.readings):
        return batch, []
    return _part(batch, 0, at), [_part(batch, at, len(batch.readings))]


def split_large(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Batches that one command can carry; the driver refuses larger ones."""
    for batch in batches:
        if not batch.readings:
            continue
        sample = len(bson.encode(batch.readings[0], codec_options=CODEC_OPTIONS))
        if sample * len(batch.readings) < BATCH_BYTES_MAX // 16:
            yield batch
            continue
        begin = size = 0
        for place, reading in enumerate(batch.readings):
            size += len(bson.encode(reading, codec_options=CODEC_OPTIONS)) + 8
            if size > BATCH_BYTES_MAX and place > begin:
                yield _part(batch, begin, place)
                begin, size = place, 0
        yield _part(batch, begin, len(batch.readings))
