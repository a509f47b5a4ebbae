"""Reading: buckets in, readings out, in the order that was asked for.

A `Reader` is fed pages of buckets by the shell, which holds the cursor. By
time it emits as soon as no later bucket can hold an earlier reading, so it
keeps about one window per series. Any other order has to see everything
first; with a limit it keeps only as many as will be shown.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar
from uuid import UUID

from bson import ObjectId
from bson.decimal128 import Decimal128

from treadle.errors import UsageError
from treadle.graph.outcomes import FieldSummary, Summary
from treadle.model.adapt import adapter_of
from treadle.model.bson_types import date_to_bson, from_bson
from treadle.model.codec import Codec, StoredField
from treadle.model.document import Document
from treadle.patterns.bucket.contents import FIRST, LAST, column, columns_of, form_of, number_key, readings_of
from treadle.patterns.bucket.matching import Selection, open_buckets, select, times_filter
from treadle.patterns.bucket.spec import EPOCH, Spec, milliseconds, moment
from treadle.plan import Plan, Raw, Read, aggregate, find
from treadle.query.paths import ARRAYS, top, value_at
from treadle.query.safety import Sort, clean, sort_keys

D = TypeVar("D", bound=Document)

NAIVE_EPOCH = EPOCH.replace(tzinfo=None)


class Reader(Generic[D]):
    """Turns pages of buckets into readings, filtered, sorted and cut."""

    def __init__(self, spec: Spec, filter: Any, sort: Sort | None, skip: int, limit: int | None) -> None:
        self.spec = spec
        self.selection = select(spec, filter)
        self.keys = sort_keys(sort, spec.codec) or []
        _check_sort(spec, self.keys)
        self.skip = skip
        self.remaining = limit or None
        self._few = bool(limit) and (limit or 0) + skip <= 1000
        self.page = spec.limits.bucket_small_page if self._few else spec.limits.bucket_page
        self.done = False
        self._held: list[Raw] = []
        self._by_time = bool(self.keys) and self.keys[0][0] == spec.time.stored

    @property
    def command(self) -> Read:
        """The read whose cursor gives the buckets."""
        options: Raw = {"batch_size": self.page * 4} if self._few else {}
        if self._by_time:
            options |= {"sort": [self._bucket_order()], "allow_disk_use": True}
        return Read(self.spec.collection, "find", (self.selection.buckets,), options)

    def _bucket_order(self) -> tuple[str, int]:
        names, direction = self.spec.names, self.keys[0][1]
        return (names.end if direction == -1 and self.spec.span is None else names.start), direction

    def take(self, buckets: list[Raw], ended: bool) -> Plan[list[D]]:
        """The readings that can be emitted now that these buckets are known."""
        opened = yield from open_buckets(self.spec, self.selection, buckets)
        flats = [
            self.spec.flat(each.bucket, each.readings[place], each.series)
            for each in opened
            for place in each.picked
        ]
        if not self.keys:
            return self._emit(flats, ended)
        self._held += flats
        if not ended and not self._by_time:
            self._keep_few()
            return []
        self._sort()
        at = len(self._held) if ended else self._safe(buckets)
        ready, self._held = self._held[:at], self._held[at:]
        return self._emit(ready, ended)

    def _safe(self, buckets: Sequence[Raw]) -> int:
        """How many of the held readings come before those of any bucket that is still to be read."""
        if not buckets:
            return 0
        name, direction = self._bucket_order()
        edge, time = buckets[-1][name], self.spec.time.stored
        if direction == -1 and self.spec.span is not None:
            edge = moment(self.spec.last(milliseconds(edge)))
        for place, flat in enumerate(self._held):
            if (flat[time] >= edge) if direction == 1 else (flat[time] <= edge):
                return place
        return len(self._held)

    def _sort(self) -> None:
        # From the last key to the first: sorting is stable.
        for name, direction in reversed(self.keys):
            self._held.sort(key=lambda flat: order_key(value_at(flat, name)), reverse=direction == -1)

    def _keep_few(self) -> None:
        """Forget held readings that will not be emitted; refuses to hold too many."""
        most = self.spec.limits.bucket_held_max
        if self.remaining is not None:
            few = self.skip + self.remaining
            if len(self._held) > 2 * few + 1000:
                self._sort()
                del self._held[few:]
        elif len(self._held) > most:
            raise UsageError(
                f"more than {most:,} readings of {self.spec.label} would have to be held to sort them by "
                f"{self.keys}; sort by {self.spec.time.stored!r}, narrow the filter, or give a limit",
                code="sort-too-large",
            )

    def _emit(self, flats: list[Raw], ended: bool) -> list[D]:
        if self.skip:
            passed = min(self.skip, len(flats))
            self.skip -= passed
            flats = flats[passed:]
        if self.remaining is not None:
            flats = flats[: self.remaining]
            self.remaining -= len(flats)
        self.done = ended or self.remaining == 0
        return [self.spec.codec.load(flat) for flat in flats]


def _check_sort(spec: Spec, keys: Sequence[tuple[str, int]]) -> None:
    for name, _ in keys:
        field = spec.codec.by_stored.get(top(name))
        if field is not None and field.shape.kind in ARRAYS:
            raise UsageError(
                f"the sort names the list {name!r}; readings in buckets are sorted by single values",
                code="sort-invalid",
            )


def order_key(value: Any) -> tuple[int, Any]:
    """Values in the order of BSON, across types."""
    if value is None:
        return 1, 0
    if isinstance(value, bool):
        return 8, value
    if isinstance(value, (int, float, Decimal128)):
        return 2, number_key(value)
    if isinstance(value, dict):
        return 4, [(order_key(item)[0], key, order_key(item)[1]) for key, item in value.items()]
    if isinstance(value, list):
        return 5, [order_key(item) for item in value]
    rank = {str: 3, bytes: 6, ObjectId: 7, dt.datetime: 9}.get(type(value))
    return (rank, value) if rank is not None else (6, bytes(getattr(value, "bytes", b"")))


# -- count ----------------------------------------------------------------------------------


def count(spec: Spec, filter: Any) -> Plan[int]:
    """How many readings match; buckets that lie wholly in the range are not unpacked."""
    selection = select(spec, filter)
    if not selection.whole:
        return (yield from count_opened(spec, selection))
    names = spec.names
    inside: list[Raw] = []
    if selection.low is not None:
        inside.append({"$gte": [f"${names.start}", moment(selection.low)]})
    if selection.high is not None:
        inside.append({"$lte": [f"${names.end}", moment(selection.high)]})
    wholly: Raw = {"$and": inside}
    grouped = {
        "_id": {"$cond": [wholly, None, "$_id"]},
        "n": {"$sum": f"${names.count}"},
        "bucket": {"$first": {"$cond": [wholly, None, "$$ROOT"]}},
    }
    stages = [{"$match": selection.buckets}, {"$group": grouped}]
    groups = yield from aggregate(spec.collection, stages, allowDiskUse=True)
    total = sum(int(each["n"]) for each in groups if each["bucket"] is None)
    edges = [each["bucket"] for each in groups if each["bucket"] is not None]
    opened = yield from open_buckets(spec, selection, edges)
    return total + sum(len(each.picked) for each in opened)


def count_opened(spec: Spec, selection: Selection) -> Plan[int]:
    """How many readings a selection means, looking into each bucket."""
    total = 0
    scan = Scan(spec.collection, selection.buckets, spec.limits.bucket_page)
    while buckets := (yield from scan.next()):
        opened = yield from open_buckets(spec, selection, buckets)
        total += sum(len(each.picked) for each in opened)
    return total


class Scan:
    """The documents that match, page by page: those with ids as Treadle makes them, then all others."""

    def __init__(self, collection: str, filter: Raw, page: int, projection: Raw | None = None) -> None:
        self.collection = collection
        self.filter = filter
        self.page = page
        self.projection = projection
        # In a list, because an id may itself be null.
        self._last: list[Any] = []
        self._others = False
        self._ended = False

    def next(self) -> Plan[list[Raw]]:
        """The next page; empty when there are no more."""
        while not self._ended:
            after: Raw = {"$type": "objectId"}
            bounds: Raw = {}
            if self._others:
                after = {"$not": after}
            if self._others and self._last:
                # A range would end where the type of the ids changes; bounds of the index do not.
                bounds = {"min": {"_id": self._last[0]}, "hint": [("_id", 1)]}
                after["$ne"] = self._last[0]
            elif self._last:
                after = {"$gt": self._last[0]}
            condition = {"$and": [self.filter, {"_id": after}]}
            rows = yield from find(
                self.collection, condition, self.projection, sort=[("_id", 1)], limit=self.page, **bounds
            )
            self._last = [rows[-1]["_id"]] if rows else []
            if len(rows) < self.page:
                self._ended, self._others, self._last = self._others, True, []
            if rows:
                return rows
        return []


# -- the readings of one series ---------------------------------------------------------------


def tuples(
    spec: Spec, key: Any, start: Any, end: Any, fields: Sequence[str] | None
) -> Plan[list[tuple[Any, ...]]]:
    """Readings of one series as tuples: the time, then the fields; from `start` to before `end`."""
    chosen, naive = chosen_fields(spec.codec, fields, {*spec.outer, spec.time.stored})
    names = [each.stored for each in chosen]
    selection = _series(spec, key, start, end)
    buckets = yield from find(
        spec.collection, selection.buckets, sort=[(spec.names.start, 1)], naive=naive, allow_disk_use=True
    )
    first, last = selection.times
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


def _series(spec: Spec, key: Any, start: Any, end: Any) -> Selection:
    """All readings of one series in a range of time."""
    selection = Selection({}, *bounds(start, end))
    selection.buckets = {"$and": [spec.key_filter(key_values(spec, key)), *times_filter(spec, selection)]}
    return selection


def _tuples_of(spec: Spec, bucket: Raw, names: Sequence[str], naive: bool) -> list[tuple[Any, ...]]:
    if form_of(spec, bucket) == "rows":
        rows = bucket[spec.names.readings]
        try:
            times = list(map(itemgetter(spec.time.stored), rows))
            columns = {name: column(rows, name) for name in names}
            if naive:
                times = [EPOCH + (each - NAIVE_EPOCH) for each in times]
        except (KeyError, TypeError, AttributeError):
            # No reading, no time, text in its place, or a date beyond Python's years.
            readings_of(spec, bucket)
            raise
    else:
        times, columns = columns_of(spec, bucket)
    columns |= {name: [bucket.get(name)] * len(times) for name in names if name in spec.outer_names}
    nothing = [None] * len(times)
    return list(zip(times, *(columns.get(name, nothing) for name in names), strict=True))


def make_aware(raw: Raw, *names: str) -> None:
    """Give dates their time zone, by distance, which is quicker than to replace it."""
    for name in names:
        if isinstance(value := raw.get(name), dt.datetime):
            raw[name] = EPOCH + (value - NAIVE_EPOCH)


def chosen_fields(
    codec: Codec[Any], names: Sequence[str] | None, outer: set[str]
) -> tuple[list[StoredField], bool]:
    """The fields that a caller named, or all that are measured; and whether none of them can hold a date."""
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
    """A time and values of these fields per row, as Python has them."""
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


def bounds(start: Any, end: Any) -> tuple[int | None, int | None]:
    """The first and last millisecond from `start` to before `end`."""
    for given in (start, end):
        if given is not None and not isinstance(given, dt.datetime):
            raise UsageError(
                f"{given!r} is no datetime; a range goes from one to another", code="filter-invalid"
            )
    low = None if start is None else milliseconds(date_to_bson(start, []))
    high = None if end is None else milliseconds(date_to_bson(end, [])) - 1
    return low, high


def key_values(spec: Spec, key: Any) -> tuple[Any, ...]:
    """The stored key of a series that a caller named: a value, a tuple, or a mapping of fields."""
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
    """One entry per bucket of a series that meets the range, in order; readings are not read."""
    names = spec.names
    buckets = yield from find(
        spec.collection,
        _series(spec, key, start, end).buckets,
        {names.start: 1, names.end: 1, names.count: 1, names.stats: 1, "_id": 0},
        sort=[(names.start, 1)],
        limit=spec.limits.bucket_summaries_max,
        naive=True,
        allow_disk_use=True,
    )
    summaries = []
    for bucket in buckets:
        make_aware(bucket, names.start, names.end)
        number, held = bucket[names.count], bucket.get(names.stats)
        stats = {stat.python: field_summary(value_at(held, stat.path) or {}, number) for stat in spec.stats}
        summaries.append(Summary(bucket[names.start], bucket[names.end], number, stats))
    return summaries


def field_summary(stored: Raw, count: int) -> FieldSummary:
    """Statistics as Python knows them, with the average."""
    low, high, total = stored.get("min"), stored.get("max"), stored.get("sum")
    if isinstance(total, Decimal128) or isinstance(low, Decimal128):
        low, high, total = map(from_bson, (low, high, total))
    number = stored.get("count", count)
    if low is None or not number:
        return FieldSummary(None, None, 0 if total is None else total, None)
    return FieldSummary(low, high, total, total / number)
