"""Models to stored documents: code that is generated once per model.

A generic walk costs more than the network for small documents.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter

from treadle.model.bson_types import (
    RESERVED,
    UTC,
    date_to_bson,
    decimal_to_bson,
    key_to_bson,
    set_to_bson,
    to_bson,
)
from treadle.model.indexed import Indexed
from treadle.model.keywords import stamps_of
from treadle.model.lazy_id import LazyObjectId, made
from treadle.model.pairs import is_paired, pair
from treadle.model.shape import FOR_JSON_ONLY, Shape
from treadle.model.stored import Codec, Dump, StoredField


def _whole_model_serializer(model: type[BaseModel]) -> Dump:
    serializer = model.__pydantic_serializer__
    stamps = stamps_of(model)

    def dump(value: Any, altered: list[Any]) -> Any:
        document = to_bson(serializer.to_python(value, by_alias=True), altered)
        return {**document, **stamps} if stamps else document

    return dump


def compile_dump(codec: Codec[Any], *, with_id: bool = True) -> Dump:
    """What makes the document to store of a model; without its id, that is not made either."""
    decorators = codec.model.__pydantic_decorators__
    if decorators.model_serializers:
        codec.bounded_depth = False
        return _whole_model_serializer(codec.model)
    fields = codec.fields if with_id else tuple(each for each in codec.fields if each.stored != "_id")
    return _dict_display(codec, fields, _with_serializers(codec.model))


def _with_serializers(model: type[BaseModel]) -> set[str]:
    """The fields whose stored form is their own serializer's."""
    serializers = [each.info for each in model.__pydantic_decorators__.field_serializers.values()]
    return {name for each in serializers if each.when_used not in FOR_JSON_ONLY for name in each.fields}


def field_encoder(codec: Codec[Any], field: StoredField) -> Dump | None:
    """Return what makes the stored form of a validated value of one field, None included.

    None where a serializer of the whole model decides what is stored.
    """
    model = codec.model
    if model.__pydantic_decorators__.model_serializers:
        return None
    if field.name not in _with_serializers(model):
        return item_dump(codec, field.shape)
    encode_in_model = _custom_dump(model, field.name)

    def encode(value: Any, altered: list[Any]) -> Any:
        # A serializer that reads other fields sees their defaults.
        holder = model.model_construct()
        holder.__dict__[field.name] = value
        return encode_in_model(holder, altered)

    return encode


def _dict_display(codec: Codec[Any], fields: Sequence[StoredField], custom: set[str]) -> Dump:
    """Generate one dict display that reads the fields out of `__dict__`."""
    names: dict[str, Any] = {"to_bson": to_bson, "utc": UTC, "date_to_bson": date_to_bson}
    names |= {"lazy": LazyObjectId, "made": made}
    parts = []
    prelude: list[str] = []
    stamps = stamps_of(codec.model)
    for number, field in enumerate(fields):
        value = f"d[{field.name!r}]"
        if field.stored in stamps:
            # The kind or the version; a model may show it, but not choose it.
            names[f"s{number}"] = stamps[field.stored]
            expression = f"(s{number} if {value} == s{number} else (altered.append({value}), s{number})[1])"
        elif field.name in custom:
            names[f"c{number}"] = _custom_dump(codec.model, field.name)
            codec.bounded_depth = False
            expression = f"c{number}(m, altered)"
        elif field.info.default_factory is LazyObjectId:
            expression = f"(v if type(v := {value}) is not lazy else made(v))"
        elif field.shape.kind == "scalar" and field.shape.python is dt.datetime:
            exact = "v.tzinfo is utc and not v.microsecond % 1000"
            expression = f"(v if (v := {value}) is None or {exact} else date_to_bson(v, altered))"
        else:
            converter = _dump_converter(codec, field.shape)
            nested = codec.codec_of(field.shape.python) if field.shape.kind == "model" else None
            if converter is None:
                expression = value
            elif nested is not None and nested.ready:
                # The ordinary case without a call more than needed: an instance of just that model.
                names |= {f"c{number}": converter, f"n{number}": nested._dump, f"k{number}": nested.model}
                local = f"v{number}"
                prelude.append(f"    {local} = {value}")
                exact = f"(n{number} if {local}.__class__ is k{number} else c{number})({local}, altered)"
                expression = f"(None if {local} is None else {exact})" if field.shape.optional else exact
            else:
                names[f"c{number}"] = converter
                guard = f"None if (v := {value}) is None else " if field.shape.optional else ""
                argument = "v" if field.shape.optional else value
                expression = f"({guard}c{number}({argument}, altered))"
        parts.append(f"{field.stored!r}: {expression}")
    undeclared = {name: value for name, value in stamps.items() if name not in codec.by_stored}
    parts[1:1] = [f"{name!r}: {value!r}" for name, value in undeclared.items()]
    body = "{" + ", ".join(parts) + "}"
    lines = ["def dump(m, altered):", "    d = m.__dict__", *prelude, f"    r = {body}"]
    if codec.model.model_config.get("extra") == "allow":
        codec.bounded_depth = False
        lines += ["    for k, v in to_bson(m.__pydantic_extra__ or {}, altered).items(): r.setdefault(k, v)"]
        lines += [f"    r.pop({RESERVED!r}, None)"]
        lines += [f"    r[{name!r}] = {value!r}" for name, value in undeclared.items()]
    if codec.model.__pydantic_root_model__:
        lines.append("    r = r['root']")
    for field in fields:
        if omitted_when_none(field):
            lines.append(f"    if r[{field.stored!r}] is None: del r[{field.stored!r}]")
    lines.append("    return r")
    exec("\n".join(lines), names)
    compiled: Dump = names["dump"]
    return compiled


