"""What the rules of a model ask of each write of it, and the one update of a target.

Derived values are stored inside a transaction, by leaf, never as a
sub-document that a caller's write may share. The formulas of the target are
evaluated in the same update, and `_treadle.n` is incremented in any case: an
update that changes nothing takes no lock, and a concurrent writer would not
conflict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from pymongo import ReplaceOne, UpdateOne
from pymongo.errors import OperationFailure

from treadle.graph.aggregate import NumberSum
from treadle.graph.changes import Changes
from treadle.graph.derived import (
    DerivedRule,
    FormulaRule,
    LocalRule,
    aggregates_in,
    aggregates_of,
    copies_in,
    copies_of,
)
from treadle.graph.kinds import build_formula_stages
from treadle.graph.model_entry import ModelEntry
from treadle.graph.owned import NO_VALUE, Touch
from treadle.graph.rule import REVISION
from treadle.graph.stored_pages import chunks
from treadle.model.bson_types import RESERVED
from treadle.plan import NO_OPTIONS, Call, Plan, Raw, bulk_write, by_id, find
from treadle.plan.server_errors import CONVERSION_FAILURE, codes_of
from treadle.query.comparison import identical
from treadle.query.keys import Key, freeze
from treadle.query.paths import outermost

# Documents that one query asks for by their keys.
READ_KEYS_MAX = 1_000

R = TypeVar("R")

BUMP: Raw = {REVISION: {"$add": [{"$ifNull": [f"${REVISION}", 0]}, 1]}}


class Derivation:
    """What one model derives, and what is derived from it, as its writes need to know it."""

    def __init__(self, entry: ModelEntry) -> None:
        self._entry = entry
        self.aggregates = aggregates_in(entry)
        self.copies = copies_in(entry)
        self.locals = entry.rules.of_type(LocalRule)
        self.formulas = entry.rules.of_type(FormulaRule)
        self.formula_stages = build_formula_stages(entry)
        # Whether a document must be filled in before it is stored.
        self.fills = bool(self.copies or self.locals)
        # What each write maintains; and of that, what sources refer to by an alternate key: that of a new
        # document may be known.
        self.written = aggregates_in(entry, "write")
        self.by_alternate_key = [rule for rule in self.written if rule.alternate_key]
        # The rules that act when a whole document is written.
        implementing = entry.rules.implementing
        self.acting = list(dict.fromkeys([*implementing("before"), *implementing("after")]))
        self.records = implementing("record")
        # What is made of its documents with each write, and the last level that is.
        self.fed = aggregates_of(entry)
        self.copied = copies_of(entry)
        self.feeds = entry.effects.on_write
        self.last_level = max((rule.level for rule in self.feeds), default=0)
        # Whether its documents hold copies of each other.
        self.among_themselves = any(rule.target.collection == entry.collection for rule in self.copied)

    @cached_property
    def blanks(self) -> dict[str, Any]:
        """What a new document holds as long as it has no sources."""
        blanks: dict[str, Any] = {}
        for rule in self.aggregates:
            blanks |= {**rule.empty(), **({rule.stamp: None} if rule.stamp else {})}
        blanks |= dict.fromkeys(rule.path for rule in [*self.formulas, *self.locals])
        owned = self._entry.paths.owned
        return blanks | {path: own.blank for path, own in owned.items() if own.blank is not NO_VALUE}

    @cached_property
    def touches(self) -> dict[bool, dict[str, Touch]]:
        """What a write stamps on a document, and how; by whether the document is new."""
        return {is_new: self._touches(is_new) for is_new in (False, True)}

    def _touches(self, is_new: bool) -> dict[str, Touch]:
        owned = self._entry.paths.owned.items()
        return {path: own.on_write for path, own in owned if own.on_write and (is_new or not own.insert_only)}

    # What follows concerns the models that some document may share with this one; itself among them.

    @cached_property
    def is_recorded(self) -> bool:
        """Whether each write of a document is a state of its own to some rule."""
        return any(derivation(each).records for each in self._entry.kinds.related)

    @cached_property
    def maintains_itself(self) -> bool:
        """Whether a write of a document may have to fill in more of it."""
        derivations = [derivation(each) for each in self._entry.kinds.related]
        return any(each.fills or each.formula_stages for each in derivations)

    @cached_property
    def has_formulas(self) -> bool:
        """Whether a write may be refused for what formulas make of it."""
        return any(derivation(each).formulas for each in self._entry.kinds.related)

    @cached_property
    def needs_before(self) -> bool:
        """Whether anything follows from what a document was before an update."""
        related = self._entry.kinds.related
        return (
            bool(self.fed)
            # What refers to it by an alternate key that it had must be found by that.
            or any(each.paths.alternate_keys for each in related)
            or any(rule.needs_before for each in related for rule in each.rules)
        )

    @cached_property
    def is_referred_to(self) -> bool:
        """Whether something follows where other documents refer to a new one already."""
        return bool(self.written or self.copied)

    @cached_property
    def references(self) -> list[tuple[str, Key]]:
        """The collections whose documents an insert also writes, each with the key of these."""
        fed = [(rule.target, rule.match) for rule in self.fed]
        read = [(rule.source, rule.on) for rule in self.copies if rule.guards_source]
        return [(model.collection, key) for model, key in [*fed, *read] if key.is_local]

    @cached_property
    def followed(self) -> bool:
        """Whether something follows from each insert, whatever it holds."""
        rules = [*self.fed, *self.records, *self.formulas, *self.locals, *self.by_alternate_key]
        rules += [rule for rule in self.copied if rule.alternate_key]
        rules += [rule for rule in self.copies if rule.guards_source]
        return bool(rules)


def derivation(entry: ModelEntry) -> Derivation:
    """Return the derivation of a model, made once."""
    made: Derivation | None = entry.rules.facts.get(Derivation)
    return entry.rules.memo(Derivation, lambda: Derivation(entry)) if made is None else made


def update_pipeline(target: ModelEntry, first: dict[str, Any], second: dict[str, Any]) -> list[Raw]:
    """Return the one update of a target: values, what follows from them, then the formulas."""
    stages: list[Raw] = [{"$set": {**first, **BUMP}}]
    if second:
        stages.append({"$set": second})
    formulas = formula_stages(target)
    return [*stages, *formulas] if formulas else stages


def changed_fields(before: Raw, after: Raw) -> Raw:
    """Return the fields of a document that a write changes, as literals for a `$set`.

    Of the reserved sub-document only its leaves, because the update increments `_treadle.n` as well.
    """
    changed: Raw = {}
    for name, value in after.items():
        if name == RESERVED:
            changed.update(_changed_leaves(name, before.get(name), value))
        elif not identical(before.get(name), value):
            changed[name] = {"$literal": value}
    return changed


def _changed_leaves(path: str, before: Any, after: Any) -> Raw:
    if identical(before, after):
        return {}
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return {path: {"$literal": after}}
    leaves: Raw = {}
    for name, value in after.items():
        leaves.update(_changed_leaves(f"{path}.{name}", before.get(name), value))
    return leaves


def formula_stages(target: ModelEntry) -> list[Raw]:
    """Return the target's formulas, those that read others after these."""
    return derivation(target).formula_stages


def stamps_of(rules: Sequence[DerivedRule]) -> Raw:
    """Return the dates of computation that an update of these rules' values sets."""
    return {rule.stamp: "$$NOW" for rule in rules if rule.stamp}


# -- storing derived values -----------------------------------------------------------------------


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
