"""Which nodes of a large subtree go into the next transaction, and how many."""

from __future__ import annotations

from typing import Any, NamedTuple

from pymongo.errors import OperationFailure

from treadle.errors import DataError
from treadle.patterns.tree.fields import Tree
from treadle.patterns.tree.segments import below
from treadle.plan import Plan, Raw, find
from treadle.plan.server_errors import is_about_one_document


class Step(NamedTuple):
    """What one chunk did: whether it was the last, how many nodes it counts, and where it ended."""

    ended: bool
    done: int = 0
    after: Any = None


class Pace:
    """How many nodes go at once: fewer where one of them cannot be written, until it is alone."""

    def __init__(self, chunk: int) -> None:
        self.most = self._chunk = chunk
        self.tried: list[Any] = []

    def slower(self, error: Exception) -> bool:
        """Whether fewer may be tried; False if the only one that was tried cannot be written."""
        if not is_about_one_node(error):
            raise error
        if self.most == 1:
            return False
        self.most = max(1, min(self.most, len(self.tried)) // 8)
        return True

    def faster(self) -> None:
        self.most = min(self.most * 4, self._chunk)

    def choose(self, tree: Tree, work: Raw, condition: Raw, *, by_id: bool = False) -> Plan[list[Any]]:
        """The ids of nodes that meet a condition, without those that were passed over.

        With `by_id` they go on from where the last chunk ended.
        """
        bounds: Raw = {}
        if by_id and work.get("after") is not None:
            bounds["$gt"] = work["after"]
        if work.get("passed"):
            bounds["$nin"] = work["passed"]
        conditions = [condition, *([{"_id": bounds}] if bounds else [])]
        if work.get("passed_paths"):
            conditions.append({"$nor": [{tree.path: below(path)} for path in work["passed_paths"]]})
        # Parents before their children, where only paths tell who is whose.
        order = [("_id", 1)] if by_id else [(tree.roles["path"], 1)] if tree.truth == "path" else None
        rows = yield from find(
            tree.collection, tree.living({"$and": conditions}), {"_id": 1}, sort=order, limit=self.most
        )
        self.tried = [row["_id"] for row in rows]
        return self.tried


def is_about_one_node(error: Exception) -> bool:
    """Whether one node cannot be written, because it is too large or invalid, or its path is taken."""
    if isinstance(error, DataError):
        return error.code == "tree-segment-taken"
    return isinstance(error, OperationFailure) and is_about_one_document(error)
