"""Keys of documents: what connects a source with its targets, also through arrays.

Covers: query/keys, query/windows.
"""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import pytest
from bson import Code, DBRef, Decimal128, Int64, ObjectId, Regex

from treadle.query.keys import GroupField, Key, Slot, distinct, freeze, is_among, may_be_id, same_key
from treadle.query.windows import Window

pytestmark = pytest.mark.quick

SCALAR = Key("product_id")
LINES = Key("lines.product_id", ("lines",))
PARTS = Key("boxes.parts.ref", ("boxes", "boxes.parts"))
TAGS = Key("tags", ("tags",))


def keys(key: Key, document: dict[str, Any]) -> list[Any]:
    return list(key.of(document).values())


@pytest.mark.parametrize(
    ("key", "document", "expected"),
    [
        (SCALAR, {"product_id": 1}, [1]),
        (SCALAR, {"product_id": None}, []),
        (SCALAR, {}, []),
        (SCALAR, {"product_id": [1, 2]}, []),
        (Key("customer.$id"), {"customer": DBRef("customers", 7)}, [7]),
        (TAGS, {"tags": ["a", "b", "a", None]}, ["a", "b"]),
        (TAGS, {"tags": "a"}, ["a"]),
        (LINES, {"lines": [{"product_id": 1}, {"product_id": 2}, {"product_id": 1}]}, [1, 2]),
        (LINES, {"lines": [None, 5, {}, {"product_id": None}, [{"product_id": 9}], {"product_id": [3]}]}, []),
        (LINES, {"lines": {"product_id": 1}}, [1]),
        (LINES, {"lines": None}, []),
        (PARTS, {"boxes": [{"parts": [{"ref": 1}, {"ref": 2}]}, {}, {"parts": [{"ref": 3}]}]}, [1, 2, 3]),
        (PARTS, {"boxes": [{"parts": {"ref": 1}}, {"parts": None}]}, [1]),
    ],
)
def test_a_source_has_the_distinct_keys_that_it_holds(key, document, expected):
    assert expected == keys(key, document)


def test_keys_that_the_server_treats_as_equal_are_one():
    assert 1 == len(TAGS.of({"tags": [1, 1.0, Int64(1), Decimal128("1")]}))
    assert 2 == len(TAGS.of({"tags": [True, 1]}))


def test_a_missing_inner_array_does_not_hide_the_others():
    assert [1] == keys(PARTS, {"boxes": [{}, {"parts": None}, {"parts": [{"ref": 1}]}]})


@pytest.mark.parametrize(
    ("key", "path", "document", "expected"),
    [
        (SCALAR, "product", {"product_id": 1}, [("product", 1)]),
        (SCALAR, "product", {}, [("product", None)]),
        (Key("category._id"), "category", {"category": {"_id": 3}}, [("category", 3)]),
        (
            LINES,
            "lines.product",
            {"lines": [{"product_id": 1}, None, 5, {"product_id": 2}, {}, {"product_id": [4]}]},
            [
                ("lines.0.product", 1),
                ("lines.3.product", 2),
                ("lines.4.product", None),
                ("lines.5.product", None),
            ],
        ),
        (LINES, "lines.product", {"lines": {"product_id": 1}}, []),
        (LINES, "lines.product", {"lines": [[{"product_id": 1}]]}, []),
        (LINES, "lines.product", {}, []),
        (
            PARTS,
            "boxes.parts.card",
            {"boxes": [{"parts": [{"ref": 1}]}, {}, {"parts": [{"ref": 1}, {"ref": 2}]}]},
            [("boxes.0.parts.0.card", 1), ("boxes.2.parts.0.card", 1), ("boxes.2.parts.1.card", 2)],
        ),
    ],
)
def test_a_target_has_one_slot_per_element(key, path, document, expected):
    assert [Slot(*each) for each in expected] == list(key.slots(document, path))


def test_array_filters_ask_for_the_reference_at_every_level():
    assert ("product", []) == SCALAR.blind("product", 1)
    assert ("lines.$[e0].product", [{"e0.product_id": {"$eq": 1}}]) == LINES.blind("lines.product", 1)
    path, filters = PARTS.blind("boxes.parts.card", 1)
    assert "boxes.$[e1].parts.$[e0].card" == path
    assert [{"e0.ref": {"$eq": 1}}, {"e1.parts.ref": {"$eq": 1}}] == filters


DAY = GroupField("day", "created_at", Window("day"))
SHOP = GroupField("shop", "shop_id")


def test_the_key_of_a_group_is_the_list_of_its_values():
    group = Key("", group=(SHOP, DAY))
    moment = dt.datetime(2026, 5, 3, 17, 5, tzinfo=dt.UTC)
    midnight = moment.replace(hour=0, minute=0)
    assert [[4, midnight]] == keys(group, {"shop_id": 4, "created_at": moment})
    for document in ({"shop_id": 4}, {"created_at": moment}, {"shop_id": [4], "created_at": moment}):
        assert [] == keys(group, document)
    optional = Key("", group=(SHOP._replace(optional=True), DAY))
    assert [[None, midnight]] == keys(optional, {"created_at": moment})
    assert [["all"]] == keys(Key("", group=(GroupField("_id", "_id", constant="all"),)), {})


def test_groups_are_found_one_by_one_or_by_ranges():
    start = dt.datetime(2026, 5, 3, tzinfo=dt.UTC)
    group = Key("", group=(SHOP, DAY))
    span = {"$gte": start, "$lte": start + dt.timedelta(days=1)}
    assert {"$and": [{"shop_id": {"$in": [4]}}, {"created_at": span}]} == group.condition([[4, start]])
    assert 2 == len(group.condition([[4, start], [5, start]])["$or"])
    many = group.condition([[number % 3, start] for number in range(300)])
    assert {"$and": [{"shop_id": {"$in": [0, 1, 2]}}, {"created_at": span}]} == many
    # What is not a date has no window.
    assert {"$and": [{"shop_id": {"$in": [4]}}, {}]} == group.condition([[4, None]])


def test_keys_are_equal_where_the_server_treats_them_as_equal():
    assert freeze(1) == freeze(1.0) == freeze(Decimal128("1.00"))
    assert freeze(math.nan) == freeze(Decimal128("NaN"))
    assert freeze(True) != freeze(1)
    assert freeze(Regex("a")) != freeze(Regex("a", "i"))
    assert freeze(DBRef("a", 1)) != freeze(DBRef("b", 1))
    assert freeze([1]) != freeze({"0": 1})
    assert same_key({"a": 1}, {"a": 1.0})
    assert is_among(2.0, [1, 2])
    assert [ObjectId("0" * 24), 1] == distinct([ObjectId("0" * 24), 1, ObjectId("0" * 24), 1])


def test_what_cannot_be_an_id_is_known():
    for value in (None, [1], Regex("a"), {"$gt": 1}):
        assert not may_be_id(value)
    for value in ("a", 0, {"a": 1}, Code("x"), False):
        assert may_be_id(value)
