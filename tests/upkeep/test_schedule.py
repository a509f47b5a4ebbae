"""Scheduled maintenance: whole closed windows, late data, emptied groups, one runner at a time."""

from __future__ import annotations

import datetime as dt
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Generator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pytest
from bson.decimal128 import Decimal128
from pydantic import BaseModel
from pymongo import MongoClient

from treadle import (
    Average,
    Count,
    Day,
    Document,
    ExtendedReference,
    Formula,
    Max,
    Month,
    Rollup,
    Store,
    Subset,
    Sum,
    UsageError,
)
from treadle.server.local import LocalServer, start
from treadle.upkeep import changes, merging, schedule

UTC = dt.UTC
HOURLY = dt.timedelta(hours=1)


def at(*parts: int) -> dt.datetime:
    return dt.datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type]


class Sale(Document, collection="sales"):
    product_id: int
    amount: Decimal
    created_at: dt.datetime | None = None
    paid: bool = True


class DailySales(
    Document,
    collection="daily_summaries",
    rollup=Rollup(
        Sale, keys={"product_id": "product_id", "day": Day("created_at")}, maintain="schedule", every=HOURLY
    ),
):
    product_id: int
    day: dt.datetime
    total_amount: Annotated[Decimal, Sum("amount")]
    order_count: Annotated[int, Count()]
    average_order_value: Annotated[Decimal | None, Average("amount")]
    largest: Annotated[Decimal | None, Max("amount")] = None
    unpaid: Annotated[int, Count(where={"paid": False})] = 0
    twice: Annotated[int | None, Formula({"$multiply": ["$order_count", 2]})] = None
    note: str = ""


def raw(product: int, amount: str, *moment: int, **more: Any) -> dict[str, Any]:
    """A sale as a writer that does not use Treadle stores it."""
    return {"product_id": product, "amount": Decimal128(amount), "created_at": at(*moment), **more}


def summaries(database: Any) -> dict[Any, Any]:
    return {
        (each["product_id"], each["day"].day): (each["order_count"], each["total_amount"].to_decimal())
        for each in database.daily_summaries.find()
    }


NOON = at(2026, 3, 5, 12)


@pytest.fixture
def store(run: Any) -> Any:
    made = run.store([Sale, DailySales])
    made.setup()
    return made


# -- windows ------------------------------------------------------------------------------------------


def test_closed_windows_are_computed_whole_and_open_ones_not(store, database):
    database.sales.insert_many(
        [
            raw(1, "1", 2026, 3, 3),
            raw(1, "2.50", 2026, 3, 4, 23, 59),
            raw(1, "4", 2026, 3, 5, 0),
            raw(2, "8", 2026, 3, 3, 5, paid=False),
        ]
    )
    (ran,) = store.run_due(now=NOON)
    assert ("DailySales", "rollup", "DailySales", NOON, True, 3, 0) == (
        ran.name,
        ran.pattern,
        ran.model,
        ran.at,
        ran.whole,
        ran.written,
        ran.removed,
    )
    assert {(1, 3): (1, 1), (1, 4): (1, Decimal("2.50")), (2, 3): (1, 8)} == summaries(database)
    found = database.daily_summaries.find_one({"product_id": 2})
    assert (1, 2, Decimal128("8"), Decimal128("8"), 1) == (
        found["unpaid"],
        found["twice"],
        found["average_order_value"],
        found["largest"],
        found["_treadle"]["state"]["members"],
    )
    assert [] == store.verify()
    (ran,) = store.run_due(now=at(2026, 3, 6))
    assert (False, 1) == (ran.whole, ran.written)
    assert (1, 4) == summaries(database)[1, 5]
    assert [] == store.verify()


