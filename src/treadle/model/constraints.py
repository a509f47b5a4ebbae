"""Pydantic's constraints in the words of `$jsonSchema`, as far as the server means the same by them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import annotated_types
from bson.decimal128 import Decimal128
from pydantic.fields import FieldInfo

from treadle.errors import UsageError
from treadle.model.bson_types import to_bson
from treadle.model.schema_check import REPEATED_GROUP
from treadle.model.shape import Shape

Schema = dict[str, Any]

_LENGTHS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
# What a rule may be dropped from, where a default breaks it.
KEYWORDS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "pattern", "anyOf"}
    | {key for pair in _LENGTHS.values() for key in pair}
)

# The parts of a pattern that Rust, Python and the server's PCRE read alike. Classes such as \\w
# are not among them: what they hold differs, and so does how case is ignored.
_ESCAPE = r"\\[.\-+*?()\[\]{}^$|/\\@:#&~_, ]"
_IN_CLASS = rf"(?:[^\0\\\[\]&~-]|{_ESCAPE}|\\d|-(?!-))"
_PORTABLE = re.compile(
    rf"(?:[^\0\\\[\](){{}}*+?|^$.]|{_ESCAPE}|\\d|\^|\$|\.|\(\?:|\((?!\?)|\)|\||\[\^?{_IN_CLASS}+\]"
    r"|[*+?](?![+])|\{{\d{{1,3}}(?:,(?:\d{{1,3}})?)?\}}(?![+]))*".replace("{{", "{").replace("}}", "}")
)


_DIGIT = r"\p{Nd}"
# What a portable pattern is made of: escaped signs, classes, single signs.
_PART = re.compile(r"\\.|\[(?:\\.|[^\\\]])*\]|.", re.DOTALL)
_IN_CLASS_DIGIT = re.compile(r"\\.", re.DOTALL)
_LOOP = re.compile(r"(.)([*+]|\{\d+(?:,\d*)?\})", re.DOTALL)
_PATTERNED = frozenset({"pattern", "anyOf"})
LOOPED_LENGTH_MAX = 50_000
NESTED_LENGTH_MAX = 256


def metadata_of(shape: Shape) -> Iterator[Any]:
    """The constraints of a field, groups of them taken apart."""
    for item in shape.metadata:
        if isinstance(item, FieldInfo):
            # On a member of a union, Field(…) stands as it is.
            yield from item.metadata
        else:
            yield from item if isinstance(item, annotated_types.GroupedMetadata) else [item]


def add_text_rules(schema: Schema, shape: Shape, config: Mapping[str, Any]) -> Schema:
    """Lengths and pattern of a text; those of the model's configuration where the field has none."""
    add_lengths(schema, shape, "string")
    if "minLength" not in schema and config.get("str_min_length"):
        schema["minLength"] = config["str_min_length"]
    if "maxLength" not in schema and config.get("str_max_length") is not None:
        schema["maxLength"] = config["str_max_length"]
    return add_pattern(schema, shape, config)


def add_lengths(schema: Schema, shape: Shape, kind: str) -> Schema:
    """`min_length` and `max_length` of text, arrays and maps."""
    least, most = _LENGTHS[kind]
    for item in metadata_of(shape):
        if isinstance(item, annotated_types.MinLen):
            schema[least] = max(item.min_length, schema.get(least, 0))
        elif isinstance(item, annotated_types.MaxLen):
            schema[most] = min(item.max_length, schema.get(most, item.max_length))
    return schema


def add_pattern(schema: Schema, shape: Shape, config: Mapping[str, Any]) -> Schema:
    """A pattern, if the server reads it as Pydantic does."""
    for item in metadata_of(shape):
        # A declaration of a pattern has a `pattern` too, which is a name.
        own = hasattr(item, "bind")
        pattern = None if own else getattr(item, "pattern", None)
        # A compiled pattern is Python's own, whatever the model says.
        in_python = config.get("regex_engine") == "python-re" or isinstance(pattern, re.Pattern)
        if isinstance(pattern, re.Pattern):
            pattern = pattern.pattern if not pattern.flags & ~re.UNICODE else None
        if isinstance(pattern, str) and not _PATTERNED & set(schema) and _PORTABLE.fullmatch(pattern):
            _add_pattern(schema, pattern, in_python)
    return schema


def _add_pattern(schema: Schema, pattern: str, in_python: bool) -> None:
    changed = _PART.sub(lambda part: _as_server_reads(part[0], in_python), pattern)
    bound = _length_bound(pattern)
    if bound is None or schema.get("maxLength", bound + 1) <= bound:
        schema["pattern"] = changed
    else:
        # The server gives up on longer texts, which Pydantic accepts.
        schema["anyOf"] = [{"pattern": changed}, {"minLength": bound + 1}]


def _as_server_reads(part: str, in_python: bool) -> str:
    if part == r"\d":
        # A digit is any of Unicode's, here as there.
        return _DIGIT
    if part == "$" and not in_python:
        # For Rust the end is the very end, not the place before a last line break.
        return r"\z"
    return _IN_CLASS_DIGIT.sub(lambda sign: _DIGIT if sign[0] == r"\d" else sign[0], part)


def _length_bound(pattern: str) -> int | None:
    """Up to which length the server surely decides whether a text fits; None for any.

    It allows 200,000 steps and a depth of 4,000, and takes a text for one that
    does not fit when it needs more.
    """
    loops = [loop for loop in _LOOP.finditer(_PART.sub(_without_class, pattern)) if _is_long(loop[2])]
    if not loops:
        return None
    if len(loops) > 1 or REPEATED_GROUP.search(pattern):
        return NESTED_LENGTH_MAX
    # With its end fixed, a single loop is right at once, or off by no more than what follows it.
    ends = pattern.endswith("$") and not pattern.endswith(r"\$") and not re.search(r"\||[*+}]\?", pattern)
    return None if ends else LOOPED_LENGTH_MAX


def _without_class(part: re.Match[str]) -> str:
    # A class, or an escaped sign, is one sign like any other.
    return "x" if part[0][0] in "[\\" else part[0]


def _is_long(quantifier: str) -> bool:
    return quantifier in ("*", "+") or quantifier.endswith(",}")


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
