"""Comparing what is stored with what should be, by meaning rather than by bytes."""

from __future__ import annotations

import datetime as dt
import decimal
import math
from collections.abc import Mapping, Sequence
from typing import Any

import bson
from bson import Code, Int64, ObjectId
from bson.decimal128 import Decimal128

from treadle.model.bson_types import CODEC_OPTIONS, from_bson

# A sum of floats depends on the order of its terms; this much is not a finding.
FLOAT_TOLERANCE = 1e-9
# Larger values are not sent to the server to be compared.
UNLIKE_BYTES_MAX = 100_000
# Of these, equal ones are the same; most of what is compared is.
_PLAIN = frozenset({bool, int, float, str, ObjectId})
# The server's arithmetic of decimals: it rounds, and what it cannot compute is infinite or no number.
DECIMALS = decimal.Context(prec=34, Emin=-6143, Emax=6144, clamp=1, traps=[])
# The same, where nothing may be rounded. What has all 34 digits may have been before.
_EXACT = decimal.Context(
    prec=33,
    Emin=-6143,
    Emax=6144,
    clamp=1,
    traps=[decimal.Rounded, decimal.Clamped, decimal.InvalidOperation],
)
_INTEGERS = frozenset({int, Int64})


def same(one: Any, other: Any) -> bool:
    """Whether two stored values mean the same.

    Null equals missing, keys have no order, numbers compare by value across
    types, floats up to rounding, dates to the millisecond. What is not a number
    equals what is not a number, as on the server.
    """
    if one is None or other is None:
        return one is other
    if type(one) is type(other) and type(one) in _PLAIN and one == other:
        return True
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


def identical(one: Any, other: Any) -> bool:
    """Whether two stored values are the same to the letter; the keys of documents have no order."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(identical(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int) and isinstance(other, int):
        # The driver has a class of its own for large ones.
        return one == other
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return type(one) is type(other) and bool(one == other)


def unlike(path: str, value: Any) -> dict[str, Any]:
    """The condition that a field holds another value than this; empty where the server could not tell.

    Fields of documents in another order are another value, null is not
    missing. Texts are compared by their bytes as well, because a collection's
    collation may take another one for the same. A large value would not fit
    into one command with the condition, which holds it twice.
    """
    if len(bson.encode({"": value}, codec_options=CODEC_OPTIONS)) > UNLIKE_BYTES_MAX:
        return {}
    texts = _texts(path, value)
    if texts is None:
        return {}
    exact: list[Any] = []
    for at, text in texts:
        exact.append({"$eq": [{"$strLenBytes": f"${at}"}, len(text.encode())]})
        exact.append({"$eq": [{"$indexOfBytes": [f"${at}", {"$literal": text}]}, 0]})
    equal: dict[str, Any] = {"$eq": [f"${path}", {"$literal": value}]}
    if exact:
        # Only where it is equal each of these is a text at all.
        equal = {"$cond": [equal, {"$and": exact}, False]}
    return {"$expr": {"$not": [equal]}}


def _texts(path: str, value: Any) -> list[tuple[str, str]] | None:
    """Each text in a value with its path; None where one has no path of its own."""
    if isinstance(value, str):
        # Code is text to Python, and not to the server.
        return [] if isinstance(value, Code) else [(path, value)]
    if isinstance(value, (list, tuple)):
        return None if any(_texts(path, each) != [] for each in value) else []
    texts: list[tuple[str, str]] = []
    for key, item in value.items() if isinstance(value, Mapping) else ():
        inner = None if not key or "." in key or "$" in key else _texts(f"{path}.{key}", item)
        if inner is None:
            return None
        texts += inner
    return texts


def _number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal128, decimal.Decimal))


def is_nan(value: Any) -> bool:
    """Whether a number is none: of any type, and a signalling one too, with which Python compares nothing."""
    if isinstance(value, Decimal128):
        value = value.to_decimal()
    if isinstance(value, decimal.Decimal):
        return value.is_nan()
    return isinstance(value, float) and math.isnan(value)


def _same_number(one: Any, other: Any) -> bool:
    if is_nan(one) or is_nan(other):
        return is_nan(one) and is_nan(other)
    exact = [each.to_decimal() if isinstance(each, Decimal128) else each for each in (one, other)]
    if exact[0] == exact[1]:
        return True
    if not (isinstance(one, float) or isinstance(other, float)) or any(map(math.isinf, exact)):
        return False
    return math.isclose(*map(float, exact), rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)


def _milliseconds(value: dt.datetime) -> int:
    aware = value if value.tzinfo else value.replace(tzinfo=dt.UTC)
    return int((aware - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) / dt.timedelta(milliseconds=1))


# -- order and sums, as on the server ---------------------------------------------------------------


def order_key(value: Any) -> tuple[int, Any]:
    """Values in the order of BSON, across types."""
    if value is None:
        return 1, 0
    if isinstance(value, bool):
        return 8, value
    if isinstance(value, (int, float, Decimal128)):
        return 2, number_key(value)
    if isinstance(value, dict):
        return 4, [(order_key(item)[0], key, order_key(item)[1]) for key, item in value.items()]
    if isinstance(value, list):
        return 5, [order_key(item) for item in value]
    rank = {str: 3, bytes: 6, ObjectId: 7, dt.datetime: 9}.get(type(value))
    return (rank, value) if rank is not None else (6, bytes(getattr(value, "bytes", b"")))


def number_key(value: Any) -> tuple[int, Any]:
    """Numbers in the server's order, across their types."""
    return (0, 0) if is_nan(value) else (1, from_bson(value))


