"""Keyset pagination: the condition for what follows a place in a sorted query, and the token of a place.

A place is the sort values of one document, `_id` last. What follows it is found by comparison, so concurrent
inserts and deletes shift nothing. The server's order crosses types but its comparisons do not, so each
further type is a condition of its own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import bson
from bson import MinKey
from bson.errors import BSONError

from treadle.errors import UsageError
from treadle.model.bson_types import CODEC_OPTIONS, Raw
from treadle.query.comparison import TYPE_ORDER, is_nan, order_key, type_rank

DIGEST_BYTES = 12
_NAN = float("nan")


def after(keys: Sequence[tuple[str, int]], values: Sequence[Any], *, mixed: Iterable[str] = ()) -> Raw:
    """Return the condition that a document follows the place with these values.

    `mixed` names the fields whose values may be of several types.
    """
    several = set(mixed)
    equal: Raw = {}
    alternatives = []
    for (path, direction), value in zip(keys, values, strict=True):
        later = _later(value, direction == 1, path in several)
        alternatives += [{**equal, path: condition} for condition in later]
        equal = {**equal, path: {"$eq": value}}
    return {"$or": alternatives} if alternatives else {"_id": {"$in": []}}


def _later(value: Any, ascending: bool, mixed: bool) -> list[Raw]:
    """Return the conditions on one field, each of which says that its value comes later."""
    if value is None and ascending:
        return [{"$nin": [None, MinKey()]} if mixed else {"$ne": None}]
    # What is missing sorts with null, but has no type. Nothing compares with NaN, the least of numbers.
    exact = [each for each in (None, _NAN) if _comes_later(each, value, ascending)]
    types = _later_types(value, ascending) if mixed else []
    further = [{"$in": exact}] if exact else []
    return [*_within_its_type(value, ascending), *further, *([{"$type": types}] if types else [])]


def _later_types(value: Any, ascending: bool) -> list[str]:
    rank = type_rank(value)
    later = TYPE_ORDER[rank + 1 :] if ascending else TYPE_ORDER[:rank]
    return [name for each in later for name in each.names if name != "null"]


def _comes_later(special: Any, value: Any, ascending: bool) -> bool:
    """Whether null, or NaN where it has the type of the value, comes after the value."""
    if special is not None and type_rank(value) != type_rank(special):
        return False
    one, other = order_key(value), order_key(special)
    return one < other if ascending else one > other


def _within_its_type(value: Any, ascending: bool) -> list[Raw]:
    if value is None:
        return []
    if is_nan(value):
        return [{"$gte": -math.inf}] if ascending else []
    return [{"$gt" if ascending else "$lt": value}]


# -- tokens -------------------------------------------------------------------------------------------


def digest(*query: Any) -> bytes:
    """Return what tells a query from all others: of its model, filter and sort."""
    return hashlib.blake2b(repr(query).encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def to_token(query: bytes, values: Sequence[Any]) -> str:
    """Return a place in a query as text for a URL."""
    stored = bson.encode({"": list(values)}, codec_options=CODEC_OPTIONS)
    return base64.urlsafe_b64encode(query + stored).rstrip(b"=").decode("ascii")


def from_token(query: bytes, token: Any, number: int) -> list[Any]:
    """Return the values of a place in this very query; refuses every other token."""
    try:
        if not isinstance(token, str):
            raise TypeError
        held = base64.urlsafe_b64decode(token.encode("ascii") + b"=" * (-len(token) % 4))
        values = None
        if held[:DIGEST_BYTES] == query:
            values = bson.decode(held[DIGEST_BYTES:], codec_options=CODEC_OPTIONS)[""]
    except (TypeError, ValueError, KeyError, binascii.Error, BSONError):
        raise _invalid("after= takes the `next` of a page as it was given, which this is not") from None
    if values is None:
        raise _invalid(
            "this token is of another query; after= takes the `next` of a page with the same model, filter "
            "and sort"
        )
    if not isinstance(values, list) or len(values) != number:
        raise _invalid("after= takes the `next` of a page as it was given, which this is not")
    return values


def _invalid(reason: str) -> UsageError:
    return UsageError(reason, code="page-token-invalid")
