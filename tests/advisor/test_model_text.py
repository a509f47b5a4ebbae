"""Proposals are data: render -> load -> read back gives the same; one module runs, and reads what is stored.

Covers: advisor/proposals, advisor/model_text
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from bson import ObjectId

from tests.advisor.drafts import draft_of, without_tie
from tests.advisor.symptoms import CASES, at, profiled
from treadle import Store
from treadle.advisor import Limits, Report, scan
from treadle.advisor.loop.plan import together
from treadle.advisor.model_text import load_models, render, render_module
from treadle.advisor.proposals import Conflict, Derived, Draft, Index, merge, without_prefixes
from treadle.errors import UsageError

# Symptoms on collections of their own, so that one database can have them all.
APART = (
    "extended-reference", "subset", "bucket", "outlier", "tree", "approximation", "huge-array", "blobs",
    "mixed-types", "query-without-index", "too-many-indexes",
)  # fmt: skip
SUBSETS = 4
READ_MAX = 100
LIMITS = Limits(index_age_seconds_min=0.0)


def report_on(database: Any, *codes: str) -> Report:
    for code in codes:
        CASES[code].symptom(database)
    return scan(database, limits=LIMITS)


def normal(draft: Draft) -> tuple[Any, Any]:
    """What of a draft its models say: not the name that a field might have had, nor the order."""
    derived = {replace(each, sort=without_tie(each.sort), other_name="") for each in draft.derived}
    return derived, {(each.collection, each.keys) for each in draft.indexes}


def check(text: str, database: Any) -> Store:
    """It runs, a dry set-up accepts it, and it reads what is stored."""
    assert all(len(line) <= 110 for line in text.splitlines())
    store = Store(database, models=load_models(text))
    store.setup(dry_run=True)
    for model, entry in store.graph.entries.items():
        if entry.layout is None:
            stored = store.count(model, {})
            assert min(READ_MAX, stored) == sum(1 for _ in store.find(model, {}, limit=READ_MAX))
    return store


def test_what_is_rendered_is_read_back_for_any_findings(database: Any) -> None:
    report = report_on(database, *APART)
    assert set(APART) <= {each.code for each in report.findings}
    chance = random.Random(11)
    chosen = [[each] for each in report.findings] + [list(report.findings)]
    chosen += [
        chance.sample(report.findings, chance.randint(1, len(report.findings))) for _ in range(SUBSETS)
    ]
    for findings in chosen:
        merged = merge(each.draft for each in findings)
        for text in (render(report.scan, merged), render_module(report.scan, merged)):
            assert not re.search(r"\w_2\b", text), text
            store = check(text, database)
            assert normal(merged) == normal(draft_of(store.graph.entries))


@pytest.mark.parametrize("code", ["computed", "normalised-everything", "redundant-index"])
def test_other_symptoms_are_read_back_as_well(code: str, database: Any) -> None:
    report = report_on(database, code)
    merged = merge(each.draft for each in report.findings)
    store = check(render_module(report.scan, merged), database)
    assert normal(merged) == normal(draft_of(store.graph.entries))


def camel_shop(database: Any) -> None:
    """Reviews that refer to two products, are counted, averaged, joined and paged; `product` is taken."""
    products = [ObjectId() for _ in range(30)]
    database["products"].insert_many(
        [
            {"_id": each, "name": f"p{n}", "listPrice": 9.5, "spec": {"w": 1}}
            for n, each in enumerate(products)
        ]
    )
    database["reviews"].insert_many(
        [
            {
                "productId": products[n % 30],
                "mainProductId": products[n * 7 % 30],
                "product": "x",
                "rating": n % 5,
                "createdAt": at(n / 10),
            }
            for n in range(600)
        ]
    )
    with profiled(database):
        for each in products[:20]:
            for path in ("productId", "mainProductId"):
                matching: dict[str, Any] = {"$match": {path: each}}
                join = {"from": "products", "localField": path, "foreignField": "_id", "as": "p"}
                database["reviews"].count_documents({path: each})
                mean = {"$group": {"_id": None, "a": {"$avg": "$rating"}}}
                list(database["reviews"].aggregate([matching, mean]))
                list(database["reviews"].find({path: each}).sort("createdAt", -1).limit(5))
                for _ in range(4):
                    list(database["reviews"].aggregate([matching, {"$lookup": join}]))


def test_two_findings_on_one_collection_have_names_that_say_by_which_reference(database: Any) -> None:
    camel_shop(database)
    report = scan(database)
    wanted = [each for each in report.findings if each.code != "no-validation"]
    assert 6 == len(wanted)
    left_out: list[Any] = []
    draft, text, chosen = together(report.scan, wanted, left_out)
    assert ([], wanted) == (left_out, chosen)
    store = check(text, database)
    assert {
        *("ratingAverage", "reviewCount", "recentReviews"),
        *("ratingAverageByProductId", "reviewCountByProductId", "recentReviewsByProductId"),
    } == set(draft.fields("products"))
    assert {"productCard", "mainProduct"} == set(draft.fields("reviews"))
    assert {"stream"} == {rule.maintain for rule in store.graph.rules}
    assert {"off"} == {entry.model.__treadle__.validation for entry in store.graph.entries.values()}
    store.setup()
    store.rebuild()
    product = database["products"].find_one()
    reviews = database["reviews"]
    assert reviews.count_documents({"mainProductId": product["_id"]}) == product["reviewCount"]
    assert reviews.count_documents({"productId": product["_id"]}) == product["reviewCountByProductId"]
    review = reviews.find_one()
    assert ("x", {"name", "listPrice"}) == (review["product"], set(review["productCard"]))


def test_a_module_that_does_not_run_is_refused() -> None:
    with pytest.raises(UsageError, match=r"models\.py does not run") as refused:
        load_models("class X(")
    assert "plan-folder-invalid" == refused.value.code


def test_an_empty_draft_is_an_empty_module(database: Any) -> None:
    assert [] == load_models(render_module(scan(database).scan, Draft()))


def test_two_values_for_one_name_take_the_other_name_or_conflict() -> None:
    first = Derived("products", "n", "reviews", "product_id", operator="count", other_name="n_by_product_id")
    second = replace(first, by="main_id", other_name="n_by_main_id")
    assert (first,) == merge([Draft((first,)), Draft((first,))]).derived
    assert ["n", "n_by_main_id"] == [each.name for each in merge([Draft((first,)), Draft((second,))]).derived]
    with pytest.raises(Conflict):
        merge([Draft((first,)), Draft((replace(second, other_name="n"),))])


def test_an_index_that_begins_another_is_not_proposed() -> None:
    short, long = Index("c", (("a", 1),)), Index("c", (("a", 1), ("b", -1)))
    other, elsewhere = Index("c", (("b", 1),)), Index("d", (("a", 1),))
    assert (long, other, elsewhere) == without_prefixes([short, long, other, elsewhere, long])
    assert () == without_prefixes([short], [long])
