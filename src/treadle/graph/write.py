"""One write: what a parser makes of a call, before anything is sent.

A `Write` is one plain command where nothing follows from it. Any other is
applied inside a commit (`engine/write_path.py`), where it writes documents and
adds their changes; the commit propagates them. Several writes can share one
commit, because what their changes do to other documents is done once, at its
end, for all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from bson import ObjectId

from treadle.graph.changes import Changes
from treadle.graph.model_entry import ModelEntry
from treadle.model.lazy_id import ReservedId
from treadle.plan import Plan, Raw
from treadle.query.keys import freeze

R = TypeVar("R")


class Selector(NamedTuple):
    """The documents that a write is about: a model and a stored filter, which is never parsed again."""

    model: ModelEntry
    filter: Raw

    @property
    def single_id(self) -> ObjectId | None:
        """The id of the one document that this means, and of which nothing else is asked."""
        identity = self.filter.get("_id")
        alone = type(identity) is ObjectId and self.filter == self.model.filter_for_id(identity)
        return identity if alone else None

    @property
    def targets(self) -> frozenset[Hashable]:
        """The one document whose id is asked for, as `Write.targets` names it."""
        identity = self.filter.get("_id")
        if isinstance(identity, dict):
            identity = identity.get("$eq")
        return frozenset() if identity is None else frozenset({(self.model.collection, freeze(identity))})

    def within(self, ids: Sequence[Any] | None) -> Selector:
        """Return the same confined to these ids; None for no bound."""
        if ids is None:
            return self
        among = {"_id": {"$in": list(ids)}}
        return self._replace(filter={"$and": [among, self.filter]} if self.filter else among)


class Write(Generic[R]):
    """One write: what happens in its commit, and what its caller gets."""

    entry: ModelEntry
    # The documents that it is about, where it updates, replaces or deletes.
    filter: Raw
    # Whether a duplicate key may be the document of a concurrent write, so that it is tried again.
    races = False
    # Whether the outcome is the document (or documents) as stored.
    shows_document = True
    # The ids that were generated for it. `apply` takes them for unknown to others until they are published,
    # so that documents which refer to one that became known too early may have been missed.
    reserved_ids: Sequence[ReservedId | None] = ()
    # The writes that it consists of, where these are several.
    parts: Sequence[Write[Any]] = ()

    def command(self) -> Plan[Any] | None:
        """Return the write as plain commands where nothing follows from it; None where it needs a commit.

        The plan raises `CommitNeeded` if it turns out, before it has written anything, that it does.
        """
        return None

    def apply(self, changes: Changes) -> Plan[Any]:
        """Write documents and add their changes; returns the outcome.

        Runs inside a transaction, where the server has any, and may run again from the start.
        """
        raise NotImplementedError  # pragma: no cover

    def result(self, outcome: Any) -> R:
        """Return what the caller gets, from what `apply` or the command returned."""
        result: R = outcome
        return result

    @property
    def selector(self) -> Selector:
        return Selector(self.entry, self.filter)

    @property
    def targets(self) -> frozenset[Hashable]:
        """Return the documents that this write may conflict about; a contended group is split by them.

        Each as its collection and its frozen key. Those that only the server can tell are missing.
        """
        return frozenset()

    @property
    def size(self) -> int | None:
        """The length of this write's share of a merged outcome; None where it cannot be merged."""
        return None

    def merges(self, other: Write[Any]) -> bool:
        """Whether `merged` can make one write of this one and another."""
        return False

    def merged(self, other: Any) -> Write[Any]:
        """Return this write and another as one; called on what it returned, it may add to that."""
        raise NotImplementedError  # pragma: no cover

    def shares(self, parts: Sequence[Write[Any]], outcome: Any) -> list[Any]:
        """Return the outcome of each write that was merged into this one; here, a stretch of a list."""
        remaining = iter(outcome)
        return [list(islice(remaining, part.size)) for part in parts]

    def smaller(self) -> Plan[list[ChunkedWrite]]:
        """Return the writes to do first, in chunks, where this one is too large for one commit."""
        return []
        yield  # pragma: no cover


class ChunkedWrite(Write[int]):
    """A bulk write, which can be confined to some documents."""

    shows_document = False
    # Whether it makes sense only for all documents at once.
    is_indivisible = False
    # The ids that it is confined to; None for all documents that match.
    ids: list[Any] | None = None

    def within(self, ids: list[Any]) -> ChunkedWrite:
        """Return the same write of these documents only."""
        chunk = copy.copy(self)
        chunk.ids = ids
        return chunk

    @property
    def selector(self) -> Selector:
        return Selector(self.entry, self.filter).within(self.ids)


class CommitNeeded(Exception):
    """A write that seemed to be a plain command needs a commit, and has written nothing yet."""