def omitted_when_none(field: StoredField) -> bool:
    """Whether None is stored as absence: under a unique index nulls would collide."""
    return (
        field.shape.optional
        and field.info.default is None
        and any(isinstance(mark, Indexed) and mark.unique for mark in field.shape.metadata)
    )


def _custom_dump(model: type[BaseModel], name: str) -> Dump:
    serializer = model.__pydantic_serializer__

    def dump(value: Any, altered: list[Any]) -> Any:
        # A field that is excluded from JSON answers is stored all the same, as it is.
        serialized = serializer.to_python(value, include={name}, by_alias=False)
        return to_bson(serialized.get(name, value.__dict__[name]), altered)

    return dump


def _adapter_dump(shape: Shape) -> Dump:
    """What Pydantic makes of a value whose type only Pydantic knows."""
    annotation: Any = Annotated[shape.python, *shape.metadata] if shape.metadata else shape.python
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    return lambda value, altered: to_bson(adapter.dump_python(value), altered)


def _dump_converter(codec: Codec[Any], shape: Shape) -> Dump | None:
    """What turns a value of this shape into BSON; None where it is BSON already."""
    if shape.kind == "scalar":
        return _scalar_dump(shape.python)
    if shape.kind == "model":
        return _nested_dump(codec, shape.python)
    if shape.kind == "list" or (shape.kind == "tuple" and shape.python is Ellipsis):
        return _array_dump(codec, shape)
    if shape.kind in ("set", "frozenset"):
        inner = item_dump(codec, shape.items[0])
        return lambda value, altered: set_to_bson(value, lambda item: inner(item, altered))
    if shape.kind == "tuple":
        inners = [item_dump(codec, item) for item in shape.items]
        return lambda value, altered: [
            inner(item, altered) for inner, item in zip(inners, value, strict=True)
        ]
    if shape.kind == "map":
        inner = item_dump(codec, shape.items[1])
        if is_paired(shape):
            return lambda value, altered: [
                pair(key, item, inner(item, altered), altered) for key, item in value.items()
            ]
        return lambda value, altered: {key_to_bson(key): inner(item, altered) for key, item in value.items()}
    if shape.kind == "literal":
        return to_bson
    if shape.kind == "custom":
        codec.bounded_depth = False
        return _adapter_dump(shape)
    if shape.kind != "enum":
        codec.bounded_depth = codec.bounded_depth and shape.kind == "union" and not _is_deep(codec, shape)
    return to_bson


def _is_deep(codec: Codec[Any], shape: Shape) -> bool:
    for item in shape.items:
        _dump_converter(codec, item)
    return not codec.bounded_depth


def _scalar_dump(python: type) -> Dump | None:
    if python is decimal.Decimal:
        return lambda value, altered: decimal_to_bson(value)
    if python is dt.datetime:
        return date_to_bson
    # Subclasses of str and int may be assigned where the base is declared, and
    # the driver encodes those as they are.
    return to_bson if python in (dt.date, dt.time, dt.timedelta) else None


def item_dump(codec: Codec[Any], shape: Shape) -> Dump:
    """What turns a value of this shape, None included, into BSON."""
    converter = _dump_converter(codec, shape)
    if converter is None:
        return lambda value, altered: value
    if not shape.optional:
        return converter
    return lambda value, altered: None if value is None else converter(value, altered)


def _array_dump(codec: Codec[Any], shape: Shape) -> Dump | None:
    item = shape.items[0]
    if _dump_converter(codec, item) is None:
        return None if shape.kind == "list" and shape.python is list else lambda value, altered: list(value)
    inner = item_dump(codec, item)
    return lambda value, altered: [inner(element, altered) for element in value]


def _nested_dump(codec: Codec[Any], model: type[BaseModel]) -> Dump:
    nested = codec.codec_of(model)
    if not nested.ready:
        # A model that contains itself: its depth is the data's, not the declaration's.
        codec.bounded_depth = False
        return lambda value, altered: nested._dump(value, altered)  # noqa: PLW0108 (bound later)
    codec.bounded_depth = codec.bounded_depth and nested.bounded_depth
    inner = nested._dump

    def dump(value: Any, altered: list[Any]) -> Any:
        if value.__class__ is not model:
            # Of a subclass only the declared part is stored, as Pydantic serializes it; say so.
            altered.append(value)
        return inner(value, altered)

    return dump
