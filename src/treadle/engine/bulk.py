"""Several writes in one commit, and what becomes of those that are refused.

The operations of a chunk run one after another in one commit; what they do to
other documents is done once, at its end. A chunk of which one operation is
refused is rolled back: an ordered bulk ends there, any other goes on in
smaller chunks until the refused operation stands alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from treadle.engine.deletes import DeleteEach, DeleteOneDocument
from treadle.engine.inserts import Insert
from treadle.engine.propagate import record
from treadle.engine.salvage import divide
from treadle.engine.updates import UpdateEach, UpdateOneDocument
from treadle.engine.upserts import UPSERT_ATTEMPTS_MAX, Upsert
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
from treadle.plan.server_errors import DuplicateKey, message_of
from treadle.query.keys import freeze

R = TypeVar("R")
T = TypeVar("T")


def failure_of(position: int, error: Exception) -> Failure:
    if isinstance(error, TreadleError):
        return Failure(position, error.message, error.code)
    return Failure(position, message_of(error), code="document-refused")


def past_refused(
    write_path: WritePath,
    items: Sequence[tuple[int, T]],
    attempt: Callable[[Sequence[tuple[int, T]]], Plan[list[R]]],
    failures: list[Failure],
) -> Plan[list[R]]:
    """Write all items but those that are refused, which are noted with their positions."""

    def alone(item: tuple[int, T], error: Exception) -> Plan[list[R]]:
        failures.append(failure_of(item[0], error))
        return []
        yield  # pragma: no cover

    return (yield from divide(items, attempt, alone))


class _Apart(DataError):
    """One operation cannot share a commit: it writes more than goes into one, or a document elsewhere."""

    def __init__(self, work: Write[Any]) -> None:
        super().__init__("this operation needs commits of its own", code="delete-too-many")
        self.work = work


class Part:
    """One operation of a bulk write: its work, or its own plan where its model has another layout."""

    def __init__(self, layout: Layout[Any], operation: Operation) -> None:
        self.layout = layout
        self.operation = operation
        self.counts, self._call = _CALLS[type(operation)]
        self.work: Write[Any] | None = layout.work(operation)

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


class Together(Write[list[Any]]):
    """Several works as one, in the order in which they are given."""

    shows_document = False

    def __init__(self, graph: Graph, works: Sequence[Write[Any]]) -> None:
        self.graph = graph
        self.works = list(works)
        self.entry = self.works[0].entry

    @property
    def parts(self) -> list[Write[Any]]:
        return self.works

    def apply(self, changes: Changes) -> Plan[list[Any]]:
        outcomes: list[Any] = []
        for work, parts in together(self.works):
            if isinstance(work, ChunkedWrite):
                yield from _require_few(work)
            if not isinstance(work, Insert):
                # It may be about what the operations before it did to other documents of its model.
                yield from record(changes, self.graph.spreading)
            try:
                outcome = yield from work.apply(changes)
            except DataError as error:
                if error.code == "document-gone":
                    yield from _require_here(work)
                raise
            if isinstance(work, Upsert):
                outcome = Upserted(outcome, work.created)
            each = outcome if isinstance(work, (UpdateEach, DeleteEach)) else split(parts, outcome)
            for part, one in zip(parts, each, strict=True):
                if one is None:
                    yield from _require_here(part)
            outcomes += each
        return outcomes


def together(works: Sequence[Write[Any]]) -> list[tuple[Write[Any], list[Write[Any]]]]:
    """Each work with its parts: neighbours that can be done in one round of commands become one."""
    groups: list[tuple[Write[Any], list[Write[Any]]]] = []
    for (kind, _), run in groupby(works, _likeness):
        some: list[Any] = list(run)
        if kind is None or len(some) == 1 or _repeats(some):
            groups += merge(some)
        else:
            groups.append(((UpdateEach if kind is UpdateOneDocument else DeleteEach)(some), some))
    return groups


def _likeness(work: Write[Any]) -> tuple[Any, Any]:
    """What neighbours must have in common to be done together: their kind, and their model."""
    entry = work.entry
    apart = entry.versions.is_versioned or any(
        each.rules.implementing("record") for each in entry.kinds.related
    )
    if type(work) not in (UpdateOneDocument, DeleteOneDocument) or apart:
        return None, None
    return (type(work), entry) if work.key else (None, None)  # type: ignore[attr-defined]


def _repeats(works: Sequence[Any]) -> bool:
    keys = [freeze(key) for work in works for key in work.key]
    return len(set(keys)) < len(keys)


def _require_few(work: ChunkedWrite) -> Plan[None]:
    most = work.entry.limits.write_chunk
    if (yield from find(work.entry.collection, work.filter, {"_id": 1}, skip=most, limit=1)):
        raise _Apart(work)


def _require_here(work: Write[Any]) -> Plan[None]:
    """Set an operation apart whose document was not found because it is archived."""
    archive = work.entry.everything.archive
    if archive is not None and (yield from find(archive, work.selector.filter, {"_id": 1}, limit=1)):
        raise _Apart(work)


class BulkWrite:
    """The operations of one call, and how many documents they have written so far."""

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
        """Do them all, chunk by chunk."""
        works = [part.work for _, part in self.parts if part.work is not None]
        yield from self.write_path.index_check.require(work.entry for work in works)
        server, inside = (yield from server_facts()), (yield from is_inside())
        # Without transactions a refused operation leaves those before it done: each goes by itself.
        size = self.write_path.graph.limits.bulk_chunk if server.transactions else 1
        for chunk in chunks(self.parts, size):
            if self.ordered or inside:
                yield from self._attempt(chunk)
            else:
                # In whichever order: neighbours of one kind and model are done in one round of commands.
                alike: dict[Any, list[tuple[int, Part]]] = {}
                for position, part in chunk:
                    of_kind = (type(part.work), None if part.work is None else part.work.entry)
                    alike.setdefault(of_kind, []).append((position, part))
                grouped = [each for group in alike.values() for each in group]
                yield from past_refused(self.write_path, grouped, self._attempt, self.failures)
        if self.failures:
            raise BulkFailed(sorted(self.failures, key=lambda each: each.position), self.number)
        return Bulk(**self.counts)

    def _attempt(self, chunk: Sequence[tuple[int, Part]]) -> Plan[list[None]]:
        """One commit; or several, where an operation cannot share one."""
        apart = next((n for n, (_, part) in enumerate(chunk) if part.work is None), None)
        if len(chunk) > 1 and apart is None:
            try:
                return (yield from self._counted(chunk))
            except _Apart as found:
                apart = next(n for n, (_, part) in enumerate(chunk) if part.work is found.work)
        if len(chunk) == 1:
            yield from self._one(*chunk[0])
            return []
        if apart is not None:
            for piece in (chunk[:apart], chunk[apart : apart + 1], chunk[apart + 1 :]):
                if piece:
                    yield from self._attempt(piece)
        return []

    def _counted(self, chunk: Sequence[tuple[int, Part]]) -> Plan[list[None]]:
        outcomes = yield from self._together([part.work for _, part in chunk if part.work])
        for (_, part), outcome in zip(chunk, outcomes, strict=True):
            self._count(part, outcome)
        return []

    def _together(self, works: list[Write[Any]]) -> Plan[list[Any]]:
        write = Together(self.write_path.graph, works)
        races = any(isinstance(work, Upsert) for work in works)
        for _ in range(UPSERT_ATTEMPTS_MAX if races else 0):
            try:
                return (yield from self.write_path.execute(write, alone=True))
            except DuplicateKey:
                # Perhaps another made the document of an upsert; if not, the last attempt says so.
                if (yield from is_inside()):
                    raise
        return (yield from self.write_path.execute(write, alone=True))

    def _one(self, position: int, part: Part) -> Plan[None]:
        self._count(part, (yield from part.plan()))

    def _count(self, part: Part, outcome: Any) -> None:
        counts = part.counts
        if isinstance(part.work, Upsert):
            counts = "inserted" if outcome.created else "updated"
        self.counts[counts] += outcome if isinstance(outcome, int) else outcome is not None


def _listed(given: Any) -> list[Any]:
    """The operations of a bulk as a list; refuses what is none."""
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
