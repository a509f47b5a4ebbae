"""What must happen to a stored document before Pydantic can validate it.

Names that the model does not accept are changed, Decimal128 becomes Decimal,
and what JSON-like storage has no form for gets its own type back: members of
enums, dates without a time, sets, keys of maps. Compiled once per model, and
nothing at all for most.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
from collections.abc import Callable, Sequence
from typing import Any, get_args

from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from treadle.errors import DeclarationError
from treadle.model.bson_types import RESERVED, UTC, from_bson, key_to_bson, to_bson
from treadle.model.keywords import stamped_names
from treadle.model.pairs import from_pairs, is_paired
from treadle.model.shape import Shape
from treadle.model.stored import Codec

Adapt = Callable[[Any], Any]


def accepted_keys(model: type[BaseModel], name: str, info: FieldInfo) -> list[str]:
    """The keys under which the model's validator takes this field."""
    alias, config = info.validation_alias, model.model_config
    if alias is None:
        return [name]
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
    by_alias = config.get("validate_by_alias") is not False
    keys = [choice for choice in choices if by_alias and isinstance(choice, str)]
    if config.get("populate_by_name") or config.get("validate_by_name"):
        keys.append(name)
    if not keys:
        raise DeclarationError(
            f"{model.__name__}.{name} can only be read through a path into another field, so what is "
            "stored could not be read back; give it an alias that is a name",
            code="alias-not-readable",
        )
    return keys


def compile_adapt(codec: Codec[Any]) -> Adapt | None:
    """What must happen to a raw document before Pydantic can validate it."""
    names: dict[str, Any] = {"missing": object()}
    lines: list[str] = []
    renamed: list[tuple[str, str]] = []
    extra = codec.model.model_config.get("extra")
    if extra in ("allow", "forbid"):
        own = [name for name in stamped_names(codec.model) if name not in codec.by_stored]
        lines += [f"    r.pop({name!r}, None)" for name in (RESERVED, *own)]
    for number, field in enumerate(codec.fields):
        converter = adapter_of(codec, field.shape)
        keys = accepted_keys(codec.model, field.name, field.info)
        if converter is not None:
            names[f"c{number}"] = converter
            lines.append(f"    v = r.get({field.stored!r})")
            lines.append(f"    if v is not None: r[{field.stored!r}] = c{number}(v)")
        if field.stored not in keys:
            renamed.append((field.stored, keys[0]))
    # All are taken out before any is put back, because names may cross over.
    for number, (stored, _) in enumerate(renamed):
        lines.append(f"    t{number} = r.pop({stored!r}, missing)")
    for number, (_, key) in enumerate(renamed):
        lines.append(f"    if t{number} is not missing: r[{key!r}] = t{number}")
    if codec.model.__pydantic_root_model__:
        return adapter_of(codec, codec.fields[0].shape)
    if extra == "allow":
        # Undeclared fields may hold anything, Decimal128 included.
        names["from_bson"] = from_bson
        lines.append("    from_bson(r)")
    if not lines:
        return None
    lines = ["def adapt(r):", "    if type(r) is not dict: return r", *lines, "    return r"]
    exec("\n".join(lines), names)
    adapt: Adapt = names["adapt"]
    return adapt


def adapter_of(codec: Codec[Any], shape: Shape) -> Adapt | None:
    """What makes a stored value of this shape ready for Pydantic; None where it is so already."""
    if shape.kind == "scalar":
        return _SCALAR_ADAPTERS.get(shape.python)
    if shape.kind == "enum":
        return _member_adapter(list(shape.python))
    if shape.kind == "model":
        nested = codec.codec_of(shape.python)
        if not nested.ready:
            return lambda value: value if nested._adapt is None else nested._adapt(value)
        return nested._adapt
    if shape.kind == "map":
        return _map_adapter(codec, shape)
    if shape.kind == "literal":
        members = [member for member in get_args(shape.python) if isinstance(member, enum.Enum)]
        return _member_adapter(members) if members else None
    if shape.kind == "union":
        return _union_adapter(codec, shape)
    if shape.items:
        return _array_adapter(codec, shape)
    return from_bson


def _map_adapter(codec: Codec[Any], shape: Shape) -> Adapt | None:
    adapters = _key_adapter(shape.items[0]), adapter_of(codec, shape.items[1])
    if not any(adapters):
        return from_pairs if is_paired(shape) else None
    key_of, value_of = (each or _same for each in adapters)
    if is_paired(shape):
        return lambda value: (
            {key: item if item is None else value_of(item) for key, item in map_.items()}
            if type(map_ := from_pairs(value)) is dict
            else value
        )
    return lambda value: (
        {key_of(key): item if item is None else value_of(item) for key, item in value.items()}
        if type(value) is dict
        else value
    )


def _same(value: Any) -> Any:
    return value


