"""Several trees in one collection, kept apart by a field (`within=`).

A `Tree` that is confined to one of them (`Tree.of`) sees the nodes of that one
alone, in whatever it reads, and locks nothing but it. So all that is said of
one tree holds for each of several; here is only how to tell which is meant.
A node stays in its tree: a parent in another one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from treadle.errors import TreadleError, UsageError
from treadle.patterns.tree.fields import UNSTATED, Tree
from treadle.plan import Plan, Raw, find, find_one
from treadle.query.keys import freeze
from treadle.query.paths import put, value_at


class Share(NamedTuple):
    """The nodes of a batch that go into one tree, with what their callers state of each."""

    tree: Tree
    raws: list[Raw]
    stated: list[Any]


def grouped(tree: Tree, raws: Iterable[Raw]) -> list[tuple[Tree, list[Raw]]]:
    """Nodes by the tree that they stand in."""
    if tree.within is None:
        return [(tree, list(raws))]
    groups: dict[Any, tuple[Tree, list[Raw]]] = {}
    for raw in raws:
        known = freeze(value_at(raw, tree.within))
        if known not in groups:
            groups[known] = (tree.of(raw), [])
        groups[known][1].append(raw)
    return list(groups.values())


def divide(tree: Tree, raws: Sequence[Raw], stated: Sequence[Any]) -> Plan[list[Share]]:
    """New nodes by the tree that they go into; one that names no tree takes its parent's."""
    if tree.within is None:
        return [Share(tree, list(raws), list(stated))]
    yield from _inherit(tree, raws, stated)
    by_key = {freeze(raw["_id"]): each for raw, each in zip(raws, stated, strict=True)}
    return [
        Share(own, some, [by_key[freeze(raw["_id"])] for raw in some]) for own, some in grouped(tree, raws)
    ]


def _inherit(tree: Tree, raws: Sequence[Raw], stated: Sequence[Any]) -> Plan[None]:
    assert tree.within is not None
    inside = {freeze(raw["_id"]): raw for raw in raws}
    parents: dict[Any, Any] = {}
    for raw, explicit in zip(raws, stated, strict=True):
        parent = tree.get(raw, "parent") if explicit is UNSTATED else explicit
        if parent is not None:
            parents[freeze(raw["_id"])] = parent
        children = tree.get(raw, "children") if explicit is UNSTATED else None
        for child in children if isinstance(children, list) else ():
            parents.setdefault(freeze(child), raw["_id"])
    unnamed = {key for key, raw in inside.items() if value_at(raw, tree.within) is None and key in parents}
    outside = [parents[key] for key in unnamed if freeze(parents[key]) not in inside]
    above: dict[Any, Any] = {}
    if outside:
        condition = tree.alive | {"_id": {"$in": outside}}
        rows = yield from find(tree.collection, condition, {tree.within: 1})
        above = {freeze(row["_id"]): value_at(row, tree.within) for row in rows}
    while unnamed:
        key = unnamed.pop()
        chain = [key]
        # Up to a node that names its tree; those that are each other's parents are refused later.
        while (parent := freeze(parents[key])) in unnamed:
            unnamed.remove(parent)
            chain.append(key := parent)
        value = value_at(inside[parent], tree.within) if parent in inside else above.get(parent)
        for each in chain:
            put(inside[each], tree.within, value)
    for key, parent in parents.items():
        if key in inside and (over := inside.get(freeze(parent))) is not None:
            one, other = (value_at(each, tree.within) for each in (inside[key], over))
            if freeze(one) != freeze(other):
                raise stands_apart(tree, parent)


def settle(tree: Tree, raw: Raw, value: Any) -> None:
    """Put a new node into the tree that its caller names, unless it says another one itself."""
    assert tree.within is not None
    own = value_at(raw, tree.within)
    if own is None:
        put(raw, tree.within, value)
    elif freeze(own) != freeze(value):
        raise UsageError(
            f"{tree.entry.model.__name__}.{tree.within} is {own!r}, but the node is to stand in the tree "
            f"{value!r}; correct one of the two",
            code="tree-apart",
        )


def stands_apart(tree: Tree, key: Any) -> UsageError:
    return UsageError(
        f"{tree.entry.model.__name__} {key!r} stands in another tree, which {tree.within!r} keeps apart from "
        "this one; a node stays in its tree: insert it anew in the other one, and remove it here",
        code="tree-apart",
    )


def absent(tree: Tree, key: Any, error: TreadleError) -> Plan[TreadleError]:
    """Why a node is not in a tree: it stands in another one, or `error`."""
    if tree.confined:
        node = yield from find_one(tree.collection, tree.alive | {"_id": {"$eq": key}}, {"_id": 1})
        if node is not None:
            return stands_apart(tree, key)
    return error
