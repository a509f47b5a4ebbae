"""Writing: new readings into the buckets of their own windows, one update per bucket.

The key of a bucket is (series, start of its window, sequence number), and a
unique index holds it. Several readings for a window of which this process has
written nothing are tried as a new bucket. An append is one upsert whose filter
says that there is room. Where it meets a bucket that is full, packed or of
other metadata, the upsert collides with the index; then the window is read
(`placing.py`) and the readings go on in whichever bucket has room, or in the
next number. Inside a transaction of the caller an error would end everything,
so there the windows are read first.

Many appends at once share one transaction, because the server commits once
then and not once per bucket. It is tried once: whoever meets another writer or
a full bucket there writes one by one after all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure

from treadle.errors import DataError, UsageError
from treadle.graph.limits import Limits
from treadle.model.bson_types import RESERVED
from treadle.patterns.bucket.contents import Form, aggregate_of, columns_of_batch, stats_of, values_of
from treadle.patterns.bucket.grouping import Batch, group, part_of, split_large
from treadle.patterns.bucket.placing import Placer
from treadle.patterns.bucket.spec import CLOSED, NEXT, SEQUENCE, Spec, milliseconds, moment
from treadle.plan import Plan, Raw, bulk_write, insert_many, transact, update_one, wait
from treadle.plan.server_errors import BAD_VALUE, DUPLICATE_KEY, TOO_LARGE, is_increment_overflow, refusals

# How many readings make it worth to try a new bucket first, and how many appends a transaction.
FRESH_MIN = 8
TOGETHER_MIN = 4


class Writer:
    """Appends the readings of one model; remembers which bucket of a window was the last."""

    def __init__(self, spec: Spec, collection: str) -> None:
        self.spec = spec
        self.limits = spec.limits
        self.collection = collection
        self.form: Form = "rows" if spec.layout == "rows" else "columns"
        self.placer = Placer(spec, collection, self.form, self.remember)
        # Of a window: the last bucket, and how many readings it has at least.
        self._last: dict[Any, tuple[int, int]] = {}
        self._alone = self._alone_next = 0

    def group(
        self, raws: Sequence[Raw], places: Iterable[int] | None = None, documents: Sequence[Any] | None = None
    ) -> list[Batch]:
        """The readings by bucket; takes the raw ones over, and gives `documents` their derived ids."""
        return group(self.spec, self.form, raws, places, documents)

    # -- appending ----------------------------------------------------------------------

    def append(self, batches: Sequence[Batch], *, careful: bool, together: bool = False) -> Plan[list[int]]:
        """Store the readings; the positions of those that were there already, under `unique`.

        `careful` reads the windows before it writes, as a transaction needs;
        `together` allows a transaction of our own.
        """
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
            located = yield from self._write_fresh(located)
        if together and not careful and _is_worth_it(located, self.limits):
            located = yield from self._write_together(located)
        pause = self.limits.bucket_pause_seconds
        for attempt in range(self.limits.bucket_attempts_max):
            later: list[Batch] = []
            for batch in pending:
                found, rest = yield from self.placer.locate(batch, duplicates)
                located += found
                later += rest
            failed = yield from self.write(located)
            pending, located = [*failed, *later], []
            if not pending:
                return duplicates
            if failed and attempt > 2:
                # Others were quicker; each time one of them got on.
                yield from wait(pause)
                pause = min(self.limits.bucket_pause_max_seconds, pause * 1.5)
        raise DataError(
            f"readings of {spec.label} found no bucket in {self.limits.bucket_attempts_max} attempts; "
            "run verify, and setup() if the unique index is missing",
            code="bucket-contended",
        )

    def _guess(self, batch: Batch) -> list[Batch]:
        """Aim at the last bucket that this process knows of the window, or at a new one.

        What would make that bucket too full goes on in the next number. A
        guess that is wrong does no harm: it collides with the index.
        """
        number, limit = len(batch.readings), self.spec.limit
        name = self.spec.known(batch.outer), batch.start
        known = self._last.get(name)
        if known is None:
            batch.fresh = number >= FRESH_MIN
            self._note(name, 0, number)
            return [batch]
        batch.sequence, count = known
        if limit is None or count + number <= limit:
            self._note(name, batch.sequence, count + number)
            return [batch]
        room = max(0, limit - count)
        rest = part_of(batch, room, number)
        rest.sequence += 1
        rest.fresh = number - room >= FRESH_MIN
        self._note(name, rest.sequence, number - room)
        return [part_of(batch, 0, room), rest] if room else [rest]

    def remember(self, batch: Batch, count: int) -> None:
        """Note that a batch goes into a bucket with so many readings."""
        self._note((self.spec.known(batch.outer), batch.start), batch.sequence, count + len(batch.readings))

    def _note(self, name: Any, sequence: int, count: int) -> None:
        if len(self._last) >= self.limits.bucket_remembered_max:
            self._last.clear()
        self._last[name] = sequence, count

    def _write_together(self, batches: list[Batch]) -> Plan[list[Batch]]:
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
            operations = [UpdateOne(*self._operation(batch), upsert=True) for batch in batches]
            yield from bulk_write(self.collection, operations, ordered=False)

        try:
            yield from transact(attempt)
        except _InVain:
            pass
        except BulkWriteError as error:
            refused = refusals(error)
            if not refused or not all(self.answerable(each["code"], each) for each in refused):
                raise
        else:
            self._alone_next = 0
            return []
        # Each time twice as many calls do without a transaction.
        self._alone = self._alone_next = min(self.limits.bucket_alone_max, 2 * self._alone_next or 1)
        return batches

    def _write_fresh(self, batches: Sequence[Batch]) -> Plan[list[Batch]]:
        """Insert what are probably new buckets; the batches that are still to be appended."""
        rest = [batch for batch in batches if not batch.fresh]
        fresh = [batch for batch in batches if batch.fresh]
        most = self.limits.bucket_operations_max
        for at in range(0, len(fresh), most):
            part = fresh[at : at + most]
            try:
                yield from insert_many(
                    self.collection, [self._bucket(batch) for batch in part], ordered=False
                )
            except BulkWriteError as error:
                refused = refusals(error)
                if not refused or not all(self.answerable(each["code"], each) for each in refused):
                    raise
                # Another process opened it; the ordinary append comes next.
                rest += [part[each["index"]] for each in refused]
        return rest

    def _bucket(self, batch: Batch) -> Raw:
        """A whole new bucket."""
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
            **({RESERVED: {"sequence": batch.sequence}} if batch.sequence else {}),
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
        most = self.limits.bucket_operations_max
        for at in range(0, len(batches), most):
            part = batches[at : at + most]
            operations = [UpdateOne(*self._operation(batch), upsert=True) for batch in part]
            try:
                yield from bulk_write(self.collection, operations, ordered=False)
            except BulkWriteError as error:
                refused = refusals(error)
                if not refused or not all(self.answerable(each["code"], each) for each in refused):
                    raise
                for each in refused:
                    self._noted(part[each["index"]], each["code"])
                    failed.append(part[each["index"]])
        return failed

    def answerable(self, code: Any, details: Any) -> bool:
        """Whether an append only met a bucket without room, for its readings or for their sum."""
        if code in TOO_LARGE:
            return True
        refusal = details or {}
        if code == DUPLICATE_KEY:
            return SEQUENCE in (refusal.get("keyPattern") or {})
        return is_increment_overflow(refusal)

    def _noted(self, batch: Batch, code: Any) -> None:
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
        self._add_statistics(update, readings, batch.wide)
        return filter, update

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


def _is_worth_it(batches: Sequence[Batch], limits: Limits) -> bool:
    """Whether appends gain by a transaction, and are not too much for one."""
    if not TOGETHER_MIN <= len(batches) <= limits.bucket_together_max:
        return False
    return sum(batch.size for batch in batches) <= limits.bucket_bytes_max


class _InVain(Exception):
    """A transaction that has done nothing, and is not tried again."""
