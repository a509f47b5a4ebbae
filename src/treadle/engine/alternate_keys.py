"""Documents to which others refer by a unique field of theirs, and not by their id.

A contribution goes to the document that has the alternate key which its source
holds. Everything else in the engine refers to targets by id, so alternate keys
are looked up where a source's change is followed to its targets, and ids where
a target is computed from its sources. Both happen in the commit: a target that
is given another key concurrently is written by both, and one of the two starts
again. Where no document has a key, its guard is written, as it is for an id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from treadle.engine.guards import guard
from treadle.engine.target_updates import READ_KEYS_MAX
from treadle.errors import DataError
from treadle.graph.changes import Change
from treadle.graph.derived import DerivedRule
from treadle.graph.model_entry import ModelEntry
from treadle.graph.scope import Image
from treadle.graph.stored_pages import chunks
from treadle.plan import Plan, Raw, find, find_one
from treadle.query.comparison import same
from treadle.query.keys import distinct, freeze, may_be_id


def ids_by_key(rule: DerivedRule, keys: Iterable[Any]) -> Plan[dict[Any, Any]]:
    """Return the ids of the targets that have these alternate keys, by frozen key."""
    ids: dict[Any, Any] = {}
    projection = {rule.on.path: 1}
    for some in chunks(distinct(filter(may_be_id, keys)), READ_KEYS_MAX):
        chosen = rule.target.targets.filter(rule.on.condition(some))
        for each in (yield from find(rule.target.collection, chosen, projection)):
            ids[freeze(rule.unique_key(each))] = each["_id"]
    return ids


def target_keys(rule: DerivedRule, keys: Sequence[Any]) -> Plan[list[Any]]:
    """Return the ids of the targets that have alternate keys; other keys as they are."""
    if not rule.alternate_key:
        return list(keys)
    return list((yield from ids_by_key(rule, keys)).values())


def alternate_keys_of(rules: Iterable[DerivedRule], documents: Iterable[Raw]) -> list[Any]:
    """Return the alternate keys by which sources may refer to documents."""
    listed = list(documents)
    by_path = {rule.alternate_key: rule for rule in rules if rule.alternate_key}
    return [key for rule in by_path.values() for key in rule.unique_keys(listed)]


def guard_arrivals(entry: ModelEntry, rules: Iterable[DerivedRule], documents: Sequence[Raw]) -> Plan[None]:
    """Bump the guards of these documents, so that writers that found them missing conflict."""
    ids = [each["_id"] for each in documents]
    yield from guard(entry.collection, [*ids, *alternate_keys_of(rules, documents)])


def refuse_key_change(rules: Iterable[DerivedRule], keys: Sequence[Any]) -> Plan[None]:
    """Refuse to change the alternate keys of documents as long as others refer to them by these.

    A card that is cleared or kept loses its source; a document that would be
    deleted with its source must not vanish because of a correction.
    """
    for rule in rules:
        if not rule.alternate_key or rule.on_delete not in ("restrict", "cascade") or not keys:
            continue
        other = yield from find_one(rule.target.collection, rule.targets_of(keys), {"_id": 1})
        if other is not None:
            raise DataError(
                f"{rule.alternate_key!r} of this {rule.source.model.__name__} cannot be changed, because "
                f"{rule.target.model.__name__} {other['_id']!r} refers to it ({rule.place.label} has "
                f"on_delete={rule.on_delete!r}); change that reference first",
                code="reference-restricted",
            )


def with_changed_keys(rule: DerivedRule, changes: Iterable[Change]) -> list[Raw]:
    """Return the targets that have another alternate key than before."""
    documents = []
    for change in changes:
        if not isinstance(change.before, Image) or change.after is None:
            continue
        before, after = rule.on.value(change.before.document), rule.on.value(change.after.document)
        if rule.target.targets.holds(change.after) and not same(before, after):
            documents.append(change.after.document)
    return documents
