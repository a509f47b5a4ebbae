"""The part of the asyncio shell that commits, and learns what the server can do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from bson import ObjectId
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import PyMongoError

from treadle.engine.document_layout import DocumentLayout
from treadle.engine.protocol import WriteProtocol
from treadle.engine.work import Work
from treadle.graph.graph import Graph
from treadle.graph.layout import Layout
from treadle.graph.limits import Limits
from treadle.graph.versions import WriteVersions
from treadle.model.document import Document
from treadle.plan.capabilities import Capabilities, read_capabilities
from treadle.store import shell
from treadle.store.async_runner import AsyncRunner
from treadle.store.combine import AsyncCombiner

D = TypeVar("D", bound=Document)
R = TypeVar("R")
Session = AsyncClientSession | None


class AsyncWriter:
    """What a store and its handles write through. Making one asks the server nothing."""

    def __init__(
        self,
        database: AsyncDatabase[Any],
        models: Iterable[type[Document]],
        write_versions: WriteVersions = None,
        limits: Limits | None = None,
    ) -> None:
        shell.check_database(database, AsyncDatabase)
        self.graph = Graph(models, write_versions, limits)
        self.protocol = WriteProtocol(self.graph, lambda: f"{shell.owner()}/{ObjectId()}", shell.is_dead)
        self._layouts: dict[type[Document], Layout[Any]] = {
            entry.model: entry.layout or DocumentLayout(entry, self.protocol)
            for entry in self.graph.entries.values()
        }
        self.runner = AsyncRunner(database, self._capabilities, self._share)
        self.database = database
        self._known: Capabilities | None = None
        bounds = self.graph.limits
        self._combiner = AsyncCombiner(self._commit, bounds.combined_max, bounds.combine_seconds)

    def _calls(self, model: type[D]) -> Layout[D]:
        """What answers the calls on a model."""
        layout = self._layouts.get(model)
        # The graph refuses what is none of its models.
        return self._layouts[self.graph.entry(model).model] if layout is None else layout

    async def _share(self, work: Work[Any], alone: bool, session: Session) -> Any:
        """The outcome of a work, committed with those of others who come at the same time."""
        if session is None and not alone:
            return await self._combiner.perform(work)
        (outcome,) = await self._commit([work], session)
        return outcome

    async def _commit(self, works: Sequence[Work[Any]], session: Session = None) -> list[Any]:
        try:
            return await self.runner.run(self.protocol.commit(works), session)
        except BaseException:
            if self.protocol.interrupted:
                # If it fails, the next write tries again.
                with contextlib.suppress(PyMongoError):
                    await self.runner.run(self.protocol.abandon())
            raise

    async def _capabilities(self) -> Capabilities:
        """What the server can do; the first call also recovers what a crash left."""
        if self._known is None:
            await self.recover()
        assert self._known is not None
        return self._known

    async def recover(self) -> int:
        """Finish what a crash left half done; how many such things there were."""
        if self._known is None:
            self._known = self.graph.check_server(await self.runner.run(read_capabilities()))
        return await self.runner.run(self.protocol.recover())
