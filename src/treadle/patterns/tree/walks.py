"""Reading a subtree in its order: walks, leaves, and the subtree as one structure.

The ids are read first, with what says whose child a node is; then the nodes
themselves, batch by batch in their order. So a walk holds the ids of its
subtree in memory and one batch of its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from pymongo.errors import OperationFailure

from treadle.errors import DataError, UsageError
from treadle.graph.calls import Order
from treadle.graph.outcomes import Nested
from treadle.model.document import Document
from treadle.patterns.tree import reads
from treadle.patterns.tree.fields import Tree, node_missing
from treadle.patterns.tree.segments import path_above
from treadle.plan import Plan, Raw, Read, by_id, find, find_one
from treadle.query.keys import freeze, same_key
from treadle.query.paths import value_at
from treadle.query.safety import Sort, sort_keys

D = TypeVar("D", bound=Document)


class Skeleton:
    """The ids of a subtree, or of a whole forest, and whose child each is."""

    def __init__(self, tops: Sequence[Any]) -> None:
        self.tops = tops
        # By the frozen id of their parent, siblings in their order.
        self.children: dict[Any, list[Any]] = {}

    def add(self, parent: Any, key: Any) -> None:
        self.children.setdefault(freeze(parent), []).append(key)

    def below(self, key: Any) -> list[Any]:
        return self.children.get(freeze(key), [])

    def walk(self, order: Order = "depth", max_depth: int | None = None) -> list[Any]:
        """The ids in the order of a walk; each once, also where raw writes have made a cycle."""
        keys: list[Any] = []
        seen: set[Any] = set()
        pending = [(key, 0) for key in reversed(self.tops)]
        while pending:
            level: list[tuple[Any, int]] = []
            while pending:
                key, depth = pending.pop()
                if freeze(key) in seen:
                    continue
                seen.add(freeze(key))
                keys.append(key)
                if max_depth is None or depth < max_depth:
                    further = [(child, depth + 1) for child in self.below(key)]
                    if order == "depth":
                        pending += reversed(further)
                    else:
                        level += further
            pending = level[::-1]
        return keys


def skeleton(tree: Tree, key: Any, max_depth: int | None, sort: Sort | None) -> Plan[Skeleton]:
    """What is below a node, so many levels deep at least; without a key, the whole forest."""
    if key is None:
        tops = yield from reads.keys_of((yield from reads.roots(tree, sort)))
    elif (yield from find_one(tree.collection, tree.living(by_id(key)), {"_id": 1})) is None:
        raise node_missing(tree, key)
    else:
        tops = [key]
    found = Skeleton(tops)
    if "ancestors" in tree.lead or "path" in tree.lead:
        yield from _at_once(tree, key, max_depth, sort, found)
    else:
        yield from _by_levels(tree, max_depth, sort, found)
    return found


def _at_once(tree: Tree, key: Any, max_depth: int | None, sort: Sort | None, found: Skeleton) -> Plan[None]:
    """By the arrays or paths of all nodes below: one query."""
    condition: Raw = {}
    if key is not None:
        stream = yield from reads.descendants(tree, key, max_depth)
        if isinstance(stream, list):
            return
        assert isinstance(stream, Read)
        condition = stream.arguments[0]
    rows = yield from _rows(tree, condition, sort)
    if "parent" in tree.lead:
        for row in rows:
            found.add(tree.get(row, "parent"), row["_id"])
        return
    tops = yield from find(tree.collection, tree.living({"_id": {"$in": found.tops}}), tree.projection)
    by_path = {(_apart(tree, row), tree.get(row, "path")): row["_id"] for row in [*tops, *rows]}
    for row in rows:
        above = (_apart(tree, row), path_above(tree.get(row, "path") or ""))
        if above in by_path:
            found.add(by_path[above], row["_id"])


def _apart(tree: Tree, row: Raw) -> Any:
    """What tells the tree of a node from others, in which paths may be the same."""
    return None if tree.within is None else freeze(value_at(row, tree.within))


def _by_levels(tree: Tree, max_depth: int | None, sort: Sort | None, found: Skeleton) -> Plan[None]:
    """By the parents, or the child lists, of one level after another."""
    level, seen, depth = list(found.tops), set(map(freeze, found.tops)), 0
    most = tree.entry.limits.tree_batch
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
                    found.add(parent, key)
                    lower.append(key)
        level = lower
        depth += 1


def _listed(tree: Tree, batch: Sequence[Any], sort: Sort | None) -> Plan[list[tuple[Any, Any]]]:
    """The children that these nodes list, each with its parent; in the order of the lists unless sorted."""
    parents = yield from find(tree.collection, tree.living({"_id": {"$in": list(batch)}}), tree.projection)
    pairs = [(parent["_id"], key) for parent in parents for key in tree.get(parent, "children") or []]
    if sort is None or not pairs:
        return pairs
    above = {freeze(key): parent for parent, key in pairs}
    rows = yield from _rows(tree, {"_id": {"$in": [key for _, key in pairs]}}, sort)
    return [(above[freeze(row["_id"])], row["_id"]) for row in rows]


def _rows(tree: Tree, condition: Raw, sort: Sort | None) -> Plan[list[Raw]]:
    apart = [] if tree.within is None else [tree.within]
    projection = dict.fromkeys(["_id", *(path.stored for path in tree.lead.values()), *apart], 1)
    options = {"sort": sort_keys(sort or tree.sort, tree.entry.codec), "allow_disk_use": True}
    chosen = tree.living(condition)
    rows: list[Raw] = yield Read(tree.collection, "find", (chosen, projection), options)
    return rows


# -- the calls -----------------------------------------------------------------------------------


class Ordered(Generic[D]):
    """Nodes in the order of their ids in a list, streamed; those that were removed since are left out."""

    def __init__(self, tree: Tree, keys: Plan[list[Any]]) -> None:
        self._tree = tree
        self._plan = keys
        # A whole batch is one page, so that it can be put in its order.
        self.page = tree.entry.limits.find_page
        self._batch: list[Any] = []
        self._rest: list[Any] = []

    def first(self) -> Plan[Read | None]:
        self._rest = yield from self._plan
        return self.next()

    def instead(self, error: OperationFailure) -> Read:
        raise error

    def take(self, raws: list[Raw]) -> Iterable[D]:
        by_key = {freeze(raw["_id"]): raw for raw in raws}
        present = [by_key[freeze(key)] for key in self._batch if freeze(key) in by_key]
        return map(self._tree.entry.codec.load, present)

    def next(self) -> Read | None:
        self._batch, self._rest = self._rest[: self.page], self._rest[self.page :]
        if not self._batch:
            return None
        chosen = self._tree.living({"_id": {"$in": self._batch}})
        return Read(self._tree.collection, "find", (chosen,))


def walk(tree: Tree, key: Any, order: Order, max_depth: int | None, sort: Sort | None) -> Plan[list[Any]]:
    """The ids of a node and all below it, in the order of a walk."""
    return (yield from skeleton(tree, key, max_depth, sort)).walk(order, max_depth)


def leaves(tree: Tree, key: Any, sort: Sort | None) -> Plan[list[Any]]:
    """The ids of the nodes at or below one that have no children."""
    found = yield from skeleton(tree, key, None, sort)
    return [each for each in found.walk() if not found.below(each)]


def check_order(order: Any) -> None:
    if order not in ("depth", "breadth"):
        raise UsageError(f"walk() has order={order!r}; it takes 'depth' or 'breadth'", code="filter-invalid")


def siblings(tree: Tree, key: Any, sort: Sort | None) -> Plan[reads.Stream]:
    """The other children of a node's parent; of a root, the other roots."""
    node = yield from find_one(tree.collection, tree.living(by_id(key)), tree.projection)
    if node is None:
        raise node_missing(tree, key)
    tree = tree.of(node)
    parent = yield from reads.parent_of(tree, node)
    stream = yield from reads.roots(tree, sort) if parent is None else reads.children(tree, parent, sort)
    if not isinstance(stream, Read):
        return stream
    return narrowed(stream, {"_id": {"$ne": key}})


