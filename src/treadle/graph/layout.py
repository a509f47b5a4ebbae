"""How the documents of a model are stored, and what the Store's calls do to them.

The default is one document each (`engine/document_layout.py`). A pattern that
stores them otherwise answers the same calls with a layout of its own. All
but the readers are plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

from treadle.errors import UsageError
from treadle.graph.outcomes import Action, Finding, Report, Summary
from treadle.model.document import Document
from treadle.plan import Plan, Raw, Read
from treadle.plan.capabilities import Capabilities
from treadle.query.safety import Sort

D = TypeVar("D", bound=Document)
READINGS = "only models with bucket= or timeseries= have this"
D_co = TypeVar("D_co", bound=Document, covariant=True)


class PageReader(Protocol[D_co]):
    """Turns pages of what a cursor gives into documents of a model."""

    page: int
    done: bool

    @property
    def command(self) -> Read:
        """The read whose cursor is to be paged through."""

    def take(self, raws: list[Raw], ended: bool) -> Plan[Iterable[D_co]]:
        """The documents that can be emitted now."""


class Layout(Generic[D]):
    """The Store's calls on one model; what a layout does not answer, it refuses by name."""

    # What findings call it.
    pattern: ClassVar[str] = ""
    # The model's `Entry`, which knows its layout in turn.
    entry: Any

    def _not_answered(self, call: str, hint: str = "use find or count") -> NoReturn:
        name = self.entry.model.__name__
        stored = self.pattern or "one by one"
        raise UsageError(
            f"{call} is not for {name}, whose documents are stored {stored}; {hint}", code="layout-missing"
        )

    # -- reading -----------------------------------------------------------------------------------

    def id_filter(self, identity: Any) -> Raw:
        """The filter for one document, by an id that a caller gave."""
        return {"_id": {"$eq": self.entry.identity(identity)}}

    def get(self, identity: Any) -> Plan[D | None]:
        """The document with this id, or None."""
        return self.first(self.id_filter(identity), None)

    def first(self, filter: Any, sort: Sort | None) -> Plan[D | None]:
        """The first matching document, or None."""
        reader = self.reader(filter, sort, 0, 1)
        options, taken = reader.command.options, 0
        while not reader.done:
            most = options.get("limit") or reader.page
            raws = yield replace(reader.command, options={**options, "skip": taken, "limit": most})
            taken += len(raws)
            for document in (yield from reader.take(raws, len(raws) < reader.page)):
                return document
        return None

    def reader(self, filter: Any, sort: Sort | None, skip: int, limit: int | None) -> PageReader[D]:
        """What reads the matching documents, page by page."""
        self._not_answered("find")

    def search(self, text: str, filter: Any, limit: int | None) -> PageReader[D]:
        """What reads the documents that hold these words."""
        self._not_answered("search")

    def count(self, filter: Any) -> Plan[int]:
        self._not_answered("count")

    # -- writing -----------------------------------------------------------------------------------

    def insert(self, document: D) -> Plan[D]:
        self._not_answered("insert")

    def insert_many(self, documents: Iterable[D]) -> Plan[list[D]]:
        self._not_answered("insert_many")

    def update(self, id_or_filter: Any, update: Any) -> Plan[D | None]:
        self._not_answered("update")

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

    # -- readings ----------------------------------------------------------------------------------

    def summary(self, key: Any, start: Any, end: Any) -> Plan[list[Summary]]:
        self._not_answered("summary", READINGS)

    def tuples(
        self, key: Any, start: Any, end: Any, fields: Sequence[str] | None
    ) -> Plan[list[tuple[Any, ...]]]:
        self._not_answered("readings", READINGS)

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
