"""What `store.array(…)` of the asyncio shell gives: the handle of one outlier array."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pymongo.asynchronous.client_session import AsyncClientSession

from treadle.graph.pattern import Entry
from treadle.patterns.outlier import reads
from treadle.patterns.outlier.item_bytes import cut
from treadle.patterns.outlier.writes import ArrayWork, Extend, Remove
from treadle.plan import Plan
from treadle.store.async_writer import AsyncWriter

R = TypeVar("R")
Session = AsyncClientSession | None


class AsyncArray:
    """An outlier array, whether or not it overflowed, on asyncio; nothing is read before a call."""

    def __init__(self, store: AsyncWriter, entry: Entry[Any], field: str, id: Any) -> None:
        self._store = store
        self.rule = reads.rule_named(entry, field)
        self.key = entry.identity(id)
        # How many duplicates this handle was given and left out.
        self.ignored = 0
        # The last page that was met, so that the next addition need not try without overflow.
        self._last: int | None = None

    async def append(self, item: Any, session: Session = None) -> bool:
        """Add an item at the end; False if it was there already and the array is unique."""
        return await self.extend([item], session) == 1

    async def extend(self, items: Iterable[Any], session: Session = None) -> int:
        """Add items at the end; how many were added."""
        total = 0
        limits = self.rule.target.limits
        pieces = cut(self.rule.dump(list(items)), limits.array_extend_max, limits.array_bytes_max)
        for part in pieces:
            added = await self._write(Extend(self.rule, self.key, part), session)
            total += sum(added)
            self.ignored += len(added) - sum(added)
        return total

    async def remove(self, item: Any, session: Session = None) -> int:
        """Remove every occurrence of an item; how many there were."""
        return await self._write(Remove(self.rule, self.key, self.rule.dump([item])[0]), session)

    async def contains(self, item: Any, session: Session = None) -> bool:
        """Whether an item is there."""
        dumped = self.rule.dump([item])[0]
        return await self._read(lambda: reads.contains(self.rule, self.key, dumped), session)

    async def count(self, session: Session = None) -> int:
        """How many items there are."""
        return await self._read(lambda: reads.count(self.rule, self.key), session)

    async def page(self, number: int, size: int, session: Session = None) -> list[Any]:
        """The items of one page of this size; the first is number 1."""
        reads.check_page(self.rule, number, size)
        items = await self._read(lambda: reads.page(self.rule, self.key, number, size), session)
        return self.rule.load(items)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async with self._moment(None) as (session, steady):
            walk = reads.Walk(self.rule, self.key, steady)
            while not walk.over:
                items = await self._store.runner.run(reads.steadily(self.rule, walk.next), session)
                for item in self.rule.load(items):
                    yield item

    async def _write(self, work: ArrayWork[R], session: Session) -> R:
        # First, because it refuses a server where overflow cannot be kept.
        await self._store._capabilities()
        if isinstance(work, Extend):
            work.last = self._last
        if self._last is None:
            done: R | None = await self._store.runner.run(work.quick(), session)
            if done is not None:
                return done
        outcome = await self._store._write(work, session)
        if isinstance(work, Extend):
            self._last = work.last
        return outcome

    async def _read(self, make: Callable[[], Plan[R]], session: Session) -> R:
        async with self._moment(session) as (own, _):
            return await self._store.runner.run(reads.steadily(self.rule, make), own)

    @asynccontextmanager
    async def _moment(self, session: Session) -> AsyncGenerator[tuple[Session, bool]]:
        """A session whose reads all see one moment, where the server has such."""
        if session is not None or not reads.has_snapshots(await self._store._capabilities()):
            yield session, session is not None and session.in_transaction
            return
        async with self._store.runner.database.client.start_session(snapshot=True) as own:
            yield own, True
