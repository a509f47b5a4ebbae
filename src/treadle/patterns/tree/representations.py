"""How the nodes of a tree hold their places: one class per representation, without I/O.

A representation gives filters, stages and expressions over stored nodes. The
links between parents and children are in the parent's id, in child lists, or
in the paths alone; `verify` and `repair` derive everything else from them. A
node's line, the nodes above it, may be stored as well, as an array or a path:
then all descendants of a node meet one filter, and a move rewrites them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import bson

from treadle.errors import DataError, UsageError
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.patterns.tree import paths
from treadle.patterns.tree.paths import check_segment, split
from treadle.plan import Raw
from treadle.query.keys import freeze
from treadle.query.paths import getter

# A length for $slice that takes the rest of any array.
SLICE_ALL = 1_000_000_000
# Ranges of paths in one filter.
PATH_RANGES_MAX = 100
NODE = "__treadle_node"
# Makes nodes of what a $lookup or a $graphLookup found.
UNWRAP: list[Raw] = [{"$unwind": f"${NODE}"}, {"$replaceRoot": {"newRoot": f"${NODE}"}}]

# A filter, or the stages of a pipeline.
Selection: TypeAlias = "Raw | list[Raw]"


class Lift(NamedTuple):
    """What one update does to the nodes below one that is removed alone."""

    condition: Raw
    sets: Raw


class Climb:
    """Some nodes and those above them, and where the cycles among them are cut."""

    def __init__(self, representation: Representation) -> None:
        self._representation = representation
        # By frozen id.
        self.nodes: dict[Any, Raw] = {}
        # The frozen id of each node's parent by its links; None for roots and orphans.
        self._parents: dict[Any, Any] = {}
        self.by_path: dict[str, Any] = {}
        # By frozen id the frozen ids of the nodes that list a node.
        self.listed_by: dict[Any, list[Any]] = {}
        self._cut: set[Any] = set()

    def add(self, nodes: Iterable[Raw]) -> list[Raw]:
        """Add nodes. Returns those that are new."""
        new = []
        for node in nodes:
            key = freeze(node["_id"])
            if key not in self.nodes:
                self.nodes[key] = node
                self._representation.index(node, self)
                new.append(node)
        return new

    def cut_cycles(self) -> None:
        """Cut each cycle at the node with the least id, which is the same in every process."""
        for key, node in self.nodes.items():
            parent = self._representation.parent_among(node, self)
            self._parents[key] = parent if parent in self.nodes else None
        visited: set[Any] = set()
        for start in self.nodes:
            walk: list[Any] = []
            step: Any = start
            while step is not None and step not in visited:
                visited.add(step)
                walk.append(step)
                step = self._parents[step]
            if step in walk:
                self._cut.add(self.least(walk[walk.index(step) :]))

    def least(self, keys: Iterable[Any]) -> Any:
        """Return the frozen id of the node whose id is the least, by its bytes; None of none."""

        def encoded(frozen: Any) -> bytes:
            return bytes(bson.encode({"": self.nodes[frozen]["_id"]}, codec_options=CODEC_OPTIONS))

        return min(keys, key=encoded, default=None)

    def parent(self, key: Any) -> Any:
        """Return the frozen id of the parent that a node should have."""
        return None if key in self._cut else self._parents.get(key)

    def id_of(self, key: Any) -> Any:
        return None if key is None else self.nodes[key]["_id"]

    def line(self, key: Any) -> list[Raw]:
        """Return the nodes that should be above one, root first."""
        above: list[Raw] = []
        while (key := self.parent(key)) is not None:
            above.append(self.nodes[key])
        return above[::-1]


class Representation:
    """The stored fields of one tree, and what follows from them."""

    # The fields that an insert may set: the parent's id, and the node's own part of its path.
    parent: str | None = None
    segment: str | None = None
    # The field with the path, which no two nodes share.
    path: str | None = None
    # Whether all descendants of a node meet one filter; else `$graphLookup` follows the links.
    is_ranged = False
    # Whether a node must be read before those below it can be.
    needs_node = True
    # The field whose values `line` gives. None where only links lead to the nodes above.
    line_field: str | None = None
    # The sort of a range in which each node comes after all that are below it, if there is one.
    leaves_first: list[tuple[str, int]] | None = None
    # The options of `$graphLookup` that follow the links of a node.
    up: Raw
    down: Raw

    def __init__(self, model: str, collection: str, *fields: str) -> None:
        # The model's name, for errors.
        self.model = model
        self.collection = collection
        self.fields = fields

    @property
    def indexed(self) -> list[str]:
        """The fields with an index that is not unique."""
        return [field for field in self.fields if field not in (self.path, self.segment)]

    # -- reading -----------------------------------------------------------------------------------

    def roots(self) -> Selection:
        """Return what selects the nodes without a parent."""
        raise NotImplementedError  # pragma: no cover

    def children_of(self, node: Raw) -> Selection:
        """Return what selects the children of a node; where nodes have paths, by that of this one."""
        raise NotImplementedError  # pragma: no cover

    def below(self, node: Raw, max_depth: int | None = None) -> Raw | None:
        """Return the filter of all descendants; None where there is none, or no node has a line."""
        return None

    def line(self, node: Raw) -> list[Any] | None:
        """Return what a node says of those above it, root first; None where it has no line yet."""
        return []

    def links_of(self, node: Raw) -> list[Any]:
        """Return what the children of a node are found by."""
        raise NotImplementedError  # pragma: no cover

    def level(self, links: Sequence[Any]) -> Raw:
        """Return the filter of the nodes that these links lead to."""
        raise NotImplementedError  # pragma: no cover

    def pairs(self, nodes: Sequence[Raw], *, is_sorted: bool) -> Iterator[tuple[Any, Any]]:
        """Give each parent's id with each child's, siblings in the order of the nodes, or as listed."""
        raise NotImplementedError  # pragma: no cover

    def parents(self, nodes: Sequence[Raw], climb: Climb) -> Raw | None:
        """Return the filter of the parents of nodes; None where all are among those of the climb."""
        raise NotImplementedError  # pragma: no cover

    def children_outside(self, nodes: Sequence[Raw]) -> list[Raw]:
        """Return filters of children of these nodes that are not among them; one after another is asked."""
        raise NotImplementedError  # pragma: no cover

    # -- new nodes ---------------------------------------------------------------------------------

    def check(self, node: Raw) -> None:
        """Refuse a new node that could have no place."""

    def is_root(self, node: Raw) -> bool:
        """Whether a new node says that no other node is concerned."""
        raise NotImplementedError  # pragma: no cover

    def stated_parents(self, nodes: Sequence[Raw], among: Sequence[Raw]) -> dict[Any, Any]:
        """Return the ids of the parents that new nodes state, by frozen id; where paths are no links."""
        raise NotImplementedError  # pragma: no cover

    def listed(self, node: Raw) -> list[Any]:
        """Return the ids in a node's child list."""
        return []

    # -- writing -----------------------------------------------------------------------------------

    def place(self, node: Raw, parent: Raw | None) -> Raw:
        """Return the fields of a node below a parent that has its line, or of a root."""
        return {}

    def follow(self, before: Raw, after: Raw) -> Raw:
        """Return the expressions of all descendants of a node that has moved."""
        return {}

    def lift(self, node: Raw, parent: Any) -> list[Lift]:
        """Return the updates that give the children of a node to its parent, whose id this is."""
        return []

    # -- what should be ----------------------------------------------------------------------------

    def index(self, node: Raw, climb: Climb) -> None:
        """Add to a climb what tells the parents of other nodes."""

    def parent_among(self, node: Raw, climb: Climb) -> Any:
        """Return the frozen id of a node's parent, if that is known."""
        raise NotImplementedError  # pragma: no cover

    def expected(self, node: Raw, climb: Climb) -> Raw:
        """Return what the fields of a node should hold."""
        return {}


