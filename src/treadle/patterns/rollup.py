"""Rollup: one document per group of sources, with what is computed over the group.

A group is known by its keys: fields of the sources, or windows of their
dates. Its document appears with the first source and goes with the last. How
many sources it has is counted in its reserved sub-document; what stands in its
fields are the aggregates of Computed, over the group in place of a reference.

A unique index on the keys (or the keys as `_id`) makes two writers who open
the same group meet: without it, both would make a document.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

from treadle.errors import DeclarationError
from treadle.graph.binding import check_maintenance
from treadle.graph.derived import GroupRule, Relation, copies_in, copies_of
from treadle.graph.model_entry import Maintain, ModelEntry
from treadle.graph.rule import ModelReference, Models, Pattern, Place, Rule
from treadle.model.codec import Codec, codec_of
from treadle.model.shape import Shape
from treadle.query.filters import parse_condition
from treadle.query.keys import GroupField, Key, group_key
from treadle.query.paths import Path, model_of, overlap, resolve
from treadle.query.windows import Unit, Window, is_timezone

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class _Windowed:
    """A key that is the window of a date: `Day("created_at", timezone="Europe/Berlin")`."""

    unit: ClassVar[Unit]

    field: str
    timezone: str = "UTC"


@dataclass(frozen=True)
class _Sized(_Windowed):
    """Several minutes or hours as one window."""

    size: int = 1


class Minute(_Sized):
    """The minute of a date, or `size` of them: `Minute("at", size=15)` cuts each hour in four."""

    unit: ClassVar[Unit] = "minute"


class Hour(_Sized):
    """The hour of a date, or `size` of them, from the full hour on the clock of the time zone."""

    unit: ClassVar[Unit] = "hour"


class Day(_Windowed):
    """The day of a date, from midnight to midnight in the time zone."""

    unit: ClassVar[Unit] = "day"


class Week(_Windowed):
    """The week of a date, which begins on Monday in the time zone."""

    unit: ClassVar[Unit] = "week"


class Month(_Windowed):
    """The month of a date, in the time zone."""

    unit: ClassVar[Unit] = "month"


class Quarter(_Windowed):
    """The quarter of a date, from the first of January, April, July or October, in the time zone."""

    unit: ClassVar[Unit] = "quarter"


class Year(_Windowed):
    """The year of a date, in the time zone."""

    unit: ClassVar[Unit] = "year"


@dataclass(frozen=True)
class Total:
    """A key that all sources have in common, so that one document sums them up: `keys={"id": Total()}`."""

    name: str = "all"


@dataclass(frozen=True)
class Rollup(Pattern):
    """One document per group of `source`: `class DailySales(Document, rollup=Rollup(Sale, keys={…}))`.

    `keys` names the model's fields that hold the group's values, and what
    they are made of: a field of the source, or `Minute`, `Hour`, `Day`,
    `Week`, `Month`, `Quarter` or `Year` of a date, or `Total`.
    """

    pattern: ClassVar[str] = "rollup"
    keyword: ClassVar[str | None] = "rollup"

    source: ModelReference
    keys: Mapping[str, str | _Windowed | Total]
    where: Mapping[str, Any] | None = None
    maintain: Maintain = "write"
    every: dt.timedelta | None = None

    def bind(self, place: Place, graph: Models) -> Rule:
        _refuse_shapes(place)
        check_maintenance(place, self.maintain, self.every)
        return RollupRule(place, graph, self)


def _refuse_shapes(place: Place) -> None:
    """The groups of a rollup are made by Treadle; they have no kinds, and no older versions."""
    settings = place.entry.model.__treadle__
    shaped = "version" if settings.version is not None else "discriminator"
    if getattr(settings, shaped) is not None:
        raise DeclarationError(
            f"{place.label} has rollup= and {shaped}=, which do not go together; keep one of them",
            code="kind-invalid" if shaped == "discriminator" else "version-invalid",
        )


class RollupRule(GroupRule):
    """The groups of one source, each with a document."""

    def __init__(self, place: Place, graph: Models, declared: Rollup) -> None:
        source = graph.resolve(declared.source, place.label)
        if source is place.entry:
            raise DeclarationError(f"{place.label} is a rollup of itself", code="maintenance-cycle")
        match, on = group_key(_parts(place, source, declared.keys))
        where = parse_condition(source.codec, declared.where or {})
        super().__init__(place, Relation(source, match, on, where), declared)
        _check_identity(place, on)

    def check(self, graph: Models) -> None:
        """Refuse what a rollup's document cannot hold, because only Treadle makes it."""
        entry = self.target
        wrong = [rule for rule in copies_of(entry, None) if rule.on_delete != "keep"]
        wrong += [rule for rule in copies_in(entry) if rule.on_delete in ("clear", "cascade")]
        for rule in wrong:
            raise DeclarationError(
                f"{rule.place.label} has on_delete={rule.on_delete!r}; the documents of a rollup come and go "
                "with their groups alone: use on_delete='keep'",
                code="rollup-field",
            )
        for name in _unfilled(entry.codec, "", [*entry.paths.owned]):
            raise DeclarationError(
                f"{entry.model.__name__}.{name} is neither a key nor computed, and has no default; "
                "a rollup's documents are made by Treadle, which would not know what to put there",
                code="rollup-field",
            )


def _refusal(place: Place, text: str) -> DeclarationError:
    return DeclarationError(f"{place.label} {text}", code="rollup-keys")


