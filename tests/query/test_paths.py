"""Dotted paths through stored documents."""

from __future__ import annotations

import copy

import pytest

from treadle.query.paths import drop, has, put, top, value_at

DOCUMENT = {"a": 1, "b": {"c": {"d": None}, "e": [1]}}


@pytest.mark.parametrize(
    ("path", "there", "value"),
    [
        ("a", True, 1),
        ("b.c", True, {"d": None}),
        ("b.c.d", True, None),
        ("x", False, None),
        ("a.x", False, None),
        ("b.x", False, None),
        ("b.x.y", False, None),
        ("b.c.d.x", False, None),
        # Arrays are gone through by other means.
        ("b.e.0", False, None),
    ],
)
def test_a_path_leads_to_a_value_or_to_nothing(path, there, value):
    assert (there, value) == (has(DOCUMENT, path), value_at(DOCUMENT, path))


def test_the_empty_path_is_the_whole_and_what_is_no_document_has_nothing():
    assert DOCUMENT == value_at(DOCUMENT, "")
    assert [None, None] == [value_at(each, "a") for each in (3, None)]
    assert not has(3, "a")


def test_documents_on_the_way_are_made():
    document = copy.deepcopy(DOCUMENT)
    put(document, "b.c.f", 2)
    put(document, "x.y.z", 3)
    # What stands in the way is no document, and gives way.
    put(document, "a.g", 4)
    assert {"a": {"g": 4}, "b": {"c": {"d": None, "f": 2}, "e": [1]}, "x": {"y": {"z": 3}}} == document


def test_what_is_there_is_dropped():
    document = copy.deepcopy(DOCUMENT)
    for path in ("b.c.d", "a", "x", "x.y", "b.e.0"):
        drop(document, path)
    assert {"b": {"c": {}, "e": [1]}} == document


def test_parts_of_a_path():
    assert ["a", "a"] == [top("a"), top("a.b.c")]
