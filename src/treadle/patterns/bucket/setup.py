"""Set-up of a bucketed model: its collection with validator and indexes, and two views.

`<collection>.flat` shows one document per reading and `<collection>.summary`
one per bucket with averages, so that mongosh and Compass read buckets without
Treadle.
"""

from __future__ import annotations

from collections.abc import Mapping

from pymongo import IndexModel

from treadle.engine.indexes import (
    change_validator,
    compare_indexes,
    existing_indexes,
    field_index,
    require_collection,
    set_up_collection,
    set_up_indexes,
)
from treadle.errors import DataError, DeclarationError
from treadle.graph.outcomes import Action
from treadle.model.document import Indexed
from treadle.model.json_schema import model_schema
from treadle.model.text import get_logger
from treadle.patterns.bucket.query import unwind_stages
from treadle.patterns.bucket.spec import SEQUENCE, Spec, milliseconds
from treadle.plan import Plan, Raw, create, database_command, find_one
from treadle.query.paths import put

log = get_logger(__name__)


def setup(spec: Spec, existing: Mapping[str, Raw], actions: list[Action]) -> Plan[None]:
    """Create what is missing, and change what differs."""
    entry = spec.entry
    collection = existing.get(spec.collection)
    present: list[Raw] = []
    if collection is not None:
        require_collection(entry, collection)
        present = yield from existing_indexes(spec.collection)
        yield from _check_existing(spec, present)
    missing, changed = compare_indexes(entry, present, _indexes(spec))
    views = {f"{spec.collection}.flat": flat_view(spec), f"{spec.collection}.summary": summary_view(spec)}
    for name in views:
        if name in existing and existing[name]["type"] != "view":
            raise DataError(
                f"{spec.label} needs the name {name!r} for a view, but that is a "
                f"{existing[name]['type']} in this database; rename it",
                code="collection-conflict",
            )
    yield from _set_up_buckets(spec, collection, actions)
    yield from set_up_indexes(entry, missing, changed, actions)
    for name, pipeline in views.items():
        yield from _set_up_view(spec, name, pipeline, existing.get(name), actions)


def _check_existing(spec: Spec, present: list[Raw]) -> Plan[None]:
    """Refuse a collection that holds other documents; say so where buckets are of another span."""
    start, end, readings = spec.names.start, spec.names.end, spec.names.readings
    keys = [name for name, _ in index_keys(spec)]
    if not any(list(index["key"]) == keys for index in present):
        other = yield from find_one(spec.collection, {readings: {"$exists": False}}, {"_id": 1})
        if other is not None:
            raise DataError(
                f"{spec.collection!r} holds documents that are not buckets of {spec.label}; rename the "
                "collection in MongoDB and give adopt= its new name, or choose another collection",
                code="collection-conflict",
            )
    if spec.span is None:
        return
    dated = {start: {"$type": "date"}, end: {"$type": "date"}}
    bucket = yield from find_one(spec.collection, dated, {start: 1, end: 1})
    if bucket is not None and milliseconds(bucket[end]) != spec.last(milliseconds(bucket[start])):
        log.warning(
            "%s: the buckets in %r are of another span than it declares now; run rebuild, until then "
            "ranges of time may miss readings",
            spec.label,
            spec.collection,
        )


def index_keys(spec: Spec) -> list[tuple[str, int]]:
    """Return the key of a bucket: series, window and number; without a span, a series is one window."""
    window = [spec.names.start] if spec.span is not None else []
    return [(name, 1) for name in (*spec.key_names, *window, SEQUENCE)]


def window_index(spec: Spec) -> IndexModel:
    """Return the index by which the buckets of a window are found."""
    return IndexModel(index_keys(spec))


