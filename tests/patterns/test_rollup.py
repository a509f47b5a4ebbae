"""Rollup: one document per group, there as long as the group is, and right after every write."""

from __future__ import annotations

import datetime as dt
import enum
import random
import threading
import uuid
from collections.abc import Callable, Generator
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import BaseModel, Field
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from treadle import (
    Average,
    Count,
    Day,
    DeclarationError,
    Document,
    ExtendedReference,
    Formula,
    Hour,
    Id,
    Max,
    Min,
    Month,
    Rollup,
    Store,
    Sum,
    UsageError,
    Week,
)
from treadle.server.local import LocalServer, start

UTC = dt.UTC
WRITERS = 8


def at(*parts: int) -> dt.datetime:
    return dt.datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type]


class Sale(Document, collection="sales"):
    product_id: int
    amount: Decimal
    created_at: dt.datetime | None = None
    shop: str | None = None
    refunded: bool = False


class DailySales(
    Document,
    collection="daily_summaries",
    rollup=Rollup(Sale, keys={"product_id": "product_id", "day": Day("created_at", timezone="UTC")}),
):
    product_id: int
    day: dt.datetime
    total_amount: Annotated[Decimal, Sum("amount")]
    order_count: Annotated[int, Count()]
    average_order_value: Annotated[Decimal | None, Average("amount")]


def sale(product: int, amount: str, *moment: int, **more: Any) -> Sale:
    return Sale(product_id=product, amount=Decimal(amount), created_at=at(*moment), **more)


def rows(database: Any, name: str, *drop: str) -> list[dict[str, Any]]:
    """The stored documents without ids and Treadle's state, in some fixed order."""
    found = []
    for document in database[name].find():
        for key in ("_treadle", *drop):
            document.pop(key, None)
        found.append(document)
    order = ("product_id", "day", "zone", "date", "shelf_id", "month", "_id")
    return sorted(found, key=lambda each: repr([each.get(name) for name in order]))


# -- the literature's examples, in its shapes ------------------------------------------------------


def test_sales_per_product_and_day(run, database):
    store = run.store([Sale, DailySales])
    store.setup()
    store.insert_many([sale(1, "10.10", 2026, 3, 1, 9), sale(1, "5.00", 2026, 3, 1, 23, 59)])
    store.insert_many([sale(1, "1", 2026, 3, 2), sale(2, "2", 2026, 3, 1)])
    assert [
        {
            "product_id": 1,
            "day": dt.datetime(2026, 3, 1),
            "total_amount": Decimal128("15.10"),
            "order_count": 2,
            "average_order_value": Decimal128("7.55"),
        },
        {
            "product_id": 1,
            "day": dt.datetime(2026, 3, 2),
            "total_amount": Decimal128("1"),
            "order_count": 1,
            "average_order_value": Decimal128("1"),
        },
        {
            "product_id": 2,
            "day": dt.datetime(2026, 3, 1),
            "total_amount": Decimal128("2"),
            "order_count": 1,
            "average_order_value": Decimal128("2"),
        },
    ] == rows(database, "daily_summaries", "_id")
    found = store.find_one(DailySales, {"product_id": 2})
    assert (2, at(2026, 3, 1), Decimal(2), 1) == (
        found.product_id,
        found.day,
        found.total_amount,
        found.order_count,
    )
    assert [] == store.verify()


class HourlySummary(
    Document, collection="hourly_summaries", rollup=Rollup("Sale", keys={"hour": Hour("created_at")})
):
    hour: dt.datetime
    total: Annotated[Decimal, Sum("amount")] = Decimal(0)
    count: Annotated[int, Count()] = 0
    largest: Annotated[Decimal | None, Max("amount")] = None
    smallest: Annotated[Decimal | None, Min("amount")] = None


def test_hourly_summaries(run, database):
    """A full hour stays a full hour, whenever its documents come."""
    store = run.store([Sale, HourlySummary])
    store.setup()
    store.insert_many([sale(1, "1", 2026, 3, 1, 9, minute) for minute in range(60)])
    store.insert(sale(1, "7", 2026, 3, 1, 10))
    store.insert(sale(1, "3", 2026, 3, 1, 9, 30))
    first, second = sorted(store.find(HourlySummary).to_list(), key=lambda each: each.hour)
    assert (at(2026, 3, 1, 9), 61, Decimal(63), Decimal(3), Decimal(1)) == (
        first.hour,
        first.count,
        first.total,
        first.largest,
        first.smallest,
    )
    assert (at(2026, 3, 1, 10), 1) == (second.hour, second.count)
    # The largest leaves its hour.
    store.update(Sale, {"amount": Decimal(3)}, {"$set": {"created_at": at(2026, 3, 1, 10, 59)}})
    by_hour = {each.hour.hour: each for each in store.find(HourlySummary)}
    assert (60, Decimal(1), 2, Decimal(7), Decimal(3)) == (
        by_hour[9].count,
        by_hour[9].largest,
        by_hour[10].count,
        by_hour[10].largest,
        by_hour[10].smallest,
    )
    assert [] == store.verify()


class Inventory(BaseModel):
    stock: int


class Product(Document, collection="products"):
    name: str
    category: str
    price: Decimal
    inventory: Inventory


class CategoryStats(Document, collection="category_stats", rollup=Rollup(Product, keys={"id": "category"})):
    id: str
    product_count: Annotated[int, Count()] = 0
    average_price: Annotated[Decimal | None, Average("price")] = None
    total_stock: Annotated[int, Sum("inventory.stock")] = 0
    inventory_value: Annotated[Decimal, Sum({"$multiply": ["$price", "$inventory.stock"]})] = Decimal(0)
    stock_per_product: Annotated[float | None, Formula({"$divide": ["$total_stock", "$product_count"]})] = (
        None
    )


