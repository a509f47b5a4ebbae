"""The meaning of a field's annotation, as one small tree that all of Treadle shares.

A `Shape` is what remains of an annotation when forward references, aliases,
`Annotated` and `Optional` are taken off. What could not be read back is
refused here, when the model is declared: types without a BSON form, and
unions of types that BSON stores alike.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime as dt
import decimal
import enum
import types
import typing
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

import typing_extensions
from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import BaseModel, Json, PlainSerializer, Secret, SecretBytes, SecretStr, WrapSerializer
from pydantic.fields import FieldInfo

from treadle.errors import DeclarationError

Kind = Literal[
    "scalar", "model", "list", "set", "frozenset", "tuple", "map", "union", "enum",
    "literal", "any", "custom",
]  # fmt: skip
# A class, or what `typing` makes of classes; Python has no common type for them.
Annotation: TypeAlias = Any
Metadata: TypeAlias = tuple[object, ...]

# The BSON types that values have once stored. Members of a union that share one
# come back as the member that Pydantic tries first.
_FORMS: dict[type, set[str]] = {
    str: {"string"}, int: {"int"}, float: {"double"}, bool: {"bool"}, bytes: {"bytes"},
    ObjectId: {"objectId"}, uuid.UUID: {"uuid"}, Decimal128: {"decimal"}, decimal.Decimal: {"decimal"},
    dt.datetime: {"date"}, dt.date: {"date"}, dt.time: {"string"},
    # Seconds, which other programs may store as a whole number.
    dt.timedelta: {"double", "int"},
}  # fmt: skip
_CONTAINER_FORMS: dict[str, set[str]] = {
    "list": {"array"}, "set": {"array"}, "frozenset": {"array"}, "tuple": {"array"}, "map": {"map"},
}  # fmt: skip
SCALARS: frozenset[type] = frozenset({*_FORMS, type(None)})
_ARRAYS: dict[object, Kind] = {
    list: "list", collections.abc.Sequence: "list", collections.abc.Iterable: "list",
    set: "set", collections.abc.Set: "set", collections.abc.MutableSet: "set",
    frozenset: "frozenset",
}  # fmt: skip
_MAPS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_KEYS = (str, int, uuid.UUID, dt.date, dt.datetime, decimal.Decimal, ObjectId)
# `when_used` of serializers that do not affect what is stored.
FOR_JSON_ONLY = ("json", "json-unless-none")
# Types that Pydantic knows and BSON does not.
_UNSTORABLE = (deque, Secret, SecretStr, SecretBytes, complex, range, type)
_ADDRESSES = ("pydantic.networks", "pydantic_core")
# Modules of classes that the driver encodes, or that Pydantic reads.
_KNOWN = ("bson", "re", "pydantic")


@dataclass(frozen=True)
class Shape:
    """One annotation, taken apart; `items` are the members, the elements, or the key and the value."""

    kind: Kind
    python: Annotation
    items: tuple[Shape, ...] = ()
    optional: bool = False
    metadata: Metadata = ()

    @property
    def name(self) -> str:
        """The name for messages."""
        return getattr(self.python, "__name__", self.kind)


ANY = Shape("any", Any)


@dataclass(frozen=True)
class StoredField:
    """One field of a model: its Python name, its stored name, its shape."""

    name: str
    stored: str
    shape: Shape
    info: FieldInfo


class ModelCodec:
    """The part of a codec that does not depend on the type of its model."""

    model: type[BaseModel]
    fields: tuple[StoredField, ...] = ()
    by_name: dict[str, StoredField]
    by_stored: dict[str, StoredField]
    # The maps that are stored as pairs, by stored path.
    pairs: dict[str, Shape]
    # The codecs of the models inside this one.
    codec_of: Callable[[type[BaseModel]], ModelCodec]
    # False while the codec is compiled, which a model that contains itself can observe.
    ready = False
    # Of the codec that a Store makes for a model with kinds or versions: the condition of the
    # model's own documents, the fields that only Treadle writes, the codecs of its kinds,
    # and whether stored documents may have other field names.
    scope: Mapping[str, Any] = MappingProxyType({})
    owned: frozenset[str] = frozenset()
    kinds: tuple[ModelCodec, ...] = ()
    has_former_names = False
    _dump: Callable[[Any, list[Any]], Any]
    _adapt: Callable[[Any], Any] | None = None


def field_shape(owner: str, name: str, field: FieldInfo) -> Shape:
    """Return the shape of one field of a model; `owner` and `name` are for messages."""
    marks = [*field.metadata, field] if field.discriminator else field.metadata
    return shape_of(field.annotation, tuple(marks), f"{owner}.{name}")


def shape_of(annotation: Annotation, metadata: Metadata = (), where: str = "value") -> Shape:
    """Return the shape of an annotation; raises DeclarationError for what cannot be stored and read back."""
    annotation, metadata = _unwrap(annotation, metadata)
    if kind := _serialized_kind(annotation, metadata):
        return Shape(kind, annotation, metadata=metadata)
    origin: Annotation = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _union(get_args(annotation), metadata, where)
    if origin is Literal:
        return Shape("literal", annotation, metadata=metadata, optional=None in get_args(annotation))
    if origin is not None:
        return _generic(annotation, origin, get_args(annotation), metadata, where)
    return _plain(annotation, metadata, where)


def _unwrap(annotation: Annotation, metadata: Metadata) -> tuple[Annotation, Metadata]:
    """Take `Annotated`, `NewType` and type aliases off an annotation."""
    while True:
        origin: Annotation = get_origin(annotation)
        if origin is typing.Annotated:
            annotation, *more = get_args(annotation)
            metadata = (*more, *metadata)
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif hasattr(annotation, "__value__") and not isinstance(annotation, type):
            annotation = annotation.__value__
        else:
            return annotation, metadata


def _serialized_kind(annotation: Annotation, metadata: Metadata) -> Kind | None:
    """Return "any" or "custom" for values that are stored in another form than that of their type."""
    # Compared by name, because for type checkers it is an alias.
    if any(type(item).__name__ == "SerializeAsAny" for item in metadata):
        return "any"
    serializers = [item for item in metadata if isinstance(item, (PlainSerializer, WrapSerializer))]
    if any(each.when_used not in FOR_JSON_ONLY for each in serializers):
        return "custom"
    # Json is stored as the text that Pydantic parses.
    return "custom" if annotation is Json or Json in map(type, metadata) else None


def _union(members: tuple[Annotation, ...], metadata: Metadata, where: str) -> Shape:
    some = tuple(member for member in members if member is not type(None))
    optional = len(some) < len(members)
    if len(some) == 1:
        inner = shape_of(some[0], metadata, where)
        return dataclasses.replace(inner, optional=inner.optional or optional)
    shapes = tuple(shape_of(member, (), where) for member in some)
    if any(shape.kind == "custom" and shape.metadata for shape in shapes):
        # Only Pydantic can tell which member's serializer makes the stored form.
        return Shape("custom", Union[some], (), optional, metadata)  # noqa: UP007
    _refuse_ambiguous(shapes, where)
    optional = optional or any(shape.optional for shape in shapes)
    return Shape("union", Union, shapes, optional, metadata)


def _refuse_ambiguous(shapes: tuple[Shape, ...], where: str) -> None:
    by_form: dict[str, Shape] = {}
    for shape in shapes:
        for form in _forms(shape):
            other = by_form.setdefault(form, shape)
            if other.python is not shape.python:
                names = " and ".join(getattr(s.python, "__name__", str(s.python)) for s in (other, shape))
                raise DeclarationError(
                    f"{where} may be {names}, which are stored alike and could not be told apart "
                    "when read; keep one of them, or wrap one in a model",
                    code="union-ambiguous",
                )
            if other is not shape and shape.items:
                # Two arrays, or two maps: their items must differ.
                _refuse_ambiguous((other.items[-1], shape.items[-1]), where)


def _forms(shape: Shape) -> set[str]:
    """Return the BSON types of a union's member, as far as they could be mistaken for another member's."""
    if shape.kind == "scalar":
        return _FORMS.get(shape.python, set())
    # A str or int enum equals its value, so nothing is lost either way.
    if shape.kind == "enum" and not issubclass(shape.python, (str, int)):
        return set().union(*(_FORMS.get(type(member.value), {"other"}) for member in shape.python))
    return _CONTAINER_FORMS.get(shape.kind, set())


def _generic(
    annotation: Annotation, origin: Annotation, arguments: Metadata, metadata: Metadata, where: str
) -> Shape:
    if origin in _ARRAYS:
        return Shape(_ARRAYS[origin], origin, (shape_of(arguments[0], (), where),), metadata=metadata)
    if origin is tuple:
        # A tuple of any length has Ellipsis for its Python type.
        is_open = arguments[1:] == (Ellipsis,)
        items = tuple(shape_of(each, (), where) for each in (arguments[:1] if is_open else arguments))
        return Shape("tuple", Ellipsis if is_open else tuple, items, metadata=metadata)
    if origin in _MAPS:
        key, value = (shape_of(argument, (), where) for argument in arguments)
        _check_key(key, where)
        return Shape("map", dict, (key, value), metadata=metadata)
    if isinstance(origin, type) and issubclass(origin, _UNSTORABLE):
        raise _not_storable(origin, where)
    return Shape("any", annotation, metadata=metadata)


def _check_key(key: Shape, where: str) -> None:
    if key.kind in ("enum", "literal", "any") or (key.kind == "scalar" and key.python in _KEYS):
        return
    raise DeclarationError(
        f"{where} is a map with keys of {key.python}; BSON keys are text: use str, int, UUID, "
        "date or an enum, or a list of pairs",
        code="key-not-storable",
    )


def _plain(annotation: Annotation, metadata: Metadata, where: str) -> Shape:
    if annotation in (None, type(None)):
        return Shape("scalar", type(None), optional=True, metadata=metadata)
    if annotation in (Any, object) or isinstance(annotation, TypeVar):
        return Shape("any", Any, metadata=metadata)
    if not isinstance(annotation, type):
        return Shape("any", annotation, metadata=metadata)
    if annotation in (*_ARRAYS, *_MAPS, tuple):
        arguments = (Any, ...) if annotation is tuple else (Any, Any)
        return _generic(annotation, annotation, arguments, metadata, where)
    return _class(annotation, metadata, where)


def _class(annotation: type, metadata: Metadata, where: str) -> Shape:
    if issubclass(annotation, enum.Enum):
        return Shape("enum", annotation, metadata=metadata)
    if issubclass(annotation, BaseModel):
        return Shape("model", annotation, metadata=metadata)
    scalar = next((base for base in annotation.__mro__ if base in SCALARS), None)
    if scalar is not None:
        return Shape("scalar", scalar, metadata=metadata)
    # Dataclasses and named tuples.
    if dataclasses.is_dataclass(annotation) or hasattr(annotation, "_fields"):
        return Shape("custom", annotation, metadata=metadata)
    is_known = hasattr(annotation, "__get_pydantic_core_schema__") or annotation.__module__.startswith(_KNOWN)
    if _has_no_form(annotation) or not (is_known or typing_extensions.is_typeddict(annotation)):
        raise _not_storable(annotation, where)
    return Shape("any", annotation, metadata=metadata)


def _has_no_form(annotation: type) -> bool:
    """Whether BSON has no form for a class, Pydantic's URLs and IP addresses among them."""
    return any(
        base in _UNSTORABLE or (base.__module__.startswith(_ADDRESSES) and base.__name__ != "EmailStr")
        for base in annotation.__mro__
    )


def _not_storable(annotation: type, where: str) -> DeclarationError:
    return DeclarationError(
        f"{where} is a {annotation.__name__}, which has no BSON form; use a type that has one "
        "or give the field a PlainSerializer",
        code="type-not-storable",
    )
