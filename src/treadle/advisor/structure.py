"""Pipelines that ask for structure, and what their rows mean; nothing here talks to a server.

Two questions. *Shapes*: which top-level fields of which types occur together,
by one `$group` over a signature made from `$objectToArray`. *Paths*: which
nested fields there are, by an expression that walks a document to a fixed
depth and yields each path once, so that counts are documents and not
occurrences.

A path travels as one string: each step is NUL and a letter, `k` and a key or
`[` for an array's elements. Keys may hold dots, dollars and brackets, but
never NUL, so that nothing can be mistaken for something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bson import Binary, ObjectId

from treadle.advisor.facts import CollectionFacts, Distribution, FieldFacts, Shape

NUL = "\x00"
# Treadle's own state is no part of a document's design.
RESERVED = "_treadle"
DEPTH_MAX = 6
ELEMENTS_LOOKED_AT = 20
# An object with more different keys than this, most of them rare, is a map.
MAP_KEYS_MIN = 40
MAP_KEY_SHARE_MAX = 0.2
# So is one with fewer keys, if hardly any occurs again.
UNIQUE_KEYS_MIN = 8
UNIQUE_KEY_OCCURRENCES_MAX = 3
# Keys that nobody would choose as names: addresses, dates, ids and long numbers.
_DATA = re.compile(
    r".*@.*\..*|\d{4}-\d\d.*|\d{4,}|[0-9a-f]{12,}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE
)
LIKE_DATA_MIN = 1
BINS_PER_DOUBLING = 8
_UUIDS = (Binary(bytes(16), 4), Binary(b"\xff" * 16, 4))

Stage = dict[str, Any]


def sampled(share: float) -> list[Stage]:
    """A uniform choice of this share of the documents; every document has the same chance.

    Not `$sample`: below 5 % of a collection the server picks by position on
    disk, which prefers large documents.
    """
    return [] if share >= 1 else [{"$match": {"$sampleRate": share}}]


def share_of(facts: CollectionFacts, documents: int) -> float:
    """The share that gives about so many documents."""
    return 1.0 if facts.count <= documents else documents / facts.count


def chosen(facts: CollectionFacts, share: float) -> list[Stage]:
    """The stages that choose documents: uniformly, or at once where a pass is known to take too long."""
    if not facts.slow:
        return sampled(share)
    return [{"$sample": {"size": max(1, round(share * facts.count))}}]


def sample_words(facts: CollectionFacts) -> str:
    """What a sample of these is called."""
    return "a quick sample, which prefers large documents," if facts.slow else "a uniform sample"


def shapes(chosen: list[Stage], shapes_max: int, keys: Sequence[str] = ()) -> list[Stage]:
    """One row per signature: its fields, how many documents, first and last id, and values of `keys`.

    The values serve to find references without another pass; they stay in
    this process. They are asked for with small samples only.
    """
    signature = {"$map": {"input": {"$objectToArray": "$$ROOT"}, "in": ["$$this.k", {"$type": "$$this.v"}]}}
    accumulators = {f"v{number}": {"$push": f"${name}"} for number, name in enumerate(keys)}
    return [
        *chosen,
        {
            "$group": {
                "_id": signature,
                "n": {"$sum": 1},
                "first": {"$min": "$_id"},
                "last": {"$max": "$_id"},
                **accumulators,
            }
        },
        {"$sort": {"n": -1, "_id": 1}},
        {"$limit": shapes_max + 1},
    ]


def likely_keys(rows: Iterable[Mapping[str, Any]], keys_max: int) -> list[str]:
    """Names of top-level fields that may refer to something, by a look at a few signatures."""
    found: dict[str, None] = {}
    for row in rows:
        for name, kind in row["_id"]:
            named = name.lower().endswith(("id", "_ref", "_key")) and kind in (
                "int",
                "long",
                "double",
                "string",
            )
            if name != "_id" and is_plain_name(name) and (kind == "objectId" or named):
                found[name] = None
    return list(found)[:keys_max]


def read_values(rows: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, list[Any]]:
    """The values that `shapes` brought along, per field."""
    values: dict[str, list[Any]] = {name: [] for name in keys}
    for row in rows:
        for number, name in enumerate(keys):
            values[name] += [value for value in row[f"v{number}"] if value is not None]
    return values


def read_shapes(rows: Iterable[Mapping[str, Any]]) -> list[Shape]:
    return [
        Shape(
            tuple((name, kind) for name, kind in row["_id"] if name != RESERVED),
            row["n"],
            _created(row.get("first")),
            _created(row.get("last")),
        )
        for row in rows
    ]


def _created(identity: Any) -> datetime | None:
    return identity.generation_time if isinstance(identity, ObjectId) else None


def paths(chosen: list[Stage], paths_max: int, nested_only: bool) -> list[Stage]:
    """One row per path and type: in how many documents it occurs; the empty path stands for all of them."""
    source: Any = {"$objectToArray": "$$ROOT"}
    if nested_only:
        is_nested = {"$in": [{"$type": "$$each.v"}, ["object", "array"]]}
        source = {"$filter": {"input": source, "as": "each", "cond": is_nested}}
    return [
        *chosen,
        {"$project": {"_id": 0, "e": {"$setUnion": [_entries(source, "", 1), [["", "document"]]]}}},
        {"$unwind": "$e"},
        {"$group": {"_id": "$e", "n": {"$sum": 1}}},
        {"$sort": {"n": -1, "_id": 1}},
        {"$limit": paths_max + 1},
    ]


def _entries(pairs: Any, prefix: Any, depth: int) -> dict[str, Any]:
    """The [path, type] pairs of an object that was made into key-value pairs."""
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
    return _flat({"$map": {"input": pairs, "as": each, "in": body}})


def _elements(value: str, path: str, depth: int) -> dict[str, Any]:
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
    first = {"$slice": [value, ELEMENTS_LOOKED_AT]}
    # Equal elements say nothing new; without the union a long array would be carried along.
    return {"$setUnion": [_flat({"$map": {"input": first, "as": each, "in": body}})]}


def _flat(lists: Any) -> dict[str, Any]:
    return {"$reduce": {"input": lists, "initialValue": [], "in": {"$concatArrays": ["$$value", "$$this"]}}}


def steps_of(encoded: str) -> tuple[str, ...]:
    """The steps of an encoded path; an array's elements are the step `[]`."""
    return tuple(part[1:] if part[0] == "k" else "[]" for part in encoded.split(NUL)[1:])