def test_category_statistics(run, database):
    """The inventory value is the sum over products of price times stock."""
    store = run.store([Product, CategoryStats])
    store.setup()
    store.insert_many(
        [
            Product(name="a", category="books", price=Decimal(10), inventory=Inventory(stock=100)),
            Product(name="b", category="books", price=Decimal(100), inventory=Inventory(stock=1)),
            Product(name="c", category="toys", price=Decimal(5), inventory=Inventory(stock=2)),
        ]
    )
    books = store.get(CategoryStats, "books")
    assert Decimal(1100) == books.inventory_value, "average price times total stock would be 5555"
    assert (2, 101, Decimal(55), 50.5) == (
        books.product_count,
        books.total_stock,
        books.average_price,
        books.stock_per_product,
    )
    store.update(Product, {"name": "a"}, {"$inc": {"inventory.stock": -1}})
    assert Decimal(1090) == store.get(CategoryStats, "books").inventory_value
    store.update(Product, {"name": "c"}, {"$set": {"category": "books"}})
    assert store.get(CategoryStats, "toys") is None
    assert Decimal(1100) == store.get(CategoryStats, "books").inventory_value
    assert {"_id", "product_count", "average_price", "total_stock", "inventory_value",
            "stock_per_product", "_treadle"} == set(database.category_stats.find_one())  # fmt: skip
    assert [] == store.verify()


class Meter(BaseModel):
    kw: float


class Usage(Document, collection="usage"):
    zone: str
    at: dt.datetime
    meter: Meter


class PerDay(BaseModel):
    consumption: Annotated[float, Sum("meter.kw")] = 0.0
    readings: Annotated[int, Count()] = 0
    peak: Annotated[float | None, Max("meter.kw")] = None


class ZoneDay(
    Document,
    collection="zone_days",
    rollup=Rollup(Usage, keys={"zone": "zone", "date": Day("at", timezone="America/New_York")}),
):
    zone: str
    date: dt.datetime
    kw_per_day: PerDay = Field(PerDay(), alias="kW per day")


def test_kilowatts_per_zone_and_day(run, database):
    store = run.store([Usage, ZoneDay])
    store.setup()
    # On the clocks of New York both are on the first of July.
    early, late = at(2026, 7, 1, 4), at(2026, 7, 2, 3, 59)
    for moment, kilowatts in ((early, 1.5), (late, 2.5), (at(2026, 7, 2, 4), 8.0)):
        store.insert(Usage(zone="north", at=moment, meter=Meter(kw=kilowatts)))
    assert [
        {
            "zone": "north",
            "date": dt.datetime(2026, 7, 1, 4),
            "kW per day": {"consumption": 4.0, "readings": 2, "peak": 2.5},
        },
        {
            "zone": "north",
            "date": dt.datetime(2026, 7, 2, 4),
            "kW per day": {"consumption": 8.0, "readings": 1, "peak": 8.0},
        },
    ] == rows(database, "zone_days", "_id")
    store.delete(Usage, {"at": late})
    assert 1.5 == store.find_one(ZoneDay, sort="date").kw_per_day.peak
    with pytest.raises(UsageError) as raised:
        store.update(ZoneDay, {"zone": "north"}, {"$set": {"kW per day.consumption": 5}})
    assert "field-maintained" == raised.value.code
    assert [] == store.verify()


# -- groups come and go ------------------------------------------------------------------------------


def test_a_group_goes_with_its_last_source_and_comes_back(run, database):
    store = run.store([Sale, DailySales])
    store.setup()
    one = store.insert(sale(1, "1", 2026, 3, 1))
    two = store.insert(sale(1, "2", 2026, 3, 1))
    store.delete(Sale, one.id)
    assert 1 == store.find_one(DailySales, {}).order_count
    store.delete(Sale, two.id)
    assert 0 == store.count(DailySales)
    store.insert(sale(1, "4", 2026, 3, 1))
    assert Decimal(4) == store.find_one(DailySales, {}).total_amount
    store.delete_many(Sale, {})
    assert [] == rows(database, "daily_summaries")
    assert [] == store.verify()


def test_a_source_moves_between_groups(run):
    store = run.store([Sale, DailySales])
    store.setup()
    moved = store.insert(sale(1, "1", 2026, 3, 1))
    store.insert(sale(2, "5", 2026, 3, 1))
    store.update(Sale, moved.id, {"$set": {"product_id": 2}})
    (only,) = store.find(DailySales).to_list()
    assert (2, 2, Decimal(6)) == (only.product_id, only.order_count, only.total_amount)
    moved.product_id, moved.created_at = 2, at(2026, 3, 2)
    store.replace(moved)
    assert {1: Decimal(5), 2: Decimal(1)} == {
        each.day.day: each.total_amount for each in store.find(DailySales)
    }
    store.update_many(Sale, {}, {"$set": {"created_at": at(2026, 3, 9)}})
    (only,) = store.find(DailySales).to_list()
    assert (9, 2) == (only.day.day, only.order_count)
    assert [] == store.verify()


def test_an_update_of_what_no_group_is_made_of_costs_one_command(run, heard):
    """`shop` is neither a key nor summed."""
    database, listener = heard
    store = Store(database, [Sale, DailySales])
    store.setup()
    made = store.insert(sale(1, "1", 2026, 3, 1))
    listener.clear()
    store.update(Sale, made.id, {"$set": {"shop": "north"}})
    assert ["findAndModify"] == listener.names


