"""Proof and repair of trees: cycles, orphans, wrong arrays and paths, lists that disagree.

Everything is derived from the tree's truth: the parents, or the child lists,
or else the paths themselves. An orphan, and the node with the least id of a
cycle, should be a root; nothing is ever deleted. The nodes of a page are
followed up to their roots together, so that a page costs about as many reads
as the tree is deep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import bson

from treadle.engine.copies import UNBOUNDED
from treadle.engine.propagate import propagate
from treadle.engine.salvage import attempting, salvage
from treadle.errors import UsageError
from treadle.graph.changes import Changes
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Finding
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.patterns.tree import state
from treadle.patterns.tree.fields import Tree
from treadle.patterns.tree.rewriting import rewrite
from treadle.patterns.tree.segments import join, path_above, split
from treadle.patterns.tree.unfinished import finish
from treadle.plan import Plan, Raw, find, transact, update_many
from treadle.plan.capabilities import Capabilities
from treadle.query.comparison import same
from treadle.query.keys import freeze
from treadle.query.paths import value_at

# How often repair lets large moves finish first.
TREE_ATTEMPTS_MAX = 20


def order_of(key: Any) -> bytes:
    """Something by which ids of any type have one order, the same in every process."""
    encoded: bytes = bson.encode({"": key}, codec_options=CODEC_OPTIONS)
    return encoded


class Climb:
    """Some nodes and all above them: who is whose parent, and where cycles are to be cut."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.nodes: dict[Any, Raw] = {}
        # Per node (frozen id) the frozen id of its parent, by the truth; None for roots and orphans.
        self.parents: dict[Any, Any] = {}
        self.by_path: dict[str, Any] = {}
        # Who lists a node, where the lists are the truth.
        self.claims: dict[Any, list[Any]] = {}
        self.cut: set[Any] = set()
        self._paths: dict[Any, str | None] = {}

    def add(self, nodes: Iterable[Raw]) -> list[Any]:
        """Take nodes in; the frozen ids of those that are new."""
        new = []
        for node in nodes:
            key, path = freeze(node["_id"]), self.tree.get(node, "path")
            if key not in self.nodes:
                self.nodes[key] = node
                new.append(key)
            if isinstance(path, str):
                self.by_path.setdefault(path, key)
        return new

    def above(self, key: Any) -> list[Any]:
        """The frozen ids above a node, root first, with cycles cut."""
        chain: list[Any] = []
        while (key := self.parent(key)) is not None:
            chain.append(key)
        return chain[::-1]

    def parent(self, key: Any) -> Any:
        """The frozen id of the parent that a node should have."""
        return None if key in self.cut else self.parents.get(key)

    def path(self, key: Any) -> str | None:
        """The path that a node should have; None where a segment on the way is no segment."""
        if key not in self._paths:
            path: str | None = None
            try:
                for each in [*self.above(key), key]:
                    path = join(path, self.tree.segment_of(self.nodes[each]))
            except UsageError:
                path = None
            self._paths[key] = path
        return self._paths[key]

    def cut_cycles(self) -> None:
        """Decide where each cycle is cut: at the node with the least id."""
        visited: set[Any] = set()
        for start in self.nodes:
            walk: list[Any] = []
            key: Any = start
            while key is not None and key not in visited:
                visited.add(key)
                walk.append(key)
                key = self.parents.get(key)
            if key in walk:
                self.cut.add(self.least(walk[walk.index(key) :]))

    def least(self, keys: Sequence[Any]) -> Any:
        return min(keys, key=lambda each: order_of(self.nodes[each]["_id"]), default=None)


def climb(tree: Tree, documents: Sequence[Raw]) -> Plan[Climb]:
    """Read all that is above some nodes, level by level, all of them together."""
    known = Climb(tree)
    level = known.add(documents)
    while level:
        condition = _above(known, level)
        nodes = (
            (yield from find(tree.collection, tree.living(condition), tree.projection)) if condition else []
        )
        higher = known.add(nodes)
        if tree.truth == "children":
            _claim(known, nodes, set(level))
        for key in level:
            parent = _parent(known, key)
            known.parents[key] = parent if parent in known.nodes else None
        level = higher
    known.cut_cycles()
    return known


def _above(known: Climb, keys: Sequence[Any]) -> Raw | None:
    """The condition that the parents of nodes meet which are not known yet; None if all are."""
    tree = known.tree
    nodes = [known.nodes[key] for key in keys]
    if tree.truth == "children":
        return {tree.roles["children"]: {"$in": [node["_id"] for node in nodes]}}
    if tree.truth == "parent":
        parents = {
            freeze(parent): parent for node in nodes if (parent := tree.get(node, "parent")) is not None
        }
        missing = [parent for key, parent in parents.items() if key not in known.nodes]
        return {"_id": {"$in": missing}} if missing else None
    above = {path_above(tree.get(node, "path") or "") for node in nodes} - {None}
    paths = sorted(str(path) for path in above if path not in known.by_path)
    return {tree.roles["path"]: {"$in": paths}} if paths else None


def _claim(known: Climb, nodes: Sequence[Raw], keys: set[Any]) -> None:
    """Note which of the nodes list some of these."""
    for node in nodes:
        for child in {freeze(each) for each in known.tree.listed_children(node)} & keys:
            known.claims.setdefault(child, []).append(freeze(node["_id"]))


def _parent(known: Climb, key: Any) -> Any:
    """The frozen id of a node's parent, by the truth."""
    tree, node = known.tree, known.nodes[key]
    if tree.truth == "parent":
        stated = tree.get(node, "parent")
        return None if stated is None else freeze(stated)
    if tree.truth == "path":
        return known.by_path.get(path_above(tree.get(node, "path") or "") or "")
    return known.least(known.claims.get(key, []))


