"""Subset: always exactly the first N."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import pytest
from pydantic import BaseModel

from treadle import Document, Id, Store, Subset


def day(number: int) -> dt.datetime:
    return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(days=number)


class Review(Document, collection="reviews"):
    product_id: Id | None
    rating: int = 3
    likes: int = 0
    text: str = ""
    date: dt.datetime = day(0)
    hidden: bool = False


class ReviewCard(BaseModel):
    rating: int
    text: str
    date: dt.datetime


class LikedCard(BaseModel):
    text: str


class Product(Document, collection="products"):
    name: str = ""
    recent: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-date", size=3)] = []
    liked: Annotated[
        list[LikedCard],
        Subset(Review, by="product_id", sort=["-likes", "date"], size=2, where={"hidden": False}),
    ] = []


@pytest.fixture
def store(run):
    return run.store([Review, Product])


def texts(store, product, field="recent"):
    return [card.text for card in getattr(store.get(Product, product.id), field)]


@pytest.mark.quick
def test_several_sort_keys_and_a_condition(store):
    """The card does not hold the likes by which it is chosen."""
    product = store.insert(Product())
    for text, likes, date, hidden in (
        ("a", 5, 2, False),
        ("b", 5, 1, False),
        ("c", 9, 0, True),
        ("d", 1, 0, False),
    ):
        store.insert(Review(product_id=product.id, text=text, likes=likes, date=day(date), hidden=hidden))
    assert ["b", "a"] == texts(store, product, "liked")
    store.update_many(Review, {"text": "c"}, {"$set": {"hidden": False}})
    assert ["c", "b"] == texts(store, product, "liked")
    store.update_many(Review, {"text": "d"}, {"$inc": {"likes": 7}})
    assert ["c", "d"] == texts(store, product, "liked")
    assert [] == store.verify()


def test_setup_makes_the_index_that_the_refill_uses(run, database):
    store = run.store([Review, Product])
    store.setup()
    assert {"product_id": 1, "date": -1, "_id": 1} in [
        dict(index["key"]) for index in database["reviews"].list_indexes()
    ]
    product = store.insert(Product())
    store.insert_many([Review(product_id=product.id, date=day(n)) for n in range(50)])
    plan = (
        database["reviews"]
        .find({"product_id": product.id})
        .sort([("date", -1), ("_id", 1)])
        .limit(3)
        .explain()
    )
    assert 3 == plan["executionStats"]["totalDocsExamined"]


def test_new_children_cost_one_update_and_no_read(heard):
    database, listener = heard
    store = Store(database, [Review, type(Document)("Only", (Document,), {
        "__module__": __name__,
        "__annotations__": {"recent": Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-date", size=3)]},
        "recent": [],
    }, collection="products")])  # fmt: skip
    model = next(model for model in store.graph.entries if model.__name__ == "Only")
    parent = store.insert(model())
    listener.clear()
    store.insert(Review(product_id=parent.id))
    assert ["insert", "update", "commitTransaction"] == listener.names


def test_a_rebuild_of_many_targets_reads_the_first_sources_of_each(database):
    """By the index: what a subset leaves out is not read, however much there is of it."""

    class Note(BaseModel):
        rating: int

    class Comment(Document, collection="comments"):
        post_id: int
        rating: int

    class Post(Document, collection="posts"):
        id: int
        best: Annotated[list[Note], Subset(Comment, by="post_id", sort="-rating", size=2)] = []

    store = Store(database, [Post, Comment])
    store.setup()
    database["comments"].insert_many([{"post_id": n % 5, "rating": n} for n in range(1_000)])
    store.insert_many([Post(id=n) for n in range(5)])
    database.command("profile", 2)
    assert 5 == store.rebuild(Post)
    database.command("profile", 0)
    read = [each.get("keysExamined", 0) for each in database["system.profile"].find()]
    assert sum(read) < 100
