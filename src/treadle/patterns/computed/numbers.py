"""Numbers of sums and averages: what is added, and what their fields can hold."""

from __future__ import annotations

import decimal
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from bson.decimal128 import Decimal128

from treadle.graph.gather import RECOMPUTE
from treadle.graph.pattern import Place
from treadle.model.bson_types import from_bson
from treadle.plan import Raw
from treadle.query.comparison import DECIMALS
from treadle.query.update_values import DECIMAL_SAFE, takes

INT64 = 2**63
# Sums of numbers with at most so many digits before and after the point are never rounded.
DIGITS_SAFE = 12
_WIDE = decimal.Context(prec=100, traps=[decimal.InvalidOperation])
# Text that is no number: an error, and only where it is evaluated.
NOT_HELD: Raw = {"$toLong": {"$concat": ["not ", {"$toString": "$$n"}]}}


class Numbers:
    """Arithmetic in the declared type of the target."""

    def __init__(self, place: Place, path: str) -> None:
        self.python = place.field.shape.python
        self._place, self._path = place, path
        zeros: dict[Any, Any] = {decimal.Decimal: Decimal128("0"), float: 0.0}
        self.zero = zeros.get(self.python, 0)

    def add(self, current: str, difference: Sequence[Any]) -> Any:
        """The expression for the current value plus the difference."""
        total: Any = {"$add": [{"$ifNull": [current, self.zero]}]}
        for value in difference:
            total["$add"].append({"$literal": value})
        if self.python is decimal.Decimal:
            total = {"$toDecimal": total}
            if not any(map(self.spoils, difference)):
                return total
        return self._held(total) if difference else total

    @cached_property
    def _bounded(self) -> bool:
        """Whether the field refuses what is infinite or no number."""
        codec = self._place.entry.codec
        return not all(takes(codec, self._path, self._typed(each)) for each in ("Infinity", "NaN"))

    def _typed(self, value: str) -> Any:
        return Decimal128(value) if self.python is decimal.Decimal else float(value)

    def fits(self, value: Any) -> bool:
        """Whether the field can hold a result."""
        if self.python is int:
            # The server goes on in doubles where integers end.
            exact = isinstance(value, int) or (_is_finite(value) and abs(from_bson(value)) < INT64)
            return exact and (isinstance(value, int) or takes(self._place.entry.codec, self._path, value))
        return _is_finite(value) or not self._bounded

    def spoils(self, value: Any) -> bool:
        """Whether a result may not fit because of this one value."""
        if self.python is not decimal.Decimal or not is_number(value):
            return True
        # Whatever is smaller is rounded away where a sum is about to go beyond.
        return not _is_finite(value) or abs(from_bson(value)) > DECIMAL_SAFE

    @cached_property
    def _held_if(self) -> Raw:
        """The condition for a number `$$n` that the field can hold; empty where it holds any."""
        if self.python is int:
            # To the server what is no number is less than any, and equals itself.
            within = [{"$gt": ["$$n", -float(INT64)]}, {"$lt": ["$$n", float(INT64)]}]
            whole = {"$and": [*within, {"$eq": ["$$n", {"$trunc": "$$n"}]}]}
            return {"$or": [{"$in": [{"$type": "$$n"}, ["int", "long"]]}, whole]}
        if not self._bounded:
            return {}
        odd = [self._typed(each) for each in ("NaN", "Infinity", "-Infinity")]
        return {"$not": [{"$in": ["$$n", odd]}]}

    def _held(self, value: Any) -> Any:
        """A number, but an error where the field cannot hold it."""
        if not self._held_if:
            return value
        return {"$let": {"vars": {"n": value}, "in": {"$cond": [self._held_if, "$$n", NOT_HELD]}}}

    def stored(self, value: Any) -> Any:
        """A value that the server computed, in the declared type."""
        if self.python is decimal.Decimal and isinstance(value, (int, float)):
            return Decimal128(repr(value))
        if self.python is float and isinstance(value, int):
            return float(value)
        return value

    def stored_expression(self, value: str) -> Any:
        """The same as `stored`, for the server."""
        known: Any = {"$ifNull": [value, self.zero]}
        if self.python is not int:
            known = {"$toDecimal" if self.python is decimal.Decimal else "$toDouble": known}
        return self._held(known)


def _is_finite(value: Any) -> bool:
    return value.to_decimal().is_finite() if isinstance(value, Decimal128) else math.isfinite(value)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal128)) and not isinstance(value, bool)


def subtract(removed: Sequence[Any], added: Sequence[Any]) -> Any:
    """The terms to add, one per numeric type, so that the server mixes them as it does."""
    if not removed and len(added) == 1 and type(added[0]) is int and -INT64 <= added[0] < INT64:
        # The same in short, for the most frequent case.
        return [added[0]] if added[0] else []
    old, new = list(filter(is_number, removed)), list(filter(is_number, added))
    if any(isinstance(value, float) for value in old):
        return RECOMPUTE
    terms: list[Any] = []
    whole = sum(value for value in new if isinstance(value, int)) - sum(
        value for value in old if isinstance(value, int)
    )
    if whole:
        if not -INT64 <= whole < INT64:
            return RECOMPUTE
        terms.append(whole)
    fractions = [value for value in new if isinstance(value, float)]
    if fractions:
        terms.append(sum(fractions))
    plus = [value.to_decimal() for value in new if isinstance(value, Decimal128)]
    minus = [value.to_decimal() for value in old if isinstance(value, Decimal128)]
    # The sum may have been rounded to 34 digits, which subtraction does not undo.
    if any(not value.is_finite() or (minus and _is_extreme(value)) for value in [*plus, *minus]):
        return RECOMPUTE
    exact = decimal.Decimal(0)
    for value in [*plus, *(each.copy_negate() for each in minus)]:
        exact = _WIDE.add(exact, value)
    if exact:
        try:
            terms.append(Decimal128(exact))
        except decimal.DecimalException:
            return RECOMPUTE
    return terms if terms or len(old) != len(new) else None


def _is_extreme(value: decimal.Decimal) -> bool:
    exponent = value.as_tuple().exponent
    return value.adjusted() > DIGITS_SAFE or (isinstance(exponent, int) and exponent < -DIGITS_SAFE)


def quotient(total: Any, count: int) -> Any:
    if isinstance(total, Decimal128):
        return Decimal128(DECIMALS.divide(total.to_decimal(), decimal.Decimal(count)))
    return total / count
