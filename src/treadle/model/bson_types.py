"""Python values and their BSON forms, where PyMongo's encoder does not know them.

`Decimal` is stored as Decimal128, an enum as its value, a `date` as midnight
UTC, a set as an array, a `timedelta` as seconds, a `time` as ISO text. A
`datetime` is cut to milliseconds and stored in UTC; a naive one is taken to be
UTC. A conversion that loses something notes the value in `altered`, so that
the caller can be shown what was stored.

What the driver cannot encode it refuses with an error that does not say where.
So a document is not checked beforehand; it is searched for such a value only
when the driver has refused it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import bson
from bson import ObjectId
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.decimal128 import Decimal128
from bson.errors import InvalidDocument
from pydantic import GetCoreSchemaHandler, GetPydanticSchema, TypeAdapter
from pydantic_core import core_schema
from pymongo.errors import DocumentTooLarge

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


DEPTH_MAX = 180  # the server's own limit for stored documents
SIZE_MAX_BYTES = 16 * 1024 * 1024
BATCH_SAFE_BYTES = 4 * 1024 * 1024
SAMPLES_MAX = 64

ENCODING_ERRORS = (InvalidDocument, OverflowError, UnicodeEncodeError, RecursionError, DocumentTooLarge)
_ALWAYS_ENCODABLE = frozenset({bool, float, type(None), ObjectId, bytes, dt.datetime, uuid.UUID, Decimal128})
# Operators that run code on the server.
CODE_OPERATORS = frozenset({"$where", "$function", "$accumulator"})


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


# -- values that callers send ---------------------------------------------------------------------


def clean(value: Any) -> Any:
    """Return the value as BSON; refuses operators that run code, and values that no driver can send."""
    try:
        converted = to_bson(value, [])
        # After the conversion, because only then everything is a plain dict or list.
        check_values(converted)
    except RecursionError:
        raise too_deep("value") from None
    return converted


def check_values(value: Any) -> None:
    """Refuse operators that run code, and values that no driver can send, in what was converted."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_key(key)
            check_values(item)
    elif isinstance(value, list):
        for item in value:
            check_values(item)
    else:
        refuse_unsendable(value)


def check_key(key: str) -> None:
    """Refuse a key that runs code on the server, or that no driver can send."""
    if key in CODE_OPERATORS:
        raise UsageError(
            f"{key} runs code on the server and is not accepted; write the condition with ordinary operators",
            code="operator-forbidden",
        )
    if not key.isascii():
        refuse_unsendable(key)


# -- what cannot be stored -------------------------------------------------------------------------


def not_storable(error: Exception, model: str, documents: Sequence[Mapping[str, Any]] = ()) -> UsageError:
    """Return the error that says why the driver could not encode documents, and names the first such."""
    general = UsageError(f"this cannot be stored in {model}: {error}", code="value-not-storable")
    return next(filter(None, (_refusal(document, model) for document in documents)), general)


def require_encodable(document: Mapping[str, Any], model: str) -> None:
    """Refuse a document that the driver could not encode, or that is too large."""
    if (refusal := _refusal(document, model)) is not None:
        raise refusal


def _refusal(document: Mapping[str, Any], model: str) -> UsageError | None:
    try:
        size = len(bson.encode(document, codec_options=CODEC_OPTIONS))
    except RecursionError:
        return too_deep(model)
    except (*ENCODING_ERRORS, ValueError, TypeError):
        path, reason = _find(document, "", 0) or ("document", "it cannot be encoded")
        return UsageError(f"{model}.{path} cannot be stored: {reason}", code="value-not-storable")
    if size > SIZE_MAX_BYTES:
        return UsageError(
            f"this {model} takes {size:,} bytes, and MongoDB stores at most {SIZE_MAX_BYTES:,} in one "
            "document; keep large or growing parts in documents of their own",
            code="document-too-large",
        )
    return None


def _find(value: Any, path: str, depth: int) -> tuple[str, str] | None:
    """Return the path of the first value that BSON cannot hold, and why it cannot."""
    if depth > DEPTH_MAX:
        return path[:60], "it is nested too deeply"
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        reason = _reason(value)
        return (path, reason) if reason else None
    for key, item in items:
        if isinstance(value, Mapping) and (not isinstance(key, str) or "\0" in key):
            return f"{path}.{key!r}".lstrip("."), "a key must be text without NUL"
        if culprit := _find(item, f"{path}.{key}".lstrip("."), depth + 1):
            return culprit
    return None


def _reason(value: Any) -> str | None:
    """Return why BSON cannot hold a single value; None where it can."""
    kind = type(value)
    if kind in _ALWAYS_ENCODABLE or (kind is str and value.isascii()):
        return None
    if isinstance(value, int):
        fits = -(2**63) <= value < 2**63
        return None if fits else "the integer needs more than the 64 bits that BSON has; use Decimal or str"
    try:
        bson.encode({"": value}, codec_options=CODEC_OPTIONS)
    except UnicodeEncodeError:
        return "the text holds a lone surrogate, which is not valid Unicode"
    except (*ENCODING_ERRORS, ValueError, TypeError):
        return f"BSON has no form for {kind.__name__}"
    return None


def refuse_unsendable(value: object) -> None:
    """Refuse a single value, in BSON's types, that the driver cannot encode."""
    if (reason := _reason(value)) is not None:
        raise UsageError(
            f"this cannot be stored, or sent as a condition: {reason}", code="value-not-storable"
        )


def too_deep(model: str) -> UsageError:
    """Return the error of a document that is nested deeper than the server takes."""
    return UsageError(
        f"this {model} is nested more than {DEPTH_MAX} levels deep, which MongoDB refuses; "
        "store references instead of nesting",
        code="document-too-deep",
    )


def check_batch(documents: Sequence[Mapping[str, Any]], model: str) -> None:
    """Refuse documents of which one cannot be stored, before any is.

    The driver encodes and sends batch by batch. A small bulk is one batch, so
    its own check comes before anything is sent; only a large one is encoded
    twice.
    """
    step = max(1, len(documents) // SAMPLES_MAX)
    try:
        samples = documents[::step]
        # Several in one call, which is faster and counts a few bytes more.
        parts = (samples[at : at + 16] for at in range(0, len(samples), 16))
        size = sum(len(bson.encode({"": part}, codec_options=CODEC_OPTIONS)) for part in parts)
        if size / len(samples) * len(documents) <= BATCH_SAFE_BYTES:
            return
        for document in documents:
            if len(bson.encode(document, codec_options=CODEC_OPTIONS)) > SIZE_MAX_BYTES:
                raise not_storable(DocumentTooLarge(""), model, [document])
    except ENCODING_ERRORS as error:
        raise not_storable(error, model, documents) from error
