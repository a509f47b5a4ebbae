"""Updating the copies of a source, in the transaction that changed it or after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.engine.deletes import follow_references
from treadle.engine.guards import guard
from treadle.engine.pipelines import formula_stages, is_followed, note_writes
from treadle.engine.references import read_sources
from treadle.engine.version_upgrade import upgrade_matching_upgraded
from treadle.errors import DataError
from treadle.graph.changes import Change, Changes, NotRead
from treadle.graph.derived import Contribution, DerivedRule, copies_of
from treadle.graph.model_entry import ModelEntry
from treadle.graph.scope import NO_FILTER, Failed, Image
from treadle.plan import Plan, Raw, find, find_one, update_many
from treadle.plan.decoding import Unreadable
from treadle.query.comparison import same
from treadle.query.keys import same_key

# Copies that are made in the transaction of their source, where the copies feed others.
CHAINED_FAN_OUT_MAX = 100

# Inside a caller's own transaction nothing can be left for later.
UNBOUNDED = 2**31


@dataclass(slots=True, eq=False, repr=False)
class FanOut:
    """Copies that are still to be made of one source document, by the key that targets refer to."""

    rule: DerivedRule
    key: Any


def copy_sources(entry: ModelEntry, ids: Sequence[Any], changes: Changes) -> Plan[None]:
    """Update all copies of these documents."""
    for image in (yield from entry.targets.find({"_id": {"$in": list(ids)}})):
        for rule in copies_of(entry):
            if rule.copied.synced and rule.source.targets.holds(image):
                for key, card in rule.contributions(image.document):
                    yield from copy_to(rule, key, card, NO_FILTER, changes)


def upgrade_targets(rule: DerivedRule, keys: Sequence[Any], changes: Changes) -> Plan[None]:
    """Store as current ones the outdated targets of sources that an update of copies would miss or spoil."""
    if rule.target.versions.may_change:
        writes = None if formula_stages(rule.target) else [rule.path]
        yield from upgrade_matching_upgraded(rule.target, rule.targets_of(keys), changes, writes)


def read_cards(rule: DerivedRule, keys: Sequence[Any], *, written: bool = False) -> Plan[dict[Any, Any]]:
    """Return what is copied of sources, archived or not, by frozen key; really writes them on request.

    Raises `Unreadable` if one cannot be decoded or upgraded.
    """
    failed: Failed = []
    sources = yield from read_sources(rule.source, keys, written, rule.match.path, failed)
    if failed:
        raise Unreadable(rule.source.collection, failed)
    return {frozen: rule.aggregate.contribution(source) for frozen, source in sources.items()}


def copy_to(
    rule: DerivedRule, key: Any, card: Any, within: Mapping[str, Any], changes: Changes
) -> Plan[None]:
    """Update the copies of a source in the targets that meet a condition."""
    target = rule.target
    if not is_followed(target, rule.level):
        yield from _update(rule, key, card, within)
        return
    chosen = {**within, **rule.targets_of([key]), **differing_copies(rule, card)}
    rows = yield from find(target.collection, chosen, target.key_projection())
    if rows:
        write = _update(rule, key, card, {"_id": {"$in": [each["_id"] for each in rows]}})
        yield from note_writes(target, [target.key_of(each) for each in rows], write, changes)


def differing_copies(rule: DerivedRule, card: Any) -> Raw:
    """Return the condition for targets whose copies differ from their source; empty for all of them."""
    # Formulas are evaluated with the copy, and may differ though it does not.
    return {} if formula_stages(rule.target) else rule.copied.differing(card)


def _update(rule: DerivedRule, key: Any, card: Any, within: Mapping[str, Any]) -> Plan[None]:
    """Update equal copies by one `update_many`, which reads no target, and evaluate the formulas there."""
    collection = rule.target.collection
    chosen = {**within, **rule.targets_of([key]), **differing_copies(rule, card)}
    formulas = formula_stages(rule.target)
    update, filters = rule.copied.update(key, card, formulas)
    options = {} if filters is None else {"array_filters": filters}
    yield from update_many(collection, chosen, update, **options)
    if formulas and filters is not None:
        # Array filters go with no pipeline.
        yield from update_many(collection, chosen, formulas)


# -- after a change of the source ----------------------------------------------------------------------


def follow_key_change(rule: DerivedRule, change: Change, changes: Changes) -> Plan[None]:
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
    yield from _refuse_key_change(rule, old)
    yield from follow_references(rule.source, [rule], [before.document], changes)


def _refuse_key_change(rule: DerivedRule, key: Any) -> Plan[None]:
    """Refuse to change the alternate key of a document as long as others refer to it by this one.

    A card that is cleared or kept loses its source; a document that would be
    deleted with its source must not vanish because of a correction.
    """
    if rule.on_delete not in ("restrict", "cascade"):
        return
    other = yield from find_one(rule.target.collection, rule.targets_of([key]), {"_id": 1})
    if other is not None:
        raise DataError(
            f"{rule.alternate_key!r} of this {rule.source.model.__name__} cannot be changed, because "
            f"{rule.target.model.__name__} {other['_id']!r} refers to it ({rule.place.label} has "
            f"on_delete={rule.on_delete!r}); change that reference first",
            code="reference-restricted",
        )


def copy_change(
    rule: DerivedRule, change: Change, changes: Changes, copies_max: int | None
) -> Plan[list[FanOut]]:
    """Copy one changed source to the targets that refer to it."""
    # No document can refer to an id that was generated in this call; to an alternate key any may.
    if rule.alternate_key is None and changes.is_new_id(rule.source, change.id):
        return []
    old, new = _copied(rule, change)
    if not new or (old and rule.is_unchanged(old, new)):
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
