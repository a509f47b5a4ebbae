"""`into=`: the documents of a model, read as another Pydantic model.

A card names fields of the model, by Python name or by alias; it may nest
cards of its own. The server is asked for these fields alone. Values are made
ready by the model's own declaration, because that says how they are stored,
and then validated by the card's.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
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
ANY = Shape("any", Any)


class CardField(NamedTuple):
    """One field of a card: where it is stored, what the card calls it, how its value is made ready."""

    stored: str
    key: str
    convert: Adapt | None
    # Returns what the model reads, in its stored form, where there is nothing; None where it must be there.
    absent: Callable[[], Any] | None = None


class Card(Generic[C]):
    """How one card is read from the documents of one model."""

    def __init__(self, entry: ModelEntry, model: type[C]) -> None:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise UsageError(
                f"into={model!r} is no Pydantic model; pass the class to read {entry.model.__name__} as",
                code="card-invalid",
            )
        self.model = model
        self._entry = entry
        kinds = [entry, *entry.kinds.below]
        searches = {each.kinds.kind: _Search(each.codec, model) for each in kinds}
        if entry.model.model_config.get("extra") != "allow":
            _refuse_unknown(entry, model, [search.missing for search in searches.values()])
        # The id is for messages; kind and version say how to read the document.
        paths = {"_id"}.union(*(stamped_names(each.model) for each in kinds))
        self.paths = outermost(paths.union(*(search.paths for search in searches.values())))
        self.projection: Raw = dict.fromkeys(self.paths, 1)
        self._loads = {kind: _loader(model, search.card_fields) for kind, search in searches.items()}
        of_one_kind = entry.kinds.family is None
        self.load: Callable[[Raw], C] = self._loads[entry.kinds.kind] if of_one_kind else self._load_by_kind

    def _load_by_kind(self, raw: Raw) -> C:
        family = self._entry.kinds.family
        assert family is not None
        kind = raw.get(family.discriminator)
        kind = family.default if kind is None else kind
        load = self._loads.get(kind) if isinstance(kind, (str, int)) else None
        if load is None:
            known = [each for each in self._loads if each is not None]
            raise unknown_kind(self._entry.model, family.discriminator, raw, known)
        card: C = load(raw)
        return card


def card_of(entry: ModelEntry, into: type[C] | None) -> Card[C] | None:
    """Return the card that a caller asked for, compiled once."""
    if into is None or into is entry.model:
        return None
    return entry.rules.memo(("card", into), lambda: Card(entry, into))


def _refuse_unknown(
    entry: ModelEntry, card: type[BaseModel], missing: Sequence[dict[str, list[str]]]
) -> None:
    """Refuse a name that no kind of the model has."""
    for name in sorted(set.intersection(*map(set, missing))):
        near = [each for names in missing for each in names[name]]
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(entry.codec.by_name)}"
        raise UsageError(
            f"{card.__name__} asks for {name!r}, but {entry.model.__name__} has no such field; {hint}",
            code="card-invalid",
        )


class _Search:
    """Compiles the fields of a card for one kind, and collects the stored paths that they need."""

    def __init__(self, codec: Codec[Any], card: type[BaseModel]) -> None:
        self.paths: set[str] = set()
        # Names that the kind does not have, with similar ones.
        self.missing: dict[str, list[str]] = {}
        # The models and cards around the one at hand, so that one that contains itself has an end.
        self._outer: list[tuple[type, type]] = []
        self.card_fields = self._fields(codec, card)

    def _fields(self, codec: Codec[Any], card: type[BaseModel], prefix: str = "") -> list[CardField]:
        """Return the fields of a card that a model has."""
        if not card.__pydantic_complete__:
            card.model_rebuild()
        fields = []
        for name, info in card.__pydantic_fields__.items():
            keys = accepted_keys(card, name, info)
            declared = next(filter(None, (_declared(codec, key) for key in [*keys, name])), None)
            if declared is not None:
                path = prefix + declared.stored
                convert = self._converter(codec, declared.shape, _shape(card, name, info), path)
                fields.append(CardField(declared.stored, keys[0], convert, self._absent(declared, path)))
            elif (stored := self._undeclared(codec, name, keys, prefix)) is not None:
                self.paths.add(prefix + stored)
                fields.append(CardField(stored, keys[0], adapter_of(codec, ANY)))
        return fields

    def _undeclared(self, codec: Codec[Any], name: str, keys: Sequence[str], prefix: str) -> str | None:
        """Return the stored name of a kind, a version or an undeclared field, which is read as stored."""
        stamped = next((key for key in [*keys, name] if key in stamped_names(codec.model)), None)
        if stamped is not None:
            return stamped
        self.missing[prefix + name] = difflib.get_close_matches(name, [*codec.by_name], n=1)
        return keys[0] if codec.model.model_config.get("extra") == "allow" else None

    def _absent(self, declared: StoredField, path: str) -> Callable[[], Any] | None:
        """Return what makes the value that the model reads where a field is missing, if it may be."""
        info, is_in_part = declared.info, declared.shape.optional and path not in self.paths
        if info.is_required():
            # Asked for fields of a null, the server leaves the null out.
            return _nothing if is_in_part else None
        if info.default_factory_takes_validated_data:
            return None
        if info.default_factory is None and info.default is None:
            return _nothing
        if is_in_part:
            # A null must be told from nothing at all.
            self.paths.add(path)
        return lambda: to_bson(info.get_default(call_default_factory=True), [])

    def _converter(self, codec: Codec[Any], source: Shape, target: Shape, path: str) -> Adapt | None:
        """Return what makes a stored value ready for a card's field."""
        if _are_lists(source, target):
            if source.items[0].optional:
                # Asked for fields of elements, the server leaves out those that are null.
                self.paths.add(path)
            return _each(self._converter(codec, source.items[0], target.items[0], path))
        if source.kind == target.kind == "model" and source.python is not target.python:
            pair = source.python, target.python
            if pair not in self._outer:
                self._outer.append(pair)
                inner = self._fields(codec_of(source.python), target.python, f"{path}.")
                self._outer.pop()
                return _picker(inner)
        self.paths.add(path)
        if source.kind == target.kind == "map" and source.items[1].kind == target.items[1].kind == "model":
            # The map is read whole, whatever its values need.
            paths, self.paths = self.paths, set()
            item = self._converter(codec, source.items[1], target.items[1], "")
            self.paths = paths
            return _each(item)
        return adapter_of(codec, source)


