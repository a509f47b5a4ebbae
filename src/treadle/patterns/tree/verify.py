"""Verify and repair of a tree: cycles, orphans, wrong arrays and paths, lists that disagree.

Everything is derived from the links: the parents' ids, or the child lists, or
the paths where there is nothing else. An orphan should be a root, and so should
the node with the least id of a cycle. Nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from treadle.engine.copies import UNBOUNDED
from treadle.engine.propagate import propagate
from treadle.engine.salvage import attempting, salvage
from treadle.graph.changes import Changes
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Finding
from treadle.patterns.tree.paths import split
from treadle.patterns.tree.representations import Climb
from treadle.patterns.tree.tree import Tree
from treadle.patterns.tree.writes import lock, update_each
from treadle.plan import Plan, Raw, transact, update_many
from treadle.query.comparison import same
from treadle.query.keys import freeze
from treadle.query.paths import value_at


def expected(tree: Tree, nodes: Sequence[Raw]) -> Plan[list[Raw]]:
    """Return what each of these nodes should hold, by stored path.

    Follows all of them up to their roots together, so that a page costs about
    as many reads as the tree is deep.
    """
    representation = tree.representation
    climb = Climb(representation)
    level = climb.add(nodes)
    if listed := [child for node in nodes for child in representation.listed(node)]:
        # Another list may hold a child as well.
        level += climb.add((yield from tree.find({"_id": {"$in": listed}}, tree.projection)))
    while level:
        condition = representation.parents(level, climb)
        level = [] if condition is None else climb.add((yield from tree.find(condition, tree.projection)))
    climb.cut_cycles()
    return [representation.expected(node, climb) for node in nodes]


def _differences(node: Raw, values: Raw) -> Iterator[tuple[str, Any, Any]]:
    """Give the path, the stored value and the expected one of each field that is wrong."""
    for path, value in values.items():
        stored = value_at(node, path)
        if isinstance(stored, list) and isinstance(value, list):
            # Ids are not equal just because their numbers are.
            is_right = [freeze(each) for each in stored] == [freeze(each) for each in value]
        else:
            is_right = same(stored, value)
        if not is_right:
            yield path, stored, value


def findings(tree: Tree, pattern: str, nodes: Sequence[Raw]) -> Plan[list[Finding]]:
    """Return the findings in these nodes."""
    return [
        Finding(pattern, tree.name, node["_id"], path, stored, value)
        for node, values in zip(nodes, (yield from expected(tree, nodes)), strict=True)
        for path, stored, value in _differences(node, values)
    ]


def repair(graph: Graph, tree: Tree, label: str, keys: Sequence[Any]) -> Plan[list[Any]]:
    """Store what nodes should hold. Returns the ids of those that changed."""

    def attempt(some: Sequence[Any]) -> Plan[list[Any]]:
        # As one item, which is never divided: a second attempt has the tree to itself.
        return (yield from transact(attempting(partial(_repair, graph, tree, some), partial(lock, tree), 1)))

    # Two siblings with one segment, or a node that cannot be written, are for a person to decide.
    return (yield from salvage(label, tree.collection, keys, attempt))


def _repair(graph: Graph, tree: Tree, keys: Sequence[Any]) -> Plan[list[Any]]:
    nodes = yield from tree.find({"_id": {"$in": list(keys)}}, tree.projection)
    updates = [
        (node, sets)
        for node, values in zip(nodes, (yield from expected(tree, nodes)), strict=True)
        if (sets := _repairs(tree, node, values))
    ]
    if not updates:
        # Correct nodes are only read, so that a repair that was interrupted soon continues.
        return []
    # A concurrent move would make what was derived here outdated: this write conflicts with it.
    yield from lock(tree)
    yield from _free_paths(tree, [node for node, sets in updates if tree.representation.path in sets])
    changes = Changes()
    yield from update_each(tree, [(node["_id"], sets) for node, sets in updates], changes)
    yield from propagate(graph, changes, copies_max=UNBOUNDED)
    return [node["_id"] for node, _ in updates]


def _repairs(tree: Tree, node: Raw, values: Raw) -> Raw:
    """Return what to set in a node; a segment is for a person to correct."""
    wrong = {path: {"$literal": value} for path, _, value in _differences(node, values)}
    return {path: value for path, value in wrong.items() if path != tree.representation.segment}


def _free_paths(tree: Tree, nodes: Sequence[Raw]) -> Plan[None]:
    """Take the paths of nodes away, because two nodes may have each other's."""
    field = tree.representation.path
    pathed = [node["_id"] for node in nodes if field is not None and split(value_at(node, field)) is not None]
    if pathed and field is not None:
        yield from update_many(tree.collection, {"_id": {"$in": pathed}}, {"$set": {field: ""}})
