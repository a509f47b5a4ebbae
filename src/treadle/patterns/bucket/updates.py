"""Changes and deletions of readings; count and statistics of their buckets stay exact.

A transaction reads a page of buckets, changes their readings here, and writes
them back. A concurrent write of one of them makes it start again. A bucket
that has become empty is deleted. A reading whose time, series or metadata
changed moves to another bucket in the same transaction.
"""

from __future__ import annotations

import copy
import datetime as dt
import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import bson
from bson.decimal128 import Decimal128
from pymongo import DeleteOne, UpdateOne

from treadle.engine.salvage import Contended, attempting
from treadle.errors import DataError, UsageError
from treadle.graph.rule import REVISION
from treadle.graph.stored_pages import chunks, matching
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED, Update
from treadle.patterns.bucket.bucket_document import (
    as_decimal,
    is_number,
    readings_of,
    replace_readings,
    window_of,
)
from treadle.patterns.bucket.grouping import group
from treadle.patterns.bucket.query import ReadingQuery, positions, time_condition, unwind_stages
from treadle.patterns.bucket.spec import Spec
from treadle.patterns.bucket.writing import Writer, partly
from treadle.plan import (
    Plan,
    Raw,
    aggregate,
    bulk_write,
    by_id,
    delete_many,
    find,
    is_inside,
    outside,
    transact,
    update_many,
)
from treadle.plan.capabilities import clock
from treadle.query.comparison import DECIMALS, order_key
from treadle.query.keys import freeze, same_key
from treadle.query.paths import drop, has, put, value_at

# Ids of buckets that are listed at a time, and buckets that are deleted at a time, unread.
BUCKET_IDS_PAGE = 10_000
BUCKET_DELETE_PAGE = 500
# Buckets that are read at a time to change one reading.
BUCKET_SMALL_PAGE = 4

# What a change makes of whole readings of a bucket: a reading in the place of each, or None to delete it.
Change = Callable[["Picked"], Plan[Sequence[Raw | None]]]
Pair = tuple[Raw, Raw | None]
# Applies one operator to one path of a reading.
Operator = Callable[[Raw, str, Any], None]


class Picked:
    """A bucket, and the places of the readings that a change is about."""

    def __init__(self, spec: Spec, bucket: Raw, places: Sequence[int]) -> None:
        self.bucket = bucket
        self.elements = readings_of(spec, bucket)
        self.places = list(places)
        self.befores = [spec.to_reading(bucket, self.elements[place]) for place in self.places]

    def keep(self, numbers: Sequence[int]) -> None:
        self.places = [self.places[number] for number in numbers]
        self.befores = [self.befores[number] for number in numbers]


