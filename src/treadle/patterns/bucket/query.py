"""A caller's filter and sort on readings, as queries of the buckets that hold them.

A filter is MongoDB's and speaks of whole readings. What it says about series,
times and measured values becomes a filter on buckets that misses no match.
The server then unwinds these buckets and judges each reading. Python knows
only the ids that are derived, which the server does not.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bson import MinKey, ObjectId
from bson.decimal128 import Decimal128

from treadle.errors import UsageError
from treadle.model.bson_types import RESERVED
from treadle.patterns.bucket.spec import YEAR_ONE, Spec, decode_id, milliseconds, to_datetime
from treadle.plan import Plan, Raw, aggregate
from treadle.query.filters import parse_filter, refuse_operators
from treadle.query.paths import top

_BOUNDS = frozenset({"$eq", "$gt", "$gte", "$lt", "$lte", "$in"})
_PLAIN_SHAPES = frozenset({"scalar", "enum", "literal"})
_PLAIN_TYPES = frozenset({bool, int, float, Decimal128, str, dt.datetime, ObjectId})
_REFUSED = frozenset({"$text", "$near", "$nearSphere", "$geoNear"})
_NOTHING: Raw = {"_id": {"$in": []}}

# The first and last millisecond, inclusive; None where open.
Times = tuple[int | None, int | None]
ALWAYS: Times = (None, None)
NEVER: Times = (1, 0)


@dataclass(frozen=True, slots=True)
class ReadingQuery:
    """A filter on readings, taken apart."""

    # The filter on buckets; it misses no bucket with a match.
    buckets: Raw
    times: Times = ALWAYS
    # The rest of the filter, which the server judges for each reading.
    rest: Raw | None = None
    # Derived ids that were asked for: hash of the series and time.
    ids: frozenset[tuple[int, int]] | None = None

    @property
    def takes_whole_buckets(self) -> bool:
        return self.times == ALWAYS and self.rest is None and self.ids is None


def split_filter(spec: Spec, filter: Any) -> ReadingQuery:
    """Return a caller's filter, taken apart; raises where it is not a filter."""
    cleaned = parse_filter(spec.entry.paths.fields, filter)
    refuse_operators(cleaned, _REFUSED, "cannot be used on readings in buckets", "filter-invalid")
    query, parts, rest = _split(spec, cleaned)
    if query.ids:
        counts = [count for _, count in query.ids]
        query = replace(query, times=narrowed(query.times, (min(counts), max(counts))))
    if rest and not spec.stores_id:
        _refuse_ids(rest)
    parts += times_filter(spec, query.times) + _id_buckets(spec, query.ids)
    return replace(query, buckets={"$and": parts} if parts else {}, rest={"$and": rest} if rest else None)


def _split(spec: Spec, filter: Raw) -> tuple[ReadingQuery, list[Raw], list[Raw]]:
    """Return times and ids of a filter, conditions on buckets, and conditions on each reading."""
    parts: list[Raw] = []
    rest: list[Raw] = []
    query = ReadingQuery({})
    for name, condition in _conjuncts(filter):
        if top(name) in spec.series_fields:
            parts.append({name: condition})
        elif name == "_id" and not spec.stores_id:
            query = replace(query, ids=_ids(condition, query.ids))
        elif name == spec.time.stored and (times := _times_of(condition)) is not None:
            query = replace(query, times=narrowed(query.times, times))
            if isinstance(condition, dict) and "$in" in condition:
                rest.append({name: condition})
        elif name != "$comment":
            rest.append({name: condition})
            parts += _bucket_conditions(spec, name, condition)
    return query, parts, rest


def _conjuncts(filter: Raw) -> Iterator[tuple[str, Any]]:
    """Yield the conditions of a filter that must all hold."""
    for name, condition in filter.items():
        if name == "$and" and isinstance(condition, list) and condition:
            for each in condition:
                if not isinstance(each, dict):
                    raise UsageError("$and takes a list of filters", code="filter-invalid")
                yield from _conjuncts(each)
        else:
            yield name, condition


def _bucket_conditions(spec: Spec, name: str, condition: Any) -> list[Raw]:
    """Return what a bucket must have for one of its readings to meet a condition."""
    if name == "$or" and isinstance(condition, list) and condition:
        branches = [_branch(spec, each) for each in condition]
        return [{"$or": branches}] if all(branches) else []
    field = spec.codec.by_stored.get(name)
    if field is None or field.stored in spec.shared or field.shape.kind not in _PLAIN_SHAPES:
        return []
    operators = condition if isinstance(condition, dict) else {"$eq": condition}
    plain = {key: value for key, value in operators.items() if key in _BOUNDS and _is_plain(value)}
    return [{f"{spec.names.readings}.{name}": plain}] if plain else []


