"""A model's shape as MongoDB's `$jsonSchema`: draft 4 with `bsonType`, no `$ref`.

It accepts whatever the model can write, and refuses other types. A field
without a default is required. Enums, literals and numeric bounds carry over;
what the server cannot express is left open, never guessed.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import ipaddress
import uuid
from dataclasses import replace
from typing import Any, get_args

import annotated_types
from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import AfterValidator, BaseModel, PlainValidator, WrapValidator

from treadle.bson_types import RESERVED, to_bson
from treadle.codec import Codec, StoredField, codec_of
from treadle.errors import UsageError
from treadle.shape import Shape

Schema = dict[str, Any]

# A float field takes integers too: mongosh writes 20 as an int, and Pydantic
# reads it as the float that it is.
_BSON_TYPES: dict[type, list[str]] = {
    str: ["string"], int: ["int", "long"], float: ["double", "int", "long"], bool: ["bool"],
    bytes: ["binData"], type(None): ["null"], ObjectId: ["objectId"], uuid.UUID: ["binData"],
    decimal.Decimal: ["decimal"], Decimal128: ["decimal"], dt.datetime: ["date"], dt.date: ["date"],
    dt.time: ["string"], dt.timedelta: ["double", "int", "long"],
    ipaddress.IPv4Address: ["string"], ipaddress.IPv6Address: ["string"],
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
    custom = {name for each in decorators.field_serializers.values() for name in each.info.fields}
    # A validator that comes last may return whatever it likes.
    custom |= {
        name
        for each in decorators.field_validators.values()
        if each.info.mode != "before"
        for name in each.info.fields
    }
    properties: Schema = {}
    required = []
    for field in codec.fields:
        open_ended = bool({field.name, "*"} & custom) or _may_become_anything(field)
        properties[field.stored] = {} if open_ended else _fitting_default(field, inside)
        if field.info.is_required() or field.stored == "_id":
            required.append(field.stored)
    schema: Schema = {"bsonType": "object", "properties": properties}
    if required:
        schema["required"] = required
    if model.model_config.get("extra") == "forbid":
        schema["additionalProperties"] = False
    return schema


def _may_become_anything(field: StoredField) -> bool:
    """Whether a validator of the field's own comes after the type's."""
    last = (AfterValidator, WrapValidator, PlainValidator)
    return any(isinstance(mark, last) for mark in field.shape.metadata)


def _fitting_default(field: StoredField, inside: tuple[type[BaseModel], ...]) -> Schema:
    """The schema of a field; a default is not validated, so it may break the field's own rules."""
    shape, default = field.shape, field.info.default
    if default is None and not shape.optional:
        shape = replace(shape, optional=True)
    schema = _of(shape, inside)
    if isinstance(default, (int, float, decimal.Decimal)) and not isinstance(default, bool):
        schema = _without_broken_bounds(schema, default)
    return schema


def _without_broken_bounds(schema: Schema, default: Any) -> Schema:
    low, high = (
        each.to_decimal() if isinstance(each, Decimal128) else each
        for each in (schema.get("minimum"), schema.get("maximum"))
    )
    broken: set[str] = set()
    if low is not None and (default < low or (default == low and schema.get("exclusiveMinimum"))):
        broken |= {"minimum", "exclusiveMinimum"}
    if high is not None and (default > high or (default == high and schema.get("exclusiveMaximum"))):
        broken |= {"maximum", "exclusiveMaximum"}
    return {key: value for key, value in schema.items() if key not in broken}


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
    if shape.kind == "scalar":
        return _scalar(shape)
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
        return {"bsonType": "object", **({"additionalProperties": values} if values else {})}
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
    return {"bsonType": "array", **({"items": item} if item else {})}


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
    return {"anyOf": members}


def _scalar(shape: Shape) -> Schema:
    kinds = _BSON_TYPES[shape.python]
    schema: Schema = {"bsonType": kinds[0] if len(kinds) == 1 else kinds}
    if shape.python in _NUMBERS:
        for item in shape.metadata:
            # Field(ge=1) leaves Ge(1); some annotated types are groups of such.
            for bound in item if isinstance(item, annotated_types.GroupedMetadata) else [item]:
                _add_bound(schema, bound)
    return schema


def _add_bound(schema: Schema, bound: Any) -> None:
    for kind, attribute, key, exclusive in (
        (annotated_types.Ge, "ge", "minimum", False),
        (annotated_types.Gt, "gt", "minimum", True),
        (annotated_types.Le, "le", "maximum", False),
        (annotated_types.Lt, "lt", "maximum", True),
    ):
        if not isinstance(bound, kind):
            continue
        try:
            value = to_bson(getattr(bound, attribute), [])
        except UsageError:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float, Decimal128)):
            return
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return
        schema[key] = value
        if exclusive:
            schema["exclusiveMinimum" if key == "minimum" else "exclusiveMaximum"] = True
