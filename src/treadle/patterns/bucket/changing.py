"""Changing and deleting readings, with count and statistics of their buckets kept exact.

A bucket is read, changed here and written back if nobody else changed it
meanwhile: its count and its revision (`_treadle.n`, which every change but an
append raises) say so. Who comes too late reads it again. A bucket that has
become empty is deleted. A reading whose time, series or metadata changed
moves: out of one bucket and into another, in one transaction.
"""

from __future__ import annotations

import copy
import datetime as dt
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bson
from bson.decimal128 import Decimal128
from pymongo import DeleteOne

from treadle.errors import DataError, UsageError
from treadle.graph.rule import REVISION
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED, Update
from treadle.patterns.bucket.contents import as_decimal, guard, is_number, rewrite, window_of
from treadle.patterns.bucket.grouping import group
from treadle.patterns.bucket.matching import Opened, Selection, on_server, open_buckets
from treadle.patterns.bucket.reading import Scan
from treadle.patterns.bucket.spec import Spec
from treadle.patterns.bucket.writing import Writer, partly, pause
from treadle.plan import (
    Plan,
    Raw,
    bulk_write,
    delete_one,
    find,
    find_one,
    is_inside,
    server_facts,
    transact,
    update_one,
)
from treadle.query.comparison import DECIMALS, order_key
from treadle.query.keys import freeze, same_key
from treadle.query.paths import drop, has, put, value_at

# Attempts to change a bucket.
BUCKET_CHANGE_ATTEMPTS_MAX = 1_000
# And to change.
BUCKET_CHANGE_PAUSE_SECONDS = 0.002
# Whole buckets that are deleted at a time.
BUCKET_DELETE_PAGE = 500

# What a change makes of the picked readings of a bucket: a reading in their place, or None to delete it.
Change = Callable[[list[Raw]], Plan[list[Raw | None]]]
Pair = tuple[Raw, Raw | None]


