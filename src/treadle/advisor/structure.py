"""Pipelines that ask for structure, and what their rows mean; nothing here talks to a server.

Two questions. *Shapes*: which top-level fields of which types occur together,
by one `$group` over a signature made from `$objectToArray`. *Paths*: which
nested fields there are, by an expression that walks a document to a fixed
depth and yields each path once, so that it counts documents, not occurrences.

A path travels as one string: each step is NUL and a letter, `k` and a key or
`[` for the elements of an array. Keys may hold dots, dollars and brackets, but
never NUL, so paths are unambiguous.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bson import Binary, ObjectId

from treadle.advisor.facts import CollectionFacts, Distribution, FieldFacts, Shape

NUL = "\x00"
# Treadle's own state is not part of a document's design.
RESERVED = "_treadle"
DEPTH_MAX = 6
ELEMENTS_MAX = 20
# Of an object with more keys, the first are looked at: they are data, and not names.
KEYS_MAX = 1_000
# An object with more different keys than this, most of them rare, is a map.
MAP_KEYS_MIN = 40
MAP_KEY_SHARE_MAX = 0.2
# So is one with fewer keys, if hardly any of them recurs.
UNIQUE_KEYS_MIN = 8
UNIQUE_KEY_OCCURRENCES_MAX = 3
# Keys that are not chosen as names: mail addresses, dates, ids and long numbers.
_DATA = re.compile(
    r".*@.*\..*|\d{4}-\d\d.*|\d{4,}|[0-9a-f]{12,}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE
)
BINS_PER_DOUBLING = 8
_UUIDS = (Binary(bytes(16), 4), Binary(b"\xff" * 16, 4))

Stage = dict[str, Any]
Steps = tuple[str, ...]
Rows = Iterable[Mapping[str, Any]]


def uniform_sample(share: float) -> list[Stage]:
    """Stages that pick this share of the documents, each with the same probability.

    Not `$sample`: below 5 % of a collection the server picks by position on
    disk, which prefers large documents.
    """
    return [] if share >= 1 else [{"$match": {"$sampleRate": share}}]


def share_of(facts: CollectionFacts, documents: int) -> float:
    """The share of a collection that gives about so many documents."""
    return 1.0 if facts.count <= documents else documents / facts.count


def sample_stages(facts: CollectionFacts, share: float) -> list[Stage]:
    """Stages that pick a sample: uniform, or the server's quick one where a full pass takes too long."""
    if not facts.slow:
        return uniform_sample(share)
    return [{"$sample": {"size": max(1, round(share * facts.count))}}]


def sample_name(facts: CollectionFacts) -> str:
    """How notes describe a sample of this collection."""
    return "a quick sample, which prefers large documents," if facts.slow else "a uniform sample"


def shapes_pipeline(sample: list[Stage], shapes_max: int, keys: Sequence[str] = ()) -> list[Stage]:
    """One row per signature: its fields, number of documents, first and last id, and values of `keys`.

    The values serve to find references without another pass; they stay in
    this process. They are requested with small samples only.
    """
    signature = {"$map": {"input": {"$objectToArray": "$$ROOT"}, "in": ["$$this.k", {"$type": "$$this.v"}]}}
    accumulators = {
        "n": {"$sum": 1},
        "first": {"$min": "$_id"},
        "last": {"$max": "$_id"},
        **{f"v{number}": {"$push": f"${name}"} for number, name in enumerate(keys)},
    }
    return [
        *sample,
        {"$group": {"_id": signature, **accumulators}},
        {"$sort": {"n": -1, "_id": 1}},
        {"$limit": shapes_max + 1},
    ]


def likely_keys(rows: Rows, keys_max: int) -> list[str]:
    """Top-level fields that may be references, judging by a few signatures."""
    names: dict[str, None] = {}
    for row in rows:
        for name, kind in row["_id"]:
            has_key_name = name.lower().endswith(("id", "_ref", "_key"))
            is_key = has_key_name and kind in ("int", "long", "double", "string")
            if name != "_id" and is_plain_name(name) and (kind == "objectId" or is_key):
                names[name] = None
    return list(names)[:keys_max]


def read_values(rows: Rows, keys: Sequence[str]) -> dict[str, list[Any]]:
    """The values of `keys` in rows of `shapes_pipeline`, per field."""
    values: dict[str, list[Any]] = {name: [] for name in keys}
    for row in rows:
        for number, name in enumerate(keys):
            values[name] += [value for value in row[f"v{number}"] if value is not None]
    return values


def read_shapes(rows: Rows) -> list[Shape]:
    return [
        Shape(
            tuple((name, kind) for name, kind in row["_id"] if name != RESERVED),
            row["n"],
            _creation_time(row["first"]),
            _creation_time(row["last"]),
        )
        for row in rows
    ]


