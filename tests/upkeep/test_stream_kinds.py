"""The worker on a collection that holds several kinds: each document by the rules of its own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from treadle import Count, Document, ExtendedReference, Id, Sum


class Review(Document, collection="reviews"):
    item_id: Id
    stars: int = 1


class Maker(Document, collection="makers"):
    name: str


class MakerCard(BaseModel):
    name: str


class Item(Document, collection="items", discriminator="type"):
    title: str
    reviews: Annotated[int, Count(Review, by="item_id", maintain="stream")] = 0


class Book(Item, kind="book"):
    stars: Annotated[int, Sum(Review, "stars", by="item_id", maintain="stream")] = 0


class Gadget(Item, kind="gadget"):
    maker_id: Id | None = None
    maker: Annotated[MakerCard | None, ExtendedReference(Maker, by="maker_id", maintain="stream")] = None


class Shelf(Document, collection="shelves"):
    id: str
    books: Annotated[int, Count(Book, by="title", maintain="stream")] = 0


def test_each_kind_is_followed_by_its_own_rules(run, database):
    store = run.store([Review, Maker, Item, Book, Gadget, Shelf])
    store.setup()
    worker = store.worker()
    worker.run_until_idle()
    items, reviews = database["items"], database["reviews"]
    maker = database["makers"].insert_one({"name": "Jacquard"}).inserted_id
    database["shelves"].insert_one({"_id": "loom"})
    book = items.insert_one({"type": "book", "title": "loom"}).inserted_id
    gadget = items.insert_one({"type": "gadget", "title": "loom", "maker_id": maker}).inserted_id
    for item in (book, gadget):
        reviews.insert_many([{"item_id": item, "stars": stars} for stars in (2, 3)])
    worker.run_until_idle()
    assert [] == store.verify()
    assert (2, 5) == (store.get(Book, book).reviews, store.get(Book, book).stars)
    assert (2, "Jacquard") == (store.get(Gadget, gadget).reviews, store.get(Gadget, gadget).maker.name)
    assert "stars" not in items.find_one({"_id": gadget})
    assert 1 == store.get(Shelf, "loom").books
    database["makers"].update_one({}, {"$set": {"name": "J. M. Jacquard"}})
    reviews.delete_many({"stars": 2})
    items.delete_one({"_id": book})
    worker.run_until_idle()
    assert [] == store.verify()
    assert (1, "J. M. Jacquard") == (store.get(Gadget, gadget).reviews, store.get(Gadget, gadget).maker.name)
    assert 0 == store.get(Shelf, "loom").books


def test_a_document_that_becomes_another_kind_is_filled_as_such(run, database):
    store = run.store([Review, Maker, Item, Book, Gadget, Shelf])
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
