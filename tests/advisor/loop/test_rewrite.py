"""Requests are rewritten as a client would write them, and what a pattern cannot answer is left alone.

Covers: advisor/loop/answers, advisor/loop/request_shape, advisor/loop/compare, advisor/loop/units
"""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from tests.advisor.drafts import chosen, draft_of
from tests.advisor.loop.shop_models import Customer, Order
from treadle import Average, Count, Document, Id, Max, Min, Subset, Sum
from treadle.advisor.loop.answers import same, same_first, same_rows
from treadle.advisor.loop.compare import compare_reads
from treadle.advisor.loop.rewrite import Rewritten, rewrite, unchanged
from treadle.advisor.loop.units import Group, collect, describe, grouped
from treadle.advisor.loop.workload_file import Request
from treadle.advisor.loop.write_cost import WriteCounter, watched_fields


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    date: dt.datetime


class ReviewCard(BaseModel):
    rating: int
    date: dt.datetime


class Product(Document, collection="products"):
    name: str
    n: Annotated[int, Count(Review, by="product_id")] = 0
    total: Annotated[int, Sum(Review, "rating", by="product_id")] = 0
    mean: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    best: Annotated[int | None, Max(Review, "rating", by="product_id")] = None
    worst: Annotated[int | None, Min(Review, "rating", by="product_id")] = None
    recent: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-date", size=5)] = []


PATTERNS = draft_of([Customer, Order, Review, Product])
JOIN = {"from": "customers", "localField": "customer_id", "foreignField": "_id", "as": "customer"}
FULL = {"_id": 7, "name": "Ada", "email": "a@b", "tier": "gold"}


def rewritten(request: Request | tuple[Request, ...]) -> Rewritten:
    after = rewrite(request, PATTERNS)
    assert after is not None
    return after


def aggregate(collection: str, *stages: dict[str, Any]) -> Request:
    return Request("aggregate", collection, {"pipeline": list(stages)})


def test_a_lookup_becomes_a_find_of_the_card():
    request = aggregate(
        "orders", {"$match": {"status": "open"}}, {"$sort": {"_id": 1}}, {"$limit": 5}, {"$lookup": JOIN}
    )
    after = rewritten(request)
    (found,) = after.requests
    assert ("find", {"filter": {"status": "open"}, "sort": {"_id": 1}, "limit": 5}) == (
        found.operation,
        found.body,
    )
    before = [[{"_id": 1, "customer_id": 7, "customer": [FULL]}]]
    assert after.same(before, [[{"_id": 1, "customer_id": 7, "customer": {"name": "Ada", "tier": "gold"}}]])
    assert not after.same(
        before, [[{"_id": 1, "customer_id": 7, "customer": {"name": "Eve", "tier": "gold"}}]]
    )
    assert not after.same(before, [[{"_id": 1, "customer_id": 7}]])
    assert not after.same(before, [[]])
    assert "customers" in after.note


def test_joined_documents_that_tie_may_come_in_another_order():
    """A plan's own index gives them in another order than a scan did."""
    request = aggregate("orders", {"$sort": {"day": -1}}, {"$lookup": JOIN})
    after = rewritten(request)
    rows = [
        {"_id": key, "day": day, "customer_id": 7, "customer": [FULL]}
        for key, day in ((1, 9), (2, 8), (3, 8))
    ]
    found = [{**each, "customer": {"name": "Ada", "tier": "gold"}} for each in rows]
    assert after.same([rows], [[found[0], found[2], found[1]]])
    assert not after.same([rows], [[found[1], found[0], found[2]]])
    assert not after.same([rows], [[*found[:2], {**found[2], "_id": 4}]])


def test_names_of_what_was_joined_become_names_in_the_card():
    request = aggregate(
        "orders",
        {"$lookup": {**JOIN, "as": "buyer"}},
        {"$unwind": "$buyer"},
        {"$match": {"buyer.tier": "gold"}},
        {"$project": {"who": "$buyer.name", "id": "$buyer._id"}},
    )
    after = rewritten(request)
    assert [
        {"$match": {"customer": {"$ne": None}}},
        {"$match": {"customer.tier": "gold"}},
        {"$project": {"who": "$customer.name", "id": "$customer_id"}},
    ] == after.requests[0].body["pipeline"]
    assert "" == after.note


