"""Indexes that are hidden serve no query, and a small log needs no validator.

Covers: advisor/rules/redundant_index, advisor/rules/query_without_index, advisor/rules/no_validation
Covers: advisor/statistics
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from treadle.advisor.facts import CollectionFacts, FieldFacts, IndexFacts, Query, Scan, Shape, Workload
from treadle.advisor.interface import Finding
from treadle.advisor.rules import no_validation, query_without_index, redundant_index
from treadle.advisor.statistics import index_facts

A = FieldFacts("a", {"int": 5_000}, 5_000, ("a",))
FACTS = CollectionFacts("events", count=5_000, looked_at=5_000, fields={"a": A}, shapes=(Shape((), 5_000),))


def findings(find: Callable[[Scan], Iterator[Finding]], facts: CollectionFacts, *queries: Query) -> list[str]:
    workload = Workload("test", queries, 60.0) if queries else None
    return [each.where for each in find(Scan("shop", (6, 0), {facts.name: facts}, workload=workload))]


def test_a_visible_index_is_not_redundant_beside_a_hidden_one() -> None:
    short, long = IndexFacts("a_1", (("a", 1),)), IndexFacts("a_1_b_1", (("a", 1), ("b", 1)))
    assert ["events"] == findings(redundant_index.find, replace(FACTS, indexes=(short, long)))
    hidden = replace(long, hidden=True)
    assert [] == findings(redundant_index.find, replace(FACTS, indexes=(short, hidden)))
    both = (replace(short, hidden=True), hidden)
    assert ["events"] == findings(redundant_index.find, replace(FACTS, indexes=both))


def test_a_hidden_index_serves_no_query() -> None:
    scans = Query("events", "find", ("a",), count=20, examined=100_000, returned=20, collection_scan=True)
    index = IndexFacts("a_1", (("a", 1),))
    assert [] == findings(query_without_index.find, replace(FACTS, indexes=(index,)), scans)
    hidden = replace(FACTS, indexes=(replace(index, hidden=True),))
    assert ["events.a"] == findings(query_without_index.find, hidden, scans)


def test_listed_indexes_say_whether_they_are_hidden() -> None:
    listed = {"name": "a_1", "key": {"a": 1}}
    now = dt.datetime.now(dt.UTC)
    assert [False, True] == [
        index_facts({**listed, **more}, 1, None, now).hidden for more in ({}, {"hidden": True})
    ]


@pytest.mark.parametrize(
    ("name", "count", "shapes", "expected"),
    [
        ("audit_log", 500, 1, []),
        ("audit_log", 50_000, 1, ["audit_log"]),
        ("audit_log", 500, 2, ["audit_log"]),
        ("people", 500, 1, ["people"]),
    ],
)
def test_a_small_log_of_one_shape_needs_no_validator(
    name: str, count: int, shapes: int, expected: list[str]
) -> None:
    facts = replace(FACTS, name=name, count=count, shapes=(Shape((), count),) * shapes)
    assert expected == findings(no_validation.find, facts)


def test_a_collection_that_is_changed_is_no_log() -> None:
    facts = replace(FACTS, name="orders", count=500)
    insert, update = (Query("orders", kind, (), count=9) for kind in ("insert", "update"))
    assert [] == findings(no_validation.find, facts, insert)
    assert ["orders"] == findings(no_validation.find, facts, insert, update)
