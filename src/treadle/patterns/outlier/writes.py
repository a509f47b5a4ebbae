"""Writes of outlier arrays: one update where there is no overflow, else a transaction.

Rules:

1. Whatever touches the overflow writes the owner in the same transaction. Two
   writers of one array therefore always meet, and one of them starts again.
2. An owner without overflow takes items by one update, whose own filter says
   that there is room; checking first and pushing later would overshoot.
3. New items go to the end. As long as there is overflow, that is the overflow,
   also where the embedded part has room again, so that the order stays.
4. An owner that lacks what is maintained is brought in order first; so writers
   go on while old data is adopted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, TypeVar

from treadle.engine.documents import auto_fields, stamping, translated
from treadle.engine.references import follow_own
from treadle.engine.updates import concerns
from treadle.engine.version_upgrade import upgrade_stored
from treadle.graph.changes import Changes
from treadle.graph.rule import REVISION
from treadle.graph.write import Write
from treadle.patterns.outlier.fields import OutlierFields, first_of_each
from treadle.patterns.outlier.item_bytes import fitting, weight
from treadle.patterns.outlier.parts import Move, in_order, refill
from treadle.plan import (
    Plan,
    Raw,
    aggregate,
    by_id,
    find,
    find_one,
    find_one_and_update,
    insert_many,
    update_one,
)
from treadle.query.keys import freeze

R = TypeVar("R")


class ArrayWork(Write[R]):
    """One write of one array."""

    shows_document = False

    def __init__(self, rule: OutlierFields, key: Any) -> None:
        self.rule = rule
        self.entry = rule.target
        self.key = key
        self.of_owner = rule.owned(key)
        # Whether others are fed by the array, its count or its flag.
        self.followed = concerns(
            self.entry, {*(owned.path for owned in rule.owns()), *auto_fields(self.entry, new=False)}
        )
        # In an older version the array may have another name, or another form.
        self.current = self.entry.versions.current_only if self.entry.versions.is_versioned else {}

    def quick(self) -> Plan[Any]:
        """The write as one plain update; None where that cannot be, and nothing was done."""
        raise NotImplementedError  # pragma: no cover

    def change(self) -> Plan[Any]:
        """The write in a transaction."""
        raise NotImplementedError  # pragma: no cover

    def apply(self, changes: Changes) -> Plan[Any]:
        entry, before = self.entry, None
        if self.followed or entry.versions.is_versioned:
            before = yield from find_one(entry.collection, by_id(self.key))
            if before is None:
                raise self.rule.missing(self.key)
        if before is None or not (self.followed or entry.versions.is_outdated(before)):
            return (yield from self.change())
        (before,) = yield from upgrade_stored(entry, [before], changes)
        outcome = yield from self.change()
        after = yield from find_one(entry.collection, by_id(self.key))
        if after is not None:
            (after,) = yield from follow_own(entry, [(before, after)])
            yield from changes.add(entry, [(before, after)])
        return outcome


def holds(item: Any) -> Raw:
    """The condition that an array holds an item, itself and not one of its parts."""
    return {"$elemMatch": {"$eq": item}}


# -- adding --------------------------------------------------------------------------------


class Extend(ArrayWork[list[bool]]):
    """Items at the end of an array; per item whether it was added.

    `last` is the number of the last page, as far as the caller knows it. What
    it turned out to be is there afterwards; None where there is no overflow.
    """

    def __init__(self, rule: OutlierFields, key: Any, items: Sequence[Any], last: int | None = None) -> None:
        super().__init__(rule, key)
        self.items = list(items)
        self.last = last
        self._parts: tuple[Extend, ...] = ()

    @property
    def size(self) -> int:
        return len(self.items)

    def merges(self, other: Write[Any]) -> bool:
        return (
            isinstance(other, Extend)
            and other.rule is self.rule
            and other.key == self.key
            and len(self.items) + len(other.items) <= self.rule.limits.array_extend_max
            and sum(map(weight, [*self.items, *other.items])) <= self.rule.limits.array_bytes_max
        )

    def merged(self, other: Extend) -> Extend:
        both = Extend(self.rule, self.key, [*self.items, *other.items], self.last)
        both._parts = (*(self._parts or [self]), other)
        return both

    def _met(self, last: int | None) -> None:
        for each in (self, *self._parts):
            each.last = last

    def quick(self) -> Plan[list[bool] | None]:
        rule, number = self.rule, len(self.items)
        if self.followed or number > rule.limit or (rule.unique and number > 1):
            return None
        condition = {**by_id(self.key), **self.current, **rule.ordinary()}
        condition[f"{rule.path}.{rule.limit - number}"] = {"$exists": False}
        if rule.unique:
            condition[rule.path] = {**condition[rule.path], "$not": holds(self.items[0])}
        push = {"$push": {rule.path: {"$each": self.items}}, "$inc": {rule.count_path: number}}
        update = stamping(self.entry, push)
        with translated(self.entry.model.__name__):
            result = yield from update_one(self.entry.collection, condition, update)
        return [True] * number if result.matched_count else None

    def change(self) -> Plan[list[bool]]:
        with translated(self.entry.model.__name__):
            if not (self.rule.unique and len(self.items) > 1):
                done = yield from self._to_the_last_page()
                if done is not None:
                    return done
            return (yield from settle(self.rule, self.key, self._plan))

    def _to_the_last_page(self) -> Plan[list[bool] | None]:
        """The ordinary way while there is overflow: the owner's count, and one overflow document."""
        rule, items, number = self.rule, self.items, len(self.items)
        if number > rule.page_size:
            return None
        if rule.unique:
            known = yield from find_one(
                rule.overflow_collection, {**self.of_owner, rule.content: {"$eq": items[0]}}, {"_id": 1}
            )
            if known is not None:
                return [False]
        last = yield from self._count_them()
        if last is None:
            return None
        if rule.form == "documents":
            made, _ = rule.pages(self.key, items, last - number)
            yield from insert_many(rule.overflow_collection, made)
        else:
            condition = {**self.of_owner, "page": last, "count": {"$lte": rule.page_size - number}}
            if not rule.small:
                room = rule.limits.array_bytes_max - sum(map(weight, items))
                condition["$expr"] = {"$lte": [{"$bsonSize": "$$ROOT"}, room]}
            push = {"$push": {rule.field: {"$each": items}}, "$inc": {"count": number}}
            result = yield from update_one(rule.overflow_collection, condition, push)
            if not result.matched_count:
                last = yield from self._begin_page(last)
        self._met(last)
        return [True] * number

    def _count_them(self) -> Plan[int | None]:
        """Add to the owner's count; the number of its last page, None where there is no overflow."""
        rule, number = self.rule, len(self.items)
        condition: Raw = {**by_id(self.key), **self.current, rule.count_path: {"$type": "number"}}
        if rule.unique:
            condition[rule.path] = {"$not": holds(self.items[0])}
        increments = {rule.count_path: number}
        if rule.form == "documents":
            increments[rule.last_path] = number
        update = stamping(self.entry, {"$inc": increments})
        if rule.form != "documents" and self.last is not None:
            # An update is cheaper than one that also shows the document.
            known = {**condition, rule.last_path: self.last}
            result = yield from update_one(self.entry.collection, known, update)
            if result.matched_count:
                return self.last
        owner = yield from find_one_and_update(
            self.entry.collection,
            {**condition, rule.last_path: {"$exists": True}},
            update,
            projection={rule.last_path: 1},
        )
        return None if owner is None else int(rule.value(owner, rule.last_path))

    def _begin_page(self, last: int) -> Plan[int | None]:
        """Fill the last page, and put the rest on new ones; the number of the last."""
        rule = self.rule
        room = yield from self._fill(last, self.items)
        made, number = rule.pages(self.key, self.items[room:], last)
        yield from insert_many(rule.overflow_collection, made)
        yield from update_one(self.entry.collection, by_id(self.key), {"$set": {rule.last_path: number}})
        return number

    def _fill(self, last: int, items: list[Any]) -> Plan[int]:
        """Add to the last page as many items as it has room for; how many these were."""
        rule, room = self.rule, 0
        projection = {"count": 1, "bytes": {"$bsonSize": "$$ROOT"}}
        stages = [{"$match": {**self.of_owner, "page": last}}, {"$project": projection}]
        for page in (yield from aggregate(rule.overflow_collection, stages)):
            spare = max(0, rule.page_size - page.get("count", rule.page_size))
            room = fitting(items, spare, rule.limits.array_bytes_max - page["bytes"])
            if room:
                push = {"$push": {rule.field: {"$each": items[:room]}}, "$inc": {"count": room}}
                yield from update_one(rule.overflow_collection, {"_id": page["_id"]}, push)
        return room

    def _plan(self, owner: Raw) -> Plan[tuple[list[bool], Move | None]]:
        rule = self.rule
        embedded, last = rule.embedded(owner), rule.value(owner, rule.last_path)
        self._met(last)
        new, added = self.items, [True] * len(self.items)
        if rule.unique:
            known = list(embedded)
            if last is not None:
                known += yield from self._in_overflow()
            added = first_of_each(self.items, known)
            new = list(compress(self.items, added))
        if not new:
            return added, None
        room = max(0, rule.limit - len(embedded)) if last is None else 0
        taken, rest = new[:room], new[room:]
        count = rule.value(owner, rule.count_path) + len(new)
        move = Move(rule, owner, [*embedded, *taken] if taken else None, count, last)
        if rest and last is not None and rule.form == "page":
            rest = rest[(yield from self._fill(last, rest)) :]
        move.made, move.last = rule.pages(self.key, rest, last)
        self._met(move.last)
        return added, move

    def _in_overflow(self) -> Plan[list[Any]]:
        """Which of the items the overflow holds already."""
        rule = self.rule
        condition = {**self.of_owner, rule.content: {"$in": self.items}}
        if rule.form == "documents":
            rows = yield from find(rule.overflow_collection, condition, {rule.item: 1})
            return [row[rule.item] for row in rows]
        ours = {"$in": ["$$this", {"$literal": self.items}]}
        among = {"$filter": {"input": f"${rule.field}", "cond": ours}}
        rows = yield from aggregate(
            rule.overflow_collection, [{"$match": condition}, {"$project": {"items": among}}]
        )
        return [item for row in rows for item in row["items"]]


