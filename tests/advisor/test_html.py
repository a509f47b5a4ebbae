"""The HTML report: it asks for nothing, runs nothing foreign, and shows everything.

Covers: advisor/pictures
"""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import pytest

from tests.advisor.symptoms import CASES
from treadle.advisor import Report, scan
from treadle.advisor.facts import CollectionFacts, Distribution, Relation, Scan
from treadle.advisor.html import html
from treadle.advisor.pictures import graph

HOSTILE = "<script>window.hacked=1</script>"
IMAGE = '"><img src=x onerror="window.hacked=1">'


@pytest.fixture
def report(database: Any) -> Report:
    """A database with findings, references, orphans, and names that would like to be code."""
    for code in ("outlier", "tree", "normalised-everything", "subset"):
        CASES[code].symptom(database)
    database[HOSTILE].insert_many(
        [
            {HOSTILE: [1] * n, IMAGE: {HOSTILE: "x"}, "\u202ebidi\x07": n if n % 2 else "n", "]]>": 1}
            for n in range(120)
        ]
    )
    database["javascript:window.hacked=1"].insert_one({"a": 1})
    database["order_lines"].insert_one({"_id": "o", "order_id": 99_999, "product_id": 5, "quantity": 1})
    return scan(database)


def related(names: int) -> Scan:
    """A database whose collections all refer to each other."""
    collections = {f"c{n}": CollectionFacts(f"c{n}", count=n) for n in range(names)}
    relations = tuple(
        Relation(one, f"{other}_id", other, "_id", False, 9, Distribution((), 0.0), 9, 0, 0, 9)
        for one in collections
        for other in collections
        if one != other
    )
    return Scan("knot", (6, 0), collections, relations, names=tuple(collections))


def test_a_knot_of_references_is_drawn_at_once() -> None:
    """Where everything refers to everything there are more ways than anyone could follow."""
    began = time.process_time()
    drawn = graph(related(30), {})
    assert time.process_time() - began < 30
    assert 30 == drawn.count('<g class="node')
    assert 30 * 29 == drawn.count('marker-end="url(#tip)"')


def test_of_many_collections_those_with_references_are_drawn() -> None:
    knot = related(5)
    alone = {f"big{n}": CollectionFacts(f"big{n}", count=10**6) for n in range(200)}
    scan = dataclasses.replace(knot, collections={**alone, **knot.collections})
    drawn = graph(scan, {})
    assert all(f">c{n}</text>" in drawn for n in range(5))
    assert "165 more are not drawn" in drawn


def test_names_are_escaped_and_the_policy_allows_nothing(report: Report) -> None:
    """Nothing of the database becomes a tag or an attribute, and everything that was found is there."""
    text = html(report)
    assert len(report.findings) == text.count("<article")
    assert len(report.scan.collections) == text.count('<g class="node')
    assert not re.search(r"<(img|iframe|link|object|embed|a) ", text)
    assert HOSTILE not in text
    assert IMAGE not in text
    assert "\u202e" not in text
    assert 1 == text.count("<script>")
    assert "default-src 'none'" in text
    assert not re.search(
        r"https?://|//[a-z]|url\(|@import|src=['\"]",
        re.sub(r"&[a-z#0-9]+;", "", text.replace("url(#tip)", "")).replace("src=x", ""),
    )
