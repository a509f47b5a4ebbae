"""Packed readings come back as they were, bit by bit; damage is noticed."""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from hypothesis import given
from hypothesis import strategies as st

from treadle.patterns.bucket.packing import Damaged, pack, unpack

dates = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)).map(
    lambda value: value.replace(microsecond=value.microsecond // 1000 * 1000, tzinfo=UTC)
)
kinds: list[st.SearchStrategy[Any]] = [
    st.floats(),
    st.floats(-100, 100).map(lambda value: round(value, 2)),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-5, 5),
    st.booleans(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    dates,
    st.decimals(allow_nan=False, allow_infinity=False, places=2).map(
        lambda value: (
            Decimal128(value.quantize(type(value)("0.01"))) if abs(value) < 10**20 else Decimal128("1")
        )
    ),
    st.binary(min_size=12, max_size=12).map(ObjectId),
    st.lists(st.integers(0, 9), max_size=3),
    st.integers(0, 9) | st.floats(allow_nan=False) | st.text("ab", max_size=2),
]


@st.composite
def readings(draw: Any) -> tuple[list[int], dict[str, list[Any]]]:
    count = draw(st.integers(0, 40))
    times = draw(st.lists(st.integers(-(2**45), 2**47), min_size=count, max_size=count))
    columns = {}
    for name in draw(st.lists(st.text("abü", min_size=1, max_size=4), unique=True, max_size=4)):
        values = draw(st.sampled_from(kinds))
        if draw(st.booleans()):
            values = st.none() | values
        columns[name] = draw(st.lists(values, min_size=count, max_size=count))
    return times, columns


def bits(value: Any) -> Any:
    """A value with its type, and a float by its bits."""
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, list):
        return [bits(each) for each in value]
    return type(value).__name__ if type(value).__name__ != "Int64" else "int", value


@given(readings())
def test_what_is_packed_comes_back_bit_by_bit(made):
    times, columns = made
    found_times, found = unpack(pack(times, columns))
    assert times == found_times
    assert {name: bits(values) for name, values in columns.items()} == {
        name: bits(values) for name, values in found.items()
    }
    for name in columns:
        others = {each: values for each, values in found.items() if each != name}
        assert repr((found_times, others)) == repr(unpack(pack(times, columns), unread={name}))


def test_the_odd_floats_survive():
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 0.1, 1 / 3]
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF80000DEADBEEF))[0]
    for column in ([*values, payload], [-0.0], [0.1, -0.0], [1e300, 2.5], [0.1 + 0.2, 0.3]):
        _, found = unpack(pack(list(range(len(column))), {"v": column}))
        assert bits(column) == bits(found["v"])


def test_a_day_of_readings_is_small():
    """Regular times cost nothing, and a value with one decimal place about a byte."""
    times = [1_767_225_600_000 + 60_000 * minute for minute in range(1440)]
    values = [round(20 + 5 * math.sin(minute / 200), 1) for minute in range(1440)]
    assert 1440 > len(pack(times, {"temp": values}))
    assert 100 > len(pack(times, {}))


@given(st.binary(max_size=60))
def test_any_bytes_are_readings_or_damaged(data):
    for given_bytes in (data, b"\x01" + data, b"\x01" + zlib.compress(data)):
        with contextlib.suppress(Damaged):
            unpack(given_bytes)


def test_each_cut_and_each_flipped_byte_is_noticed():
    packed = pack([0, 60_000, 120_500], {"temp": [1.5, 2.5, None], "note": ["a", "b", "c"]})
    for length in range(len(packed)):
        with pytest.raises(Damaged):
            unpack(packed[:length])
    for place in range(1, len(packed)):
        flipped = bytearray(packed)
        flipped[place] ^= 0x55
        with pytest.raises(Damaged):
            unpack(bytes(flipped))
    with pytest.raises(Damaged, match="version 2"):
        unpack(b"\x02" + packed[1:])
    with pytest.raises(Damaged, match="end where"):
        unpack(packed + b"x")


def test_times_out_of_order_and_equal_ones_survive():
    start = datetime(2026, 1, 1, tzinfo=UTC)
    counts = [round((start + timedelta(milliseconds=each)).timestamp() * 1000) for each in (5, 5, 1, 99)]
    assert counts == unpack(pack(counts, {}))[0]
