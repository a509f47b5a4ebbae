"""Reading: buckets in, readings out, in the order that was asked for.

A `Reader` is fed pages of buckets by the shell, which holds the cursor. By
time it emits as soon as no later bucket can hold an earlier reading, so it
keeps about one window per series. Any other order has to see everything
first; with a limit it keeps only as many as will be shown.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar
from uuid import UUID

from bson import MaxKey, ObjectId, Timestamp
from bson.decimal128 import Decimal128

from treadle.errors import UsageError
from treadle.graph.reports import FieldSummary, Summary
from treadle.model.adapt import adapter_of
from treadle.model.bson_types import date_to_bson
from treadle.model.document import Document
from treadle.model.shape import Shape
from treadle.patterns.bucket.contents import columns_of, form_of, number_key, readings_of
from treadle.patterns.bucket.matching import Selection, open_buckets, select, times_filter
from treadle.patterns.bucket.spec import EPOCH, Spec, milliseconds, moment
from treadle.plan import Plan, Raw, Read, aggregate, find
from treadle.query.paths import ARRAYS, top, value_at
from treadle.query.safety import Sort, clean, sort_keys

D = TypeVar("D", bound=Document)


class Reader(Generic[D]):
    """Turns pages of buckets into readings, filtered, sorted and cut."""

    def __init__(
        self,
        spec: Spec,
        collection: str,
        load: Callable[[Raw], D],
        filter: Any,
        sort: Sort | None,
        skip: int,
        limit: int | None,
    ) -> None:
        self.spec = spec
        self.collection = collection
        self.load = load
        self.selection = select(spec, filter)
        self.keys = sort_keys(sort, spec.codec)
        _check_sort(spec, self.keys)
        self.skip = skip
        self.remaining = limit or None
        few = limit and limit + skip <= 1000
        self.page = spec.limits.bucket_small_page if few else spec.limits.bucket_page
        self.done = False
        self._held: list[tuple[Raw, dt.datetime]] = []
        self._by_time = bool(self.keys) and self.keys[0][0] == spec.time.stored if self.keys else False

    @property
    def command(self) -> Read:
        """The read whose cursor gives the buckets."""
        small = self.page == self.spec.limits.bucket_small_page
        options: Raw = {"batch_size": self.page * 4} if small else {}
        if self._by_time:
            options |= {"sort": [self._bucket_order()], "allow_disk_use": True}
        return Read(self.collection, "find", (self.selection.buckets,), options)

    def _bucket_order(self) -> tuple[str, int]:
        assert self.keys is not None
        forward = self.keys[0][1] == 1
        names = self.spec.names
        return (names.start, 1) if forward else (names.end if self.spec.span is None else names.start, -1)

    def take(self, buckets: list[Raw], ended: bool) -> Plan[list[D]]:
        """The readings that can be emitted now that these buckets are known."""
        opened = yield from open_buckets(self.spec, self.collection, self.selection, buckets)
        time = self.spec.time.stored
        flats = [
            (self.spec.flat(each.bucket, each.readings[place], each.series), each.readings[place][time])
            for each in opened
            for place in each.picked
        ]
        if self.keys is None:
            return self._emit([flat for flat, _ in flats], ended)
        self._held += flats
        if not self._by_time:
            return self._emit(self._settle(), True) if ended else self._hold()
        self._sort()
        if ended:
            cut = len(self._held)
        elif buckets:
            cut = self._safe(buckets[-1])
        else:
            return []
        ready, self._held = self._held[:cut], self._held[cut:]
        return self._emit([flat for flat, _ in ready], ended)

    def _safe(self, last: Raw) -> int:
        """How many of the held readings no bucket that is still to come can precede."""
        name, direction = self._bucket_order()
        edge = last[name]
        if direction == -1 and self.spec.span is not None:
            edge = moment(self.spec.last(milliseconds(edge)))
        for place, (_, when) in enumerate(self._held):
            if (when >= edge) if direction == 1 else (when <= edge):
                return place
        return len(self._held)

    def _sort(self) -> None:
        assert self.keys is not None
        # From the last key to the first: sorting is stable.
        for name, direction in reversed(self.keys):
            self._held.sort(key=lambda pair: order_key(value_at(pair[0], name)), reverse=direction == -1)

    def _hold(self) -> list[D]:
        most = self.spec.limits.bucket_held_max
        wanted = None if self.remaining is None else self.skip + self.remaining
        if wanted is not None and len(self._held) > 2 * wanted + 1000:
            self._sort()
            del self._held[wanted:]
        elif wanted is None and len(self._held) > most:
            raise UsageError(
                f"more than {most:,} readings of {self.spec.label} would have to be held to sort them by "
                f"{self.keys}; sort by {self.spec.time.stored!r}, narrow the filter, or give a limit",
                code="sort-too-large",
            )
        return []

    def _settle(self) -> list[Raw]:
        self._sort()
        return [flat for flat, _ in self._held]

    def _emit(self, flats: list[Raw], ended: bool) -> list[D]:
        if self.skip:
            passed = min(self.skip, len(flats))
            self.skip -= passed
            flats = flats[passed:]
        if self.remaining is not None:
            flats = flats[: self.remaining]
            self.remaining -= len(flats)
        self.done = ended or self.remaining == 0
        return [self.load(flat) for flat in flats]


def _check_sort(spec: Spec, keys: Sequence[tuple[str, int]] | None) -> None:
    for name, _ in keys or ():
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


def count(spec: Spec, collection: str, filter: Any) -> Plan[int]:
    """How many readings match; buckets that lie wholly in the range are not unpacked."""
    selection = select(spec, filter)
    if not selection.whole:
        return (yield from _count_opened(spec, collection, selection))
    names = spec.names
    inside: list[Raw] = [{"$eq": [True, True]}]
    if selection.low is not None:
        inside.append({"$gte": [f"${names.start}", moment(selection.low)]})
    if selection.high is not None:
        inside.append({"$lte": [f"${names.end}", moment(selection.high)]})
    wholly: Raw = {"$and": inside}
    opened = {"$cond": [wholly, None, "$$ROOT"]}
    groups = yield from aggregate(
        collection,
        [
            {"$match": selection.buckets},
            {
                "$group": {
                    "_id": {"$cond": [wholly, None, "$_id"]},
                    "n": {"$sum": f"${names.count}"},
                    "bucket": {"$first": opened},
                }
            },
        ],
        allowDiskUse=True,
    )
    total = sum(int(each["n"]) for each in groups if each["bucket"] is None)
    edges = [each["bucket"] for each in groups if each["bucket"] is not None]
    for each in (yield from open_buckets(spec, collection, selection, edges)):
        total += len(each.picked)
    return total


def _count_opened(spec: Spec, collection: str, selection: Selection) -> Plan[int]:
    total = 0
    scan = Scan(collection, selection.buckets, spec.limits.bucket_page)
    while buckets := (yield from scan.next()):
        for each in (yield from open_buckets(spec, collection, selection, buckets)):
            total += len(each.picked)
    return total


class Scan:
    """The buckets that match, page by page: those with ids as Treadle makes them, then all others."""

    def __init__(self, collection: str, filter: Raw, page: int, projection: Raw | None = None) -> None:
        self.collection = collection
        self.filter = filter
        self.page = page
        self.projection = projection
        self._last: Any = None
        self._others = False
        self._ended = False

    def next(self) -> Plan[list[Raw]]:
        """The next page; empty when there are no more."""
        if not self._others:
            after = {"$gt": self._last} if self._last is not None else {"$type": "objectId"}
            found = yield from self._page({"_id": after})
            if found:
                self._last = found[-1]["_id"]
                return found
            self._others = True
            self._last = None
            found = yield from self._page({"_id": {"$not": {"$type": "objectId"}}})
        elif self._ended:
            return []
        else:
            found = yield from self._page({"$or": ids_after(self._last)})
        self._ended = len(found) < self.page
        if found:
            self._last = found[-1]["_id"]
        return found

    def _page(self, place: Raw) -> Plan[list[Raw]]:
        condition = {"$and": [self.filter, place]}
        return (
            yield from find(self.collection, condition, self.projection, sort=[("_id", 1)], limit=self.page)
        )


# The types that an `_id` can have, in the order of the server.
_ID_TYPES = ("null", "number", "string", "object", "binData", "bool", "date", "timestamp", "maxKey")


def ids_after(last: Any) -> list[Raw]:
    """What an `_id` after this one is like, but for ObjectIds; a comparison stays within one type."""
    if isinstance(last, bool):
        name = "bool"
    elif isinstance(last, (int, float, Decimal128)):
        name = "number"
    else:
        name = next((name for kind, name in _ID_CLASSES if isinstance(last, kind)), "object")
    later: list[Raw] = [{"_id": {"$type": each}} for each in _ID_TYPES[_ID_TYPES.index(name) + 1 :]]
    if name == "number" and number_key(last)[0] == 0:
        # Nothing is greater than what is not a number, but all numbers come after it.
        return [{"_id": {"$type": "number", "$nin": [float("nan"), Decimal128("NaN")]}}, *later]
    return [{"_id": {"$gt": last}}, *later]


_ID_CLASSES: tuple[tuple[Any, str], ...] = (
    (type(None), "null"), (str, "string"), ((bytes, UUID), "binData"), (dt.datetime, "date"),
    (Timestamp, "timestamp"), (MaxKey, "maxKey"),
)  # fmt: skip


# -- tuples ---------------------------------------------------------------------------------


def tuples(
    spec: Spec, collection: str, key: Any, start: Any, end: Any, fields: Sequence[str] | None
) -> Plan[list[tuple[Any, ...]]]:
    """Readings of one series as tuples: the time, then the fields; from `start` to before `end`."""
    names = tuple(_stored(spec, name) for name in fields) if fields is not None else spec.value_names
    low, high = bounds(start, end)
    selection = Selection({}, low, high)
    condition = {"$and": [spec.key_filter(key_values(spec, key)), *times_filter(spec, selection)]}
    naive = all(is_dateless(spec.codec.by_stored[name].shape) for name in names)
    buckets = yield from find(
        collection, condition, sort=[(spec.names.start, 1)], naive=naive, allow_disk_use=True
    )
    adapters = [adapter_of(spec.codec, spec.codec.by_stored[name].shape) for name in names]
    found: list[tuple[Any, ...]] = []
    for bucket in buckets:
        if naive:
            _localise(spec, bucket)
        part = _tuples_of(spec, bucket, names, naive)
        if any(adapters):
            part = [
                (row[0], *(value if value is None or adapt is None else adapt(value)
                           for adapt, value in zip(adapters, row[1:], strict=True)))
                for row in part
            ]  # fmt: skip
        edge = (low is not None and milliseconds(bucket[spec.names.start]) < low) or (
            high is not None and milliseconds(bucket[spec.names.end]) > high
        )
        if edge:
            first, last = (
                moment(low) if low is not None else _FIRST,
                moment(high) if high is not None else _LAST,
            )
            part = [row for row in part if first <= row[0] <= last]
        found += part
    found.sort(key=itemgetter(0))
    return found


def is_dateless(shape: Shape) -> bool:
    """Whether values of a field are surely no dates, nor hold any."""
    return shape.kind == "scalar" and shape.python in _DATELESS


_DATELESS = (bool, int, float, str, bytes, decimal.Decimal, ObjectId, UUID)


def _localise(spec: Spec, bucket: Raw) -> None:
    """Give the dates of a bucket, but not those of its readings, their time zone."""
    for name in (spec.names.start, spec.names.end):
        if isinstance(value := bucket.get(name), dt.datetime):
            bucket[name] = EPOCH + (value - NAIVE_EPOCH)


_FIRST = dt.datetime.min.replace(tzinfo=dt.UTC)
_LAST = dt.datetime.max.replace(tzinfo=dt.UTC)


def _tuples_of(spec: Spec, bucket: Raw, names: Sequence[str], naive: bool) -> list[tuple[Any, ...]]:
    time = spec.time.stored
    if form_of(spec, bucket) == "rows" and not set(names) & set(spec.outer_names):
        rows = bucket[spec.names.readings]
        try:
            times = list(map(itemgetter(time), rows))
            columns = [list(map(itemgetter(name), rows)) for name in names]
        except (KeyError, TypeError):
            # Somebody left a field out; it is None then.
            times = [row[time] for row in readings_of(spec, bucket)]
            columns = [[row.get(name) for row in rows] for name in names]
        if naive:
            times = _aware(spec, bucket, times)
        return list(zip(times, *columns, strict=True))
    if naive and form_of(spec, bucket) == "rows":
        for row in readings_of(spec, bucket):
            row[time] = EPOCH + (row[time] - NAIVE_EPOCH)
    times, found = columns_of(spec, bucket)
    nothing = [None] * len(times)
    outer = {name: [bucket.get(name)] * len(times) for name in names if name in spec.outer_names}
    return list(zip(times, *(outer.get(name) or found.get(name, nothing) for name in names), strict=True))


def _aware(spec: Spec, bucket: Raw, times: list[Any]) -> list[Any]:
    """Dates with their time zone; by distance, which is quicker than to replace it."""
    try:
        return [EPOCH + (each - NAIVE_EPOCH) for each in times]
    except TypeError:
        # Text, or a date beyond Python's years.
        readings_of(spec, bucket)
        raise


NAIVE_EPOCH = EPOCH.replace(tzinfo=None)


def _stored(spec: Spec, name: str) -> str:
    field = spec.codec.by_name.get(name)
    if field is None or field.stored == "_id":
        raise UsageError(f"{spec.label} has no field {name!r} to read", code="filter-invalid")
    return field.stored


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
    if isinstance(key, dict) and set(key) == {field.name for field in spec.keys}:
        values = [key[field.name] for field in spec.keys]
    elif len(spec.keys) == 1:
        values = [key]
    elif isinstance(key, (tuple, list)) and len(key) == len(spec.keys):
        values = list(key)
    else:
        names = ", ".join(field.name for field in spec.keys)
        raise UsageError(
            f"{key!r} does not say which {spec.label} series is meant; give ({names})", code="filter-invalid"
        )
    return tuple(clean(value) for value in values)


# -- summaries ------------------------------------------------------------------------------


def summary(spec: Spec, collection: str, key: Any, start: Any, end: Any) -> Plan[list[Summary]]:
    """One entry per bucket of a series that meets the range, in order; readings are not read."""
    low, high = bounds(start, end)
    condition = {
        "$and": [spec.key_filter(key_values(spec, key)), *times_filter(spec, Selection({}, low, high))]
    }
    names = spec.names
    buckets = yield from find(
        collection,
        condition,
        {names.start: 1, names.end: 1, names.count: 1, names.stats: 1, "_id": 0},
        sort=[(names.start, 1)],
        limit=spec.limits.bucket_summaries_max,
        naive=True,
        allow_disk_use=True,
    )
    found = []
    for bucket in buckets:
        _localise(spec, bucket)
        number, held = bucket[names.count], bucket.get(names.stats)
        stats = {
            stat.python: field_summary(value_at(held, stat.path) or _NO_STATISTICS, number)
            for stat in spec.stats
        }
        found.append(Summary(bucket[names.start], bucket[names.end], number, stats))
    return found


_NO_STATISTICS: Raw = {}


def field_summary(stored: Raw, count: int) -> FieldSummary:
    """Statistics as Python knows them, with the average."""
    low, high, total = stored.get("min"), stored.get("max"), stored.get("sum")
    if isinstance(total, Decimal128) or isinstance(low, Decimal128):
        low, high, total = _python(low), _python(high), _python(total)
    number = stored.get("count", count)
    if low is None or not number:
        return FieldSummary(None, None, total if total is not None else 0, None)
    return FieldSummary(low, high, total, total / number)


def _python(value: Any) -> Any:
    return value.to_decimal() if isinstance(value, Decimal128) else value
