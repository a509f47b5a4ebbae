"""Readings of a call, grouped by the bucket that they belong to, and cut to size."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import bson

from treadle.errors import UsageError
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.patterns.bucket.spec import Spec, encode_id, milliseconds
from treadle.plan import Raw

# A bucket is not filled beyond this, so that the server's 16 MB leave room for the rest of it.
BUCKET_BYTES_MAX = 15 * 2**20


@dataclass(slots=True)
class WindowBatch:
    """Readings of one series, window and metadata, in the order of arrival."""

    key: tuple[Any, ...]
    # Key and metadata.
    values: tuple[Any, ...]
    # Milliseconds; None where windows have no span.
    start: int | None
    readings: list[Raw] = field(default_factory=list)
    # Where the readings stand in what the caller gave.
    positions: list[int] = field(default_factory=list)
    # At most so many bytes each reading takes in its bucket.
    sizes: list[int] = field(default_factory=list)


def group(spec: Spec, raws: Sequence[Raw], documents: Sequence[Any] | None = None) -> list[WindowBatch]:
    """Return whole readings by bucket.

    Takes the raw readings over. With `documents`, the models that they were
    dumped from, gives these their derived ids.
    """
    time, names, key_length = spec.time.stored, spec.series_fields, len(spec.keys)
    batches: dict[Any, tuple[WindowBatch, int]] = {}
    last: dt.datetime | None = None
    count, start = 0, None
    for position, raw in enumerate(raws):
        values = tuple([raw.pop(name) for name in names])
        if raw[time] != last:
            # Readings of many series often have the same time.
            last = raw[time]
            count = milliseconds(raw[time])
            start = spec.window(count) if spec.span is not None else None
        name = (spec.hashable_key(values), start)
        found = batches.get(name)
        if found is None:
            key = values[:key_length]
            _refuse_lists(spec, key)
            found = batches[name] = WindowBatch(key, values, start), spec.series_hash(key)
        batch, series = found
        if not spec.stores_id:
            raw.pop("_id", None)
            if documents is not None:
                documents[position].__dict__["id"] = encode_id(series, count)
        batch.readings.append(raw)
        batch.positions.append(position)
    for batch, _ in batches.values():
        batch.sizes = _sizes(spec, batch.readings, exact=documents is None)
    return [batch for batch, _ in batches.values()]


def _refuse_lists(spec: Spec, key: Sequence[Any]) -> None:
    """Refuse a list as key: an index has one entry per element, so two such series could collide."""
    for each, value in zip(spec.keys, key, strict=True):
        if isinstance(value, (list, tuple)):
            raise UsageError(
                f"{spec.label}.{each.name} names a series and is a list here; use a single value",
                code="value-not-storable",
            )


def _sizes(spec: Spec, readings: Sequence[Raw], *, exact: bool) -> list[int]:
    if spec.reading_bytes_max is not None and not exact:
        return [spec.reading_bytes_max] * len(readings)
    # Each has its type and its place in the array besides.
    return [len(bson.encode(reading, codec_options=CODEC_OPTIONS)) + 12 for reading in readings]


def count_fitting(sizes: Sequence[int], begin: int, most: int, room: int) -> int:
    """Return how many readings from `begin` on fit, by number and by bytes."""
    number = max(0, min(most, len(sizes) - begin))
    if sum(sizes[begin : begin + number]) <= room:
        return number
    for taken in range(number):
        room -= sizes[begin + taken]
        if room < 0:
            return taken
    return number


def cut(sizes: Sequence[int], begin: int, most: int) -> Iterator[slice]:
    """Yield the pieces that fit into a bucket each; a reading that is too large for any stands alone."""
    while begin < len(sizes):
        number = max(1, count_fitting(sizes, begin, most, BUCKET_BYTES_MAX))
        yield slice(begin, begin + number)
        begin += number
