"""How many items fit into one document, by number and by bytes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import bson
from bson import Decimal128, ObjectId

from treadle.model.bson_types import CODEC_OPTIONS

# An element's type, its place in the array as text, and a value of up to 16 bytes.
SMALL_BYTES = 32
_SMALL = frozenset({ObjectId, int, float, bool, type(None), dt.datetime, Decimal128})
# The types that are declared for these.
SMALL_TYPES = frozenset({ObjectId, int, float, bool, dt.datetime, Decimal})
# Text up to this length is not encoded to be measured.
_SHORT_TEXT = 256


def weight(item: Any) -> int:
    """At most so many bytes an item takes in an array."""
    kind = type(item)
    if kind in _SMALL:
        return SMALL_BYTES
    if kind is str:
        return SMALL_BYTES + (4 * len(item) if len(item) < _SHORT_TEXT else len(item.encode()))
    if kind is bytes:
        return SMALL_BYTES + len(item)
    return SMALL_BYTES + len(bson.encode({"": item}, codec_options=CODEC_OPTIONS))


def fitting(items: Sequence[Any], most: int, room: int, start: int = 0) -> int:
    """How many of the items from `start` on fit: at most so many, and so many bytes."""
    taken = 0
    for place in range(start, min(start + most, len(items))):
        room -= weight(items[place])
        if room < 0:
            break
        taken += 1
    return taken


def cut(items: Sequence[Any], most: int, room: int) -> Iterator[list[Any]]:
    """The items in pieces that fit; one that is too large for any stands alone."""
    start = 0
    while start < len(items):
        number = max(1, fitting(items, most, room, start))
        yield list(items[start : start + number])
        start += number
