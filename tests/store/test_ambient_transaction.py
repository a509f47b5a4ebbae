"""transaction() and with_transaction(): which calls belong to the transaction, and which do not."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Annotated

import pytest
from pymongo import AsyncMongoClient

from treadle import (
    AncestorArray,
    AsyncStore,
    Count,
    Document,
    Id,
    Outlier,
    Store,
    UsageError,
)


class Customer(Document, collection="customers"):
    name: str
    order_count: Annotated[int, Count("Order", by="customer_id")] = 0
    tags: Annotated[list[str], Outlier(limit=2, overflow="more_tags")] = []


class Order(Document, collection="orders"):
    customer_id: Id


class Node(Document, collection="nodes", tree=AncestorArray(parent="parent_id", ancestors="ancestors")):
    name: str
    parent_id: Id | None = None
    ancestors: list[Id] = []


MODELS = [Customer, Order, Node]


@pytest.fixture
def store(database):
    store = Store(database, MODELS)
    store.setup()
    return store


class Stop(Exception):
    """The block is to be rolled back."""


@pytest.mark.quick
def test_calls_inside_the_block_belong_to_it(store):
    ada = store.insert(Customer(name="Ada"))
    root = store.tree(Node).insert(Node(name="root"))
    with pytest.raises(Stop), store.transaction():
        store.insert(Order(customer_id=ada.id))
        store.insert_many([Order(customer_id=ada.id), Order(customer_id=ada.id)])
        store.update(Customer, ada.id, {"$set": {"name": "Eve"}})
        store.array(Customer, "tags", ada.id).extend(["a", "b", "c"])
        store.tree(Node).insert(Node(name="leaf"), parent=root.id)
        assert ("Eve", 3) == (store.get(Customer, ada.id).name, store.get(Customer, ada.id).order_count)
        assert 3 == len(store.find(Order).to_list()) == store.count(Order)
        assert ["a", "b", "c"] == list(store.array(Customer, "tags", ada.id))
        assert 1 == len(store.tree(Node).children(root.id).to_list())
        assert 0 == Store(store.database, MODELS).count(Order)
        raise Stop
    assert ("Ada", 0) == (store.get(Customer, ada.id).name, store.get(Customer, ada.id).order_count)
    assert 0 == store.count(Order)
    assert [] == list(store.array(Customer, "tags", ada.id))
    assert [] == store.tree(Node).children(root.id).to_list()
    assert [] == store.verify()


def test_a_thread_that_inherits_the_context_is_refused(store):
    errors = []

    def call():
        try:
            store.insert(Customer(name="Eve"))
        except UsageError as error:
            errors.append(error.code)

    with store.transaction():
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: context.run(call))
        thread.start()
        thread.join()
    assert ["transaction-elsewhere"] == errors
    context.run(call)
    assert ["Eve"] == [each.name for each in store.find(Customer)]


def test_two_threads_have_blocks_of_their_own(store):
    line = threading.Barrier(2)

    def write(name):
        with store.transaction():
            store.insert(Customer(name=name))
            line.wait()
            assert [name] == [each.name for each in store.find(Customer)]
            line.wait()

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ["a", "b"] == sorted(each.name for each in store.find(Customer))


def test_a_block_inside_another_is_a_transaction_of_its_own(store):
    with pytest.raises(Stop), store.transaction() as outer:
        store.insert(Customer(name="Ada"))
        with store.transaction():
            assert 0 == store.count(Customer)
            store.insert(Customer(name="Eve"))
        store.insert(Customer(name="Bob"), session=outer)
        assert ["Ada", "Bob"] == [each.name for each in store.find(Customer)]
        raise Stop
    assert ["Eve"] == [each.name for each in store.find(Customer)]


def run_in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def in_a_block(store, work):
    with store.transaction() as session:
        return work(session)


BLOCKS = {
    "transaction": in_a_block,
    "with_transaction": Store.with_transaction,
}


def test_each_attempt_of_with_transaction_is_a_transaction_of_its_own(store):
    ada = store.insert(Customer(name="Ada"))
    attempts = []

    def work(session):
        attempts.append(store.count(Order))
        if len(attempts) == 1:
            # Written after this transaction began to read, so its own update of the document conflicts.
            run_in_a_thread(lambda: store.update(Customer, ada.id, {"$set": {"name": "Eve"}}))
        store.insert(Order(customer_id=ada.id))
        return len(attempts)

    assert 2 == store.with_transaction(work)
    assert [0, 0] == attempts
    assert ("Eve", 1) == (store.get(Customer, ada.id).name, store.get(Customer, ada.id).order_count)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_session_of_another_transaction_is_refused_inside(store, block):
    def work(own):
        with store.database.client.start_session() as session:
            # One that is in no transaction is as good as ever.
            store.insert(Customer(name="Eve"), session=session)
            with session.start_transaction():
                for call in (
                    lambda: store.insert(Customer(name="Bob"), session=session),
                    lambda: store.find(Customer, session=session).to_list(),
                    lambda: store.get(Customer, 1, session=session),
                ):
                    with pytest.raises(UsageError, match="transaction-other"):
                        call()
        store.insert(Customer(name="Ada"), session=own)

    block(store, work)
    assert ["Ada", "Eve"] == sorted(each.name for each in store.find(Customer))


def test_the_session_of_an_outer_block_is_refused_in_the_inner_one(store):
    with store.transaction() as outer, store.transaction(), pytest.raises(UsageError) as raised:
        store.insert(Customer(name="Ada"), session=outer)
    assert "transaction-other" == raised.value.code


def test_two_stores_have_blocks_of_their_own(store, database):
    other = Store(database, MODELS)
    with store.transaction():
        store.insert(Customer(name="Ada"))
        assert 0 == other.count(Customer)
        with other.transaction():
            other.insert(Customer(name="Eve"))
        assert 1 == other.count(Customer)
    assert 2 == store.count(Customer)


def run_async(server, database, body):
    async def main():
        async with AsyncMongoClient(server.uri) as client:
            store = AsyncStore(client[database.name], MODELS)
            await store.setup()
            await body(store)

    asyncio.run(main())


def test_tasks_and_with_transaction(server, database):
    async def body(store):
        outside = asyncio.Event(), asyncio.Event()

        async def other():
            await outside[0].wait()
            count = await store.count(Customer)
            outside[1].set()
            return count

        async def work(session):
            await store.insert(Customer(name="Ada"))
            (refused,) = await asyncio.gather(store.insert(Customer(name="Eve")), return_exceptions=True)
            assert "transaction-elsewhere" == refused.code
            outside[0].set()
            await outside[1].wait()
            raise Stop

        task = asyncio.create_task(other())
        with pytest.raises(Stop):
            await store.with_transaction(work)
        assert 0 == await task == await store.count(Customer)

    run_async(server, database, body)


def test_tasks_started_inside_the_block_are_refused(server, database):
    async def body(store):
        async with store.transaction():
            await store.insert(Customer(name="Ada"))
            results = await asyncio.gather(
                store.insert(Customer(name="Eve")), store.count(Customer), return_exceptions=True
            )
            assert ["transaction-elsewhere"] * 2 == [each.code for each in results]
            async with asyncio.timeout(20):
                await store.insert(Customer(name="Bob"))
        assert ["Ada", "Bob"] == sorted([each.name async for each in store.find(Customer)])

    run_async(server, database, body)


def test_a_task_that_outlives_the_block_is_outside(server, database):
    async def body(store):
        ended = asyncio.Event()

        async def later():
            await ended.wait()
            await store.insert(Customer(name="Eve"))

        with pytest.raises(Stop):
            async with store.transaction():
                task = asyncio.create_task(later())
                await store.insert(Customer(name="Ada"))
                raise Stop
        ended.set()
        await task
        assert ["Eve"] == [each.name async for each in store.find(Customer)]

    run_async(server, database, body)
