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

from treadle.query.comparison import is_nan, same
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
    for unlike in ((math.inf, -math.inf), (math.inf, Decimal128("9E6144")), (math.inf, 1.7e308), (True, 1)):
        assert not same(*unlike)


@given(*[st.recursive(st.sampled_from([*NOT_A_NUMBER, *NUMBERS, *OTHERS]), st.lists, max_leaves=6)] * 2)
def test_any_two_values_can_be_compared(one, other):
    assert same(one, one)
    assert same(one, other) == same(other, one)
    hash(freeze(one))