def label(steps: Iterable[str]) -> str:
    """A path for people: `lines[].product_id`."""
    text = ""
    for step in steps:
        text += step if step == "[]" else ("." if text else "") + step
    return text


def fields_of_shapes(found: Iterable[Shape]) -> dict[str, FieldFacts]:
    """The top-level fields of all shapes, the most usual order first."""
    counts: dict[str, dict[str, int]] = {}
    looked_at = 0
    for shape in found:
        looked_at += shape.count
        for name, kind in shape.fields:
            types = counts.setdefault(name, {})
            types[kind] = types.get(kind, 0) + shape.count
    return {name: FieldFacts(label((name,)), types, looked_at, (name,)) for name, types in counts.items()}


def looked_at(rows: Iterable[Mapping[str, Any]]) -> int:
    """How many documents `paths` went through."""
    return next((int(row["n"]) for row in rows if row["_id"][0] == ""), 0)


def fields_of_paths(rows: Iterable[Mapping[str, Any]], looked_at: int) -> dict[str, FieldFacts]:
    """Fields from rows of `paths`; the keys of maps are taken together as `*`."""
    counts: dict[tuple[str, ...], dict[str, int]] = {}
    for row in rows:
        encoded, kind = row["_id"]
        steps = steps_of(encoded)
        if steps and steps[0] != RESERVED:
            counts.setdefault(steps, {})[kind] = row["n"]
    merged = _without_maps(counts, looked_at)
    return {
        label(steps): FieldFacts(label(steps), types, looked_at, steps, is_map=(*steps, "*") in merged)
        for steps, types in merged.items()
    }


def _without_maps(
    counts: dict[tuple[str, ...], dict[str, int]], looked_at: int
) -> dict[tuple[str, ...], dict[str, int]]:
    for depth in range(1, DEPTH_MAX + 4):
        children: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for steps in counts:
            if len(steps) == depth and steps[-1] != "[]":
                children.setdefault(steps[:-1], []).append(steps)
        for parent, siblings in children.items():
            whole = sum(counts[parent].values()) if parent in counts else looked_at
            numbers = {each: sum(counts[each].values()) for each in siblings}
            keys = {each for each in siblings if _DATA.fullmatch(each[-1])}
            keys = keys if len(keys) >= LIKE_DATA_MIN else set()
            # Counts are documents: of many items in one document, a key of few looks usual.
            among_items = "[]" in parent and len(siblings) >= MAP_KEYS_MIN
            # Of very few objects, a key of one is rare too.
            most = max(MAP_KEY_SHARE_MAX * whole, 1 if whole > 1 else 0)
            rare = {each for each in siblings if among_items or numbers[each] <= most}
            unique = sum(numbers[each] for each in rare) <= UNIQUE_KEY_OCCURRENCES_MAX * len(rare)
            if len(rare) >= (UNIQUE_KEYS_MIN if unique and parent else MAP_KEYS_MIN):
                keys |= rare
            if keys:
                counts = _taken_together(counts, parent, keys, whole)
    return counts


