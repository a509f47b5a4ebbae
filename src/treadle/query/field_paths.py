"""Everything that filters, updates and sorts need to know about the stored paths of a model.

A misspelt name finds nothing, sorts by nothing, or stores a field that no model reads, without an error. So
each stored path is followed through the model, and through the kinds below it, before anything is sent.
A path is compiled when it is first used, and remembered.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from bson import ObjectId

from treadle.errors import UsageError
from treadle.model.attributes import is_paired
from treadle.model.bson_types import RESERVED, refuse_unsendable
from treadle.model.shape import ANY, ModelCodec, Shape
from treadle.query.attributes import Attribute, attribute_of
from treadle.query.field_types import FieldType, field_type, undeclared
from treadle.query.paths import ARRAYS, elements, overlap, plain, suggestion

# Keys of maps and positions are the callers', so the paths of a model have no end.
PATHS_MAX = 2_000
_POSITION = re.compile(r"\$(\[[A-Za-z0-9]*\])?")


class Unchecked(dict[str, Any]):
    """A filter or update whose names and values are passed through as they are."""


class Maintained(Protocol):
    """An owned path, as far as updates of it are concerned."""

    @property
    def refilled(self) -> bool:
        """Whether the value is filled again after a write, so that callers may write what surrounds it."""

    @property
    def advice(self) -> str:
        """What a caller should do instead of writing this path."""


class Refusal(NamedTuple):
    """Why a path may not be named, or not be updated."""

    reason: str
    code: str
    # Whether `Unchecked` does not lift it.
    is_final: bool = True


class FieldPath(NamedTuple):
    """One stored path of a model."""

    path: str
    # The same without positions.
    plain: str
    # What judges a value, and the types in further kinds, to whose documents the value may go as well.
    type: FieldType
    others: tuple[FieldType, ...]
    # Whether a value that these types accept leaves a document of any kind valid.
    certain: bool
    # Whether text stands for an ObjectId, and whether a document is stored as the paths inside it say.
    holds_ids: bool
    holds_fields: bool
    # The types, of the field and of its elements, whose values a serializer of the user's own stores.
    serialized: tuple[FieldType, ...]
    # Why the path may not be named at all, and why it may not be updated.
    unknown: Refusal | None
    protected: Refusal | None
    attribute: Attribute | None
    # Whether Treadle completes a value that is set here, so that it need not be whole.
    is_completed: bool
    # Whether something is derived from it.
    is_followed: bool

    def check(self, place: str, *, lenient: bool) -> None:
        """Refuse a path that leads nowhere; with `lenient` only one that can never be meant."""
        if self.unknown is not None and (self.unknown.is_final or not lenient):
            raise self._refused(self.unknown, place)

    def check_update(self, *, unchecked: bool) -> None:
        """Refuse a path that callers may not update, or that the model does not have."""
        if self.protected is not None:
            raise self._refused(self.protected, "update")
        self.check("update", lenient=unchecked)

    def _refused(self, refusal: Refusal, place: str) -> UsageError:
        return UsageError(f"the {place} names {self.path!r}, {refusal.reason}", code=refusal.code)


class FieldPaths(dict[str, FieldPath]):
    """The stored paths of one model of a Store."""

    def __init__(
        self,
        codec: ModelCodec,
        maintained: Mapping[str, Maintained] = MappingProxyType({}),
        followed: Collection[str] | None = (),
    ) -> None:
        super().__init__()
        self.codec = codec
        self.model = codec.model.__name__
        self.maintained = maintained
        # The paths from which something is derived; None for all.
        self.followed = followed

    def __missing__(self, path: str) -> FieldPath:
        if not isinstance(path, str):
            raise UsageError(f"{path!r} is not a field of {self.model}; keys are text", code="filter-invalid")
        refuse_unsendable(path)
        if len(self) >= PATHS_MAX:
            self.clear()
        field = self[path] = self._compile(path)
        return field

    def named(self, path: str, place: str, *, lenient: bool = False) -> FieldPath:
        """Return a path that a caller names in a filter, update or sort; refuses one that leads nowhere.

        `lenient` lets through a name that the model does not have.
        """
        field = self[path]
        field.check(place, lenient=lenient)
        return field

    def are_followed(self, paths: Iterable[str] | None) -> bool:
        """Whether something is derived from any of these plain paths; None stands for all paths."""
        return self.followed is None or any(
            paths is None or any(overlap(path, each) for path in paths) for each in self.followed
        )

    def _compile(self, path: str) -> FieldPath:
        types, unknown = self._types(path)
        agreed = bool(types) and all(each.shape == types[0].shape for each in types)
        accepting = types if agreed else [FieldType(self.codec)]
        shapes = [element for each in types for element in elements(each.shape)]
        short = plain(path)
        return FieldPath(
            path=path,
            plain=short,
            type=accepting[0],
            others=tuple(accepting[1:]),
            certain=all(each.certain for each in [*accepting, *self._kinds_without(types)]),
            holds_ids=bool(shapes) and all(each.python is ObjectId for each in shapes),
            holds_fields=any(map(_has_fields, shapes)),
            serialized=tuple(each for type_ in types for each in type_.serialized),
            unknown=unknown,
            protected=self._refused_name(path) or self._maintenance(short),
            attribute=attribute_of(self.codec, path),
            is_completed=any(self._surrounds(short, each) for each in self.maintained),
            is_followed=self.are_followed((short,)),
        )

    def _kinds(self) -> tuple[ModelCodec, ...]:
        return (self.codec, *self.codec.kinds)

    def _kinds_without(self, types: Sequence[FieldType]) -> list[FieldType]:
        """Return what the path is in kinds that lack it, to whose documents a value may go as well."""
        return [] if len(types) > len(self.codec.kinds) else list(map(undeclared, self._kinds()))

    def _types(self, path: str) -> tuple[list[FieldType], Refusal | None]:
        """Return what a path leads to, in each kind that has it; or why no kind has it."""
        parts = path.split(".")
        if parts[0] == RESERVED or parts[0] in self.codec.owned:
            return [], None
        types, missing = [], []
        for codec in self._kinds():
            try:
                types.append(_in_model(codec, parts, certain=True))
            except _MissingField as error:
                missing.append(error)
        return types, None if types else _unknown(self.codec, missing)

    def _refused_name(self, path: str) -> Refusal | None:
        """Return why a path may not be updated, if its name alone says so."""
        head, *rest = path.split(".")
        if head == RESERVED:
            return Refusal("which is Treadle's own and cannot be updated", code="field-maintained")
        if head in self.codec.owned:
            return Refusal(
                f"which says of which kind or version a {self.model} is and cannot be updated; use "
                "change_kind() for the kind, migrate() for the version",
                code="field-maintained",
            )
        names = [head, *(part for part in rest if not _POSITION.fullmatch(part))]
        if all(name and not name.startswith("$") and "\0" not in name for name in names):
            return None
        return Refusal(
            "which is not the path of a field: names are not empty and do not begin with '$'",
            code="update-invalid",
        )

    def _maintenance(self, short: str) -> Refusal | None:
        """Return why a path may not be updated, if Treadle maintains it or a part of it."""
        for maintained, owned in self.maintained.items():
            if overlap(short, maintained) and not self._surrounds(short, maintained):
                return Refusal(
                    f"which cannot be updated, because Treadle maintains {self.model}.{maintained}"
                    f"{owned.advice}",
                    code="field-maintained",
                )
        return None

    def _surrounds(self, short: str, maintained: str) -> bool:
        """Whether callers may write this path although it contains a maintained one."""
        return self.maintained[maintained].refilled and maintained.startswith(f"{short}.")


def _has_fields(shape: Shape) -> bool:
    """Whether the values inside this one may have another stored form than any value of their type."""
    if shape.kind != "map":
        return shape.kind == "model"
    return any(each.kind != "scalar" or each.python is ObjectId for each in shape.items[1:])


# -- from a path to its types ---------------------------------------------------------------------------


class _MissingField(Exception):
    """A model has no such field, or a value has no fields at all."""

    def __init__(self, name: str, codec: ModelCodec, shape: Shape | None = None) -> None:
        super().__init__(name)
        self.name = name
        self.codec = codec
        self.shape = shape


def _in_model(codec: ModelCodec, parts: Sequence[str], *, certain: bool) -> FieldType:
    """Return what a path within a model leads to."""
    name, root = parts[0], codec.model.__pydantic_root_model__
    field = None if root else codec.by_stored.get(name)
    if field is not None:
        return _inside(field_type(codec, field, certain=certain), parts[1:])
    if not root and (codec.model.model_config.get("extra") != "allow" or name in codec.by_name):
        raise _MissingField(name, codec)
    return undeclared(codec)


def _inside(type_: FieldType, parts: Sequence[str]) -> FieldType:
    kind = type_.shape.kind
    if not parts:
        return type_
    if kind in _WAYS_INSIDE:
        return _WAYS_INSIDE[kind](type_, parts)
    if kind in ("any", "custom") or parts[0].startswith("$"):
        return FieldType(type_.codec, certain=type_.is_open and type_.core_type == "any")
    raise _MissingField(parts[0], type_.codec, type_.shape)


def _in_nested(type_: FieldType, parts: Sequence[str]) -> FieldType:
    nested = type_.codec.codec_of(type_.shape.python)
    # Where there is no nested document, the server makes one of this field alone.
    whole = type_.required or not any(each.info.is_required() for each in nested.fields)
    return _in_model(nested, parts, certain=type_.is_open and whole)


def _in_array(type_: FieldType, parts: Sequence[str]) -> FieldType:
    """The same in an array: at a position, or straight into the elements."""
    codec, head = type_.codec, parts[0]
    rest = parts[1:] if head.isdigit() or head.startswith("$") else parts
    if type_.element is None:
        items = type_.shape.items or (ANY,)
        return _common(codec, [_inside(FieldType(codec, each), rest) for each in items])
    element = copy.copy(type_.element)
    # A position beyond the end makes new elements, and a path without one an object where no array is.
    element.certain = element.certain and head.startswith("$")
    return _inside(element, rest)


def _in_map(type_: FieldType, parts: Sequence[str]) -> FieldType:
    """The same in a dict, whose keys are the callers' and may contain dots."""
    if len(type_.shape.items) < 2:
        return FieldType(type_.codec)
    if is_paired(type_.shape):
        return type_.map_value(".".join(parts))
    try:
        return _inside(type_.map_value(parts[0]), parts[1:])
    except _MissingField:
        return FieldType(type_.codec)


