"""Whether a pattern that is declared still pays: each read that shows it, with and without.

Without it, a client would ask for the same by a second request: the source by
its reference, an aggregation over the sources, or their first few. What it
costs is what the recorded writes of its sources cost more through the Store.
Nothing here talks to a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from treadle.advisor.trials.answers import at
from treadle.advisor.trials.declared import Card, First, Patterns, Value
from treadle.advisor.trials.results import RequestResult, TrialResult
from treadle.advisor.trials.rewrite import Rewritten
from treadle.advisor.trials.units import Unit
from treadle.advisor.trials.verdict import Trial, judge
from treadle.advisor.trials.workload_file import Request

Derived = Card | Value | First
CODES = {Card: "extended-reference", Value: "computed", First: "subset"}
KEYS_MAX = 1_000
_ACCUMULATORS = {"sum": "$sum", "average": "$avg", "min": "$min", "max": "$max"}


def single(patterns: Patterns) -> list[tuple[Derived, Patterns]]:
    """Each derived value of the models by itself."""
    kinds = (("cards", patterns.cards), ("values", patterns.values), ("firsts", patterns.firsts))
    return [
        (each, Patterns(patterns.models, **{name: (each,)}))  # type: ignore[arg-type]
        for name, group in kinds
        for each in group
    ]


def shows(unit: Unit, derived: Derived) -> bool:
    """Whether a read answers with the maintained field."""
    request = unit[0]
    if request.operation != "find" or request.collection != derived.collection:
        return False
    projection = request.body.get("projection")
    if not isinstance(projection, Mapping) or not projection:
        return True
    top = derived.place.partition(".")[0]
    included = [name for name, value in projection.items() if value in (1, True) and name != "_id"]
    if included:
        return any(str(name).partition(".")[0] == top for name in included)
    return top not in projection


def instead(derived: Derived, rows: Sequence[Mapping[str, Any]]) -> Request | None:
    """The request by which a client would get what these rows show, if it were not maintained."""
    if isinstance(derived, Card):
        keys = _distinct(at(row, derived.by) for row in rows)
        projection = dict.fromkeys((*derived.paths, derived.key), 1)
        body = {"filter": {derived.key: {"$in": keys}}, "projection": projection}
        return Request("find", derived.source, body) if keys else None
    keys = _distinct(at(row, derived.key) for row in rows)
    if not keys:
        return None
    condition = {derived.by: {"$in": keys}, **derived.where}
    if isinstance(derived, Value):
        of = (
            {"$sum": 1}
            if derived.operator == "count"
            else {_ACCUMULATORS[derived.operator]: f"${derived.of}"}
        )
        pipeline = [{"$match": condition}, {"$group": {"_id": f"${derived.by}", "value": of}}]
        return Request("aggregate", derived.source, {"pipeline": pipeline})
    limit = derived.size * len(keys)
    return Request("find", derived.source, {"filter": condition, "sort": dict(derived.sort), "limit": limit})


def first_alone(unit: Unit) -> Rewritten:
    """With the pattern, the first request of a unit is enough; its answer is what the second asks for."""
    return Rewritten(unit[:1], lambda before, after: True, f"{unit[0].collection}: as it is declared")


def _distinct(values: Any) -> list[Any]:
    found = {repr(value): value for value in values if value is not None}
    return list(found.values())[:KEYS_MAX]


def still_pays(
    derived: Derived, requests: Sequence[RequestResult], writes_recorded: int, reads_recorded: int
) -> TrialResult:
    """Keep it, drop it, or nothing to go by."""
    code, place = CODES[type(derived)], f"{derived.collection}.{derived.place}"
    if not reads_recorded:
        if not writes_recorded:
            reason = "No recorded request reads it or feeds it."
            return TrialResult(code, place, "", "no evidence", reason, tuple(requests))
        reason = f"Drop it: no recorded read shows it, and {writes_recorded:,} recorded writes keep it right."
        return TrialResult(code, place, "", "do not", reason, tuple(requests))
    result = judge(Trial(code, place, "", requests, None, 0.0))
    if result.verdict == "do":
        return replace(result, reason=f"Keep it. {result.reason}")
    return replace(
        result, reason=f"Drop it: {result.reason}" if result.verdict == "do not" else result.reason
    )
