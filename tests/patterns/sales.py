"""Sales, and what is summed up of them per product and day."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel

from treadle import (
    Average,
    Count,
    Day,
    Document,
    ExtendedReference,
    Formula,
    Id,
    Max,
    Month,
    Rollup,
    Sum,
)

UTC = dt.UTC


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
