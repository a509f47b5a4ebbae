"""Why a read that concerns a pattern is not changed by it, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.advisor.trials.declared import First, Patterns, Value
from treadle.advisor.trials.grouping import filter_of, grouping
from treadle.advisor.trials.workload_file import Request


def why_not(request: Request, patterns: Patterns) -> str | None:
    """What of a read the patterns do not hold; None where it has nothing to do with them."""
    if not request.is_read:
        return None
    joined = set(_joined(request))
    for card in patterns.cards:
        if request.collection == card.collection and card.source in joined:
            return f"it uses more of {card.source} than the card holds, or joins it in another way"
    kept: tuple[Value | First, ...] = (*patterns.values, *patterns.firsts)
    for each in kept:
        if request.collection == each.collection and each.source in joined:
            return f"it asks for more of {each.source} than {each.collection}.{each.place} holds"
    for each in kept:
        if request.collection == each.source and each.by in _condition(request):
            reason = _of_source(request, isinstance(each, First))
            if reason is not None:
                return reason
    return None


def _of_source(request: Request, first: bool) -> str | None:
    if request.body.get("collation"):
        return "it goes by a collation"
    if first and request.body.get("sort") and request.body.get("limit"):
        return "it sorts otherwise, or asks for more or other fields than are embedded"
    if not first and grouping(request) is not None:
        return "it counts only some of them, or computes what is not kept"
    return None


def _condition(request: Request) -> Mapping[str, Any]:
    stages = request.body.get("pipeline")
    if isinstance(stages, list) and stages and isinstance(stages[0], Mapping):
        condition = stages[0].get("$match")
        return condition if isinstance(condition, Mapping) else {}
    return filter_of(request)


def _joined(request: Request) -> list[str]:
    stages = request.body.get("pipeline")
    bodies = [
        stage.get("$lookup")
        for stage in (stages if isinstance(stages, list) else [])
        if isinstance(stage, Mapping)
    ]
    return [str(body.get("from")) for body in bodies if isinstance(body, Mapping)]
