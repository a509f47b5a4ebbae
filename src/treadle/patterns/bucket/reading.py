"""Reading: buckets in, readings out, in the order that was asked for.

A `Reader` is fed pages of buckets by the shell, which holds the cursor. By
time it emits as soon as no later bucket can hold an earlier reading, so it
keeps about one window per series. Any other order has to see everything
first; with a limit it keeps only as many as will be shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from treadle.errors import UsageError
from treadle.graph.query import SKIPPED, Query
from treadle.graph.stored_pages import Note, readable_page
from treadle.patterns.bucket.matching import Opened, Selection, open_buckets, select
from treadle.patterns.bucket.spec import Spec, milliseconds, moment
from treadle.plan import Plan, Raw, Read, aggregate, find
from treadle.plan.decoding import UndecodableId
from treadle.query.comparison import order_key
from treadle.query.filters import sort_keys
from treadle.query.keys import freeze
from treadle.query.paths import ARRAYS, Path, top, value_at, values_at

# The same, for few readings.
BUCKET_SMALL_PAGE = 4
# Readings that are held to sort them.
BUCKET_HELD_MAX = 1_000_000


class Reader:
    """Turns pages of buckets into readings, filtered, sorted and cut."""

    def __init__(self, spec: Spec, query: Query) -> None:
        self.spec = spec
        self._load = query.loader(spec.entry.codec)
        self.selection = select(spec, query.filter)
        self.keys = sort_keys(query.sort, spec.entry.paths.fields) or []
        # The fields that are in neither the card, the sort nor the filter.
        self._unread = frozenset[str]()
        named = None if query.card is None else _named(query.filter or {})
        if query.card is not None and named is not None:
            sorted_by = [top(path) for path, _ in self.keys]
            asked = {*map(top, query.card.paths), *sorted_by, *named, spec.time.stored}
            self._unread = frozenset(spec.value_names) - asked
        _check_sort(spec, self.keys)
        limit = query.limit or 0
        self.skip = query.skip
        self.remaining = query.limit or None
        self._few = 0 < limit <= 1000 - query.skip
        self.page = BUCKET_SMALL_PAGE if self._few else spec.limits.bucket_page
        self.done = False
        self._held: list[Raw] = []
        # The series of the readings that are held, where no order was asked for.
        self._last: Any = None
        self._by_time = bool(self.keys) and self.keys[0][0] == spec.time.stored

    @property
    def command(self) -> Read:
        """The read whose cursor gives the buckets."""
        options: Raw = {"batch_size": self.page * 4} if self._few else {}
        if not self.keys:
            # As the index has them: series by series, each in the order of its windows.
            order = [*self.spec.key_names, self.spec.names.start]
            options |= {"sort": [(name, 1) for name in order], "allow_disk_use": True}
        if self._by_time:
            options |= {"sort": [self._bucket_order()], "allow_disk_use": True}
        chosen: tuple[Raw, ...] = (self.selection.buckets,)
        if self._unread:
            held = self.spec.names.readings
            chosen = (*chosen, {f"{held}.{name}": 0 for name in sorted(self._unread)})
        return Read(self.spec.collection, "find", chosen, options)

    def _bucket_order(self) -> tuple[str, int]:
        names, direction = self.spec.names, self.keys[0][1]
        return (names.end if direction == -1 and self.spec.span is None else names.start), direction

    def take(self, buckets: list[Raw], ended: bool) -> Plan[list[Any]]:
        """The readings that can be emitted now that these buckets are known."""
        opened = yield from open_buckets(self.spec, self.selection, buckets)
        if not self.keys:
            return self._emit(self._in_time(opened, buckets, ended), ended)
        self._held += [flat for each in opened for flat in self._flats(each)]
        if not ended and not self._by_time:
            self._keep_few()
            return []
        self._sort()
        at = len(self._held) if ended else self._safe(buckets)
        ready, self._held = self._held[:at], self._held[at:]
        return self._emit(ready, ended)

    def _flats(self, each: Opened) -> list[Raw]:
        return [self.spec.flat(each.bucket, each.readings[place], each.series) for place in each.picked]

    def _in_time(self, opened: Sequence[Opened], buckets: Sequence[Raw], ended: bool) -> list[Raw]:
        """The readings that no further bucket can come before: series by series, in the order of time."""
        time = itemgetter(self.spec.time.stored)
        groups = [(self._last, self._held)] if self._held else []
        for each in opened:
            series = self._series(each.bucket)
            if not groups or groups[-1][0] != series:
                groups.append((series, []))
            groups[-1][1].extend(self._flats(each))
        # The last series may go on, in windows that begin no earlier than its last one.
        self._last = None if ended or not buckets else self._series(buckets[-1])
        self._held, ready = [], list[Raw]()
        for series, flats in groups:
            flats.sort(key=time)
            at = len(flats)
            if self._last is not None and series == self._last:
                at = bisect_left(flats, buckets[-1][self.spec.names.start], key=time)
                self._held = flats[at:]
            ready += flats[:at]
        return ready

    def _series(self, bucket: Raw) -> Any:
        return freeze([value_at(bucket, name) for name in self.spec.key_names])

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
        most = BUCKET_HELD_MAX
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

    def _emit(self, flats: list[Raw], ended: bool) -> list[Any]:
        if self.skip:
            passed = min(self.skip, len(flats))
            self.skip -= passed
            flats = flats[passed:]
        if self.remaining is not None:
            flats = flats[: self.remaining]
            self.remaining -= len(flats)
        self.done = ended or self.remaining == 0
        return [each for each in map(self._load, flats) if each is not SKIPPED]


def _named(filter: Mapping[str, Any]) -> set[str] | None:
    """The fields that a filter names; None where it may look at any."""
    names: set[str] = set()
    for key, condition in filter.items():
        if not key.startswith("$"):
            names.add(top(key))
            continue
        inner = [_named(each) for each in condition] if key in ("$and", "$or", "$nor") else [None]
        for each in inner:
            if each is None:
                return None
            names |= each
    return names


class ArchiveReader:
    """Readings of buckets in two collections, such as a model's own and its archive."""

    def __init__(self, reader: Reader) -> None:
        archive = reader.spec.entry.everything.archive
        if archive is None:
            raise UsageError(
                f"{reader.spec.label} has no archive to look into; declare it with archive=Archive(…)",
                code="archive-undeclared",
            )
        # Buckets come in the order of the one collection after the other, and are sorted at the end.
        reader._by_time = False
        self._reader = reader
        self.page = reader.page
        self.commands = [reader.command, replace(reader.command, collection=archive)]
        self._at = 0
        self._buckets: list[Raw] = []

    @property
    def done(self) -> bool:
        return self._reader.done

    @property
    def wanting(self) -> list[int]:
        """Which of the cursors is to be read next."""
        return [self._at]

    def fill(self, at: int, buckets: list[Raw]) -> None:
        self._buckets = buckets

    def take(self) -> Plan[list[Any]]:
        """The readings that can be emitted now."""
        ended = len(self._buckets) < self.page
        readings = yield from self._reader.take(self._buckets, ended and self._at == 1)
        self._at = min(1, self._at + ended)
        return readings


