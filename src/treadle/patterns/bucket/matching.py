"""Which readings a filter means: first the buckets that may hold them, then the readings.

A filter is MongoDB's and speaks of flat readings. What it says about series,
time and measured values becomes a filter on buckets that misses no match
(`Selection.buckets`). Then each reading is judged: by Python where the
condition compares plain values, which Python does exactly as the server does;
otherwise by the server, to which the readings are sent.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt
from typing import Any

import bson
from bson import Int64, MinKey, ObjectId
from bson.decimal128 import Decimal128

from treadle.errors import UsageError
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED
from treadle.patterns.bucket.contents import FIRST, LAST, readings_of, start_of
from treadle.patterns.bucket.grouping import BUCKET_BYTES_MAX
from treadle.patterns.bucket.spec import YEAR_ONE, Spec, milliseconds, moment, when_of
from treadle.plan import Plan, Raw, aggregate
from treadle.query.filters import parse_filter, refuse_operators
from treadle.query.paths import top

# Readings that the server filters in one query.
BUCKET_JUDGED_MAX = 2_000

Test = Callable[[Any], bool]
_BOUNDS = frozenset({"$eq", "$gt", "$gte", "$lt", "$lte", "$in"})
_PLAIN = frozenset({"scalar", "enum", "literal"})
_REFUSED = frozenset({"$text", "$near", "$nearSphere", "$geoNear"})
_NOTHING: Raw = {"_id": {"$in": []}}


@dataclass(slots=True)
class Selection:
    """A filter, taken apart."""

    buckets: Raw
    # The readings' times, in milliseconds, both ends included; None where open.
    low: int | None = None
    high: int | None = None
    # What remains to be judged per reading: by Python, or by the server.
    predicate: Test | None = None
    residual: Raw | None = None
    # Derived ids that were asked for: series and time.
    ids: frozenset[tuple[int, int]] | None = None

    @property
    def whole(self) -> bool:
        """Whether all readings of the buckets are meant, as far as the time does not say otherwise."""
        return self.predicate is None and self.residual is None and self.ids is None

    @property
    def times(self) -> tuple[dt.datetime, dt.datetime]:
        """The first and the last moment that is meant."""
        return (
            FIRST if self.low is None else moment(self.low),
            LAST if self.high is None else moment(self.high),
        )

    def narrow(self, low: int | None, high: int | None) -> None:
        if low is not None:
            self.low = low if self.low is None else max(self.low, low)
        if high is not None:
            self.high = high if self.high is None else min(self.high, high)


def select(spec: Spec, filter: Any) -> Selection:
    """Take a caller's filter apart; raises where it is no filter."""
    cleaned = parse_filter(spec.entry.paths.fields, filter)
    refuse_operators(cleaned, _REFUSED, "cannot be used on readings in buckets", "filter-invalid")
    selection = Selection({})
    parts, rest = _take_apart(spec, cleaned, selection)
    if rest:
        remaining = rest[0] if len(rest) == 1 else {"$and": rest}
        selection.predicate = compile_predicate(spec, remaining)
        if selection.predicate is None:
            _refuse_ids(spec, remaining)
            selection.residual = remaining
    parts += times_filter(spec, selection) + _id_buckets(spec, selection)
    selection.buckets = {"$and": parts} if parts else {}
    return selection


def _take_apart(spec: Spec, filter: Raw, selection: Selection) -> tuple[list[Raw], list[Raw]]:
    """What a bucket must have for one of its readings to match, and what is to be judged per reading.

    What the filter says about times and derived ids goes into the selection.
    """
    parts: list[Raw] = []
    rest: list[Raw] = []
    for name, condition in _conjuncts(filter):
        if top(name) in spec.outer_names:
            parts.append({name: condition})
        elif name == "_id" and not spec.stores_id:
            selection.ids = _ids(condition, selection.ids)
        elif name == spec.time.stored and (bounds := _bounds(condition)) is not None:
            selection.narrow(*bounds)
            if isinstance(condition, dict) and "$in" in condition:
                rest.append({name: condition})
        elif name != "$comment":
            rest.append({name: condition})
            if name == "$or" and isinstance(condition, list) and condition:
                branches = [_branch(spec, each) for each in condition]
                parts += [{"$or": branches}] if all(branches) else []
            elif name in spec.value_names:
                parts += _of_value(spec, name, condition)
    return parts, rest


def _branch(spec: Spec, filter: Any) -> Raw:
    """What a bucket must have for one branch of an `$or`; empty if it may have anything."""
    if not isinstance(filter, dict):
        return {}
    selection = Selection({})
    parts, _ = _take_apart(spec, filter, selection)
    parts += times_filter(spec, selection)
    return {"$and": parts} if parts else {}


