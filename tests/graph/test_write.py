"""Writes before anything is sent: which documents they are about, and by what a group is split.

Covers: graph/write, engine/inserts
"""

from __future__ import annotations

from typing import Annotated, Any

from bson import ObjectId
from pymongo import MongoClient

from treadle import Count, Document, Id, Store
from treadle.engine.inserts import Insert
from treadle.graph.write import Selector


class Review(Document, collection="reviews"):
    product_id: Id
    tags: list[str] = []


class Product(Document, collection="products"):
    reviews: Annotated[int, Count(Review, by="product_id")] = 0


class Tag(Document, collection="tags"):
    id: str
    reviews: Annotated[int, Count(Review, by="tags")] = 0


with MongoClient[Any]("localhost:1", connect=False) as client:
    GRAPH = Store(client["writes"], [Review, Product, Tag]).graph
REVIEWS = GRAPH.entry(Review)
KEY = ObjectId()


def test_a_selector_knows_whether_it_means_one_document() -> None:
    assert KEY == Selector(REVIEWS, REVIEWS.filter_for_id(KEY)).single_id
    assert Selector(REVIEWS, {"_id": KEY, "tags": "a"}).single_id is None
    assert {"_id": {"$in": [1]}} == Selector(REVIEWS, {}).within([1]).filter


def test_a_write_names_the_documents_that_follow_from_it() -> None:
    one = Insert(REVIEWS, [Review(product_id=KEY, tags=["a", "b"])])
    other = Insert(REVIEWS, [Review(product_id=KEY)])
    assert {("products", KEY), ("tags", "a"), ("tags", "b")} == one.targets
    assert {("products", KEY)} == other.targets
    assert one.targets | other.targets == one.merged(other).targets