def _creation_time(identity: Any) -> datetime | None:
    return identity.generation_time if isinstance(identity, ObjectId) else None


def collapse_maps(shapes: list[Shape], known: Collection[str] = ()) -> tuple[list[Shape], bool]:
    """The shapes with the keys of a top-level map replaced by `*`; and whether there was a map.

    `known` are names for sure: those that have an index.
    """
    counts: Counter[str] = Counter()
    for shape in shapes:
        for name, _ in shape.fields:
            counts[name] += shape.count
    total = sum(shape.count for shape in shapes)
    keys = {name for name, number in counts.items() if number <= MAP_KEY_SHARE_MAX * total}
    keys = keys if len(keys) >= MAP_KEYS_MIN else set()
    keys -= set(known)
    keys |= {name for name in counts if _DATA.fullmatch(name)}
    if not keys:
        return shapes, False
    groups: dict[tuple[tuple[str, str], ...], list[Shape]] = {}
    for shape in shapes:
        fields = tuple(pair for pair in shape.fields if pair[0] not in keys)
        fields += tuple(sorted({("*", kind) for name, kind in shape.fields if name in keys})[:1])
        groups.setdefault(fields, []).append(shape)
    merged = [_merge(fields, group) for fields, group in groups.items()]
    return sorted(merged, key=lambda shape: -shape.count), True


def _merge(fields: tuple[tuple[str, str], ...], shapes: list[Shape]) -> Shape:
    return Shape(
        fields,
        sum(shape.count for shape in shapes),
        min((shape.first for shape in shapes if shape.first is not None), default=None),
        max((shape.last for shape in shapes if shape.last is not None), default=None),
    )


def fields_of_shapes(shapes: Iterable[Shape]) -> dict[str, FieldFacts]:
    """The top-level fields of all shapes, in the order of the most common shape."""
    counts: dict[str, Counter[str]] = {}
    looked_at = 0
    for shape in shapes:
        looked_at += shape.count
        for name, kind in shape.fields:
            counts.setdefault(name, Counter())[kind] += shape.count
    return {name: FieldFacts(name, dict(types), looked_at, (name,)) for name, types in counts.items()}


def paths_pipeline(sample: list[Stage], paths_max: int, nested_only: bool) -> list[Stage]:
    """One row per path and type: how many documents have it; the empty path stands for all documents."""
    pairs: Any = {"$objectToArray": "$$ROOT"}
    if nested_only:
        is_nested = {"$in": [{"$type": "$$each.v"}, ["object", "array"]]}
        pairs = {"$filter": {"input": pairs, "as": "each", "cond": is_nested}}
    return [
        *sample,
        {"$project": {"_id": 0, "e": {"$setUnion": [_entries(pairs, "", 1), [["", "document"]]]}}},
        {"$unwind": "$e"},
        {"$group": {"_id": "$e", "n": {"$sum": 1}}},
        {"$sort": {"n": -1, "_id": 1}},
        {"$limit": paths_max + 1},
    ]


def _entries(pairs: Any, prefix: Any, depth: int) -> dict[str, Any]:
    """The [path, type] pairs of an object, given as key-value pairs."""
    each = f"f{depth}"
    path = f"$$p{depth}"
    value = f"$${each}.v"
    parts: list[Any] = [[[path, {"$type": value}]]]
    if depth < DEPTH_MAX:
        inner = _entries({"$objectToArray": value}, path, depth + 1)
        parts.append({"$cond": [{"$eq": [{"$type": value}, "object"]}, inner, []]})
        parts.append({"$cond": [{"$isArray": [value]}, _elements(value, path, depth), []]})
    body = {
        "$let": {
            "vars": {f"p{depth}": {"$concat": [prefix, NUL + "k", f"$${each}.k"]}},
            "in": {"$concatArrays": parts},
        }
    }
    # The server joins lists in quadratic time, and looks at its clock only between documents.
    first = {"$slice": [pairs, KEYS_MAX]}
    return _flatten({"$map": {"input": first, "as": each, "in": body}})


def _elements(value: str, path: str, depth: int) -> dict[str, Any]:
    """The [path, type] pairs of the first elements of an array."""
    each = f"e{depth}"
    element = f"$${each}"
    here = {"$concat": [path, NUL + "["]}
    inner = _entries({"$objectToArray": element}, here, depth + 1)
    body = {
        "$concatArrays": [
            [[here, {"$type": element}]],
            {"$cond": [{"$eq": [{"$type": element}, "object"]}, inner, []]},
        ]
    }
    first = {"$slice": [value, ELEMENTS_MAX]}
    # Equal elements add nothing; without the union a long array would be carried along.
    return {"$setUnion": [_flatten({"$map": {"input": first, "as": each, "in": body}})]}


def _flatten(lists: Any) -> dict[str, Any]:
    return {"$reduce": {"input": lists, "initialValue": [], "in": {"$concatArrays": ["$$value", "$$this"]}}}


