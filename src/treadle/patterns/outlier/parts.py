"""What one write makes of an outlier array, and how that is stored.

A write is planned as a `Move`, from what was read, and performed in the same
transaction. `in_order` plans what an array must become where something stored
is not as it should be. `refill` lets the first items of the overflow come
back when few are embedded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bson import ObjectId
from pymongo import DeleteMany, InsertOne, ReplaceOne

from treadle.engine.documents import stamping
from treadle.graph.rule import REVISION
from treadle.patterns.outlier.fields import OutlierFields, distinct, first_of_each
from treadle.patterns.outlier.item_bytes import fitting, weight
from treadle.plan import Plan, Raw, bulk_write, by_id, find, update_one
from treadle.query.keys import freeze

# Pages of overflow that are read at a time.
ARRAY_PAGES_MAX = 4


@dataclass(slots=True)
class Move:
    """What one write makes of an array; nothing is done yet."""

    rule: OutlierFields
    owner: Raw
    # The new embedded part; None where it stays as it is.
    embedded: list[Any] | None
    count: int
    last: int | None
    # Overflow documents: with other items and deleted ones, by their frozen ids; and new ones.
    changed: dict[Any, Raw] = field(default_factory=dict)
    gone: dict[Any, Any] = field(default_factory=dict)
    made: list[Raw] = field(default_factory=list)
    # Whether items changed their place, which readers without a snapshot must notice.
    moved: bool = False

    def leave(self, page: Raw, items: Sequence[Any]) -> None:
        """Let an overflow document hold only these items; without any it goes."""
        key = freeze(page["_id"])
        self.changed.pop(key, None)
        if items:
            self.changed[key] = {**page, self.rule.field: list(items), "count": len(items)}
        else:
            self.gone[key] = page["_id"]

    def perform(self, *, touches: bool = False) -> Plan[None]:
        """Write the owner, so that two writers always meet, and then its overflow."""
        rule = self.rule
        sets, unsets = rule.owner_sets(self.count, self.last)
        if self.embedded is not None:
            sets[rule.path] = self.embedded
        update: Raw = {"$set": sets, "$inc": {REVISION: 1, **({rule.moves_path: 1} if self.moved else {})}}
        if unsets:
            update["$unset"] = unsets
        sent = stamping(rule.target, update) if touches else update
        yield from update_one(rule.target.collection, by_id(self.owner["_id"]), sent)
        # In this order, because numbers are unique.
        operations: list[Any] = [DeleteMany({"_id": {"$in": list(self.gone.values())}})] if self.gone else []
        operations += [ReplaceOne({"_id": page["_id"]}, page) for page in self.changed.values()]
        operations += [InsertOne({"_id": ObjectId(), **page}) for page in self.made]
        if operations:
            yield from bulk_write(rule.overflow_collection, operations)


def in_order(rule: OutlierFields, owner: Raw) -> Plan[Move | None]:
    """What makes the array of an owner as it should be; None where it is.

    Reads all overflow of the owner. Nothing is lost: only the repetitions of
    an item under `unique=True`, of which the first stays.
    """
    key = owner["_id"]
    pages = yield from find(rule.overflow_collection, rule.owned(key), sort=[(rule.order, 1), ("_id", 1)])
    given = rule.embedded(owner)
    embedded = distinct(given) if rule.unique else given
    excess, embedded = embedded[rule.limit :], embedded[: rule.limit]
    stays = isinstance(rule.value(owner, rule.path), list) and len(embedded) == len(given)
    move = Move(rule, owner, None if stays else embedded, 0, None)
    held = [rule.contents(page) for page in pages]
    if rule.unique:
        flags = iter(first_of_each([item for items in held for item in items], [*embedded, *excess]))
        held = [[item for item in items if next(flags)] for items in held]
    # What is too much comes before the overflow, so that the order stays that of the readers.
    usable = _usable(rule, pages, held)
    if pages and (not usable or (excess and rule.form == "page")):
        move.gone = {freeze(page["_id"]): page["_id"] for page in pages}
        rest = [*excess, *(item for items in held for item in items)]
        move.made, move.last = rule.pages(key, rest, None)
    else:
        for page, items in zip(pages, held, strict=True):
            if items != rule.contents(page) or page.get("count", len(items)) != len(items) or not items:
                move.leave(page, items)
        numbers = [page[rule.order] for page in pages]
        before = min(numbers) - len(excess) - 1 if numbers and excess else None
        move.made, move.last = rule.pages(key, excess, before)
        if numbers:
            move.last = max(numbers)
    move.count = len(embedded) + len(excess) + sum(len(items) for items in held)
    yield from refill(move, embedded)
    move.moved = bool(move.made or move.gone or move.moved)
    return None if _nothing_to_do(move) else move


def _usable(rule: OutlierFields, pages: Sequence[Raw], held: Sequence[Sequence[Any]]) -> bool:
    """Whether overflow documents can stay: not without numbers, with the same twice, or too long."""
    numbers = [page.get(rule.order) for page in pages]
    if any(isinstance(each, bool) or not isinstance(each, int) for each in numbers):
        return False
    too_long = rule.form == "page" and any(len(items) > rule.page_size for items in held)
    unmarked = rule.form == "page" and any("count" not in page for page in pages)
    return not (too_long or unmarked) and len(set(numbers)) == len(numbers)


def _nothing_to_do(move: Move) -> bool:
    rule, owner = move.rule, move.owner
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


def refill(move: Move, left: Sequence[Any]) -> Plan[None]:
    """Where few items are left embedded: let the first ones of the overflow come back, in their order.

    As many as the owner may hold. Where the overflow is empty then, its last number goes.
    """
    rule, embedded = move.rule, list(left)
    overflowing = move.count - len(embedded)
    full = bool(move.made) or len(embedded) > rule.low
    room = 0 if full else rule.limits.array_bytes_max - sum(map(weight, embedded))
    condition = rule.owned(move.owner["_id"])
    while overflowing and len(embedded) < rule.refilled and not full:
        many = ARRAY_PAGES_MAX
        if rule.form == "documents":
            many = rule.refilled - len(embedded) + len(move.gone)
        pages = yield from find(rule.overflow_collection, condition, sort=[(rule.order, 1)], limit=many)
        if not pages:
            break
        condition = {**condition, rule.order: {"$gt": pages[-1][rule.order]}}
        for page in pages:
            key = freeze(page["_id"])
            if key in move.gone or len(embedded) >= rule.refilled or full:
                continue
            held = rule.contents(move.changed.get(key, page))
            number = fitting(held, rule.refilled - len(embedded), room)
            full = number < min(len(held), rule.refilled - len(embedded))
            if number:
                embedded += held[:number]
                room -= sum(map(weight, held[:number]))
                overflowing -= number
                move.moved = True
                move.leave(page, held[number:])
    if len(embedded) > len(left):
        move.embedded = embedded
    if move.count == len(embedded):
        move.last = None
