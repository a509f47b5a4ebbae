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
from treadle.query.keys import KEY, distinct, same_key

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
    rows = yield from _evaluated(rules, documents)
    results: dict[DerivedRule, list[Contributions]] = {}
    for number, rule in enumerate(rules):
        of_document: list[list[Contribution]] = [[] for _ in documents]
        for row in rows:
            of_document[row[NUMBER]].append((row[KEY], row.get(f"value{number}")))
        each = iter(of_document)
        results[rule] = [
            Contributions(change, *([] if side is None else next(each) for side in (before, after)))
            for change, before, after in seen
        ]
    return results


def _evaluated(rules: Sequence[DerivedRule], documents: Sequence[Raw]) -> Plan[list[Raw]]:
    """Return one row per contribution: the number of the document, the key, and a value per rule."""
    rule = rules[0]
    values = {f"value{number}": each.aggregate.expression() for number, each in enumerate(rules)}
    stages = [
        *([{"$match": rule.condition}] if rule.condition else []),
        *rule.match.stages(unwound=rule.unit),
        {"$project": {KEY: 1, NUMBER: 1, **values}},
    ]
    numbered = [{**document, NUMBER: number} for number, document in enumerate(documents)]
    rows = yield from rule.source.sources.evaluate(numbered, stages)
    return [row for row in rows if row.get(KEY) is not None]


def is_unchanged(rule: DerivedRule, old: Sequence[Contribution], new: Sequence[Contribution]) -> bool:
    """Return whether no value can change where a source contributed `old`, and contributes `new`."""
    return len(old) == len(new) and all(
        same_key(one, other) and rule.aggregate.is_unchanged(before, after)
        for (one, before), (other, after) in zip(old, new, strict=True)
    )


def keys_of_sources(rule: DerivedRule, documents: Sequence[Raw]) -> Plan[list[Any]]:
    """Return the keys that these sources hold, whether or not they count."""
    current = yield from upgraded_leniently(rule.source, documents)
    if rule.match.is_local:
        return rule.match.of_all(current)
    rows = yield from rule.source.sources.evaluate(current, [*rule.match.stages(), {"$project": {KEY: 1}}])
    return distinct(row[KEY] for row in rows)