def narrowed(stream: Read, condition: Raw, limit: int = 0) -> Read:
    """A read of those nodes only that meet one condition more."""
    if stream.method == "find":
        (chosen,) = stream.arguments
        options = {**stream.options, "limit": limit}
        return Read(stream.collection, "find", ({"$and": [chosen, condition]},), options)
    limited = [{"$limit": limit}] if limit else []
    stages = [*stream.arguments[0], {"$match": condition}, *limited]
    return Read(stream.collection, stream.method, (stages,), stream.options)


def common_ancestor(tree: Tree, keys: Sequence[Any]) -> Plan[Raw | None]:
    """The lowest node that each of these is at or below; None where they have none in common."""
    if not keys:
        raise UsageError("common_ancestor() takes the ids of one or more nodes", code="filter-invalid")
    common: list[Raw] = []
    for number, key in enumerate(keys):
        path = yield from reads.path(tree, key)
        if number:
            pairs = zip(common, path, strict=False)
            alike = [same_key(one["_id"], other["_id"]) for one, other in pairs]
            path = path[: (*alike, False).index(False)]
        common = path
    return common[-1] if common else None


def nested(
    tree: Tree, key: Any, max_depth: int | None, sort: Sort | None, load: Callable[[Raw], D]
) -> Plan[Nested[D]]:
    """A node and all below it, as one structure."""
    found = yield from skeleton(tree, key, max_depth, sort)
    keys = found.walk(max_depth=max_depth)
    most = tree.entry.limits.tree_nested_max
    if len(keys) > most:
        raise DataError(
            f"the subtree has {len(keys):,} nodes, more than the {most:,} that nested() gives at once; give "
            "it max_depth=, stream walk(), or raise Limits.tree_nested_max",
            code="tree-too-large",
        )
    nodes: dict[Any, Nested[D]] = {}
    batch = tree.entry.limits.find_page
    for start in range(0, len(keys), batch):
        raws = yield from reads.nodes_by_key(tree, keys[start : start + batch])
        nodes |= {frozen: Nested(load(raw)) for frozen, raw in raws.items()}
    if freeze(key) not in nodes:
        raise node_missing(tree, key)
    placed = {freeze(key)}
    for each in keys:
        for child in map(freeze, found.below(each)):
            if freeze(each) in nodes and child in nodes and child not in placed:
                placed.add(child)
                nodes[freeze(each)].children.append(nodes[child])
    return nodes[freeze(key)]