def test_a_run_is_due_when_its_time_has_come_and_missed_runs_are_one(store, database):
    database.sales.insert_one(raw(1, "1", 2026, 3, 3))
    assert 1 == len(store.run_due(now=NOON))
    assert [] == store.run_due(now=NOON)
    assert [] == store.run_due(now=NOON + dt.timedelta(minutes=59))
    assert [] == store.run_due(now=at(2026, 1, 1)), "a time that is past already"
    assert 1 == len(store.run_due(now=NOON + dt.timedelta(hours=7)))
    assert [] == store.run_due(now=NOON + dt.timedelta(hours=7, minutes=30))
    # In steps from the first run, not from whenever the last one happened to come.
    assert 1 == len(store.run_due(now=NOON + dt.timedelta(hours=8)))
    # The server's own time is far behind the time of the runs above, and is not held up by them.
    row = database["treadle.schedules"].find_one()
    assert "done" == row["outcome"]
    database["treadle.schedules"].update_one({}, {"$set": {"last_run": at(2020, 1, 1)}})
    assert 1 == len(store.run_due())


def test_late_data_reopens_exactly_its_windows(store, database):
    database.sales.insert_many([raw(n % 2, "1", 2026, 3, 1 + n % 4) for n in range(16)])
    store.run_due(now=NOON)
    revisions = {each["_id"]: each["_treadle"]["n"] for each in database.daily_summaries.find()}
    database.sales.insert_many([raw(0, "5", 2026, 3, 2), raw(7, "1", 2026, 3, 2), raw(1, "9", 2026, 3, 5)])
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert not ran.whole
    found = summaries(database)
    assert ((1, 5), (1, 1), (4, 4)) == (found[0, 2], found[7, 2], found[1, 2])
    assert (1, 5) not in found, "still open"
    assert [] == store.verify()
    touched = {
        each["day"].day
        for each in database.daily_summaries.find()
        if each["_treadle"]["n"] != revisions.get(each["_id"])
    }
    assert {2} == touched


@pytest.mark.parametrize("change", ["update", "move", "delete", "replace", "unset", "transaction", "several"])
def test_nothing_that_other_writers_do_is_missed(store, database, change):
    """Also what moved twice between two runs, and documents whose key is gone."""
    database.sales.insert_many([raw(n % 3, str(n), 2026, 3, 1 + n % 4) for n in range(24)])
    store.run_due(now=NOON)
    sales = database.sales
    if change == "update":
        sales.update_many({"product_id": 1}, {"$inc": {"amount": Decimal128("1")}})
    elif change == "move":
        sales.update_many({"product_id": 1}, {"$set": {"created_at": at(2026, 3, 2, 3)}})
        sales.update_many({"product_id": 1}, {"$set": {"created_at": at(2026, 3, 4, 3)}})
    elif change == "delete":
        sales.delete_many({"product_id": 2})
    elif change == "replace":
        for each in list(sales.find({"product_id": 0})):
            sales.replace_one({"_id": each["_id"]}, {**each, "product_id": 9})
    elif change == "unset":
        sales.update_many({"product_id": 2}, {"$unset": {"created_at": ""}})
    elif change == "transaction":
        with database.client.start_session() as session, session.start_transaction():
            sales.insert_one(raw(5, "5", 2026, 3, 3), session=session)
            sales.delete_many({"product_id": 0}, session=session)
    else:
        late = sales.insert_one(raw(8, "1", 2026, 3, 1)).inserted_id
        sales.update_one({"_id": late}, {"$set": {"product_id": 9}})
        sales.delete_one({"_id": late})
        sales.insert_one({"_id": late, **raw(4, "1", 2026, 3, 3)})
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert not ran.whole, ran.why
    assert [] == store.verify()
    expected: dict[Any, list[Decimal]] = {}
    for each in sales.find({"created_at": {"$ne": None}}):
        expected.setdefault((each["product_id"], each["created_at"].day), []).append(
            each["amount"].to_decimal()
        )
    assert {key: (len(values), sum(values)) for key, values in expected.items()} == summaries(database)


