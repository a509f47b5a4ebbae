"""Reading a tree: the same questions, asked in the way of each representation.

A plan here ends in a command whose cursor streams the nodes, or in the few
nodes themselves; nothing holds more than one chain of ancestors in memory.
The representation that was declared first is the one that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pymongo import ASCENDING
from pymongo.errors import OperationFailure

from treadle.errors import DataError, UsageError
from treadle.graph.gather import freeze
from treadle.patterns.tree.fields import Tree, node_missing, not_rebuilt
from treadle.patterns.tree.segments import at_most, below, prefixes, split
from treadle.plan import Plan, Raw, Read, aggregate, by_id, count_documents, find, find_one
from treadle.plan.server_errors import GRAPH_LOOKUP_TOO_LARGE
from treadle.query.safety import Sort, sort_keys

Stream: TypeAlias = "Read | Levels | list[Raw]"
NODE = "__treadle_node"
DEPTH = "__treadle_depth"


@dataclass(frozen=True, slots=True)
class Levels:
    """Descendants: the first levels by `$graphLookup`, in one question, the others batch by batch.

    `$graphLookup` holds all that it finds in memory, up to 100 MB, and takes
    the longer for each node the more they are.
    """

    tree: Tree
    key: Any
    read: Read
    max_depth: int | None = None


class Pending:
    """The nodes whose children are still to be asked for: the deepest first, so that they stay few."""

    def __init__(self, stream: Levels) -> None:
        self._stream = stream
        self._limits = stream.tree.entry.limits
        self._by_parent = "parent" in stream.tree.lead
        # Per level what its nodes are found by: ids of their parents, or their own ids.
        self._levels: list[list[Any]] = []
        # The level of the nodes that are being read.
        self._depth = 0

    def add_first(self, raws: Sequence[Raw]) -> None:
        """Note what is below the deepest of the nodes that `$graphLookup` found."""
        self._depth = self._limits.tree_graph_levels
        self.add([raw for raw in raws if raw.pop(DEPTH) == self._depth - 1])

    def add(self, raws: Sequence[Raw]) -> None:
        """Note what is below nodes of the level that is being read."""
        if self._depth == self._stream.max_depth:
            return
        while len(self._levels) <= self._depth:
            self._levels.append([])
        level, key = self._levels[self._depth], self._stream.key
        for raw in raws:
            further = [raw["_id"]] if self._by_parent else self._stream.tree.get(raw, "children") or []
            # A circle that raw writes made may lead back to where this began.
            level.extend(each for each in further if each != key)

    def anew(self) -> Read:
        """The first question, where `$graphLookup` had not enough memory."""
        self._depth = 1
        return below_batch(self._stream.tree, [self._stream.key])

    def next(self) -> Read | None:
        """The next question; None at the end."""
        while self._levels and not self._levels[-1]:
            self._levels.pop()
        if not self._levels:
            return None
        last, most = self._levels[-1], self._limits.tree_batch
        batch, last[:] = last[-most:], last[:-most]
        self._depth = len(self._levels)
        if self._depth > self._limits.tree_depth_max:
            raise endless(self._stream.tree)
        if self._by_parent:
            return below_batch(self._stream.tree, batch)
        return Read(self._stream.tree.entry.collection, "find", ({"_id": {"$in": batch}},))


def endless(tree: Tree) -> DataError:
    name = tree.entry.model.__name__
    return DataError(
        f"nodes of {name} are each other's ancestors, which some other writer made them; run "
        f"store.repair({name})",
        code="tree-cycle",
    )


def _find(tree: Tree, condition: Raw, sort: Sort | None, limit: int | None) -> Read:
    keys = sort_keys(sort, tree.entry.codec)
    path = tree.path if "path" in tree.lead and "parent" not in tree.lead else None
    if keys and path in condition and keys[0][0] != path:
        # A field that no node has, so that no index gives this order: the server would rather go through
        # the whole index on _id than sort the few nodes of a range.
        keys = [(NODE, ASCENDING), *keys]
    options: Raw = {"sort": keys, "limit": limit or 0}
    if sort is not None:
        options["allow_disk_use"] = True
    return Read(tree.entry.collection, "find", (condition,), options)


def _aggregate(tree: Tree, pipeline: list[Raw], sort: Sort | None, limit: int | None) -> Read:
    keys = sort_keys(sort, tree.entry.codec)
    if keys:
        pipeline = [*pipeline, {"$sort": dict(keys)}]
    if limit:
        pipeline = [*pipeline, {"$limit": limit}]
    return Read(tree.entry.collection, "aggregate", (pipeline,), {"allowDiskUse": True})


def roots(tree: Tree, sort: Sort | None = None, limit: int | None = None) -> Plan[Stream]:
    """The nodes without a parent; by id unless sorted otherwise."""
    lead = tree.lead
    if "parent" in lead:
        return _find(tree, {lead["parent"].stored: None}, sort or "_id", limit)
    if "path" in lead:
        return _find(tree, {lead["path"].stored: {"$gt": "", **at_most(1)}}, sort or "_id", limit)
    listed = {
        "from": tree.entry.collection,
        "localField": "_id",
        "foreignField": lead["children"].stored,
        "as": NODE,
    }
    stages: list[Raw] = [
        {"$lookup": listed},
        {"$match": {NODE: []}},
        {"$unset": NODE},
    ]
    return _aggregate(tree, stages, sort or "_id", limit)
    yield  # pragma: no cover (a plan that needs no read of its own)


def children(tree: Tree, key: Any, sort: Sort | None = None, limit: int | None = None) -> Plan[Stream]:
    """The nodes right below one; by id unless sorted otherwise, child lists in their own order."""
    lead = tree.lead
    if "parent" in lead:
        return _find(tree, {lead["parent"].stored: {"$eq": key}}, sort or "_id", limit)
    if "path" in lead:
        path = tree.get((yield from find_one(tree.entry.collection, by_id(key), tree.projection)), "path")
        if split(path) is None:
            return []
        return _find(tree, {lead["path"].stored: _within(path, 1)}, sort or "_id", limit)
    stored = lead["children"].stored
    looked_up = {"from": tree.entry.collection, "localField": stored, "foreignField": "_id", "as": NODE}
    stages: list[Raw] = [
        {"$match": by_id(key)},
        {"$project": {stored: 1}},
        {"$unwind": f"${stored}"},
        {"$lookup": looked_up},
        {"$unwind": f"${NODE}"},
        {"$replaceRoot": {"newRoot": f"${NODE}"}},
    ]
    return _aggregate(tree, stages, sort, limit)


def too_large(tree: Tree) -> DataError:
    return DataError(
        f"the subtree is more than $graphLookup sorts in its 100 MB; leave out sort=, "
        f"or give {tree.entry.model.__name__} an AncestorArray",
        code="tree-too-large",
    )


def _within(path: str, depth: int | None) -> Raw:
    """The condition on a path below another, so many levels deep at most."""
    if depth is None:
        return below(path)
    return {**below(path), **at_most(len(split(path) or []) + depth)}


def descendants(
    tree: Tree, key: Any, max_depth: int | None = None, sort: Sort | None = None, limit: int | None = None
) -> Plan[Stream]:
    """All nodes below one, in no particular order unless sorted."""
    check_depth(max_depth)
    if max_depth == 0:
        return []
    if max_depth == 1:
        return (yield from children(tree, key, sort, limit))
    lead = tree.lead
    if "ancestors" in lead:
        return _find(tree, _below_in_array(lead["ancestors"].stored, key, max_depth), sort, limit)
    if "path" in lead:
        path = tree.get((yield from find_one(tree.entry.collection, by_id(key), tree.projection)), "path")
        if split(path) is None:
            return []
        return _find(tree, {lead["path"].stored: _within(path, max_depth)}, sort, limit)
    if sort or limit:
        return _graph(tree, key, max_depth, sort, limit)
    most = tree.entry.limits.tree_graph_levels
    levels = most if max_depth is None else min(max_depth, most)
    return Levels(tree, key, _graph(tree, key, levels, depth_field=DEPTH), max_depth)


def _graph(
    tree: Tree,
    key: Any,
    max_depth: int | None,
    sort: Sort | None = None,
    limit: int | None = None,
    depth_field: str | None = None,
) -> Read:
    """Everything below a node, so many levels deep at most, with one `$graphLookup`."""
    stages = _graph_below(tree, key, max_depth)
    if depth_field is not None:
        stages[-1]["$graphLookup"]["depthField"] = depth_field
    stages += [{"$unwind": f"${NODE}"}, {"$replaceRoot": {"newRoot": f"${NODE}"}}]
    return _aggregate(tree, stages, sort, limit)


def _below_in_array(stored: str, key: Any, max_depth: int | None) -> Raw:
    condition: Raw = {stored: {"$eq": key}}
    if max_depth is not None:
        since = {"$subtract": [{"$size": f"${stored}"}, {"$indexOfArray": [f"${stored}", {"$literal": key}]}]}
        condition["$expr"] = {"$lte": [since, max_depth]}
    return condition


def _graph_below(tree: Tree, key: Any, max_depth: int | None = None) -> list[Raw]:
    lead = tree.lead
    graph: Raw = {"from": tree.entry.collection, "as": NODE}
    if "parent" in lead:
        graph |= {
            "startWith": "$_id",
            "connectFromField": "_id",
            "connectToField": lead["parent"].stored,
        }
    else:
        stored = lead["children"].stored
        graph |= {"startWith": f"${stored}", "connectFromField": stored, "connectToField": "_id"}
    if max_depth is not None:
        graph["maxDepth"] = max_depth - 1
    return [
        {"$match": by_id(key)},
        {"$project": dict.fromkeys(_graph_fields(tree), 1)},
        {"$graphLookup": graph},
    ]


def _graph_fields(tree: Tree) -> list[str]:
    return ["_id", *(path.stored for path in tree.lead.values())]


def below_batch(tree: Tree, keys: Sequence[Any]) -> Read:
    """The children of many nodes at once."""
    lead = tree.lead
    if "parent" in lead:
        return Read(tree.entry.collection, "find", ({lead["parent"].stored: {"$in": list(keys)}},))
    stored = lead["children"].stored
    looked_up = {"from": tree.entry.collection, "localField": stored, "foreignField": "_id", "as": NODE}
    stages: list[Raw] = [
        {"$match": {"_id": {"$in": list(keys)}}},
        {"$project": {stored: 1}},
        {"$lookup": looked_up},
        {"$unwind": f"${NODE}"},
        {"$replaceRoot": {"newRoot": f"${NODE}"}},
    ]
    return Read(tree.entry.collection, "aggregate", (stages,), {"allowDiskUse": True})


def keys_below(
    tree: Tree, key: Any, max_depth: int | None = None, limit: int | None = None
) -> Plan[list[Any]]:
    """The ids of nodes below one, level by level; never more than a level's more than the limit."""
    keys: list[Any] = []
    level = [key]
    # Raw writes may have made circles, and this must come to an end all the same.
    seen = {freeze(key)}
    depth, most = 0, tree.entry.limits.tree_batch
    while level and (max_depth is None or depth < max_depth) and (limit is None or len(keys) < limit):
        batch: list[Any] = []
        for start in range(0, len(level), most):
            read = below_batch(tree, level[start : start + most])
            if read.method == "find":
                found = yield Read(
                    read.collection, "find", (*read.arguments, {"_id": 1}), {"limit": limit or 0}
                )
            else:
                stages = [
                    *read.arguments[0],
                    *([{"$limit": limit}] if limit else []),
                    {"$project": {"_id": 1}},
                ]
                found = yield Read(read.collection, "aggregate", (stages,), read.options)
            for each in found:
                if freeze(each["_id"]) not in seen:
                    seen.add(freeze(each["_id"]))
                    batch.append(each["_id"])
        keys += batch
        level = batch
        depth += 1
    return keys[:limit]


