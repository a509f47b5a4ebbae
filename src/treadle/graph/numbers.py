"""Sums and averages: exact differences, and what a number field of a target can hold."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from bson import Int64
from bson.decimal128 import Decimal128

from treadle.model.bson_types import from_bson
from treadle.plan import Raw
from treadle.query.comparison import DECIMALS
from treadle.query.updates import DECIMAL_SAFE

INT64 = 2**63
# Integers up to here are exact as a double.
DOUBLE_EXACT_MAX = 2**53
# Sums of numbers with at most so many digits before and after the point are never rounded.
DIGITS_SAFE = 12
# The same, where nothing may be rounded. A number with all 34 digits may have been rounded before.
_EXACT = decimal.Context(
    prec=33,
    Emin=-6143,
    Emax=6144,
    clamp=1,
    traps=[decimal.Rounded, decimal.Clamped, decimal.InvalidOperation],
)
_INTEGERS = frozenset({int, Int64})
# Converting this text fails, but only where it is evaluated.
_FAIL: Raw = {"$toLong": {"$concat": ["not ", {"$toString": "$$n"}]}}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal128)) and not isinstance(value, bool)


def negate(number: Any) -> Any:
    return Decimal128(number.to_decimal().copy_negate()) if isinstance(number, Decimal128) else -number


def sum_after(former: Any, removed: Sequence[Any], added: Sequence[Any]) -> Any:
    """Return a sum after some numbers left it and others joined it, or None where that could be inexact.

    Integers are exact within 64 bits and decimals within 34 digits. A sum of
    doubles is off by a rounding error of its former size, so it is computed
    from scratch whenever it falls below a power of two: since then it has not
    been more than twice as large as it is now, and the errors of two million
    differences stay below a relative 1e-9.
    """
    numbers = [former, *filter(is_number, added), *map(negate, filter(is_number, removed))]
    if not any(isinstance(each, float) for each in numbers):
        return exact_sum(numbers)
    if any(isinstance(each, Decimal128) or not math.isfinite(each) for each in numbers):
        return None
    try:
        total = math.fsum(numbers)
    except OverflowError:
        return None
    fell = math.frexp(total)[1] < math.frexp(former)[1] or not total
    return total if total == former or not fell else None


def terms(removed: Sequence[Any], added: Sequence[Any]) -> list[Any] | None:
    """Return what to add to a sum that was not read, or None where that could be inexact.

    There is one term per numeric type, so that the server mixes them as its
    `$sum` does. Doubles are added only: whether one may be subtracted depends
    on the sum.
    """
    if not removed and len(added) == 1 and type(added[0]) is int and -INT64 <= added[0] < INT64:
        # The most frequent case, in short.
        return [added[0]] if added[0] else []
    leaving = list(filter(is_number, removed))
    if not all(map(_may_be_subtracted, leaving)):
        return None
    change = [*filter(is_number, added), *map(negate, leaving)]
    whole, fractions, decimals = (_of_type(change, kind) for kind in (int, float, Decimal128))
    sums = [exact_sum(whole), sum(fractions), exact_sum(decimals)]
    return None if None in sums else [each for each in sums if from_bson(each)]


def _of_type(numbers: Sequence[Any], kind: type) -> list[Any]:
    return [each for each in numbers if isinstance(each, kind)]


def _may_be_subtracted(number: Any) -> bool:
    """Return whether subtraction undoes the addition of a number, whatever the sum."""
    if not isinstance(number, Decimal128):
        return isinstance(number, int)
    # A sum with such a number may have been rounded to 34 digits.
    return number.to_decimal().is_finite() and not _is_extreme(number.to_decimal())


def _is_extreme(value: decimal.Decimal) -> bool:
    exponent = value.as_tuple().exponent
    return value.adjusted() > DIGITS_SAFE or (isinstance(exponent, int) and exponent < -DIGITS_SAFE)


def _is_finite(value: Any) -> bool:
    return value.to_decimal().is_finite() if isinstance(value, Decimal128) else math.isfinite(value)


class NumberField:
    """Arithmetic in the declared type of a target's field; `takes` tells what else the field refuses."""

    def __init__(self, python: type, takes: Callable[[Any], bool]) -> None:
        self.python = python
        self._takes = takes

    def stored(self, number: Any) -> Any:
        """Return a number that the server computed in the declared type."""
        if self.python is decimal.Decimal and isinstance(number, (int, float)):
            return Decimal128(repr(number))
        if self.python is float and isinstance(number, int):
            return float(number)
        return number

    def converted(self, number: Any) -> Any:
        """Return the expression for the same."""
        converts = {decimal.Decimal: "$toDecimal", float: "$toDouble"}.get(self.python)
        return number if converts is None else {converts: number}

    def expression(self, number: Any) -> Any:
        """Return the expression for the same that fails where the field could not hold the number."""
        return self.held(self.converted(number))

    def quotient(self, total: Any, count: int) -> Any:
        if self.python is decimal.Decimal:
            return Decimal128(DECIMALS.divide(self.stored(total).to_decimal(), decimal.Decimal(count)))
        return self.stored(float(from_bson(total)) if isinstance(total, Decimal128) else total) / count

    def quotient_expression(self, total: Any, count: Any) -> Any:
        converts = "$toDecimal" if self.python is decimal.Decimal else "$toDouble"
        return {"$cond": [{"$gt": [count, 0]}, {"$divide": [{converts: total}, count]}, None]}

    def holds(self, number: Any) -> bool:
        """Return whether the field can hold a sum."""
        if self.python is not int:
            return _is_finite(number) or not self._is_bounded
        # The server continues in doubles where integers end.
        exact = isinstance(number, int) or (_is_finite(number) and abs(from_bson(number)) < INT64)
        return exact and (isinstance(number, int) or self._takes(number))

    def could_overflow(self, number: Any) -> bool:
        """Return whether this one number could be why the field cannot hold a sum."""
        if self.python is not decimal.Decimal or not is_number(number):
            return True
        # A smaller number is rounded away where a sum is about to overflow.
        return not _is_finite(number) or abs(from_bson(number)) > DECIMAL_SAFE

    def held(self, number: Any) -> Any:
        """Return the expression for a number that fails where the field could not hold it."""
        if not self._held_if:
            return number
        return {"$let": {"vars": {"n": number}, "in": {"$cond": [self._held_if, "$$n", _FAIL]}}}

    @cached_property
    def _is_bounded(self) -> bool:
        """Whether the field refuses infinities and NaN."""
        return not all(self._takes(self._typed(each)) for each in ("Infinity", "NaN"))

    def _typed(self, text: str) -> Any:
        return Decimal128(text) if self.python is decimal.Decimal else float(text)

    @cached_property
    def _held_if(self) -> Raw:
        """The condition for a number `$$n` that the field can hold; empty where it holds any."""
        if self.python is int:
            # To the server NaN is less than any number, and equals itself.
            within = [{"$gt": ["$$n", -float(INT64)]}, {"$lt": ["$$n", float(INT64)]}]
            whole = {"$and": [*within, {"$eq": ["$$n", {"$trunc": "$$n"}]}]}
            return {"$or": [{"$in": [{"$type": "$$n"}, ["int", "long"]]}, whole]}
        if not self._is_bounded:
            return {}
        odd = [self._typed(each) for each in ("NaN", "Infinity", "-Infinity")]
        return {"$not": [{"$in": ["$$n", odd]}]}


