"""The part of the asyncio shell that reads documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pymongo.asynchronous.client_session import AsyncClientSession
from typing_extensions import TypeVar

from treadle.errors import DataError, NotFound, UsageError
from treadle.graph.calls import PastRule, RelatingRule, rule_of
from treadle.graph.card import card_of
from treadle.graph.layout import PageReader
from treadle.graph.outcomes import Page, State, Summary
from treadle.graph.query import Query
from treadle.model.document import Document
from treadle.plan import Raw
from treadle.query.filters import Sort
from treadle.store import common
from treadle.store.async_results import AsyncResults, read_both, read_pages
from treadle.store.async_writer import AsyncWriter
from treadle.store.common import Invalid

if TYPE_CHECKING:
    from treadle.patterns.history.handle import HistoryHandle

D = TypeVar("D", bound=Document)
# What documents are read as by `into=`: by default their own model, or the dicts of a pipeline.
C = TypeVar("C", bound=BaseModel, default=D)
A = TypeVar("A", bound=BaseModel | Raw, default=Raw)
R = TypeVar("R")
Session = AsyncClientSession | None


class AsyncReads(AsyncWriter):
    """The calls that read; `into=` reads documents as another model, and asks for its fields alone."""

    def _card(self, model: type[Document], into: Any) -> Any:
        return None if into is None else card_of(self.graph.entry(model), into)

    def _results(
        self, reader: PageReader[R], session: Session, noted: list[DataError] | None = None
    ) -> AsyncResults[R]:
        # A server without change streams is refused before anything is read.
        look = self._look if self._streams and self._known is None else None
        pages = read_pages(reader, self.runner, self._within(session), look, noted)
        return AsyncResults(pages, noted)

    # -- one ----------------------------------------------------------------------

    async def get(
        self, model: type[D], id: Any, session: Session = None, *, into: type[C] | None = None
    ) -> C | None:
        """The document with this id, or None."""
        calls = self._calls(model)
        if into is None and self._may_share(session):
            command = calls.read_command(id)
            if command is not None:
                raw = await self.runner.share(command)
                return None if raw is None else calls.entry.codec.load(raw)
        document: C | None = await self._read(calls.get(id, self._card(model, into)), session)
        return document

    async def require(
        self, model: type[D], id_or_filter: Any, session: Session = None, *, into: type[C] | None = None
    ) -> C:
        """The document with this id, or the first that matches; raises `NotFound` where there is none."""
        calls, card = self._calls(model), self._card(model, into)
        by_filter = isinstance(id_or_filter, Mapping)
        plan = calls.first(id_or_filter, None, card) if by_filter else calls.get(id_or_filter, card)
        document: C | None = await self._read(plan, session)
        if document is None:
            raise NotFound(model.__name__, None if by_filter else id_or_filter)
        return document

    async def find_one(
        self,
        model: type[D],
        filter: Any = None,
        sort: Sort | None = None,
        session: Session = None,
        *,
        into: type[C] | None = None,
    ) -> C | None:
        """The first matching document, or None."""
        plan = self._calls(model).first(filter, sort, self._card(model, into))
        document: C | None = await self._read(plan, session)
        return document

    # -- several ------------------------------------------------------------------

    async def get_many(
        self, model: type[D], ids: Iterable[Any], session: Session = None, *, into: type[C] | None = None
    ) -> list[C | None]:
        """The documents with these ids, in their order; None where there is none."""
        calls, listed = self._calls(model), common.listed_ids(model, ids)
        return await self._read(calls.many(listed, self._card(model, into)), session)

    def find(
        self,
        model: type[D],
        filter: Any = None,
        sort: Sort | None = None,
        skip: int = 0,
        limit: int | None = None,
        session: Session = None,
        *,
        into: type[C] | None = None,
        deleted: bool = False,
        archived: bool = False,
        invalid: Invalid = "raise",
    ) -> AsyncResults[C]:
        """The matching documents, streamed, never all in memory at once; or the `deleted` ones alone.

        With `archived`, those of the model's archive as well, merged in the order of the sort.
        One that does not fit its model is named by the error that it raises;
        with `invalid="skip"` it is passed over, and `invalid` of the results
        lists the errors.
        """
        if archived and deleted:
            raise UsageError(
                "find takes deleted=True or archived=True, not both: a soft-deleted document is never "
                "archived, so leave archived= out",
                code="filter-invalid",
            )
        errors, card = common.noting(invalid), self._card(model, into)
        query = Query(filter, sort, skip, limit, card, deleted, errors)
        if archived:
            both = self._calls(model).archive_reader(query)
            return AsyncResults(read_both(both, self, self._within(session)), errors)
        return self._results(self._calls(model).reader(query), session, errors)

    def search(
        self,
        model: type[D],
        text: str,
        filter: Any = None,
        limit: int | None = None,
        session: Session = None,
        *,
        into: type[C] | None = None,
    ) -> AsyncResults[C]:
        """The documents that hold these words, the best match first; words only, no operators."""
        return self._results(self._calls(model).search(text, filter, limit, self._card(model, into)), session)

    async def page(
        self,
        model: type[D],
        filter: Any = None,
        sort: Sort | None = None,
        size: int = 20,
        after: str | None = None,
        session: Session = None,
        *,
        into: type[C] | None = None,
    ) -> Page[C]:
        """The documents after a place in the order of the sort; `next` is the place for the next call."""
        card = self._card(model, into)
        return await self._read(self._calls(model).page(filter, sort, size, after, card), session)

    # -- readings ---------------------------------------------------------------------

    async def summary(
        self, model: type[Document], key: Any, start: Any = None, end: Any = None, session: Session = None
    ) -> list[Summary]:
        """Statistics of a series from `start` to before `end`: one entry per bucket, readings unread."""
        return await self._read(self._calls(model).summary(key, start, end), session)

    async def readings(
        self,
        model: type[Document],
        key: Any,
        start: Any = None,
        end: Any = None,
        fields: Sequence[str] | None = None,
        session: Session = None,
    ) -> list[tuple[Any, ...]]:
        """A series from `start` to before `end` as tuples, time first; much quicker than models."""
        return await self._read(self._calls(model).tuples(key, start, end, fields), session)

    # -- facts about documents ------------------------------------------------------

    async def count(self, model: type[Document], filter: Any = None, session: Session = None) -> int:
        """How many documents match."""
        return await self._read(self._calls(model).count(filter), session)

    async def exists(self, model: type[Document], filter: Any = None, session: Session = None) -> bool:
        """Whether any document matches."""
        return await self._read(self._calls(model).exists(filter), session)

    async def distinct(
        self, model: type[Document], field: str, filter: Any = None, session: Session = None
    ) -> list[Any]:
        """The different values of a field, which is named in Python, of the documents that match."""
        return await self._read(self._calls(model).distinct(field, filter), session)

    def aggregate(
        self,
        model: type[Document],
        pipeline: Sequence[Any],
        session: Session = None,
        *,
        into: type[A] | None = None,
    ) -> AsyncResults[A]:
        """What a pipeline makes of the documents, streamed: dicts of Python values, or models."""
        return self._results(self._calls(model).aggregate(pipeline, into), session)

    # -- former states, and documents that belong together ---------------------------------

    def _past(self, model: type[Document]) -> HistoryHandle:
        entry = self.graph.entry(model)
        handle: HistoryHandle = rule_of(entry, PastRule).calls(self.write_path, entry)
        return handle

    def history(self, model: type[D], id: Any, session: Session = None) -> AsyncResults[State[D]]:
        """The states of a document, the newest first, streamed."""
        return self._results(self._past(model).states(id), session)

    async def at(self, model: type[D], id: Any, moment: datetime, session: Session = None) -> D | None:
        """The document as it was at a moment, or None where there was none."""
        document: D | None = await self._read(self._past(model).at(id, moment), session)
        return document

    def find_at(
        self, model: type[D], filter: Any, moment: datetime, session: Session = None
    ) -> AsyncResults[D]:
        """The documents that matched at a moment, as they were, streamed in the order of their ids."""
        return self._results(self._past(model).find_at(filter, moment), session)

    async def revert(self, model: type[D], id: Any, revision: int, session: Session = None) -> D:
        """Write a document as it was in an earlier state, as a new one; one that was deleted comes back."""
        document: D = await self._write(self._past(model).revert(id, revision), session)
        return document

    # -- documents that belong together ------------------------------------------------

    def related(
        self,
        model: type[Document],
        id: Any,
        filter: Any = None,
        sort: Sort | None = None,
        limit: int | None = None,
        session: Session = None,
    ) -> AsyncResults[Any]:
        """A document and all that are linked to it, streamed, each as its own class; in one query."""
        rule = rule_of(self.graph.entry(model), RelatingRule)
        return self._results(rule.related(self.write_path, id, filter, sort, limit), session)
