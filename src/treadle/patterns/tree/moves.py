"""Moving and renaming: one transaction where the subtree is small, chunks where it is large.

A move shuts out all other moves (`state.py`), checks that the new parent is
not below the node, and writes old parent lists, new parent, node and all
descendants. So no two moves can make a cycle between them, and an insert
below any of these nodes conflicts with the move.

A large subtree is moved in chunks. The node itself moves first, and the rest
is recorded as pending in the same transaction. Each chunk takes descendants
that still have their old ancestors, and writes the node too. A node that is
inserted meanwhile below one that has not been moved yet also has the old
ancestors, so a later chunk finds it; below one that has been moved it has the
new ones. The move ends when a search finds none with the old ones.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from treadle.engine.documents import as_written, stamp_expressions, translated
from treadle.engine.pipelines import update_pipeline
from treadle.engine.references import follow_own
from treadle.errors import DataError, UsageError
from treadle.graph.changes import Changes
from treadle.graph.rule import REVISION
from treadle.graph.write import Write
from treadle.model.document import Document
from treadle.patterns.tree import state
from treadle.patterns.tree.fields import MOVING, UNSTATED, Tree, node_missing, parent_missing
from treadle.patterns.tree.pace import Pace, Step
from treadle.patterns.tree.placing import below_parent, complete, hold_parents
from treadle.patterns.tree.reads import lineage, parent_of
from treadle.patterns.tree.rewriting import (
    listing,
    new_path,
    rewrite,
    rewrite_all,
    segment_errors,
    unlisting,
)
from treadle.patterns.tree.segments import below, check_segment, split
from treadle.plan import Plan, Raw, by_id, find, find_one_and_update, update_one
from treadle.query.keys import freeze, is_among, same_key
from treadle.query.paths import put

D = TypeVar("D", bound=Document)

_ALL = 1_000_000_000


class Move(Write[D]):
    """A node, and all below it, under another parent or with another segment."""

    def __init__(
        self,
        tree: Tree,
        key: Any,
        parent: Any = UNSTATED,
        segment: Any = UNSTATED,
        at: int | None = None,
    ) -> None:
        entry = self.entry = tree.entry
        self.tree = tree
        self.key = entry.ids.encode(key)
        self.parent = parent if parent is UNSTATED or parent is None else entry.ids.encode(parent)
        self.segment = segment
        # The index among the children of the new parent, where these have an order.
        self.at = at
        # Of the work that is pending after the first transaction.
        self.token: Any = None
        if segment is not UNSTATED:
            if self.tree.segment is None:
                raise UsageError(
                    f"{entry.model.__name__} has no segment to rename; only MaterializedPath has one",
                    code="tree-segment-invalid",
                )
            check_segment(segment, f"{entry.model.__name__}.{self.tree.segment}")

    def apply(self, changes: Changes) -> Plan[Raw]:
        self.token = None
        tree = self.tree
        node = yield from state.lock_node(tree, self.key, changes)
        work = yield from self._work(node, changes)
        if work is None:
            return node
        after = yield from _place(tree, work, changes, node, self.at)
        descendants = _below(tree, work)
        if descendants is None:
            return after
        if not changes.whole:
            most = tree.entry.limits.tree_move_max
            beyond = yield from find(
                tree.collection, tree.living(descendants), {"_id": 1}, skip=most, limit=1
            )
            if beyond:
                self.token = yield from state.begin(tree, work)
        if self.token is None:
            yield from _descend(tree, work, after, _remaining(tree, work, after, descendants), changes)
        elif tree.path is not None and work["from"] is not None:
            # Nobody may take the old path while descendants still have it.
            yield from update_one(
                tree.collection, tree.living(by_id(work["from"])), {"$set": {MOVING: work["path_from"]}}
            )
        return after

    def _work(self, node: Raw, changes: Changes) -> Plan[Raw | None]:
        """What is to be done, in full; None if the node keeps its parent and its segment."""
        tree = self.tree
        now = yield from parent_of(tree, node)
        to = now if self.parent is UNSTATED else self.parent
        segment = tree.get(node, "segment") if self.segment is UNSTATED else self.segment
        same = same_key(to, now) and type(to) is type(now)
        if same and segment == tree.get(node, "segment"):
            if self.at is not None:
                # Only the list of its parent changes.
                listed = listing(tree, [self.key], {freeze(self.key): self.at})
                yield from rewrite(tree, [(to, listed)], changes)
            return None
        if to is not None and not same:
            yield from self._refuse_cycle(to)
        work: Raw = {"kind": "move", "node": self.key, "from": now, "to": to}
        if tree.path is not None:
            work |= {"path_from": tree.get(node, "path"), "segment": segment}
        return work

    def _refuse_cycle(self, to: Any) -> Plan[None]:
        try:
            chain = yield from lineage(self.tree, to)
        except DataError as error:
            if error.code == "tree-node-missing":
                raise parent_missing(self.tree, to) from None
            raise
        if is_among(self.key, [each["_id"] for each in chain]):
            raise UsageError(
                f"{self.entry.model.__name__} {self.key!r} cannot be moved below {to!r}, which is "
                f"{'the node itself' if same_key(to, self.key) else 'below it'}; "
                "a tree has no cycles",
                code="tree-cycle",
            )

    def result(self, outcome: Raw) -> D:
        moved: D = as_written(self.entry, copy.deepcopy(outcome))
        return moved


def _place(tree: Tree, work: Raw, changes: Changes, before: Raw, at: int | None) -> Plan[Raw]:
    """Give the node itself its new place; the node after."""
    entry = tree.entry
    key, source, target = work["node"], work["from"], work["to"]
    parent: Raw | None = None
    if target is not None:
        held = yield from hold_parents(tree, [target])
        (parent,) = held.values()
        parent = yield from complete(tree, parent)
    named = copy.deepcopy(before)
    values: Raw = {}
    if tree.segment is not None:
        put(named, tree.segment, work["segment"])
        values[tree.segment] = work["segment"]
    values |= below_parent(tree, named, parent)
    sets = {path: {"$literal": value} for path, value in values.items()}
    sets |= stamp_expressions(entry)
    with segment_errors(tree), translated(entry.model.__name__, [values]):
        after = yield from find_one_and_update(
            entry.collection, tree.living(by_id(key)), update_pipeline(entry, sets, {})
        )
    if after is None:
        raise node_missing(tree, key)
    if tree.children is not None and not same_key(source, target):
        if source is not None:
            yield from rewrite(tree, [(source, unlisting(tree, [key]))], changes)
        if target is not None:
            indexes = {} if at is None else {freeze(key): at}
            yield from rewrite(tree, [(target, listing(tree, [key], indexes))], changes)
    (after,) = yield from follow_own(entry, [(before, after)])
    yield from changes.add(entry, [(before, after)])
    return after


# -- what is below it ------------------------------------------------------------------------------


def _by_array(tree: Tree) -> bool:
    """Whether descendants are found by their arrays rather than by their paths."""
    return tree.ancestors is not None and ("ancestors" in tree.lead or "path" not in tree.lead)


def _below(tree: Tree, work: Raw) -> Raw | None:
    """The condition that the descendants meet; None if a move does not change any."""
    if _by_array(tree):
        return {tree.roles["ancestors"]: {"$eq": work["node"]}}
    if tree.path is None or split(work["path_from"]) is None:
        return None
    return {tree.path: below(work["path_from"])}


def _remaining(tree: Tree, work: Raw, node: Raw, descendants: Raw) -> Raw:
    """The condition that descendants meet which still have their old place."""
    if not _by_array(tree):
        return descendants
    stored = tree.roles["ancestors"]
    above = tree.get(node, "ancestors")
    moved: Raw = {f"{stored}.{len(above)}": {"$eq": node["_id"]}}
    if above:
        moved[f"{stored}.{len(above) - 1}"] = {"$eq": above[-1]}
    old: list[Raw] = [{"$nor": [moved]}]
    if tree.path is not None and split(work["path_from"]) is not None:
        old.append({tree.path: below(work["path_from"])})
    return {**descendants, "$or": old}


def _descend(tree: Tree, work: Raw, node: Raw, chosen: Raw, changes: Changes) -> Plan[None]:
    """Give descendants the ancestors and paths that follow from the node's."""
    sets: Raw = {}
    if tree.ancestors is not None:
        stored = f"${tree.ancestors}"
        place = {"$indexOfArray": [stored, {"$literal": node["_id"]}]}
        since = {"$slice": [stored, {"$max": [place, 0]}, _ALL]}
        new = {"$concatArrays": [{"$literal": tree.get(node, "ancestors")}, since]}
        listed = {"$and": [{"$isArray": stored}, {"$gte": [{"$ifNull": [place, -1]}, 0]}]}
        sets[tree.ancestors] = {"$cond": [listed, new, stored]}
    sets |= new_path(tree, work.get("path_from"), tree.get(node, "path"))
    yield from rewrite_all(tree, chosen, sets, changes)


def move_some(tree: Tree, work: Raw, pace: Pace, changes: Changes) -> Plan[Step]:
    """Move some descendants of a node that has moved."""
    node = yield from find_one_and_update(
        tree.collection,
        tree.living(by_id(work["node"])),
        {"$inc": {REVISION: 1}},
        projection=tree.projection,
    )
    descendants = _below(tree, work)
    if node is not None and descendants is not None:
        # By id only where the ids can be cut into ranges, and where an index gives that order.
        ranged = _by_array(tree) and tree.entry.ids.shape.kind == "scalar"
        remaining = _remaining(tree, work, node, descendants)
        keys = yield from pace.choose(tree, work, remaining, by_id=ranged)
        if keys:
            yield from _descend(tree, work, node, {"_id": {"$in": keys}}, changes)
            return Step(ended=False, done=len(keys), after=keys[-1])
        if work.get("after") is not None:
            # Once more from the start, for those who were inserted meanwhile.
            return Step(ended=False)
    if work["from"] is not None:
        yield from update_one(tree.collection, tree.living(by_id(work["from"])), {"$unset": {MOVING: 1}})
    return Step(ended=True)
