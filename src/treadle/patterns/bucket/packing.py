"""Packed readings: columns of values as one small binary, and back, without loss.

Version 1, after a byte for the version: one zlib stream, which holds the
number of readings, the number of columns, and per column its name, its kind
and its values. The first column is the time, in milliseconds. Numbers are
stored as whole numbers, the way that comes out smallest: as they are, as
differences, or as differences of differences, each above the smallest one, in
as few bytes as the largest needs, byte planes apart. A float is such a number
with a power of ten if that gives back the very same float; otherwise its bits
are combined with those of the one before. Whatever is no number, text, date
or bool is BSON.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
import operator
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import bson

from treadle.model.bson_types import CODEC_OPTIONS, UTC
from treadle.patterns.bucket.spec import EPOCH, MILLISECOND, milliseconds

VERSION = 1
UNPACKED_BYTES_MAX = 256 * 1024 * 1024
DIGITS_MAX = 9
EXACT_MAX = 2**53
INT_MIN, INT_MAX = -(2**63), 2**63 - 1
LEVEL = 9

INTS, SCALED, FLOATS, BOOLS, TEXTS, DATES, OTHER, NOTHING = range(8)
WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Damaged(ValueError):
    """These bytes are no packed readings."""


def pack(times: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> bytes:
    """The readings as bytes; `times` are milliseconds, every column is as long as they are."""
    parts = [_varint(len(times)), _varint(len(columns)), _ints(times)]
    for name, values in columns.items():
        encoded = name.encode()
        parts += [_varint(len(encoded)), encoded, _column(values)]
    return bytes([VERSION]) + zlib.compress(b"".join(parts), LEVEL)


def unpack(packed: bytes) -> tuple[list[int], dict[str, list[Any]]]:
    """The times and the columns of packed readings; raises `Damaged`."""
    try:
        if not packed or packed[0] != VERSION:
            raise Damaged(f"version {packed[0] if packed else 'missing'}, where {VERSION} is known")
        stream = zlib.decompressobj()
        body = stream.decompress(packed[1:], UNPACKED_BYTES_MAX)
        if not stream.eof or stream.unused_data:
            raise Damaged("the bytes do not end where they should")
        source = _Source(body)
        count, width = source.number(), source.number()
        times = list(source.ints(count))
        columns = {}
        for _ in range(width):
            name = source.take(source.number()).decode()
            columns[name] = _read_column(source, count)
        if source.at != len(body) or len(columns) != width:
            raise Damaged("there is more than was written")
    except Damaged:
        raise
    except (
        zlib.error, ValueError, IndexError, OverflowError, TypeError, KeyError, AttributeError, MemoryError,
        bson.errors.BSONError,
    ) as error:  # fmt: skip
        raise Damaged(f"{type(error).__name__}: {error}") from error
    return times, columns


# -- columns ------------------------------------------------------------------------------


def _column(values: Sequence[Any]) -> bytes:
    present = [value for value in values if value is not None]
    if not present:
        return bytes([NOTHING])
    mask = b""
    if len(present) < len(values):
        mask = bytes(value is not None for value in values)
    kind, body = _present(present)
    return bytes([kind, 1 if mask else 0]) + mask + (_varint(len(present)) if mask else b"") + body


def _present(values: list[Any]) -> tuple[int, bytes]:
    kinds = {type(value) for value in values}
    if kinds == {float}:
        scaled = _scaled(values)
        return (SCALED, scaled) if scaled is not None else (FLOATS, _floats(values))
    if kinds == {bool}:
        return BOOLS, bytes(values)
    if kinds == {str}:
        encoded = [value.encode() for value in values]
        return TEXTS, _ints([len(each) for each in encoded]) + b"".join(encoded)
    if kinds == {dt.datetime} and all(
        value.tzinfo is UTC and not value.microsecond % 1000 for value in values
    ):
        return DATES, _ints([milliseconds(value) for value in values])
    if all(kind is int or kind.__name__ == "Int64" for kind in kinds):
        return INTS, _ints(values)
    return OTHER, bson.encode({"": values}, codec_options=CODEC_OPTIONS)


def _read_column(source: _Source, count: int) -> list[Any]:
    kind = source.take(1)[0]
    if kind == NOTHING:
        return [None] * count
    if not source.take(1)[0]:
        return _read_present(source, kind, count)
    mask = source.take(count)
    present = source.number()
    if present != sum(mask):
        raise Damaged("a column has another number of values than it says")
    values = iter(_read_present(source, kind, present))
    return [next(values) if each else None for each in mask]


def _read_present(source: _Source, kind: int, count: int) -> list[Any]:
    if kind == INTS:
        return list(source.ints(count))
    if kind == SCALED:
        scale = 10 ** source.take(1)[0]
        return [number / scale for number in source.ints(count)]
    if kind == FLOATS:
        return _read_floats(source.take(8 * count))
    if kind == BOOLS:
        return [bool(each) for each in source.take(count)]
    if kind == TEXTS:
        return [source.take(length).decode() for length in list(source.ints(count))]
    if kind == DATES:
        return [EPOCH + number * MILLISECOND for number in source.ints(count)]
    if kind == OTHER:
        length = int.from_bytes(source.body[source.at : source.at + 4], "little")
        values: list[Any] = bson.decode(source.take(length), codec_options=CODEC_OPTIONS)[""]
        if len(values) != count:
            raise Damaged("a column has another number of values than it says")
        return values
    raise Damaged(f"a column of the unknown kind {kind}")


# -- floats -------------------------------------------------------------------------------


def _scaled(values: Sequence[float]) -> bytes | None:
    """The floats as whole numbers over a power of ten; None unless that gives back the very same."""
    if not all(map(math.isfinite, values)):
        return None
    if any(value == 0 and math.copysign(1, value) < 0 for value in values):
        return None
    probe = values[:16]
    for digits in range(DIGITS_MAX + 1):
        scale = 10**digits
        if max(map(abs, values)) * scale >= EXACT_MAX:
            return None
        if any(round(value * scale) / scale != value for value in probe):
            continue
        numbers = [round(value * scale) for value in values]
        if all(number / scale == value for number, value in zip(numbers, values, strict=True)):
            return bytes([digits]) + _ints(numbers)
    return None


def _floats(values: Sequence[float]) -> bytes:
    words = array("Q")
    words.frombytes(array("d", values).tobytes())
    mixed = array("Q", [words[0], *map(operator.xor, words[1:], words[:-1])])
    return _planes(_little(mixed).tobytes(), 8)


def _read_floats(planes: bytes) -> list[float]:
    mixed = array("Q")
    mixed.frombytes(_unplaned(planes, 8))
    words = array("Q", itertools.accumulate(_little(mixed), operator.xor))
    values = array("d")
    values.frombytes(words.tobytes())
    return values.tolist()


# -- whole numbers --------------------------------------------------------------------------


def _ints(numbers: Sequence[int]) -> bytes:
    """Whole numbers in whichever of three ways comes out smallest."""
    best = b""
    rest, heads = list(numbers), []
    for order in range(3):
        if order:
            if not rest:
                break
            heads.append(rest[0])
            rest = [after - before for before, after in itertools.pairwise(rest)]
        candidate = bytes([order]) + b"".join(map(_signed, heads)) + _above_smallest(rest)
        if not best or len(zlib.compress(candidate, 6)) < len(zlib.compress(best, 6)):
            best = candidate
    return best


def _above_smallest(numbers: Sequence[int]) -> bytes:
    low = min(numbers, default=0)
    span = max(numbers, default=0) - low
    width = next((width for width in (0, 1, 2, 4, 8) if span < 1 << (8 * width)), None)
    if width is None:
        # Differences of 64-bit numbers may need 65 bits.
        return bytes([16]) + b"".join(number.to_bytes(16, "little", signed=True) for number in numbers)
    head = bytes([width]) + _signed(low)
    if width == 0:
        return head
    return head + _planes(_little(array(WIDTHS[width], [each - low for each in numbers])).tobytes(), width)


class _Source:
    """The bytes that are still to be read."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.at = 0

    def take(self, count: int) -> bytes:
        part = self.body[self.at : self.at + count]
        if len(part) != count:
            raise Damaged("the bytes end too early")
        self.at += count
        return part

    def number(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise Damaged("a number without an end")

    def signed(self) -> int:
        return int.from_bytes(self.take(self.take(1)[0]), "little", signed=True)

    def ints(self, count: int) -> Iterable[int]:
        order = self.take(1)[0]
        if order > 2 or (order and not count):
            raise Damaged(f"whole numbers of the unknown kind {order}")
        heads = [self.signed() for _ in range(order)]
        numbers: Iterable[int] = self._above_smallest(count - order)
        for head in reversed(heads):
            numbers = itertools.accumulate(numbers, initial=head)
        return numbers

    def _above_smallest(self, count: int) -> Iterable[int]:
        width = self.take(1)[0]
        if width == 16:
            parts: Iterator[bytes] = (self.take(16) for _ in range(count))
            return [int.from_bytes(part, "little", signed=True) for part in parts]
        low = self.signed()
        if width == 0:
            return [low] * count
        numbers = array(WIDTHS[width])
        numbers.frombytes(_unplaned(self.take(width * count), width))
        differences = _little(numbers)
        return [low + each for each in differences] if low else differences


def _signed(number: int) -> bytes:
    size = (number.bit_length() + 8) // 8
    return bytes([size]) + number.to_bytes(size, "little", signed=True)


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number >= 128:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _little(numbers: Any) -> Any:
    if sys.byteorder == "big":  # pragma: no cover (no such machine here)
        numbers.byteswap()
    return numbers


def _planes(data: bytes, width: int) -> bytes:
    return b"".join(data[place::width] for place in range(width))


def _unplaned(planes: bytes, width: int) -> bytes:
    if width == 1:
        return planes
    count = len(planes) // width
    data = bytearray(len(planes))
    for place in range(width):
        data[place::width] = planes[place * count : (place + 1) * count]
    return bytes(data)
