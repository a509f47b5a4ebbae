"""One series: its readings as tuples, and the summaries of its buckets; the buckets are read as they are."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Sequence
from operator import itemgetter
from typing import Any
from uuid import UUID

from bson import ObjectId
from bson.decimal128 import Decimal128

from treadle.errors import UsageError
from treadle.graph.outcomes import FieldSummary, Summary
from treadle.model.adapt import adapter_of
from treadle.model.bson_types import clean, date_to_bson, from_bson
from treadle.model.codec import Codec, StoredField
from treadle.patterns.bucket.bucket_document import column, damaged, readings_of
from treadle.patterns.bucket.query import Times, time_condition, times_filter
from treadle.patterns.bucket.spec import EPOCH, FIRST, LAST, Spec, milliseconds
from treadle.plan import Plan, Raw, find
from treadle.query.paths import value_at

# Buckets in one summary.
BUCKET_SUMMARIES_MAX = 1_000_000

NAIVE_EPOCH = EPOCH.replace(tzinfo=None)


def reading_tuples(
    spec: Spec, key: Any, start: Any, end: Any, fields: Sequence[str] | None
) -> Plan[list[tuple[Any, ...]]]:
    """Return readings of one series as tuples: the time, then the fields; from `start` to before `end`."""
    chosen, naive = chosen_fields(spec.codec, fields, {*spec.shared, spec.time.stored})
    names = [each.stored for each in chosen]
    times = times_between(start, end)
    buckets = yield from find(
        spec.collection,
        _series(spec, key, times),
        sort=[(spec.names.start, 1)],
        naive=naive,
        allow_disk_use=True,
    )
    at = time_condition(times)
    first, last = at.get("$gte", FIRST), at.get("$lte", LAST)
    rows: list[tuple[Any, ...]] = []
    for bucket in buckets:
        if naive:
            make_aware(bucket, spec.names.start, spec.names.end)
        part = _tuples_of(spec, bucket, names, naive)
        if bucket.get(spec.names.start, FIRST) < first or bucket.get(spec.names.end, LAST) > last:
            part = [row for row in part if first <= row[0] <= last]
        rows += part
    rows.sort(key=itemgetter(0))
    return adapted(spec.codec, chosen, rows)


def _series(spec: Spec, key: Any, times: Times) -> Raw:
    """Return the filter for the buckets of one series that meet a range of time."""
    return {"$and": [spec.key_filter(key_values(spec, key)), *times_filter(spec, times)]}


def _tuples_of(spec: Spec, bucket: Raw, names: Sequence[str], naive: bool) -> list[tuple[Any, ...]]:
    rows = bucket.get(spec.names.readings)
    try:
        if not isinstance(rows, list):
            raise TypeError
        times = list(map(itemgetter(spec.time.stored), rows))
        columns = {name: column(rows, name) for name in names if name not in spec.series_fields}
        if naive:
            times = [EPOCH + (each - NAIVE_EPOCH) for each in times]
    except (KeyError, TypeError, AttributeError):
        # No array, no reading, no time, text in its place, or a date beyond Python's years.
        readings_of(spec, bucket)
        raise
    columns |= {name: [bucket.get(name)] * len(times) for name in names if name in spec.series_fields}
    return list(zip(times, *(columns[name] for name in names), strict=True))


def make_aware(raw: Raw, *names: str) -> None:
    """Give dates their time zone, by adding a distance, which is faster than replacing it."""
    for name in names:
        if isinstance(value := raw.get(name), dt.datetime):
            raw[name] = EPOCH + (value - NAIVE_EPOCH)


def chosen_fields(
    codec: Codec[Any], names: Sequence[str] | None, outer: set[str]
) -> tuple[list[StoredField], bool]:
    """Return the fields that a caller named, or all measured ones, and whether none can hold a date."""
    for name in names or ():
        if name not in codec.by_name or codec.by_name[name].stored == "_id":
            raise UsageError(f"{codec.model.__name__} has no field {name!r} to read", code="filter-invalid")
    if names is None:
        fields = [each for each in codec.fields if each.stored not in outer]
    else:
        fields = [codec.by_name[name] for name in names]
    return fields, all(each.shape.kind == "scalar" and each.shape.python in _DATELESS for each in fields)


_DATELESS = (bool, int, float, str, bytes, decimal.Decimal, ObjectId, UUID)


def adapted(
    codec: Codec[Any], fields: Sequence[StoredField], rows: list[tuple[Any, ...]]
) -> list[tuple[Any, ...]]:
    """Return rows of a time and values of these fields, as Python has them."""
    adapters = [None, *(adapter_of(codec, each.shape) for each in fields)]
    if not any(adapters):
        return rows
    return [
        tuple(
            value if value is None or adapt is None else adapt(value)
            for value, adapt in zip(row, adapters, strict=True)
        )
        for row in rows
    ]


def times_between(start: Any, end: Any) -> Times:
    """Return the times from `start` to before `end`."""
    for given in (start, end):
        if given is not None and not isinstance(given, dt.datetime):
            raise UsageError(
                f"{given!r} is no datetime; a range goes from one to another", code="filter-invalid"
            )
    low = None if start is None else milliseconds(date_to_bson(start, []))
    high = None if end is None else milliseconds(date_to_bson(end, [])) - 1
    return low, high


def key_values(spec: Spec, key: Any) -> tuple[Any, ...]:
    """Return the stored key of a series that a caller named: a value, a tuple, or a mapping of fields."""
    names = [field.name for field in spec.keys]
    if isinstance(key, dict) and set(key) == set(names):
        values = [key[name] for name in names]
    elif len(names) == 1:
        values = [key]
    elif isinstance(key, (tuple, list)) and len(key) == len(names):
        values = list(key)
    else:
        raise UsageError(
            f"{key!r} does not say which {spec.label} series is meant; give ({', '.join(names)})",
            code="filter-invalid",
        )
    return tuple(clean(value) for value in values)


# -- summaries ------------------------------------------------------------------------------


def summary(spec: Spec, key: Any, start: Any, end: Any) -> Plan[list[Summary]]:
    """Return an entry per bucket of a series that meets the range, in order; readings are not read."""
    names = spec.names
    buckets = yield from find(
        spec.collection,
        _series(spec, key, times_between(start, end)),
        dict.fromkeys((names.start, names.end, names.count, names.stats), 1),
        sort=[(names.start, 1)],
        limit=BUCKET_SUMMARIES_MAX,
        naive=True,
        allow_disk_use=True,
    )
    return [_summary_of(spec, bucket) for bucket in buckets]


def _summary_of(spec: Spec, bucket: Raw) -> Summary:
    names = spec.names
    make_aware(bucket, names.start, names.end)
    number, stored = bucket.get(names.count), bucket.get(names.stats)
    try:
        if not isinstance(number, int):
            raise TypeError
        stats = {stat.python: field_summary(value_at(stored, stat.path) or {}, number) for stat in spec.stats}
        return Summary(bucket[names.start], bucket[names.end], number, stats)
    except (AttributeError, KeyError, TypeError):
        # Text in the place of a number, or a part that is missing.
        raise damaged(spec, bucket["_id"], "its count or its statistics are not numbers") from None


def field_summary(stored: Raw, count: Any) -> FieldSummary:
    """Return statistics as Python has them, with the average."""
    low, high, total = stored.get("min"), stored.get("max"), stored.get("sum")
    if isinstance(total, Decimal128) or isinstance(low, Decimal128):
        low, high, total = map(from_bson, (low, high, total))
    number = stored.get("count", count)
    if low is None or not number:
        return FieldSummary(None, None, 0 if total is None else total, None)
    return FieldSummary(low, high, total, total / number)
