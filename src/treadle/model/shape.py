"""What a field's annotation means: one small tree that the codec, the validators and the graph share.

A `Shape` is what remains of an annotation when forward references, aliases,
`Annotated` and `Optional` are taken apart. Two members of a union that BSON
could not tell apart when read back are refused here, at declaration.
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
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import typing_extensions
from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import BaseModel, PlainSerializer, Secret, SecretBytes, SecretStr, WrapSerializer
from pydantic.fields import FieldInfo

from treadle.errors import DeclarationError

Kind = Literal[
    "scalar", "model", "list", "set", "frozenset", "tuple", "map", "union", "enum",
    "literal", "any", "custom",
]  # fmt: skip

# What a type looks like once stored; two union members that share one of these
# come back as whichever Pydantic tries first.
_STORED_AS: dict[type, str] = {
    str: "string", int: "int", float: "double", bool: "bool", bytes: "bytes", ObjectId: "objectId",
    uuid.UUID: "uuid", Decimal128: "decimal", decimal.Decimal: "decimal", dt.datetime: "date",
    dt.date: "date", dt.time: "string", dt.timedelta: "double",
}  # fmt: skip
SCALARS: frozenset[type] = frozenset({*_STORED_AS, type(None)})
_ARRAYS: dict[Any, Kind] = {
    list: "list", collections.abc.Sequence: "list", collections.abc.Iterable: "list",
    set: "set", collections.abc.Set: "set", collections.abc.MutableSet: "set",
    frozenset: "frozenset",
}  # fmt: skip
# When a serializer that does not concern what is stored is used.
FOR_JSON_ONLY = ("json", "json-unless-none")
# Types that Pydantic knows and BSON does not, and that are no model's own.
_UNSTORABLE = (deque, Secret, SecretStr, SecretBytes, complex, range)
_MAPS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


@dataclass(frozen=True)
class Shape:
    """One annotation, taken apart; `items` are the members, elements, or key and value."""

    kind: Kind
    python: Any
    items: tuple[Shape, ...] = ()
    optional: bool = False
    metadata: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """What a message calls it."""
        return getattr(self.python, "__name__", self.kind)


def field_shape(owner: str, name: str, field: FieldInfo) -> Shape:
    """The shape of one field of a model; `owner` and `name` are for messages."""
    return shape_of(field.annotation, tuple(field.metadata), f"{owner}.{name}")


def shape_of(annotation: Any, metadata: tuple[Any, ...] = (), where: str = "value") -> Shape:
    """The shape of an annotation; refuses what BSON cannot hold."""
    while True:
        origin = get_origin(annotation)
        if origin is typing.Annotated:
            annotation, *more = get_args(annotation)
            metadata = (*more, *metadata)
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif hasattr(annotation, "__value__") and not isinstance(annotation, type):
            annotation = annotation.__value__
        else:
            break
    # By name: for type checkers it is a mere alias.
    if any(type(item).__name__ == "SerializeAsAny" for item in metadata):
        return Shape("any", annotation, metadata=metadata)
    if any(_changes_serialization(item) for item in metadata):
        return Shape("custom", annotation, metadata=metadata)
    if origin is Union or origin is types.UnionType:
        return _union(get_args(annotation), metadata, where)
    if origin is Literal:
        return Shape("literal", annotation, metadata=metadata, optional=None in get_args(annotation))
    if origin is not None:
        return _generic(annotation, origin, get_args(annotation), metadata, where)
    return _plain(annotation, metadata, where)


def _changes_serialization(item: Any) -> bool:
    return isinstance(item, (PlainSerializer, WrapSerializer)) and item.when_used not in FOR_JSON_ONLY


def _union(members: tuple[Any, ...], metadata: tuple[Any, ...], where: str) -> Shape:
    rest = tuple(member for member in members if member is not type(None))
    optional = len(rest) < len(members)
    if len(rest) == 1:
        inner = shape_of(rest[0], metadata, where)
        return dataclasses.replace(inner, optional=inner.optional or optional)
    shapes = tuple(shape_of(member, (), where) for member in rest)
    optional = optional or any(shape.optional for shape in shapes)
    _refuse_ambiguous(shapes, where)
    return Shape("union", Union, shapes, optional, metadata)


def _refuse_ambiguous(shapes: tuple[Shape, ...], where: str) -> None:
    shapes_by_form: dict[str, Shape] = {}
    for shape in shapes:
        for stored in _stored_as(shape):
            other = shapes_by_form.setdefault(stored, shape)
            if other is not shape and other.python is shape.python and shape.items:
                # Two arrays, or two maps: it is for their items to differ.
                _refuse_ambiguous((other.items[-1], shape.items[-1]), where)
            if other.python is not shape.python:
                names = " and ".join(getattr(s.python, "__name__", str(s.python)) for s in (other, shape))
                raise DeclarationError(
                    f"{where} may be {names}, which are stored alike and could not be told apart "
                    "when read; keep one of them, or wrap one in a model",
                    code="union-ambiguous",
                )


def _stored_as(shape: Shape) -> set[str]:
    if shape.kind == "scalar":
        if shape.python is dt.timedelta:
            # A whole number of seconds reads as an int as well.
            return {"double", "int"}
        stored = _STORED_AS.get(shape.python)
        return {stored} if stored else set()
    if shape.kind == "enum":
        # A str or int enum equals its value, so nothing is lost either way.
        if issubclass(shape.python, (str, int)):
            return set()
        return {_STORED_AS.get(type(member.value), "other") for member in shape.python}
    if shape.kind in ("list", "set", "frozenset", "tuple"):
        return {"array"}
    if shape.kind == "map":
        return {"map"}
    return set()


def _generic(
    annotation: Any, origin: Any, arguments: tuple[Any, ...], metadata: tuple[Any, ...], where: str
) -> Shape:
    if origin in _ARRAYS:
        return Shape(_ARRAYS[origin], origin, (shape_of(arguments[0], (), where),), metadata=metadata)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return Shape("tuple", Ellipsis, (shape_of(arguments[0], (), where),), metadata=metadata)
        items = tuple(shape_of(argument, (), where) for argument in arguments)
        return Shape("tuple", tuple, items, metadata=metadata)
    if origin in _MAPS:
        key, value = (shape_of(argument, (), where) for argument in arguments)
        _check_key(key, where)
        return Shape("map", dict, (key, value), metadata=metadata)
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return Shape("model", annotation, metadata=metadata)
    if isinstance(origin, type) and issubclass(origin, _UNSTORABLE):
        raise _not_storable(origin, where)
    return Shape("any", annotation, metadata=metadata)


def _check_key(key: Shape, where: str) -> None:
    storable = (str, int, uuid.UUID, dt.date, dt.datetime, decimal.Decimal, ObjectId)
    if key.kind in ("enum", "literal", "any") or (key.kind == "scalar" and key.python in storable):
        return
    raise DeclarationError(
        f"{where} is a map with keys of {key.python}; BSON keys are text: use str, int, UUID, "
        "date or an enum, or a list of pairs",
        code="key-not-storable",
    )


def _plain(annotation: Any, metadata: tuple[Any, ...], where: str) -> Shape:
    if annotation is None or annotation is type(None):
        return Shape("scalar", type(None), optional=True, metadata=metadata)
    if annotation is Any or annotation is object or isinstance(annotation, TypeVar):
        return Shape("any", Any, metadata=metadata)
    if not isinstance(annotation, type):
        return Shape("any", annotation, metadata=metadata)
    if annotation in (*_ARRAYS, *_MAPS, tuple):
        anything = (Any, ...) if annotation is tuple else (Any, Any)
        return _generic(annotation, annotation, anything, metadata, where)
    return _class(annotation, metadata, where)


def _class(annotation: type, metadata: tuple[Any, ...], where: str) -> Shape:
    if issubclass(annotation, enum.Enum):
        return Shape("enum", annotation, metadata=metadata)
    if issubclass(annotation, BaseModel):
        return Shape("model", annotation, metadata=metadata)
    scalar = next((base for base in annotation.__mro__ if base in SCALARS), None)
    named_tuple = hasattr(annotation, "_fields")
    if scalar is not None and not named_tuple:
        return Shape("scalar", scalar, metadata=metadata)
    if dataclasses.is_dataclass(annotation) or named_tuple:
        return Shape("custom", annotation, metadata=metadata)
    refused = annotation is type or issubclass(annotation, _UNSTORABLE) or _is_address(annotation)
    if not refused and (
        typing_extensions.is_typeddict(annotation)
        or hasattr(annotation, "__get_pydantic_core_schema__")
        or annotation.__module__.startswith(("bson", "re", "pydantic"))
    ):
        return Shape("any", annotation, metadata=metadata)
    raise _not_storable(annotation, where)


def _is_address(annotation: type) -> bool:
    """Whether this is one of Pydantic's URLs or IP addresses, whose values BSON has no form for."""
    return any(
        base.__module__.startswith(("pydantic.networks", "pydantic_core")) and base.__name__ != "EmailStr"
        for base in annotation.__mro__
    )


def _not_storable(annotation: type, where: str) -> DeclarationError:
    return DeclarationError(
        f"{where} is a {annotation.__name__}, which has no BSON form; use a type that has one "
        "or give the field a PlainSerializer",
        code="type-not-storable",
    )
