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