def least(one: Any, other: Any) -> Any:
    """The smaller value, as `$min` has it: null is none."""
    present = [each for each in (one, other) if each is not None]
    return min(present, key=order_key) if present else None


def greatest(one: Any, other: Any) -> Any:
    """The larger value, as `$max` has it: null is none."""
    present = [each for each in (one, other) if each is not None]
    return max(present, key=order_key) if present else None


def exact_sum(numbers: Sequence[Any]) -> Any:
    """The sum of integers, or of decimals and integers, as `$sum` has it in any order; None if it may differ.

    It differs where something is rounded, and where there is anything but such
    numbers. One of the numbers may be what `$sum` gave for others.
    """
    kinds = {type(number) for number in numbers}
    if kinds <= _INTEGERS:
        return _exact_integer(numbers, long=Int64 in kinds)
    if not kinds <= _INTEGERS | {Decimal128}:
        return None
    exact = bound = decimal.Decimal(0)
    try:
        for number in numbers:
            value = from_bson(number)
            exact = _EXACT.add(exact, value)
            # The server adds integers last, so that others meet on the way.
            bound = _EXACT.add(bound, abs(value) if isinstance(value, int) else value.copy_abs())
    except decimal.DecimalException:
        return None
    return Decimal128(exact) if exact.is_finite() else None


def _exact_integer(numbers: Sequence[Any], *, long: bool) -> int | None:
    """The sum of integers; of 64 bits if one of them is, or if it needs them."""
    whole = sum(numbers)
    if not long:
        return whole if -(2**63) <= whole < 2**63 else None
    if _needs_long(whole):
        return Int64(whole) if -(2**63) <= whole < 2**63 else None
    # A sum of short ones that was large shows itself as long, and is no longer.
    surely = any(type(number) is Int64 and not _needs_long(number) for number in numbers)
    return Int64(whole) if surely else None


def _needs_long(number: int) -> bool:
    return not -(2**31) <= number < 2**31


def total(one: Any, other: Any) -> Any:
    """The sum of two sums, as `$sum` has it."""
    if not (isinstance(one, Decimal128) or isinstance(other, Decimal128)):
        whole = one + other
        return whole if isinstance(whole, float) or -(2**63) <= whole < 2**63 else float(whole)
    parts = [
        each.to_decimal() if isinstance(each, Decimal128) else decimal.Decimal(repr(each))
        for each in (one, other)
    ]
    return Decimal128(DECIMALS.add(*parts))
