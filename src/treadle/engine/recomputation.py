"""Recomputing stored documents: the one way of `repair`, `rebuild`, schedules and the worker.

Inside a transaction: documents are read, derived from scratch and stored, and
their changes are added, so that others follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from treadle.engine.aggregation import aggregate_values, refuse_unfit
from treadle.engine.derive import DerivedValues, Gather, derive
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import derivation
from treadle.engine.target_updates import TargetUpdate, literals, store_derived
from treadle.graph.changes import Changes, load_images
from treadle.graph.model_entry import ModelEntry
from treadle.graph.quarantine import set_aside
from treadle.graph.rule import REVISION
from treadle.graph.scope import Failed, Image
from treadle.plan import Plan, Raw, delete_many, find, update_many
from treadle.plan.decoding import Unreadable
from treadle.query.keys import freeze


class Groups(NamedTuple):
    """The ids of the documents of groups that were made, and the keys of those that were removed."""

    made: Sequence[Any] = ()
    removed: Sequence[Any] = ()


def recompute(
    chosen: DerivedValues,
    keys: Sequence[Any],
    changes: Changes,
    *,
    exact: bool = False,
    recall: Callable[[Raw], Raw] | None = None,
    unforced: Collection[Any] | None = None,
    gather: Gather | None = None,
) -> Plan[list[Any]]:
    """Derive the documents of these keys and store what differs. Returns the keys of those that changed.

    With `exact` only documents of the model's own class. `recall` gives a
    document as it was before, where snapshots depend on that. Each document
    is written, so that concurrent writers conflict, and the sources of its
    copies too. With `unforced` no source is written, and the documents of
    these frozen keys only if they are incorrect. `gather` is as in `derive`.
    """
    entry, forces_all = chosen.entry, unforced is None
    groups = Groups()
    if entry.rules.group is not None:
        groups = yield from _arrange_groups(entry, keys, changes)
    images = yield from _images(chosen, keys, exact, None if forces_all else chosen.projection)
    documents = [image.document for image in images]
    befores = documents if recall is None else [recall(each) for each in documents]
    # The worker's copies need their sources written too: it finds a copy correct and leaves it, while this
    # transaction still holds an older value for it.
    derived = yield from derive(chosen, documents, befores, guarded=forces_all, gather=gather)
    writes = _Writes(chosen, set(map(freeze, groups.made)), unforced)
    for image, correct in zip(images, derived, strict=True):
        for rule, error in chosen.leave_refused(image.document, correct):
            yield from set_aside(rule.place.label, entry.collection, entry.key_of(image.document), error)
        writes.add(image, correct)
    yield from writes.store(changes)
    if (groups.removed or writes.changed) and derivation(entry).feeds:
        yield from _note(entry, images, writes.made, changes)
    return [*groups.removed, *writes.changed]


class _Writes:
    """What a recomputation writes."""

    def __init__(self, chosen: DerivedValues, made: set[Any], unforced: Collection[Any] | None) -> None:
        self.chosen = chosen
        self.made = made
        self.unforced = unforced
        # The keys of the documents that change.
        self.changed: list[Any] = []
        self.updates: list[TargetUpdate] = []
        # The ids of outdated documents that are correct: storing them upgraded is up to `migrate`.
        self.bumped: list[Any] = []

    def add(self, image: Image, derived: Raw) -> None:
        document, key = image.document, self.chosen.entry.key_of(image.document)
        is_made = freeze(document["_id"]) in self.made
        if is_made or self.chosen.differs(document, derived):
            self.changed.append(key)
        elif self.unforced is not None and freeze(key) in self.unforced:
            return
        elif image.outdated:
            self.bumped.append(document["_id"])
            return
        # A document that was made here has its values, but not their dates.
        stored = {} if is_made else document
        update = self.chosen.update(stored, derived, incorrect_only=self.unforced is not None)
        update.upgraded = document if image.outdated else None
        self.updates.append(update)

    def store(self, changes: Changes) -> Plan[None]:
        entry = self.chosen.entry
        if self.updates:
            yield from store_derived(entry, self.updates)
            upgraded = [each.upgraded["_id"] for each in self.updates if each.upgraded is not None]
            changes.note_upgraded(entry, upgraded)
        if self.bumped:
            yield from update_many(entry.collection, {"_id": {"$in": self.bumped}}, {"$inc": {REVISION: 1}})


def _images(
    chosen: DerivedValues, keys: Sequence[Any], exact: bool, projection: Raw | None
) -> Plan[list[Image]]:
    entry = chosen.entry
    scope = entry.targets.exact if exact else entry.targets
    own = {"_id": {"$in": list(keys)}} if entry.rules.group is None else entry.filter_for_keys(keys)
    failed: Failed = []
    images = yield from scope.find(own, projection=projection, failed=failed)
    if failed:
        # The caller halves its batch until the document is alone, and quarantines it.
        raise Unreadable(entry.collection, failed)
    return images


def _note(entry: ModelEntry, images: Sequence[Image], made: set[Any], changes: Changes) -> Plan[None]:
    """Add the changes of recomputed documents."""
    keys = [image.document["_id"] for image in images]
    stored = yield from by_ids(entry.collection, keys)
    afters = yield from load_images(entry, [stored[freeze(key)] for key in keys])
    for before, after in zip(images, afters, strict=True):
        changes.note(entry, None if freeze(before.document["_id"]) in made else before, after)


# -- rollups ----------------------------------------------------------------------------------------


def _arrange_groups(entry: ModelEntry, keys: Sequence[Any], changes: Changes) -> Plan[Groups]:
    """Let each of these groups have one document if it has sources, else none.

    A document that is made here has all its values, so that its formulas can be evaluated.
    """
    group = entry.rules.group
    documents = yield from find(entry.collection, entry.filter_for_keys(keys), sort=[("_id", 1)])
    members = yield from aggregate_values([group], keys)
    missing = {freeze(key): key for key in keys if members[freeze(key)][group.path]}
    surplus: list[Raw] = []
    for each in documents:
        if missing.pop(freeze(entry.key_of(each)), None) is None:
            surplus.append(each)
    if surplus:
        yield from delete_many(entry.collection, {"_id": {"$in": [each["_id"] for each in surplus]}})
        yield from changes.add(entry, [(each, None) for each in surplus])
    made = (yield from _make_groups(entry, list(missing.values()))) if missing else []
    return Groups(made, [entry.key_of(each) for each in surplus])


def _make_groups(entry: ModelEntry, keys: Sequence[Any]) -> Plan[list[Any]]:
    rules = derivation(entry).aggregates
    values = yield from aggregate_values(rules, keys)
    updates = []
    for key in keys:
        refuse_unfit(rules, values[freeze(key)])
        updates.append(TargetUpdate(key, literals(values[freeze(key)]), blank={}))
    return (yield from store_derived(entry, updates)).made