@pytest.mark.parametrize(
    "stages",
    [
        [{"$lookup": JOIN}, {"$project": {"customer.email": 1}}],
        [{"$lookup": JOIN}, {"$project": {"customer": {"email": 1}}}],
        [{"$lookup": JOIN}, {"$replaceRoot": {"newRoot": {"$first": "$customer"}}}],
        [{"$lookup": {**JOIN, "localField": "other_id"}}],
        [{"$lookup": {**JOIN, "from": "products"}}],
        [{"$lookup": {**JOIN, "pipeline": [{"$match": {"tier": "gold"}}]}}],
        [{"$match": {"status": "open"}}],
    ],
)
def test_a_join_that_the_card_cannot_answer_stays(stages):
    assert rewrite(aggregate("orders", *stages), PATTERNS) is None


def test_a_read_and_the_reads_by_id_that_follow_it_are_one_page():
    first = Request(
        "find", "orders", {"filter": {"status": "open"}, "projection": {"status": 1}}, at=1.0, session=1
    )
    second = Request("find", "customers", {"filter": {"_id": 7}, "limit": 1}, at=1.01, session=1)
    elsewhere = Request("find", "customers", {"filter": {"_id": 8}}, at=1.005, session=2)
    late = Request("find", "customers", {"filter": {"_id": 7}}, at=9.0, session=1)
    groups = grouped([first, elsewhere, second, late], PATTERNS, lambda unit: True)
    units = [unit for group in groups for unit in group.units]
    assert [(first, second), (elsewhere,), (late,)] == sorted(
        units, key=lambda unit: (len(unit) < 2, unit[0].at)
    )
    after = rewritten((first, second))
    assert 1 == len(after.requests)
    assert {"status": 1, "customer_id": 1, "customer": 1} == after.requests[0].body["projection"]
    before = [[{"_id": 1, "status": "open"}], [FULL]]
    card = {"name": "Ada", "tier": "gold"}
    assert after.same(before, [[{"_id": 1, "status": "open", "customer_id": 7, "customer": card}]])
    assert not after.same(
        before, [[{"_id": 1, "status": "open", "customer_id": 7, "customer": {**card, "name": "E"}}]]
    )
    # What was read by id is no order's customer: the second read was about something else.
    assert not after.same(before, [[{"_id": 1, "status": "open", "customer_id": 9, "customer": card}]])


def test_reads_that_follow_count_only_where_they_are_about_what_was_read():
    """Sessions are reused at once, so that a read of an unrelated customer may come right after an order."""
    orders = Request("find", "orders", {"filter": {"_id": 1}})
    customer = Request("find", "customers", {"filter": {"_id": 7}})
    after = rewritten((orders, customer))
    assert after.applies is not None
    assert after.applies([[{"_id": 1, "customer_id": 7}], [FULL]])
    assert not after.applies([[{"_id": 1, "customer_id": 9}], [FULL]])
    assert not after.applies([[], [FULL]])
    # The client knows the customer from its own filter.
    hidden = Request("find", "orders", {"filter": {"customer_id": 7}, "projection": {"status": 1}})
    after = rewritten((hidden, customer))
    assert after.applies is not None
    assert after.applies([[{"_id": 1, "status": "open"}], [FULL]])
    assert not after.applies([[], [FULL]])


def test_reads_of_something_else_are_neither_compared_nor_counted(database):
    card = {"name": "Ada", "tier": "gold"}
    database["customers"].insert_many([FULL, {**FULL, "_id": 8}])
    database["orders"].insert_one({"_id": 1, "customer_id": 7, "status": "open", "customer": card})
    order = Request("find", "orders", {"filter": {"_id": 1}})
    units = [(order, Request("find", "customers", {"filter": {"_id": key}})) for key in (7, 8)]
    (result,), _ = compare_reads(database, database, [Group(units, recorded=100)], PATTERNS, 10, rounds=2)
    assert (50, 5.0, 1, 0) == (result.recorded, result.per_second, result.compared, result.different)


def test_a_read_that_asks_for_more_than_the_card_holds_is_not_left_out():
    orders = Request("find", "orders", {"filter": {"_id": 1}}, at=1.0, session=1)
    for projection, pages in (({"name": 1, "email": 1}, 0), ({"email": 1}, 0), ({"name": 1, "_id": 0}, 1)):
        body = {"filter": {"_id": 7}, "projection": projection}
        customer = Request("find", "customers", body, at=1.01, session=1)
        assert pages == len(chosen([orders, customer], PATTERNS))


def test_counts_and_sums_become_reads_of_fields():
    sums = {
        "_id": None,
        "n": {"$sum": 1},
        "t": {"$sum": "$rating"},
        "m": {"$avg": "$rating"},
        "b": {"$max": "$rating"},
        "w": {"$min": "$rating"},
    }
    after = rewritten(aggregate("reviews", {"$match": {"product_id": 4}}, {"$group": sums}))
    (found,) = after.requests
    assert ("find", "products", {"_id": 4}) == (found.operation, found.collection, found.body["filter"])
    before = [[{"_id": None, "n": 3, "t": 9, "m": 3.0, "b": 5, "w": 1}]]
    assert after.same(
        before, [[{"_id": 4, "n": 3, "total": 9, "mean": 3.0000000000001, "best": 5, "worst": 1}]]
    )
    assert not after.same(before, [[{"_id": 4, "n": 4, "total": 9, "mean": 3.0, "best": 5, "worst": 1}]])
    assert after.same([[]], [[{"_id": 4, "n": 0, "total": 0, "mean": None}]])
    assert not after.same(before, [[]])


