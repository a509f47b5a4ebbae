"""How the documents of a model are stored, and what the Store's calls do to them.

The default is one document each (`engine/document_layout.py`). A pattern that
stores them otherwise answers the same calls with a layout of its own. All
but the readers are plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from treadle.errors import UsageError
from treadle.graph.operations import Operation, Returns, Upserted
from treadle.graph.outcomes import Action, Finding, Page, Report, Summary
from treadle.graph.query import Query
from treadle.model.document import Document
from treadle.model.text import get_logger
from treadle.plan import Call, Plan, Raw, Read
from treadle.plan.capabilities import Capabilities
from treadle.query.filters import Sort

log = get_logger(__name__)

D = TypeVar("D", bound=Document)
READINGS = "only models with bucket= or timeseries= have this"
R_co = TypeVar("R_co", covariant=True)


class PageReader(Protocol[R_co]):
    """Turns pages of what a cursor gives into documents of a model, or into cards."""

    page: int
    done: bool

    @property
    def command(self) -> Read:
        """The read whose cursor is to be paged through."""

    def take(self, raws: list[Raw], ended: bool) -> Plan[Iterable[R_co]]:
        """The documents that can be emitted now."""


class PlainInsert(NamedTuple):
    """An insert that is one command, and what it returns: the document as a later read will give it."""

    command: Call
    stored: Any


class Layout(Generic[D]):
    """The Store's calls on one model; what a layout does not answer, it refuses by name."""

    # What findings call it.
    pattern: ClassVar[str] = ""
    # The model's `ModelEntry`, which knows its layout in turn.
    entry: Any

    def _not_answered(self, call: str, hint: str = "use find or count") -> NoReturn:
        name = self.entry.model.__name__
        pattern = self.pattern.replace("_", " ")
        stored = f"by the pattern {pattern}" if pattern else "as one document each"
        raise UsageError(
            f"{call} is not for {name}, whose documents are stored {stored}; {hint}", code="layout-missing"
        )

    # -- calls that are one command --------------------------------------------------------------

    def read_command(self, identity: Any) -> Call | None:
        """Return the command that reads the document of an id; None where a plan does."""
        return None

    def plain_insert(self, document: D) -> PlainInsert | None:
        """Return the command that stores a document; None where a plan does."""
        return None

    def refusal(self, error: Exception, command: Call) -> Exception:
        """Return the error to raise where such an insert failed."""
        return error

    # -- reading -----------------------------------------------------------------------------------

    def id_filter(self, identity: Any) -> Raw:
        """The filter for one document, by an id that a caller gave."""
        return {"_id": {"$eq": self.entry.ids.encode(identity)}}

    def get(self, identity: Any, card: Any = None) -> Plan[Any]:
        """The document with this id, or None; as the model, or as a `Card`."""
        return self.first(self.id_filter(identity), None, card)

    def many(self, identities: Iterable[Any], card: Any = None) -> Plan[list[Any]]:
        """The documents with these ids in their order, None where there is none."""
        documents = []
        for identity in identities:
            documents.append((yield from self.get(identity, card)))
        return documents

    def exists(self, filter: Any) -> Plan[bool]:
        return (yield from self.first(filter, None)) is not None

    def first(self, filter: Any, sort: Sort | None, card: Any = None) -> Plan[Any]:
        """The first matching document, or None."""
        reader = self.reader(Query(filter, sort, limit=1, card=card))
        options, taken = reader.command.options, 0
        while not reader.done:
            most = options.get("limit") or reader.page
            raws = yield replace(reader.command, options={**options, "skip": taken, "limit": most})
            taken += len(raws)
            for document in (yield from reader.take(raws, len(raws) < reader.page)):
                return document
        return None

    def reader(self, query: Query) -> PageReader[Any]:
        """What reads the matching documents, page by page."""
        self._not_answered("find")

    def archive_reader(self, query: Query) -> Any:
        """What reads the matching documents of a model's collection and of its archive."""
        self._not_answered("find(archived=True)")

    def search(self, text: str, filter: Any, limit: int | None, card: Any = None) -> PageReader[Any]:
        """What reads the documents that hold these words."""
        self._not_answered("search")

    def page(
        self, filter: Any, sort: Sort | None, size: int, after: str | None, card: Any = None
    ) -> Plan[Page[Any]]:
        """The documents after a place in the order of the sort, and where the next ones begin."""
        self._not_answered("page", "use find with sort=, skip= and limit=")

    def distinct(self, field: str, filter: Any) -> Plan[list[Any]]:
        """The different values of a field."""
        self._not_answered("distinct")

    def aggregate(self, pipeline: Any, into: Any) -> PageReader[Any]:
        """What reads the results of a pipeline over the documents."""
        self._not_answered("aggregate")

    def count(self, filter: Any) -> Plan[int]:
        self._not_answered("count")

    # -- writing -----------------------------------------------------------------------------------

    def insert(self, document: D) -> Plan[D]:
        self._not_answered("insert")

    def insert_many(self, documents: Iterable[D], ordered: bool = True) -> Plan[list[D]]:
        self._not_answered("insert_many")

    def update(
        self,
        id_or_filter: Any,
        update: Any,
        sort: Sort | None = None,
        returns: Returns = "after",
        array_filters: Sequence[Any] | None = None,
    ) -> Plan[D | None]:
        self._not_answered("update")

    def bring_back(self, selector: Any) -> Plan[bool]:
        """Restore an archived document that a write is about; raises if that is refused.

        Returns whether the write finds a document now.
        """
        return False
        yield  # pragma: no cover

    def upsert(self, filter: Any, update: Any, insert: D) -> Plan[Upserted[D]]:
        """Update the document that matches, or store another."""
        self._not_answered("upsert", "use insert, or update")

    def write(self, operation: Operation) -> Any:
        """Return the `Write` of one operation of a bulk; None where it cannot share a commit."""
        return None

    def change(self, document: D, fields: Mapping[str, Any]) -> Plan[D]:
        """Write some fields, by their Python names, of a document that the caller has read."""
        self._not_answered("change", "use update, or replace")

    def update_all(self, filter: Any, update: Any) -> Plan[int]:
        self._not_answered("update_many")

    def replace(self, document: D) -> Plan[D]:
        self._not_answered("replace")

    def change_kind(self, document: D, was: type[Document]) -> Plan[D]:
        self._not_answered("change_kind")

    def delete(self, id_or_filter: Any) -> Plan[D | None]:
        self._not_answered("delete")

    def delete_all(self, filter: Any) -> Plan[int]:
        self._not_answered("delete_many")

    def restore(self, identity: Any) -> Plan[D | None]:
        """Bring a deleted document back, or None where there is none."""
        self._not_answered("restore")

    def purge(self, before: datetime | None) -> Plan[int]:
        """Remove deleted documents for good; how many."""
        self._not_answered("purge")

    # -- readings ----------------------------------------------------------------------------------

    def summary(self, key: Any, start: Any, end: Any) -> Plan[list[Summary]]:
        self._not_answered("summary", READINGS)

    def tuples(
        self, key: Any, start: Any, end: Any, fields: Sequence[str] | None
    ) -> Plan[list[tuple[Any, ...]]]:
        self._not_answered("readings", READINGS)

    def aged_by(self, path: str) -> str | None:
        """The stored path that tells until when a stored document has readings of a time; None for others."""
        return None

    # -- set-up, proof and repair; asked only of layouts that are not one document each --------------

    def schema(self) -> Raw | None:
        """What each stored document must be like; None where the server alone looks after them."""
        return None

    def setup(self, existing: dict[str, Raw], actions: list[Action]) -> Plan[None]:
        """Make the collection, its indexes and its views as declared."""
        self._not_answered("setup")

    def verify(self, server: Capabilities, report: Report | None) -> Plan[list[Finding]]:
        self._not_answered("verify")

    def repair(self, server: Capabilities, report: Report | None) -> Plan[int]:
        self._not_answered("repair")

    def rebuild(self, server: Capabilities, report: Report | None) -> Plan[int]:
        self._not_answered("rebuild")
