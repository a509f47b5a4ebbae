"""Reading a tree. A plan here ends in a read whose cursor streams the nodes, or in a few nodes themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from pymongo.errors import OperationFailure

from treadle.errors import DataError
from treadle.graph.outcomes import Nested
from treadle.model.document import Document
from treadle.patterns.tree.representations import NODE, UNWRAP, Climb
from treadle.patterns.tree.tree import Tree
from treadle.plan import Plan, Raw, Read, aggregate, by_id, count_documents
from treadle.plan.server_errors import GRAPH_LOOKUP_TOO_LARGE
from treadle.query.filters import Sort
from treadle.query.keys import freeze
from treadle.query.paths import value_at

# Nodes whose children are read at a time.
TREE_BATCH = 1_000
# Levels that $graphLookup is asked for where nodes are streamed. It holds what it finds in memory, up to
# 100 MB, and gets slower per node the more there are; the levels below are read batch by batch.
TREE_GRAPH_LEVELS = 3
# Nodes of a level that one reply holds; by itself the server sends the first hundred alone.
TREE_REPLY_NODES = 1_000
# Nodes that nested() gives at once.
TREE_NESTED_MAX = 100_000
DEPTH = "__treadle_depth"

D = TypeVar("D", bound=Document)


# -- several levels --------------------------------------------------------------------------------


class Levels:
    """What is below one node, read a batch of parents at a time: the deepest first, so that few wait.

    Each node comes once, although a cycle that another program wrote leads to it again.
    """

    def __init__(self, tree: Tree, max_depth: int | None = None) -> None:
        self._tree = tree
        self._max_depth = max_depth
        self._seen: set[Any] = set()
        # By depth what the children of its nodes are found by, together for each node.
        self._links: list[list[list[Any]]] = []
        # The depth of the nodes that are being read.
        self.depth = 0

    def take(self, nodes: Iterable[Raw]) -> list[Raw]:
        """Note what is below nodes of the level that is being read. Returns those that are new."""
        new, seen, links_of = list[Raw](), self._seen, self._tree.representation.links_of
        while len(self._links) <= self.depth:
            self._links.append([])
        waiting = self._links[self.depth]
        for node in nodes:
            # Of several levels at once, what is below all but the last was found as well.
            is_last = node.pop(DEPTH, self.depth - 1) + 1 == self.depth
            if (frozen := freeze(node["_id"])) in seen:
                continue
            seen.add(frozen)
            new.append(node)
            if is_last and self.depth != self._max_depth and (links := links_of(node)):
                waiting.append(links)
        return new

    def next(self, projection: Raw | None = None, sort: Sort | None = None) -> Read | None:
        """Return the next read; None at the end."""
        while self._links and not self._links[-1]:
            self._links.pop()
        if not self._links:
            return None
        waiting, batch = self._links[-1], list[Any]()
        while waiting and len(batch) < TREE_BATCH:
            batch += waiting.pop()
        self.depth = len(self._links)
        read = self._tree.read(self._tree.representation.level(batch), sort)
        return _in_few_replies(replace(read, arguments=(*read.arguments, projection)))


def _in_few_replies(read: Read) -> Read:
    name = "batch_size" if read.method == "find" else "batchSize"
    return replace(read, options={**read.options, name: TREE_REPLY_NODES})


def _graph(tree: Tree, key: Any, max_depth: int | None, **options: Any) -> list[Raw]:
    """Return the stages that give everything below a node, so many levels deep at most."""
    representation = tree.representation
    graph: Raw = {"from": tree.collection, "as": NODE, **representation.down, **options}
    if active := tree.active({}):
        graph["restrictSearchWithMatch"] = active
    if max_depth is not None:
        graph["maxDepth"] = max_depth - 1
    shown = dict.fromkeys(["_id", *representation.fields], 1)
    return [{"$match": by_id(key)}, {"$project": shown}, {"$graphLookup": graph}, *UNWRAP]


# -- streams ---------------------------------------------------------------------------------------


class NodeReader(Generic[D]):
    """The nodes of one read, which a Store pages through."""

    def __init__(self, tree: Tree, plan: Plan[Read | None]) -> None:
        self.tree = tree
        self.page = tree.entry.limits.find_page
        self._plan = plan

    def first(self) -> Plan[Read | None]:
        """Return the first read; None where there are no nodes."""
        return self._plan

    def take(self, raws: list[Raw]) -> Iterable[D]:
        """Return the nodes of a page."""
        return map(self.tree.entry.codec.load, raws)

    def next(self) -> Read | None:
        """Return the next read; None at the end."""
        return None

    def instead(self, error: OperationFailure) -> Read:
        """Return what to read where the server refused the last read; raises the clear error otherwise."""
        raise too_large(self.tree) if error.code == GRAPH_LOOKUP_TOO_LARGE else error


class SubtreeReader(NodeReader[D]):
    """The nodes below one whose links are followed: the first levels by one `$graphLookup`."""

    def __init__(
        self,
        tree: Tree,
        key: Any,
        max_depth: int | None,
        checked: Callable[[Plan[Read | None]], Plan[Read | None]],
    ) -> None:
        super().__init__(tree, checked(self._first()))
        self._key = key
        self._max_depth = max_depth
        self._levels = Levels(tree, max_depth)

    def _first(self) -> Plan[Read | None]:
        depth = min(TREE_GRAPH_LEVELS, self._max_depth or TREE_GRAPH_LEVELS)
        self._levels.depth = depth
        yield from ()
        return _in_few_replies(self.tree.read(_graph(self.tree, self._key, depth, depthField=DEPTH)))

    def instead(self, error: OperationFailure) -> Read:
        if error.code != GRAPH_LOOKUP_TOO_LARGE:
            raise error
        self._levels.depth = 1
        return _in_few_replies(self.tree.read(self.tree.representation.children_of({"_id": self._key})))

    def take(self, raws: list[Raw]) -> Iterable[D]:
        return super().take(self._levels.take(raws))

    def next(self) -> Read | None:
        return self._levels.next()


def too_large(tree: Tree) -> DataError:
    return DataError(
        f"the subtree is more than $graphLookup sorts in its 100 MB; leave out sort=, or give {tree.name} an "
        "AncestorArray",
        code="tree-too-large",
    )


def roots(tree: Tree, sort: Sort | None) -> Plan[Read | None]:
    """Read the nodes without a parent; by id unless sorted otherwise."""
    yield from ()
    return tree.read(tree.representation.roots(), sort or tree.sort)


def children(tree: Tree, key: Any, sort: Sort | None) -> Plan[Read | None]:
    """Read the children of a node; by id unless sorted otherwise, child lists in their own order."""
    node = (yield from _located(tree, key)) if tree.paths else {"_id": key}
    default = None if tree.lists else tree.sort
    return None if node is None else tree.read(tree.representation.children_of(node), sort or default)


def descendants(tree: Tree, key: Any, max_depth: int | None, sort: Sort | None) -> Plan[Read | None]:
    """Read all nodes below one, in no particular order unless sorted."""
    if max_depth == 0:
        return None
    if max_depth == 1:
        return (yield from children(tree, key, sort))
    if not tree.representation.is_ranged:
        return tree.read(_graph(tree, key, max_depth), sort)
    node = yield from _located(tree, key)
    below = None if node is None else tree.representation.below(node, max_depth)
    return None if below is None else tree.read(below, sort)


def _located(tree: Tree, key: Any) -> Plan[Raw | None]:
    """Return a node with what leads to those below it."""
    if not tree.representation.needs_node:
        return {"_id": key}
    return (yield from tree.find_one(by_id(key), tree.projection))


# -- numbers, ids, nested structures ----------------------------------------------------------------


def count(tree: Tree, key: Any, max_depth: int | None) -> Plan[int]:
    """Return the number of nodes below one; of the whole forest where the key is None."""
    if key is None:
        return (yield from count_documents(tree.collection, tree.active({})))
    if not tree.representation.is_ranged:
        return len((yield from ids_below(tree, key, max_depth)))
    read = yield from descendants(tree, key, max_depth, None)
    return 0 if read is None else (yield from count_documents(read.collection, read.arguments[0]))


def ids_below(tree: Tree, key: Any, max_depth: int | None = None, limit: int = 0) -> Plan[list[Any]]:
    """Return the ids of the nodes below one; about so many at most if there is a limit."""
    node = yield from _located(tree, key)
    shown = dict.fromkeys(["_id", *tree.representation.fields], 1)
    nodes = [] if node is None else (yield from nodes_below(tree, node, max_depth, None, limit, shown))
    return [each["_id"] for each in nodes]


def nodes_below(
    tree: Tree, node: Raw, max_depth: int | None, sort: Sort | None, limit: int, shown: Raw | None = None
) -> Plan[list[Raw]]:
    """Return the nodes below one, about so many at most; with a sort, siblings come in its order.

    Never by `$graphLookup`, whose memory is limited: inside a transaction its error would end that.
    """
    if tree.representation.is_ranged:
        below = tree.representation.below(node, max_depth)
        if below is None:
            return []
        read = tree.read(below, sort, limit)
        rows: list[Raw] = yield replace(read, arguments=(*read.arguments, shown))
        return rows
    levels, nodes = Levels(tree, max_depth), list[Raw]()
    levels.take([node])
    while (not limit or len(nodes) < limit) and (read_level := levels.next(shown, sort)) is not None:
        nodes += levels.take((yield read_level))
    return nodes


def nested(
    tree: Tree, key: Any, max_depth: int | None, sort: Sort | None, load: Callable[[Raw], D]
) -> Plan[Nested[D]]:
    """Return a node and all below it, as one structure."""
    top = yield from tree.find_one(by_id(key))
    if top is None:
        raise tree.node_missing(key)
    order = sort or (None if tree.lists else tree.sort)
    below: list[Raw] = []
    if max_depth != 0:
        below = yield from nodes_below(tree, top, max_depth, order, TREE_NESTED_MAX + 1)
    if len(below) >= TREE_NESTED_MAX:
        raise DataError(
            f"the subtree has more than the {TREE_NESTED_MAX:,} nodes that nested() gives at once; give it "
            "max_depth=, or stream descendants()",
            code="tree-too-large",
        )
    pairs = list(tree.representation.pairs([top, *below], is_sorted=sort is not None))
    nodes = {freeze(each["_id"]): Nested(load(each)) for each in [top, *below]}
    # Each node has one place, also where another program made a cycle or listed it twice.
    placed = {freeze(key)}
    for parent, child in pairs:
        frozen = freeze(child)
        if frozen in nodes and frozen not in placed and freeze(parent) in nodes:
            placed.add(frozen)
            nodes[freeze(parent)].children.append(nodes[frozen])
    return nodes[freeze(key)]


# -- upwards ---------------------------------------------------------------------------------------


def path(tree: Tree, key: Any) -> Plan[list[Raw]]:
    """Return the nodes from the root down to one, which is the last."""
    if tree.representation.line_field is None:
        return (yield from lineage(tree, key))
    node, line = yield from _line(tree, key, None)
    return [*(yield from _on_line(tree, line)), node]


def depth(tree: Tree, key: Any) -> Plan[int]:
    """Return the number of nodes above one; 0 for a root."""
    if tree.representation.line_field is None:
        return len((yield from lineage(tree, key))) - 1
    return len((yield from _line(tree, key, tree.projection))[1])


def _line(tree: Tree, key: Any, shown: Raw | None) -> Plan[tuple[Raw, list[Any]]]:
    """Return a node, and what it says of those above it."""
    node = yield from tree.find_one(by_id(key), shown)
    if node is None:
        raise tree.node_missing(key)
    line = tree.representation.line(node)
    if line is None:
        raise tree.not_rebuilt(key)
    return node, line


def _on_line(tree: Tree, line: Sequence[Any]) -> Plan[list[Raw]]:
    """Return the nodes of a line, root first; one that was removed since is left out."""
    field = tree.representation.line_field
    if not line or field is None:
        return []
    nodes = yield from tree.find({field: {"$in": list(line)}})
    by_step = {freeze(value_at(node, field)): node for node in nodes}
    return [by_step[freeze(step)] for step in line if freeze(step) in by_step]


def lineage(tree: Tree, key: Any) -> Plan[list[Raw]]:
    """Return a node and all above it, root first, by its links and not by what follows from them."""
    if tree.paths is not None:
        return (yield from path(tree, key))
    graph: Raw = {"from": tree.collection, "as": NODE, "depthField": DEPTH, **tree.representation.up}
    if active := tree.active({}):
        graph["restrictSearchWithMatch"] = active
    rows = yield from aggregate(
        tree.collection, [{"$match": tree.active(by_id(key))}, {"$graphLookup": graph}]
    )
    if not rows:
        raise tree.node_missing(key)
    (node,) = rows
    above = sorted(node.pop(NODE), key=lambda each: -each.pop(DEPTH))
    return [*above, node]


def parent_id(tree: Tree, node: Raw) -> Plan[Any]:
    """Return the id of a node's parent by its links, None for a root."""
    if tree.representation.parent is not None:
        return value_at(node, tree.representation.parent)
    condition = tree.representation.parents([node], Climb(tree.representation))
    return None if condition is None else (yield from tree.first_id(condition))


def child_outside(tree: Tree, nodes: Sequence[Raw]) -> Plan[Any]:
    """Return the id of a child of one of these nodes that is not among them; None if there is none."""
    for condition in tree.representation.children_outside(nodes):
        if (child := (yield from tree.first_id(condition))) is not None:
            return child
    return None
