"""Removing a node: alone, with its subtree, or with its children lifted to its parent.

A large subtree goes in steps of one transaction each, from its leaves upwards,
so that what is left is always a tree: where a step is refused, or the process
ends, the removal can be called again.
"""

from __future__ import annotations

from typing import Any

from pymongo.errors import OperationFailure

from treadle.engine.deletes import check_restrictions, delete_documents, restricting, smaller_first
from treadle.engine.write_path import WritePath
from treadle.errors import PartlyDone, TreadleError, UsageError
from treadle.graph.calls import Children
from treadle.graph.changes import Changes
from treadle.graph.stored_pages import chunks
from treadle.graph.write import ChunkedWrite, Write
from treadle.patterns.tree.inserts import TREE_CHECK_MAX, note_former_parent
from treadle.patterns.tree.moves import refuse_too_many
from treadle.patterns.tree.reads import ids_below, parent_id
from treadle.patterns.tree.tree import Tree
from treadle.patterns.tree.writes import lock_node, update_all, update_each
from treadle.plan import Plan, Raw, by_id, update_one
from treadle.plan.server_errors import surely_not_committed
from treadle.query.keys import freeze

# Nodes of a subtree that are removed in one transaction, in which each is read and followed.
TREE_REMOVE_STEP = 2_000


class Remove(Write[int]):
    """A node out of its tree. The outcome is the number of nodes removed."""

    shows_document = False

    def __init__(self, tree: Tree, key: Any) -> None:
        self.entry = tree.entry
        self.tree = tree
        self.key = tree.entry.ids.encode(key)
        self.filter = by_id(self.key)

    def apply(self, changes: Changes) -> Plan[int]:
        node = yield from lock_node(self.tree, self.key, changes)
        yield from delete_documents(self.entry, [node], changes)
        return 1

    def smaller(self) -> Plan[list[ChunkedWrite]]:
        return (yield from smaller_first(self.selector, limit=1))


class RemoveAndLift(Remove):
    """A node out of its tree, whose children become children of its parent, or roots."""

    def apply(self, changes: Changes) -> Plan[int]:
        tree = self.tree
        node = yield from lock_node(tree, self.key, changes)
        parent = yield from parent_id(tree, node)
        yield from self._lift(node, parent, changes)
        childless = yield from tree.find_one(by_id(self.key))
        yield from delete_documents(self.entry, [childless or node], changes)
        # The deletion noted none, where the node's own fields said whose child it was.
        yield from note_former_parent(tree, self.key, parent)
        return 1

    def _lift(self, node: Raw, parent: Any, changes: Changes) -> Plan[None]:
        tree, lifts = self.tree, self.tree.representation.lift(node, parent)
        for lift in lifts:
            yield from refuse_too_many(tree, lift.condition, lift.sets)
        if tree.representation.path is not None:
            # A child may take over the very path of the node.
            yield from update_one(tree.collection, by_id(self.key), {"$set": {tree.representation.path: ""}})
        for lift in lifts:
            yield from update_all(tree, lift.condition, lift.sets, changes)
        if tree.lists is not None and (children := tree.lists.listed(node)):
            updates: list[tuple[Any, Raw]] = [(self.key, {tree.lists.children: {"$literal": []}})]
            if parent is not None:
                updates.append((parent, tree.lists.replaced(self.key, children)))
            yield from update_each(tree, updates, changes)


class RemoveSubtree(Remove):
    """A node and all below it, or some leaves of the subtree where it is large."""

    def __init__(self, tree: Tree, key: Any) -> None:
        super().__init__(tree, key)
        # How many nodes earlier steps have removed, and whether the last one removed the node itself.
        self.removed = 0
        self.ended = False

    def apply(self, changes: Changes) -> Plan[int]:
        tree = self.tree
        node = yield from lock_node(tree, self.key, changes)
        # A transaction of the caller has no next step.
        ids = yield from ids_below(tree, self.key, limit=0 if changes.joined else TREE_REMOVE_STEP)
        self.ended = changes.joined or len(ids) < TREE_REMOVE_STEP
        if not self.ended:
            if not self.removed:
                yield from self._refuse_restricted()
            ids = yield from self._leaves(node)
        nodes = yield from tree.find({"_id": {"$in": ids}})
        if self.ended:
            nodes.append(node)
        yield from delete_documents(self.entry, nodes, changes)
        return len(nodes)

    def _refuse_restricted(self) -> Plan[None]:
        """Refuse before the first step what a later one would be refused for."""
        rules = restricting(self.entry)
        ids = (yield from ids_below(self.tree, self.key)) if rules else []
        for some in chunks(ids, TREE_CHECK_MAX):
            yield from check_restrictions(rules, (yield from self.tree.find({"_id": {"$in": list(some)}})))

    def _leaves(self, top: Raw) -> Plan[list[Any]]:
        """Return the ids of some nodes below one that have no children."""
        tree, representation = self.tree, self.tree.representation
        if representation.leaves_first is not None:
            read = tree.read(representation.below(top) or {}, representation.leaves_first, TREE_REMOVE_STEP)
            return [node["_id"] for node in (yield read)]
        batch, seen = [top], set[Any]()
        while links := [link for node in batch for link in representation.links_of(node)]:
            below = yield from tree.find(representation.level(links), tree.projection, limit=TREE_REMOVE_STEP)
            if not below:
                break
            batch = [node for node in below if freeze(node["_id"]) not in seen]
            if not batch:
                raise tree.cycle()
            seen.update(freeze(node["_id"]) for node in batch)
        return [node["_id"] for node in batch]

    def smaller(self) -> Plan[list[ChunkedWrite]]:
        # What a whole subtree takes along is not known before.
        return []
        yield  # pragma: no cover


def remove(write_path: WritePath, tree: Tree, key: Any, children: Children) -> Plan[int]:
    """Remove a node. Returns the number of nodes removed."""
    if children not in ("refuse", "subtree", "lift"):
        raise UsageError(
            f"remove() has children={children!r}; it takes 'refuse', 'subtree' or 'lift'", code="tree-remove"
        )
    if children != "subtree":
        return (yield from write_path.execute((RemoveAndLift if children == "lift" else Remove)(tree, key)))
    write = RemoveSubtree(tree, key)
    while not write.ended:
        try:
            write.removed += yield from write_path.execute(write)
        except (TreadleError, OperationFailure) as error:
            # It is not known whether the last step was committed.
            if not write.removed or not surely_not_committed(error):
                raise
            raise PartlyDone(tree.name, write.removed, error) from error
    return write.removed