# -- what should be --------------------------------------------------------------------------------


def expected(tree: Tree, documents: Sequence[Raw]) -> Plan[list[Raw]]:
    """Per node the value that each of the tree's fields should have, by stored path."""
    known = yield from climb(tree, documents)
    lists = yield from _expected_lists(known, documents)
    rights: list[Raw] = []
    for document in documents:
        key = freeze(document["_id"])
        values: Raw = {}
        if tree.parent is not None:
            parent = known.parent(key)
            values[tree.parent] = None if parent is None else known.nodes[parent]["_id"]
        if tree.ancestors is not None:
            values[tree.ancestors] = [known.nodes[each]["_id"] for each in known.above(key)]
        if tree.path is not None and tree.segment is not None:
            path = known.path(key)
            values[tree.path] = tree.get(document, "path") if path is None else path
            try:
                tree.segment_of(document)
            except UsageError:
                # Only a person can say what it should be called.
                values[tree.segment] = None
        if tree.children is not None:
            values[tree.children] = lists[key]
        rights.append(values)
    return rights


def _expected_lists(known: Climb, documents: Sequence[Raw]) -> Plan[dict[Any, list[Any]]]:
    """The child list that each node should have."""
    tree = known.tree
    if tree.children is None:
        return {}
    if tree.truth == "children":
        listed = [child for document in documents for child in tree.listed_children(document)]
        children = yield from find(tree.collection, tree.living({"_id": {"$in": listed}}), tree.projection)
        below = yield from climb(tree, children)
        rightful = {key: below.parent(key) for key in below.nodes}
        unlisted = []
    else:
        condition = {tree.roles["parent"]: {"$in": [document["_id"] for document in documents]}}
        children = yield from find(
            tree.collection, tree.living(condition), tree.projection, sort=[("_id", 1)]
        )
        rightful = {freeze(each["_id"]): freeze(tree.get(each, "parent")) for each in children}
        rightful = {key: parent for key, parent in rightful.items() if key not in known.cut}
        unlisted = [each["_id"] for each in children]
    lists: dict[Any, list[Any]] = {}
    for document in documents:
        own = freeze(document["_id"])
        listed = [*tree.listed_children(document), *unlisted]
        each_once = {freeze(child): child for child in reversed(listed)}
        lists[own] = [child for key, child in reversed(each_once.items()) if rightful.get(key) == own]
    return lists


def _differences(document: Raw, values: Raw) -> Iterator[tuple[str, Any, Any]]:
    """Path, stored and right value of each field that is not as it should be."""
    for path, right in values.items():
        stored = value_at(document, path)
        if isinstance(stored, list) and isinstance(right, list):
            # Ids: not equal just because their numbers are.
            equal = [freeze(each) for each in stored] == [freeze(each) for each in right]
        else:
            equal = same(stored, right)
        if not equal:
            yield path, stored, right


def examine(tree: Tree, documents: Sequence[Raw]) -> Plan[list[Finding]]:
    """The findings in these nodes."""
    rights = yield from expected(tree, documents)
    return [
        Finding(tree.pattern_of(path), tree.entry.model.__name__, document["_id"], path, stored, right)
        for document, values in zip(documents, rights, strict=True)
        for path, stored, right in _differences(document, values)
    ]


# -- repair ----------------------------------------------------------------------------------------


def mend_tree(graph: Graph, server: Capabilities, tree: Tree, keys: Sequence[Any]) -> Plan[list[Any]]:
    """Give nodes what the truth says; the ids of those that changed."""

    def attempt(some: Sequence[Any]) -> Plan[list[Any]]:
        """Mend, but not during a large move: paths alone do not show that it is half done."""
        for _ in range(TREE_ATTEMPTS_MAX):
            mend = partial(_mend, graph, server, tree, some)
            try:
                # As one item, which is never cut: a second attempt has the tree to itself.
                return (yield from transact(attempting(mend, partial(state.lock_idle, tree), 1)))
            except state.TreeBusy:
                yield from finish(tree, graph, server)
        raise state.TreeBusy(tree)  # pragma: no cover

    # Two siblings with one segment, or a node that cannot be written, are for a person to decide.
    return (yield from salvage(tree.rules[0].place.label, tree.collection, keys, attempt))


def _mend(graph: Graph, server: Capabilities, tree: Tree, keys: Sequence[Any]) -> Plan[list[Any]]:
    documents = yield from find(tree.collection, tree.living({"_id": {"$in": list(keys)}}), tree.projection)
    rights = yield from expected(tree, documents)
    updates: list[tuple[Any, Raw]] = []
    renamed: list[Any] = []
    for document, values in zip(documents, rights, strict=True):
        wrong = {path: {"$literal": right} for path, _, right in _differences(document, values)}
        sets = {path: value for path, value in wrong.items() if path != tree.segment}
        if sets:
            updates.append((document["_id"], sets))
            if tree.path in sets and split(tree.get(document, "path")) is not None:
                renamed.append(document["_id"])
    if not updates:
        # Right nodes are only read, so that a run after an interrupted one soon comes to where that one was.
        return []
    # A concurrent move would make stale what was derived here: this write conflicts with it.
    yield from state.lock_idle(tree)
    changes = Changes()
    if renamed:
        # Two nodes may have each other's path, which must be free first.
        yield from update_many(
            tree.collection, tree.living({"_id": {"$in": renamed}}), {"$set": {tree.roles["path"]: ""}}
        )
    yield from rewrite(tree, updates, changes)
    yield from propagate(graph, changes, copies_max=UNBOUNDED)
    return [key for key, _ in updates]
