"""Several writes in one commit, and the report of those that are refused.

The operations of a chunk are applied one after another in one commit; their
changes are propagated once, at its end. A chunk of which one operation is
refused is rolled back: an ordered bulk ends there, any other continues in
smaller chunks until the refused operation stands alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from treadle.engine.inserts import Insert
from treadle.engine.propagate import record
from treadle.engine.salvage import divide
from treadle.engine.upserts import Upsert
from treadle.engine.write_path import WritePath, merge, split
from treadle.errors import BulkFailed, DataError, Failure, TreadleError, UsageError
from treadle.graph import operations
from treadle.graph.changes import Changes
from treadle.graph.graph import Graph
from treadle.graph.layout import Layout
from treadle.graph.operations import Bulk, Operation, Upserted
from treadle.graph.stored_pages import chunks
from treadle.graph.write import ChunkedWrite, Write
from treadle.plan import Plan, find, is_inside, server_facts
from treadle.plan.server_errors import message_of

R = TypeVar("R")
T = TypeVar("T")


def failure_of(position: int, error: Exception) -> Failure:
    """Return what `BulkFailed` says of one refused document or operation."""
    if isinstance(error, TreadleError):
        return Failure(position, error.message, error.code)
    return Failure(position, message_of(error), code="document-refused")


def raise_failures(failures: Sequence[Failure], number: int) -> None:
    """Raise `BulkFailed` if any of so many documents or operations were refused."""
    if failures:
        raise BulkFailed(sorted(failures, key=lambda each: each.position), number)


def skip_refused(
    items: Sequence[tuple[int, T]],
    attempt: Callable[[Sequence[tuple[int, T]]], Plan[list[R]]],
    failures: list[Failure],
) -> Plan[list[R]]:
    """Write all items but those that are refused, which are added to `failures` with their positions."""

    def alone(item: tuple[int, T], error: Exception) -> Plan[list[R]]:
        failures.append(failure_of(item[0], error))
        return []
        yield  # pragma: no cover

    return (yield from divide(items, attempt, alone))


class _Separate(DataError):
    """One operation cannot share a commit: it writes more than fits into one, or an archived document."""

    def __init__(self, write: Write[Any]) -> None:
        super().__init__("this operation needs commits of its own", code="delete-too-many")
        self.write = write


class Part:
    """One operation of a bulk: its write, or its own plan where its model has another layout."""

    def __init__(self, layout: Layout[Any], operation: Operation) -> None:
        self.layout = layout
        self.operation = operation
        self.counts, self._call = _CALLS[type(operation)]
        self.write: Write[Any] | None = layout.write(operation)

    def plan(self) -> Plan[Any]:
        return self._call(self.layout, self.operation)


# What each operation counts as, and the call that does the same.
_CALLS: dict[type, tuple[str, Callable[[Layout[Any], Any], Plan[Any]]]] = {
    operations.Insert: ("inserted", lambda calls, each: calls.insert(each.document)),
    operations.Update: ("updated", lambda calls, each: calls.update(each.filter, each.update)),
    operations.UpdateMany: ("updated", lambda calls, each: calls.update_all(each.filter, each.update)),
    operations.Replace: ("updated", lambda calls, each: calls.replace(each.document)),
    operations.Upsert: ("updated", lambda calls, each: calls.upsert(each.filter, each.update, each.insert)),
    operations.Delete: ("deleted", lambda calls, each: calls.delete(each.filter)),
    operations.DeleteMany: ("deleted", lambda calls, each: calls.delete_all(each.filter)),
}


class Chunk(Write[list[Any]]):
    """Several writes as one, in the order in which they are given."""

    shows_document = False

    def __init__(self, graph: Graph, writes: Sequence[Write[Any]]) -> None:
        self._graph = graph
        self.parts = writes
        self.entry = writes[0].entry
        self.races = any(write.races for write in writes)

    def apply(self, changes: Changes) -> Plan[list[Any]]:
        merged, outcomes = merge(self.parts), []
        for write, parts in merged:
            if isinstance(write, ChunkedWrite):
                yield from _require_few(write)
            if not isinstance(write, Insert):
                # It may be about what the operations before it did to other documents of its model.
                yield from record(changes, self._graph.spreading)
            outcome = yield from self._apply(write, changes)
            for part, share in zip(parts, split([(write, parts)], [outcome]), strict=True):
                if share is None:
                    yield from _require_not_archived(part)
            outcomes.append(outcome)
        return split(merged, outcomes)

    def _apply(self, write: Write[Any], changes: Changes) -> Plan[Any]:
        try:
            outcome = yield from write.apply(changes)
        except DataError as error:
            if error.code == "document-gone":
                yield from _require_not_archived(write)
            raise
        return Upserted(outcome, write.created) if isinstance(write, Upsert) else outcome


def _require_few(write: ChunkedWrite) -> Plan[None]:
    most = write.entry.limits.write_chunk
    if (yield from find(write.entry.collection, write.filter, {"_id": 1}, skip=most, limit=1)):
        raise _Separate(write)


def _require_not_archived(write: Write[Any]) -> Plan[None]:
    """Separate an operation whose document was not found because it is archived."""
    model, filter = write.selector
    archive = model.everything.archive
    if archive is not None and (yield from find(archive, filter, {"_id": 1}, limit=1)):
        raise _Separate(write)


class BulkWrite:
    """The operations of one call, and the number of documents that they have written so far."""

    def __init__(
        self, write_path: WritePath, calls: Callable[[Operation], Layout[Any]], given: Any, ordered: bool
    ) -> None:
        self.write_path = write_path
        self.ordered = ordered
        self.failures: list[Failure] = []
        self.counts = {"inserted": 0, "updated": 0, "deleted": 0}
        self.parts: list[tuple[int, Part]] = []
        listed = _listed(given)
        self.number = len(listed)
        for position, operation in enumerate(listed):
            try:
                self.parts.append((position, Part(calls(operation), operation)))
            except (UsageError, DataError) as error:
                if ordered:
                    # Nothing has been sent yet.
                    error.add_note(f"operation {position} of {self.number}")
                    raise
                self.failures.append(failure_of(position, error))

    def perform(self) -> Plan[Bulk]:
        """Perform all operations, chunk by chunk."""
        writes = [part.write for _, part in self.parts if part.write is not None]
        yield from self.write_path.index_check.require(write.entry for write in writes)
        server, inside = (yield from server_facts()), (yield from is_inside())
        # Without transactions a refused operation leaves those before it done: each is a chunk.
        size = self.write_path.graph.limits.bulk_chunk if server.transactions else 1
        for chunk in chunks(self.parts, size):
            if self.ordered or inside:
                yield from self._attempt(chunk)
            else:
                yield from skip_refused(_by_kind(chunk), self._attempt, self.failures)
        raise_failures(self.failures, self.number)
        return Bulk(**self.counts)

    def _attempt(self, chunk: Sequence[tuple[int, Part]]) -> Plan[list[None]]:
        """Perform a chunk in one commit; in several, where an operation cannot share one."""
        parts = [part for _, part in chunk]
        if len(parts) == 1:
            self._count(parts[0], (yield from parts[0].plan()))
            return []
        writes = [part.write for part in parts]
        separate = writes.index(None) if None in writes else (yield from self._commit(parts))
        if separate is None:
            return []
        for piece in (chunk[:separate], chunk[separate : separate + 1], chunk[separate + 1 :]):
            if piece:
                yield from self._attempt(piece)
        return []

    def _commit(self, parts: Sequence[Part]) -> Plan[int | None]:
        """Perform operations in one commit. Returns the position of one that cannot share it."""
        writes = [part.write for part in parts if part.write is not None]
        try:
            outcomes = yield from self.write_path.execute(Chunk(self.write_path.graph, writes), alone=True)
        except _Separate as error:
            return writes.index(error.write)
        for part, outcome in zip(parts, outcomes, strict=True):
            self._count(part, outcome)
        return None

    def _count(self, part: Part, outcome: Any) -> None:
        counts = part.counts
        if isinstance(part.write, Upsert):
            counts = "inserted" if outcome.created else "updated"
        self.counts[counts] += outcome if isinstance(outcome, int) else outcome is not None


def _by_kind(chunk: Sequence[tuple[int, Part]]) -> list[tuple[int, Part]]:
    """The operations of an unordered chunk, in an order in which those that can be one are neighbours."""
    alike: dict[Any, list[tuple[int, Part]]] = {}
    for position, part in chunk:
        kind = (type(part.write), None if part.write is None else part.write.entry)
        alike.setdefault(kind, []).append((position, part))
    return [each for group in alike.values() for each in group]


def _listed(given: Any) -> list[Any]:
    """The operations of a bulk as a list; refuses anything else."""
    listed = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, Mapping)) else [given]
    for each in listed:
        if type(each) not in _CALLS:
            kinds = ", ".join(kind.__name__ for kind in _CALLS)
            raise UsageError(
                f"bulk takes a list of operations ({kinds}), such as [Insert(document), Delete(Order, id)]; "
                f"it got {type(each).__name__}",
                code="bulk-invalid",
            )
    return listed
