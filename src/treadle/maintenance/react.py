"""What changed sources do to their targets, inside the transaction that changed them.

Level by level: first the rules that are fed by callers' fields only, then
those that are fed by these. At each level all rules of one target become one
update of it, which ends with the target's formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pymongo import UpdateOne

from treadle.change import Change
from treadle.gather import RECOMPUTE, GatherRule, freeze
from treadle.kinds import scoped_formula
from treadle.maintenance.guards import guard
from treadle.maintenance.ledger import Ledger
from treadle.maintenance.recompute import recompute
from treadle.paths import outermost
from treadle.pattern import REVISION
from treadle.patterns.computed import ComputedRule
from treadle.patterns.extended_reference import ReferenceRule
from treadle.plan import Plan, Raw, bulk_write, find, update_many, update_one
from treadle.topology import Topology

if TYPE_CHECKING:
    from treadle.graph import Entry, Graph

# Copies beyond this many are made after the transaction, in chunks, under an intent.
FAN_OUT_MAX = 2000
# Fewer where each copy feeds others in turn.
CHAINED_FAN_OUT_MAX = 100
# Inside a caller's own transaction nothing can be left for later.
UNBOUNDED = 2**31

BUMP: Raw = {REVISION: {"$add": [{"$ifNull": [f"${REVISION}", 0]}, 1]}}


@dataclass(frozen=True, slots=True)
class FanOut:
    """Copies that are still to be made of one source document."""

    rule: ReferenceRule
    source_id: Any


@dataclass(slots=True)
class _Effect:
    """What the changes do to one target, per rule."""

    key: Any
    removed: dict[GatherRule, list[Any]] = field(default_factory=dict)
    added: dict[GatherRule, list[Any]] = field(default_factory=dict)


def react(
    graph: Graph, server: Topology, ledger: Ledger, *, copies_max: int | None = None
) -> Plan[list[FanOut]]:
    """Bring every target up to date; the fan-outs that are too large for here."""
    later: list[FanOut] = []
    for stage in graph.stages:
        effects: dict[Entry[Any], dict[Any, _Effect]] = {}
        for entry, gathers in stage.gathers:
            changes = ledger.of(entry.collection)
            if changes:
                for gather in gathers:
                    yield from _collect(gather, changes, ledger, effects.setdefault(gather.target, {}))
        for target, of_target in effects.items():
            yield from _update_targets(target, of_target, stage.level, server, ledger)
        for reference in stage.references:
            for change in ledger.of(reference.source.collection):
                later.extend((yield from _copy(reference, change, ledger, copies_max)))
    return later


def _collect(
    rule: GatherRule, changes: Sequence[Change], ledger: Ledger, effects: dict[Any, _Effect]
) -> Plan[None]:
    """Note per target what the changes take from it and give to it."""
    evaluated = (yield from ledger.evaluate_after(rule, changes)) if rule.server_side else {}
    for change in changes:
        old = ledger.before(rule, change)
        new = evaluated.get(freeze(change.id), []) if rule.server_side else rule.contributions(change.after)
        if old == new and _types(old) == _types(new):
            continue
        for key, value in old:
            effect = effects.setdefault(freeze(key), _Effect(key))
            effect.removed.setdefault(rule, []).append(value)
        for key, value in new:
            effect = effects.setdefault(freeze(key), _Effect(key))
            effect.added.setdefault(rule, []).append(value)


def _types(contributions: Sequence[tuple[Any, Any]]) -> list[type]:
    # In Python True equals 1; a sum on the server does not count it.
    return [type(value) for _, value in contributions]


def _update_targets(
    target: Entry[Any], effects: dict[Any, _Effect], level: int, server: Topology, ledger: Ledger
) -> Plan[None]:
    """One update per target, all its rules in it."""
    sets: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {}
    anew: dict[GatherRule, list[Any]] = {}
    # A target that this very transaction inserted may have counted the same sources then.
    new = {freeze(change.id) for change in ledger.of(target.collection) if change.before is None}
    for frozen, effect in effects.items():
        first: dict[str, Any] = {}
        second: dict[str, Any] = {}
        touched = False
        for rule in {**effect.removed, **effect.added}:
            removed, added = effect.removed.get(rule, []), effect.added.get(rule, [])
            difference = RECOMPUTE if frozen in new else rule.difference(removed, added, server.version)
            if difference is None:
                continue
            touched = True
            if difference is RECOMPUTE:
                anew.setdefault(rule, []).append(effect.key)
            else:
                parts, following = rule.apply(difference)
                first.update(parts)
                second.update(following)
        if touched:
            sets[frozen] = (first, second)
    if not sets:
        return
    for rules, keys in _together(anew):
        for frozen, values in (yield from recompute(rules, keys, server.version)).items():
            sets[frozen][0].update({path: {"$literal": value} for path, value in values.items()})
    keys = [effects[frozen].key for frozen in sets]
    stamps = {
        stamp: "$$NOW" for rule in target.inline_gathers for stamp in rule.stamps() if rule.level == level
    }
    updates = [
        (effects[frozen].key, update_pipeline(target, {**first, **stamps}, second))
        for frozen, (first, second) in sets.items()
    ]
    followed = feeds_beyond(target, level)
    before = (yield from read(target, keys)) if followed else {}
    if followed:
        yield from ledger.note_before(target, keys)
    matched = yield from update_each(target, updates)
    if matched < len(updates):
        # Some targets do not exist (yet); whoever inserts one must meet this transaction.
        yield from guard(target.collection, keys)
    if followed:
        yield from note_after(target, before, ledger)


def update_each(target: Entry[Any], updates: Sequence[tuple[Any, list[Raw]]]) -> Plan[int]:
    """Update documents, each in its own way, in one command; how many there were."""
    if len(updates) == 1:
        # The driver's bulk machinery costs as much as a whole update.
        key, pipeline = updates[0]
        return (yield from update_one(target.collection, target.one(key), pipeline)).matched_count
    operations = [UpdateOne(target.one(key), pipeline) for key, pipeline in updates]
    return (yield from bulk_write(target.collection, operations, ordered=False)).matched_count


def _together(anew: dict[GatherRule, list[Any]]) -> list[tuple[list[GatherRule], list[Any]]]:
    """Rules that are to be recomputed for the same targets, side by side."""
    groups: dict[tuple[Any, ...], tuple[list[GatherRule], list[Any]]] = {}
    for rule, keys in anew.items():
        groups.setdefault(tuple(freeze(key) for key in keys), ([], keys))[0].append(rule)
    return list(groups.values())


def update_pipeline(target: Entry[Any], first: dict[str, Any], second: dict[str, Any]) -> list[Raw]:
    """The one update of a target: values, what follows from them, then the formulas."""
    stages: list[Raw] = [{"$set": {**first, **BUMP}}]
    if second:
        stages.append({"$set": second})
    return [*stages, *formula_stages(target)]


def formula_stages(target: Entry[Any]) -> list[Raw]:
    """The target's formulas, those that read others after these."""
    if target.family is not None:
        # Each for itself: formulas of several kinds may set the same field.
        formulas = dict.fromkeys(rule for each in target.related for rule in each.formulas)
        ordered = sorted(formulas, key=lambda rule: rule.level)
        return [{"$set": scoped_formula(rule, rule.expression)} for rule in ordered]
    by_level: dict[int, Raw] = {}
    for formula in target.formulas:
        by_level.setdefault(formula.level, {})[formula.path] = formula.expression
    return [{"$set": sets} for _, sets in sorted(by_level.items())]


