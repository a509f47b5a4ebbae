"""Updating the copies of a source, in the transaction that changed it or after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.engine.pipelines import formula_stages
from treadle.engine.references import read_sources
from treadle.engine.target_updates import is_followed, note_writes
from treadle.engine.version_upgrade import upgrade_matching_upgraded
from treadle.graph.changes import Changes
from treadle.graph.derived import DerivedRule, copies_of
from treadle.graph.model_entry import ModelEntry
from treadle.graph.scope import NO_FILTER, Failed
from treadle.plan import Plan, Raw, find, update_many
from treadle.plan.decoding import Unreadable


def copy_sources(entry: ModelEntry, ids: Sequence[Any], changes: Changes) -> Plan[None]:
    """Update all copies of these documents."""
    for image in (yield from entry.targets.find({"_id": {"$in": list(ids)}})):
        for rule in copies_of(entry):
            if rule.copied.synced and rule.source.targets.holds(image):
                for key, card in rule.contributions(image.document):
                    yield from copy_to(rule, key, card, NO_FILTER, changes)


def upgrade_targets(rule: DerivedRule, keys: Sequence[Any], changes: Changes) -> Plan[None]:
    """Store as current ones the outdated targets of sources that an update of copies would miss or spoil."""
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