def _conjuncts(filter: Raw) -> Iterator[tuple[str, Any]]:
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
    values = [condition]
    if isinstance(condition, dict):
        if set(condition) == {"$eq"}:
            values = [condition["$eq"]]
        elif set(condition) == {"$in"} and isinstance(condition["$in"], list):
            values = condition["$in"]
        else:
            raise _ids_only()
    pairs = frozenset(pair for value in values if (pair := when_of(value)) is not None)
    return pairs if known is None else pairs & known


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
        return [_NOTHING]
    # The index begins with the series, which is not known; this lets the server skip from one to the next.
    every = [{name: {"$gte": MinKey()}} for name in spec.key_names]
    return [*every, {"$or": branches} if len(branches) > 1 else branches[0]]


# -- times ----------------------------------------------------------------------------------


def _bounds(condition: Any) -> tuple[int | None, int | None] | None:
    """The first and last millisecond that a condition allows; None where it says something else."""
    operators = {"$eq": condition} if isinstance(condition, dt.datetime) else condition
    if not isinstance(operators, dict) or not operators or set(operators) - _BOUNDS:
        return None
    bounds = Selection({})
    for name, operand in operators.items():
        values = operand if name == "$in" else [operand]
        if not isinstance(values, list) or not all(isinstance(each, dt.datetime) for each in values):
            return None
        counts = [milliseconds(each) for each in values]
        if not counts:
            return 1, 0
        bounds.narrow(
            None if name in ("$lt", "$lte") else min(counts) + (name == "$gt"),
            None if name in ("$gt", "$gte") else max(counts) - (name == "$lt"),
        )
    return bounds.low, bounds.high


def times_filter(spec: Spec, selection: Selection) -> list[Raw]:
    """The buckets whose window meets the times; the one that starts before them is among these."""
    low, high, names = selection.low, selection.high, spec.names
    parts: list[Raw] = []
    if low is not None and high is not None and low > high:
        return [_NOTHING]
    if high is not None:
        parts.append({names.start: {"$lte": moment(high)}})
    if low is not None and spec.span is not None:
        parts.append({names.start: {"$gte": moment(max(spec.window(low), -YEAR_ONE))}})
    elif low is not None:
        parts.append({names.end: {"$gte": moment(low)}})
    return parts


# -- measured values ------------------------------------------------------------------------


def _of_value(spec: Spec, name: str, condition: Any) -> list[Raw]:
    """What a bucket must have for one of its readings to have such a value."""
    field = spec.codec.by_stored.get(name)
    if field is None or field.shape.kind not in _PLAIN:
        return []
    operators = condition if isinstance(condition, dict) else {"$eq": condition}
    positive = {key: value for key, value in operators.items() if key in _BOUNDS and _is_plain(value, key)}
    if not positive:
        return []
    if any(stat.path == name for stat in spec.stats):
        parts = _of_statistics(f"{spec.names.stats}.{name}", positive)
        if parts:
            return parts
    return [{f"{spec.names.readings}.{name}": positive}]


def _is_plain(value: Any, operator: str) -> bool:
    if operator == "$in":
        return isinstance(value, list) and all(_is_plain(each, "") for each in value)
    return kind_of(value) not in (None, "null") and value == value


def _of_statistics(path: str, operators: Raw) -> list[Raw]:
    parts: list[Raw] = []
    for operator, value in operators.items():
        if operator == "$in" or kind_of(value) != "number":
            continue
        # A bucket that somebody else wrote may lack the statistics.
        if operator in ("$gt", "$gte", "$eq"):
            most = f"{path}.max"
            parts.append({"$or": [{most: {"$gte" if operator == "$eq" else operator: value}}, {most: None}]})
        if operator in ("$lt", "$lte"):
            # A value that is not a number comes before all others and hides the smallest one.
            least = f"{path}.min"
            parts.append({"$or": [{least: {operator: value}}, {least: {"$in": [None, *_NOT_A_NUMBER]}}]})
    return parts


_NOT_A_NUMBER = [float("nan"), Decimal128("NaN")]


# -- judging by Python ----------------------------------------------------------------------

_KINDS: dict[type, str] = {
    type(None): "null", bool: "bool", int: "number", Int64: "number", float: "number", Decimal128: "number",
    str: "text", dt.datetime: "date", ObjectId: "id",
}  # fmt: skip
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": eq, "$gt": gt, "$gte": ge, "$lt": lt, "$lte": le,
}  # fmt: skip


def kind_of(value: Any) -> str | None:
    """What a value can be compared with; None where only the server knows."""
    return _KINDS.get(type(value))


def compile_predicate(spec: Spec, filter: Raw) -> Test | None:
    """A filter as a Python function that judges as the server would; None where that is not certain."""
    tests: list[Test | None] = []
    for name, condition in filter.items():
        if name in _JOINS:
            if not isinstance(condition, list) or not condition:
                return None
            inner = [compile_predicate(spec, each) if isinstance(each, dict) else None for each in condition]
            tests.append(_joined(inner, _JOINS[name]))
        elif name.startswith("$") or (name == "_id" and not spec.stores_id):
            return None
        else:
            tests.append(_field_test(spec, name, condition))
    return _joined(tests, all)


