"""What a sample of whole documents shows, read on this side; nothing here talks to a server.

Where documents are small, to send the sampled ones is quicker than to let the
server take them apart, and their values answer further questions. They stay in
this process, and for no longer than their collection is measured.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from bson import (
    Binary,
    Code,
    DatetimeMS,
    DBRef,
    Decimal128,
    Int64,
    MaxKey,
    MinKey,
    ObjectId,
    Regex,
    Timestamp,
)

from treadle.advisor import natural_keys
from treadle.advisor.facts import CollectionFacts
from treadle.advisor.relations import values_at
from treadle.advisor.structure import likely_keys, query_path

# Of larger documents the server sends the names alone.
DOCUMENT_BYTES_MEAN_MAX = 1_024
DOCUMENT_BYTES_MAX = 64 * 1_024

# What the server calls the types of what the driver decodes.
_NAMES: dict[type, str] = {
    **{str: "string", int: "int", Int64: "long", float: "double", bool: "bool", Decimal128: "decimal"},
    **{type(None): "null", ObjectId: "objectId", dt.datetime: "date", DatetimeMS: "date"},
    **{dict: "object", DBRef: "object", list: "array", bytes: "binData", Binary: "binData"},
    **{Regex: "regex", Code: "javascript", Timestamp: "timestamp", MinKey: "minKey", MaxKey: "maxKey"},
}

Row = dict[str, Any]


def are_small(facts: CollectionFacts) -> bool:
    """Whether all documents are small enough to send some thousand of them."""
    sizes = facts.sizes
    return sizes is not None and sizes.mean <= DOCUMENT_BYTES_MEAN_MAX and sizes.maximum <= DOCUMENT_BYTES_MAX


def shape_rows(documents: Sequence[Row], keys_max: int) -> tuple[list[Row], list[str]]:
    """The rows that `structure.shapes_pipeline` would give, and the fields whose values are in them.

    A value of a type that has no name here raises KeyError.
    """
    by_class: defaultdict[tuple[tuple[str, ...], tuple[type, ...]], list[Row]] = defaultdict(list)
    for each in documents:
        by_class[tuple(each), tuple(map(type, each.values()))].append(each)
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for (names, classes), some in by_class.items():
        signature = tuple(zip(names, map(_NAMES.__getitem__, classes), strict=True))
        groups.setdefault(signature, []).extend(some)
    rows = [_row(signature, group) for signature, group in groups.items()]
    keys = likely_keys(rows, keys_max)
    for row, group in zip(rows, groups.values(), strict=True):
        row |= {f"v{number}": [each.get(name) for each in group] for number, name in enumerate(keys)}
    rows.sort(key=lambda row: (-row["n"], row["_id"]))
    return rows, keys


def _row(signature: tuple[tuple[str, str], ...], documents: list[Row]) -> Row:
    row: Row = {"_id": signature, "n": len(documents), "first": None, "last": None}
    # Only ObjectIds tell when they were made; of other ids the first is not asked for.
    if ("_id", "objectId") in signature:
        # As bytes, which compare in the same order, and at once.
        ids = [each["_id"].binary for each in documents]
        row |= {"first": ObjectId(min(ids)), "last": ObjectId(max(ids))}
    return row


def referring_values(facts: CollectionFacts, documents: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of the fields that may refer to other collections, as the server would send them."""
    fields = natural_keys.referring_fields(facts)
    rows = [
        {f"f{number}": _short(each, query_path(field.steps)) for number, field in enumerate(fields)}
        for each in documents
    ]
    return natural_keys.sampled_values(fields, rows)


def _short(document: Mapping[str, Any], path: str) -> list[Any]:
    values = values_at(document, path)[: natural_keys.ITEMS_MAX]
    return [
        value
        for value in values
        if not isinstance(value, str) or len(value.encode()) <= natural_keys.KEY_LENGTH_MAX
    ]
