"""A caller's deadline bounds its call wherever it waits: for the server, for a lock, or behind others.

Covers: store/call_context, store/common, plan/capabilities
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Generator
from datetime import timedelta
from typing import Annotated, Any

import pymongo
import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import PyMongoError

from tests.support import long_transactions, transaction_lifetime
from treadle import Approximate, AsyncStore, Count, Document, Store, TimedOut, UsageError
from treadle.plan.capabilities import Capabilities
from treadle.store import call_context, common

# Far more than any deadline here, and far less than what a call without one would take.
SOON_SECONDS = 30.0


class Review(Document, collection="reviews"):
    id: int
    product_id: int


class Product(Document, collection="products"):
    id: int
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    views: Annotated[int, Approximate(every=1_000, within=timedelta(milliseconds=20))] = 0


MODELS = [Review, Product]


@contextlib.contextmanager
def soon() -> Generator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < SOON_SECONDS


@contextlib.contextmanager
def product_locked(database: Any) -> Generator[None]:
    """Somebody else's transaction holds the product, so that every write of a review has to wait."""
    with database.client.start_session() as session, session.start_transaction():
        database["products"].update_one({"_id": 1}, {"$inc": {"held": 1}}, session=session)
        yield
        session.abort_transaction()


@pytest.fixture
def product(database: Any) -> None:
    store = Store(database, MODELS)
    store.setup()
    store.insert(Product(id=1))


def stored_reviews(database: Any) -> int:
    return int(database["reviews"].count_documents({}))


def test_a_group_has_the_deadline_of_none_of_the_others(server: Any, database: Any, product: None) -> None:
    """Whoever was served before had little time; those who queued behind it have none of its haste."""

    async def scenario() -> None:
        async with AsyncMongoClient[Any](server.uri) as client:
            store = AsyncStore(client[database.name], MODELS)

            async def hasty() -> None:
                with pymongo.timeout(0.3):
                    await store.insert(Review(id=1, product_id=1))

            with product_locked(database):
                first = asyncio.create_task(hasty())
                while not store._group_commit._running:
                    await asyncio.sleep(0)
                patient = [
                    asyncio.create_task(store.insert(Review(id=number, product_id=1)))
                    for number in range(2, 6)
                ]
                with pytest.raises(PyMongoError):
                    await first
            await asyncio.gather(*patient)
            assert 4 == (await store.require(Product, 1)).review_count

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["timeoutMS", "store", "pymongo"])
def test_every_way_to_set_a_deadline_bounds_a_maintained_write(
    server: Any, database: Any, product: None, way: str
) -> None:
    options = {"timeoutMS": 300} if way == "timeoutMS" else {}
    with MongoClient[Any](server.uri, **options) as client:
        store = Store(client[database.name], MODELS, timeout=0.3 if way == "store" else None)
        with product_locked(database), soon(), pytest.raises(PyMongoError) as caught:
            if way == "pymongo":
                with pymongo.timeout(0.3):
                    store.insert(Review(id=1, product_id=1))
            store.insert(Review(id=1, product_id=1))
        assert caught.value.timeout or caught.value.has_error_label("TransientTransactionError")
        assert 0 == stored_reviews(database)
        # Nothing is left locked by what was given up.
        with soon():
            store.insert(Review(id=2, product_id=1))
        assert 1 == store.require(Product, 1).review_count


def test_a_deadline_of_the_store_bounds_each_call_and_not_a_long_job(database: Any, product: None) -> None:
    store = Store(database, MODELS, timeout=0.000_001)
    with pytest.raises(PyMongoError):
        store.get(Product, 1)
    assert [] == store.verify()
    assert [] == store.setup()