def _decode(encoded: str) -> Steps:
    """The steps of an encoded path; the elements of an array are the step `[]`."""
    return tuple(part[1:] if part[0] == "k" else "[]" for part in encoded.split(NUL)[1:])


def label(steps: Iterable[str]) -> str:
    """A path for people: `lines[].product_id`."""
    text = ""
    for step in steps:
        text += step if step == "[]" else ("." if text else "") + step
    return text


def read_document_count(rows: Rows) -> int:
    """How many documents `paths_pipeline` went through."""
    return next((int(row["n"]) for row in rows if row["_id"][0] == ""), 0)


def fields_of_paths(rows: Rows, looked_at: int, known: Collection[str] = ()) -> dict[str, FieldFacts]:
    """Fields from rows of `paths_pipeline`; the keys of maps are merged into `*`, but for known paths."""
    counts: dict[Steps, dict[str, int]] = {}
    for row in rows:
        encoded, kind = row["_id"]
        steps = _decode(encoded)
        if steps and steps[0] != RESERVED:
            counts.setdefault(steps, {})[kind] = row["n"]
    counts = _merge_map_keys(counts, looked_at, known)
    return {
        label(steps): FieldFacts(label(steps), types, looked_at, steps, is_map=(*steps, "*") in counts)
        for steps, types in counts.items()
    }


def _merge_map_keys(
    counts: dict[Steps, dict[str, int]], looked_at: int, known: Collection[str]
) -> dict[Steps, dict[str, int]]:
    """The counts with the keys of every map merged into `*`, level by level."""
    for depth in range(1, DEPTH_MAX + 4):
        children: dict[Steps, list[Steps]] = {}
        for steps in counts:
            if len(steps) == depth and steps[-1] != "[]":
                children.setdefault(steps[:-1], []).append(steps)
        for parent, siblings in children.items():
            whole = sum(counts[parent].values()) if parent in counts else looked_at
            numbers = {each: sum(counts[each].values()) for each in siblings}
            keys = {each for each in siblings if _DATA.fullmatch(each[-1])}
            siblings = [each for each in siblings if query_path(each) not in known]
            # Counts are documents: of many items in one document, a rare key looks common.
            among_items = "[]" in parent and len(siblings) >= MAP_KEYS_MIN
            # Of very few objects, a key that occurs once is rare too.
            most = max(MAP_KEY_SHARE_MAX * whole, 1 if whole > 1 else 0)
            rare = {each for each in siblings if among_items or numbers[each] <= most}
            unique = sum(numbers[each] for each in rare) <= UNIQUE_KEY_OCCURRENCES_MAX * len(rare)
            if len(rare) >= (UNIQUE_KEYS_MIN if unique and parent else MAP_KEYS_MIN):
                keys |= rare
            if keys:
                counts = _merge_keys(counts, parent, keys, whole)
    return counts


def _merge_keys(
    counts: dict[Steps, dict[str, int]], parent: Steps, keys: set[Steps], whole: int
) -> dict[Steps, dict[str, int]]:
    merged: dict[Steps, dict[str, int]] = {}
    depth = len(parent)
    for steps, types in counts.items():
        if steps[: depth + 1] in keys:
            steps = (*parent, "*", *steps[depth + 1 :])
        into = merged.setdefault(steps, {})
        for kind, number in types.items():
            into[kind] = min(into.get(kind, 0) + number, whole)
    return merged


def is_plain_name(name: str) -> bool:
    """Whether a path in an expression can name the field."""
    return bool(name) and "." not in name and not name.startswith("$") and NUL not in name


def has_plain_path(field: FieldFacts) -> bool:
    """Whether a path in an expression leads to the field, elements of arrays aside."""
    return "*" not in field.steps and all(is_plain_name(step) for step in field.steps if step != "[]")


def query_path(steps: Iterable[str]) -> str:
    """A path as a query writes it."""
    return ".".join(step for step in steps if step != "[]")


def is_known(facts: CollectionFacts, path: str) -> bool:
    """Whether a path of a query names fields of the collection, and no keys that are data.

    Numbers in the path are positions in arrays. A field that no document has
    yet is accepted where it does not lie in a map.
    """
    steps = tuple(step for step in path.split(".") if not step.isdecimal())
    # A mail address has dots of its own; and nested fields are only known where they were read.
    if "@" in path or (len(steps) > 1 and not facts.nested_looked_at):
        return False
    if not steps or not all(map(is_plain_name, steps)) or any(_DATA.fullmatch(step) for step in steps):
        return False
    paths = {query_path(each.steps) for each in facts.fields.values()}
    return not any(
        ".".join((*steps[:depth], "*")) in paths and ".".join(steps[: depth + 1]) not in paths
        for depth in range(len(steps))
    )


