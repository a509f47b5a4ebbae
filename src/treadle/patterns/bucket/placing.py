"""Where readings go: the bucket of their window that has room, or a new one.

Windows without a span are those that `_treadle.next` says: a full bucket
names, once, where its successor starts, so that all writers open the same.

With `unique`, windows are always read first, and each append also says that
its bucket has none of the new values. A full bucket is closed for good before
the next one is opened; so a value cannot slip into one while it is looked for
in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from treadle.model.bson_types import RESERVED
from treadle.patterns.bucket.contents import Form, readings_of
from treadle.patterns.bucket.grouping import Batch, cut, drop_repeated, frozen, part_of
from treadle.patterns.bucket.spec import CLOSED, NEXT, SEQUENCE, Spec, milliseconds, moment
from treadle.plan import Plan, Raw, aggregate, find, find_one_and_update, update_one


class Placer:
    """Finds the buckets for the readings of one model; tells `remember` what it found."""

    def __init__(
        self, spec: Spec, collection: str, form: Form, remember: Callable[[Batch, int], None]
    ) -> None:
        self.spec = spec
        self.collection = collection
        self.form: Form = form
        self.remember = remember

    def locate(self, batch: Batch, duplicates: list[int]) -> Plan[tuple[list[Batch], list[Batch]]]:
        """Where the readings of one batch go now, and those that must wait for that."""
        if self.spec.span is None:
            return (yield from self._locate_by_limit(batch, duplicates))
        window = yield from self._window(batch, batch.start)
        if self.spec.unique is not None:
            if not (yield from self._drop_duplicates(batch, window, duplicates)):
                return [], []
            if (yield from self._close_full(window, batch)):
                return [], [batch]
        return self._place(batch, window, batch.start, None)

    def _window(self, batch: Batch, start: int | None) -> Plan[list[Raw]]:
        """The buckets of a window, the last one first, without their readings unless they are needed."""
        spec, names = self.spec, self.spec.names
        shown: Raw = {
            "sequence": f"${SEQUENCE}", "count": f"${names.count}", "next": f"${NEXT}",
            "closed": f"${CLOSED}", "form": {"$type": f"${names.readings}"}, "end": f"${names.end}",
            "start": f"${names.start}",
        }  # fmt: skip
        shown |= {f"outer{number}": f"${name}" for number, name in enumerate(spec.outer_names)}
        if spec.unique is not None:
            shown["bucket"] = "$$ROOT"
        assert start is not None
        match = {**spec.key_filter(batch.key), names.start: {"$eq": moment(start)}}
        # What is unique must be looked for in all of them.
        most = spec.limits.bucket_candidates_max
        few: list[Raw] = [] if spec.unique is not None else [{"$limit": most}]
        stages = [{"$match": match}, {"$sort": {SEQUENCE: -1}}, *few, {"$project": shown}]
        return (yield from aggregate(self.collection, stages))

    def _fits(self, batch: Batch, bucket: Raw) -> bool:
        """Whether readings can be added to a bucket at all."""
        if bucket["form"] not in ("array", "object") or bucket.get("closed"):
            return False
        return all(_equal(bucket.get(f"outer{number}"), value) for number, value in enumerate(batch.outer))

    def _place(
        self, batch: Batch, window: Sequence[Raw], start: int | None, following: int | None
    ) -> tuple[list[Batch], list[Batch]]:
        """Fill a bucket that has room, then open new ones; what is left for another look.

        What is unique goes into one bucket at a time: another writer may fill
        the first with a reading of this batch, which must not go into the
        second then.
        """
        limit = self.spec.limit
        target = self._with_room(batch, window)
        highest = max((bucket.get("sequence") or 0 for bucket in window), default=-1)
        placed: list[Batch] = []
        at = 0
        total = len(batch.readings)
        if target is not None:
            at = total if limit is None else min(total, limit - int(target["count"]))
            form: Form = "rows" if target["form"] == "array" else "columns"
            part = part_of(batch, 0, at)
            placed.append(
                replace(part, start=start, sequence=target.get("sequence") or 0, form=form, next=following)
            )
            self.remember(placed[0], int(target["count"]))
        size = limit or max(total, 1)
        if batch.crowded:
            size = max(1, min(size, total // 2))
        while at < total and not (placed and self.spec.unique is not None):
            highest += 1
            part = part_of(batch, at, at + size)
            placed.append(replace(part, start=start, sequence=highest, form=self.form, next=following))
            self.remember(placed[-1], 0)
            at += size
        return placed, [part_of(batch, at, total)] if at < total else []

    def _with_room(self, batch: Batch, window: Sequence[Raw]) -> Raw | None:
        limit = self.spec.limit
        if batch.crowded:
            return None
        for bucket in window:
            if self._fits(batch, bucket) and (limit is None or int(bucket["count"]) < limit):
                return bucket
        return None

    # -- windows that end with their limit --------------------------------------------------

    def _locate_by_limit(self, batch: Batch, duplicates: list[int]) -> Plan[tuple[list[Batch], list[Batch]]]:
        """The window of the earliest reading; the readings beyond it wait."""
        spec, names, time = self.spec, self.spec.names, self.spec.time.stored
        order = sorted(range(len(batch.readings)), key=lambda place: batch.readings[place][time])
        batch = replace(
            batch,
            readings=[batch.readings[place] for place in order],
            counts=[],
            places=[batch.places[place] for place in order] if batch.places else [],
        )
        first = milliseconds(batch.readings[0][time])
        before = yield from self._neighbour(batch, {"$lte": moment(first)}, -1)
        if before is None or (before.get("next") is not None and milliseconds(before["next"]) <= first):
            start = first if before is None else milliseconds(before["next"])
            after = yield from self._neighbour(batch, {"$gt": moment(start)}, 1)
            window: list[Raw] = []
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
        if spec.unique is not None and window:
            if not (yield from self._drop_duplicates(now, window, duplicates)):
                return [], later
            # An open window goes on in its successor, which is named first and closes it too.
            if following is not None and (yield from self._close_full(window, now)):
                return [], [now, *later]
        elif spec.unique is not None:
            drop_repeated(spec, now, duplicates)
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
        names = self.spec.names
        found = yield from find(
            self.collection,
            {**self.spec.key_filter(batch.key), names.start: range},
            {names.start: 1, NEXT: 1},
            sort=[(names.start, direction), (SEQUENCE, direction)],
            limit=1,
        )
        if not found:
            return None
        return {**found[0], "next": found[0].get(RESERVED, {}).get("next")}

    def _name_successor(self, window: Sequence[Raw], first: int) -> Plan[None]:
        """Say where the window after a full one starts; whoever is first decides for all."""
        last = max(milliseconds(bucket["end"]) for bucket in window)
        named = moment(max(first, last + 1))
        yield from find_one_and_update(
            self.collection,
            {"_id": {"$in": [bucket["_id"] for bucket in window]}, NEXT: {"$exists": False}},
            {"$set": {NEXT: named}},
            sort=[(SEQUENCE, -1)],
        )

    # -- unique -----------------------------------------------------------------------------

    def _drop_duplicates(self, batch: Batch, window: Sequence[Raw], duplicates: list[int]) -> Plan[bool]:
        """Take out what the window holds already; whether anything is left."""
        unique = self.spec.unique
        assert unique is not None
        known = {
            frozen(reading.get(unique.stored))
            for bucket in window
            for reading in readings_of(self.spec, bucket["bucket"])
            if reading.get(unique.stored) is not None
        }
        drop_repeated(self.spec, batch, duplicates, known)
        return bool(batch.readings)
        yield  # pragma: no cover (a plan, for the sake of its callers)

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
        yield from update_one(self.collection, full, {"$set": {CLOSED: True}})
        return True


def _equal(one: Any, other: Any) -> bool:
    """Equality as the server's `$eq` has it."""
    return one is other or frozen(one) == frozen(other)
