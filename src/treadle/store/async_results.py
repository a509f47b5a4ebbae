"""What `find`, `search` and `aggregate` of the asyncio shell return: results that are read page by page."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Generic, TypeVar

from bson.errors import InvalidBSON
from pymongo.asynchronous.client_session import AsyncClientSession

from treadle.errors import DataError
from treadle.graph.layout import PageReader
from treadle.model.bson_types import ENCODING_ERRORS, not_storable
from treadle.plan.decoding import PagedRead
from treadle.store import common
from treadle.store.async_runner import AsyncRunner
from treadle.store.async_writer import AsyncWriter

R = TypeVar("R")
Session = AsyncClientSession | None


class AsyncResults(Generic[R]):
    """The documents that a `find` streams; iterate it, once."""

    def __init__(self, documents: AsyncGenerator[R], invalid: list[DataError] | None = None) -> None:
        self._documents = documents
        # The errors of the documents that were passed over so far, under `invalid="skip"`.
        self.invalid: list[DataError] = [] if invalid is None else invalid

    def __aiter__(self) -> AsyncIterator[R]:
        return self._documents

    async def __anext__(self) -> R:
        return await anext(self._documents)

    async def to_list(self) -> list[R]:
        """All remaining documents, in memory."""
        return [document async for document in self._documents]

    async def close(self) -> None:
        """Release the cursor early."""
        await self._documents.aclose()


# A function, not a method: the cursor is closed as soon as its results are not iterated any more.


async def read_pages(
    reader: PageReader[R],
    runner: AsyncRunner,
    session: Session,
    first: Callable[[], Awaitable[None]] | None = None,
    noted: list[DataError] | None = None,
) -> AsyncGenerator[R]:
    """The documents that a reader makes of the pages of a cursor; something else may be done `first`.

    Where errors are `noted`, documents that cannot be decoded are passed over.
    """
    if first is not None:
        await first()
    reading = PagedRead(await runner.aimed(reader.command, session))
    while True:
        try:
            with common.encoding():
                opened = await runner.opened(reading.command, session, raw=reading.as_bytes)
        except InvalidBSON as error:
            reading.decode_singly(error)
            continue
        async with opened as cursor:
            while not reader.done:
                try:
                    page = await cursor.to_list(reader.page)
                except InvalidBSON as error:
                    reading.decode_singly(error)
                    break
                except ENCODING_ERRORS as error:
                    raise not_storable(error, reading.command.collection) from error
                raws, unreadable = reading.take(page, skip=noted is not None)
                for document in await runner.call(
                    reader.take(raws, len(page) < reader.page), session, answers=True
                ):
                    yield document
                if unreadable is not None and noted is None:
                    raise unreadable
                if unreadable is not None and noted is not None:
                    noted += unreadable.singly()
            else:
                return


@asynccontextmanager
async def snapshot(store: AsyncWriter, session: Session) -> AsyncGenerator[tuple[Session, bool]]:
    """Give a session whose reads all see one moment, where the server has such, and whether they do."""
    if session is not None or not (await store._capabilities()).snapshots:
        yield session, session is not None and session.in_transaction
        return
    async with store.runner.database.client.start_session(snapshot=True) as own:
        yield own, True


async def read_both(both: Any, store: AsyncWriter, session: Session) -> AsyncGenerator[Any]:
    """Stream the documents that a reader merges from the pages of two cursors."""
    async with AsyncExitStack() as stack:
        within, _ = await stack.enter_async_context(snapshot(store, session))
        cursors = [
            await stack.enter_async_context(await store.runner.opened(command, within))
            for command in both.commands
        ]
        while not both.done:
            for at in both.wanting:
                both.fill(at, await cursors[at].to_list(both.page))
            for document in await store.runner.call(both.take(), within, answers=True):
                yield document