class PerShop(
    Document,
    collection="per_shop",
    rollup=Rollup(Sale, keys={"shop": "shop"}, where={"refunded": False}),
):
    shop: str
    count: Annotated[int, Count()] = 0
    big: Annotated[int, Count(where={"amount": {"$gte": Decimal(10)}})] = 0
    total: Annotated[Decimal, Sum("amount")] = Decimal(0)


class PerAnyShop(Document, collection="per_any_shop", rollup=Rollup(Sale, keys={"shop": "shop"})):
    shop: str | None
    count: Annotated[int, Count()] = 0


class PerShopAndMonth(
    Document,
    collection="per_shop_and_month",
    rollup=Rollup(Sale, keys={"shop": "shop", "month": Month("created_at")}),
):
    shop: str | None = None
    month: dt.datetime | None = None
    count: Annotated[int, Count()] = 0


def test_a_source_without_a_key_belongs_to_a_group_only_if_the_key_may_be_none(run, database):
    store = run.store([Sale, PerShop, PerAnyShop, PerShopAndMonth])
    store.setup()
    store.insert_many([sale(1, "1", 2026, 3, 1), sale(1, "1", 2026, 3, 2, shop="a")])
    database.sales.insert_one({"product_id": 1, "amount": Decimal128("1"), "refunded": False})
    store.insert(Sale(product_id=1, amount=Decimal(1), created_at=None))
    assert ["a"] == [each.shop for each in store.find(PerShop)]
    assert {None: 3, "a": 1} == {each.shop: each.count for each in store.find(PerAnyShop)} | {
        None: 2 + store.repair(PerAnyShop)
    }
    store.repair()
    assert {("a", 3): 1, (None, 3): 1, (None, None): 2} == {
        (each.shop, each.month and each.month.month): each.count for each in store.find(PerShopAndMonth)
    }
    assert [] == store.verify()
    store.update_many(Sale, {}, {"$set": {"shop": "b", "created_at": at(2026, 5, 5)}})
    assert [("b", 4)] == [(each.shop, each.count) for each in store.find(PerAnyShop)]
    assert 1 == store.count(PerShopAndMonth)
    assert [] == store.verify()


def test_conditions_decide_who_belongs_and_who_is_counted(run):
    store = run.store([Sale, PerShop])
    store.setup()
    store.insert_many(
        [
            sale(1, "10", 2026, 3, 1, shop="a"),
            sale(1, "1", 2026, 3, 1, shop="a"),
            sale(1, "99", 2026, 3, 1, shop="a", refunded=True),
            sale(1, "99", 2026, 3, 1, shop="b", refunded=True),
        ]
    )
    assert [("a", 2, 1, Decimal(11))] == [
        (each.shop, each.count, each.big, each.total) for each in store.find(PerShop)
    ]
    store.update_many(Sale, {"refunded": True}, {"$set": {"refunded": False}})
    assert {"a": (3, 2, Decimal(110)), "b": (1, 1, Decimal(99))} == {
        each.shop: (each.count, each.big, each.total) for each in store.find(PerShop)
    }
    store.update_many(Sale, {"shop": "a"}, {"$set": {"refunded": True}})
    assert ["b"] == [each.shop for each in store.find(PerShop)]
    assert [] == store.verify()


def test_odd_dates_belong_to_no_window_and_harm_nobody(run, database):
    """What other writers put into a date: text, numbers, arrays, and dates at the ends of time."""
    store = run.store([Usage, ZoneDay])
    store.setup()
    for odd in ("yesterday", 5, None, [at(2026, 1, 1)], at(1, 1, 1), at(9999, 12, 31, 23)):
        raw = {"zone": "odd", "at": odd, "meter": {"kw": 1.0}}
        database.usage.insert_one(raw, bypass_document_validation=True)
    store.insert(Usage(zone="north", at=at(2026, 1, 1, 12), meter=Meter(kw=1)))
    assert [] == store.verify(ZoneDay)
    store.rebuild()
    assert ["north"] == [each.zone for each in store.find(ZoneDay)]


# -- windows --------------------------------------------------------------------------------------------


class Event(Document, collection="events"):
    at: dt.datetime


def windows_of(unit: type, zone: str) -> type[Document]:
    class Windows(
        Document, collection="windows", rollup=Rollup(Event, keys={"start": unit("at", timezone=zone)})
    ):
        start: dt.datetime
        count: Annotated[int, Count()] = 0

    return Windows


def starts(store: Any, model: Any) -> dict[dt.datetime, int]:
    return {each.start: each.count for each in store.find(model)}


def every_half_hour(first: dt.datetime, last: dt.datetime) -> list[Event]:
    count = int((last - first) / dt.timedelta(minutes=30))
    return [Event(at=first + dt.timedelta(minutes=30 * number)) for number in range(count)]


def test_daylight_saving_makes_days_of_23_and_25_hours(database):
    model = windows_of(Day, "Europe/Berlin")
    store = Store(database, [Event, model])
    store.setup()
    store.insert_many(every_half_hour(at(2026, 3, 27, 23), at(2026, 3, 30, 22)))
    assert {at(2026, 3, 27, 23): 48, at(2026, 3, 28, 23): 46, at(2026, 3, 29, 22): 48} == starts(store, model)
    store.delete_many(Event, {})
    store.insert_many(every_half_hour(at(2026, 10, 23, 22), at(2026, 10, 26, 23)))
    assert {at(2026, 10, 23, 22): 48, at(2026, 10, 24, 22): 50, at(2026, 10, 25, 23): 48} == starts(
        store, model
    )
    assert [] == store.verify()


