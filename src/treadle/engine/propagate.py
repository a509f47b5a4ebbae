"""What changed sources do to their targets, inside the transaction that changed them.

Level by level: first the rules that are fed by callers' fields only, then
those that are fed by these. At each level all rules of one target become one
update of it, which ends with the target's formulas.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pymongo import UpdateOne
from pymongo.errors import OperationFailure

from treadle.engine.alternate_keys import (
    READ_KEYS_MAX,
    alternate_keys_of,
    ids_by_key,
    refuse_key_change,
    with_changed_keys,
)
from treadle.engine.contributions import Contribution, Contributions, contributions
from treadle.engine.deletes import follow_references
from treadle.engine.pipelines import changed_fields, derivation, formula_stages, stamps_of, update_pipeline
from treadle.engine.recompute import recompute
from treadle.engine.references import fill_copies, guard
from treadle.engine.version_upgrade import (
    lower_documents,
    upgrade_matching_upgraded,
    upgrade_possible,
    upgraded_leniently,
)
from treadle.graph.aggregate import RECOMPUTE, Aggregate, NumberSum, Values
from treadle.graph.changes import Change, Changes, NotRead
from treadle.graph.derived import DerivedRule, aggregates_in, copies_in
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.quarantine import set_aside
from treadle.graph.rule import Rule
from treadle.graph.scope import NO_FILTER, Image
from treadle.plan import NO_OPTIONS, Call, Plan, Raw, bulk_write, by_id, delete_many, find, update_many
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import CONVERSION_FAILURE, codes_of
from treadle.query.comparison import same
from treadle.query.keys import distinct, freeze, may_be_id, same_key
from treadle.query.paths import outermost

# The same, where the copies feed others.
CHAINED_FAN_OUT_MAX = 100

# Inside a caller's own transaction nothing can be left for later.
UNBOUNDED = 2**31


@dataclass(slots=True, eq=False, repr=False)
class FanOut:
    """Copies that are still to be made of one source document, by the key that targets refer to."""

    rule: DerivedRule
    key: Any


@dataclass(slots=True)
class _Effect:
    """What the changes do to one target, per rule."""

    key: Any
    # What is removed, and what is added.
    moves: dict[DerivedRule, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    # The rules by which it is to be recomputed, whatever the difference.
    anew: set[DerivedRule] = field(default_factory=set)
    # What its update sets, and what follows from that.
    first: dict[str, Any] = field(default_factory=dict)
    second: dict[str, Any] = field(default_factory=dict)

    def of(self, rule: DerivedRule) -> tuple[list[Any], list[Any]]:
        """What is noted for one rule so far."""
        move = self.moves.get(rule)
        if move is None:
            move = self.moves[rule] = ([], [])
        return move


def _effect_on(key: Any, effects: dict[Any, _Effect]) -> _Effect:
    """What is noted for one target so far."""
    frozen = freeze(key)
    effect = effects.get(frozen)
    if effect is None:
        effect = effects[frozen] = _Effect(key)
    return effect


def propagate(
    graph: Graph, server: Capabilities, ledger: Changes, *, copies_max: int | None = None
) -> Plan[list[FanOut]]:
    """Bring every target up to date; the fan-outs that are too large for here."""
    later: list[FanOut] = []
    if graph.spreading:
        yield from record(ledger, graph.spreading)
    for level in graph.levels:
        effects: dict[ModelEntry[Any], dict[Any, _Effect]] = {}
        for entry, gathers in level.aggregates:
            changes = ledger.of(entry)
            if changes:
                for gather, moves in (yield from contributions(gathers, changes)).items():
                    of_target = effects.setdefault(gather.target, {})
                    if not gather.alternate_key:
                        _collect(gather, moves, of_target)
                        continue
                    by_name: dict[Any, _Effect] = {}
                    _collect(gather, moves, by_name)
                    yield from _by_id(gather, by_name, of_target)
        for rule in level.by_alternate_key:
            yield from _rename(rule, ledger, effects.setdefault(rule.target, {}))
        for target, of_target in effects.items():
            yield from _update_targets(target, of_target, level.number, server, ledger)
        for rule in level.copies:
            for change in ledger.of(rule.source):
                yield from _forsake(rule, change, ledger)
                later.extend((yield from _copy(rule, change, ledger, copies_max)))
    if graph.recording:
        yield from record(ledger, graph.recording)
    yield from lower_documents(ledger)
    return later


def record(ledger: Changes, rules: Sequence[Rule]) -> Plan[None]:
    """Write what goes beside the changes that were noted since these rules were last asked."""
    for rule in rules:
        if changes := ledger.take_unrecorded(rule, rule.target):
            yield from rule.record(changes, ledger)
            # What it wrote itself is no news to it; what others write on top of that is.
            ledger.take_unrecorded(rule, rule.target)


def _collect(rule: DerivedRule, moves: Sequence[Contributions], effects: dict[Any, _Effect]) -> None:
    """Note per target what the changes take from it and give to it."""
    for change, old, new in moves:
        outdated = isinstance(change.before, Image) and change.before.outdated
        if outdated and not rule.source.versions.writes_older:
            # A writer of the older version may have counted it or not. Where this Store writes that version,
            # its rules maintain what such documents hold.
            for key, _ in [*old, *new]:
                _effect_on(key, effects).anew.add(rule)
        elif is_unchanged(rule, old, new):
            continue
        for key, value in old:
            _effect_on(key, effects).of(rule)[0].append(value)
        for key, value in new:
            _effect_on(key, effects).of(rule)[1].append(value)


def _by_id(rule: DerivedRule, by_name: dict[Any, _Effect], effects: dict[Any, _Effect]) -> Plan[None]:
    """Note under the ids of targets what was noted under their names."""
    ids = yield from ids_by_key(rule, [each.key for each in by_name.values()])
    missing = []
    for name, named in by_name.items():
        if name not in ids:
            missing.append(named.key)
            continue
        effect = _effect_on(ids[name], effects)
        effect.anew |= named.anew
        for each, moved in named.moves.items():
            for own, values in zip(effect.of(each), moved, strict=True):
                own.extend(values)
    # Whoever takes one of these names must meet this transaction.
    yield from guard(rule.target.collection, filter(may_be_id, missing))


def _rename(rule: DerivedRule, ledger: Changes, effects: dict[Any, _Effect]) -> Plan[None]:
    """Let targets that were given another name be computed from the sources which hold that."""
    documents = with_changed_keys(rule, ledger.of(rule.target))
    for document in documents:
        _effect_on(document["_id"], effects).anew.add(rule)
    yield from guard(rule.target.collection, alternate_keys_of([rule], documents))


def is_unchanged(rule: DerivedRule, old: Sequence[Contribution], new: Sequence[Contribution]) -> bool:
    """Return whether no target's value can change where a source contributed `old`, and contributes `new`."""
    return len(old) == len(new) and all(
        same_key(one, other) and rule.aggregate.is_unchanged(before, after)
        for (one, before), (other, after) in zip(old, new, strict=True)
    )


