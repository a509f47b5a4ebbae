"""A database that is modelled well is left in peace; so is one that Treadle keeps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel

from tests.advisor import well_modelled, well_modelled_domains
from treadle import (
    AncestorArray,
    Average,
    Bucket,
    Count,
    Day,
    Document,
    ExtendedReference,
    Id,
    Outlier,
    Rollup,
    Store,
    Subset,
    Sum,
)
from treadle.advisor import Report, scan

START = datetime(2025, 1, 1, tzinfo=UTC)
FILLS = {**well_modelled.FILLS, **well_modelled_domains.FILLS}


def told(report: Report) -> list[tuple[str, str]]:
    assert () == report.failures
    return [(each.code, each.where) for each in report.findings]


@pytest.mark.parametrize("name", FILLS)
def test_a_well_modelled_database_is_left_in_peace(name: str, database: Any) -> None:
    FILLS[name](database)
    report = scan(database)
    assert [] == told(report)
    read = {facts.name for facts in report.scan.collections.values() if facts.kind != "GridFS"}
    assert read == {facts.name for facts in report.healthy}


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    date: datetime


class ReviewCard(BaseModel):
    rating: int
    date: datetime


class Product(Document, collection="products"):
    name: str
    price: Decimal
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    rating: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    recent_reviews: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-date", size=3)] = []


class ProductCard(BaseModel):
    name: str


class Sale(Document, collection="sales"):
    product_id: Id
    product: Annotated[ProductCard | None, ExtendedReference(Product, by="product_id")] = None
    amount: Decimal
    at: datetime


class DailySales(
    Document,
    collection="daily_sales",
    rollup=Rollup(Sale, keys={"product_id": "product_id", "day": Day("at", timezone="UTC")}),
):
    product_id: Id
    day: datetime
    total: Annotated[Decimal, Sum("amount")]
    mean: Annotated[Decimal | None, Average("amount")]


class Reading(
    Document,
    collection="readings",
    bucket=Bucket(key="sensor", time="ts", span=timedelta(hours=1), limit=200, stats=("value",)),
):
    sensor: str
    ts: datetime
    value: float


class Person(Document, collection="people"):
    name: str
    fans: Annotated[list[Id], Outlier(limit=50, overflow="fan_overflow", page_size=1_000)] = []
    has_overflow: bool = False


class Category(
    Document, collection="categories", tree=AncestorArray(parent="parent_id", ancestors="ancestors")
):
    name: str
    parent_id: Id | None = None
    ancestors: list[Id] = []


def test_what_treadle_keeps_is_left_in_peace(database: Any) -> None:
    """Its buckets, its overflow pages and its own state are no symptoms."""
    models = [Review, Product, Sale, DailySales, Reading, Person, Category]
    store = Store(database, models=models)
    store.setup()
    products = store.insert_many([Product(name=f"p{n}", price=Decimal(n)) for n in range(40)])
    store.insert_many(
        [
            Review(product_id=products[n % 40].id, rating=n % 5, date=START + timedelta(hours=n))
            for n in range(300)
        ]
    )
    store.insert_many(
        [
            Sale(product_id=products[n % 40].id, amount=Decimal(n), at=START + timedelta(hours=n))
            for n in range(300)
        ]
    )
    store.insert_many(
        [
            Reading(sensor=f"s{n % 4}", ts=START + timedelta(seconds=30 * (n // 4)), value=n / 7)
            for n in range(12_000)
        ]
    )
    people = store.insert_many([Person(name=f"n{n}") for n in range(120)])
    store.array(Person, "fans", people[7].id).extend([ObjectId() for _ in range(3_200)])
    nodes: list[Any] = []
    for n in range(60):
        above = nodes[(n - 1) // 2].id if n else None
        nodes.append(store.tree(Category).insert(Category(name=f"c{n}"), parent=above))
    report = scan(database)
    assert [] == told(report)
    # Ids of embedded items refer to nothing.
    assert not [each for each in report.scan.relations if each.path.startswith("recent_reviews")]
    assert {"readings", "fan_overflow", "daily_sales"} <= {facts.name for facts in report.healthy}
    assert "_treadle" not in {
        each.steps[0] for facts in report.scan.collections.values() for each in facts.fields.values()
    }
