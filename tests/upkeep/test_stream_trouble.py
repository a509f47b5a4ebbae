"""What the worker does when collections vanish, commands fail, leases move or history is lost.

Never a silent gap, never a crash loop; each is logged and counted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest
from bson import ObjectId
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tests.kit import faults, processes
from tests.kit.command_log import CommandLog
from tests.kit.tiers import IS_FULL
from tests.upkeep.marketplace import (
    MEGABYTE,
    MODELS,
    WAIT_SECONDS_MAX,
    Sale,
    Shop,
    settled,
    totals,
    wait_for,
    working,
)
from treadle import DataError, Limits, Store
from treadle.engine.lease import Lease, LeaseLost
from treadle.plan import Plan, Wait
from treadle.server import local as server
from treadle.store.blocking.runner import Runner

# -- collections that vanish -------------------------------------------------------------------------


def test_a_dropped_source_empties_what_it_fed(market, database, caplog):
    store, keys = market
    database["sales"].drop()
    assert 1 == settled(store)["upheavals"]
    assert [0, 0, 0] == totals(database, keys)
    assert 1 == sum("sales: drop" in each.message for each in caplog.records)
    # Whoever writes first makes it again, without former states.
    sale = database["sales"].insert_one({"shop_id": keys[0], "amount": 3}).inserted_id
    settled(store)
    assert [3, 0, 0] == totals(database, keys)
    database["sales"].delete_one({"_id": sale})
    settled(store)
    assert [0, 0, 0] == totals(database, keys)


def test_a_dropped_and_refilled_target_is_filled(market, database):
    store, keys = market
    database["shops"].drop()
    database["shops"].insert_one({"_id": keys[0], "name": "again"})
    settled(store)
    assert [5] == totals(database, keys[:1])
    assert {"name": "again"} != database["visits"].find_one({"shop_id": keys[0]})


def test_a_renamed_source_no_longer_feeds(market, database):
    store, keys = market
    database["sales"].rename("sales_of_last_year")
    settled(store)
    assert [0, 0, 0] == totals(database, keys)
    database["sales_of_last_year"].insert_one({"shop_id": keys[0], "amount": 3})
    assert [0, 0, 0] == totals(database, keys)
    database["sales_of_last_year"].rename("sales")
    settled(store)
    assert [8, 5, 5] == totals(database, keys)


def test_a_collection_that_is_renamed_onto_a_source_feeds(market, database):
    """As a bulk load does that fills a new collection and swaps it in."""
    store, keys = market
    database["loaded"].insert_many([{"shop_id": keys[1], "amount": 70}, {"shop_id": keys[1], "amount": 7}])
    database["loaded"].rename("sales", dropTarget=True)
    settled(store)
    assert [0, 77, 0] == totals(database, keys)
    database["sales"].delete_one({"amount": 7})
    settled(store)
    assert [0, 70, 0] == totals(database, keys)


def test_a_collection_that_is_renamed_onto_a_target_is_filled(market, database):
    store, keys = market
    database["loaded"].insert_one({"_id": keys[2], "name": "new"})
    database["loaded"].rename("shops", dropTarget=True)
    settled(store)
    assert [5] == totals(database, keys[2:])


def test_a_dropped_database_begins_anew(market, database, client):
    """The worker's own position and lease are gone as well."""
    store, keys = market
    client.drop_database(database.name)
    store.setup()
    database["shops"].insert_one({"_id": keys[0], "name": "again"})
    database["sales"].insert_one({"shop_id": keys[0], "amount": 2})
    settled(store)
    assert [2] == totals(database, keys[:1])


def test_a_running_worker_goes_on_after_the_database_was_dropped(database, client):
    store = Store(database, MODELS)
    store.setup()
    worker = store.worker()
    with working(worker):
        wait_for(lambda: worker.leading)
        client.drop_database(database.name)
        store.setup()
        key = database["shops"].insert_one({"name": "again"}).inserted_id
        database["sales"].insert_one({"shop_id": key, "amount": 2})
        wait_for(lambda: (database["shops"].find_one({"_id": key}) or {}).get("total") == 2)
        database["sales"].delete_many({})
        wait_for(lambda: (database["shops"].find_one({"_id": key}) or {}).get("total") == 0)
    assert [] == store.verify()


