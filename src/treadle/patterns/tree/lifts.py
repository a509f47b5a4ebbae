"""Lifting more children than fit one transaction: chunk by chunk, and the node itself goes last.

What is owed is written down first, with the node's lists and the node's path.
Each chunk takes nodes that still name the node as parent, as ancestor or in
their path, found by a condition and not from a list, so that whatever is
inserted below it meanwhile is lifted too. When nothing is left, the node goes.
"""

from __future__ import annotations

from typing import Any

from pymongo.errors import OperationFailure

from treadle.engine.deletes import check_restrictions, delete_documents, restricting
from treadle.engine.ledger import Ledger
from treadle.engine.pipelines import BUMP, formula_stages
from treadle.engine.react import UNBOUNDED, react
from treadle.errors import DataError
from treadle.graph.graph import Graph
from treadle.graph.pattern import REVISION
from treadle.patterns.tree import state
from treadle.patterns.tree.fields import Tree
from treadle.patterns.tree.moves import beside_passed, from_above
from treadle.patterns.tree.pace import Pace
from treadle.patterns.tree.placing import (
    follows,
    listing,
    rewrite,
    segment_errors,
    segment_taken,
    unlisting,
)
from treadle.patterns.tree.reads import parent_of
from treadle.patterns.tree.segments import SEPARATOR, at_most, below, path_above, split
from treadle.plan import Plan, Raw, by_id, find, find_one, find_one_and_update, update_many
from treadle.plan.capabilities import Capabilities


def lifted(tree: Tree, key: Any, old_path: Any, above: Any) -> Raw:
    """The fields of what is below a node, one level up; expressions."""
    gone = {"$literal": key}
    sets: Raw = {}
    if tree.parent is not None:
        stored = f"${tree.parent}"
        sets[tree.parent] = {"$cond": [{"$eq": [stored, gone]}, {"$literal": above}, stored]}
    if tree.ancestors is not None:
        stored = f"${tree.ancestors}"
        kept = {"$filter": {"input": stored, "cond": {"$ne": ["$$this", gone]}}}
        sets[tree.ancestors] = {"$cond": [{"$isArray": stored}, kept, stored]}
    if tree.path is not None and split(old_path) is not None:
        stored = f"${tree.path}"
        rest = {"$substrBytes": [stored, len(old_path.encode()), -1]}
        new = {"$concat": [{"$literal": path_above(old_path) or SEPARATOR}, rest]}
        begins = {"$eq": [{"$indexOfBytes": [{"$ifNull": [stored, ""]}, {"$literal": old_path}]}, 0]}
        sets[tree.path] = {"$cond": [begins, new, stored]}
    return sets


def lift_lists(tree: Tree, node: Raw, above: Any, ledger: Ledger) -> Plan[None]:
    """Put the node's children into its own place in the list above; a second chunk changes nothing."""
    if tree.children is None:
        return
    own = tree.get(node, "children") or []
    if not own:
        return
    if above is not None:
        parent = yield from find_one(tree.entry.collection, by_id(above), tree.projection)
        there = node["_id"] in (tree.get(parent, "children") or [])
        # Not there any more: these came since, or the run before got no further.
        lists = unlisting(tree, [node["_id"]], own) if there else listing(tree, own)
        yield from rewrite(tree, [(above, lists)], ledger)
    yield from rewrite(tree, [(node["_id"], {tree.children: {"$literal": []}})], ledger)


def owe_lift(tree: Tree, node: Raw) -> Plan[Raw]:
    """Write down a large lift, or refuse it, before anything is changed."""
    yield from check_restrictions(restricting(tree.entry), [node["_id"]])
    yield from _refuse_taken(tree, node)
    work: Raw = {"kind": "lift", "node": node["_id"], "to": (yield from parent_of(tree, node))}
    if tree.path is not None:
        work["path_from"] = tree.get(node, "path")
    return (yield from state.owe(tree, work))