def test_emptied_groups_are_removed_and_a_callers_own_fields_kept(store, database):
    database.sales.insert_many([raw(1, "1", 2026, 3, 1), raw(2, "1", 2026, 3, 1), raw(3, "1", 2026, 3, 2)])
    store.run_due(now=NOON)
    store.update(DailySales, {"product_id": 1}, {"$set": {"note": "kept"}})
    database.sales.delete_one({"product_id": 2})
    database.sales.insert_one(raw(1, "2", 2026, 3, 1))
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert (1, 1) == (ran.written, ran.removed)
    assert {(1, 1): (2, 3), (3, 2): (1, 1)} == summaries(database)
    assert "kept" == database.daily_summaries.find_one({"product_id": 1})["note"]
    database.sales.delete_many({})
    store.run_due(now=NOON + 2 * HOURLY)
    assert {} == summaries(database)
    assert [] == store.verify()


def test_what_was_closed_once_stays_closed(store, database):
    """A run for a time ahead computes windows that are not over; later ones keep them right."""
    database.sales.insert_one(raw(1, "1", 2026, 3, 5, 1))
    store.run_due(now=at(2026, 3, 6))
    database.sales.insert_one(raw(1, "2", 2026, 3, 5, 2))
    database["treadle.schedules"].update_one({}, {"$set": {"due": at(2026, 3, 5)}})
    store.run_due(now=NOON)
    assert {(1, 5): (2, 3)} == summaries(database)


def test_verify_speaks_of_what_the_last_run_computed(store, database):
    """Nothing before the first run, nothing of open windows; late data until the next run."""
    database.sales.insert_many([raw(1, "1", 2026, 3, 1), raw(1, "1", 2026, 3, 5)])
    assert [] == store.verify()
    store.run_due(now=NOON)
    assert [] == store.verify()
    database.sales.insert_one(raw(1, "1", 2026, 3, 1))
    assert {"order_count", "total_amount"} <= {each.path for each in store.verify()}
    assert 1 == store.repair()
    assert [] == store.verify()
    database.daily_summaries.delete_many({})
    store.rebuild()
    assert {(1, 1): (2, 2)} == summaries(database)


# -- when the stream cannot tell -------------------------------------------------------------------------


def test_without_former_states_everything_is_computed_anew(store, database):
    database.sales.insert_many([raw(n, "1", 2026, 3, 1) for n in range(5)])
    store.run_due(now=NOON)
    database.command({"collMod": "sales", "changeStreamPreAndPostImages": {"enabled": False}})
    database.sales.insert_one(raw(7, "1", 2026, 3, 1))
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert not ran.whole, "an insert needs no former state"
    database.sales.delete_one({"product_id": 3})
    (ran,) = store.run_due(now=NOON + 2 * HOURLY)
    assert "no former state" in ran.why
    assert {(n, 1): (1, 1) for n in (0, 1, 2, 4, 7)} == summaries(database)
    assert [] == store.verify()


def test_a_dropped_source_and_lost_history_are_noticed(store, database):
    database.sales.insert_many([raw(n, "1", 2026, 3, 1) for n in range(3)])
    store.run_due(now=NOON)
    database.sales.drop()
    database.sales.insert_one(raw(8, "1", 2026, 3, 1))
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert "drop" in ran.why
    assert {(8, 1): (1, 1)} == summaries(database)
    # A place that the server does not know any more.
    store.run_due(now=NOON + 2 * HOURLY)
    token = database["treadle.schedules"].find_one()["position"]["token"]["_data"]
    gone = {"token": {"_data": token[:10] + "00000000" + token[18:]}, "start": None}
    database["treadle.schedules"].update_one({}, {"$set": {"position": gone}})
    database.sales.insert_one(raw(9, "1", 2026, 3, 1))
    (ran,) = store.run_due(now=NOON + 3 * HOURLY)
    assert "history" in ran.why
    assert {(8, 1): (1, 1), (9, 1): (1, 1)} == summaries(database)
    assert [] == store.verify()


