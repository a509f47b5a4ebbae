"""Documents of other versions, converted: in memory by functions, by the server where a pipeline says how.

The result of functions is stored by an update that compares every field that
they read, and sets only what they changed. Comparing the version alone would
not do: writers that do not know of it leave it as it is, and their writes
would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import bson
from pymongo import ReplaceOne, UpdateOne

from treadle.engine.contention import in_pieces
from treadle.errors import DataError, UsageError
from treadle.graph.pattern import Entry
from treadle.graph.versions import Lineage, Way, failed
from treadle.graph.watched import copied
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED, to_bson
from treadle.model.encodable import ENCODING_ERRORS, not_storable
from treadle.plan import Plan, Raw, aggregate, bulk_write, by_id, find_one, transact
from treadle.plan.server_errors import OBJECT_TOO_LARGE, codes_of, message_of

# Documents that the server converts in one command.
CONVERT_DOCUMENTS_MAX = 500
# Their size; a command holds 16 MB.
CONVERT_BYTES_MAX = 6 * 1024 * 1024
# What one update compares and sets.
COMPARE_BYTES_MAX = 12 * 1024 * 1024

# Names of fields that a process remembers.
NAMES_MAX = 10_000


@dataclass(slots=True)
class Converted:
    """A document before and after; `read` are the fields that the result rests on, None for all."""

    lineage: Lineage
    before: Raw
    after: Raw
    read: set[str] | None


def lineage_of(entry: Entry[Any], raw: Raw) -> Lineage | None:
    """The versions that a stored document belongs to."""
    return entry.lineage if entry.family is None else entry.of(raw).lineage


def convert(
    entry: Entry[Any], raws: Sequence[Raw], end: int | None = None
) -> Plan[list[Converted | DataError]]:
    """Each document as another version has it (the current one), or what went wrong with it."""
    results: list[Converted | DataError] = []
    waiting: dict[tuple[Lineage, int], list[int]] = {}
    # The ways of each version, and whether all of them are functions.
    routes: dict[tuple[Lineage, Any], tuple[list[tuple[Way, int]], bool]] = {}
    for number, raw in enumerate(raws):
        lineage = lineage_of(entry, raw)
        assert lineage is not None
        try:
            version = raw.get(lineage.field)
            if version.__class__ is not int:
                version = lineage.version_of(raw)
            if (lineage, version) not in routes:
                ways = lineage.ways_from(raw, lineage.current if end is None else end)
                routes[lineage, version] = ways, all(callable(way) for way, _ in ways)
            ways, by_functions = routes[lineage, version]
            if by_functions:
                after, read = lineage.change(raw, ways)
                results.append(Converted(lineage, raw, after, read))
            else:
                results.append(Converted(lineage, raw, raw, None))
                waiting.setdefault((lineage, version), []).append(number)
        except DataError as error:
            results.append(error)
    for (lineage, _), numbers in waiting.items():
        outcomes = yield from _by_the_server(entry, lineage, [raws[number] for number in numbers], end)
        for number, outcome in zip(numbers, outcomes, strict=True):
            results[number] = outcome
    return results


def _by_the_server(
    entry: Entry[Any], lineage: Lineage, raws: Sequence[Raw], end: int | None
) -> Plan[list[Converted | DataError]]:
    """Documents of one version, step by step, pipelines on the server."""
    outcomes: list[Raw | DataError] = list(raws)
    for way, version in lineage.ways_from(raws[0], lineage.current if end is None else end):
        numbers = [number for number, each in enumerate(outcomes) if not isinstance(each, DataError)]
        if callable(way):
            for number in numbers:
                try:
                    # A copy: the document that was read is compared with what is stored.
                    outcomes[number] = lineage.apply(way, copied(outcomes[number]), version)
                except DataError as error:
                    outcomes[number] = error
            continue
        pipeline = [*way, {"$set": {lineage.field: {"$literal": version}}}]
        ready = []
        for number in numbers:
            try:
                outcomes[number] = encodable(outcomes[number], lineage.model)
                ready.append(number)
            except UsageError as error:
                outcomes[number] = failed(lineage.model, raws[number].get("_id"), version, error.message)
        done = yield from evaluate(entry, [outcomes[number] for number in ready], pipeline, lineage, version)
        for number, outcome in zip(ready, done, strict=True):
            outcomes[number] = outcome
    return [
        outcome if isinstance(outcome, DataError) else Converted(lineage, raw, outcome, None)
        for raw, outcome in zip(raws, outcomes, strict=True)
    ]


def encodable(raw: Any, model: type) -> Raw:
    """A document in BSON's own types, where `Decimal`, dates and sets are stored as those of models are."""
    try:
        bson.encode(raw, codec_options=CODEC_OPTIONS)
    except ENCODING_ERRORS:
        raw = to_bson(raw, [])
        try:
            bson.encode(raw, codec_options=CODEC_OPTIONS)
        except ENCODING_ERRORS as error:
            raise not_storable(error, model.__name__, [raw]) from error
    stored: Raw = raw
    return stored


