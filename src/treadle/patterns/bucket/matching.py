"""Which readings a filter means: first the buckets that can hold them, then the readings.

A filter is MongoDB's and speaks of flat readings. What it says about series,
time and measured values becomes a filter on buckets that lets no match slip
(`Selection.buckets`). Then each reading is judged: by Python where the
condition compares plain values, which Python does exactly as the server does;
otherwise by the server, to which the unpacked readings are sent.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import bson
from bson import MinKey, ObjectId
from bson.decimal128 import Decimal128

from treadle.errors import UsageError
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED
from treadle.patterns.bucket.contents import readings_of
from treadle.patterns.bucket.spec import Spec, milliseconds, moment, when_of
from treadle.plan import Plan, Raw, aggregate
from treadle.query.paths import top
from treadle.query.safety import clean_filter

Predicate = Callable[[Raw], bool]
_BOUNDS = frozenset({"$eq", "$gt", "$gte", "$lt", "$lte", "$in"})
_PLAIN = frozenset({"scalar", "enum", "literal"})
_REFUSED = frozenset({"$text", "$near", "$nearSphere", "$geoNear"})


@dataclass(slots=True)
class Selection:
    """A filter, taken apart."""

    buckets: Raw
    # The readings' times, in milliseconds, both ends included; None where open.
    low: int | None = None
    high: int | None = None
    # What remains to be judged per reading: by Python, or by the server.
    predicate: Predicate | None = None
    residual: Raw | None = None
    # Derived ids that were asked for: series and time.
    ids: frozenset[tuple[int, int]] | None = None

    @property
    def whole(self) -> bool:
        """Whether all readings of the buckets are meant, as far as the time does not say otherwise."""
        return self.predicate is None and self.residual is None and self.ids is None


def select(spec: Spec, filter: Any) -> Selection:
    """Take a caller's filter apart; raises where it is no filter."""
    cleaned = clean_filter(spec.codec, filter)
    _refuse_operators(cleaned)
    selection = Selection({})
    outer: list[Raw] = []
    rest: list[Raw] = []
    for name, condition in _conjuncts(cleaned):
        if name == "$comment":
            continue
        if name == "_id" and not spec.stores_id:
            selection.ids = _ids(condition, selection.ids)
        elif top(name) in spec.outer_names:
            outer.append({name: condition})
        elif name == spec.time.stored and (bounds := _bounds(condition)) is not None:
            _narrow(selection, bounds)
            if isinstance(condition, dict) and "$in" in condition:
                rest.append({name: condition})
        else:
            rest.append({name: condition})
    if rest:
        remaining = rest[0] if len(rest) == 1 else {"$and": rest}
        selection.predicate = compile_predicate(spec, remaining)
        if selection.predicate is None:
            _refuse_ids(spec, remaining)
            selection.residual = remaining
    parts = [
        *outer,
        *(each for part in rest for each in _necessary(spec, part)),
        *times_filter(spec, selection),
    ]
    parts += _id_buckets(spec, selection)
    selection.buckets = {"$and": parts} if parts else {}
    return selection


