"""What `store.array(…)` of the asyncio shell gives: the handle of one outlier array."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from pymongo.asynchronous.client_session import AsyncClientSession

from treadle.graph.calls import ArrayRule, rule_named
from treadle.graph.model_entry import ModelEntry
from treadle.plan import Plan
from treadle.store.async_results import snapshot
from treadle.store.async_writer import AsyncWriter

if TYPE_CHECKING:
    from treadle.patterns.outlier.handle import ArrayHandle

R = TypeVar("R")
Session = AsyncClientSession | None


class AsyncArray:
    """An outlier array, whether or not it overflowed, on asyncio; nothing is read before a call."""

    def __init__(self, store: AsyncWriter, entry: ModelEntry, field: str, id: Any) -> None:
        self._store = store
        self._calls: ArrayHandle = rule_named(entry, ArrayRule, field).calls(store.write_path, id)

    @property
    def ignored(self) -> int:
        """How many duplicates this handle was given and left out."""
        return self._calls.ignored

    async def append(self, item: Any, session: Session = None) -> bool:
        """Add an item at the end; False if it was there already and the array is unique."""
        return await self.extend([item], session) == 1

    async def extend(self, items: Iterable[Any], session: Session = None) -> int:
        """Add items at the end; how many were added."""
        return await self._store._write(self._calls.extend(items), session)

    async def remove(self, item: Any, session: Session = None) -> int:
        """Remove every occurrence of an item; how many there were."""
        return await self._store._write(self._calls.remove(item), session)

    async def contains(self, item: Any, session: Session = None) -> bool:
        """Whether an item is there."""
        return await self._read(self._calls.contains(item), session)

    async def count(self, session: Session = None) -> int:
        """How many items there are."""
        return await self._read(self._calls.count(), session)

    async def page(self, number: int, size: int, session: Session = None) -> list[Any]:
        """The items of one page of this size; the first is number 1."""
        return await self._read(self._calls.page(number, size), session)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async with snapshot(self._store, self._store._within(None)) as (session, _):
            reader = self._calls.reader()
            while not reader.over:
                for item in await self._store.runner.call(reader.next(), session, answers=True):
                    yield item

    async def _read(self, plan: Plan[R], session: Session) -> R:
        async with snapshot(self._store, self._store._within(session)) as (own, _):
            return await self._store.runner.call(plan, own, answers=True)
