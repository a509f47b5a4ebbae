"""What the movers of one tree share: a document per tree, in `treadle.trees`.

Every move and every removal writes it, so two of them never run side by side:
in snapshot isolation "A under B" and "B under A" would otherwise both commit.
Inserts do not write it; they really write their parent instead.

`owed` in it is work that was begun and must be ended before the next move: a
move or removal too large for one transaction.
"""

from __future__ import annotations

import logging
from typing import Any

from bson import ObjectId

from treadle.engine.work import Busy
from treadle.errors import DataError
from treadle.patterns.tree.fields import Tree
from treadle.plan import Plan, Raw, find_one, find_one_and_update, update_one

COLLECTION = "treadle.trees"

log = logging.getLogger("treadle")


class TreeBusy(Busy):
    """A large move or removal must finish first."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(
            f"a large move in the tree of {tree.entry.model.__name__} is in progress and this write would "
            "cross it; try again in a moment",
            code="tree-busy",
            rule=tree.rules[0],
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


def pass_over(tree: Tree, token: Any, key: Any, path: str | None = None) -> Plan[None]:
    """Leave a node out of owed work that it would bring to a stop; with its path, all below it too."""
    passed: Raw = {"owed.passed": key, **({} if path is None else {"owed.passed_paths": path})}
    yield from update_one(COLLECTION, {"_id": tree.entry.collection, "owed.token": token}, {"$push": passed})


def settle(tree: Tree, token: Any, stopped: str | None = None) -> Plan[None]:
    """Let work go that was done, or that cannot be; keep for a while how much it was, and why it stopped."""
    ended = {"token": "$owed.token", "done": "$owed.done", "stopped": {"$literal": stopped}}
    ended_before, most = {"$ifNull": ["$ended", []]}, tree.entry.limits.tree_ended_max
    yield from update_one(
        COLLECTION,
        {"_id": tree.entry.collection, "owed.token": token},
        [
            {"$set": {"ended": {"$slice": [{"$concatArrays": [[ended], ended_before]}, most]}}},
            {"$unset": "owed"},
        ],
    )


def outcome(tree: Tree, token: Any) -> Plan[int]:
    """How many documents a finished work has touched; 0 where many others ended since."""
    state = yield from find_one(COLLECTION, {"_id": tree.entry.collection})
    ended = (state or {}).get("ended") or []
    own: Raw = next((each for each in ended if each["token"] == token), {"done": 0})
    if own.get("stopped"):
        raise stopped(own["done"], own["stopped"])
    return int(own["done"])


def stopped(done: int, reason: str) -> DataError:
    return DataError(
        f"a large removal stopped after {done:,} nodes: {reason}; what is left is a tree still, so mend that "
        "and do it again",
        code="tree-remove-stopped",
    )
