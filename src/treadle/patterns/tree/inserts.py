"""New nodes, deleted ones and restored ones: what a plain write of a node does to its tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from treadle.engine.document_layout import DocumentLayout
from treadle.engine.documents import dump_all
from treadle.engine.inserts import Insert
from treadle.errors import DataError, UsageError
from treadle.graph.changes import Changes
from treadle.graph.rule import Rule
from treadle.graph.stored_pages import chunks
from treadle.model.document import Document
from treadle.patterns.tree.paths import path_above
from treadle.patterns.tree.reads import child_outside, parent_id
from treadle.patterns.tree.representations import ByAncestors, ByPath
from treadle.patterns.tree.tree import FORMER_PARENT, Tree
from treadle.patterns.tree.writes import (
    fill,
    lock_parents,
    require_parents,
    update_all,
    update_each,
    with_line,
)
from treadle.plan import Plan, Raw, by_id, update_one
from treadle.query.keys import distinct, freeze
from treadle.query.paths import has, put, value_at

# Nodes of which one command asks by their ids or paths.
TREE_CHECK_MAX = 10_000
# Nodes that insert_many stores in one commit without looking at how deep they stand.
TREE_FLAT_MAX = 100
# Entries of ancestor arrays, each with one in an index, that it stores in one commit.
TREE_ANCESTORS_MAX = 100_000

D = TypeVar("D", bound=Document)


class _Unstated:
    def __repr__(self) -> str:
        return "UNSTATED"


UNSTATED: Final = _Unstated()
"""Where a node goes is for its own fields to say."""


class Stated(NamedTuple):
    """Where a caller wants a new node: below which parent, and at which index among its children."""

    parent: Any = UNSTATED
    at: int | None = None


@dataclass(slots=True)
class Placement:
    """Where new nodes go: the order in which to store them, and the lists that are to hold them."""

    order: list[Raw]
    # By frozen id the parents outside of the batch, with their new children.
    lists: dict[Any, tuple[Any, list[Any]]] = field(default_factory=dict)
    # By frozen id the index of a new child in such a list.
    indexes: dict[Any, int] = field(default_factory=dict)


# -- new nodes ---------------------------------------------------------------------------------------


def stands_alone(tree: Tree, nodes: Sequence[Raw], stated: Sequence[Stated]) -> bool:
    """Whether all these nodes are roots, so that no other document is concerned."""
    return all(
        tree.representation.is_root(node) if place.parent is UNSTATED else place.parent is None
        for node, place in zip(nodes, stated, strict=True)
    )


def place(tree: Tree, nodes: Sequence[Raw], stated: Sequence[Stated]) -> Plan[Placement]:
    """Fill the tree's fields of new nodes from their parents, which may be among them."""
    for node in nodes:
        tree.representation.check(node)
    parents = yield from _parents(tree, nodes, stated)
    placement = Placement(_parents_first(tree, nodes, parents))
    placement.indexes = {
        freeze(node["_id"]): each.at for node, each in zip(nodes, stated, strict=True) if each.at is not None
    }
    by_key = {freeze(node["_id"]): node for node in nodes}
    outside = yield from _parents_outside(tree, _keys_outside(parents, by_key))
    for node in placement.order:
        key = parents[freeze(node["_id"])]
        parent = outside.get(freeze(key), by_key.get(freeze(key)))
        fill(tree, node, parent)
        if tree.lists is not None:
            put(node, tree.lists.children, [])
            _list(tree.lists.children, node, parent, placement, is_stored=freeze(key) in outside)
    return placement


def _list(field: str, node: Raw, parent: Raw | None, placement: Placement, *, is_stored: bool) -> None:
    """Put a new node into its parent's list, or note it where the parent is stored already."""
    if parent is None:
        return
    if is_stored:
        placement.lists.setdefault(freeze(parent["_id"]), (parent["_id"], []))[1].append(node["_id"])
    else:
        value_at(parent, field).append(node["_id"])


def _keys_outside(parents: Mapping[Any, Any], inside: Mapping[Any, Any]) -> list[Any]:
    """Return the ids of parents that are not among the new nodes."""
    return [key for key in distinct(parents.values()) if key is not None and freeze(key) not in inside]


