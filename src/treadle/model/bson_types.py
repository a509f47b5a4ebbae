"""Python values and their BSON forms, where PyMongo's own encoder does not know them.

`Decimal` is stored as Decimal128, an enum as its value, a `date` as midnight
UTC, a set as an array, a `timedelta` as seconds, a `time` as ISO text. A
`datetime` is cut to milliseconds and read as UTC; a naive one is taken to be
UTC. Everything that loses something on the way notes it in `altered`, so that
a caller can be shown what was really stored.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from bson import ObjectId
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.decimal128 import Decimal128
from pydantic import GetCoreSchemaHandler, TypeAdapter
from pydantic_core import core_schema

from treadle.errors import UsageError
from treadle.model.lazy_id import LazyObjectId, made

# A stored document, and the filters and updates of MongoDB's language.
Raw: TypeAlias = dict[str, Any]
Filter: TypeAlias = Mapping[str, Any]
Update: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]

UTC = dt.UTC
# Treadle's own state in a document; nothing else is ever added to one.
RESERVED = "_treadle"

# Every read and write of Treadle goes through these options, so that dates are
# aware and UUIDs are standard whatever the client was opened with.
CODEC_OPTIONS: CodecOptions[dict[str, Any]] = CodecOptions(
    tz_aware=True,
    tzinfo=UTC,
    uuid_representation=UuidRepresentation.STANDARD,
    # A date beyond Python's years, which any client may store, must not hide the other documents.
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)
# The same without the time zone, for reads of many dates.
NAIVE_CODEC_OPTIONS: CodecOptions[dict[str, Any]] = CODEC_OPTIONS.with_options(tz_aware=False, tzinfo=None)


class _ObjectIdSchema:
    """How Pydantic treats an ObjectId: itself, or its 24 hexadecimal digits."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        exact = core_schema.is_instance_schema(ObjectId)
        from_text = core_schema.chain_schema(
            [
                core_schema.str_schema(pattern="^[0-9a-fA-F]{24}$"),
                core_schema.no_info_plain_validator_function(ObjectId),
            ]
        )
        return core_schema.json_or_python_schema(
            json_schema=from_text,
            python_schema=core_schema.lax_or_strict_schema(
                lax_schema=core_schema.union_schema(
                    [exact, from_text],
                    custom_error_type="object_id",
                    custom_error_message="Input should be an ObjectId or its 24 hexadecimal digits",
                ),
                strict_schema=exact,
            ),
            serialization=core_schema.to_string_ser_schema(when_used="json"),
        )


Id = Annotated[ObjectId, _ObjectIdSchema]
"""An ObjectId on a model; text of 24 hexadecimal digits is accepted."""


def date_to_bson(value: dt.datetime, altered: list[Any]) -> dt.datetime:
    """The same instant in UTC at millisecond precision."""
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


def decimal_to_bson(value: decimal.Decimal | float) -> Decimal128:
    """The exact Decimal128; more than 34 significant digits are refused."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # `price: Decimal = 0`: Pydantic does not validate defaults. A float is read as it is written.
        value = decimal.Decimal(str(value))
    try:
        return Decimal128(value)
    except (decimal.Inexact, decimal.Overflow, decimal.InvalidOperation, ValueError) as error:
        raise UsageError(
            f"the Decimal {value} does not fit MongoDB's Decimal128 (34 significant digits, "
            "exponents from -6176 to 6111); round it before storing it",
            code="decimal-too-long",
        ) from error


def set_to_bson(value: Any, item: Callable[[Any], Any]) -> list[Any]:
    """The members as a list, in sorted order where they have one."""
    members = [item(member) for member in value]
    try:
        return sorted(members)
    except TypeError:
        return members


def _set_to_bson(value: Any, altered: list[Any]) -> list[Any]:
    return set_to_bson(value, lambda item: to_bson(item, altered))


def _map_to_bson(value: Mapping[Any, Any], altered: list[Any]) -> dict[str, Any]:
    return {
        key_to_bson(key): item if type(item) in _AS_IT_IS else to_bson(item, altered)
        for key, item in value.items()
    }


def key_to_bson(key: Any) -> str:
    """A key of a stored map; BSON keys are text without NUL."""
    if type(key) is str and "\0" not in key:
        return key
    if isinstance(key, enum.Enum):
        key = key.value
    if not isinstance(key, str):
        if isinstance(key, bool) or not isinstance(key, (int, uuid.UUID, dt.date, decimal.Decimal, ObjectId)):
            raise UsageError(
                f"a key of type {type(key).__name__} cannot be stored; BSON keys are text",
                code="key-not-storable",
            )
        return key.isoformat() if isinstance(key, dt.date) else str(key)
    if "\0" in key:
        raise UsageError(
            f"the key {key!r} contains NUL, which BSON keys cannot hold; remove it",
            code="key-not-storable",
        )
    return key


Converter = Callable[[Any, list[Any]], Any]

# What to_bson does with a value, by its exact type; types that are not here
# are looked up along their base classes once and then remembered.
_CONVERTERS: dict[type, Converter] = {
    decimal.Decimal: lambda value, altered: decimal_to_bson(value),
    dt.datetime: date_to_bson,
    dt.date: lambda value, altered: dt.datetime(value.year, value.month, value.day, tzinfo=UTC),
    dt.time: lambda value, altered: value.isoformat(),
    dt.timedelta: lambda value, altered: value.total_seconds(),
    enum.Enum: lambda value, altered: to_bson(value.value, altered),
    **dict.fromkeys((set, frozenset), _set_to_bson),
    **dict.fromkeys((list, tuple), lambda value, altered: [to_bson(item, altered) for item in value]),
    dict: _map_to_bson,
    Mapping: _map_to_bson,
    LazyObjectId: lambda value, altered: made(value),
}
_AS_IT_IS: frozenset[type] = frozenset(
    {str, int, float, bool, bytes, type(None), ObjectId, uuid.UUID, Decimal128}
)


def convert_by(kind: type, converter: Converter) -> None:
    """Let `to_bson` convert values of a type in this way."""
    _CONVERTERS[kind] = converter


def to_bson(value: Any, altered: list[Any]) -> Any:
    """What to store for any Python value; BSON's own types come back as they are."""
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    converter = _CONVERTERS.get(kind)
    if converter is None:
        converter = _converter_by_base(kind)
    return converter(value, altered)


def _unchanged(value: Any, altered: list[Any]) -> Any:
    return value


def _converter_by_base(kind: type) -> Converter:
    # An enum that is also a str or an int is stored by its value, so that the
    # driver sees a plain type.
    bases = (enum.Enum, *kind.__mro__[1:]) if issubclass(kind, enum.Enum) else kind.__mro__[1:]
    for base in bases:
        if base in _CONVERTERS:
            return _CONVERTERS[base]
        if base in _AS_IT_IS:
            return _unchanged
    if issubclass(kind, Mapping):
        return _map_to_bson
    if dataclasses.is_dataclass(kind):
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        return lambda value, altered: to_bson(adapter.dump_python(value), altered)
    return _unchanged


def from_bson(value: Any) -> Any:
    """Undo Decimal128 at any depth; the rest is left for Pydantic to judge."""
    kind = type(value)
    if kind is Decimal128:
        return value.to_decimal()
    if kind is dict:
        for key, item in value.items():
            if type(item) in _DEEP:
                value[key] = from_bson(item)
    elif kind is list:
        for index, item in enumerate(value):
            if type(item) in _DEEP:
                value[index] = from_bson(item)
    return value


_DEEP = frozenset({Decimal128, dict, list})