def check_depth(max_depth: Any) -> None:
    if max_depth is not None and (
        not isinstance(max_depth, int) or isinstance(max_depth, bool) or max_depth < 0
    ):
        raise UsageError(
            f"max_depth={max_depth!r} is not a whole number from 0; 1 means children", code="filter-invalid"
        )


# -- upwards ---------------------------------------------------------------------------------


def ancestors(tree: Tree, key: Any) -> Plan[list[Raw]]:
    """The nodes above one, root first."""
    return (yield from _upwards(tree, key))[:-1]


def path(tree: Tree, key: Any) -> Plan[list[Raw]]:
    """The nodes from the root down to one, which is the last."""
    return (yield from _upwards(tree, key))


def _upwards(tree: Tree, key: Any) -> Plan[list[Raw]]:
    lead = tree.lead
    if "ancestors" not in lead and "path" not in lead:
        return (yield from lineage(tree, key))
    node = yield from find_one(tree.entry.collection, by_id(key))
    if node is None:
        raise node_missing(tree, key)
    if "ancestors" in lead:
        above = tree.get(node, "ancestors")
        if above is None and tree.get(node, "parent") is not None:
            raise not_rebuilt(tree, key, "ancestors")
        if not above:
            return [node]
        found = yield from find(tree.entry.collection, {"_id": {"$in": above}})
        by_key = {freeze(each["_id"]): each for each in found}
        # One that was removed since is left out.
        return [*filter(None, (by_key.get(freeze(each)) for each in above)), node]
    stored = lead["path"].stored
    own = tree.get(node, "path")
    if split(own) is None:
        raise not_rebuilt(tree, key, "path")
    above = prefixes(own)
    if not above:
        return [node]
    # A path sorts right before those below it, so this is root first.
    return [*(yield from find(tree.entry.collection, {stored: {"$in": above}}, sort=[(stored, 1)])), node]