def value_of(steps: Steps) -> Any:
    """An expression for the value at a path through objects; odd names need MongoDB 5.0."""
    if all(map(is_plain_name, steps)):
        return "$" + ".".join(steps)
    value: Any = "$$ROOT"
    for step in steps:
        value = {"$getField": {"field": {"$literal": step}, "input": value}}
    return value


def sizes_pipeline(sample: list[Stage]) -> list[Stage]:
    """Document sizes in bins of an eighth of a doubling, after exact ones, which the server groups fast."""
    bins = {"$floor": {"$multiply": [BINS_PER_DOUBLING, {"$log": ["$_id", 2]}]}}
    accumulators = {
        "n": {"$sum": "$n"},
        "low": {"$min": "$_id"},
        "high": {"$max": "$_id"},
        "total": {"$sum": {"$multiply": ["$_id", "$n"]}},
    }
    return [
        *sample,
        {"$group": {"_id": {"$bsonSize": "$$ROOT"}, "n": {"$sum": 1}}},
        {"$group": {"_id": bins, **accumulators}},
    ]


def read_sizes(rows: Rows, sampled_of: int | None) -> Distribution:
    return Distribution.of(((row["low"], row["high"], row["n"], row["total"]) for row in rows), sampled_of)


def measurable_arrays(facts: CollectionFacts) -> list[FieldFacts]:
    """The arrays of documents, then those inside the items of one array."""
    arrays = [
        each
        for each in facts.fields.values()
        if "array" in each.types and each.name != "[]" and "*" not in each.steps
    ]
    return [each for each in arrays if not each.in_array] + [
        each for each in arrays if each.steps.count("[]") == 1 and has_plain_path(each)
    ]


def lengths_pipeline(steps: Steps, sample: list[Stage]) -> list[Stage]:
    """How many documents have how many items in an array; one row per length.

    For an array inside the items of another, the longest in a document counts.
    """
    if "[]" not in steps:
        length = _length(value_of(steps))
    else:
        place = steps.index("[]")
        outer = value_of(steps[:place])
        inner = _length("$$item." + ".".join(steps[place + 1 :]))
        longest = {"$max": {"$map": {"input": outer, "as": "item", "in": inner}}}
        length = {"$cond": [{"$isArray": [outer]}, longest, None]}
    return [*sample, {"$group": {"_id": length, "n": {"$sum": 1}}}]


def _length(value: Any) -> dict[str, Any]:
    return {"$cond": [{"$isArray": [value]}, {"$size": value}, None]}


def read_lengths(rows: Rows, sampled_of: int | None) -> Distribution:
    counts = ((row["_id"], row["n"]) for row in rows if row["_id"] is not None)
    return Distribution.of_counts(counts, sampled_of)


def uuid_fields(facts: CollectionFacts) -> list[FieldFacts]:
    """The fields whose binary values may be UUIDs."""
    return [
        each
        for each in facts.fields.values()
        if each.type == "binData" and each.steps.count("[]") <= 1 and has_plain_path(each)
    ]


def uuids_pipeline(fields: Iterable[FieldFacts], sample: list[Stage]) -> list[Stage]:
    """How many binary values each field has in a sample, and how many of them are UUIDs.

    The server orders binary data by length, then by subtype: all UUIDs lie
    between the lowest and the highest of them.
    """
    accumulators: dict[str, Any] = {}
    for number, each in enumerate(fields):
        value: Any = "$" + query_path(each.steps)
        if each.in_array:
            value = {"$cond": [{"$isArray": [value]}, {"$arrayElemAt": [value, 0]}, None]}
        is_binary = {"$eq": [{"$type": value}, "binData"]}
        is_uuid = {"$and": [{"$gte": [value, _UUIDS[0]]}, {"$lte": [value, _UUIDS[1]]}]}
        accumulators[f"n{number}"] = {"$sum": {"$cond": [is_binary, 1, 0]}}
        accumulators[f"u{number}"] = {"$sum": {"$cond": [is_uuid, 1, 0]}}
    return [*sample, {"$group": {"_id": None, **accumulators}}]


def value_sizes_pipeline(fields: Iterable[FieldFacts], sample: list[Stage]) -> list[Stage]:
    """The largest and the mean size of text and binary values, per field."""
    accumulators: dict[str, Any] = {"n": {"$sum": 1}}
    for number, each in enumerate(fields):
        value = value_of(each.steps)
        branches = [
            {"case": {"$eq": [{"$type": value}, kind]}, "then": {operator: value}}
            for kind, operator in (("binData", "$binarySize"), ("string", "$strLenBytes"))
        ]
        size = {"$switch": {"branches": branches, "default": None}}
        accumulators[f"m{number}"] = {"$max": size}
        accumulators[f"a{number}"] = {"$avg": size}
    return [*sample, {"$group": {"_id": None, **accumulators}}]
