"""A call that is refused half way inside a transaction: nothing of the transaction is committed.

Covers: store/call_context
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import OperationFailure
from pymongo.monitoring import CommandListener

from tests.engine.test_refused_updates import Even
from treadle import AsyncStore, DataError, Document, ExtendedReference, Store, Sum, UsageError
from treadle.errors import InvalidValue


class Line(Document, collection="ended_lines", validation="off"):
    id: int
    bill_id: int = 0
    n: Even = 0
    amount: int = 0


class Bill(Document, collection="ended_bills", validation="off"):
    id: int
    total: Annotated[int, Sum(Line, "amount", by="bill_id")] = 0


class Note(Document, collection="ended_notes", validation="off"):
    id: int
    bill_id: int
    total: Annotated[int, ExtendedReference(Bill, by="bill_id", field="total")]


MODELS = [Line, Bill, Note]
REFUSED = [
    # By the model, once it is seen what the update has made.
    lambda store, session: store.update(Line, 1, {"$inc": {"n": 1}}, session=session),
    # By what follows, after the document is written.
    lambda store, session: store.insert(Line(id=2, amount=2**62), session=session),
]


@pytest.mark.parametrize("call", REFUSED)
def test_nothing_is_committed_though_the_error_is_caught(run, database, call):
    store = run.store(MODELS)
    store.insert(Bill(id=0))
    store.insert(Line(id=1, amount=2**62))
    with pytest.raises(UsageError) as caught, store.transaction() as session:
        store.insert(Line(id=3), session=session)
        with pytest.raises(DataError):
            call(store, session)
        with pytest.raises(UsageError) as refused:
            store.insert(Line(id=4), session=session)
        assert "transaction-ended" == refused.value.code
    assert "transaction-ended" == caught.value.code
    assert [1] == [each["_id"] for each in database["ended_lines"].find()]
    assert (0, 2**62) == (store.get(Line, 1).n, store.get(Bill, 0).total)
    with store.transaction() as session:
        store.insert(Line(id=4), session=session)
    assert 2 == store.count(Line, {})
    assert [] == store.verify()


def test_what_is_refused_before_it_writes_ends_nothing(run):
    """A value that does not fit, and a reference that leads nowhere."""
    store = run.store(MODELS)
    store.insert(Line(id=1))
    with store.transaction() as session:
        for call in (
            lambda: store.update(Line, 1, {"$set": {"n": 1}}, session=session),
            lambda: store.insert(Note(id=1, bill_id=7, total=0), session=session),
        ):
            with pytest.raises(DataError):
                call()
        store.update(Line, 1, {"$set": {"n": 4}}, session=session)
    assert 4 == store.get(Line, 1).n


def test_a_function_that_swallows_the_error_is_not_committed(database):
    store = Store(database, MODELS)
    store.insert(Line(id=1))

    def work(session):
        store.insert(Line(id=2), session=session)
        with pytest.raises(InvalidValue):
            store.update(Line, 1, {"$inc": {"n": 1}}, session=session)

    with pytest.raises(UsageError):
        store.with_transaction(work)
    assert [1] == [each["_id"] for each in database["ended_lines"].find()]


def test_the_same_with_a_session_of_the_driver(database):
    """The server has ended it, so its own commit is refused; the session can begin another one."""
    store = Store(database, MODELS)
    store.insert(Line(id=1))
    with database.client.start_session() as session:
        session.start_transaction()
        store.insert(Line(id=2), session=session)
        with pytest.raises(InvalidValue):
            store.update(Line, 1, {"$inc": {"n": 1}}, session=session)
        with pytest.raises(OperationFailure):
            session.commit_transaction()
        with session.start_transaction():
            store.insert(Line(id=3), session=session)
    assert [1, 3] == [each["_id"] for each in database["ended_lines"].find()]


def test_the_same_in_asyncio(server, database):
    """Where the calls belong to the block around them."""

    async def scenario():
        async with AsyncMongoClient(server.uri) as client:
            store = AsyncStore(client[database.name], MODELS)
            await store.insert(Line(id=1))
            with pytest.raises(UsageError):
                async with store.transaction():
                    with pytest.raises(InvalidValue):
                        await store.update(Line, 1, {"$inc": {"n": 1}})
            return (await store.get(Line, 1)).n

    assert 0 == asyncio.run(scenario())


class After(CommandListener):
    """Does something once a line is stored, and nothing has followed from it yet."""

    def __init__(self):
        self.then = None

    def started(self, event):
        pass

    def succeeded(self, event):
        if self.then is not None and event.command_name == "insert":
            then, self.then = self.then, None
            then()

    def failed(self, event):
        pass


def test_a_call_that_is_cut_off_commits_nothing(server, database):
    """Cancelled half way, inside a block that catches it and goes on."""
    listener = After()

    async def scenario():
        async with AsyncMongoClient(server.uri, event_listeners=[listener]) as client:
            store = AsyncStore(client[database.name], MODELS)
            await store.insert(Bill(id=0))
            with pytest.raises(UsageError) as refused:
                async with store.transaction():
                    listener.then = asyncio.current_task().cancel
                    with pytest.raises(asyncio.CancelledError):
                        await store.insert(Line(id=1, amount=5))
                    asyncio.current_task().uncancel()
            assert "transaction-ended" == refused.value.code
            await store.insert(Line(id=2, amount=3))
            assert [] == await store.verify()

    asyncio.run(scenario())
    assert [2] == [each["_id"] for each in database["ended_lines"].find()]


def test_a_call_that_is_interrupted_commits_nothing(server, database):
    listener = After()

    def interrupt():
        raise KeyboardInterrupt

    with MongoClient(server.uri, event_listeners=[listener]) as client:
        store = Store(client[database.name], MODELS)
        store.insert(Bill(id=0))
        with pytest.raises(UsageError), store.transaction():
            listener.then = interrupt
            with pytest.raises(KeyboardInterrupt):
                store.insert(Line(id=1, amount=5))
        assert [] == store.verify()
    assert [] == [each["_id"] for each in database["ended_lines"].find()]
