"""Bulk loads: parents before children, over as many transactions as it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from treadle.engine import crud
from treadle.graph.gather import freeze
from treadle.model.document import Document
from treadle.patterns.tree.fields import Tree, parent_missing
from treadle.patterns.tree.placing import UNSTATED, agreed_parent, listed_parents, parents_first
from treadle.patterns.tree.segments import path_above
from treadle.plan import Plan, Raw, find

D = TypeVar("D", bound=Document)


def in_pieces(tree: Tree, documents: Sequence[D], most: int) -> Plan[list[tuple[list[D], list[Any]]]]:
    """A bulk load in pieces, in an order in which each node finds its parent; with the parents to state."""
    order, parents = list(documents), [UNSTATED] * len(documents)
    if len(documents) > most:
        order, parents = yield from _ordered(tree, documents)
    starts = range(0, len(order), most)
    return [(order[start : start + most], parents[start : start + most]) for start in starts]


def _ordered(tree: Tree, documents: Sequence[D]) -> Plan[tuple[list[D], list[Any]]]:
    raws = crud.dump_all(tree.entry, documents, [])
    by_key = {freeze(raw["_id"]): document for raw, document in zip(raws, documents, strict=True)}
    parents = _parents(tree, raws)
    order = parents_first(tree, raws, parents)
    if tree.segment is not None:
        for raw in raws:
            tree.segment_of(raw)
    yield from _check_outside(tree, raws, parents)
    # Lists are filled as the children come, so these are told their parents.
    stated = [parents[freeze(raw["_id"])] if tree.children is not None else UNSTATED for raw in order]
    return [by_key[freeze(raw["_id"])] for raw in order], stated


def _parents(tree: Tree, raws: Sequence[Raw]) -> dict[Any, Any]:
    """The parent of each node by its frozen id; that of another batch only where it is named."""
    listed = listed_parents(tree, raws, [UNSTATED] * len(raws))
    if tree.parent is not None:
        return {freeze(raw["_id"]): agreed_parent(tree, raw, listed) for raw in raws}
    if tree.path is not None:
        by_path = {tree.get(raw, "path") or None: raw["_id"] for raw in raws}
        return {
            freeze(raw["_id"]): by_path.get(path_above(tree.get(raw, "path") or "") or "") for raw in raws
        }
    return {freeze(raw["_id"]): listed.get(freeze(raw["_id"])) for raw in raws}


def _check_outside(tree: Tree, raws: Sequence[Raw], parents: dict[Any, Any]) -> Plan[None]:
    """Refuse a parent that is nowhere, before the first chunk is written."""
    inside = {freeze(raw["_id"]) for raw in raws}
    outside = {freeze(key): key for key in parents.values() if key is not None and freeze(key) not in inside}
    keys = list(outside.values())
    most = tree.entry.limits.tree_check_max
    for start in range(0, len(keys), most):
        chunk = keys[start : start + most]
        found = yield from find(tree.entry.collection, {"_id": {"$in": chunk}}, {"_id": 1})
        present = {freeze(each["_id"]) for each in found}
        for key in chunk:
            if freeze(key) not in present:
                raise parent_missing(tree, key)
