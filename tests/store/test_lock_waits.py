"""Maintained writes go past those that wait for a document which another transaction holds."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import OperationFailure

from tests.support import long_transactions, until
from treadle import AsyncStore, Count, Document, Limits, Store, Sum

WAIT_SECONDS_MAX = 60
PRODUCTS = 6
# The first is hot, and sometimes held.
WRITERS, WRITES = 8, 30


class Review(Document, collection="reviews"):
    id: int
    product_id: int
    rating: int = 1


class Product(Document, collection="products"):
    id: int
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    total: Annotated[int, Sum(Review, "rating", by="product_id")] = 0


MODELS = [Review, Product]


@contextlib.contextmanager
def held(database: Any, product: int = 1) -> Generator[None]:
    """Another transaction holds a product, so that every write of its reviews has to wait."""
    with long_transactions(database.client), database.client.start_session() as session:
        session.start_transaction()
        database["products"].update_one({"_id": product}, {"$inc": {"held": 1}}, session=session)
        yield
        session.abort_transaction()


@pytest.fixture(params=["threads", "tasks"])
def start(request: pytest.FixtureRequest, server: Any, database: Any) -> Generator[Any]:
    """Opens a store; inserts begin in a thread or a task of their own, and are futures."""
    store = Store(database, MODELS)
    store.setup()
    store.insert_many([Product(id=number) for number in range(1, PRODUCTS + 1)])
    if request.param == "threads":
        with ThreadPoolExecutor(32) as pool:

            def open_(limits: Limits) -> Any:
                opened = Store(database, MODELS, limits=limits)
                return opened, lambda review: pool.submit(opened.insert, review)

            yield open_
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    client = AsyncMongoClient[Any](server.uri)

    def open_tasks(limits: Limits) -> Any:
        async def make() -> AsyncStore:
            return AsyncStore(client[database.name], MODELS, limits=limits)

        opened = asyncio.run_coroutine_threadsafe(make(), loop).result(WAIT_SECONDS_MAX)
        return opened, lambda review: asyncio.run_coroutine_threadsafe(opened.insert(review), loop)

    yield open_tasks
    asyncio.run_coroutine_threadsafe(client.close(), loop).result(WAIT_SECONDS_MAX)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


Insert = Callable[[Review], "Future[Review]"]


def counts(database: Any) -> list[int]:
    found = database["products"].find({}, {"review_count": 1}).sort("_id", 1)
    return [each.get("review_count", 0) for each in found]


def test_writes_of_other_documents_go_past_one_that_waits(start: Any, database: Any) -> None:
    store, insert = start(Limits())
    with held(database):
        stuck = insert(Review(id=1, product_id=1))
        until("the first write", lambda: store._group_commit._running)
        others = [insert(Review(id=number, product_id=2 + number % 3)) for number in range(2, 20)]
        # While the product is held, and long before the first is given up.
        for each in others:
            each.result(WAIT_SECONDS_MAX)
        assert not stuck.done()
    stuck.result(WAIT_SECONDS_MAX)
    assert [1, 6, 6, 6, 0, 0] == counts(database)
    assert [] == Store(database, MODELS).verify()
    # All have ended: the next goes at once.
    insert(Review(id=20, product_id=1)).result(WAIT_SECONDS_MAX)
    until("all groups", lambda: not store._group_commit._running and not store._group_commit._passed)


def test_a_group_of_which_one_document_is_held_is_split(start: Any, database: Any) -> None:
    store, insert = start(Limits())
    with held(database):
        calls = [insert(Review(id=number, product_id=1 + number % 4)) for number in range(24)]
        for number, call in enumerate(calls):
            if number % 4:
                call.result(WAIT_SECONDS_MAX)
        assert not any(call.done() for call in calls[::4])
    for call in calls:
        call.result(WAIT_SECONDS_MAX)
    assert [6, 6, 6, 6, 0, 0] == counts(database)
    until("all groups", lambda: not store._group_commit._running and not store._group_commit._passed)


def test_nothing_is_lost_among_writers_of_hot_documents_that_are_held_now_and_then(
    start: Any, database: Any
) -> None:
    store, insert = start(Limits(together_wait_seconds=0.01))
    chance = random.Random(11)
    done = threading.Event()

    def hold() -> None:
        while not done.is_set():
            with contextlib.suppress(OperationFailure), held(database, chance.choice([1, 1, 2])):
                done.wait(0.1)
            done.wait(0.02)

    holder = threading.Thread(target=hold)
    holder.start()
    expected: Counter[int] = Counter()
    try:
        for turn in range(WRITES):
            begun = []
            for writer in range(WRITERS):
                product = chance.choice([1, 1, 1, *range(2, PRODUCTS + 1)])
                expected[product] += 1
                begun.append(insert(Review(id=turn * WRITERS + writer, product_id=product)))
            for each in begun:
                each.result(WAIT_SECONDS_MAX)
    finally:
        done.set()
        holder.join()
    assert WRITERS * WRITES == database["reviews"].count_documents({})
    assert [expected[product] for product in range(1, PRODUCTS + 1)] == counts(database)
    assert [] == Store(database, MODELS).verify()
    until("all groups", lambda: not store._group_commit._running and not store._group_commit._passed)