def lineage(tree: Tree, key: Any) -> Plan[list[Raw]]:
    """The node and all above it, root first, by what the tree's truth is."""
    if tree.truth == "path":
        return (yield from _upwards(tree, key))
    graph: Raw = {"from": tree.entry.collection, "as": NODE, "depthField": DEPTH}
    if tree.truth == "parent":
        parent = tree.parent
        graph |= {"startWith": f"${parent}", "connectFromField": parent, "connectToField": "_id"}
    else:
        graph |= {"startWith": "$_id", "connectFromField": "_id", "connectToField": tree.children}
    found = yield from aggregate(tree.entry.collection, [{"$match": by_id(key)}, {"$graphLookup": graph}])
    if not found:
        raise node_missing(tree, key)
    node = found[0]
    above = sorted(node.pop(NODE), key=lambda each: -each[DEPTH])
    for each in above:
        del each[DEPTH]
    return [*above, node]


def depth(tree: Tree, key: Any) -> Plan[int]:
    """How many nodes are above one; 0 for a root."""
    lead = tree.lead
    if "ancestors" not in lead and "path" not in lead:
        return len((yield from lineage(tree, key))) - 1
    node = yield from find_one(tree.entry.collection, by_id(key), tree.projection)
    if node is None:
        raise node_missing(tree, key)
    if "ancestors" in lead:
        above = tree.get(node, "ancestors")
        if above is None and tree.get(node, "parent") is not None:
            raise not_rebuilt(tree, key, "ancestors")
        return len(above or [])
    segments = split(tree.get(node, "path"))
    if segments is None:
        raise not_rebuilt(tree, key, "path")
    return len(segments) - 1


