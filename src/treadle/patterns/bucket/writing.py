"""Writing: new readings into the buckets of their own windows, one update per bucket.

The key of a bucket is (series, start of its window, sequence number), and a
unique index holds it. Several readings for a window of which this process has
written nothing are tried as a new bucket. An append is one upsert whose filter
says that there is room. Where it meets a bucket that is full or of other
metadata, the upsert collides with the index; then the window is read
(`placing.py`) and the readings go on in whichever bucket has room, or in the
next number. Inside a transaction of the caller an error would end everything,
so there the windows are read first.

Many appends at once share one transaction, because the server commits once
then and not once per bucket. It reads the buckets first, and those with room
are then updated by their `_id` alone, which takes the server half as long as
with conditions. Nobody can fill one meanwhile without making the transaction
fail. It is tried once: whoever meets another writer or a full bucket there
writes one by one after all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from bson import ObjectId
from pymongo import UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure

from treadle.errors import DataError, PartlyDone, TreadleError, UsageError
from treadle.model.bson_types import RESERVED
from treadle.patterns.bucket.contents import (
    aggregate_of,
    column,
    start_of,
    stats_of,
    values_of,
)
from treadle.patterns.bucket.grouping import BUCKET_BYTES_MAX, Batch, part_of, split_large
from treadle.patterns.bucket.placing import Placer
from treadle.patterns.bucket.spec import CLOSED, NEXT, SEQUENCE, Spec, moment, state
from treadle.plan import Plan, Raw, bulk_write, find, insert_many, transact, update_one, wait
from treadle.plan.server_errors import (
    BAD_VALUE,
    DUPLICATE_KEY,
    TOO_LARGE,
    is_about_one_document,
    is_increment_overflow,
    refusals,
    surely_not_committed,
    translate,
)
from treadle.query.keys import freeze

# Buckets that are written in one command.
BUCKET_OPERATIONS_MAX = 5_000
# Buckets that are written in one transaction.
BUCKET_TOGETHER_MAX = 1_000
# Windows whose last bucket is remembered.
BUCKET_REMEMBERED_MAX = 20_000
# Calls that do without a transaction after one was in vain.
BUCKET_ALONE_MAX = 256
# Attempts to add readings.
BUCKET_ATTEMPTS_MAX = 500
# The first pause between two attempts to add.
BUCKET_PAUSE_SECONDS = 0.001
# The longest of both.
BUCKET_PAUSE_MAX_SECONDS = 0.05

R = TypeVar("R")

# How many readings make it worth to try a new bucket first, and how many appends a transaction.
FRESH_MIN = 8
TOGETHER_MIN = 4
# How many appends it takes, for each condition that finds their buckets, to make it worth to look first.
LOOK_UP_MIN = 16


NO_BUCKETS: Mapping[Any, Raw] = MappingProxyType({})


class Writer:
    """Appends the readings of one model; remembers which bucket of a window was the last."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.collection = spec.collection
        self.placer = Placer(spec, self.remember)
        # Of a window: the last bucket, and how many readings it has at least.
        self._last: dict[Any, tuple[int, int]] = {}
        self._alone = self._alone_next = 0
        # Whether a value of a key can be one of several in a condition; a mapping could pass for an operator.
        self._looks_up = all(each.shape.kind == "scalar" for each in spec.keys)

    # -- appending ----------------------------------------------------------------------

    def append(self, batches: Sequence[Batch], *, careful: bool, together: bool = False) -> Plan[list[int]]:
        """Store the readings; the positions of those that were there already, under `unique`.

        `careful` reads the windows before it writes, as a transaction needs;
        `together` allows a transaction of our own.
        """
        done: list[int] = []
        appending = self._append(batches, done, careful=careful, together=together)
        # In a transaction of the caller's nothing stays.
        return (yield from partly(self.spec.label, [] if careful else done, appending))

    def _append(
        self, batches: Sequence[Batch], done: list[int], *, careful: bool, together: bool
    ) -> Plan[list[int]]:
        spec = self.spec
        duplicates: list[int] = []
        careful = careful or spec.unique is not None or spec.span is None
        pending: list[Batch] = []
        located: list[Batch] = []
        for batch in split_large(spec, batches):
            if careful or (spec.limit is not None and len(batch.readings) > spec.limit):
                pending.append(batch)
            else:
                located += self._guess(batch)
        if any(batch.fresh for batch in located):
            located = yield from self._write_fresh(located, done)
        # Whether they gain by a transaction, and are not too much for one.
        few = TOGETHER_MIN <= len(located) <= BUCKET_TOGETHER_MAX
        if together and not careful and few and sum(each.size for each in located) <= BUCKET_BYTES_MAX:
            located = yield from self._write_together(located, done)
        for attempt in range(BUCKET_ATTEMPTS_MAX):
            later: list[Batch] = []
            for batch in pending:
                now, rest = yield from self.placer.locate(batch, duplicates)
                located += now
                later += rest
            failed = yield from self.write(located, done)
            pending, located = [*failed, *later], []
            if not pending:
                return duplicates
            if failed:
                # Others were quicker; each time one of them got on.
                yield from pause(attempt, BUCKET_PAUSE_SECONDS)
        raise DataError(
            f"readings of {spec.label} found no bucket in {BUCKET_ATTEMPTS_MAX} attempts; "
            "run verify, and setup() if the unique index is missing",
            code="bucket-contended",
        )

    def _guess(self, batch: Batch) -> list[Batch]:
        """Aim at the last bucket that this process knows of the window, or at a new one.

        What would make that bucket too full goes on in the next number. A
        guess that is wrong does no harm: it collides with the index.
        """
        number, limit = len(batch.readings), self.spec.limit
        known = self._last.get((self.spec.known(batch.outer), batch.start))
        batch.fresh = known is None and number >= FRESH_MIN
        batch.sequence, count = known or (0, 0)
        if known is None or limit is None or count + number <= limit:
            self.remember(batch, count)
            return [batch]
        room = max(0, limit - count)
        rest = part_of(batch, room, number)
        rest.sequence += 1
        rest.fresh = number - room >= FRESH_MIN
        self.remember(rest, 0)
        return [part_of(batch, 0, room), rest] if room else [rest]

    def remember(self, batch: Batch, count: int) -> None:
        """Note that a batch goes into a bucket with so many readings."""
        if len(self._last) >= BUCKET_REMEMBERED_MAX:
            self._last.clear()
        name = self.spec.known(batch.outer), batch.start
        self._last[name] = batch.sequence, count + len(batch.readings)

    def _write_together(self, batches: list[Batch], done: list[int]) -> Plan[list[Batch]]:
        """Perform the appends in one transaction; all of them again if that was in vain."""
        if self._alone:
            self._alone -= 1
            return batches
        tried = False

        def attempt() -> Plan[None]:
            nonlocal tried
            if tried:
                # Another writer came between, or a reply was lost; the transaction has done nothing.
                raise _InVain
            tried = True
            buckets = yield from self._look_up(batches)
            yield from self._append_all(batches, buckets)

        try:
            yield from transact(attempt)
        except _InVain:
            pass
        except BulkWriteError as error:
            self.collisions(error)
        else:
            done += _numbers(batches)
            self._alone_next = 0
            return []
        # Each time twice as many calls do without a transaction.
        self._alone = self._alone_next = min(BUCKET_ALONE_MAX, 2 * self._alone_next or 1)
        return batches

    def _append_all(self, batches: Sequence[Batch], buckets: Mapping[Any, Raw] = NO_BUCKETS) -> Plan[None]:
        """The appends in one command; `buckets` are those that nobody else can change meanwhile."""
        spec, count, limit = self.spec, self.spec.names.count, self.spec.limit
        operations = []
        for batch in batches:
            bucket = buckets.get(_place(batch.outer, batch.start, batch.sequence)) if buckets else None
            if bucket is not None and limit is not None:
                # Several of the batches may be for the same one.
                bucket[count] += len(batch.readings)
                bucket = bucket if bucket[count] <= limit else None
            filter = self._filter(batch) if bucket is None else {"_id": bucket["_id"]}
            operations.append(UpdateOne(filter, self._update(batch), upsert=bucket is None))
        yield from bulk_write(spec.collection, operations, ordered=False)

    def _look_up(self, batches: Sequence[Batch]) -> Plan[dict[Any, Raw]]:
        """The buckets at which batches aim, by their places; none where it is not worth to look."""
        spec, names = self.spec, self.spec.names
        conditions = self._conditions(batches) if self._looks_up else []
        if not conditions:
            return {}
        projection = dict.fromkeys((*spec.outer_names, names.start, names.count, SEQUENCE), 1)
        condition = {"$or": conditions, names.readings: {"$type": "array"}}
        buckets = yield from find(self.collection, condition, projection)
        return {
            _place(
                [each.get(name) for name in spec.outer_names], start_of(spec, each), state(each, "sequence")
            ): each
            for each in buckets
            if type(each["_id"]) is ObjectId and type(each.get(names.count)) is int
        }

    def _conditions(self, batches: Sequence[Batch]) -> list[Raw]:
        """What finds the buckets of batches and no others; few conditions, or none."""
        names = (*self.spec.key_names, self.spec.names.start)
        windows = [(*batch.key, moment(batch.start or 0)) for batch in batches]
        sequence = {"$in": [each or None for each in {batch.sequence for batch in batches}]}
        for place, name in enumerate(names):
            groups: dict[Any, tuple[tuple[Any, ...], list[Any]]] = {}
            for window in windows:
                rest = (*window[:place], *window[place + 1 :])
                groups.setdefault(tuple(map(freeze, rest)), (rest, []))[1].append(window[place])
            if len(groups) * LOOK_UP_MIN <= len(windows):
                others = (*names[:place], *names[place + 1 :])
                return [
                    {other: {"$eq": value} for other, value in zip(others, rest, strict=True)}
                    | {name: {"$in": values}, SEQUENCE: sequence}
                    for rest, values in groups.values()
                ]
        return []

    def _parts(self, batches: Sequence[Batch]) -> Iterator[Sequence[Batch]]:
        """As many as one command carries."""
        most = BUCKET_OPERATIONS_MAX
        return (batches[at : at + most] for at in range(0, len(batches), most))

    def _write_fresh(self, batches: Sequence[Batch], done: list[int]) -> Plan[list[Batch]]:
        """Insert what are probably new buckets; the batches that are still to be appended."""
        rest = [batch for batch in batches if not batch.fresh]
        for part in self._parts([batch for batch in batches if batch.fresh]):
            try:
                yield from insert_many(
                    self.collection, [self._bucket(batch) for batch in part], ordered=False
                )
                done += _numbers(part)
            except BulkWriteError as error:
                done += _numbers(part, error)
                # Another process opened it; the ordinary append comes next.
                rest += [part[each["index"]] for each in self.collisions(error)]
        return rest

    def _bucket(self, batch: Batch) -> Raw:
        """A whole new bucket."""
        spec, names = self.spec, self.spec.names
        assert batch.start is not None
        stats = stats_of(spec, batch.readings)
        return {
            **dict(zip(spec.outer_names, batch.outer, strict=True)),
            names.start: moment(batch.start),
            names.end: moment(spec.last(batch.start)),
            names.count: len(batch.readings),
            names.readings: batch.readings,
            **({names.stats: stats} if stats else {}),
            **({RESERVED: {"sequence": batch.sequence}} if batch.sequence else {}),
        }

    def write(self, batches: Sequence[Batch], done: list[int]) -> Plan[list[Batch]]:
        """Perform the appends; those that found no room. Notes in `done` how many readings were stored."""
        failed: list[Batch] = []
        for part in self._parts(batches):
            try:
                if len(part) == 1:
                    filter, update = self._filter(part[0]), self._update(part[0])
                    yield from update_one(self.collection, filter, update, upsert=True)
                else:
                    yield from self._append_all(part)
                done += _numbers(part)
            except OperationFailure as error:
                done += _numbers(part, error)
                for each in self.collisions(error):
                    batch = part[each.get("index", 0)]
                    self._note_collision(batch, each["code"])
                    failed.append(batch)
        return failed

    def collisions(self, error: OperationFailure) -> list[Raw]:
        """The appends that met a bucket without room, for their readings or a sum; raises for all others."""
        refused = refusals(error)
        for each in refused or [{}]:
            full = each.get("code") in TOO_LARGE or is_increment_overflow(each)
            taken = each.get("code") == DUPLICATE_KEY and SEQUENCE in (each.get("keyPattern") or {})
            if not full and not taken:
                raise error
        return refused

    def _note_collision(self, batch: Batch, code: Any) -> None:
        """A bucket that would become too large is as good as full; a sum can become a float."""
        batch.wide = batch.wide or code == BAD_VALUE
        if code in TOO_LARGE:
            if len(batch.readings) == 1 and batch.crowded:
                raise UsageError(
                    f"a reading of {self.spec.label} is too large even for a bucket of its own",
                    code="document-too-large",
                )
            batch.crowded += 1

    # -- one append ---------------------------------------------------------------------

    def _filter(self, batch: Batch) -> Raw:
        """The bucket of a batch, if it has room."""
        spec, names = self.spec, self.spec.names
        assert batch.start is not None
        filter: Raw = {
            name: {"$eq": value} for name, value in zip(spec.outer_names, batch.outer, strict=True)
        }
        filter[names.start] = {"$eq": moment(batch.start)}
        filter[SEQUENCE] = {"$eq": batch.sequence} if batch.sequence else {"$exists": False}
        if spec.limit is not None:
            filter[names.count] = {"$lte": spec.limit - len(batch.readings)}
        filter[names.readings] = {"$type": "array"}
        if spec.span is None:
            # Two values, or an upsert would store the one.
            filter[NEXT] = {"$exists": False} if batch.next is None else {"$in": [None, moment(batch.next)]}
        if spec.unique is not None:
            self._guard_unique(filter, batch)
        return filter

    def _update(self, batch: Batch) -> Raw:
        """What adds the readings of a batch to its bucket, or opens it."""
        spec, names = self.spec, self.spec.names
        assert batch.start is not None
        readings, start = batch.readings, batch.start
        update: Raw = {
            "$push": {names.readings: {"$each": readings}},
            "$inc": {names.count: len(readings)},
        }
        if spec.span is not None:
            update["$setOnInsert"] = {names.end: moment(spec.last(start))}
        else:
            update["$max"] = {names.end: max(reading[spec.time.stored] for reading in readings)}
            if batch.next is not None:
                update["$setOnInsert"] = {NEXT: moment(batch.next)}
        self._add_statistics(update, readings, batch.wide)
        return update

    def _add_statistics(self, update: Raw, readings: Sequence[Raw], wide: bool) -> None:
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
            update["$inc"][f"{path}.sum"] = float(total) if wide and isinstance(total, int) else total
            if stat.optional:
                update["$inc"][f"{path}.count"] = len(values)

    def _guard_unique(self, filter: Raw, batch: Batch) -> None:
        unique = self.spec.unique
        assert unique is not None
        filter[CLOSED] = {"$exists": False}
        values = column(batch.readings, unique.stored)
        present = [value for value in values if value is not None]
        if not present:
            return
        filter[f"{self.spec.names.readings}.{unique.stored}"] = {"$nin": present}