def _branch(spec: Spec, filter: Any) -> Raw:
    """Return what a bucket must have for one branch of an `$or`; empty if it may have anything."""
    if not isinstance(filter, dict):
        return {}
    query, parts, _ = _split(spec, filter)
    parts += times_filter(spec, query.times)
    return {"$and": parts} if parts else {}


def _is_plain(value: Any) -> bool:
    """Whether a value matches elements of an array as it matches a field; null does not."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN_TYPES


# -- times ----------------------------------------------------------------------------------


def narrowed(one: Times, other: Times) -> Times:
    """Return the times that are in both ranges."""
    lows = [low for low, _ in (one, other) if low is not None]
    highs = [high for _, high in (one, other) if high is not None]
    return max(lows, default=None), min(highs, default=None)


def _times_of(condition: Any) -> Times | None:
    """Return the times that a condition allows; None where it is not a range."""
    operators = {"$eq": condition} if isinstance(condition, dt.datetime) else condition
    if not isinstance(operators, dict) or not operators or set(operators) - _BOUNDS:
        return None
    times = ALWAYS
    for name, operand in operators.items():
        values = operand if name == "$in" else [operand]
        if not isinstance(values, list) or not all(isinstance(each, dt.datetime) for each in values):
            return None
        counts = [milliseconds(each) for each in values]
        if not counts:
            return NEVER
        low = None if name in ("$lt", "$lte") else min(counts) + (name == "$gt")
        high = None if name in ("$gt", "$gte") else max(counts) - (name == "$lt")
        times = narrowed(times, (low, high))
    return times


def times_filter(spec: Spec, times: Times) -> list[Raw]:
    """Return conditions for the buckets of a range of times, the one that starts before it included."""
    (low, high), names = times, spec.names
    parts: list[Raw] = []
    if low is not None and high is not None and low > high:
        return [_NOTHING]
    if high is not None:
        parts.append({names.start: {"$lte": to_datetime(high)}})
    if low is not None and spec.span is not None:
        parts.append({names.start: {"$gte": to_datetime(max(spec.window(low), -YEAR_ONE))}})
    elif low is not None:
        parts.append({names.end: {"$gte": to_datetime(low)}})
    return parts


def time_condition(times: Times) -> Raw:
    """Return the condition on the time of a reading; empty where the range is open at both ends."""
    bounds = {"$gte": times[0], "$lte": times[1]}
    return {name: to_datetime(count) for name, count in bounds.items() if count is not None}


# -- derived ids ----------------------------------------------------------------------------


def _ids(condition: Any, known: frozenset[tuple[int, int]] | None) -> frozenset[tuple[int, int]]:
    values = [condition]
    if isinstance(condition, dict):
        if set(condition) == {"$eq"}:
            values = [condition["$eq"]]
        elif set(condition) == {"$in"} and isinstance(condition["$in"], list):
            values = condition["$in"]
        else:
            raise _ids_only()
    pairs = frozenset(pair for value in values if (pair := decode_id(value)) is not None)
    return pairs if known is None else pairs & known


def _ids_only() -> UsageError:
    return UsageError(
        "the id of a reading in a bucket is made of its series and its time; ask for {'_id': id} or "
        "{'_id': {'$in': ids}}, beside other conditions, or declare an id on the model",
        code="filter-invalid",
    )


def _refuse_ids(filters: Sequence[Any]) -> None:
    """Refuse conditions on a derived id that the server would have to judge."""
    for name, condition in [pair for each in filters if isinstance(each, dict) for pair in each.items()]:
        if name == "_id" or (
            name == "$expr" and any(word in str(condition) for word in ("$_id", "$$ROOT", "$$CURRENT"))
        ):
            raise _ids_only()
        if name in ("$and", "$or", "$nor") and isinstance(condition, list):
            _refuse_ids(condition)


def _id_buckets(spec: Spec, ids: frozenset[tuple[int, int]] | None) -> list[Raw]:
    """Return conditions for the buckets that may hold readings with these ids."""
    if ids is None:
        return []
    if not ids:
        return [_NOTHING]
    held = f"{spec.names.readings}.{spec.time.stored}"
    branches = [
        {"$and": [*times_filter(spec, (count, count)), {held: to_datetime(count)}]}
        for count in {count for _, count in ids}
    ]
    # The index begins with the series, which is unknown; this lets the server skip from one to the next.
    every = [{name: {"$gte": MinKey()}} for name in spec.key_names]
    return [*every, {"$or": branches}]


def identify(spec: Spec, query: ReadingQuery) -> Plan[tuple[ReadingQuery, int]]:
    """Return a query by series and time for one by derived ids, and how many readings have these ids."""
    if query.ids is None:
        return query, 0
    named = {name: f"${name}" for name in (*spec.key_names, spec.time.stored)}
    stages = [*reading_stages(spec, query), {"$group": {"_id": named, "count": {"$sum": 1}}}]
    rows = yield from aggregate(spec.collection, stages, allowDiskUse=True)
    # A group leaves out a field that is missing.
    readings = [({**dict.fromkeys(spec.key_names), **row["_id"]}, row["count"]) for row in rows]
    chosen = [pair for pair in readings if decode_id(spec.derived_id(pair[0])) in query.ids]
    branches = [{name: {"$eq": value} for name, value in reading.items()} for reading, _ in chosen]
    counts = [milliseconds(reading[spec.time.stored]) for reading, _ in chosen]
    if not branches:
        return ReadingQuery(_NOTHING), 0
    keys = {"$or": [spec.key_filter(spec.key_of(reading)) for reading, _ in chosen]}
    times = (min(counts), max(counts))
    rest = {"$and": [{"$or": branches}, query.rest or {}]}
    buckets = {"$and": [query.buckets, keys, *times_filter(spec, times)]}
    return ReadingQuery(buckets, times, rest), sum(count for _, count in chosen)


# -- pipelines ------------------------------------------------------------------------------


def unwind_stages(
    spec: Spec,
    *,
    header: Raw | None = None,
    mark: Raw | None = None,
    damaged: Sequence[Any] = (),
    with_bucket: bool = False,
) -> list[Raw]:
    """Return the stages that make a row of each reading in a bucket.

    A row has the series fields and those of the reading; `with_bucket`, also
    the bucket's id until the reading's own replaces it. `mark` is added to each
    row. A `header` is a row of its own before the readings of its bucket.
    `damaged` are the readings of a bucket whose array is not one. What is no
    document in the array makes a row without reading fields.
    """
    held = f"${spec.names.readings}"
    readings: Any = {"$cond": [{"$isArray": held}, held, list(damaged)]}
    if header is not None:
        readings = {"$concatArrays": [[{RESERVED: header}], readings]}
    outer = {name: f"${name}" for name in spec.series_fields}
    if with_bucket:
        outer = {"_id": "$_id", **outer}
    element = {"$cond": [{"$eq": [{"$type": "$reading"}, "object"]}, "$reading", None]}
    unwind: Raw = {"path": "$reading"} if mark is None else {"path": "$reading", "includeArrayIndex": "place"}
    marked = [] if mark is None else [{RESERVED: mark}]
    return [
        {"$project": {"_id": int(with_bucket), "outer": outer, "reading": readings}},
        {"$unwind": unwind},
        {"$replaceWith": {"$mergeObjects": ["$outer", element, *marked]}},
    ]


def wanted(spec: Spec, query: ReadingQuery) -> Raw:
    """Return the condition on a row; empty where all rows are wanted."""
    at = time_condition(query.times)
    parts = [{spec.time.stored: at}] if at else []
    if query.rest is not None:
        parts.append(query.rest)
    return {"$and": parts} if parts else {}


def reading_stages(spec: Spec, query: ReadingQuery) -> list[Raw]:
    """Return the stages that make a row of each reading that a query means; damaged ones are left out."""
    dated = {spec.time.stored: {"$type": "date"}}
    condition = {"$and": [dated, wanted(spec, query)]}
    return [{"$match": query.buckets}, *unwind_stages(spec), {"$match": condition}]


def positions(spec: Spec, query: ReadingQuery, ids: Sequence[Any]) -> list[Raw]:
    """Return the stages that tell bucket and place of each reading, in some buckets, that is meant."""
    mark = {"bucket": "$_id", "place": "$place"}
    return [
        {"$match": {"_id": {"$in": list(ids)}}},
        *unwind_stages(spec, mark=mark, with_bucket=True),
        {"$match": wanted(spec, query)},
        {"$project": {"_id": 0, RESERVED: 1}},
    ]