def test_counts_in_every_form():
    for request in (
        Request("count", "reviews", {"query": {"product_id": 4}}),
        aggregate("reviews", {"$match": {"product_id": {"$eq": 4}}}, {"$count": "n"}),
        aggregate("reviews", {"$match": {"product_id": 4}}, {"$group": {"_id": 1, "n": {"$sum": 1}}}),
    ):
        after = rewritten(request)
        assert after.same([[{"n": 3}]], [[{"_id": 4, "n": 3}]])
    several = aggregate(
        "reviews",
        {"$match": {"product_id": {"$in": [4, 5]}}},
        {"$group": {"_id": "$product_id", "n": {"$sum": 1}}},
    )
    after = rewritten(several)
    assert after.same([[{"_id": 5, "n": 1}, {"_id": 4, "n": 3}]], [[{"_id": 4, "n": 3}, {"_id": 5, "n": 1}]])
    assert not after.same([[{"_id": 5, "n": 1}]], [[{"_id": 4, "n": 1}]])


@pytest.mark.parametrize(
    "request_",
    [
        Request("count", "reviews", {"query": {"product_id": 4, "rating": 5}}),
        Request("count", "reviews", {"query": {"product_id": {"$gt": 4}}}),
        Request("count", "reviews", {"query": {"product_id": 4}, "limit": 2}),
        aggregate("reviews", {"$match": {"product_id": 4}}, {"$group": {"_id": "$rating", "n": {"$sum": 1}}}),
        aggregate(
            "reviews", {"$match": {"product_id": 4}}, {"$group": {"_id": None, "n": {"$push": "$rating"}}}
        ),
        aggregate(
            "reviews", {"$match": {"product_id": 4}}, {"$group": {"_id": None, "n": {"$sum": "$stars"}}}
        ),
        Request("find", "reviews", {"filter": {"product_id": 4}, "sort": {"date": -1}, "limit": 6}),
        Request("find", "reviews", {"filter": {"product_id": 4}, "sort": {"date": 1}, "limit": 5}),
        Request(
            "find", "reviews", {"filter": {"product_id": 4}, "sort": {"date": -1}, "limit": 5, "skip": 5}
        ),
        Request("find", "reviews", {"filter": {"rating": 4}, "sort": {"date": -1}, "limit": 5}),
    ],
)
def test_what_no_pattern_answers_stays(request_):
    assert rewrite(request_, PATTERNS) is None


def test_a_sort_and_limit_become_a_read_of_the_subset():
    body = {"filter": {"product_id": 4}, "sort": {"date": -1}, "limit": 2, "projection": {"rating": 1}}
    after = rewritten(Request("find", "reviews", body))
    assert ("products", {"_id": 4}, {"recent": 1}) == (
        after.requests[0].collection,
        after.requests[0].body["filter"],
        after.requests[0].body["projection"],
    )
    before = [[{"_id": 1, "rating": 5}, {"_id": 2, "rating": 4}]]
    items = [{"_id": 1, "rating": 5}, {"_id": 2, "rating": 4}, {"_id": 3, "rating": 1}]
    assert after.same(before, [[{"_id": 4, "recent": items}]])
    assert not after.same(before, [[{"_id": 4, "recent": items[:1]}]])
    assert rewrite(Request("find", "reviews", {**body, "projection": {"text": 1}}), PATTERNS) is None


def test_of_documents_that_tie_either_may_come_last():
    def row(key: int, date: int, rating: int = 1) -> dict[str, int]:
        return {"_id": key, "date": date, "rating": rating}

    assert same_first([row(1, 9), row(2, 8)], [row(1, 9), row(3, 8)], ["date"])
    assert same_first([row(1, 9), row(2, 9), row(4, 1)], [row(2, 9), row(1, 9), row(4, 1)], ["date"])
    assert not same_first([row(1, 9), row(2, 8)], [row(5, 9), row(2, 8)], ["date"])
    assert not same_first([row(1, 9), row(2, 8)], [row(1, 9), row(2, 8, 5)], ["date"])
    assert not same_first([row(1, 9)], [row(1, 7)], ["date"])


