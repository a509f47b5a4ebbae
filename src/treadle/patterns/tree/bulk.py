"""Bulk loads: parents before children, over as many transactions as it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from treadle.engine import crud
from treadle.model.document import Document
from treadle.patterns.tree.fields import Tree, parent_missing
from treadle.patterns.tree.placing import UNSTATED, parents_first, parents_of, parents_outside
from treadle.patterns.tree.reads import nodes_by_key
from treadle.plan import Plan
from treadle.query.keys import freeze

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
    if tree.segment is not None:
        for raw in raws:
            tree.segment_of(raw)
    by_key = {freeze(raw["_id"]): document for raw, document in zip(raws, documents, strict=True)}
    parents = yield from parents_of(tree, raws, [UNSTATED] * len(raws))
    order = [freeze(raw["_id"]) for raw in parents_first(tree, raws, parents)]
    # A parent that does not exist is refused before the first piece is written.
    outside = parents_outside(raws, parents)
    most = tree.entry.limits.tree_check_max
    for start in range(0, len(outside), most):
        keys = outside[start : start + most]
        present = yield from nodes_by_key(tree, keys, {"_id": 1})
        for key in keys:
            if freeze(key) not in present:
                raise parent_missing(tree, key)
    # Child lists are filled as the children come, so these nodes get their parents stated.
    stated = [parents[key] if tree.children is not None else UNSTATED for key in order]
    return [by_key[key] for key in order], stated