class ByParent(Representation):
    """Each node holds the id of its parent."""

    needs_node = False
    parent: str

    def __init__(self, model: str, collection: str, parent: str, *fields: str) -> None:
        super().__init__(model, collection, parent, *fields)
        self.parent = parent
        self._parent_of = getter(parent)
        self.up = {"startWith": f"${parent}", "connectFromField": parent, "connectToField": "_id"}
        self.down = {"startWith": "$_id", "connectFromField": "_id", "connectToField": parent}

    def roots(self) -> Selection:
        return {self.parent: None}

    def children_of(self, node: Raw) -> Selection:
        return {self.parent: {"$eq": node["_id"]}}

    def links_of(self, node: Raw) -> list[Any]:
        return [node["_id"]]

    def level(self, links: Sequence[Any]) -> Raw:
        return {self.parent: {"$in": list(links)}}

    def pairs(self, nodes: Sequence[Raw], *, is_sorted: bool) -> Iterator[tuple[Any, Any]]:
        return ((self._parent_of(node), node["_id"]) for node in nodes)

    def parents(self, nodes: Sequence[Raw], climb: Climb) -> Raw | None:
        keys = {freeze(key): key for node in nodes if (key := self._parent_of(node)) is not None}
        missing = [key for frozen, key in keys.items() if frozen not in climb.nodes]
        return {"_id": {"$in": missing}} if missing else None

    def children_outside(self, nodes: Sequence[Raw]) -> list[Raw]:
        keys = [node["_id"] for node in nodes]
        return [{self.parent: {"$in": keys}, "_id": {"$nin": keys}}]

    def is_root(self, node: Raw) -> bool:
        return self._parent_of(node) is None

    def stated_parents(self, nodes: Sequence[Raw], among: Sequence[Raw]) -> dict[Any, Any]:
        return {freeze(node["_id"]): self._parent_of(node) for node in nodes}

    def place(self, node: Raw, parent: Raw | None) -> Raw:
        return {self.parent: None if parent is None else parent["_id"]}

    def lift(self, node: Raw, parent: Any) -> list[Lift]:
        return [Lift({self.parent: {"$eq": node["_id"]}}, {self.parent: {"$literal": parent}})]

    def parent_among(self, node: Raw, climb: Climb) -> Any:
        return freeze(self._parent_of(node))

    def expected(self, node: Raw, climb: Climb) -> Raw:
        return {self.parent: climb.id_of(climb.parent(freeze(node["_id"])))}


