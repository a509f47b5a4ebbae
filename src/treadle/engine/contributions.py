"""What changed sources contribute to their targets, before and after.

A condition (`where=`) or an expression is evaluated by the server alone, which
is given the documents: nothing else evaluates it in just the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from treadle.engine.version_upgrade import upgraded_leniently
from treadle.graph.changes import Change, NotRead
from treadle.graph.derived import DerivedRule
from treadle.plan import Plan, Raw
from treadle.query.keys import KEY, distinct

# The number of a document among those that the server is given.
NUMBER = "__treadle_number"

# The key of a target, and what it is given.
Contribution: TypeAlias = tuple[Any, Any]


class Contributions(NamedTuple):
    """What one change takes from targets, and what it gives them."""

    change: Change
    removed: Sequence[Contribution]
    added: Sequence[Contribution]


def contributions(
    rules: Iterable[DerivedRule], changes: Sequence[Change]
) -> Plan[dict[DerivedRule, list[Contributions]]]:
    """Return what these changes of sources are to each rule, through its scope."""
    results: dict[DerivedRule, list[Contributions]] = {}
    by_query: dict[Any, list[DerivedRule]] = {}
    for rule in rules:
        if rule.server_side:
            by_query.setdefault(rule.group_key, []).append(rule)
            continue
        results[rule] = [
            Contributions(change, rule.contributions(before), rule.contributions(after))
            for change, before, after in _through(rule, changes)
        ]
    for together in by_query.values():
        results |= yield from _evaluate(together, changes)
    return results


def _through(rule: DerivedRule, changes: Sequence[Change]) -> Iterable[tuple[Change, Raw | None, Raw | None]]:
    for change in changes:
        # A write of a source of aggregates always reads it before.
        assert not isinstance(change.before, NotRead)
        yield change, *rule.source.sources.through(change.before, change.after)


def _evaluate(
    rules: Sequence[DerivedRule], changes: Sequence[Change]
) -> Plan[dict[DerivedRule, list[Contributions]]]:
    """Let the server evaluate the contributions of rules with the same sources, in one command."""
    seen = list(_through(rules[0], changes))
    documents = [document for _, *pair in seen for document in pair if document is not None]
    values = {f"value{number}": rule.aggregate.expression() for number, rule in enumerate(rules)}
    rule = rules[0]
    chosen = [{"$match": rule.condition}] if rule.condition else []
    keyed = rule.match.stages(None, rule.unit)
    stages = [*chosen, *keyed, {"$project": {KEY: 1, NUMBER: 1, **values}}]
    numbered = [{**document, NUMBER: number} for number, document in enumerate(documents)]
    rows = yield from rule.source.sources.evaluate(numbered, stages)
    results: dict[DerivedRule, list[Contributions]] = {}
    for number, rule in enumerate(rules):
        of_document: list[list[Contribution]] = [[] for _ in documents]
        for row in rows:
            if row.get(KEY) is not None:
                of_document[row[NUMBER]].append((row[KEY], row.get(f"value{number}")))
        each = iter(of_document)
        results[rule] = [
            Contributions(
                change,
                [] if before is None else next(each),
                [] if after is None else next(each),
            )
            for change, before, after in seen
        ]
    return results


def keys_of_sources(
    rules: Iterable[DerivedRule], documents: Sequence[Raw]
) -> Plan[dict[DerivedRule, list[Any]]]:
    """Return the targets that these sources refer to, whether or not they count there."""
    keys: dict[DerivedRule, list[Any]] = {}
    for rule in rules:
        current = yield from upgraded_leniently(rule.source, documents)
        if rule.match.is_local:
            keys[rule] = rule.match.of_all(current)
            continue
        stages = [*rule.match.stages(), {"$project": {KEY: 1}}]
        rows = yield from rule.source.sources.evaluate(current, stages)
        keys[rule] = distinct(row[KEY] for row in rows)
    return keys