def test_an_hour_that_is_lived_twice_is_two_windows(database):
    model = windows_of(Hour, "Europe/Berlin")
    store = Store(database, [Event, model])
    store.setup()
    # 02:00 to 03:00 in summer time, then 02:00 to 03:00 in winter time.
    store.insert_many(every_half_hour(at(2026, 10, 25, 0), at(2026, 10, 25, 2)))
    assert {at(2026, 10, 25, 0): 2, at(2026, 10, 25, 1): 2} == starts(store, model)
    assert [] == store.verify()


def test_weeks_begin_on_monday(run):
    model = windows_of(Week, "UTC")
    store = run.store([Event, model])
    store.setup()
    store.insert_many([Event(at=at(2026, 3, 1, 23)), Event(at=at(2026, 3, 2)), Event(at=at(1969, 12, 31))])
    assert {at(2026, 2, 23): 1, at(2026, 3, 2): 1, at(1969, 12, 29): 1} == starts(store, model)
    assert [] == store.verify()


class DayById(Document, collection="days", rollup=Rollup(Event, keys={"id": Day("at")})):
    id: dt.datetime
    count: Annotated[int, Count()] = 0


class MonthByDate(Document, collection="months", rollup=Rollup(Event, keys={"month": Month("at")})):
    month: dt.date
    count: Annotated[int, Count()] = 0


def test_a_window_may_be_the_id_or_a_date(run):
    store = run.store([Event, DayById, MonthByDate])
    store.setup()
    store.insert_many([Event(at=at(2026, 3, 1, 5)), Event(at=at(2026, 3, 1, 9)), Event(at=at(2026, 4, 2))])
    assert 2 == store.get(DayById, at(2026, 3, 1)).count
    assert {dt.date(2026, 3, 1): 2, dt.date(2026, 4, 1): 1} == {
        each.month: each.count for each in store.find(MonthByDate)
    }
    store.delete_many(Event, {"at": {"$lt": at(2026, 4, 1)}})
    assert store.get(DayById, at(2026, 3, 1)) is None
    assert [] == store.verify()


# -- what callers may not do --------------------------------------------------------------------------------


def test_documents_of_a_rollup_are_treadles(run):
    store = run.store([Sale, DailySales])
    store.setup()
    store.insert(sale(1, "1", 2026, 3, 1))
    found = store.find_one(DailySales, {})
    attempts: list[Callable[[], Any]] = [
        lambda: store.insert(found),
        lambda: store.insert_many([found]),
        lambda: store.replace(found),
        lambda: store.delete(DailySales, found.id),
        lambda: store.delete_many(DailySales, {}),
    ]
    for attempt in attempts:
        with pytest.raises(UsageError, match="write the Sale documents instead") as raised:
            attempt()
        assert "rollup-maintained" == raised.value.code
    for path in ("day", "product_id", "total_amount", "_treadle.state.members"):
        with pytest.raises(UsageError) as raised:
            store.update(DailySales, found.id, {"$set": {path: 1}})
        assert "field-maintained" == raised.value.code, path
    assert found == store.find_one(DailySales, {})


class Noted(Document, collection="noted", rollup=Rollup(Sale, keys={"product_id": "product_id"})):
    product_id: int
    count: Annotated[int, Count()] = 0
    note: str = ""
    shouted: Annotated[str | None, Formula({"$toUpper": "$note"})] = None


def test_a_callers_own_fields_may_be_updated(run):
    store = run.store([Sale, Noted])
    store.setup()
    store.insert(sale(1, "1", 2026, 3, 1))
    updated = store.update(Noted, {"product_id": 1}, {"$set": {"note": "good"}})
    assert ("good", "GOOD") == (updated.note, updated.shouted)
    store.insert(sale(1, "1", 2026, 3, 1))
    found = store.find_one(Noted, {})
    assert ("good", 2) == (found.note, found.count)
    store.rebuild()
    assert "good" == store.find_one(Noted, {}).note


def test_without_its_unique_index_nothing_is_written(run, database):
    store = run.store([Sale, DailySales])
    with pytest.raises(UsageError, match=r"run setup\(\) first") as raised:
        store.insert(sale(1, "1", 2026, 3, 1))
    assert "rollup-index-missing" == raised.value.code
    assert [] == rows(database, "sales")
    with pytest.raises(UsageError):
        database.sales.insert_one({"product_id": 1, "amount": Decimal128("1"), "created_at": at(2026, 1, 1)})
        store.rebuild()
    store.setup()
    store.insert(sale(1, "1", 2026, 3, 1))
    assert 1 == len(rows(database, "daily_summaries"))


def test_set_up_makes_the_indexes(run, database):
    store = run.store([Sale, DailySales, Product, CategoryStats])
    store.setup()
    (index,) = (each for each in database.daily_summaries.index_information().values() if each.get("unique"))
    assert [("product_id", 1), ("day", 1)] == index["key"]
    assert [("product_id", 1), ("created_at", 1)] in [
        each["key"] for each in database.sales.index_information().values()
    ]
    assert {"_id_"} == set(database.category_stats.index_information()), "the id is unique already"


# -- proof and repair ---------------------------------------------------------------------------------------


