"""Python values and their BSON forms, where PyMongo's encoder does not know them.

`Decimal` is stored as Decimal128, an enum as its value, a `date` as midnight
UTC, a set as an array, a `timedelta` as seconds, a `time` as ISO text. A
`datetime` is cut to milliseconds and stored in UTC; a naive one is taken to be
UTC. A conversion that loses something notes the value in `altered`, so that
the caller can be shown what was stored.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from bson import ObjectId
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.decimal128 import Decimal128
from pydantic import GetCoreSchemaHandler, GetPydanticSchema, TypeAdapter
from pydantic_core import core_schema

from treadle.errors import UsageError
from treadle.model.lazy_id import LazyObjectId, materialize

# A stored document, and the filters and updates of MongoDB's language.
Raw: TypeAlias = dict[str, Any]
Filter: TypeAlias = Mapping[str, Any]
Update: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]
# Values of which a conversion lost something.
Altered: TypeAlias = list[Any]
Converter: TypeAlias = Callable[[Any, Altered], Any]

UTC = dt.UTC
# The sub-document for Treadle's own state; nothing else is ever added to a document.
RESERVED = "_treadle"

# Every read and write of Treadle uses these options, so that dates are aware and
# UUIDs are standard, however the client was opened.
CODEC_OPTIONS: CodecOptions[Raw] = CodecOptions(
    tz_aware=True,
    tzinfo=UTC,
    uuid_representation=UuidRepresentation.STANDARD,
    # A date beyond Python's years, which any client may store, must not hide the other documents.
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)
# The same without the time zone, for reads of many dates.
NAIVE_CODEC_OPTIONS: CodecOptions[Raw] = CODEC_OPTIONS.with_options(tz_aware=False, tzinfo=None)


def _object_id_schema(source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
    exact = core_schema.is_instance_schema(ObjectId)
    digits = core_schema.str_schema(pattern="^[0-9a-fA-F]{24}$")
    from_text = core_schema.no_info_after_validator_function(ObjectId, digits)
    lax = core_schema.union_schema(
        [exact, from_text],
        custom_error_type="object_id",
        custom_error_message="Input should be an ObjectId or its 24 hexadecimal digits",
    )
    return core_schema.json_or_python_schema(
        json_schema=from_text,
        python_schema=core_schema.lax_or_strict_schema(lax_schema=lax, strict_schema=exact),
        serialization=core_schema.to_string_ser_schema(when_used="json"),
    )


Id = Annotated[ObjectId, GetPydanticSchema(_object_id_schema)]
"""An ObjectId on a model; text of 24 hexadecimal digits is accepted."""


def date_to_bson(value: dt.datetime, altered: Altered) -> dt.datetime:
    """Return the same instant in UTC, cut to milliseconds."""
    offset = value.utcoffset()
    if offset is None:
        altered.append(value)
        value = value.replace(tzinfo=UTC)
    elif offset:
        altered.append(value)
        try:
            value = value.astimezone(UTC)
        except OverflowError:
            raise UsageError(
                f"the date {value} lies outside the years 1 to 9999 in UTC and cannot be stored",
                code="value-not-storable",
            ) from None
    surplus = value.microsecond % 1000
    if surplus:
        altered.append(value)
        value = value.replace(microsecond=value.microsecond - surplus)
    return value


def as_moment(moment: object) -> dt.datetime:
    """Return a date that a caller passed in UTC, cut to milliseconds."""
    if not isinstance(moment, dt.datetime):
        raise UsageError(f"{moment!r} is not a datetime", code="moment-invalid")
    return date_to_bson(moment, []).astimezone(UTC)


def decimal_to_bson(value: decimal.Decimal | float) -> Decimal128:
    """Return the exact Decimal128; more than 34 significant digits are refused."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # `price: Decimal = 0`: Pydantic does not validate defaults. A float counts as it is written.
        value = decimal.Decimal(str(value))
    try:
        return Decimal128(value)
    except (decimal.Inexact, decimal.Overflow, decimal.InvalidOperation, ValueError) as error:
        raise UsageError(
            f"the Decimal {value} does not fit MongoDB's Decimal128 (34 significant digits, "
            "exponents from -6176 to 6111); round it before storing it",
            code="decimal-too-long",
        ) from error