class ByAncestors(ByParent):
    """Each node holds the id of its parent, and those of all its ancestors, root first."""

    is_ranged = True
    line_field = "_id"

    def __init__(self, model: str, collection: str, parent: str, ancestors: str) -> None:
        super().__init__(model, collection, parent, ancestors)
        self._ancestors = ancestors
        self._ancestors_of = getter(ancestors)

    def below(self, node: Raw, max_depth: int | None = None) -> Raw | None:
        condition: Raw = {self._ancestors: {"$eq": node["_id"]}}
        if max_depth is not None:
            array = f"${self._ancestors}"
            since = {"$subtract": [{"$size": array}, {"$indexOfArray": [array, {"$literal": node["_id"]}]}]}
            condition["$expr"] = {"$lte": [since, max_depth]}
        return condition

    def line(self, node: Raw) -> list[Any] | None:
        line: list[Any] | None = self._ancestors_of(node)
        return [] if line is None and self.is_root(node) else line

    def place(self, node: Raw, parent: Raw | None) -> Raw:
        line = [] if parent is None else [*(self.line(parent) or []), parent["_id"]]
        return {**super().place(node, parent), self._ancestors: line}

    def follow(self, before: Raw, after: Raw) -> Raw:
        array = f"${self._ancestors}"
        place = {"$indexOfArray": [array, {"$literal": before["_id"]}]}
        since = {"$slice": [array, {"$max": [place, 0]}, SLICE_ALL]}
        # An array that another program wrote may lack the node, or be none.
        has_it = {"$and": [{"$isArray": array}, {"$gte": [{"$ifNull": [place, -1]}, 0]}]}
        line = {"$literal": self._ancestors_of(after)}
        return {self._ancestors: {"$cond": [has_it, {"$concatArrays": [line, since]}, array]}}

    def lift(self, node: Raw, parent: Any) -> list[Lift]:
        array = f"${self._ancestors}"
        others = {"$filter": {"input": array, "cond": {"$ne": ["$$this", {"$literal": node["_id"]}]}}}
        sets = {self._ancestors: {"$cond": [{"$isArray": array}, others, array]}}
        return [*super().lift(node, parent), Lift({self._ancestors: {"$eq": node["_id"]}}, sets)]

    def expected(self, node: Raw, climb: Climb) -> Raw:
        line = [each["_id"] for each in climb.line(freeze(node["_id"]))]
        return {**super().expected(node, climb), self._ancestors: line}


