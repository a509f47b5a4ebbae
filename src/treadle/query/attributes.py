"""Conditions on, changes of, and sorts by single attributes: names in a map that is stored as pairs.

A condition on `specs.color` becomes an `$elemMatch` on `specs`, so that the one index over names and values
is used. Conditions on two names are two of them, since one element holds one name. What matches documents
without a field (`$ne`, `$nin`, `$not`, None) matches those without the name. An update of a name changes,
adds or removes its pair in place, by a pipeline. Everything after the path of the map is the name, dots
included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bson import Regex

from treadle.errors import UsageError
from treadle.model.attributes import is_measured
from treadle.model.bson_types import Raw
from treadle.model.shape import ModelCodec

SORTED = "_treadle_sort"
PATTERNS = (re.Pattern, Regex)


class Attribute(NamedTuple):
    """A map that is stored as pairs, or one name in it."""

    map_path: str
    # None for the map as a whole.
    name: str | None
    # Whether its values may have a unit.
    is_measured: bool


def attribute_of(codec: ModelCodec, path: str) -> Attribute | None:
    """Return the attribute that a stored path names, if it names one."""
    for map_path, shape in codec.pairs.items():
        if path == map_path or path.startswith(f"{map_path}."):
            name = None if path == map_path else path[len(map_path) + 1 :]
            return Attribute(map_path, name, is_measured(shape.items[1]))
    return None


# -- filters ------------------------------------------------------------------------------------------


def attribute_conditions(attribute: Attribute, condition: Any) -> list[Raw]:
    """Return the conditions, each on the stored pairs, that one condition on an attribute stands for."""
    path, name, measured = attribute
    if name is None:
        return _Map(path).conditions(condition)
    part = "v"
    if measured:
        for suffix, stored in ((".value", "v"), (".unit", "u")):
            if name.endswith(suffix):
                name, part = name.removesuffix(suffix), stored
    if not name:
        raise UsageError(f"{path!r} has no attribute without a name", code="filter-invalid")
    return _Pair(path, name, part).conditions(condition)


class _Map:
    """Translates conditions on a map as a whole."""

    def __init__(self, path: str) -> None:
        self.path = path

    def conditions(self, condition: Any) -> list[Raw]:
        if not (isinstance(condition, dict) and any(str(key).startswith("$") for key in condition)):
            return [self.equals(condition)]
        conditions: list[Raw] = []
        others: Raw = {}
        for operator, operand in condition.items():
            if (translated := self.translate(operator, operand)) is None:
                others[operator] = operand
            else:
                conditions.append(translated)
        return [*conditions, self.holds(others)] if others else conditions

    def translate(self, operator: str, operand: Any) -> Raw | None:
        """Return the condition of an operator that also matches what is missing; None for all others."""
        if operator == "$eq" or (operand is None and operator in ("$gte", "$lte")):
            return self.equals(operand)
        if operator == "$in":
            return self.among(operand)
        if operator in ("$ne", "$nin"):
            return {"$nor": [self.equals(operand) if operator == "$ne" else self.among(operand)]}
        return {"$nor": [{"$and": self.conditions(operand)}]} if operator == "$not" else None

    def holds(self, condition: Any) -> Raw:
        return {self.path: condition}

    def among(self, values: Any) -> Raw:
        conditions = [self.equals(each) for each in values]
        return {"$or": conditions} if conditions else {"$expr": False}

    def equals(self, value: Any) -> Raw:
        """Return the condition that the map has exactly these names and values, in any order."""
        if not isinstance(value, dict):
            return self.holds(value)
        each = []
        for name, item in value.items():
            pair = _Pair(self.path, name)
            # An array that contains the value is not equal to it.
            single = {} if isinstance(item, list) else {"$not": {"$type": "array"}}
            each.append(pair.equals(item) if _has_unit(item) else pair.holds({"$eq": item, **single}))
        return {"$and": [self.holds({"$size": len(value)}), *each]}


class _Pair(_Map):
    """Translates conditions on the value (`v`) or the unit (`u`) of the pair with one name."""

    def __init__(self, path: str, name: str, part: str = "v") -> None:
        super().__init__(path)
        self.name = name
        self.part = part

    def translate(self, operator: str, operand: Any) -> Raw | None:
        if operator != "$exists":
            return super().translate(operator, operand)
        present = {"$elemMatch": {"k": self.name}}
        return {self.path: present if operand else {"$not": present}}

    def holds(self, condition: Any) -> Raw:
        return {self.path: {"$elemMatch": {"k": self.name, self.part: condition}}}

    def among(self, values: Any) -> Raw:
        if None in values or any(isinstance(each, dict) for each in values):
            return super().among(values)
        return self.holds({"$in": values})

    def equals(self, value: Any) -> Raw:
        if value is None:
            # A document without the name has null there.
            return {self.path: {"$not": {"$elemMatch": {"k": self.name, self.part: {"$ne": None}}}}}
        if _has_unit(value):
            whole = {"k": self.name, "v": {"$eq": value["value"]}, "u": value["unit"]}
            return {self.path: {"$elemMatch": whole}}
        # A pattern is searched for, not compared with.
        return self.holds(value if isinstance(value, PATTERNS) else {"$eq": value})


def _has_unit(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"value", "unit"}


# -- updates ------------------------------------------------------------------------------------------


def update_stages(
    model: str, update: Mapping[str, Raw], attributes: Mapping[str, Attribute | None]
) -> list[Raw]:
    """Return the pipeline of an update of which some paths are names in a map."""
    paths = [path for changes in update.values() for path in changes]
    stages: list[Raw] = []
    for operator, changes in update.items():
        for path, value in changes.items():
            attribute = attributes[path]
            if attribute is None or attribute.name is None:
                stages.append(_plain_stage(model, operator, path, value))
            else:
                _check_name(model, path, attribute, paths)
                stages.append(_pair_stage(operator, attribute.map_path, attribute.name, value))
    return stages


def _check_name(model: str, path: str, attribute: Attribute, paths: Sequence[str]) -> None:
    """Refuse a path that cannot be the name of an attribute, and two changes of one attribute."""
    name, around = attribute.name or "", f"{attribute.map_path}."
    reasons = {
        "a position, but attributes have names": name.startswith("$"),
        "a part of a Measured, which is written whole": attribute.is_measured
        and name.endswith((".value", ".unit")),
        "what another part of the update changes as well": paths.count(path) > 1
        or any(around.startswith(f"{each}.") for each in paths),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UsageError(
                f"the update of {model} names {path!r}, which is {reason}", code="attributes-update"
            )


def _plain_stage(model: str, operator: str, path: str, value: Any) -> Raw:
    """Return the stage of a change of an ordinary field."""
    old, literal = f"${path}", {"$literal": value}
    # What an operator makes of a field, which is null where it is missing.
    expressions: dict[str, Any] = {
        "$set": literal,
        "$currentDate": "$$NOW",
        "$inc": {"$add": [{"$ifNull": [old, 0]}, literal]},
        "$mul": {"$multiply": [{"$ifNull": [old, 0]}, literal]},
        "$min": {"$min": [old, literal]},
        "$max": {"$max": [old, literal]},
    }
    positioned = any(part.isdigit() or part.startswith("$") for part in path.split("."))
    if operator == "$unset" and not positioned:
        return {"$unset": path}
    if operator not in expressions or positioned:
        raise UsageError(
            f"the update of {model} has {operator} of {path!r} beside a change of an attribute, which one "
            "update cannot do together; make two of it",
            code="attributes-update",
        )
    return {"$set": {path: expressions[operator]}}


def _pairs(path: str) -> Raw:
    """Return the expression of a map's pairs; also of one that another program stored as a plain object."""
    plain = {"$cond": [{"$eq": [{"$type": f"${path}"}, "object"]}, {"$objectToArray": f"${path}"}, []]}
    return {"$cond": [{"$isArray": f"${path}"}, f"${path}", plain]}


