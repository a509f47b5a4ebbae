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

Equal or regular values take no bytes, so a few bytes can claim any number of
readings. What is claimed is compared with what the bucket says and with what
a stored document can hold, before memory is taken for it.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
import operator
import sys
import zlib
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import bson

from treadle.model.bson_types import CODEC_OPTIONS, UTC
from treadle.patterns.bucket.spec import EPOCH, MILLISECOND, milliseconds

VERSION = 1
# Readings were a document of at most 16 MB before they were packed. There a value takes about 8 bytes
# at least; as packed values before compression, whole numbers with 65 bits take half as much again.
VALUES_MAX = 2 * 1024 * 1024
UNPACKED_BYTES_MAX = 64 * 1024 * 1024
# So many readings may be there whatever a bucket says, so that a wrong count can be mended.
SMALL_COUNT = 10_000
DIGITS_MAX = 9
SIGNED_BYTES_MAX = 9
EXACT_MAX = 2**53
INT_MIN, INT_MAX = -(2**63), 2**63 - 1
LEVEL = 9

INTS, SCALED, FLOATS, BOOLS, TEXTS, DATES, OTHER, NOTHING = range(8)
WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Damaged(ValueError):
    """These bytes are no packed readings."""


def pack(times: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> bytes:
    """The readings as bytes; `times` are milliseconds, every column is as long as they are.

    Raises `Damaged` for more than could be unpacked.
    """
    _check_size(len(times), len(columns))
    parts = [_varint(len(times)), _varint(len(columns)), _ints(times)]
    for name, values in columns.items():
        encoded = name.encode()
        parts += [_varint(len(encoded)), encoded, _column(values)]
    return bytes([VERSION]) + zlib.compress(b"".join(parts), LEVEL)


def _check_size(count: int, width: int) -> None:
    if count * (width + 1) > VALUES_MAX:
        raise Damaged(f"{count:,} readings of {width:,} fields are more than a document can hold")


def unpack(
    packed: bytes, expected: Any = None, unread: Container[str] = ()
) -> tuple[list[int], dict[str, list[Any]]]:
    """The times and the columns of packed readings; raises `Damaged`.

    `expected` is how many readings the bucket says that it has. The `unread`
    columns are passed over.
    """
    try:
        if not packed or packed[0] != VERSION:
            raise Damaged(f"version {packed[0] if packed else 'missing'}, where {VERSION} is known")
        stream = zlib.decompressobj()
        body = stream.decompress(packed[1:], UNPACKED_BYTES_MAX)
        if not stream.eof or stream.unused_data:
            raise Damaged("the bytes do not end where they should")
        source = _Source(body)
        count, width = source.number(), source.number()
        _check_size(count, width)
        said = expected if isinstance(expected, int) else 0
        if count > max(said, len(body), SMALL_COUNT):
            raise Damaged(f"{len(packed)} bytes claim {count:,} readings, where the bucket counts {said:,}")
        times = list(source.ints(count))
        columns, passed = dict[str, list[Any]](), 0
        for _ in range(width):
            name = source.take(source.number()).decode()
            if "\0" in name:
                raise Damaged("the name of a column holds NUL")
            if name in unread:
                _pass_column(source, count)
                passed += 1
            else:
                columns[name] = _read_column(source, count)
        if source.at != len(body) or len(columns) + passed != width:
            raise Damaged("there is more than was written")
    except Damaged:
        raise
    except (
        zlib.error, ValueError, IndexError, OverflowError, TypeError, KeyError, AttributeError, MemoryError,
        RecursionError, bson.errors.BSONError,
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
    if present != mask.count(1) or mask.count(0) != count - present:
        raise Damaged("a column has another number of values than it says")
    values = iter(_read_present(source, kind, present))
    return [next(values) if each else None for each in mask]


def _pass_column(source: _Source, count: int) -> None:
    """Go on to what follows a column."""
    kind = source.take(1)[0]
    if kind == NOTHING:
        return
    if source.take(1)[0]:
        source.take(count)
        count = source.number()
    if kind == SCALED:
        source.take(1)
    if kind in (INTS, SCALED, DATES):
        source.ints(count)
    elif kind == TEXTS:
        source.take(sum(source.ints(count)))
    elif kind == OTHER:
        source.take(int.from_bytes(source.body[source.at : source.at + 4], "little"))
    else:
        source.take(8 * count if kind == FLOATS else count)


def _read_present(source: _Source, kind: int, count: int) -> list[Any]:
    if kind == INTS:
        numbers = list(source.ints(count))
        if numbers and not INT_MIN <= min(numbers) <= max(numbers) <= INT_MAX:
            raise Damaged("a whole number has more than 64 bits")
        return numbers
    if kind == SCALED:
        digits = source.take(1)[0]
        if digits > DIGITS_MAX:
            raise Damaged(f"numbers with {digits} decimal places")
        scale = 10**digits
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
        if not isinstance(values, list) or len(values) != count:
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
        size = self.take(1)[0]
        if size > SIGNED_BYTES_MAX:
            raise Damaged(f"a whole number of {size} bytes")
        return int.from_bytes(self.take(size), "little", signed=True)

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
