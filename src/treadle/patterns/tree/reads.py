"""Reading a tree: the same queries, in the way of each representation.

A plan here ends in a command whose cursor streams the nodes, or in the few
nodes themselves; nothing holds more than one chain of ancestors in memory.
The representation that was declared first is the one that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pymongo import ASCENDING
from pymongo.errors import OperationFailure

from treadle.errors import DataError, UsageError
from treadle.model.text import quote
from treadle.patterns.tree.fields import Tree, node_missing, not_rebuilt
from treadle.patterns.tree.segments import at_most, below, path_above, prefixes, split
from treadle.plan import Plan, Raw, Read, aggregate, by_id, count_documents, find, find_one
from treadle.plan.server_errors import GRAPH_LOOKUP_TOO_LARGE
from treadle.query.filters import Sort, sort_keys
from treadle.query.keys import freeze

# Nodes whose children are read at a time.
TREE_BATCH = 1_000
# Subtrees that are read at a time by their paths.
TREE_RANGES_BATCH = 100
# Levels that $graphLookup is asked for; deeper ones are read by batches.
TREE_GRAPH_LEVELS = 3
# Levels after which a tree is taken for a cycle.
TREE_DEPTH_MAX = 10_000

Stream: TypeAlias = "Read | Levels | list[Raw]"
NODE = "__treadle_node"
DEPTH = "__treadle_depth"
# Nodes of a level that one reply of the server holds; by itself it sends the first hundred alone.
REPLY_NODES = 1_000
# Nodes that a $lookup or a $graphLookup found, as documents of their own.
_UNWRAP: list[Raw] = [{"$unwind": f"${NODE}"}, {"$replaceRoot": {"newRoot": f"${NODE}"}}]


@dataclass(frozen=True)
class Levels:
    """Descendants: the first levels by one `$graphLookup`, the others batch by batch.

    `$graphLookup` holds all that it finds in memory, up to 100 MB, and gets
    slower per node the more there are.
    """

    tree: Tree
    key: Any
    read: Read
    max_depth: int | None = None


class Pending:
    """The nodes whose children are still to be read: the deepest first, so that they stay few."""

    def __init__(self, stream: Levels) -> None:
        self._stream = stream
        self._by_parent = "parent" in stream.tree.lead
        # Per level what its nodes are found by: ids of their parents, or their own ids.
        self._levels: list[list[Any]] = []
        # The level of the nodes that are being read.
        self._depth = 0

    def add_first(self, raws: Sequence[Raw]) -> None:
        """Note what is below the deepest of the nodes that `$graphLookup` found."""
        self._depth = TREE_GRAPH_LEVELS
        self.add([raw for raw in raws if raw.pop(DEPTH) == self._depth - 1])

    def add(self, raws: Sequence[Raw]) -> None:
        """Note what is below nodes of the level that is being read."""
        if self._depth == self._stream.max_depth:
            return
        while len(self._levels) <= self._depth:
            self._levels.append([])
        level, key = self._levels[self._depth], self._stream.key
        for raw in raws:
            further = [raw["_id"]] if self._by_parent else self._stream.tree.listed_children(raw)
            # A cycle that raw writes made may lead back to where this began.
            level.extend(each for each in further if each != key)

    def anew(self) -> Read:
        """The first query, where `$graphLookup` had not enough memory."""
        self._depth = 1
        return _in_few_replies(below_batch(self._stream.tree, [self._stream.key]))

    def next(self) -> Read | None:
        """The next query; None at the end."""
        while self._levels and not self._levels[-1]:
            self._levels.pop()
        if not self._levels:
            return None
        last, most = self._levels[-1], TREE_BATCH
        batch, last[:] = last[-most:], last[:-most]
        self._depth = len(self._levels)
        if self._depth > TREE_DEPTH_MAX:
            raise cycle_error(self._stream.tree)
        tree = self._stream.tree
        if self._by_parent:
            return _in_few_replies(below_batch(tree, batch))
        return _in_few_replies(Read(tree.collection, "find", (tree.living({"_id": {"$in": batch}}),)))


def too_large(tree: Tree) -> DataError:
    return DataError(
        f"the subtree is more than $graphLookup sorts in its 100 MB; leave out sort=, "
        f"or give {tree.entry.model.__name__} an AncestorArray",
        code="tree-too-large",
    )


def cycle_error(tree: Tree) -> DataError:
    name = tree.entry.model.__name__
    return DataError(
        f"nodes of {name} are each other's ancestors, because of a write that bypassed Treadle; run "
        f"store.repair({name})",
        code="tree-cycle",
    )


def _find(tree: Tree, condition: Raw, sort: Sort | None, limit: int | None) -> Read:
    keys = sort_keys(sort, tree.entry.paths.fields)
    path = tree.path if "path" in tree.lead and "parent" not in tree.lead else None
    if keys and path in condition and keys[0][0] != path:
        # A field that no node has, so that no index gives this order: the server would rather go through
        # the whole index on _id than sort the few nodes of a range.
        keys = [(NODE, ASCENDING), *keys]
    options: Raw = {"sort": keys, "limit": limit or 0}
    if sort is not None:
        options["allow_disk_use"] = True
    return Read(tree.collection, "find", (tree.living(condition),), options)


def _aggregate(tree: Tree, pipeline: list[Raw], sort: Sort | None, limit: int | None) -> Read:
    keys = sort_keys(sort, tree.entry.paths.fields)
    if keys:
        pipeline = [*pipeline, {"$sort": dict(keys)}]
    if limit:
        pipeline = [*pipeline, {"$limit": limit}]
    if among := tree.living({}):
        pipeline = [{"$match": among}, *pipeline]
    return Read(tree.collection, "aggregate", (pipeline,), {"allowDiskUse": True})


def roots(tree: Tree, sort: Sort | None = None, limit: int | None = None) -> Plan[Stream]:
    """The nodes without a parent; by id unless sorted otherwise."""
    lead = tree.lead
    if "parent" in lead:
        return _find(tree, {lead["parent"].stored: None}, sort or tree.sort, limit)
    if "path" in lead:
        return _find(tree, {lead["path"].stored: {"$gt": "", **at_most(1)}}, sort or tree.sort, limit)
    listed = {
        "from": tree.collection,
        "localField": "_id",
        "foreignField": lead["children"].stored,
        "as": NODE,
    }
    stages: list[Raw] = [{"$lookup": listed}, {"$match": {NODE: []}}, {"$unset": NODE}]
    return _aggregate(tree, stages, sort or tree.sort, limit)
    yield  # pragma: no cover (a plan that needs no read of its own)


def children(tree: Tree, key: Any, sort: Sort | None = None, limit: int | None = None) -> Plan[Stream]:
    """The nodes right below one; by id unless sorted otherwise, child lists in their own order."""
    lead = tree.lead
    if "parent" in lead:
        return _find(tree, {lead["parent"].stored: {"$eq": key}}, sort or tree.sort, limit)
    if "path" in lead:
        return (yield from _below_path(tree, key, 1, sort or tree.sort, limit))
    return _aggregate(tree, _listed(tree, [key], in_order=True), sort, limit)


def _below_path(
    tree: Tree, key: Any, max_depth: int | None, sort: Sort | None, limit: int | None
) -> Plan[Stream]:
    """The nodes in the range of a node's path, so many levels deep at most."""
    node = yield from find_one(tree.collection, tree.living(by_id(key)), tree.projection)
    own = tree.get(node, "path")
    segments = split(own)
    if node is None or segments is None:
        return []
    depth = {} if max_depth is None else at_most(len(segments) + max_depth)
    return _find(tree, {tree.roles["path"]: {**below(own), **depth}}, sort, limit)