def _refuse_operators(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in _REFUSED:
                raise UsageError(f"{key} cannot be used on readings in buckets", code="filter-invalid")
            _refuse_operators(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_operators(item)


def _conjuncts(filter: Raw) -> Iterable[tuple[str, Any]]:
    for name, condition in filter.items():
        if name == "$and" and isinstance(condition, list) and condition:
            for each in condition:
                if not isinstance(each, dict):
                    raise UsageError("$and takes a list of filters", code="filter-invalid")
                yield from _conjuncts(each)
        else:
            yield name, condition


# -- ids ------------------------------------------------------------------------------------


def _ids(condition: Any, known: frozenset[tuple[int, int]] | None) -> frozenset[tuple[int, int]]:
    if isinstance(condition, dict) and set(condition) == {"$in"} and isinstance(condition["$in"], list):
        values = condition["$in"]
    elif isinstance(condition, dict) and set(condition) == {"$eq"}:
        values = [condition["$eq"]]
    elif isinstance(condition, dict):
        raise _ids_only()
    else:
        values = [condition]
    found = frozenset(pair for value in values if (pair := when_of(value)) is not None)
    return found if known is None else found & known


def _ids_only() -> UsageError:
    return UsageError(
        "the id of a reading in a bucket is made of its series and its time; ask for {'_id': id} or "
        "{'_id': {'$in': ids}}, beside other conditions, or declare an id on the model",
        code="filter-invalid",
    )


def _refuse_ids(spec: Spec, filter: Any) -> None:
    """A derived id is not stored, so the server cannot judge it."""
    if spec.stores_id:
        return
    for name, condition in filter.items():
        if name == "_id" or (
            name == "$expr" and any(word in str(condition) for word in ("$_id", "$$ROOT", "$$CURRENT"))
        ):
            raise _ids_only()
        if name in ("$and", "$or", "$nor") and isinstance(condition, list):
            for each in condition:
                if isinstance(each, dict):
                    _refuse_ids(spec, each)


def _id_buckets(spec: Spec, selection: Selection) -> list[Raw]:
    if selection.ids is None:
        return []
    branches: list[Raw] = []
    for _, count in selection.ids:
        try:
            branches.append({"$and": times_filter(spec, Selection({}, count, count))})
        except OverflowError:
            # An ObjectId from elsewhere; no reading has such a time.
            continue
    if not branches:
        return [{"_id": {"$in": []}}]
    # The index begins with the series, which is not known; this lets the server skip from one to the next.
    every = [{name: {"$gte": MinKey()}} for name in spec.key_names]
    return [*every, {"$or": branches} if len(branches) > 1 else branches[0]]


# -- times ----------------------------------------------------------------------------------


def _bounds(condition: Any) -> tuple[int | None, int | None] | None:
    """The first and last millisecond that a condition allows; None where it says something else."""
    if isinstance(condition, dt.datetime):
        count = milliseconds(condition)
        return count, count
    if not isinstance(condition, dict) or not condition or set(condition) - _BOUNDS:
        return None
    low: int | None = None
    high: int | None = None
    for operator, operand in condition.items():
        values = operand if operator == "$in" else [operand]
        if not isinstance(values, list) or not all(isinstance(each, dt.datetime) for each in values):
            return None
        counts = [milliseconds(each) for each in values]
        if not counts:
            return 1, 0
        if operator != "$lt" and operator != "$lte":
            least = min(counts) + (operator == "$gt")
            low = least if low is None else max(low, least)
        if operator != "$gt" and operator != "$gte":
            most = max(counts) - (operator == "$lt")
            high = most if high is None else min(high, most)
    return low, high


def _narrow(selection: Selection, bounds: tuple[int | None, int | None]) -> None:
    low, high = bounds
    if low is not None:
        selection.low = low if selection.low is None else max(selection.low, low)
    if high is not None:
        selection.high = high if selection.high is None else min(selection.high, high)


def times_filter(spec: Spec, selection: Selection) -> list[Raw]:
    """The buckets whose window meets the times; the one that starts before them is among these."""
    low, high = selection.low, selection.high
    parts: list[Raw] = []
    if low is not None and high is not None and low > high:
        return [{"_id": {"$in": []}}]
    if low is None and high is None:
        # A document that is no bucket yet, because nobody adopted it so far.
        return [{spec.names.start: {"$exists": True}}]
    if high is not None:
        parts.append({spec.names.start: {"$lte": moment(high)}})
    if low is not None and spec.span is not None:
        parts.append({spec.names.start: {"$gte": moment(max(spec.window(low), _EARLIEST))}})
    elif low is not None:
        parts.append({spec.names.end: {"$gte": moment(low)}})
    return parts


_EARLIEST = -62_135_596_800_000


# -- what a bucket must have for one of its readings to match ----------------------------------


def _necessary(spec: Spec, filter: Raw) -> list[Raw]:
    found: list[Raw] = []
    for name, condition in filter.items():
        if name == "$or" and isinstance(condition, list) and condition:
            branches = [_branch(spec, each) for each in condition]
            if all(branches):
                found.append({"$or": branches})
        elif name == "$and" and isinstance(condition, list):
            for each in condition:
                found += _necessary(spec, each) if isinstance(each, dict) else []
        elif name in spec.value_names:
            found += _of_value(spec, name, condition)
    return found


def _branch(spec: Spec, filter: Any) -> Raw:
    """What one branch of an `$or` needs; empty if it may need nothing."""
    if not isinstance(filter, dict) or "_id" in filter:
        return {}
    selection = Selection({})
    parts: list[Raw] = []
    for name, condition in _conjuncts(filter):
        if top(name) in spec.outer_names:
            parts.append({name: condition})
        elif name == spec.time.stored and (bounds := _bounds(condition)) is not None:
            _narrow(selection, bounds)
        elif not name.startswith("$"):
            parts += _necessary(spec, {name: condition})
    if selection.low is not None or selection.high is not None:
        parts += times_filter(spec, selection)
    return {"$and": parts} if parts else {}


def _of_value(spec: Spec, name: str, condition: Any) -> list[Raw]:
    field = spec.codec.by_stored.get(name)
    if field is None or field.shape.kind not in _PLAIN:
        return []
    operators = condition if isinstance(condition, dict) else {"$eq": condition}
    positive = {key: value for key, value in operators.items() if key in _BOUNDS and _is_plain(value, key)}
    if not positive:
        return []
    if any(stat.path == name for stat in spec.stats):
        found = _of_statistics(f"{spec.names.stats}.{name}", positive)
        if found:
            return found
    # A packed bucket cannot be looked into; it may hold a match.
    binary = {spec.names.readings: {"$type": "binData"}}
    return [{"$or": [{f"{spec.names.readings}.{name}": positive}, binary]}]


def _is_plain(value: Any, operator: str) -> bool:
    if operator == "$in":
        return isinstance(value, list) and all(_is_plain(each, "") for each in value)
    return kind_of(value) not in (None, "null") and value == value


def _of_statistics(path: str, operators: Raw) -> list[Raw]:
    found: list[Raw] = []
    for operator, value in operators.items():
        if operator == "$in" or kind_of(value) != "number":
            continue
        # A bucket that somebody else wrote may lack the statistics.
        if operator in ("$gt", "$gte", "$eq"):
            most = f"{path}.max"
            found.append({"$or": [{most: {"$gte" if operator == "$eq" else operator: value}}, {most: None}]})
        if operator in ("$lt", "$lte"):
            # A value that is not a number comes before all others and hides the smallest one.
            least = f"{path}.min"
            found.append({"$or": [{least: {operator: value}}, {least: {"$in": [None, *_NOT_A_NUMBER]}}]})
    return found


_NOT_A_NUMBER = [float("nan"), Decimal128("NaN")]


# -- judging by Python ----------------------------------------------------------------------


def kind_of(value: Any) -> str | None:
    """What a value can be compared with; None where only the server knows."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float, Decimal128)):
        return "number"
    return _KINDS.get(type(value))


_KINDS: dict[type, str] = {str: "text", dt.datetime: "date", ObjectId: "id"}


def compile_predicate(spec: Spec, filter: Any) -> Predicate | None:
    """A filter as a Python function that judges as the server would; None where that is not certain."""
    tests: list[Predicate] = []
    for name, condition in filter.items():
        if name in ("$and", "$or", "$nor"):
            if not isinstance(condition, list) or not condition:
                return None
            inner = [compile_predicate(spec, each) if isinstance(each, dict) else None for each in condition]
            if None in inner:
                return None
            tests.append(_joined(name, [each for each in inner if each is not None]))
        elif name.startswith("$") or (name == "_id" and not spec.stores_id):
            return None
        else:
            test = _field_test(spec, name, condition)
            if test is None:
                return None
            tests.append(test)
    if len(tests) == 1:
        return tests[0]
    return lambda reading: all(test(reading) for test in tests)


def _joined(name: str, tests: list[Predicate]) -> Predicate:
    if name == "$and":
        return lambda reading: all(test(reading) for test in tests)
    if name == "$or":
        return lambda reading: any(test(reading) for test in tests)
    return lambda reading: not any(test(reading) for test in tests)


def _field_test(spec: Spec, name: str, condition: Any) -> Predicate | None:
    field = spec.codec.by_stored.get(name)
    if field is None or field.shape.kind not in _PLAIN:
        return None
    is_operators = isinstance(condition, dict) and any(key.startswith("$") for key in condition)
    operators = condition if is_operators else {"$eq": condition}
    tests = []
    for operator, operand in operators.items():
        test = _value_test(operator, operand)
        if test is None:
            return None
        tests.append(test)
    if len(tests) == 1:
        only = tests[0]
        return lambda reading: only(reading.get(name))
    return lambda reading: all(test(reading.get(name)) for test in tests)


def _value_test(operator: str, operand: Any) -> Callable[[Any], bool] | None:
    if operator in ("$in", "$nin"):
        if not isinstance(operand, list):
            return None
        members = [_value_test("$eq", each) for each in operand]
        if None in members:
            return None
        known = [each for each in members if each is not None]
        if operator == "$in":
            return lambda value: any(member(value) for member in known)
        return lambda value: not any(member(value) for member in known)
    if operator == "$ne":
        equal = _value_test("$eq", operand)
        return None if equal is None else lambda value: not equal(value)
    kind = kind_of(operand)
    if kind is None or operand != operand or (isinstance(operand, Decimal128) and _is_nan(operand)):
        return None
    if kind == "null":
        return (lambda value: value is None) if operator == "$eq" else None
    compare = _COMPARE.get(operator)
    if compare is None:
        return None
    plain = _plain(operand)
    return lambda value: kind_of(value) == kind and compare(_plain(value), plain)


def _is_nan(value: Decimal128) -> bool:
    return bool(value.to_decimal().is_nan())


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal128):
        number = value.to_decimal()
        # A comparison with a decimal that is not a number would raise.
        return float("nan") if number.is_nan() else number
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return decimal.Decimal(value)
    return value


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": lambda one, other: bool(one == other),
    "$gt": lambda one, other: bool(one > other),
    "$gte": lambda one, other: bool(one >= other),
    "$lt": lambda one, other: bool(one < other),
    "$lte": lambda one, other: bool(one <= other),
}


# -- the readings of some buckets -----------------------------------------------------------


@dataclass(slots=True)
class Opened:
    """A bucket, its inner readings, and the positions of those that match."""

    bucket: Raw
    readings: list[Raw]
    picked: Sequence[int]
    series: int


def open_buckets(
    spec: Spec, collection: str, selection: Selection, buckets: Iterable[Raw]
) -> Plan[list[Opened]]:
    """The buckets unpacked, with the readings that the selection means."""
    opened = [_open(spec, selection, bucket) for bucket in buckets]
    if selection.residual is not None:
        yield from _judge(spec, collection, selection.residual, opened)
    return opened


def _open(spec: Spec, selection: Selection, bucket: Raw) -> Opened:
    readings = readings_of(spec, bucket)
    series = spec.series_of(bucket)
    picked: Sequence[int] = range(len(readings))
    time, low, high = spec.time.stored, selection.low, selection.high
    if low is not None or high is not None:
        first = moment(low) if low is not None else _FIRST
        last = moment(high) if high is not None else _LAST
        picked = [place for place in picked if first <= readings[place][time] <= last]
    if selection.ids is not None:
        picked = [place for place in picked if (series, milliseconds(readings[place][time])) in selection.ids]
    if selection.predicate is not None:
        outer = {name: bucket.get(name) for name in spec.outer_names}
        predicate = selection.predicate
        picked = [place for place in picked if predicate({**outer, **readings[place]})]
    return Opened(bucket, readings, picked, series)


_FIRST = dt.datetime.min.replace(tzinfo=dt.UTC)
_LAST = dt.datetime.max.replace(tzinfo=dt.UTC)


def _judge(spec: Spec, collection: str, residual: Raw, opened: Sequence[Opened]) -> Plan[None]:
    """Let the server say which of the picked readings match."""
    places = [(number, place) for number, each in enumerate(opened) for place in each.picked]
    kept: dict[int, list[int]] = {number: [] for number in range(len(opened))}
    chunk: list[Raw] = []
    size = 0
    for index, (number, place) in enumerate(places):
        each = opened[number]
        reading = spec.flat(each.bucket, each.readings[place], each.series)
        if not spec.stores_id:
            del reading["_id"]
        chunk.append({**reading, RESERVED: {"place": index}})
        size += len(bson.encode(chunk[-1], codec_options=CODEC_OPTIONS))
        full = len(chunk) >= spec.limits.bucket_judged_max or size >= spec.limits.bucket_bytes_max
        if full or index == len(places) - 1:
            for found in (yield from on_server(collection, chunk, [{"$match": residual}])):
                owner, position = places[found[RESERVED]["place"]]
                kept[owner].append(position)
            chunk, size = [], 0
    for number, each in enumerate(opened):
        each.picked = sorted(kept[number])


def on_server(collection: str, documents: Sequence[Raw], stages: Sequence[Raw]) -> Plan[list[Raw]]:
    """What pipeline stages make of documents that are not stored; the collection holds at least one."""
    return (
        yield from aggregate(
            collection,
            [
                {"$limit": 1},
                {"$project": {"_id": 0, "d": {"$literal": list(documents)}}},
                {"$unwind": "$d"},
                {"$replaceWith": "$d"},
                *stages,
            ],
        )
    )
