"""Moving and renaming: one transaction where the subtree is small, chunks where it is large.

A move shuts out all other moves (`state.py`), looks whether the new parent
lies below the node, and really writes old parent lists, new parent, node and
descendants. So no two moves can close a circle between them, and an insert
below any of these nodes meets the move.

A large subtree is moved in chunks. The node itself moves first, and what is
owed is committed with it. Each chunk takes descendants that still have their
old ancestors, and really writes the node. A node that is inserted meanwhile
below one that has not been moved yet also has the old ancestors, and is
therefore found by a later chunk; below one that has been moved it has the new
ones. The work ends when a search finds none with the old ones.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from pymongo.errors import OperationFailure

from treadle.engine import crud
from treadle.engine.ledger import Ledger
from treadle.engine.pipelines import BUMP, formula_stages
from treadle.engine.react import UNBOUNDED, react
from treadle.engine.set_aside import set_aside
from treadle.engine.work import Work
from treadle.engine.writes import follow_own
from treadle.errors import DataError, UsageError
from treadle.graph.calls import hierarchy_of
from treadle.graph.change import Change
from treadle.graph.gather import freeze
from treadle.graph.graph import Graph
from treadle.graph.pattern import REVISION, Entry
from treadle.model.document import Document
from treadle.patterns.tree import state
from treadle.patterns.tree.fields import MOVING, Tree, TreeRule, node_missing, parent_missing
from treadle.patterns.tree.pace import Pace, in_the_way
from treadle.patterns.tree.placing import (
    UNSTATED,
    below_parent,
    complete,
    follows,
    hold_parents,
    listing,
    rewrite,
    segment_errors,
    unlisting,
)
from treadle.patterns.tree.reads import lineage, parent_of
from treadle.patterns.tree.segments import below, check_segment, split
from treadle.plan import (
    Plan,
    Raw,
    by_id,
    find,
    find_one,
    find_one_and_update,
    transact,
    update_many,
    update_one,
)
from treadle.plan.capabilities import Capabilities
from treadle.query.paths import put

D = TypeVar("D", bound=Document)

_ALL = 1_000_000_000


def tree_of(entry: Entry[Any]) -> Tree:
    """The model's tree, or an error that says how to have one."""
    rule = hierarchy_of(entry)
    assert isinstance(rule, TreeRule)
    return rule.tree


class Move(Work[D]):
    """A node, and all below it, under another parent or with another segment."""

    def __init__(
        self,
        entry: Entry[D],
        key: Any,
        parent: Any = UNSTATED,
        segment: Any = UNSTATED,
        *,
        whole: bool = False,
    ) -> None:
        self.entry = entry
        self.tree = tree_of(entry)
        self.key = entry.identity(key)
        self.parent = parent if parent is UNSTATED or parent is None else entry.identity(parent)
        self.segment = segment
        # Inside the caller's own transaction nothing can be left for later.
        self.whole = whole
        self.owes = False
        if segment is not UNSTATED:
            if self.tree.segment is None:
                raise UsageError(
                    f"{entry.model.__name__} has no segment to rename; only MaterializedPath has one",
                    code="tree-segment-invalid",
                )
            check_segment(segment, f"{entry.model.__name__}.{self.tree.segment}")

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[Raw]:
        tree = self.tree
        self.owes = False
        yield from begin(tree)
        node = yield from find_one(tree.entry.collection, by_id(self.key))
        if node is None:
            raise node_missing(tree, self.key)
        work = yield from self._work(node)
        if work is None:
            return node
        after = yield from apply(tree, work, ledger, node)
        if not tree.rewrites:
            return after
        if self.whole or not (yield from _many(tree, work)):
            with segment_errors(tree):
                yield from _descend(tree, work, after, None, ledger)
            return after
        yield from state.owe(tree, work)
        if tree.path is not None and work["from"] is not None:
            # Nobody may take the old path while descendants still have it.
            yield from update_one(
                tree.entry.collection, by_id(work["from"]), {"$set": {MOVING: work["path_from"]}}
            )
        self.owes = True
        return after

    def _work(self, node: Raw) -> Plan[Raw | None]:
        """What is to be done, in full; None if it is so already."""
        tree = self.tree
        now = yield from parent_of(tree, node)
        to = now if self.parent is UNSTATED else self.parent
        segment = tree.get(node, "segment") if self.segment is UNSTATED else self.segment
        same = freeze(to) == freeze(now) and type(to) is type(now)
        if same and segment == tree.get(node, "segment"):
            return None
        if to is not None and not same:
            chain = yield from lineage_of_parent(tree, to)
            if freeze(self.key) in chain:
                raise UsageError(
                    f"{self.entry.model.__name__} {self.key!r} cannot be moved below {to!r}, which is "
                    f"{'the node itself' if freeze(to) == freeze(self.key) else 'below it'}; "
                    "a tree has no circles",
                    code="tree-cycle",
                )
        work: Raw = {"kind": "move", "node": self.key, "from": now, "to": to}
        if tree.path is not None:
            work |= {"path_from": tree.get(node, "path"), "segment": segment}
        return work

    def result(self, outcome: Raw) -> D:
        moved: D = self.entry.codec.load(copy.deepcopy(outcome))
        return moved