def set_to_bson(value: Iterable[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """Return the converted members, in sorted order where they have one."""
    members = [convert(member) for member in value]
    try:
        return sorted(members)
    except TypeError:
        return members


def key_to_bson(key: object) -> str:
    """Return the text that a key of a map is stored as."""
    text = key if type(key) is str else _key_text(key)
    if "\0" in text:
        reason = f"the key {text!r} contains NUL, which BSON keys cannot hold; remove it"
        raise UsageError(reason, code="key-not-storable")
    return text


def _key_text(key: object) -> str:
    key = key.value if isinstance(key, enum.Enum) else key
    storable = (str, int, uuid.UUID, dt.date, decimal.Decimal, ObjectId)
    if isinstance(key, bool) or not isinstance(key, storable):
        reason = f"a key of type {type(key).__name__} cannot be stored; BSON keys are text"
        raise UsageError(reason, code="key-not-storable")
    return key.isoformat() if isinstance(key, dt.date) else str(key)


def _map_to_bson(value: Mapping[Any, Any], altered: Altered) -> Raw:
    return {
        key_to_bson(key): item if type(item) in _BSON_TYPES else to_bson(item, altered)
        for key, item in value.items()
    }


# The conversion by exact type. Other types are looked up along their base classes.
_CONVERTERS: dict[type, Converter] = {
    decimal.Decimal: lambda value, altered: decimal_to_bson(value),
    dt.datetime: date_to_bson,
    dt.date: lambda value, altered: dt.datetime(value.year, value.month, value.day, tzinfo=UTC),
    dt.time: lambda value, altered: value.isoformat(),
    dt.timedelta: lambda value, altered: value.total_seconds(),
    enum.Enum: lambda value, altered: to_bson(value.value, altered),
    **dict.fromkeys(
        (set, frozenset), lambda value, altered: set_to_bson(value, lambda item: to_bson(item, altered))
    ),
    **dict.fromkeys((list, tuple), lambda value, altered: [to_bson(item, altered) for item in value]),
    **dict.fromkeys((dict, Mapping), _map_to_bson),
    LazyObjectId: lambda value, altered: materialize(value),
}
_BSON_TYPES: frozenset[type] = frozenset(
    {str, int, float, bool, bytes, type(None), ObjectId, uuid.UUID, Decimal128}
)


def register_converter(kind: type, converter: Converter) -> None:
    """Let `to_bson` convert values of a type, and of its subclasses, in this way."""
    _CONVERTERS[kind] = converter


def to_bson(value: Any, altered: Altered) -> Any:
    """Return what to store for any Python value; values of BSON's own types are returned as they are."""
    kind = type(value)
    if kind in _BSON_TYPES:
        return value
    converter = _CONVERTERS.get(kind)
    if converter is None:
        converter = _converter_by_base(kind)
    return converter(value, altered)


def _converter_by_base(kind: type) -> Converter:
    # An enum that is also a str or an int is stored as its value, a plain str or int.
    bases = (enum.Enum, *kind.__mro__[1:]) if issubclass(kind, enum.Enum) else kind.__mro__[1:]
    for base in bases:
        if base in _CONVERTERS:
            return _CONVERTERS[base]
        if base in _BSON_TYPES:
            return _unchanged
    if issubclass(kind, Mapping):
        return _map_to_bson
    if dataclasses.is_dataclass(kind):
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        return lambda value, altered: to_bson(adapter.dump_python(value), altered)
    return _unchanged


def _unchanged(value: Any, altered: Altered) -> Any:
    return value


def from_bson(value: Any) -> Any:
    """Turn Decimal128 into Decimal at any depth, in place; everything else is left for Pydantic to judge."""
    kind = type(value)
    if kind is Decimal128:
        return value.to_decimal()
    if kind is dict or kind is list:
        for key, item in value.items() if kind is dict else enumerate(value):
            if type(item) in _CONVERTED:
                value[key] = from_bson(item)
    return value


_CONVERTED = frozenset({Decimal128, dict, list})
