"""What the writes of a tree share: its lock, held parents, and updates of stored nodes.

Every move and removal locks the tree, so that two of them never run at the
same time: under snapshot isolation "A under B" and "B under A" would otherwise
both commit. An insert does not. It really writes the parent, which conflicts
with a removal of the parent and with a move of anything above, since a move
writes each node whose line changes. So inserts below different parents do not
wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from pymongo.errors import OperationFailure

from treadle.engine.documents import translated
from treadle.engine.guards import GUARDS
from treadle.engine.pipelines import TargetUpdate, derivation, store_derived, update_pipeline
from treadle.engine.references import follow_own
from treadle.engine.version_upgrade import has_outdated, upgrade_stored
from treadle.errors import DataError
from treadle.graph.changes import Changes
from treadle.graph.rule import REVISION
from treadle.patterns.tree.reads import lineage
from treadle.patterns.tree.tree import Tree
from treadle.plan import Plan, Raw, by_id, find, find_one_and_update, update_many, update_one
from treadle.plan.server_errors import DUPLICATE_KEY, refusals
from treadle.query.keys import freeze
from treadle.query.paths import overlap, put

BUMP_REVISION: Raw = {"$inc": {REVISION: 1}}


# -- what must not change concurrently ---------------------------------------------------------------


def lock(tree: Tree) -> Plan[None]:
    """Conflict with all other moves and removals in this tree until the transaction ends."""
    chosen = {"_id": f"{tree.collection}:tree"}
    yield from update_one(GUARDS, chosen, {"$inc": {"n": 1}}, upsert=True)


def lock_node(tree: Tree, key: Any, changes: Changes) -> Plan[Raw]:
    """Lock the tree. Returns the node that is to be moved or removed."""
    yield from lock(tree)
    yield from upgrade_nodes(tree, changes)
    node = yield from tree.find_one(by_id(key))
    if node is None:
        raise tree.node_missing(key)
    return node


def upgrade_nodes(tree: Tree, changes: Changes) -> Plan[None]:
    """Store outdated nodes in the current version, in which their places are known."""
    entry = tree.entry
    if not (yield from has_outdated(entry)):
        return
    most = entry.limits.upgrade_chunk
    outdated = yield from find(entry.collection, entry.versions.outdated_only, limit=most + 1)
    if len(outdated) > most:
        raise DataError(
            f"{entry.collection} holds more than {most:,} outdated nodes, and where they stand in the tree "
            f"is known only once they are upgraded; run migrate({tree.name})",
            code="tree-outdated",
        )
    current = yield from upgrade_stored(entry, outdated, changes)
    yield from changes.add(entry, zip(outdated, current, strict=True))


def lock_parents(tree: Tree, keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
    """Return parents by frozen id, written so that a concurrent move or removal of one conflicts."""
    if len(keys) == 1:
        chosen, shown = tree.active(by_id(keys[0])), tree.projection
        parent = yield from find_one_and_update(tree.collection, chosen, BUMP_REVISION, projection=shown)
        parents = [] if parent is None else [parent]
    elif keys:
        chosen = tree.active({"_id": {"$in": list(keys)}})
        yield from update_many(tree.collection, chosen, BUMP_REVISION)
        parents = yield from tree.find(chosen, tree.projection)
    else:
        parents = []
    return require_parents(tree, keys, parents)


def require_parents(tree: Tree, keys: Iterable[Any], parents: Iterable[Raw]) -> dict[Any, Raw]:
    """Return parents by frozen id; refuses where one of these ids has none."""
    by_key = {freeze(each["_id"]): each for each in parents}
    for key in keys:
        if freeze(key) not in by_key:
            raise tree.parent_missing(key)
    return by_key


def with_line(tree: Tree, node: Raw) -> Plan[Raw]:
    """Return a node with its line, derived from its links where the tree was not rebuilt yet."""
    if tree.representation.line(node) is not None:
        return node
    if tree.paths is not None:
        raise tree.not_rebuilt(node["_id"])
    # A move of a node above does not find one that has no line, so it must wait.
    yield from lock(tree)
    chain = yield from lineage(tree, node["_id"])
    for parent, each in pairwise([None, *chain]):
        assert each is not None
        fill(tree, each, parent)
    return chain[-1]


def fill(tree: Tree, node: Raw, parent: Raw | None) -> None:
    """Put a node, not stored yet, below a parent that has its line."""
    for field, value in tree.representation.place(node, parent).items():
        put(node, field, value)


# -- updates of stored nodes -------------------------------------------------------------------------


def update_each(tree: Tree, updates: Sequence[tuple[Any, Raw]], changes: Changes) -> Plan[None]:
    """Set fields of nodes to expressions, each node's its own, and note the changes."""
    if updates:
        condition = {"_id": {"$in": [key for key, _ in updates]}}
        paths = {path for _, sets in updates for path in sets}
        storing = store_derived(tree.entry, [TargetUpdate(key, sets) for key, sets in updates])
        yield from _update(tree, condition, paths, storing, changes)


def update_all(tree: Tree, condition: Raw, sets: Raw, changes: Changes) -> Plan[None]:
    """Set fields of all nodes that meet a condition to the same expressions, and note the changes."""
    condition = tree.active(condition)
    storing = update_many(tree.collection, condition, update_pipeline(tree.entry, sets, {}))
    with translated(tree.name, entry=tree.entry):
        yield from _update(tree, condition, sets, storing, changes)


def _update(
    tree: Tree, condition: Raw, paths: Iterable[str], storing: Plan[Any], changes: Changes
) -> Plan[None]:
    """Perform an update of nodes. Reads them before and after it only where something follows from it."""
    entry = tree.entry
    if not is_followed(tree, paths):
        yield from storing
        return
    befores = yield from find(entry.collection, condition)
    yield from storing
    afters = yield from find(entry.collection, {"_id": {"$in": [each["_id"] for each in befores]}})
    by_key = {freeze(each["_id"]): each for each in afters}
    pairs = [(each, by_key[freeze(each["_id"])]) for each in befores]
    finals = yield from follow_own(entry, pairs)
    yield from changes.add(entry, zip(befores, finals, strict=True))


def is_followed(tree: Tree, paths: Iterable[str]) -> bool:
    """Whether anything follows from a change of these fields: other documents, history, a node's copies."""
    entry, related = tree.entry, [derivation(each) for each in tree.entry.kinds.related]
    references = [rule.on.path for each in related for rule in each.copies]
    watched: Iterable[str] | None = ()
    if any(each.feeds or each.records for each in related):
        watched = entry.effects.followed
    if watched is None:
        return True
    return any(overlap(one, path) for path in paths for one in [*watched, *references])


# -- errors ------------------------------------------------------------------------------------------


def segment_error(tree: Tree, error: Exception) -> DataError | None:
    """Return the clear error where two siblings would have the same segment; None of any other error."""
    path = tree.representation.path
    if path is None or not isinstance(error, OperationFailure):
        return None
    taken = [each for each in refusals(error) if each.get("code") == DUPLICATE_KEY]
    return tree.segment_taken() if any(path in (each.get("keyPattern") or {}) for each in taken) else None
