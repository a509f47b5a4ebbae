"""What `store.array(…)` gives: the thin blocking and asyncio handles of one outlier array."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.graph.pattern import Entry
from treadle.patterns.outlier import reads
from treadle.patterns.outlier.item_bytes import cut
from treadle.patterns.outlier.writes import EXTEND_MAX, ArrayWork, Extend, Remove
from treadle.plan import Plan

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from pymongo.asynchronous.client_session import AsyncClientSession
    from pymongo.client_session import ClientSession

    from treadle.store.async_store import AsyncStore
    from treadle.store.blocking_store import Store

R = TypeVar("R")


class _Handle:
    """One array of one document; nothing is read before a call asks for it."""

    def __init__(self, entry: Entry[Any], field: str, id: Any) -> None:
        self.rule = reads.rule_named(entry, field)
        self.key = entry.identity(id)
        # How many duplicates this handle was given and left out.
        self.ignored = 0
        # The last page that was met, so that the next addition need not try without overflow.
        self._last: int | None = None

    def _extends(self, items: Iterable[Any]) -> list[Extend]:
        dumped = self.rule.dump(list(items))
        return [Extend(self.rule, self.key, part) for part in cut(dumped, EXTEND_MAX)]

    def _note(self, added: list[bool]) -> int:
        number = sum(added)
        self.ignored += len(added) - number
        return number

    def _removal(self, item: Any) -> Remove:
        return Remove(self.rule, self.key, self.rule.dump([item])[0])


class Array(_Handle):
    """An outlier array, whether or not it overflowed; blocking."""

    def __init__(self, store: Store, entry: Entry[Any], field: str, id: Any) -> None:
        super().__init__(entry, field, id)
        self._store = store

    def append(self, item: Any, session: ClientSession | None = None) -> bool:
        """Add an item at the end; False if it was there already and the array is unique."""
        return self.extend([item], session) == 1

    def extend(self, items: Iterable[Any], session: ClientSession | None = None) -> int:
        """Add items at the end; how many were added."""
        added = 0
        for work in self._extends(items):
            added += self._note(self._write(work, session))
        return added

    def remove(self, item: Any, session: ClientSession | None = None) -> int:
        """Remove every occurrence of an item; how many there were."""
        return self._write(self._removal(item), session)

    def contains(self, item: Any, session: ClientSession | None = None) -> bool:
        """Whether an item is there."""
        wanted = self.rule.dump([item])[0]
        return self._read(lambda: reads.contains(self.rule, self.key, wanted), session)

    def count(self, session: ClientSession | None = None) -> int:
        """How many items there are."""
        return self._read(lambda: reads.count(self.rule, self.key), session)

    def page(self, number: int, size: int, session: ClientSession | None = None) -> list[Any]:
        """The items of one page of this size; the first is number 1."""
        reads.check_page(number, size)
        found = self._read(lambda: reads.page(self.rule, self.key, number, size), session)
        return self.rule.load(found)

    def __iter__(self) -> Iterator[Any]:
        with self._moment(None) as (session, steady):
            walk = reads.Walk(self.rule, self.key, steady)
            while not walk.over:
                found = self._store.runner.run(reads.steadily(self.rule, walk.next), session)
                yield from self.rule.load(found)

    def _write(self, work: ArrayWork[R], session: ClientSession | None) -> R:
        if isinstance(work, Extend):
            work.last = self._last
        # First, because it refuses a server where overflow cannot be kept.
        self._store._capabilities()
        if self._last is None:
            done: R | None = self._store.runner.run(work.quick(), session)
            if done is not None:
                return done
        outcome = self._store._write(work, session)
        if isinstance(work, Extend):
            self._last = work.last
        return outcome

    def _read(self, make: Callable[[], Plan[R]], session: ClientSession | None) -> R:
        with self._moment(session) as (own, _):
            return self._store.runner.run(reads.steadily(self.rule, make), own)

    @contextmanager
    def _moment(self, session: ClientSession | None) -> Generator[tuple[ClientSession | None, bool]]:
        """A session whose reads all see one moment, where the server has such."""
        if session is not None or not reads.has_snapshots(self._store._capabilities()):
            yield session, session is not None and session.in_transaction
            return
        with self._store.runner.database.client.start_session(snapshot=True) as own:
            yield own, True


class AsyncArray(_Handle):
    """An outlier array, whether or not it overflowed; on asyncio."""

    def __init__(self, store: AsyncStore, entry: Entry[Any], field: str, id: Any) -> None:
        super().__init__(entry, field, id)
        self._store = store

    async def append(self, item: Any, session: AsyncClientSession | None = None) -> bool:
        """Add an item at the end; False if it was there already and the array is unique."""
        return await self.extend([item], session) == 1

    async def extend(self, items: Iterable[Any], session: AsyncClientSession | None = None) -> int:
        """Add items at the end; how many were added."""
        added = 0
        for work in self._extends(items):
            added += self._note(await self._write(work, session))
        return added

    async def remove(self, item: Any, session: AsyncClientSession | None = None) -> int:
        """Remove every occurrence of an item; how many there were."""
        return await self._write(self._removal(item), session)

    async def contains(self, item: Any, session: AsyncClientSession | None = None) -> bool:
        """Whether an item is there."""
        wanted = self.rule.dump([item])[0]
        return await self._read(lambda: reads.contains(self.rule, self.key, wanted), session)

    async def count(self, session: AsyncClientSession | None = None) -> int:
        """How many items there are."""
        return await self._read(lambda: reads.count(self.rule, self.key), session)

    async def page(self, number: int, size: int, session: AsyncClientSession | None = None) -> list[Any]:
        """The items of one page of this size; the first is number 1."""
        reads.check_page(number, size)
        found = await self._read(lambda: reads.page(self.rule, self.key, number, size), session)
        return self.rule.load(found)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async with self._moment(None) as (session, steady):
            walk = reads.Walk(self.rule, self.key, steady)
            while not walk.over:
                found = await self._store.runner.run(reads.steadily(self.rule, walk.next), session)
                for item in self.rule.load(found):
                    yield item

    async def _write(self, work: ArrayWork[R], session: AsyncClientSession | None) -> R:
        if isinstance(work, Extend):
            work.last = self._last
        # First, because it refuses a server where overflow cannot be kept.
        await self._store._capabilities()
        if self._last is None:
            done: R | None = await self._store.runner.run(work.quick(), session)
            if done is not None:
                return done
        outcome = await self._store._write(work, session)
        if isinstance(work, Extend):
            self._last = work.last
        return outcome

    async def _read(self, make: Callable[[], Plan[R]], session: AsyncClientSession | None) -> R:
        async with self._moment(session) as (own, _):
            return await self._store.runner.run(reads.steadily(self.rule, make), own)

    @asynccontextmanager
    async def _moment(
        self, session: AsyncClientSession | None
    ) -> AsyncGenerator[tuple[AsyncClientSession | None, bool]]:
        """A session whose reads all see one moment, where the server has such."""
        if session is not None or not reads.has_snapshots(await self._store._capabilities()):
            yield session, session is not None and session.in_transaction
            return
        async with self._store.runner.database.client.start_session(snapshot=True) as own:
            yield own, True