@pytest.mark.parametrize("projection", [None, {"rating": 1, "date": 1}, {"rating": 1}, {"_id": 0, "date": 1}])
def test_embedded_documents_that_tie_may_come_in_another_order(projection):
    """The subset breaks ties by id; a read that sorts by date alone does not."""
    day, later = dt.datetime(2026, 1, 1), dt.datetime(2026, 1, 2)
    stored = [
        {"_id": 1, "rating": 5, "date": later},
        {"_id": 2, "rating": 4, "date": day},
        {"_id": 3, "rating": 3, "date": day},
    ]
    body = {"filter": {"product_id": 4}, "sort": {"date": -1}, "limit": 3, "projection": projection}
    after = rewritten(Request("find", "reviews", body))

    def answer(*documents: dict[str, Any]) -> list[list[dict[str, Any]]]:
        shown = {"_id": 1, **(projection or stored[0])}
        names = [name for name in stored[0] if shown.get(name, 0) != 0]
        return [[{name: each[name] for name in names} for each in documents]]

    items = [[{"_id": 4, "recent": stored}]]
    assert after.same(answer(*stored), items)
    assert after.same(answer(stored[0], stored[2], stored[1]), items)
    assert not after.same(answer(*stored[:2]), items)
    # Which of them is the newest is seen in the items, where the answer does not show it.
    assert not after.same(answer(stored[1], stored[0], stored[2]), items)


def test_an_index_may_give_documents_that_tie_in_another_order():
    request = Request("find", "orders", {"filter": {"status": "open"}, "sort": {"day": -1}})
    rows = [{"_id": 1, "day": 9}, {"_id": 2, "day": 8}, {"_id": 3, "day": 8}]
    tied = [rows[0], rows[2], rows[1]]
    other = [rows[0], rows[1], {"_id": 4, "day": 8}]
    after = unchanged((request,))
    assert after is not None
    assert after.same([rows], [tied])
    assert not after.same([rows], [[rows[1], rows[0], rows[2]]])
    assert not after.same([rows], [other])
    cut = unchanged((replace(request, body={**request.body, "limit": 3}),))
    assert cut is not None
    assert cut.same([rows], [other])
    assert not cut.same([rows], [[{"_id": 4, "day": 9}, *rows[1:]]])
    # What the rows do not show cannot tie.
    plain = [[{"_id": each["_id"]} for each in answer] for answer in (rows, tied)]
    assert not after.same(plain[:1], plain[1:])


def test_groups_count_all_requests_and_keep_some():
    requests = [Request("count", "reviews", {"query": {"product_id": key}}) for key in range(1_000)]
    (group,) = chosen(requests, PATTERNS, kept_max=10)
    assert 1_000 == group.recorded
    assert 5 <= len(group.units) <= 10
    keys = [unit[0].body["query"]["product_id"] for unit in group.units]
    assert max(keys) > 500 > min(keys)
    assert "reviews: count by product_id" == describe(group.units[0])


def test_writes_that_no_pattern_follows_cost_nothing():
    follows = [
        Request("insert", "reviews", {"document": {"_id": 1}}),
        Request("update", "reviews", {"q": {"_id": 1}, "u": {"$set": {"rating": 2}}}),
        Request("update", "customers", {"q": {"_id": 1}, "u": {"$set": {"name": "B"}}}),
        Request("delete", "reviews", {"q": {"_id": 1}, "limit": 1}),
    ]
    others = [
        Request("update", "customers", {"q": {"_id": 1}, "u": {"$set": {"email": "x"}}}),
        Request("update", "products", {"q": {"_id": 1}, "u": {"$set": {"name": "x"}}}),
        Request("insert", "elsewhere", {"document": {"_id": 1}}),
    ]
    counter = WriteCounter(watched_fields(PATTERNS))
    collect([*follows, *others], [counter])
    assert {
        ("reviews", "insert"): 1,
        ("reviews", "update"): 1,
        ("customers", "update"): 1,
        ("reviews", "delete"): 1,
    } == counter.documents
    assert {"reviews": {"rating": 1}, "customers": {"name": 1}} == counter.changed


def test_answers_are_compared_by_meaning():
    assert same({"a": 1, "b": None}, {"a": 1.0})
    assert same([0.1 + 0.2], [0.3])
    assert not same(10**17, 10**17 + 1)
    assert not same("1", 1)
    assert not same(True, 1)
    assert same({"a": float("nan")}, {"a": float("nan")})
    assert not same(float("nan"), 0.0)
    assert same_rows([{"a": 1}, {"a": 2}], [{"a": 2}, {"a": 1}], ordered=False)
    assert not same_rows([{"a": 1}, {"a": 2}], [{"a": 2}, {"a": 1}], ordered=True)
