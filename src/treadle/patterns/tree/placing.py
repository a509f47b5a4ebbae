"""New nodes and deleted ones: what a plain write of a node does to its tree.

An insert really writes the parent, so that it meets whoever moves or removes
the parent or anything above it: a move rewrites the whole subtree. It does
not touch what movers share, and costs the same in a tree of any size.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from pymongo.errors import OperationFailure

from treadle.engine.pipelines import BUMP, formula_stages
from treadle.engine.react import update_each
from treadle.errors import DataError, UsageError
from treadle.graph.change import Change, Changes
from treadle.graph.derived import CopyRule
from treadle.graph.gather import freeze
from treadle.graph.pattern import REVISION, Entry
from treadle.patterns.tree import state
from treadle.patterns.tree.fields import MOVING, Tree, not_rebuilt, parent_missing
from treadle.patterns.tree.reads import lineage, outside_child
from treadle.patterns.tree.segments import SEPARATOR, join, path_above, split
from treadle.plan import Plan, Raw, by_id, find, find_one, find_one_and_update, update_many
from treadle.plan.server_errors import DUPLICATE_KEY, refusals
from treadle.query.paths import overlap, put, top, value_at


class _Unstated:
    def __repr__(self) -> str:
        return "UNSTATED"


UNSTATED: Final = _Unstated()
"""Where a node goes is for its own fields to say."""


@dataclass(slots=True)
class Placed:
    """Where new nodes go: the order in which to insert them, and who must list them."""

    order: list[Raw]
    # Per parent outside the batch (frozen id): its id, and its new children in their order.
    lists: dict[Any, tuple[Any, list[Any]]] = field(default_factory=dict)


def stands_alone(tree: Tree, raws: Sequence[Raw], stated: Sequence[Any]) -> bool:
    """Whether all these nodes are roots, so that nobody else is concerned."""
    for raw, parent in zip(raws, stated, strict=True):
        if parent is not UNSTATED:
            if parent is not None:
                return False
        elif tree.get(raw, "parent") is not None or tree.get(raw, "children"):
            return False
        if tree.parent is None and path_above(tree.get(raw, "path") or "") is not None:
            return False
    return True


def place(tree: Tree, raws: Sequence[Raw], stated: Sequence[Any]) -> Plan[Placed]:
    """Fill the tree's fields of new nodes from their parents, which may be among them."""
    if tree.segment is not None:
        for raw in raws:
            tree.segment_of(raw)
    parents = yield from _parents(tree, raws, stated)
    order = parents_first(tree, raws, parents)
    inside = {freeze(raw["_id"]): raw for raw in raws}
    outside = {freeze(key): key for key in parents.values() if key is not None and freeze(key) not in inside}
    # Where the parent lists its children it is written anyway.
    held = yield from hold_parents(tree, list(outside.values()), look_only=tree.children is not None)
    above: dict[Any, Raw] = {}
    placed = Placed(order)
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
            placed.lists.setdefault(freeze(key), (key, []))[1].append(raw["_id"])
    yield from _refuse_reserved(tree, raws, parents, held)
    return placed


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


def _parents(tree: Tree, raws: Sequence[Raw], stated: Sequence[Any]) -> Plan[dict[Any, Any]]:
    """The id of each node's parent, by the node's frozen id."""
    parents: dict[Any, Any] = {}
    listed = listed_parents(tree, raws, stated)
    by_path: dict[Any, str] = {}
    for raw, explicit in zip(raws, stated, strict=True):
        own = freeze(raw["_id"])
        if explicit is not UNSTATED:
            parents[own] = explicit
        elif tree.parent is not None:
            parents[own] = agreed_parent(tree, raw, listed)
        elif tree.path is not None:
            by_path[own] = _stated_path(tree, raw)
            parents[own] = None
        else:
            parents[own] = listed.get(own)
    yield from _resolve_paths(tree, raws, by_path, parents)
    return parents