def test_too_many_changes_are_not_looked_at_one_by_one(store, database, monkeypatch):
    monkeypatch.setattr(schedule, "DIRTY_MAX", 3)
    database.sales.insert_many([raw(1, "1", 2026, 3, 1)])
    store.run_due(now=NOON)
    database.sales.insert_many([raw(n, "1", 2026, 3, 1) for n in range(20)])
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert not ran.whole, "one window"
    database.sales.insert_many([raw(n, "1", 2026, 2, 1 + n) for n in range(20)])
    (ran,) = store.run_due(now=NOON + 2 * HOURLY)
    assert "more changed" in ran.why
    assert 40 == len(database.daily_summaries.distinct("_id"))
    monkeypatch.setattr(changes, "EVENTS_MAX", 3)
    monkeypatch.setattr(changes, "BATCH_MAX", 2)
    database.sales.insert_many([raw(n, "1", 2026, 3, 2) for n in range(20)])
    (ran,) = store.run_due(now=NOON + 3 * HOURLY)
    assert "more changed" in ran.why
    assert 60 == len(database.daily_summaries.distinct("_id"))
    assert [] == store.verify()


def test_another_declaration_is_computed_anew(run, database):
    def model(**fields: Any) -> Any:
        annotations = {"product_id": int, "count": Annotated[int, Count()], **fields}
        return type(Document)(
            "Totals",
            (Document,),
            {"__annotations__": annotations, "__module__": __name__, "count": 0},
            collection="totals",
            rollup=Rollup(Sale, keys={"product_id": "product_id"}, maintain="schedule", every=HOURLY),
        )

    database.sales.insert_many([raw(n % 2, "1", 2026, 3, 1) for n in range(4)])
    first = run.store([Sale, model()])
    first.setup()
    first.run_due(now=NOON)
    second = run.store([Sale, model(total=Annotated[Decimal | None, Max("amount")])])
    second.setup()
    (ran,) = second.run_due(now=NOON + HOURLY)
    assert "declaration" in ran.why
    assert [Decimal128("1")] * 2 == [each["total"] for each in database.totals.find()]
    assert [] == second.verify()


# -- other shapes ----------------------------------------------------------------------------------------


class Product(Document, collection="products"):
    category: str | None = None
    price: Decimal
    stock: int = 1


class CategoryStats(
    Document,
    collection="category_stats",
    rollup=Rollup(Product, keys={"id": "category"}, maintain="schedule", every=HOURLY),
):
    id: str
    count: Annotated[int, Count()] = 0
    value: Annotated[Decimal, Sum({"$multiply": ["$price", "$stock"]})] = Decimal(0)


class PerCategory(
    Document,
    collection="per_category",
    rollup=Rollup(Product, keys={"what.category": "category"}, maintain="schedule", every=HOURLY),
):
    class What(BaseModel):
        category: str | None = None

    what: What = What()
    count: Annotated[int, Count()] = 0


def test_groups_without_windows_are_computed_as_they_change(run, database):
    """The key as the id; a nested key that may be None."""
    store = run.store([Product, CategoryStats, PerCategory])
    store.setup()
    database.products.insert_many(
        [{"category": name, "price": Decimal128("2"), "stock": 3} for name in ("a", "a", "b", None)]
    )
    database.products.insert_one({"price": Decimal128("2"), "stock": 3})
    assert {"CategoryStats", "PerCategory"} == {each.name for each in store.run_due(now=NOON)}
    assert {"a": 2, "b": 1} == {each["_id"]: each["count"] for each in database.category_stats.find()}
    assert {"a": 2, "b": 1, None: 2} == {
        each["what"]["category"]: each["count"] for each in database.per_category.find()
    }
    assert [] == store.verify()
    database.products.update_one({"category": "b"}, {"$set": {"category": None}})
    database.products.update_one({"category": "a"}, {"$set": {"stock": 10}})
    ran = store.run_due(now=NOON + HOURLY)
    assert ["", ""] == [each.why for each in ran]
    assert Decimal128("26") == database.category_stats.find_one({"_id": "a"})["value"]
    assert {"a": 2, None: 3} == {
        each["what"]["category"]: each["count"] for each in database.per_category.find()
    }
    database.products.delete_many({"category": None})
    store.run_due(now=NOON + 2 * HOURLY)
    assert ["a"] == [each["what"]["category"] for each in database.per_category.find()]
    assert [] == store.verify()


