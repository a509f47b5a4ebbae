"""`into=`: the documents of a model, read as another Pydantic model.

A card names fields of the model, by Python name or by alias; it may nest
cards of its own. The server is asked for these fields alone. Values are made
ready by the model's own declaration, because that says how they are stored,
and then validated by the card's.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from treadle.errors import DeclarationError, UsageError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.store_codec import unknown_kind
from treadle.model.adapt import Adapt, accepted_keys, adapter_of
from treadle.model.bson_types import Raw, to_bson
from treadle.model.codec import Codec, StoredField, codec_of, invalid_document, validator_failed
from treadle.model.keywords import stamped_names
from treadle.model.shape import Shape, field_shape
from treadle.query.paths import ARRAYS, outermost

C = TypeVar("C", bound=BaseModel)
Load = Callable[[Raw], Any]


class Part(NamedTuple):
    """One field of a card: where it is stored, what the card calls it, how it is made ready.

    `absent` gives what the model reads, in its stored form, where there is nothing.
    """

    stored: str
    key: str
    convert: Adapt | None
    absent: Callable[[], Any] | None = None


@dataclass
class _Search:
    """The stored paths that a card needs, and its names that no model has, as they are found."""

    paths: set[str]
    missing: dict[str, list[str]]
    # The models and cards on the way here, so that one that contains itself comes to an end.
    outer: tuple[tuple[Any, Any], ...] = ()


class Card(Generic[C]):
    """How one card is read from the documents of one model."""

    def __init__(self, entry: ModelEntry[Any], model: type[C]) -> None:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise UsageError(
                f"into={model!r} is no Pydantic model; pass the class to read {entry.model.__name__} as",
                code="card-invalid",
            )
        self.model = model
        self._entry = entry
        paths: set[str] = set()
        loads: dict[Any, Load] = {}
        missing: list[set[str]] = []
        hints: dict[str, list[str]] = {}
        for each in [entry, *entry.kinds.below]:
            search = _Search(paths, {})
            parts = _parts(each.codec, model, "", search)
            loads[each.kinds.kind] = _loader(model, parts)
            missing.append(set(search.missing))
            for name, near in search.missing.items():
                hints.setdefault(name, []).extend(near)
        for name in sorted(set.intersection(*missing)):
            if entry.model.model_config.get("extra") != "allow":
                raise _unknown(entry, model, name, hints[name])
        own = [name for each in [entry, *entry.kinds.below] for name in stamped_names(each.model)]
        # The id for messages, kind and version to read the document rightly.
        self.paths = outermost({*paths, *own, "_id"})
        self.projection: Raw = dict.fromkeys(self.paths, 1)
        self.load: Callable[[Raw], C] = loads[entry.kinds.kind]
        if entry.kinds.family is not None:
            self._discriminator = entry.kinds.family.discriminator
            self._default = entry.kinds.family.default
            self._loads = loads
            self.load = self._by_kind

    def _by_kind(self, raw: Raw) -> C:
        kind = raw.get(self._discriminator)
        kind = self._default if kind is None else kind
        load = self._loads.get(kind) if isinstance(kind, (str, int)) else None
        if load is None:
            known = [each for each in self._loads if each is not None]
            raise unknown_kind(self._entry.model, self._discriminator, raw, known)
        card: C = load(raw)
        return card


def card_of(entry: ModelEntry[Any], into: type[C] | None) -> Card[C] | None:
    """The card that a caller asked for, compiled once."""
    if into is None or into is entry.model:
        return None
    return entry.rules.memo(("card", into), lambda: Card(entry, into))


def _unknown(entry: ModelEntry[Any], card: type, name: str, near: Sequence[str]) -> UsageError:
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(entry.codec.by_name)}"
    return UsageError(
        f"{card.__name__} asks for {name!r}, but {entry.model.__name__} has no such field; {hint}",
        code="card-invalid",
    )


def _parts(codec: Codec[Any], card: type[BaseModel], prefix: str, search: _Search) -> list[Part]:
    """The fields of a card that a model has; notes the paths that they need, and what is missing."""
    if not card.__pydantic_complete__:
        card.model_rebuild()
    parts = []
    for name, info in card.__pydantic_fields__.items():
        keys = accepted_keys(card, name, info)
        names = [*keys, name]
        declared = next(
            (each for key in names if (each := codec.by_stored.get(key) or codec.by_name.get(key))), None
        )
        if declared is None:
            stamped = next((key for key in names if key in stamped_names(codec.model)), None)
            if stamped is None:
                search.missing[prefix + name] = difflib.get_close_matches(name, [*codec.by_name], n=1)
                if codec.model.model_config.get("extra") != "allow":
                    continue
            # Kind, version, or a field that nobody declared: as it is stored.
            stored = stamped or keys[0]
            search.paths.add(prefix + stored)
            parts.append(Part(stored, keys[0], adapter_of(codec, Shape("any", Any))))
            continue
        target, path = _shape(card, name, info), prefix + declared.stored
        convert = _converter(codec, declared.shape, target, path, search)
        parts.append(Part(declared.stored, keys[0], convert, _absent(declared, path, search)))
    return parts


def _absent(declared: StoredField, path: str, search: _Search) -> Callable[[], Any] | None:
    """What the model reads where a field is not there; None where it must be there."""
    info, optional = declared.info, declared.shape.optional
    inside = path not in search.paths
    if info.is_required():
        # Asked for fields of a null, the server leaves the null out.
        return _nothing if optional and inside else None
    if info.default_factory_takes_validated_data:
        return None
    if info.default_factory is None and info.default is None:
        return _nothing
    if optional and inside:
        # A null must be told from nothing at all.
        search.paths.add(path)
    return lambda: to_bson(info.get_default(call_default_factory=True), [])


def _nothing() -> None:
    return None


def _shape(card: type, name: str, info: FieldInfo) -> Shape:
    try:
        return field_shape(card.__name__, name, info)
    except DeclarationError:
        # What cannot be stored may be read all the same.
        return Shape("any", Any)


def _converter(codec: Codec[Any], source: Shape, target: Shape, path: str, search: _Search) -> Adapt | None:
    """What makes a stored value ready for a card's field; notes the paths that it needs."""
    if source.kind in ARRAYS and target.kind in ARRAYS and len(source.items) == len(target.items) == 1:
        if source.items[0].kind in ("model", "map"):
            if source.items[0].optional:
                # Asked for fields of elements, the server leaves those out that are null.
                search.paths.add(path)
            item = _converter(codec, source.items[0], target.items[0], path, search)
            return _each(item) if item else None
    elif source.kind == target.kind == "map" and source.items[1].kind == target.items[1].kind == "model":
        item = _converter(codec, source.items[1], target.items[1], "", _Search(set(), search.missing))
        search.paths.add(path)
        return _values(item) if item else None
    elif source.kind == target.kind == "model" and source.python is not target.python:
        pair = source.python, target.python
        if pair not in search.outer:
            inner = _Search(search.paths, search.missing, (*search.outer, pair))
            return _picker(_parts(codec_of(source.python), target.python, f"{path}.", inner))
    search.paths.add(path)
    return adapter_of(codec, source)


