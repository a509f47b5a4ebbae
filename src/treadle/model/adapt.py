"""The functions that prepare stored documents for Pydantic, composed once per model.

Stored names become names that the model accepts, Decimal128 becomes Decimal,
and values that BSON has no form for get their type back: members of enums,
dates without a time, sets, keys of maps. Most models need none of it.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, TypeAlias, get_args

from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from treadle.errors import DeclarationError
from treadle.model.attributes import from_pairs, is_paired
from treadle.model.bson_types import RESERVED, UTC, from_bson, key_to_bson, to_bson
from treadle.model.keywords import stamped_names
from treadle.model.shape import Kind, ModelCodec, Shape

# From a stored value, not None, to what Pydantic can validate; may change it in place. A value
# of another type than expected is left alone, so that Pydantic reports it.
Adapt: TypeAlias = Callable[[Any], Any]


def alias_names(info: FieldInfo) -> list[str]:
    """Return the aliases of a field that are names, not paths into other fields."""
    alias = info.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
    return [each for each in choices if isinstance(each, str)]


def accepted_keys(model: type[BaseModel], name: str, info: FieldInfo) -> list[str]:
    """Return the keys under which the model's validator takes this field; raises where it takes none."""
    if info.validation_alias is None:
        return [name]
    config = model.model_config
    keys = alias_names(info) if config.get("validate_by_alias") is not False else []
    if config.get("populate_by_name") or config.get("validate_by_name"):
        keys.append(name)
    if not keys:
        raise DeclarationError(
            f"{model.__name__}.{name} can only be read through a path into another field, so what is "
            "stored could not be read back; give it an alias that is a name",
            code="alias-not-readable",
        )
    return keys


def compile_adapt(codec: ModelCodec) -> Adapt | None:
    """Return what prepares a stored document, in place; None where there is nothing to do."""
    if codec.model.__pydantic_root_model__:
        return adapter_of(codec, codec.fields[0].shape)
    adapters = [(each.stored, adapt) for each in codec.fields if (adapt := adapter_of(codec, each.shape))]
    keys = [(each.stored, accepted_keys(codec.model, each.name, each.info)) for each in codec.fields]
    renamed = [(stored, accepted[0]) for stored, accepted in keys if stored not in accepted]
    extra = codec.model.model_config.get("extra")
    hidden = [] if extra in (None, "ignore") else [RESERVED, *stamped_names(codec.model)]
    hidden = [name for name in hidden if name not in codec.by_stored]
    # Undeclared fields may hold anything, Decimal128 included.
    finish = from_bson if extra == "allow" else _same
    if not (adapters or renamed or hidden):
        return None

    def adapt_document(raw: Any) -> Any:
        if type(raw) is not dict:
            return raw
        for name in hidden:
            raw.pop(name, None)
        for name, adapt in adapters:
            value = raw.get(name)
            if value is not None:
                raw[name] = adapt(value)
        # All are taken out before any is put back, because names may cross.
        raw.update([(key, raw.pop(name)) for name, key in renamed if name in raw])
        return finish(raw)

    return adapt_document


def adapter_of(codec: ModelCodec, shape: Shape) -> Adapt | None:
    """Return what prepares a stored value of this shape; None where it is ready as it is."""
    make = _ADAPTERS.get(shape.kind)
    return from_bson if make is None else make(codec, shape)


def _same(value: Any) -> Any:
    return value


def _nested(codec: ModelCodec, shape: Shape) -> Adapt | None:
    nested = codec.codec_of(shape.python)
    if nested.ready:
        return nested._adapt
    # A model that contains itself: its function is not composed yet.
    return lambda value: value if nested._adapt is None else nested._adapt(value)


def _array(codec: ModelCodec, shape: Shape) -> Adapt | None:
    make, item = _CONTAINERS[shape.kind], shape.items[0] if shape.items else None
    if item and shape.kind in ("set", "frozenset") and item.kind not in ("scalar", "enum", "literal"):
        # What cannot be hashed yet becomes a member once Pydantic has made a model of it.
        make = list
    adapters = [adapter_of(codec, each) or _same for each in shape.items]
    if adapters == [_same] and make is list:
        return None
    has_length = shape.kind == "tuple" and shape.python is not Ellipsis

    def adapt(value: Any) -> Any:
        if type(value) is not list or (has_length and len(value) != len(adapters)):
            return value
        pairs = zip(adapters if has_length else repeat(adapters[0]), value, strict=False)
        return make([each if each is None else adapt_item(each) for adapt_item, each in pairs])

    return adapt


