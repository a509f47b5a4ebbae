"""The names in filters, updates and sorts: each must lead to something that the model has.

A misspelt name finds nothing, sorts by nothing, or stores a field that nobody
reads, without a word. So a stored path is followed through the shapes of the
model, and of the kinds below it, before anything is sent. Whoever means it
writes `Unchecked({…})`. On the way one learns where text stands for an
ObjectId.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bson import ObjectId

from treadle.errors import UsageError
from treadle.model.bson_types import RESERVED, Update
from treadle.model.codec import Codec
from treadle.model.shape import Shape
from treadle.query.paths import ARRAYS, nearest

# Paths of one model that are remembered; keys of maps and positions are the callers' and have no end.
TARGETS_MAX = 2_000
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]{24}")
_LOGICAL = ("$and", "$or", "$nor")


class Unchecked(dict[str, Any]):
    """A filter or update whose names and values are passed through as they are."""


class Target(NamedTuple):
    """What a stored path leads to; none where it may be anything."""

    codec: Codec[Any]
    shapes: tuple[Shape, ...]


class _Missing(Exception):
    """There is no such field; says which, of which model, or in what that is none."""

    def __init__(self, name: str, codec: Codec[Any], shape: Shape | None = None) -> None:
        super().__init__(name)
        self.name = name
        self.codec = codec
        self.shape = shape


def target_of(codec: Codec[Any], path: str, place: str) -> Target:
    """What a stored path of a model, or of a kind below it, leads to; refuses one that leads nowhere."""
    known: dict[str, Target] = codec.targets
    target = known.get(path)
    if target is None:
        target = _follow(codec, path, place)
        if len(known) >= TARGETS_MAX:
            known.clear()
        known[path] = target
    return target


def _follow(codec: Codec[Any], path: str, place: str) -> Target:
    parts = path.split(".")
    if parts[0] == RESERVED or parts[0] in codec.owned:
        return Target(codec, ())
    shapes: list[Shape] = []
    missing: list[_Missing] = []
    for each in (codec, *codec.kinds):
        try:
            shapes += _fields(each, parts)
        except _Missing as error:
            missing.append(error)
    if len(missing) > len(codec.kinds):
        raise _unknown(codec, path, place, missing)
    return Target(codec, tuple(shapes))


def _fields(codec: Codec[Any], parts: Sequence[str]) -> list[Shape]:
    """The shapes at the end of a path that begins at a model."""
    field = codec.by_stored.get(parts[0])
    if field is None:
        if codec.model.model_config.get("extra") == "allow" or codec.model.__pydantic_root_model__:
            return []
        raise _Missing(parts[0], codec)
    return _inside(codec, field.shape, parts[1:])


def _inside(codec: Codec[Any], shape: Shape, parts: Sequence[str]) -> list[Shape]:
    if not parts:
        return [shape]
    head = parts[0]
    if shape.kind in ARRAYS:
        # A position, or straight into the elements.
        rest = parts[1:] if head.isdigit() or head.startswith("$") else parts
        return [found for item in shape.items or (_ANY,) for found in _inside(codec, item, rest)]
    if shape.kind == "map":
        return _in_map(codec, shape, parts)
    if shape.kind == "model":
        return _fields(codec.codec_of(shape.python), parts)
    if shape.kind == "union":
        return _members(codec, shape, parts)
    if shape.kind in ("any", "custom") or head.startswith("$"):
        return []
    raise _Missing(head, codec, shape)


def _in_map(codec: Codec[Any], shape: Shape, parts: Sequence[str]) -> list[Shape]:
    """The same in a dict, whose keys are the callers' own, however they are made."""
    try:
        return _inside(codec, shape.items[1], parts[1:]) if len(shape.items) > 1 else []
    except _Missing:
        return []


def _members(codec: Codec[Any], shape: Shape, parts: Sequence[str]) -> list[Shape]:
    """The same in a union, where one member will do."""
    found: list[Shape] = []
    missing: list[_Missing] = []
    for item in shape.items:
        try:
            found += _inside(codec, item, parts)
        except _Missing as error:
            missing.append(error)
    if missing and len(missing) == len(shape.items):
        raise missing[0]
    return found


_ANY = Shape("any", Any)


def _unknown(codec: Codec[Any], path: str, place: str, missing: Sequence[_Missing]) -> UsageError:
    first = max(missing, key=lambda each: each.codec is not codec)
    model, name = first.codec.model.__name__, first.name
    if first.shape is not None:
        return UsageError(
            f"the {place} names {path!r}, but there is nothing in a {first.shape.name}; name the field "
            "itself (Unchecked({…}) lets it through)",
            code="field-unknown",
        )
    stored = first.codec.by_name.get(name)
    if stored is not None:
        return UsageError(
            f"the {place} names {path!r}, but {model}.{name} is stored as {stored.stored!r}; filters, "
            "updates and sorts use stored names",
            code="python-name",
        )
    known = {field for each in missing for field in each.codec.by_stored} | set(codec.owned)
    near = nearest(name, known)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}"
    return UsageError(
        f"the {place} names {path!r}, but {model} has no field that is stored as {name!r}; {hint} "
        "(Unchecked({…}) lets it through)",
        code="field-unknown",
    )


# -- filters --------------------------------------------------------------------------------------


Find = Callable[[str], Target]


