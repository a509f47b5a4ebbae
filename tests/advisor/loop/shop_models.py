"""The demo's shop, declared by hand; its collections stay as they are called."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel

from treadle.model.bson_types import Id
from treadle.model.document import Document
from treadle.patterns.computed import Average, Count
from treadle.patterns.extended_reference import ExtendedReference
from treadle.patterns.subset import Subset


class Customer(Document, collection="customers"):
    name: str
    email: str
    tier: str


class CustomerCard(BaseModel):
    name: str
    tier: str


class Order(Document, collection="orders"):
    customer_id: Id
    customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None
    total: float
    status: str
    placed_at: datetime


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    text: str
    date: datetime


class ReviewCard(BaseModel):
    rating: int
    text: str
    date: datetime


class Product(Document, collection="products"):
    name: str
    price: float
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    rating_average: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    recent_reviews: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-date", size=5)] = []


MODELS = (Customer, Order, Review, Product)
