"""Siblings in an order of their own: a number in each node, kept apart from those of its siblings.

Numbers are `GAP` apart, so that a node goes between two others by a number
between theirs. Where there is none left, the siblings are numbered anew. A
number is chosen in the commit that also writes the parent, or the document
that all moves of the tree share where the node is a root (`state.py`): two
that would choose the same number meet there, and one starts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from treadle.errors import DataError, UsageError
from treadle.graph.change import Changes
from treadle.graph.outcomes import Finding
from treadle.patterns.tree import state
from treadle.patterns.tree.apart import absent
from treadle.patterns.tree.fields import UNSTATED, Tree
from treadle.patterns.tree.rewriting import rewrite
from treadle.plan import Plan, Raw, aggregate, by_id, find, find_one
from treadle.query.keys import freeze, same_key
from treadle.query.paths import put, value_at
from treadle.values import frozen

GAP = 1024
# Numbers of this size and beyond, which only other writers leave, are numbered anew before they overflow.
_MOST = 2**62
# What other writers store besides is no number: NaN is one to the server, and has none beside it.
_WHOLE: Raw = {"$type": ["int", "long"]}


@frozen
class Spot:
    """Where among its siblings a node goes."""

    at: Literal["first", "last", "before", "after"] = "last"
    # The sibling that it goes before or after.
    sibling: Any = None


LAST = Spot()


@frozen
class Stated:
    """Where a caller wants a new node: below whom, where among its siblings, and in which tree."""

    parent: Any
    spot: Spot | None = None
    within: Any = UNSTATED


def spot_of(tree: Tree, at: Any, before: Any, after: Any) -> Spot | None:
    """What a caller asks for; None where it asks for nothing."""
    given = [each for each in (at, before, after) if each is not None]
    if not given:
        return None
    if tree.order is None:
        raise UsageError(
            f"{tree.entry.model.__name__} has no order among siblings; declare it, such as "
            'tree=AncestorArray(…, order="position")',
            code="tree-order",
        )
    if len(given) > 1 or (at is not None and at not in ("first", "last")):
        raise UsageError(
            f"at={at!r}, before={before!r}, after={after!r}: say one of at='first', at='last', before=id and "
            "after=id",
            code="tree-order",
        )
    if at is not None:
        return Spot(at)
    side: Literal["before", "after"] = "after" if before is None else "before"
    return Spot(side, tree.entry.identity(given[0]))


def sibling_at(tree: Tree, spot: Spot) -> Plan[Raw]:
    """The sibling that a spot names."""
    sibling = yield from find_one(tree.collection, tree.living(by_id(spot.sibling)), tree.projection)
    if sibling is None:
        missing = DataError(
            f"there is no {tree.entry.model.__name__} {spot.sibling!r} to stand {spot.at}; somebody may have "
            "removed it",
            code="tree-node-missing",
        )
        raise (yield from absent(tree, spot.sibling, missing))
    return sibling


def place_all(
    tree: Tree, raws: Sequence[Raw], parents: dict[Any, Any], spots: dict[Any, Spot], changes: Changes
) -> Plan[None]:
    """Give new nodes, in their order, their numbers; their parents are held."""
    assert tree.order is not None
    inside = {freeze(raw["_id"]) for raw in raws}
    last: dict[Any, int] = {}
    if any(parents[key] is None for key in inside):
        yield from state.lock(tree)
    for raw in raws:
        parent = parents[freeze(raw["_id"])]
        spot = spots.get(freeze(raw["_id"]), LAST)
        known = freeze(parent)
        if known in last and spot is LAST:
            last[known] += GAP
        elif parent is not None and known in inside:
            last[known] = last.get(known, 0) + GAP
        else:
            number = yield from number_at(tree, parent, spot, None, changes)
            if spot is LAST:
                last[known] = number
            put(raw, tree.order, number)
            continue
        put(raw, tree.order, last[known])


def number_at(tree: Tree, parent: Any, spot: Spot, moving: Any, changes: Changes) -> Plan[int]:
    """A number that no other child of a parent has, at a spot; `moving` is the node that goes there."""
    for _ in range(2):
        low, high = yield from _bounds(tree, parent, spot, moving)
        if low is None or high is None:
            number = low + GAP if low is not None else GAP if high is None else high - GAP
            if -_MOST < number < _MOST:
                return number
        elif high - low > 1:
            return (low + high) // 2
        yield from renumber(tree, parent, changes)
    raise DataError(
        f"the children of {parent!r} could not be numbered anew; try again", code="tree-order"
    )  # pragma: no cover


def _bounds(tree: Tree, parent: Any, spot: Spot, moving: Any) -> Plan[tuple[int | None, int | None]]:
    """The numbers between which a spot lies; None where nothing is on that side."""
    assert tree.order is not None
    siblings: Raw = {tree.roles["parent"]: {"$eq": parent}}
    if moving is not None:
        siblings["_id"] = {"$ne": moving}
    if spot.at in ("first", "last"):
        direction = 1 if spot.at == "first" else -1
        number = yield from _first(tree, {**siblings, tree.order: _WHOLE}, direction)
        return (None, number) if spot.at == "first" else (number, None)
    sibling = yield from sibling_at(tree, spot)
    if not same_key(tree.get(sibling, "parent"), parent):
        raise UsageError(
            f"{tree.entry.model.__name__} {spot.sibling!r} is no child of {parent!r}; name a sibling of the "
            "place where the node goes",
            code="tree-order",
        )
    own = value_at(sibling, tree.order)
    if moving is not None and same_key(spot.sibling, moving):
        raise UsageError("a node cannot stand before or after itself; name another one", code="tree-order")
    if not _is_whole(own):
        # Stored before there was an order: all are numbered first.
        return 0, 0
    beyond = {"$lt" if spot.at == "before" else "$gt": own, **_WHOLE}
    alike = yield from find(
        tree.collection, tree.living({**siblings, tree.order: {"$eq": own}}), {"_id": 1}, limit=2
    )
    if len(alike) > 1:
        return own, own
    other = yield from _first(tree, {**siblings, tree.order: beyond}, -1 if spot.at == "before" else 1)
    return (other, own) if spot.at == "before" else (own, other)


def _first(tree: Tree, condition: Raw, direction: int) -> Plan[int | None]:
    assert tree.order is not None
    rows = yield from find(
        tree.collection, tree.living(condition), {tree.order: 1}, sort=[(tree.order, direction)], limit=1
    )
    return int(value_at(rows[0], tree.order)) if rows else None


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def numbers_of(tree: Tree, parent: Any) -> Plan[list[tuple[Any, Any, int]]]:
    """The children of a node in their order: id, the number that each has, and one that is its own."""
    assert tree.order is not None
    condition = {tree.roles["parent"]: {"$eq": parent}}
    sort = [(tree.order, 1), ("_id", 1)]
    rows = yield from find(tree.collection, tree.living(condition), {tree.order: 1}, sort=sort)
    return [(row["_id"], value_at(row, tree.order), GAP * (at + 1)) for at, row in enumerate(rows)]


def renumber(tree: Tree, parent: Any, changes: Changes) -> Plan[list[Any]]:
    """Number the children of a node anew, in the order that they have; the ids of those that changed."""
    assert tree.order is not None
    numbered = yield from numbers_of(tree, parent)
    wrong = [(key, new) for key, old, new in numbered if old != new or not _is_whole(old)]
    updates = [(key, {tree.order: {"$literal": new}}) for key, new in wrong]
    yield from rewrite(tree, updates, changes)
    return [key for key, _ in updates]


# -- proof and repair ------------------------------------------------------------------------------


def wrong_parents(tree: Tree, documents: Iterable[Raw]) -> Plan[list[Any]]:
    """The parents of these nodes that have children without a number, or two with the same."""
    if tree.order is None:
        return []
    parents = {freeze(tree.get(each, "parent")): tree.get(each, "parent") for each in documents}
    stored = tree.roles["parent"]
    rows = yield from aggregate(
        tree.collection,
        [
            {"$match": tree.living({stored: {"$in": list(parents.values())}})},
            {"$group": {"_id": {"p": f"${stored}", "n": f"${tree.order}"}, "count": {"$sum": 1}}},
            {"$match": {"$or": [{"count": {"$gt": 1}}, {"_id.n": {"$not": _WHOLE}}]}},
            {"$group": {"_id": "$_id.p"}},
        ],
        allowDiskUse=True,
    )
    return [row["_id"] for row in rows]


def examine(tree: Tree, documents: Sequence[Raw]) -> Plan[list[Finding]]:
    """The nodes of a page that have no number of their own."""
    findings: list[Finding] = []
    page = {freeze(each["_id"]) for each in documents}
    for parent in (yield from wrong_parents(tree, documents)):
        assert tree.order is not None
        numbered = yield from numbers_of(tree, parent)
        seen: set[Any] = set()
        for key, old, new in numbered:
            if (not _is_whole(old) or freeze(old) in seen) and freeze(key) in page:
                name = tree.entry.model.__name__
                findings.append(Finding(tree.rules[0].pattern, name, key, tree.order, old, new))
            seen.add(freeze(old))
    return findings