class ReadingUpdater:
    """Applies changes to the readings of one model."""

    def __init__(self, spec: Spec, writer: Writer) -> None:
        self.spec = spec
        self.collection = spec.collection
        self.writer = writer

    # -- which readings -----------------------------------------------------------------

    def change_all(self, query: ReadingQuery, change: Change) -> Plan[int]:
        """Change all readings that a query means. Returns how many there were."""
        # Readings that this very change moved into buckets which it has yet to visit.
        arrived: Counter[bytes] = Counter()
        inside = yield from is_inside()
        done: list[int] = []
        last: list[Any] | None = None
        while rows := (
            yield from matching(self.collection, query.buckets, last, BUCKET_IDS_PAGE, {"_id": 1})
        ):
            last = [rows[-1]["_id"]]
            ids = [row["_id"] for row in rows]
            for page in chunks(ids, self.spec.entry.limits.bucket_page):
                plan = self._change_page(page, query, change, arrived)
                done.append((yield from partly(self.spec.label, [] if inside else done, plan)))
        return sum(done)

    def _change_page(
        self, ids: Sequence[Any], query: ReadingQuery, change: Change, arrived: Counter[bytes]
    ) -> Plan[int]:
        """Change readings of some buckets in one transaction; of each in its own among many writers."""
        page = {"$and": [{"_id": {"$in": list(ids)}}, query.buckets]}
        try:
            read = partial(find, self.collection, page)
            pairs, _ = yield from self._transact(read, query, change, arrived, items=len(ids))
            return len(pairs)
        except Contended:
            number = 0
            for each in ids:
                number += yield from self._change_page([each], query, change, arrived)
            return number

    def change_first(self, query: ReadingQuery, change: Change) -> Plan[Pair | None]:
        """Change the first reading that a query means. Returns it before and after."""
        last: list[Any] | None = None
        while True:
            read = partial(matching, self.collection, query.buckets, last, BUCKET_SMALL_PAGE)
            pairs, ids = yield from self._transact(read, query, change, Counter(), only_first=True)
            if pairs or not ids:
                return pairs[0] if pairs else None
            last = [ids[-1]]

    def _transact(
        self,
        read: Callable[[], Plan[list[Raw]]],
        query: ReadingQuery,
        change: Change,
        arrived: Counter[bytes],
        *,
        items: int = 1,
        only_first: bool = False,
    ) -> Plan[tuple[list[Pair], list[Any]]]:
        """Change readings of the buckets that `read` gives. Returns the changes, and the buckets' ids."""
        ids: list[Any] = []

        def hold() -> Plan[None]:
            yield from update_many(self.collection, {"_id": {"$in": ids}}, {"$inc": {REVISION: 1}})

        def attempt() -> Plan[tuple[list[Pair], list[Raw]]]:
            buckets = yield from read()
            ids[:] = [bucket["_id"] for bucket in buckets]
            return (yield from self._change(buckets, query, change, arrived, only_first=only_first))

        pairs, moved = yield from transact(attempting(attempt, hold, items))
        arrived.update(map(self._digest, moved))
        return pairs, ids

    def delete_buckets(self, query: ReadingQuery) -> Plan[int]:
        """Delete buckets of which every reading is meant. Returns how many readings there were."""
        count = self.spec.names.count
        inside = yield from is_inside()
        done: list[int] = []

        def attempt() -> Plan[tuple[int, int]]:
            buckets = yield from find(
                self.collection, query.buckets, {"_id": 1, count: 1}, limit=BUCKET_DELETE_PAGE
            )
            yield from delete_many(self.collection, {"_id": {"$in": [bucket["_id"] for bucket in buckets]}})
            numbers = [bucket.get(count) for bucket in buckets]
            return len(buckets), sum(number for number in numbers if isinstance(number, int))

        number = BUCKET_DELETE_PAGE
        while number == BUCKET_DELETE_PAGE:
            number, readings = yield from partly(self.spec.label, [] if inside else done, transact(attempt))
            done.append(readings)
        return sum(done)

    # -- some buckets, in a transaction -------------------------------------------------

    def _change(
        self,
        buckets: Sequence[Raw],
        query: ReadingQuery,
        change: Change,
        arrived: Counter[bytes],
        *,
        only_first: bool,
    ) -> Plan[tuple[list[Pair], list[Raw]]]:
        """Change the readings that are meant. Returns the changes, and the readings that moved."""
        places = yield from self._places(buckets, query)
        pairs: list[Pair] = []
        moved: list[Raw] = []
        operations: list[Any] = []
        for bucket in buckets:
            picked = Picked(self.spec, bucket, places.get(freeze(bucket["_id"]), ()))
            if arrived:
                self._leave_arrived(picked, arrived)
            if only_first:
                picked.keep(range(min(1, len(picked.places))))
            if not picked.places:
                continue
            afters = yield from change(picked)
            operation, leaving = self._write_back(picked, afters)
            operations.append(operation)
            moved += leaving
            pairs += zip(picked.befores, afters, strict=True)
            if only_first:
                break
        if operations:
            yield from bulk_write(self.collection, operations, ordered=False)
        yield from self._move(moved)
        return pairs, moved

    def _places(self, buckets: Sequence[Raw], query: ReadingQuery) -> Plan[dict[Any, list[int]]]:
        """Return the places of the readings that are meant, by bucket."""
        spec, places = self.spec, dict[Any, list[int]]()
        if query.rest is not None:
            ids = [bucket["_id"] for bucket in buckets]
            rows = yield from aggregate(self.collection, positions(spec, query, ids))
            for mark in (row[RESERVED] for row in rows):
                places.setdefault(freeze(mark["bucket"]), []).append(mark["place"])
            return places
        at, time = time_condition(query.times), spec.time.stored
        for bucket in buckets:
            places[freeze(bucket["_id"])] = [
                place
                for place, each in enumerate(readings_of(spec, bucket))
                if ("$gte" not in at or at["$gte"] <= each[time])
                and ("$lte" not in at or each[time] <= at["$lte"])
            ]
        return places

    def _leave_arrived(self, picked: Picked, arrived: Counter[bytes]) -> None:
        """Leave out the readings that this change itself brought here."""
        left, kept = Counter(arrived), list[int]()
        for number, reading in enumerate(picked.befores):
            digest = self._digest(reading)
            if left[digest]:
                left[digest] -= 1
            else:
                kept.append(number)
        picked.keep(kept)

    def _digest(self, reading: Raw) -> bytes:
        # A derived id is another one after a move.
        parts = {name: value for name, value in reading.items() if name != "_id" or self.spec.stores_id}
        encoded = bson.encode(dict(sorted(parts.items())), codec_options=CODEC_OPTIONS)
        return hashlib.blake2b(encoded, digest_size=16).digest()

    def _write_back(self, picked: Picked, afters: Sequence[Raw | None]) -> tuple[Any, list[Raw]]:
        """Return what writes a bucket with its changed readings, and those that must move to another."""
        spec, bucket = self.spec, picked.bucket
        changed: dict[int, Raw | None] = {}
        leaving: list[Raw] = []
        for place, before, after in zip(picked.places, picked.befores, afters, strict=True):
            if after is not None:
                self._require_readable(before, after)
            if after is not None and self._must_move(bucket, before, after):
                leaving.append(after)
                after = None
            changed[place] = None if after is None else spec.to_element(after)
        return write_readings(spec, bucket, picked.elements, changed), leaving

    def _require_readable(self, before: Raw, after: Raw) -> None:
        """Refuse to store what could not be read back; the validator does not look at each reading.

        A reading that another program wrote and that cannot be read may stay so.
        """
        problem = self._problem(after)
        if problem is not None and self._problem(before) is None:
            raise DataError(
                f"this leaves a {self.spec.label} that does not fit its model ({problem.message})",
                code="validator-refused",
            )

    def _problem(self, reading: Raw) -> DataError | None:
        try:
            self.spec.codec.load(copy.deepcopy(reading))
        except DataError as error:
            return error
        return None

    def _must_move(self, bucket: Raw, before: Raw, after: Raw) -> bool:
        """Whether a changed reading belongs to another bucket, or has another unique value."""
        spec = self.spec
        if spec.unique is not None and not _same(spec.unique.stored, before, after):
            return True
        first, last = window_of(spec, bucket)
        stays = first <= after[spec.time.stored] <= last
        return not stays or not all(_same(name, after, bucket) for name in spec.series_fields)

    def _move(self, readings: Sequence[Raw]) -> Plan[None]:
        """Add readings that left their buckets to those where they belong."""
        if not readings:
            return
        duplicates = yield from self.append(readings)
        if duplicates:
            unique = self.spec.unique
            raise UsageError(
                f"this would give a {self.spec.label} the {unique and unique.name} of another one in its new "
                "bucket, which unique= forbids",
                code="reading-duplicate",
            )

    def append(self, readings: Sequence[Raw]) -> Plan[int]:
        """Append whole readings within the transaction. Returns the number of duplicates."""
        whole = dict.fromkeys(self.spec.series_fields)
        batches = group(self.spec, [{**whole, **copy.deepcopy(each)} for each in readings])
        return len((yield from self.writer.append_inside(batches)))


