"""Filters, updates and sorts on single names of a map that is stored as pairs.

A condition on `specs.color` becomes an `$elemMatch` on `specs`, so that the
one index over names and values is used. Conditions on two names are two of
them, since one element holds one name. What matches documents that lack a
field (`$ne`, `$nin`, `$not`, None) matches those that lack the name. An
update of a name changes, adds or removes its pair in place, by a pipeline.
Everything after the map's own path is the name, dots included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bson import Regex

from treadle.errors import UsageError
from treadle.model.attributes import is_measured
from treadle.model.bson_types import Update
from treadle.model.codec import Codec

Raw = dict[str, Any]
LOGICAL = ("$and", "$or", "$nor")
SORTED = "_treadle_sort"
PATTERNS = (re.Pattern, Regex)
# What an operator makes of the old value of a plain field, which is null where there is none.
ARITHMETIC = {
    "$inc": lambda old, value: {"$add": [{"$ifNull": [old, 0]}, value]},
    "$mul": lambda old, value: {"$multiply": [{"$ifNull": [old, 0]}, value]},
    "$min": lambda old, value: {"$min": [old, value]},
    "$max": lambda old, value: {"$max": [old, value]},
}


def _named(codec: Codec[Any], path: str) -> tuple[str, str] | None:
    """The map that a path leads into, and the name in it."""
    for map_path in codec.pairs:
        if path.startswith(map_path + "."):
            return map_path, path[len(map_path) + 1 :]
    return None


# -- filters ------------------------------------------------------------------------------------------


def paired_filter(codec: Codec[Any], filter: Raw) -> Raw:
    """A cleaned filter with its conditions on names of paired maps as the server can answer them."""
    if not codec.pairs:
        return filter
    translated: Raw = {}
    conditions: list[Raw] = []
    for key, condition in filter.items():
        named = _named(codec, key)
        if key in LOGICAL:
            translated[key] = [paired_filter(codec, each) for each in condition]
        elif named is not None:
            conditions += _on_name(codec, *named, condition)
        elif key in codec.pairs and isinstance(condition, dict):
            conditions += _on_map(key, condition)
        else:
            translated[key] = condition
    if not conditions:
        return translated
    return {"$and": [*([translated] if translated else []), *conditions]}


def _is_operators(condition: Any) -> bool:
    return isinstance(condition, dict) and any(str(key).startswith("$") for key in condition)


def _on_name(codec: Codec[Any], path: str, name: str, condition: Any) -> list[Raw]:
    """The conditions on one name."""
    part = "v"
    if is_measured(codec.pairs[path].items[1]):
        for suffix, stored in ((".value", "v"), (".unit", "u")):
            if name.endswith(suffix):
                name, part = name.removesuffix(suffix), stored
    if not name:
        raise UsageError(f"{path!r} has no attribute without a name", code="filter-invalid")
    if not _is_operators(condition):
        return [_equal(path, name, part, condition)]
    positive: Raw = {}
    conditions: list[Raw] = []
    for operator, operand in condition.items():
        if operator == "$exists":
            there = {"$elemMatch": {"k": name}}
            conditions.append({path: there if operand else {"$not": there}})
        elif operator == "$eq":
            conditions.append(_equal(path, name, part, operand))
        elif operator == "$ne":
            conditions.append({"$nor": [_equal(path, name, part, operand)]})
        elif operator in ("$gte", "$lte") and operand is None:
            # As the server has it: what is null, or is not there.
            conditions.append(_equal(path, name, part, None))
        elif operator in ("$in", "$nin"):
            any_of = _any_of([_equal(path, name, part, each) for each in operand])
            if None not in operand and not any(isinstance(each, dict) for each in operand):
                any_of = _holds(path, name, {part: {"$in": operand}})
            conditions.append(any_of if operator == "$in" else {"$nor": [any_of]})
        elif operator == "$not":
            inner = _on_name(codec, path, name if part == "v" else f"{name}.unit", operand)
            conditions.append({"$nor": [{"$and": inner}]})
        else:
            positive[operator] = operand
    if positive:
        conditions.append(_holds(path, name, {part: positive}))
    return conditions


def _holds(path: str, name: str, conditions: Raw) -> Raw:
    return {path: {"$elemMatch": {"k": name, **conditions}}}


def _equal(path: str, name: str, part: str, value: Any) -> Raw:
    if value is None:
        # A document without the name has null there.
        return {path: {"$not": {"$elemMatch": {"k": name, part: {"$ne": None}}}}}
    if isinstance(value, dict) and value.keys() == {"value", "unit"}:
        return _holds(path, name, {"v": {"$eq": value["value"]}, "u": value["unit"]})
    # A pattern is looked for, and not compared with.
    return _holds(path, name, {part: value if isinstance(value, PATTERNS) else {"$eq": value}})


def _any_of(conditions: list[Raw]) -> Raw:
    return {"$or": conditions} if conditions else {"$expr": False}


def _on_map(path: str, condition: Raw) -> list[Raw]:
    """The conditions on a map as a whole."""
    if not _is_operators(condition):
        return [_whole(path, condition)]
    conditions: list[Raw] = []
    left: Raw = {}
    for operator, operand in condition.items():
        if operator in ("$eq", "$ne") and isinstance(operand, dict):
            whole = _whole(path, operand)
            conditions.append(whole if operator == "$eq" else {"$nor": [whole]})
        elif operator in ("$in", "$nin"):
            maps = [_whole(path, each) if isinstance(each, dict) else {path: each} for each in operand]
            conditions.append(_any_of(maps) if operator == "$in" else {"$nor": [_any_of(maps)]})
        elif operator == "$not" and isinstance(operand, dict):
            conditions.append({"$nor": [{"$and": _on_map(path, operand)}]})
        else:
            left[operator] = operand
    return [*([{path: left}] if left else []), *conditions]


def _whole(path: str, value: Raw) -> Raw:
    """The condition that a map is just this one, in any order."""
    each = []
    for name, item in value.items():
        if isinstance(item, dict) and item.keys() == {"value", "unit"}:
            each.append(_equal(path, name, "v", item))
            continue
        # Not one of several values either.
        single = {} if isinstance(item, list) else {"$not": {"$type": "array"}}
        each.append(_holds(path, name, {"v": {"$eq": item, **single}}))
    return {"$and": [{path: {"$size": len(value)}}, *each]}


# -- updates ------------------------------------------------------------------------------------------


def paired_update(codec: Codec[Any], update: Update) -> Update:
    """A checked update with its changes of names of paired maps as a pipeline."""
    if not codec.pairs:
        return update
    if not isinstance(update, Mapping):
        for path in _stage_paths(update):
            if _named(codec, path) is not None:
                raise UsageError(
                    f"a pipeline speaks of what is stored, where {path!r} is no field: attributes are stored "
                    "as pairs; change it by operators, such as $set",
                    code="attributes-update",
                )
        return update
    named = {
        (operator, path): split
        for operator, changes in update.items()
        for path in changes
        if (split := _named(codec, path)) is not None
    }
    if not named:
        return update
    _check_names(codec, update, named)
    stages: list[Raw] = []
    for operator, changes in update.items():
        for path, value in changes.items():
            split = named.get((operator, path))
            stages.append(
                _plain(codec, operator, path, value) if split is None else _pair(operator, *split, value)
            )
    return stages


def _stage_paths(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The paths that the stages of an update set or remove."""
    paths: list[str] = []
    for stage in stages:
        for body in stage.values():
            paths += [body] if isinstance(body, str) else [path for path in body if isinstance(path, str)]
    return paths


