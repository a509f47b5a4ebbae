"""Approximation: events reach their documents, by number, by time and by hand.

Covers: patterns/approximation/handle, store/async_counter, store/counter_buffer
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from pymongo import AsyncMongoClient

from tests.patterns.approximation.products import KINDS, NEVER, SOON, Narrow, Product, store_of, stored
from tests.support import race
from treadle import Approximate, AsyncStore, Document, Limits, Store, UsageError, migration
from treadle.store.counter_buffer import Buffer

THREADS = 16

# -- counting ----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_events_are_written_every_so_many(run, database, field):
    store = store_of(run)
    counter = store.counter(Product, field)
    for number in range(1, 35):
        counter.add(1)
        assert number // 10 * 10 == stored(database, field)
    assert {1: 4} == counter.pending()
    assert (30, 34) == (counter.read(1), counter.read(1, exact=True))
    assert 1 == counter.flush().documents
    assert ({}, 34, 34) == (counter.pending(), counter.read(1), counter.read(1, exact=True))
    assert 0 == counter.flush().documents


def test_a_tail_is_written_in_time(run, database, field):
    """Below `every`, the timer stores it: a thread, or on asyncio a task of the loop."""

    class Quick(Document, collection="products"):
        id: int
        views: Annotated[int, Approximate(every=1000, within=SOON)] = 0
        likes: Annotated[int, Approximate(every=1000, within=SOON, buffer="durable")] = 0

    store = run.store([Quick])
    store.insert(Quick(id=1))
    counter = store.counter(Quick, field)
    counter.add(1, 3)
    until = time.monotonic() + 30
    while stored(database, field) != 3 and time.monotonic() < until:
        # On asyncio the loop has to run for its task to run.
        store.count(Quick)
        time.sleep(0.01)
    assert 3 == stored(database, field)
    counter.close()


def test_the_context_manager_and_closing_the_store_flush(run, database, field):
    store = store_of(run)
    with store.counter(Product, field) as counter:
        counter.add(1, 2)
    assert 2 == stored(database, field)
    store.counter(Product, field).add(1, 3)
    store.close()
    assert 5 == stored(database, field)


def test_the_same_counter_is_shared_by_the_whole_store(run):
    store = store_of(run)
    store.counter(Product, "views").add(1)
    assert {1: 1} == store.counter(Product, "views").pending()


def test_decimals_are_exact(run, database):
    store = store_of(run)
    counter = store.counter(Product, "worth")
    for _ in range(30):
        counter.add(1, Decimal("0.1"))
    counter.add(1)
    assert Decimal("4.0") == counter.read(1, exact=True)
    counter.flush()
    assert Decimal128("4.0") == stored(database, "worth")
    # To the last of the 34 digits that the server keeps, and beyond what an int may be.
    long = Decimal("1234567890123456789012345678901230")
    counter.add_many({1: long})
    counter.add(1)
    counter.add(1, -2)
    assert Decimal("1234567890123456789012345678901233") == counter.read(1, exact=True)
    counter.flush()
    assert Decimal128("1234567890123456789012345678901233") == stored(database, "worth")


@pytest.mark.parametrize("n", [True, "1", None, 1.5, float("nan"), {"$inc": 1}, 2**70])
def test_a_bad_amount_changes_nothing(run, field, n):
    counter = store_of(run).counter(Product, field)
    with pytest.raises(UsageError):
        counter.add(1, n)
    with pytest.raises(UsageError):
        counter.add_many({1: 1, 2: n})
    assert {} == counter.pending()


def test_a_bad_id_changes_nothing(run, field):
    counter = store_of(run).counter(Product, field)
    for bad in ({"$ne": 1}, "x", None):
        with pytest.raises((UsageError, TypeError)):
            counter.add(bad)
    assert {} == counter.pending()
    with pytest.raises(UsageError) as refused:
        counter.read("x")
    assert "id-invalid" == refused.value.code


# -- races -------------------------------------------------------------------------------------------


def test_sixteen_threads_on_one_counter(database, field):
    store = Store(database, [Product])
    store.setup()
    store.insert_many([Product(id=1), Product(id=2)])

    def count() -> None:
        counter = store.counter(Product, field)
        for turn in range(60 if field == "views" else 20):
            counter.add(1 + turn % 2)
            if turn % 7 == 0:
                counter.flush()

    race(*[count] * THREADS)
    store.counter(Product, field).flush()
    each = THREADS * (30 if field == "views" else 10)
    assert [each, each] == [stored(database, field, key) for key in (1, 2)]
    assert {} == store.counter(Product, field).pending()


def test_events_that_come_during_a_flush_wait_for_the_next(database):
    """Swapped before writing: clearing afterwards would lose them."""
    store = Store(database, [Product])
    store.insert(Product(id=1))
    counter = store.counter(Product, "views")
    counter.add(1, 3)
    write = store.write_path.execute

    def slow(work: Any, **options: Any) -> Any:
        counter._append(1)
        return write(work, **options)

    store.write_path.execute = slow  # type: ignore[method-assign]
    counter.flush()
    store.write_path.execute = write  # type: ignore[method-assign]
    assert (3, {1: 1}) == (stored(database, "views"), counter.pending())
    assert 4 == counter.read(1, exact=True)


def test_tasks_of_one_loop_need_no_thread(server, database):
    async def main() -> None:
        async with AsyncMongoClient(server.uri) as client:
            store = AsyncStore(client[database.name], [Product])
            await store.insert(Product(id=1))
            before = set(threading.enumerate())

            async def count(field: str) -> None:
                for _ in range(25):
                    await store.counter(Product, field).add(1)

            await asyncio.gather(*[count(field) for field in KINDS for _ in range(THREADS)])
            # Those of clients that others have closed may end meanwhile.
            assert before >= set(threading.enumerate())
            await store.close()

    asyncio.run(main())
    assert [THREADS * 25] * 2 == [stored(database, field) for field in KINDS]


def test_the_end_of_the_loop_flushes(server, database):
    """asyncio.run cancels the timer's task, which writes what is left."""
    client: list[Any] = []

    async def main() -> None:
        client.append(AsyncMongoClient(server.uri))
        store = AsyncStore(client[0][database.name], [Product])
        await store.insert(Product(id=1))
        await store.counter(Product, "views").add(1, 3)

    asyncio.run(main())
    assert 3 == stored(database, "views")