def _update_targets(
    target: ModelEntry[Any], effects: dict[Any, _Effect], level: int, server: Capabilities, ledger: Changes
) -> Plan[None]:
    """Update each target once, for all its rules; an outdated target is upgraded first."""
    outdated: set[Any] = set()
    if target.versions.may_change:
        chosen = {"_id": {"$in": [effect.key for effect in effects.values()]}}
        upgraded = (yield from upgrade_possible(target, chosen, ledger)).documents
        if not target.versions.writes_older:
            outdated = {freeze(each["_id"]) for each in upgraded}
    yield from _update_current(target, effects, level, server, ledger, outdated)


def _update_current(
    target: ModelEntry[Any],
    effects: dict[Any, _Effect],
    level: int,
    server: Capabilities,
    ledger: Changes,
    outdated: set[Any],
) -> Plan[None]:
    anew: dict[DerivedRule, list[Any]] = {}
    unsure: dict[DerivedRule, list[_Effect]] = {}
    # A target that this transaction inserted, or made visible, may have counted the same sources then.
    new: set[Any] = set()
    if target.rules.group is None:
        new = {freeze(change.id) for change in ledger.of(target) if _came(target, change)}
    # What an outdated target held was not maintained by this version's rules.
    new |= outdated
    changed = [
        effect
        for frozen, effect in effects.items()
        if _change_blindly(effect, anew, unsure, is_new=bool(new) and frozen in new)
    ]
    if not changed:
        return
    if unsure:
        yield from _change_stored(target, unsure, anew)
    for rules, some in _together(anew) if anew else ():
        for frozen, values in (yield from recompute(rules, some, server)).items():
            yield from _leave_out_unfit(rules, effects[frozen], values)
            effects[frozen].first.update({path: {"$literal": value} for path, value in values.items()})
    keys = [effect.key for effect in changed]
    followed = derivation(target).last_level > level
    updates = [(effect.key, update_pipeline(target, effect.first, effect.second)) for effect in changed]
    before = (yield from read(target, keys)) if followed else {}
    if target.rules.group is not None:
        yield from _update_groups(target, changed, updates, level)
    else:
        matched, _ = yield from update_each(target, updates)
        if matched < len(updates):
            # Some targets do not exist (yet); whoever inserts one must meet this transaction.
            yield from guard(target.collection, keys)
    if followed:
        yield from note_after(target, before, ledger, keys if target.rules.group is not None else None)


