"""Rollup: one document per group, there as long as the group has a source."""

from __future__ import annotations

import datetime as dt
import enum
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import BaseModel, Field

from tests.patterns.sales import (
    CHAIN,
    CategoryStats,
    DailySales,
    Earned,
    Inventory,
    Item,
    PerAnyShop,
    PerShop,
    Product,
    Purchase,
    Sale,
    Shelf,
    ShelfDay,
    ShelfMonth,
    at,
    rows,
    sale,
)
from treadle import (
    Count,
    Day,
    Document,
    Formula,
    Max,
    Month,
    Rollup,
    Store,
    Sum,
    UsageError,
)

# -- the literature's examples, in its shapes --------------------------------------------------------


@pytest.mark.quick
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


def test_an_update_of_what_no_group_is_made_of_costs_one_command(run, heard):
    """`shop` is neither a key nor summed."""
    database, listener = heard
    store = Store(database, [Sale, DailySales])
    store.setup()
    made = store.insert(sale(1, "1", 2026, 3, 1))
    listener.clear()
    store.update(Sale, made.id, {"$set": {"shop": "north"}})
    assert ["findAndModify"] == listener.names


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


# -- windows -----------------------------------------------------------------------------------------


class Event(Document, collection="events"):
    at: dt.datetime


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


# -- odd types ---------------------------------------------------------------------------------------


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


# -- proof and repair --------------------------------------------------------------------------------


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


# -- chains ------------------------------------------------------------------------------------------


def test_rollups_of_rollups_and_of_maintained_fields(run):
    """Writes that reach every level, by every kind of write."""
    store = run.store(CHAIN)
    store.setup()
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
    assert {(1, 114), (2, 0)} == {(each.id, each.earned) for each in store.find(Shelf)}
    assert {(1, "upper"), (2, "low")} == {(each.shelf_id, each.shelf) for each in store.find(ShelfDay)}
    assert {(1, 110, 2, 100), (1, 4, 1, 4), (2, 0, 1, 0)} == {
        (each.shelf_id, each.earned, each.days, each.best_day) for each in store.find(ShelfMonth)
    }
    assert {100: 1, 4: 1, 0: 1, 10: 1} == {int(each.id): each.days for each in store.find(Earned)}
    assert [] == store.verify()


# -- what callers may not do -------------------------------------------------------------------------


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
    with pytest.raises(UsageError, match=r"run setup\(\)") as raised:
        store.insert(sale(1, "1", 2026, 3, 1))
    assert "index-missing" == raised.value.code
    assert [] == rows(database, "sales")
    with pytest.raises(UsageError):
        database.sales.insert_one({"product_id": 1, "amount": Decimal128("1"), "created_at": at(2026, 1, 1)})
        store.rebuild()
    store.setup()
    store.insert(sale(1, "1", 2026, 3, 1))
    assert 1 == len(rows(database, "daily_summaries"))
