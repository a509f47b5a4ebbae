"""The seam through which the Store's calls reach models whose readings are not documents.

A model with a layout keeps its calls; what they do is here. Everything but
`reader` is a plan. `careful` says that the caller is inside a transaction,
where an error that the server reports ends everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from treadle.graph.reports import Action, Finding, Report, Summary
from treadle.model.document import Document
from treadle.plan import Plan, Raw, Read
from treadle.plan.capabilities import Capabilities
from treadle.query.safety import Sort


D = TypeVar("D", bound=Document)


class PageReader(Protocol[D]):
    """Turns pages of what a cursor gives into documents of a model."""

    done: bool
    page: int

    @property
    def command(self) -> Read:
        """The read whose cursor is to be paged through."""

    def take(self, raws: list[Raw], ended: bool) -> Plan[list[D]]:
        """The documents that can be emitted now."""


class Layout(Generic[D]):
    """How the documents of one model are stored, where that is not one by one."""

    # What findings call it.
    pattern: str = ""

    def insert(self, document: D, careful: bool) -> Plan[D]:
        raise NotImplementedError  # pragma: no cover

    def insert_many(
        self, documents: Iterable[D], careful: bool, server: Capabilities | None = None
    ) -> Plan[list[D]]:
        raise NotImplementedError  # pragma: no cover

    def reader(self, filter: Any, sort: Sort | None, skip: int, limit: int | None) -> PageReader[D]:
        raise NotImplementedError  # pragma: no cover

    def id_filter(self, identity: Any) -> Raw:
        """The filter for one document, by an id that a caller gave."""
        raise NotImplementedError  # pragma: no cover

    def count(self, filter: Any) -> Plan[int]:
        raise NotImplementedError  # pragma: no cover

    def update(self, id_or_filter: Any, update: Any, server: Capabilities) -> Plan[D | None]:
        raise NotImplementedError  # pragma: no cover

    def update_all(self, filter: Any, update: Any, server: Capabilities) -> Plan[int]:
        raise NotImplementedError  # pragma: no cover

    def replace(self, document: D, server: Capabilities) -> Plan[D]:
        raise NotImplementedError  # pragma: no cover

    def delete(self, id_or_filter: Any, server: Capabilities) -> Plan[D | None]:
        raise NotImplementedError  # pragma: no cover

    def delete_all(self, filter: Any, server: Capabilities) -> Plan[int]:
        raise NotImplementedError  # pragma: no cover

    def summary(self, key: Any, start: Any, end: Any) -> Plan[list[Summary]]:
        raise NotImplementedError  # pragma: no cover

    def tuples(
        self, key: Any, start: Any, end: Any, fields: Sequence[str] | None
    ) -> Plan[list[tuple[Any, ...]]]:
        raise NotImplementedError  # pragma: no cover

    def schema(self) -> Raw | None:
        """What each stored document must be like; None where the server alone looks after them."""
        return None

    # -- set-up, proof and repair ---------------------------------------------------------

    def setup(self, existing: dict[str, Raw], actions: list[Action]) -> Plan[None]:
        """Make the collection, its indexes and its views as declared."""
        raise NotImplementedError  # pragma: no cover

    def verify(self, server: Capabilities, report: Report | None) -> Plan[list[Finding]]:
        raise NotImplementedError  # pragma: no cover

    def repair(self, server: Capabilities, report: Report | None) -> Plan[int]:
        raise NotImplementedError  # pragma: no cover

    def rebuild(self, server: Capabilities, report: Report | None) -> Plan[int]:
        raise NotImplementedError  # pragma: no cover