def test_a_model_that_is_gone_is_no_lost_history(run, database, caplog):
    """The last event was of a collection that the next version does not watch; its token is not found."""
    store = run.store(MODELS)
    store.setup()
    key = database["shops"].insert_one({"name": "a"}).inserted_id
    database["visits"].insert_one({"shop_id": key})
    settled(store)
    worker = store.worker()
    database["visits"].insert_one({"shop_id": key})
    worker.run_until_idle()
    fewer = run.store([Sale, Shop])
    database["sales"].insert_one({"shop_id": key, "amount": 4})
    assert 0 == settled(fewer).get("history_lost", 0)
    assert [4] == totals(database, [key])


def test_a_version_that_leads_in_between_leaves_no_gap(run, database):
    """It reads on past what it does not know, and cannot finish what it does not know either."""
    store, fewer = run.store(MODELS), run.store([Sale, Shop])
    store.setup()
    key = database["shops"].insert_one({"name": "a"}).inserted_id
    database["visits"].insert_one({"shop_id": key})
    settled(store)
    database["visits"].insert_one({"shop_id": key})
    owed = [{"collection": "visits", "after": None}]
    database["treadle.streams"].update_one({}, {"$set": {"owed": owed}})
    settled(fewer)
    database["shops"].update_one({"_id": key}, {"$set": {"name": "b"}})
    settled(fewer)
    settled(store)
    assert ["b", "b"] == [each["shop"]["name"] for each in database["visits"].find()]


# -- errors on the way -------------------------------------------------------------------------------

FAILING = ["update", "findAndModify", "commitTransaction", "aggregate", "getMore", "find"]


@pytest.mark.heavy
@pytest.mark.parametrize("command", FAILING)
def test_an_error_in_the_middle_loses_no_event(database, client, server, command):
    """What was read when it failed is read again; `run_until_idle` does not take it for done."""
    app, heard = f"failing-{command}", CommandLog()
    with MongoClient(server.uri, appname=app, event_listeners=[heard]) as other:
        store = Store(other[database.name], MODELS)
        store.setup()
        keys = [ObjectId() for _ in range(3)]
        database["shops"].insert_many([{"_id": key, "name": "shop"} for key in keys])
        settled(store)
        worker = store.worker()
        for turn, skip in enumerate(range(0, 9, 1 if IS_FULL else 2), start=1):
            database["sales"].insert_many([{"shop_id": key, "amount": 1} for key in keys])
            refused = {"errorCode": 8, "errorLabels": []}
            with faults.fail_point(client, heard, skip=skip, times=2, app=app, commands=[command], **refused):
                for _ in range(3):
                    with contextlib.suppress(PyMongoError):
                        worker.run_until_idle()
                        break
            assert [turn] * 3 == totals(database, keys)
        assert [] == store.verify()


@pytest.mark.heavy
def test_a_worker_that_fails_while_it_takes_the_lead_tries_again(database, client, server):
    """Half a beginning is none: neither without a position, nor without knowing what to watch."""
    app = "failing-lead"
    with MongoClient(server.uri, appname=app) as other:
        store = Store(other[database.name], MODELS)
        store.setup()
        key = database["shops"].insert_one({"name": "a"}).inserted_id
        database["sales"].insert_one({"shop_id": key, "amount": 4})
        for command in ("ping", "listCollections", "findAndModify"):
            data = {"failCommands": [command], "appName": app, "errorCode": 8, "errorLabels": []}
            client.admin.command({"configureFailPoint": "failCommand", "mode": {"times": 2}, "data": data})
            worker = store.worker()
            with working(worker):
                database["sales"].update_many({}, {"$inc": {"amount": 1}})
                wait_for(lambda: totals(database, [key]) == [database["sales"].find_one({})["amount"]])
            assert [] == store.verify()


# -- leases ------------------------------------------------------------------------------------------


