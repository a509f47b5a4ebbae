"""New nodes and deleted ones: what a plain write of a node does to its tree.

An insert also writes the parent, so that it conflicts with whoever moves or
removes the parent or anything above it: a move rewrites the whole subtree. It
does not touch what moves share, and costs the same in a tree of any size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.errors import DataError, UsageError
from treadle.graph.changes import Changes
from treadle.graph.rule import REVISION
from treadle.patterns.tree import state
from treadle.patterns.tree.fields import (
    ABOVE,
    MOVING,
    TREE_CHECK_MAX,
    UNSTATED,
    Tree,
    not_rebuilt,
    parent_missing,
)
from treadle.patterns.tree.reads import first_key, lineage, nodes_by_key, outside_child, parent_of
from treadle.patterns.tree.rewriting import (
    NO_INDEXES,
    listing,
    rewrite,
    rewrite_all,
    segment_taken,
    unlisting,
)
from treadle.patterns.tree.segments import join, path_above, split
from treadle.plan import Plan, Raw, by_id, find, find_one, find_one_and_update, update_many, update_one
from treadle.query.keys import freeze, freeze_all, same_key
from treadle.query.paths import has, put, value_at


@dataclass(slots=True)
class Placement:
    """Where new nodes go: the order in which to insert them, and who must list them."""

    order: list[Raw]
    # Per parent outside the batch (frozen id): its id, and its new children in their order.
    lists: dict[Any, tuple[Any, list[Any]]] = field(default_factory=dict)


def stands_alone(tree: Tree, raws: Sequence[Raw], stated: Sequence[Any]) -> bool:
    """Whether all these nodes are roots, so that no other document is concerned."""
    for raw, parent in zip(raws, stated, strict=True):
        if parent is not UNSTATED:
            if parent is not None:
                return False
        elif tree.get(raw, "parent") is not None or tree.get(raw, "children"):
            return False
        if tree.parent is None and path_above(tree.get(raw, "path") or "") is not None:
            return False
    return True


def place(tree: Tree, raws: Sequence[Raw], stated: Sequence[Any]) -> Plan[Placement]:
    """Fill the tree's fields of new nodes from their parents, which may be among them."""
    if tree.segment is not None:
        for raw in raws:
            tree.segment_of(raw)
    parents = yield from parents_of(tree, raws, stated)
    order = parents_first(tree, raws, parents)
    inside = {freeze(raw["_id"]): raw for raw in raws}
    # Where the parent lists its children it is written anyway.
    outside = parents_outside(raws, parents)
    held = yield from hold_parents(tree, outside, look_only=tree.children is not None)
    above: dict[Any, Raw] = {}
    placement = Placement(order)
    for raw in order:
        own = freeze(raw["_id"])
        key = parents[own]
        if tree.children is not None:
            put(raw, tree.children, [])
        if key is None:
            _fill(tree, raw, None)
        elif freeze(key) in inside:
            parent = inside[freeze(key)]
            _fill(tree, raw, parent)
            if tree.children is not None:
                tree.get(parent, "children").append(raw["_id"])
        else:
            if freeze(key) not in above:
                above[freeze(key)] = yield from complete(tree, held[freeze(key)])
            _fill(tree, raw, above[freeze(key)])
            placement.lists.setdefault(freeze(key), (key, []))[1].append(raw["_id"])
    yield from _refuse_reserved(tree, raws, parents, held)
    return placement


def _fill(tree: Tree, raw: Raw, parent: Raw | None) -> None:
    """Set what a node holds of the way down to it."""
    for role, value in below_parent(tree, raw, parent).items():
        put(raw, role, value)


def below_parent(tree: Tree, raw: Raw, parent: Raw | None) -> Raw:
    """The stored fields of a node below a complete parent, or of a root."""
    values: Raw = {}
    if tree.parent is not None:
        values[tree.parent] = None if parent is None else parent["_id"]
    if tree.ancestors is not None:
        values[tree.ancestors] = [] if parent is None else [*tree.get(parent, "ancestors"), parent["_id"]]
    if tree.path is not None:
        values[tree.path] = join(None if parent is None else tree.get(parent, "path"), tree.segment_of(raw))
    return values