def _pair_stage(operator: str, path: str, name: str, value: Any) -> Raw:
    """Return the stage that changes, adds or removes the pair of one name."""
    pairs, literal = _pairs(path), {"$literal": name}
    others = {"$filter": {"input": pairs, "cond": {"$ne": ["$$this.k", literal]}}}
    if operator == "$unset":
        missing = {"$eq": [{"$type": f"${path}"}, "missing"]}
        return {"$set": {path: {"$cond": [missing, "$$REMOVE", others]}}}
    if operator != "$set":
        raise UsageError(
            f"{operator} of {path + '.' + name!r}: an attribute can be $set or $unset; read it and $set the "
            "new value, or make it a field of its own",
            code="attributes-update",
        )
    parts = {"v": value["value"], "u": value["unit"]} if _has_unit(value) else {"v": value}
    changed = {"k": literal, **{part: {"$literal": each} for part, each in parts.items()}}
    own = {"$eq": ["$$this.k", literal]}
    present = {"$in": [literal, {"$map": {"input": pairs, "in": "$$this.k"}}]}
    replaced = {"$map": {"input": pairs, "in": {"$cond": [own, changed, "$$this"]}}}
    return {"$set": {path: {"$cond": [present, replaced, {"$concatArrays": [others, [changed]]}]}}}


# -- sorts --------------------------------------------------------------------------------------------


def sorts_by_attribute(codec: ModelCodec, keys: Sequence[tuple[str, int]] | None) -> bool:
    """Whether a sort names an attribute, which only a pipeline can sort by."""
    attributes = [attribute_of(codec, path) for path, _ in keys or ()] if codec.pairs else []
    return any(each is not None and each.name is not None for each in attributes)


def refuse_attributes(codec: ModelCodec, keys: list[tuple[str, int]] | None) -> list[tuple[str, int]] | None:
    """Return the keys of a sort; refuses those that name an attribute."""
    if sorts_by_attribute(codec, keys):
        raise UsageError(
            "only find, find_one and update sort by an attribute; sort by a field here", code="sort-invalid"
        )
    return keys


def sorting_stages(codec: ModelCodec, keys: Sequence[tuple[str, int]]) -> tuple[list[Raw], Raw]:
    """Return the stages that sort by attributes, and the one that removes what they added."""
    computed: Raw = {}
    sort: Raw = {}
    for number, (path, direction) in enumerate(keys):
        attribute = attribute_of(codec, path)
        if attribute is None or attribute.name is None:
            sort[path] = direction
            continue
        is_own = {"$eq": ["$$this.k", {"$literal": attribute.name}]}
        own = {"$filter": {"input": _pairs(attribute.map_path), "cond": is_own}}
        key = f"{SORTED}{number}"
        computed[key] = {"$let": {"vars": {"own": own}, "in": {"$arrayElemAt": ["$$own.v", 0]}}}
        sort[key] = direction
    return [{"$set": computed}, {"$sort": sort}], {"$unset": list(computed)}