def _map(codec: ModelCodec, shape: Shape) -> Adapt | None:
    read = from_pairs if is_paired(shape) else _same
    adapt_key, adapt_value = _key_adapter(shape.items[0]), adapter_of(codec, shape.items[1]) or _same
    if adapt_key is adapt_value is _same:
        return None if read is _same else read

    def adapt(value: Any) -> Any:
        value = read(value)
        if type(value) is not dict:
            return value
        return {adapt_key(key): each if each is None else adapt_value(each) for key, each in value.items()}

    return adapt


def _key_adapter(shape: Shape) -> Adapt:
    """Return what turns the text of a stored key into the type that the model declares."""
    if shape.kind == "scalar":
        return _KEYS.get(shape.python, _same)
    if shape.kind not in ("enum", "literal"):
        return _same
    members = get_args(shape.python) if shape.kind == "literal" else shape.python
    by_text = {key_to_bson(member): member for member in members}
    return lambda key: by_text.get(key, key)


def _parsing(parse: Callable[[str], object]) -> Adapt:
    def adapt(value: Any) -> Any:
        try:
            return parse(value) if type(value) is str else value
        except (ValueError, TypeError, ArithmeticError):
            return value

    return adapt


def _member_adapter(members: Iterable[object]) -> Adapt | None:
    """Return what turns stored values into the members of an enum; None where there are no members."""
    by_stored = {_hashable(to_bson(each, [])): each for each in members if isinstance(each, enum.Enum)}

    def adapt(value: Any) -> Any:
        try:
            return by_stored.get(_hashable(value), value)
        except TypeError:
            return value

    return adapt if by_stored else None


def _hashable(value: Any) -> Any:
    if isinstance(value, Decimal128):
        # Equal numbers with other digits are different values of an enum.
        return Decimal128, value.bid
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value


def _union(codec: ModelCodec, shape: Shape) -> Adapt:
    """A stored value as the member that its type tells; a model if its literals fit no other member."""
    models = [codec.codec_of(item.python) for item in shape.items if item.kind == "model"]
    scalars = {item.python for item in shape.items if item.kind == "scalar"}
    members = [member for item in shape.items if item.kind == "enum" for member in item.python]
    adapt_member = _member_adapter(members) or _same
    # In Python True and 1.0 equal the member of an enum that is 1.
    never_members = {dict, list, *(scalars & {bool, float})}
    # Pydantic takes a number for a date and text for a bool where it may; the stored type tells better.
    by_type: dict[type, Adapt] = {}
    if dt.timedelta in scalars:
        by_type |= dict.fromkeys((int, float), _SCALARS[dt.timedelta])
    if dt.date in scalars:
        by_type[dt.datetime] = _SCALARS[dt.date]

    def adapt(value: Any) -> Any:
        kind = type(value)
        if kind in by_type:
            return by_type[kind](value)
        fitting = [each for each in models if _literals_fit(each, value)]
        if len(fitting) == 1:
            adapt_model = fitting[0]._adapt
            return value if adapt_model is None else adapt_model(value)
        return from_bson(value if kind in never_members else adapt_member(value))

    return adapt


def _literals_fit(codec: ModelCodec, value: Any) -> bool:
    """Whether a value is a document that has the literals of a model, its discriminator among them."""
    return type(value) is dict and all(
        value[field.stored] in [to_bson(member, []) for member in get_args(field.shape.python)]
        for field in codec.fields
        if field.shape.kind == "literal" and field.stored in value
    )


_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list, "set": set, "frozenset": frozenset, "tuple": tuple,
}  # fmt: skip
_KEYS: dict[type, Adapt] = {
    **{kind: _parsing(kind) for kind in (int, uuid.UUID, decimal.Decimal, ObjectId)},
    **{kind: _parsing(kind.fromisoformat) for kind in (dt.date, dt.datetime)},
}
_SCALARS: dict[type, Adapt] = {
    dt.time: _parsing(dt.time.fromisoformat),
    dt.timedelta: lambda value: (
        dt.timedelta(seconds=value) if type(value) in (int, float) and abs(value) < 8e13 else value
    ),
    decimal.Decimal: lambda value: value.to_decimal() if type(value) is Decimal128 else value,
    # Only a whole day is a date; anything else is Pydantic's to refuse.
    dt.date: lambda value: (
        value.date() if type(value) is dt.datetime and value.timetz() == dt.time(tzinfo=UTC) else value
    ),
}
# Of the other kinds, only Decimal128 is converted.
_ADAPTERS: dict[Kind, Callable[[ModelCodec, Shape], Adapt | None]] = {
    "scalar": lambda codec, shape: _SCALARS.get(shape.python),
    "enum": lambda codec, shape: _member_adapter(shape.python),
    "literal": lambda codec, shape: _member_adapter(get_args(shape.python)),
    "model": _nested, "map": _map, "union": _union,
    "list": _array, "set": _array, "frozenset": _array, "tuple": _array,
}  # fmt: skip
