"""The part of the asyncio shell that writes with all that follows, and recovers what a crash left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from bson import ObjectId
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import PyMongoError

from treadle.engine import commit, deletes, groups, standalone, writes
from treadle.engine.writes import ChunkedWork, Work
from treadle.errors import UsageError
from treadle.graph.graph import Graph
from treadle.graph.versions import WriteVersions
from treadle.model.document import Document
from treadle.patterns.tree.moves import finish
from treadle.patterns.tree.state import TreeBusy
from treadle.plan.capabilities import Capabilities, read_capabilities
from treadle.store import shell
from treadle.store.async_runner import AsyncRunner
from treadle.store.combine import AsyncCombiner

R = TypeVar("R")
Session = AsyncClientSession | None


class AsyncWriter:
    """What a store and its handles write through. Making one asks the server nothing."""

    def __init__(
        self,
        database: AsyncDatabase[Any],
        models: Iterable[type[Document]],
        write_versions: WriteVersions = None,
    ) -> None:
        shell.check_database(database, AsyncDatabase)
        self.graph = Graph(models, write_versions)
        self.runner = AsyncRunner(database)
        self.database = database
        self._known: Capabilities | None = None
        self._owes = False
        self._given_up: list[str] = []
        self._combiner = AsyncCombiner(self._commit)

    async def _write(self, work: Work[R], session: Session, *, combine: bool = True) -> R:
        """Perform a write with all that follows from it; a large move that it would cross is ended first."""
        for _ in range(shell.GIVE_WAY_MAX):
            try:
                return await self._write_through(work, session, combine)
            except TreeBusy as busy:
                if shell.inside(session):
                    raise
                await self.runner.run(finish(busy.tree, self.graph, await self._capabilities()))
        return await self._write_through(work, session, combine)

    async def _write_through(self, work: Work[R], session: Session, combine: bool) -> R:
        try:
            return await self._write_whole(work, session, combine)
        except UsageError as error:
            if error.code != "cascade-too-large" or session is not None or not deletes.can_go_ahead(work):
                raise
        # Too many documents hang on it for one transaction: those first, in chunks.
        deletion: Any = work
        for smaller in await self.runner.run(deletes.ahead_of(deletion)):
            await self._write_chunks(smaller, None)
        return await self._write_whole(work, session, combine)

    async def _write_whole(self, work: Work[R], session: Session, combine: bool) -> R:
        server = await self._capabilities()
        if self._owes and session is None:
            await self._pay()
        if work.entry.unready:
            await self.runner.run(groups.require_indexes(work.entry.unready))
        if work.alone:
            outcome = await self.runner.run(work.direct(self.graph, server), session)
        elif session is not None and session.in_transaction:
            outcome = await self.runner.run(commit.inside(self.graph, server, work), session)
        elif session is None and combine:
            outcome = await self._combiner.perform(work)
        else:
            (outcome,) = await self._commit([work], session)
        return work.result(shell.delivered(outcome))

    async def _commit(self, works: Sequence[Work[Any]], session: Session = None) -> list[Any]:
        server = await self._capabilities()
        who = f"{shell.owner()}/{ObjectId()}"
        plan = commit.commit(
            self.graph,
            server,
            works,
            owner=who,
            is_dead=shell.is_dead,
            left=lambda: self._leave_for_later(who),
        )
        try:
            return await self.runner.run(plan, session)
        except BaseException:
            if not server.transactions:
                await self._abandon(who)
            raise

    async def _abandon(self, who: str) -> None:
        """Release a lease that may be held without anybody knowing: its reply may have been lost."""
        self._leave_for_later(who)
        # If it fails, the next write tries again.
        with contextlib.suppress(PyMongoError):
            await self.runner.run(standalone.give_up(self._given_up))

    async def _write_chunks(self, work: ChunkedWork, session: Session) -> int:
        """Perform a bulk write, one transaction per chunk of documents."""
        if work.alone or work.together or (session is not None and session.in_transaction):
            return await self._write(work, session)
        done = 0
        last: Any = None
        while keys := await self.runner.run(writes.next_keys(work, last), session):
            done += await self._write(work.within(keys), session, combine=False)
            last = keys[-1]
        return done

    # -- what a crash left ----------------------------------------------------------

    async def _capabilities(self) -> Capabilities:
        """What the server can do. The first call also recovers what a crash left."""
        if self._known is None:
            self._known = await self.runner.run(read_capabilities())
            await self.recover()
        return self._known

    def _leave_for_later(self, who: str) -> None:
        self._owes = True
        self._given_up.append(who)

    async def _pay(self) -> None:
        """Finish what an earlier write could not; if that fails, the next write tries again."""
        with contextlib.suppress(PyMongoError):
            await self.recover()

    async def recover(self) -> int:
        """Finish what a crash left half done; how many such things there were."""
        if not self.graph.derives:
            return 0
        self._owes = False
        try:
            if self._known is None:
                self._known = await self.runner.run(read_capabilities())
            if self._given_up:
                await self.runner.run(standalone.give_up(self._given_up))
                self._given_up.clear()
            return await self.runner.run(shell.recover(self.graph, self._known))
        except BaseException:
            self._owes = True
            raise