def _listed(tree: Tree, keys: Sequence[Any], *, in_order: bool = False) -> list[Raw]:
    """The stages that give the children which these nodes list."""
    stored = tree.roles["children"]
    looked_up = {"from": tree.collection, "localField": stored, "foreignField": "_id", "as": NODE}
    return [
        {"$match": {"_id": {"$in": list(keys)}}},
        {"$project": {stored: 1}},
        *([{"$unwind": f"${stored}"}] if in_order else []),
        {"$lookup": looked_up},
        *_UNWRAP,
    ]


def below_batch(tree: Tree, keys: Sequence[Any]) -> Read:
    """The children of many nodes at once."""
    if "parent" in tree.lead:
        condition = tree.living({tree.roles["parent"]: {"$in": list(keys)}})
        return Read(tree.collection, "find", (condition,))
    return _aggregate(tree, _listed(tree, keys), None, None)


def descendants(
    tree: Tree, key: Any, max_depth: int | None = None, sort: Sort | None = None, limit: int | None = None
) -> Plan[Stream]:
    """All nodes below one, in no particular order unless sorted."""
    check_depth(max_depth)
    if max_depth == 0:
        return []
    if max_depth == 1:
        return (yield from children(tree, key, sort, limit))
    if "ancestors" in tree.lead:
        stored = tree.roles["ancestors"]
        condition: Raw = {stored: {"$eq": key}}
        if max_depth is not None:
            place = {"$indexOfArray": [f"${stored}", {"$literal": key}]}
            since = {"$subtract": [{"$size": f"${stored}"}, place]}
            condition["$expr"] = {"$lte": [since, max_depth]}
        return _find(tree, condition, sort, limit)
    if "path" in tree.lead:
        return (yield from _below_path(tree, key, max_depth, sort, limit))
    if sort or limit:
        return _aggregate(tree, _graph(tree, key, max_depth), sort, limit)
    most = TREE_GRAPH_LEVELS
    levels = most if max_depth is None else min(max_depth, most)
    read = _aggregate(tree, _graph(tree, key, levels, depthField=DEPTH), None, None)
    return Levels(tree, key, _in_few_replies(read), max_depth)


