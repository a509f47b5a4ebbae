"""A draft read back from models: what a rendered draft must be equal to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from treadle.advisor.loop.rewrite import rewrite
from treadle.advisor.loop.units import Group, grouped
from treadle.advisor.loop.workload_file import Request
from treadle.advisor.proposals import Derived, Draft, Index
from treadle.graph.aggregate import Extreme, FirstDocuments, NumberAverage, NumberSum, SourceCount
from treadle.graph.derived import DerivedRule
from treadle.graph.graph import Graph

_OPERATORS = {SourceCount: "count", NumberSum: "sum", NumberAverage: "average"}


def draft_of(models: Iterable[type[Any]]) -> Draft:
    """What models declare, as far as a plan can apply it."""
    graph = Graph(models)
    rules = [each for each in graph.rules if isinstance(each, DerivedRule)]
    indexes = [
        Index(entry.collection, tuple(dict(each.document["key"]).items()), each.document["name"])
        for entry in graph.entries.values()
        for each in entry.model.__treadle__.indexes
    ]
    return Draft(tuple(map(_derived, rules)), tuple(indexes))


def _derived(rule: DerivedRule) -> Derived:
    target, source = rule.target.collection, rule.source.collection
    if rule.is_copy:
        of = tuple(each.source for each in rule.copied.fields)
        return Derived(target, rule.path, source, rule.on.path, rule.match.path, "copy", of)
    ends = (target, rule.path, source, rule.match.path, rule.on.path)
    ranked = rule.aggregate
    if isinstance(ranked, FirstDocuments):
        return Derived(
            *ends, "top", tuple(ranked.card.values()), without_tie(tuple(ranked.sort)), ranked.size
        )
    path = ranked.operand.path
    operator: Any = _OPERATORS.get(type(ranked))
    if isinstance(ranked, Extreme):
        operator = ranked.operator.removeprefix("$")
    return Derived(*ends, operator, (path,) if path else ())


def chosen(requests: Iterable[Request], draft: Draft, kept_max: int = 40) -> list[Group]:
    """The reads that a draft changes."""
    return grouped(requests, draft, lambda unit: rewrite(unit, draft) is not None, kept_max)


def without_tie(sort: Any) -> Any:
    """A sort without the tie-break by `_id` that is added to each."""
    return sort[:-1] if len(sort) > 1 and sort[-1] == ("_id", 1) else sort