class Paths(Representation):
    """Each node holds its path, `,company,engineering,`, with its own segment last."""

    is_ranged = True
    needs_node = True
    path: str
    segment: str

    def _use_paths(self, path: str, segment: str) -> None:
        self.path = self.line_field = path
        self.segment = segment
        self.path_of, self._segment_of = getter(path), getter(segment)
        # A path sorts right before those below it.
        self.leaves_first = [(path, -1)]

    def below(self, node: Raw, max_depth: int | None = None) -> Raw | None:
        segments = split(self.path_of(node))
        if segments is None:
            return None
        depth = {} if max_depth is None else paths.at_most(len(segments) + max_depth)
        return {self.path: {**paths.below(self.path_of(node)), **depth}}

    def line(self, node: Raw) -> list[Any] | None:
        path = self.path_of(node)
        return None if split(path) is None else paths.prefixes(path)

    def check(self, node: Raw) -> None:
        self.segment_of(node)

    def segment_of(self, node: Raw) -> str:
        return check_segment(self._segment_of(node), f"{self.model}.{self.segment}")

    def place(self, node: Raw, parent: Raw | None) -> Raw:
        above = None if parent is None else self.path_of(parent)
        return {**super().place(node, parent), self.path: paths.join(above, self.segment_of(node))}

    def follow(self, before: Raw, after: Raw) -> Raw:
        return self._rebased(self.path_of(before), self.path_of(after))

    def _rebased(self, old: str, new: str) -> Raw:
        """Return the path of a node below the path `old`, which becomes `new`, as an expression."""
        field = f"${self.path}"
        rest = {"$substrBytes": [field, len(old.encode()), -1]}
        # Where the collection has a collation, the range may hold other paths as well.
        begins = {"$eq": [{"$indexOfBytes": [{"$ifNull": [field, ""]}, {"$literal": old}]}, 0]}
        return {self.path: {"$cond": [begins, {"$concat": [{"$literal": new}, rest]}, field]}}

    def lift(self, node: Raw, parent: Any) -> list[Lift]:
        condition, old = self.below(node), self.path_of(node)
        if condition is None:
            return super().lift(node, parent)
        moved = self._rebased(old, paths.path_above(old) or paths.SEPARATOR)
        return [*super().lift(node, parent), Lift(condition, moved)]

    def expected(self, node: Raw, climb: Climb) -> Raw:
        values = {**super().expected(node, climb), self.path: self._expected_path(node, climb)}
        try:
            self.check(node)
        except UsageError:
            # Only a person can say what the node should be called.
            values[self.segment] = None
        return values

    def _expected_path(self, node: Raw, climb: Climb) -> Any:
        path: str | None = None
        try:
            for each in [*climb.line(freeze(node["_id"])), node]:
                path = paths.join(path, self.segment_of(each))
        except UsageError:
            return self.path_of(node)
        return path