# -- removing ------------------------------------------------------------------------------


class Remove(ArrayWork[int]):
    """Every occurrence of an item; how many there were."""

    def __init__(self, rule: OutlierFields, key: Any, item: Any) -> None:
        super().__init__(rule, key)
        self.item = item

    def quick(self) -> Plan[int | None]:
        rule = self.rule
        if self.followed:
            return None
        condition = {**by_id(self.key), **self.current, **rule.ordinary()}
        condition[rule.path] = {**condition[rule.path], **holds(self.item)}
        is_other = {"$ne": ["$$this", {"$literal": self.item}]}
        others = {"$filter": {"input": f"${rule.path}", "cond": is_other}}
        counted = {rule.count_path: {"$size": f"${rule.path}"}}
        update: list[Raw] = [{"$set": {rule.path: others}}, {"$set": counted}]
        before = yield from find_one_and_update(
            self.entry.collection,
            condition,
            stamping(self.entry, update),
            after=False,
            projection={rule.path: 1},
        )
        if before is None:
            return None
        embedded = rule.embedded(before)
        return len(embedded) - len(self._others(embedded))

    def _others(self, items: Sequence[Any]) -> list[Any]:
        """All items but the one to remove."""
        mark = freeze(self.item)
        return [each for each in items if freeze(each) != mark]

    def change(self) -> Plan[int]:
        with translated(self.entry.model.__name__):
            return (yield from settle(self.rule, self.key, self._plan))

    def _plan(self, owner: Raw) -> Plan[tuple[int, Move | None]]:
        rule = self.rule
        embedded, last = rule.embedded(owner), rule.value(owner, rule.last_path)
        left = self._others(embedded)
        removed = len(embedded) - len(left)
        move = Move(rule, owner, left if removed else None, 0, last)
        if last is not None:
            pages = yield from find(
                rule.overflow_collection,
                {**self.of_owner, rule.content: {"$eq": self.item}},
                sort=[(rule.order, 1)],
            )
            for page in pages:
                held = rule.contents(page)
                kept = self._others(held)
                removed += len(held) - len(kept)
                move.leave(page, kept)
        if not removed:
            return 0, None
        move.count = rule.value(owner, rule.count_path) - removed
        yield from refill(move, left)
        return removed, move


