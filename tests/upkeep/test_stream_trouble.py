"""What the worker does when things go wrong: collections that vanish, documents that cannot be
written, events that are too large, history that is gone, leases that are lost.

Never a silent gap, never a crash loop; each is logged and counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Generator
from typing import Annotated, Any

import bson
import pytest
from bson import ObjectId
from bson.raw_bson import RawBSONDocument
from pydantic import BaseModel
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tests import faults, mill
from treadle import Count, DataError, Document, ExtendedReference, Id, Store, Sum
from treadle.engine import lease
from treadle.plan import Read
from treadle.server import local as server
from treadle.upkeep import stream

Raw = dict[str, Any]
WAIT_SECONDS_MAX = 30.0


class Sale(Document, collection="sales"):
    shop_id: Id
    amount: int = 1
    blob: str = ""


class Shop(Document, collection="shops"):
    name: str = ""
    blob: str = ""
    total: Annotated[int, Sum(Sale, "amount", by="shop_id", maintain="stream")] = 0
    count: Annotated[int, Count(Sale, by="shop_id", maintain="stream")] = 0


class ShopCard(BaseModel):
    name: str


class Visit(Document, collection="visits"):
    shop_id: Id | None
    shop: Annotated[
        ShopCard | None,
        ExtendedReference(Shop, by="shop_id", maintain="stream", on_delete="clear"),
    ] = None


MODELS = [Sale, Shop, Visit]


def settled(store: Any) -> dict[str, int]:
    """Let the worker catch up; nothing is wrong then; what it counted."""
    worker = store.worker()
    worker.run_until_idle()
    assert [] == store.verify()
    return worker.totals


@pytest.fixture
def market(run, database) -> Any:
    """A store, and the ids of three shops with one sale each."""
    store = run.store(MODELS)
    store.setup()
    keys = [ObjectId() for _ in range(3)]
    database["shops"].insert_many([{"_id": key, "name": "shop"} for key in keys])
    database["sales"].insert_many([{"shop_id": key, "amount": 5} for key in keys])
    settled(store)
    return store, keys


def totals(database: Any, keys: list[Any]) -> list[int]:
    return [database["shops"].find_one({"_id": key}).get("total") for key in keys]


@contextlib.contextmanager
def working(worker: Any) -> Generator[threading.Thread]:
    """A worker that runs in a thread for as long as the block."""
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield thread
    finally:
        worker.stop()
        thread.join(WAIT_SECONDS_MAX)
        assert not thread.is_alive()


def wait_for(condition: Any, seconds: float = WAIT_SECONDS_MAX) -> float:
    """Wait until something holds; how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it does not come"
        time.sleep(0.01)
    return time.monotonic() - start


# -- collections that vanish --------------------------------------------------------------------------


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
    owed = [{"collection": "visits", "ledger": False, "after": None}]
    database["treadle.streams"].update_one({}, {"$set": {"owed": owed}})
    settled(fewer)
    database["shops"].update_one({"_id": key}, {"$set": {"name": "b"}})
    settled(fewer)
    settled(store)
    assert ["b", "b"] == [each["shop"]["name"] for each in database["visits"].find()]


# -- large documents ---------------------------------------------------------------------------------

MEGABYTE = "x" * 1_000_000


def test_documents_of_nine_megabytes_are_followed(market, database):
    """Before and after together would not fit into one event."""
    store, keys = market
    sale = database["sales"].insert_one({"shop_id": keys[0], "amount": 1, "blob": MEGABYTE * 9}).inserted_id
    database["sales"].replace_one(
        {"_id": sale}, {"shop_id": keys[1], "amount": 2, "blob": MEGABYTE * 9 + "y"}
    )
    database["sales"].update_one({"_id": sale}, {"$set": {"amount": 3, "blob": "z" + MEGABYTE * 9}})
    counted = settled(store)
    assert [5, 8, 5] == totals(database, keys)
    database["sales"].delete_one({"_id": sale})
    counted |= settled(store)
    assert [5, 5, 5] == totals(database, keys)
    assert "oversized" not in counted


class Post(Document, collection="posts"):
    id: int
    topics: list[str] = []


class Topic(Document, collection="topics"):
    id: str
    posts: Annotated[int, Count(Post, by="topics", maintain="stream")] = 0


