"""A shop for the dashboard: rules by write, stream and schedule, and a document that is set aside."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from bson import ObjectId
from pydantic import BaseModel

from treadle import Average, Count, Document, ExtendedReference, Id

# The collection's name is hostile on purpose.
HOSTILE = "<script>alert(1)</script>"


class Customer(Document, collection="customers"):
    name: str


class Card(BaseModel):
    name: str


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int = 3


class Product(Document, collection="products", validation="off"):
    name: str = ""
    review_count: Annotated[int, Count(Review, by="product_id", maintain="stream")] = 0
    avg_rating: Annotated[float | None, Average(Review, "rating", by="product_id", maintain="stream")] = None
    reviews_hourly: Annotated[
        int, Count(Review, by="product_id", maintain="schedule", every=timedelta(hours=1))
    ] = 0


class Order(Document, collection=f"orders {HOSTILE}"):
    customer_id: Id
    customer: Annotated[Card | None, ExtendedReference(Customer, by="customer_id", maintain="stream")] = None
    product_id: Id | None = None
    product: Annotated[Card | None, ExtendedReference(Product, by="product_id")] = None


MODELS: list[type[Document]] = [Customer, Review, Product, Order]


def fill(store: Any, database: Any) -> list[ObjectId]:
    """Products and reviews, all right; one product is set aside, and one value is wrong."""
    store.setup()
    keys = [ObjectId() for _ in range(4)]
    database["products"].insert_many([{"_id": key, "name": "loom"} for key in keys])
    database["reviews"].insert_many([{"product_id": keys[number % 4], "rating": 3} for number in range(12)])
    store.worker().run_until_idle()
    store.run_due()
    refuse(database, True)
    database["reviews"].insert_many([{"product_id": keys[3], "rating": 5} for _ in range(100)])
    store.worker().run_until_idle()
    database["products"].update_one({"_id": keys[0]}, {"$set": {"reviews_hourly": 77}})
    store.verify()
    return keys


def refuse(database: Any, refused: bool) -> None:
    """Let the server refuse a product with more than a hundred reviews, or no longer."""
    validator = {"review_count": {"$not": {"$gte": 100}}} if refused else {}
    database.command({"collMod": "products", "validator": validator, "validationLevel": "strict"})