def _parents_outside(tree: Tree, keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
    """Return stored parents by frozen id, each with its line, which cannot change concurrently."""
    if tree.lists is None:
        parents = yield from lock_parents(tree, keys)
    else:
        # Their lists are written anyway.
        stored = (yield from tree.find({"_id": {"$in": list(keys)}}, tree.projection)) if keys else []
        parents = require_parents(tree, keys, stored)
    for frozen, parent in parents.items():
        parents[frozen] = yield from with_line(tree, parent)
    return parents


def _parents(tree: Tree, nodes: Sequence[Raw], stated: Sequence[Stated]) -> Plan[dict[Any, Any]]:
    """Return the id of each new node's parent, by the node's frozen id."""
    by_fields = [node for node, each in zip(nodes, stated, strict=True) if each.parent is UNSTATED]
    if tree.paths is None:
        parents = tree.representation.stated_parents(by_fields, nodes)
    else:
        parents = yield from _parents_by_path(tree, tree.paths, by_fields)
    for node, each in zip(nodes, stated, strict=True):
        if each.parent is not UNSTATED:
            parents[freeze(node["_id"])] = each.parent
    return parents


def _parents_by_path(tree: Tree, paths: ByPath, nodes: Sequence[Raw]) -> Plan[dict[Any, Any]]:
    """Return the ids of the parents that the paths of new nodes name."""
    own = {freeze(node["_id"]): paths.stated_path(node) for node in nodes}
    ids = {own[freeze(node["_id"])]: node["_id"] for node in nodes}
    above = {key: path_above(path) for key, path in own.items()}
    unknown = sorted({path for path in above.values() if path is not None and path not in ids})
    for some in chunks(unknown, TREE_CHECK_MAX):
        rows = yield from tree.find({paths.path: {"$in": some}}, tree.projection)
        ids |= {paths.path_of(row): row["_id"] for row in rows}
    for path in unknown:
        if path not in ids:
            raise tree.parent_missing(path)
    return {key: None if path is None else ids[path] for key, path in above.items()}


def _parents_first(tree: Tree, nodes: Sequence[Raw], parents: Mapping[Any, Any]) -> list[Raw]:
    """Return the nodes in an order in which each comes after its parent; siblings as listed or given."""
    by_key = {freeze(node["_id"]): node for node in nodes}
    below: dict[Any, list[Raw]] = {}
    order: list[Raw] = []
    for key, node in by_key.items():
        parent = freeze(parents[key])
        (below.setdefault(parent, []) if parent in by_key else order).append(node)
    for node in order:  # grows while it is gone through
        siblings = below.get(freeze(node["_id"]), [])
        if siblings and tree.lists is not None:
            rank = {freeze(key): number for number, key in enumerate(tree.lists.listed(node))}
            siblings.sort(key=lambda each: rank.get(freeze(each["_id"]), len(rank)))
        order.extend(siblings)
    if len(order) < len(by_key):
        ordered = {freeze(node["_id"]) for node in order}
        first = next(node["_id"] for key, node in by_key.items() if key not in ordered)
        raise UsageError(
            f"these {tree.name} documents are each other's ancestors ({first!r} among them); a tree has no "
            "cycles: correct their parents",
            code="tree-cycle",
        )
    return order


def list_children(tree: Tree, placement: Placement, changes: Changes) -> Plan[None]:
    """Add new nodes to the stored lists of their parents: last, or at the index that a caller gave."""
    lists = tree.lists
    if lists is None:
        return
    updates, indexed = list[tuple[Any, Raw]](), list[tuple[Any, Raw]]()
    for parent, children in placement.lists.values():
        at = placement.indexes
        indexed += [
            (parent, lists.inserted(each, at[freeze(each)])) for each in children if freeze(each) in at
        ]
        if last := [each for each in children if freeze(each) not in at]:
            updates.append((parent, lists.appended(last)))
    yield from update_each(tree, updates, changes)
    for update in indexed:
        yield from update_each(tree, [update], changes)


# -- deletion and restoring --------------------------------------------------------------------------


def before_deletion(tree: Tree, nodes: Sequence[Raw]) -> Plan[None]:
    """Refuse to delete nodes whose children would be left behind; note the parents of soft-deleted ones."""
    child = yield from child_outside(tree, nodes)
    if child is not None:
        raise DataError(
            f"this {tree.name} has children ({child!r} among them), which would be left without a parent; "
            f"use store.tree({tree.name}).remove(id, children='subtree'), or children='lift' to keep them",
            code="tree-has-children",
        )
    if _notes_parents(tree):
        for node in nodes:
            yield from note_former_parent(tree, node["_id"], (yield from parent_id(tree, node)))


def _notes_parents(tree: Tree) -> bool:
    """Whether a soft-deleted node does not say itself whose child it was."""
    return tree.entry.paths.deletion is not None and tree.representation.parent is None


def note_former_parent(tree: Tree, key: Any, parent: Any) -> Plan[None]:
    """Note the parent of a node that is deleted softly, below which it is restored."""
    if _notes_parents(tree):
        yield from update_one(tree.collection, by_id(key), {"$set": {FORMER_PARENT: parent}})


def unlist(tree: Tree, ids: Sequence[Any], changes: Changes) -> Plan[None]:
    """Remove deleted nodes from the lists that hold them."""
    if tree.lists is not None:
        condition = {tree.lists.children: {"$in": list(ids)}, "_id": {"$nin": list(ids)}}
        yield from update_all(tree, condition, tree.lists.removed(ids), changes)


def restore_place(tree: Tree, node: Raw) -> Plan[Placement]:
    """Put a node that is restored below its former parent, wherever that is now."""
    if tree.lists is not None:
        put(node, tree.lists.children, [])
    is_noted = tree.representation.parent is None and has(node, FORMER_PARENT)
    return (yield from place(tree, [node], [Stated(value_at(node, FORMER_PARENT)) if is_noted else Stated()]))


def check_replacement(tree: Tree, before: Raw, after: Raw) -> None:
    """Refuse a replacement that would move or rename a node."""
    representation = tree.representation
    calls = {representation.parent: "move(id, parent)", representation.segment: "rename(id, segment)"}
    for path, call in calls.items():
        if path is not None and value_at(before, path) != value_at(after, path):
            raise UsageError(
                f"this {tree.name} has another {path!r} than the stored one; to change it use "
                f"store.tree({tree.name}).{call}, or read the document again if another writer did",
                code="tree-replace-moves",
            )


# -- bulk loads --------------------------------------------------------------------------------------


class TreeLayout(DocumentLayout[D]):
    """Nodes one by one; bulk loads in an order in which each node finds its parent."""

    inserts_apart = True

    def __init__(self, rule: Rule, tree: Tree, default: DocumentLayout[D]) -> None:
        super().__init__(default.entry, default.write_path)
        self._rule = rule
        self._tree = tree

    def _inserts(self, documents: list[D]) -> Plan[list[Insert[Any]]]:
        most, tree = self.entry.limits.insert_max, self._tree
        may_be_deep = isinstance(tree.representation, ByAncestors) and len(documents) > TREE_FLAT_MAX
        if len(documents) <= most and not may_be_deep:
            pieces = [Piece(documents, [Stated()] * len(documents))] if documents else []
        else:
            pieces = yield from _pieces(tree, documents, most)
        return [Insert(self.entry, piece.documents, {self._rule: piece.stated}) for piece in pieces]


class Piece(NamedTuple):
    """What one commit of a bulk load stores."""

    documents: list[Any]
    stated: list[Stated]


def _pieces(tree: Tree, documents: Sequence[D], most: int) -> Plan[list[Piece]]:
    """Divide a bulk load. A parent that does not exist is refused before the first piece is stored."""
    nodes = dump_all(tree.entry, documents, [])
    for node in nodes:
        tree.representation.check(node)
    by_key = {freeze(node["_id"]): document for node, document in zip(nodes, documents, strict=True)}
    parents = yield from _parents(tree, nodes, [Stated()] * len(nodes))
    depths = yield from _depths_outside(tree, _keys_outside(parents, by_key))
    pieces: list[Piece] = []
    entries = 0
    for node in _parents_first(tree, nodes, parents):
        key = freeze(node["_id"])
        depth = depths[key] = 0 if parents[key] is None else depths[freeze(parents[key])] + 1
        # A node of a deep tree has many ancestors, each with an entry in the index.
        entries += depth
        if not pieces or len(pieces[-1].documents) == most or entries > TREE_ANCESTORS_MAX:
            pieces.append(Piece([], []))
            entries = depth
        pieces[-1].documents.append(by_key[key])
        # Child lists are filled as the children come.
        pieces[-1].stated.append(Stated() if tree.lists is None else Stated(parents[key]))
    return pieces


def _depths_outside(tree: Tree, keys: Sequence[Any]) -> Plan[dict[Any, int]]:
    """Return by frozen id how many nodes stored parents say are above them."""
    depths: dict[Any, int] = {}
    for some in chunks(keys, TREE_CHECK_MAX):
        stored = yield from tree.find({"_id": {"$in": list(some)}}, tree.projection)
        for key, parent in require_parents(tree, some, stored).items():
            depths[key] = len(tree.representation.line(parent) or [])
    return depths