class Changer:
    """Applies changes to the readings of one model."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.collection = spec.collection
        self.limits = spec.limits
        self.writer = Writer(spec)

    # -- all that match, or the first ---------------------------------------------------

    def change_all(
        self, selection: Selection, change: Change, *, only_first: bool = False
    ) -> Plan[tuple[int, list[Pair]]]:
        """Change what the selection means; how many, and the pairs of the last bucket that was changed."""
        inside = yield from is_inside()
        done: list[int] = []
        changing = self._change_all(selection, change, only_first, done)
        pairs = yield from partly(self.spec.label, [] if inside else done, changing)
        return sum(done), pairs

    def _change_all(
        self, selection: Selection, change: Change, only_first: bool, done: list[int]
    ) -> Plan[list[Pair]]:
        pairs: list[Pair] = []
        # Readings that this very change moved into buckets which it has yet to visit.
        arrived: Counter[bytes] = Counter()
        scan = Scan(self.collection, selection.buckets, 1 if only_first else self.limits.bucket_page)
        while buckets := (yield from scan.next()):
            opened = yield from open_buckets(self.spec, selection, buckets)
            for each in opened:
                if not each.picked:
                    continue
                pairs = yield from self._change(each, selection, change, only_first, arrived)
                done.append(len(pairs))
                if pairs and only_first:
                    return pairs
        return pairs

    def _change(
        self,
        opened: Opened,
        selection: Selection,
        change: Change,
        only_first: bool,
        arrived: Counter[bytes],
    ) -> Plan[list[Pair]]:
        """Change one bucket, again and again until no other writer came between."""
        for attempt in range(BUCKET_CHANGE_ATTEMPTS_MAX):
            if attempt:
                yield from pause(attempt - 1, BUCKET_CHANGE_PAUSE_SECONDS)
                bucket = yield from find_one(self.collection, {"_id": {"$eq": opened.bucket["_id"]}})
                if bucket is None:
                    return []
                (opened,) = yield from open_buckets(self.spec, selection, [bucket])
            picked = self._not_arrived(opened, arrived) if arrived else opened.picked
            picked = picked[:1] if only_first else picked
            if not picked:
                return []
            befores = [self._flat(opened, place) for place in picked]
            afters = yield from change(copy.deepcopy(befores))
            for before, after in zip(befores, afters, strict=True):
                self._require_readable(before, after)
            leaving = [
                after
                for before, after in zip(befores, afters, strict=True)
                if after is not None and self._leaves(opened, before, after)
            ]
            if (yield from self._write(opened, picked, afters, leaving)):
                arrived.update(self._digest(each) for each in leaving)
                return list(zip(befores, afters, strict=True))
        raise DataError(
            f"a bucket of {self.spec.label} was changed by others each time in "
            f"{BUCKET_CHANGE_ATTEMPTS_MAX} attempts",
            code="bucket-contended",
        )

    def _require_readable(self, before: Raw, after: Raw | None) -> None:
        """Refuse to store what could not be read back; the validator does not look at each reading.

        A reading that others wrote and that cannot be read as it is may stay so.
        """
        if after is None or (problem := self._problem(after)) is None or self._problem(before) is not None:
            return
        raise DataError(
            f"this leaves a {self.spec.label} that does not fit its model ({problem.message})",
            code="validator-refused",
        )

    def _problem(self, flat: Raw) -> DataError | None:
        try:
            self.spec.codec.load(copy.deepcopy(flat))
        except DataError as error:
            return error
        return None

    def _flat(self, opened: Opened, place: int) -> Raw:
        return self.spec.flat(opened.bucket, opened.readings[place], opened.series)

    def _digest(self, flat: Raw) -> bytes:
        # An id that follows from series and time is not that of before.
        parts = {name: value for name, value in flat.items() if name != "_id" or self.spec.stores_id}
        encoded = bson.encode(dict(sorted(parts.items())), codec_options=CODEC_OPTIONS)
        return hashlib.blake2b(encoded, digest_size=16).digest()

    def _not_arrived(self, opened: Opened, arrived: Counter[bytes]) -> list[int]:
        """The picked readings without those that this change itself brought here."""
        left = Counter(arrived)
        picked = []
        for place in opened.picked:
            digest = self._digest(self._flat(opened, place))
            if left[digest]:
                left[digest] -= 1
            else:
                picked.append(place)
        return picked

    def _leaves(self, opened: Opened, before: Raw, after: Raw) -> bool:
        """Whether a changed reading has to be added anew, to another bucket or under another unique value."""
        spec, bucket = self.spec, opened.bucket
        if spec.unique is not None and not _same(spec.unique.stored, before, after):
            return True
        first, last = window_of(spec, bucket)
        return not first <= after[spec.time.stored] <= last or not all(
            _same(name, after, bucket) for name in spec.outer_names
        )

    def _write_back(self, opened: Opened, picked: Sequence[int], afters: Sequence[Raw | None]) -> Plan[bool]:
        """Write the bucket with its changed readings, if it is still the one that was read."""
        spec = self.spec
        readings: list[Raw] = []
        changed = dict(zip(picked, afters, strict=True))
        for place, reading in enumerate(opened.readings):
            after = changed.get(place, reading)
            if after is reading:
                readings.append(reading)
            elif after is not None:
                readings.append({name: value for name, value in after.items() if name not in spec.outer})
        unchanged = guard(spec, opened.bucket)
        if not readings:
            return bool((yield from delete_one(self.collection, unchanged)).deleted_count)
        update = rewrite(spec, opened.bucket, readings)
        return bool((yield from update_one(self.collection, unchanged, update)).matched_count)

    def _write(
        self,
        opened: Opened,
        picked: Sequence[int],
        afters: Sequence[Raw | None],
        leaving: Sequence[Raw],
        *,
        drop_duplicates: bool = False,
    ) -> Plan[bool]:
        """Write the bucket back and move leaving readings to others; whether nobody came between."""
        if not leaving:
            return (yield from self._write_back(opened, picked, afters))
        (yield from server_facts()).require_transactions(
            f"a change of time, series, metadata or unique value adds a {self.spec.label} anew and",
            "insert it anew and delete the old one",
        )
        going = {id(each) for each in leaving}
        staying = [None if id(after) in going else after for after in afters]

        def attempt() -> Plan[bool]:
            if not (yield from self._write_back(opened, picked, staying)):
                return False
            whole = dict.fromkeys(self.spec.outer_names)
            batches = group(self.spec, [{**whole, **copy.deepcopy(each)} for each in leaving])
            duplicates = yield from self.writer.append(batches, careful=True)
            if duplicates and not drop_duplicates:
                raise UsageError(
                    f"this would give a {self.spec.label} the {self.spec.unique and self.spec.unique.name} "
                    "of another one in its new bucket, which unique= forbids",
                    code="reading-duplicate",
                )
            return True

        return (yield from transact(attempt))

    def sort_out(self, opened: Opened, astray: set[int], surplus: set[int]) -> Plan[bool]:
        """Rewrite a bucket without surplus readings, move the astray ones; whether nobody came between."""
        picked = range(len(opened.readings))
        afters = [None if place in surplus else self._flat(opened, place) for place in picked]
        leaving = [after for place, after in enumerate(afters) if place in astray and after is not None]
        return (yield from self._write(opened, picked, afters, leaving, drop_duplicates=True))

    # -- whole buckets ------------------------------------------------------------------

    def delete_buckets(self, selection: Selection) -> Plan[int]:
        """Delete buckets of which every reading is meant; how many readings there were."""
        names = self.spec.names
        total = 0
        for _ in range(BUCKET_CHANGE_ATTEMPTS_MAX):
            projection = {names.count: 1, REVISION: 1, "_id": 1}
            scan = Scan(self.collection, selection.buckets, BUCKET_DELETE_PAGE, projection)
            missed = False
            while buckets := (yield from scan.next()):
                operations = [DeleteOne(guard(self.spec, bucket)) for bucket in buckets]
                result = yield from bulk_write(self.collection, operations, ordered=False)
                left: set[Any] = set()
                if result.deleted_count != len(buckets):
                    keys = [bucket["_id"] for bucket in buckets]
                    rest = yield from find(self.collection, {"_id": {"$in": keys}}, {"_id": 1})
                    left = {freeze(each["_id"]) for each in rest}
                    missed = True
                total += sum(
                    int(bucket.get(names.count, 0)) for bucket in buckets if freeze(bucket["_id"]) not in left
                )
            if not missed:
                break
        return total


def _same(name: str, one: Raw, other: Raw) -> bool:
    return same_key(one.get(name), other.get(name))


# -- what an update makes of a reading --------------------------------------------------------


def applied(spec: Spec, update: Update) -> Change:
    """A change from an update of MongoDB's: operators by Python, a pipeline by the server."""
    if not isinstance(update, Mapping):
        stages: list[Raw] = [dict(stage) for stage in update]
        return lambda readings: _by_server(spec, readings, stages)
    for operator, fields in update.items():
        if operator not in _OPERATORS:
            known = ", ".join(sorted(_OPERATORS - {"$setOnInsert"}))
            raise UsageError(
                f"{operator} is not offered on readings in buckets; use {known} or a pipeline",
                code="update-invalid",
            )
        for path in fields:
            _check_path(operator, path)

    def change(readings: list[Raw]) -> Plan[list[Raw | None]]:
        for reading in readings:
            for operator, fields in update.items():
                for path, operand in fields.items():
                    _apply(operator, reading, path, operand)
        if "$currentDate" in update:
            # The server has a clock.
            now: Raw = dict.fromkeys(update["$currentDate"], "$$NOW")
            return (yield from _by_server(spec, readings, [{"$set": now}]))
        return [_checked(spec, reading) for reading in readings]

    return change