class ByPath(Paths):
    """Nothing but the paths says whose child a node is."""

    def __init__(self, model: str, collection: str, path: str, segment: str) -> None:
        super().__init__(model, collection, path, segment)
        self._use_paths(path, segment)

    def roots(self) -> Selection:
        return {self.path: {"$gt": "", **paths.at_most(1)}}

    def children_of(self, node: Raw) -> Selection:
        return self.below(node, 1) or {"_id": {"$in": []}}

    def pairs(self, nodes: Sequence[Raw], *, is_sorted: bool) -> Iterator[tuple[Any, Any]]:
        by_path = {self.path_of(node): node["_id"] for node in nodes}
        return ((by_path.get(self._path_above(node)), node["_id"]) for node in nodes)

    def _path_above(self, node: Raw) -> str | None:
        return paths.path_above(self.path_of(node) or "")

    def parents(self, nodes: Sequence[Raw], climb: Climb) -> Raw | None:
        above = {path for node in nodes if (path := self._path_above(node)) is not None}
        missing = sorted(above - climb.by_path.keys())
        return {self.path: {"$in": missing}} if missing else None

    def children_outside(self, nodes: Sequence[Raw]) -> list[Raw]:
        tops: list[str] = []
        # In this order a node comes right before all that is below it, which its own range covers.
        for path in sorted({path for node in nodes if split(path := self.path_of(node)) is not None}):
            if not tops or not path.startswith(tops[-1]):
                tops.append(path)
        keys = [node["_id"] for node in nodes]
        ranges = [{self.path: paths.below(path)} for path in tops]
        return [
            {"$or": ranges[start : start + PATH_RANGES_MAX], "_id": {"$nin": keys}}
            for start in range(0, len(ranges), PATH_RANGES_MAX)
        ]

    def is_root(self, node: Raw) -> bool:
        return self._path_above(node) is None

    def stated_path(self, node: Raw) -> str:
        """Return the path that a new node says it has; without one it is a root."""
        segment, given = self.segment_of(node), self.path_of(node)
        if not given:
            return paths.join(None, segment)
        if (split(given) or [""])[-1] != segment:
            example = paths.join(",company,", segment)
            raise UsageError(
                f"{self.model}.{self.path} is {given!r}; leave it empty for a root, give the whole path with "
                f"the node's own segment last, such as {example!r}, or insert it with "
                f"store.tree({self.model}).insert(node, parent=id)",
                code="tree-path-invalid",
            )
        return str(given)

    def index(self, node: Raw, climb: Climb) -> None:
        path = self.path_of(node)
        if isinstance(path, str):
            climb.by_path.setdefault(path, freeze(node["_id"]))

    def parent_among(self, node: Raw, climb: Climb) -> Any:
        return climb.by_path.get(self._path_above(node) or "")


class ByPathAndParent(Paths, ByParent):
    """Each node also holds the id of its parent, from which the paths follow."""

    def __init__(self, model: str, collection: str, path: str, segment: str, parent: str) -> None:
        ByParent.__init__(self, model, collection, parent, path, segment)
        self._use_paths(path, segment)