def test_an_event_of_more_than_sixteen_megabytes_is_read_without_its_documents(run, database, caplog):
    """Here the keys themselves are that large: nine megabytes of topics before, and nine after."""
    store = run.store([Post, Topic])
    store.setup()
    database["topics"].insert_many([{"_id": name} for name in ("a", "b", "c")])
    database["posts"].insert_one({"_id": 1, "topics": ["a"]})
    database["posts"].insert_one({"_id": 2, "topics": ["a", *(f"{n}{MEGABYTE}" for n in range(9))]})
    settled(store)
    # Others before and after it, which must not be lost with it.
    database["posts"].replace_one({"_id": 1}, {"topics": ["b"]})
    database["posts"].replace_one({"_id": 2}, {"topics": ["b", *(f"{n}{MEGABYTE}" for n in range(1, 10))]})
    database["posts"].replace_one({"_id": 1}, {"topics": ["c"]})
    counted = settled(store)
    assert [0, 1, 1] == [database["topics"].find_one({"_id": name})["posts"] for name in ("a", "b", "c")]
    assert 1 == counted["oversized"]
    assert 1 == sum("too large" in each.message for each in caplog.records)


# -- documents that cannot be written --------------------------------------------------------------------


def test_a_target_that_is_full_is_set_aside_and_the_others_go_on(market, database, caplog):
    store, keys = market
    full = ObjectId()
    document = {"_id": full, "name": "full", "blob": ""}
    document["blob"] = "x" * (16 * 1024 * 1024 - len(bson.encode(document)) - 10)
    database["shops"].insert_one(document)
    for key in [*keys, full]:
        database["sales"].insert_one({"shop_id": key, "amount": 1})
    worker = store.worker()
    worker.run_until_idle()
    assert [6, 6, 6] == totals(database, keys)
    assert ["total", "count"] == [each.path for each in store.verify() if each.document_id == full][:2]
    assert 1 <= worker.totals["set_aside"]
    rows = [each["_id"]["key"] for each in database["treadle.set_aside"].find()]
    assert [full] == rows
    # Told once, however often it is met.
    for _ in range(3):
        database["sales"].insert_one({"shop_id": full, "amount": 1})
        worker.run_until_idle()
    assert 1 == sum("set aside" in each.message for each in caplog.records)
    # And as soon as there is room, it is brought right.
    database["shops"].update_one({"_id": full}, {"$set": {"blob": ""}})
    database["sales"].insert_one({"shop_id": full, "amount": 1})
    settled(store)
    assert [5] == totals(database, [full])


def test_a_target_that_the_validator_refuses_is_set_aside(market, database):
    store, keys = market
    database.command(
        {"collMod": "shops", "validator": {"total": {"$not": {"$gte": 100}}}, "validationLevel": "strict"}
    )
    for key, amount in zip(keys, (1, 200, 3), strict=True):
        database["sales"].insert_one({"shop_id": key, "amount": amount})
    worker = store.worker()
    worker.run_until_idle()
    assert [6, 5, 8] == totals(database, keys)
    assert 1 <= worker.totals["set_aside"]
    assert {keys[1]} == {each.document_id for each in store.verify()}


def test_a_copy_that_the_validator_refuses_does_not_stop_the_others(market, database):
    store, keys = market
    visits = database["visits"].insert_many([{"shop_id": keys[0]} for _ in range(5)]).inserted_ids
    settled(store)
    refusing = {"$or": [{"_id": {"$ne": visits[2]}}, {"shop.name": "shop"}]}
    database.command({"collMod": "visits", "validator": refusing, "validationLevel": "strict"})
    database["shops"].update_one({"_id": keys[0]}, {"$set": {"name": "new"}})
    worker = store.worker()
    worker.run_until_idle()
    names = [each["shop"]["name"] for each in database["visits"].find(sort=[("_id", 1)])]
    assert ["new", "new", "shop", "new", "new"] == names
    assert 1 <= worker.totals["set_aside"]


def test_a_reference_that_cannot_be_cleared_does_not_stop_the_others(market, database):
    """The source was deleted by somebody else; one of those who refer to it cannot let go of it."""
    store, keys = market
    visits = database["visits"].insert_many([{"shop_id": keys[0]} for _ in range(5)]).inserted_ids
    settled(store)
    refusing = {"$or": [{"_id": {"$ne": visits[2]}}, {"shop_id": {"$ne": None}}]}
    database.command({"collMod": "visits", "validator": refusing, "validationLevel": "strict"})
    database["shops"].delete_one({"_id": keys[0]})
    worker = store.worker()
    worker.run_until_idle()
    left = [each["_id"] for each in database["visits"].find({"shop_id": keys[0]})]
    assert [visits[2]] == left
    assert 1 == worker.totals["set_aside"]
    database["sales"].insert_one({"shop_id": keys[1], "amount": 1})
    worker.run_until_idle()
    assert [6] == totals(database, keys[1:2])


