"""One model or more for each pattern; the ids are chosen by the writers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import BaseModel

from treadle import (
    AncestorArray,
    Approximate,
    Bucket,
    Count,
    Day,
    Document,
    ExtendedReference,
    Max,
    Outlier,
    Rollup,
    Subset,
    Sum,
    migration,
)

START = datetime(2020, 1, 1, tzinfo=UTC)
EVERY = timedelta(seconds=1)


class CustomerCard(BaseModel):
    name: str


class Order(Document, collection="orders"):
    id: str
    customer_id: int
    customer: Annotated[CustomerCard | None, ExtendedReference("Customer", by="customer_id")] = None
    amount: int
    status: str = "open"


class Customer(Document, collection="customers"):
    id: int
    name: str
    order_count: Annotated[int, Count(Order, by="customer_id")] = 0
    spent: Annotated[int, Sum(Order, "amount", by="customer_id")] = 0


class Review(Document, collection="reviews"):
    id: str
    product_id: int
    rating: int


class ReviewCard(BaseModel):
    rating: int


class Product(Document, collection="products"):
    id: int
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    rating_total: Annotated[int, Sum(Review, "rating", by="product_id")] = 0
    best: Annotated[int | None, Max(Review, "rating", by="product_id")] = None
    top: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-rating", size=3)] = []
    streamed: Annotated[int, Count(Review, by="product_id", maintain="stream")] = 0
    views: Annotated[int, Approximate(every=50, within=timedelta(milliseconds=200))] = 0
    likes: Annotated[int, Approximate(every=50, within=timedelta(milliseconds=200), buffer="durable")] = 0


class Sale(Document, collection="sales"):
    id: str
    shop: int
    at: datetime
    amount: int


class DailySales(
    Document,
    collection="daily_sales",
    rollup=Rollup(Sale, keys={"shop": "shop", "day": Day("at")}),
):
    shop: int
    day: datetime
    amount: Annotated[int, Sum("amount")] = 0


class ScheduledSales(
    Document,
    collection="scheduled_sales",
    rollup=Rollup(Sale, keys={"shop": "shop", "day": Day("at")}, maintain="schedule", every=EVERY),
):
    shop: int
    day: datetime
    amount: Annotated[int, Sum("amount")] = 0


class Category(Document, collection="categories", tree=AncestorArray(parent="parent_id", ancestors="above")):
    id: str
    parent_id: str | None = None
    above: list[str] = []


class Club(Document, collection="clubs"):
    id: int
    members: Annotated[list[str], Outlier(limit=5, overflow="club_overflow", page_size=5)] = []
    member_count: int = 0
    has_overflow: bool = False


class Reading(
    Document,
    collection="readings",
    bucket=Bucket(key="sensor", time="at", span=timedelta(minutes=1), limit=10, stats=("value",)),
):
    sensor: int
    at: datetime
    value: int


class User(Document, collection="users", version=2):
    id: str
    name: str
    greeting: str = ""


migration(
    User,
    from_version=1,
    up=lambda document: {**document, "greeting": f"hello {document['name']}"},
    down=lambda document: {key: value for key, value in document.items() if key != "greeting"},
)


class Item(Document, collection="items", discriminator="type"):
    id: str
    title: str


class Book(Item, kind="book"):
    pages: int = 1


class Tool(Item, kind="tool"):
    weight: int = 1


class Note(Document, collection="notes"):
    """Nothing follows from it: concurrent calls share commands."""

    id: str
    edits: int = 0


class Tally(Document, collection="tallies"):
    """The same, with documents that all writers add to."""

    id: int
    total: int = 0


MODELS: list[type[Document]] = [
    Order, Customer, Review, Product, Sale, DailySales, ScheduledSales, Category, Club, Reading, User,
    Item, Book, Tool, Note, Tally,
]  # fmt: skip
CUSTOMERS = PRODUCTS = CLUBS = TALLIES = 8
SHOPS = 4
