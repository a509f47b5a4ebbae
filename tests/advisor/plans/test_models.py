"""One models.py for several findings: it runs, reads what is stored, and is called like what is stored."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from bson import ObjectId

from tests.advisor.symptoms import CASES, at, profiled
from treadle import Store
from treadle.advisor import Limits, Report, scan
from treadle.advisor.plans.models import combine, load_models
from treadle.advisor.plans.pieces import Class
from treadle.errors import UsageError

# Symptoms on collections of their own, so that one database can have them all.
APART = (
    "extended-reference", "subset", "bucket", "outlier", "tree", "approximation", "huge-array", "blobs", "mixed-types", "query-without-index", "too-many-indexes",
)  # fmt: skip
SUBSETS = 4
READ_MAX = 100
LIMITS = Limits(index_age_seconds_min=0.0)


def report_on(database: Any, *codes: str) -> Report:
    for code in codes:
        CASES[code].symptom(database)
    return scan(database, limits=LIMITS)


def check(text: str, database: Any) -> Store:
    """It runs, a dry set-up accepts it, and it reads what is stored."""
    assert not re.search(r"\w_2\b", text), text
    assert all(len(line) <= 110 for line in text.splitlines())
    store = Store(database, models=load_models(text))
    store.setup(dry_run=True)
    for model, entry in store.graph.entries.items():
        if entry.layout is None:
            stored = store.count(model, {})
            assert min(READ_MAX, stored) == sum(1 for _ in store.find(model, {}, limit=READ_MAX))
    return store


def test_any_findings_go_into_one_module_that_reads_what_is_stored(database: Any) -> None:
    report = report_on(database, *APART)
    assert set(APART) <= {each.code for each in report.findings}
    chance = random.Random(11)
    chosen = [list(report.findings)]
    chosen += [
        chance.sample(report.findings, chance.randint(1, len(report.findings))) for _ in range(SUBSETS)
    ]
    for findings in chosen:
        combined = combine(report.scan, findings)
        assert sorted(map(id, findings)) == sorted(
            map(id, [*combined.findings, *(each for each, _ in combined.left_out)])
        )
        assert () == combined.left_out
        check(combined.text, database)


@pytest.mark.parametrize("code", ["computed", "normalised-everything", "redundant-index"])
def test_other_symptoms_are_declared_as_well(code: str, database: Any) -> None:
    report = report_on(database, code)
    combined = combine(report.scan, report.findings)
    assert () == combined.left_out
    check(combined.text, database)


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


def test_names_fit_what_is_stored_and_say_what_they_show(database: Any) -> None:
    """Findings on one collection are one class; models that refer to each other are both there."""
    camel_shop(database)
    report = scan(database)
    wanted = [each for each in report.findings if each.code != "no-validation"]
    assert 6 == len(wanted)
    combined = combine(report.scan, wanted)
    assert () == combined.left_out
    store = check(combined.text, database)
    fields = {
        "products": {
            *("ratingAverage", "reviewCount", "recentReviews"),
            *("ratingAverageByProductId", "reviewCountByProductId", "recentReviewsByProductId"),
        },
        "reviews": {"productCard", "mainProduct"},
    }
    assert fields == {
        name: {each.field for each in combined.places if each.collection == name} for name in fields
    }
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


def test_a_module_that_does_not_run_is_refused(database: Any) -> None:
    with pytest.raises(UsageError, match=r"models\.py does not run") as refused:
        load_models("class X(")
    assert "plan-folder-invalid" == refused.value.code


def test_no_finding_gives_an_empty_module(database: Any) -> None:
    report = scan(database)
    assert [] == load_models(combine(report.scan, []).text)


def test_an_index_that_begins_another_is_not_declared() -> None:
    """Neither where a finding declares the longer one, nor where a pattern needs it."""
    lines = [
        '    IndexModel([("a", 1)]),',
        '    IndexModel([("a", 1), ("b", -1)], name="both"),',
        '    IndexModel([("c", 1)]),',
        '    IndexModel([("a", 1)], unique=True),',
    ]
    made = Class("A", ["Document"], {"indexes": "\n".join(["[", *lines, "]"])})
    made.prune_indexes([(("c", 1), ("d", 1))])
    assert "\n".join(["[", lines[1], lines[3], "]"]) == made.keywords["indexes"]
    made = Class("A", ["Document"], {"indexes": "\n".join(["[", lines[0], "]"])})
    made.prune_indexes([(("a", 1), ("d", 1))])
    assert "indexes" not in made.keywords