def _in_union(type_: FieldType, parts: Sequence[str]) -> FieldType:
    """The same in a union, of which one member must have the rest of the path."""
    types: list[FieldType] = []
    missing: list[_MissingField] = []
    for item in type_.shape.items:
        try:
            types.append(_inside(FieldType(type_.codec, item), parts))
        except _MissingField as error:
            missing.append(error)
    if not types and missing:
        raise missing[0]
    return _common(type_.codec, types)


def _common(codec: ModelCodec, types: Sequence[FieldType]) -> FieldType:
    """Return the type of what several lead to: of anything, where they differ."""
    shapes = [each.shape for each in types]
    shape = shapes[0] if shapes and all(each == shapes[0] for each in shapes) else ANY
    return types[0] if len(types) == 1 else FieldType(codec, shape)


_WAYS_INSIDE = {
    "model": _in_nested,
    "map": _in_map,
    "union": _in_union,
    **dict.fromkeys(ARRAYS, _in_array),
}


def _unknown(codec: ModelCodec, missing: Sequence[_MissingField]) -> Refusal:
    first = max(missing, key=lambda each: each.codec is not codec)
    model, name = first.codec.model.__name__, first.name
    if first.shape is not None:
        reason = f"but there is nothing in a {first.shape.name}; name the field itself"
        return Refusal(f"{reason} (Unchecked({{…}}) lets it through)", code="field-unknown", is_final=False)
    declared = first.codec.by_name.get(name)
    if declared is not None:
        return Refusal(
            f"but {model}.{name} is stored as {declared.stored!r}; filters, updates and sorts use stored "
            "names",
            code="python-name",
            is_final=first.codec is codec,
        )
    names = {field for each in missing for field in each.codec.by_stored} | set(codec.owned)
    return Refusal(
        f"but {model} has no field that is stored as {name!r}; {suggestion(name, sorted(names))} "
        "(Unchecked({…}) lets it through)",
        code="field-unknown",
        is_final=False,
    )
