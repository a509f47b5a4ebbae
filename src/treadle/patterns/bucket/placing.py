"""Where readings go: the bucket of their window that has room, or a new one.

Windows without a span are those that `_treadle.next` says: a full bucket
names, once, where its successor starts, so that all writers open the same.

With `unique`, which needs a span, windows are always read first, and each
append also says that its bucket has none of the new values. A full bucket is
closed for good before the next one is opened; so a value cannot slip into one
while it is looked for in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from treadle.patterns.bucket.contents import readings_of
from treadle.patterns.bucket.grouping import Batch, cut, drop_repeated, keep, part_of
from treadle.patterns.bucket.spec import CLOSED, NEXT, SEQUENCE, Spec, milliseconds, moment, state
from treadle.plan import Plan, Raw, aggregate, find, find_one_and_update, update_one
from treadle.query.keys import freeze, same_key

# The last buckets of a window, among which one with room is looked for.
BUCKET_CANDIDATES_MAX = 8

# Where the readings of a batch go now, and those that must wait for that.
Located = tuple[list[Batch], list[Batch]]


class Placer:
    """Looks up the buckets for the readings of one model; tells `remember` where a batch goes."""

    def __init__(self, spec: Spec, remember: Callable[[Batch, int], None]) -> None:
        self.spec = spec
        self.remember = remember

    def locate(self, batch: Batch, duplicates: list[int]) -> Plan[Located]:
        """Where the readings of one batch go; notes those that are there already, under `unique`."""
        if self.spec.span is None:
            return (yield from self._locate_by_limit(batch))
        window = yield from self._window(batch, batch.start)
        if self.spec.unique is not None:
            self._drop_duplicates(batch, window, duplicates)
            if not batch.readings:
                return [], []
            if (yield from self._close_full(window, batch)):
                return [], [batch]
        return self._place(batch, window, batch.start, None)

    def _window(self, batch: Batch, start: int | None) -> Plan[list[Raw]]:
        """The buckets of a window, the last one first, without their readings unless they are needed."""
        spec, names = self.spec, self.spec.names
        projection: Raw = {
            "sequence": f"${SEQUENCE}", "count": f"${names.count}", "next": f"${NEXT}",
            "closed": f"${CLOSED}", "array": {"$isArray": f"${names.readings}"}, "end": f"${names.end}",
        }  # fmt: skip
        projection |= {f"outer{number}": f"${name}" for number, name in enumerate(spec.outer_names)}
        if spec.unique is not None:
            projection["bucket"] = "$$ROOT"
        assert start is not None
        match = {**spec.key_filter(batch.key), names.start: {"$eq": moment(start)}}
        # What is unique must be looked for in all of them.
        few: list[Raw] = [{"$limit": BUCKET_CANDIDATES_MAX}] if spec.unique is None else []
        stages = [{"$match": match}, {"$sort": {SEQUENCE: -1}}, *few, {"$project": projection}]
        return (yield from aggregate(spec.collection, stages))

    def _place(
        self, batch: Batch, window: Sequence[Raw], start: int | None, following: int | None
    ) -> Located:
        """Fill a bucket that has room, then open new ones; what is left is for another look.

        What is unique goes into one bucket at a time: another writer may fill
        the first with a reading of this batch, which must not go into the
        second then.
        """
        limit, total = self.spec.limit, len(batch.readings)
        placed: list[Batch] = []
        at = 0

        def place(size: int, sequence: int, count: int) -> None:
            nonlocal at
            part = part_of(batch, at, at + size)
            placed.append(replace(part, start=start, sequence=sequence, next=following))
            self.remember(placed[-1], count)
            at += size

        target = self._with_room(batch, window)
        if target is not None:
            count = int(target["count"])
            place(total if limit is None else limit - count, target.get("sequence") or 0, count)
        highest = max((bucket.get("sequence") or 0 for bucket in window), default=-1)
        size = limit or max(total, 1)
        if batch.crowded:
            size = max(1, min(size, total // 2))
        while at < total and not (placed and self.spec.unique is not None):
            highest += 1
            place(size, highest, 0)
        return placed, [part_of(batch, at, total)] if at < total else []

    def _with_room(self, batch: Batch, window: Sequence[Raw]) -> Raw | None:
        """The last bucket of a window to which readings can be added."""
        if batch.crowded:
            return None
        for bucket in window:
            if not bucket["array"] or bucket.get("closed"):
                continue
            if self.spec.limit is not None and int(bucket["count"]) >= self.spec.limit:
                continue
            # Equal as the server's `$eq` has it.
            if all(same_key(bucket.get(f"outer{number}"), value) for number, value in enumerate(batch.outer)):
                return bucket
        return None

    # -- windows that end with their limit --------------------------------------------------

    def _locate_by_limit(self, batch: Batch) -> Plan[Located]:
        """The window of the earliest reading; the readings beyond it wait."""
        spec, names, time = self.spec, self.spec.names, self.spec.time.stored
        batch = replace(batch)
        keep(batch, sorted(range(len(batch.readings)), key=lambda number: batch.readings[number][time]))
        first = milliseconds(batch.readings[0][time])
        before = yield from self._neighbour(batch, {"$lte": moment(first)}, -1)
        named = None if before is None else state(before, "next")
        window: list[Raw] = []
        if before is None or (named is not None and milliseconds(named) <= first):
            start = first if named is None else milliseconds(named)
            after = yield from self._neighbour(batch, {"$gt": moment(start)}, 1)
            following = None if after is None else milliseconds(after[names.start])
        else:
            start = milliseconds(before[names.start])
            window = yield from self._window(batch, start)
            # As the window is now, not as it was a moment ago.
            named = next((each["next"] for each in window if each.get("next") is not None), None)
            following = None if named is None else milliseconds(named)
            if not window or (following is not None and following <= first):
                return [], [batch]
        now, later = cut(batch, following, time)
        target = self._with_room(now, window)
        if window and following is None and target is None and not now.crowded:
            yield from self._name_successor(window, first)
            return [], [now, *later]
        if following is None and spec.limit is not None:
            # Only as many as fit; what follows opens the next window.
            room = spec.limit - (0 if target is None else int(target["count"]))
            rest = part_of(now, room, len(now.readings))
            now = part_of(now, 0, room)
            later = [rest, *later] if rest.readings else later
        placed, rest_of_window = self._place(now, window, start, following)
        return placed, [*rest_of_window, *later]

    def _neighbour(self, batch: Batch, range: Raw, direction: int) -> Plan[Raw | None]:
        """The bucket of the series that starts first in a range of times, or last."""
        names = self.spec.names
        rows = yield from find(
            self.spec.collection,
            {**self.spec.key_filter(batch.key), names.start: range},
            {names.start: 1, NEXT: 1},
            sort=[(names.start, direction), (SEQUENCE, direction)],
            limit=1,
        )
        return rows[0] if rows else None

    def _name_successor(self, window: Sequence[Raw], first: int) -> Plan[None]:
        """Say where the window after a full one starts; whoever is first decides for all."""
        last = max(milliseconds(bucket["end"]) for bucket in window)
        named = moment(max(first, last + 1))
        yield from find_one_and_update(
            self.spec.collection,
            {"_id": {"$in": [bucket["_id"] for bucket in window]}, NEXT: {"$exists": False}},
            {"$set": {NEXT: named}},
            sort=[(SEQUENCE, -1)],
        )

    # -- unique -----------------------------------------------------------------------------

    def _drop_duplicates(self, batch: Batch, window: Sequence[Raw], duplicates: list[int]) -> None:
        """Take out what the window holds already, or comes twice."""
        assert self.spec.unique is not None
        name = self.spec.unique.stored
        readings = [each for bucket in window for each in readings_of(self.spec, bucket["bucket"])]
        known = {freeze(each[name]) for each in readings if each.get(name) is not None}
        drop_repeated(self.spec, batch, duplicates, known)

    def _close_full(self, window: Sequence[Raw], batch: Batch) -> Plan[bool]:
        """Close the last bucket of a window if nothing more fits in; whether it had to be."""
        if not window or window[0].get("closed"):
            return False
        last, limit = window[0], self.spec.limit
        full: Raw = {"_id": {"$eq": last["_id"]}}
        if not batch.crowded:
            if limit is None or int(last["count"]) < limit:
                return False
            full[self.spec.names.count] = {"$gte": limit}
        yield from update_one(self.spec.collection, full, {"$set": {CLOSED: True}})
        return True