# -- bounds ------------------------------------------------------------------------------------------


def test_the_buffer_is_bounded_in_keys(run, database):
    store = run.store([Narrow])
    store.insert_many([Narrow(id=key) for key in range(20)])
    counter = store.counter(Narrow, "views")
    for key in range(20):
        counter.add(key, 2)
        assert len(counter.pending()) < 5
    assert 20 == sum(each["views"] > 0 for each in database["products"].find())


def test_a_large_flush_goes_in_chunks(run, database):
    store = store_of(run, *range(20), limits=Limits(counter_chunk=7))
    counter = store.counter(Product, "worth")
    counter.add_many(dict.fromkeys(range(20), 1))
    assert 20 == counter.flush().documents
    assert 20 == sum(product.worth for product in store.find(Product))


class Renamed(Document, collection="products", version=2):
    id: int
    views: Annotated[int, Approximate(every=1000, within=NEVER)] = 0
    likes: Annotated[int, Approximate(every=1000, within=NEVER, buffer="durable")] = 0
    hits: Annotated[int, Approximate(every=1, buffer="sampled")] = 0


migration(
    Renamed,
    from_version=1,
    up=[
        {"$set": {name: f"$old_{name}" for name in ("views", "likes", "hits")}},
        {"$unset": [f"old_{name}" for name in ("views", "likes", "hits")]},
    ],
    down=[{"$set": {"old_views": "$views", "old_likes": "$likes", "old_hits": "$hits"}}],
)


@pytest.mark.parametrize("kind", ["views", "likes", "hits"])
def test_a_number_of_an_older_version_is_brought_up_first(run, database, kind):
    """A migration that renames the number would put the old one in the place of what was added."""
    database["products"].insert_one({"_id": 1, "old_views": 5, "old_likes": 5, "old_hits": 5})
    store = run.store([Renamed])
    counter = store.counter(Renamed, kind)
    counter.add(1, 3)
    counter.flush()
    store.migrate(Renamed)
    assert 8 == stored(database, kind)


# -- sampled -----------------------------------------------------------------------------------------


def test_one_in_so_many_is_written_and_worth_as_many(run, database):
    """With a given chance, the count is known; on average it is the truth."""
    store = store_of(run)
    chance = random.Random(7)
    counter = store.counter(Product, "hits", random=chance.random)
    for _ in range(1000):
        counter.add(1)
    again = random.Random(7)
    assert 10 * sum(again.random() < 0.1 for _ in range(1000)) == stored(database, "hits")
    assert 800 < stored(database, "hits") < 1200
    assert ({}, stored(database, "hits")) == (counter.pending(), counter.read(1, exact=True))


def test_a_sampled_event_of_an_unknown_id_is_told(run, database):
    counter = store_of(run).counter(Product, "hits", random=lambda: 0.0)
    counter.add(77)
    assert {77: 10} == counter.unknown
    database["products"].update_one({"_id": 1}, {"$set": {"hits": 2**63 - 1}})
    counter.add(1)
    assert 10 == counter.unknown[1]
    counter.add(1, 2**62)
    assert 10 + 10 * 2**62 == counter.unknown[1]


def test_events_in_memory_are_folded_many_at_a_time():
    """An event itself is one append; what it costs is in the benchmarks."""
    buffer = Buffer(10**9, 10**9, Limits())
    keys = [ObjectId() for _ in range(10)]
    folds = 0
    for number in range(20_000):
        buffer.events.append(keys[number % 10])
        if len(buffer.events) >= buffer.room:
            buffer.fold()
            folds += 1
    assert folds <= 20_000 / 100
    assert 20_000 == sum(buffer.pending().values())
