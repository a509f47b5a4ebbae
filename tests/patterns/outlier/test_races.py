"""Outlier arrays under many writers and readers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pymongo import MongoClient

from tests.kit import faults
from tests.members import LIMIT, Plain, Unique, UniqueRows, items, wrong
from tests.support import race
from treadle import AsyncStore, Store

THREADS = 16


def test_sixteen_threads_on_one_array(database, model):
    """Check-then-push would overshoot the limit, and store more members than there are."""
    store = Store(database, [model])
    store.setup()
    store.insert(model(id=1))
    other = Store(database, [model])

    def write(number: int) -> None:
        array = (store if number % 2 else other).array(model, "members", 1)
        for turn in range(6):
            assert array.append(number * 100 + turn)
        array.extend([number * 100 + 50, number * 100 + 51])
        assert 1 == array.remove(number * 100 + 3)

    race(*[lambda number=number: write(number) for number in range(THREADS)])
    wanted = {number * 100 + turn for number in range(THREADS) for turn in (0, 1, 2, 4, 5, 50, 51)}
    found = items(database, model, 1)
    assert len(wanted) == len(found)
    assert wanted == set(found)
    assert [] == wrong(database, model, 1)
    for number in range(THREADS):
        own = [each for each in found if each // 100 == number]
        assert sorted(own) == own


@pytest.mark.parametrize("model", [Unique, UniqueRows])
def test_sixteen_threads_with_the_same_items_store_each_once(database, model):
    store = Store(database, [model])
    store.setup()
    store.insert(model(id=1))
    added: list[int] = []

    def write(number: int) -> None:
        array = store.array(model, "members", 1)
        for item in range(12):
            if array.append((item + number) % 12):
                added.append((item + number) % 12)

    race(*[lambda number=number: write(number) for number in range(THREADS)])
    assert list(range(12)) == sorted(items(database, model, 1)) == sorted(added)
    assert [] == wrong(database, model, 1)


def test_iteration_sees_one_moment_while_others_write(database, model):
    """Also while a rebuild stores items elsewhere, which a reader without a snapshot would pass over."""
    store = Store(database, [model])
    store.setup()
    store.insert(model(id=1, members=range(60)))
    array = store.array(model, "members", 1)
    reading = iter(array)
    seen = [next(reading) for _ in range(LIMIT)]
    for number in range(40):
        array.remove(number)
    array.extend(range(100, 110))
    store.rebuild()
    assert list(range(60)) == [*seen, *reading]
    assert [*range(40, 60), *range(100, 110)] == list(array)


def test_a_reader_never_sees_an_item_twice_or_too_few(database, model):
    store = Store(database, [model])
    store.setup()
    store.insert(model(id=1, members=range(20)))
    stop = threading.Event()
    bad: list[Any] = []

    def read() -> None:
        array = Store(database, [model]).array(model, "members", 1)
        while not stop.is_set():
            found = list(array)
            # One item at a time is taken from the beginning and put to the end.
            if len(found) not in (19, 20) or len(set(found)) < len(found) or found != sorted(found):
                bad.append(found)
            if len([each for number in range(1, 8) for each in array.page(number, 3)]) < 15:
                bad.append("page")

    def write() -> None:
        try:
            array = store.array(model, "members", 1)
            for number in range(25):
                array.remove(number)
                array.append(20 + number)
        finally:
            stop.set()

    race(read, read, write)
    assert [] == bad


def test_replaces_and_appends_at_once_lose_nothing(database):
    store = Store(database, [Plain])
    store.insert(Plain(id=1))

    def replace() -> None:
        for _ in range(15):
            store.replace(Plain(id=1, members=[999]))

    def append(number: int) -> None:
        for turn in range(10):
            store.array(Plain, "members", 1).append(number * 100 + turn)

    race(replace, *[lambda number=number: append(number) for number in range(4)])
    assert 40 == len(items(database, Plain, 1))
    assert [] == wrong(database, Plain, 1)


def test_tasks_of_one_loop_share_an_array(server, database):
    """Sixteen tasks on one array of an AsyncStore."""
    import asyncio

    from pymongo import AsyncMongoClient

    async def main() -> None:
        async with AsyncMongoClient(server.uri) as client:
            store = AsyncStore(client[database.name], [Unique])
            await store.setup()
            await store.insert(Unique(id=1))

            async def write(number: int) -> int:
                return sum(
                    [await store.array(Unique, "members", 1).append((number + n) % 20) for n in range(20)]
                )

            assert 20 == sum(await asyncio.gather(*[write(number) for number in range(THREADS)]))
            assert list(range(20)) == sorted([item async for item in store.array(Unique, "members", 1)])

    asyncio.run(main())
    assert [] == wrong(database, Unique, 1)


def test_a_lost_reply_does_not_append_twice(server, database):
    """The driver sends the update again, and the server knows it."""
    with faults.Proxy(server) as proxy, MongoClient[Any](proxy.uri) as client:
        store = Store(client[database.name], [Plain])
        store.setup()
        store.insert(Plain(id=1, members=range(LIMIT - 2)))
        array = store.array(Plain, "members", 1)
        for number in range(6):
            for command in ("update", "findAndModify", "commitTransaction"):
                with proxy.drop_reply(0, names=[command]):
                    array.append(100 * number)
    assert LIMIT - 2 + 18 == len(items(database, Plain, 1))
    assert [] == wrong(database, Plain, 1)