def lineage_of_parent(tree: Tree, key: Any) -> Plan[set[Any]]:
    """The frozen ids of a future parent and all above it."""
    try:
        chain = yield from lineage(tree, key)
    except DataError as error:
        if error.code == "tree-node-missing":
            raise parent_missing(tree, key) from None
        raise
    return {freeze(each["_id"]) for each in chain}


def begin(tree: Tree) -> Plan[None]:
    """Shut out all other moves; whatever is owed must end first."""
    if (yield from state.take(tree)) is not None:
        raise state.TreeBusy(tree)


# -- the node itself ---------------------------------------------------------------------------


def apply(tree: Tree, work: Raw, ledger: Ledger, before: Raw) -> Plan[Raw]:
    """Give the node its new place; the node after."""
    entry = tree.entry
    key, source, target = work["node"], work["from"], work["to"]
    parent: Raw | None = None
    if target is not None:
        held = yield from hold_parents(tree, [target])
        parent = yield from complete(tree, held[freeze(target)])
    named = dict(before)
    values: Raw = {}
    if tree.segment is not None:
        named = _with(before, tree.segment, work["segment"])
        values[tree.segment] = work["segment"]
    values |= below_parent(tree, named, parent)
    yield from ledger.note_before(entry, [key])
    sets = {path: {"$literal": value} for path, value in values.items()}
    with segment_errors(tree), crud.translated(entry.model.__name__, [values]):
        after = yield from find_one_and_update(
            entry.collection, by_id(key), [{"$set": {**sets, **BUMP}}, *formula_stages(entry)]
        )
    if after is None:
        raise node_missing(tree, key)
    if tree.children is not None and freeze(source) != freeze(target):
        if source is not None:
            yield from rewrite(tree, [(source, unlisting(tree, [key]))], ledger)
        if target is not None:
            yield from rewrite(tree, [(target, listing(tree, [key]))], ledger)
    (after,) = yield from follow_own(entry, [(before, after)])
    ledger.add(Change(entry.collection, key, before, after))
    return after


def _with(raw: Raw, stored: str, value: Any) -> Raw:
    changed = copy.deepcopy(raw)
    put(changed, stored, value)
    return changed


# -- what is below it ------------------------------------------------------------------------------


def _by_array(tree: Tree) -> bool:
    """Whether descendants are found by their arrays rather than by their paths."""
    return tree.ancestors is not None and ("ancestors" in tree.lead or "path" not in tree.lead)