# -- sums, as on the server ---------------------------------------------------------------------------


def exact_sum(numbers: Sequence[Any]) -> Any:
    """Return the sum of integers, or of decimals and integers, as `$sum` gives it in any order.

    None where it may differ: where something is rounded, and where there is another kind of number. One of
    the numbers may be what `$sum` gave for others.
    """
    kinds = {type(number) for number in numbers}
    if kinds <= _INTEGERS:
        whole = sum(numbers)
        return whole if -INT64 <= whole < INT64 else None
    if not kinds <= _INTEGERS | {Decimal128}:
        return None
    exact = bound = decimal.Decimal(0)
    try:
        for number in numbers:
            value = decimal.Decimal(from_bson(number))
            exact = _EXACT.add(exact, value)
            # The server adds integers last, so the partial sums are others.
            bound = _EXACT.add(bound, value.copy_abs())
    except decimal.DecimalException:
        return None
    return Decimal128(exact) if exact.is_finite() else None


def total(one: Any, other: Any) -> Any:
    """Return the sum of two sums, as `$sum` gives it."""
    if not (isinstance(one, Decimal128) or isinstance(other, Decimal128)):
        whole = one + other
        return whole if isinstance(whole, float) or -INT64 <= whole < INT64 else float(whole)
    parts = [
        each.to_decimal() if isinstance(each, Decimal128) else decimal.Decimal(repr(each))
        for each in (one, other)
    ]
    return Decimal128(DECIMALS.add(*parts))
