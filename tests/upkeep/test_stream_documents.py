"""Documents that make trouble for the worker: large, refused, or written all the time."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Generator
from typing import Annotated, Any

import bson
import pytest
from bson import ObjectId
from bson.raw_bson import RawBSONDocument
from pymongo.errors import PyMongoError

from tests.upkeep.followed import has_former_states
from tests.upkeep.marketplace import MEGABYTE, MODELS, settled, totals, wait_for, working
from treadle import Count, Document, Formula, Store
from treadle.plan import Outside

# -- large documents ---------------------------------------------------------------------------------


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


def test_an_event_of_more_than_sixteen_megabytes_is_read_all_the_same(run, database, caplog):
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
    # Without its documents, unless the server keeps no former ones, or sends it in pieces.
    whole = store._capabilities().split_events or not has_former_states(database, "posts")
    assert (not whole) == counted.get("oversized", 0)
    assert (not whole) == sum("too large" in each.message for each in caplog.records)


# -- documents that cannot be written ----------------------------------------------------------------


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


class Item(Document, collection="items"):
    id: int
    price: Any = 1
    sold: Annotated[int, Count("Purchase", by="item_id", maintain="stream")] = 0
    half: Annotated[float | None, Formula({"$divide": ["$price", 2]})] = None


class Purchase(Document, collection="purchases"):
    item_id: int


def test_a_target_on_which_a_formula_fails_is_set_aside(run, database):
    """The server says so of the update, by a code that many errors share."""
    store = run.store([Item, Purchase])
    store.setup()
    store.insert_many([Item(id=1), Item(id=2)])
    settled(store)
    database["items"].update_one({"_id": 1}, {"$set": {"price": "free"}})
    database["purchases"].insert_many([{"item_id": 1}, {"item_id": 2}])
    worker = store.worker()
    worker.run_until_idle()
    assert [0, 1] == [each["sold"] for each in database["items"].find(sort=[("_id", 1)])]
    assert 1 <= worker.totals["set_aside"]


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


# -- documents that others write all the time --------------------------------------------------------


SPOILT_MAX = 20


def test_targets_that_others_write_all_the_time_are_brought_right(database):
    """Whatever is read of them is old before it can be written, unless they are held meanwhile."""
    store = Store(database, MODELS)
    store.setup()
    keys = [ObjectId() for _ in range(3)]
    database["shops"].insert_many([{"_id": key, "name": "shop"} for key in keys])
    settled(store)
    real, spoilt = store.runner._perform, []

    def perform(command: Any, session: Any, *rest: Any) -> Any:
        answer = real(command, session, *rest)
        # Sources are counted outside the transaction, so that the moment of that is known.
        if isinstance(command, Outside) and session is not None and session.in_transaction:
            with contextlib.suppress(PyMongoError):
                spoil = {"update": "shops", "updates": [{"q": {"_id": keys[1]}, "u": {"$inc": {"views": 1}}}]}
                database.command({**spoil, "maxTimeMS": 100})
                spoilt.append(True)
        return answer

    store.runner._perform = perform  # type: ignore[method-assign]
    database["sales"].insert_many([{"shop_id": key, "amount": 5} for key in keys])
    store.worker().run_until_idle()
    assert [5, 5, 5] == totals(database, keys)
    assert 1 <= len(spoilt) <= SPOILT_MAX, len(spoilt)


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
