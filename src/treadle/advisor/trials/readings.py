"""Reads of a series as reads of its buckets.

A `$group` over whole windows becomes a read of the buckets' statistics, which
the client adds up where a window has several buckets. A find within a time
becomes an unwinding of the buckets that touch it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from treadle.advisor.trials.answers import at, same, same_rows, without
from treadle.advisor.trials.declared import Readings
from treadle.advisor.trials.workload_file import Request

Row = Mapping[str, Any]
Answers = Sequence[Sequence[Row]]
_UNITS = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400}
_OPERATORS = ("$sum", "$avg", "$min", "$max")


@dataclass(frozen=True, slots=True)
class Window:
    """The series and the time that a filter asks for: from `low` on, and before or up to `high`."""

    keys: dict[str, Any]
    low: datetime
    high: datetime
    includes_high: bool


def window_of(condition: Any, readings: Readings) -> Window | None:
    """What a filter on a series asks for; None where it asks for anything else."""
    if not isinstance(condition, Mapping) or set(condition) != {*readings.key, readings.time}:
        return None
    bounds = condition[readings.time]
    keys = {name: condition[name] for name in readings.key}
    if not isinstance(bounds, Mapping) or any(isinstance(each, Mapping) for each in keys.values()):
        return None
    low, high = bounds.get("$gte"), bounds.get("$lt", bounds.get("$lte"))
    if len(bounds) != 2 or not isinstance(low, datetime) or not isinstance(high, datetime):
        return None
    return Window(keys, low, high, "$lte" in bounds)


def summarised(
    request: Request, readings: Readings
) -> tuple[Request, Callable[[Answers, Answers], bool]] | None:
    """A `$group` over whole windows of a series as a read of statistics."""
    stages = request.body.get("pipeline")
    if request.operation != "aggregate" or not isinstance(stages, list) or readings.span is None:
        return None
    names = [next(iter(stage), "") for stage in stages]
    if names not in (["$match", "$group"], ["$match", "$group", "$sort"]):
        return None
    window = window_of(stages[0]["$match"], readings)
    asked = _asked(stages[1]["$group"], readings)
    if window is None or asked is None or window.includes_high or not _aligned(window, readings):
        return None
    accumulators, by_window = asked
    parts = readings.names
    body = {
        "filter": {**window.keys, parts["start"]: {"$gte": window.low, "$lt": window.high}},
        "projection": {parts["start"]: 1, parts["count"]: 1, parts["stats"]: 1},
        "sort": {parts["start"]: 1},
    }

    def compare(before: Answers, after: Answers) -> bool:
        expected = {repr(row["_id"]) if by_window else "": row for row in before[0]}
        groups: dict[str, list[Row]] = {}
        for bucket in after[0]:
            groups.setdefault(repr(bucket[parts["start"]]) if by_window else "", []).append(bucket)
        if set(expected) != set(groups):
            return False
        return all(
            same(at(expected[key], name), _total(buckets, accumulator, parts))
            for key, buckets in groups.items()
            for name, accumulator in accumulators.items()
        )

    return Request("find", readings.collection, body), compare


def _asked(group: Any, readings: Readings) -> tuple[dict[str, tuple[str, str]], bool] | None:
    """What a `$group` computes of which field, and whether it does so for each window."""
    if not isinstance(group, Mapping) or readings.span is None:
        return None
    accumulators: dict[str, tuple[str, str]] = {}
    for name, accumulator in group.items():
        if name == "_id":
            continue
        if not isinstance(accumulator, Mapping) or len(accumulator) != 1:
            return None
        operator, value = next(iter(accumulator.items()))
        if operator == "$sum" and value == 1 and not isinstance(value, bool):
            accumulators[name] = ("$count", "")
        elif operator in _OPERATORS and isinstance(value, str) and value[1:] in readings.stats:
            accumulators[name] = (operator, value[1:])
        else:
            return None
    identity = group.get("_id")
    if isinstance(identity, Mapping):
        trunc = identity.get("$dateTrunc")
        if not isinstance(trunc, Mapping) or set(trunc) != {"date", "unit"}:
            return None
        if trunc["date"] != f"${readings.time}":
            return None
        return (accumulators, True) if _UNITS.get(trunc["unit"]) == readings.span.total_seconds() else None
    return None if isinstance(identity, str) and identity.startswith("$") else (accumulators, False)


def _aligned(window: Window, readings: Readings) -> bool:
    assert readings.span is not None
    seconds = readings.span.total_seconds()
    return all(each.timestamp() % seconds == 0 for each in (window.low, window.high))


def _total(buckets: Sequence[Row], accumulator: tuple[str, str], parts: Mapping[str, str]) -> Any:
    operator, field = accumulator
    counts = [int(bucket[parts["count"]]) for bucket in buckets]
    if operator == "$count":
        return sum(counts)
    stats = [at(bucket, f"{parts['stats']}.{field}") or {} for bucket in buckets]
    if operator in ("$min", "$max"):
        found = [each[operator[1:]] for each in stats if each.get(operator[1:]) is not None]
        return (min if operator == "$min" else max)(found) if found else None
    total = sum(each.get("sum") or 0 for each in stats)
    # Where some readings have no value, the statistics say how many do.
    valued = sum(each.get("count", count) for each, count in zip(stats, counts, strict=True))
    return total if operator == "$sum" else total / max(1, valued)


def unwound(
    request: Request, readings: Readings
) -> tuple[Request, Callable[[Answers, Answers], bool]] | None:
    """A find within a time as an unwinding of the buckets that touch it."""
    body = request.body
    window = window_of(body.get("filter"), readings) if request.operation == "find" else None
    if window is None or body.get("skip") or body.get("projection"):
        return None
    parts = readings.names
    outer = {name: f"${name}" for name in readings.outer}
    stages: list[dict[str, Any]] = [
        {
            "$match": {
                **window.keys,
                parts["start"]: {"$lte": window.high},
                parts["end"]: {"$gte": window.low},
            }
        },
        {"$unwind": f"${parts['readings']}"},
        {"$replaceWith": {"$mergeObjects": [outer, f"${parts['readings']}"]}},
        {"$match": {readings.time: body["filter"][readings.time]}},
    ]
    sort = body.get("sort")
    stages += [{"$sort": dict(sort)}] if isinstance(sort, Mapping) and sort else []
    stages += [{"$limit": body["limit"]}] if body.get("limit") else []

    def compare(before: Answers, after: Answers) -> bool:
        # A reading in a bucket has an id that follows from its place.
        one, other = ([without(row, "_id") for row in rows] for rows in (before[0], after[0]))
        cut = bool(body.get("limit")) and not sort
        return len(one) == len(other) if cut else same_rows(one, other, ordered=bool(sort))

    return Request("aggregate", readings.collection, {"pipeline": stages}), compare
