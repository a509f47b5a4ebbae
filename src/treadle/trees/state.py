"""What the movers of one tree share: a document per tree, in `treadle.trees`.

Every move and every removal writes it, so two of them never run side by side:
in snapshot isolation "A under B" and "B under A" would otherwise both commit.
Inserts do not write it; they really write their parent instead.

`owed` in it is work that was begun and must be ended before the next move: a
move or removal too large for one transaction, or, on a server without
transactions, whatever is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bson import ObjectId

from treadle.errors import DataError
from treadle.plan import Plan, Raw, find_one, find_one_and_update, update_one

if TYPE_CHECKING:
    from treadle.trees.fields import Tree

COLLECTION = "treadle.trees"
# Of how many works it is remembered how much they did, for their callers.
ENDED_MAX = 50


def busy(tree: Tree) -> DataError:
    """Another large move must end first; the tree's own calls see to that themselves."""
    return DataError(
        f"a large move in the tree of {tree.entry.model.__name__} is under way and this write would cross "
        "it; try again in a moment",
        code="tree-busy",
    )


def take(tree: Tree) -> Plan[Raw | None]:
    """Shut out all other moves until this transaction ends; what is owed from before."""
    state = yield from find_one_and_update(
        COLLECTION, {"_id": tree.entry.collection}, {"$inc": {"n": 1}}, upsert=True
    )
    return None if state is None else state.get("owed")


def owed_by(tree: Tree) -> Plan[Raw | None]:
    """What is owed, without shutting anybody out."""
    state = yield from find_one(COLLECTION, {"_id": tree.entry.collection})
    return None if state is None else state.get("owed")


def owe(tree: Tree, work: Raw) -> Plan[Raw]:
    """Write down work before it can be forgotten."""
    owed = {"token": ObjectId(), "done": 0, **work}
    yield from update_one(
        COLLECTION, {"_id": tree.entry.collection}, {"$set": {"owed": owed}, "$inc": {"n": 1}}, upsert=True
    )
    return owed


def hold(tree: Tree, token: Any) -> Plan[Raw | None]:
    """The same work, if it is still owed; shuts out whoever else would go on with it."""
    state = yield from find_one_and_update(
        COLLECTION, {"_id": tree.entry.collection, "owed.token": token}, {"$inc": {"n": 1}}
    )
    return None if state is None else state["owed"]


def progress(tree: Tree, token: Any, after: Any, done: int) -> Plan[None]:
    """Note how far owed work has come."""
    yield from update_one(
        COLLECTION,
        {"_id": tree.entry.collection, "owed.token": token},
        {"$set": {"owed.after": after}, "$inc": {"owed.done": done}},
    )


def settle(tree: Tree, token: Any) -> Plan[None]:
    """Let work go that was done, and keep for a while how much it was."""
    ended = {"token": "$owed.token", "done": "$owed.done"}
    ended_before = {"$ifNull": ["$ended", []]}
    yield from update_one(
        COLLECTION,
        {"_id": tree.entry.collection, "owed.token": token},
        [
            {"$set": {"ended": {"$slice": [{"$concatArrays": [[ended], ended_before]}, ENDED_MAX]}}},
            {"$unset": "owed"},
        ],
    )


def outcome(tree: Tree, token: Any) -> Plan[int]:
    """How many documents a finished work has touched; 0 where many others ended since."""
    state = yield from find_one(COLLECTION, {"_id": tree.entry.collection})
    ended = (state or {}).get("ended") or []
    return next((int(each["done"]) for each in ended if each["token"] == token), 0)
