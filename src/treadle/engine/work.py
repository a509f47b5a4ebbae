"""One write that others follow.

A `Work` has a body that runs inside a commit, changes documents and notes the
changes in a ledger, and a result for its caller that is made afterwards.
Several works can share one commit, because what their changes do to other
documents is done once, at the end, for all of them (`commit.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from treadle.engine.pages import by_ids
from treadle.errors import DataError
from treadle.graph.changes import Changes
from treadle.graph.graph import Graph
from treadle.graph.rule import ModelEntry
from treadle.plan import Failed as Failed
from treadle.plan import Plan, Raw, find
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze

R = TypeVar("R")


class Work(Generic[R]):
    """One write: what happens in the commit, and what the caller gets."""

    entry: ModelEntry[Any]
    # Whether the outcome is the document (or documents) as stored.
    shows_document = True

    def body(self, graph: Graph, server: Capabilities, ledger: Changes) -> Plan[Any]:
        """Change documents and note the changes; may run again from the start."""
        raise NotImplementedError  # pragma: no cover

    @property
    def alone(self) -> bool:
        """Whether nothing else follows from it, so that `direct` will do."""
        return False

    def direct(self) -> Plan[Any]:
        """The write as plain commands, where it is `alone`; raises `NotAlone` if it is not after all."""
        raise NotImplementedError  # pragma: no cover

    @property
    def looked_for(self) -> Raw:
        """The filter for the one document that it is about."""
        filter: Raw = self.filter  # type: ignore[attr-defined]
        return filter

    def result(self, outcome: Any) -> R:
        """What the caller gets, from what the body returned."""
        result: R = outcome
        return result

    def reveal(self) -> list[Any]:
        """Let everybody know the new ids; those that somebody learned before, though the body took them for
        unknown.
        """
        return []

    @property
    def parts(self) -> list[Work[Any]]:
        """The works that it consists of."""
        return [self]

    @property
    def size(self) -> int | None:
        """How much of a joined outcome is this work's share; None where it cannot be joined."""
        return None

    def joins(self, other: Work[Any]) -> bool:
        """Whether `joined` can make one work of this one and another."""
        return False

    def joined(self, other: Any) -> Work[Any]:
        """This work and another as one."""
        raise NotImplementedError  # pragma: no cover

    def smaller(self) -> Plan[list[ChunkedWork]]:
        """What to do first, in chunks, where it is too large for one commit; nothing if that is not known."""
        return []
        yield  # pragma: no cover


class ChunkedWork(Work[int]):
    """A bulk write that can be confined to some documents."""

    shows_document = False
    filter: Raw
    # Whether it makes sense only for all documents together.
    together = False

    # The documents that it is confined to; None for all that match.
    keys: list[Any] | None = None

    def within(self, keys: list[Any]) -> ChunkedWork:
        """The same write, of these documents only."""
        chunk = copy.copy(self)
        chunk.keys = keys
        return chunk

    def next_keys(self, last: Any) -> Plan[list[Any]]:
        """The ids of the next chunk, after the last one."""
        condition, most = self.filter, self.entry.limits.write_chunk
        if last is not None:
            condition = {"$and": [{"_id": {"$gt": last}}, condition]} if condition else {"_id": {"$gt": last}}
        rows = yield from find(self.entry.collection, condition, {"_id": 1}, sort=[("_id", 1)], limit=most)
        if not rows and last is not None and self.entry.identity_shape.kind != "scalar":
            # A range ends where the type of the ids changes; an expression compares across types.
            further = {"$and": [{"$expr": {"$gt": ["$_id", {"$literal": last}]}}, self.filter]}
            rows = yield from find(self.entry.collection, further, {"_id": 1}, sort=[("_id", 1)], limit=most)
        return [each["_id"] for each in rows]


class NotAlone(Exception):
    """A work that seemed to be `alone` is not, as it turns out before it has written anything."""


class Busy(DataError):
    """Something larger must end first; outside of transactions the write protocol calls `finish`."""

    def __init__(self, message: str, *, code: str, finish: Callable[[], Plan[None]]) -> None:
        super().__init__(message, code=code)
        self.finish = finish


def only(filter: Raw, keys: list[Any] | None) -> Raw:
    """A filter within some documents."""
    if keys is None:
        return filter
    return {"$and": [{"_id": {"$in": keys}}, filter]} if filter else {"_id": {"$in": keys}}


def as_they_are_now(entry: ModelEntry[Any], outcome: Any) -> Plan[Any]:
    """The documents of an outcome, read again; one that is gone as it was."""
    documents = [outcome] if isinstance(outcome, dict) else outcome
    rows = yield from by_ids(entry.collection, [each["_id"] for each in documents])
    now = [rows.get(freeze(each["_id"]), each) for each in documents]
    return now[0] if isinstance(outcome, dict) else now