def named_filter(codec: Codec[Any], filter: Mapping[str, Any]) -> dict[str, Any]:
    """A cleaned filter with text made ids where fields are; refuses names that lead nowhere.

    A filter may name fields that only documents of older versions have.
    """

    def known(path: str) -> Target:
        try:
            return target_of(codec, path, "filter")
        except UsageError:
            return Target(codec, ())

    return _checked(filter, known) if codec.has_former_names else checked_filter(codec, filter)


def checked_filter(codec: Codec[Any], filter: Mapping[str, Any]) -> dict[str, Any]:
    """The same, of a model without older versions."""
    return _checked(filter, lambda path: target_of(codec, path, "filter"))


def _checked(filter: Mapping[str, Any], find: Find) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for key, condition in filter.items():
        if key in _LOGICAL and isinstance(condition, list):
            checked[key] = [_checked(each, find) if isinstance(each, Mapping) else each for each in condition]
        elif key.startswith("$"):
            checked[key] = condition
        else:
            checked[key] = with_ids(find(key), condition)
    return checked


def checked_array_filters(codec: Codec[Any], update: Any, filters: Sequence[Any]) -> list[Any]:
    """The same for conditions on elements, which an update names by `$[identifier]`."""
    places: dict[str, str] = {}
    paths = [path for changes in update.values() for path in changes] if isinstance(update, Mapping) else []
    for path in paths:
        parts = path.split(".")
        for number, part in enumerate(parts):
            if part.startswith("$[") and len(part) > 3:
                places.setdefault(part[2:-1], ".".join(parts[: number + 1]))

    def find(key: str) -> Target:
        identifier, dot, rest = key.partition(".")
        place = places.get(identifier)
        # One that the update does not name, the server refuses.
        return Target(codec, ()) if place is None else target_of(codec, f"{place}{dot}{rest}", "array filter")

    return [_checked(each, find) if isinstance(each, Mapping) else each for each in filters]


def with_ids(target: Target, condition: Any) -> Any:
    """A condition, or a value, with text made ids where the path is one of ids; checks what lies inside."""
    if isinstance(condition, Mapping):
        if any(str(key).startswith("$") for key in condition):
            return {key: _operand(target, key, value) for key, value in condition.items()}
        return _document(target, condition)
    if isinstance(condition, list):
        return [with_ids(target, item) for item in condition]
    if isinstance(condition, str) and _HEXADECIMAL.fullmatch(condition) and _holds_ids(target.shapes):
        return ObjectId(condition)
    return condition


def _operand(target: Target, operator: str, value: Any) -> Any:
    if operator == "$elemMatch" and isinstance(value, Mapping):
        return _pulled(target, value)
    if operator in ("$regex", "$options", "$exists", "$type", "$size", "$mod", "$geoWithin", "$near"):
        return value
    return with_ids(target, value)


def _document(target: Target, value: Mapping[str, Any]) -> Any:
    """A sub-document to be equal to; its ids, where it is known what it is."""
    models = _models(target.shapes)
    if len(models) != 1:
        return value
    codec = target.codec.codec_of(models[0])
    fields = codec.by_stored
    return {
        key: with_ids(Target(codec, (fields[key].shape,)), item) if key in fields else item
        for key, item in value.items()
    }


def _elements(shapes: Iterable[Shape]) -> list[Shape]:
    """Single values: the shapes themselves, or what arrays of them hold."""
    single: list[Shape] = []
    for shape in shapes:
        single += _elements(shape.items or (_ANY,)) if shape.kind in ARRAYS else [shape]
    return single


def _holds_ids(shapes: Sequence[Shape]) -> bool:
    single = _elements(shapes)
    return bool(single) and all(each.kind == "scalar" and each.python is ObjectId for each in single)


def _models(shapes: Sequence[Shape]) -> list[Any]:
    return [each.python for each in _elements(shapes) if each.kind == "model"]


# -- updates and sorts -----------------------------------------------------------------------------


def checked_update(codec: Codec[Any], update: Update) -> Update:
    """A cleaned update; refuses names that lead nowhere, and makes ids of text that is to be pulled."""
    if not isinstance(update, (dict, Mapping)):
        for path in _set_by(update):
            target_of(codec, path, "update")
        return update
    checked: dict[str, Any] = {}
    for operator, changes in update.items():
        checked[operator] = dict(changes)
        for path, value in changes.items():
            target = target_of(codec, path, "update")
            if operator == "$rename" and isinstance(value, str):
                target_of(codec, value, "update")
            elif operator in ("$pull", "$pullAll"):
                checked[operator][path] = _pulled(target, value)
    return checked


def _pulled(target: Target, value: Any) -> Any:
    """A condition on the elements of an array: on their fields, or on themselves."""
    models = _models(target.shapes)
    if models and isinstance(value, Mapping):
        return checked_filter(target.codec.codec_of(models[0]), value) if len(models) == 1 else value
    return with_ids(target, value)


def _set_by(pipeline: Sequence[Mapping[str, Any]]) -> set[str]:
    """What a pipeline sets for good; what it removes again is a note to itself."""
    paths: set[str] = set()
    for stage in pipeline:
        ((operator, body),) = stage.items()
        if operator in ("$set", "$addFields"):
            paths |= set(body)
        elif operator == "$unset":
            paths -= {body} if isinstance(body, str) else set(body)
        else:
            return set()
    return paths
