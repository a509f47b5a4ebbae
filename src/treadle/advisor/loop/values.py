"""Where the values in a request are: everything else is its shape.

`replaced` puts other values in the place of those that a request carries.
Names of fields and collections, operators, limits, sorts and options stay;
so do `true`, `false`, null, and 0, 1 and -1 in expressions, in which they are
mostly structure. Shapes and the search for keys use this walk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from treadle.advisor.loop.workload_file import Request

DEPTH_MAX = 100
# (path of the field that the value belongs to, or "", and the value) -> what takes its place.
Replace = Callable[[str, Any], Any]
_LOGIC = frozenset({"$and", "$or", "$nor"})
_KEPT_OPERANDS = frozenset({"$exists", "$type", "$size", "$options", "$mod"})
_KEPT_ARGUMENTS = frozenset(
    {"unit", "timezone", "format", "startOfWeek", "as", "to", "binSize", "n", "limit"}
)
_KEPT_STAGES = frozenset(
    {"$sort", "$limit", "$skip", "$unwind", "$count", "$unset", "$sample", "$out", "$merge", "$indexStats"}
)
_EXPRESSION_STAGES = frozenset(
    {"$project", "$addFields", "$set", "$group", "$replaceRoot", "$replaceWith", "$sortByCount", "$redact"}
    | {"$setWindowFields", "$fill", "$densify"}
)
_KEPT_IN_PUSH = frozenset({"$slice", "$position", "$sort"})


def replaced(request: Request, put: Replace) -> Request:
    """The request with other values."""
    body = {name: _part(name, value, put) for name, value in request.body.items()}
    return replace(request, body=body)


def _part(name: str, value: Any, put: Replace) -> Any:
    if name in ("filter", "q", "query") and isinstance(value, Mapping):
        return _filter(value, put)
    if name == "pipeline":
        return _pipeline(value, put)
    if name == "document":
        return _leaves("", value, put)
    if name in ("u", "update"):
        return _update(value, put)
    if name in ("projection", "fields"):
        return _projection(value, put)
    if name == "arrayFilters" and isinstance(value, Sequence):
        return [_filter(each, put) if isinstance(each, Mapping) else each for each in value]
    if name in ("let", "c"):
        return _expression(value, put)
    return value


def _leaves(path: str, value: Any, put: Replace, depth: int = 0) -> Any:
    if depth > DEPTH_MAX:
        return None
    if isinstance(value, Mapping):
        return {
            name: _leaves(f"{path}.{name}" if path else str(name), each, put, depth + 1)
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_leaves(path, each, put, depth + 1) for each in value]
    return put(path, value)


def _filter(condition: Mapping[str, Any], put: Replace, within: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in condition.items():
        if name in _LOGIC and isinstance(value, Sequence):
            parts = (each if not isinstance(each, Mapping) else _filter(each, put, within) for each in value)
            result[name] = list(parts)
        elif name == "$expr":
            result[name] = _expression(value, put)
        elif name == "$comment":
            continue
        elif name.startswith("$"):
            result[name] = _leaves("", value, put)
        else:
            result[name] = _operand(f"{within}{name}", value, put)
    return result


def _operand(path: str, value: Any, put: Replace) -> Any:
    if not isinstance(value, Mapping) or not next(iter(value), "").startswith("$"):
        return _leaves(path, value, put)
    result: dict[str, Any] = {}
    for name, each in value.items():
        if name in _KEPT_OPERANDS:
            result[name] = each
        elif name == "$not" and isinstance(each, Mapping):
            result[name] = _operand(path, each, put)
        elif name == "$elemMatch" and isinstance(each, Mapping):
            plain = not next(iter(each), "").startswith("$")
            result[name] = _filter(each, put, f"{path}.") if plain else _operand(path, each, put)
        else:
            result[name] = _leaves(path, each, put)
    return result


def _update(value: Any, put: Replace) -> Any:
    if isinstance(value, (list, tuple)):
        return _pipeline(value, put)
    if not isinstance(value, Mapping):
        return value
    if not next(iter(value), "").startswith("$"):
        return _leaves("", value, put)
    result: dict[str, Any] = {}
    for operator, fields in value.items():
        if operator in ("$unset", "$rename", "$currentDate"):
            result[operator] = fields
        elif operator in ("$inc", "$mul") and isinstance(fields, Mapping):
            result[operator] = {name: _number(name, each, put) for name, each in fields.items()}
        elif operator in ("$push", "$addToSet") and isinstance(fields, Mapping):
            result[operator] = {name: _pushed(name, each, put) for name, each in fields.items()}
        elif operator == "$pull" and isinstance(fields, Mapping):
            result[operator] = {name: _operand(name, each, put) for name, each in fields.items()}
        else:
            result[operator] = _leaves("", fields, put)
    return result


def _pushed(path: str, value: Any, put: Replace) -> Any:
    if not isinstance(value, Mapping) or "$each" not in value:
        return _leaves(path, value, put)
    return {name: each if name in _KEPT_IN_PUSH else _leaves(path, each, put) for name, each in value.items()}


def _projection(value: Any, put: Replace) -> Any:
    if not isinstance(value, Mapping):
        return value
    result: dict[str, Any] = {}
    for name, each in value.items():
        if isinstance(each, Mapping) and "$elemMatch" in each and isinstance(each["$elemMatch"], Mapping):
            result[name] = {"$elemMatch": _filter(each["$elemMatch"], put, f"{name}.")}
        elif isinstance(each, Mapping) and "$slice" in each:
            result[name] = each
        else:
            result[name] = _expression(each, put)
    return result


def _pipeline(stages: Any, put: Replace) -> Any:
    if not isinstance(stages, (list, tuple)):
        return stages
    return [_stage(stage, put) if isinstance(stage, Mapping) and stage else stage for stage in stages]


def _stage(stage: Mapping[str, Any], put: Replace) -> dict[str, Any]:
    name, body = next(iter(stage.items()))
    if name in _KEPT_STAGES:
        return {name: body}
    if name == "$match" and isinstance(body, Mapping):
        return {name: _filter(body, put)}
    if name in _EXPRESSION_STAGES:
        return {name: _expression(body, put)}
    if name == "$facet" and isinstance(body, Mapping):
        return {name: {each: _pipeline(stages, put) for each, stages in body.items()}}
    if name in ("$lookup", "$unionWith", "$graphLookup") and isinstance(body, Mapping):
        return {name: {part: _joined(part, each, put) for part, each in body.items()}}
    if name == "$unionWith":
        return {name: body}
    return {name: _leaves("", body, put)}


def _joined(part: str, value: Any, put: Replace) -> Any:
    if part == "pipeline":
        return _pipeline(value, put)
    if part in ("let", "startWith"):
        return _expression(value, put)
    if part == "restrictSearchWithMatch" and isinstance(value, Mapping):
        return _filter(value, put)
    return value


def _expression(value: Any, put: Replace) -> Any:
    if isinstance(value, Mapping):
        result: dict[str, Any] = {}
        for name, each in value.items():
            if name == "$literal":
                result[name] = _leaves("", each, put)
            elif name in _KEPT_ARGUMENTS and not isinstance(each, Mapping):
                result[name] = each
            else:
                result[name] = _expression(each, put)
        return result
    if isinstance(value, (list, tuple)):
        return [_expression(each, put) for each in value]
    if isinstance(value, str):
        return value if value.startswith("$") else put("", value)
    return _number("", value, put)


def _number(path: str, value: Any, put: Replace) -> Any:
    if isinstance(value, bool) or (isinstance(value, (int, float)) and value in (-1, 0, 1)):
        return value
    return put(path, value)


# -- what is made of it -----------------------------------------------------------------------


def shape(request: Request) -> str:
    """The same text for requests that differ in nothing but values."""
    body = replaced(request, lambda path, value: "?").body
    if request.operation == "insert":
        body = {}
    return f"{request.operation} {request.collection} {json.dumps(_folded(body), default=str)}"


def _folded(value: Any) -> Any:
    """Lists of values of any length look alike."""
    if isinstance(value, Mapping):
        return {name: _folded(each) for name, each in value.items()}
    if isinstance(value, list):
        return ["?"] if value and all(each == "?" for each in value) else [_folded(each) for each in value]
    return value


def values(request: Request) -> Iterator[tuple[str, Any]]:
    """(field, value) of each value that a request carries; the field is empty where none is known."""
    seen: list[tuple[str, Any]] = []

    def note(path: str, value: Any) -> Any:
        seen.append((path, value))
        return value

    replaced(request, note)
    return iter(seen)
