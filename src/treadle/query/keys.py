"""How a source finds its targets: by an id that it holds, or by the group that it belongs to.

A key says which target a source contributes to. It is the value of a field, which may lie in arrays, so that
one source has several; or it is the list of the values that a group has in common: fields of the source, or
windows of its dates. A list is never an `_id`, so the two cannot be confused.
"""

from __future__ import annotations

import decimal
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import bson
from bson import Code, DBRef, Decimal128, Int64, ObjectId, Regex
from pymongo import ASCENDING

from treadle.model.bson_types import CODEC_OPTIONS, Raw
from treadle.query.comparison import is_nan
from treadle.query.paths import REFERRED, Path, expression_of, value_at, variable_field
from treadle.query.windows import Window

KEY = "__treadle_key"
# The sources of so many groups are found one by one; those of more, by ranges.
GROUPS_APART_MAX = 200
_HASHED_AS_COMPARED = frozenset({ObjectId, str, int, Int64, datetime, UUID, bytes})
# A frozen key, and distinct keys by their frozen form.
Frozen: TypeAlias = Hashable
Keys: TypeAlias = dict[Frozen, Any]


def freeze(key: Any) -> Any:
    """Return a hashable form of a key, equal to another's where the server treats the two as equal."""
    return key if type(key) in _HASHED_AS_COMPARED else _frozen(key)


def _frozen(key: Any) -> Any:
    if isinstance(key, Mapping):
        return (dict, *((name, freeze(value)) for name, value in key.items()))
    if isinstance(key, (list, tuple)):
        return (list, *map(freeze, key))
    if isinstance(key, bool):
        # To Python True equals 1.
        return (bool, key)
    if isinstance(key, (float, decimal.Decimal, Decimal128)):
        if is_nan(key):
            return (float, "nan")
        return key.to_decimal() if isinstance(key, Decimal128) else key
    if isinstance(key, (Regex, Code, DBRef)):
        return bson.encode({"": key}, codec_options=CODEC_OPTIONS)
    return key


def may_be_id(key: Any) -> bool:
    """Whether a document can have this id at all; the server refuses even to search for some others."""
    if isinstance(key, dict):
        return not any(name.startswith("$") for name in key)
    return key is not None and not isinstance(key, (list, Regex))


def freeze_all(keys: Iterable[Any], *, ids: bool = False) -> list[Any]:
    """Return each key frozen; with `ids`, None in the place of what cannot be an id."""
    return [freeze(key) if not ids or may_be_id(key) else None for key in keys]


def same_key(one: Any, other: Any) -> bool:
    """Whether the server treats two keys as equal."""
    return bool(freeze(one) == freeze(other))


def is_among(key: Any, others: Iterable[Any]) -> bool:
    """Whether the server treats a key as equal to one of several."""
    return freeze(key) in map(freeze, others)


def distinct(keys: Iterable[Any]) -> list[Any]:
    """Return the keys without those that the server treats as equal to another."""
    return list({freeze(key): key for key in keys}.values())


class GroupField(NamedTuple):
    """One value that the sources of a group have in common, and where the target holds it."""

    target: str
    source: str
    window: Window | None = None
    # Whether sources without a value form a group of their own.
    optional: bool = False
    # The same value for all sources, so that they form one group.
    constant: str | None = None

    def value(self, raw: Raw) -> Any:
        """Return the value of a source; of a window only in UTC."""
        if self.constant is not None:
            return self.constant
        value = value_at(raw, self.source)
        if self.window is not None:
            return self.window.start_of(value)
        return None if isinstance(value, list) else value

    def expression(self, within: str = "") -> Any:
        """Return the same for the server, from a document that lies `within` another."""
        if self.constant is not None:
            return {"$literal": self.constant}
        path = f"${within}{self.source}"
        if self.window is not None:
            return self.window.expression(path)
        return {"$cond": [{"$isArray": path}, None, path]}

    def match(self, values: Sequence[Any]) -> Raw:
        """Return a filter that lets at least the sources with these values through."""
        if self.constant is not None:
            return {}
        if self.window is None:
            return {self.source: {"$in": list(values)}}
        if None in values:
            # What is not a date has no window, and may be anything.
            return {}
        spans = [self.window.span(value) for value in values]
        first, last = min(start for start, _ in spans), max(end for _, end in spans)
        return {self.source: {"$gte": first, "$lte": last}}


