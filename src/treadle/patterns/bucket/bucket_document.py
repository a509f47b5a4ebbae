"""A stored bucket: its readings, an array of documents, and the parts that follow from them."""

from __future__ import annotations

import datetime as dt
import decimal
import functools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from bson.decimal128 import Decimal128

from treadle.errors import DataError
from treadle.graph.rule import REVISION
from treadle.model.bson_types import RESERVED
from treadle.patterns.bucket.spec import FIRST, LAST, Spec, Stat, milliseconds, to_datetime
from treadle.plan import Raw
from treadle.query.comparison import DECIMALS, number_key
from treadle.query.paths import put, value_at

INT_MIN, INT_MAX = -(2**63), 2**63 - 1


def damaged(spec: Spec, identity: Any, reason: str) -> DataError:
    return DataError(
        f"the bucket {identity!r} of {spec.label} in {spec.collection} cannot be read: {reason}; "
        "restore it from a backup, or delete it",
        code="bucket-damaged",
    )


def start_of(spec: Spec, bucket: Raw) -> int:
    start = bucket.get(spec.names.start)
    if not isinstance(start, dt.datetime):
        raise damaged(spec, bucket.get("_id"), f"its {spec.names.start!r} is not a date")
    return milliseconds(start)


def window_of(spec: Spec, bucket: Raw) -> tuple[dt.datetime, dt.datetime]:
    """Return the first and last moment of a bucket's window; no moment is in a misaligned one."""
    start = start_of(spec, bucket)
    if spec.span is None:
        return FIRST, LAST
    if spec.window(start) != start:
        return LAST, FIRST
    return to_datetime(start), to_datetime(spec.last(start))


def readings_of(spec: Spec, bucket: Raw) -> list[Raw]:
    """Return the elements of a bucket, each with its time."""
    time, readings = spec.time.stored, bucket.get(spec.names.readings)
    if not isinstance(readings, list):
        raise damaged(spec, bucket.get("_id"), f"its {spec.names.readings!r} is not an array")
    for each in readings:
        if not isinstance(each, dict) or not isinstance(each.get(time), dt.datetime):
            raise damaged(spec, bucket.get("_id"), f"one of its readings has no date in {time!r}")
    return readings


def column(rows: Sequence[Raw], path: str) -> list[Any]:
    """Return the values of one field."""
    try:
        return list(map(itemgetter(path), rows))
    except KeyError:
        # A path into a nested model, or a field that another program left out.
        return [value_at(row, path) for row in rows]


# -- parts that follow from the readings --------------------------------------------------


def derived_parts(spec: Spec, start: int, readings: Sequence[Raw]) -> Raw:
    """Return start, end, count and statistics of a bucket, in this order; `readings` is not empty."""
    names, parts = spec.names, dict[str, Any]()
    if spec.span is not None:
        parts |= {names.start: to_datetime(start), names.end: to_datetime(spec.last(start))}
    else:
        times = column(readings, spec.time.stored)
        parts |= {names.start: min(times), names.end: max(times)}
    parts[names.count] = len(readings)
    if spec.stats:
        parts[names.stats] = stats_of(spec, readings)
    return parts


def replace_readings(spec: Spec, bucket: Raw, readings: Sequence[Raw]) -> Raw:
    """Return the update that gives a bucket these readings; raises its revision."""
    sets = {spec.names.readings: list(readings), **derived_parts(spec, start_of(spec, bucket), readings)}
    if isinstance(bucket.get(RESERVED, {}), dict):
        return {"$set": sets, "$inc": {REVISION: 1}}
    return {"$set": {**sets, RESERVED: {"n": 1}}}


def stats_of(spec: Spec, readings: Sequence[Raw]) -> Raw:
    """Return the `stats` of a bucket; a field without any number is left out."""
    stats: Raw = {}
    for stat in spec.stats:
        values = values_of(stat, readings)
        if values:
            low, high, total = aggregate_of(values)
            entry = {"min": low, "max": high, "sum": total}
            put(stats, stat.path, {**entry, "count": len(values)} if stat.optional else entry)
    return stats


def values_of(stat: Stat, readings: Sequence[Raw]) -> list[Any]:
    """Return the numbers of one field."""
    values = column(readings, stat.path)
    if set(map(type, values)) <= {int, float}:
        return values
    return [value for value in values if is_number(value)]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal128)) and not isinstance(value, bool)


def aggregate_of(values: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return min, max and sum of numbers, as the server orders and adds them; `values` is not empty."""
    has_decimals = any(type(value) is Decimal128 for value in values)
    total = None if has_decimals else sum(values)
    if total is not None and total == total:
        return min(values), max(values), in_64_bits(total)
    # NaN comes before all numbers.
    low, high = min(values, key=number_key), max(values, key=number_key)
    if has_decimals:
        total = Decimal128(functools.reduce(DECIMALS.add, map(as_decimal, values)))
    return low, high, total


def in_64_bits(total: Any) -> Any:
    """Return a sum as BSON can store it: a whole number that needs more than 64 bits becomes a float."""
    return total if type(total) is not int or INT_MIN <= total <= INT_MAX else float(total)


def as_decimal(value: Any) -> decimal.Decimal:
    if isinstance(value, Decimal128):
        return value.to_decimal()
    return decimal.Decimal(repr(value)) if isinstance(value, float) else decimal.Decimal(value)
