"""What changed sources do to their targets, inside the transaction that changed them.

Level by level: first the rules that are fed by callers' fields only, then
those that are fed by these. At each level all rules of one target become one
update of it, which ends with the target's formulas.

Where it is exact, a difference is applied to a target that is not read, by an
expression (`Aggregate.blind`), which saves a read per target. Where it is not,
the target is read and the difference applied to what it holds, which saves
reading all of its sources. The rest is recomputed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.engine.aggregation import aggregate_values
from treadle.engine.alternate_keys import (
    alternate_keys_of,
    ids_by_key,
    refuse_key_change,
    with_changed_keys,
)
from treadle.engine.contributions import Contribution, Contributions, contributions, is_unchanged
from treadle.engine.copies import copy_to, upgrade_targets
from treadle.engine.deletes import follow_references
from treadle.engine.guards import guard
from treadle.engine.pipelines import changed_fields, stamps_of
from treadle.engine.references import fill_copies
from treadle.engine.target_updates import (
    Stored,
    TargetUpdate,
    is_followed,
    literals,
    note_writes,
    store_derived,
)
from treadle.engine.version_upgrade import lower_documents, upgrade_possible
from treadle.graph.aggregate import RECOMPUTE, Aggregate, Values
from treadle.graph.changes import Change, Changes, NotRead
from treadle.graph.derived import DerivedRule, copies_in
from treadle.graph.graph import Graph
from treadle.graph.levels import Level
from treadle.graph.model_entry import ModelEntry
from treadle.graph.quarantine import set_aside
from treadle.graph.rule import Rule
from treadle.graph.scope import NO_FILTER, Image
from treadle.plan import Plan, Raw, delete_many, find
from treadle.query.comparison import same
from treadle.query.keys import distinct, freeze, may_be_id, same_key
from treadle.query.paths import outermost

# Copies that are made in the transaction of their source, where the copies feed others.
CHAINED_FAN_OUT_MAX = 100

# Inside a caller's own transaction nothing can be left for later.
UNBOUNDED = 2**31


@dataclass(slots=True, eq=False, repr=False)
class FanOut:
    """Copies that are still to be made of one source document, by the key that targets refer to."""

    rule: DerivedRule
    key: Any


@dataclass(slots=True, eq=False, repr=False)
class _Effect:
    """What the changes do to one target, per rule."""

    key: Any
    # What is removed, and what is added.
    moves: dict[DerivedRule, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    # The rules by which it is recomputed, whatever the difference.
    recomputed: set[DerivedRule] = field(default_factory=set)

    def of(self, rule: DerivedRule) -> tuple[list[Any], list[Any]]:
        """Return what one rule removes and adds so far."""
        move = self.moves.get(rule)
        if move is None:
            move = self.moves[rule] = ([], [])
        return move

    def add(self, other: _Effect) -> None:
        """Add what was noted under another key of the same target."""
        self.recomputed |= other.recomputed
        for rule, moved in other.moves.items():
            for own, values in zip(self.of(rule), moved, strict=True):
                own.extend(values)


class _Effects(dict[Any, _Effect]):
    """What the changes do to the targets of one model, by frozen key."""

    def on(self, key: Any) -> _Effect:
        frozen = freeze(key)
        effect = self.get(frozen)
        if effect is None:
            effect = self[frozen] = _Effect(key)
        return effect


def propagate(graph: Graph, changes: Changes, *, copies_max: int | None = None) -> Plan[list[FanOut]]:
    """Update every target of these changes. Returns the fan-outs that are too large for this transaction."""
    later: list[FanOut] = []
    if graph.spreading:
        yield from record(changes, graph.spreading)
    for level in graph.levels:
        for target, effects in (yield from _effects(level, changes)).items():
            if effects:
                yield from _update_targets(target, effects, level.number, changes)
        for rule in level.copies:
            for change in changes.of(rule.source):
                yield from _follow_key_change(rule, change, changes)
                later += yield from _copy(rule, change, changes, copies_max)
    if graph.recording:
        yield from record(changes, graph.recording)
    if changes.to_lower():
        yield from lower_documents(changes)
    return later


def record(changes: Changes, rules: Sequence[Rule]) -> Plan[None]:
    """Let rules write what goes beside the changes that were added since they were last asked."""
    for rule in rules:
        if unrecorded := changes.take_unrecorded(rule, rule.target):
            yield from rule.record(unrecorded, changes)
            # What it wrote itself is no change to it; what others write on top of that is.
            changes.take_unrecorded(rule, rule.target)


# -- what the changes of sources do to each target -------------------------------------------------------


def _effects(level: Level, changes: Changes) -> Plan[dict[ModelEntry, _Effects]]:
    """Return what the changes of sources do to targets, by the rules of one level."""
    effects: dict[ModelEntry, _Effects] = {}
    for source, rules in level.aggregates:
        if of_source := changes.of(source):
            for rule, moves in (yield from contributions(rules, of_source)).items():
                of_target = effects.setdefault(rule.target, _Effects())
                if rule.alternate_key is None:
                    _collect(rule, moves, of_target)
                else:
                    yield from _collect_by_alternate_key(rule, moves, of_target)
    for rule in level.by_alternate_key:
        # A target that has another key is computed from the sources that hold this one.
        documents = with_changed_keys(rule, changes.of(rule.target))
        for document in documents:
            effects.setdefault(rule.target, _Effects()).on(document["_id"]).recomputed.add(rule)
        yield from guard(rule.target.collection, alternate_keys_of([rule], documents))
    return effects


def _collect(rule: DerivedRule, moves: Sequence[Contributions], effects: _Effects) -> None:
    """Note per target what the changes remove from it and add to it."""
    # A writer of an older version may have counted a document or not. Where this Store writes that version,
    # its rules maintain what such documents hold.
    trusts_outdated = rule.source.versions.writes_older
    for change, old, new in moves:
        if isinstance(change.before, Image) and change.before.outdated and not trusts_outdated:
            for key, _ in [*old, *new]:
                effects.on(key).recomputed.add(rule)
        elif is_unchanged(rule, old, new):
            continue
        for side, contributed in enumerate((old, new)):
            for key, value in contributed:
                effects.on(key).of(rule)[side].append(value)


def _collect_by_alternate_key(
    rule: DerivedRule, moves: Sequence[Contributions], effects: _Effects
) -> Plan[None]:
    """Note under the ids of targets what their sources contribute under alternate keys."""
    by_key = _Effects()
    _collect(rule, moves, by_key)
    ids = yield from ids_by_key(rule, [each.key for each in by_key.values()])
    missing = []
    for frozen, effect in by_key.items():
        if frozen in ids:
            effects.on(ids[frozen]).add(effect)
        else:
            missing.append(effect.key)
    # A concurrent writer that gives a document one of these keys must conflict.
    yield from guard(rule.target.collection, filter(may_be_id, missing))


# -- one update per target -------------------------------------------------------------------------------


def _update_targets(target: ModelEntry, effects: _Effects, level: int, changes: Changes) -> Plan[None]:
    """Update each target once, for all its rules; an outdated target is upgraded first."""
    # Its own rules computed what a target holds that this transaction inserted or made visible. What an
    # outdated one held was not maintained by the rules of this version.
    entered: set[Any] = set()
    if target.versions.may_change:
        chosen = {"_id": {"$in": [effect.key for effect in effects.values()]}}
        upgraded = (yield from upgrade_possible(target, chosen, changes)).documents
        if not target.versions.writes_older:
            entered = {freeze(each["_id"]) for each in upgraded}
    if target.rules.group is None:
        entered |= {freeze(change.id) for change in changes.of(target) if _may_have_entered(target, change)}
    yield from _LevelUpdate(target, effects, level).perform(entered, changes)


def _may_have_entered(target: ModelEntry, change: Change) -> bool:
    """Whether a document may have become one of the target's in this transaction, and was computed then."""
    before, after, family = change.before, change.after, target.kinds.family
    if not isinstance(before, Image) or after is None or target.paths.deletion is not None:
        return True
    if before.collection != after.collection:
        return True
    kind = family.discriminator if family is not None else "_id"
    return bool(before.document.get(kind) != after.document.get(kind))


