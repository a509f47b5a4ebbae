"""Running totals: what targets have gathered, so that the worker adds new sources instead of counting all.

A count or a sum of a target is remembered with the moment of the server's
history that it is true for, which a snapshot read tells. An insert later in the
stream adds to it; one that is not later is in it already. After any other
change of a source, and wherever adding would not be exact, all sources are
counted again.

What is written is the total itself and never a difference, so that writing it
twice is harmless. Nothing of it is stored: it is true only as long as each event is
read once, in order, and is forgotten with the stream and after any error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from bson import Int64, ObjectId
from pymongo.errors import OperationFailure

from treadle.engine.aggregation import Fold, Values, aggregate_values
from treadle.engine.derive import DerivedValues
from treadle.graph.aggregate import RECOMPUTE, Ranked, SourceCount, State
from treadle.graph.derived import DerivedRule
from treadle.graph.model_entry import ModelEntry
from treadle.plan import REPLY_DOCUMENTS, Plan, Raw, database_command, outside
from treadle.query.comparison import same
from treadle.query.keys import freeze
from treadle.query.paths import value_at
from treadle.upkeep.change_stream import operation_time
from treadle.upkeep.dirty import Mark

# Ids that no collation takes for equal to another.
_PLAIN_KEYS = frozenset({ObjectId, int, Int64, UUID})
# With fewer sources than this the total number is not asked for.
MANY = 1_000


@dataclass(frozen=True)
class Total:
    """The states of the rules of a target as of a moment; None if it has no sources."""

    # All changes up to here are in it, and of later ones those that were read since.
    at: Any
    states: Sequence[State] | None


class Totals:
    """The totals that a worker remembers."""

    def __init__(self, targets_max: int) -> None:
        self._targets_max = targets_max
        # The time of the last event that was read.
        self.until: Any = None
        self._totals: dict[tuple[ModelEntry, Any], Total] = {}

    def forget(self) -> None:
        self._totals.clear()

    def take(self, entry: ModelEntry, key: Any) -> Total | None:
        """The total of a target, which is forgotten unless it is kept again."""
        return self._totals.pop((entry, key), None)

    def keep(self, entry: ModelEntry, key: Any, total: Total) -> None:
        while len(self._totals) >= self._targets_max:
            self._totals.pop(next(iter(self._totals)))
        self._totals[entry, key] = total


def countable(entry: ModelEntry) -> list[DerivedRule]:
    """The rules of a model that totals serve: all that gather, from one source by one key; else none."""
    rules = DerivedValues.of(entry, "stream").aggregates
    if not rules or entry.rules.group is not None:
        return []
    return (
        rules if all(_is_countable(rule) and rule.group_key == rules[0].group_key for rule in rules) else []
    )


def _is_countable(rule: DerivedRule) -> bool:
    return (
        not (rule.match.group or rule.match.arrays or rule.unit or rule.where or rule.server_side)
        and not rule.alternate_key
        and rule.source.sources.archive is None
        and not rule.source.versions.may_change
        and not isinstance(rule.aggregate, Ranked)
    )


class Counted:
    """The totals of some targets, in one transaction that brings them right."""

    def __init__(self, totals: Totals, entry: ModelEntry, marks: Sequence[Mark]) -> None:
        self._totals = totals
        self._entry = entry
        self._rules = countable(entry)
        self._fold = Fold(self._rules)
        # The values that were written last, and the totals with what has arrived since.
        self._written: dict[Any, Raw] = {}
        self._known: dict[Any, Total] = {}
        # What comes of them, if the transaction commits.
        self._new: dict[Any, Total] = {}
        for mark in marks:
            total = totals.take(entry, mark.frozen)
            added = None if total is None else _added(self._rules, total, mark)
            if total is not None and added is not None:
                self._written[mark.frozen] = self._fold.finish(total.states)
                self._known[mark.frozen] = added

    def gather(self, keys: Sequence[Any], frozen: Sequence[Any], documents: Sequence[Raw]) -> Plan[Values]:
        """The values of targets, from their totals where these are known."""
        self._new = {}
        unknown = []
        for number, (key, document) in enumerate(zip(frozen, documents, strict=True)):
            # One that another program has written since is counted again.
            written = self._written.get(key)
            if written and all(same(value_at(document, path), value) for path, value in written.items()):
                self._new[key] = self._known[key]
            else:
                unknown.append(number)
        plain = [number for number in unknown if type(keys[number]) in _PLAIN_KEYS]
        if plain:
            some = [keys[number] for number in plain]
            most = sum(self._stored_count(documents[number]) for number in plain)
            counted = yield from outside(lambda: self._count(some, most))
            self._new |= {frozen[number]: counted[frozen[number]] for number in plain if counted}
        values = {key: self._fold.finish(total.states) for key, total in self._new.items()}
        left = [number for number in unknown if frozen[number] not in values]
        if left:
            rest = [[each[number] for number in left] for each in (keys, frozen, documents)]
            values |= yield from aggregate_values(self._rules, *rest)
        return values

    def _stored_count(self, document: Raw) -> int:
        """How many sources a target seems to have."""
        for rule in self._rules:
            if (
                isinstance(rule.aggregate, SourceCount)
                and type(count := value_at(document, rule.path)) is int
            ):
                return count
        return 0

    def _count(self, keys: Sequence[Any], sources: int) -> Plan[dict[Any, Total]]:
        """Return the totals of targets as of this moment, by frozen key; none where the server cannot tell.

        They seem to have so many `sources`. No transaction tells the moment that it
        sees; this one is not before that of the transaction under way, so that no
        value goes back in time.
        """
        at = yield from operation_time()
        rule = self._rules[0]
        collection = rule.source.collection
        command: Raw = {
            "aggregate": collection,
            "pipeline": [{"$match": rule.match.condition(keys)}, *self._fold.stages(keys)],
            # What else refers to one of them, in a list, is a group too.
            "cursor": {"batchSize": REPLY_DOCUMENTS},
            "readConcern": {"level": "snapshot", "atClusterTime": at},
        }
        if (
            sources > MANY
            and sources * 2 > (yield from database_command({"count": collection}, writes=False))["n"]
        ):
            # To go through them all takes less than half of the time of finding as many by an index.
            command["hint"] = {"$natural": 1}
        try:
            cursor = (yield from database_command(command, writes=False))["cursor"]
        except OperationFailure:
            # No snapshots here, or none that shows a collection which was made just now.
            return {}
        if cursor["id"] or at < self._totals.until:
            return {}
        states = self._fold.by_key(cursor["firstBatch"])
        return {freeze(key): Total(at, states.get(freeze(key))) for key in keys}

    def keep(self) -> None:
        """Remember the totals, after the transaction has committed."""
        for key, total in self._new.items():
            self._totals.keep(self._entry, key, total)


def _added(rules: Sequence[DerivedRule], total: Total, mark: Mark) -> Total | None:
    """Return a total with the sources that arrived; None where all must be counted again."""
    if mark.arrived is None:
        return None
    later = [document for at, document in mark.arrived if at > total.at]
    if not later:
        return total
    states = []
    for number, rule in enumerate(rules):
        former = rule.aggregate.empty() if total.states is None else total.states[number]
        added = [rule.aggregate.contribution(document) for document in later]
        state = rule.aggregate.difference(former, [], added)
        if state is RECOMPUTE:
            return None
        states.append(state)
    return Total(total.at, states)
