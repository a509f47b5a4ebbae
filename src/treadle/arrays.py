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

On a server without transactions see `maintenance/array_intents.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bson import ObjectId
from pymongo import DeleteMany, InsertOne, ReplaceOne

from treadle.change import Change
from treadle.errors import DataError
from treadle.graph import Graph
from treadle.maintenance.ledger import Ledger
from treadle.pattern import REVISION
from treadle.patterns.outlier import OutlierRule, comparable, distinct
from treadle.plan import (
    Plan,
    Raw,
    aggregate,
    bulk_write,
    by_id,
    find,
    find_one,
    find_one_and_update,
    insert_many,
    update_one,
)
from treadle.topology import Topology
from treadle.writes import Work, concerns, follow_own

R = TypeVar("R")

# More items than this are added in several transactions.
EXTEND_MAX = 10_000
# How many overflow documents are read at once when items come back.
REFILL_PAGES = 4
ATTEMPTS_MAX = 50


@dataclass(slots=True)
class Move:
    """What one write makes of an array; nothing is done yet."""

    owner: Raw
    embedded: list[Any] | None
    count: int
    last: int | None
    changed: list[Raw] = field(default_factory=list)
    made: list[Raw] = field(default_factory=list)
    gone: list[Any] = field(default_factory=list)
    # Items changed their place, which readers without a snapshot must notice.
    moved: bool = False


def missing(rule: OutlierRule, key: Any) -> DataError:
    return DataError(
        f"{rule.target.model.__name__} {key!r} is not stored (any more), so it has no {rule.python_path}; "
        "insert it first",
        code="array-owner-missing",
    )


class ArrayWork(Work[R]):
    """One write of one array."""

    shows_document = False

    def __init__(self, rule: OutlierRule, key: Any) -> None:
        self.rule = rule
        self.entry = rule.target
        self.key = key
        # Whether others are fed by the array, its count or its flag.
        self.followed = concerns(self.entry, rule.maintained())

    def quick(self) -> Plan[Any]:
        """The write as one plain update; None where that cannot be, and nothing was done."""
        raise NotImplementedError  # pragma: no cover

    def change(self, server: Topology) -> Plan[Any]:
        """The write in a transaction, or under the lease where there are none."""
        raise NotImplementedError  # pragma: no cover

    def body(self, graph: Graph, server: Topology, ledger: Ledger) -> Plan[Any]:
        if not self.followed:
            return (yield from self.change(server))
        entry = self.entry
        before = yield from find_one(entry.collection, by_id(self.key))
        if before is None:
            raise missing(self.rule, self.key)
        yield from ledger.note_before(entry, [self.key])
        outcome = yield from self.change(server)
        after = yield from find_one(entry.collection, by_id(self.key))
        if after is not None:
            (after,) = yield from follow_own(entry, [(before, after)])
            ledger.add(Change(entry.collection, self.key, before, after))
        return outcome

    def result(self, outcome: R) -> R:
        return outcome

    @property
    def of_owner(self) -> Raw:
        return owned(self.rule, self.key)


def owned(rule: OutlierRule, key: Any) -> Raw:
    """The condition on overflow documents of one owner; an id never becomes an operator."""
    return {rule.owner: {"$eq": key}}


def holds(item: Any) -> Raw:
    """The condition that an array holds an item, itself and not one of its parts."""
    return {"$elemMatch": {"$eq": item}}


# -- adding --------------------------------------------------------------------------------


class Extend(ArrayWork[list[bool]]):
    """Items at the end of an array; per item whether it was added."""

    def __init__(self, rule: OutlierRule, key: Any, items: Sequence[Any]) -> None:
        super().__init__(rule, key)
        self.items = list(items)

    @property
    def size(self) -> int:
        """How much of a joined outcome is this one's."""
        return len(self.items)

    def joins(self, other: Work[Any]) -> bool:
        """Whether another work can be done along with this one."""
        return (
            isinstance(other, Extend)
            and other.rule is self.rule
            and other.key == self.key
            and len(self.items) + len(other.items) <= EXTEND_MAX
        )

    def joined(self, other: Extend) -> Extend:
        return Extend(self.rule, self.key, [*self.items, *other.items])

    def quick(self) -> Plan[list[bool] | None]:
        rule, number = self.rule, len(self.items)
        if self.followed or number > rule.limit or (rule.unique and number > 1):
            return None
        condition = {**by_id(self.key), **rule.ordinary()}
        condition[f"{rule.path}.{rule.limit - number}"] = {"$exists": False}
        if rule.unique:
            condition[rule.path] = {"$not": holds(self.items[0])}
        update = {"$push": {rule.path: {"$each": self.items}}, "$inc": {rule.count_path: number}}
        result = yield from update_one(self.entry.collection, condition, update)
        return [True] * number if result.matched_count else None

    def change(self, server: Topology) -> Plan[list[bool]]:
        if server.transactions and not (self.rule.unique and len(self.items) > 1):
            done = yield from self._to_the_last_page()
            if done is not None:
                return done
        return (yield from settle(self.rule, self.key, server, self._plan))

    def _to_the_last_page(self) -> Plan[list[bool] | None]:
        """The ordinary way while there is overflow: the owner's count, and one overflow document."""
        rule, items, number = self.rule, self.items, len(self.items)
        condition: Raw = {**by_id(self.key), rule.last_path: {"$exists": True}}
        if number > rule.page_size:
            return None
        if rule.unique:
            condition[rule.path] = {"$not": holds(items[0])}
            known = yield from find_one(
                rule.collection, {**self.of_owner, rule.content: {"$eq": items[0]}}, {"_id": 1}
            )
            if known is not None:
                return [False]
        increments = {rule.count_path: number}
        if rule.layout == "documents":
            increments[rule.last_path] = number
        owner = yield from find_one_and_update(
            self.entry.collection, condition, {"$inc": increments}, projection={rule.last_path: 1}
        )
        if owner is None:
            return None
        last = rule.value(owner, rule.last_path)
        if rule.layout == "documents":
            made, _ = rule.pages(self.key, items, last - number)
            yield from insert_many(rule.collection, made)
            return [True] * number
        room = {**self.of_owner, "page": last, "count": {"$lte": rule.page_size - number}}
        push = {"$push": {rule.field: {"$each": items}}, "$inc": {"count": number}}
        result = yield from update_one(rule.collection, room, push)
        if not result.matched_count:
            yield from self._begin_page(last)
        return [True] * number

    def _begin_page(self, last: int) -> Plan[None]:
        """Fill the last page, and put the rest on a new one."""
        rule = self.rule
        page = yield from find_one(rule.collection, {**self.of_owner, "page": last}, {"count": 1})
        room = max(0, rule.page_size - page.get("count", rule.page_size)) if page is not None else 0
        if page is not None and room:
            push = {"$push": {rule.field: {"$each": self.items[:room]}}, "$inc": {"count": room}}
            yield from update_one(rule.collection, {"_id": page["_id"]}, push)
        made, number = rule.pages(self.key, self.items[room:], last)
        yield from insert_many(rule.collection, made)
        yield from update_one(self.entry.collection, by_id(self.key), {"$set": {rule.last_path: number}})

    def _plan(self, owner: Raw) -> Plan[tuple[list[bool], Move | None]]:
        rule = self.rule
        embedded, last = rule.embedded(owner), rule.value(owner, rule.last_path)
        new, added = self.items, [True] * len(self.items)
        if rule.unique:
            known = list(embedded)
            if last is not None:
                known += yield from self._in_overflow()
            added = first_of_each(self.items, known)
            new = [item for item, is_new in zip(self.items, added, strict=True) if is_new]
        if not new:
            return added, None
        room = max(0, rule.limit - len(embedded)) if last is None else 0
        taken, rest = new[:room], new[room:]
        move = Move(
            owner,
            [*embedded, *taken] if taken else None,
            rule.value(owner, rule.count_path) + len(new),
            last,
        )
        if rest and last is not None and rule.layout == "page":
            page = yield from find_one(rule.collection, {**self.of_owner, "page": last})
            room = rule.page_size - len(rule.contents(page)) if page is not None else 0
            if page is not None and room > 0:
                held = [*rule.contents(page), *rest[:room]]
                move.changed.append({**page, rule.field: held, "count": len(held)})
                rest = rest[room:]
        move.made, move.last = rule.pages(self.key, rest, last)
        return added, move

    def _in_overflow(self) -> Plan[list[Any]]:
        """Which of the items the overflow holds already."""
        rule = self.rule
        condition = {**self.of_owner, rule.content: {"$in": self.items}}
        if rule.layout == "documents":
            rows = yield from find(rule.collection, condition, {rule.item: 1})
            return [row[rule.item] for row in rows]
        wanted = {"$in": ["$$this", {"$literal": self.items}]}
        among = {"$filter": {"input": f"${rule.field}", "cond": wanted}}
        rows = yield from aggregate(rule.collection, [{"$match": condition}, {"$project": {"found": among}}])
        return [item for row in rows for item in row["found"]]


def first_of_each(items: Sequence[Any], known: Sequence[Any]) -> list[bool]:
    """Per item whether it is neither known nor a repetition."""
    seen = {comparable(item) for item in known}
    new = []
    for item in items:
        mark = comparable(item)
        new.append(mark not in seen)
        seen.add(mark)
    return new


# -- removing --------------------------------------------------------------------------------


class Remove(ArrayWork[int]):
    """Every occurrence of an item; how many there were."""

    def __init__(self, rule: OutlierRule, key: Any, item: Any) -> None:
        super().__init__(rule, key)
        self.item = item
        self.mark = comparable(item)

    def quick(self) -> Plan[int | None]:
        rule = self.rule
        if self.followed:
            return None
        condition = {**by_id(self.key), **rule.ordinary(), rule.path: holds(self.item)}
        others = {"$filter": {"input": f"${rule.path}", "cond": {"$ne": ["$$this", {"$literal": self.item}]}}}
        update: list[Raw] = [
            {"$set": {rule.path: others}},
            {"$set": {rule.count_path: {"$size": f"${rule.path}"}}},
        ]
        before = yield from find_one_and_update(
            self.entry.collection, condition, update, after=False, projection={rule.path: 1}
        )
        return None if before is None else sum(self._is_it(each) for each in rule.embedded(before))

    def _is_it(self, item: Any) -> bool:
        return bool(comparable(item) == self.mark)

    def change(self, server: Topology) -> Plan[int]:
        return (yield from settle(self.rule, self.key, server, self._plan))

    def _plan(self, owner: Raw) -> Plan[tuple[int, Move | None]]:
        rule = self.rule
        embedded, last = rule.embedded(owner), rule.value(owner, rule.last_path)
        left = [each for each in embedded if not self._is_it(each)]
        removed = len(embedded) - len(left)
        move = Move(owner, left if removed else None, 0, last)
        if last is not None:
            pages = yield from find(
                rule.collection, {**self.of_owner, rule.content: {"$eq": self.item}}, sort=[(rule.order, 1)]
            )
            for page in pages:
                held = rule.contents(page)
                kept = [each for each in held if not self._is_it(each)]
                removed += len(held) - len(kept)
                if kept:
                    move.changed.append({**page, rule.field: kept, "count": len(kept)})
                else:
                    move.gone.append(page["_id"])
        if not removed:
            return 0, None
        move.count = rule.value(owner, rule.count_path) - removed
        if last is not None and len(left) <= rule.low:
            yield from _refill(rule, self.key, move, left)
        if move.count == len(left if move.embedded is None else move.embedded):
            move.last = None
        return removed, move


def _refill(rule: OutlierRule, key: Any, move: Move, left: Sequence[Any]) -> Plan[None]:
    """Let the first items of the overflow come back, in their order."""
    embedded = list(left)
    overflowing = move.count - len(embedded)
    changed = {page["_id"]: page for page in move.changed}
    gone = set(move.gone)
    after: Any = None
    while overflowing and len(embedded) < rule.refilled:
        condition = owned(rule, key)
        if after is not None:
            condition[rule.order] = {"$gt": after}
        many = rule.refilled - len(embedded) + len(gone) if rule.layout == "documents" else REFILL_PAGES
        pages = yield from find(rule.collection, condition, sort=[(rule.order, 1)], limit=many)
        if not pages:
            break
        after = pages[-1][rule.order]
        for page in pages:
            if page["_id"] in gone or len(embedded) >= rule.refilled:
                continue
            held = rule.contents(changed.get(page["_id"], page))
            taken = held[: rule.refilled - len(embedded)]
            embedded += taken
            overflowing -= len(taken)
            move.moved = True
            rest = held[len(taken) :]
            if rest:
                changed[page["_id"]] = {**page, rule.field: rest, "count": len(rest)}
            else:
                changed.pop(page["_id"], None)
                gone.add(page["_id"])
    move.changed, move.gone = list(changed.values()), list(gone)
    move.embedded = embedded


# -- bringing in order ----------------------------------------------------------------------------


def in_order(rule: OutlierRule, owner: Raw) -> Plan[Move | None]:
    """What makes the array of an owner as it should be; None where it is.

    Reads all overflow of the owner. Nothing is lost: only the repetitions of
    an item under `unique=True`, of which the first stays.
    """
    key = owner["_id"]
    pages = yield from find(rule.collection, owned(rule, key), sort=[(rule.order, 1), ("_id", 1)])
    given = rule.embedded(owner)
    embedded = distinct(given) if rule.unique else given
    excess, embedded = embedded[rule.limit :], embedded[: rule.limit]
    move = Move(owner, embedded if len(embedded) < len(given) else None, 0, None)
    held = [rule.contents(page) for page in pages]
    if rule.unique:
        flags = iter(first_of_each([item for items in held for item in items], [*embedded, *excess]))
        held = [[item for item in items if next(flags)] for items in held]
    if _unusable(rule, pages, held):
        move.gone = [page["_id"] for page in pages]
        rest = [*excess, *(item for items in held for item in items)]
        move.made, move.last = rule.pages(key, rest, None)
    else:
        for page, items in zip(pages, held, strict=True):
            if not items:
                move.gone.append(page["_id"])
            elif items != rule.contents(page) or page.get("count", len(items)) != len(items):
                move.changed.append({**page, rule.field: items, "count": len(items)})
        last = max((page[rule.order] for page in pages), default=None)
        move.made, move.last = rule.pages(key, excess, last)
    overflowing = len(excess) + sum(len(items) for items in held)
    move.count = len(embedded) + overflowing
    if overflowing and len(embedded) <= rule.low and not move.made:
        yield from _refill(rule, key, move, embedded)
    if move.count == len(embedded if move.embedded is None else move.embedded):
        move.last = None
    move.moved = bool(move.made or move.gone or move.moved)
    if value_missing(rule, owner) and move.embedded is None:
        move.embedded = embedded
    return None if _nothing_to_do(rule, owner, move) else move


def value_missing(rule: OutlierRule, owner: Raw) -> bool:
    """Whether there is no array at all, or null in its place."""
    return not isinstance(rule.value(owner, rule.path), list)


def _unusable(rule: OutlierRule, pages: Sequence[Raw], held: Sequence[Sequence[Any]]) -> bool:
    """Whether overflow documents must be made anew: no numbers, the same twice, or too long."""
    numbers = [page.get(rule.order) for page in pages]
    if any(isinstance(each, bool) or not isinstance(each, int) for each in numbers):
        return True
    too_long = rule.layout == "page" and any(len(items) > rule.page_size for items in held)
    unmarked = rule.layout == "page" and any("count" not in page for page in pages)
    return too_long or unmarked or len(set(numbers)) < len(numbers)


def _nothing_to_do(rule: OutlierRule, owner: Raw, move: Move) -> bool:
    last = rule.value(owner, rule.last_path)
    # A number beyond the last page is as good: pages at the end may have been emptied.
    same_last = move.last == last if move.last is None or last is None else last >= move.last
    return (
        move.embedded is None
        and not (move.changed or move.made or move.gone)
        and same_last
        and rule.settled(owner)
        and move.count == rule.value(owner, rule.count_path)
    )


class Tidy(ArrayWork[bool]):
    """An array brought in order; whether anything had to be done."""

    def needed(self) -> Plan[bool | None]:
        """A first look, outside of any transaction; None where there is no such document."""
        owner = yield from find_one(self.entry.collection, by_id(self.key), self.rule.projection())
        if owner is None:
            return None
        return self.rule.value(owner, self.rule.open_path) is not None or (
            (yield from in_order(self.rule, owner)) is not None
        )

    def change(self, server: Topology) -> Plan[bool]:
        owner = yield from find_one(self.entry.collection, by_id(self.key), self.rule.projection())
        if owner is None:
            return False
        return (yield from settle(self.rule, self.key, server, self._plan))

    def _plan(self, owner: Raw) -> Plan[tuple[bool, Move | None]]:
        move = yield from in_order(self.rule, owner)
        return True, move


# -- writing ---------------------------------------------------------------------------------


def settle(
    rule: OutlierRule, key: Any, server: Topology, plan: Callable[[Raw], Plan[tuple[R, Move | None]]]
) -> Plan[R]:
    """Read an owner, let `plan` say what is to be done, and do it."""
    from treadle.maintenance import array_intents

    for _ in range(ATTEMPTS_MAX):
        # One item beyond the limit is enough to see that there are too many.
        shown = {**rule.projection(), rule.path: {"$slice": rule.limit + 1}}
        owner = yield from find_one(rule.target.collection, by_id(key), shown)
        if owner is None:
            raise missing(rule, key)
        if not server.transactions and (yield from array_intents.finish(rule, owner)):
            continue
        if not rule.settled(owner):
            owner = yield from _whole(rule, key, server)
            move = yield from in_order(rule, owner)
            if move is not None:
                yield from perform(rule, server, move)
                continue
        outcome, move = yield from plan(owner)
        if move is None or (yield from perform(rule, server, move)):
            return outcome
    raise DataError(
        f"{rule.place.label} of {key!r} changed {ATTEMPTS_MAX} times while it was being written; "
        "try again when fewer writers are at it",
        code="write-contended",
    )


def _whole(rule: OutlierRule, key: Any, server: Topology) -> Plan[Raw]:
    """An owner with its whole array, which in a transaction nobody else can write from here on."""
    shown = rule.projection()
    owner: Raw | None
    if server.transactions:
        # Written first: while a long array is read, those who push to it wait and do not get in between.
        bump = {"$inc": {REVISION: 1}}
        owner = yield from find_one_and_update(rule.target.collection, by_id(key), bump, projection=shown)
    else:
        owner = yield from find_one(rule.target.collection, by_id(key), shown)
    if owner is None:
        raise missing(rule, key)
    return owner


def perform(rule: OutlierRule, server: Topology, move: Move) -> Plan[bool]:
    """Do what a move says; False if the owner changed meanwhile, which a transaction excludes."""
    from treadle.maintenance import array_intents

    if not server.transactions:
        return (yield from array_intents.perform(rule, move))
    yield from update_one(rule.target.collection, by_id(move.owner["_id"]), owner_update(rule, move))
    yield from bulk(rule, move.gone, move.changed, move.made)
    return True


def owner_update(rule: OutlierRule, move: Move) -> Raw:
    """The update of the owner; it always writes, so that two writers meet."""
    sets, unsets = rule.owner_sets(move.count, move.last)
    if move.embedded is not None:
        sets[rule.path] = move.embedded
    update: Raw = {"$set": sets, "$inc": {REVISION: 1}}
    if unsets:
        update["$unset"] = unsets
    if move.moved:
        update["$inc"][rule.moves_path] = 1
    return update


def bulk(rule: OutlierRule, gone: Sequence[Any], changed: Sequence[Raw], made: Sequence[Raw]) -> Plan[None]:
    """Delete, rewrite and make overflow documents, in this order: numbers are unique."""
    operations: list[Any] = [DeleteMany({"_id": {"$in": list(gone)}})] if gone else []
    operations += [ReplaceOne({"_id": page["_id"]}, page) for page in changed]
    operations += [InsertOne({"_id": ObjectId(), **page}) for page in made]
    if operations:
        yield from bulk_write(rule.collection, operations)
