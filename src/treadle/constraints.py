"""Pydantic's constraints in the words of `$jsonSchema`, as far as the server means the same by them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import annotated_types
from bson.decimal128 import Decimal128
from pydantic.fields import FieldInfo

from treadle.bson_types import to_bson
from treadle.errors import UsageError
from treadle.shape import Shape

Schema = dict[str, Any]

_LENGTHS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
# What a rule may be dropped from, where a default breaks it.
KEYWORDS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "pattern"}
    | {key for pair in _LENGTHS.values() for key in pair}
)

# The parts of a pattern that Rust, Python and the server's PCRE read alike. Classes such as \\w
# are not among them: what they hold differs, and so does how case is ignored.
_ESCAPE = r"\\[.\-+*?()\[\]{}^$|/\\@:#&~_, ]"
_IN_CLASS = rf"(?:[^\\\[\]&~-]|{_ESCAPE}|\\d|-(?!-))"
_PORTABLE = re.compile(
    rf"(?:[^\\\[\](){{}}*+?|^$.]|{_ESCAPE}|\\d|\^|\$|\.|\(\?:|\((?!\?)|\)|\||\[\^?{_IN_CLASS}+\]"
    r"|[*+?](?![+])|\{{\d{{1,3}}(?:,(?:\d{{1,3}})?)?\}}(?![+]))*".replace("{{", "{").replace("}}", "}")
)


_DIGIT = r"\p{Nd}"


def metadata_of(shape: Shape) -> Iterator[Any]:
    """The constraints of a field, groups of them taken apart."""
    for item in shape.metadata:
        if isinstance(item, FieldInfo):
            # On a member of a union, Field(…) stands as it is.
            yield from item.metadata
        else:
            yield from item if isinstance(item, annotated_types.GroupedMetadata) else [item]


def add_lengths(schema: Schema, shape: Shape, kind: str) -> Schema:
    """`min_length` and `max_length` of text, arrays and maps."""
    least, most = _LENGTHS[kind]
    for item in metadata_of(shape):
        if isinstance(item, annotated_types.MinLen):
            schema[least] = max(item.min_length, schema.get(least, 0))
        elif isinstance(item, annotated_types.MaxLen):
            schema[most] = min(item.max_length, schema.get(most, item.max_length))
    return schema


def add_pattern(schema: Schema, shape: Shape) -> Schema:
    """A pattern, if the server reads it as Pydantic does."""
    for item in metadata_of(shape):
        # Treadle's own declarations have a `pattern` too, which is a name.
        own = type(item).__module__.startswith("treadle")
        pattern = None if own else getattr(item, "pattern", None)
        if isinstance(pattern, re.Pattern):
            pattern = pattern.pattern if not pattern.flags & ~re.UNICODE else None
        if isinstance(pattern, str) and "pattern" not in schema and _PORTABLE.fullmatch(pattern):
            # A digit is any of Unicode's, here as there.
            schema["pattern"] = re.sub(
                r"\\(.)", lambda found: _DIGIT if found[1] == "d" else found[0], pattern
            )
    return schema


def fits_pattern(schema: Schema, value: Any) -> bool:
    """Whether a text fits the pattern of a schema."""
    pattern = schema.get("pattern")
    return (
        not isinstance(value, str)
        or pattern is None
        or bool(re.search(pattern.replace(_DIGIT, r"\d"), value))
    )


def add_bounds(schema: Schema, shape: Shape) -> Schema:
    """`ge`, `gt`, `le`, `lt` of numbers, and `multiple_of` of whole ones."""
    for item in metadata_of(shape):
        _add_bound(schema, item)
        if isinstance(item, annotated_types.MultipleOf) and shape.python is int:
            step = item.multiple_of
            if isinstance(step, int) and not isinstance(step, bool) and 0 < step < 2**31:
                schema["multipleOf"] = step
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