class _LevelUpdate:
    """The updates of one model's targets at one level."""

    def __init__(self, target: ModelEntry, effects: _Effects, level: int) -> None:
        self.target = target
        self.effects = effects
        self.level = level
        self.updates = {frozen: TargetUpdate(effect.key) for frozen, effect in effects.items()}
        # The targets whose difference needs what they hold, and those that are recomputed, per rule.
        self.unread: dict[DerivedRule, list[_Effect]] = {}
        self.recomputed: dict[DerivedRule, list[Any]] = {}

    def perform(self, entered: set[Any], changes: Changes) -> Plan[None]:
        changed = [
            frozen
            for frozen, effect in self.effects.items()
            if self._apply_unread(frozen, effect, forced=frozen in entered)
        ]
        if not changed:
            return
        if self.unread:
            yield from self._apply_to_stored()
        for rules, keys in self._recomputations():
            yield from self._recompute(rules, keys)
        keys = [self.effects[frozen].key for frozen in changed]
        makes = self.target.rules.group is not None
        write = (self._store_groups if makes else self._store)(changed)
        if is_followed(self.target, self.level):
            yield from note_writes(self.target, keys, write, changes, makes=makes)
        else:
            yield from write

    # -- values ------------------------------------------------------------------------------------

    def _apply_unread(self, frozen: Any, effect: _Effect, *, forced: bool) -> bool:
        """Apply the differences that need no read, and note the others. Returns whether anything changes."""
        update = self.updates[frozen]
        moved: list[DerivedRule] = []
        for rule in effect.recomputed:
            effect.of(rule)
        for rule, (removed, added) in effect.moves.items():
            recomputes = forced or rule in effect.recomputed
            blind = RECOMPUTE if recomputes else rule.aggregate.blind(removed, added)
            if blind is RECOMPUTE:
                # A recomputation finds the first sources by an index, which takes no longer than a read.
                self._note_inexact(rule, effect, recomputes=recomputes or rule.first is not None)
            elif not blind.values:
                continue
            else:
                update.values.update(blind.values)
                update.following.update(blind.following)
            moved.append(rule)
        update.values.update(stamps_of(moved))
        return bool(moved)

    def _note_inexact(self, rule: DerivedRule, effect: _Effect, *, recomputes: bool) -> None:
        if recomputes:
            self.recomputed.setdefault(rule, []).append(effect.key)
        else:
            self.unread.setdefault(rule, []).append(effect)

    def _apply_to_stored(self) -> Plan[None]:
        """Apply differences to what targets hold, or note these targets for a recomputation."""
        stored = yield from self._read()
        for rule, effects in self.unread.items():
            for effect in effects:
                frozen = freeze(effect.key)
                values = _values_after(rule.aggregate, stored.get(frozen), *effect.of(rule))
                if values is None:
                    self._note_inexact(rule, effect, recomputes=True)
                else:
                    self.updates[frozen].values.update(literals(values))

    def _read(self) -> Plan[dict[Any, Raw]]:
        """Read what targets hold for rules whose difference needs it."""
        target = self.target
        keys = distinct(effect.key for effects in self.unread.values() for effect in effects)
        paths = [*target.key_projection(), *(path for rule in self.unread for path in rule.empty())]
        shown = dict.fromkeys(outermost(paths), 1)
        rows = yield from find(target.collection, target.filter_for_keys(keys), shown)
        return {freeze(target.key_of(each)): each for each in rows}

    def _recomputations(self) -> list[tuple[list[DerivedRule], list[Any]]]:
        """Return the rules that are recomputed for the same targets together, with these."""
        groups: dict[tuple[Any, ...], tuple[list[DerivedRule], list[Any]]] = {}
        for rule, keys in self.recomputed.items():
            groups.setdefault(tuple(map(freeze, keys)), ([], keys))[0].append(rule)
        return list(groups.values())

    def _recompute(self, rules: Sequence[DerivedRule], keys: Sequence[Any]) -> Plan[None]:
        for frozen, values in (yield from aggregate_values(rules, keys)).items():
            for rule in rules:
                yield from self._leave_out_unfit(rule, self.effects[frozen], values)
            self.updates[frozen].values.update(literals(values))

    def _leave_out_unfit(self, rule: DerivedRule, effect: _Effect, values: Values) -> Plan[None]:
        """Refuse a value that its field could not hold, if this write makes it so.

        Where other writes did, this one is not stopped: the value stays as it was, and is quarantined.
        """
        error = rule.aggregate.refuse(values)
        if error is None:
            return
        if rule.aggregate.blames(effect.of(rule)[1]):
            raise error
        for path in rule.empty():
            values.pop(path, None)
        yield from set_aside(rule.place.label, self.target.collection, effect.key, error)

    # -- storing -----------------------------------------------------------------------------------

    def _store(self, changed: Sequence[Any]) -> Plan[None]:
        stored = yield from store_derived(self.target, [self.updates[frozen] for frozen in changed])
        if stored.matched < len(changed):
            # Some targets do not exist (yet): a concurrent insert of one must conflict with this transaction.
            yield from guard(self.target.collection, [self.effects[frozen].key for frozen in changed])

    def _store_groups(self, changed: Sequence[Any]) -> Plan[None]:
        """Make the documents of groups whose first source arrived, and remove those whose last left."""
        target, group = self.target, self.target.rules.group
        shrinking = []
        for frozen in changed:
            removed, added = map(len, self.effects[frozen].of(group))
            if removed > added:
                shrinking.append(self.effects[frozen].key)
            if self.level == group.level and added > 0:
                self.updates[frozen].blank = group.blank()
        stored: Stored = yield from store_derived(target, [self.updates[frozen] for frozen in changed])
        if stored.made and copies_in(target):
            yield from self._fill_copies(stored.made)
        if shrinking:
            empty = {"$and": [target.filter_for_keys(shrinking), {group.path: {"$lte": 0}}]}
            yield from delete_many(target.collection, empty)

    def _fill_copies(self, ids: Sequence[Any]) -> Plan[None]:
        """Fill the copies of documents that were just made."""
        target = self.target
        made = yield from find(target.collection, {"_id": {"$in": list(ids)}})
        pairs: list[tuple[Raw | None, Raw]] = [(None, copy.deepcopy(each)) for each in made]
        yield from fill_copies(target, pairs, lenient=True)
        updates = [
            TargetUpdate(target.key_of(new), changed_fields(old, new))
            for old, (_, new) in zip(made, pairs, strict=True)
        ]
        yield from store_derived(target, updates)


