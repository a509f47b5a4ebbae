"""An archive in another cluster: two phases under intents; what crashes leave is undone or finished."""

from __future__ import annotations

import asyncio
import datetime as dt
import signal
import threading
from collections.abc import Generator
from typing import Annotated, Any

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import BulkWriteError

from tests import victim
from tests.patterns.archive.distant import AT_ONCE, NOW, NUMBER, OLD, YEAR, models, move_until_killed
from tests.support import shared_server
from treadle import Archive, AsyncStore, Attributes, DeclarationError, Document, Store, UsageError
from treadle.patterns.archive import distant

KILLS = 20


@pytest.fixture(scope="module")
def other() -> Generator[Any]:
    """Another server, which knows nothing of the first."""
    with shared_server(replica_set=False) as server:
        yield server


@pytest.fixture
def away(other: Any, database: Any) -> Generator[Any]:
    """The archive's own database there."""
    with MongoClient[Any](other.uri) as client:
        yield client[f"a_{database.name}"]


@pytest.fixture
def opened(database: Any, away: Any) -> Any:
    return filled(database, away)


def filled(database: Any, away: Any, counted: bool = False) -> Any:
    Sale, Shop = models(away.client, away.name, counted)
    store = Store(database, [Sale, Shop], limits=AT_ONCE)
    store.setup()
    store.insert(Shop(id=1))
    store.insert_many([Sale(id=key, code=str(key), amount=key, date=OLD) for key in range(10)])
    store.insert(Sale(id=10, date=NOW))
    return store, Sale, Shop


def in_one_place(database: Any, away: Any, number: int) -> None:
    """Each document in one of the two, and no intent left."""
    here = {each["_id"] for each in database["sales"].find()}
    there = {each["_id"] for each in away["sales"].find()}
    assert set() == here & there
    assert set(range(number)) == here | there
    assert 0 == database["treadle.intents"].count_documents({})


def test_documents_move_and_come_back(opened, database, away):
    store, Sale, Shop = opened
    assert 10 == store.archive(Sale, now=NOW)
    in_one_place(database, away, 11)
    assert ([10], 1) == ([each.id for each in store.find(Sale)], store.get(Shop, 1).sales)
    assert list(range(11)) == [each.id for each in store.find(Sale, sort="_id", archived=True)]
    assert [9, 8, 7] == [each.id for each in store.find(Sale, sort="-amount", limit=3, archived=True)]
    assert 3 == store.get(Sale, 3).amount
    with pytest.raises(UsageError, match="document-archived"):
        store.update(Sale, 3, {"$set": {"amount": 7}})
    with pytest.raises(UsageError, match="duplicate-key"):
        store.insert(Sale(id=3))
    with pytest.raises(UsageError, match="duplicate-key"):
        store.insert(Sale(id=99, code="3"))
    assert 3 == store.restore(Sale, 3).amount
    assert store.restore(Sale, 3) is None
    assert "archive" not in database["sales"].find_one({"_id": 3}).get("_treadle", {})
    assert 2 == store.get(Shop, 1).sales
    in_one_place(database, away, 11)
    assert [] == store.verify()


def test_an_update_that_races_with_the_move_is_kept(opened, database, away):
    """Updates from other threads while documents move and come back, again and again."""
    store, Sale, _ = opened
    counted = [0] * 10
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            key = number % 10
            try:
                if store.update(Sale, key, {"$inc": {"shop_id": 0, "amount": 1}}) is not None:
                    counted[key] += 1
            except UsageError as error:
                assert "document-archived" == error.code
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(4):
        store.archive(Sale, now=NOW)
        for key in range(0, 10, 2):
            store.restore(Sale, key)
    done.set()
    thread.join()
    store.recover()
    in_one_place(database, away, 11)
    amounts = {each.id: each.amount for each in store.find(Sale, archived=True)}
    assert [key + counted[key] for key in range(10)] == [amounts[key] for key in range(10)]
    assert [] == store.verify()


@pytest.mark.heavy
@pytest.mark.parametrize("counted", [True, False])
def test_twenty_kills_lose_nothing_and_double_nothing(server, other, database, away, counted):
    """Each at another command, of a move there or of one back."""
    Sale, Shop = models(away.client, away.name, counted)
    store = Store(database, [Sale, Shop], limits=AT_ONCE)
    store.setup()
    store.insert(Shop(id=1))
    store.insert_many([Sale(id=key, amount=key, date=OLD) for key in range(NUMBER)])
    victim.prepare()
    places = (server.uri, database.name, other.uri, away.name, counted)
    for skip in range(KILLS):
        process = victim.CONTEXT.Process(target=move_until_killed, args=(*places, skip))
        process.start()
        process.join(victim.SECONDS_MAX)
        assert -signal.SIGKILL == process.exitcode
        # The transaction that it may have left would hold documents for a minute.
        database.client.admin.command({"killAllSessions": []})
        seen = [each.id for each in store.find(Sale, archived=True)]
        assert list(range(NUMBER)) == sorted(seen), "for a reader, before anybody recovers"
        store.recover()
        in_one_place(database, away, NUMBER)
        amounts = {each.id: each.amount for each in store.find(Sale, archived=True)}
        assert {key: key for key in range(NUMBER)} == amounts
        living = database["sales"].count_documents({})
        assert (NUMBER if counted else living) == store.get(Shop, 1).sales
        assert [] == store.verify()
    assert [] == store.verify()


