"""Pipelines that join children to their parent, in both ways on a real server.

Covers: advisor/loop/joins, advisor/loop/children
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel

from tests.advisor.drafts import chosen, draft_of
from treadle import Average, Count, Document, Id, Max, Min, Store, Subset, Sum
from treadle.advisor import scan
from treadle.advisor.loop.compare import compare_reads
from treadle.advisor.loop.rewrite import Rewritten, rewrite
from treadle.advisor.loop.units import collect, reads_of
from treadle.advisor.loop.workload_file import Request
from treadle.advisor.model_text import load_models
from treadle.advisor.proposals import Draft


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    text: str
    date: dt.datetime


class ReviewCard(BaseModel):
    id: Id
    rating: int
    date: dt.datetime


class Product(Document, collection="products"):
    name: str
    n: Annotated[int, Count(Review, by="product_id")] = 0
    total: Annotated[int, Sum(Review, "rating", by="product_id")] = 0
    mean: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    best: Annotated[int | None, Max(Review, "rating", by="product_id")] = None
    worst: Annotated[int | None, Min(Review, "rating", by="product_id")] = None
    recent: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-date", size=3)] = []


MODELS = [Review, Product]
JOIN = {"from": "reviews", "localField": "_id", "foreignField": "product_id", "as": "reviews"}
BY_VARIABLE = {
    "from": "reviews",
    "let": {"product": "$_id"},
    "as": "reviews",
}
MATCHED = {"$match": {"$expr": {"$eq": ["$product_id", "$$product"]}}}
NEWEST = [{"$sort": {"date": -1}}, {"$limit": 3}]
STATISTICS = {"$group": {"_id": None, "count": {"$sum": 1}, "mean": {"$avg": "$rating"}}}
# Pipelines on the parents.
REWRITTEN: dict[str, list[dict[str, Any]]] = {
    "size": [
        {"$lookup": JOIN},
        {"$project": {"name": 1, "number": {"$size": "$reviews"}}},
        {"$sort": {"name": 1}},
    ],
    "statistics": [
        {"$lookup": JOIN},
        {"$set": {"mean_rating": {"$avg": "$reviews.rating"}, "sum": {"$sum": "$reviews.rating"}}},
        {"$set": {"best_rating": {"$max": "$reviews.rating"}, "least": {"$min": "$reviews.rating"}}},
        {"$unset": "reviews"},
    ],
    "by-size": [
        {"$lookup": JOIN},
        {"$match": {"$expr": {"$gt": [{"$size": "$reviews"}, 8]}}},
        {"$project": {"reviews": 0}},
    ],
    "first-few": [{"$match": {"name": {"$gt": "p"}}}, {"$lookup": {**JOIN, "pipeline": NEWEST}}],
    "first-two": [
        {
            "$lookup": {
                **JOIN,
                "pipeline": [NEWEST[0], {"$limit": 2}, {"$project": {"rating": 1, "date": 1}}],
            }
        }
    ],
    "first-few-by-variable": [{"$lookup": {**BY_VARIABLE, "pipeline": [MATCHED, *NEWEST]}}],
    "counted": [{"$lookup": {**BY_VARIABLE, "pipeline": [MATCHED, {"$count": "n"}]}}],
    "grouped": [
        {"$lookup": {**JOIN, "pipeline": [STATISTICS]}},
        {"$unwind": {"path": "$reviews", "preserveNullAndEmptyArrays": True}},
    ],
    "unwound": [
        {"$lookup": JOIN},
        {"$unwind": "$reviews"},
        {
            "$group": {
                "_id": "$_id",
                "name": {"$first": "$name"},
                "count": {"$sum": 1},
                "mean": {"$avg": "$reviews.rating"},
            }
        },
        {"$sort": {"_id": 1}},
    ],
}
LEFT: dict[str, list[dict[str, Any]]] = {
    "whole-children": [{"$lookup": JOIN}],
    "children-and-size": [{"$lookup": JOIN}, {"$set": {"n": {"$size": "$reviews"}}}],
    "another-use": [{"$lookup": JOIN}, {"$project": {"n": {"$size": "$reviews"}, "texts": "$reviews.text"}}],
    "too-many": [{"$lookup": {**JOIN, "pipeline": [NEWEST[0], {"$limit": 4}]}}],
    "another-order": [{"$lookup": {**JOIN, "pipeline": [{"$sort": {"date": 1}}, NEWEST[1]]}}],
    "another-field": [{"$lookup": {**JOIN, "pipeline": [*NEWEST, {"$project": {"text": 1}}]}}],
    "some-of-them": [{"$lookup": {**JOIN, "pipeline": [{"$match": {"rating": 5}}, {"$count": "n"}]}}],
    "another-value": [{"$lookup": {**JOIN, "pipeline": [{"$group": {"_id": None, "x": {"$max": "$date"}}}]}}],
    "by-another-field": [
        {"$lookup": {**JOIN, "localField": "name"}},
        {"$project": {"n": {"$size": "$reviews"}}},
    ],
}


@pytest.fixture
def patterns(database: Any) -> Iterator[Draft]:
    products = [{"_id": ObjectId(), "name": f"p{number}"} for number in range(8)]
    database["products"].insert_many(products)
    # The last has no reviews, and some are equal in the sort.
    database["reviews"].insert_many(
        [
            {
                "product_id": products[number % 7]["_id"],
                "rating": number % 5 + 1,
                "text": "t",
                "date": dt.datetime(2026, 1, 1 + number // 10, tzinfo=dt.UTC),
            }
            for number in range(60)
        ]
    )
    with Store(database, models=MODELS) as store:
        store.setup()
        store.rebuild()
        yield draft_of(MODELS)


def differs(database: Any, patterns: Draft, *requests: Request) -> tuple[int, int]:
    """How many answers differ, of how many that were compared."""
    results, notes = compare_reads(database, database, chosen(requests, patterns), patterns, 1.0, rounds=1)
    assert [] == notes
    return sum(each.different for each in results), sum(each.compared for each in results)


def test_what_the_parent_holds_of_its_children_takes_the_place_of_a_join(database, patterns):
    requests = {
        name: Request("aggregate", "products", {"pipeline": pipeline}) for name, pipeline in REWRITTEN.items()
    }
    for name, request in requests.items():
        after = rewrite(request, patterns)
        assert isinstance(after, Rewritten), name
        assert "'from': 'reviews'" not in str(after.requests), name
        assert (0, 1) == differs(database, patterns, request), name
    # What is kept wrong is noticed.
    database["products"].update_many({}, {"$inc": {"n": 1, "mean": 1, "total": 1, "best": 1, "worst": 1}})
    database["products"].update_many({}, {"$set": {"recent.0.rating": 99}})
    for name, request in requests.items():
        assert (1, 1) == differs(database, patterns, request), name


@pytest.mark.parametrize("name", sorted(LEFT))
def test_what_the_parent_does_not_hold_is_left_as_it_is(name):
    assert rewrite(Request("aggregate", "products", {"pipeline": LEFT[name]}), draft_of(MODELS)) is None


def test_joins_of_the_parent_lead_to_a_finding_that_they_are_tried_with(database, uri):
    """What requests on the parent make of its children is declared, and takes the place of the join."""
    products = [{"_id": ObjectId(), "name": f"p{number}"} for number in range(40)]
    database["products"].insert_many(products)
    database["reviews"].insert_many(
        [
            {
                "product_id": products[number % 40]["_id"],
                "rating": number % 5,
                "text": "t",
                "date": dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(minutes=number),
            }
            for number in range(2_000)
        ]
    )
    pages = [
        [
            {"$match": {"_id": product["_id"]}},
            {"$lookup": JOIN},
            {"$project": {"name": 1, "n": {"$size": "$reviews"}, "mean": {"$avg": "$reviews.rating"}}},
        ]
        for product in products
    ]
    shown = {"$project": {"rating": 1, "date": 1}}
    pages += [
        [{"$match": {"_id": each["_id"]}}, {"$lookup": {**JOIN, "pipeline": [*NEWEST, shown]}}]
        for each in products
    ]
    requests = [
        Request("aggregate", "products", {"pipeline": pipeline}, at=number / 10)
        for number, pipeline in enumerate(pages)
    ]
    started = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)
    report = scan(database, workload=[each.as_profile(database.name, started) for each in requests])
    found = {each.code: each for each in report.findings if each.where == "reviews.product_id"}
    assert {"computed", "subset"} <= set(found)
    for code, fields in (("computed", ("Count(", "Average(")), ("subset", ("size=3",))):
        declaration = found[code].declaration
        assert all(field in declaration for field in fields), declaration
        (group,) = chosen(requests, found[code].draft)
        assert group.recorded == chosen(requests, draft_of(load_models(declaration)))[0].recorded
        assert 40 == group.recorded
    # The card holds what requests read, and nothing else.
    card = found["subset"].declaration.partition("class ReviewCard")[2].partition("class ")[0]
    assert "rating" in card
    assert "text" not in card


def test_what_is_not_rewritten_is_said_with_the_reason(database):
    patterns = draft_of(MODELS)
    collector = reads_of(patterns)
    requests = [Request("aggregate", "products", {"pipeline": pipeline}) for pipeline in LEFT.values()]
    requests.append(Request("count", "reviews", {"query": {"product_id": 1, "rating": 5}}))
    other = {"filter": {"product_id": 1}, "sort": {"rating": 1}, "limit": 2}
    requests.append(Request("find", "reviews", other))
    requests.append(Request("find", "products", {"filter": {"name": "p1"}}))
    collect(requests, [collector])
    assert [] == collector.groups()
    # All but the read that has nothing to do with the patterns.
    assert len(requests) - 1 == sum(collector.missed.values())
    assert any("holds" in text for text in collector.missed)
    assert any("counts only some" in text for text in collector.missed)
    assert any("sorts otherwise" in text for text in collector.missed)
