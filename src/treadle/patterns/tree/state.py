"""What all moves of one tree share: a document per tree, in `treadle.trees`.

Every move and every removal writes it, so that two of them never run at the
same time: under snapshot isolation "A under B" and "B under A" would otherwise
both commit. Inserts do not write it; they write their parent instead.

Its field `owed` holds the pending work: a move or a removal that is too large
for one transaction, has begun, and must end before the next move.
"""

from __future__ import annotations

from typing import Any

from bson import ObjectId

from treadle.engine.version_upgrade import has_outdated, upgrade_stored
from treadle.errors import DataError
from treadle.graph.changes import Changes
from treadle.graph.write import Blocked
from treadle.model.text import get_logger
from treadle.patterns.tree.fields import Tree, node_missing
from treadle.plan import Plan, Raw, by_id, find, find_one, find_one_and_update, update_one

# Large moves and removals whose outcome is remembered for their callers.
TREE_ENDED_MAX = 50

COLLECTION = "treadle.trees"

log = get_logger(__name__)


class TreeBusy(Blocked):
    """A large move or removal must finish first."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(
            f"a large move in the tree of {tree.entry.model.__name__} is in progress and this write would "
            "cross it; try again in a moment",
            code="tree-busy",
            finish=tree.finish,
        )


def _document(tree: Tree, token: Any = None) -> Raw:
    return {"_id": {"$eq": tree.collection}, **({} if token is None else {"owed.token": token})}


def _lock(chosen: Raw, *, upsert: bool = False) -> Plan[Raw | None]:
    state = yield from find_one_and_update(COLLECTION, chosen, {"$inc": {"n": 1}}, upsert=upsert)
    return None if state is None else state.get("owed")


def lock(tree: Tree) -> Plan[Raw | None]:
    """Shut out all other moves until this transaction ends; the pending work, if there is any."""
    return (yield from _lock(_document(tree), upsert=True))


def lock_idle(tree: Tree) -> Plan[None]:
    """Shut out all other moves; pending work must end first."""
    if (yield from lock(tree)) is not None:
        raise TreeBusy(tree)


def bring_up(tree: Tree, changes: Changes) -> Plan[None]:
    """Store nodes of older versions in the current one, since only there are their places known."""
    entry = tree.entry
    if not (yield from has_outdated(entry)):
        return
    most = entry.limits.upgrade_chunk
    older = yield from find(entry.collection, entry.versions.outdated_only, limit=most + 1)
    if len(older) > most:
        raise DataError(
            f"{entry.collection} holds more than {most:,} nodes of older versions, and where they stand in "
            f"the tree is known only once they are migrated; run migrate({entry.model.__name__})",
            code="tree-outdated",
        )
    current = yield from upgrade_stored(entry, older, changes)
    yield from changes.add(entry, zip(older, current, strict=True))


def lock_node(tree: Tree, key: Any, changes: Changes) -> Plan[Raw]:
    """The node that is to be moved or removed, with all other moves of the tree shut out."""
    yield from lock_idle(tree)
    yield from bring_up(tree, changes)
    node = yield from find_one(tree.collection, tree.living(by_id(key)))
    if node is None:
        raise node_missing(tree, key)
    return node


# -- pending work ------------------------------------------------------------------------------


def pending(tree: Tree) -> Plan[Raw | None]:
    """The pending work, without shutting anybody out."""
    state = yield from find_one(COLLECTION, _document(tree))
    return None if state is None else state.get("owed")


def begin(tree: Tree, work: Raw) -> Plan[Any]:
    """Record work that goes in chunks, in the transaction that begins it; its token."""
    token = ObjectId()
    owed = {"token": token, "done": 0, **work}
    yield from update_one(COLLECTION, _document(tree), {"$set": {"owed": owed}})
    return token


def resume(tree: Tree, token: Any) -> Plan[Raw | None]:
    """The work, if it is still pending; shuts out whoever else would continue it."""
    return (yield from _lock(_document(tree, token)))


def progress(tree: Tree, token: Any, after: Any, done: int) -> Plan[None]:
    """Record how far pending work has come."""
    update = {"$set": {"owed.after": after}, "$inc": {"owed.done": done}}
    yield from update_one(COLLECTION, _document(tree, token), update)


def pass_over(tree: Tree, token: Any, key: Any, path: str | None) -> Plan[None]:
    """Leave a node out of pending work that it would stop; with its path, all below it too."""
    passed: Raw = {"owed.passed": key, **({} if path is None else {"owed.passed_paths": path})}
    yield from update_one(COLLECTION, _document(tree, token), {"$push": passed})


def end(tree: Tree, token: Any, done: int = 0, stopped: str | None = None) -> Plan[None]:
    """Release work that is done or cannot proceed; its outcome is kept for a while."""
    total, most = {"$add": ["$owed.done", done]}, TREE_ENDED_MAX
    ended = {"token": "$owed.token", "done": total, "stopped": {"$literal": stopped}}
    latest = {"$slice": [{"$concatArrays": [[ended], {"$ifNull": ["$ended", []]}]}, most]}
    yield from update_one(
        COLLECTION, _document(tree, token), [{"$set": {"ended": latest}}, {"$unset": "owed"}]
    )


def outcome(tree: Tree, token: Any) -> Plan[int]:
    """How many documents a finished work has touched; 0 where many others ended since."""
    state = yield from find_one(COLLECTION, _document(tree))
    ended = (state or {}).get("ended") or []
    own: Raw = next((each for each in ended if each["token"] == token), {"done": 0})
    if own.get("stopped"):
        raise DataError(
            f"a large removal stopped after {own['done']:,} nodes: {own['stopped']}; what is left is still a "
            "tree: fix the cause and remove the node again",
            code="tree-remove-stopped",
        )
    return int(own["done"])