class Slot(NamedTuple):
    """One place of a target that holds a derived value, and the key that it is computed for."""

    path: str
    key: Any | None


class Key(NamedTuple):
    """The keys of a document: the values at a path, or the one list of the values of a group.

    `arrays` are the prefixes of the path that the model declares as arrays, outermost first. Elsewhere an
    array is what another program stored, and has no key, because a list is never one.
    """

    path: str
    arrays: tuple[str, ...] = ()
    group: tuple[GroupField, ...] = ()

    @property
    def fields(self) -> list[str]:
        """The stored paths that decide the key."""
        return [field.source for field in self.group] if self.group else [self.path]

    @property
    def is_local(self) -> bool:
        """Whether the key can be told without the server."""
        return all(field.window is None or field.window.utc for field in self.group)

    def of(self, document: Raw) -> Keys:
        """Return the distinct keys of a source; none for what is null or missing."""
        if self.group:
            keys = self._of_group(document)
        elif self.arrays:
            keys = self._in_arrays(document)
        else:
            keys = [value_at(document, self.path)]
        is_group = bool(self.group)
        return {freeze(key): key for key in keys if is_group or _is_key(key)}

    def one(self, document: Raw) -> Any:
        """Return the key of a document that has at most one; None for none."""
        if self.group:
            return next(iter(self._of_group(document)), None)
        # Most keys are fields of the document itself.
        key = value_at(document, self.path) if "." in self.path else document.get(self.path)
        return key if _is_key(key) else None

    def of_all(self, documents: Iterable[Raw]) -> list[Any]:
        """Return the distinct keys of several documents."""
        return list({frozen: key for each in documents for frozen, key in self.of(each).items()}.values())

    def value(self, document: Mapping[str, Any]) -> Any:
        """Return what a document holds as its key, null included."""
        if self.group:
            return [value_at(document, field.source) for field in self.group]
        return value_at(document, self.path)

    def checked(self, values: Sequence[Any]) -> list[Any] | None:
        """Return the key of a group that has these values; None where a required one is missing."""
        required = [value for value, field in zip(values, self.group, strict=True) if not field.optional]
        return None if None in required else list(values)

    def _of_group(self, document: Raw) -> list[Any]:
        key = self.checked([field.value(document) for field in self.group])
        return [] if key is None else [key]

    def _in_arrays(self, document: Raw) -> list[Any]:
        """Return what `_array_expression` gives, step by step the same."""
        done, *inner = self.arrays
        elements = _elements_of(navigate(document, done))
        for array in inner:
            parents = [each for each in elements if not isinstance(each, list)]
            elements = _flattened([navigate(each, array[len(done) + 1 :]) for each in parents])
            done = array
        rest = self.path[len(done) + 1 :]
        return [navigate(each, rest) for each in elements] if rest else elements

    def slots(self, document: Raw, path: str) -> Iterator[Slot]:
        """Yield where the values at `path` are stored in a target, once per element, each with its key.

        The path lies beside the key or above it. Nothing is yielded for elements that are not objects, nor
        for an object in place of an array, which the update of a fan-out does not reach.
        """
        *parents, last = path.split(".")
        rest = self.path.split(".")[len(parents) :]
        for place, element in self._elements(document, "", "", parents):
            key = value_at(element, ".".join(rest))
            yield Slot(f"{place}{last}", key if _is_key(key) else None)

    def _elements(
        self, value: Any, prefix: str, place: str, names: Sequence[str]
    ) -> Iterator[tuple[str, Any]]:
        if prefix not in self.arrays:
            yield from self._below(value, prefix, place, names)
        elif isinstance(value, list):
            for number, element in enumerate(value):
                yield from self._below(element, prefix, f"{place}{number}.", names)

    def _below(self, value: Any, prefix: str, place: str, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, dict):
            return
        if not names:
            yield place, value
        elif names[0] in value:
            inner = f"{prefix}.{names[0]}" if prefix else names[0]
            yield from self._elements(value[names[0]], inner, f"{place}{names[0]}.", names[1:])

    def condition(self, keys: Sequence[Any]) -> Raw:
        """Return a filter, by an index, that lets at least all documents with these keys through."""
        if not self.group:
            # The server looks through arrays by itself.
            return {self.path: {"$in": list(keys)}}
        if len(keys) == 1:
            return self._group_condition(keys[0])
        if len(keys) <= GROUPS_APART_MAX:
            return {"$or": [self._group_condition(key) for key in keys]}
        columns = zip(self.group, zip(*keys, strict=True), strict=True)
        return {"$and": [field.match(distinct(values)) for field, values in columns]}

    def _group_condition(self, key: Sequence[Any]) -> Raw:
        return {"$and": [field.match([value]) for field, value in zip(self.group, key, strict=True)]}

    def exactly(self, keys: Sequence[Any]) -> Raw:
        """Return a filter for the documents that hold these keys as values.

        Of one key an upsert makes the values of a new document.
        """
        if len(keys) == 1:
            values = keys[0] if self.group else keys
            return {path: {"$eq": value} for path, value in zip(self.fields, values, strict=True)}
        if len(self.fields) == 1:
            return {self.fields[0]: {"$in": [key[0] for key in keys] if self.group else list(keys)}}
        return {"$or": [self.exactly([key]) for key in keys]} if keys else {"_id": {"$in": []}}

    def index_keys(self, *, windows_first: bool = False) -> list[tuple[str, int]]:
        """Return an index by which the documents of a key are found; for whole windows, those first."""
        if not self.group:
            return [(self.path, ASCENDING)]
        # Equal values first, then ranges.
        varying = [field for field in self.group if field.constant is None]
        ordered = sorted(varying, key=lambda field: (field.window is not None) != windows_first)
        return list(dict.fromkeys((field.source, ASCENDING) for field in ordered))

    def expression(self, unwound: Sequence[str] = ()) -> Any:
        """Return the array of the distinct keys for the server, after a `$unwind` of these arrays.

        Where no array is left on the way it is the value itself, which may be null, missing or a list.
        """
        if self.group:
            return [field.expression() for field in self.group]
        left = [array for array in self.arrays if array not in unwound]
        return self._array_expression(left) if left else expression_of(self.path)

    def stages(self, keys: Sequence[Any] | None = None, unwound: Sequence[str] = ()) -> list[Raw]:
        """Return stages that leave one document per key, with the key in KEY, and per element of some arrays.

        With `keys` only what may have one of these is left.
        """
        if self.group:
            return [{"$set": {KEY: self.expression()}}, *self._group_match(keys)]
        keyed = self.expression(unwound)
        stages: list[Raw] = [{"$unwind": f"${array}"} for array in unwound]
        if len(unwound) == len(self.arrays):
            chosen = [{"$match": self.condition(keys)}] if unwound and keys is not None else []
            return [*stages, *chosen, {"$set": {KEY: keyed}}]
        if keys is not None:
            keyed = {"$setIntersection": [keyed, {"$literal": list(keys)}]}
        return [*stages, {"$set": {KEY: keyed}}, {"$unwind": f"${KEY}"}]

    def _group_match(self, keys: Sequence[Any] | None) -> list[Raw]:
        """Return the stage that leaves these groups, or all whose required values are there."""
        if keys is not None:
            return [{"$match": {KEY: {"$in": list(keys)}}}]
        # By expressions: a path would look into a value that is a document, and find nothing there.
        kinds = [
            {"$type": {"$arrayElemAt": [f"${KEY}", number]}}
            for number, field in enumerate(self.group)
            if not field.optional
        ]
        missing = [{"$in": [kind, ["null", "undefined", "missing"]]} for kind in kinds]
        return [{"$match": {"$expr": {"$not": [{"$or": missing}]}}}] if missing else []

    def _array_expression(self, arrays: Sequence[str]) -> Raw:
        done, *inner = arrays
        values: Any = _elements_expression(f"${done}")
        for array in inner:
            values = _flattened_expression(values, array[len(done) + 1 :])
            done = array
        rest = self.path[len(done) + 1 :]
        if rest:
            values = {"$map": {"input": values, "in": variable_field("this", rest)}}
        is_key = {"$and": [{"$not": {"$isArray": "$$this"}}, {"$ne": ["$$this", None]}]}
        return {"$setUnion": [{"$filter": {"input": values, "cond": is_key}}, []]}

    def blind(self, path: str, key: Any) -> tuple[str, list[Raw]]:
        """Return an update path, and array filters, that reach the slots of one key without reading.

        They ask for the reference, never for what is stored at the path. Each level asks, because `$[]`
        fails where an inner array is missing.
        """
        filters: list[Raw] = []
        for number, array in enumerate(reversed(self.arrays)):
            if path.startswith(f"{array}."):
                path = f"{array}.$[e{number}].{path[len(array) + 1 :]}"
                filters.append({f"e{number}.{self.path[len(array) + 1 :]}": {"$eq": key}})
        return path, filters


