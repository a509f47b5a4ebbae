"""A model's shape as MongoDB's `$jsonSchema`: draft 4 with `bsonType`, without `$ref`.

The schema accepts every document that the model can write, and refuses other
types. A field without a default is required. Enums, literals, numeric bounds,
lengths and item counts carry over; what the server cannot express, or means
in another way, is left open.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import enum
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, get_args

import annotated_types
from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import AfterValidator, BaseModel, PlainValidator, ValidationError, WrapValidator
from pydantic.fields import FieldInfo

from treadle.errors import UsageError
from treadle.model.attributes import is_paired
from treadle.model.bson_types import RESERVED, to_bson
from treadle.model.codec import codec_of
from treadle.model.dump import has_model_serializer, type_adapter
from treadle.model.shape import Annotation, Kind, ModelCodec, Shape, StoredField

Schema = dict[str, Any]
# The models around a value, outermost first; the last one's configuration applies.
Path = tuple[type[BaseModel], ...]

# A float field takes integers too: mongosh writes 20 as an int, and Pydantic
# reads it as the float that it is.
_BSON_TYPES: dict[type, str | list[str]] = {
    str: "string", int: ["int", "long"], float: ["double", "int", "long"], bool: "bool",
    bytes: "binData", type(None): "null", ObjectId: "objectId", uuid.UUID: "binData",
    decimal.Decimal: "decimal", Decimal128: "decimal", dt.datetime: "date", dt.date: "date",
    dt.time: "string", dt.timedelta: ["double", "int", "long"],
}  # fmt: skip
_ANY_TYPE = ["object", "array", "string", "number", "bool", "date", "objectId", "binData"]
# Pydantic's constraints, and the keywords of the server that mean the same.
_BOUNDS = {"ge": "minimum", "gt": "minimum", "le": "maximum", "lt": "maximum", "multiple_of": "multipleOf"}
_LIMITS = {
    "string": {"min_length": "minLength", "max_length": "maxLength"},
    "array": {"min_length": "minItems", "max_length": "maxItems"},
    "object": {"min_length": "minProperties", "max_length": "maxProperties"},
    "int": _BOUNDS,
    # The server's remainders of other numbers are not Pydantic's.
    "number": {name: keyword for name, keyword in _BOUNDS.items() if name != "multiple_of"},
}
_EXCLUSIVE = {"gt": {"exclusiveMinimum": True}, "lt": {"exclusiveMaximum": True}}
# The keywords that are left out where a field's default breaks them.
_CONSTRAINTS = {keyword for limits in _LIMITS.values() for keyword in limits.values()} | {
    "exclusiveMinimum", "exclusiveMaximum"
}  # fmt: skip


def model_schema(codec: ModelCodec) -> Schema:
    """Return the `$jsonSchema` of a document."""
    schema = _object(codec, ())
    if schema.get("additionalProperties") is False:
        schema["properties"][RESERVED] = {}
    return schema


def stored_types(shape: Shape) -> list[str]:
    """Return the BSON types that a value of this shape may have, null aside."""
    return _types(_not_null(shape, ()), _ANY_TYPE)


def _types(schema: Schema, default: Sequence[str] = ()) -> list[str]:
    types = schema.get("bsonType", default)
    return [types] if isinstance(types, str) else list(types)


def _object(codec: ModelCodec, inside: Path) -> Schema:
    model = codec.model
    if model in inside:
        # Draft 4 without $ref cannot say "the same again".
        return {"bsonType": "object"}
    if has_model_serializer(model):
        return {}
    inside = (*inside, model)
    if model.__pydantic_root_model__:
        return _nullable(codec.fields[0].shape, inside)
    is_open = _open_fields(model)
    properties = {
        each.stored: {} if is_open & {each.name, "*"} else _field(each, inside) for each in codec.fields
    }
    schema: Schema = {"bsonType": "object", "properties": properties}
    if required := [each.stored for each in codec.fields if each.info.is_required() or each.stored == "_id"]:
        schema["required"] = required
    if model.model_config.get("extra") == "forbid":
        schema["additionalProperties"] = False
    return schema


def _open_fields(model: type[BaseModel]) -> set[str]:
    """Return the fields that may have any type, because a function of the model's author comes last."""
    decorators = model.__pydantic_decorators__
    validators = [each.info for each in decorators.field_validators.values() if each.info.mode != "before"]
    serializers = [each.info for each in decorators.field_serializers.values()]
    return {name for infos in (validators, serializers) for each in infos for name in each.fields}


def _field(field: StoredField, inside: Path) -> Schema:
    """Return the schema of a field; a default is not validated, so it may break the field's constraints."""
    shape, info = field.shape, field.info
    if info.default is None:
        return _nullable(replace(shape, optional=True), inside)
    schema = _nullable(shape, inside)
    if not info.is_required() and _CONSTRAINTS & schema.keys() and _default_may_break(field, inside[-1]):
        return {key: value for key, value in schema.items() if key not in _CONSTRAINTS}
    return schema


def _default_may_break(field: StoredField, model: type[BaseModel]) -> bool:
    """Whether Pydantic would refuse the default of a field."""
    info, factory = field.info, field.info.default_factory
    if factory not in (None, list, dict, set, str, int, float):
        # Called for each document, it may return something else each time.
        return True
    annotation: Annotation = info.annotation
    adapter = type_adapter(Annotated[annotation, *info.metadata] if info.metadata else annotation, model)
    try:
        adapter.validate_python(info.get_default(call_default_factory=True))
    except ValidationError:
        return True
    return False