def _place(outer: Sequence[Any], start: int | None, sequence: int | None) -> Any:
    """What says which bucket is meant; equal where the server takes all parts for equal."""
    return (*map(freeze, outer), start, sequence or 0)


def pause(attempt: int, seconds: float) -> Plan[None]:
    """Wait for other writers after an attempt in vain, from the fourth on and longer each time."""
    if attempt > 2:
        yield from wait(min(BUCKET_PAUSE_MAX_SECONDS, seconds * 1.5 ** (attempt - 3)))


def partly(label: str, done: Sequence[int], plan: Plan[R]) -> Plan[R]:
    """Perform a plan; where it is refused, say how many readings were stored before."""
    try:
        return (yield from plan)
    except (TreadleError, OperationFailure) as error:
        refused = isinstance(error, TreadleError) or is_about_one_document(error)
        if not any(done) or not refused or not surely_not_committed(error):
            raise
        raise PartlyDone(label, sum(done), translate(error, label)) from error


def _numbers(batches: Sequence[Batch], error: OperationFailure | None = None) -> list[int]:
    """How many readings of each batch were stored by a command in any order, some of which was refused."""
    refused: set[int] = set()
    if error is not None:
        if not isinstance(error, BulkWriteError):
            return []
        refused = {each["index"] for each in refusals(error)}
    return [len(batch.readings) for number, batch in enumerate(batches) if number not in refused]


class _InVain(Exception):
    """A transaction that has done nothing, and is not tried again."""