@pytest.mark.parametrize("timeout", [0, -1, True, "5", float("inf")])
def test_a_deadline_is_a_number_of_seconds(database: Any, timeout: Any) -> None:
    with pytest.raises(UsageError, match="seconds above 0"):
        Store(database, MODELS, timeout=timeout)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_without_a_server_all_callers_hear_after_the_time_for_its_selection() -> None:
    """Also those who queue behind the first, which is not tried again for two minutes."""
    heard: list[float] = []
    uri = f"mongodb://127.0.0.1:{free_port()}/shop?replicaSet=rs0"
    with contextlib.closing(Store.open(uri, MODELS, serverSelectionTimeoutMS=300)) as store:
        # As after an earlier call: otherwise the question what the server can do fails first.
        store._known = Capabilities(True, (6, 0, 5))

        def insert(number: int) -> None:
            started = time.monotonic()
            with pytest.raises(PyMongoError):
                store.insert(Review(id=number, product_id=1))
            heard.append(time.monotonic() - started)

        threads = [threading.Thread(target=insert, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 5 == len(heard)
    assert max(heard) < SOON_SECONDS


def test_what_was_given_up_is_let_go_while_others_wait_for_it(database: Any, product: None) -> None:
    """A transaction that nobody could abort holds the product; who waits for it ends it, not the server."""
    store = Store(database, MODELS)
    with long_transactions(database.client), database.client.start_session() as session:
        session.start_transaction()
        database["products"].update_one({"_id": 1}, {"$inc": {"held": 1}}, session=session)
        thread = threading.Thread(target=store.insert, args=(Review(id=1, product_id=1),))
        thread.start()
        while not store._group_commit._running:
            time.sleep(0.001)
        with soon():
            store.runner._abandoned.append(session.session_id)
            thread.join()
    assert 1 == store.require(Product, 1).review_count


@pytest.mark.parametrize("how", ["alone", "in a transaction"])
def test_conflicts_that_do_not_end_are_an_error_of_treadle(
    database: Any, product: None, constants: Any, how: str
) -> None:
    """After the server's lifetime of transactions, half of it and the margin; the lock here is held for longer."""
    constants(lock_margin_seconds=0.1)
    client, review = database.client, Review(id=1, product_id=1)
    with long_transactions(client), product_locked(database), transaction_lifetime(client, 1), soon():
        store, started = Store(database, MODELS), time.monotonic()
        with pytest.raises(TimedOut, match="nothing of it was written") as caught:
            if how == "alone":
                store.insert(review)
            else:
                store.with_transaction(lambda session: store.insert(review, session=session))
        assert time.monotonic() - started >= 1.6
    assert "write-contended" == caught.value.code
    assert 112 == getattr(caught.value.__cause__, "code", None), "a write conflict"
    assert 0 == stored_reviews(database)


def test_a_conflict_at_the_deadline_is_an_error_of_treadle(database: Any, product: None) -> None:
    store = Store(database, MODELS)
    store.with_transaction(lambda session: None)
    with product_locked(database), pymongo.timeout(0.5), pytest.raises(TimedOut) as caught:
        store.insert(Review(id=1, product_id=1))
    assert "deadline-passed" == caught.value.code


def test_retries_last_until_the_deadline_whatever_the_server_does() -> None:
    with pymongo.timeout(60):
        assert not call_context.Retries(0).over()
    with pymongo.timeout(0.01):
        retries = call_context.Retries(60)
        time.sleep(0.02)
        assert retries.over()
        assert "deadline-passed" == retries.timed_out().code


def test_pauses_between_attempts_grow_and_stay_short() -> None:
    retries = call_context.Retries(60)
    pauses = [retries.pause(1.0) for _ in range(20)]
    assert sorted(pauses) == pauses
    assert (0.005, 0.05) == (pauses[0], pauses[-1])
    assert 0.025 == retries.pause(0.5)


def test_a_pause_of_a_plan_ends_with_the_deadline() -> None:
    assert 5.0 == call_context.pause(5.0)
    with pymongo.timeout(1), pytest.raises(TimedOut):
        call_context.pause(5.0)


def test_a_deadline_can_be_set_aside_for_what_must_be_done() -> None:
    with pymongo.timeout(0.000_001):
        time.sleep(0.001)
        assert 0.0 == call_context.remaining()
        with call_context.instead(5):
            assert 4 < (call_context.remaining() or 0) <= 5
        with call_context.instead(None):
            assert call_context.remaining() is None
        assert 0.0 == call_context.remaining()
    assert call_context.remaining() is None


def test_the_timer_of_a_counter_has_nobodys_deadline(server: Any, database: Any, product: None) -> None:
    async def scenario() -> None:
        async with AsyncMongoClient[Any](server.uri) as client:
            store = AsyncStore(client[database.name], MODELS)
            counter = store.counter(Product, "views")
            with pymongo.timeout(0.001):
                await counter.add(1)
            with soon():
                while not database["products"].find_one({"_id": 1}).get("views"):
                    await asyncio.sleep(0.01)
            await counter.close()

    asyncio.run(scenario())


def test_open_bounds_a_server_that_hangs_unless_told_otherwise() -> None:
    uri = "mongodb://127.0.0.1:1/shop?heartbeatfrequencyms=9000"
    assert {"connectTimeoutMS": 2_000} == common.client_options(uri, {})
    assert {"connectTimeoutMS": 7, "heartbeatFrequencyMS": 2_000} == common.client_options(
        "mongodb://127.0.0.1:1/shop", {"connectTimeoutMS": 7}
    )
    with contextlib.closing(Store.open(uri, MODELS, appname="shop")) as store:
        options = store.database.client.options
        assert 2.0 == options.pool_options.connect_timeout
        assert "shop" == options.pool_options.appname