def _check_names(
    codec: Codec[Any], update: Mapping[str, Any], named: Mapping[tuple[str, str], tuple[str, str]]
) -> None:
    """Refuse what would name an attribute that nobody means, and two changes of one."""
    paths = [path for changes in update.values() for path in changes]
    for (_, path), (map_path, name) in named.items():
        reason = ""
        if name.startswith("$"):
            reason = "a position, but attributes have names"
        elif is_measured(codec.pairs[map_path].items[1]) and name.endswith((".value", ".unit")):
            reason = "a part of a Measured, which is written whole"
        elif paths.count(path) > 1 or any(f"{map_path}.".startswith(f"{each}.") for each in paths):
            reason = "what another part of the update changes as well"
        if reason:
            raise UsageError(
                f"the update of {codec.model.__name__} names {path!r}, which is {reason}",
                code="attributes-update",
            )


def _refuse(codec: Codec[Any], operator: str, path: str) -> UsageError:
    return UsageError(
        f"the update of {codec.model.__name__} has {operator} of {path!r} beside a change of an attribute, "
        "which one update cannot do together; make two of it",
        code="attributes-update",
    )


def _plain(codec: Codec[Any], operator: str, path: str, value: Any) -> Raw:
    """The stage of a change elsewhere in the document."""
    if any(part.isdigit() or part.startswith("$") for part in path.split(".")):
        raise _refuse(codec, operator, path)
    if operator == "$unset":
        return {"$unset": path}
    if operator == "$set":
        return {"$set": {path: {"$literal": value}}}
    if operator == "$currentDate":
        return {"$set": {path: "$$NOW"}}
    if operator not in ARITHMETIC:
        raise _refuse(codec, operator, path)
    return {"$set": {path: ARITHMETIC[operator](f"${path}", {"$literal": value})}}