def _are_lists(source: Shape, target: Shape) -> bool:
    """Whether both are arrays, of elements that may be read in part."""
    if not (source.kind in ARRAYS and target.kind in ARRAYS and len(source.items) == len(target.items) == 1):
        return False
    return source.items[0].kind in ("model", "map")


def _declared(codec: Codec[Any], key: str) -> StoredField | None:
    return codec.by_stored.get(key) or codec.by_name.get(key)


def _nothing() -> None:
    return None


def _shape(card: type, name: str, info: FieldInfo) -> Shape:
    try:
        return field_shape(card.__name__, name, info)
    except DeclarationError:
        # A value that cannot be stored may be read all the same.
        return ANY


def _each(convert: Adapt | None) -> Adapt | None:
    """Return what converts the items of a list, or the values of a map."""
    if convert is None:
        return None

    def each(value: Any) -> Any:
        if type(value) is list:
            return [item if item is None else convert(item) for item in value]
        if type(value) is dict:
            return {key: item if item is None else convert(item) for key, item in value.items()}
        return value

    return each


def _picker(fields: Sequence[CardField]) -> Adapt:
    """Return what takes a card's fields out of a stored document, under the card's names."""

    def pick(raw: Any) -> Any:
        if type(raw) is not dict:
            return raw
        values = {}
        for stored, key, convert, absent in fields:
            if stored in raw:
                value = raw[stored]
            elif absent is None:
                continue
            else:
                value = absent()
            values[key] = value if value is None or convert is None else convert(value)
        return values

    return pick


def _filler(fields: Sequence[CardField]) -> Adapt:
    """Return what completes a stored document whose values need nothing else."""
    defaults = [(field.stored, field.absent) for field in fields if field.absent is not None]

    def fill(raw: Raw) -> Raw:
        for name, absent in defaults:
            if name not in raw:
                raw[name] = absent()
        return raw

    return fill


def _loader(model: type[BaseModel], fields: Sequence[CardField]) -> Load:
    """Return what makes a card of a stored document."""
    validate = model.__pydantic_validator__.validate_python
    is_as_stored = all(field.stored == field.key and field.convert is None for field in fields)
    ignores_others = model.model_config.get("extra") in (None, "ignore")
    prepare = (_filler if is_as_stored and ignores_others else _picker)(fields)

    def load(raw: Raw) -> Any:
        try:
            return validate(prepare(raw))
        except ValidationError as error:
            raise invalid_document(model, raw, error) from None
        except Exception as error:
            # As in `Codec.load`.
            raise validator_failed(model, raw, error) from error

    return load
