"""Removing a node: alone, with its subtree, or with its children lifted to its parent.

A subtree that is too large for one transaction goes from its leaves upwards,
chunk by chunk, so that what is left is a tree at every moment. A child that
is inserted meanwhile is found when its parent's turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.engine.deletes import check_restrictions, delete_documents, restricting, smaller_first
from treadle.engine.ledger import Ledger
from treadle.engine.pipelines import BUMP, formula_stages
from treadle.engine.react import UNBOUNDED, react
from treadle.engine.work import ChunkedWork, Work
from treadle.errors import UsageError
from treadle.graph.calls import Children
from treadle.graph.gather import freeze
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry
from treadle.patterns.tree import state
from treadle.patterns.tree.fields import Tree, node_missing
from treadle.patterns.tree.lifts import lift_lists, lifted, owe_lift
from treadle.patterns.tree.moves import begin, tree_of
from treadle.patterns.tree.pace import Pace
from treadle.patterns.tree.placing import follows, rewrite, segment_errors
from treadle.patterns.tree.reads import (
    Levels,
    below_batch,
    children,
    descendants,
    endless,
    keys_below,
    parent_of,
)
from treadle.plan import Plan, Raw, Read, by_id, find, find_one, update_many
from treadle.plan.capabilities import Capabilities

_ALL = 1_000_000_000


class Remove(Work[int]):
    """A node out of its tree; how many nodes that were."""

    shows_document = False

    def __init__(
        self, entry: Entry[Any], key: Any, mode: Children = "refuse", *, whole: bool = False
    ) -> None:
        self.entry = entry
        self.tree = tree_of(entry)
        self.key = entry.identity(key)
        if mode not in ("refuse", "subtree", "lift"):
            raise UsageError(
                f"remove() has children={mode!r}; it takes 'refuse', 'subtree' or 'lift'", code="tree-remove"
            )
        self.mode = mode
        self.whole = whole
        self.token: Any = None
        # What hangs on the node may have to be dealt with first; of a subtree, that is its caller's.
        self.filter = None if mode == "subtree" else by_id(self.key)

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[int]:
        tree = self.tree
        self.token = None
        yield from begin(tree)
        node = yield from find_one(tree.entry.collection, by_id(self.key))
        if node is None:
            raise node_missing(tree, self.key)
        if self.mode == "lift":
            if (yield from self._lift(node, ledger)):
                return 1
            node = (yield from find_one(tree.entry.collection, by_id(self.key))) or node
        if self.mode != "subtree":
            yield from delete_documents(self.entry, [node], ledger)
            return 1
        most = tree.entry.limits.tree_remove_max
        keys = yield from _keys_below(tree, self.key, _ALL if self.whole else most + 1)
        if len(keys) > most and not self.whole:
            yield from self._refuse_restricted()
            self.token = (yield from state.owe(tree, {"kind": "remove", "node": self.key}))["token"]
            return 0
        nodes = yield from find(tree.entry.collection, {"_id": {"$in": [*keys, self.key]}})
        yield from delete_documents(self.entry, nodes, ledger)
        return len(nodes)

    def _refuse_restricted(self) -> Plan[None]:
        """Refuse before the first chunk what a later one would be refused for."""
        if not restricting(self.entry):
            return
        keys = yield from _keys_below(self.tree, self.key, _ALL)
        most = self.entry.limits.tree_check_max
        for start in range(0, len(keys), most):
            yield from check_restrictions(restricting(self.entry), keys[start : start + most])

    def _lift(self, node: Raw, ledger: Ledger) -> Plan[bool]:
        """Give the children to the node's parent, at the node's own place among them.

        Whether it is too large for that, and owed together with the node's own removal.
        """
        tree = self.tree
        keys: list[Any] = []
        if tree.parent is not None or tree.rewrites:
            limit = _ALL if self.whole else tree.entry.limits.tree_remove_max + 1
            keys = yield from self._keys_to_lift(limit)
            if len(keys) >= limit:
                self.token = (yield from owe_lift(tree, node))["token"]
                return True
        above = yield from parent_of(tree, node)
        yield from lift_lists(tree, node, above, ledger)
        sets = lifted(tree, self.key, tree.get(node, "path"), above)
        if not sets or not keys:
            return False
        if tree.path is not None:
            # A child may take over the very path of the node.
            yield from update_many(tree.entry.collection, by_id(self.key), {"$set": {tree.path: ""}})
        with segment_errors(tree):
            if follows(tree):
                yield from rewrite(tree, [(key, sets) for key in keys], ledger)
            else:
                stages = [{"$set": {**sets, **BUMP}}, *formula_stages(tree.entry)]
                yield from update_many(tree.entry.collection, {"_id": {"$in": keys}}, stages)
        return False

    def _keys_to_lift(self, limit: int) -> Plan[list[Any]]:
        if self.tree.rewrites:
            return (yield from _keys_below(self.tree, self.key, limit))
        return (yield from _keys(self.tree, (yield from children(self.tree, self.key, limit=limit))))

    def smaller(self) -> Plan[list[ChunkedWork]]:
        # What a whole subtree will take along is not known before.
        return [] if self.filter is None else (yield from smaller_first(self.entry, self.filter, limit=1))


def _keys(tree: Tree, stream: Any) -> Plan[list[Any]]:
    """The ids of what a stream holds."""
    assert not isinstance(stream, Levels)
    if isinstance(stream, list):
        return [each["_id"] for each in stream]
    if stream.method == "find":
        found = yield Read(stream.collection, "find", (*stream.arguments, {"_id": 1}), stream.options)
    else:
        pipeline = [*stream.arguments[0], {"$project": {"_id": 1}}]
        found = yield Read(stream.collection, "aggregate", (pipeline,), stream.options)
    return [each["_id"] for each in found]


def _keys_below(tree: Tree, key: Any, limit: int) -> Plan[list[Any]]:
    if "ancestors" not in tree.lead and "path" not in tree.lead:
        # Not by $graphLookup, whose memory has an end: an error would end the transaction.
        return (yield from keys_below(tree, key, limit=limit))
    return (yield from _keys(tree, (yield from descendants(tree, key, limit=limit))))


# -- large subtrees ------------------------------------------------------------------------------


def _leaves(tree: Tree, key: Any) -> Plan[list[Any]]:
    """Some nodes of a subtree that have no children; the node itself when it is the last."""
    if "path" in tree.lead and "parent" not in tree.lead:
        return (yield from _last_by_path(tree, key))
    batch, most = [key], tree.entry.limits.tree_remove_chunk
    seen = {freeze(key)}
    while True:
        found = yield from _keys(tree, _limited(below_batch(tree, batch), most))
        if not found:
            return batch
        batch = [each for each in found if freeze(each) not in seen]
        if not batch:
            # Every one of them was passed on the way down.
            raise endless(tree)
        seen.update(map(freeze, batch))


def _last_by_path(tree: Tree, key: Any) -> Plan[list[Any]]:
    """Backwards along the paths, where whatever is below a node comes before it."""
    most = tree.entry.limits.tree_remove_chunk
    stream = yield from descendants(tree, key, sort=[(tree.roles["path"], -1)], limit=most)
    return (yield from _keys(tree, stream)) or [key]


def _limited(read: Read, limit: int) -> Read:
    if read.method == "find":
        return Read(read.collection, "find", read.arguments, {**read.options, "limit": limit})
    return Read(read.collection, "aggregate", ([*read.arguments[0], {"$limit": limit}],), read.options)


def _remove_leaves(tree: Tree, key: Any, ledger: Ledger) -> Plan[tuple[int, bool]]:
    """Delete some leaves of a subtree; how many, and whether the node itself was the last."""
    if (yield from find_one(tree.entry.collection, by_id(key), {"_id": 1})) is None:
        return 0, True
    keys = yield from _leaves(tree, key)
    nodes: Sequence[Raw] = yield from find(tree.entry.collection, {"_id": {"$in": keys}})
    yield from delete_documents(tree.entry, nodes, ledger)
    return len(nodes), any(freeze(each) == freeze(key) for each in keys)


def remove_chunk(tree: Tree, graph: Graph, server: Capabilities, token: Any, pace: Pace) -> Plan[bool]:
    """Delete some leaves in one transaction; whether the subtree is gone."""
    pace.tried = []
    work = yield from state.hold(tree, token)
    if work is None:
        return True
    ledger = Ledger()
    done, last = yield from _remove_leaves(tree, work["node"], ledger)
    yield from react(graph, server, ledger, copies_max=UNBOUNDED)
    yield from state.progress(tree, token, None, done)
    if last:
        yield from state.settle(tree, token)
    return last
