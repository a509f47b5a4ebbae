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

from treadle.engine.recompute import Recomputation, Values, finished, grouping_stages, recompute
from treadle.graph.gather import CountingRule, GatherRule
from treadle.graph.pattern import Entry
from treadle.plan import REPLY_DOCUMENTS, Plan, Raw, database_command, outside
from treadle.plan.capabilities import Capabilities
from treadle.query.comparison import exact_sum, same
from treadle.query.keys import ReferenceKey, freeze
from treadle.query.paths import value_at
from treadle.upkeep.change_stream import operation_time
from treadle.upkeep.dirty import Mark

# Ids that no collation takes for equal to another.
_PLAIN_KEYS = frozenset({ObjectId, int, Int64, UUID})
# With fewer sources than this nobody asks how many there are in all.
MANY = 1_000


@dataclass(frozen=True)
class Total:
    """What the sources of a target come to, as a row of `$group`; None if it has none."""

    # All changes up to here are in it, and of later ones those that were read since.
    at: Any
    row: Raw | None


class Totals:
    """The totals that a worker remembers."""

    def __init__(self, targets_max: int) -> None:
        self._targets_max = targets_max
        # The time of the last event that was read.
        self.until: Any = None
        self._totals: dict[tuple[Entry[Any], Any], Total] = {}

    def forget(self) -> None:
        self._totals.clear()

    def take(self, entry: Entry[Any], key: Any) -> Total | None:
        """The total of a target, which is forgotten unless it is kept again."""
        return self._totals.pop((entry, key), None)

    def keep(self, entry: Entry[Any], key: Any, total: Total) -> None:
        while len(self._totals) >= self._targets_max:
            self._totals.pop(next(iter(self._totals)))
        self._totals[entry, key] = total


def countable(entry: Entry[Any]) -> list[GatherRule]:
    """The rules of a model that totals serve: all that gather, from one source by one key; else none."""
    rules = Recomputation.of(entry, "stream").gathers
    if not rules or entry.group is not None:
        return []
    return rules if all(_is_countable(rule) and rule.alike == rules[0].alike for rule in rules) else []


def _is_countable(rule: GatherRule) -> bool:
    return (
        isinstance(rule.key, ReferenceKey)
        and not (rule.key.array_depth or rule.per_element or rule.where or rule.server_side)
        and rule.to is None
        and rule.source.sources.archive is None
        and not rule.source.versions.may_change
        and rule.tally([]) is not None
    )


class Counted:
    """The totals of some targets, in one transaction that brings them right."""

    def __init__(self, totals: Totals, entry: Entry[Any], marks: Sequence[Mark]) -> None:
        self._totals = totals
        self._entry = entry
        self._rules = countable(entry)
        # The values that were written last, and the totals with what has arrived since.
        self._written: dict[Any, Raw] = {}
        self._known: dict[Any, Total] = {}
        # What comes of them, if the transaction commits.
        self._new: dict[Any, Total] = {}
        for mark in marks:
            total = totals.take(entry, mark.frozen)
            added = None if total is None else _added(self._rules, total, mark)
            if total is not None and added is not None:
                self._written[mark.frozen] = finished(self._rules, total.row)
                self._known[mark.frozen] = added

    def gather(
        self, keys: Sequence[Any], server: Capabilities, frozen: Sequence[Any], documents: Sequence[Raw]
    ) -> Plan[Values]:
        """The values of targets, from their totals where these are known."""
        self._new = {}
        unknown = []
        for number, (key, document) in enumerate(zip(frozen, documents, strict=True)):
            # One that somebody else has written since is counted again, whoever was right.
            written = self._written.get(key)
            if written and all(same(value_at(document, path), value) for path, value in written.items()):
                self._new[key] = self._known[key]
            else:
                unknown.append(number)
        plain = [number for number in unknown if type(keys[number]) in _PLAIN_KEYS]
        if plain:
            some = [keys[number] for number in plain]
            most = sum(self._stored_count(documents[number]) for number in plain)
            counted = yield from outside(lambda: _count(self._rules, some, self._totals.until, most))
            self._new |= {frozen[number]: counted[frozen[number]] for number in plain if counted}
        values = {key: finished(self._rules, total.row) for key, total in self._new.items()}
        left = [number for number in unknown if frozen[number] not in values]
        if left:
            rest = [[each[number] for number in left] for each in (keys, frozen, documents)]
            values |= yield from recompute(self._rules, rest[0], server, rest[1], rest[2])
        return values

    def _stored_count(self, document: Raw) -> int:
        """How many sources a target seems to have."""
        for rule in self._rules:
            if isinstance(rule, CountingRule) and type(count := value_at(document, rule.path)) is int:
                return count
        return 0

    def keep(self) -> None:
        """Remember the totals, after the transaction has committed."""
        for key, total in self._new.items():
            self._totals.keep(self._entry, key, total)


def _count(
    rules: Sequence[GatherRule], keys: Sequence[Any], until: Any, sources: int
) -> Plan[dict[Any, Total]]:
    """The totals of targets as of this moment, by frozen key; none where the server cannot tell.

    They seem to have so many `sources`. No transaction tells the moment that it
    sees; this one is not before that of the transaction under way, so that no
    value goes back in time.
    """
    at = yield from operation_time()
    rule = rules[0]
    collection = rule.source.collection
    command: Raw = {
        "aggregate": collection,
        "pipeline": [{"$match": rule.key.match(keys)}, *grouping_stages(rules, keys)],
        # Whatever else names one of them, in a list, is a group too.
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
    if cursor["id"] or at < until:
        return {}
    rows = {freeze(row["_id"]): row for row in cursor["firstBatch"]}
    return {freeze(key): Total(at, rows.get(freeze(key))) for key in keys}


def _added(rules: Sequence[GatherRule], total: Total, mark: Mark) -> Total | None:
    """A total with the sources that arrived; None where all must be counted again."""
    if mark.arrived is None:
        return None
    later = mark.arrived
    if later and later[0][0] <= total.at:
        later = [each for each in later if each[0] > total.at]
    if not later:
        return total
    row: Raw = {}
    for number, rule in enumerate(rules):
        added = rule.tally([rule.value(document) for _, document in later])
        for name, value in (added or {}).items():
            field = f"{name}{number}"
            whole = value if total.row is None else exact_sum([total.row[field], value])
            if whole is None:
                return None
            row[field] = whole
        if added is None:
            return None
    return Total(total.at, row)