def feeds_beyond(target: Entry[Any], level: int) -> bool:
    """Whether anything is fed by what this level maintains in the target."""
    return any(rule.level > level for rule in target.feeds)


def read(entry: Entry[Any], keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
    """Documents by frozen id, with what others are fed by."""
    projection = (
        None if entry.watched is None else dict.fromkeys([*sorted(outermost(entry.watched)), "_id"], 1)
    )
    found = yield from find(entry.collection, {"_id": {"$in": list(keys)}}, projection)
    return {freeze(each["_id"]): each for each in found}


def note_after(entry: Entry[Any], before: dict[Any, Raw], ledger: Ledger) -> Plan[None]:
    """Read the documents again and note their changes."""
    after = yield from read(entry, [each["_id"] for each in before.values()])
    for frozen, old in before.items():
        if frozen in after:
            ledger.add(Change(entry.collection, old["_id"], old, after[frozen]))


def _copy(rule: ReferenceRule, change: Change, ledger: Ledger, copies_max: int | None) -> Plan[list[FanOut]]:
    """Copy one changed source to the targets that refer to it."""
    # A document that was of another kind is a new one to those who refer to this kind.
    before = None if change.before and not rule.source.holds(change.before) else change.before
    if (
        change.after is None
        or not rule.source.holds(change.after)
        or change.fresh
        or not rule.synced
        or not rule.changed(before, change.after)
    ):
        return []
    if before is None:
        yield from guard(rule.source.collection, [change.id])
    followed = feeds_beyond(rule.target, rule.level)
    most = copies_max
    if most is None:
        most = CHAINED_FAN_OUT_MAX if followed else FAN_OUT_MAX
    if most != UNBOUNDED:
        referring = {rule.reference_path: {"$eq": change.id}, **rule.target.scope}
        beyond = yield from find(rule.target.collection, referring, {"_id": 1}, skip=most, limit=1)
        if beyond:
            return [FanOut(rule, change.id)]
    yield from copy_to(rule, change.id, change.after, {}, followed, ledger)
    return []


def copy_to(
    rule: ReferenceRule, source_id: Any, source: Raw, within: Raw, followed: bool, ledger: Ledger
) -> Plan[None]:
    """Bring the copies of a source up to date, within some targets."""
    if not followed:
        yield from update_copies(rule, source_id, source, within)
        return
    target = rule.target
    referring = {**within, rule.reference_path: {"$eq": source_id}, **target.scope}
    found = yield from find(target.collection, referring, {"_id": 1})
    keys = [each["_id"] for each in found]
    if keys:
        before = yield from read(target, keys)
        yield from ledger.note_before(target, keys)
        yield from update_copies(rule, source_id, source, {"_id": {"$in": keys}})
        yield from note_after(target, before, ledger)


def update_copies(rule: ReferenceRule, source_id: Any, source: Raw, within: Raw) -> Plan[None]:
    """The update of all copies of a source within some targets, formulas included."""
    target = rule.target
    condition = {**within, rule.reference_path: {"$eq": source_id}, **target.scope}
    formulas = formula_stages(target)
    update, filters = rule.sync_update(source_id, source, formulas)
    if filters is None:
        yield from update_many(target.collection, condition, update)
        return
    yield from update_many(target.collection, condition, update, array_filters=filters)
    if formulas:
        yield from update_many(target.collection, condition, formulas)


def stamps_of(rules: Sequence[GatherRule]) -> dict[str, Any]:
    """The dates of computation that a rewrite of these rules sets."""
    return {stamp: "$$NOW" for rule in rules if isinstance(rule, ComputedRule) for stamp in rule.stamps()}
