"""What changed sources do to their targets, inside the transaction that changed them.

Level by level: first the rules that are fed by callers' fields only, then
those that are fed by these. At each level all rules of one target become one
update of it, which ends with the target's formulas.

Where it is exact, a difference is applied to a target that is not read, by an
expression (`Aggregate.blind`), which saves a read per target. Where it is not,
the target is read and the difference applied to what it holds, which saves
reading all of its sources. The rest is recomputed.

Targets are known by their ids. Where sources refer to them by another unique
field, the ids are looked up here: in the commit, so that a target that gets
another key concurrently is written by both, and one of the two starts again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from treadle.engine.aggregation import aggregate_values
from treadle.engine.copies import FanOut, copy_change, follow_key_change
from treadle.engine.guards import alternate_keys_of, guard
from treadle.engine.pipelines import (
    READ_KEYS_MAX,
    TargetUpdate,
    changed_fields,
    is_followed,
    literals,
    note_writes,
    stamps_of,
    store_derived,
)
from treadle.engine.references import fill_copies
from treadle.engine.version_upgrade import lower_documents, upgrade_possible
from treadle.graph.aggregate import RECOMPUTE, Aggregate, Values
from treadle.graph.changes import Change, Changes, NotRead, load_documents
from treadle.graph.derived import Contribution, DerivedRule, copies_in
from treadle.graph.graph import Graph
from treadle.graph.levels import Level
from treadle.graph.model_entry import ModelEntry
from treadle.graph.quarantine import set_aside
from treadle.graph.rule import Rule
from treadle.graph.scope import Image
from treadle.graph.stored_pages import chunks
from treadle.plan import Plan, Raw, delete_many, find
from treadle.query.comparison import same
from treadle.query.keys import KEY, distinct, freeze, may_be_id
from treadle.query.paths import outermost

# The number of a document among those that the server is given.
NUMBER = "__treadle_number"


class Contributions(NamedTuple):
    """What one change takes from targets, and what it gives them."""

    change: Change
    removed: Sequence[Contribution]
    added: Sequence[Contribution]


@dataclass(slots=True, eq=False, repr=False)
class _Effect:
    """What the changes do to one target."""

    update: TargetUpdate
    # What is removed, and what is added, per rule.
    moves: dict[DerivedRule, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    # The rules by which it is recomputed, whatever the difference.
    recomputed: set[DerivedRule] = field(default_factory=set)

    @property
    def key(self) -> Any:
        return self.update.key

    def of(self, rule: DerivedRule) -> tuple[list[Any], list[Any]]:
        """Return what one rule removes and adds so far."""
        move = self.moves.get(rule)
        if move is None:
            move = self.moves[rule] = ([], [])
        return move

    def recompute(self, rules: Iterable[DerivedRule]) -> None:
        """Note rules by which the target is recomputed."""
        for rule in [*rules]:
            self.of(rule)
            self.recomputed.add(rule)

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
            effect = self[frozen] = _Effect(TargetUpdate(key))
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
                yield from follow_key_change(rule, change, changes)
                later += yield from copy_change(rule, change, changes, copies_max)
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
            for rule, moves in (yield from _contributions(rules, of_source)).items():
                of_target = effects.setdefault(rule.target, _Effects())
                if rule.alternate_key is None:
                    _collect(rule, moves, of_target)
                else:
                    yield from _collect_by_alternate_key(rule, moves, of_target)
    for rule in level.by_alternate_key:
        # A target that has another key is computed from the sources that hold this one.
        documents = _with_changed_keys(rule, changes.of(rule.target))
        for document in documents:
            effects.setdefault(rule.target, _Effects()).on(document["_id"]).recompute([rule])
        yield from guard(rule.target.collection, alternate_keys_of([rule], documents))
    return effects


def _contributions(
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
        results |= yield from _evaluated(together, list(_through(together[0], changes)))
    return results


def _through(rule: DerivedRule, changes: Sequence[Change]) -> Iterable[tuple[Change, Raw | None, Raw | None]]:
    for change in changes:
        # A write of a source of aggregates always reads it before.
        assert not isinstance(change.before, NotRead)
        yield change, *rule.source.sources.through(change.before, change.after)


def _evaluated(
    rules: Sequence[DerivedRule], seen: Sequence[tuple[Change, Raw | None, Raw | None]]
) -> Plan[dict[DerivedRule, list[Contributions]]]:
    """Let the server evaluate the contributions of rules with the same sources, in one command.

    A condition (`where=`) or an expression is the server's alone: nothing else evaluates it in just the same
    way.
    """
    documents = [document for _, *pair in seen for document in pair if document is not None]
    by_document = iter((yield from _rows_by_document(rules, documents)))
    results: dict[DerivedRule, list[Contributions]] = {rule: [] for rule in rules}
    for change, before, after in seen:
        old, new = ([] if side is None else next(by_document) for side in (before, after))
        for number, rule in enumerate(rules):
            results[rule].append(Contributions(change, _of_rows(old, number), _of_rows(new, number)))
    return results


def _of_rows(rows: Sequence[Raw], number: int) -> list[Contribution]:
    return [(row[KEY], row.get(f"value{number}")) for row in rows]


def _rows_by_document(rules: Sequence[DerivedRule], documents: Sequence[Raw]) -> Plan[list[list[Raw]]]:
    """Return one row per contribution of each document: the key, and a value per rule."""
    rule = rules[0]
    values = {f"value{number}": each.aggregate.expression() for number, each in enumerate(rules)}
    stages = [
        *([{"$match": rule.condition}] if rule.condition else []),
        *rule.match.stages(unwound=rule.unit),
        {"$project": {KEY: 1, NUMBER: 1, **values}},
    ]
    numbered = [{**document, NUMBER: number} for number, document in enumerate(documents)]
    by_document: list[list[Raw]] = [[] for _ in documents]
    for row in (yield from rule.source.sources.evaluate(numbered, stages)):
        if row.get(KEY) is not None:
            by_document[row[NUMBER]].append(row)
    return by_document


def _collect(rule: DerivedRule, moves: Sequence[Contributions], effects: _Effects) -> None:
    """Note per target what the changes remove from it and add to it."""
    # A writer of an older version may have counted a document or not. Where this Store writes that version,
    # its rules maintain what such documents hold.
    trusts_outdated = rule.source.versions.writes_older
    for change, old, new in moves:
        if isinstance(change.before, Image) and change.before.outdated and not trusts_outdated:
            for key, _ in [*old, *new]:
                effects.on(key).recompute([rule])
        elif rule.is_unchanged(old, new):
            continue
        for side, contributed in enumerate((old, new)):
            for key, value in contributed:
                effects.on(key).of(rule)[side].append(value)


# -- targets by an alternate key -------------------------------------------------------------------------


def _collect_by_alternate_key(
    rule: DerivedRule, moves: Sequence[Contributions], effects: _Effects
) -> Plan[None]:
    """Note under the ids of targets what their sources contribute under alternate keys."""
    by_key = _Effects()
    _collect(rule, moves, by_key)
    ids = yield from _ids_by_key(rule, [each.key for each in by_key.values()])
    for frozen, effect in by_key.items():
        if frozen in ids:
            effects.on(ids[frozen]).add(effect)
    # A concurrent writer that gives a document one of these keys must conflict.
    missing = [effect.key for frozen, effect in by_key.items() if frozen not in ids]
    yield from guard(rule.target.collection, filter(may_be_id, missing))


def _ids_by_key(rule: DerivedRule, keys: Iterable[Any]) -> Plan[dict[Any, Any]]:
    """Return the ids of the targets that have these alternate keys, by frozen key."""
    ids: dict[Any, Any] = {}
    for some in chunks(distinct(filter(may_be_id, keys)), READ_KEYS_MAX):
        chosen = rule.target.targets.filter(rule.on.condition(some))
        for each in (yield from find(rule.target.collection, chosen, {rule.on.path: 1})):
            ids[freeze(rule.unique_key(each))] = each["_id"]
    return ids


def _with_changed_keys(rule: DerivedRule, changes: Iterable[Change]) -> list[Raw]:
    """Return the targets that have another alternate key than before."""
    documents = []
    for change in changes:
        if not isinstance(change.before, Image) or change.after is None:
            continue
        before, after = rule.on.value(change.before.document), rule.on.value(change.after.document)
        if rule.target.targets.holds(change.after) and not same(before, after):
            documents.append(change.after.document)
    return documents


def targets_of(rule: DerivedRule, sources: Sequence[Raw]) -> Plan[list[Any]]:
    """Return what the targets of these stored sources are known by, whether or not the sources count."""
    current = yield from load_documents(rule.source, [each for each in sources if each])
    if rule.match.is_local:
        keys = rule.match.of_all(current)
    else:
        stages = [*rule.match.stages(), {"$project": {KEY: 1}}]
        rows = yield from rule.source.sources.evaluate(current, stages)
        keys = distinct(row[KEY] for row in rows)
    return list((yield from _ids_by_key(rule, keys)).values()) if rule.alternate_key else keys


# -- one update per target -------------------------------------------------------------------------------


def _update_targets(target: ModelEntry, effects: _Effects, level: int, changes: Changes) -> Plan[None]:
    """Update each target once, for all its rules; an outdated target is upgraded first."""
    # Its own rules computed what a target holds that this transaction inserted or made visible. What an
    # outdated one held was not maintained by the rules of this version.
    entered: list[Any] = []
    if target.versions.may_change:
        chosen = {"_id": {"$in": [effect.key for effect in effects.values()]}}
        upgraded = (yield from upgrade_possible(target, chosen, changes)).documents
        if not target.versions.writes_older:
            entered = [each["_id"] for each in upgraded]
    if target.rules.group is None:
        entered += [change.id for change in changes.of(target) if _may_have_entered(target, change)]
    for key in entered:
        if (effect := effects.get(freeze(key))) is not None:
            effect.recompute(effect.moves)
    yield from _LevelUpdate(target, effects, level).perform(changes)


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
        # The targets whose difference needs what they hold, and those that are recomputed, per rule.
        self.unread: dict[DerivedRule, list[_Effect]] = {}
        self.recomputed: dict[DerivedRule, list[Any]] = {}

    def perform(self, changes: Changes) -> Plan[None]:
        changed = [effect for effect in self.effects.values() if self._apply_unread(effect)]
        if not changed:
            return
        if self.unread:
            yield from self._apply_to_stored()
        if self.recomputed:
            yield from self._recompute()
        makes = self.target.rules.group is not None
        write = (self._store_groups if makes else self._store)(changed)
        if is_followed(self.target, self.level):
            keys = [effect.key for effect in changed]
            yield from note_writes(self.target, keys, write, changes, makes=makes)
        else:
            yield from write

    # -- values ------------------------------------------------------------------------------------

    def _apply_unread(self, effect: _Effect) -> bool:
        """Apply the differences that need no read, and note the others. Returns whether anything changes."""
        update = effect.update
        moved: list[DerivedRule] = []
        for rule, (removed, added) in effect.moves.items():
            blind = RECOMPUTE if rule in effect.recomputed else rule.aggregate.blind(removed, added)
            if blind is RECOMPUTE:
                self._note_inexact(rule, effect)
            elif not blind.values:
                continue
            else:
                update.values.update(blind.values)
                update.following.update(blind.following)
            moved.append(rule)
        update.values.update(stamps_of(moved))
        return bool(moved)

    def _note_inexact(self, rule: DerivedRule, effect: _Effect) -> None:
        # A recomputation finds the first sources by an index, which takes no longer than a read.
        if rule in effect.recomputed or rule.first is not None:
            self.recomputed.setdefault(rule, []).append(effect.key)
        else:
            self.unread.setdefault(rule, []).append(effect)

    def _apply_to_stored(self) -> Plan[None]:
        """Apply differences to what targets hold, or note these targets for a recomputation."""
        stored = yield from self._read()
        for rule, effects in self.unread.items():
            for effect in effects:
                values = _values_after(rule.aggregate, stored.get(freeze(effect.key)), *effect.of(rule))
                if values is None:
                    self.recomputed.setdefault(rule, []).append(effect.key)
                else:
                    effect.update.values.update(literals(values))

    def _read(self) -> Plan[dict[Any, Raw]]:
        """Read what targets hold for rules whose difference needs it."""
        target = self.target
        keys = distinct(effect.key for effects in self.unread.values() for effect in effects)
        paths = [*target.key_projection(), *(path for rule in self.unread for path in rule.empty())]
        shown = dict.fromkeys(outermost(paths), 1)
        rows = yield from find(target.collection, target.filter_for_keys(keys), shown)
        return {freeze(target.key_of(each)): each for each in rows}

    def _recompute(self) -> Plan[None]:
        """Recompute targets by some rules; those that are recomputed for the same targets together."""
        together: dict[tuple[Any, ...], list[DerivedRule]] = {}
        for rule, keys in self.recomputed.items():
            together.setdefault(tuple(map(freeze, keys)), []).append(rule)
        for rules in together.values():
            values = yield from aggregate_values(rules, self.recomputed[rules[0]])
            for frozen, own in values.items():
                effect = self.effects[frozen]
                for rule in rules:
                    yield from self._leave_out_unfit(rule, effect, own)
                effect.update.values.update(literals(own))

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

    def _store(self, changed: Sequence[_Effect]) -> Plan[None]:
        stored = yield from store_derived(self.target, [effect.update for effect in changed])
        if stored.matched < len(changed):
            # Some targets do not exist (yet): a concurrent insert of one must conflict with this transaction.
            yield from guard(self.target.collection, [effect.key for effect in changed])

    def _store_groups(self, changed: Sequence[_Effect]) -> Plan[None]:
        """Make the documents of groups whose first source arrived, and remove those whose last left."""
        target, group = self.target, self.target.rules.group
        shrinking = []
        for effect in changed:
            removed, added = map(len, effect.of(group))
            if removed > added:
                shrinking.append(effect.key)
            if self.level == group.level and added > 0:
                effect.update.blank = group.blank()
        stored = yield from store_derived(target, [effect.update for effect in changed])
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
