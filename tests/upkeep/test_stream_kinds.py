"""A document whose kind another program changes."""

from __future__ import annotations

from typing import Annotated

from treadle import Count, Document, Id, Sum


class Review(Document, collection="reviews"):
    item_id: Id
    stars: int = 1


class Item(Document, collection="items", discriminator="type"):
    title: str
    reviews: Annotated[int, Count(Review, by="item_id", maintain="stream")] = 0


class Book(Item, kind="book"):
    stars: Annotated[int, Sum(Review, "stars", by="item_id", maintain="stream")] = 0


class Gadget(Item, kind="gadget"):
    pass


def test_a_document_that_becomes_another_kind_is_filled_as_such(run, database):
    store = run.store([Review, Item, Book, Gadget])
    store.setup()
    worker = store.worker()
    worker.run_until_idle()
    item = database["items"].insert_one({"type": "gadget", "title": "loom"}).inserted_id
    database["reviews"].insert_many([{"item_id": item, "stars": stars} for stars in (2, 3)])
    worker.run_until_idle()
    database["items"].update_one({"_id": item}, {"$set": {"type": "book"}})
    worker.run_until_idle()
    assert 5 == store.get(Book, item).stars
    assert [] == store.verify()