def _each(convert: Adapt) -> Adapt:
    return lambda value: (
        [item if item is None else convert(item) for item in value] if type(value) is list else value
    )


def _values(convert: Adapt) -> Adapt:
    return lambda value: (
        {key: item if item is None else convert(item) for key, item in value.items()}
        if type(value) is dict
        else value
    )


def _picker(parts: Sequence[Part]) -> Adapt:
    """What takes a card's fields out of a stored document, under the card's names."""

    def pick(raw: Any) -> Any:
        if type(raw) is not dict:
            return raw
        values = {}
        for stored, key, convert, absent in parts:
            if stored in raw:
                value = raw[stored]
            elif absent is None:
                continue
            else:
                value = absent()
            values[key] = value if value is None or convert is None else convert(value)
        return values

    return pick


def _loader(model: type[BaseModel], parts: Sequence[Part]) -> Load:
    """What makes a card of a stored document."""
    validate, pick = model.__pydantic_validator__.validate_python, _picker(parts)
    as_stored = all(part.stored == part.key and part.convert is None for part in parts)
    if as_stored and model.model_config.get("extra") in (None, "ignore"):
        defaults = [(part.stored, part.absent) for part in parts if part.absent is not None]

        def load(raw: Raw) -> Any:
            for name, absent in defaults:
                if name not in raw:
                    raw[name] = absent()
            try:
                return validate(raw)
            except ValidationError as error:
                raise invalid_document(model, raw, error) from None
            except Exception as error:
                # As in `Codec.load`.
                raise validator_failed(model, raw, error) from error

    else:

        def load(raw: Raw) -> Any:
            try:
                return validate(pick(raw))
            except ValidationError as error:
                raise invalid_document(model, raw, error) from None
            except Exception as error:
                # As in `Codec.load`.
                raise validator_failed(model, raw, error) from error

    return load