def write_readings(
    spec: Spec, bucket: Raw, elements: Sequence[Raw], changed: Mapping[int, Raw | None]
) -> Any:
    """Return the operation that writes a bucket with changed elements, without those that are None."""
    results = (changed.get(place, element) for place, element in enumerate(elements))
    left = [element for element in results if element is not None]
    identity = by_id(bucket["_id"])
    return UpdateOne(identity, replace_readings(spec, bucket, left)) if left else DeleteOne(identity)


def _same(name: str, one: Raw, other: Raw) -> bool:
    return same_key(one.get(name), other.get(name))


# -- what an update makes of a reading --------------------------------------------------------


def delete_readings(picked: Picked) -> Plan[Sequence[Raw | None]]:
    return [None] * len(picked.places)
    yield  # pragma: no cover (a plan that asks for nothing)


def compile_update(spec: Spec, update: Update) -> Change:
    """Return the change that an update of MongoDB's makes: operators in Python, a pipeline on the server."""
    if not isinstance(update, Mapping):
        stages: list[Raw] = [dict(stage) for stage in update]
        return lambda picked: _by_pipeline(spec, picked, stages)
    for name, fields in update.items():
        if name not in _OPERATORS:
            offered = ", ".join(sorted({*_OPERATORS} - {"$setOnInsert"}))
            raise UsageError(
                f"{name} is not offered on readings in buckets; use {offered} or a pipeline",
                code="update-invalid",
            )
        for path in fields:
            _check_path(name, path)
    return lambda picked: _by_operators(spec, picked, update)


