"""The order of maintenance, and what a write of each model entails.

The level of a rule is one more than the highest level among the maintained
fields that it reads. Rules are carried out level by level.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from treadle.errors import DeclarationError
from treadle.graph.derived import (
    DerivedRule,
    FormulaRule,
    LocalRule,
    aggregates_in,
    aggregates_of,
    copies_in,
    copies_of,
)
from treadle.graph.model_entry import ModelEntry, implements
from treadle.graph.rule import Rule
from treadle.query.paths import overlap, plain


class Level(NamedTuple):
    """The derived rules of one level that are maintained on write."""

    number: int
    # Those that aggregate, by their sources.
    aggregates: Sequence[tuple[ModelEntry, Sequence[DerivedRule]]]
    copies: Sequence[DerivedRule]
    # Those whose sources refer to the target by an alternate key.
    by_alternate_key: Sequence[DerivedRule]


def set_levels(rules: Iterable[Rule], by_collection: Mapping[str, ModelEntry]) -> None:
    """Set the level of each rule; refuses a value that would be computed from itself."""
    for rule in rules:
        _set_level(rule, by_collection, [])


def _set_level(rule: Rule, by_collection: Mapping[str, ModelEntry], waiting: list[Rule]) -> int:
    if rule.level:
        return rule.level
    if rule in waiting:
        around = " -> ".join(each.place.label for each in [*waiting[waiting.index(rule) :], rule])
        raise DeclarationError(
            f"these fields would be computed from each other without an end: {around}; break the cycle",
            code="maintenance-cycle",
        )
    waiting.append(rule)
    read = list(_rules_read(rule, by_collection))
    level = 1 + max((_set_level(each, by_collection, waiting) for each in read), default=0)
    if isinstance(rule, LocalRule) and (read or rule.target.rules.group is not None):
        made = read[0].place.label if read else rule.target.model.__name__
        raise DeclarationError(
            f"{rule.place.label} is computed in Python when a caller writes its document, but "
            f"{made} changes with the writes of others; compute it from fields that callers write",
            code="local-derived",
        )
    waiting.pop()
    rule.level = level
    return level


def _rules_read(rule: Rule, by_collection: Mapping[str, ModelEntry]) -> Iterator[Rule]:
    """Yield the rules whose maintained fields a rule reads."""
    for collection, paths in rule.reads().items():
        source = rule.source if rule.source.collection == collection else by_collection[collection]
        others = dict.fromkeys(other for related in source.kinds.related for other in related.rules)
        yield from (other for other in others if _reads_from(rule, paths, other))


def _reads_from(rule: Rule, paths: Set[str] | None, other: Rule) -> bool:
    owned = [each.path for each in other.owns()]
    if paths is None:
        return other is not rule and bool(owned)
    return any(overlap(path, each) for path in paths for each in owned)


def levels_of(entries: Sequence[ModelEntry], rules: Iterable[Rule]) -> list[Level]:
    """Return what follows a change, level by level."""
    return [_level(number, entries) for number in sorted({rule.level for rule in rules})]


def _level(number: int, entries: Sequence[ModelEntry]) -> Level:
    def of_level(entry: ModelEntry, rules: Iterable[DerivedRule], end: str) -> list[DerivedRule]:
        # Each rule once: kinds have those of their base as well.
        return [rule for rule in rules if rule.level == number and getattr(rule, end) is entry]

    by_source = ((entry, of_level(entry, aggregates_of(entry), "source")) for entry in entries)
    aggregates = [(entry, own) for entry, own in by_source if own]
    return Level(
        number,
        aggregates,
        [rule for entry in entries for rule in of_level(entry, copies_in(entry, "write"), "target")],
        [rule for _, own in aggregates for rule in own if rule.alternate_key],
    )


# -- the effects of a write -----------------------------------------------------------------------


def find_effects(entry: ModelEntry) -> None:
    """Set what a write of a model entails, once all rules are bound."""
    effects, related = entry.effects, entry.kinds.related
    effects.followed = _followed_paths(entry)
    acts = any(each.rules for each in related if each.layout is None)
    restricts = any(rule.on_delete == "restrict" for rule in copies_of(entry, None))
    effects.is_plain = not (acts or effects.on_write or restricts)
    is_found_by_key = any(rule.alternate_key for each in related for rule in aggregates_in(each))
    reached = {each.collection for each in models_reached(entry)}
    effects.may_affect_itself = is_found_by_key or entry.collection in reached


def _followed_paths(entry: ModelEntry) -> set[str] | None:
    """Return the stored paths that a write must not change without being followed; None for all."""
    followed: set[str] = set()
    for rule in [*entry.effects.on_write, *_own_rules(entry)]:
        paths = rule.reads().get(entry.collection, frozenset())
        if paths is None:
            return None
        followed |= paths
    for each in entry.kinds.related:
        for copy in copies_in(each):
            followed |= {copy.on.path, copy.path}
        # An alternate key decides which sources a document has.
        followed |= each.paths.alternate_keys.keys()
    if entry.kinds.family is not None:
        followed.add(entry.kinds.family.discriminator)
    return {plain(path) for path in followed}


def _own_rules(entry: ModelEntry) -> Iterator[Rule]:
    """Yield the rules that follow a document's own writes."""
    for each in entry.kinds.related:
        for rule in each.rules:
            if isinstance(rule, (FormulaRule, LocalRule)) or implements(rule, "record"):
                yield rule


def models_reached(entry: ModelEntry) -> list[ModelEntry]:
    """Return the models that a write of this one may change in the same commit."""
    reached: list[ModelEntry] = []
    pending = [rule.target for rule in entry.effects.on_write]
    while pending:
        target = pending.pop()
        if target not in reached:
            reached.append(target)
            pending.extend(rule.target for rule in target.effects.on_write)
    return reached
