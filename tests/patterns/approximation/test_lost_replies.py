"""An event of a durable counter whose reply is lost is counted once, even if it is moved concurrently.

Covers: patterns/approximation/durable_buffer
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any

import pymongo
import pytest
from benchmarks.torture.journal import outcome_of
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, PyMongoError

from tests.kit import faults
from tests.support import until
from treadle import Approximate, Document, Limits, Store
from treadle.plan import Call, Plan

NEVER = timedelta(hours=1)
BUFFER = "treadle.buffer.posts.likes"


class Post(Document, collection="posts"):
    id: int
    likes: Annotated[int, Approximate(every=10**6, within=NEVER, buffer="durable")] = 0


@pytest.fixture
def flusher(database: Any) -> Store:
    store = Store(database, [Post])
    store.setup()
    store.insert(Post(id=1))
    return store


def losing_the_first_reply(plan: Plan[Any], meanwhile: Callable[[], Any]) -> Plan[Any]:
    """A plan whose first insert is done, but whose writer hears of a broken connection."""
    command = next(plan)
    lost = False
    try:
        while True:
            try:
                result = yield command
                if isinstance(command, Call) and "insert_one" == command.method and not lost:
                    lost = True
                    meanwhile()
                    raise AutoReconnect("the reply is lost")
            except PyMongoError as error:
                command = plan.throw(error)
            else:
                command = plan.send(result)
    except StopIteration:
        return


def record(run: Any, flusher: Store, meanwhile: Callable[[], Any], amount: int = 1) -> None:
    store = run.store([Post])
    counter = store.counter(Post, "likes")
    plan = counter._calls.record(counter._buffer, [{1: amount}])
    lossy = losing_the_first_reply(plan, meanwhile)
    run.wait(store.runner.run(lossy)) if hasattr(run, "wait") else store.runner.run(lossy)


MEANWHILE: dict[str, Callable[[Store, Any], Any]] = {
    "it was moved": lambda flusher, database: flusher.counter(Post, "likes").flush(),
    "it is still there": lambda flusher, database: None,
    "it never arrived": lambda flusher, database: database[BUFFER].delete_many({}),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_an_event_whose_reply_is_lost_is_counted_once(run: Any, flusher: Store, database: Any, what: str):
    record(run, flusher, lambda: MEANWHILE[what](flusher, database))
    assert database[BUFFER].count_documents({}) == (what != "it was moved")
    flusher.counter(Post, "likes").flush()
    assert (1, 0) == (database["posts"].find_one()["likes"], database[BUFFER].count_documents({}))


def test_an_event_that_arrives_late_a_second_time_is_not_counted(flusher: Store, database: Any) -> None:
    """The first request lay in a socket while its writer sent it again."""
    counter = flusher.counter(Post, "likes")
    counter.add(1, 3)
    event = database[BUFFER].find_one()
    counter.flush()
    database[BUFFER].insert_one(event)
    assert ({}, 3) == (counter.pending(), counter.read(1, exact=True))
    counter.add(1, 4)
    assert ({1: 4}, 7) == (counter.pending(), counter.read(1, exact=True))
    counter.flush()
    assert 7 == database["posts"].find_one()["likes"]
    assert 0 == database[BUFFER].count_documents({})


def test_events_are_moved_in_the_order_of_their_numbers(database: Any, flusher: Store) -> None:
    """A part at a time: what is left behind has higher numbers than what was moved."""
    store = Store(database, [Post], limits=Limits(counter_events_max=2))
    counter = store.counter(Post, "likes")
    for _ in range(7):
        counter.add(1)
    counter.flush()
    assert 7 == database["posts"].find_one()["likes"]


def test_nobody_says_that_an_event_was_not_stored_which_was(
    server: Any, database: Any, flusher: Store
) -> None:
    """Its second attempt, in a transaction, certainly stored nothing; the first one did."""
    with faults.Proxy(server) as proxy, MongoClient[Any](proxy.uri) as client:
        counter = Store(client[database.name], [Post]).counter(Post, "likes")
        counter.add(1)
        with (
            proxy.drop_reply(0, names=["insert", "find"], times=10**6),
            pytest.raises(PyMongoError) as raised,
            pymongo.timeout(1.0),
        ):
            counter.add(1)
    assert "unknown" == outcome_of(raised.value)
    flusher.counter(Post, "likes").flush()
    assert 2 == database["posts"].find_one()["likes"]


def test_no_event_goes_past_one_that_is_stored_again(flusher: Store, database: Any) -> None:
    """It would be moved first, and the one behind it taken for moved too."""
    buffer, counter = database[BUFFER], flusher.counter(Post, "likes")
    record = counter._calls.record
    with database.client.start_session() as session:

        def never_arrived_and_is_held() -> None:
            event = buffer.find_one_and_delete({})
            session.start_transaction()
            buffer.insert_one(event, session=session)

        counter._calls.record = lambda waiting, group: losing_the_first_reply(
            record(waiting, group), never_arrived_and_is_held
        )
        first = threading.Thread(target=counter.add, args=(1,))
        first.start()
        until("the conflict", lambda: session.in_transaction and counter._batcher._running)
        counter._calls.record = record
        second = threading.Thread(target=counter.add, args=(1,))
        second.start()
        # Long enough for it to be stored, if it were allowed to.
        second.join(0.5)
        counter.flush()
        session.abort_transaction()
        first.join()
        second.join()
    counter.flush()
    assert 2 == database["posts"].find_one()["likes"]
