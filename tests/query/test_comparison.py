"""Comparison by meaning never raises, whatever is stored, and answers as the server does.

Covers: query/comparison, query/keys.
"""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import math
import uuid
from typing import Any

import pytest
from bson import Binary, Code, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from hypothesis import given
from hypothesis import strategies as st

from tests.query.models import CODEC_OPTIONS
from treadle.query.comparison import differs_condition, greatest, is_nan, least, order_key, same
from treadle.query.keys import freeze

NOT_A_NUMBER = [
    math.nan, -math.nan, decimal.Decimal("NaN"), decimal.Decimal("sNaN"), decimal.Decimal("-sNaN9"),
    *map(Decimal128, ("NaN", "-NaN", "sNaN", "-sNaN")),
]  # fmt: skip
NUMBERS = [
    0, -0.0, 0.0, 1, Int64(1), 1.5, 0.1, math.inf, -math.inf, 2**63 - 1, 5e-324, 1.7e308,
    *map(Decimal128, ("0", "-0", "0E+3", "1", "1.50", "0.1", "Infinity", "-Infinity", "9E6144", "1E-6176")),
]  # fmt: skip
OTHERS: list[Any] = [
    None, True, False, "", "a", b"", b"a", [], [1], {}, {"a": None}, ObjectId(), Regex("a"), Code("x"),
    dt.datetime(2026, 1, 1), dt.datetime.max.replace(tzinfo=dt.UTC), DatetimeMS(2**60),
]  # fmt: skip


FAR = DatetimeMS(10**16)
BY_TYPE: list[Any] = [
    MinKey(), None, *NUMBERS, math.nan, "", "a", "B", {}, {"a": 1}, {"a": "b"}, {"b": 0}, [], [2], [1, 3],
    b"", b"zz", Binary(b"a", 5), Binary(b"zzz", 5), Binary(b"zzz", 128), uuid.UUID(int=3),
    ObjectId("0" * 24), ObjectId("f" * 24), False, True, dt.datetime(2020, 1, 1, tzinfo=dt.UTC), FAR,
    DatetimeMS(-(10**15)), Timestamp(5, 1), Timestamp(5, 2), Regex("a"), Regex("a", "i"), Code("x"), MaxKey(),
]  # fmt: skip


def test_values_of_all_types_sort_as_on_the_server(database):
    collection = database.get_collection("ordered", codec_options=CODEC_OPTIONS)
    # In an object, so that the server compares arrays as wholes.
    collection.insert_many({"_id": number, "v": {"": value}} for number, value in enumerate(BY_TYPE))
    stored = list(collection.find(sort=[("v", 1), ("_id", 1)]))
    expected = sorted(stored, key=lambda each: (order_key(each["v"][""]), each["_id"]))
    assert [each["_id"] for each in expected] == [each["_id"] for each in stored]


@pytest.mark.quick
def test_dates_beyond_the_years_of_python_and_binaries_of_other_subtypes_are_ordered():
    recent = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    assert (FAR, recent) == (greatest(FAR, recent), least(FAR, recent))
    assert order_key(Binary(b"a", 5)) < order_key(Binary(b"zzz", 5)) < order_key(Binary(b"zzz", 128))


@pytest.mark.quick
def test_what_is_not_a_number_equals_nothing_but_its_like():
    for one, other in itertools.product(NOT_A_NUMBER, NOT_A_NUMBER):
        assert is_nan(one)
        assert same(one, other)
        assert same({"a": [one]}, {"a": [other]})
        assert freeze(one) == freeze(other)
    for one, other in itertools.product(NOT_A_NUMBER, [*NUMBERS, *OTHERS]):
        assert not is_nan(other)
        assert not same(one, other)
        assert not same(other, one)
        assert freeze(one) != freeze(other)


def test_numbers_compare_by_value_across_types():
    for one, other in itertools.product([*NUMBERS, *OTHERS], repeat=2):
        assert same(one, other) == same(other, one)
    for equal in (
        [0, -0.0, Decimal128("-0")],
        [math.inf, Decimal128("Infinity")],
        [1, 1.0, Decimal128("1.00")],
    ):
        assert all(same(*pair) for pair in itertools.product(equal, repeat=2))
    for different in (
        (math.inf, -math.inf),
        (math.inf, Decimal128("9E6144")),
        (math.inf, 1.7e308),
        (True, 1),
    ):
        assert not same(*different)


@given(*[st.recursive(st.sampled_from([*NOT_A_NUMBER, *NUMBERS, *OTHERS]), st.lists, max_leaves=6)] * 2)
def test_any_two_values_can_be_compared(one, other):
    assert same(one, one)
    assert same(one, other) == same(other, one)
    hash(freeze(one))


VALUES: list[Any] = [
    None, True, 1, 2.5, -0.0, math.nan, "Ann", "ann", "Änn", "Ann\u200b", "", "$name",
    [1, 2], [[1, 2]], [{"name": "Ann"}],
    {"name": "Ann"}, {"name": "ann"}, {"name": None}, {}, {"name": "Ann", "tier": "a"},
    {"tier": "a", "name": "Ann"}, {"home": {"city": "Ulm"}}, {"home": {"city": "ulm"}}, {"home": "Ulm"},
]  # fmt: skip


@pytest.mark.parametrize("collation", [None, {"locale": "en", "strength": 1}])
def test_the_server_tells_every_other_value(database, collation):
    """Also where the collation takes texts for the same, and where an array holds the value."""
    options = {} if collation is None else {"collation": collation}
    collection = database.create_collection("values", **options)
    collection.insert_many([*({"_id": n, "a": {"b": value}} for n, value in enumerate(VALUES)), {"_id": -1}])
    for number, value in enumerate(VALUES):
        condition = differs_condition("a.b", value)
        if not condition:
            assert [{"name": "Ann"}] == value
            continue
        expected = {-1, *range(len(VALUES))} - {number}
        assert expected == {each["_id"] for each in collection.find(condition)}, value


@pytest.mark.parametrize("value", [["a"], {"a": ["b"]}, {"a.b": "c"}, {"$a": "b"}, {"": "b"}, [{"a": "b"}]])
def test_texts_that_have_no_path_are_not_compared_by_the_server(value):
    assert {} == differs_condition("a", value)


@pytest.mark.parametrize("value", ["a" * 200_000, {"a": b"b" * 200_000}])
def test_large_values_are_not_compared_by_the_server(value):
    assert {} == differs_condition("a", value)
