"""A model's shape as MongoDB's `$jsonSchema`: draft 4 with `bsonType`, no `$ref`.

It accepts whatever the model can write, and refuses other types. A field
without a default is required. Enums and literals carry over, and constraints
as `constraints.py` says; what the server cannot express is left open, never
guessed.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import AfterValidator, BaseModel, PlainValidator, WrapValidator
from pydantic.fields import FieldInfo

from treadle.errors import UsageError
from treadle.model.bson_types import RESERVED, to_bson
from treadle.model.codec import Codec, StoredField, codec_of
from treadle.model.constraints import KEYWORDS, add_bounds, add_lengths, add_text_lengths
from treadle.model.pairs import is_paired
from treadle.model.schema_check import faults
from treadle.model.shape import Shape

Schema = dict[str, Any]

# A float field takes integers too: mongosh writes 20 as an int, and Pydantic
# reads it as the float that it is.
_BSON_TYPES: dict[type, str | list[str]] = {
    str: "string", int: ["int", "long"], float: ["double", "int", "long"], bool: "bool",
    bytes: "binData", type(None): "null", ObjectId: "objectId", uuid.UUID: "binData",
    decimal.Decimal: "decimal", Decimal128: "decimal", dt.datetime: "date", dt.date: "date",
    dt.time: "string", dt.timedelta: ["double", "int", "long"],
}  # fmt: skip
_NUMBERS = (int, float, decimal.Decimal)


def model_schema(codec: Codec[Any]) -> Schema:
    """The `$jsonSchema` of a document."""
    schema = _object(codec, ())
    if schema.get("additionalProperties") is False:
        schema["properties"][RESERVED] = {}
    return schema


def stored_types(shape: Shape) -> list[str]:
    """The BSON types that a value of this shape may have, null aside."""
    kinds = _not_null(shape, ()).get(
        "bsonType", ["object", "array", "string", "number", "bool", "date", "objectId", "binData"]
    )
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _object(codec: Codec[Any], inside: tuple[type[BaseModel], ...]) -> Schema:
    model = codec.model
    if model in inside or model.__pydantic_decorators__.model_serializers:
        # Draft 4 without $ref cannot say "the same again"; a serializer may say anything.
        return {"bsonType": "object"} if model in inside else {}
    inside = (*inside, model)
    if model.__pydantic_root_model__:
        return _of(codec.fields[0].shape, inside)
    decorators = model.__pydantic_decorators__
    # A validator that comes last may return whatever it likes.
    last = [each for each in decorators.field_validators.values() if each.info.mode != "before"]
    custom = {name for each in (*decorators.field_serializers.values(), *last) for name in each.info.fields}
    properties: Schema = {}
    required = []
    for field in codec.fields:
        open_ended = bool({field.name, "*"} & custom)
        properties[field.stored] = {} if open_ended else _fitting_default(field, inside)
        if field.info.is_required() or field.stored == "_id":
            required.append(field.stored)
    schema: Schema = {"bsonType": "object", "properties": properties}
    if required:
        schema["required"] = required
    if model.model_config.get("extra") == "forbid":
        schema["additionalProperties"] = False
    return schema


def _may_become_anything(shape: Shape) -> bool:
    """Whether a validator of the value's own comes after the type's."""
    last = (AfterValidator, WrapValidator, PlainValidator)
    return any(isinstance(mark, last) for mark in shape.metadata)


def _fitting_default(field: StoredField, inside: tuple[type[BaseModel], ...]) -> Schema:
    """The schema of a field; a default is not validated, so it may break the field's own rules."""
    shape, default = field.shape, field.info.default
    if default is None and not shape.optional:
        shape = replace(shape, optional=True)
    schema = _of(shape, inside)
    if isinstance(field.info.discriminator, str):
        schema = _tagged(schema, shape, field.info.discriminator)
    ruled = KEYWORDS & set(schema) if shape.kind != "union" else set()
    if ruled and _may_break(field, schema):
        return {key: value for key, value in schema.items() if key not in ruled}
    return schema


def _may_break(field: StoredField, schema: Schema) -> bool:
    """Whether the default of a field breaks its rules, or may do so."""
    factory: Any = field.info.default_factory
    if field.info.is_required() or field.info.validate_default:
        return False
    if factory is not None and factory not in (list, dict, set, str, int, float):
        return True
    default = field.info.default if factory is None else factory()
    try:
        stored = to_bson(default, [])
    except UsageError:
        return True
    return stored is not None and bool(faults(schema, stored))


