"""What `store.tree(…)` of the asyncio shell gives: the handle of a tree."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import OperationFailure

from treadle.graph.calls import Children, HierarchyRule, rule_of
from treadle.graph.outcomes import Nested
from treadle.model.document import Document
from treadle.query.filters import Sort
from treadle.store import common
from treadle.store.async_results import AsyncResults
from treadle.store.async_runner import AsyncRunner
from treadle.store.async_writer import AsyncWriter

if TYPE_CHECKING:
    from treadle.patterns.tree.calls import TreeCalls
    from treadle.patterns.tree.reads import NodeReader

D = TypeVar("D", bound=Document)
Session = AsyncClientSession | None


class AsyncNodes(AsyncResults[D]):
    """The nodes that a tree streams; iterate it, once, or await it for a list."""

    def __init__(self, store: AsyncWriter, reader: NodeReader[D], session: Session) -> None:
        super().__init__(_stream(store.runner, reader, store._within(session)))

    def __await__(self) -> Generator[Any, Any, list[D]]:
        return self.to_list().__await__()


async def _stream(runner: AsyncRunner, reader: NodeReader[D], session: Session) -> AsyncGenerator[D]:
    read = await runner.call(reader.first(), session, answers=True)
    while read is not None:
        try:
            with common.encoding():
                cursor = await runner.opened(read, session)
        except OperationFailure as error:
            read = reader.instead(error)
            continue
        async with cursor:
            while raws := await _page(cursor, reader.page):
                for node in reader.take(raws):
                    yield node
        read = reader.next()


async def _page(cursor: Any, size: int) -> list[Any]:
    with common.encoding():
        raws: list[Any] = await cursor.to_list(size)
        return raws


class AsyncTreeHandle(Generic[D]):
    """The tree of one model: ids in, models out."""

    def __init__(self, store: AsyncWriter, model: type[D]) -> None:
        self._store = store
        rule = rule_of(store.graph.entry(model), HierarchyRule)
        self._calls: TreeCalls[D] = rule.calls(store.write_path)

    # -- reading ----------------------------------------------------------------------

    def roots(self, sort: Sort | None = None, session: Session = None) -> AsyncNodes[D]:
        """The nodes without a parent, streamed."""
        return AsyncNodes(self._store, self._calls.roots(sort), session)

    def children(self, id: Any, sort: Sort | None = None, session: Session = None) -> AsyncNodes[D]:
        """The nodes right below one, streamed."""
        return AsyncNodes(self._store, self._calls.children(id, sort), session)

    def descendants(
        self, id: Any, max_depth: int | None = None, sort: Sort | None = None, session: Session = None
    ) -> AsyncNodes[D]:
        """All nodes below one, streamed; `max_depth=1` means children."""
        return AsyncNodes(self._store, self._calls.descendants(id, max_depth, sort), session)

    async def nested(
        self, id: Any, max_depth: int | None = None, sort: Sort | None = None, session: Session = None
    ) -> Nested[D]:
        """A node and all below it, as one nested structure."""
        return await self._store._read(self._calls.nested(id, max_depth, sort), session)

    async def ancestors(self, id: Any, session: Session = None) -> list[D]:
        """The nodes above one, root first."""
        return await self._store._read(self._calls.ancestors(id), session)

    async def path(self, id: Any, session: Session = None) -> list[D]:
        """The nodes from the root to one, itself included."""
        return await self._store._read(self._calls.path(id), session)

    async def parent(self, id: Any, session: Session = None) -> D | None:
        """The node right above one; None for a root."""
        return await self._store._read(self._calls.parent(id), session)

    async def depth(self, id: Any, session: Session = None) -> int:
        """How many nodes are above one; 0 for a root."""
        return await self._store._read(self._calls.depth(id), session)

    async def count(self, id: Any = None, max_depth: int | None = None, session: Session = None) -> int:
        """How many nodes are below one, or in the whole forest."""
        return await self._store._read(self._calls.count(id, max_depth), session)

    # -- writing ----------------------------------------------------------------------

    async def insert(
        self, node: D, parent: Any = None, session: Session = None, *, at: int | None = None
    ) -> D:
        """Store a new node below a parent; without one, where its own fields say.

        `at` is the index among the parent's children, for ChildReferences;
        a new node is the last of them otherwise.
        """
        return await self._store._write(self._calls.insert(node, parent, at), session)

    async def move(self, id: Any, parent: Any, session: Session = None, *, at: int | None = None) -> D:
        """Put a node, and all below it, under another parent; None makes it a root.

        `at` is the index among the parent's other children, for
        ChildReferences; a node becomes the last of them otherwise. With the
        parent that it has, only its place among its siblings changes.
        """
        return await self._store._write(self._calls.move(id, parent, at), session)

    async def rename(self, id: Any, segment: str, session: Session = None) -> D:
        """Give a node another segment, and all below it the paths that follow."""
        return await self._store._write(self._calls.rename(id, segment), session)

    async def remove(self, id: Any, children: Children = "refuse", session: Session = None) -> int:
        """Remove a node; returns the number of nodes removed. `children`: refuse, subtree or lift."""
        return await self._store._write(self._calls.remove(id, children), session)
