"""What the shop stores: eight patterns on seven collections.

Polymorphic products in a tree of categories; each product counts and averages
its reviews (Computed), embeds the newest (Subset), carries its category's name
(Extended Reference), counts its views (Approximation) and holds its followers
(Outlier). An order carries its customer's card and the prices of that moment.
Sales per day (Rollup) are kept by a worker.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from treadle import (
    AncestorArray,
    Approximate,
    Average,
    Count,
    Day,
    Document,
    ExtendedReference,
    Formula,
    Id,
    Indexed,
    Outlier,
    Rollup,
    Subset,
    Sum,
)


class Category(
    Document, collection="categories", tree=AncestorArray(parent="parent_id", ancestors="ancestors")
):
    name: str
    parent_id: Id | None = None
    ancestors: list[Id] = []


class Customer(Document, collection="customers"):
    name: str
    email: Annotated[str, Indexed(unique=True)]
    tier: Literal["silver", "gold"] = "silver"


class CustomerCard(BaseModel):
    name: str
    tier: str


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int = Field(ge=1, le=5)
    text: str = ""
    date: datetime


class ReviewCard(BaseModel):
    rating: int
    text: str
    date: datetime


class Product(Document, collection="products", discriminator="type"):
    title: Annotated[str, Indexed(text=True)]
    price: Decimal = Field(ge=0)
    stock: int = Field(0, ge=0)
    category_id: Annotated[Id, Indexed()]
    category: Annotated[
        str | None,
        ExtendedReference(Category, by="category_id", field="name", on_delete="restrict"),
    ] = None
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    average_rating: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    recent_reviews: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-date", size=3)] = []
    views: Annotated[int, Approximate(every=100, within=timedelta(seconds=1))] = 0
    # Not shown with the product: an answer has them page by page.
    followers: Annotated[list[Id], Outlier(limit=100, overflow="product_followers", unique=True)] = Field(
        [], exclude=True
    )
    follower_count: int = 0
    has_overflow: bool = False


class Book(Product, kind="book"):
    type: Literal["book"] = "book"
    author: Annotated[str, Indexed(text=True)]
    isbn: Annotated[str | None, Indexed(unique=True)] = None


class Electronics(Product, kind="electronics"):
    type: Literal["electronics"] = "electronics"
    brand: Annotated[str, Indexed(text=True)]


class Clothing(Product, kind="clothing"):
    type: Literal["clothing"] = "clothing"
    size: Literal["S", "M", "L"]


class Line(BaseModel):
    product_id: Id
    title: Annotated[
        str | None, ExtendedReference(Product, by="product_id", field="title", policy="snapshot")
    ] = None
    price: Annotated[
        Decimal | None, ExtendedReference(Product, by="product_id", field="price", policy="snapshot")
    ] = None
    quantity: int = Field(ge=1)


class Order(Document, collection="orders"):
    customer_id: Id
    customer: Annotated[
        CustomerCard | None, ExtendedReference(Customer, by="customer_id", on_delete="restrict")
    ] = None
    lines: list[Line]
    total: Annotated[
        Decimal | None,
        Formula(
            {"$sum": {"$map": {"input": "$lines", "in": {"$multiply": ["$$this.price", "$$this.quantity"]}}}}
        ),
    ] = None
    placed_at: datetime


class DailySales(
    Document,
    collection="daily_sales",
    rollup=Rollup(Order, keys={"day": Day("placed_at")}, maintain="stream"),
):
    day: datetime
    orders: Annotated[int, Count()] = 0
    turnover: Annotated[Decimal, Sum("total")] = Decimal(0)


MODELS = [Category, Customer, Review, Product, Book, Electronics, Clothing, Order, DailySales]