def _change_blindly(
    effect: _Effect,
    anew: dict[DerivedRule, list[Any]],
    unsure: dict[DerivedRule, list[_Effect]],
    *,
    is_new: bool,
) -> bool:
    """Note what the update of a target that was not read sets, and which rules need more than that.

    Returns whether there is an update.
    """
    moved: list[DerivedRule] = []
    for rule in effect.anew:
        effect.of(rule)
    for rule, (removed, added) in effect.moves.items():
        forced = is_new or rule in effect.anew
        update = RECOMPUTE if forced else rule.aggregate.blind(removed, added)
        if update is not RECOMPUTE:
            if not update.values:
                continue
            effect.first.update(update.values)
            effect.second.update(update.following)
        elif forced or rule.first is not None:
            anew.setdefault(rule, []).append(effect.key)
        else:
            unsure.setdefault(rule, []).append(effect)
        moved.append(rule)
    effect.first.update(stamps_of(moved))
    return bool(moved)


def _change_stored(
    target: ModelEntry[Any], unsure: dict[DerivedRule, list[_Effect]], anew: dict[DerivedRule, list[Any]]
) -> Plan[None]:
    """Apply differences to what targets hold, or mark these targets in `anew` for a recomputation.

    A recomputation would read all sources of a target; this reads the target.
    """
    keys = distinct(effect.key for effects in unsure.values() for effect in effects)
    paths = [*target.key_projection(), *(path for rule in unsure for path in rule.empty())]
    shown = dict.fromkeys(outermost(paths), 1)
    rows = yield from find(target.collection, target.filter_for_keys(keys), shown)
    stored = {freeze(target.key_of(each)): each for each in rows}
    for rule, effects in unsure.items():
        for effect in effects:
            values = _values_after(rule.aggregate, stored.get(freeze(effect.key)), *effect.of(rule))
            if values is None:
                anew.setdefault(rule, []).append(effect.key)
            else:
                effect.first.update({path: {"$literal": value} for path, value in values.items()})


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


def _leave_out_unfit(rules: Sequence[DerivedRule], effect: _Effect, values: dict[str, Any]) -> Plan[None]:
    """Refuse values that their fields could not hold, if this write makes them so.

    Where others did, who writes beside it is not stopped: the value stays as it was, and is set aside.
    """
    for rule in rules:
        error = rule.aggregate.refuse(values)
        if error is None:
            continue
        if rule.aggregate.blames(effect.of(rule)[1]):
            raise error
        for path in rule.empty():
            values.pop(path, None)
        yield from set_aside(rule.place.label, rule.target.collection, effect.key, error)


def _came(target: ModelEntry[Any], change: Change) -> bool:
    """Whether a document may have become one of the target's in this transaction, and was computed then."""
    before, after, family = change.before, change.after, target.kinds.family
    if not isinstance(before, Image) or after is None or target.paths.deletion is not None:
        return True
    if before.collection != after.collection:
        return True
    kind = family.discriminator if family is not None else "_id"
    return bool(before.document.get(kind) != after.document.get(kind))


def _update_groups(
    target: ModelEntry[Any], effects: Sequence[_Effect], updates: Sequence[tuple[Any, list[Raw]]], level: int
) -> Plan[None]:
    """Update the documents of groups: make those whose first source came, remove those whose last went."""
    group = target.rules.group
    operations: list[tuple[Any, list[Raw]]] = []
    makes: set[int] = set()
    shrinking = []
    blank: Raw = {"$set": group.blank()}
    for effect, (key, pipeline) in zip(effects, updates, strict=True):
        gone, come = map(len, effect.of(group))
        if gone > come:
            shrinking.append(key)
        if level == group.level and come > 0:
            makes.add(len(operations))
            pipeline = [blank, *pipeline]
        operations.append((key, pipeline))
    _, new = yield from update_each(target, operations, makes)
    if new and copies_in(target):
        yield from fill_new(target, new)
    if shrinking:
        yield from delete_many(
            target.collection, {"$and": [target.filter_for_keys(shrinking), {group.path: {"$lte": 0}}]}
        )


