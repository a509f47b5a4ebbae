"""Tokens in the place of values: equal for equal, and of the same type.

A token is a keyed hash, with a key that is made for one recording and thrown
away. Equal values have equal tokens wherever they stand, so an order's
customer and the customer's id still fit. `true`, `false` and null stay, as do
0, 1 and -1 where they are mostly structure (`values.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from datetime import UTC, datetime, timedelta
from typing import Any

from bson import Binary, DBRef, Decimal128, Int64, ObjectId, Regex, Timestamp
from bson.datetime_ms import DatetimeMS
from bson.max_key import MaxKey
from bson.min_key import MinKey

from treadle.advisor.trials.values import replaced
from treadle.advisor.trials.workload_file import Request

_KEPT = (bool, type(None), MinKey, MaxKey)
_FIRST = datetime(2000, 1, 1, tzinfo=UTC)
_YEARS_IN_MILLISECONDS = 30 * 365 * 86_400_000


class Redactor:
    """Replaces the values of requests by tokens."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def redact(self, request: Request) -> Request:
        return replaced(request, lambda path, value: self.token(value))

    def token(self, value: Any) -> Any:
        """A value of the same type that tells nothing about this one but whether another is equal."""
        if isinstance(value, _KEPT):
            return value
        if isinstance(value, DBRef):
            return DBRef(value.collection, self.token(value.id), value.database)
        if isinstance(value, (int, float)):
            return self._of_number(value)
        kind, content = _content(value)
        digest = self._digest(kind, content)
        number = int.from_bytes(digest[:8], "big")
        if isinstance(value, ObjectId):
            return ObjectId(digest[:12])
        if isinstance(value, (datetime, DatetimeMS)):
            return _FIRST + timedelta(milliseconds=number % _YEARS_IN_MILLISECONDS)
        if isinstance(value, Decimal128):
            return Decimal128(str(number % 10**12))
        if isinstance(value, Binary):
            return Binary(digest[:16], value.subtype)
        if isinstance(value, bytes):
            return digest[:16]
        if isinstance(value, Timestamp):
            return Timestamp(number % 2**31, 1)
        if isinstance(value, (Regex, re.Pattern)):
            return Regex(f"^{digest.hex()[:16]}", 0)
        return f"r{digest.hex()[:20]}"

    def _of_number(self, value: float) -> Any:
        # 5 and 5.0 are equal to the server, so they have one token.
        digest = self._digest("number", repr(float(value)).encode())
        number = int.from_bytes(digest[:4], "big") % 1_000_000_007
        if isinstance(value, float):
            return float(number)
        return Int64(number) if isinstance(value, Int64) else number

    def _digest(self, kind: str, content: bytes) -> bytes:
        return hmac.new(self._key, kind.encode() + b"\0" + content, hashlib.sha256).digest()


def _content(value: Any) -> tuple[str, bytes]:
    if isinstance(value, ObjectId):
        return "oid", value.binary
    if isinstance(value, str):
        return "text", value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return "bytes", bytes(value)
    if isinstance(value, (Regex, re.Pattern)):
        return "regex", repr(value.pattern).encode()
    return type(value).__name__, repr(value).encode()