def distinct(spec: Spec, path: Path, filter: Any) -> Plan[list[Any]]:
    """The different stored values of one field."""
    selection = select(spec, filter)
    values: dict[Any, Any] = {}
    scan = Scan(spec.collection, selection.buckets, spec.limits.bucket_page)
    while buckets := (yield from scan.next()):
        for each in (yield from open_buckets(spec, selection, buckets)):
            for place in each.picked:
                flat = spec.flat(each.bucket, each.readings[place], each.series)
                values.update((freeze(value), value) for value in values_at(flat, path.steps))
    return sorted(values.values(), key=order_key)


def _check_sort(spec: Spec, keys: Sequence[tuple[str, int]]) -> None:
    for name, _ in keys:
        field = spec.codec.by_stored.get(top(name))
        if field is not None and field.shape.kind in ARRAYS:
            raise UsageError(
                f"the sort names the list {name!r}; readings in buckets are sorted by single values",
                code="sort-invalid",
            )


# -- count ----------------------------------------------------------------------------------


def count(spec: Spec, filter: Any) -> Plan[int]:
    """How many readings match; buckets that lie wholly in the range are not read."""
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

    def __init__(
        self,
        collection: str,
        filter: Raw,
        page: int,
        projection: Raw | None = None,
        label: str | None = None,
        note: Note | None = None,
    ) -> None:
        self.collection = collection
        # Under which name those that cannot be decoded are set aside; without one they are an error.
        self._label = label
        self._note = note
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
            beyond: Any = {"_id": after}
            if self._last and isinstance(self._last[0], UndecodableId):
                bounds, beyond = {}, self._last[0].greater()
            condition = {"$and": [self.filter, beyond]}
            reading = find(
                self.collection, condition, self.projection, sort=[("_id", 1)], limit=self.page, **bounds
            )
            last: list[Any] | None
            if self._label is None:
                rows = yield from reading
                last = [each["_id"] for each in rows[-1:]] or None
                ended = len(rows) < self.page
            else:
                rows, last = yield from readable_page(self._label, reading, self._last or None, self._note)
                # Whether a page was full cannot be told where some of it could not be decoded.
                ended = last is None
            self._last = last or []
            if ended:
                self._ended, self._others, self._last = self._others, True, []
            if rows:
                return rows
        return []