def test_a_date_that_python_cannot_hold_does_not_stop_the_worker(market, database):
    """Year 30,000, in a field that is nobody's business."""
    from bson.datetime_ms import DatetimeMS

    store, keys = market
    far = DatetimeMS(884_541_600_000_000)
    database["visits"].insert_one({"shop_id": keys[0], "until": far})
    database["visits"].insert_one({"shop_id": keys[0]})
    settled(store)
    assert ["shop", "shop"] == [
        each["shop"]["name"] for each in database["visits"].find(projection={"shop": 1})
    ]


def test_text_that_is_no_text_is_set_aside(market, database):
    """Bytes that are not UTF-8, which the server stores and the driver does not read."""
    store, keys = market
    good = bson.encode({"_id": ObjectId(), "shop_id": keys[0], "note": "????"})
    database["visits"].insert_one(RawBSONDocument(good.replace(b"????", b"\xff\xfe\xfd\xfc")))
    key = database["visits"].insert_one({"shop_id": keys[0]}).inserted_id
    worker = store.worker()
    worker.run_until_idle()
    assert {"name": "shop"} == database["visits"].find_one({"_id": key})["shop"]
    assert 1 <= worker.totals["set_aside"]
    # Nor does it stop the going over of everything.
    database["treadle.streams"].delete_many({})
    database["visits"].update_one({"_id": key}, {"$unset": {"shop": ""}})
    worker.run_until_idle()
    assert {"name": "shop"} == database["visits"].find_one({"_id": key})["shop"]


# -- documents that others write all the time --------------------------------------------------------------


def test_targets_that_others_write_all_the_time_are_brought_right(database):
    """Whatever is read of them is old before it can be written, unless they are held meanwhile."""
    store = Store(database, MODELS)
    store.setup()
    keys = [ObjectId() for _ in range(3)]
    database["shops"].insert_many([{"_id": key, "name": "shop"} for key in keys])
    settled(store)
    real, spoilt = store.runner._perform, []

    def perform(command: Any, session: Any) -> Any:
        answer = real(command, session)
        reads_sources = isinstance(command, Read) and command.collection == "sales"
        if reads_sources and session is not None and session.in_transaction:
            with contextlib.suppress(PyMongoError):
                spoil = {"update": "shops", "updates": [{"q": {"_id": keys[1]}, "u": {"$inc": {"views": 1}}}]}
                database.command({**spoil, "maxTimeMS": 100})
                spoilt.append(True)
        return answer

    store.runner._perform = perform  # type: ignore[method-assign]
    database["sales"].insert_many([{"shop_id": key, "amount": 5} for key in keys])
    start = time.monotonic()
    store.worker().run_until_idle()
    assert [5, 5, 5] == totals(database, keys)
    assert 1 <= len(spoilt)
    assert time.monotonic() - start < 20.0


@contextlib.contextmanager
def crowd(database: Any, keys: list[Any]) -> Generator[None]:
    """Views are counted in the very documents whose totals are maintained."""
    done = threading.Event()

    def view(seed: int) -> None:
        order = random.Random(seed)
        while not done.is_set():
            database["shops"].update_one({"_id": order.choice(keys)}, {"$inc": {"views": 1}})

    viewers = [threading.Thread(target=view, args=(seed,)) for seed in range(3)]
    for each in viewers:
        each.start()
    try:
        yield
    finally:
        done.set()
        for each in viewers:
            each.join()


@pytest.fixture
def crowded(database) -> Any:
    store = Store(database, MODELS)
    store.setup()
    keys = [ObjectId() for _ in range(200)]
    database["shops"].insert_many([{"_id": key, "name": "shop"} for key in keys])
    return store, keys


def test_a_crowd_of_writers_does_not_starve_the_worker(crowded, database):
    store, keys = crowded
    worker = store.worker()
    with crowd(database, keys), working(worker):
        for amount in range(1, 6):
            database["sales"].insert_many([{"shop_id": key, "amount": 1} for key in keys])
            wait_for(lambda amount=amount: database["shops"].count_documents({"total": amount}) == len(keys))
            assert worker.lag().events <= len(keys)
    assert [] == store.verify()


def test_a_crowd_of_writers_does_not_starve_repair(crowded, database):
    store, keys = crowded
    database["sales"].insert_many([{"shop_id": key, "amount": 1} for key in keys])
    with crowd(database, keys):
        assert len(keys) == store.repair()
    assert [] == store.verify()


def test_updates_of_fields_that_nobody_watches_are_not_even_sent(market, database):
    store, _ = market
    database["shops"].update_many({}, {"$inc": {"views": 1}, "$set": {"place.name": "here"}})
    worker = store.worker()
    assert 0 == worker.lag().events
    worker.run_until_idle()
    assert 0 == worker.totals.get("events", 0)


