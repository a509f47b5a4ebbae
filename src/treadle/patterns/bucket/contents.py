"""The readings of one bucket, an array of sub-documents, and their statistics."""

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
from treadle.patterns.bucket.spec import MILLISECOND, Spec, Stat, milliseconds, moment, state
from treadle.plan import Raw
from treadle.query.comparison import DECIMALS, number_key
from treadle.query.paths import put, value_at

FIRST = dt.datetime.min.replace(tzinfo=dt.UTC)
LAST = dt.datetime.max.replace(tzinfo=dt.UTC)
INT_MIN, INT_MAX = -(2**63), 2**63 - 1


def damaged(spec: Spec, bucket: Raw, why: str) -> DataError:
    return DataError(
        f"the bucket {bucket.get('_id')!r} of {spec.label} in {spec.collection} cannot be read: {why}; "
        "restore it from a backup, or delete it",
        code="bucket-damaged",
    )


def start_of(spec: Spec, bucket: Raw) -> int:
    start = bucket.get(spec.names.start)
    if not isinstance(start, dt.datetime):
        raise damaged(spec, bucket, f"its {spec.names.start!r} is no date")
    return milliseconds(start)


def window_of(spec: Spec, bucket: Raw) -> tuple[dt.datetime, dt.datetime]:
    """The first and last moment of a bucket's window; no moment is in one that starts at a wrong time."""
    start = start_of(spec, bucket)
    if spec.span is None:
        following = state(bucket, "next")
        if not isinstance(following, dt.datetime | None):
            raise damaged(spec, bucket, "the start of the next one is no date")
        return moment(start), LAST if following is None else following - MILLISECOND
    return (moment(start), moment(spec.last(start))) if spec.window(start) == start else (LAST, FIRST)


def readings_of(spec: Spec, bucket: Raw) -> list[Raw]:
    """The inner readings of a bucket, each with its time."""
    time, readings = spec.time.stored, bucket.get(spec.names.readings)
    if not isinstance(readings, list):
        raise damaged(spec, bucket, f"its {spec.names.readings!r} is no array")
    for each in readings:
        if not isinstance(each, dict) or not isinstance(each.get(time), dt.datetime):
            raise damaged(spec, bucket, f"one of its readings has no date in {time!r}")
    return readings


def column(rows: Sequence[Raw], path: str) -> list[Any]:
    """The values of one field."""
    try:
        # What is not dotted is read at once, unless others wrote it and left the field out.
        return list(map(itemgetter(path), rows))
    except KeyError:
        return [value_at(row, path) for row in rows]


# -- statistics ---------------------------------------------------------------------------


def values_of(stat: Stat, readings: Sequence[Raw]) -> list[Any]:
    """The numbers of one field, without what is none."""
    values = column(readings, stat.path)
    if not stat.decimal and not stat.optional and None not in values:
        return values
    return [value for value in values if is_number(value)]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal128)) and not isinstance(value, bool)


def aggregate_of(values: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Min, max and sum, as the server would order and add them; `values` is not empty."""
    try:
        total = sum(values)
        if total == total:
            # Whole numbers whose sum needs more than 64 bits have an approximate one.
            whole = type(total) is not int or INT_MIN <= total <= INT_MAX
            return min(values), max(values), total if whole else float(total)
    except TypeError:
        # Decimals, or text that somebody wrote where numbers belong.
        pass
    return _careful([value for value in values if is_number(value)])


def _careful(values: Sequence[Any]) -> tuple[Any, Any, Any]:
    """The same for decimals, and where something is not a number: NaN comes before all numbers."""
    if not values:
        return None, None, 0
    low, high = min(values, key=number_key), max(values, key=number_key)
    if not any(isinstance(value, Decimal128) for value in values):
        return low, high, sum(values)
    return low, high, Decimal128(functools.reduce(DECIMALS.add, map(as_decimal, values)))


def as_decimal(value: Any) -> decimal.Decimal:
    if isinstance(value, Decimal128):
        return value.to_decimal()
    return decimal.Decimal(repr(value)) if isinstance(value, float) else decimal.Decimal(value)


def stats_of(spec: Spec, readings: Sequence[Raw]) -> Raw:
    """The `stats` of a bucket with these readings; a field without any number is not there."""
    stats: Raw = {}
    for stat in spec.stats:
        values = values_of(stat, readings)
        if not values:
            continue
        low, high, total = aggregate_of(values)
        entry = {"min": low, "max": high, "sum": total}
        put(stats, stat.path, {**entry, "count": len(values)} if stat.optional else entry)
    return stats


def parts_of(spec: Spec, start: int, readings: Sequence[Raw]) -> Raw:
    """Count, statistics and end of a bucket, from its readings; `readings` is not empty."""
    names = spec.names
    if spec.span is not None:
        end = spec.last(start)
    else:
        end = max(milliseconds(row[spec.time.stored]) for row in readings)
    return {
        names.count: len(readings),
        names.end: moment(end),
        **({names.stats: stats_of(spec, readings)} if spec.stats else {}),
    }


# -- writing a bucket back ----------------------------------------------------------------


def guard(spec: Spec, bucket: Raw) -> Raw:
    """The filter that a bucket meets only as long as nobody changed it."""
    revision = state(bucket, "n")
    return {
        "_id": {"$eq": bucket["_id"]},
        spec.names.count: {"$eq": bucket.get(spec.names.count)},
        REVISION: {"$exists": False} if revision is None else {"$eq": revision},
    }


def rewrite(spec: Spec, bucket: Raw, readings: Sequence[Raw]) -> Raw:
    """The update that gives a bucket these readings."""
    sets = {spec.names.readings: list(readings), **parts_of(spec, start_of(spec, bucket), readings)}
    return {"$set": sets, "$inc": {REVISION: 1}}
