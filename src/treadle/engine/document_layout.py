"""The default layout: each document of a model is stored as one document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, TypeVar

from treadle.engine import crud, lazy
from treadle.engine.deletes import DeleteManyDocuments, DeleteOneDocument
from treadle.engine.inserts import Insert
from treadle.engine.kinds import ChangeKind, former, search_command
from treadle.engine.protocol import WriteProtocol
from treadle.engine.writes import Replace, UpdateManyDocuments, UpdateOneDocument
from treadle.graph.layout import Layout, PageReader
from treadle.graph.pattern import Entry
from treadle.model.document import Document
from treadle.plan import Plan, Raw, Read
from treadle.query.safety import Sort

D = TypeVar("D", bound=Document)


class DocumentReader(PageReader[D]):
    """Pages of stored documents, each as the model has it."""

    def __init__(self, entry: Entry[D], command: Read, filter: Any) -> None:
        self._command = command
        # PyMongo's own iteration costs as much per document as validating one.
        self.page = entry.limits.find_page
        self.done = False
        self._entry = entry
        self._filter = filter
        # Where all documents are as the model has them, there is nothing to do to a page.
        self._attends = entry.attends or (entry.versioned and bool(filter) and not entry.warned)

    @property
    def command(self) -> Read:
        return self._command

    def take(self, raws: list[Raw], ended: bool) -> Plan[Iterator[D]]:
        self.done = ended
        if self._attends:
            raws = yield from lazy.attend(self._entry, raws, self._filter)
        return map(self._entry.codec.load, raws)


class DocumentLayout(Layout[D]):
    """Documents one by one: a plain command, or a work where others follow."""

    entry: Entry[D]

    def __init__(self, entry: Entry[D], protocol: WriteProtocol) -> None:
        self.entry = entry
        self.protocol = protocol

    # -- reading -----------------------------------------------------------------------------------

    def get(self, identity: Any) -> Plan[D | None]:
        return crud.get(self.entry, identity)

    def first(self, filter: Any, sort: Sort | None) -> Plan[D | None]:
        return crud.find_first(self.entry, filter, sort)

    def reader(self, filter: Any, sort: Sort | None, skip: int, limit: int | None) -> DocumentReader[D]:
        command = crud.find_command(self.entry, filter, sort, skip, limit)
        return DocumentReader(self.entry, command, filter)

    def search(self, text: str, filter: Any, limit: int | None) -> DocumentReader[D]:
        return DocumentReader(self.entry, search_command(self.entry, text, filter, limit), filter)

    def count(self, filter: Any) -> Plan[int]:
        return crud.count(self.entry, filter)

    # -- writing -----------------------------------------------------------------------------------

    def insert(self, document: D) -> Plan[D]:
        return crud.insert(self.entry, document) if self.entry.plain else self._insert(document)

    def _insert(self, document: D) -> Plan[D]:
        (stored,) = yield from self.protocol.write(Insert(self.entry, [document]))
        return stored

    def insert_many(self, documents: Iterable[D]) -> Plan[list[D]]:
        listed = list(documents)
        if self.entry.plain:
            return (yield from crud.insert_many(self.entry, listed))
        works = yield from self._inserts(listed)
        stored: list[D] = []
        for work in works:
            stored += yield from self.protocol.write(work, combine=False)
        if len(works) == 1:
            return stored
        # In the order in which they were listed.
        written = [document for work in works for document in work.documents]
        by_document = {id(document): result for document, result in zip(written, stored, strict=True)}
        return [by_document[id(document)] for document in listed]

    def _inserts(self, documents: list[D]) -> Plan[list[Insert[D]]]:
        """The inserts of a bulk load: in chunks of one class, or as a rule wants them."""
        most = self.entry.limits.insert_max
        for rule in self.entry.answering("in_pieces"):
            pieces = yield from rule.in_pieces(documents, most)
            return [Insert(self.entry, piece, {rule: given}) for piece, given in pieces]
        works = []
        for model, run in groupby(documents, type):
            same = list(run)
            entry: Entry[D] = self.protocol.graph.entry(model)
            works += [Insert(entry, same[at : at + most]) for at in range(0, len(same), most)]
        return works

    def update(self, id_or_filter: Any, update: Any) -> Plan[D | None]:
        return self.protocol.write(UpdateOneDocument(self.entry, id_or_filter, update))

    def update_all(self, filter: Any, update: Any) -> Plan[int]:
        return self.protocol.write_chunks(UpdateManyDocuments(self.entry, filter, update))

    def replace(self, document: D) -> Plan[D]:
        return self.protocol.write(Replace(self.entry, document))

    def change_kind(self, document: D, was: type[Document]) -> Plan[D]:
        before = former(self.protocol.graph, document, was)
        return self.protocol.write(ChangeKind(self.entry, document, before))

    def delete(self, id_or_filter: Any) -> Plan[D | None]:
        return self.protocol.write(DeleteOneDocument(self.entry, id_or_filter))

    def delete_all(self, filter: Any) -> Plan[int]:
        return self.protocol.write_chunks(DeleteManyDocuments(self.entry, filter))