def parents_of(tree: Tree, raws: Sequence[Raw], stated: Sequence[Any]) -> Plan[dict[Any, Any]]:
    """The id of each new node's parent, by the node's frozen id."""
    parents: dict[Any, Any] = {}
    listed = _listed_parents(tree, raws, stated)
    by_path: dict[Any, str] = {}
    for raw, explicit in zip(raws, stated, strict=True):
        own = freeze(raw["_id"])
        if explicit is not UNSTATED:
            parents[own] = explicit
        elif tree.parent is not None:
            parents[own] = _agreed_parent(tree, raw, listed)
        elif tree.path is not None:
            by_path[own] = _stated_path(tree, raw)
            parents[own] = None
        else:
            parents[own] = listed.get(own)
    yield from _resolve_paths(tree, raws, by_path, parents)
    return parents


def parents_outside(raws: Sequence[Raw], parents: dict[Any, Any]) -> list[Any]:
    """The parents of new nodes that are not among them."""
    inside = {freeze(raw["_id"]) for raw in raws} | {freeze(None)}
    outside = {freeze(key): key for key in parents.values()}
    return [key for frozen, key in outside.items() if frozen not in inside]


def _agreed_parent(tree: Tree, raw: Raw, listed: dict[Any, Any]) -> Any:
    """The parent that a new node's field names, or that lists it, where the tree has both."""
    named, own = tree.get(raw, "parent"), freeze(raw["_id"])
    if own not in listed:
        return named
    if named is not None and not same_key(named, listed[own]):
        raise UsageError(
            f"{tree.entry.model.__name__} {raw['_id']!r} names {named!r} as its parent, but is listed by "
            f"{listed[own]!r}; correct one of the two",
            code="tree-child-unknown",
        )
    return listed[own]


def _stated_path(tree: Tree, raw: Raw) -> str:
    """The path that a node without a parent field says it has."""
    segment = tree.segment_of(raw)
    given = tree.get(raw, "path")
    if not given:
        return join(None, segment)
    segments = split(given)
    if segments is None or segments[-1] != segment:
        name = tree.entry.model.__name__
        raise UsageError(
            f"{name}.{tree.path} is {given!r}; leave it empty for a root, give the whole path with the "
            f"node's own segment last, such as {join(',company,', segment)!r}, or insert it with "
            f"store.tree({name}).insert(node, parent=id)",
            code="tree-path-invalid",
        )
    return str(given)


def _resolve_paths(
    tree: Tree, raws: Sequence[Raw], by_path: dict[Any, str], parents: dict[Any, Any]
) -> Plan[None]:
    """Add the parents of nodes that only their paths name."""
    above = {own: parent for own, path in by_path.items() if (parent := path_above(path)) is not None}
    known = {by_path[own]: raw["_id"] for raw in raws if (own := freeze(raw["_id"])) in by_path}
    unknown = sorted({path for path in above.values() if path not in known})
    most = TREE_CHECK_MAX
    for start in range(0, len(unknown), most):
        condition = {tree.roles["path"]: {"$in": unknown[start : start + most]}}
        rows = yield from find(tree.collection, tree.living(condition), tree.projection)
        known |= {tree.get(row, "path"): row["_id"] for row in rows}
    for own, path in above.items():
        if path not in known:
            raise parent_missing(tree, path)
        parents[own] = known[path]


def _listed_parents(tree: Tree, raws: Sequence[Raw], stated: Sequence[Any]) -> dict[Any, Any]:
    """Who is whose parent by the child lists of new nodes."""
    if tree.children is None:
        return {}
    among = {freeze(raw["_id"]) for raw in raws}
    parents: dict[Any, Any] = {}
    for raw, explicit in zip(raws, stated, strict=True):
        children = tree.get(raw, "children") or []
        if not isinstance(children, list):
            raise UsageError(
                f"{tree.entry.model.__name__}.{tree.children} is no list; build the node through its "
                "constructor",
                code="model-inconsistent",
            )
        for child in children if explicit is UNSTATED else ():
            if freeze(child) not in among:
                raise UsageError(
                    f"{tree.entry.model.__name__}.{tree.children} names {child!r}, which is not inserted "
                    f"with it; move it there with store.tree({tree.entry.model.__name__}).move(id, parent)",
                    code="tree-child-unknown",
                )
            if parents.setdefault(freeze(child), raw["_id"]) != raw["_id"]:
                raise UsageError(
                    f"{tree.entry.model.__name__} {child!r} is in the lists of two parents",
                    code="tree-child-unknown",
                )
    return parents


