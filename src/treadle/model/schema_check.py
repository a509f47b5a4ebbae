"""Where a document does not fit a `$jsonSchema` that Treadle made.

Only the keywords that `json_schema.py` writes are known here. The server is
the judge of whether a document fits; this says where to look.
"""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bson import ObjectId
from bson.binary import Binary
from bson.decimal128 import Decimal128
from bson.int64 import Int64

INT32 = 2**31


@dataclass(frozen=True)
class Fault:
    """A place in a document, what stands there, and what should."""

    path: str
    stored: Any
    expected: Any


def join(path: str, name: str) -> str:
    """The path of what stands under this name within a path."""
    return f"{path}.{name}" if path else name


def faults(schema: Mapping[str, Any], value: Any) -> list[Fault]:
    """The places where a document does not fit; of several alternatives, of the nearest."""
    return list(_faults(schema, value, ""))


def _faults(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[Fault]:
    if "not" in schema and not faults(schema["not"], value):
        yield Fault(join(path, str(schema["not"].get("required", [""])[0])), None, {"enum": []})
    if "anyOf" in schema:
        yield from _nearest(schema["anyOf"], value, path)
    if "enum" in schema and not any(_equal(value, member) for member in schema["enum"]):
        yield Fault(path, value, {"enum": list(schema["enum"])})
        return
    if "bsonType" in schema and not _is(value, schema["bsonType"]):
        yield Fault(path, value, {"bsonType": schema["bsonType"]})
        return
    if isinstance(value, Mapping):
        yield from _object(schema, value, path)
    elif isinstance(value, list):
        yield from _array(schema, value, path)
    else:
        yield from _scalar(schema, value, path)


def _nearest(branches: Any, value: Any, path: str) -> Iterator[Fault]:
    """The faults of the branch that a value comes closest to; none if it fits one."""
    tried = [list(_faults(branch, value, path)) for branch in branches]
    if not all(tried):
        return

    def distance(faults: list[Fault]) -> tuple[int, int]:
        # A wrong kind or version says that another branch was meant.
        other = sum(1 for fault in faults if isinstance(fault.expected, dict) and "enum" in fault.expected)
        return other, len(faults)

    yield from min(tried, key=distance)


def _object(schema: Mapping[str, Any], value: Mapping[str, Any], path: str) -> Iterator[Fault]:
    properties = schema.get("properties", {})
    for name in schema.get("required", []):
        if name not in value:
            yield Fault(join(path, name), None, {"required": True, **properties.get(name, {})})
    additional = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in properties:
            yield from _faults(properties[name], item, join(path, name))
        elif additional is False:
            yield Fault(join(path, name), item, "no such field")
        elif isinstance(additional, Mapping):
            yield from _faults(additional, item, join(path, name))
    yield from _sizes(schema, len(value), path, value, ("minProperties", "maxProperties"))


def _array(schema: Mapping[str, Any], value: list[Any], path: str) -> Iterator[Fault]:
    items = schema.get("items", {})
    for number, item in enumerate(value):
        each = items if isinstance(items, Mapping) else items[number] if number < len(items) else {}
        yield from _faults(each, item, join(path, str(number)))
    yield from _sizes(schema, len(value), path, value, ("minItems", "maxItems"))


def _scalar(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[Fault]:
    if isinstance(value, str):
        yield from _sizes(schema, len(value), path, value, ("minLength", "maxLength"))
    number = _number(value)
    if number is None:
        return
    low, high = _number(schema.get("minimum")), _number(schema.get("maximum"))
    if _is_nan(number):
        # The server takes it to be less than every number; Python's Decimal will not compare it.
        if low is not None:
            yield Fault(path, value, {"minimum": schema["minimum"]})
        return
    if low is not None and (number < low or (schema.get("exclusiveMinimum") and number == low)):
        yield Fault(path, value, {"minimum": schema["minimum"]})
    if high is not None and (number > high or (schema.get("exclusiveMaximum") and number == high)):
        yield Fault(path, value, {"maximum": schema["maximum"]})
    if "multipleOf" in schema and number % schema["multipleOf"]:
        yield Fault(path, value, {"multipleOf": schema["multipleOf"]})


def _sizes(
    schema: Mapping[str, Any], size: int, path: str, value: Any, keys: tuple[str, str]
) -> Iterator[Fault]:
    least, most = keys
    if size < schema.get(least, 0):
        yield Fault(path, value, {least: schema[least]})
    if most in schema and size > schema[most]:
        yield Fault(path, value, {most: schema[most]})


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return None
    if isinstance(value, Decimal128):
        return value.to_decimal()
    if isinstance(value, float):
        return decimal.Decimal(value)
    return value if isinstance(value, int) else None


def _is_nan(number: Any) -> bool:
    return isinstance(number, decimal.Decimal) and number.is_nan()


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    first, second = _number(one), _number(other)
    if first is not None and second is not None:
        if _is_nan(first) or _is_nan(second):
            return _is_nan(first) and _is_nan(second)
        return bool(first == second)
    return bool(one == other)


def _is(value: Any, kinds: Any) -> bool:
    return not _types(value).isdisjoint([kinds] if isinstance(kinds, str) else kinds)


def _types(value: Any) -> set[str]:
    if isinstance(value, int) and not isinstance(value, (bool, Int64)):
        return {"int" if -INT32 <= value < INT32 else "long", "number"}
    return next((names for kind, names in _NAMES if isinstance(value, kind)), set())


_NAMES: tuple[tuple[Any, set[str]], ...] = (
    (type(None), {"null"}),
    (bool, {"bool"}),
    (Int64, {"long", "number"}),
    (float, {"double", "number"}),
    (Decimal128, {"decimal", "number"}),
    (str, {"string"}),
    ((bytes, Binary, uuid.UUID), {"binData"}),
    (dt.datetime, {"date"}),
    (ObjectId, {"objectId"}),
    (Mapping, {"object"}),
    (list, {"array"}),
)
