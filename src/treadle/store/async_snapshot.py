"""Reads of several collections at one moment, in the asyncio shell."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from pymongo.asynchronous.client_session import AsyncClientSession

from treadle.store.async_writer import AsyncWriter

Session = AsyncClientSession | None


@asynccontextmanager
async def moment(store: AsyncWriter, session: Session) -> AsyncGenerator[tuple[Session, bool]]:
    """A session whose reads all see one moment, where the server has such; whether they do."""
    if session is not None or not (await store._capabilities()).snapshots:
        yield session, session is not None and session.in_transaction
        return
    async with store.runner.database.client.start_session(snapshot=True) as own:
        yield own, True


async def read_both(both: Any, store: AsyncWriter, session: Session) -> AsyncGenerator[Any]:
    """The documents that a reader merges from the pages of two cursors."""
    async with AsyncExitStack() as stack:
        within, _ = await stack.enter_async_context(moment(store, session))
        cursors = [
            await stack.enter_async_context(await store.runner.opened(command, within))
            for command in both.commands
        ]
        while not both.done:
            for at in both.wanting:
                both.fill(at, await cursors[at].to_list(both.page))
            for document in await store.runner.read(both.take(), within):
                yield document
