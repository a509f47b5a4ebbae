"""Computed: counts, sums, averages, extremes and formulas that are right after every write.

Covers: graph/derived, engine/propagate, engine/aggregation, engine/pipelines
"""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Annotated

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import BaseModel

from treadle import (
    Average,
    Count,
    DataError,
    Document,
    Formula,
    Id,
    Max,
    Min,
    Store,
    Sum,
    UsageError,
)


class Review(Document, collection="reviews"):
    product_id: Id | None
    rating: int | None = 3
    price: Decimal = Decimal(0)
    weight: float = 0.0


class Summary(BaseModel):
    count: Annotated[int, Count(Review, by="product_id")] = 0
    average: Annotated[float | None, Average(Review, "rating", by="product_id", computed_at="at")] = None
    at: dt.datetime | None = None


class Product(Document, collection="products"):
    name: str = ""
    price: Decimal = Decimal(10)
    summary: Summary = Summary()
    total: Annotated[int, Sum(Review, "rating", by="product_id")] = 0
    money: Annotated[Decimal, Sum(Review, "price", by="product_id")] = Decimal(0)
    mean_money: Annotated[Decimal | None, Average(Review, "price", by="product_id")] = None
    grams: Annotated[float, Sum(Review, "weight", by="product_id")] = 0.0
    worst: Annotated[int | None, Min(Review, "rating", by="product_id")] = None
    best: Annotated[int | None, Max(Review, "rating", by="product_id", where={"rating": {"$gte": 3}})] = None
    good: Annotated[int, Count(Review, by="product_id", where={"rating": {"$gte": 4}})] = 0
    worth: Annotated[
        Decimal, Sum(Review, {"$multiply": ["$price", {"$ifNull": ["$rating", 0]}]}, by="product_id")
    ] = Decimal(0)
    taxed: Annotated[Decimal | None, Formula({"$multiply": ["$price", Decimal("1.2")]})] = None
    share: Annotated[
        float | None, Formula({"$cond": [{"$eq": ["$total", 0]}, None, {"$divide": ["$good", "$total"]}]})
    ] = None


@pytest.fixture
def store(run):
    return run.store([Review, Product])


def test_money_is_exact(store):
    """A float total read 1999.9999999993 for 2000."""
    product = store.insert(Product())
    store.insert_many([Review(product_id=product.id, price=Decimal("0.10")) for _ in range(2000)])
    assert Decimal("200.00") == store.get(Product, product.id).money
    store.delete_many(Review, {})
    assert Decimal(0) == store.get(Product, product.id).money


def test_an_average_starts_right_on_a_document_that_lacked_the_fields(store, database):
    identity = ObjectId()
    database["products"].insert_one({"_id": identity, "name": "old", "price": Decimal128("1")})
    store.insert_many([Review(product_id=identity, rating=rating) for rating in (1, 2)])
    after = store.get(Product, identity)
    assert (1.5, 2) == (after.summary.average, after.summary.count)
    assert Decimal("1.2") == after.taxed


@pytest.mark.quick
def test_formulas_follow_their_fields(store):
    product = store.insert(Product(price=Decimal(10)))
    assert Decimal("24.0") == store.update(Product, product.id, {"$set": {"price": Decimal(20)}}).taxed
    assert 1 == store.update_many(Product, {}, {"$set": {"price": Decimal(30)}})
    assert Decimal("36.0") == store.get(Product, product.id).taxed
    store.insert_many([Review(product_id=product.id, rating=4) for _ in range(2)])
    assert 0.25 == store.get(Product, product.id).share
    replaced = store.replace(product.model_copy(update={"price": Decimal(5)}))
    assert (Decimal("6.0"), 8) == (replaced.taxed, replaced.total)
    assert [] == store.verify()


def test_one_update_per_target_and_one_plain_command_where_nothing_is_fed(heard):
    database, listener = heard
    store = Store(database, [Review, Product])
    products = store.insert_many([Product() for _ in range(100)])
    reviews = [Review(product_id=products[number % 100].id, rating=number % 5) for number in range(10_000)]
    listener.clear()
    store.insert_many(reviews)
    updates = [body for name, body in listener.commands if name == "update"]
    assert 1 == len(updates)
    assert 100 == len(updates[0]["updates"])
    listener.clear()
    store.update(Product, products[0].id, {"$set": {"name": "renamed"}})
    assert ["findAndModify"] == listener.names
    assert "startTransaction" not in listener.commands[0][1]