def _check_path(operator: str, path: str) -> None:
    parts = path.split(".")
    if parts[0] == "_id":
        raise UsageError("the id of a reading cannot be updated", code="update-invalid")
    if parts[0] == RESERVED:
        raise UsageError(f"{RESERVED} is Treadle's own and cannot be updated", code="field-maintained")
    if any(not part or part.startswith("$") or part.isdigit() for part in parts):
        raise UsageError(
            f"{operator} of {path!r}: positions in arrays are not offered on readings in buckets; "
            "use a pipeline",
            code="update-invalid",
        )


def _checked(spec: Spec, reading: Raw) -> Raw:
    if not isinstance(reading.get(spec.time.stored), dt.datetime):
        raise UsageError(
            f"this leaves a {spec.label} without a date in {spec.time.stored!r}", code="update-invalid"
        )
    for stat in spec.stats:
        value = value_at(reading, stat.path)
        if value is not None and not is_number(value):
            raise UsageError(
                f"this makes {stat.path!r} of a {spec.label} something else than a number, of which its "
                "bucket holds statistics",
                code="update-invalid",
            )
    return reading


def _by_server(spec: Spec, readings: list[Raw], stages: list[Raw]) -> Plan[list[Raw | None]]:
    sent = [{**each, "_id": number} for number, each in enumerate(readings)]
    results = yield from on_server(spec, sent, stages)
    if len(results) != len(sent):
        raise DataError(
            f"the buckets of {spec.label} were deleted while a reading was updated", code="bucket-contended"
        )
    if any(each.get("_id") is None for each in results):
        raise UsageError("the id of a reading cannot be removed by a pipeline", code="update-invalid")
    for before, after in zip(readings, results, strict=True):
        after["_id"] = before["_id"]
        after.pop(RESERVED, None)
    return [_checked(spec, each) for each in results]


# What MongoDB offers for single values; a new document, which `$setOnInsert` speaks of, is never made.
_OPERATORS = frozenset(
    {"$set", "$unset", "$inc", "$mul", "$min", "$max", "$rename", "$currentDate", "$setOnInsert"}
)


def _apply(operator: str, reading: Raw, path: str, operand: Any) -> None:
    """What one operator makes of one field."""
    present, current = has(reading, path), value_at(reading, path)
    if operator == "$set":
        put(reading, path, copy.deepcopy(operand))
    elif operator in ("$unset", "$rename") and present:
        drop(reading, path)
        if operator == "$rename":
            put(reading, str(operand), current)
    elif operator in ("$min", "$max"):
        one, other = order_key(operand), order_key(current)
        if not present or (one < other if operator == "$min" else one > other):
            put(reading, path, operand)
    elif operator in ("$inc", "$mul"):
        if not is_number(operand):
            raise UsageError(f"{operator} takes a number, not {operand!r}", code="update-invalid")
        if present and not is_number(current):
            raise UsageError(
                f"{operator} of {path!r}: one of the readings has no number there",
                code="update-invalid",
            )
        nothing = Decimal128("0") if isinstance(operand, Decimal128) else type(operand)(0)
        missing = operand if operator == "$inc" else nothing
        put(reading, path, _compute(operator, current, operand) if present else missing)


def _compute(operator: str, current: Any, operand: Any) -> Any:
    if isinstance(current, Decimal128) or isinstance(operand, Decimal128):
        compute = DECIMALS.add if operator == "$inc" else DECIMALS.multiply
        return Decimal128(compute(as_decimal(current), as_decimal(operand)))
    return current + operand if operator == "$inc" else current * operand
