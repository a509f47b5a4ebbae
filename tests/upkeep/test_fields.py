"""`verify(fields=…)` and `repair(fields=…)`: one field, and the others stay as they are."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from treadle import Count, Document, ExtendedReference, Formula, Id, Store, Sum, UsageError


class Review(Document, collection="reviews"):
    product_id: int
    rating: int = 0
    author_id: Id | None = None


class Figures(BaseModel):
    total: Annotated[int, Sum(Review, "rating", by="product_id")] = 0


class Product(Document, collection="products", naming="camel"):
    id: int
    name: str = ""
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    figures: Figures = Figures()
    twice: Annotated[int | None, Formula({"$multiply": [2, "$reviewCount"]})] = None


class Note(Document, collection="notes"):
    product_id: int
    title: Annotated[str | None, ExtendedReference(Product, by="product_id", field="name")] = None


MODELS: list[type[Document]] = [Review, Product, Note]


@pytest.fixture
def opened(run: Any, database: Any) -> Any:
    """A store in which every value is wrong, and its database."""
    store = run.store(MODELS)
    store.setup()
    store.insert(Product(id=1, name="Loom"))
    store.insert_many([Review(product_id=1, rating=4), Review(product_id=1, rating=5)])
    store.insert(Note(product_id=1))
    database["products"].update_one({}, {"$set": {"reviewCount": 7, "figures.total": 7, "twice": 7}})
    database["notes"].update_one({}, {"$set": {"title": "wrong"}})
    return store, database


def stored(raw: Any) -> tuple[Any, Any, Any]:
    product = raw["products"].find_one()
    return product["reviewCount"], product["figures"]["total"], raw["notes"].find_one()["title"]


def test_one_field_is_mended_and_the_others_are_not(opened):
    store, raw = opened
    assert {"reviewCount"} == {each.path for each in store.verify(Product, fields=["review_count"])}
    assert 1 == store.repair(Product, fields=["review_count"])
    assert (2, 7, "wrong") == stored(raw)
    assert 4 == store.get(Product, 1).twice
    assert 0 == store.repair(Product, fields=["review_count"])
    assert 1 == store.repair(Product, fields=["figures"])
    assert 1 == store.repair(Note, fields=["title"])
    assert (2, 9, "Loom") == stored(raw)
    assert [] == store.verify()


def test_fields_go_with_ids(opened):
    store, raw = opened
    assert 1 == store.repair(Product, ids=[1], fields=["figures.total"])
    assert (7, 9, "wrong") == stored(raw)


@pytest.mark.parametrize("fields", [["name"], ["reviews"], [], "review_count"])
def test_what_is_not_maintained_is_refused(opened, fields):
    store, raw = opened
    with pytest.raises(UsageError, match="fields-invalid"):
        store.repair(Product, fields=fields)
    with pytest.raises(UsageError, match="fields-invalid"):
        store.verify(Product, fields=fields)
    assert (7, 7, "wrong") == stored(raw)


@pytest.mark.parametrize("fields", [[], "reviews", 3])
def test_fields_are_a_list(run, fields):
    with pytest.raises(UsageError, match="fields-invalid"):
        run.store([]).repair(fields=fields)


class Letter(Document, collection="letters"):
    id: Any
    product_id: int
    text: str = ""
    title: Annotated[str | None, ExtendedReference(Product, by="product_id", field="name")] = None


def test_large_documents_are_examined_as_many_as_one_reply_holds(heard):
    """A page of them would take gigabytes; none is passed over, however little fits beside it."""
    database, listener = heard
    store = Store(database, [Review, Product, Letter])
    store.insert(Product(id=1, name="Loom"))
    ids = [None, 1, 2.5, "a", "b", *(Id() for _ in range(3))]
    for number, key in enumerate(ids):
        store.insert(Letter(id=key, product_id=1, text="x" * (7 if number % 3 else 9) * 1_000_000))
    database["letters"].update_many({}, {"$set": {"title": "Old"}})
    listener.clear()
    assert ids == [each.document_id for each in store.verify(Letter)]
    assert "getMore" not in listener.names