def _in_few_replies(read: Read) -> Read:
    """The same read, whose nodes come many at a time."""
    name = "batch_size" if read.method == "find" else "batchSize"
    return replace(read, options={**read.options, name: REPLY_NODES})


def _searched(tree: Tree) -> Raw:
    """The option of `$graphLookup` that leaves out deleted nodes."""
    among = tree.living({})
    return {"restrictSearchWithMatch": among} if among else {}


def _graph(tree: Tree, key: Any, max_depth: int | None, **options: Any) -> list[Raw]:
    """The stages that give everything below a node, so many levels deep at most."""
    graph: Raw = {"from": tree.collection, "as": NODE, **options, **_searched(tree)}
    if "parent" in tree.lead:
        stored = tree.roles["parent"]
        graph |= {"startWith": "$_id", "connectFromField": "_id", "connectToField": stored}
    else:
        stored = tree.roles["children"]
        graph |= {"startWith": f"${stored}", "connectFromField": stored, "connectToField": "_id"}
    if max_depth is not None:
        graph["maxDepth"] = max_depth - 1
    return [
        {"$match": tree.living(by_id(key))},
        {"$project": dict.fromkeys(["_id", *(path.stored for path in tree.lead.values())], 1)},
        {"$graphLookup": graph},
        *_UNWRAP,
    ]


def keys_of(stream: Stream, limit: int | None = None) -> Plan[list[Any]]:
    """The ids of the nodes that a command would stream."""
    if isinstance(stream, list):
        return [each["_id"] for each in stream]
    assert isinstance(stream, Read)
    if stream.method == "find":
        arguments: tuple[Any, ...] = (*stream.arguments, {"_id": 1})
        options = {**stream.options, "limit": limit} if limit else stream.options
    else:
        limited = [{"$limit": limit}] if limit else []
        arguments = ([*stream.arguments[0], *limited, {"$project": {"_id": 1}}],)
        options = stream.options
    rows = yield Read(stream.collection, stream.method, arguments, options)
    return [row["_id"] for row in rows]