def _remaining(tree: Tree, work: Raw, node: Raw) -> Raw:
    """The condition that descendants meet which still have their old place."""
    if not _by_array(tree):
        return {tree.roles["path"]: below(work["path_from"])}
    stored = tree.roles["ancestors"]
    above = tree.get(node, "ancestors")
    moved: Raw = {f"{stored}.{len(above)}": {"$eq": node["_id"]}}
    if above:
        moved[f"{stored}.{len(above) - 1}"] = {"$eq": above[-1]}
    remaining: Raw = {stored: {"$eq": node["_id"]}, "$nor": [moved]}
    if tree.path is not None and split(work.get("path_from")) is not None:
        old = {"$and": [{stored: {"$eq": node["_id"]}}, {tree.path: below(work["path_from"])}]}
        return {stored: {"$eq": node["_id"]}, "$or": [{"$nor": [moved]}, old]}
    return remaining


def _many(tree: Tree, work: Raw) -> Plan[bool]:
    """Whether more nodes are below than go into one transaction."""
    if _by_array(tree):
        condition: Raw = {tree.roles["ancestors"]: {"$eq": work["node"]}}
    elif split(work["path_from"]) is None:
        return False
    else:
        condition = {tree.roles["path"]: below(work["path_from"])}
    most = tree.entry.limits.tree_move_max
    beyond = yield from find(tree.entry.collection, condition, {"_id": 1}, skip=most, limit=1)
    return bool(beyond)


def _descend(tree: Tree, work: Raw, node: Raw, keys: list[Any] | None, ledger: Ledger) -> Plan[None]:
    """Give descendants the ancestors and paths that follow from the node's; all, or these."""
    sets: Raw = {}
    if tree.ancestors is not None:
        stored = f"${tree.ancestors}"
        place = {"$indexOfArray": [stored, {"$literal": node["_id"]}]}
        since = {"$slice": [stored, {"$max": [place, 0]}, _ALL]}
        new = {"$concatArrays": [{"$literal": tree.get(node, "ancestors")}, since]}
        listed = {"$and": [{"$isArray": stored}, {"$gte": [{"$ifNull": [place, -1]}, 0]}]}
        sets[tree.ancestors] = {"$cond": [listed, new, stored]}
    old = work.get("path_from")
    if tree.path is not None and old is not None and split(old) is not None:
        stored = f"${tree.path}"
        rest = {"$substrBytes": [stored, len(old.encode()), -1]}
        new = {"$concat": [{"$literal": tree.get(node, "path")}, rest]}
        begins = {"$eq": [{"$indexOfBytes": [{"$ifNull": [stored, ""]}, {"$literal": old}]}, 0]}
        sets[tree.path] = {"$cond": [begins, new, stored]}
    if not sets:
        return
    condition = _remaining(tree, work, node)
    if follows(tree):
        if keys is None:
            found = yield from find(tree.entry.collection, condition, {"_id": 1})
            keys = [each["_id"] for each in found]
        yield from rewrite(tree, [(key, sets) for key in keys], ledger)
        return
    if keys is not None:
        condition = {"$and": [{"_id": {"$in": keys}}, condition]}
    stages = [{"$set": {**sets, **BUMP}}, *formula_stages(tree.entry)]
    yield from update_many(tree.entry.collection, condition, stages)


def _next_keys(tree: Tree, work: Raw, node: Raw, after: Any, most: int) -> Plan[list[Any]]:
    """Some descendants that still have their old place."""
    condition = _remaining(tree, work, node)
    # By id only where the ids can be cut into ranges, and where an index gives that order.
    ranged = _by_array(tree) and tree.entry.identity_shape.kind == "scalar"
    bounds: Raw = {}
    if ranged and after is not None:
        bounds["$gt"] = after
    if work.get("passed"):
        bounds["$nin"] = work["passed"]
    if bounds:
        condition = {**condition, "_id": bounds}
    if beside := beside_passed(tree, work):
        condition = {"$and": [condition, *beside]}
    order = [("_id", 1)] if ranged else from_above(tree)
    found = yield from find(tree.entry.collection, condition, {"_id": 1}, sort=order, limit=most)
    return [each["_id"] for each in found]