@pytest.mark.parametrize("counted", [False, True])
def test_a_writer_that_slept_while_it_was_undone_takes_nothing_along(database, away, counted):
    """Its move is undone and done by another; then it wakes up, at each of its commands."""
    store, Sale, Shop = filled(database, away, counted)
    rule = next(each for each in store.graph.rules if each.pattern == "archive")
    for pause in range(1, 12 if counted else 8):
        for key in range(10):
            store.restore(Sale, key)
        plan = rule.archive(NOW, None, False)
        commands, result = 0, None
        try:
            command = next(plan)
            while True:
                commands += 1
                if commands == pause + 2:
                    store.recover()
                    store.archive(Sale, now=NOW)
                try:
                    result = store.runner._perform(command, None)
                except Exception as error:
                    command = plan.throw(error)
                else:
                    command = plan.send(result)
        except StopIteration:
            pass
        store.recover()
        in_one_place(database, away, 11)
        amounts = {each.id: each.amount for each in store.find(Sale, archived=True) if each.id < 10}
        assert {key: key for key in range(10)} == amounts
        assert [] == store.verify()
        assert (11 if counted else 1) == store.get(Shop, 1).sales


def test_the_same_with_asyncio(server, other, database, away):
    async def work() -> Any:
        async with AsyncMongoClient[Any](other.uri) as client:
            Sale, Shop = models(client, away.name, counted=True)
            uri = server.uri.replace("/?", f"/{database.name}?")
            async with AsyncStore.open(uri, [Sale, Shop], limits=AT_ONCE) as store:
                await store.setup()
                await store.insert(Shop(id=1))
                await store.insert_many([Sale(id=key, date=OLD) for key in range(6)])
                assert 6 == await store.archive(Sale, now=NOW)
                assert 2 == (await store.restore(Sale, 2)).id
                found = [each.id async for each in store.find(Sale, archived=True)]
                await store.rebuild()
                return found, await store.verify(), (await store.get(Shop, 1)).sales

    assert (list(range(6)), [], 6) == asyncio.run(work())
    in_one_place(database, away, 6)


def test_what_cannot_be_kept_is_refused(database, away):
    def declared(**options: Any) -> Any:
        class Visit(Document, collection="visits", archive=Archive(by="at", after=YEAR, **options)):
            at: dt.datetime

        return Visit

    with pytest.raises(DeclarationError, match="archive-declaration"):
        Store(database, [declared(into="visits", client=away.client, counted=False)])
    wrong = declared(into="a.visits", client="mongodb://nowhere", counted=False)
    with pytest.raises(UsageError, match="archive-client"):
        Store(database, [wrong])


@pytest.mark.parametrize("state", [distant.RESTORING, distant.COPYING])
def test_a_document_that_another_is_moving_is_waited_for(opened, database, away, state, monkeypatch):
    """It is neither here nor free to be brought back, for a moment; it is archived all the same."""
    store, Sale, _ = opened
    store.archive(Sale, now=NOW)
    (rule,) = (each for each in store.graph.rules if each.pattern == "archive")
    intents = database["treadle.intents"]
    key = {"kind": "archive", "rule": rule.place.label, "key": 3}
    intents.insert_one({"_id": key, "token": "another", "state": state})
    pauses = []

    def wait(seconds):
        pauses.append(seconds)
        intents.delete_one({"_id": key})
        return iter(())

    monkeypatch.setattr(distant, "wait", wait)
    assert 3 == store.restore(Sale, 3).id
    assert 1 == len(pauses)
    in_one_place(database, away, 11)


def test_an_index_that_is_there_already_may_be_stored_in_another_way(database, away):
    class Part(
        Document,
        collection="parts",
        archive=Archive(by="date", after=YEAR, into=f"{away.name}.parts", client=away.client),
    ):
        id: int
        specs: Annotated[dict[str, str], Attributes()] = {}
        date: dt.datetime | None = None

    keys = [("specs.k", 1), ("specs.v", 1)]
    away["parts"].create_index(keys)
    store = Store(database, [Part])
    store.setup()
    assert keys in [each["key"] for each in away["parts"].index_information().values()]
    store.insert(Part(id=1, specs={"color": "red"}, date=OLD))
    assert 1 == store.archive(Part, now=NOW)
    assert [1] == [each.id for each in store.find(Part, {"specs.color": "red"}, archived=True)]


def test_copies_that_no_majority_confirmed_do_not_pass_for_copied(opened: Any) -> None:
    """Some of them are there already, from an attempt before; what is deleted here must stay there."""
    store, sale, _ = opened
    rule = next(each for each in store.graph.entry(sale).rules if hasattr(each, "into"))
    plan = distant._copy(rule, [{"_id": 1}, {"_id": 2}], "token")
    next(plan)
    there, unconfirmed = {"index": 0, "code": 11000}, {"code": 64}
    error = BulkWriteError({"writeErrors": [there], "writeConcernErrors": [unconfirmed]})
    with pytest.raises(BulkWriteError):
        plan.throw(error)