def _by_operators(spec: Spec, picked: Picked, update: Mapping[str, Any]) -> Plan[Sequence[Raw | None]]:
    """Return what the operators of an update make of readings."""
    if "$currentDate" in update:
        # The server has a clock.
        update = {
            **update,
            "$currentDate": dict.fromkeys(update["$currentDate"], (yield from outside(clock))),
        }
    readings = copy.deepcopy(picked.befores)
    for reading in readings:
        for name, fields in update.items():
            for path, operand in fields.items():
                _OPERATORS[name](reading, path, operand)
    return [_checked(spec, reading) for reading in readings]


def _check_path(name: str, path: str) -> None:
    parts = path.split(".")
    if parts[0] == "_id":
        raise UsageError("the id of a reading cannot be updated", code="update-invalid")
    if parts[0] == RESERVED:
        raise UsageError(f"{RESERVED} is Treadle's own and cannot be updated", code="field-maintained")
    if any(not part or part.startswith("$") or part.isdigit() for part in parts):
        raise UsageError(
            f"{name} of {path!r}: positions in arrays are not offered on readings in buckets; use a pipeline",
            code="update-invalid",
        )


def _checked(spec: Spec, reading: Raw) -> Raw:
    """Refuse a reading without its date, or with something else than a number where there are statistics."""
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


def _by_pipeline(spec: Spec, picked: Picked, stages: list[Raw]) -> Plan[Sequence[Raw | None]]:
    """Return what the stages of an update make of readings, in their order."""
    rows: list[Raw] = [
        {"$match": {"_id": {"$eq": picked.bucket["_id"]}}},
        *unwind_stages(spec, mark={"place": "$place"}, with_bucket=True),
        {"$match": {f"{RESERVED}.place": {"$in": picked.places}}},
        {"$unset": RESERVED},
    ]
    results = yield from aggregate(spec.collection, [*rows, *stages])
    for before, after in zip(picked.befores, results, strict=True):
        if after.get("_id") is None:
            raise UsageError("the id of a reading cannot be removed by a pipeline", code="update-invalid")
        after["_id"] = before["_id"]
        after.pop(RESERVED, None)
    return [_checked(spec, each) for each in results]


def _set(reading: Raw, path: str, operand: Any) -> None:
    put(reading, path, copy.deepcopy(operand))


def _rename(reading: Raw, path: str, operand: Any) -> None:
    if has(reading, path):
        value = value_at(reading, path)
        drop(reading, path)
        put(reading, str(operand), value)


def _extreme(wins: Callable[[Any, Any], bool]) -> Operator:
    def apply(reading: Raw, path: str, operand: Any) -> None:
        if not has(reading, path) or wins(order_key(operand), order_key(value_at(reading, path))):
            put(reading, path, operand)

    return apply


def _arithmetic(
    name: str, of_numbers: Callable[[Any, Any], Any], of_decimals: Callable[..., Any]
) -> Operator:
    def apply(reading: Raw, path: str, operand: Any) -> None:
        current = _number_at(name, reading, path, operand)
        if isinstance(current, Decimal128) or isinstance(operand, Decimal128):
            put(reading, path, Decimal128(of_decimals(as_decimal(current), as_decimal(operand))))
        else:
            put(reading, path, of_numbers(current, operand))

    return apply


def _number_at(name: str, reading: Raw, path: str, operand: Any) -> Any:
    """Return the number that an operator changes; zero, of the operand's type, where there is none."""
    if not is_number(operand):
        raise UsageError(f"{name} takes a number, not {operand!r}", code="update-invalid")
    if not has(reading, path):
        return Decimal128("0") if isinstance(operand, Decimal128) else type(operand)(0)
    current = value_at(reading, path)
    if not is_number(current):
        raise UsageError(
            f"{name} of {path!r}: one of the readings has no number there", code="update-invalid"
        )
    return current


_OPERATORS: dict[str, Operator] = {
    "$set": _set,
    "$unset": lambda reading, path, operand: drop(reading, path),
    "$rename": _rename,
    "$min": _extreme(operator.lt),
    "$max": _extreme(operator.gt),
    "$inc": _arithmetic("$inc", operator.add, DECIMALS.add),
    "$mul": _arithmetic("$mul", operator.mul, DECIMALS.multiply),
    # Given the server's time.
    "$currentDate": _set,
    # A new document, of which it speaks, is never made.
    "$setOnInsert": lambda reading, path, operand: None,
}
