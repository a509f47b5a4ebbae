"""Reads of readings: the server unwinds buckets, filters and sorts by value; the client merges by time.

By time, the server sends buckets in the order of their start, each as a header
row and the rows of its readings. A reading is emitted as soon as no later
bucket can hold an earlier one, so about one window per series is held, and
"the newest ten" stops early.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from treadle.errors import UsageError
from treadle.graph.query import SKIPPED, Query
from treadle.model.bson_types import RESERVED
from treadle.patterns.bucket.bucket_document import damaged
from treadle.patterns.bucket.query import (
    identify,
    reading_stages,
    split_filter,
    time_condition,
    unwind_stages,
    wanted,
)
from treadle.patterns.bucket.spec import Spec, decode_id, encode_id, milliseconds, to_datetime
from treadle.plan import Plan, Raw, Read, aggregate
from treadle.query.comparison import order_key
from treadle.query.filters import sort_keys
from treadle.query.keys import freeze
from treadle.query.paths import ARRAYS, Path, top, tops, value_at

# Rows that are taken from the cursor first, as many as a first reply holds, and afterwards.
ROWS_FIRST = 100
ROWS_PAGE = 1_000
# Buckets that `first` reads at once, and how many times more it reads if they were not enough.
BUCKETS_FIRST = 2
BUCKETS_GROWTH = 4

Keys = list[tuple[str, int]]


class Reader:
    """Turns the rows of a pipeline into the readings that a query asks for."""

    def __init__(self, spec: Spec, query: Query) -> None:
        query.require_window()
        self.spec = spec
        self.page = ROWS_FIRST
        self.done = False
        self._card = query.card
        self._load = query.loader(spec.entry.codec)
        self._query = split_filter(spec, query.filter)
        self._skip = query.skip
        self._left = query.limit
        self._keys = sort_keys(query.sort, spec.entry.paths.fields, tie_breaker=False) or []
        _check_sort(spec, self._keys)
        by_value = bool(self._keys) and self._keys[0][0] != spec.time.stored
        # None where the server sorts by value.
        self.time_order = None if by_value else TimeOrder(spec, self._keys)

    @property
    def command(self) -> Read:
        """The read whose cursor gives the rows."""
        return Read(self.spec.collection, "aggregate", (self.stages(),), {"allowDiskUse": True})

    @property
    def row_order(self) -> Keys:
        """The order of the rows, or of the header rows where there are any."""
        if self.time_order is not None:
            return self.time_order.header_order
        # Ties break by series and time.
        ties = {*self.spec.key_names, self.spec.time.stored} - {name for name, _ in self._keys}
        ordered = [name for name in (*self.spec.key_names, self.spec.time.stored) if name in ties]
        return [*self._keys, *((name, 1) for name in ordered)]

    @property
    def is_by_id(self) -> bool:
        """Whether it asks for readings by their derived ids, of which there are few."""
        return self._query.ids is not None

    def stages(self, *choice: Raw) -> list[Raw]:
        """Return the pipeline; `choice` are stages that choose among the buckets, in their order."""
        stages: list[Raw] = [{"$match": self._query.buckets}]
        if self.time_order is None:
            stages += [*self._row_stages(None), {"$sort": dict(self.row_order)}]
            if self._left and self._query.ids is None:
                stages.append({"$limit": self._skip + self._left})
        else:
            names = self.spec.names
            header = {"start": f"${names.start}", "end": f"${names.end}"}
            stages += [{"$sort": dict(self.time_order.bucket_order)}, *choice, *self._row_stages(header)]
        if self._card is not None:
            fields = {*tops(self._card.paths), *(top(name) for name, _ in self._keys)}
            fields |= {*self.spec.key_names, self.spec.time.stored, "_id", RESERVED}
            stages.append({"$project": dict.fromkeys(sorted(fields), 1)})
        return stages

    def _row_stages(self, header: Raw | None) -> list[Raw]:
        """Return the stages that make the rows, without readings that are not wanted."""
        stages = unwind_stages(self.spec, header=header, damaged=[None], with_bucket=True)
        condition = wanted(self.spec, self._query)
        if condition:
            # What has no date belongs to a damaged bucket, which is reported.
            undated = {self.spec.time.stored: {"$not": {"$type": "date"}}}
            headers = [] if header is None else [{RESERVED: {"$exists": True}}]
            stages.append({"$match": {"$or": [*headers, undated, condition]}})
        return stages

    def take(self, rows: list[Raw], ended: bool) -> Plan[list[Any]]:
        """Return what can be emitted now that these rows are known."""
        self.page = ROWS_PAGE
        if self.time_order is None:
            ready = [_with_id(self.spec, row) for row in rows]
        else:
            ready = self.time_order.take(rows, ended)
        ids = self._query.ids
        if ids is not None:
            ready = [row for row in ready if decode_id(row["_id"]) in ids]
        return self._emit(ready, ended)
        yield  # pragma: no cover (a plan that asks for nothing)

    def _emit(self, rows: list[Raw], ended: bool) -> list[Any]:
        if self._skip:
            passed = min(self._skip, len(rows))
            self._skip -= passed
            rows = rows[passed:]
        if self._left is not None:
            rows = rows[: self._left]
            self._left -= len(rows)
        self.done = ended or self._left == 0
        return [each for each in map(self._load, rows) if each is not SKIPPED]


def _with_id(spec: Spec, row: Raw) -> Raw:
    """Return a row with the id of its reading; raises where it comes from a damaged bucket."""
    if not isinstance(row.get(spec.time.stored), dt.datetime):
        raise _damaged(spec, row["_id"])
    return spec.with_derived_id(row)


def _damaged(spec: Spec, identity: Any) -> Exception:
    reason = f"its {spec.names.readings!r} is not an array of readings with dates in {spec.time.stored!r}"
    return damaged(spec, identity, reason)


def _check_sort(spec: Spec, keys: Keys) -> None:
    for name, _ in keys:
        field = spec.codec.by_stored.get(top(name))
        if field is not None and field.shape.kind in ARRAYS:
            raise UsageError(
                f"the sort names the list {name!r}; readings in buckets are sorted by single values",
                code="sort-invalid",
            )
        if name == "_id" and not spec.stores_id:
            raise UsageError(
                f"the id of a {spec.label} is made of its series and its time; sort by these",
                code="sort-invalid",
            )


class TimeOrder:
    """Puts rows in the order of time: of all series, or series by series where no sort was asked for."""

    def __init__(self, spec: Spec, keys: Keys) -> None:
        self._spec = spec
        self._by_series = not keys
        self._descending = bool(keys) and keys[0][1] == -1
        self._by_end = self._descending and spec.span is None
        self._sorts = [(_sort_key(spec, name), direction == -1) for name, direction in keys]
        if self._by_series:
            self._sorts = [(_sort_key(spec, spec.time.stored), False)]
        if "_id" not in dict(keys):
            self._sorts.append((_sort_key(spec, "_id"), False))
        # The readings that cannot be emitted yet, and the header of the bucket at hand.
        self._held: list[Raw] = []
        self._group: Any = None
        self._edge: dt.datetime | None = None
        self._series = 0
        self._bucket: Any = None

    @property
    def bucket_order(self) -> Keys:
        """The order in which buckets must arrive."""
        return self._order(self._spec.names.start, self._spec.names.end)

    @property
    def header_order(self) -> Keys:
        """The same order in terms of header rows."""
        return self._order(f"{RESERVED}.start", f"{RESERVED}.end")

    def _order(self, start: str, end: str) -> Keys:
        series = [(name, 1) for name in self._spec.key_names] if self._by_series else []
        return [*series, (end if self._by_end else start, -1 if self._descending else 1)]

    def take(self, rows: Sequence[Raw], ended: bool) -> list[Raw]:
        """Return the readings that no further bucket can come before."""
        time, stores_id = self._spec.time.stored, self._spec.stores_id
        ready: list[Raw] = []
        for row in rows:
            header = row.get(RESERVED)
            if header is not None:
                ready += self._open(row, header)
                continue
            moment = row.get(time)
            if not isinstance(moment, dt.datetime):
                raise _damaged(self._spec, self._bucket)
            if not stores_id:
                row["_id"] = encode_id(self._series, milliseconds(moment))
            self._held.append(row)
        return ready + (self._release(None) if ended else [])

    def _open(self, row: Raw, header: Raw) -> list[Raw]:
        """Go on to the next bucket. Returns the readings that come before all of its readings."""
        spec = self._spec
        edge = header.get("end" if self._by_end else "start")
        if not isinstance(edge, dt.datetime):
            raise damaged(spec, row["_id"], f"its {spec.names.start!r} is not a date")
        if self._descending and spec.span is not None:
            edge = to_datetime(spec.last(milliseconds(edge)))
        key = spec.key_of(row)
        group = freeze(list(key)) if self._by_series else None
        ready: list[Raw] = []
        if group != self._group:
            ready = self._release(None)
        elif edge != self._edge:
            ready = self._release(edge)
        self._group, self._edge, self._bucket = group, edge, row["_id"]
        self._series = spec.series_hash(key)
        return ready

    def _release(self, edge: dt.datetime | None) -> list[Raw]:
        """Return the held readings before an edge, in order; all of them without one."""
        held, self._held = self._held, []
        # From the last key to the first: sorting is stable.
        for key, reverse in reversed(self._sorts):
            held.sort(key=key, reverse=reverse)
        if edge is None:
            return held
        time, limit = self._spec.time.stored, edge
        if self._descending:
            at = bisect_left(held, True, key=lambda row: row[time] <= limit)
        else:
            at = bisect_left(held, limit, key=itemgetter(time))
        self._held = held[at:]
        return held[:at]


def _sort_key(spec: Spec, name: str) -> Callable[[Raw], Any]:
    if name == spec.time.stored or (name == "_id" and not spec.stores_id):
        return itemgetter(name)
    return lambda row: order_key(value_at(row, name))


class ArchiveReader:
    """Readings of the buckets in two collections, a model's own and its archive, in one order."""

    def __init__(self, reader: Reader) -> None:
        archive = reader.spec.entry.everything.archive
        if archive is None:
            raise UsageError(
                f"{reader.spec.label} has no archive to look into; declare it with archive=Archive(…)",
                code="archive-undeclared",
            )
        self._reader = reader
        self.commands = [reader.command, replace(reader.command, collection=archive)]
        self._rows: list[deque[Raw]] = [deque(), deque()]
        self._ended = [False, False]
        # The collection of the bucket at hand.
        self._at = 0

    @property
    def page(self) -> int:
        return self._reader.page

    @property
    def done(self) -> bool:
        return self._reader.done

    @property
    def wanting(self) -> list[int]:
        """Which of the cursors must be read before anything else can be told."""
        return [at for at in (0, 1) if not self._rows[at] and not self._ended[at]]

    def fill(self, at: int, rows: list[Raw]) -> None:
        self._rows[at].extend(rows)
        self._ended[at] = len(rows) < self.page

    def take(self) -> Plan[list[Any]]:
        """Return the readings that can be emitted now."""
        merged: list[Raw] = []
        while not self.wanting and any(self._rows):
            rows = self._rows[self._at]
            if not rows or self._reader.time_order is None or RESERVED in rows[0]:
                self._at = self._next()
            merged.append(self._rows[self._at].popleft())
        return (yield from self._reader.take(merged, not any(self._rows) and all(self._ended)))

    def _next(self) -> int:
        """Return the collection whose next row, or bucket, comes first."""
        present = [at for at in (0, 1) if self._rows[at]]
        if len(present) < 2:
            return present[0]
        live, archived = self._rows[0][0], self._rows[1][0]
        for name, direction in self._reader.row_order:
            one, other = order_key(value_at(live, name)), order_key(value_at(archived, name))
            if one != other:
                return int((one < other) != (direction == 1))
        return 0


