"""The functions that make stored documents of models, generated once per model.

A generic walk over a small document would cost more than the network does. A
value has the same stored form in every position: `field_encoder` and
`encoder_of` return the function that an insert uses, for updates and filters.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError

from treadle.errors import UsageError
from treadle.model.attributes import is_paired, pair
from treadle.model.bson_types import (
    RESERVED,
    UTC,
    Altered,
    date_to_bson,
    decimal_to_bson,
    key_to_bson,
    set_to_bson,
    to_bson,
)
from treadle.model.document import Indexed
from treadle.model.keywords import stamps_of
from treadle.model.lazy_id import LazyObjectId, materialize
from treadle.model.shape import FOR_JSON_ONLY, Annotation, Kind, ModelCodec, Shape, StoredField

# From a validated value to what is stored; notes in the list what it had to change.
Encoder: TypeAlias = Callable[[Any, Altered], Any]


def compile_dump(codec: ModelCodec, *, with_id: bool = True) -> Encoder:
    """Return what makes the document to store of a model; without the id, a generated one is not made."""
    if has_model_serializer(codec.model):
        return _model_encoder(codec.model)
    return _dict_display(codec, [each for each in codec.fields if with_id or each.stored != "_id"])


def field_encoder(codec: ModelCodec, field: StoredField) -> Encoder | None:
    """Return what makes the stored form of a validated value of one field, None included.

    None where a serializer of the whole model decides what is stored.
    """
    model = codec.model
    if has_model_serializer(model):
        return None
    if field.name not in own_serializers(model):
        return encoder_of(codec, field.shape)
    encode_in_model = _method_encoder(model, field.name)

    def encode(value: Any, altered: Altered) -> Any:
        # A serializer that reads other fields sees their defaults.
        holder = model.model_construct()
        holder.__dict__[field.name] = value
        return encode_in_model(holder, altered)

    return encode


def encoder_of(codec: ModelCodec, shape: Shape) -> Encoder:
    """Return what makes the stored form of a validated value of a shape, None included."""
    encode = _encoder(codec, shape)
    if encode is None:
        return unchanged
    if not shape.optional:
        return encode
    return lambda value, altered: None if value is None else encode(value, altered)


def type_adapter(annotation: Annotation, model: type[BaseModel]) -> TypeAdapter[Any]:
    """Return Pydantic's adapter of a type, configured like the model where the type may be."""
    try:
        return TypeAdapter(annotation, config=model.model_config)
    except PydanticUserError:
        # A model or a dataclass has a configuration of its own.
        return TypeAdapter(annotation)


def omitted_when_none(field: StoredField) -> bool:
    """Whether None is stored as absence: under a unique index nulls would collide."""
    return (
        field.shape.optional
        and field.info.default is None
        and any(isinstance(mark, Indexed) and mark.unique for mark in field.shape.metadata)
    )


def has_model_serializer(model: type[BaseModel]) -> bool:
    """Whether a serializer of the whole model decides what is stored."""
    return bool(model.__pydantic_decorators__.model_serializers)


def own_serializers(model: type[BaseModel]) -> set[str]:
    """Return the fields whose stored form is made by a serializer method."""
    serializers = [each.info for each in model.__pydantic_decorators__.field_serializers.values()]
    return {name for each in serializers if each.when_used not in FOR_JSON_ONLY for name in each.fields}


def _serializing(where: str, to_python: Callable[..., Any], **options: Any) -> Encoder:
    """Return an encoder that lets Pydantic serialize, and reports what the author's functions raise."""

    def encode(value: Any, altered: Altered) -> Any:
        try:
            serialized = to_python(value, **options)
        except PydanticSerializationError as error:
            text = f"the serializer of {where} failed: {error}"
            raise UsageError(text, code="value-not-storable") from error
        return to_bson(serialized, altered)

    return encode


def _model_encoder(model: type[BaseModel]) -> Encoder:
    encode = _serializing(model.__name__, model.__pydantic_serializer__.to_python, by_alias=True)
    stamps = stamps_of(model)
    return (lambda value, altered: {**encode(value, altered), **stamps}) if stamps else encode


def _method_encoder(model: type[BaseModel], name: str) -> Encoder:
    """Return what makes the stored form of a field with a serializer method, which takes the whole model."""
    where, options = f"{model.__name__}.{name}", {"include": {name}, "by_alias": False, "round_trip": True}
    encode = _serializing(where, model.__pydantic_serializer__.to_python, **options)

    def encode_field(value: BaseModel, altered: Altered) -> Any:
        serialized = encode(value, altered)
        # A field that is excluded from JSON answers is stored all the same, as it is.
        return serialized[name] if name in serialized else to_bson(value.__dict__[name], altered)

    return encode_field


def _custom(codec: ModelCodec, shape: Shape) -> Encoder:
    """A type that only Pydantic can serialize."""
    annotation: Annotation = Annotated[shape.python, *shape.metadata] if shape.metadata else shape.python
    return _serializing(shape.name, type_adapter(annotation, codec.model).dump_python, round_trip=True)


def _encoder(codec: ModelCodec, shape: Shape) -> Encoder | None:
    """Return what makes the stored form of a value other than None; None where it is stored as it is."""
    make = _ENCODERS.get(shape.kind)
    return to_bson if make is None else make(codec, shape)