def _taken_together(
    counts: dict[tuple[str, ...], dict[str, int]],
    parent: tuple[str, ...],
    keys: set[tuple[str, ...]],
    whole: int,
) -> dict[tuple[str, ...], dict[str, int]]:
    made: dict[tuple[str, ...], dict[str, int]] = {}
    depth = len(parent)
    for steps, types in counts.items():
        if steps[: depth + 1] in keys:
            steps = (*parent, "*", *steps[depth + 1 :])
        into = made.setdefault(steps, {})
        for kind, number in types.items():
            into[kind] = min(into.get(kind, 0) + number, whole)
    return made


def collapse_shapes(found: list[Shape]) -> tuple[list[Shape], bool]:
    """The shapes with the keys of a top-level map taken out; whether there was one."""
    total = sum(shape.count for shape in found)
    counts: dict[str, int] = {}
    for shape in found:
        for name, _ in shape.fields:
            counts[name] = counts.get(name, 0) + shape.count
    rare = {name for name, number in counts.items() if number <= MAP_KEY_SHARE_MAX * total}
    alike = {name for name in counts if _DATA.fullmatch(name)}
    rare = rare if len(rare) >= MAP_KEYS_MIN else set()
    rare |= alike if len(alike) >= LIKE_DATA_MIN else set()
    if not rare:
        return found, False
    made: dict[tuple[tuple[str, str], ...], Shape] = {}
    for shape in found:
        kept = tuple(pair for pair in shape.fields if pair[0] not in rare)
        kept += tuple(sorted({("*", kind) for name, kind in shape.fields if name in rare})[:1])
        before = made.get(kept)
        made[kept] = shape if before is None else _joined(kept, before, shape)
        if before is None:
            made[kept] = Shape(kept, shape.count, shape.first, shape.last)
    return sorted(made.values(), key=lambda shape: -shape.count), True


def _joined(fields: tuple[tuple[str, str], ...], one: Shape, other: Shape) -> Shape:
    firsts = [each for each in (one.first, other.first) if each is not None]
    lasts = [each for each in (one.last, other.last) if each is not None]
    return Shape(fields, one.count + other.count, min(firsts, default=None), max(lasts, default=None))


def is_plain_name(name: str) -> bool:
    """Whether a field can be named by a path in an expression."""
    return bool(name) and "." not in name and not name.startswith("$") and NUL not in name


def queried(steps: Iterable[str]) -> str:
    """A path as a query writes it."""
    return ".".join(step for step in steps if step != "[]")


def is_known(facts: CollectionFacts, path: str) -> bool:
    """Whether a path of a query names fields of the collection, and none of its keys that are data.

    Numbers on the way are places in arrays. A field that no document has yet
    may be named, if its surroundings are no map.
    """
    steps = tuple(step for step in path.split(".") if not step.isdecimal())
    # An address has dots of its own; and what lies inside is only known where somebody looked.
    if "@" in path or (len(steps) > 1 and not facts.nested_looked_at):
        return False
    if not steps or not all(map(is_plain_name, steps)) or any(_DATA.fullmatch(step) for step in steps):
        return False
    known = {queried(each.steps): each for each in facts.fields.values()}
    for depth in range(len(steps)):
        above = ".".join(steps[:depth])
        is_map = "*" in known if depth == 0 else f"{above}.*" in known
        if is_map and ".".join(steps[: depth + 1]) not in known:
            return False
    return True


def value_of(steps: Iterable[str]) -> Any:
    """An expression for the value at a path through objects; odd names need MongoDB 5.0."""
    steps = tuple(steps)
    if all(map(is_plain_name, steps)):
        return "$" + ".".join(steps)
    value: Any = "$$ROOT"
    for step in steps:
        value = {"$getField": {"field": {"$literal": step}, "input": value}}
    return value


