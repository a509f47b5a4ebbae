"""Readings by bucket: what one append carries, taken apart and cut to size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import bson
from bson import ObjectId

from treadle.errors import UsageError
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.patterns.bucket.spec import TIME_BITS, YEAR_ONE, Spec, moment
from treadle.plan import Raw
from treadle.query.keys import freeze

# Readings in one command.
BUCKET_BYTES_MAX = 8 * 1024 * 1024


@dataclass(slots=True)
class Batch:
    """Readings for one bucket: inner parts, in the order of arrival, and where they are to go."""

    key: tuple[Any, ...]
    outer: tuple[Any, ...]
    start: int | None
    readings: list[Raw]
    sequence: int = 0
    # The start of the successor, where the window says so; None if it is open.
    next: int | None = None
    # Positions in what the caller gave, for `unique`.
    places: list[int] = field(default_factory=list)
    # Whether to try it as a new bucket first, which costs the server less than an upsert.
    fresh: bool = False
    # Whether the readings come from models, and so hold what is declared and nothing else.
    modelled: bool = False
    # Whether the sum of whole numbers needs more than 64 bits.
    wide: bool = False
    # At most so many bytes.
    size: int = 0
    # How often a bucket would have become too large for the server with these.
    crowded: int = 0


def group(
    spec: Spec,
    raws: Sequence[Raw],
    places: Iterable[int] | None = None,
    documents: Sequence[Any] | None = None,
) -> list[Batch]:
    """The readings by bucket; takes the raw ones over, and gives `documents` their derived ids."""
    if documents is not None and spec.one_key and spec.unique is None:
        return _group_one_key(spec, raws, documents)
    time, names, span, origin = spec.time.stored, spec.outer_names, spec.span, spec.origin
    drop_id, only = not spec.stores_id, names[0] if len(names) == 1 else None
    tracked = spec.unique is not None or places is not None
    # One loop for everything: bulk inserts live by it.
    groups: dict[Any, tuple[Batch, Callable[[Raw], None], int]] = {}
    for place, raw in zip(places or range(len(raws)), raws, strict=False):
        if drop_id:
            raw.pop("_id", None)
        outer = (raw.pop(only),) if only is not None else tuple([raw.pop(name) for name in names])
        count = round(raw[time].timestamp() * 1000)
        start = None if span is None else count - (count - origin) % span
        known: Any = (spec.known(outer), start)
        group = groups.get(known)
        if group is None:
            key = outer[: len(spec.keys)]
            _refuse_lists(spec, key)
            batch = Batch(key, outer, start, [])
            first = (spec.series(key) << TIME_BITS) + YEAR_ONE if drop_id else 0
            group = groups[known] = batch, batch.readings.append, first
        group[1](raw)
        if tracked:
            group[0].places.append(place)
        if documents is not None and drop_id:
            documents[place].__dict__["id"] = ObjectId((group[2] + count).to_bytes(12, "big"))
    return [group[0] for group in groups.values()]


def _group_one_key(spec: Spec, raws: Sequence[Raw], documents: Sequence[Any]) -> list[Batch]:
    """The same for the ordinary declaration: one plain key, windows with a span, derived ids."""
    time, only, span, origin = spec.time.stored, spec.outer_names[0], spec.span, spec.origin
    assert span is not None
    groups: dict[Any, tuple[Callable[[Raw], None], int, Batch]] = {}
    last, count, start = None, 0, 0
    for document, raw in zip(documents, raws, strict=True):
        key, when = raw.pop(only), raw[time]
        if when != last:
            # Readings of many series often have the same time.
            last, count = when, round(when.timestamp() * 1000)
            start = count - (count - origin) % span
        group = groups.get((key, start))
        if group is None:
            batch = Batch((key,), (key,), start, [], modelled=True)
            first = (spec.series((key,)) << TIME_BITS) + YEAR_ONE
            group = groups[key, start] = batch.readings.append, first, batch
        group[0](raw)
        document.__dict__["id"] = ObjectId((group[1] + count).to_bytes(12, "big"))
    return [group[2] for group in groups.values()]


def _refuse_lists(spec: Spec, key: Sequence[Any]) -> None:
    """An index has one entry per element of a list, so two such series would get into each other's way."""
    for each, value in zip(spec.keys, key, strict=True):
        if isinstance(value, (list, tuple)):
            raise UsageError(
                f"{spec.label}.{each.name} names a series and is a list here; use a single value",
                code="value-not-storable",
            )


def part_of(batch: Batch, begin: int, end: int) -> Batch:
    """Some of the readings of a batch."""
    return replace(batch, readings=batch.readings[begin:end], places=batch.places[begin:end])


def drop_repeated(spec: Spec, batch: Batch, duplicates: list[int], known: set[Any]) -> None:
    """Take out what is known, or comes twice; notes the places of that in `duplicates`."""
    assert spec.unique is not None
    kept: list[int] = []
    for number, reading in enumerate(batch.readings):
        value = reading.get(spec.unique.stored)
        if value is not None and freeze(value) in known:
            duplicates.append(batch.places[number])
            continue
        if value is not None:
            known.add(freeze(value))
        kept.append(number)
    keep(batch, kept)


def keep(batch: Batch, numbers: Sequence[int]) -> None:
    """Leave these readings in a batch, in this order."""
    batch.readings = [batch.readings[number] for number in numbers]
    batch.places = [batch.places[number] for number in numbers] if batch.places else []


def cut(batch: Batch, following: int | None, time: str) -> tuple[Batch, list[Batch]]:
    """The readings before the next window, and the others; the readings are in order."""
    if following is None or batch.readings[-1][time] < (edge := moment(following)):
        return batch, []
    at = bisect_left(batch.readings, edge, key=itemgetter(time))
    return part_of(batch, 0, at), [part_of(batch, at, len(batch.readings))]


def split_large(spec: Spec, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Batches that one command can carry; the driver refuses larger ones."""
    for batch in batches:
        if not batch.readings:
            continue
        if batch.modelled and spec.reading_bytes_max is not None:
            most = spec.reading_bytes_max * len(batch.readings)
        else:
            most = len(bson.encode({"": batch.readings}, codec_options=CODEC_OPTIONS))
        batch.size = most
        if most <= BUCKET_BYTES_MAX:
            yield batch
            continue
        begin = size = 0
        for place, reading in enumerate(batch.readings):
            # The number of its place in an array comes on top.
            bytes_now = len(bson.encode(reading, codec_options=CODEC_OPTIONS)) + 8
            if size + bytes_now > BUCKET_BYTES_MAX and place > begin:
                yield part_of(batch, begin, place)
                begin, size = place, 0
            size += bytes_now
        yield part_of(batch, begin, len(batch.readings))
