"""How many items fit into one document, by number and by bytes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Any

import bson
from bson import Decimal128, ObjectId

from treadle.model.bson_types import CODEC_OPTIONS

# An element's type, its index in the array as text, and a value of up to 16 bytes.
SMALL_BYTES = 32
_SMALL_STORED = frozenset({ObjectId, int, float, bool, type(None), dt.datetime, Decimal128})
# Text up to this length is not encoded to be measured.
_SHORT_TEXT = 256


def bson_size_bound(item: Any) -> int:
    """Return an upper bound of the bytes that an item takes in an array."""
    kind = type(item)
    if kind in _SMALL_STORED:
        return SMALL_BYTES
    if kind is str:
        return SMALL_BYTES + (4 * len(item) if len(item) < _SHORT_TEXT else len(item.encode()))
    if kind is bytes:
        return SMALL_BYTES + len(item)
    return SMALL_BYTES + len(bson.encode({"": item}, codec_options=CODEC_OPTIONS))


def count_fitting(items: Sequence[Any], items_max: int, bytes_max: int, start: int = 0) -> int:
    """Return how many items, from `start` on, fit into this number and these bytes."""
    count = 0
    for index in range(start, min(start + items_max, len(items))):
        bytes_max -= bson_size_bound(items[index])
        if bytes_max < 0:
            break
        count += 1
    return count


def cut(items: Sequence[Any], items_max: int, bytes_max: int) -> Iterator[list[Any]]:
    """Cut items into lists that fit; an item that is too large for any is alone."""
    start = 0
    while start < len(items):
        count = max(1, count_fitting(items, items_max, bytes_max, start))
        yield list(items[start : start + count])
        start += count