def unchanged(value: Any, altered: Altered) -> Any:
    """Encode a value that is stored as it is."""
    return value


def _nested(codec: ModelCodec, shape: Shape) -> Encoder:
    nested = codec.codec_of(shape.python)
    if nested.ready:
        return nested._dump
    # A model that contains itself: its function is not generated yet.
    return lambda value, altered: nested._dump(value, altered)  # noqa: PLW0108


def _array(codec: ModelCodec, shape: Shape) -> Encoder | None:
    encode = encoder_of(codec, shape.items[0])
    if encode is unchanged:
        return None if shape.python is list else lambda value, altered: list(value)
    return lambda value, altered: [encode(each, altered) for each in value]


def _tuple(codec: ModelCodec, shape: Shape) -> Encoder | None:
    if shape.python is Ellipsis:
        return _array(codec, shape)
    encoders = [encoder_of(codec, item) for item in shape.items]
    return lambda value, altered: [
        encode(each, altered) for encode, each in zip(encoders, value, strict=True)
    ]


def _set(codec: ModelCodec, shape: Shape) -> Encoder:
    encode = encoder_of(codec, shape.items[0])
    return lambda value, altered: set_to_bson(value, lambda each: encode(each, altered))


def _map(codec: ModelCodec, shape: Shape) -> Encoder:
    encode = encoder_of(codec, shape.items[1])
    if is_paired(shape):
        return lambda value, altered: [
            pair(key, each, encode(each, altered), altered) for key, each in value.items()
        ]
    return lambda value, altered: {key_to_bson(key): encode(each, altered) for key, each in value.items()}


# Subclasses of str and int may be assigned where the base is declared; the driver encodes those.
_SCALARS: dict[type, Encoder] = {
    decimal.Decimal: lambda value, altered: decimal_to_bson(value),
    dt.datetime: date_to_bson,
    **dict.fromkeys((dt.date, dt.time, dt.timedelta), to_bson),
}
_ENCODERS: dict[Kind, Callable[[ModelCodec, Shape], Encoder | None]] = {
    "scalar": lambda codec, shape: _SCALARS.get(shape.python),
    "model": _nested, "list": _array, "tuple": _tuple, "set": _set, "frozenset": _set, "map": _map,
    "custom": _custom,
}  # fmt: skip


def _dict_display(codec: ModelCodec, fields: Sequence[StoredField]) -> Encoder:
    """Generate a function that is one dict display, which reads the fields out of `__dict__`."""
    model, stamps = codec.model, stamps_of(codec.model)
    names: dict[str, Any] = {
        "to_bson": to_bson, "utc": UTC, "date_to_bson": date_to_bson, "model": model, "lazy": LazyObjectId,
        "materialize": materialize,
    }  # fmt: skip
    parts = [f"{field.stored!r}: {_expression(codec, field, names)}" for field in fields]
    undeclared = {name: value for name, value in stamps.items() if name not in codec.by_stored}
    parts[1:1] = [f"{name!r}: {value!r}" for name, value in undeclared.items()]
    lines = [
        "def dump(m, altered):",
        # Of a subclass only the declared part is stored, as Pydantic serializes it.
        "    if m.__class__ is not model: altered.append(m)",
        "    d = m.__dict__",
        f"    r = {{{', '.join(parts)}}}",
    ]
    if model.model_config.get("extra") == "allow":
        # Undeclared fields never take the place of declared ones, or of Treadle's own.
        lines += ["    for k, v in to_bson(m.__pydantic_extra__ or {}, altered).items(): r.setdefault(k, v)"]
        lines += [f"    r.pop({RESERVED!r}, None)"]
        lines += [f"    r[{name!r}] = {value!r}" for name, value in undeclared.items()]
    if model.__pydantic_root_model__:
        lines.append("    r = r['root']")
    omitted = [field.stored for field in fields if omitted_when_none(field)]
    lines += [f"    if r[{stored!r}] is None: del r[{stored!r}]" for stored in omitted]
    exec("\n".join([*lines, "    return r"]), names)
    dump: Encoder = names["dump"]
    return dump


def _expression(codec: ModelCodec, field: StoredField, names: dict[str, Any]) -> str:
    """Return the source of a field's stored value; adds to `names` what it refers to."""
    value, name = f"d[{field.name!r}]", f"n{len(names)}"
    stamps, shape = stamps_of(codec.model), field.shape
    if field.stored in stamps:
        # The kind or the version: a model may declare the field, but not choose the value.
        names[name] = stamps[field.stored]
        return f"({name} if {value} == {name} else (altered.append({value}), {name})[1])"
    if field.name in own_serializers(codec.model):
        names[name] = _method_encoder(codec.model, field.name)
        return f"{name}(m, altered)"
    if field.info.default_factory is LazyObjectId:
        return f"(v if type(v := {value}) is not lazy else materialize(v))"
    if shape.kind == "scalar" and shape.python is dt.datetime:
        is_exact = "v.tzinfo is utc and not v.microsecond % 1000"
        return f"(v if (v := {value}) is None or {is_exact} else date_to_bson(v, altered))"
    encode = _encoder(codec, shape)
    if encode is None:
        return value
    names[name] = encode
    if shape.optional:
        return f"(None if (v := {value}) is None else {name}(v, altered))"
    return f"{name}({value}, altered)"
