"""What `find` and `search` of the asyncio shell return: documents that are read page by page."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Generic, TypeVar

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.cursor import AsyncCursor

from treadle.graph.layout import PageReader
from treadle.model.document import Document
from treadle.plan import Raw
from treadle.store.async_runner import AsyncRunner

D = TypeVar("D", bound=Document)


class AsyncFound(Generic[D]):
    """The documents that a `find` streams; iterate it, once."""

    def __init__(self, cursor: AsyncCursor[Raw], documents: AsyncGenerator[D]) -> None:
        self._cursor = cursor
        self._documents = documents

    def __aiter__(self) -> AsyncIterator[D]:
        return self._documents

    async def __anext__(self) -> D:
        return await anext(self._documents)

    async def to_list(self) -> list[D]:
        """All remaining documents, in memory."""
        return [document async for document in self._documents]

    async def close(self) -> None:
        """Release the cursor early."""
        await self._documents.aclose()
        await self._cursor.close()


# A function, not a method: the cursor is to be closed as soon as nobody iterates any more.


async def read_pages(
    cursor: AsyncCursor[Raw], reader: PageReader[D], runner: AsyncRunner, session: AsyncClientSession | None
) -> AsyncGenerator[D]:
    """The documents that a reader makes of the pages of a cursor."""
    async with cursor:
        while not reader.done:
            raws = await cursor.to_list(reader.page)
            for document in await runner.run(reader.take(raws, len(raws) < reader.page), session):
                yield document