class ZoneDay(
    Document,
    collection="zone_days",
    rollup=Rollup(
        Sale, keys={"day": Day("created_at", timezone="Asia/Kolkata")}, maintain="schedule", every=HOURLY
    ),
):
    day: dt.datetime
    count: Annotated[int, Count()] = 0


class ZoneMonth(
    Document,
    collection="zone_months",
    rollup=Rollup(
        ZoneDay, keys={"month": Month("day", timezone="Asia/Kolkata")}, maintain="schedule", every=HOURLY
    ),
):
    month: dt.datetime
    days: Annotated[int, Count()] = 0
    sales: Annotated[int, Sum("count")] = 0


def test_windows_close_in_their_own_time_zone_and_chains_follow(run, database):
    store = run.store([Sale, ZoneDay, ZoneMonth])
    store.setup()
    # In Kolkata the first of April begins at 18:30 UTC on the 31st of March.
    database.sales.insert_many([raw(1, "1", 2026, 3, 31, 18, 29), raw(1, "1", 2026, 3, 31, 18, 30)])
    assert [1, 1] == [each.written for each in store.run_due(now=at(2026, 3, 31, 18, 30))]
    assert [(at(2026, 3, 30, 18, 30).replace(tzinfo=None), 1)] == [
        (each["day"], each["count"]) for each in database.zone_days.find()
    ]
    assert [(1, 1)] == [(each["days"], each["sales"]) for each in database.zone_months.find()]
    database.sales.insert_one(raw(1, "1", 2026, 3, 31, 10))
    store.run_due(now=at(2026, 3, 31, 19, 30))
    assert [(1, 2)] == [(each["days"], each["sales"]) for each in database.zone_months.find()]
    assert [] == store.verify()


class Shelf(Document, collection="shelves"):
    id: int
    name: str
    days: Annotated[int, Count("ShelfDay", by="product_id")] = 0


class ShelfDay(
    Document,
    collection="shelf_days",
    rollup=Rollup(
        Sale, keys={"product_id": "product_id", "day": Day("created_at")}, maintain="schedule", every=HOURLY
    ),
):
    product_id: int
    day: dt.datetime
    shelf: Annotated[str | None, ExtendedReference(Shelf, by="product_id", field="name")] = None
    count: Annotated[int, Count()] = 0


def test_what_follows_from_a_scheduled_rollup_follows(run, database):
    """A Computed field over it, and a card in it, both kept with the write."""
    store = run.store([Sale, Shelf, ShelfDay])
    store.setup()
    store.insert_many([Shelf(id=1, name="top"), Shelf(id=2, name="low")])
    database.sales.insert_many([raw(1, "1", 2026, 3, 1), raw(1, "1", 2026, 3, 2), raw(2, "1", 2026, 3, 1)])
    store.run_due(now=NOON)
    assert {1: 2, 2: 1} == {each.id: each.days for each in store.find(Shelf)}
    assert {"top", "low"} == {each.shelf for each in store.find(ShelfDay)}
    store.update(Shelf, 1, {"$set": {"name": "upper"}})
    database.sales.delete_one({"product_id": 2})
    store.run_due(now=NOON + HOURLY)
    assert {1: 2, 2: 0} == {each.id: each.days for each in store.find(Shelf)}
    assert ["upper", "upper"] == [each.shelf for each in store.find(ShelfDay)]
    assert [] == store.verify()


# -- fields of other models -------------------------------------------------------------------------------


class Customer(Document, collection="customers"):
    name: str


class ReviewCard(BaseModel):
    rating: int


class Review(Document, collection="reviews"):
    item_id: int
    rating: int
    customer_id: Any = None
    customer: Annotated[
        str | None, ExtendedReference(Customer, by="customer_id", field="name", maintain="schedule", every=HOURLY)
    ] = None  # fmt: skip


