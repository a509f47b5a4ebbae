"""The values of aggregates from scratch: what every difference must equal.

Rules that agree in their sources share one `$group` (`Fold`). The sources of a
single target that decide an extreme, and those that are first in an order, are
found by an index, so that the others are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import bson

from treadle.engine.guards import guard_arrivals
from treadle.graph.aggregate import Aggregate, State
from treadle.graph.derived import DerivedRule, source_paths
from treadle.graph.model_entry import ModelEntry
from treadle.graph.scope import Seek, beside
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import Plan, Raw, find, server_facts
from treadle.query.keys import KEY, distinct, freeze, freeze_all
from treadle.query.paths import put

# The values of targets, by frozen key and path.
Values: TypeAlias = dict[Any, dict[str, Any]]


def aggregate_values(
    rules: Iterable[DerivedRule],
    keys: Sequence[Any],
    frozen: Sequence[Any] | None = None,
    documents: Sequence[Raw] | None = None,
) -> Plan[Values]:
    """Compute the values of some targets, by path, from their sources. Returns them by frozen key.

    `frozen` are the keys as they are frozen, and `documents` the targets,
    where the caller has them.
    """
    values: Values = {key: {} for key in (freeze_all(keys) if frozen is None else frozen)}
    if not values:
        return values
    by_key: list[DerivedRule] = []
    by_alternate_key: dict[str, list[DerivedRule]] = {}
    for rule in rules:
        path = rule.alternate_key
        (by_key if path is None else by_alternate_key.setdefault(path, [])).append(rule)
    yield from _add_values(by_key, keys, values)
    for own in by_alternate_key.values():
        if documents is None:
            collection = own[0].target.collection
            documents = yield from find(
                collection, {"_id": {"$in": list(keys)}}, dict.fromkeys(by_alternate_key, 1)
            )
        yield from _add_by_alternate_key(own, documents, values)
    return values


def fill_aggregates(entry: ModelEntry, rules: Sequence[DerivedRule], documents: Sequence[Raw]) -> Plan[None]:
    """Compute the values of targets that become visible after their sources, into the documents.

    Bumps their guards, so that a write of a source that finds them missing
    conflicts. Refuses values that their fields cannot hold.
    """
    yield from guard_arrivals(entry, rules, documents)
    values = yield from aggregate_values(rules, [each["_id"] for each in documents], documents=documents)
    for document in documents:
        own = values[freeze(document["_id"])]
        refuse_unfit(rules, own)
        for path, value in own.items():
            put(document, path, value)


def refuse_unfit(rules: Sequence[DerivedRule], values: Raw) -> None:
    """Refuse values that their fields cannot hold."""
    for rule in rules:
        if (error := rule.aggregate.refuse(values)) is not None:
            raise error


def _add_by_alternate_key(
    rules: Sequence[DerivedRule], documents: Sequence[Raw], values: Values
) -> Plan[None]:
    """Add the values of targets to which sources refer by an alternate key."""
    rule = rules[0]
    wanted = distinct(rule.unique_keys(documents))
    by_alternate_key: Values = {freeze(key): {} for key in wanted}
    yield from _add_values(rules, wanted, by_alternate_key)
    # A target without the key, or one that does not exist, has no sources.
    empty = {path: value for each in rules for path, value in each.empty().items()}
    own_keys = {freeze(each["_id"]): freeze(rule.unique_key(each)) for each in documents}
    for key, parts in values.items():
        parts.update(by_alternate_key.get(own_keys.get(key), empty))


def _add_values(rules: Sequence[DerivedRule], keys: Sequence[Any], values: Values) -> Plan[None]:
    """Add the values of targets, given the keys that their sources hold."""
    if not keys:
        return
    for fold, stages in _groupings(rules, keys):
        rule = fold.rules[0]
        own = beside(rule.match.condition(keys), rule.condition)
        reads, keep = source_paths(fold.rules), _contributing(rule, keys)
        seek = (yield from _seek(fold, keys)) if rule.aggregate.is_ranked else None
        rows = yield from rule.source.sources.group(own, stages, reads=reads, keep=keep, seek=seek)
        states = fold.by_key(rows)
        for key, parts in values.items():
            parts.update(fold.finish(states.get(key)))


def _groupings(rules: Sequence[DerivedRule], keys: Sequence[Any]) -> Iterator[tuple[Fold, list[Raw]]]:
    """Yield the folds that compute some rules, each with its stages."""
    if len(keys) == 1:
        # The sources that decide the value of one target are found by an index.
        for rule in rules:
            if rule.first is not None:
                fold = Fold([rule])
                yield fold, [*rule.first, *fold.stages(keys)]
        rules = [rule for rule in rules if rule.first is None]
    for fold in folds_of(rules):
        yield fold, fold.stages(keys)


def _seek(fold: Fold, keys: Sequence[Any]) -> Plan[Seek | None]:
    """Return how the first sources of many targets are found by an index; None where they are not."""
    rule = fold.rules[0]
    # A `$lookup` reaches no shards in a transaction.
    is_sharded = any(each.model.__treadle__.shard_key for each in (rule.source, rule.target))
    if len(keys) == 1 or rule.first is None or rule.unit or is_sharded:
        return None
    if (yield from server_facts()).sharded:
        return None
    row = {"$group": {"_id": None, **fold.accumulators}}
    return Seek(rule.match.path, keys, rule.condition, [*rule.first, row])


def _contributing(rule: DerivedRule, keys: Sequence[Any]) -> Callable[[Raw], bool] | None:
    """Return which sources may contribute to some targets, where Python can tell."""
    if not rule.match.is_local:
        return None
    wanted = {freeze(key) for key in keys}
    return lambda source: not wanted.isdisjoint(rule.match.of(source))


class Fold:
    """Rules with the same contributions, whose states one `$group` computes, equal accumulators once.

    An aggregate that is grouped in another way is a fold of its own.
    """

    def __init__(self, rules: Sequence[DerivedRule], prefix: str = "f") -> None:
        self.rules = rules
        self.accumulators: Raw = {}
        self._grouping = rules[0].aggregate.grouping()
        names: dict[bytes, str] = {}
        self._columns: list[tuple[Aggregate, dict[str, str]]] = []
        for rule in rules:
            columns = {}
            for name, accumulator in rule.aggregate.accumulators().items():
                expression = bson.encode(accumulator.expression, codec_options=CODEC_OPTIONS)
                own = f"{prefix}{len(names)}" if self._grouping is None else name
                column = columns[name] = names.setdefault(expression, own)
                self.accumulators[column] = accumulator.expression
            self._columns.append((rule.aggregate, columns))

    def stages(self, keys: Sequence[Any]) -> list[Raw]:
        """Return the stages that give one row per target, of sources that may contribute."""
        rule = self.rules[0]
        *stages, last = rule.match.stages(keys, rule.unit)
        if self._grouping is not None:
            return [*stages, last, *self._grouping]
        if list(last.get("$set", ())) == [KEY]:
            # A key that is grouped by at once takes a fifth less than one that is first set.
            return [*stages, {"$group": {"_id": last["$set"][KEY], **self.accumulators}}]
        return [*stages, last, {"$group": {"_id": f"${KEY}", **self.accumulators}}]

    def finish_expressions(self) -> Raw:
        """Return the values of all rules, as expressions over the rows that a `$group` gives."""
        values: Raw = {}
        for value, columns in self._columns:
            values |= value.finish_expressions({name: f"${each}" for name, each in columns.items()}) or {}
        return values

    def by_key(self, rows: Iterable[Raw]) -> dict[Any, list[State]]:
        """Return the states of each target, one per rule, from the rows of all parts."""
        states: dict[Any, list[State]] = {}
        for row in rows:
            key = freeze(row["_id"])
            own: list[State] = [
                {name: row[column] for name, column in columns.items()} for _, columns in self._columns
            ]
            if key in states:
                pairs = zip(self._columns, states[key], own, strict=True)
                own = [value.merge([one, other]) for (value, _), one, other in pairs]
            states[key] = own
        return states

    def finish(self, states: Sequence[State] | None) -> dict[str, Any]:
        """Return the values of one target by path; `states` is None where it has no sources."""
        values: dict[str, Any] = {}
        for number, (value, _) in enumerate(self._columns):
            values.update(value.finish(value.empty() if states is None else states[number]))
        return values


def folds_of(rules: Iterable[DerivedRule]) -> list[Fold]:
    """Return the folds that compute some rules, each over the sources that its rules agree in."""
    by_sources: dict[Any, list[DerivedRule]] = {}
    for rule in rules:
        is_alone = rule.aggregate.grouping() is not None or rule.aggregate.is_ranked
        key = rule if is_alone else rule.group_key
        by_sources.setdefault(key, []).append(rule)
    return [Fold(together, f"f{number}_") for number, together in enumerate(by_sources.values())]