# -- bringing in order ---------------------------------------------------------------------


class Tidy(ArrayWork[bool]):
    """An array brought in order; whether anything had to be done."""

    def needed(self) -> Plan[bool | None]:
        """A first look, outside of any transaction; None where there is no such document."""
        owner = yield from find_one(self.entry.collection, by_id(self.key), self.rule.projection())
        if owner is None:
            return None
        return (yield from in_order(self.rule, owner)) is not None

    def change(self) -> Plan[bool]:
        if (yield from find_one(self.entry.collection, by_id(self.key), {"_id": 1})) is None:
            return False
        return (yield from settle(self.rule, self.key, self._plan, touches=False))

    def _plan(self, owner: Raw) -> Plan[tuple[bool, Move | None]]:
        return True, (yield from in_order(self.rule, owner))


def settle(
    rule: OutlierFields,
    key: Any,
    plan: Callable[[Raw], Plan[tuple[R, Move | None]]],
    *,
    touches: bool = True,
) -> Plan[R]:
    """Read an owner, bring it in order, let `plan` say what is to be done, and do it.

    It `touches` the owner unless it only brings it in order.
    """
    owner = yield from _owner(rule, key)
    if not rule.settled(owner):
        move = yield from in_order(rule, (yield from _owner(rule, key, whole=True)))
        if move is not None:
            yield from move.perform()
        owner = yield from _owner(rule, key)
    outcome, move = yield from plan(owner)
    if move is not None:
        yield from move.perform(touches=touches)
    return outcome


def _owner(rule: OutlierFields, key: Any, *, whole: bool = False) -> Plan[Raw]:
    """An owner with its array up to one item beyond the limit, which tells that there are too many.

    A `whole` array is written before it is read: it may be long, and those who
    push to it meanwhile wait and do not get in between.
    """
    collection, projection = rule.target.collection, rule.projection()
    if whole:
        bump = {"$inc": {REVISION: 1}}
        owner = yield from find_one_and_update(collection, by_id(key), bump, projection=projection)
    else:
        owner = yield from find_one(
            collection, by_id(key), {**projection, rule.path: {"$slice": rule.limit + 1}}
        )
    if owner is None:
        raise rule.missing(key)
    return owner
