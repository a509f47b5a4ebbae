"""The readings of one bucket in their three stored forms, and their statistics.

*rows* is an array of sub-documents, as the literature draws it; *columns* is
an object with one array per field, the times as milliseconds since `start`;
*packed* is a binary (`packing.py`). A stored bucket shows its form by the type
of its readings, so a collection may hold several forms while it is converted.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Literal

from bson.binary import Binary
from bson.decimal128 import Decimal128, create_decimal128_context

from treadle.errors import DataError
from treadle.patterns.bucket.packing import INT_MAX, INT_MIN, Damaged, pack, unpack
from treadle.patterns.bucket.spec import Spec, Stat, milliseconds, moment
from treadle.plan import Raw
from treadle.query.paths import put, value_at

Form = Literal["rows", "columns", "packed"]
_DECIMALS = create_decimal128_context()
_MILLISECOND = dt.timedelta(milliseconds=1)


def damaged(spec: Spec, bucket: Raw, why: str) -> DataError:
    return DataError(
        f"the bucket {bucket.get('_id')!r} of {spec.label} cannot be read: {why}; restore it from a backup, "
        "or delete it",
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
    if isinstance(held, list):
        return "rows"
    if isinstance(held, dict):
        return "columns"
    if isinstance(held, bytes):
        return "packed"
    raise damaged(spec, bucket, f"its {spec.names.readings!r} is neither array, object nor binary")


def start_of(spec: Spec, bucket: Raw) -> int:
    start = bucket.get(spec.names.start)
    if not isinstance(start, dt.datetime):
        raise damaged(spec, bucket, f"its {spec.names.start!r} is no date")
    return milliseconds(start)


def columns_of(spec: Spec, bucket: Raw) -> tuple[list[dt.datetime], dict[str, list[Any]]]:
    """Times and columns of a bucket, whatever its form."""
    form, held = form_of(spec, bucket), bucket[spec.names.readings]
    if form == "columns":
        return _spread(spec, bucket, held)
    if form == "packed":
        try:
            counts, columns = unpack(held)
            start = bucket[spec.names.start]
            first = start_of(spec, bucket)
            return [start + (count - first) * _MILLISECOND for count in counts], columns
        except (Damaged, OverflowError) as error:
            raise damaged(spec, bucket, str(error)) from error
    rows = readings_of(spec, bucket)
    names = dict.fromkeys(name for row in rows for name in row if name != spec.time.stored)
    return [row[spec.time.stored] for row in rows], {name: [row.get(name) for row in rows] for name in names}


def _spread(spec: Spec, bucket: Raw, held: Raw) -> tuple[list[dt.datetime], dict[str, list[Any]]]:
    offsets = held.get(spec.time.stored)
    columns = {name: values for name, values in held.items() if name != spec.time.stored}
    if not isinstance(offsets, list) or any(
        not isinstance(values, list) or len(values) != len(offsets) for values in columns.values()
    ):
        raise damaged(spec, bucket, "its columns are not equally long")
    start_of(spec, bucket)
    start = bucket[spec.names.start]
    try:
        return [start + offset * _MILLISECOND for offset in offsets], columns
    except (TypeError, OverflowError) as error:
        raise damaged(spec, bucket, f"its times are no offsets ({error})") from error


def readings_of(spec: Spec, bucket: Raw) -> list[Raw]:
    """The inner readings of a bucket, each a new dict with its time."""
    time = spec.time.stored
    if form_of(spec, bucket) == "rows":
        rows: list[Raw] = bucket[spec.names.readings]
        for row in rows:
            if not isinstance(row, dict) or not isinstance(row.get(time), dt.datetime):
                raise damaged(spec, bucket, f"one of its readings has no date in {time!r}")
        return rows
    times, columns = columns_of(spec, bucket)
    names = (time, *columns)
    return [dict(zip(names, values, strict=True)) for values in zip(times, *columns.values(), strict=True)]


def columns_of_batch(spec: Spec, start: int, readings: Sequence[Raw], counts: Sequence[int]) -> Raw:
    """The columns of new readings; `counts` are their times in milliseconds, if they are known."""
    time = spec.time.stored
    try:
        columns = {name: list(map(itemgetter(name), readings)) for name in spec.value_names}
    except KeyError:
        # Adopted documents may lack fields.
        columns = {name: [row.get(name) for row in readings] for name in spec.value_names}
    if len(counts) != len(readings):
        counts = [milliseconds(row[time]) for row in readings]
    return {time: [count - start for count in counts], **columns}


def stored_form(spec: Spec, form: Form, start: int, readings: Sequence[Raw]) -> Any:
    """What `readings` holds for these readings."""
    time = spec.time.stored
    if form == "rows":
        return list(readings)
    columns = {name: [row.get(name) for row in readings] for name in spec.value_names}
    if any(len(row) > len(columns) + 1 or row.keys() - columns.keys() - {time} for row in readings):
        raise unknown_fields(spec, {name for row in readings for name in row} - {*columns, time})
    if form == "columns":
        return {time: [milliseconds(row[time]) - start for row in readings], **columns}
    return Binary(pack([milliseconds(row[time]) for row in readings], columns))


# -- statistics ---------------------------------------------------------------------------


def values_of(stat: Stat, readings: Sequence[Raw]) -> list[Any]:
    """The numbers of one field, without what is none."""
    try:
        # A dotted path is no key; one that is not dotted is read at once.
        found = list(map(itemgetter(stat.path), readings))
    except KeyError:
        found = [value_at(row, stat.path) for row in readings]
    if not stat.decimal and not stat.optional and None not in found:
        return found
    return [value for value in found if is_number(value)]


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
    key: Callable[[Any], Any] = number_key
    low, high = min(values, key=key), max(values, key=key)
    if not any(isinstance(value, Decimal128) for value in values):
        return low, high, sum(values)
    with decimal.localcontext(_DECIMALS) as context:
        context.traps[decimal.Inexact] = False
        context.traps[decimal.InvalidOperation] = False
        context.clear_flags()
        total = decimal.Decimal(0)
        for value in values:
            total = context.add(total, _decimal(value))
        return low, high, Decimal128(total)


def number_key(value: Any) -> tuple[int, Any]:
    """Numbers in the server's order, across their types."""
    plain = value.to_decimal() if isinstance(value, Decimal128) else value
    return (0, 0) if plain != plain else (1, plain)


def _decimal(value: Any) -> decimal.Decimal:
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


def derived_parts(spec: Spec, start: int, readings: Sequence[Raw]) -> Raw:
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