def test_one_worker_leads_and_the_other_stands_by(database):
    """Whoever stops lets go of its lease, which nobody here would live to see run out."""
    store = Store(database, MODELS, limits=Limits(worker_lease_seconds=10 * WAIT_SECONDS_MAX))
    store.setup()
    key = database["shops"].insert_one({"name": "a"}).inserted_id
    first, second = store.worker(), store.worker()
    with working(first):
        wait_for(lambda: first.leading)
        with working(second):
            time.sleep(2 * store.graph.limits.worker_standby_seconds)
            assert (True, False) == (first.leading, second.leading)
            first.stop()
            wait_for(lambda: second.leading)
            database["sales"].insert_one({"shop_id": key, "amount": 4})
            wait_for(lambda: totals(database, [key]) == [4])


def test_two_databases_have_a_worker_each(database, client):
    names = [f"{database.name}_{number}" for number in (1, 2)]
    stores = [Store(client[name], MODELS) for name in names]
    try:
        for each in stores:
            each.setup()
        one, other = (each.worker() for each in stores)
        with working(one), working(other):
            wait_for(lambda: one.leading and other.leading)
            for number, name in enumerate(names):
                key = client[name]["shops"].insert_one({"name": "a"}).inserted_id
                client[name]["sales"].insert_one({"shop_id": key, "amount": number})
            wait_for(lambda: [client[name]["shops"].find_one().get("total") for name in names] == [0, 1])
    finally:
        for name in names:
            client.drop_database(name)


# The follower is stepped by hand, on the blocking runner.
@pytest.mark.parametrize("run", ["sync"], indirect=True)
def test_a_worker_that_was_replaced_moves_nothing(market, database):
    """Its lease went to another while it slept: what it still does changes neither position nor values."""
    store, keys = market
    run = store.runner.run
    with (
        store.runner.database.client.start_session() as mine,
        store.runner.database.client.start_session() as theirs,
    ):
        zombie = store.worker()._following(store._capabilities(), mine, "zombie")
        successor = store.worker()._following(store._capabilities(), theirs, "successor")
        assert run(zombie.lead(), mine)
        database["sales"].insert_one({"shop_id": keys[0], "amount": 1})
        events = []
        while not events:
            events = run(zombie._read(0.5), mine)
        database["treadle.leases"].update_one({}, [{"$set": {"until": "$$NOW"}}])
        assert run(successor.lead(), theirs)
        database["sales"].update_many({"shop_id": keys[0]}, {"$inc": {"amount": 10}})
        run(successor.step(0.5, linger=False), theirs)
        before = database["treadle.streams"].find_one()
        with pytest.raises(LeaseLost):
            run(zombie._handle(events), mine)
        assert before == database["treadle.streams"].find_one()
        run(successor.resign(), theirs)
    settled(store)
    assert [26, 5, 5] == totals(database, keys)


def test_sigterm_ends_the_worker_after_its_batch(server, database):
    """It resigns, so that nobody has to wait for its lease to run out."""
    store = Store(database, MODELS)
    store.setup()
    worker = processes.start(processes.work, f"{__name__}:MODELS", server.uri, database.name)
    wait_for(lambda: (database["treadle.leases"].find_one() or {}).get("owner"))
    key = database["shops"].insert_one({"name": "a"}).inserted_id
    database["sales"].insert_one({"shop_id": key, "amount": 4})
    wait_for(lambda: totals(database, [key]) == [4])
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(WAIT_SECONDS_MAX)
    assert 0 == worker.exitcode
    assert "" == database["treadle.leases"].find_one()["owner"]


def test_a_leader_that_works_keeps_others_waiting(database, constants):
    """`run_until_idle` says so after a while, instead of doing the work twice."""
    constants(worker_wait_seconds=1.0)
    store = Store(database, MODELS)
    store.setup()
    worker = store.worker()
    with working(worker):
        wait_for(lambda: worker.leading)
        with pytest.raises(DataError) as refused:
            store.worker().run_until_idle()
        assert "lease-busy" == refused.value.code


# -- history that is gone ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forgetful() -> Generator[Any]:
    """A server that forgets what happened as soon as it may: its oplog holds a megabyte."""
    arguments = ["--oplogSize=1", "--syncdelay=1"]
    with server.start(arguments=arguments) as running, MongoClient(running.uri) as client:
        yield client