def test_verify_finds_what_is_missing_orphaned_double_and_wrong(run, database):
    store = run.store([Sale, DailySales])
    store.setup()
    store.insert_many([sale(number, "1", 2026, 3, 1) for number in range(4)])
    summaries = database.daily_summaries
    summaries.delete_one({"product_id": 0})
    summaries.update_one({"product_id": 1}, {"$set": {"total_amount": Decimal128("7")}})
    database.sales.delete_one({"product_id": 2})
    summaries.drop_index("product_id_1_day_1")
    double = summaries.find_one({"product_id": 3})
    summaries.insert_one({**double, "_id": ObjectId()})
    key = {"product_id": 0, "day": at(2026, 3, 1)}
    found = {(each.path, each.document_id): each for each in store.verify()}
    assert 4 == len(found)
    assert {"rollup"} == {each.pattern for each in found.values()}
    missing = found["product_id, day", (0, at(2026, 3, 1))]
    assert (None, key) == (missing.stored, missing.expected)
    wrong = next(each for each in found.values() if each.path == "total_amount")
    assert (Decimal128("7"), Decimal128("1")) == (wrong.stored, wrong.expected)
    gone = [each for each in found.values() if each.expected is None]
    assert [2, 3] == sorted(each.stored["product_id"] for each in gone)
    summaries.delete_one({"_id": double["_id"]})
    store.setup()
    assert 3 == store.repair()
    assert [] == store.verify()
    assert {0: 1, 1: 1, 3: 1} == {each["product_id"]: each["order_count"] for each in summaries.find()}


def test_rebuild_makes_groups_of_old_data_and_removes_empty_ones(run, database):
    database.sales.insert_many(
        {"product_id": n % 7, "amount": Decimal128("1"), "created_at": at(2026, 1 + n % 3, 1)}
        for n in range(500)
    )
    store = run.store([Sale, DailySales])
    store.setup()
    store.rebuild()
    assert 21 == store.count(DailySales)
    assert [] == store.verify()
    database.sales.delete_many({"product_id": 3})
    store.rebuild()
    assert 18 == store.count(DailySales)
    assert [] == store.verify()


# -- chains ------------------------------------------------------------------------------------------------


class Shelf(Document, collection="shelves"):
    id: int
    name: str
    earned: Annotated[Decimal, Sum("ShelfDay", "earned", by="shelf_id")] = Decimal(0)


class Item(Document, collection="items"):
    shelf_id: int
    when: dt.datetime
    price: int
    sold: Annotated[int, Count("Purchase", by="item_id")] = 0
    earned: Annotated[int | None, Formula({"$multiply": ["$price", "$sold"]})] = None


class Purchase(Document, collection="purchases"):
    item_id: Id


class ShelfDay(
    Document, collection="shelf_days", rollup=Rollup(Item, keys={"shelf_id": "shelf_id", "day": Day("when")})
):
    shelf_id: int
    shelf: Annotated[str | None, ExtendedReference(Shelf, by="shelf_id", field="name")] = None
    day: dt.datetime
    earned: Annotated[Decimal, Sum("earned")] = Decimal(0)
    items: Annotated[int, Count()] = 0


class ShelfMonth(
    Document,
    collection="shelf_months",
    rollup=Rollup(ShelfDay, keys={"shelf_id": "shelf_id", "month": Month("day", timezone="Asia/Kolkata")}),
):
    shelf_id: int
    month: dt.datetime
    earned: Annotated[Decimal, Sum("earned")] = Decimal(0)
    days: Annotated[int, Count()] = 0
    best_day: Annotated[Decimal | None, Max("earned")] = None


class Earned(Document, collection="earned", rollup=Rollup(ShelfDay, keys={"id": "earned"})):
    """Its key is itself computed."""

    id: Decimal
    days: Annotated[int, Count()] = 0


CHAIN = [Shelf, Item, Purchase, ShelfDay, ShelfMonth, Earned]


def act_on_chain(store: Any) -> None:
    """Writes that reach every level, by every kind of write."""
    store.insert_many([Shelf(id=1, name="top"), Shelf(id=2, name="low")])
    items = [
        Item(shelf_id=1 + number % 2, when=at(2026, 1 + number % 2, 1 + number), price=number + 1)
        for number in range(6)
    ]
    store.insert_many(items)
    store.insert_many([Purchase(item_id=item.id) for item in items for _ in range(2)])
    store.update(Item, items[0].id, {"$set": {"price": 50}})
    store.update(Item, items[1].id, {"$set": {"shelf_id": 1}})
    store.update(Shelf, 1, {"$set": {"name": "upper"}})
    store.delete(Item, items[2].id)
    store.delete_many(Purchase, {"item_id": items[3].id})
    store.delete(Item, items[5].id)


def check_chain(store: Any, database: Any) -> None:
    shelves = {each["_id"]: each for each in database.shelves.find()}
    sold: dict[Any, int] = {}
    for each in database.purchases.find():
        sold[each["item_id"]] = sold.get(each["item_id"], 0) + 1
    days: dict[Any, list[int]] = {}
    for each in database["items"].find():
        days.setdefault((each["shelf_id"], each["when"]), []).append(each["price"] * sold.get(each["_id"], 0))
    assert {key: (sum(values), len(values)) for key, values in days.items()} == {
        (each["shelf_id"], each["day"]): (int(each["earned"].to_decimal()), each["items"])
        for each in database.shelf_days.find()
    }
    assert {shelves[each["shelf_id"]]["name"] == each["shelf"] for each in database.shelf_days.find()} <= {
        True
    }
    months: dict[Any, list[int]] = {}
    for (shelf, day), values in days.items():
        months.setdefault((shelf, day.month), []).append(sum(values))
    assert {key: (sum(values), len(values), max(values)) for key, values in months.items()} == {
        (each["shelf_id"], (each["month"] + dt.timedelta(hours=6)).month): (
            int(each["earned"].to_decimal()),
            each["days"],
            int(each["best_day"].to_decimal()),
        )
        for each in database.shelf_months.find()
    }
    earned: dict[int, int] = {}
    for values in days.values():
        earned[sum(values)] = earned.get(sum(values), 0) + 1
    assert earned == {int(each["_id"].to_decimal()): each["days"] for each in database.earned.find()}
    for shelf in shelves.values():
        total = sum(sum(values) for (key, _), values in days.items() if key == shelf["_id"])
        assert total == int(shelf["earned"].to_decimal())
    assert [] == store.verify()


