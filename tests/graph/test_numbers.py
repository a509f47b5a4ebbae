"""Sums that change by differences: exact, or None; and what a number field can hold."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from bson import Decimal128
from hypothesis import given
from hypothesis import strategies as st

from treadle.graph.numbers import NumberField, sum_after, terms

INT64 = 2**63
NUMBERS = st.lists(st.integers(-(2**61), 2**61), max_size=4)


@given(st.integers(-(2**60), 2**60), NUMBERS, NUMBERS)
def test_integers_are_exact_or_leave_64_bits(former, removed, added):
    exact = former + sum(added) - sum(removed)
    expected = exact if -INT64 <= exact < INT64 else None
    assert expected == sum_after(former, removed, added)


@given(NUMBERS, NUMBERS)
def test_the_terms_of_integers_add_up_to_their_difference(removed, added):
    change = sum(added) - sum(removed)
    if -INT64 <= change < INT64:
        assert change == sum(terms(removed, added) or [])
    else:
        assert terms(removed, added) is None


def test_there_is_one_term_per_type_as_the_server_mixes_them():
    added = [1, 2, 0.5, Decimal128("1.5"), Decimal128("2"), "text", None, True]
    assert [3, 0.5, Decimal128("3.5")] == terms([], added)
    assert [-1] == terms([2, "text"], [1])


@pytest.mark.parametrize(
    "removed",
    [[0.5], [Decimal128("1E+13")], [Decimal128("1E-13")], [Decimal128("NaN")], [Decimal128("Infinity")]],
)
def test_what_subtraction_cannot_undo_is_not_subtracted(removed):
    assert terms(removed, [1]) is None


def test_decimals_of_more_than_34_digits_are_not_added_unread():
    assert terms([], [Decimal128("1E+30"), Decimal128("1E-30")]) is None


def test_a_sum_of_floats_that_falls_below_a_power_of_two_is_computed_from_scratch():
    assert sum_after(5.0, [1.0], []) == 4.0
    assert sum_after(4.0, [1.0], []) is None, "it fell below a power of two"
    assert sum_after(1000.0, [999.0], []) is None
    assert sum_after(1.0, [1.0], []) is None
    assert sum_after(0.0, [], [0.0]) == 0.0
    assert sum_after(1e308, [], [1e308]) is None


def takes_finite(value: Any) -> bool:
    return (value.to_decimal() if isinstance(value, Decimal128) else Decimal(value)).is_finite()


@pytest.mark.parametrize(
    ("python", "number", "held"),
    [
        (int, INT64 - 1, True),
        (int, 2.0, True),
        (int, float(INT64), False),
        (int, float("nan"), False),
        (float, float("inf"), False),
        (float, 1e300, True),
        (Decimal, Decimal128("Infinity"), False),
        (Decimal, Decimal128("9E6144"), True),
    ],
)
def test_a_field_holds_what_its_type_can_read(python, number, held):
    assert held is NumberField(python, takes_finite).holds(number)


def test_a_field_that_takes_anything_holds_infinity():
    everything = NumberField(Decimal, lambda value: True)
    assert everything.holds(Decimal128("NaN"))
    assert {"$toDecimal": "$n"} == everything.expression("$n"), "there is nothing to check"


def test_a_quotient_has_the_type_of_the_field():
    assert Decimal128("0.3333333333333333333333333333333333") == NumberField(Decimal, bool).quotient(1, 3)
    assert 0.5 == NumberField(float, bool).quotient(Decimal128("1"), 2)
    assert isinstance(NumberField(float, bool).quotient(4, 2), float)
