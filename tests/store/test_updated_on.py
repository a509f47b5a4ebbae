"""UpdatedAt(on=[…]): a document is dated by the writes of those that name it, and counts nothing."""

from __future__ import annotations

import datetime as dt
from collections.abc import Generator
from typing import Annotated, Any

import pytest
from pymongo import MongoClient

from tests.support import shared_server
from treadle import Count, DeclarationError, Document, ExtendedReference, Store, UpdatedAt

LONG_AGO = dt.datetime(2001, 2, 3, tzinfo=dt.UTC)


class Review(Document, collection="reviews"):
    product_id: int | None = None
    text: str = ""
    product_name: Annotated[str | None, ExtendedReference("Product", by="product_id", field="name")] = None


class Photo(Document, collection="photos"):
    of: int | None = None


class Product(Document, collection="products"):
    id: int
    name: str = ""
    touched: Annotated[dt.datetime | None, UpdatedAt(on=[Review])] = None
    pictured: Annotated[dt.datetime | None, UpdatedAt(on=["Photo"], by="of")] = None
    own: Annotated[dt.datetime | None, UpdatedAt()] = None


class Shop(Document, collection="shops"):
    id: int
    products: Annotated[int, Count("Product", by="id")] = 0


@pytest.fixture(scope="module")
def alone() -> Generator[Any]:
    with shared_server(replica_set=False) as server, MongoClient[Any](server.uri) as client:
        yield client["updated"]


@pytest.fixture(params=["transactions", "standalone"])
def opened(request: pytest.FixtureRequest, run: Any, database: Any, alone: Any) -> Any:
    """A store, its database, and how to take all dates back."""
    models = [Review, Photo, Product]
    raw = database if request.param == "transactions" else alone
    for name in ("products", "reviews", "photos"):
        raw[name].delete_many({})
    store = run.store(models) if request.param == "transactions" else Store(alone, models)
    store.setup()
    store.insert_many([Product(id=1), Product(id=2)])

    def forget() -> None:
        raw["products"].update_many({}, {"$set": dict.fromkeys(("touched", "pictured", "own"), LONG_AGO)})

    forget()
    return store, forget


def dated(store: Any, name: str = "touched") -> list[int]:
    """The products that were dated since."""
    return [each.id for each in store.find(Product, sort="_id") if getattr(each, name) != LONG_AGO]


def test_every_write_of_a_source_dates_who_it_names(opened):
    store, forget = opened
    review = store.insert(Review(product_id=1))
    assert [1] == dated(store)
    assert [] == dated(store, "own")
    assert [] == dated(store, "pictured")
    forget()
    review = store.update(Review, review.id, {"$set": {"text": "new"}})
    assert [1] == dated(store)
    forget()
    review = store.change(review, product_id=2)
    assert [1, 2] == dated(store)
    forget()
    store.delete(Review, review.id)
    assert [2] == dated(store)
    forget()
    store.insert(Photo(of=1))
    assert ([], [1]) == (dated(store), dated(store, "pictured"))
    assert [] == store.verify()


def test_what_treadle_maintains_in_a_source_dates_nobody(opened):
    """A rename reaches the cards of the reviews, which is no write of the reviews."""
    store, forget = opened
    store.insert(Review(product_id=1))
    forget()
    store.update(Product, 1, {"$set": {"name": "Loom"}})
    assert "Loom" == next(iter(store.find(Review))).product_name
    assert ([1], [1]) == (dated(store), dated(store, "own"))
    forget()
    store.repair()
    store.rebuild()
    assert [] == dated(store)


def test_what_cannot_be_meant_is_refused(run):
    def refused(code: str, **options: Any) -> None:
        class Item(Document, collection="items"):
            at: Annotated[dt.datetime | None, UpdatedAt(**options)] = None

        with pytest.raises(DeclarationError, match=code):
            run.store([Review, Product, Photo, Item])

    refused("pattern-keyword", on="Review")
    refused("pattern-keyword", by="product_id")
    refused("reference-field-missing", on=[Review])
    refused("reference-type", on=[Review], by="product_id")


class Followed(Document, collection="followed"):
    id: int
    touched: Annotated[dt.datetime | None, UpdatedAt(on=["Note"], by="about", maintain="stream")] = None
    sold: Annotated[int, Count("Sold", by="about", maintain="stream")] = 0


class Note(Document, collection="notes"):
    id: int
    about: int | None = None
    text: str = ""


class Sold(Document, collection="sold"):
    about: int


def test_the_worker_dates_what_raw_writers_touched(run, database):
    """Inserts, changes, moves and deletions by anybody; not what other sources feed, and not a backfill."""
    store = run.store([Followed, Note, Sold])
    store.setup()
    store.insert_many([Followed(id=1), Followed(id=2)])
    worker = store.worker()

    def dated_by(write: Any) -> list[int]:
        worker.run_until_idle()
        database["followed"].update_many({}, {"$set": {"touched": LONG_AGO}})
        worker.run_until_idle()
        write()
        worker.run_until_idle()
        return [each.id for each in store.find(Followed, sort="_id") if each.touched != LONG_AGO]

    notes = database["notes"]
    assert [1] == dated_by(lambda: notes.insert_one({"_id": 1, "about": 1}))
    assert [1] == dated_by(lambda: notes.update_one({"_id": 1}, {"$set": {"text": "new"}}))
    assert [1, 2] == dated_by(lambda: notes.update_one({"_id": 1}, {"$set": {"about": 2}}))
    assert [2] == dated_by(lambda: notes.delete_one({"_id": 1}))
    assert [2] == dated_by(lambda: store.insert(Note(id=2, about=2)))
    assert [] == dated_by(lambda: database["sold"].insert_one({"about": 1}))
    assert 1 == store.get(Followed, 1).sold
    assert [] == dated_by(lambda: store.rebuild(Followed))
    assert [] == store.verify()


def test_only_the_models_in_on_are_followed_by_a_worker(run):
    class Alone(Document, collection="alone"):
        at: Annotated[dt.datetime | None, UpdatedAt(maintain="stream")] = None

    with pytest.raises(DeclarationError, match="pattern-keyword"):
        run.store([Alone])