# -- single readings, counts and values -----------------------------------------------------


def first(reader: Reader) -> Plan[Any]:
    """Return the first reading, or None; by time, from as few buckets as can tell."""
    if reader.time_order is None or reader.is_by_id:
        rows = yield reader.command
        return next(iter((yield from reader.take(rows, True))), None)
    passed, number = 0, BUCKETS_FIRST
    while not reader.done:
        choice = [{"$skip": passed}, {"$limit": number}] if passed else [{"$limit": number}]
        rows = yield replace(reader.command, arguments=(reader.stages(*choice),))
        buckets = sum(RESERVED in row for row in rows)
        readings = yield from reader.take(rows, buckets < number)
        if readings:
            return readings[0]
        passed, number = passed + number, number * BUCKETS_GROWTH
    return None


def count(spec: Spec, filter: Any) -> Plan[int]:
    """Return how many readings match; of buckets that lie wholly in a range, only the count is read."""
    query, _ = yield from identify(spec, split_filter(spec, filter))
    if query.rest is not None:
        counted: list[Raw] = [*reading_stages(spec, query), {"$count": "count"}]
    else:
        names, time = spec.names, f"$$this.{spec.time.stored}"
        at = time_condition(query.times)
        inside = [{operator: [time, bound]} for operator, bound in at.items()]
        ends = {"$gte": f"${names.start}", "$lte": f"${names.end}"}
        whole = [{operator: [ends[operator], bound]} for operator, bound in at.items()]
        some = {"$size": {"$filter": {"input": f"${names.readings}", "cond": {"$and": inside}}}}
        all_of_it = {"$or": [{"$and": whole}, {"$not": {"$isArray": f"${names.readings}"}}]}
        number = {"$cond": [all_of_it, f"${names.count}", some]}
        counted = [{"$match": query.buckets}, {"$group": {"_id": None, "count": {"$sum": number}}}]
    rows = yield from aggregate(spec.collection, counted, allowDiskUse=True)
    return int(rows[0]["count"]) if rows else 0


def distinct(spec: Spec, path: Path, filter: Any) -> Plan[list[Any]]:
    """Return the different stored values of one field."""
    query, _ = yield from identify(spec, split_filter(spec, filter))
    stages = reading_stages(spec, query)
    if path.stored == "_id" and not spec.stores_id:
        named = {name: f"${name}" for name in (*spec.key_names, spec.time.stored)}
        stages.append({"$group": {"_id": named}})
        rows = yield from aggregate(spec.collection, stages, allowDiskUse=True)
        return sorted({spec.derived_id(row["_id"]) for row in rows})
    steps = [step.stored for step in path.steps]
    for number, step in enumerate(path.steps):
        if step.array:
            within = ".".join(steps[: number + 1])
            stages.append({"$unwind": {"path": f"${within}", "preserveNullAndEmptyArrays": True}})
    stages += [{"$match": {path.stored: {"$exists": True}}}, {"$group": {"_id": f"${path.stored}"}}]
    rows = yield from aggregate(spec.collection, stages, allowDiskUse=True)
    return sorted((row["_id"] for row in rows), key=order_key)
