"""The part of the asyncio shell that reads and brings back what was before."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from pymongo.asynchronous.client_session import AsyncClientSession

from treadle.graph.calls import past_of, relating_of
from treadle.graph.outcomes import State
from treadle.model.document import Document
from treadle.query.filters import Sort
from treadle.store.async_reads import AsyncReads
from treadle.store.async_results import AsyncResults

if TYPE_CHECKING:
    from treadle.patterns.history.handle import HistoryHandle

D = TypeVar("D", bound=Document)
Session = AsyncClientSession | None


class AsyncPast(AsyncReads):
    """The calls on models whose former states are kept, and on those with links."""

    def _past(self, model: type[Document]) -> HistoryHandle:
        entry = self.graph.entry(model)
        handle: HistoryHandle = past_of(entry).calls(self.write_path, entry)
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
        rule = relating_of(self.graph.entry(model))
        return self._results(rule.related(self.write_path, id, filter, sort, limit), session)