def fill_new(target: ModelEntry[Any], ids: Sequence[Any]) -> Plan[None]:
    """Fill the cards of documents that were just made."""
    documents = yield from find(target.collection, {"_id": {"$in": list(ids)}})
    pairs: list[tuple[Raw | None, Raw]] = [(None, copy.deepcopy(each)) for each in documents]
    yield from fill_copies(target, pairs, lenient=True)
    operations = []
    for old, (_, new) in zip(documents, pairs, strict=True):
        if sets := changed_fields(old, new):
            operations.append(UpdateOne(by_id(old["_id"]), update_pipeline(target, sets, {})))
    if operations:
        yield from bulk_write(target.collection, operations, ordered=False)


def update_each(
    target: ModelEntry[Any], updates: Sequence[tuple[Any, list[Raw]]], makes: Collection[int] = ()
) -> Plan[tuple[int, list[Any]]]:
    """Update documents by key, each in its own way; how many there were, and the ids of new ones.

    The updates at the positions `makes` make a document where there is none.
    """
    try:
        if len(updates) == 1:
            # The driver's bulk machinery costs as much as a whole update.
            ((key, pipeline),) = updates
            options = {"upsert": True} if makes else NO_OPTIONS
            one = yield Call(target.collection, "update_one", (target.filter_for_key(key), pipeline), options)
            return one.matched_count, [] if one.upserted_id is None else [one.upserted_id]
        operations = [
            UpdateOne(target.filter_for_key(key), pipeline, upsert=number in makes)
            for number, (key, pipeline) in enumerate(updates)
        ]
        result = yield from bulk_write(target.collection, operations, ordered=False)
        return result.matched_count, list((result.upserted_ids or {}).values())
    except OperationFailure as error:
        # Say which sum would not fit, where the server only says that a number does not.
        aggregates = [rule.aggregate for rule in aggregates_in(target)]
        sums = [each for each in aggregates if isinstance(each, NumberSum) and each.is_bounded]
        if CONVERSION_FAILURE not in codes_of(error) or not sums or derivation(target).formulas:
            raise
        raise sums[0].too_large() from error


def _together(anew: dict[DerivedRule, list[Any]]) -> list[tuple[list[DerivedRule], list[Any]]]:
    """Rules that are to be recomputed for the same targets, side by side."""
    groups: dict[tuple[Any, ...], tuple[list[DerivedRule], list[Any]]] = {}
    for rule, keys in anew.items():
        groups.setdefault(tuple(freeze(key) for key in keys), ([], keys))[0].append(rule)
    return list(groups.values())


def feeds_beyond(target: ModelEntry[Any], level: int) -> bool:
    """Whether anything is fed by what this level maintains in the target."""
    return derivation(target).last_level > level