def parents_first(tree: Tree, raws: Sequence[Raw], parents: dict[Any, Any]) -> list[Raw]:
    """The nodes in an order in which each comes after its parent; siblings as listed or given."""
    by_key = {freeze(raw["_id"]): raw for raw in raws}
    below: dict[Any, list[Raw]] = {}
    order: list[Raw] = []
    for raw in raws:
        key = parents[freeze(raw["_id"])]
        if key is None or freeze(key) not in by_key:
            order.append(raw)
        else:
            below.setdefault(freeze(key), []).append(raw)
    for raw in order:  # grows while it is gone through
        siblings = below.get(freeze(raw["_id"]), [])
        if tree.children is not None and siblings:
            rank = {freeze(key): number for number, key in enumerate(tree.get(raw, "children") or [])}
            siblings.sort(key=lambda each: rank.get(freeze(each["_id"]), len(rank)))
        order.extend(siblings)
    if len(order) < len(raws):
        ordered = {freeze(raw["_id"]) for raw in order}
        first = next(raw["_id"] for raw in raws if freeze(raw["_id"]) not in ordered)
        raise UsageError(
            f"these {tree.entry.model.__name__} documents are each other's ancestors ({first!r} among them); "
            "a tree has no cycles: correct their parents",
            code="tree-cycle",
        )
    return order


# -- parents ------------------------------------------------------------------------------------


def hold_parents(tree: Tree, keys: Sequence[Any], *, look_only: bool = False) -> Plan[dict[Any, Raw]]:
    """The parents by frozen id; written too, so that nobody else moves or removes them meanwhile."""
    if not keys:
        return {}
    collection, frozen = tree.collection, freeze_all(keys)
    bump = {"$inc": {REVISION: 1}}
    if len(keys) == 1 and not look_only:
        one = yield from find_one_and_update(
            collection, tree.living(by_id(keys[0])), bump, projection=tree.projection
        )
        held = {} if one is None else {frozen[0]: one}
    else:
        if not look_only:
            yield from update_many(collection, tree.living({"_id": {"$in": list(keys)}}), bump)
        held = yield from nodes_by_key(tree, keys, tree.projection)
    for key, known in zip(keys, frozen, strict=True):
        if known not in held:
            raise parent_missing(tree, key)
    return held


def complete(tree: Tree, node: Raw) -> Plan[Raw]:
    """A node with its ancestors and path, worked out from the tree where it lacks them."""
    lacks_array = tree.ancestors is not None and tree.get(node, "ancestors") is None
    lacks_path = tree.path is not None and split(tree.get(node, "path")) is None
    if not lacks_array and not lacks_path:
        return node
    if tree.truth == "path":
        raise not_rebuilt(tree, node["_id"], "path" if lacks_path else "ancestors")
    # A move above does not rewrite a node that has no array or path yet, so it must be shut out.
    yield from state.lock(tree)
    chain = yield from lineage(tree, node["_id"])
    for number, each in enumerate(chain):
        _fill(tree, each, chain[number - 1] if number else None)
    return chain[-1]


def _refuse_reserved(
    tree: Tree, raws: Sequence[Raw], parents: dict[Any, Any], held: dict[Any, Raw]
) -> Plan[None]:
    """Keep the paths free that descendants of a node in a pending move still have, or will have."""
    if tree.path is None:
        return
    reserved = {value_at(parent, MOVING) for parent in held.values()}
    work = yield from state.pending(tree)
    if work is not None and work["kind"] == "move" and work["from"] is None:
        # Of a root there is no parent that could hold it.
        reserved.add(work.get("path_from"))
    if any(tree.get(raw, "path") in reserved for raw in raws):
        raise state.TreeBusy(tree)
    if work is not None and work["kind"] in ("move", "lift"):
        yield from _refuse_twins(tree, raws, work)