def _key_adapter(shape: Shape) -> Adapt | None:
    """From the text that a key is stored as to what the model declares."""
    if shape.kind in ("enum", "literal"):
        members = list(shape.python) if shape.kind == "enum" else get_args(shape.python)
        return lambda key: {key_to_bson(member): member for member in members}.get(key, key)
    parse = _KEY_PARSERS.get(shape.python) if shape.kind == "scalar" else None
    return None if parse is None else _attempt(parse)


def _attempt(parse: Callable[[Any], Any]) -> Adapt:
    def adapt(value: Any) -> Any:
        try:
            return parse(value) if type(value) is str else value
        except (ValueError, TypeError, ArithmeticError):
            # Not what was declared; Pydantic says so.
            return value

    return adapt


def _union_adapter(codec: Codec[Any], shape: Shape) -> Adapt:
    """Adapt a stored model as the member of the union that its literals name, if exactly one fits."""
    models = [codec.codec_of(item.python) for item in shape.items if item.kind == "model"]
    # Pydantic takes a number for a date and text for a bool where it may; the stored type tells better.
    scalars = {item.python for item in shape.items if item.kind == "scalar"}
    members = [member for item in shape.items if item.kind == "enum" for member in item.python]
    member_of = _member_adapter(members) if members else None
    # In Python True and 1.0 equal the member of an enum that is 1.
    unlike = {dict, list, *(scalars & {bool, float})}
    exact: dict[type, Adapt] = {}
    if dt.timedelta in scalars:
        exact |= dict.fromkeys((int, float), _SCALAR_ADAPTERS[dt.timedelta])
    if dt.date in scalars:
        exact[dt.datetime] = _SCALAR_ADAPTERS[dt.date]

    def adapt(value: Any) -> Any:
        if type(value) in exact:
            return exact[type(value)](value)
        if member_of is not None and type(value) not in unlike:
            value = member_of(value)
        if type(value) is dict and models:
            fitting = [codec for codec in models if _tags_fit(codec, value)]
            if len(fitting) == 1:
                own = fitting[0]._adapt
                return value if own is None else own(value)
        return from_bson(value)

    return adapt


def _tags_fit(codec: Codec[Any], value: dict[str, Any]) -> bool:
    """Whether the literals of a model, its discriminator among them, are those of the document."""
    return all(
        value[field.stored] in [to_bson(member, []) for member in get_args(field.shape.python)]
        for field in codec.fields
        if field.shape.kind == "literal" and field.stored in value
    )


def _array_adapter(codec: Codec[Any], shape: Shape) -> Adapt | None:
    make = _CONTAINERS[shape.kind]
    if shape.items and shape.items[0].kind not in ("scalar", "enum", "literal") and shape.kind != "tuple":
        # What is not hashable yet becomes a member only once Pydantic has made a model of it.
        make = list
    inners = [adapter_of(codec, item) for item in shape.items]
    if not any(inners):
        return None if make is list else lambda value: make(value) if type(value) is list else value
    if len(inners) == 1 and (shape.kind != "tuple" or shape.python is Ellipsis):
        adapt = inners[0] or _same
        return lambda value: (
            make([item if item is None else adapt(item) for item in value]) if type(value) is list else value
        )
    return lambda value: (
        tuple(
            item if item is None or inner is None else inner(item)
            for inner, item in zip(inners, value, strict=True)
        )
        if type(value) is list and len(value) == len(inners)
        else value
    )


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": list, "set": set, "frozenset": frozenset, "tuple": tuple,
}  # fmt: skip
_KEY_PARSERS: dict[Any, Callable[[Any], Any]] = {
    int: int, uuid.UUID: uuid.UUID, decimal.Decimal: decimal.Decimal, ObjectId: ObjectId,
    dt.date: dt.date.fromisoformat, dt.datetime: dt.datetime.fromisoformat,
}  # fmt: skip
_SCALAR_ADAPTERS: dict[type, Adapt] = {
    dt.time: _attempt(dt.time.fromisoformat),
    dt.timedelta: lambda value: (
        dt.timedelta(seconds=value) if type(value) in (int, float) and abs(value) < 8e13 else value
    ),
    decimal.Decimal: lambda value: value.to_decimal() if type(value) is Decimal128 else value,
    # Only a whole day is a date; anything else is Pydantic's to refuse.
    dt.date: lambda value: (
        value.date() if type(value) is dt.datetime and value.timetz() == dt.time(tzinfo=UTC) else value
    ),
}


def _member_adapter(members: Sequence[Any]) -> Adapt:
    """From stored values to the members of an enum."""
    by_stored = {_hashable(to_bson(member, [])): member for member in members}

    def adapt(value: Any) -> Any:
        try:
            return by_stored.get(_hashable(value), value)
        except TypeError:
            return value

    return adapt


def _hashable(value: Any) -> Any:
    if isinstance(value, Decimal128):
        # Equal numbers with other digits are still other values of an enum.
        return Decimal128, value.bid
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value
