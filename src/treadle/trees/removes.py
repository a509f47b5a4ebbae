"""Removing a node: alone, with its subtree, or with its children lifted to its parent.

A subtree that is too large for one transaction goes from its leaves upwards,
chunk by chunk, so that what is left is a tree at every moment. A child that
is inserted meanwhile is found when its parent's turn comes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

from treadle.deletes import check_restrictions, delete_documents
from treadle.errors import DataError, UsageError
from treadle.gather import freeze
from treadle.graph import Entry, Graph
from treadle.maintenance.ledger import Ledger
from treadle.maintenance.react import BUMP, UNBOUNDED, formula_stages, react
from treadle.plan import Plan, Raw, Read, by_id, find, find_one, transact, update_many
from treadle.topology import Topology
from treadle.trees import state
from treadle.trees.fields import Tree, node_missing
from treadle.trees.moves import begin, tree_of
from treadle.trees.placing import follows, rewrite, segment_errors, unlist, unlisting
from treadle.trees.reads import Levels, below_batch, children, descendants, endless, keys_below, parent_of
from treadle.trees.segments import SEPARATOR, path_above, split
from treadle.writes import Work

Children = Literal["refuse", "subtree", "lift"]
REMOVE_MAX = 2000
CHUNK = 1000
CHECK_MAX = 10_000
_ALL = 1_000_000_000

log = logging.getLogger("treadle")


class TooLarge(Exception):
    """More hangs on this node than is lifted in one transaction."""


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

    def body(self, graph: Graph, server: Topology, ledger: Ledger) -> Plan[int]:
        tree = self.tree
        self.token = None
        yield from begin(tree, ledger)
        node = yield from find_one(tree.entry.collection, by_id(self.key))
        if node is None:
            raise node_missing(tree, self.key)
        if self.mode == "lift":
            yield from self._lift(node, server, ledger)
            node = (yield from find_one(tree.entry.collection, by_id(self.key))) or node
        if self.mode != "subtree":
            yield from delete_documents(self.entry, [node], ledger)
            return 1
        if not server.transactions:
            yield from self._refuse_restricted()
            work = yield from state.owe(tree, {"kind": "remove", "node": self.key})
            try:
                done = yield from go_on_removing(tree, work, ledger)
            except (DataError, UsageError) as error:
                yield from state.settle(tree, work["token"], str(error))
                raise
            yield from state.settle(tree, work["token"])
            return done
        keys = yield from _keys_below(tree, self.key, _ALL if self.whole else REMOVE_MAX + 1)
        if len(keys) > REMOVE_MAX and not self.whole:
            yield from self._refuse_restricted()
            self.token = (yield from state.owe(tree, {"kind": "remove", "node": self.key}))["token"]
            return 0
        nodes = yield from find(tree.entry.collection, {"_id": {"$in": [*keys, self.key]}})
        yield from delete_documents(self.entry, nodes, ledger)
        return len(nodes)

    def _refuse_restricted(self) -> Plan[None]:
        """Refuse before the first chunk what a later one would be refused for."""
        if not self.entry.restricting:
            return
        keys = yield from _keys_below(self.tree, self.key, _ALL)
        for start in range(0, len(keys), CHECK_MAX):
            yield from check_restrictions(self.entry, keys[start : start + CHECK_MAX])

    def _lift(self, node: Raw, server: Topology, ledger: Ledger) -> Plan[None]:
        """Give the children to the node's parent, at the node's own place among them."""
        tree = self.tree
        limit = _ALL if self.whole else (REMOVE_MAX if server.transactions else 0) + 1
        if tree.rewrites:
            keys = yield from _keys_below(tree, self.key, limit)
        else:
            keys = yield from _keys(tree, (yield from children(tree, self.key, limit=limit)))
        if len(keys) >= limit:
            raise TooLarge
        if not keys:
            return
        above = yield from parent_of(tree, node)
        own = yield from _keys(tree, (yield from children(tree, self.key)))
        if tree.children is not None:
            if above is not None:
                yield from rewrite(tree, [(above, unlisting(tree, [self.key], own))], ledger)
            yield from rewrite(tree, [(self.key, {tree.children: {"$literal": []}})], ledger)
        sets = self._lifted(node, above)
        if not sets:
            return
        if tree.path is not None:
            # A child may take over the very path of the node.
            yield from update_many(tree.entry.collection, by_id(self.key), {"$set": {tree.path: ""}})
        if follows(tree):
            with segment_errors(tree):
                yield from rewrite(tree, [(key, sets) for key in keys], ledger)
            return
        with segment_errors(tree):
            yield from update_many(
                tree.entry.collection,
                {"_id": {"$in": keys}},
                [{"$set": {**sets, **BUMP}}, *formula_stages(tree.entry)],
            )

    def _lifted(self, node: Raw, above: Any) -> Raw:
        """The fields of what was below the node, one level up."""
        tree = self.tree
        gone = {"$literal": self.key}
        sets: Raw = {}
        if tree.parent is not None:
            stored = f"${tree.parent}"
            sets[tree.parent] = {"$cond": [{"$eq": [stored, gone]}, {"$literal": above}, stored]}
        if tree.ancestors is not None:
            stored = f"${tree.ancestors}"
            kept = {"$filter": {"input": stored, "cond": {"$ne": ["$$this", gone]}}}
            sets[tree.ancestors] = {"$cond": [{"$isArray": stored}, kept, stored]}
        old = tree.get(node, "path")
        if tree.path is not None and split(old) is not None:
            stored = f"${tree.path}"
            rest = {"$substrBytes": [stored, len(old.encode()), -1]}
            new = {"$concat": [{"$literal": path_above(old) or SEPARATOR}, rest]}
            begins = {"$eq": [{"$indexOfBytes": [{"$ifNull": [stored, ""]}, {"$literal": old}]}, 0]}
            sets[tree.path] = {"$cond": [begins, new, stored]}
        return sets

    def result(self, outcome: int) -> int:
        return outcome


def _keys(tree: Tree, stream: Any) -> Plan[list[Any]]:
    """The ids of what a stream holds."""
    if isinstance(stream, Levels):
        stream = stream.read
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


def child_keys(tree: Tree, key: Any) -> Plan[list[Any]]:
    """The ids of some children of a node, in their order."""
    return (yield from _keys(tree, (yield from children(tree, key, limit=CHUNK))))


# -- large subtrees ------------------------------------------------------------------------------


def _leaves(tree: Tree, key: Any) -> Plan[list[Any]]:
    """Some nodes of a subtree that have no children; the node itself when it is the last."""
    if "path" in tree.lead and "parent" not in tree.lead:
        return (yield from _last_by_path(tree, key))
    batch = [key]
    seen = {freeze(key)}
    while True:
        found = yield from _keys(tree, _limited(below_batch(tree, batch), CHUNK))
        if not found:
            return batch
        batch = [each for each in found if freeze(each) not in seen]
        if not batch:
            # Every one of them was passed on the way down.
            raise endless(tree)
        seen.update(map(freeze, batch))


def _last_by_path(tree: Tree, key: Any) -> Plan[list[Any]]:
    """Backwards along the paths, where whatever is below a node comes before it."""
    stream = yield from descendants(tree, key, sort=[(tree.roles["path"], -1)], limit=CHUNK)
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


def remove_chunk(tree: Tree, graph: Graph, server: Topology, token: Any) -> Plan[bool]:
    """Delete some leaves; whether that is the end of it, the subtree being gone or one not to be deleted."""
    try:
        return (yield from transact(lambda: _chunk(tree, graph, server, token)))
    except (DataError, UsageError) as error:
        # It would stop whoever comes next as well, so it is let go; its caller is told.
        log.warning("%s: the removal of a subtree stopped: %s", tree.entry.model.__name__, error)
        yield from state.settle(tree, token, str(error))
        return True


def _chunk(tree: Tree, graph: Graph, server: Topology, token: Any) -> Plan[bool]:
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


def go_on_removing(tree: Tree, work: Raw, ledger: Ledger) -> Plan[int]:
    """The whole removal without transactions, from the start or after a crash."""
    total = 0
    while True:
        done, last = yield from _remove_leaves(tree, work["node"], ledger)
        total += done
        if last:
            yield from unlist(tree, [work["node"]], ledger)
            return total