class Item(Document, collection="items"):
    id: int
    label: str = ""
    count: Annotated[int, Count(Review, by="item_id", maintain="schedule", every=HOURLY)] = 0
    average: Annotated[
        float | None,
        Average(Review, "rating", by="item_id", maintain="schedule", every=HOURLY, computed_at="computed"),
    ] = None
    good: Annotated[
        int, Count(Review, by="item_id", where={"rating": {"$gte": 4}}, maintain="schedule", every=HOURLY)
    ] = 0
    best: Annotated[list[ReviewCard], Subset(Review, by="item_id", sort="-rating", size=2,
                                             maintain="schedule", every=HOURLY)] = []  # fmt: skip
    computed: dt.datetime | None = None
    double: Annotated[int | None, Formula({"$multiply": ["$count", 2]})] = None


def test_fields_of_documents_are_computed_on_their_schedule(run, database):
    store = run.store([Customer, Review, Item])
    store.setup()
    ann = store.insert(Customer(name="Ann"))
    store.insert_many([Item(id=1), Item(id=2), Item(id=3)])
    database.reviews.insert_many(
        [{"item_id": 1 + n % 2, "rating": n, "customer_id": ann.id} for n in range(1, 6)]
    )
    store.insert(Review(item_id=2, rating=3, customer_id=ann.id))
    assert 0 == store.get(Item, 2).count, "not with the write"
    ran = store.run_due(now=NOON)
    assert {None} == {each.error for each in ran}
    item = store.get(Item, 2)
    assert (4, 3.0, 1, 8, [5, 3]) == (
        item.count,
        item.average,
        item.good,
        item.double,
        [each.rating for each in item.best],
    )
    assert {"Ann"} == {each.customer for each in store.find(Review)}
    assert [] == store.verify()
    before = {each["_id"]: each for each in database["items"].find()}
    store.update(Customer, ann.id, {"$set": {"name": "Anna"}})
    database.reviews.delete_many({"item_id": 1})
    store.run_due(now=NOON + HOURLY)
    empty = store.get(Item, 1)
    assert (0, None, 0, [], 0) == (empty.count, empty.average, empty.good, empty.best, empty.double)
    after = {each["_id"]: each for each in database["items"].find()}
    assert before[2] == after[2], "what is right already is not written"
    assert before[1]["computed"] < after[1]["computed"]
    assert {"Anna"} == {each.customer for each in store.find(Review)}
    assert [] == store.verify()


# -- runners ------------------------------------------------------------------------------------------------