def keys_below(
    tree: Tree, key: Any, max_depth: int | None = None, limit: int | None = None
) -> Plan[list[Any]]:
    """The ids of nodes below one, so many at most."""
    if "ancestors" in tree.lead or "path" in tree.lead:
        return (yield from keys_of((yield from descendants(tree, key, max_depth, limit=limit))))
    # Level by level and not by $graphLookup, whose memory is limited: an error would end the transaction.
    keys: list[Any] = []
    level = [key]
    # Raw writes may have made cycles, and this must end all the same.
    seen = {freeze(key)}
    depth, most = 0, TREE_BATCH
    while level and (max_depth is None or depth < max_depth) and (limit is None or len(keys) < limit):
        lower: list[Any] = []
        for start in range(0, len(level), most):
            for each in (yield from keys_of(below_batch(tree, level[start : start + most]), limit)):
                if freeze(each) not in seen:
                    seen.add(freeze(each))
                    lower.append(each)
        keys += lower
        level = lower
        depth += 1
    return keys[:limit]


def check_depth(max_depth: Any) -> None:
    if max_depth is not None and (
        not isinstance(max_depth, int) or isinstance(max_depth, bool) or max_depth < 0
    ):
        raise UsageError(
            f"max_depth={quote(max_depth)} is not a whole number from 0; 1 means children",
            code="filter-invalid",
        )


# -- upwards ---------------------------------------------------------------------------------


def ancestors(tree: Tree, key: Any) -> Plan[list[Raw]]:
    """The nodes above one, root first."""
    return (yield from path(tree, key))[:-1]


def path(tree: Tree, key: Any) -> Plan[list[Raw]]:
    """The nodes from the root down to one, which is the last."""
    if "ancestors" not in tree.lead and "path" not in tree.lead:
        return (yield from lineage(tree, key))
    node, above = yield from _above(tree, key, None)
    if not above:
        return [node]
    if "ancestors" in tree.lead:
        nodes = yield from nodes_by_key(tree, above)
        # One that was removed since is left out.
        return [*filter(None, (nodes.get(freeze(each)) for each in above)), node]
    stored = tree.roles["path"]
    chosen = tree.living({stored: {"$in": above}})
    # A path sorts right before those below it, so this is root first.
    return [*(yield from find(tree.collection, chosen, sort=[(stored, 1)])), node]


def _above(tree: Tree, key: Any, projection: Raw | None) -> Plan[tuple[Raw, list[Any]]]:
    """A node, and what it says of all above it, root first: their ids, or their paths."""
    node = yield from find_one(tree.collection, tree.living(by_id(key)), projection)
    if node is None:
        raise node_missing(tree, key)
    if "ancestors" in tree.lead:
        above = tree.get(node, "ancestors")
        if above is None and tree.get(node, "parent") is not None:
            raise not_rebuilt(tree, key, "ancestors")
        return node, above or []
    own = tree.get(node, "path")
    if split(own) is None:
        raise not_rebuilt(tree, key, "path")
    return node, prefixes(own)


def lineage(tree: Tree, key: Any) -> Plan[list[Raw]]:
    """The node and all above it, root first, by what the tree's truth is."""
    if tree.truth == "path":
        return (yield from path(tree, key))
    graph: Raw = {"from": tree.collection, "as": NODE, "depthField": DEPTH, **_searched(tree)}
    if tree.truth == "parent":
        parent = tree.parent
        graph |= {"startWith": f"${parent}", "connectFromField": parent, "connectToField": "_id"}
    else:
        graph |= {"startWith": "$_id", "connectFromField": "_id", "connectToField": tree.children}
    stages: list[Raw] = [{"$match": tree.living(by_id(key))}, {"$graphLookup": graph}]
    rows = yield from aggregate(tree.collection, stages)
    if not rows:
        raise node_missing(tree, key)
    node = rows[0]
    above = sorted(node.pop(NODE), key=lambda each: -each[DEPTH])
    for each in above:
        del each[DEPTH]
    return [*above, node]


