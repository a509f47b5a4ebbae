"""Conditions, updates and sorts of attributes, as conditions, updates and sorts of pairs.

Covers: query/attributes, query/filters, query/updates.
"""

from __future__ import annotations

import re

import pytest

from tests.query.models import Order, codec_of, paths_of
from treadle import Measured, UsageError
from treadle.query.attributes import (
    attribute_conditions,
    attribute_of,
    refuse_attributes,
    sorting_stages,
    sorts_by_attribute,
)
from treadle.query.filters import parse_filter
from treadle.query.updates import parse_update

pytestmark = pytest.mark.quick
CODEC = codec_of(Order)


def holds(name, **conditions):
    return {"specs": {"$elemMatch": {"k": name, **conditions}}}


def test_everything_after_the_path_of_the_map_is_the_name():
    assert ("specs", "a.b") == attribute_of(CODEC, "specs.a.b")[:2]
    assert attribute_of(CODEC, "specs").name is None
    assert attribute_of(CODEC, "status") is None


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        ({"specs.color": "red"}, [holds("color", v={"$eq": "red"})]),
        ({"specs.color": None}, [{"specs": {"$not": {"$elemMatch": {"k": "color", "v": {"$ne": None}}}}}]),
        ({"specs.color": re.compile("^r")}, [holds("color", v=re.compile("^r"))]),
        ({"specs.size": {"$gt": 1, "$lt": 5}}, [holds("size", v={"$gt": 1, "$lt": 5})]),
        ({"specs.color": {"$ne": "red"}}, [{"$nor": [holds("color", v={"$eq": "red"})]}]),
        ({"specs.color": {"$in": ["a", "b"]}}, [holds("color", v={"$in": ["a", "b"]})]),
        (
            {"specs.size": {"$gte": None, "$lte": 5}},
            [
                {"specs": {"$not": {"$elemMatch": {"k": "size", "v": {"$ne": None}}}}},
                holds("size", v={"$lte": 5}),
            ],
        ),
        ({"specs.color": {"$in": []}}, [holds("color", v={"$in": []})]),
        ({"specs.color": {"$exists": False}}, [{"specs": {"$not": {"$elemMatch": {"k": "color"}}}}]),
        ({"specs.w": Measured(5, "kg")}, [holds("w", v={"$eq": 5}, u="kg")]),
        ({"specs.w.unit": "kg"}, [holds("w", u={"$eq": "kg"})]),
        ({"specs.w.value": {"$gt": 5}}, [holds("w", v={"$gt": 5})]),
        ({"specs.a": 1, "specs.b": 2}, [holds("a", v={"$eq": 1}), holds("b", v={"$eq": 2})]),
        ({"specs": {"$size": 1}}, [{"specs": {"$size": 1}}]),
        ({"specs": {"$elemMatch": {"k": "a"}}}, [{"specs": {"$elemMatch": {"k": "a"}}}]),
    ],
    ids=str,
)
def test_each_condition_on_a_name_is_one_on_the_pairs(filter, expected):
    assert {"$and": expected} == parse_filter(paths_of(Order), filter)


def test_a_map_equals_another_in_any_order():
    (condition,) = attribute_conditions(attribute_of(CODEC, "specs"), {"a": 1, "b": [2]})
    single = {"$eq": 1, "$not": {"$type": "array"}}
    assert {"$and": [{"specs": {"$size": 2}}, holds("a", v=single), holds("b", v={"$eq": [2]})]} == condition


def test_conditions_inside_logical_operators_are_translated_too():
    parsed = parse_filter(paths_of(Order), {"$or": [{"specs.a": 1, "status": "x"}, {"total": 1}]})
    assert {"$or": [{"status": "x", "$and": [holds("a", v={"$eq": 1})]}, {"total": 1}]} == parsed


def test_an_update_of_a_name_is_a_pipeline_and_exact():
    update = {
        "$set": {"specs.color": "$red", "status": "$x"},
        "$inc": {"total": 1},
        "$unset": {"specs.b": ""},
    }
    parsed = parse_update(paths_of(Order), update)
    assert ["$set"] * 4 == [next(iter(stage)) for stage in parsed.update]
    assert {"$set": {"status": {"$literal": "$x"}}} == parsed.update[1]
    assert "{'$literal': '$red'}" in str(parsed.update[0])
    assert parsed.is_exact
    assert "document-invalid" == _code({"$set": {"specs.color": [1]}})


def _code(update):
    with pytest.raises(UsageError) as caught:
        parse_update(paths_of(Order), update)
    return caught.value.code


@pytest.mark.parametrize(
    "update",
    [
        {"$inc": {"specs.size": 1}},
        {"$set": {"specs.$[].v": 1}},
        {"$set": {"specs.w.unit": "kg"}},
        {"$set": {"specs": {}, "specs.a": 1}},
        {"$set": {"specs.a": 1, "lines.0.quantity": 2}},
        {"$set": {"specs.a": 1}, "$push": {"tags": "0" * 24}},
        [{"$set": {"specs.a": 1}}],
        [{"$unset": ["specs.a"]}],
        [{"$project": {"specs.a": 1}}],
    ],
    ids=str,
)
def test_what_one_update_cannot_do_to_attributes_is_refused(update):
    assert "attributes-update" == _code(update)


def test_only_a_pipeline_sorts_by_an_attribute():
    keys = [("status", 1), ("specs.size", -1)]
    assert sorts_by_attribute(CODEC, keys)
    assert not sorts_by_attribute(CODEC, [("specs", 1)])
    assert not sorts_by_attribute(CODEC, None)
    with pytest.raises(UsageError):
        refuse_attributes(CODEC, keys)
    assert keys[:1] == refuse_attributes(CODEC, keys[:1])
    (computed, sort), removed = sorting_stages(CODEC, keys)
    assert ["status", "_treadle_sort1"] == list(sort["$sort"])
    assert ["_treadle_sort1"] == list(computed["$set"]) == removed["$unset"]
