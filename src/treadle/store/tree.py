"""`store.tree(Model)`: the blocking and the asyncio shell of trees; what to do is in the plans."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from pymongo.errors import OperationFailure, PyMongoError

from treadle.engine.writes import Insert, Work
from treadle.errors import UsageError
from treadle.model.document import Document
from treadle.patterns.tree import reads, state
from treadle.patterns.tree.fields import Tree
from treadle.patterns.tree.moves import Move, finish, tree_of
from treadle.patterns.tree.placing import UNSTATED
from treadle.patterns.tree.reads import Levels, Pending, Stream
from treadle.patterns.tree.removes import Children, Remove
from treadle.plan import Plan, Raw, Read
from treadle.query.safety import Sort

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession
    from pymongo.client_session import ClientSession

    from treadle.store.async_store import AsyncRunner, AsyncStore
    from treadle.store.blocking_store import Runner, Store

D = TypeVar("D", bound=Document)
R = TypeVar("R")
Session: TypeAlias = "ClientSession | None"
AsyncSession: TypeAlias = "AsyncClientSession | None"
Load = Callable[[Raw], D]

PAGE = 100

log = logging.getLogger("treadle")


def _inside(session: Any) -> bool:
    return session is not None and session.in_transaction


def _check_model(node: Any, model: type[Document]) -> None:
    if type(node) is not model:
        raise UsageError(
            f"this is the tree of {model.__name__}; it takes no {type(node).__name__}", code="model-unknown"
        )


def _owes(work: Work[Any]) -> bool:
    return bool(getattr(work, "owes", False) or getattr(work, "token", None) is not None)


class Nodes(Generic[D]):
    """The nodes that a tree streams; iterate it, once."""

    def __init__(
        self, tree: Tree, runner: Runner, plan: Plan[Stream], load: Load[D], session: Session
    ) -> None:
        self._nodes = _stream(tree, runner, plan, load, session)

    def __iter__(self) -> Iterator[D]:
        return self._nodes

    def __next__(self) -> D:
        return next(self._nodes)

    def to_list(self) -> list[D]:
        """All remaining nodes, in memory."""
        return list(self._nodes)

    def close(self) -> None:
        """Release the cursor early."""
        self._nodes.close()


def _stream(tree: Tree, runner: Runner, plan: Plan[Stream], load: Load[D], session: Session) -> Generator[D]:
    stream = runner.run(plan, session)
    if isinstance(stream, list):
        yield from map(load, stream)
        return
    pending = Pending(stream) if isinstance(stream, Levels) else None
    read: Read | None = stream.read if isinstance(stream, Levels) else stream
    add: Callable[[list[Raw]], None] | None = pending.add_first if pending is not None else None
    while read is not None:
        try:
            cursor = runner.open(read, session)
        except OperationFailure as error:
            read, add = reads.otherwise(tree, pending, error)
            continue
        with closing(cursor):
            while raws := cursor.to_list(PAGE):
                if add is not None:
                    add(raws)
                for raw in raws:
                    yield load(raw)
        read, add = (pending.next(), pending.add) if pending is not None else (None, None)


class TreeHandle(Generic[D]):
    """The tree of one model: ids in, models out."""

    def __init__(self, store: Store, model: type[D]) -> None:
        self._store = store
        self._entry = store.graph.entry(model)
        self._tree = tree_of(self._entry)

    # -- reading ----------------------------------------------------------------------

    def roots(self, sort: Sort | None = None, session: Session = None) -> Nodes[D]:
        """The nodes without a parent, streamed."""
        return self._nodes(reads.roots(self._tree, sort), session)

    def children(self, id: Any, sort: Sort | None = None, session: Session = None) -> Nodes[D]:
        """The nodes right below one, streamed."""
        return self._nodes(reads.children(self._tree, self._entry.identity(id), sort), session)

    def descendants(
        self, id: Any, max_depth: int | None = None, sort: Sort | None = None, session: Session = None
    ) -> Nodes[D]:
        """All nodes below one, streamed; `max_depth=1` means children."""
        reads.check_depth(max_depth)
        return self._nodes(reads.descendants(self._tree, self._entry.identity(id), max_depth, sort), session)

    def ancestors(self, id: Any, session: Session = None) -> list[D]:
        """The nodes above one, root first."""
        return self._models(reads.ancestors(self._tree, self._entry.identity(id)), session)

    def path(self, id: Any, session: Session = None) -> list[D]:
        """The nodes from the root to one, itself included."""
        return self._models(reads.path(self._tree, self._entry.identity(id)), session)

    def parent(self, id: Any, session: Session = None) -> D | None:
        """The node right above one; None for a root."""
        above = self.ancestors(id, session)
        return above[-1] if above else None

    def depth(self, id: Any, session: Session = None) -> int:
        """How many nodes are above one; 0 for a root."""
        return self._store.runner.run(reads.depth(self._tree, self._entry.identity(id)), session)

    def count(self, id: Any = None, max_depth: int | None = None, session: Session = None) -> int:
        """How many nodes are below one, or in the whole forest."""
        key = None if id is None else self._entry.identity(id)
        return self._store.runner.run(reads.count(self._tree, key, max_depth), session)

    # -- writing ----------------------------------------------------------------------

    def insert(self, node: D, parent: Any = None, session: Session = None) -> D:
        """Store a new node below a parent; without one, where its own fields say."""
        _check_model(node, self._entry.model)
        stated = UNSTATED if parent is None else self._entry.identity(parent)
        return self._perform(Insert(self._entry, [node], [stated]), session)[0]

    def move(self, id: Any, parent: Any, session: Session = None) -> D:
        """Put a node, and all below it, under another parent; None makes it a root."""
        whole = _inside(session)
        return self._perform(Move(self._entry, id, parent, whole=whole), session)

    def rename(self, id: Any, segment: str, session: Session = None) -> D:
        """Give a node another segment, and all below it the paths that follow."""
        whole = _inside(session)
        return self._perform(Move(self._entry, id, segment=segment, whole=whole), session)

    def remove(self, id: Any, children: Children = "refuse", session: Session = None) -> int:
        """Take a node out; how many nodes went. `children`: refuse, subtree or lift."""
        work = Remove(self._entry, id, children, whole=_inside(session))
        done = self._perform(work, session)
        if work.token is None:
            return done
        # It went in chunks, which others may have helped with.
        return self._store.runner.run(state.outcome(self._tree, work.token))

    # -- how -------------------------------------------------------------------------------

    def _nodes(self, plan: Plan[Stream], session: Session) -> Nodes[D]:
        return Nodes(self._tree, self._store.runner, plan, self._entry.codec.load, session)

    def _models(self, plan: Plan[list[Raw]], session: Session) -> list[D]:
        return [self._entry.codec.load(raw) for raw in self._store.runner.run(plan, session)]

    def _perform(self, work: Work[R], session: Session) -> R:
        """A write, and then what it owes."""
        result = self._store._write(work, session)
        if not _owes(work):
            return result
        try:
            self._finish()
        except PyMongoError as error:
            # It is committed, and what is owed with it; it must not seem to have failed.
            log.warning("%s: a large move is owed: %s", self._entry.model.__name__, error)
            self._store._owes = True
        return result

    def _finish(self) -> None:
        self._store.runner.run(finish(self._tree, self._store.graph, self._store._capabilities()))


class AsyncNodes(Generic[D]):
    """The nodes that a tree streams; iterate it, once, or await it for a list."""

    def __init__(
        self, tree: Tree, runner: AsyncRunner, plan: Plan[Stream], load: Load[D], session: AsyncSession
    ) -> None:
        self._nodes = _stream_async(tree, runner, plan, load, session)

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


async def _opened(runner: AsyncRunner, read: Any, session: AsyncSession) -> Any:
    cursor = runner.open(read, session)
    return await cursor if inspect.isawaitable(cursor) else cursor


async def _stream_async(
    tree: Tree, runner: AsyncRunner, plan: Plan[Stream], load: Load[D], session: AsyncSession
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
            cursor = await _opened(runner, read, session)
        except OperationFailure as error:
            read, add = reads.otherwise(tree, pending, error)
            continue
        async with cursor:
            while raws := await cursor.to_list(PAGE):
                if add is not None:
                    add(raws)
                for raw in raws:
                    yield load(raw)
        read, add = (pending.next(), pending.add) if pending is not None else (None, None)


class AsyncTreeHandle(Generic[D]):
    """The tree of one model: ids in, models out."""

    def __init__(self, store: AsyncStore, model: type[D]) -> None:
        self._store = store
        self._entry = store.graph.entry(model)
        self._tree = tree_of(self._entry)

    # -- reading ----------------------------------------------------------------------

    def roots(self, sort: Sort | None = None, session: AsyncSession = None) -> AsyncNodes[D]:
        """The nodes without a parent, streamed."""
        return self._nodes(reads.roots(self._tree, sort), session)

    def children(self, id: Any, sort: Sort | None = None, session: AsyncSession = None) -> AsyncNodes[D]:
        """The nodes right below one, streamed."""
        return self._nodes(reads.children(self._tree, self._entry.identity(id), sort), session)

    def descendants(
        self, id: Any, max_depth: int | None = None, sort: Sort | None = None, session: AsyncSession = None
    ) -> AsyncNodes[D]:
        """All nodes below one, streamed; `max_depth=1` means children."""
        reads.check_depth(max_depth)
        return self._nodes(reads.descendants(self._tree, self._entry.identity(id), max_depth, sort), session)

    async def ancestors(self, id: Any, session: AsyncSession = None) -> list[D]:
        """The nodes above one, root first."""
        return await self._models(reads.ancestors(self._tree, self._entry.identity(id)), session)

    async def path(self, id: Any, session: AsyncSession = None) -> list[D]:
        """The nodes from the root to one, itself included."""
        return await self._models(reads.path(self._tree, self._entry.identity(id)), session)

    async def parent(self, id: Any, session: AsyncSession = None) -> D | None:
        """The node right above one; None for a root."""
        above = await self.ancestors(id, session)
        return above[-1] if above else None

    async def depth(self, id: Any, session: AsyncSession = None) -> int:
        """How many nodes are above one; 0 for a root."""
        return await self._store.runner.run(reads.depth(self._tree, self._entry.identity(id)), session)

    async def count(self, id: Any = None, max_depth: int | None = None, session: AsyncSession = None) -> int:
        """How many nodes are below one, or in the whole forest."""
        key = None if id is None else self._entry.identity(id)
        return await self._store.runner.run(reads.count(self._tree, key, max_depth), session)

    # -- writing ----------------------------------------------------------------------

    async def insert(self, node: D, parent: Any = None, session: AsyncSession = None) -> D:
        """Store a new node below a parent; without one, where its own fields say."""
        _check_model(node, self._entry.model)
        stated = UNSTATED if parent is None else self._entry.identity(parent)
        return (await self._perform(Insert(self._entry, [node], [stated]), session))[0]

    async def move(self, id: Any, parent: Any, session: AsyncSession = None) -> D:
        """Put a node, and all below it, under another parent; None makes it a root."""
        whole = _inside(session)
        return await self._perform(Move(self._entry, id, parent, whole=whole), session)

    async def rename(self, id: Any, segment: str, session: AsyncSession = None) -> D:
        """Give a node another segment, and all below it the paths that follow."""
        whole = _inside(session)
        return await self._perform(Move(self._entry, id, segment=segment, whole=whole), session)

    async def remove(self, id: Any, children: Children = "refuse", session: AsyncSession = None) -> int:
        """Take a node out; how many nodes went. `children`: refuse, subtree or lift."""
        work = Remove(self._entry, id, children, whole=_inside(session))
        done = await self._perform(work, session)
        if work.token is None:
            return done
        # It went in chunks, which others may have helped with.
        return await self._store.runner.run(state.outcome(self._tree, work.token))

    # -- how -------------------------------------------------------------------------------

    def _nodes(self, plan: Plan[Stream], session: AsyncSession) -> AsyncNodes[D]:
        return AsyncNodes(self._tree, self._store.runner, plan, self._entry.codec.load, session)

    async def _models(self, plan: Plan[list[Raw]], session: AsyncSession) -> list[D]:
        return [self._entry.codec.load(raw) for raw in await self._store.runner.run(plan, session)]

    async def _perform(self, work: Work[R], session: AsyncSession) -> R:
        """A write, and then what it owes."""
        result = await self._store._write(work, session)
        if not _owes(work):
            return result
        try:
            await self._finish()
        except PyMongoError as error:
            # It is committed, and what is owed with it; it must not seem to have failed.
            log.warning("%s: a large move is owed: %s", self._entry.model.__name__, error)
            self._store._owes = True
        return result

    async def _finish(self) -> None:
        server = await self._store._capabilities()
        await self._store.runner.run(finish(self._tree, self._store.graph, server))