class Weight(Document, collection="weights"):
    id: int
    box_id: int
    kilos: float


class Box(Document, collection="boxes"):
    id: int
    kilos: Annotated[float, Sum(Weight, "kilos", by="box_id")] = 0.0
    mean: Annotated[float | None, Average(Weight, "kilos", by="box_id")] = None


def test_a_float_that_changes_costs_a_read_of_the_target_and_none_of_its_sources(heard):
    """Only a sum that falls below a power of two is computed from scratch."""
    database, listener = heard
    store = Store(database, [Weight, Box])
    store.insert(Box(id=1))
    store.insert_many([Weight(id=number, box_id=1, kilos=0.1) for number in range(50)])
    listener.clear()
    store.update(Weight, 0, {"$set": {"kilos": 0.7}})
    assert ["find", "findAndModify", "find", "update", "commitTransaction"] == listener.names
    assert math.isclose(49 * 0.1 + 0.7, store.get(Box, 1).kilos, rel_tol=1e-12)
    listener.clear()
    store.delete_many(Weight, {"_id": {"$gt": 5}})
    assert 1 == listener.names.count("aggregate")
    assert math.isclose(1.2, store.get(Box, 1).kilos, rel_tol=1e-12)
    assert [] == store.verify()


def test_a_fresh_target_costs_one_plain_command(heard):
    class Simple(Document, collection="simple"):
        count: Annotated[int, Count(Review, by="product_id")] = 0

    database, listener = heard
    store = Store(database, [Review, Simple])
    store.recover()
    listener.clear()
    store.insert(Simple())
    assert ["insert"] == listener.names
    assert "startTransaction" not in listener.commands[0][1]


@pytest.mark.parametrize(
    "update",
    [
        {"$inc": {"total": 1}},
        {"$set": {"summary.count": 3}},
        {"$set": {"summary": {}}},
        {"$set": {"taxed": 1}},
        {"$set": {"summary.at": None}},
    ],
)
def test_maintained_fields_are_protected(store, update):
    product = store.insert(Product())
    with pytest.raises(UsageError, match="cannot be updated") as caught:
        store.update(Product, product.id, update)
    assert "field-maintained" == caught.value.code


def test_insert_ignores_and_replace_keeps_maintained_values(store):
    product = store.insert(Product(total=99, summary=Summary(count=77), taxed=Decimal(1)))
    assert (0, 0, Decimal("12.0")) == (product.total, product.summary.count, product.taxed)
    store.insert(Review(product_id=product.id, rating=4))
    replaced = store.replace(product.model_copy(update={"name": "stale"}))
    assert (4, 1, 4.0) == (replaced.total, replaced.summary.count, replaced.summary.average)
    with pytest.raises(DataError, match="not stored"):
        store.replace(Product())


def test_verify_pages_over_ids_of_mixed_types(database):
    class Loose(Document, collection="products"):
        id: int | str
        count: Annotated[int, Count("Note", by="about")] = 0

    class Note(Document, collection="notes"):
        about: int | str

    store = Store(database, [Loose, Note])
    database["products"].insert_many([{"_id": each, "count": 1} for each in (*range(600), "a", "b")])
    assert 602 == len(store.verify())


def test_a_formula_runs_no_code_of_the_server(database):
    class Scripted(Document, collection="scripted"):
        value: Annotated[float | None, Formula({"$function": {}})] = None

    with pytest.raises(UsageError) as caught:
        Store(database, [Review, Scripted])
    assert "operator-forbidden" == caught.value.code


def test_a_formula_that_fails_on_one_document_does_not_stop_verify_and_rebuild(run, database, caplog):
    class Ratio(Document, collection="ratios"):
        a: int
        b: int
        ratio: Annotated[float | None, Formula({"$divide": ["$a", "$b"]})] = None

    store = run.store([Ratio])
    with pytest.raises(Exception, match="divide by zero"):
        store.insert(Ratio(a=1, b=0))
    assert 0 == store.count(Ratio)
    database["ratios"].insert_many([{"_id": ObjectId(), "a": 4, "b": b} for b in (2, 0, 1)])
    assert 2 == len(store.verify())
    store.rebuild()
    assert [] == store.verify()
    assert {2.0, 4.0, None} == {each.get("ratio") for each in database["ratios"].find()}
    assert 1 == database["treadle.set_aside"].count_documents({})
    assert "cannot be computed" in caplog.text
