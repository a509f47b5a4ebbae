"""Pydantic's constraints in the words of `$jsonSchema`, as far as the server means the same by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import annotated_types
from bson.decimal128 import Decimal128
from pydantic.fields import FieldInfo

from treadle.errors import UsageError
from treadle.model.bson_types import to_bson
from treadle.model.shape import Shape

Schema = dict[str, Any]

_LENGTHS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
# What a rule may be dropped from, where a default breaks it.
KEYWORDS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    | {key for pair in _LENGTHS.values() for key in pair}
)


def metadata_of(shape: Shape) -> Iterator[Any]:
    """The constraints of a field, groups of them taken apart."""
    for item in shape.metadata:
        if isinstance(item, FieldInfo):
            # On a member of a union, Field(…) stands as it is.
            yield from item.metadata
        else:
            yield from item if isinstance(item, annotated_types.GroupedMetadata) else [item]


def add_text_lengths(schema: Schema, shape: Shape, config: Mapping[str, Any]) -> Schema:
    """Lengths of a text; those of the model's configuration where the field has none."""
    add_lengths(schema, shape, "string")
    if "minLength" not in schema and config.get("str_min_length"):
        schema["minLength"] = config["str_min_length"]
    if "maxLength" not in schema and config.get("str_max_length") is not None:
        schema["maxLength"] = config["str_max_length"]
    return schema


def add_lengths(schema: Schema, shape: Shape, kind: str) -> Schema:
    """`min_length` and `max_length` of text, arrays and maps."""
    least, most = _LENGTHS[kind]
    for item in metadata_of(shape):
        if isinstance(item, annotated_types.MinLen):
            schema[least] = max(item.min_length, schema.get(least, 0))
        elif isinstance(item, annotated_types.MaxLen):
            schema[most] = min(item.max_length, schema.get(most, item.max_length))
    return schema


def add_bounds(schema: Schema, shape: Shape) -> Schema:
    """`ge`, `gt`, `le`, `lt` of numbers, and `multiple_of` of whole ones."""
    for item in metadata_of(shape):
        _add_bound(schema, item, shape.python)
        if isinstance(item, annotated_types.MultipleOf) and shape.python is int:
            step = item.multiple_of
            if isinstance(step, int) and not isinstance(step, bool) and 0 < step < 2**31:
                schema["multipleOf"] = step
    return schema


def _add_bound(schema: Schema, bound: Any, python: Any) -> None:
    for kind, attribute, key, exclusive in (
        (annotated_types.Ge, "ge", "minimum", False),
        (annotated_types.Gt, "gt", "minimum", True),
        (annotated_types.Le, "le", "maximum", False),
        (annotated_types.Lt, "lt", "maximum", True),
    ):
        if not isinstance(bound, kind):
            continue
        limit: Any = getattr(bound, attribute)
        # As Pydantic takes it: 0.1 is not the same number as a float and as a Decimal.
        if python is Decimal and isinstance(limit, float):
            limit = Decimal(str(limit))
        elif python is float and isinstance(limit, Decimal):
            limit = float(limit)
        try:
            value = to_bson(limit, [])
        except UsageError:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float, Decimal128)):
            return
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return
        schema[key] = value
        if exclusive:
            schema["exclusiveMinimum" if key == "minimum" else "exclusiveMaximum"] = True
