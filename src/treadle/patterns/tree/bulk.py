"""Bulk loads: parents before children, over as many transactions as it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from treadle.engine.documents import dump_all
from treadle.model.document import Document
from treadle.patterns.tree.fields import TREE_CHECK_MAX, UNSTATED, Tree, parent_missing
from treadle.patterns.tree.placing import parents_first, parents_of, parents_outside
from treadle.patterns.tree.reads import nodes_by_key
from treadle.plan import Plan
from treadle.query.keys import freeze

# Nodes that insert_many stores without looking at how deep they stand.
TREE_FLAT_MAX = 100
# Entries of ancestor arrays that it stores in one commit.
TREE_ANCESTORS_MAX = 100_000

D = TypeVar("D", bound=Document)


def in_pieces(tree: Tree, documents: Sequence[D], most: int) -> Plan[list[tuple[list[D], list[Any]]]]:
    """A bulk load in pieces, in an order in which each node finds its parent; with the parents to state."""
    deep = tree.ancestors is not None and len(documents) > TREE_FLAT_MAX
    if len(documents) <= most and not deep:
        return [(list(documents), [UNSTATED] * len(documents))] if documents else []
    pieces: list[tuple[list[D], list[Any]]] = []
    room = entries = 0
    for document, parent, depth in (yield from _ordered(tree, documents)):
        # A node of a deep tree has many ancestors, each with an entry in the index.
        if not room or (tree.ancestors is not None and depth > entries):
            pieces.append(([], []))
            room, entries = most, TREE_ANCESTORS_MAX
        pieces[-1][0].append(document)
        pieces[-1][1].append(parent)
        room -= 1
        entries -= depth
    return pieces


def _ordered(tree: Tree, documents: Sequence[D]) -> Plan[list[tuple[D, Any, int]]]:
    """Parents before their children; each with the parent to state, and how many nodes are above it."""
    raws = dump_all(tree.entry, documents, [])
    if tree.segment is not None:
        for raw in raws:
            tree.segment_of(raw)
    by_key = {freeze(raw["_id"]): document for raw, document in zip(raws, documents, strict=True)}
    parents = yield from parents_of(tree, raws, [UNSTATED] * len(raws))
    order = [freeze(raw["_id"]) for raw in parents_first(tree, raws, parents)]
    depths: dict[Any, int] = {}
    most = TREE_CHECK_MAX
    # A parent that does not exist is refused before the first piece is written.
    outside = parents_outside(raws, parents)
    for start in range(0, len(outside), most):
        keys = outside[start : start + most]
        present = yield from nodes_by_key(tree, keys, tree.projection)
        for key in keys:
            if freeze(key) not in present:
                raise parent_missing(tree, key)
            above = tree.get(present[freeze(key)], "ancestors") if tree.ancestors is not None else None
            depths[freeze(key)] = len(above) if isinstance(above, list) else 0
    for key in order:
        depths[key] = 0 if parents[key] is None else depths[freeze(parents[key])] + 1
    # Child lists are filled as the children come, so these nodes get their parents stated.
    known = {key: parents[key] if tree.children is not None else UNSTATED for key in order}
    return [(by_key[key], known[key], depths[key]) for key in order]
