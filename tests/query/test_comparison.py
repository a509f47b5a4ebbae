"""Comparison by meaning never raises, whatever is stored, and answers as the server does."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import math
from typing import Any

import pytest
from bson import Code, Int64, ObjectId, Regex
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from hypothesis import given
from hypothesis import strategies as st

from treadle.query.comparison import is_nan, same, unlike
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
        condition = unlike("a.b", value)
        if not condition:
            assert [{"name": "Ann"}] == value
            continue
        expected = {-1, *range(len(VALUES))} - {number}
        assert expected == {each["_id"] for each in collection.find(condition)}, value


@pytest.mark.parametrize("value", [["a"], {"a": ["b"]}, {"a.b": "c"}, {"$a": "b"}, {"": "b"}, [{"a": "b"}]])
def test_texts_that_have_no_path_are_not_compared_by_the_server(value):
    assert {} == unlike("a", value)


@pytest.mark.parametrize("value", ["a" * 200_000, {"a": b"b" * 200_000}])
def test_large_values_are_not_compared_by_the_server(value):
    assert {} == unlike("a", value)
