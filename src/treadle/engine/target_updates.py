"""Storing derived values: the one way, inside a transaction.

Values are stored by leaf, never as a sub-document that a caller's write may
share. The formulas of the target are evaluated in the same update, and
`_treadle.n` is incremented in any case: an update that changes nothing takes
no lock, and a concurrent writer would not conflict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from pymongo import ReplaceOne, UpdateOne
from pymongo.errors import OperationFailure

from treadle.engine.pipelines import derivation, update_pipeline
from treadle.graph.aggregate import NumberSum
from treadle.graph.changes import Changes
from treadle.graph.model_entry import ModelEntry
from treadle.graph.stored_pages import chunks
from treadle.plan import NO_OPTIONS, Call, Plan, Raw, bulk_write, by_id, find
from treadle.plan.server_errors import CONVERSION_FAILURE, codes_of
from treadle.query.keys import freeze
from treadle.query.paths import outermost

# Documents that one query asks for by their keys.
READ_KEYS_MAX = 1_000

R = TypeVar("R")


@dataclass(slots=True, eq=False, repr=False)
class TargetUpdate:
    """What one commit does to one target: the expressions of values by path, and what follows from these."""

    # The id of the target, or the key of its group.
    key: Any
    values: Raw = field(default_factory=dict)
    following: Raw = field(default_factory=dict)
    # What the document of a group holds that this update makes; None if it makes none.
    blank: Raw | None = None
    # The upgraded document, stored first where the stored one is outdated.
    upgraded: Raw | None = None

    def pipeline(self, model: ModelEntry) -> list[Raw]:
        blank = [{"$set": self.blank}] if self.blank else []
        return [*blank, *update_pipeline(model, self.values, self.following)]


class Stored(NamedTuple):
    """How many targets there were, and the ids of those that were made."""

    matched: int
    made: list[Any]


def store_derived(model: ModelEntry, updates: Sequence[TargetUpdate]) -> Plan[Stored]:
    """Store derived values, one update per target. Runs in a transaction."""
    try:
        return (yield from _store(model, updates))
    except OperationFailure as error:
        # Say which sum would not fit, where the server only says that a number does not.
        total = _bounded_sum(model)
        if total is None or CONVERSION_FAILURE not in codes_of(error):
            raise
        raise total.too_large() from error


def _bounded_sum(model: ModelEntry) -> NumberSum | None:
    """Return the first sum that its field may not be able to hold; None where a formula may fail instead."""
    if derivation(model).formulas:
        return None
    aggregates = (rule.aggregate for rule in derivation(model).aggregates)
    return next((each for each in aggregates if isinstance(each, NumberSum) and each.is_bounded), None)


def _store(model: ModelEntry, updates: Sequence[TargetUpdate]) -> Plan[Stored]:
    if len(updates) == 1 and updates[0].upgraded is None:
        # One plain update: the driver's bulk machinery costs as much as a whole update.
        (update,) = updates
        arguments = model.filter_for_key(update.key), update.pipeline(model)
        options = NO_OPTIONS if update.blank is None else {"upsert": True}
        one = yield Call(model.collection, "update_one", arguments, options)
        return Stored(one.matched_count, [] if one.upserted_id is None else [one.upserted_id])
    upgrades = [
        ReplaceOne(by_id(each.upgraded["_id"]), each.upgraded)
        for each in updates
        if each.upgraded is not None
    ]
    operations: list[UpdateOne | ReplaceOne[Raw]] = [*upgrades]
    for update in updates:
        chosen, pipeline = model.filter_for_key(update.key), update.pipeline(model)
        operations.append(UpdateOne(chosen, pipeline, upsert=update.blank is not None))
    result = yield from bulk_write(model.collection, operations, ordered=bool(upgrades))
    return Stored(result.matched_count, list((result.upserted_ids or {}).values()))


# -- the changes of targets, where others follow -------------------------------------------------------


def is_followed(model: ModelEntry, level: int) -> bool:
    """Whether anything is derived from what this level maintains in a model."""
    return derivation(model).last_level > level


def note_writes(
    model: ModelEntry, keys: Sequence[Any], write: Plan[R], changes: Changes, *, makes: bool = False
) -> Plan[R]:
    """Write targets of these keys, and add their changes; with `makes`, also of those that it makes."""
    before = yield from _read(model, keys)
    outcome = yield from write
    after = yield from _read(model, keys if makes else [model.key_of(each) for each in before.values()])
    pairs = [(before.get(frozen), after.get(frozen)) for frozen in {**before, **after}]
    yield from changes.add(model, [pair for pair in pairs if makes or pair[1] is not None])
    return outcome


def _read(model: ModelEntry, keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
    """Return documents by frozen key, with what others are derived from."""
    followed, projection = model.effects.followed, None
    # A migration may read any field.
    if followed is not None and not model.versions.is_versioned:
        projection = dict.fromkeys(outermost([*followed, *model.key_projection()]), 1)
    rows: list[Raw] = []
    for some in chunks(keys, READ_KEYS_MAX):
        rows += yield from find(model.collection, model.filter_for_keys(list(some)), projection)
    return {freeze(model.key_of(each)): each for each in rows}


def literals(values: Mapping[str, Any]) -> Raw:
    """Return values by path as expressions."""
    return {path: {"$literal": value} for path, value in values.items()}