def _joined(tests: Sequence[Test | None], join: Callable[[Iterable[bool]], bool]) -> Test | None:
    """Whether all, any or none of the tests hold; None where one of them is not certain."""
    certain = [test for test in tests if test is not None]
    if len(certain) < len(tests):
        return None
    if len(certain) == 1 and join is not _none:
        return certain[0]
    return lambda value: join(test(value) for test in certain)


def _none(values: Iterable[bool]) -> bool:
    return not any(values)


_JOINS = {"$and": all, "$or": any, "$nor": _none}


def _field_test(spec: Spec, name: str, condition: Any) -> Test | None:
    field = spec.codec.by_stored.get(name)
    if field is None or field.shape.kind not in _PLAIN:
        return None
    is_operators = isinstance(condition, dict) and any(key.startswith("$") for key in condition)
    operators = condition if is_operators else {"$eq": condition}
    test = _joined([_value_test(*each) for each in operators.items()], all)
    return None if test is None else lambda reading: test(reading.get(name))


def _value_test(operator: str, operand: Any) -> Test | None:
    if operator in ("$in", "$nin"):
        members = [_value_test("$eq", each) for each in operand] if isinstance(operand, list) else [None]
        return _joined(members, any if operator == "$in" else _none)
    if operator == "$ne":
        return _joined([_value_test("$eq", operand)], _none)
    kind, compare, plain = kind_of(operand), _COMPARE.get(operator), _plain(operand)
    if kind == "null" and operator == "$eq":
        return lambda value: value is None
    if kind in (None, "null") or compare is None or plain != plain:
        return None
    return lambda value: kind_of(value) == kind and compare(_plain(value), plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal128):
        number = value.to_decimal()
        # A comparison with a decimal that is not a number would raise.
        return float("nan") if number.is_nan() else number
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return decimal.Decimal(value)
    return value


# -- the readings of some buckets -----------------------------------------------------------


@dataclass(slots=True)
class Opened:
    """A bucket, its inner readings, and the positions of those that match."""

    bucket: Raw
    readings: list[Raw]
    picked: list[int]
    series: int


def open_buckets(spec: Spec, selection: Selection, buckets: Iterable[Raw]) -> Plan[list[Opened]]:
    """The buckets with the readings that the selection means."""
    opened = [_open(spec, selection, bucket) for bucket in buckets]
    if selection.residual is not None:
        yield from _judge(spec, selection.residual, opened)
    return opened


def _open(spec: Spec, selection: Selection, bucket: Raw) -> Opened:
    # Refuses a bucket without a start, by which readers put buckets in order.
    start_of(spec, bucket)
    readings = readings_of(spec, bucket)
    series = spec.series_of(bucket)
    picked = list(range(len(readings)))
    time = spec.time.stored
    if selection.low is not None or selection.high is not None:
        first, last = selection.times
        picked = [place for place in picked if first <= readings[place][time] <= last]
    if selection.ids is not None:
        picked = [place for place in picked if (series, milliseconds(readings[place][time])) in selection.ids]
    if selection.predicate is not None:
        outer = {name: bucket.get(name) for name in spec.outer_names}
        predicate = selection.predicate
        picked = [place for place in picked if predicate({**outer, **readings[place]})]
    return Opened(bucket, readings, picked, series)


def _judge(spec: Spec, residual: Raw, opened: Sequence[Opened]) -> Plan[None]:
    """Let the server say which of the picked readings match."""
    candidates = [(each, place) for each in opened for place in each.picked]
    for each in opened:
        each.picked = []
    chunk: list[Raw] = []
    size = 0
    for index, (each, place) in enumerate(candidates):
        outer = {name: each.bucket.get(name) for name in spec.outer_names}
        chunk.append({**outer, **each.readings[place], RESERVED: {"place": index}})
        size += len(bson.encode(chunk[-1], codec_options=CODEC_OPTIONS))
        full = len(chunk) >= BUCKET_JUDGED_MAX or size >= BUCKET_BYTES_MAX
        if full or index == len(candidates) - 1:
            for match in (yield from on_server(spec, chunk, [{"$match": residual}])):
                owner, position = candidates[match[RESERVED]["place"]]
                owner.picked.append(position)
            chunk, size = [], 0


def on_server(spec: Spec, documents: Sequence[Raw], stages: Sequence[Raw]) -> Plan[list[Raw]]:
    """What pipeline stages make of documents that are not stored; the collection holds at least one."""
    sent: list[Raw] = [
        {"$limit": 1}, {"$project": {"_id": 0, "d": {"$literal": list(documents)}}}, {"$unwind": "$d"},
        {"$replaceWith": "$d"},
    ]  # fmt: skip
    return (yield from aggregate(spec.collection, [*sent, *stages]))
