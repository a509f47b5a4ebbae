"""Ids that somebody learns while their document is being inserted."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pymongo import MongoClient, monitoring

from treadle import Count, Document, ExtendedReference, Id, Store


class Review(Document, collection="reviews"):
    product_id: Id
    product_name: Annotated[str | None, ExtendedReference("Product", by="product_id", field="name")] = None


class Product(Document, collection="products"):
    name: str = "loom"
    kind: str = "tool"
    review_count: Annotated[int, Count(Review, by="product_id")] = 0


class Kind(Document, collection="kinds"):
    """With it a product feeds something, so that it is not inserted by one plain command."""

    id: str
    products: Annotated[int, Count(Product, by="kind")] = 0


class Interrupting(monitoring.CommandListener):
    """Does something when a command is about to be sent, once."""

    def __init__(self) -> None:
        self.collection, self.act = "", lambda: None

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if event.command.get("insert") == self.collection:
            self.collection = ""
            self.act()

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...

    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...


@pytest.fixture
def interrupting(server, database):
    listener = Interrupting()
    with MongoClient(server.uri, event_listeners=[listener]) as client:
        yield client[database.name], listener


@pytest.mark.parametrize("models", [[Product, Review], [Product, Review, Kind]], ids=["alone", "together"])
@pytest.mark.parametrize("read", [lambda product: product.id, lambda product: vars(product)["id"]])
def test_a_review_of_a_product_that_is_being_inserted_is_counted(database, interrupting, models, read):
    """Another thread or task of the caller has the same document at hand."""
    observed, listener = interrupting
    other = Store(database, models)
    store = Store(observed, models)
    store.insert(Product())
    product = Product()

    def review() -> None:
        assert other.insert(Review(product_id=read(product))).product_name is None

    listener.act, listener.collection = review, "products"
    stored = store.insert(product)
    assert (product.id, 1) == (stored.id, stored.review_count)
    assert ["loom"] == [each.product_name for each in store.find(Review)]
    assert [] == store.verify()


def test_a_document_that_nobody_read_meanwhile_costs_one_plain_command(heard):
    database, listener = heard
    store = Store(database, [Product, Review])
    store.insert(Product())
    listener.clear()
    store.insert(Product())
    assert ["insert"] == listener.names


def test_an_id_is_the_same_before_during_and_after_a_failed_insert(interrupting):
    observed, listener = interrupting
    store = Store(observed, [Product, Review])
    store.insert(Product())
    product = Product()
    seen: list[Any] = []

    def fail() -> None:
        seen.append(product.id)
        observed.command(
            {"createIndexes": "products", "indexes": [{"key": {"kind": 1}, "name": "k", "unique": True}]}
        )

    listener.act, listener.collection = fail, "products"
    with pytest.raises(Exception, match="E11000"):
        store.insert(product)
    assert seen == [product.id]