@pytest.mark.parametrize(
    "update",
    [{"$set": {"shop.name": "x"}}, {"$unset": {"shop": 1}}, {"$set": {"shop": None}}],
    ids=["inside", "removed", "cleared"],
)
def test_whoever_writes_into_a_maintained_field_is_noticed(market, database, update):
    store, keys = market
    visit = database["visits"].insert_one({"shop_id": keys[0]}).inserted_id
    settled(store)
    database["visits"].update_one({"_id": visit}, update)
    settled(store)
    assert {"name": "shop"} == database["visits"].find_one({"_id": visit})["shop"]


# -- errors on the way --------------------------------------------------------------------------------------


FAILING = ["update", "findAndModify", "commitTransaction", "aggregate", "getMore", "find"]


@pytest.mark.parametrize("command", FAILING)
def test_an_error_in_the_middle_loses_no_event(database, client, server, command):
    """What was read when it failed is read again; `run_until_idle` does not take it for done."""
    app, heard = f"failing-{command}", faults.Heard()
    with MongoClient(server.uri, appname=app, event_listeners=[heard]) as other:
        store = Store(other[database.name], MODELS)
        store.setup()
        keys = [ObjectId() for _ in range(3)]
        database["shops"].insert_many([{"_id": key, "name": "shop"} for key in keys])
        settled(store)
        worker = store.worker()
        for skip in range(9):
            database["sales"].insert_many([{"shop_id": key, "amount": 1} for key in keys])
            refused = {"errorCode": 8, "errorLabels": []}
            with faults.fail_point(client, heard, skip=skip, times=2, app=app, commands=[command], **refused):
                for _ in range(3):
                    with contextlib.suppress(PyMongoError):
                        worker.run_until_idle()
                        break
            assert [skip + 1] * 3 == totals(database, keys)
        assert [] == store.verify()


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


# -- leases ----------------------------------------------------------------------------------------------


def test_one_worker_leads_and_the_other_stands_by(database):
    store = Store(database, MODELS)
    store.setup()
    key = database["shops"].insert_one({"name": "a"}).inserted_id
    first, second = store.worker(), store.worker()
    with working(first):
        wait_for(lambda: first.leading)
        with working(second):
            time.sleep(2 * stream.STANDBY_SECONDS)
            assert (True, False) == (first.leading, second.leading)
            first.stop()
            taken = wait_for(lambda: second.leading)
            assert taken < 5.0
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
        zombie = store.worker()._following(store._capabilities(), mine)
        successor = store.worker()._following(store._capabilities(), theirs)
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
        with pytest.raises(stream.LeaseLost):
            run(zombie._handle(events), mine)
        assert before == database["treadle.streams"].find_one()
        run(successor.resign(), theirs)
    settled(store)
    assert [26, 5, 5] == totals(database, keys)


def test_sigterm_ends_the_worker_after_its_batch(server, database):
    """It resigns, so that nobody has to wait for its lease to run out."""
    store = Store(database, MODELS)
    store.setup()
    worker = mill.start(mill.work, f"{__name__}:MODELS", server.uri, database.name)
    wait_for(lambda: (database["treadle.leases"].find_one() or {}).get("owner"))
    key = database["shops"].insert_one({"name": "a"}).inserted_id
    database["sales"].insert_one({"shop_id": key, "amount": 4})
    wait_for(lambda: totals(database, [key]) == [4])
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(WAIT_SECONDS_MAX)
    assert 0 == worker.exitcode
    assert "" == database["treadle.leases"].find_one()["owner"]


@pytest.mark.parametrize("run", ["sync"], indirect=True)
def test_a_leader_that_works_keeps_others_waiting(market, database, monkeypatch):
    """`run_until_idle` says so after a while, instead of doing the work twice."""
    store, _ = market
    monkeypatch.setattr("treadle.store.worker.WAIT_MAX_SECONDS", 1.0)
    worker = store.worker()
    with working(worker):
        wait_for(lambda: worker.leading)
        with pytest.raises(DataError) as refused:
            store.worker().run_until_idle()
        assert "lease-busy" == refused.value.code


# -- history that is gone ----------------------------------------------------------------------------------


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
    while oplog.find_one(sort=[("$natural", 1)])["ts"] <= last:
        database["noise"].insert_many([{"blob": MEGABYTE} for _ in range(4)])
        assert time.monotonic() - start < WAIT_SECONDS_MAX, "the oplog does not shrink"
    database["noise"].drop()


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
    first = run(lease.attempt("worker", "me", 60.0, lambda owner: False))
    second = run(lease.attempt("worker", "me", 60.0, lambda owner: False))
    other = run(lease.attempt("worker", "you", 60.0, lambda owner: False))
    assert (1, 2, None) == (first, second, other)
