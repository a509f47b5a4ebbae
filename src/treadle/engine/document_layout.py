"""The default layout: each document of a model is stored as one document.

A call that writes is parsed into a `Write`, which the write path executes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from treadle.engine import bulk
from treadle.engine.deletes import Delete, DeleteMany, purge_filter
from treadle.engine.document_reads import DocumentReads
from treadle.engine.documents import as_stored, dump_all
from treadle.engine.inserts import Insert, insert_unordered
from treadle.engine.replaces import ChangeKind, Replace, Restore, former
from treadle.engine.updates import ChangeFields, Update, UpdateMany
from treadle.engine.upserts import Upsert
from treadle.engine.write_path import WritePath
from treadle.errors import Failure, UsageError
from treadle.graph import operations
from treadle.graph.layout import Layout, PlainInsert
from treadle.graph.model_entry import ModelEntry
from treadle.graph.operations import Operation, Returns, Upserted
from treadle.graph.stored_pages import chunks
from treadle.graph.write import Write
from treadle.model.document import Document
from treadle.plan import NO_OPTIONS, Call, Plan, is_inside
from treadle.plan.server_errors import translate
from treadle.query.filters import Sort

D = TypeVar("D", bound=Document)
R = TypeVar("R")


class DocumentLayout(DocumentReads[D]):
    """Documents one by one."""

    # Whether bulk loads may take several commits, so that one refused document must not undo others.
    inserts_apart = False

    def __init__(self, entry: ModelEntry[D], write_path: WritePath) -> None:
        super().__init__(entry)
        self.write_path = write_path
        # Whether an insert of one document is one command, whatever the document holds.
        self._inserts_at_once = entry.effects.is_plain and not entry.versions.writes_older

    # -- inserting ---------------------------------------------------------------------------------

    # The Store performs such an insert without a plan: of concurrent ones there may be many, and what each
    # costs is above all the number of its objects.

    def plain_insert(self, document: D) -> PlainInsert | None:
        if not self._inserts_at_once or self.entry in self.write_path.index_check.pending:
            return None
        altered: list[Any] = []
        (raw,) = dump_all(self.entry, [document], altered)
        stored = as_stored(self.entry, document, raw, altered)
        command = Call(self.entry.collection, "insert_one", (raw,), NO_OPTIONS, True, (raw["_id"],))
        return PlainInsert(command, stored)

    def refusal(self, error: Exception, command: Call) -> Exception:
        return translate(error, self.entry.model.__name__, command.arguments)

    def insert(self, document: D) -> Plan[D]:
        (stored,) = yield from self.write_path.execute(Insert(self.entry, [document]))
        return stored

    def insert_many(self, documents: Iterable[D], ordered: bool = True) -> Plan[list[D]]:
        listed = list(documents)
        yield from self.write_path.index_check.require([self.entry])
        # A refusal ends a transaction, so that inside of one there is no next document.
        if not ordered and not (yield from is_inside()):
            return (yield from self._insert_accepted(listed))
        writes = yield from self._inserts(listed)
        if len(writes) == 1:
            return (yield from self.write_path.execute(writes[0], alone=True))
        stored: dict[int, D] = {}
        for write in writes:
            results = yield from self.write_path.execute(write, alone=True)
            stored.update(zip(map(id, write.documents), results, strict=True))
        return [stored[id(document)] for document in listed]

    def _insert_accepted(self, documents: list[D]) -> Plan[list[D]]:
        """Store all documents but those that are refused; raises `BulkFailed` if there are any."""
        failures: list[Failure] = []
        insert = self._insert_each if self.entry.effects.is_plain else self._insert_pieces
        stored = yield from insert(documents, failures)
        bulk.raise_failures(failures, len(documents))
        return stored

    def _insert_each(self, documents: list[D], failures: list[Failure]) -> Plan[list[D]]:
        """Store the documents of a plain model, each by itself, in one command per chunk."""
        stored: list[D] = []
        most = self.entry.limits.insert_max
        for start in range(0, len(documents), most):
            some, refused = yield from insert_unordered(self.entry, documents[start : start + most])
            stored += some
            failures += [bulk.failure_of(start + at, error) for at, error in refused.items()]
        return stored

    def _insert_pieces(self, documents: list[D], failures: list[Failure]) -> Plan[list[D]]:
        """Store documents in commits, which are halved until a refused document stands alone."""
        stored: list[D] = []
        numbered = {id(document): number for number, document in enumerate(documents)}
        for write in (yield from self._inserts(documents)):
            items = [(numbered[id(document)], document) for document in write.documents]
            for piece in chunks(items, 1 if self.inserts_apart else len(items)):
                stored += yield from bulk.skip_refused(piece, self._insert_piece, failures)
        return stored

    def _insert_piece(self, items: Sequence[tuple[int, D]]) -> Plan[list[D]]:
        return (yield from self.insert_many([document for _, document in items]))

    def _inserts(self, documents: list[D]) -> Plan[list[Insert[D]]]:
        """The inserts of a bulk load, in chunks."""
        most, graph = self.entry.limits.insert_max, self.write_path.graph
        classes = (
            groupby(documents, type) if not self.entry.effects.is_plain else [(self.entry.model, documents)]
        )
        writes = []
        for model, run in classes:
            same = list(run)
            entry: ModelEntry[D] = graph.entry(model)
            writes += [Insert(entry, same[at : at + most]) for at in range(0, len(same), most)]
        return writes
        yield  # pragma: no cover (a layout may read before it decides)

    # -- other writes ------------------------------------------------------------------------------

    def _execute(self, make: Callable[[], Write[R]]) -> Plan[R]:
        """Parse and execute a write of one document."""
        return (yield from self.write_path.execute(make()))

    def update(
        self,
        id_or_filter: Any,
        update: Any,
        sort: Sort | None = None,
        returns: Returns = "after",
        array_filters: Sequence[Any] | None = None,
    ) -> Plan[D | None]:
        # Not a lambda, whose closure has an object for each argument.
        return self._execute(partial(Update, self.entry, id_or_filter, update, sort, returns, array_filters))

    def upsert(self, filter: Any, update: Any, insert: D) -> Plan[Upserted[D]]:
        return self.write_path.execute(self._upsert(filter, update, insert))

    def _upsert(self, filter: Any, update: Any, insert: D) -> Upsert[D]:
        if not isinstance(insert, self.entry.model):
            raise UsageError(
                f"insert= takes the {self.entry.model.__name__} to store where there is none, not "
                f"{type(insert).__name__}",
                code="model-unknown",
            )
        inserted: ModelEntry[D] = self.write_path.graph.entry(type(insert))
        return Upsert(self.entry, inserted, filter, update, insert)

    def change(self, document: D, fields: Mapping[str, Any]) -> Plan[D]:
        changed = yield from self._execute(lambda: ChangeFields(self.entry, document, fields))
        assert changed is not None
        return changed

    def update_all(self, filter: Any, update: Any) -> Plan[int]:
        return self.write_path.execute_chunks(UpdateMany(self.entry, filter, update))

    def replace(self, document: D) -> Plan[D]:
        return self._execute(lambda: Replace(self.entry, document))

    def change_kind(self, document: D, was: type[Document]) -> Plan[D]:
        before = former(self.write_path.graph, document, was)
        return self.write_path.execute(ChangeKind(self.entry, document, before))

    def delete(self, id_or_filter: Any) -> Plan[D | None]:
        return self._execute(lambda: Delete(self.entry, id_or_filter))

    def delete_all(self, filter: Any) -> Plan[int]:
        return self.write_path.execute_chunks(DeleteMany(self.entry, filter))

    def restore(self, identity: Any) -> Plan[D | None]:
        return self.write_path.execute(Restore(self.entry, identity))

    def purge(self, before: datetime | None) -> Plan[int]:
        purged = purge_filter(self.entry, before)
        return self.write_path.execute_chunks(DeleteMany(self.entry, {}, purged=purged))

    def write(self, operation: Operation) -> Write[Any]:
        entry = self.entry
        match operation:
            case operations.Insert(document):
                return Insert(entry, [document])
            case operations.Update(_, filter, update):
                return Update(entry, filter, update)
            case operations.UpdateMany(_, filter, update):
                return UpdateMany(entry, filter, update)
            case operations.Replace(document):
                return Replace(entry, document)
            case operations.Upsert(_, filter, update, insert):
                return self._upsert(filter, update, insert)
            case operations.Delete(_, filter):
                return Delete(entry, filter)
            case operations.DeleteMany(_, filter):
                return DeleteMany(entry, filter)


def layout_of(entry: ModelEntry[D], write_path: WritePath) -> Layout[D]:
    """Return how the documents of a model are stored and called."""
    default = DocumentLayout(entry, write_path)
    own = (rule.layout(default) for rule in entry.rules.implementing("layout"))
    return next((layout for layout in own if layout is not None), default)