def _values_after(
    aggregate: Aggregate, stored: Raw | None, removed: Sequence[Any], added: Sequence[Any]
) -> Values | None:
    """Return the values of a stored target after a difference; None where only its sources can tell."""
    state = None if stored is None else aggregate.stored_state(stored)
    after = RECOMPUTE if state is None else aggregate.difference(state, removed, added)
    if after is RECOMPUTE:
        return None
    values = aggregate.finish(after)
    return values if aggregate.refuse(values) is None else None


# -- copies -----------------------------------------------------------------------------------------------


def _follow_key_change(rule: DerivedRule, change: Change, changes: Changes) -> Plan[None]:
    """Do as `on_delete` says to what refers to a source by an alternate key that it no longer has."""
    before, after = change
    if not rule.alternate_key or rule.on_delete == "keep" or not isinstance(before, Image) or after is None:
        return
    old = rule.unique_key(before.document) if rule.source.targets.admits(before.document) else None
    if old is None or same(old, rule.unique_key(after.document)):
        return
    if (yield from find(rule.source.collection, rule.sources_of([old]), {"_id": 1}, limit=1)):
        # Another document has the key now.
        return
    yield from refuse_key_change([rule], [old])
    yield from follow_references(rule.source, [rule], [before.document], changes)


def _copy(rule: DerivedRule, change: Change, changes: Changes, copies_max: int | None) -> Plan[list[FanOut]]:
    """Copy one changed source to the targets that refer to it."""
    # No document can refer to an id that was generated in this call; to an alternate key any may.
    if rule.alternate_key is None and changes.is_new_id(rule.source, change.id):
        return []
    old, new = _copied(rule, change)
    if not new or (old and is_unchanged(rule, old, new)):
        return []
    ((key, card),) = new
    is_known = same_key(old[0][0], key) if old else isinstance(change.before, NotRead)
    if not is_known:
        # A document that refers to the source by this key may be inserted concurrently.
        yield from guard(rule.source.collection, [key])
    yield from upgrade_targets(rule, [key], changes)
    if (yield from _exceeds(rule, key, copies_max)):
        return [FanOut(rule, key)]
    yield from copy_to(rule, key, card, NO_FILTER, changes)
    return []


def _copied(rule: DerivedRule, change: Change) -> tuple[Sequence[Contribution], Sequence[Contribution]]:
    """Return what was copied of a source, and what is to be copied of it now."""
    read = None if isinstance(change.before, NotRead) else change.before
    before, after = rule.source.sources.through(read, change.after)
    old = rule.contributions(before)
    if after is None and change.after is not None and not rule.copied.keep:
        # The source is still stored, as an archived document, say, but its copies are to go.
        return old, [(key, None) for key, _ in old]
    return old, rule.contributions(after) if rule.copied.synced else []


def _exceeds(rule: DerivedRule, key: Any, copies_max: int | None) -> Plan[bool]:
    """Whether a source has more copies than are made in its transaction."""
    if copies_max is None:
        copies_max = rule.target.limits.fan_out_max
        if is_followed(rule.target, rule.level):
            copies_max = min(CHAINED_FAN_OUT_MAX, copies_max)
    if copies_max == UNBOUNDED:
        return False
    chosen = rule.targets_of([key])
    return bool((yield from find(rule.target.collection, chosen, {"_id": 1}, skip=copies_max, limit=1)))
