"""Comparing stored values by meaning rather than by bytes, and in the order of the server."""

from __future__ import annotations

import datetime as dt
import decimal
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from uuid import UUID

import bson
from bson import Code, DBRef, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128

from treadle.model.bson_types import CODEC_OPTIONS, UTC, Raw, from_bson

# A sum of floats depends on the order of its terms; a smaller difference is not a finding.
FLOAT_TOLERANCE = 1e-9
# Larger values are not sent to the server to be compared.
COMPARED_BYTES_MAX = 100_000
# Equal values of these types are the same; most values that are compared are of these.
_PLAIN = frozenset({bool, int, float, str, ObjectId})
# The server's arithmetic of decimals: it rounds, and gives infinity or NaN where it cannot compute.
DECIMALS = decimal.Context(prec=34, Emin=-6143, Emax=6144, clamp=1, traps=[])
_ARRAY = (list, tuple)
_MISSING = object()
_NUMBER = (int, float, Decimal128, decimal.Decimal)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = dt.timedelta(milliseconds=1)


def same(one: Any, other: Any) -> bool:
    """Whether two stored values mean the same.

    Null equals missing, keys have no order, numbers compare by value across types, floats up to rounding,
    dates to the millisecond. NaN equals NaN, as on the server.
    """
    if one is None or other is None:
        return one is other
    if type(one) is type(other) and type(one) in _PLAIN and one == other:
        return True
    in_parts = _equal_parts(one, other, same, None)
    return _same_scalar(one, other) if in_parts is None else in_parts


def identical(one: Any, other: Any) -> bool:
    """Whether two stored values are the same to the letter; the keys of documents have no order."""
    in_parts = _equal_parts(one, other, identical, _MISSING)
    return _identical_scalar(one, other) if in_parts is None else in_parts


def _equal_parts(one: Any, other: Any, equal: Callable[[Any, Any], bool], missing: object) -> bool | None:
    """Whether two documents, or two arrays, are equal part by part; None where they are not both of these."""
    if _are(Mapping, one, other):
        return all(equal(one.get(key, missing), other.get(key, missing)) for key in one.keys() | other.keys())
    if _are(_ARRAY, one, other):
        return len(one) == len(other) and all(map(equal, one, other))
    return None


def _are(types: Any, one: Any, other: Any) -> bool:
    return isinstance(one, types) and isinstance(other, types)


def _same_scalar(one: Any, other: Any) -> bool:
    if bool in (type(one), type(other)):
        return one is other
    if _are(_NUMBER, one, other):
        return _same_number(one, other)
    if _are(dt.datetime, one, other):
        return _milliseconds(one) == _milliseconds(other)
    return (type(one) is type(other) or _are((str, bytes), one, other)) and bool(one == other)


def _identical_scalar(one: Any, other: Any) -> bool:
    if bool in (type(one), type(other)):
        return one is other
    if type(one) is float and one != one:
        return is_nan(other) and type(other) is float
    # The driver has a class of its own for large integers.
    return (type(one) is type(other) or _are(int, one, other)) and bool(one == other)


def differs_condition(path: str, value: Any) -> Raw:
    """Return the condition that a field holds another value; empty where the server could not tell.

    Fields of documents in another order are another value, and null is not missing. Texts are compared by
    their bytes as well, because a collation may treat another text as equal. The condition holds the value
    twice, so a large value would not fit into one command.
    """
    if len(bson.encode({"": value}, codec_options=CODEC_OPTIONS)) > COMPARED_BYTES_MAX:
        return {}
    texts = _texts(path, value)
    if texts is None:
        return {}
    exact: list[Any] = []
    for text_path, text in texts:
        exact.append({"$eq": [{"$strLenBytes": f"${text_path}"}, len(text.encode())]})
        exact.append({"$eq": [{"$indexOfBytes": [f"${text_path}", {"$literal": text}]}, 0]})
    equal: Raw = {"$eq": [f"${path}", {"$literal": value}]}
    if exact:
        # Only where the value is equal, these paths are known to hold texts.
        equal = {"$cond": [equal, {"$and": exact}, False]}
    return {"$expr": {"$not": [equal]}}