def depth(tree: Tree, key: Any) -> Plan[int]:
    """How many nodes are above one; 0 for a root."""
    if "ancestors" not in tree.lead and "path" not in tree.lead:
        return len((yield from lineage(tree, key))) - 1
    return len((yield from _above(tree, key, tree.projection))[1])


def count(tree: Tree, key: Any = None, max_depth: int | None = None) -> Plan[int]:
    """How many nodes are below one; of the whole forest without a key."""
    check_depth(max_depth)
    if key is None:
        return (yield from count_documents(tree.collection, tree.living({})))
    stream = yield from descendants(tree, key, max_depth)
    if isinstance(stream, list):
        return len(stream)
    if isinstance(stream, Read) and stream.method == "find":
        return (yield from count_documents(stream.collection, stream.arguments[0]))
    stages = stream.arguments[0] if isinstance(stream, Read) else _graph(tree, key, max_depth)
    try:
        rows = yield from aggregate(tree.collection, [*stages, {"$count": "n"}])
    except OperationFailure as error:
        if error.code != GRAPH_LOOKUP_TOO_LARGE:
            raise
        return len((yield from keys_below(tree, key, max_depth)))
    return int(rows[0]["n"]) if rows else 0


# -- for writers -----------------------------------------------------------------------------


def nodes_by_key(tree: Tree, keys: Sequence[Any], projection: Raw | None = None) -> Plan[dict[Any, Raw]]:
    """Nodes by their frozen ids."""
    rows = yield from find(tree.collection, tree.living({"_id": {"$in": list(keys)}}), projection)
    return {freeze(row["_id"]): row for row in rows}


def first_key(tree: Tree, condition: Raw) -> Plan[Any]:
    """The id of a node that meets a condition; None if none does."""
    row = yield from find_one(tree.collection, tree.living(condition), {"_id": 1})
    return None if row is None else row["_id"]


def parent_of(tree: Tree, node: Raw) -> Plan[Any]:
    """The id of a node's parent, None for a root, by what the tree's truth is."""
    if tree.truth == "parent":
        return tree.get(node, "parent")
    if tree.truth == "children":
        return (yield from first_key(tree, {tree.roles["children"]: {"$eq": node["_id"]}}))
    above = path_above(tree.get(node, "path") or "")
    return None if above is None else (yield from first_key(tree, {tree.roles["path"]: above}))


def outside_child(tree: Tree, nodes: Sequence[Raw]) -> Plan[Any]:
    """The id of a child of one of these nodes that is not among them; None if there is none."""
    keys = [node["_id"] for node in nodes]
    among = {freeze(key) for key in keys}
    if tree.truth == "children":
        listed = [child for node in nodes for child in tree.listed_children(node)]
        others = [child for child in listed if freeze(child) not in among]
        return (yield from first_key(tree, {"_id": {"$in": others}})) if others else None
    if tree.truth == "parent":
        return (yield from first_key(tree, {tree.roles["parent"]: {"$in": keys}, "_id": {"$nin": keys}}))
    paths = {tree.get(node, "path") for node in nodes}
    # What is below a node is also below the topmost of these that is above it.
    real = sorted(each for each in paths if split(each) is not None)
    tops: list[str] = []
    for own in real:
        # In this order a node comes right before all that is below it.
        if not tops or not own.startswith(tops[-1]):
            tops.append(own)
    most = TREE_RANGES_BATCH
    for start in range(0, len(tops), most):
        ranges = [{tree.roles["path"]: below(own)} for own in tops[start : start + most]]
        rows = yield from find(tree.collection, tree.living({"$or": ranges}), {"_id": 1}, limit=len(keys) + 1)
        for row in rows:
            if freeze(row["_id"]) not in among:
                return row["_id"]
    return None