def overrun(client: Any, database: Any) -> None:
    """Write until the server's history begins later than now."""
    oplog = client["local"]["oplog.rs"]
    last = oplog.find_one(sort=[("$natural", -1)])["ts"]
    start = time.monotonic()

    def holds_it() -> bool:
        # The very entry that a read begins with may be removed under it.
        with contextlib.suppress(OperationFailure):
            return oplog.find_one(sort=[("$natural", 1)])["ts"] <= last
        return True

    while holds_it():
        database["noise"].insert_many([{"blob": MEGABYTE} for _ in range(4)])
        assert time.monotonic() - start < WAIT_SECONDS_MAX, "the oplog does not shrink"
    database["noise"].drop()


def test_a_rule_that_was_paused_for_too_long_says_so_and_is_rebuilt(forgetful):
    """While it is paused, its headroom shrinks to nothing; resuming it verifies everything."""
    database = forgetful["paused"]
    store = Store(database, MODELS)
    store.setup()
    key = ObjectId()
    database["shops"].insert_one({"_id": key, "name": "shop"})
    settled(store)
    store.pause("Shop.total")
    store.worker().run_until_idle()
    database["sales"].insert_one({"shop_id": key, "amount": 5})
    overrun(forgetful, database)
    store.worker().run_until_idle()
    (total,) = [each for each in store.status().rules if each.rule == "Shop.total"]
    assert ("paused", 0.0, True) == (total.state, total.headroom, total.headroom_low)
    assert "building" == store.resume("Shop.total")
    settled(store)
    assert [5] == totals(database, [key])


@pytest.mark.parametrize("kind", ["sync", "writers"])
def test_lost_history_is_made_good_by_looking_at_everything(forgetful, kind, caplog):
    """What was written meanwhile is nowhere to be read any more; every value is verified instead."""
    database = forgetful[f"lost_{kind}"]
    store = Store(database, MODELS)
    store.setup()
    keys = [ObjectId() for _ in range(3)]
    database["shops"].insert_many([{"_id": key, "name": "shop"} for key in keys])
    sales = database["sales"].insert_many([{"shop_id": key, "amount": 5} for key in keys]).inserted_ids
    settled(store)
    database["sales"].update_one({"_id": sales[0]}, {"$set": {"amount": 9}})
    database["sales"].delete_one({"_id": sales[1]})
    database["visits"].insert_one({"shop_id": keys[0]})
    overrun(forgetful, database)
    lag = store.worker().lag()
    assert lag.seconds > 0
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            database["sales"].update_one({"_id": sales[2]}, {"$inc": {"amount": 1}})

    writer = threading.Thread(target=write)
    if kind == "writers":
        writer.start()
    worker = store.worker()
    try:
        worker.run_until_idle()
    finally:
        done.set()
        if kind == "writers":
            writer.join()
    assert 1 == worker.totals["history_lost"]
    assert 1 == sum("history" in each.message for each in caplog.records)
    settled(store)
    assert [9, 0] == totals(database, keys[:2])
    assert {"name": "shop"} == database["visits"].find_one()["shop"]


def test_a_lease_is_taken_again_by_the_worker_whose_reply_was_lost(run, database):
    """It does not wait for itself."""
    leases = [Lease("worker", 60.0, owner, lambda owner: False) for owner in ("me", "me", "you")]
    assert [True, True, False] == [run(each.take()) for each in leases]
    assert [1, 2, None] == [each.token for each in leases]


def test_a_lease_is_taken_from_a_worker_of_the_same_process_without_a_wait(database, server):
    """The driver lends its session to the look whether a command of its still runs; that is not one."""
    waits: list[Wait] = []

    def noting(plan: Plan[Any]) -> Plan[Any]:
        command = next(plan)
        while True:
            waits.extend([command] if isinstance(command, Wait) else [])
            try:
                command = plan.send((yield command))
            except StopIteration as stop:
                return stop.value

    with MongoClient[Any](server.uri) as client:
        runner = Runner(client[database.name])
        with client.start_session() as session:
            client.admin.command("ping", session=session)
            former = session.session_id["id"]
        for owner, seconds in (("me", 0.0), ("you", 60.0)):
            mine = former if owner == "me" else None
            taken = Lease("worker", seconds, owner, lambda owner: False, mine)
            assert runner.run(noting(taken.take()))
    assert [] == waits