def _refuse_taken(tree: Tree, node: Raw) -> Plan[None]:
    """Refuse children whose segments the node's siblings have, or the node itself."""
    own: Any = tree.get(node, "path")
    if tree.path is None or split(own) is None:
        return
    above = path_above(own) or SEPARATOR
    depth = len(split(own) or []) + 1
    last, end, most = own, below(own)["$lt"], tree.entry.limits.tree_check_max
    while True:
        condition = {tree.path: {"$gt": last, "$lt": end, **at_most(depth)}}
        children = yield from find(
            tree.entry.collection, condition, {tree.path: 1}, sort=[(tree.path, 1)], limit=most
        )
        if not children:
            return
        paths = [tree.get(each, "path") for each in children]
        wanted = [above + path[len(own) :] for path in paths]
        # Also the node's own path: while chunk follows chunk, the two could not be told apart.
        taken = yield from find_one(tree.entry.collection, {tree.path: {"$in": wanted}}, {"_id": 1})
        if taken is not None:
            raise segment_taken(tree)
        last = paths[-1]


def _remaining(tree: Tree, work: Raw) -> Raw | None:
    """The condition that nodes meet which still hang on the one that goes."""
    conditions: list[Raw] = [
        {stored: {"$eq": work["node"]}} for stored in (tree.parent, tree.ancestors) if stored is not None
    ]
    if tree.path is not None and split(work["path_from"]) is not None:
        conditions.append({tree.path: below(work["path_from"])})
    if not conditions:
        return None
    passed = {"_id": {"$nin": work["passed"]}} if work.get("passed") else {}
    return {"$and": [{"$or": conditions, **passed}, *beside_passed(tree, work)]}


def _lift_some(tree: Tree, work: Raw, pace: Pace, ledger: Ledger) -> Plan[bool]:
    """Lift as many nodes as the pace allows; whether there were any."""
    pace.tried = []
    condition = _remaining(tree, work)
    if condition is None:
        return False
    found = yield from find(
        tree.entry.collection, condition, {"_id": 1}, sort=from_above(tree), limit=pace.most
    )
    pace.tried = [each["_id"] for each in found]
    if not pace.tried:
        return False
    sets = lifted(tree, work["node"], work.get("path_from"), work["to"])
    with segment_errors(tree):
        if follows(tree):
            yield from rewrite(tree, [(key, sets) for key in pace.tried], ledger)
        else:
            stages = [{"$set": {**sets, **BUMP}}, *formula_stages(tree.entry)]
            yield from update_many(tree.entry.collection, {"_id": {"$in": pace.tried}}, stages)
    return True


def lift_chunk(tree: Tree, graph: Graph, server: Capabilities, token: Any, pace: Pace) -> Plan[bool]:
    """Lift some nodes, in one transaction, or take the node out; whether that was the end of it."""
    pace.tried = []
    work = yield from state.hold(tree, token)
    if work is None:
        return True
    bump = {"$inc": {REVISION: 1}}
    node = yield from find_one_and_update(tree.entry.collection, by_id(work["node"]), bump)
    ledger = Ledger()
    if node is not None:
        yield from lift_lists(tree, node, work["to"], ledger)
        if (yield from _lift_some(tree, work, pace, ledger)):
            yield from react(graph, server, ledger, copies_max=UNBOUNDED)
            return False
        _refuse_passed(work)
        node = yield from find_one(tree.entry.collection, by_id(work["node"]))
        yield from delete_documents(tree.entry, [node] if node else [], ledger)
    yield from react(graph, server, ledger, copies_max=UNBOUNDED)
    yield from state.progress(tree, token, None, 1)
    yield from state.settle(tree, token)
    return True


def _refuse_passed(work: Raw) -> None:
    if work.get("passed"):
        raise DataError(
            f"{work['passed'][0]!r} below it cannot be written (treadle.set_aside says why)",
            code="tree-remove-stopped",
        )


def stop(tree: Tree, token: Any, error: Exception) -> Plan[None]:
    """Let work go that would stop whoever comes next as well; its caller is told."""
    # What the server says of a document may quote it, and has no place in a log.
    told = f"error {error.code}" if isinstance(error, OperationFailure) else str(error)
    state.log.warning("%s: what was owed to the tree stopped: %s", tree.entry.model.__name__, told)
    yield from state.settle(tree, token, told)