def move_chunk(tree: Tree, graph: Graph, server: Capabilities, token: Any, pace: Pace) -> Plan[bool]:
    """Move some descendants, in one transaction; whether none is left."""
    pace.tried = []
    work = yield from state.hold(tree, token)
    if work is None:
        return True
    node = yield from find_one_and_update(
        tree.entry.collection, by_id(work["node"]), {"$inc": {REVISION: 1}}, projection=tree.projection
    )
    keys: list[Any] = []
    if node is not None:
        keys = yield from _next_keys(tree, work, node, work.get("after"), pace.most)
        if keys:
            pace.tried = keys
            ledger = Ledger()
            with segment_errors(tree):
                yield from _descend(tree, work, node, keys, ledger)
            yield from react(graph, server, ledger, copies_max=UNBOUNDED)
            yield from state.progress(tree, token, keys[-1], len(keys))
            return False
        if work.get("after") is not None:
            # Once more from the start, for those who were inserted meanwhile.
            yield from state.progress(tree, token, None, 0)
            return False
    if work["from"] is not None:
        yield from update_one(tree.entry.collection, by_id(work["from"]), {"$unset": {MOVING: 1}})
    yield from state.settle(tree, token)
    return True


# -- what is owed --------------------------------------------------------------------------------------


def finish(tree: Tree, graph: Graph, server: Capabilities) -> Plan[None]:
    """End what is owed, chunk by chunk; others may be at it too."""
    from treadle.patterns.tree.lifts import lift_chunk, stop
    from treadle.patterns.tree.removes import remove_chunk

    owed = yield from state.owed_by(tree)
    if owed is None:
        return
    token, pace = owed["token"], Pace(tree.entry.limits.tree_move_chunk)
    chunk = {"move": move_chunk, "remove": remove_chunk, "lift": lift_chunk}[owed["kind"]]
    ended = False
    while not ended:
        try:
            ended = yield from transact(lambda: chunk(tree, graph, server, token, pace))
            pace.faster()
        except (DataError, UsageError, OperationFailure) as error:
            # Not one of the nodes that were tried, but the node itself or one beside them.
            stuck = in_the_way(error) and not pace.tried
            refused = not (isinstance(error, OperationFailure) or in_the_way(error))
            if stuck or (refused and owed["kind"] != "move"):
                yield from stop(tree, token, error)
                return
            if not pace.slower(error):
                yield from pass_over(tree, token, pace.tried[0], error)


def pass_over(tree: Tree, token: Any, key: Any, error: Exception) -> Plan[None]:
    """Leave out a node that cannot be written, so that the others and the next move need not wait for it."""
    owed = yield from state.owed_by(tree)
    if owed is None or owed["token"] != token:
        return
    if len(owed.get("passed") or []) >= tree.entry.limits.tree_passed_max:
        raise error
    yield from set_aside(tree.rules[0].place.label, tree.entry.collection, key, error)
    path: str | None = None
    if tree.truth == "path":
        # Whatever is below it stays with it: by paths alone its parent could not be found again.
        node = yield from find_one(tree.entry.collection, by_id(key), tree.projection)
        path = tree.get(node, "path") if node is not None else None
    yield from state.pass_over(tree, token, key, path)


def beside_passed(tree: Tree, work: Raw) -> list[Raw]:
    """The conditions that a node is not below one that was passed over."""
    return (
        [{"$nor": [{tree.path: below(path)} for path in work["passed_paths"]]}]
        if work.get("passed_paths")
        else []
    )


def from_above(tree: Tree) -> list[tuple[str, int]] | None:
    """Parents before their children, where only paths tell who is whose."""
    return [(tree.roles["path"], 1)] if tree.truth == "path" else None