def evaluate(
    entry: Entry[Any], raws: Sequence[Any], pipeline: Sequence[Raw], lineage: Lineage, version: int
) -> Plan[list[Raw | DataError]]:
    """What a pipeline makes of documents that are at hand, without storing anything."""

    def fail(raw: Raw, reason: str) -> DataError:
        return failed(lineage.model, raw.get("_id"), version, reason)

    def attempt(some: Sequence[Raw]) -> Plan[list[Raw | DataError]]:
        rows = yield from aggregate(entry.collection, [*_given(some), *pipeline])
        if len(rows) != len(some):
            return [fail(raw, "the pipeline dropped it") for raw in some]
        return [
            row if row.get("_id") == raw.get("_id") else fail(raw, "the pipeline changed the _id")
            for raw, row in zip(some, rows, strict=True)
        ]

    def alone(raw: Raw, error: Exception) -> Plan[list[Raw | DataError]]:
        return [fail(raw, message_of(error)[:300])]
        yield  # pragma: no cover

    done: list[Raw | DataError] = []
    start = 0
    while start < len(raws):
        end, size = start, 0
        while end < len(raws) and end - start < CONVERT_DOCUMENTS_MAX:
            size += len(bson.encode(raws[end], codec_options=CODEC_OPTIONS))
            if size > CONVERT_BYTES_MAX and end > start:
                break
            end += 1
        done += yield from in_pieces(raws[start:end], attempt, alone)
        start = end
    return done


def _given(raws: Sequence[Raw]) -> list[Raw]:
    """Stages that begin with documents which are at hand."""
    return [
        # One document to begin with, even where the collection is empty.
        {"$limit": 1},
        {"$facet": {"none": [{"$limit": 1}]}},
        {"$project": {"given": {"$literal": list(raws)}}},
        {"$unwind": "$given"},
        {"$replaceWith": "$given"},
    ]


# -- storing what was converted --------------------------------------------------------------


def guarded_write(converted: Converted, *, compare: bool = True) -> UpdateOne | ReplaceOne[Any] | None:
    """The write that stores a conversion, if what it rests on is unchanged; None if it changes nothing.

    Without `compare` the document must be guarded in another way.
    """
    before, after = converted.before, converted.after
    if RESERVED in before:
        # Treadle's own state of a document stays, whatever a function makes of the rest.
        after = {**after, RESERVED: before[RESERVED]}
    sets = {}
    for name, value in after.items():
        old = before.get(name, _MISSING)
        if old is not value and (old is _MISSING or not identical(old, value)):
            sets[name] = value
    gone = [name for name in before if name not in after]
    if not sets and not gone:
        return None
    rests_on = {*before, *after} if converted.read is None else converted.read
    compared = {*rests_on, *sets, *gone, converted.lineage.field} - {"_id", RESERVED}
    if not compared <= _PLAIN and not _have_paths(compared):
        # No path leads to such a field: the document as a whole is compared, and replaced.
        whole = {"$expr": {"$eq": ["$$ROOT", {"$literal": before}]}} if compare else {}
        return ReplaceOne({**by_id(before["_id"]), **whole}, after)
    condition: Raw = by_id(before["_id"])
    arrays = {}
    for name in compared if compare else ():
        value = before.get(name, _MISSING)
        if value is _MISSING:
            condition[name] = _ABSENT
        elif value.__class__ is list:
            arrays[name] = value
        elif value is None:
            condition[name] = _NULL
        else:
            # An array that holds the value would match as well.
            condition[name] = {"$eq": value, "$not": _NO_ARRAY}
    if arrays:
        # A filter would look into the array instead of comparing it.
        condition["$expr"] = {
            "$and": [{"$eq": [f"${name}", {"$literal": value}]} for name, value in arrays.items()]
        }
    update: Raw = {"$set": sets} if sets else {}
    if gone:
        update["$unset"] = dict.fromkeys(gone, "")
    return UpdateOne(condition, update)


def stops_others(error: Exception) -> bool:
    """Whether a write failed because of one of its documents, which must be stored by itself."""
    return isinstance(error, ENCODING_ERRORS) or OBJECT_TOO_LARGE in codes_of(error)


def store_alone(entry: Entry[Any], converted: Converted, end: int | None = None) -> Plan[int]:
    """Store a conversion that could not be sent with others; how many documents were written.

    What is too large to be compared by a filter is converted and stored in a
    transaction, which notices other writers as well.
    """
    converted.after = encodable(converted.after, entry.model)
    size = sum(
        len(bson.encode(each, codec_options=CODEC_OPTIONS)) for each in (converted.before, converted.after)
    )
    if size > COMPARE_BYTES_MAX:
        return (yield from transact(lambda: _unguarded(entry, converted.before["_id"], end)))
    write = guarded_write(converted)
    if write is None:
        return 0
    return (yield from bulk_write(entry.collection, [write])).matched_count


def _unguarded(entry: Entry[Any], identity: Any, end: int | None) -> Plan[int]:
    raw = yield from find_one(entry.collection, by_id(identity))
    if raw is None:
        return 0
    (outcome,) = yield from convert(entry, [raw], end)
    if isinstance(outcome, DataError):
        raise outcome
    outcome.after = encodable(outcome.after, entry.model)
    write = guarded_write(outcome, compare=False)
    return 0 if write is None else (yield from bulk_write(entry.collection, [write])).matched_count


def _have_paths(names: set[str]) -> bool:
    """Whether a path leads to each of these fields; those for which it does are remembered."""
    if any("." in name or name.startswith("$") or not name for name in names):
        return False
    if len(_PLAIN) < NAMES_MAX:
        _PLAIN.update(names)
    return True


_MISSING: Any = object()
_PLAIN: set[str] = set()
_NO_ARRAY = {"$type": "array"}
_ABSENT = {"$exists": False}
_NULL = {"$type": 10, "$not": _NO_ARRAY}


def identical(one: Any, other: Any) -> bool:
    """Whether two values are stored alike, types included: in Python True is 1 and 1 is 1.0."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(identical, one, other))
    return bool(one == other)