def _pairs(path: str) -> Raw:
    """The pairs of a stored map, as an expression; of one that nobody has made pairs of yet, too."""
    plain = {"$cond": [{"$eq": [{"$type": f"${path}"}, "object"]}, {"$objectToArray": f"${path}"}, []]}
    return {"$cond": [{"$isArray": f"${path}"}, f"${path}", plain]}


def _pair(operator: str, path: str, name: str, value: Any) -> Raw:
    """The stage that changes, adds or removes the pair of one name."""
    pairs = _pairs(path)
    literal = {"$literal": name}
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
    if isinstance(value, dict) and value.keys() == {"value", "unit"}:
        changed: Raw = {"k": literal, "v": {"$literal": value["value"]}, "u": {"$literal": value["unit"]}}
    else:
        changed = {"k": literal, "v": {"$literal": value}}
    replaced = {
        "$map": {"input": pairs, "in": {"$cond": [{"$eq": ["$$this.k", literal]}, changed, "$$this"]}}
    }
    present = {"$in": [literal, {"$map": {"input": pairs, "in": "$$this.k"}}]}
    return {"$set": {path: {"$cond": [present, replaced, {"$concatArrays": [others, [changed]]}]}}}


# -- sorts ---------------------------------------------------------------------------------------------


def sorts_names(codec: Codec[Any], keys: Sequence[tuple[str, int]] | None) -> bool:
    """Whether a sort names something in a paired map, which only a pipeline can sort by."""
    return bool(codec.pairs) and any(_named(codec, path) is not None for path, _ in keys or ())


def refuse_names(codec: Codec[Any], keys: list[tuple[str, int]] | None) -> list[tuple[str, int]] | None:
    """The keys of a sort, where they are not of this kind."""
    if sorts_names(codec, keys):
        raise UsageError(
            "only find, find_one and update sort by an attribute; sort by a field here",
            code="sort-invalid",
        )
    return keys


def sorting_stages(codec: Codec[Any], keys: Sequence[tuple[str, int]]) -> tuple[list[Raw], Raw]:
    """The stages that sort by such keys, and the one that removes what they added."""
    computed: Raw = {}
    sort: Raw = {}
    for number, (path, direction) in enumerate(keys):
        named = _named(codec, path)
        if named is None:
            sort[path] = direction
            continue
        map_path, name = named
        pairs = _pairs(map_path)
        mine = {"$filter": {"input": pairs, "cond": {"$eq": ["$$this.k", {"$literal": name}]}}}
        key = f"{SORTED}{number}"
        computed[key] = {"$let": {"vars": {"mine": mine}, "in": {"$arrayElemAt": ["$$mine.v", 0]}}}
        sort[key] = direction
    return [{"$set": computed}, {"$sort": sort}], {"$unset": list(computed)}