def count(tree: Tree, key: Any = None, max_depth: int | None = None) -> Plan[int]:
    """How many nodes are below one; of the whole forest without a key."""
    check_depth(max_depth)
    if key is None:
        return (yield from count_documents(tree.entry.collection, {}))
    stream = yield from descendants(tree, key, max_depth)
    if isinstance(stream, list):
        return len(stream)
    if isinstance(stream, Read) and stream.method == "find":
        return (yield from count_documents(stream.collection, stream.arguments[0]))
    graph = stream if isinstance(stream, Read) else _graph(tree, key, max_depth)
    try:
        rows = yield from aggregate(graph.collection, [*graph.arguments[0], {"$count": "n"}])
    except OperationFailure as error:
        if error.code != GRAPH_LOOKUP_TOO_LARGE:
            raise
        return len((yield from keys_below(tree, key, max_depth)))
    return int(rows[0]["n"]) if rows else 0


# -- for writers -----------------------------------------------------------------------------


def parent_of(tree: Tree, node: Raw) -> Plan[Any]:
    """The id of a node's parent, None for a root, by what the tree's truth is."""
    if tree.truth == "parent":
        return tree.get(node, "parent")
    if tree.truth == "path":
        above = prefixes(tree.get(node, "path") or "")
        if not above:
            return None
        found = yield from find_one(tree.entry.collection, {tree.roles["path"]: above[-1]}, {"_id": 1})
    else:
        found = yield from find_one(
            tree.entry.collection, {tree.roles["children"]: {"$eq": node["_id"]}}, {"_id": 1}
        )
    return None if found is None else found["_id"]


def outside_child(tree: Tree, nodes: Sequence[Raw]) -> Plan[Any]:
    """The id of a child of one of these nodes that is not among them; None if there is none."""
    keys = [node["_id"] for node in nodes]
    among = {freeze(key) for key in keys}
    if tree.truth == "children":
        listed = [child for node in nodes for child in tree.get(node, "children") or []]
        others = [child for child in listed if freeze(child) not in among]
        found = (yield from find_one(tree.entry.collection, {"_id": {"$in": others}})) if others else None
        return None if found is None else found["_id"]
    if tree.truth == "parent":
        condition: Raw = {tree.roles["parent"]: {"$in": keys}, "_id": {"$nin": keys}}
        found = yield from find_one(tree.entry.collection, condition, {"_id": 1})
        return None if found is None else found["_id"]
    paths = {tree.get(node, "path") for node in nodes}
    # What lies below a node also lies below the topmost of these that is above it.
    real = sorted(each for each in paths if split(each) is not None)
    tops = [own for own in real if not any(above in paths for above in prefixes(own))]
    most = tree.entry.limits.tree_ranges_batch
    for start in range(0, len(tops), most):
        ranges = [{tree.roles["path"]: below(own)} for own in tops[start : start + most]]
        nodes_below = yield from find(tree.entry.collection, {"$or": ranges}, {"_id": 1}, limit=len(keys) + 1)
        for node in nodes_below:
            if freeze(node["_id"]) not in among:
                return node["_id"]
    return None
