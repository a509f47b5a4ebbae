"""Names that a model does not have, and text that stands for an id, in filters, updates and sorts."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel, ConfigDict, Field

from treadle import Bucket, Count, Document, ExtendedReference, Id, Unchecked, UsageError, migration


class Address(BaseModel):
    city: str
    zip_code: str = Field("", alias="zip")
    owner_id: Id | None = None


class Line(BaseModel):
    product_id: Id
    quantity: int = 1


class Customer(Document, collection="customers"):
    name: str = ""
    orders: Annotated[int, Count("Order", by="customer_id")] = 0


class CustomerCard(BaseModel):
    name: str


class Order(Document, collection="orders", naming="camel"):
    customer_id: Id
    customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None
    status: str = "open"
    address: Address | None = None
    lines: list[Line] = []
    tags: list[Id] = []
    scores: dict[str, int] = {}
    refs: dict[str, Id] = {}
    either: Id | str | None = None
    anything: Any = None
    place: Address | int | None = None


class Loose(Document, collection="loose"):
    model_config = ConfigDict(extra="allow")
    name: str = ""


class Thing(Document, collection="things", discriminator="kind"):
    name: str = ""


class Book(Thing, kind="book"):
    isbn: str = ""
    author_id: Id | None = None


class Note(Document, collection="notes", version=2):
    body: str = ""


@migration(Note, from_version=1)
def rename(document: dict[str, Any]) -> dict[str, Any]:
    document["body"] = document.pop("text", "")
    return document


class Reading(
    Document, collection="readings", bucket=Bucket(key="sensor_id", time="ts", span=dt.timedelta(hours=1))
):
    sensor_id: Id
    ts: dt.datetime
    value: float = 0


MODELS = [Customer, Order, Loose, Thing, Book, Note, Reading]


@pytest.fixture
def store(run):
    return run.store(MODELS)


@pytest.mark.quick
def test_a_name_that_the_model_does_not_have_is_refused_by_every_call(store):
    """Which names those are is in tests/query/test_field_paths.py."""
    order = store.insert(Order(customer_id=ObjectId()))
    wrong, fine, change = (
        {"lines": {"$elemMatch": {"quantty": 1}}},
        {"_id": order.id},
        {"$set": {"stauts": "x"}},
    )
    for call in (
        lambda: store.find(Order, wrong).to_list(),
        lambda: store.count(Order, wrong),
        lambda: store.delete_many(Order, wrong),
        lambda: store.update_many(Order, wrong, {"$set": {"status": "x"}}),
        lambda: store.page(Order, wrong),
        lambda: store.update(Order, fine, change),
        lambda: store.update_many(Order, fine, change),
        lambda: store.find(Order, sort=["-status", "lines.quantty"]).to_list(),
        lambda: store.find_one(Order, sort="stauts"),
        lambda: store.page(Order, sort=[("stauts", 1)]),
        lambda: store.update(Order, {}, {"$set": {"status": "x"}}, sort="stauts"),
    ):
        with pytest.raises(UsageError, match="did you mean") as caught:
            call()
        assert "field-unknown" == caught.value.code
    assert order == store.get(Order, order.id)


def test_positions_maps_and_notes_of_a_pipeline_are_no_names(store):
    order = store.insert(Order(customer_id=ObjectId(), lines=[Line(product_id=ObjectId())]))
    for update in (
        {"$set": {"lines.0.quantity": 2, "scores.maths": 1}},
        {"$inc": {"lines.$[].quantity": 1}},
        [{"$set": {"note": 1}}, {"$set": {"status": "x"}}, {"$unset": "note"}],
    ):
        order = store.update(Order, order.id, update)
    assert (3, {"maths": 1}, "x") == (order.lines[0].quantity, order.scores, order.status)
    after = store.update(
        Order, order.id, {"$set": {"lines.$[i].quantity": 9}}, array_filters=[{"i.quantity": 3}]
    )
    assert 9 == after.lines[0].quantity


def test_extras_kinds_and_older_versions_are_not_concerned(store):
    loose = store.insert(Loose(name="x", whatever=1))
    assert [loose] == store.find(Loose, {"whatever": 1}, sort="whatever").to_list()
    assert store.update(Loose, loose.id, {"$set": {"more": 2}}).more == 2
    book = store.insert(Book(isbn="1"))
    assert [book] == store.find(Thing, {"isbn": "1", "kind": "book"}, sort="isbn").to_list()
    with pytest.raises(UsageError):
        store.find(Thing, {"ibsn": "1"}).to_list()
    assert [] == store.find(Note, {"text": "old name"}, sort="text").to_list()
    with pytest.raises(UsageError):
        store.update_many(Note, {}, {"$set": {"txet": "x"}})


@pytest.mark.quick
def test_text_is_an_id_where_the_field_is_one(store):
    customer = store.insert(Customer(name="x"))
    product, tag = ObjectId(), ObjectId()
    order = store.insert(
        Order(
            customer_id=customer.id,
            lines=[Line(product_id=product)],
            tags=[tag],
            address=Address(city="x", zip="1", owner_id=tag),
            refs={"a": tag},
        )
    )
    text = str(customer.id)
    for filter in (
        {"_id": str(order.id)},
        {"customerId": text},
        {"customerId": {"$in": [text, str(ObjectId())]}},
        {"customerId": {"$eq": text}},
        {"customerId": {"$not": {"$ne": text}}},
        {"$or": [{"customerId": text}, {"status": "none"}]},
        {"lines.product_id": str(product)},
        {"lines": {"$elemMatch": {"product_id": str(product)}}},
        {"lines.0.product_id": str(product)},
        {"tags": str(tag)},
        {"tags": {"$all": [str(tag)]}},
        {"tags": [str(tag)]},
        {"address.owner_id": str(tag)},
        {"refs.a": str(tag)},
    ):
        assert [order] == store.find(Order, filter).to_list(), filter
    assert 1 == store.update_many(Order, {"customerId": text}, {"$pull": {"tags": str(tag)}})
    assert [] == store.get(Order, order.id).tags
    assert 1 == store.delete_many(Order, {"customerId": text})
    assert 0 == store.get(Customer, text).orders


def test_array_filters_are_filters_of_elements(store):
    product = ObjectId()
    order = store.insert(
        Order(customer_id=ObjectId(), lines=[Line(product_id=product), Line(product_id=ObjectId())])
    )
    change = {"$set": {"lines.$[line].quantity": 9}}
    after = store.update(Order, order.id, change, array_filters=[{"line.product_id": str(product)}])
    assert [9, 1] == [line.quantity for line in after.lines]
    with pytest.raises(UsageError, match="did you mean 'quantity'"):
        store.update(Order, order.id, change, array_filters=[{"$or": [{"line.quantitty": 1}]}])
    unchecked = Unchecked(change)
    assert after == store.update(Order, order.id, unchecked, array_filters=[{"line.quantitty": 1}])