def test_rollups_of_rollups_and_of_maintained_fields(run, database):
    store = run.store(CHAIN)
    store.setup()
    act_on_chain(store)
    check_chain(store, database)


def test_a_chain_is_rebuilt_from_nothing(run, database):
    store = run.store(CHAIN)
    store.setup()
    act_on_chain(store)
    before = {name: rows(database, name, "_id") for name in ("shelf_days", "shelf_months", "shelves")}
    for name in ("shelf_days", "shelf_months", "earned"):
        database[name].delete_many({})
    database.shelves.update_many({}, {"$set": {"earned": Decimal128("99")}})
    store.rebuild()
    assert before == {name: rows(database, name, "_id") for name in before}
    check_chain(store, database)


# -- odd types -------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Spot(BaseModel):
    row: int
    column: int


class Thing(Document, collection="things", naming="camel"):
    spot: Spot
    colour: Colour
    owner_key: uuid.UUID
    price_level: Decimal
    made_at: dt.datetime


class Where(BaseModel):
    spot: Spot
    made: dt.datetime


class ThingGroup(
    Document,
    collection="thing_groups",
    naming="camel",
    rollup=Rollup(
        Thing,
        keys={
            "where.spot": "spot",
            "where.made": Month("made_at"),
            "the_colour": "colour",
            "owner": "owner_key",
            "price_level": "price_level",
        },
    ),
):
    where: Where
    the_colour: Colour
    owner: uuid.UUID
    price_level: Decimal
    how_many: Annotated[int, Count()] = 0
    last_made: Annotated[dt.datetime | None, Max("made_at")] = None


def test_keys_of_odd_types_and_in_nested_models(run, database):
    store = run.store([Thing, ThingGroup])
    store.setup()
    owner = uuid.uuid4()

    def thing(row: int, price: str, colour: Colour = Colour.RED, month: int = 1) -> Thing:
        return Thing(
            spot=Spot(row=row, column=2),
            colour=colour,
            owner_key=owner,
            price_level=Decimal(price),
            made_at=at(2026, month, 3, 4, 5),
        )

    # 1.0 and 1.00 are the same number.
    store.insert_many([thing(1, "1.0"), thing(1, "1.00"), thing(1, "1.0", Colour.BLUE), thing(2, "1.0")])
    store.insert(thing(1, "1.000"))
    assert [1, 1, 3] == sorted(each.how_many for each in store.find(ThingGroup))
    found = store.find_one(ThingGroup, {"howMany": 3})
    assert (Spot(row=1, column=2), at(2026, 1, 1), Colour.RED, owner, at(2026, 1, 3, 4, 5)) == (
        found.where.spot,
        found.where.made,
        found.the_colour,
        found.owner,
        found.last_made,
    )
    assert {"_id", "where", "theColour", "owner", "priceLevel", "howMany", "lastMade", "_treadle"} == set(
        database.thing_groups.find_one()
    )
    store.update_many(Thing, {"spot.row": 1}, {"$set": {"spot.row": 2}})
    assert [1, 4] == sorted(each.how_many for each in store.find(ThingGroup))
    store.delete_many(Thing, {"colour": "blue"})
    assert [4] == [each.how_many for each in store.find(ThingGroup)]
    assert [] == store.verify()


def test_a_key_that_looks_like_an_expression_is_only_text(run):
    store = run.store([Product, CategoryStats])
    store.setup()
    for name in ("$name", "$$ROOT", ".", "a.b", ""):
        store.insert(Product(name="x", category=name, price=Decimal(1), inventory=Inventory(stock=1)))
    assert {"$name", "$$ROOT", ".", "a.b", ""} == {each.id for each in store.find(CategoryStats)}
    store.delete_many(Product, {"category": "$name"})
    assert 4 == store.count(CategoryStats)
    assert [] == store.verify()


# -- declarations -------------------------------------------------------------------------------------------


def refused(**keywords: Any) -> DeclarationError:
    """The error of a Store whose rollup is declared in a wrong way."""
    fields = {"__annotations__": {"product_id": int, "day": dt.datetime}, "__module__": __name__}
    fields["__annotations__"].update(keywords.pop("fields", {}))
    fields.update(keywords.pop("values", {}))
    declared = keywords.pop("rollup", None) or Rollup(
        keywords.pop("source", Sale), keys=keywords.pop("keys"), **keywords
    )
    with pytest.raises(DeclarationError) as raised:
        model = type(Document)("Wrong", (Document,), fields, collection="wrong", rollup=declared)
        Store.__new__(Store)
        from treadle.graph.graph import Graph

        Graph([Sale, DailySales, model])
    return raised.value


class Figures(BaseModel):
    count: Annotated[int, Count()] = 0
    unit: str


BOTH = {"product_id": "product_id", "day": Day("created_at")}


