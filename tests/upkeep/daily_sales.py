"""Daily sales, computed every hour."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Annotated, Any

from bson.decimal128 import Decimal128
from pydantic import BaseModel

from treadle import Average, Count, Day, Document, ExtendedReference, Formula, Max, Rollup, Subset, Sum

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