def _tagged(schema: Schema, shape: Shape, tag: str) -> Schema:
    """A union whose members cannot do without the field that tells them apart."""
    if "anyOf" not in schema or any(item.kind != "model" for item in shape.items):
        return schema
    fields = [codec_of(item.python).by_name.get(tag) for item in shape.items]
    names = {field.stored for field in fields if field is not None}
    if len(names) != 1:
        return schema
    members = []
    for member in schema["anyOf"]:
        required = [*(name for name in member.get("required", []) if name not in names), *names]
        members.append({**member, "required": required} if member.get("bsonType") == "object" else member)
    return {**schema, "anyOf": members}


def _of(shape: Shape, inside: tuple[type[BaseModel], ...]) -> Schema:
    schema = _not_null(shape, inside)
    if not shape.optional or not schema:
        return schema
    if "enum" in schema and len(schema) == 1:
        return schema if None in schema["enum"] else {"enum": [*schema["enum"], None]}
    if "bsonType" in schema:
        listed = schema["bsonType"]
        kinds = [listed] if isinstance(listed, str) else listed
        return schema if "null" in kinds else {**schema, "bsonType": [*kinds, "null"]}
    return {"anyOf": [{"bsonType": "null"}, schema]}


def _not_null(shape: Shape, inside: tuple[type[BaseModel], ...]) -> Schema:
    if _may_become_anything(shape):
        return {}
    if shape.kind == "scalar":
        return _scalar(shape, inside[-1].model_config if inside else {})
    if shape.kind == "model":
        return _object(codec_of(shape.python), inside)
    if shape.kind == "enum" and issubclass(shape.python, enum.Flag):
        return {"bsonType": ["int", "long"]}
    if shape.kind == "enum":
        return {"enum": [to_bson(member, []) for member in shape.python]}
    if shape.kind == "literal":
        return {"enum": [to_bson(value, []) for value in get_args(shape.python)]}
    if shape.kind == "map":
        values = _of(shape.items[1], inside)
        if is_paired(shape):
            texts: Schema = {"bsonType": "string"}
            each: Schema = {"k": texts, "u": texts, **({"v": values} if values else {})}
            items = {"bsonType": "object", "required": ["k", "v"], "properties": each}
            return add_lengths({"bsonType": "array", "items": items}, shape, "array")
        open_map = {"bsonType": "object", **({"additionalProperties": values} if values else {})}
        return add_lengths(open_map, shape, "object")
    if shape.kind == "union":
        return _union(shape, inside)
    if shape.kind in ("any", "custom"):
        return {}
    return _array(shape, inside)


def _array(shape: Shape, inside: tuple[type[BaseModel], ...]) -> Schema:
    if shape.kind == "tuple" and shape.python is not Ellipsis:
        items = [_of(item, inside) for item in shape.items]
        sizes: Schema = {"minItems": len(items), "maxItems": len(items)}
        return {"bsonType": "array", **({"items": items} if items else {}), **sizes}
    item = _of(shape.items[0], inside)
    return add_lengths({"bsonType": "array", **({"items": item} if item else {})}, shape, "array")


def _union(shape: Shape, inside: tuple[type[BaseModel], ...]) -> Schema:
    members = [_not_null(item, inside) for item in shape.items]
    if not all(members):
        return {}
    if all(set(member) == {"bsonType"} for member in members):
        kinds: list[str] = []
        for member in members:
            listed = member["bsonType"]
            kinds.extend(
                kind for kind in ([listed] if isinstance(listed, str) else listed) if kind not in kinds
            )
        return {"bsonType": kinds}
    tag = next((mark.discriminator for mark in shape.metadata if isinstance(mark, FieldInfo)), None)
    return _tagged({"anyOf": members}, shape, tag) if isinstance(tag, str) else {"anyOf": members}


def _scalar(shape: Shape, config: Mapping[str, Any]) -> Schema:
    schema: Schema = {"bsonType": _BSON_TYPES[shape.python]}
    if shape.python in _NUMBERS:
        return add_bounds(schema, shape)
    if shape.python is str:
        return add_text_lengths(schema, shape, config)
    return schema
