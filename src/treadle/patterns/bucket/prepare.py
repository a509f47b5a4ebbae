"""What `setup()` makes for a bucketed model: collection, validator, indexes, and two views.

`<collection>.flat` shows one document per reading and `<collection>.summary`
one per bucket with averages, so that mongosh and Compass read buckets without
Treadle. Readings that are packed cannot be taken apart by the server: `.flat`
leaves them out, `.summary` shows them like all others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pymongo import IndexModel

from treadle.engine.indexes import compare_indexes, existing_indexes, require_collection, set_up_indexes
from treadle.errors import DataError, DeclarationError
from treadle.graph.reports import Action
from treadle.model.indexed import Indexed
from treadle.model.json_schema import model_schema
from treadle.patterns.bucket.spec import SEQUENCE, Spec, milliseconds
from treadle.plan import Plan, Raw, create, database_command, find_one
from treadle.query.paths import put

if TYPE_CHECKING:
    from treadle.graph.pattern import Entry
log = logging.getLogger("treadle")

LEAF_PAGE = "128KB"
INDEX_PAGE = "64KB"


def setup(entry: Entry[Any], spec: Spec, existing: Mapping[str, Raw], actions: list[Action]) -> Plan[None]:
    """Make what is missing, change what differs."""
    found = existing.get(entry.collection)
    present: list[Raw] = []
    if found is not None:
        require_collection(entry, found)
        present = yield from existing_indexes(entry.collection)
        yield from _check_existing(entry, spec)
    adopting = yield from _adopting(entry, spec, present, found is not None)
    missing, changed = compare_indexes(entry, present, indexes(entry, spec, adopting))
    for name in (f"{entry.collection}.flat", f"{entry.collection}.summary"):
        if name in existing and existing[name]["type"] != "view":
            raise DataError(
                f"{entry.model.__name__} needs the name {name!r} for a view, but that is a "
                f"{existing[name]['type']} in this database; rename it",
                code="collection-conflict",
            )
    yield from _collection(entry, spec, found, adopting, actions)
    yield from set_up_indexes(entry, missing, changed, actions)
    for suffix, pipeline in (("flat", flat_view(spec)), ("summary", summary_view(spec))):
        yield from _view(entry, f"{entry.collection}.{suffix}", pipeline, existing, actions)


def _check_existing(entry: Entry[Any], spec: Spec) -> Plan[None]:
    """Refuse documents that would pass for buckets; say so where buckets are of another span."""
    start, end, readings = spec.names.start, spec.names.end, spec.names.readings
    if start in entry.codec.by_stored:
        single = {start: {"$exists": True}, readings: {"$exists": False}}
        if (yield from find_one(entry.collection, single, {"_id": 1})) is not None:
            raise DataError(
                f"{entry.collection!r} holds single documents with a field {start!r}, which is also what "
                f'{entry.model.__name__} calls the start of a bucket; rename the part: names={{"start": …}}',
                code="collection-conflict",
            )
    if spec.span is None:
        return
    bucket = yield from find_one(
        entry.collection, {start: {"$type": "date"}, end: {"$type": "date"}}, {start: 1, end: 1}
    )
    if bucket is not None and milliseconds(bucket[end]) != spec.last(milliseconds(bucket[start])):
        log.warning(
            "%s: the buckets in %r are of another span than it declares now; run rebuild, until then "
            "ranges of time may miss readings",
            entry.model.__name__,
            entry.collection,
        )


def _adopting(entry: Entry[Any], spec: Spec, present: list[Raw], exists: bool) -> Plan[bool]:
    """Whether the collection still holds, or held at its set-up, one document per reading."""
    keys = [*spec.key_names, spec.names.start, SEQUENCE]
    for index in present:
        if list(dict(index["key"])) == keys:
            return "partialFilterExpression" in index
    if not exists:
        return False
    return (
        yield from find_one(entry.collection, {spec.names.start: {"$exists": False}}, {"_id": 1})
    ) is not None


def indexes(entry: Entry[Any], spec: Spec, adopting: bool) -> list[IndexModel]:
    """The key of buckets, what expires, what a pack of open buckets needs, and what the model asks for."""
    names = spec.names
    # Documents that are no buckets yet must not collide.
    only: Raw = {"partialFilterExpression": {names.start: {"$exists": True}}} if adopting else {}
    if spec.declared.compression is not None:
        only["storageEngine"] = _engine(spec, INDEX_PAGE)
    key = [*((name, 1) for name in spec.key_names), (names.start, 1), (SEQUENCE, 1)]
    wanted = [IndexModel(key, unique=True, **only)]
    if spec.span is None:
        wanted.append(IndexModel([*((name, 1) for name in spec.key_names), (names.end, 1)]))
    if spec.declared.expire_after is not None:
        seconds = int(spec.declared.expire_after.total_seconds())
        wanted.append(IndexModel([(names.end, 1)], expireAfterSeconds=seconds))
    if spec.layout == "packed":
        # Buckets that are not packed yet; few, and cheap to find.
        wanted.append(
            IndexModel(
                [(names.start, 1)],
                name="treadle_open",
                partialFilterExpression={f"{names.readings}.{spec.time.stored}": {"$exists": True}},
            )
        )
    for field in entry.codec.fields:
        for mark in field.shape.metadata:
            if isinstance(mark, Indexed):
                wanted.append(_field_index(entry, spec, field.stored, mark))
    return [*wanted, *entry.settings.indexes]


def _engine(spec: Spec, page: str) -> Raw:
    """Compressed, in larger pages than usual: neighbouring buckets are much alike, and so are their keys."""
    return {
        "wiredTiger": {"configString": f"block_compressor={spec.declared.compression},leaf_page_max={page}"}
    }


def _field_index(entry: Entry[Any], spec: Spec, name: str, mark: Indexed) -> IndexModel:
    if mark.unique or mark.expire_after is not None:
        raise DeclarationError(
            f"{entry.model.__name__}.{name} has a unique or expiring index, which a reading in a bucket "
            "cannot have; use unique= and expire_after= of Bucket",
            code="bucket-declaration",
        )
    path = name if name in spec.outer_names else f"{spec.names.readings}.{name}"
    options = {**mark.options, **({"name": mark.name} if mark.name else {})}
    return IndexModel([(path, -1 if mark.descending else 1)], sparse=mark.sparse, **options)


# -- the collection -------------------------------------------------------------------------


def _collection(
    entry: Entry[Any], spec: Spec, found: Raw | None, adopting: bool, actions: list[Action]
) -> Plan[None]:
    level = entry.settings.validation
    # The server looks at the whole bucket again with each append, so at its readings only if asked to.
    schema = bucket_schema(entry, spec, adopting, deep=level == "strict")
    validator: Raw = {} if level == "off" else {"$jsonSchema": schema}
    options: Raw = {
        "validator": validator,
        "validationLevel": level,
        "validationAction": entry.settings.validation_action,
    }
    if found is None:
        storage: Raw = {}
        if spec.declared.compression is not None:
            storage = {"storageEngine": _engine(spec, LEAF_PAGE)}
        actions.append(Action("create collection", entry.collection, _detail(spec)))
        if (yield from create(entry.collection, **(options if level != "off" else {}), **storage)):
            return
        found = {"options": {}}
    current = found.get("options", {})
    now = {
        "validator": current.get("validator", {}),
        "validationLevel": current.get("validationLevel", "strict" if current.get("validator") else "off"),
        "validationAction": current.get("validationAction", "error"),
    }
    if now != options and (level != "off" or now["validator"]):
        actions.append(Action("change validator", entry.collection, level))
        yield from database_command({"collMod": entry.collection, **options})


def _detail(spec: Spec) -> str:
    compressed = f", {spec.declared.compression}" if spec.declared.compression else ""
    return f"buckets, {spec.layout}{compressed}"


def bucket_schema(entry: Entry[Any], spec: Spec, adopting: bool, *, deep: bool) -> Raw:
    """What a stored bucket looks like, in any of the three forms; its readings too if `deep`."""
    reading = model_schema(entry.codec)
    if "properties" not in reading:
        reading = {"bsonType": "object", "properties": {}, "required": []}
    fields: Raw = reading["properties"]
    needed = set(reading.get("required", ()))
    inner = [each.stored for each in spec.inner]
    rows = {
        "bsonType": "object",
        "properties": {name: fields.get(name, {}) for name in inner},
        "required": [name for name in inner if name in needed],
    }
    if not rows["required"]:
        del rows["required"]
    columns = {
        name: {"bsonType": "array", "items": _or_null(fields.get(name, {}))} for name in spec.value_names
    }
    # A column's time is the distance from the start of its bucket.
    columns[spec.time.stored] = {"bsonType": "array", "items": {"bsonType": ["int", "long"]}}
    names = spec.names
    held = [
        {"bsonType": "array", "items": rows},
        {"bsonType": "object", "properties": columns, "required": [spec.time.stored]},
        {"bsonType": "binData"},
    ]
    bucket: Raw = {
        "bsonType": "object",
        "properties": {
            **{name: fields.get(name, {}) for name in spec.outer_names},
            names.start: {"bsonType": "date"},
            names.end: {"bsonType": "date"},
            names.count: {"bsonType": ["int", "long"], "minimum": 0},
            names.readings: {"anyOf": held} if deep else {"bsonType": ["array", "object", "binData"]},
            names.stats: {"bsonType": "object"},
        },
        "required": [
            *(name for name in spec.outer_names if name in needed),
            *(names.start, names.end, names.count, names.readings),
        ],
    }
    return {"anyOf": [bucket, reading]} if adopting else bucket


def _or_null(schema: Raw) -> Raw:
    return {"anyOf": [{"bsonType": "null"}, schema]} if schema else {}


# -- views ----------------------------------------------------------------------------------


def flat_view(spec: Spec) -> list[Raw]:
    """One document per reading; what is packed is left out."""
    held, start = f"${spec.names.readings}", f"${spec.names.start}"
    time = spec.time.stored
    column: Raw = {name: {"$arrayElemAt": [f"{held}.{name}", "$$place"]} for name in spec.value_names}
    column[time] = {"$add": [start, {"$arrayElemAt": [f"{held}.{time}", "$$place"]}]}
    rows = {
        "$map": {
            "input": {"$range": [0, {"$size": {"$ifNull": [f"{held}.{time}", []]}}]},
            "as": "place",
            "in": column,
        }
    }
    is_columns = {"$eq": [{"$type": held}, "object"]}
    branches = [{"case": {"$isArray": held}, "then": held}, {"case": is_columns, "then": rows}]
    outer = {name: f"${name}" for name in spec.outer_names}
    return [
        {
            "$project": {
                "_id": 0,
                "outer": outer,
                "reading": {"$switch": {"branches": branches, "default": []}},
            }
        },
        {"$unwind": "$reading"},
        {"$replaceWith": {"$mergeObjects": ["$outer", "$reading"]}},
    ]


def summary_view(spec: Spec) -> list[Raw]:
    """One document per bucket, with averages."""
    names = spec.names
    shown: Raw = dict.fromkeys((*spec.outer_names, names.start, names.end, names.count), 1)
    stats: Raw = {}
    for stat in spec.stats:
        path = f"${names.stats}.{stat.path}"
        number = f"{path}.count" if stat.optional else f"${names.count}"
        average = {"$cond": [{"$gt": [number, 0]}, {"$divide": [f"{path}.sum", number]}, None]}
        parts = {name: f"{path}.{name}" for name in ("min", "max", "sum")}
        put(stats, stat.path, {**parts, "avg": average})
    if stats:
        shown[names.stats] = stats
    return [{"$match": {names.start: {"$exists": True}}}, {"$project": shown}]


def _view(
    entry: Entry[Any], name: str, pipeline: list[Raw], existing: Mapping[str, Raw], actions: list[Action]
) -> Plan[None]:
    wanted = {"viewOn": entry.collection, "pipeline": pipeline}
    found = existing.get(name)
    if found is None:
        actions.append(Action("create view", name))
        if (yield from create(name, **wanted)):
            return
        found = {"options": {}}
    if any(found["options"].get(key) != value for key, value in wanted.items()):
        actions.append(Action("change view", name))
        yield from database_command({"collMod": name, **wanted})