def _texts(path: str, value: Any) -> list[tuple[str, str]] | None:
    """Return each text in a value with its path; None where one has no path of its own."""
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


def is_nan(value: Any) -> bool:
    """Whether a value of any numeric type is NaN; a signalling one too, which Python refuses to compare."""
    if isinstance(value, Decimal128):
        value = value.to_decimal()
    if isinstance(value, decimal.Decimal):
        return value.is_nan()
    return isinstance(value, float) and math.isnan(value)


def _same_number(one: Any, other: Any) -> bool:
    if is_nan(one) or is_nan(other):
        return is_nan(one) and is_nan(other)
    exact = [from_bson(one), from_bson(other)]
    if exact[0] == exact[1] or float not in (type(one), type(other)) or any(map(math.isinf, exact)):
        return bool(exact[0] == exact[1])
    return math.isclose(*map(float, exact), rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)


def _milliseconds(value: dt.datetime | DatetimeMS) -> int:
    if isinstance(value, DatetimeMS):
        # A date beyond the years that Python knows.
        return int(value)
    return ((value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH) // _MILLISECOND


# -- the server's order -------------------------------------------------------------------------------


def number_key(value: Any) -> tuple[int, Any]:
    """Return a key that sorts numbers as the server does, across their types: NaN is the least."""
    return (0, 0) if is_nan(value) else (1, from_bson(value))


def _object_key(value: Any) -> list[Any]:
    fields = value.as_doc() if isinstance(value, DBRef) else value
    keys = [(name, order_key(item)) for name, item in fields.items()]
    return [(rank, name, key) for name, (rank, key) in keys]


def _binary_key(value: Any) -> tuple[int, int, bytes]:
    data = value.bytes if isinstance(value, UUID) else bytes(value)
    return len(data), 4 if isinstance(value, UUID) else getattr(value, "subtype", 0), data


def _only(value: object) -> int:
    """Return the key of a type that has a single value."""
    return 0


class BsonType(NamedTuple):
    """A type by its Python classes, by the names that `$type` knows, and with what sorts its values."""

    classes: tuple[type, ...]
    names: tuple[str, ...]
    key: Callable[[Any], Any] = lambda value: value


# The BSON types in the server's order.
TYPE_ORDER = (
    BsonType((MinKey,), ("minKey",), _only),
    BsonType((type(None),), ("null",), _only),
    BsonType(_NUMBER, ("double", "int", "long", "decimal"), number_key),
    BsonType((str,), ("string", "symbol")),
    BsonType((dict, DBRef), ("object",), _object_key),
    BsonType((list,), ("array",), lambda value: list(map(order_key, value))),
    BsonType((bytes, Binary, UUID), ("binData",), _binary_key),
    BsonType((ObjectId,), ("objectId",)),
    BsonType((bool,), ("bool",)),
    BsonType((dt.datetime, DatetimeMS), ("date",), _milliseconds),
    BsonType((Timestamp,), ("timestamp",)),
    BsonType((Regex,), ("regex",), lambda value: (value.pattern, value.flags)),
    BsonType((Code,), ("javascript", "javascriptWithScope")),
    BsonType((MaxKey,), ("maxKey",), _only),
)
_RANKS = {python: rank for rank, each in enumerate(TYPE_ORDER) for python in each.classes}


def type_rank(value: Any) -> int:
    """Return the position of a value's type in TYPE_ORDER."""
    return next(_RANKS[base] for base in type(value).__mro__ if base in _RANKS)


def order_key(value: Any) -> tuple[int, Any]:
    """Return a key that sorts values as the server does, across types."""
    rank = type_rank(value)
    return rank, TYPE_ORDER[rank].key(value)


def least(one: Any, other: Any) -> Any:
    """Return the smaller value, as `$min` has it: null does not count."""
    present = [each for each in (one, other) if each is not None]
    return min(present, key=order_key) if present else None


def greatest(one: Any, other: Any) -> Any:
    """Return the larger value, as `$max` has it: null does not count."""
    present = [each for each in (one, other) if each is not None]
    return max(present, key=order_key) if present else None