def test_two_runners_at_once_do_the_work_once(server, database):
    store = Store(database, [Sale, DailySales])
    store.setup()
    database.sales.insert_many([raw(n % 50, "1", 2026, 3, 1 + n % 4) for n in range(2000)])
    stores = [Store(MongoClient(server.uri)[database.name], [Sale, DailySales]) for _ in range(4)]
    ran: list[Any] = []
    barrier = threading.Barrier(4)

    def work(each: Store) -> None:
        barrier.wait()
        ran.extend(each.run_due(now=NOON))

    threads = [threading.Thread(target=work, args=(each,)) for each in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for each in stores:
        each.database.client.close()
    assert 1 == len(ran)
    assert [] == store.verify()


@pytest.mark.heavy
def test_raw_writers_and_runs_at_once(store, database):
    """Writers that do not use Treadle insert, change, move and delete while runs come one after another."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def write(number: int) -> None:
        chance = random.Random(number)
        try:
            while not stop.is_set():
                key = {"product_id": chance.randrange(5), "number": chance.randrange(40)}
                moved = {"created_at": at(2026, 3, chance.randrange(1, 5), chance.randrange(24))}
                match chance.randrange(4):
                    case 0:
                        database.sales.delete_one(key)
                    case 1:
                        database.sales.update_many(
                            key, {"$set": {**moved, "product_id": chance.randrange(5)}}
                        )
                    case _:
                        database.sales.insert_one({**key, **moved, "amount": Decimal128("1.5"), "paid": True})
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    wholes = []
    for number in range(12):
        wholes += [each.whole for each in store.run_due(now=NOON + number * HOURLY)]
    stop.set()
    for writer in writers:
        writer.join(60)
    assert [] == failed
    (last,) = store.run_due(now=NOON + 20 * HOURLY)
    assert [True, *[False] * 12] == [*wholes, last.whole]
    assert [] == store.verify()
    expected: dict[Any, list[Decimal]] = {}
    for each in database.sales.find():
        expected.setdefault((each["product_id"], each["created_at"].day), []).append(Decimal("1.5"))
    assert {key: (len(values), sum(values)) for key, values in expected.items()} == summaries(database)


def test_a_runner_that_was_replaced_moves_nothing(store, database, monkeypatch):
    """It slept until its lease had run out; another run was done meanwhile."""
    database.sales.insert_many([raw(1, "1", 2026, 3, 1), raw(2, "1", 2026, 3, 1)])
    real = merging.perform
    slept = []

    def sleepy(collection: str, stages: Any) -> Any:
        if not slept:
            slept.append(True)
            database["treadle.leases"].update_one({"_id": "schedule"}, {"$set": {"until": at(2020, 1, 1)}})
            database["treadle.leases"].update_one({"_id": "schedule"}, {"$inc": {"n": 1}})
        yield from real(collection, stages)

    monkeypatch.setattr(merging, "perform", sleepy)
    assert [] == store.run_due(now=NOON)
    assert None is database["treadle.schedules"].find_one({"position": {"$exists": True}})
    database.sales.delete_one({"product_id": 2})
    assert 1 == len(store.run_due(now=NOON))
    assert {(1, 1): (1, 1)} == summaries(database)
    assert [] == store.verify()


def test_an_error_is_told_recorded_and_tried_again(run, database):
    """The index is gone: the other jobs are done, and this one is due until it succeeds."""
    store = run.store([Sale, Product, DailySales, CategoryStats])
    store.setup()
    database.daily_summaries.drop_index("product_id_1_day_1")
    database.sales.insert_one(raw(1, "1", 2026, 3, 1))
    outcomes = {each.name: each.error for each in store.run_due(now=NOON)}
    assert outcomes["CategoryStats"] is None
    assert "run setup() first" in outcomes["DailySales"]
    row = database["treadle.schedules"].find_one({"_id": "DailySales"})
    assert "run setup() first" in row["outcome"]
    store.setup()
    (ran,) = store.run_due(now=NOON + dt.timedelta(seconds=1))
    assert (None, 1) == (ran.error, ran.written)


def test_a_document_that_cannot_be_written_does_not_stop_the_others(store, database):
    database.sales.insert_many([raw(n, "1", 2026, 3, 1) for n in range(4)])
    store.run_due(now=NOON)
    database.command({"collMod": "daily_summaries", "validator": {"order_count": {"$lt": 3}}})
    database.sales.insert_many([raw(2, "1", 2026, 3, 1), raw(2, "1", 2026, 3, 1), raw(3, "1", 2026, 3, 1)])
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert ran.error is None
    assert ((1, 1), (2, 2)) == (summaries(database)[2, 1], summaries(database)[3, 1])
    assert 1 == database["treadle.set_aside"].count_documents({})


def test_a_dry_run_says_what_is_due_and_does_nothing(store, database):
    database.sales.insert_one(raw(1, "1", 2026, 3, 1))
    (due,) = store.run_due(now=NOON, dry_run=True)
    assert ("DailySales", 0) == (due.name, due.written)
    assert ("DailySales.total_amount" in due.rules, {}) == (True, summaries(database))
    assert 1 == len(store.run_due(now=NOON))


def test_the_clock_is_the_servers(store, database, monkeypatch):
    """A client whose clock is wrong by an hour neither closes windows early nor runs too often."""
    now = database.client.admin.command("hello")["localTime"].replace(tzinfo=UTC)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    database.sales.insert_many(
        [raw(1, "1", now.year - 1, 1, 1), {**raw(2, "1", 2020, 1, 1), "created_at": now}]
    )
    assert 1 == len(store.run_due())
    assert [1] == [each["product_id"] for each in database.daily_summaries.find()]
    assert [] == store.run_due()


def test_now_must_be_a_date(store):
    with pytest.raises(UsageError) as raised:
        store.run_due(now="noon")
    assert "now-invalid" == raised.value.code


def test_the_status_shows_the_last_run(store, database):
    store.run_due(now=NOON)
    (rule,) = (each for each in store.status().rules if each.rule == "DailySales.order_count")
    assert ("schedule", 3600.0) == (rule.maintain, rule.every_seconds)
    assert rule.last_run is not None
    assert rule.last_seconds is not None


# -- kill -9 -----------------------------------------------------------------------------------------------------

RUNNER = f"""
import sys
from pymongo import MongoClient
from {__name__} import DailySales, Sale, NOON
from treadle import Store
store = Store(MongoClient(sys.argv[1])[sys.argv[2]], [Sale, DailySales])
print("ready", flush=True)
print(len(store.run_due(now=NOON)), flush=True)
"""


@pytest.mark.parametrize("models", [[Sale, DailySales], [Customer, Review, Item]], ids=["groups", "fields"])
def test_a_command_of_a_run_that_was_replaced_writes_nothing(database, models):
    """Sent before its client was killed, and begun by the server when another run had the lease."""
    store = Store(database, models)
    store.setup()
    database.sales.insert_many([raw(1, "1", 2026, 3, 1), raw(2, "1", 2026, 3, 1)])
    database["items"].insert_one({"_id": 1, "label": "", "count": 0})
    database.reviews.insert_one({"item_id": 1, "rating": 5})
    real = store.runner._perform
    merged = []

    def perform(command: Any, session: Any) -> Any:
        if "$merge" in repr(command):
            merged.append(command)
            database["treadle.leases"].update_one({"_id": "schedule"}, {"$inc": {"n": 1}})
        return real(command, session)

    store.runner._perform = perform  # type: ignore[method-assign]
    assert not [each for each in store.run_due(now=NOON) if each.model in ("DailySales", "Item")]
    assert merged
    assert [0] == [each["count"] for each in database["items"].find()]
    assert [] == list(database.daily_summaries.find())


@pytest.mark.heavy
def test_a_killed_run_is_done_again(server, database):
    """Killed at many moments; whoever comes next finishes at once, and nothing is wrong."""
    store = Store(database, [Sale, DailySales])
    store.setup()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    sales = [raw(n % 40, "1", 2026, 3, 1 + n % 4) for n in range(20_000)]
    database.sales.insert_many(sales)
    for number in range(6):
        command = [sys.executable, "-c", RUNNER, server.uri, database.name]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env=environment, cwd=Path(__file__).parents[2]
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.02 * (number + 1))
            process.send_signal(signal.SIGKILL)
            process.wait()
        database.sales.delete_many({"product_id": number})
        # An hour later: it may have been done before it was killed.
        store.run_due(now=NOON + HOURLY)
        assert [] == store.verify()
        assert 39 - number == len(summaries(database))
        database["treadle.schedules"].delete_many({})


# -- a server without change streams --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Generator[LocalServer]:
    with start(replica_set=False) as running:
        yield running


def test_on_a_standalone_server_everything_is_computed_each_time(alone):
    with MongoClient[Any](alone.uri) as client:
        database = client[f"schedule_{uuid.uuid4().hex[:8]}"]
        store = Store(database, [Sale, DailySales, Product, PerCategory])
        store.setup()
        database.sales.insert_many([raw(n % 3, "1", 2026, 3, 1 + n % 4) for n in range(24)])
        database.products.insert_one({"price": Decimal128("1"), "stock": 1})
        store.run_due(now=NOON)
        assert [] == store.verify()
        database.sales.delete_many({"product_id": 1})
        ran = store.run_due(now=NOON + HOURLY)
        assert {True} == {each.whole for each in ran}
        assert {0, 2} == {key[0] for key in summaries(database)}
        assert [] == store.verify()
