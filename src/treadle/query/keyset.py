"""Keyset paging: the condition for what comes after a place in a sorted query, and the token that names it.

A place is the sort values of one document, `_id` last. What comes after it
is found by comparison, so documents that others insert or delete meanwhile
shift nothing. The server's order goes across types, its comparisons do not:
null and missing come first, then numbers with NaN at their beginning, then
the other types; each further type is a condition of its own.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import bson
from bson import ObjectId
from bson.binary import Binary
from bson.decimal128 import Decimal128
from bson.errors import BSONError
from bson.regex import Regex
from bson.timestamp import Timestamp

from treadle.errors import UsageError
from treadle.model.bson_types import CODEC_OPTIONS, Raw

# The types in the server's order, by the names that `$type` knows; null stands before them.
ORDER: tuple[tuple[tuple[type, ...], tuple[str, ...]], ...] = (
    ((int, float, Decimal128), ("double", "int", "long", "decimal")),
    ((str,), ("string", "symbol")),
    ((dict,), ("object",)),
    ((list,), ("array",)),
    ((bytes, Binary, UUID), ("binData",)),
    ((ObjectId,), ("objectId",)),
    ((bool,), ("bool",)),
    ((dt.datetime,), ("date",)),
    ((Timestamp,), ("timestamp",)),
    ((Regex,), ("regex",)),
)
DIGEST_BYTES = 12
NAN = float("nan")
_BOOL_RANK = 6


def after(keys: Sequence[tuple[str, int]], values: Sequence[Any], *, mixed: Iterable[str] = ()) -> Raw:
    """The condition that a document comes after the place with these values.

    `mixed` names the fields whose values may be of several types.
    """
    several = set(mixed)
    equal: Raw = {}
    alternatives = []
    for (path, direction), value in zip(keys, values, strict=True):
        later = _later(value, direction, path in several)
        alternatives += [{**equal, path: condition} for condition in later]
        equal = {**equal, path: {"$eq": value}}
    return {"$or": alternatives} if alternatives else {"_id": {"$in": []}}


def _later(value: Any, direction: int, mixed: bool) -> list[Raw]:
    """The conditions on one field, any of which says that it comes later."""
    if value is None:
        return [{"$ne": None}] if direction == 1 else []
    rank = _rank(value)
    if rank == 0 and _is_nan(value):
        # Nothing compares with NaN, which is the least of numbers.
        within: list[Raw] = [{"$gte": -math.inf}] if direction == 1 else []
    else:
        within = [{"$gt" if direction == 1 else "$lt": value}]
    if direction == 1:
        types = [name for _, names in ORDER[rank + 1 :] for name in names] if mixed else []
        return [*within, *([{"$type": types}] if types else [])]
    lower: list[Any] = [None]
    if rank == 0 and not _is_nan(value):
        lower.append(NAN)
    types = [name for _, names in ORDER[:rank] for name in names] if mixed else []
    return [*within, {"$in": lower}, *([{"$type": types}] if types else [])]


def _rank(value: Any) -> int:
    if isinstance(value, bool):
        return _BOOL_RANK
    for rank, (types, _) in enumerate(ORDER):
        if isinstance(value, types):
            return rank
    return len(ORDER)


def _is_nan(value: Any) -> bool:
    if isinstance(value, Decimal128):
        return value.to_decimal().is_nan()
    return isinstance(value, float) and math.isnan(value)


# -- tokens ---------------------------------------------------------------------------------------


def digest(*query: Any) -> bytes:
    """What tells a query from all others: model, filter and sort."""
    return hashlib.blake2b(repr(query).encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def to_token(query: bytes, values: Sequence[Any]) -> str:
    """A place in a query as text for a URL."""
    stored = bson.encode({"": list(values)}, codec_options=CODEC_OPTIONS)
    return base64.urlsafe_b64encode(query + stored).rstrip(b"=").decode("ascii")


def from_token(query: bytes, token: Any, number: int) -> list[Any]:
    """The values of a place in this very query; refuses every other token."""
    try:
        if not isinstance(token, str):
            raise TypeError
        held = base64.urlsafe_b64decode(token.encode("ascii") + b"=" * (-len(token) % 4))
        if held[:DIGEST_BYTES] != query:
            raise UsageError(
                "this token is of another query; after= takes the `next` of a page with the same model, "
                "filter and sort",
                code="page-token-invalid",
            )
        values = bson.decode(held[DIGEST_BYTES:], codec_options=CODEC_OPTIONS)[""]
        if isinstance(values, list) and len(values) == number:
            return values
    except (TypeError, ValueError, KeyError, binascii.Error, BSONError):
        pass
    raise UsageError(
        "after= takes the `next` of a page as it was given, which this is not", code="page-token-invalid"
    )
