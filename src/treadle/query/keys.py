"""How a source finds its targets: by an id that it names, or by the group that it belongs to.

A key says which target a contribution goes to. With a `ReferenceKey` it is
the target's `_id`, which the source holds in a field. With a `GroupKey` it is
the list of the values that a group has in common: fields of the source, or
windows of its dates. A list is never an `_id`, so that the two cannot be
mixed up.
"""

from __future__ import annotations

import decimal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias
from uuid import UUID

import bson
from bson import Code, DBRef, Decimal128, Int64, ObjectId, Regex
from pymongo import ASCENDING

from treadle.model.bson_types import CODEC_OPTIONS, Raw
from treadle.query.comparison import is_nan
from treadle.query.paths import Path, expression_of, getter, value_at, values_at, values_expression
from treadle.query.windows import Window

KEY = "__treadle_key"
# The sources of so many groups are looked for one by one; those of more, by ranges.
APART_MAX = 200
_HASHED_AS_COMPARED = frozenset({ObjectId, str, int, Int64, datetime, UUID, bytes})


def freeze(key: Any) -> Any:
    """A key that can stand in a dict, equal to another where the server takes the two for equal."""
    return key if type(key) in _HASHED_AS_COMPARED else _frozen(key)


def _frozen(key: Any) -> Any:
    if isinstance(key, Mapping):
        return (dict, *((name, freeze(value)) for name, value in key.items()))
    if isinstance(key, (list, tuple)):
        return (list, *map(freeze, key))
    if isinstance(key, bool):
        # In Python True equals 1.
        return (bool, key)
    if isinstance(key, (float, decimal.Decimal, Decimal128)):
        if is_nan(key):
            return (float, "nan")
        return key.to_decimal() if isinstance(key, Decimal128) else key
    if isinstance(key, (Regex, Code, DBRef)):
        return bson.encode({"": key}, codec_options=CODEC_OPTIONS)
    return key


def may_be_id(key: Any) -> bool:
    """Whether a document can have this id at all; the server refuses to even look for some others."""
    if isinstance(key, dict):
        return not any(name.startswith("$") for name in key)
    return key is not None and not isinstance(key, (list, Regex))


def freeze_all(keys: Iterable[Any], *, ids: bool = False) -> list[Any]:
    """Each key frozen; with `ids`, None in the place of what cannot be one."""
    return [freeze(key) if not ids or may_be_id(key) else None for key in keys]


def same_key(one: Any, other: Any) -> bool:
    """Whether the server takes two keys for equal."""
    return bool(freeze(one) == freeze(other))


def is_among(key: Any, others: Iterable[Any]) -> bool:
    """Whether the server takes a key for equal to one of several."""
    return freeze(key) in map(freeze, others)


def distinct(keys: Iterable[Any]) -> list[Any]:
    """Keys without those that the server takes for equal to another."""
    return list({freeze(key): key for key in keys}.values())


class ReferenceKey:
    """The id of a target, held in a field of the source, perhaps within arrays."""

    # Whether the key can be told without the server.
    local = True

    def __init__(self, by: Path) -> None:
        self.by = by
        # The stored paths of the source that decide the key.
        self.paths = frozenset({by.stored})
        # How many leading steps lead into the innermost array that holds the key.
        self.array_depth = by.array_depth
        # Keys that agree in this are the same.
        self.signature: Any = by.stored
        # The key of a source, which has at most one; None for none.
        self.one = getter(by.stored)

    def several(self, raw: Raw) -> list[Any]:
        """The distinct keys of a source that holds them in an array."""
        return distinct(key for key in values_at(raw, self.by.steps) if key is not None)

    def of_sources(self, raws: Iterable[Raw]) -> list[Any]:
        """The distinct keys of all these sources, whatever their kind and whether or not they count."""
        if self.array_depth:
            return distinct(key for raw in raws for key in self.several(raw))
        return distinct(key for raw in raws if (key := self.one(raw)) is not None)

    def match(self, keys: Sequence[Any]) -> Raw:
        """A filter, by an index, that lets at least all sources of these targets through."""
        return {self.by.stored: {"$in": list(keys)}}

    def stages(self, keys: Sequence[Any] | None, per_element: bool) -> list[Raw]:
        """Stages that leave one document per contribution, with its key in KEY."""
        path = self.by.stored
        if not self.array_depth:
            return [{"$set": {KEY: expression_of(path)}}]
        if per_element:
            steps = self.by.steps
            arrays = [steps[: number + 1] for number, step in enumerate(steps) if step.array]
            unwinds = [{"$unwind": "$" + ".".join(each.stored for each in array)} for array in arrays]
            chosen = [] if keys is None else [{"$match": self.match(keys)}]
            return [*unwinds, *chosen, {"$set": {KEY: expression_of(path)}}]
        values: Any = values_expression(path)
        for _ in range(sum(step.array for step in self.by.steps) - 1):
            # A missing inner array must not make the whole vanish.
            inner = {"$cond": [{"$isArray": "$$this"}, "$$this", []]}
            flat = {"$concatArrays": ["$$value", inner]}
            values = {"$reduce": {"input": values, "initialValue": [], "in": flat}}
        values = {"$cond": [{"$isArray": values}, values, []]}
        # A source that names a target twice still counts once.
        once = (
            {"$setIntersection": [values, {"$literal": list(keys)}]}
            if keys is not None
            else {"$setUnion": [values, []]}
        )
        return [{"$set": {KEY: once}}, {"$unwind": f"${KEY}"}]

    def index_keys(self, *, windows_first: bool = False) -> list[tuple[str, int]]:
        """An index on the sources by which they are found; where whole windows are, those first."""
        return [(self.by.stored, ASCENDING)]


