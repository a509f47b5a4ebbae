"""Removing a node: alone, with its subtree, or with its children lifted to its parent.

A subtree that is too large for one transaction goes from its leaves upwards,
chunk by chunk, so that what is left is always a tree. A child that is inserted
meanwhile is found when its parent's turn comes.
"""

from __future__ import annotations

from typing import Any

from treadle.engine.deletes import check_restrictions, delete_documents, restricting, smaller_first
from treadle.errors import UsageError
from treadle.graph.calls import Children
from treadle.graph.changes import Changes
from treadle.graph.write import ChunkedWrite, Write
from treadle.patterns.tree import state
from treadle.patterns.tree.fields import TREE_CHECK_MAX, Tree
from treadle.patterns.tree.lifts import lift, lift_work
from treadle.patterns.tree.pace import Pace, Step
from treadle.patterns.tree.reads import below_batch, cycle_error, descendants, keys_below, keys_of
from treadle.plan import Plan, Raw, by_id, find, find_one
from treadle.query.keys import freeze

_ALL = 1_000_000_000


class Remove(Write[int]):
    """A node out of its tree; how many nodes that were."""

    shows_document = False

    def __init__(self, tree: Tree, key: Any, mode: Children = "refuse") -> None:
        self.entry = tree.entry
        self.tree = tree
        self.key = tree.entry.ids.encode(key)
        if mode not in ("refuse", "subtree", "lift"):
            raise UsageError(
                f"remove() has children={mode!r}; it takes 'refuse', 'subtree' or 'lift'", code="tree-remove"
            )
        self.mode = mode
        # Of the work that is pending after the first transaction.
        self.token: Any = None
        self.filter = by_id(self.key)

    def apply(self, changes: Changes) -> Plan[int]:
        self.token = None
        tree = self.tree
        limit = _ALL if changes.whole else tree.entry.limits.tree_move_max + 1
        node = yield from state.lock_node(tree, self.key, changes)
        if self.mode == "subtree":
            return (yield from self._remove_subtree(limit, changes))
        if self.mode == "lift":
            work = yield from lift_work(tree, node)
            if not (yield from lift(tree, work, node, Pace(limit), changes)):
                self.token = yield from state.begin(tree, work)
                return 1
            node = (yield from find_one(tree.collection, tree.living(by_id(self.key)))) or node
        yield from delete_documents(self.entry, [node], changes)
        return 1

    def _remove_subtree(self, limit: int, changes: Changes) -> Plan[int]:
        tree = self.tree
        keys = yield from keys_below(tree, self.key, limit=limit)
        if len(keys) >= limit:
            yield from self._refuse_restricted()
            self.token = yield from state.begin(tree, {"kind": "remove", "node": self.key})
            return 0
        nodes = yield from find(tree.collection, tree.living({"_id": {"$in": [*keys, self.key]}}))
        yield from delete_documents(self.entry, nodes, changes)
        return len(nodes)

    def _refuse_restricted(self) -> Plan[None]:
        """Refuse before the first chunk what a later one would be refused for."""
        if not restricting(self.entry):
            return
        keys = yield from keys_below(self.tree, self.key)
        most = TREE_CHECK_MAX
        for start in range(0, len(keys), most):
            some = {"_id": {"$in": keys[start : start + most]}}
            yield from check_restrictions(
                restricting(self.entry), (yield from find(self.entry.collection, some))
            )

    def result(self, outcome: int) -> int:
        return outcome

    def smaller(self) -> Plan[list[ChunkedWrite]]:
        # What a whole subtree will take along is not known before.
        return [] if self.mode == "subtree" else (yield from smaller_first(self.selector, limit=1))


# -- large subtrees ------------------------------------------------------------------------------


def remove_some(tree: Tree, work: Raw, pace: Pace, changes: Changes) -> Plan[Step]:
    """Delete some leaves of a subtree, and the node itself when it is the last."""
    key = work["node"]
    if (yield from find_one(tree.collection, tree.living(by_id(key)), {"_id": 1})) is None:
        return Step(ended=True)
    keys = yield from _leaves(tree, key)
    nodes = yield from find(tree.collection, tree.living({"_id": {"$in": keys}}))
    yield from delete_documents(tree.entry, nodes, changes)
    return Step(ended=freeze(key) in map(freeze, keys), done=len(nodes))


def _leaves(tree: Tree, key: Any) -> Plan[list[Any]]:
    """Some nodes of a subtree that have no children; the node itself when it is the last."""
    most = tree.entry.limits.tree_move_max
    if "path" in tree.lead and "parent" not in tree.lead:
        # Backwards along the paths, where whatever is below a node comes before it.
        stream = yield from descendants(tree, key, sort=[(tree.roles["path"], -1)], limit=most)
        return (yield from keys_of(stream)) or [key]
    batch = [key]
    seen = {freeze(key)}
    while keys := (yield from keys_of(below_batch(tree, batch), most)):
        batch = [each for each in keys if freeze(each) not in seen]
        if not batch:
            # Every one of them was passed on the way down.
            raise cycle_error(tree)
        seen.update(map(freeze, batch))
    return batch