def _refuse_twins(tree: Tree, raws: Sequence[Raw], work: Raw) -> Plan[None]:
    """Refuse a segment that a sibling has whose path has not been changed yet, or has been already.

    The index on paths sees no duplicate until the sibling's turn comes, which
    could then not be moved at all.
    """
    old: Any = work.get("path_from")
    if split(old) is None:
        return
    if work["kind"] == "lift":
        new: Any = work["path_to"]
    else:
        node = yield from find_one(tree.collection, tree.living(by_id(work["node"])), tree.projection)
        new = tree.get(node, "path")
        if split(new) is None:
            return
    twins = [
        there + path[len(here) :]
        for path in (tree.get(raw, "path") for raw in raws)
        for here, there in ((old, new), (new, old))
        if path.startswith(here) and path != here
    ]
    if twins and (yield from first_key(tree, {tree.roles["path"]: {"$in": twins}})) is not None:
        raise segment_taken(tree)


def list_children(
    tree: Tree, placement: Placement, changes: Changes, at: Mapping[Any, int] = NO_INDEXES
) -> Plan[None]:
    """Put new nodes into the lists of their parents: last, or at the index given for a frozen id."""
    if tree.children is None:
        return
    yield from rewrite(
        tree, [(key, listing(tree, children, at)) for key, children in placement.lists.values()], changes
    )


# -- deletion -----------------------------------------------------------------------------------------


def before_deletion(tree: Tree, nodes: Sequence[Raw]) -> Plan[None]:
    """Refuse to delete nodes whose children would be left behind."""
    if any(value_at(node, MOVING) is not None for node in nodes):
        raise state.TreeBusy(tree)
    child = yield from outside_child(tree, nodes)
    name = tree.entry.model.__name__
    if child is not None:
        raise DataError(
            f"this {name} has children ({child!r} among them), which would be left without a parent; use "
            f"store.tree({name}).remove(id, children='subtree'), or children='lift' to keep them",
            code="tree-has-children",
        )


def unlist(tree: Tree, keys: Sequence[Any], changes: Changes) -> Plan[None]:
    """Take deleted nodes out of the lists that hold them."""
    if tree.children is not None:
        condition = {tree.children: {"$in": list(keys)}, "_id": {"$nin": list(keys)}}
        yield from rewrite_all(tree, condition, unlisting(tree, keys), changes)


# -- deleted and still stored -------------------------------------------------------------------------


def remember_parents(tree: Tree, nodes: Sequence[Raw]) -> Plan[None]:
    """Note the parents of nodes that are deleted softly, by which they find their place when restored."""
    if tree.entry.paths.deletion is None or tree.truth == "parent":
        return
    for node in nodes:
        above = yield from parent_of(tree, node)
        yield from update_one(tree.collection, by_id(node["_id"]), {"$set": {ABOVE: above}})


def replant(tree: Tree, node: Raw) -> Plan[Placement]:
    """Give a node that comes back its place below its former parent, wherever that is now."""
    if tree.children is not None:
        put(node, tree.children, [])
    noted = tree.truth != "parent" and has(node, ABOVE)
    return (yield from place(tree, [node], [value_at(node, ABOVE) if noted else UNSTATED]))


# -- replace ------------------------------------------------------------------------------------------


def check_replacement(tree: Tree, before: Raw, after: Raw) -> None:
    """Refuse a replacement that would move or rename a node behind the tree's back."""
    name = tree.entry.model.__name__
    for role in ("parent", "segment"):
        if role in tree.roles and tree.get(before, role) != tree.get(after, role):
            how = "move(id, parent)" if role == "parent" else "rename(id, segment)"
            raise UsageError(
                f"this {name} has another {tree.roles[role]!r} than the stored one; to change it use "
                f"store.tree({name}).{how}, or read the document again if somebody else did",
                code="tree-replace-moves",
            )