def read(entry: ModelEntry[Any], keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
    """Documents by frozen key, with what others are fed by."""
    projection = None
    # A migration may read any field.
    if entry.effects.followed is not None and not entry.kinds.root.versions.is_versioned:
        own = entry.rules.group.on.fields if entry.rules.group is not None else []
        projection = dict.fromkeys(outermost([*entry.effects.followed, *own, "_id"]), 1)
    rows: list[Raw] = []
    most = READ_KEYS_MAX
    for start in range(0, len(keys), most):
        chunk = keys[start : start + most]
        rows.extend((yield from find(entry.collection, entry.filter_for_keys(chunk), projection)))
    return {freeze(entry.key_of(each)): each for each in rows}


def note_after(
    entry: ModelEntry[Any], before: dict[Any, Raw], ledger: Changes, keys: Sequence[Any] | None = None
) -> Plan[None]:
    """Read the documents again and note their changes; with `keys`, also those that came or went."""
    known = [entry.key_of(each) for each in before.values()] if keys is None else keys
    after = yield from read(entry, known)
    pairs = [(before.get(frozen), after.get(frozen)) for frozen in {**before, **after}]
    yield from ledger.add(entry, [pair for pair in pairs if pair[1] is not None or keys is not None])


def _forsake(rule: DerivedRule, change: Change, ledger: Changes) -> Plan[None]:
    """Do as `on_delete` says to what refers to a source by a name that it no longer has."""
    before, after = change
    if not rule.alternate_key or not isinstance(before, Image) or after is None or rule.on_delete == "keep":
        return
    old = rule.unique_key(before.document)
    if (
        old is None
        or same(old, rule.unique_key(after.document))
        or not rule.source.targets.admits(before.document)
    ):
        return
    if (yield from find(rule.source.collection, rule.sources_of([old]), {"_id": 1}, limit=1)):
        # Another document has taken the name.
        return
    yield from refuse_key_change([rule], [old])
    yield from follow_references(rule.source, [rule], [before.document], ledger)


def _copy(rule: DerivedRule, change: Change, ledger: Changes, copies_max: int | None) -> Plan[list[FanOut]]:
    """Copy one changed source to the targets that refer to it."""
    unread = isinstance(change.before, NotRead)
    before, after = rule.source.sources.through(
        None if isinstance(change.before, NotRead) else change.before, change.after
    )
    old, new = rule.contributions(before), rule.contributions(after)
    if after is None and change.after is not None:
        # It is still stored, as an archived document, say, but its copies are to go.
        new = [(key, None) for key, _ in old if not rule.copied.keep]
    elif not rule.copied.synced or (not rule.alternate_key and ledger.is_new_id(rule.source, change.id)):
        return []
    if not new or (old and is_unchanged(rule, old, new)):
        return []
    ((key, card),) = new
    if (not old and not unread) or (old and not same_key(old[0][0], key)):
        yield from guard(rule.source.collection, [key])
    writes = None if formula_stages(rule.target) else [rule.path]
    yield from upgrade_matching_upgraded(rule.target, rule.targets_of([key]), ledger, writes)
    followed = feeds_beyond(rule.target, rule.level)
    most = copies_max
    if most is None:
        limits = rule.target.limits
        most = min(CHAINED_FAN_OUT_MAX, limits.fan_out_max) if followed else limits.fan_out_max
    if most != UNBOUNDED:
        referring = rule.targets_of([key])
        beyond = yield from find(rule.target.collection, referring, {"_id": 1}, skip=most, limit=1)
        if beyond:
            return [FanOut(rule, key)]
    yield from copy_to(rule, key, card, NO_FILTER, ledger)
    return []


def copy_source(
    rule: DerivedRule, source: Raw, ledger: Changes, within: Mapping[str, Any] = NO_FILTER
) -> Plan[None]:
    """Set the copies of a source that was just read, within some targets."""
    if (contribution := (yield from contribution_of(rule, source))) is not None:
        yield from copy_to(rule, *contribution, within, ledger)


def contribution_of(rule: DerivedRule, source: Raw) -> Plan[Contribution | None]:
    """Return the key of a source that was just read, and what is copied of it; None if it has no key."""
    (current,) = yield from upgraded_leniently(rule.source, [source])
    return next(iter(rule.contributions(current)), None)


def copy_to(rule: DerivedRule, key: Any, card: Any, within: Mapping[str, Any], ledger: Changes) -> Plan[None]:
    """Set the copies of a source within some targets."""
    if not feeds_beyond(rule.target, rule.level):
        yield from update_copies(rule, key, card, within)
        return
    target = rule.target
    referring = {**within, **rule.targets_of([key]), **differing_copies(rule, card)}
    rows = yield from find(target.collection, referring, target.key_projection())
    ids = [each["_id"] for each in rows]
    if ids:
        before = yield from read(target, [target.key_of(each) for each in rows])
        yield from update_copies(rule, key, card, {"_id": {"$in": ids}})
        yield from note_after(target, before, ledger)


def differing_copies(rule: DerivedRule, card: Any) -> Raw:
    """Return the condition for targets whose copies differ from their source; empty for all of them."""
    # Formulas are computed with the copy, and may differ though it does not.
    return {} if formula_stages(rule.target) else rule.copied.differing(card)


def update_copies(rule: DerivedRule, key: Any, card: Any, within: Mapping[str, Any]) -> Plan[None]:
    """Set all copies of a source within some targets, and evaluate the formulas there."""
    target = rule.target
    condition = {**within, **rule.targets_of([key]), **differing_copies(rule, card)}
    formulas = formula_stages(target)
    update, filters = rule.copied.update(key, card, formulas)
    options = {} if filters is None else {"array_filters": filters}
    yield from update_many(target.collection, condition, update, **options)
    if formulas and filters is not None:
        yield from update_many(target.collection, condition, formulas)
