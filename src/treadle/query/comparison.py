"""Comparing what is stored with what should be, by meaning rather than by bytes."""

from __future__ import annotations

import datetime as dt
import decimal
import math
from collections.abc import Mapping
from typing import Any

from bson.decimal128 import Decimal128

# A sum of floats depends on the order of its terms; this much is not a finding.
FLOAT_TOLERANCE = 1e-9


def same(one: Any, other: Any) -> bool:
    """Whether two stored values mean the same.

    Null equals missing, keys have no order, numbers compare by value across
    types, floats up to rounding, dates to the millisecond.
    """
    if one is None or other is None:
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(same(one.get(key), other.get(key)) for key in one.keys() | other.keys())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if _number(one) and _number(other):
        return _same_number(one, other)
    if isinstance(one, dt.datetime) and isinstance(other, dt.datetime):
        return _milliseconds(one) == _milliseconds(other)
    textual = isinstance(one, (str, bytes)) and isinstance(other, (str, bytes))
    return (type(one) is type(other) or textual) and bool(one == other)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal128, decimal.Decimal))


def _same_number(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        a, b = (float(str(each)) if isinstance(each, Decimal128) else float(each) for each in (one, other))
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return math.isclose(a, b, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    exact = [each.to_decimal() if isinstance(each, Decimal128) else each for each in (one, other)]
    return bool(exact[0] == exact[1])


def _milliseconds(value: dt.datetime) -> int:
    aware = value if value.tzinfo else value.replace(tzinfo=dt.UTC)
    return int((aware - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) / dt.timedelta(milliseconds=1))
