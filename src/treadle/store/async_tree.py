"""`store.tree(Model)` of the asyncio shell: the handle of a tree; what to do is in the plans."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from typing import Any, Generic, TypeVar

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import OperationFailure, PyMongoError

from treadle.engine.inserts import Insert
from treadle.engine.work import Work
from treadle.errors import UsageError
from treadle.model.document import Document
from treadle.patterns.tree import reads, state
from treadle.patterns.tree.fields import Tree
from treadle.patterns.tree.moves import Move, tree_of
from treadle.patterns.tree.placing import UNSTATED
from treadle.patterns.tree.reads import Levels, Pending, Stream
from treadle.patterns.tree.removes import Children, Remove
from treadle.plan import Plan, Raw, Read
from treadle.query.safety import Sort
from treadle.store import shell
from treadle.store.async_runner import AsyncRunner
from treadle.store.async_writer import AsyncWriter

D = TypeVar("D", bound=Document)
R = TypeVar("R")
Session = AsyncClientSession | None
Load = Callable[[Raw], D]

log = logging.getLogger("treadle")


def _check_model(node: Any, model: type[Document]) -> None:
    if type(node) is not model:
        raise UsageError(
            f"this is the tree of {model.__name__}; it takes no {type(node).__name__}", code="model-unknown"
        )


def _owes(work: Work[Any]) -> bool:
    return bool(getattr(work, "owes", False) or getattr(work, "token", None) is not None)


class AsyncNodes(Generic[D]):
    """The nodes that a tree streams; iterate it, once, or await it for a list."""

    def __init__(
        self, tree: Tree, runner: AsyncRunner, plan: Plan[Stream], load: Load[D], session: Session
    ) -> None:
        self._nodes = _stream(tree, runner, plan, load, session)

    def __aiter__(self) -> AsyncIterator[D]:
        return self._nodes

    async def __anext__(self) -> D:
        return await anext(self._nodes)

    def __await__(self) -> Generator[Any, Any, list[D]]:
        return self.to_list().__await__()

    async def to_list(self) -> list[D]:
        """All remaining nodes, in memory."""
        return [node async for node in self._nodes]

    async def close(self) -> None:
        """Release the cursor early."""
        await self._nodes.aclose()


async def _stream(
    tree: Tree, runner: AsyncRunner, plan: Plan[Stream], load: Load[D], session: Session
) -> AsyncGenerator[D]:
    stream = await runner.run(plan, session)
    if isinstance(stream, list):
        for raw in stream:
            yield load(raw)
        return
    pending = Pending(stream) if isinstance(stream, Levels) else None
    read: Read | None = stream.read if isinstance(stream, Levels) else stream
    add: Callable[[list[Raw]], None] | None = pending.add_first if pending is not None else None
    while read is not None:
        try:
            cursor = await runner.opened(read, session)
        except OperationFailure as error:
            read, add = reads.otherwise(tree, pending, error)
            continue
        async with cursor:
            while raws := await cursor.to_list(tree.entry.limits.find_page):
                if add is not None:
                    add(raws)
                for raw in raws:
                    yield load(raw)
        read, add = (pending.next(), pending.add) if pending is not None else (None, None)


class AsyncTreeHandle(Generic[D]):
    """The tree of one model: ids in, models out."""

    def __init__(self, store: AsyncWriter, model: type[D]) -> None:
        self._store = store
        self._entry = store.graph.entry(model)
        self._tree = tree_of(self._entry)

    # -- reading ----------------------------------------------------------------------

    def roots(self, sort: Sort | None = None, session: Session = None) -> AsyncNodes[D]:
        """The nodes without a parent, streamed."""
        return self._nodes(reads.roots(self._tree, sort), session)

    def children(self, id: Any, sort: Sort | None = None, session: Session = None) -> AsyncNodes[D]:
        """The nodes right below one, streamed."""
        return self._nodes(reads.children(self._tree, self._entry.identity(id), sort), session)

    def descendants(
        self, id: Any, max_depth: int | None = None, sort: Sort | None = None, session: Session = None
    ) -> AsyncNodes[D]:
        """All nodes below one, streamed; `max_depth=1` means children."""
        reads.check_depth(max_depth)
        return self._nodes(reads.descendants(self._tree, self._entry.identity(id), max_depth, sort), session)

    async def ancestors(self, id: Any, session: Session = None) -> list[D]:
        """The nodes above one, root first."""
        return await self._models(reads.ancestors(self._tree, self._entry.identity(id)), session)

    async def path(self, id: Any, session: Session = None) -> list[D]:
        """The nodes from the root to one, itself included."""
        return await self._models(reads.path(self._tree, self._entry.identity(id)), session)

    async def parent(self, id: Any, session: Session = None) -> D | None:
        """The node right above one; None for a root."""
        above = await self.ancestors(id, session)
        return above[-1] if above else None

    async def depth(self, id: Any, session: Session = None) -> int:
        """How many nodes are above one; 0 for a root."""
        return await self._store.runner.run(reads.depth(self._tree, self._entry.identity(id)), session)

    async def count(self, id: Any = None, max_depth: int | None = None, session: Session = None) -> int:
        """How many nodes are below one, or in the whole forest."""
        key = None if id is None else self._entry.identity(id)
        return await self._store.runner.run(reads.count(self._tree, key, max_depth), session)

    # -- writing ----------------------------------------------------------------------

    async def insert(self, node: D, parent: Any = None, session: Session = None) -> D:
        """Store a new node below a parent; without one, where its own fields say."""
        _check_model(node, self._entry.model)
        stated = UNSTATED if parent is None else self._entry.identity(parent)
        return (await self._perform(Insert(self._entry, [node], {self._tree.rules[0]: [stated]}), session))[0]

    async def move(self, id: Any, parent: Any, session: Session = None) -> D:
        """Put a node, and all below it, under another parent; None makes it a root."""
        whole = shell.inside(session)
        return await self._perform(Move(self._entry, id, parent, whole=whole), session)

    async def rename(self, id: Any, segment: str, session: Session = None) -> D:
        """Give a node another segment, and all below it the paths that follow."""
        whole = shell.inside(session)
        return await self._perform(Move(self._entry, id, segment=segment, whole=whole), session)

    async def remove(self, id: Any, children: Children = "refuse", session: Session = None) -> int:
        """Take a node out; how many nodes went. `children`: refuse, subtree or lift."""
        work = Remove(self._entry, id, children, whole=shell.inside(session))
        done = await self._perform(work, session)
        if work.token is None:
            return done
        # It went in chunks, which others may have helped with.
        return await self._store.runner.run(state.outcome(self._tree, work.token))

    # -- how -------------------------------------------------------------------------------

    def _nodes(self, plan: Plan[Stream], session: Session) -> AsyncNodes[D]:
        return AsyncNodes(self._tree, self._store.runner, plan, self._entry.codec.load, session)

    async def _models(self, plan: Plan[list[Raw]], session: Session) -> list[D]:
        return [self._entry.codec.load(raw) for raw in await self._store.runner.run(plan, session)]

    async def _perform(self, work: Work[R], session: Session) -> R:
        """A write, and then what it owes."""
        result = await self._store._write(work, session)
        if not _owes(work):
            return result
        try:
            await self._finish()
        except PyMongoError as error:
            # It is committed, and what is owed with it; it must not seem to have failed.
            log.warning("%s: a large move is pending: %s", self._entry.model.__name__, error)
            self._store.protocol.unfinished = True
        return result

    async def _finish(self) -> None:
        server = await self._store._capabilities()
        await self._store.runner.run(self._tree.rules[0].give_way(self._store.graph, server))
