"""The order of outlier arrays: what an array must become where something stored is not as it should be.

Here also: which items are repetitions, and how the first items of the
overflow come back when few are embedded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.patterns.outlier.fields import OutlierFields, comparable, distinct
from treadle.patterns.outlier.item_bytes import fitting, weight
from treadle.patterns.outlier.move import Move, owned
from treadle.plan import Plan, Raw, find


def in_order(rule: OutlierFields, owner: Raw) -> Plan[Move | None]:
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
    # What is too much comes before the overflow, so that the order stays that of the readers.
    first = min((page[rule.order] for page in pages), default=None) if _usable(rule, pages, held) else None
    if pages and (first is None or (excess and rule.layout == "page")):
        move.gone = [page["_id"] for page in pages]
        rest = [*excess, *(item for items in held for item in items)]
        move.made, move.last = rule.pages(key, rest, None)
    else:
        for page, items in zip(pages, held, strict=True):
            if not items:
                move.gone.append(page["_id"])
            elif items != rule.contents(page) or page.get("count", len(items)) != len(items):
                move.changed.append({**page, rule.field: items, "count": len(items)})
        before = first - len(excess) - 1 if first is not None and excess else None
        move.made, move.last = rule.pages(key, excess, before)
        if pages:
            move.last = max(page[rule.order] for page in pages)
    overflowing = len(excess) + sum(len(items) for items in held)
    move.count = len(embedded) + overflowing
    if overflowing and len(embedded) <= rule.low and not move.made:
        yield from refill(rule, key, move, embedded)
    if move.count == len(embedded if move.embedded is None else move.embedded):
        move.last = None
    move.moved = bool(move.made or move.gone or move.moved)
    if value_missing(rule, owner) and move.embedded is None:
        move.embedded = embedded
    return None if _nothing_to_do(rule, owner, move) else move


def value_missing(rule: OutlierFields, owner: Raw) -> bool:
    """Whether there is no array at all, or null in its place."""
    return not isinstance(rule.value(owner, rule.path), list)


def _usable(rule: OutlierFields, pages: Sequence[Raw], held: Sequence[Sequence[Any]]) -> bool:
    """Whether overflow documents can stay: not without numbers, with the same twice, or too long."""
    numbers = [page.get(rule.order) for page in pages]
    if any(isinstance(each, bool) or not isinstance(each, int) for each in numbers):
        return False
    too_long = rule.layout == "page" and any(len(items) > rule.page_size for items in held)
    unmarked = rule.layout == "page" and any("count" not in page for page in pages)
    return not (too_long or unmarked) and len(set(numbers)) == len(numbers)


def _nothing_to_do(rule: OutlierFields, owner: Raw, move: Move) -> bool:
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


def first_of_each(items: Sequence[Any], known: Sequence[Any]) -> list[bool]:
    """Per item whether it is neither known nor a repetition."""
    seen = {comparable(item) for item in known}
    new = []
    for item in items:
        mark = comparable(item)
        new.append(mark not in seen)
        seen.add(mark)
    return new


def refill(rule: OutlierFields, key: Any, move: Move, left: Sequence[Any]) -> Plan[None]:
    """Let the first items of the overflow come back, in their order, as far as the owner may hold them."""
    embedded = list(left)
    limits = rule.target.limits
    room = limits.array_bytes_max - sum(map(weight, embedded))
    overflowing = move.count - len(embedded)
    changed = {page["_id"]: page for page in move.changed}
    gone = set(move.gone)
    after: Any = None
    full = False
    while overflowing and len(embedded) < rule.refilled and not full:
        condition = owned(rule, key)
        if after is not None:
            condition[rule.order] = {"$gt": after}
        many = limits.array_pages_max
        if rule.layout == "documents":
            many = rule.refilled - len(embedded) + len(gone)
        pages = yield from find(rule.collection, condition, sort=[(rule.order, 1)], limit=many)
        if not pages:
            break
        after = pages[-1][rule.order]
        for page in pages:
            if page["_id"] in gone or len(embedded) >= rule.refilled or full:
                continue
            held = rule.contents(changed.get(page["_id"], page))
            number = fitting(held, 0, rule.refilled - len(embedded), room)
            full = number < min(len(held), rule.refilled - len(embedded))
            taken, rest = held[:number], held[number:]
            if not taken:
                continue
            embedded += taken
            room -= sum(map(weight, taken))
            overflowing -= number
            move.moved = True
            if rest:
                changed[page["_id"]] = {**page, rule.field: rest, "count": len(rest)}
            else:
                changed.pop(page["_id"], None)
                gone.add(page["_id"])
    move.changed, move.gone = list(changed.values()), list(gone)
    if len(embedded) > len(left):
        move.embedded = embedded