class ByChildren(Representation):
    """Each node lists its children, in their order; a node that is in no list is a root."""

    children: str

    def __init__(self, model: str, collection: str, children: str) -> None:
        super().__init__(model, collection, children)
        self.children = children
        self._children_of = getter(children)
        self.up = {"startWith": "$_id", "connectFromField": "_id", "connectToField": children}
        self.down = {"startWith": f"${children}", "connectFromField": children, "connectToField": "_id"}

    def roots(self) -> Selection:
        lists = {"localField": "_id", "foreignField": self.children, "as": NODE}
        return [{"$lookup": {"from": self.collection, **lists}}, {"$match": {NODE: []}}, {"$unset": NODE}]

    def children_of(self, node: Raw) -> Selection:
        listed = {"localField": self.children, "foreignField": "_id", "as": NODE}
        return [
            {"$match": {"_id": {"$eq": node["_id"]}}},
            {"$project": {self.children: 1}},
            {"$unwind": f"${self.children}"},
            {"$lookup": {"from": self.collection, **listed}},
            *UNWRAP,
        ]

    def listed(self, node: Raw) -> list[Any]:
        children = self._children_of(node)
        if children is None or isinstance(children, list):
            return children or []
        raise DataError(
            f"the child list of a stored {self.model} is {type(children).__name__}, not a list; repair the "
            "document",
            code="document-invalid",
        )

    def links_of(self, node: Raw) -> list[Any]:
        return self.listed(node)

    def level(self, links: Sequence[Any]) -> Raw:
        return {"_id": {"$in": list(links)}}

    def pairs(self, nodes: Sequence[Raw], *, is_sorted: bool) -> Iterator[tuple[Any, Any]]:
        pairs = [(node["_id"], child) for node in nodes for child in self.listed(node)]
        if not is_sorted:
            return iter(pairs)
        above = {freeze(child): parent for parent, child in reversed(pairs)}
        return ((above.get(freeze(node["_id"])), node["_id"]) for node in nodes)

    def parents(self, nodes: Sequence[Raw], climb: Climb) -> Raw | None:
        # Also of nodes that a known one lists: another list may hold them as well.
        return {self.children: {"$in": [node["_id"] for node in nodes]}}

    def children_outside(self, nodes: Sequence[Raw]) -> list[Raw]:
        among = {freeze(node["_id"]) for node in nodes}
        outside = [child for node in nodes for child in self.listed(node) if freeze(child) not in among]
        return [{"_id": {"$in": outside}}] if outside else []

    def is_root(self, node: Raw) -> bool:
        return not self._children_of(node)

    def stated_parents(self, nodes: Sequence[Raw], among: Sequence[Raw]) -> dict[Any, Any]:
        new = {freeze(node["_id"]) for node in among}
        parents: dict[Any, Any] = {}
        for node in nodes:
            children = self._children_of(node) or []
            if not isinstance(children, list):
                raise self._unknown_child("is no list; build the node through its constructor")
            for child in children:
                if freeze(child) not in new:
                    raise self._unknown_child(
                        f"names {child!r}, which is not inserted with it; move it there with "
                        f"store.tree({self.model}).move(id, parent)"
                    )
                if parents.setdefault(freeze(child), node["_id"]) != node["_id"]:
                    raise self._unknown_child(f"names {child!r}, which another node lists as well")
        return {freeze(node["_id"]): parents.get(freeze(node["_id"])) for node in among}

    def _unknown_child(self, wrong: str) -> UsageError:
        return UsageError(f"{self.model}.{self.children} {wrong}", code="tree-child-unknown")

    # -- lists -------------------------------------------------------------------------------------

    def appended(self, keys: Sequence[Any]) -> Raw:
        """Return the list of a parent with these at its end; one that is in it keeps its place."""
        present = {"$ifNull": [f"${self.children}", []]}
        is_new = {"$not": {"$in": ["$$this", present]}}
        new = {"$filter": {"input": {"$literal": list(keys)}, "cond": is_new}}
        return {self.children: {"$concatArrays": [present, new]}}

    def inserted(self, key: Any, at: int) -> Raw:
        """Return the list of a parent with a child at an index among the others."""
        at = min(at, SLICE_ALL)
        parts = [{"$slice": ["$$others", at]}, [{"$literal": key}], {"$slice": ["$$others", at, SLICE_ALL]}]
        others = self.removed([key])[self.children]
        return {self.children: {"$let": {"vars": {"others": others}, "in": {"$concatArrays": parts}}}}

    def removed(self, keys: Sequence[Any]) -> Raw:
        """Return the list of a parent without these."""
        present = {"$ifNull": [f"${self.children}", []]}
        stays = {"$not": {"$in": ["$$this", {"$literal": list(keys)}]}}
        return {self.children: {"$filter": {"input": present, "cond": stays}}}

    def replaced(self, key: Any, children: Sequence[Any]) -> Raw:
        """Return the list of a parent with these in the place of one that is in it."""
        array = f"${self.children}"
        at = {"$indexOfArray": [array, {"$literal": key}]}
        tail = {"$slice": [array, {"$add": [at, 1]}, SLICE_ALL]}
        parts = [{"$slice": [array, at]}, {"$literal": list(children)}, tail]
        return {self.children: {"$concatArrays": parts}}

    def index(self, node: Raw, climb: Climb) -> None:
        for child in {freeze(each) for each in self.listed(node)}:
            climb.listed_by.setdefault(child, []).append(freeze(node["_id"]))

    def parent_among(self, node: Raw, climb: Climb) -> Any:
        return climb.least(climb.listed_by.get(freeze(node["_id"]), []))

    def expected(self, node: Raw, climb: Climb) -> Raw:
        own, once = freeze(node["_id"]), {freeze(child): child for child in reversed(self.listed(node))}
        children = [child for key, child in reversed(once.items()) if climb.parent(key) == own]
        return {self.children: children}
