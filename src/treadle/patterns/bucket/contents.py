"""The readings of one bucket in their three stored forms, and their statistics.

*rows* is an array of sub-documents, as the literature draws it; *columns* is
an object with one array per field, the times as milliseconds since `start`;
*packed* is a binary (`packing.py`). A stored bucket shows its form by the type
of its readings, so a collection may hold several forms while it is converted.
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
from collections.abc import Container, Iterable, Sequence
from operator import itemgetter
from typing import Any

from bson.binary import Binary
from bson.decimal128 import Decimal128

from treadle.errors import DataError
from treadle.graph.pattern import REVISION
from treadle.patterns.bucket.packing import INT_MAX, INT_MIN, Damaged, pack, unpack
from treadle.patterns.bucket.spec import MILLISECOND, Form, Spec, Stat, milliseconds, moment, state
from treadle.plan import Raw
from treadle.query.comparison import DECIMALS, number_key
from treadle.query.paths import put, value_at

FIRST = dt.datetime.min.replace(tzinfo=dt.UTC)
LAST = dt.datetime.max.replace(tzinfo=dt.UTC)
_FORMS: tuple[tuple[type, Form], ...] = ((list, "rows"), (dict, "columns"), (bytes, "packed"))


def damaged(spec: Spec, bucket: Raw, why: str) -> DataError:
    return DataError(
        f"the bucket {bucket.get('_id')!r} of {spec.label} in {spec.collection} cannot be read: {why}; "
        "restore it from a backup, or delete it",
        code="bucket-damaged",
    )


def unknown_fields(spec: Spec, names: Iterable[str]) -> DataError:
    return DataError(
        f"a reading has the fields {', '.join(sorted(names))}, which {spec.label} does not declare; only "
        'layout="rows" keeps such fields',
        code="reading-field-unknown",
    )


def form_of(spec: Spec, bucket: Raw) -> Form:
    """How a stored bucket holds its readings."""
    held = bucket.get(spec.names.readings)
    for kind, form in _FORMS:
        if isinstance(held, kind):
            return form
    raise damaged(spec, bucket, f"its {spec.names.readings!r} is neither array, object nor binary")


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


def columns_of(
    spec: Spec, bucket: Raw, unread: Container[str] = ()
) -> tuple[list[dt.datetime], dict[str, list[Any]]]:
    """Times and columns of a bucket that holds no rows."""
    time, form, held = spec.time.stored, form_of(spec, bucket), bucket[spec.names.readings]
    first, start = start_of(spec, bucket), bucket[spec.names.start]
    try:
        if form == "packed":
            counts, columns = unpack(held, bucket.get(spec.names.count), unread)
            if time in columns:
                raise Damaged("it has two columns of times")
            return [start + (count - first) * MILLISECOND for count in counts], columns
        columns = {name: values for name, values in held.items() if name != time}
        times = [start + offset * MILLISECOND for offset in held.get(time)]
        if any(not isinstance(values, list) or len(values) != len(times) for values in columns.values()):
            raise damaged(spec, bucket, "its columns are not equally long")
        return times, columns
    except (Damaged, OverflowError, TypeError) as error:
        why = str(error) if form == "packed" else f"its times are no offsets ({error})"
        raise damaged(spec, bucket, why) from error


def readings_of(spec: Spec, bucket: Raw, unread: Container[str] = ()) -> list[Raw]:
    """The inner readings of a bucket, each a new dict with its time; packed ones without `unread` fields."""
    time = spec.time.stored
    if form_of(spec, bucket) == "rows":
        rows: list[Raw] = bucket[spec.names.readings]
        for row in rows:
            if not isinstance(row, dict) or not isinstance(row.get(time), dt.datetime):
                raise damaged(spec, bucket, f"one of its readings has no date in {time!r}")
        return rows
    times, columns = columns_of(spec, bucket, unread)
    names = (time, *columns)
    return [dict(zip(names, values, strict=True)) for values in zip(times, *columns.values(), strict=True)]


def columns_of_batch(spec: Spec, start: int, readings: Sequence[Raw], counts: Sequence[int] = ()) -> Raw:
    """The columns of new readings; `counts` are their times in milliseconds, if they are known."""
    time = spec.time.stored
    if len(counts) != len(readings):
        counts = [milliseconds(row[time]) for row in readings]
    columns = {name: column(readings, name) for name in spec.value_names}
    return {time: [count - start for count in counts], **columns}


def column(rows: Sequence[Raw], path: str) -> list[Any]:
    """The values of one field."""
    try:
        # What is not dotted is read at once, unless others wrote it and left the field out.
        return list(map(itemgetter(path), rows))
    except KeyError:
        return [value_at(row, path) for row in rows]


def stored_form(spec: Spec, form: Form, start: int, readings: Sequence[Raw]) -> Any:
    """What `readings` holds for these readings."""
    if form == "rows":
        return list(readings)
    columns = columns_of_batch(spec, start, readings)
    if any(len(row) > len(columns) or row.keys() - columns.keys() for row in readings):
        raise unknown_fields(spec, {name for row in readings for name in row} - columns.keys())
    if form == "columns":
        return columns
    offsets = columns.pop(spec.time.stored)
    try:
        return Binary(pack([start + offset for offset in offsets], columns))
    except Damaged as error:
        raise DataError(
            f"a bucket of {spec.label} is not packed: {error}; give the bucket a limit= or a shorter span=",
            code="bucket-too-large",
        ) from error


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


def guard(spec: Spec, bucket: Raw, *, light: bool = False) -> Raw:
    """The filter that a bucket meets only as long as nobody changed it; `light` leaves out its form."""
    revision = state(bucket, "n")
    unchanged = {
        "_id": {"$eq": bucket["_id"]},
        spec.names.count: {"$eq": bucket.get(spec.names.count)},
        REVISION: {"$exists": False} if revision is None else {"$eq": revision},
    }
    if light:
        return unchanged
    form = form_of(spec, bucket)
    if form == "columns":
        # An array of objects also passes for an object.
        return {**unchanged, f"{spec.names.readings}.{spec.time.stored}": {"$type": "array"}}
    return {**unchanged, spec.names.readings: {"$type": "array" if form == "rows" else "binData"}}


def rewrite(spec: Spec, bucket: Raw, readings: Sequence[Raw], form: Form | None = None) -> Raw:
    """The update that gives a bucket these readings, in its form or another."""
    start = start_of(spec, bucket)
    held = stored_form(spec, form or form_of(spec, bucket), start, readings)
    sets = {spec.names.readings: held, **parts_of(spec, start, readings)}
    return {"$set": sets, "$inc": {REVISION: 1}}
