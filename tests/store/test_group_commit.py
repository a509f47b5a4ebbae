"""A group of writes that conflicts is split, so that one contended document does not starve the others.

Covers: store/batching, store/turn, graph/write
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import pytest
from pymongo import AsyncMongoClient, MongoClient

from tests.support import until
from treadle import AsyncStore, Count, Document, Limits
from treadle.store.batching import AsyncCombiner, Combiner
from treadle.store.turn import note_conflict


class Review(Document, collection="reviews"):
    id: int
    event_id: int


class Event(Document, collection="events"):
    id: int
    reviews: Annotated[int, Count(Review, by="event_id")] = 0


class Transactions:
    """Stands for a transaction that conflicts where it holds a contended write beside others."""

    def __init__(self, contended: set[int], refused: set[int]) -> None:
        self.contended, self.refused = contended, refused
        self.sizes: list[int] = []

    def run(self, works: Sequence[int]) -> list[int]:
        self.sizes.append(len(works))
        while len(works) > 1 and self.contended & set(works):
            note_conflict()
        for work in works:
            if work in self.refused:
                raise ValueError(work)
        return [10 * work for work in works]


LIMITS = Limits(together_wait_seconds=3600)


async def outcomes_of_tasks(transactions: Transactions, works: Sequence[int]) -> list[Any]:
    release = asyncio.Event()

    async def perform(some: Sequence[int]) -> list[int]:
        if some == [0]:
            await release.wait()
        return transactions.run(some)

    combiner = AsyncCombiner(perform, 100, LIMITS)
    first = asyncio.create_task(combiner.perform(0))
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(combiner.perform(work)) for work in works]
    await asyncio.sleep(0)
    release.set()
    assert 0 == await first
    return await asyncio.gather(*tasks, return_exceptions=True)


def outcomes_of_threads(transactions: Transactions, works: Sequence[int]) -> list[Any]:
    release = threading.Event()

    def perform(some: Sequence[int]) -> list[int]:
        if list(some) == [0]:
            release.wait()
        return transactions.run(some)

    combiner = Combiner(perform, 100, LIMITS)
    outcomes: dict[int, Any] = {}

    def call(work: int) -> None:
        try:
            outcomes[work] = combiner.perform(work)
        except Exception as error:
            outcomes[work] = error

    threads = [threading.Thread(target=call, args=(0,))]
    threads[0].start()
    until("the first call", lambda: combiner._busy)
    for work in works:
        threads.append(threading.Thread(target=call, args=(work,)))
        threads[-1].start()
    until("the queue", lambda: len(combiner._waiting) == len(works))
    release.set()
    for thread in threads:
        thread.join()
    return [outcomes[work] for work in works]


def played(tasks: bool, transactions: Transactions) -> list[Any]:
    works = list(range(1, 9))
    if tasks:
        return asyncio.run(outcomes_of_tasks(transactions, works))
    return outcomes_of_threads(transactions, works)


@pytest.mark.parametrize("tasks", [True, False], ids=["tasks", "threads"])
def test_a_contended_write_ends_alone_and_the_others_in_groups(tasks):
    transactions = Transactions(contended={3}, refused=set())
    assert [10 * work for work in range(1, 9)] == played(tasks, transactions)
    # Alone: the first, and the two of the last pair. The rest of each group went at once.
    assert [1, 1, 1, 2, 2, 4, 4, 8] == sorted(transactions.sizes)


@pytest.mark.parametrize("tasks", [True, False], ids=["tasks", "threads"])
def test_a_refused_write_in_a_half_fails_alone(tasks):
    transactions = Transactions(contended={2}, refused={7})
    outcomes = played(tasks, transactions)
    assert isinstance(outcomes[6], ValueError)
    assert [10 * work for work in range(1, 9) if work != 7] == [*outcomes[:6], outcomes[7]]


def test_a_locked_document_holds_up_its_own_writers_alone(server, database):
    """Writes that share a commit with one whose target is locked are committed while it stays locked."""
    events = range(8)

    async def scenario(client: AsyncMongoClient[Any]) -> None:
        async with AsyncStore(
            client[database.name], [Review, Event], limits=Limits(combined_max=50)
        ) as store:
            await store.setup()
            await store.insert_many([Event(id=number) for number in events])
            with MongoClient[Any](server.uri) as other, other.start_session() as session:
                session.start_transaction()
                held = other[database.name].events
                held.update_one({"_id": 0}, {"$set": {"held": True}}, session=session)
                calls = [
                    asyncio.create_task(store.insert(Review(id=number, event_id=number % 8)))
                    for number in range(24)
                ]
                free = [call for number, call in enumerate(calls) if number % 8]
                await asyncio.wait_for(asyncio.gather(*free), 40)
                assert not any(call.done() for number, call in enumerate(calls) if number % 8 == 0)
                session.abort_transaction()
                await asyncio.gather(*calls)
            assert {3} == {event.reviews for event in await store.find(Event).to_list()}

    async def run() -> None:
        async with AsyncMongoClient[Any](server.uri) as client:
            await scenario(client)

    asyncio.run(run())