def key_at(path: Path) -> Key:
    """Return the key that lies at a path of a model."""
    inner = [path.steps[: number + 1] for number, step in enumerate(path.steps) if step.array]
    return Key(path.stored, tuple(".".join(step.stored for step in steps) for steps in inner))


def group_key(fields: Sequence[GroupField]) -> tuple[Key, Key]:
    """Return the key of a group's sources, and that of the document which stands for the group."""
    targets = [GroupField(field.target, field.target, optional=field.optional) for field in fields]
    return Key("", group=tuple(fields)), Key("", group=tuple(targets))


def _is_key(value: Any) -> bool:
    return value is not None and not isinstance(value, list)


def holder_of(document: Raw, path: str) -> Raw:
    """Return the sub-document that holds the last name of a path with positions, such as that of a slot."""
    holder: Any = document
    for name in path.split(".")[:-1]:
        holder = holder[int(name)] if isinstance(holder, list) else holder[name]
    found: Raw = holder
    return found


def slot_value(document: Raw, slot: Slot) -> Any:
    """Return what a document stores in a slot; None for nothing."""
    return holder_of(document, slot.path).get(slot.path.rpartition(".")[2])


def unwind(document: Raw, arrays: Sequence[str]) -> list[Raw]:
    """Return what `$unwind` gives: one document per element, which takes the place of its array."""
    documents = [document]
    for array in arrays:
        documents = [each for whole in documents for each in _unwind(whole, array.split("."))]
    return documents