def agreed_parent(tree: Tree, raw: Raw, listed: dict[Any, Any]) -> Any:
    """The parent that a new node's field names, or that lists it, where the tree has both."""
    named, own = tree.get(raw, "parent"), freeze(raw["_id"])
    if own not in listed:
        return named
    if named is not None and freeze(named) != freeze(listed[own]):
        raise UsageError(
            f"{tree.entry.model.__name__} {raw['_id']!r} names {named!r} as its parent, but is listed by "
            f"{listed[own]!r}; mend one of them",
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
    wanted = {own: above for own, path in by_path.items() if (above := path_above(path)) is not None}
    if not wanted:
        return
    known = {by_path[own]: raw["_id"] for raw in raws if (own := freeze(raw["_id"])) in by_path}
    unknown = sorted({path for path in wanted.values() if path not in known})
    if unknown:
        stored = tree.roles["path"]
        found = yield from find(tree.entry.collection, {stored: {"$in": unknown}}, {stored: 1})
        known |= {tree.get(each, "path"): each["_id"] for each in found}
    for own, path in wanted.items():
        if path not in known:
            raise parent_missing(tree, path)
        parents[own] = known[path]


def listed_parents(tree: Tree, raws: Sequence[Raw], stated: Sequence[Any]) -> dict[Any, Any]:
    """Who is whose parent by the child lists of new nodes."""
    if tree.children is None:
        return {}
    among = {freeze(raw["_id"]) for raw in raws}
    parents: dict[Any, Any] = {}
    for raw, explicit in zip(raws, stated, strict=True):
        for child in (tree.get(raw, "children") or []) if explicit is UNSTATED else ():
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
        placed = {freeze(raw["_id"]) for raw in order}
        first = next(raw["_id"] for raw in raws if freeze(raw["_id"]) not in placed)
        raise UsageError(
            f"these {tree.entry.model.__name__} documents are each other's ancestors ({first!r} among them); "
            "a tree has no circles: mend their parents",
            code="tree-cycle",
        )
    return order


# -- parents ------------------------------------------------------------------------------------


def hold_parents(tree: Tree, keys: Sequence[Any], *, look_only: bool = False) -> Plan[dict[Any, Raw]]:
    """The parents by frozen id; really written, so that nobody moves or removes them meanwhile."""
    if not keys:
        return {}
    collection = tree.entry.collection
    bump = {"$inc": {REVISION: 1}}
    if look_only:
        found = yield from find(collection, {"_id": {"$in": list(keys)}}, tree.projection)
    elif len(keys) == 1:
        one = yield from find_one_and_update(collection, by_id(keys[0]), bump, projection=tree.projection)
        found = [] if one is None else [one]
    else:
        yield from update_many(collection, {"_id": {"$in": list(keys)}}, bump)
        found = yield from find(collection, {"_id": {"$in": list(keys)}}, tree.projection)
    held = {freeze(each["_id"]): each for each in found}
    for key in keys:
        if freeze(key) not in held:
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
    yield from state.take(tree)
    chain = yield from lineage(tree, node["_id"])
    above: Raw | None = None
    for each in chain:
        right: Raw = {"_id": each["_id"]}
        for path, value in below_parent(tree, each, above).items():
            put(right, path, value)
        above = right
    assert above is not None
    if top(MOVING) in node:
        above[top(MOVING)] = node[top(MOVING)]
    return above


def _refuse_reserved(
    tree: Tree, raws: Sequence[Raw], parents: dict[Any, Any], held: dict[Any, Raw]
) -> Plan[None]:
    """Keep the paths free that descendants of a node on the move still have, or will have."""
    if tree.path is None:
        return
    reserved = {value_at(parent, MOVING) for parent in held.values()}
    owed = yield from state.owed_by(tree)
    if owed is not None and owed["kind"] == "move":
        # Of a root there is no parent that could hold it.
        reserved |= {owed.get("path_from")} if owed["from"] is None else set()
    if any(tree.get(raw, "path") in reserved for raw in raws):
        raise state.TreeBusy(tree)
    if owed is not None and owed["kind"] in ("move", "lift"):
        yield from _refuse_twins(tree, raws, owed)


def _refuse_twins(tree: Tree, raws: Sequence[Raw], owed: Raw) -> Plan[None]:
    """Refuse a segment that a sibling has whose path has not been changed yet, or has been already.

    The index on paths does not see the two as one until the sibling's turn
    comes, which could then not be moved at all.
    """
    old: Any = owed.get("path_from")
    if split(old) is None:
        return
    if owed["kind"] == "lift":
        new: Any = path_above(old) or SEPARATOR
    else:
        node = yield from find_one(tree.entry.collection, by_id(owed["node"]), tree.projection)
        new = tree.get(node, "path")
        if split(new) is None:
            return
    twins = [
        there + path[len(here) :]
        for path in (tree.get(raw, "path") for raw in raws)
        for here, there in ((old, new), (new, old))
        if path.startswith(here) and path != here
    ]
    stored = tree.roles["path"]
    if twins and (yield from find_one(tree.entry.collection, {stored: {"$in": twins}}, {"_id": 1})):
        raise segment_taken(tree)


# -- child lists --------------------------------------------------------------------------------------


def follows(tree: Tree) -> bool:
    """Whether others, or the node's own cards, are fed by the tree's fields."""
    return _feeds(tree) or _has_cards(tree)


def _feeds(tree: Tree) -> bool:
    entry = tree.entry
    if not entry.feeds:
        return False
    watched = entry.watched
    return watched is None or any(overlap(one, other) for one in watched for other in tree.roles.values())


def _has_cards(tree: Tree) -> bool:
    stored = tree.roles.values()
    return any(overlap(rule.reference_path, path) for rule in tree.entry.having(CopyRule) for path in stored)


def rewrite(tree: Tree, updates: Sequence[tuple[Any, Raw]], changes: Changes) -> Plan[None]:
    """Set fields of nodes to expressions, with all that others take from it."""
    if not updates:
        return
    entry = tree.entry
    chosen = {"_id": {"$in": [key for key, _ in updates]}}
    followed = follows(tree)
    befores = (yield from find(entry.collection, chosen)) if followed else []
    if followed:
        yield from changes.note_before(entry, [each["_id"] for each in befores])
    stages = formula_stages(entry)
    yield from update_each(entry, [(key, [{"$set": {**sets, **BUMP}}, *stages]) for key, sets in updates])
    if not befores:
        return
    from treadle.engine.writes import follow_own

    found = yield from find(entry.collection, chosen)
    afters = {freeze(each["_id"]): each for each in found}
    pairs = [(each, afters[freeze(each["_id"])]) for each in befores if freeze(each["_id"]) in afters]
    finals = (yield from follow_own(entry, pairs)) if _has_cards(tree) else [after for _, after in pairs]
    for (before, _), after in zip(pairs, finals, strict=True):
        changes.add(Change(entry.collection, before["_id"], before, after))


def listing(tree: Tree, keys: Sequence[Any]) -> Raw:
    """The fields of a parent that lists these as well, if it does not yet."""
    stored = tree.roles["children"]
    present = {"$ifNull": [f"${stored}", []]}
    new = {"$filter": {"input": {"$literal": list(keys)}, "cond": {"$not": {"$in": ["$$this", present]}}}}
    return {stored: {"$concatArrays": [present, new]}}


def unlisting(tree: Tree, keys: Sequence[Any], instead: Sequence[Any] = ()) -> Raw:
    """The fields of a parent that lists these no more; `instead` takes the place of the first."""
    stored = tree.roles["children"]
    present: Any = {"$ifNull": [f"${stored}", []]}
    if instead:
        place = {"$indexOfArray": [present, {"$literal": keys[0]}]}
        many = 1_000_000_000
        head = {"$cond": [{"$gt": [place, 0]}, {"$slice": [present, 0, {"$max": [place, 1]}]}, []]}
        tail = {"$slice": [present, {"$max": [place, 0]}, many]}
        present = {"$concatArrays": [head, {"$literal": list(instead)}, tail]}
    gone = {"$in": ["$$this", {"$literal": list(keys)}]}
    return {stored: {"$filter": {"input": present, "cond": {"$not": [gone]}}}}


def list_children(tree: Tree, placed: Placed, changes: Changes) -> Plan[None]:
    """Put new nodes into the lists of their parents."""
    if tree.children is None:
        return
    yield from rewrite(
        tree, [(key, listing(tree, children)) for key, children in placed.lists.values()], changes
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
        found = yield from find(tree.entry.collection, condition, {"_id": 1})
        yield from rewrite(tree, [(each["_id"], unlisting(tree, keys)) for each in found], changes)


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


def segment_error(tree: Tree, error: Exception) -> DataError | None:
    """The clear error where two siblings would have the same segment."""
    about = tree.path is not None and isinstance(error, OperationFailure) and _about_path(tree, error)
    return segment_taken(tree) if about else None


@contextmanager
def segment_errors(tree: Tree) -> Generator[None]:
    """Raise the clear error in place of the server's."""
    try:
        yield
    except OperationFailure as error:
        clear = segment_error(tree, error)
        if clear is None:
            raise
        raise clear from error


def _about_path(tree: Tree, error: OperationFailure) -> bool:
    taken = [each for each in refusals(error) if each.get("code") == DUPLICATE_KEY]
    return any(tree.path in (each.get("keyPattern") or {}) for each in taken)


def too_many(entry: Entry[Any], most: int) -> UsageError:
    name = entry.model.__name__
    return UsageError(
        f"more than {most:,} {name} documents match, and nodes of a tree are deleted together; use "
        f"store.tree({name}).remove(id, children='subtree'), which goes in chunks",
        code="tree-too-many",
    )


def segment_taken(tree: Tree) -> DataError:
    return DataError(
        f"there is a {tree.entry.model.__name__} with this path already; siblings need different "
        f"{tree.segment!r}",
        code="tree-segment-taken",
    )
