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


def test_an_empty_group_has_zero_and_none(store):
    product = store.insert(Product())
    assert (0, 0, Decimal(0)) == (product.summary.count, product.total, product.money)
    assert (None, None, None) == (product.summary.average, product.worst, product.best)
    assert Decimal("12.0") == product.taxed
    assert [] == store.verify()


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


def test_a_source_whose_target_does_not_exist_changes_nothing(store):
    store.insert_many([Review(product_id=ObjectId()), Review(product_id=None)])
    assert 0 == store.count(Product)
    assert 2 == store.count(Review)
    assert [] == store.verify()


def test_an_id_that_was_shown_before_the_insert_is_looked_up(store):
    product = Product()
    store.insert(Review(product_id=product.id))
    assert 1 == store.insert(product).summary.count


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


class Tagged(Document, collection="tagged"):
    tags: list[str] = []
    lines: list[TaggedLine] = []
    points: int = 1


class TaggedLine(BaseModel):
    tag: str
    quantity: int = 1


Tagged.model_rebuild()


class Tag(Document, collection="tags"):
    id: str
    used: Annotated[int, Count(Tagged, by="tags")] = 0
    points: Annotated[int, Sum(Tagged, "points", by="tags")] = 0
    ordered: Annotated[int, Sum(Tagged, "lines.quantity", by="lines.tag")] = 0
    orders: Annotated[int, Count(Tagged, by="lines.tag")] = 0
    largest: Annotated[int | None, Max(Tagged, "lines.quantity", by="lines.tag")] = None


def test_keys_inside_arrays(run):
    """One review of several products: each counts it once; lines count each for itself."""
    store = run.store([Tagged, Tag])
    store.insert_many([Tag(id="a"), Tag(id="b")])
    thing = store.insert(
        Tagged(
            tags=["a", "b", "a"],
            points=5,
            lines=[TaggedLine(tag="a", quantity=2), TaggedLine(tag="a", quantity=3)],
        )
    )
    a, b = store.get(Tag, "a"), store.get(Tag, "b")
    assert (1, 5, 5, 1, 3) == (a.used, a.points, a.ordered, a.orders, a.largest)
    assert (1, 5, 0, 0, None) == (b.used, b.points, b.ordered, b.orders, b.largest)
    store.update(Tagged, thing.id, {"$pull": {"tags": "a", "lines": {"quantity": 3}}})
    a = store.get(Tag, "a")
    assert (0, 0, 2, 1, 2) == (a.used, a.points, a.ordered, a.orders, a.largest)
    store.update(Tagged, thing.id, {"$set": {"lines.0.tag": "b", "points": 7}})
    assert (7, 2) == (store.get(Tag, "b").points, store.get(Tag, "b").ordered)
    assert [] == store.verify()
    store.delete(Tagged, thing.id)
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


def test_inside_a_callers_transaction_everything_commits_or_nothing(store):
    product = store.insert(Product())
    with pytest.raises(ValueError, match="stop"), store.transaction() as session:
        store.insert(Review(product_id=product.id), session=session)
        assert 1 == store.get(Product, product.id, session=session).summary.count
        raise ValueError("stop")
    assert 0 == store.get(Product, product.id).summary.count
    with store.transaction() as session:
        store.insert_many([Review(product_id=product.id) for _ in range(3)], session=session)
        store.update_many(Review, {}, {"$set": {"rating": 5}}, session=session)
        store.delete(Review, {"product_id": product.id}, session=session)
    assert (2, 10) == (store.get(Product, product.id).summary.count, store.get(Product, product.id).total)
    assert [] == store.verify()


def test_verify_names_what_a_raw_write_broke_and_repair_mends_it(store, database):
    product = store.insert(Product())
    store.insert_many([Review(product_id=product.id, rating=rating) for rating in (1, 5)])
    database["products"].update_one(
        {}, {"$set": {"total": 99, "best": 1, "_treadle.state.mean_money.count": 7}}
    )
    database["reviews"].insert_one(
        {"product_id": product.id, "rating": 3, "price": Decimal128("1"), "weight": 1.0}
    )
    found = {finding.path: (finding.stored, finding.expected) for finding in store.verify()}
    assert (99, 9) == found["total"]
    assert (2, 3) == found["summary.count"]
    assert (1, 5) == found["best"]
    assert {"computed"} == {finding.pattern for finding in store.verify()}
    assert {("Product", product.id)} == {(finding.model, finding.document_id) for finding in store.verify()}
    assert 1 == store.repair()
    assert [] == store.verify()
    assert 0 == store.repair()


def test_rebuild_fills_a_collection_that_existed_before(store, database):
    ids = [ObjectId() for _ in range(250)]
    database["products"].insert_many([{"_id": each, "name": "old", "price": Decimal128("1")} for each in ids])
    database["reviews"].insert_many(
        [
            {"product_id": each, "rating": 2, "price": Decimal128("1"), "weight": 0.5}
            for each in ids
            for _ in range(2)
        ]
    )
    seen = []
    assert 250 == store.rebuild(progress=seen.append)
    assert [] == store.verify()
    assert (250, 250) == (seen[-1].done, seen[-1].total)
    before = list(database["products"].find({}, {"_treadle.n": 0, "summary.at": 0}))
    store.rebuild(Product)
    assert before == list(database["products"].find({}, {"_treadle.n": 0, "summary.at": 0}))


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