def sizes(chosen: list[Stage]) -> list[Stage]:
    """Document sizes in bins of an eighth of a doubling, after exact ones, which the server groups fast."""
    number = {"$floor": {"$multiply": [BINS_PER_DOUBLING, {"$log": ["$_id", 2]}]}}
    return [
        *chosen,
        {"$group": {"_id": {"$bsonSize": "$$ROOT"}, "n": {"$sum": 1}}},
        {
            "$group": {
                "_id": number,
                "n": {"$sum": "$n"},
                "low": {"$min": "$_id"},
                "high": {"$max": "$_id"},
                "total": {"$sum": {"$multiply": ["$_id", "$n"]}},
            }
        },
    ]


def read_sizes(rows: Iterable[Mapping[str, Any]], sampled_of: int | None) -> Distribution:
    return Distribution.of(((row["low"], row["high"], row["n"], row["total"]) for row in rows), sampled_of)


def measurable_arrays(facts: CollectionFacts) -> list[FieldFacts]:
    """The arrays of documents, and of the items of one array; the former first."""
    found = [
        each
        for each in facts.fields.values()
        if "array" in each.types and each.name != "[]" and "*" not in each.steps
    ]
    return [each for each in found if not each.in_array] + [
        each for each in found if each.steps.count("[]") == 1 and all(map(is_plain_name, each.steps))
    ]


def lengths(steps: Iterable[str], chosen: list[Stage]) -> list[Stage]:
    """How many documents have how many items in an array; one row per length.

    Of an array inside the items of another, the longest in a document counts.
    """
    steps = tuple(steps)
    if "[]" not in steps:
        number = _length(value_of(steps))
    else:
        place = steps.index("[]")
        outer = value_of(steps[:place])
        each = _length("$$item." + ".".join(steps[place + 1 :]))
        longest = {"$max": {"$map": {"input": outer, "as": "item", "in": each}}}
        number = {"$cond": [{"$isArray": [outer]}, longest, None]}
    return [*chosen, {"$group": {"_id": number, "n": {"$sum": 1}}}]


def _length(value: Any) -> dict[str, Any]:
    return {"$cond": [{"$isArray": [value]}, {"$size": value}, None]}


def read_lengths(rows: Iterable[Mapping[str, Any]], sampled_of: int | None) -> Distribution:
    return Distribution.of(
        ((row["_id"], row["_id"], row["n"], row["_id"] * row["n"]) for row in rows if row["_id"] is not None),
        sampled_of,
    )


def uuid_fields(facts: CollectionFacts) -> list[FieldFacts]:
    """The fields whose binary values may be UUIDs."""
    return [
        each
        for each in facts.fields.values()
        if each.type == "binData"
        and each.steps.count("[]") <= 1
        and "*" not in each.steps
        and all(is_plain_name(step) for step in each.steps if step != "[]")
    ]


def uuids(fields: Iterable[FieldFacts], chosen: list[Stage]) -> list[Stage]:
    """How many binary values each field has in a few documents, and how many of them are UUIDs.

    The server orders binary data by length, then by subtype: all UUIDs lie
    between the first and the last of them.
    """
    accumulators: dict[str, Any] = {}
    for number, each in enumerate(fields):
        value: Any = "$" + ".".join(step for step in each.steps if step != "[]")
        if each.in_array:
            value = {"$cond": [{"$isArray": [value]}, {"$arrayElemAt": [value, 0]}, None]}
        is_binary = {"$eq": [{"$type": value}, "binData"]}
        is_uuid = {"$and": [{"$gte": [value, _UUIDS[0]]}, {"$lte": [value, _UUIDS[1]]}]}
        accumulators[f"n{number}"] = {"$sum": {"$cond": [is_binary, 1, 0]}}
        accumulators[f"u{number}"] = {"$sum": {"$cond": [is_uuid, 1, 0]}}
    return [*chosen, {"$group": {"_id": None, **accumulators}}]


def value_bytes(fields: Iterable[FieldFacts], chosen: list[Stage]) -> list[Stage]:
    """The largest and the mean size of text and binary values, per field."""
    accumulators: dict[str, Any] = {"n": {"$sum": 1}}
    for number, each in enumerate(fields):
        value = value_of(each.steps)
        size = {
            "$switch": {
                "branches": [
                    {"case": {"$eq": [{"$type": value}, "binData"]}, "then": {"$binarySize": value}},
                    {"case": {"$eq": [{"$type": value}, "string"]}, "then": {"$strLenBytes": value}},
                ],
                "default": None,
            }
        }
        accumulators[f"m{number}"] = {"$max": size}
        accumulators[f"a{number}"] = {"$avg": size}
    return [*chosen, {"$group": {"_id": None, **accumulators}}]