def _parts(place: Place, source: ModelEntry, keys: Mapping[str, str | _Windowed | Total]) -> list[GroupField]:
    if not isinstance(keys, Mapping) or not keys:
        raise _refusal(place, "needs keys=, such as keys={'shop': 'shop_id', 'day': Day('created_at')}")
    return [_part(place, source, name, origin) for name, origin in keys.items()]


def _part(place: Place, source: ModelEntry, name: Any, origin: Any) -> GroupField:
    """Return one value that the sources of a group have in common."""
    if not isinstance(name, str) or not isinstance(origin, (str, _Windowed, Total)):
        text = f"has keys={{{name!r}: {origin!r}}}; a key is a field of {source.model.__name__} by its name, "
        kinds = "or a window of one: Minute, Hour, Day, Week, Month, Quarter or Year; or Total"
        raise _refusal(place, text + kinds)
    own = resolve(place.owner, name, place.label, "rollup-keys")
    if isinstance(origin, Total):
        return _total(place, own, origin)
    path = origin if isinstance(origin, str) else origin.field
    other = resolve(source.codec, path, place.label, "source-field-missing")
    for each, of in ((own, place.entry), (other, source)):
        if each.in_array:
            text = f"has a key that lies in an array of {of.model.__name__}: {each.python!r}; "
            raise _refusal(place, f"{text}a document belongs to one group only")
    if isinstance(origin, str):
        _check_type(place, name, own.shape, other.shape, path)
        return GroupField(own.stored, other.stored, None, own.shape.optional)
    window = _window(place, name, origin)
    _check_window(place, name, own.shape, other.shape, path, window)
    return GroupField(own.stored, other.stored, window, own.shape.optional)


def _total(place: Place, own: Path, origin: Total) -> GroupField:
    if not isinstance(origin.name, str) or own.shape.python is not str or own.in_array:
        raise _refusal(place, f"has a Total as its key {own.python!r}, which is a str that has a name")
    # An id is what each source has, and what never changes.
    return GroupField(own.stored, "_id", constant=origin.name)


# Sizes that a larger unit is made of, so that each hour and each day begins with a window.
SIZES = {
    "minute": [size for size in range(1, 31) if not 60 % size],
    "hour": [size for size in range(1, 13) if not 24 % size],
}


def _window(place: Place, name: str, declared: _Windowed) -> Window:
    if not isinstance(declared, _Sized):
        return Window(declared.unit, declared.timezone)
    size, sizes = declared.size, SIZES[declared.unit]
    if type(size) is not int or size not in sizes:
        text = f"has a window as its key {name!r} with size={size!r}; windows of {declared.unit}s have "
        raise _refusal(place, f"{text}one of the sizes {', '.join(map(str, sizes))}")
    return Window(declared.unit, declared.timezone, size)


# What a declared type says too little of to compare it.
_VAGUE = frozenset({"any", "union", "custom"})


def _check_window(place: Place, name: str, own: Shape, other: Shape, path: str, window: Window) -> None:
    if not is_timezone(window.timezone):
        text = f"has the unknown time zone {window.timezone!r} in its key {name!r}; "
        raise _refusal(place, f"{text}write one such as 'Europe/Berlin'")
    for shape, where in ((own, f"{place.label}.{name}"), (other, path)):
        if shape.kind not in _VAGUE and shape.python not in (dt.datetime, dt.date):
            raise _refusal(place, f"has a window as its key {name!r}, but {where} is not a datetime")
    if own.python is dt.date and (window.length < _DAY or not window.utc):
        text = f"has a date as its key {name!r}, which cannot hold the first instant of this window; "
        raise _refusal(place, f"{text}declare a datetime")


def _check_type(place: Place, name: str, own: Shape, other: Shape, path: str) -> None:
    same_kind = own.kind == other.kind and own.python is other.python
    if not same_kind and not {own.kind, other.kind} & _VAGUE:
        text = f"has the key {name!r}, a {own.name}, but the source's {path!r} is a {other.name}; "
        raise _refusal(place, f"{text}declare the same type")


def _check_identity(place: Place, key: Key) -> None:
    """The keys are the id, or they have nothing to do with it."""
    is_id = key.fields == ["_id"]
    about = [path for path in key.fields if path == "_id" or path.startswith("_id.")]
    if about and not is_id:
        text = f"has {about[0]!r} among several keys; either the one key is the id "
        raise _refusal(place, f"{text}(keys={{'id': 'category'}}), or all keys are plain fields")
    for one, other in combinations(key.fields, 2):
        if overlap(one, other):
            raise _refusal(place, f"has the key {one!r} twice")
    if not is_id and getattr(place.entry.ids.shape.python, "__name__", "") != "ObjectId":
        text = "declares an id of its own, but its documents are made by their keys; leave the id out, "
        raise _refusal(place, f"{text}or make it the key: keys={{'id': …}}")


def _unfilled(codec: Codec[Any], prefix: str, maintained: Sequence[str]) -> Iterator[str]:
    """Yield the fields that a document must have and that no rule fills."""
    for field in codec.fields:
        path = prefix + field.stored
        if path == "_id" or path in maintained:
            continue
        inside = any(each.startswith(f"{path}.") for each in maintained)
        model = model_of(field.shape)
        if inside and model is not None:
            # Treadle makes the nested document, so that all of it must be there.
            yield from (f"{field.name}.{each}" for each in _unfilled(codec_of(model), f"{path}.", maintained))
        elif codec.model.__pydantic_fields__[field.name].is_required() and not any(
            path.startswith(f"{each}.") for each in maintained
        ):
            yield field.name