def _indexes(spec: Spec) -> list[IndexModel]:
    """Return the indexes of buckets: their key, what expires, and what the model asks for."""
    names = spec.names
    indexes = [IndexModel(index_keys(spec), unique=True)]
    if spec.span is None:
        series = [(name, 1) for name in spec.key_names]
        indexes += [IndexModel([*series, (name, 1)]) for name in (names.start, names.end)]
    if spec.declared.expire_after is not None:
        seconds = int(spec.declared.expire_after.total_seconds())
        indexes.append(IndexModel([(names.end, 1)], expireAfterSeconds=seconds))
    for field in spec.codec.fields:
        for mark in field.shape.metadata:
            if not isinstance(mark, Indexed):
                continue
            if mark.unique or mark.expire_after is not None:
                raise DeclarationError(
                    f"{spec.label}.{field.stored} has a unique or expiring index, which a reading in a "
                    "bucket cannot have; use unique= and expire_after= of Bucket",
                    code="bucket-declaration",
                )
            prefix = "" if field.stored in spec.series_fields else f"{names.readings}."
            indexes.append(field_index(spec.entry, prefix, field, mark))
    return [*indexes, *spec.entry.model.__treadle__.indexes]


# -- the collection -------------------------------------------------------------------------


def _set_up_buckets(spec: Spec, collection: Raw | None, actions: list[Action]) -> Plan[None]:
    entry, level = spec.entry, spec.entry.model.__treadle__.validation
    # The server looks at the whole bucket again with each append, so at its readings only if asked to.
    schema = None if level == "off" else bucket_schema(spec, deep=level == "strict")
    change = yield from set_up_collection(entry, collection, schema, actions, "buckets")
    if change is not None:
        yield from change_validator(entry, change[1], level, actions)


def bucket_schema(spec: Spec, *, deep: bool) -> Raw:
    """Return the JSON schema of a stored bucket; of its readings too if `deep`."""
    reading = model_schema(spec.codec)
    if "properties" not in reading:
        reading = {"bsonType": "object", "properties": {}, "required": []}
    fields: Raw = reading["properties"]
    needed = set(reading.get("required", ()))
    inner = [each.stored for each in spec.reading_fields]
    rows = {
        "bsonType": "object",
        "properties": {name: fields.get(name, {}) for name in inner},
        "required": [name for name in inner if name in needed],
    }
    if not rows["required"]:
        del rows["required"]
    names = spec.names
    return {
        "bsonType": "object",
        "properties": {
            **{name: fields.get(name, {}) for name in spec.series_fields},
            names.start: {"bsonType": "date"},
            names.end: {"bsonType": "date"},
            names.count: {"bsonType": ["int", "long"], "minimum": 0},
            names.readings: {"bsonType": "array", **({"items": rows} if deep else {})},
            names.stats: {"bsonType": "object"},
        },
        "required": [
            *(name for name in spec.series_fields if name in needed),
            *(names.start, names.end, names.count, names.readings),
        ],
    }


# -- views ----------------------------------------------------------------------------------


def flat_view(spec: Spec) -> list[Raw]:
    """Return the stages that make one document per reading; a damaged bucket has none."""
    return [*unwind_stages(spec), {"$match": {spec.time.stored: {"$type": "date"}}}]


def summary_view(spec: Spec) -> list[Raw]:
    """Return the stages that make one document per bucket, with averages."""
    names = spec.names
    projection: Raw = dict.fromkeys((*spec.series_fields, names.start, names.end, names.count), 1)
    stats: Raw = {}
    for stat in spec.stats:
        path = f"${names.stats}.{stat.path}"
        number = f"{path}.count" if stat.optional else f"${names.count}"
        average = {"$cond": [{"$gt": [number, 0]}, {"$divide": [f"{path}.sum", number]}, None]}
        parts = {name: f"{path}.{name}" for name in ("min", "max", "sum")}
        put(stats, stat.path, {**parts, "avg": average})
    if stats:
        projection[names.stats] = stats
    return [{"$project": projection}]


def _set_up_view(
    spec: Spec, name: str, pipeline: list[Raw], existing: Raw | None, actions: list[Action]
) -> Plan[None]:
    view = {"viewOn": spec.collection, "pipeline": pipeline}
    if existing is None:
        actions.append(Action("create view", name))
        if (yield from create(name, **view)):
            return
    options = {} if existing is None else existing["options"]
    if any(options.get(key) != value for key, value in view.items()):
        actions.append(Action("change view", name))
        yield from database_command({"collMod": name, **view})
