"""Reading a subtree as one nested structure.

The ids are read first, with what says whose child a node is; then the nodes
themselves, batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from treadle.errors import DataError
from treadle.graph.outcomes import Nested
from treadle.model.document import Document
from treadle.patterns.tree import reads
from treadle.patterns.tree.fields import Tree, node_missing
from treadle.patterns.tree.reads import TREE_BATCH
from treadle.patterns.tree.segments import path_above
from treadle.plan import Plan, Raw, Read, by_id, find, find_one
from treadle.query.filters import Sort, sort_keys
from treadle.query.keys import freeze

# Nodes that nested() gives at once.
TREE_NESTED_MAX = 100_000

D = TypeVar("D", bound=Document)


class Skeleton:
    """The ids of a subtree, and whose child each is."""

    def __init__(self, top: Any) -> None:
        self.top = top
        # By the frozen id of their parent, siblings in their order.
        self._children: dict[Any, list[Any]] = {}

    def add(self, parent: Any, key: Any) -> None:
        self._children.setdefault(freeze(parent), []).append(key)

    def links(self) -> list[tuple[Any, Any]]:
        """Each parent with each of its children, top down; each child once, also where there is a cycle."""
        links: list[tuple[Any, Any]] = []
        keys, seen = [self.top], {freeze(self.top)}
        for key in keys:  # grows during the loop
            for child in self._children.get(freeze(key), []):
                if freeze(child) not in seen:
                    seen.add(freeze(child))
                    keys.append(child)
                    links.append((key, child))
        return links


def nested(
    tree: Tree, key: Any, max_depth: int | None, sort: Sort | None, load: Callable[[Raw], D]
) -> Plan[Nested[D]]:
    """A node and all below it, as one structure."""
    links = (yield from _skeleton(tree, key, max_depth, sort)).links()
    keys = [key, *(child for _, child in links)]
    most = TREE_NESTED_MAX
    if len(keys) > most:
        raise DataError(
            f"the subtree has {len(keys):,} nodes, more than the {most:,} that nested() gives at once; give "
            "it max_depth=, or stream descendants()",
            code="tree-too-large",
        )
    nodes: dict[Any, Nested[D]] = {}
    batch = tree.entry.limits.find_page
    for start in range(0, len(keys), batch):
        raws = yield from reads.nodes_by_key(tree, keys[start : start + batch])
        nodes |= {frozen: Nested(load(raw)) for frozen, raw in raws.items()}
    if freeze(key) not in nodes:
        raise node_missing(tree, key)
    for parent, child in links:
        # One that was removed since its id was read is left out.
        if freeze(parent) in nodes and freeze(child) in nodes:
            nodes[freeze(parent)].children.append(nodes[freeze(child)])
    return nodes[freeze(key)]


def _skeleton(tree: Tree, key: Any, max_depth: int | None, sort: Sort | None) -> Plan[Skeleton]:
    """What is below a node, so many levels deep at most."""
    top = yield from find_one(tree.collection, tree.living(by_id(key)), tree.projection)
    if top is None:
        raise node_missing(tree, key)
    skeleton = Skeleton(key)
    if "ancestors" in tree.lead or "path" in tree.lead:
        yield from _at_once(tree, top, max_depth, sort, skeleton)
    else:
        yield from _by_levels(tree, max_depth, sort, skeleton)
    return skeleton


def _at_once(tree: Tree, top: Raw, max_depth: int | None, sort: Sort | None, known: Skeleton) -> Plan[None]:
    """By the arrays or paths of all nodes below: one query."""
    stream = yield from reads.descendants(tree, top["_id"], max_depth)
    if isinstance(stream, list):
        return
    assert isinstance(stream, Read)
    rows = yield from _rows(tree, stream.arguments[0], sort)
    if "parent" in tree.lead:
        for row in rows:
            known.add(tree.get(row, "parent"), row["_id"])
        return
    by_path = {tree.get(row, "path"): row["_id"] for row in [top, *rows]}
    for row in rows:
        above = path_above(tree.get(row, "path") or "")
        if above in by_path:
            known.add(by_path[above], row["_id"])


def _by_levels(tree: Tree, max_depth: int | None, sort: Sort | None, known: Skeleton) -> Plan[None]:
    """By the parents, or the child lists, of one level after another."""
    level, seen, depth = [known.top], {freeze(known.top)}, 0
    most = TREE_BATCH
    while level and (max_depth is None or depth < max_depth):
        lower: list[Any] = []
        for start in range(0, len(level), most):
            batch = level[start : start + most]
            pairs = (
                [
                    (tree.get(row, "parent"), row["_id"])
                    for row in (yield from _rows(tree, {tree.roles["parent"]: {"$in": batch}}, sort))
                ]
                if "parent" in tree.lead
                else (yield from _listed(tree, batch, sort))
            )
            for parent, key in pairs:
                if freeze(key) not in seen:
                    seen.add(freeze(key))
                    known.add(parent, key)
                    lower.append(key)
        level = lower
        depth += 1


def _listed(tree: Tree, batch: Sequence[Any], sort: Sort | None) -> Plan[list[tuple[Any, Any]]]:
    """The children that these nodes list, each with its parent; in the order of the lists unless sorted."""
    parents = yield from find(tree.collection, tree.living({"_id": {"$in": list(batch)}}), tree.projection)
    pairs = [(parent["_id"], key) for parent in parents for key in tree.listed_children(parent)]
    if sort is None or not pairs:
        return pairs
    above = {freeze(key): parent for parent, key in pairs}
    rows = yield from _rows(tree, {"_id": {"$in": [key for _, key in pairs]}}, sort)
    return [(above[freeze(row["_id"])], row["_id"]) for row in rows]


def _rows(tree: Tree, condition: Raw, sort: Sort | None) -> Plan[list[Raw]]:
    projection = dict.fromkeys(["_id", *(path.stored for path in tree.lead.values())], 1)
    options = {"sort": sort_keys(sort or tree.sort, tree.entry.paths.fields), "allow_disk_use": True}
    chosen = tree.living(condition)
    rows: list[Raw] = yield Read(tree.collection, "find", (chosen, projection), options)
    return rows
