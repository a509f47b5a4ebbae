"""What a count or a `$group` computes, of which documents, and for each of what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.advisor.trials.workload_file import Request

_OPERATORS = {"$sum": "sum", "$avg": "average", "$min": "min", "$max": "max"}


def filter_of(request: Request) -> Mapping[str, Any]:
    condition = request.body.get("filter", request.body.get("query"))
    return condition if isinstance(condition, Mapping) else {}


def grouping(request: Request) -> tuple[Mapping[str, Any], dict[str, tuple[str, str]], str | None] | None:
    """The filter of a count or `$group`, what it computes by name, and the field that it groups by."""
    if request.operation == "count":
        if request.body.get("limit") or request.body.get("skip"):
            return None
        return filter_of(request), {"n": ("count", "")}, None
    if request.operation != "aggregate":
        return None
    stages = request.body.get("pipeline")
    if not isinstance(stages, Sequence) or not stages or len(stages) > 2:
        return None
    condition = stages[0].get("$match", {}) if len(stages) == 2 else {}
    if len(stages) == 2 and "$match" not in stages[0]:
        return None
    if isinstance(name := stages[-1].get("$count"), str):
        return condition, {name: ("count", "")}, None
    group = stages[-1].get("$group")
    if not isinstance(group, Mapping):
        return None
    return accumulated(condition, group)


def accumulated(
    condition: Mapping[str, Any], group: Mapping[str, Any]
) -> tuple[Mapping[str, Any], dict[str, tuple[str, str]], str | None] | None:
    asked: dict[str, tuple[str, str]] = {}
    for name, accumulator in group.items():
        if name == "_id":
            continue
        if not isinstance(accumulator, Mapping) or len(accumulator) != 1:
            return None
        operator, value = next(iter(accumulator.items()))
        if operator == "$count" or (operator == "$sum" and not isinstance(value, (str, bool)) and value == 1):
            asked[name] = ("count", "")
        elif operator in _OPERATORS and isinstance(value, str) and value.startswith("$"):
            asked[name] = (_OPERATORS[operator], value[1:])
        else:
            return None
    identity = group.get("_id")
    if isinstance(identity, Mapping) or not asked:
        return None
    grouped_by = identity[1:] if isinstance(identity, str) and identity.startswith("$") else None
    return condition, asked, grouped_by