def _nullable(shape: Shape, inside: Path) -> Schema:
    schema = _not_null(shape, inside)
    if not shape.optional or not schema:
        return schema
    if set(schema) == {"enum"}:
        return schema if None in schema["enum"] else {"enum": [*schema["enum"], None]}
    if "bsonType" in schema:
        types = _types(schema)
        return schema if "null" in types else {**schema, "bsonType": [*types, "null"]}
    return {"anyOf": [{"bsonType": "null"}, schema]}


def _not_null(shape: Shape, inside: Path) -> Schema:
    make = _SCHEMAS.get(shape.kind)
    # A validator that comes after the type's own may return anything.
    last = (AfterValidator, WrapValidator, PlainValidator)
    if make is None or any(isinstance(mark, last) for mark in shape.metadata):
        return {}
    return make(shape, inside)


def _scalar(shape: Shape, inside: Path) -> Schema:
    schema: Schema = {"bsonType": _BSON_TYPES[shape.python]}
    if shape.python is str:
        return schema | _text_lengths(inside) | _limits(shape, "string")
    if shape.python in (int, float, decimal.Decimal):
        return schema | _limits(shape, "int" if shape.python is int else "number")
    return schema


def _enum(shape: Shape, inside: Path) -> Schema:
    if issubclass(shape.python, enum.Flag):
        return {"bsonType": ["int", "long"]}
    return {"enum": [to_bson(member, []) for member in shape.python]}


def _map(shape: Shape, inside: Path) -> Schema:
    values = _nullable(shape.items[1], inside)
    if is_paired(shape):
        text: Schema = {"bsonType": "string"}
        pair: Schema = {"k": text, "u": text, **({"v": values} if values else {})}
        items = {"bsonType": "object", "required": ["k", "v"], "properties": pair}
        return {"bsonType": "array", "items": items} | _limits(shape, "array")
    schema: Schema = {"bsonType": "object", **({"additionalProperties": values} if values else {})}
    return schema | _limits(shape, "object")


def _array(shape: Shape, inside: Path) -> Schema:
    items: Any = [_nullable(item, inside) for item in shape.items]
    if shape.kind == "tuple" and shape.python is not Ellipsis:
        sizes: Schema = {"minItems": len(items), "maxItems": len(items)}
    else:
        items, sizes = items[0], _limits(shape, "array")
    return {"bsonType": "array", **({"items": items} if items else {}), **sizes}


def _union(shape: Shape, inside: Path) -> Schema:
    members = [_not_null(item, inside) for item in shape.items]
    if not all(members):
        return {}
    if all(set(member) == {"bsonType"} for member in members):
        # Each type once, in order.
        return {"bsonType": list(dict.fromkeys(each for member in members for each in _types(member)))}
    tag = next((mark.discriminator for mark in shape.metadata if isinstance(mark, FieldInfo)), None)
    for item, member in zip(shape.items, members, strict=True):
        if isinstance(tag, str) and item.kind == "model" and "properties" in member:
            # The members are told apart by this field, whether or not it has a default.
            required = [*member.get("required", []), codec_of(item.python).by_name[tag].stored]
            member["required"] = list(dict.fromkeys(required))
    return {"anyOf": members}


_SCHEMAS: dict[Kind, Callable[[Shape, Path], Schema]] = {
    "scalar": _scalar, "enum": _enum, "map": _map, "union": _union,
    "list": _array, "set": _array, "frozenset": _array, "tuple": _array,
    "model": lambda shape, inside: _object(codec_of(shape.python), inside),
    "literal": lambda shape, inside: {"enum": [to_bson(value, []) for value in get_args(shape.python)]},
}  # fmt: skip


def _constraints(shape: Shape) -> Iterator[Any]:
    """Yield the constraints of a field, groups of them taken apart."""
    for mark in shape.metadata:
        if isinstance(mark, FieldInfo):
            # On a member of a union, Field(…) is not taken apart.
            yield from mark.metadata
        elif isinstance(mark, annotated_types.GroupedMetadata):
            yield from mark
        else:
            yield mark


def _text_lengths(inside: Path) -> Schema:
    """Return the lengths that the model's configuration sets for text."""
    config: Mapping[str, Any] = inside[-1].model_config if inside else {}
    lengths = {"minLength": config.get("str_min_length") or None, "maxLength": config.get("str_max_length")}
    return {key: length for key, length in lengths.items() if length is not None}


def _limits(shape: Shape, kind: str) -> Schema:
    """Return the bounds of a number, and the lengths of text, an array or a map."""
    schema: Schema = {}
    for mark in _constraints(shape):
        for name, keyword in _LIMITS[kind].items():
            limit = _limit(getattr(mark, name, None), shape.python)
            if limit is not None:
                schema |= {keyword: limit, **_EXCLUSIVE.get(name, {})}
    return schema


def _limit(limit: Any, python: type) -> Any:
    """Return a bound as Pydantic takes it, for the server; None where BSON has no such number."""
    if isinstance(limit, (float, decimal.Decimal)) and python is not int:
        # 0.1 is not the same number as a float and as a Decimal.
        limit = python(str(limit))
    with contextlib.suppress(UsageError):
        stored = to_bson(limit, [])
        if type(stored) in (float, Decimal128) or (type(stored) is int and abs(stored) < 2**63):
            return stored
    return None