def _unwind(value: Any, names: Sequence[str]) -> Iterator[Any]:
    if not names:
        yield from [] if value is None else _elements_of(value)
    elif isinstance(value, dict) and names[0] in value:
        for inner in _unwind(value[names[0]], names[1:]):
            yield {**value, names[0]: inner}


def navigate(value: Any, path: str) -> Any:
    """Return what the server reads at a path: of an array the values in its objects, as an array."""
    outer, _, last = path.rpartition(".")
    if last == REFERRED:
        return value_at(navigate(value, outer) if outer else value, last)
    for name in path.split("."):
        if isinstance(value, list):
            value = [each[name] for each in value if isinstance(each, dict) and name in each]
        else:
            value = value_at(value, name)
    return value


def _elements_of(value: Any) -> list[Any]:
    """Return the elements of a stored array; anything else is one element."""
    return value if isinstance(value, list) else [value]


def _elements_expression(value: str) -> Raw:
    return {"$cond": [{"$isArray": value}, value, [value]]}


def _flattened(values: Iterable[Any]) -> list[Any]:
    return [element for value in values for element in _elements_of(value)]


def _flattened_expression(documents: Any, path: str) -> Raw:
    """Return the elements of the arrays at a path of these documents, but not of arrays among them."""
    elements = {"$cond": [{"$isArray": "$$this"}, [], _elements_expression(f"$$this.{path}")]}
    return {
        "$reduce": {"input": documents, "initialValue": [], "in": {"$concatArrays": ["$$value", elements]}}
    }
