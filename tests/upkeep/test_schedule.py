"""Scheduled maintenance: whole closed windows, late data, emptied groups."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128

from tests.upkeep.daily_sales import (
    HOURLY,
    NOON,
    CategoryStats,
    Customer,
    DailySales,
    Item,
    PerCategory,
    Product,
    Review,
    Sale,
    at,
    raw,
    summaries,
)
from treadle import Count, Day, Document, ExtendedReference, Month, Rollup, Store, Sum

# -- windows -----------------------------------------------------------------------------------------


@pytest.mark.quick
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


def test_the_windows_of_the_newest_sources_are_guessed_and_all_others_still_found(heard, constants):
    """One stream is opened instead of two; what the guess misses, or what is no insert, the stream tells."""
    database, listener = heard
    constants(schedule_events_first=10)
    store = Store(database, [Sale, DailySales])
    store.setup()
    kept = database.sales.insert_many([raw(n % 2, "1", 2026, 2, 1 + n % 9) for n in range(36)]).inserted_ids
    store.run_due(now=NOON)
    # The ids of another window are older, as those of a client whose clock is behind.
    database.sales.insert_many(
        [{"_id": ObjectId(bytes([n]) * 12), **raw(0, "7", 2026, 2, 6)} for n in range(3)]
    )
    later = int(kept[-1].generation_time.timestamp()) + 60
    made = [ObjectId(later.to_bytes(4, "big") + bytes([n]) * 8) for n in range(12)]
    database.sales.insert_many([{"_id": key, **raw(0, "5", 2026, 2, 2)} for key in made])
    # Into the window that is passed over.
    database.sales.delete_one({"_id": kept[10]})
    database.sales.update_one({"_id": kept[19]}, {"$set": {"amount": Decimal128("50")}})
    database.sales.update_one({"_id": kept[2]}, {"$set": {"created_at": at(2026, 2, 12)}})
    listener.clear()
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert not ran.whole
    opened = [body for name, body in listener.commands if name == "aggregate" and body["aggregate"] == 1]
    assert 1 == len(opened)
    assert [] == store.verify()
    days = {each["day"].day for each in database.daily_summaries.find({"_treadle.n": {"$gt": 1}})}
    assert {2, 3, 6} == days


def test_ids_of_a_clock_that_is_far_ahead_reopen_their_window_once(store, database):
    database.sales.insert_one(raw(0, "1", 2026, 3, 1))
    store.run_due(now=NOON)
    key = ObjectId.from_datetime(at(2099, 1, 1))
    database.sales.insert_one({"_id": key, **raw(0, "2", 2026, 3, 2)})
    assert [1] == [ran.written for ran in store.run_due(now=NOON + HOURLY)]
    assert [0] == [ran.written for ran in store.run_due(now=NOON + 2 * HOURLY)]
    assert {(0, 1): (1, 1), (0, 2): (1, 2)} == summaries(database)


@pytest.mark.parametrize("passed", [1, 2, 40])
def test_inserts_into_windows_that_are_known_are_passed_over(heard, passed, constants):
    """But nothing else: not the next instant, not what is changed or deleted, and no other window."""
    database, listener = heard
    constants(schedule_events_first=4, schedule_windows_passed=passed)
    store = Store(database, [Sale, DailySales])
    store.setup()
    kept = database.sales.insert_many([raw(n % 2, "1", 2026, 2, 1 + n % 9) for n in range(36)]).inserted_ids
    store.run_due(now=NOON)
    for day in range(1, 6):
        database.sales.insert_many([raw(0, "5", 2026, 2, day) for _ in range(6)])
    edge = dt.timedelta(milliseconds=1)
    dates = [at(2026, 2, 6), at(2026, 2, 6) - edge, at(2026, 2, 7), at(2026, 2, 8) - edge]
    database.sales.insert_many([{**raw(3, "1", 2026, 2, 1), "created_at": date} for date in dates])
    with database.client.start_session() as session, session.start_transaction():
        database.sales.insert_many([raw(4, "2", 2026, 2, 1 + n % 2) for n in range(8)], session=session)
        database.sales.delete_one({"_id": kept[8]}, session=session)
        database.sales.update_one(
            {"_id": kept[0]}, {"$set": {"created_at": at(2026, 2, 12)}}, session=session
        )
    database.sales.insert_one({**raw(5, "1", 2026, 2, 1), "created_at": None})
    listener.clear()
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert not ran.whole
    opened = [body for name, body in listener.commands if name == "aggregate" and body["aggregate"] == 1]
    # Windows that the newest ids already name need no second stream.
    assert 1 <= len(opened) <= passed + 1
    assert [] == store.verify()
    found = summaries(database)
    assert ((8, 32), (1, 1), (2, 2), (1, 1)) == (found[0, 2], found[3, 5], found[3, 7], found[0, 12])


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


# -- other shapes ------------------------------------------------------------------------------------


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


# -- fields of other models --------------------------------------------------------------------------


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


class Like(Document, collection="likes"):
    page_id: int


class Share(Document, collection="shares"):
    page_id: int


class Page(Document, collection="pages"):
    id: int
    likes: Annotated[int, Count(Like, by="page_id", maintain="schedule", every=HOURLY)] = 0
    shares: Annotated[int, Count(Share, by="page_id", maintain="schedule", every=HOURLY)] = 0


def test_fields_from_two_collections_with_references_of_one_name_are_kept_apart(run, database):
    store = run.store([Like, Share, Page])
    store.setup()
    store.insert(Page(id=1))
    database.likes.insert_many([{"page_id": 1} for _ in range(3)])
    database.shares.insert_many([{"page_id": 1} for _ in range(2)])
    store.run_due(now=NOON)
    page = store.get(Page, 1)
    assert (3, 2) == (page.likes, page.shares)
    assert [] == store.verify()