@pytest.mark.parametrize(
    ("code", "keywords"),
    [
        ("rollup-keys", {"keys": {}}),
        ("rollup-keys", {"keys": {"nothing": "product_id"}}),
        ("source-field-missing", {"keys": {"product_id": "produkt_id", "day": Day("created_at")}}),
        ("rollup-keys", {"keys": {"product_id": "shop", "day": Day("created_at")}}),
        ("rollup-keys", {"keys": {"product_id": "product_id", "day": Day("amount")}}),
        ("rollup-keys", {"keys": {"product_id": Day("created_at"), "day": Day("created_at")}}),
        ("rollup-keys", {"keys": {"product_id": "product_id", "day": Day("created_at", timezone="Mars/North")}}),
        ("rollup-keys", {"keys": {"product_id": "product_id", "day": 5}}),
        ("rollup-keys", {"keys": {**BOTH, "id": "shop"}}),
        ("rollup-keys", {"keys": BOTH, "fields": {"id": str}}),
        ("rollup-field", {"keys": BOTH, "fields": {"note": str}}),
        ("rollup-field", {"keys": BOTH, "fields": {"figures": Figures}}),
        ("rollup-keys", {"keys": {**BOTH, "on": Day("created_at", timezone="Asia/Tokyo")}, "fields": {"on": dt.date}}),
        ("rollup-source", {"keys": BOTH, "fields": {"n": Annotated[int, Count(DailySales)]}}),
        ("rollup-source", {"keys": BOTH, "fields": {"n": Annotated[int, Count(by="product_id")]}}),
        ("source-field-missing", {"keys": BOTH, "fields": {"n": Annotated[Decimal, Sum()]}}),
        ("source-field-missing", {"keys": BOTH, "fields": {"n": Annotated[Decimal, Sum("amuont")]}}),
        ("pattern-keyword", {"keys": BOTH, "maintain": "sometimes"}),
        ("pattern-keyword", {"keys": BOTH, "maintain": "schedule"}),
        ("pattern-keyword", {"keys": BOTH, "fields": {"n": Annotated[int, Count(maintain="stream")]}}),
        ("maintenance-cycle", {"source": "Wrong", "keys": {"product_id": "product_id"}}),
        ("source-unknown", {"source": "Slae", "keys": BOTH}),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_refused(code, keywords):
    assert code == refused(**keywords).code


def test_an_aggregate_without_a_source_belongs_into_a_rollup():
    class Lost(Document, collection="lost"):
        count: Annotated[int, Count()] = 0

    from treadle.graph.graph import Graph

    with pytest.raises(DeclarationError, match="only inside a rollup") as raised:
        Graph([Lost])
    assert "source-unknown" == raised.value.code


# -- many writers --------------------------------------------------------------------------------------------


def together(jobs: list[Callable[[], Any]]) -> None:
    """Run all at once; raises what one of them raised."""
    barrier = threading.Barrier(len(jobs))
    raised: list[BaseException] = []

    def perform(job: Callable[[], Any]) -> None:
        try:
            barrier.wait()
            job()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=perform, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if raised:
        raise raised[0]


def test_many_writers_who_open_a_day_make_one_document(server, database):
    """Each with a Store and a client of its own, so that nobody shares a transaction."""
    Store(database, [Sale, DailySales]).setup()
    clients = [MongoClient[Any](server.uri) for _ in range(WRITERS)]
    try:
        stores = [Store(client[database.name], [Sale, DailySales]) for client in clients]
        for day in range(1, 9):
            together([lambda s=store, d=day: s.insert(sale(1, "1.5", 2026, 3, d)) for store in stores])  # type: ignore[misc]
        found = list(database.daily_summaries.find())
        assert 8 == len(found)
        assert {(WRITERS, Decimal(12))} == {
            (each["order_count"], each["total_amount"].to_decimal()) for each in found
        }
        # The last leave while others come.
        ids = [each["_id"] for each in database.sales.find()]
        jobs: list[Callable[[], Any]] = []
        for number, store in enumerate(stores):
            mine = ids[number::WRITERS]
            jobs.append(lambda s=store, m=mine: [s.delete(Sale, each) for each in m])  # type: ignore[misc]
        together(jobs)
        assert 0 == database.daily_summaries.count_documents({})
        assert [] == stores[0].verify()
    finally:
        for client in clients:
            client.close()


def test_two_sessions_that_open_one_group_conflict(database):
    """The second could not know of the first one's document; it must not make another."""
    store = Store(database, [Sale, DailySales])
    store.setup()
    with store.database.client.start_session() as one, store.database.client.start_session() as two:
        one.start_transaction()
        two.start_transaction()
        store.insert(sale(1, "1", 2026, 3, 1), session=one)
        with pytest.raises(OperationFailure) as raised:
            store.insert(sale(1, "1", 2026, 3, 1), session=two)
        assert raised.value.has_error_label("TransientTransactionError")
        one.commit_transaction()
    assert 1 == store.count(DailySales)
    assert [] == store.verify()


def test_two_sessions_one_empties_a_group_that_the_other_joins(database):
    store = Store(database, [Sale, DailySales])
    store.setup()
    first = store.insert(sale(1, "1", 2026, 3, 1))
    with store.database.client.start_session() as one, store.database.client.start_session() as two:
        one.start_transaction()
        two.start_transaction()
        store.delete(Sale, first.id, session=one)
        with pytest.raises(OperationFailure) as raised:
            store.insert(sale(1, "2", 2026, 3, 1), session=two)
        assert raised.value.has_error_label("TransientTransactionError")
        one.commit_transaction()
    assert 0 == store.count(DailySales)
    store.insert(sale(1, "2", 2026, 3, 1))
    assert Decimal(2) == store.find_one(DailySales, {}).total_amount


def test_repair_and_writers_at_once(server, database):
    """Groups are mended while sources come and go; nothing is counted twice."""
    store = Store(database, [Sale, DailySales])
    store.setup()
    store.insert_many([sale(number % 3, "1", 2026, 3, 1 + number % 5) for number in range(60)])
    database.daily_summaries.delete_many({"product_id": 1})
    database.daily_summaries.update_many({"product_id": 2}, {"$set": {"order_count": 77}})
    clients = [MongoClient[Any](server.uri) for _ in range(3)]
    stores = [Store(client[database.name], [Sale, DailySales]) for client in clients]

    def write(number: int) -> None:
        chance = random.Random(number)
        for _ in range(25):
            made = stores[number].insert(sale(chance.randrange(3), "1", 2026, 3, chance.randrange(1, 6)))
            if chance.random() < 0.5:
                stores[number].delete(Sale, made.id)

    try:
        together([store.repair, *(lambda n=number: write(n) for number in range(3))])  # type: ignore[misc]
        store.repair()
        assert [] == store.verify()
    finally:
        for client in clients:
            client.close()


# -- a server without transactions -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Generator[LocalServer]:
    with start(replica_set=False) as running:
        yield running


@pytest.fixture
def plain(alone: LocalServer) -> Generator[Any]:
    with MongoClient[Any](alone.uri) as client:
        name = f"rollup_{uuid.uuid4().hex[:8]}"
        yield client[name]
        client.drop_database(name)


def test_without_transactions_groups_come_move_and_go(plain):
    store = Store(plain, [Sale, DailySales, HourlySummary, PerShop])
    store.setup()
    made = store.insert(sale(1, "1", 2026, 3, 1, shop="a"))
    store.insert_many([sale(1, "2", 2026, 3, 1, shop="a"), sale(2, "4", 2026, 3, 2, shop="b")])
    store.update(Sale, made.id, {"$set": {"product_id": 2, "created_at": at(2026, 3, 2, 5)}})
    assert {(1, 1): 1, (2, 2): 2} == {
        (each.product_id, each.day.day): each.order_count for each in store.find(DailySales)
    }
    store.update_many(Sale, {}, {"$set": {"created_at": at(2026, 4, 1)}})
    store.delete_many(Sale, {"product_id": 2})
    assert [(1, at(2026, 4, 1), 1)] == [
        (each.product_id, each.day, each.order_count) for each in store.find(DailySales)
    ]
    assert [] == store.verify()
    assert [] == list(plain["treadle.intents"].find())
    plain.daily_summaries.delete_many({})
    plain.hourly_summaries.update_many({}, {"$set": {"count": 9}})
    assert 2 == store.repair()
    assert [] == store.verify()


def test_without_transactions_chains_of_rollups_are_right(plain):
    store = Store(plain, CHAIN)
    store.setup()
    act_on_chain(store)
    check_chain(store, plain)
    assert [] == list(plain["treadle.intents"].find())


def test_without_transactions_many_writers_make_one_document(alone, plain):
    Store(plain, [Sale, DailySales]).setup()
    clients = [MongoClient[Any](alone.uri) for _ in range(4)]
    try:
        stores = [Store(client[plain.name], [Sale, DailySales]) for client in clients]
        for day in range(1, 4):
            together([lambda s=store, d=day: s.insert(sale(1, "1", 2026, 3, d)) for store in stores])  # type: ignore[misc]
        assert [4, 4, 4] == [each["order_count"] for each in plain.daily_summaries.find()]
        assert [] == stores[0].verify()
    finally:
        for client in clients:
            client.close()


# -- at random ---------------------------------------------------------------------------------------------------


class Wide(
    Document,
    collection="wide",
    rollup=Rollup(
        Sale, keys={"shop": "shop", "week": Week("created_at", timezone="America/Sao_Paulo")}, where={"refunded": False}
    ),
):  # fmt: skip
    shop: str | None
    week: dt.datetime
    count: Annotated[int, Count()] = 0
    total: Annotated[Decimal, Sum("amount")] = Decimal(0)
    mean: Annotated[Decimal | None, Average("amount")] = None
    least: Annotated[Decimal | None, Min("amount")] = None
    most: Annotated[Decimal | None, Max("amount")] = None
    dear: Annotated[int, Count(where={"amount": {"$gt": Decimal(5)}})] = 0


@pytest.mark.parametrize("seed", range(3))
def test_any_writes_leave_every_group_right(run, database, seed):
    store = run.store([Sale, DailySales, PerShop, PerAnyShop, HourlySummary, Wide])
    store.setup()
    chance = random.Random(seed)

    def one() -> Sale:
        moment = at(2026, 1, 1) + dt.timedelta(hours=chance.randrange(24 * 20))
        return Sale(
            product_id=chance.randrange(3),
            amount=Decimal(chance.randrange(1000)) / 100,
            created_at=chance.choice([moment, moment, moment, None]),
            shop=chance.choice(["a", "b", None]),
            refunded=chance.random() < 0.2,
        )

    updates: list[dict[str, Any]] = [
        {"$set": {"shop": None}},
        {"$set": {"created_at": at(2026, 1, 3, 5)}},
        {"$inc": {"amount": Decimal("0.25")}},
        {"$set": {"refunded": True}},
        {"$unset": {"created_at": ""}},
        {"$set": {"product_id": 2, "refunded": False}},
    ]
    for _ in range(25):
        which = {"product_id": chance.randrange(3)}
        action = chance.randrange(6)
        if action <= 1:
            store.insert_many([one() for _ in range(chance.randrange(1, 6))])
        elif action == 2:
            store.update(Sale, which, chance.choice(updates))
        elif action == 3:
            store.update_many(Sale, which, chance.choice(updates))
        elif action == 4:
            store.delete(Sale, which)
        elif chance.random() < 0.4:
            store.delete_many(Sale, {**which, "shop": chance.choice(["a", None])})
    assert [] == store.verify()
    groups: dict[Any, list[Decimal]] = {}
    for each in database.sales.find():
        if each.get("created_at") is not None:
            key = each["product_id"], each["created_at"].replace(hour=0)
            groups.setdefault(key, []).append(each["amount"].to_decimal())
    assert {key: (len(values), sum(values)) for key, values in groups.items()} == {
        (each["product_id"], each["day"]): (each["order_count"], each["total_amount"].to_decimal())
        for each in database.daily_summaries.find()
    }
