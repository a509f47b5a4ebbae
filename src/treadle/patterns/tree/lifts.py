"""Lifting the children of a node that is removed to its parent, with all that is below them.

A lift that is too large for one transaction goes in chunks, and the node
itself goes last. Each chunk takes nodes that still name the node as parent, as
ancestor or in their path, found by a condition and not from a list, so that
whatever is inserted below it meanwhile is lifted too.
"""

from __future__ import annotations

from typing import Any

from treadle.engine.deletes import check_restrictions, delete_documents, restricting
from treadle.errors import DataError
from treadle.graph.changes import Changes
from treadle.graph.rule import REVISION
from treadle.patterns.tree.fields import TREE_CHECK_MAX, Tree
from treadle.patterns.tree.pace import Pace, Step
from treadle.patterns.tree.reads import first_key, parent_of
from treadle.patterns.tree.rewriting import listing, new_path, rewrite, rewrite_all, segment_taken, unlisting
from treadle.patterns.tree.segments import SEPARATOR, at_most, below, path_above, split
from treadle.plan import Plan, Raw, by_id, find, find_one, find_one_and_update, update_one


def lift_work(tree: Tree, node: Raw) -> Plan[Raw]:
    """What is to be done for a node, in full."""
    to = yield from parent_of(tree, node)
    work: Raw = {"kind": "lift", "node": node["_id"], "to": to}
    if tree.path is not None:
        own = tree.get(node, "path")
        work |= {"path_from": own, "path_to": path_above(own or "") or SEPARATOR}
    return work


def lift(tree: Tree, work: Raw, node: Raw, pace: Pace, changes: Changes) -> Plan[bool]:
    """Lift all at once; False, and nothing is changed, where there are more nodes than the pace allows."""
    keys = yield from _keys(tree, work, pace)
    if len(keys) >= pace.most:
        yield from check_restrictions(restricting(tree.entry), [node])
        yield from _refuse_taken(tree, node, work)
        return False
    yield from _lift_lists(tree, node, work["to"], changes)
    if keys:
        if tree.path is not None:
            # A child may take over the very path of the node.
            yield from update_one(tree.collection, tree.living(by_id(node["_id"])), {"$set": {tree.path: ""}})
        yield from _lift(tree, work, keys, changes)
    return True


def _keys(tree: Tree, work: Raw, pace: Pace) -> Plan[list[Any]]:
    """Some nodes that still depend on the one that goes."""
    conditions: list[Raw] = [
        {stored: {"$eq": work["node"]}} for stored in (tree.parent, tree.ancestors) if stored is not None
    ]
    if tree.path is not None and split(work["path_from"]) is not None:
        conditions.append({tree.path: below(work["path_from"])})
    return (yield from pace.choose(tree, work, {"$or": conditions})) if conditions else []


def _lift(tree: Tree, work: Raw, keys: list[Any], changes: Changes) -> Plan[None]:
    """Bring nodes one level up."""
    gone = {"$literal": work["node"]}
    sets: Raw = {}
    if tree.parent is not None:
        stored = f"${tree.parent}"
        sets[tree.parent] = {"$cond": [{"$eq": [stored, gone]}, {"$literal": work["to"]}, stored]}
    if tree.ancestors is not None:
        stored = f"${tree.ancestors}"
        kept = {"$filter": {"input": stored, "cond": {"$ne": ["$$this", gone]}}}
        sets[tree.ancestors] = {"$cond": [{"$isArray": stored}, kept, stored]}
    sets |= new_path(tree, work.get("path_from"), work.get("path_to"))
    yield from rewrite_all(tree, {"_id": {"$in": keys}}, sets, changes)


def _lift_lists(tree: Tree, node: Raw, above: Any, changes: Changes) -> Plan[None]:
    """Put the node's children into its own place in the list above; those that came since, at the end."""
    own = tree.get(node, "children")
    if not own:
        return
    if above is not None:
        parent = yield from find_one(tree.collection, tree.living(by_id(above)), tree.projection)
        there = node["_id"] in (tree.get(parent, "children") or [])
        lists = unlisting(tree, [node["_id"]], own) if there else listing(tree, own)
        yield from rewrite(tree, [(above, lists)], changes)
    yield from rewrite(tree, [(node["_id"], {tree.roles["children"]: {"$literal": []}})], changes)


def _refuse_taken(tree: Tree, node: Raw, work: Raw) -> Plan[None]:
    """Refuse children whose segments their new siblings have, or the node itself."""
    own: Any = tree.get(node, "path")
    if tree.path is None or split(own) is None:
        return
    above = work["path_to"]
    depth = len(split(own) or []) + 1
    last, end, most = own, below(own)["$lt"], TREE_CHECK_MAX
    while True:
        condition = {tree.path: {"$gt": last, "$lt": end, **at_most(depth)}}
        children = yield from find(
            tree.collection, tree.living(condition), {tree.path: 1}, sort=[(tree.path, 1)], limit=most
        )
        if not children:
            return
        paths = [tree.get(each, "path") for each in children]
        lifted = [above + path[len(own) :] for path in paths]
        # Also the node's own path: while chunk follows chunk, the two could not be told apart.
        if (yield from first_key(tree, {tree.path: {"$in": lifted}})) is not None:
            raise segment_taken(tree)
        last = paths[-1]


def lift_some(tree: Tree, work: Raw, pace: Pace, changes: Changes) -> Plan[Step]:
    """Lift some nodes; when none is left, delete the node itself."""
    bump = {"$inc": {REVISION: 1}}
    node = yield from find_one_and_update(tree.collection, tree.living(by_id(work["node"])), bump)
    if node is not None:
        yield from _lift_lists(tree, node, work["to"], changes)
        keys = yield from _keys(tree, work, pace)
        if keys:
            yield from _lift(tree, work, keys, changes)
            return Step(ended=False)
        if work.get("passed"):
            raise DataError(
                f"{work['passed'][0]!r} below it cannot be written (treadle.set_aside says why)",
                code="tree-remove-stopped",
            )
        node = yield from find_one(tree.collection, tree.living(by_id(work["node"])))
        yield from delete_documents(tree.entry, [node] if node else [], changes)
    return Step(ended=True, done=1)