@dataclass(frozen=True)
class KeyPart:
    """One value that the sources of a group have in common, and where the target holds it."""

    target: str
    source: str
    window: Window | None = None
    # Whether sources without a value form a group of their own.
    optional: bool = False
    # What all sources have in common; they then are one group, whatever they hold.
    constant: str | None = None

    def value(self, raw: Raw) -> Any:
        """The value of a source; only in UTC for a window."""
        if self.constant is not None:
            return self.constant
        value = value_at(raw, self.source)
        if self.window is not None:
            return self.window.start_of(value)
        return None if isinstance(value, list) else value

    def expression(self, within: str = "") -> Any:
        """The same, as the server computes it, from a document that stands `within` another."""
        if self.constant is not None:
            return {"$literal": self.constant}
        path = f"${within}{self.source}"
        if self.window is not None:
            return self.window.expression(path)
        return {"$cond": [{"$isArray": path}, None, path]}

    def match(self, values: Sequence[Any]) -> Raw:
        """A filter that lets at least the sources with these values through."""
        if self.constant is not None:
            return {}
        if self.window is None or None in values:
            # What is no date has no window; nobody can say what it is instead.
            return {} if self.window is not None else {self.source: {"$in": list(values)}}
        spans = [self.window.span(value) for value in values]
        first, last = min(start for start, _ in spans), max(end for _, end in spans)
        return {self.source: {"$gte": first, "$lte": last}}


class GroupKey:
    """The values that the sources of one group have in common; answers what a `ReferenceKey` answers."""

    array_depth = 0

    def __init__(self, parts: Sequence[KeyPart]) -> None:
        self.parts = self.signature = tuple(parts)
        self.paths = frozenset(part.source for part in parts)
        self.local = all(part.window is None or part.window.utc for part in parts)
        # Whether the group's only value is the target's `_id`.
        self.identity = [part.target for part in parts] == ["_id"]
        self._required = [number for number, part in enumerate(parts) if not part.optional]

    @property
    def targets(self) -> list[str]:
        """The stored paths of the target that hold the key."""
        return [part.target for part in self.parts]

    def one(self, raw: Raw) -> list[Any] | None:
        return self.checked([part.value(raw) for part in self.parts])

    def of_sources(self, raws: Iterable[Raw]) -> list[Any]:
        """The distinct keys of all these sources, whatever their kind and whether or not they count."""
        return distinct(key for raw in raws if (key := self.one(raw)) is not None)

    def checked(self, values: Sequence[Any]) -> list[Any] | None:
        """The key that values make; None where one is missing that must not be."""
        return None if any(values[number] is None for number in self._required) else list(values)

    def match(self, keys: Sequence[Any]) -> Raw:
        if len(keys) == 1:
            return self._sources(keys[0])
        if len(keys) <= APART_MAX:
            return {"$or": [self._sources(key) for key in keys]}
        columns = zip(self.parts, zip(*keys, strict=True), strict=True)
        return {"$and": [part.match(distinct(values)) for part, values in columns]}

    def _sources(self, key: Sequence[Any]) -> Raw:
        return {"$and": [part.match([value]) for part, value in zip(self.parts, key, strict=True)]}

    def stages(self, keys: Sequence[Any] | None, per_element: bool) -> list[Raw]:
        stages: list[Raw] = [{"$set": {KEY: [part.expression() for part in self.parts]}}]
        if keys is not None:
            return [*stages, {"$match": {KEY: {"$in": list(keys)}}}]
        if self._required:
            # By expressions: a path would look into a value that is a document, and find nothing there.
            kinds = [{"$type": {"$arrayElemAt": [f"${KEY}", number]}} for number in self._required]
            missing = [{"$in": [kind, ["null", "undefined", "missing"]]} for kind in kinds]
            stages.append({"$match": {"$expr": {"$not": [{"$or": missing}]}}})
        return stages

    def index_keys(self, *, windows_first: bool = False) -> list[tuple[str, int]]:
        # Equal values first, then ranges.
        varying = [part for part in self.parts if part.constant is None]
        ordered = sorted(varying, key=lambda part: (part.window is not None) != windows_first)
        return list(dict.fromkeys((part.source, ASCENDING) for part in ordered))

    # -- the targets --------------------------------------------------------------------

    def of_target(self, document: Mapping[str, Any]) -> list[Any]:
        """The key of a target."""
        return [value_at(document, part.target) for part in self.parts]

    def target(self, key: Sequence[Any]) -> Raw:
        """The filter for the target of a group, which an upsert makes the group's values of."""
        return {part.target: {"$eq": value} for part, value in zip(self.parts, key, strict=True)}

    def target_expression(self) -> list[Any]:
        """The key of a target, as the server reads it."""
        return [{"$ifNull": [f"${part.target}", None]} for part in self.parts]


Key: TypeAlias = ReferenceKey | GroupKey
