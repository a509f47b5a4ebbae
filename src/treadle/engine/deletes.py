"""Deletions, soft or for good, and what `on_delete` asks of the documents that refer to deleted ones.

A soft deletion is an update of a date. The model's scope leaves the document
out, so every rule sees a deletion.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from bson import ObjectId
from pymongo import UpdateOne

from treadle.engine.documents import (
    as_written,
    filter_of,
    hooks_of,
    refuse_group,
    require_filter,
    require_soft_delete,
    run_after,
    run_before,
    stamp_expressions,
    translated,
)
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import BUMP, changed_fields, derivation
from treadle.engine.queries import find_matching, may_match, may_match_outdated
from treadle.engine.references import follow_own
from treadle.engine.updates import EachWrite, UpdateMany, merges_by_id, merges_single
from treadle.engine.version_upgrade import (
    upgrade_matching_upgraded,
    upgrade_possible,
)
from treadle.errors import DataError, UsageError
from treadle.graph.batch import Batch
from treadle.graph.changes import Changes, load_documents
from treadle.graph.derived import DerivedRule, aggregates_of, copies_of
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import Rule
from treadle.graph.write import ChunkedWrite, CommitNeeded, Selector, Write
from treadle.model.bson_types import clean
from treadle.model.document import Document
from treadle.plan import (
    Plan,
    Raw,
    bulk_write,
    by_id,
    delete_many,
    find,
    find_one_and_delete,
    find_one_and_update,
    update_many,
)
from treadle.query.filters import parse_filter
from treadle.query.keys import freeze

# Nodes of a tree that delete_many deletes, all or none.
DELETE_TOGETHER_MAX = 10_000

# The date of a soft deletion that is not stored yet; the server sets the real one.
_PROVISIONAL: Final = datetime(1970, 1, 1, tzinfo=UTC)

D = TypeVar("D", bound=Document)


def restricting(entry: ModelEntry) -> list[DerivedRule]:
    """Return the references that forbid a deletion, however they are maintained."""
    return [rule for rule in copies_of(entry, None) if rule.on_delete == "restrict"]


def purge_filter(entry: ModelEntry, before: datetime | None) -> Raw:
    """Return the condition of the soft-deleted documents that are to be removed for good."""
    path = require_soft_delete(entry, "purge")
    if before is None:
        return entry.deleted.filter()
    if not isinstance(before, datetime):
        raise UsageError(f"purge takes before= as a datetime, not {before!r}", code="filter-invalid")
    return {**entry.targets.with_deleted.filter(), path: {"$lt": clean(before)}}


def _soft_deletion(entry: ModelEntry) -> list[Raw]:
    """The update that sets the date of the deletion."""
    return [{"$set": {require_soft_delete(entry, "delete"): "$$NOW", **stamp_expressions(entry)}}]


def _acts_on_deletions(entry: ModelEntry) -> bool:
    """Whether a rule must see the documents that are deleted."""
    return any(rule.needs_commit(None) for each in entry.kinds.related for rule in derivation(each).acting)


def _upgrade_changes_date(entry: ModelEntry) -> bool:
    """Whether an upgrade would change the date of a deletion that is set in an outdated document."""
    path = entry.paths.deletion
    return path is not None and entry.versions.changes_any([path])


class _Delete:
    """What deletions of one document and of many have in common."""

    shows_document = False

    def __init__(self, entry: ModelEntry) -> None:
        refuse_group(entry, "deleted")
        self.entry = entry

    @property
    def _is_plain(self) -> bool:
        entry = self.entry
        return not (
            aggregates_of(entry)
            or restricting(entry)
            or any(rule.on_delete != "keep" for rule in copies_of(entry))
            or derivation(entry).is_recorded
            or _acts_on_deletions(entry)
            or _upgrade_changes_date(entry)
        )


class Delete(_Delete, Write[D | None]):
    """A deletion of one document."""

    def __init__(self, entry: ModelEntry[D], id_or_filter: Any) -> None:
        super().__init__(entry)
        self.filter = filter_of(entry, id_or_filter)

    def command(self) -> Plan[Raw | None] | None:
        return self._delete_alone() if self._is_plain else None

    def _delete_alone(self) -> Plan[Raw | None]:
        entry, divided = self.entry, self.entry.versions.divide(self.filter)
        chosen = self.filter if divided is None else entry.versions.matching_current(divided)
        with translated(entry.model.__name__, [self.filter]):
            if entry.paths.deletion is None:
                raw = yield from find_one_and_delete(entry.collection, chosen)
            else:
                raw = yield from find_one_and_update(entry.collection, chosen, _soft_deletion(entry))
        if raw is None and divided is not None and (yield from may_match(entry, self.filter)):
            raise CommitNeeded
        return (yield from self._current(raw))

    def _current(self, raw: Raw | None) -> Plan[Raw | None]:
        """Return the deleted document in the current version; as it is where no migration can read it."""
        return None if raw is None else (yield from load_documents(self.entry, [raw]))[0]

    def apply(self, changes: Changes) -> Plan[Raw | None]:
        entry = self.entry
        divided = entry.versions.divide(self.filter) is not None
        before: Raw | None
        if divided or entry.paths.deletion is not None or _acts_on_deletions(entry):
            matches = yield from find_matching(entry, self.filter, limit=1)
            before = matches[0] if matches else None
            if before is not None:
                left = yield from delete_documents(entry, [before], changes)
                before = left.get(freeze(before["_id"]), before)
        else:
            before = yield from find_one_and_delete(entry.collection, self.filter)
            if before is not None:
                yield from changes.add(entry, [(before, None)])
                exact = entry.kinds.of(before)
                yield from check_restrictions(restricting(exact), [before])
                yield from follow_references(exact, copies_of(exact), [before], changes)
        return (yield from self._current(before))

    def result(self, outcome: Raw | None) -> D | None:
        return None if outcome is None else as_written(self.entry, outcome)

    def smaller(self) -> Plan[list[ChunkedWrite]]:
        return (yield from smaller_first(self.selector, limit=1))

    @property
    def targets(self) -> frozenset[Hashable]:
        return self.selector.targets

    # -- several as one ------------------------------------------------------------------------

    @property
    def key(self) -> ObjectId | None:
        """The id of the one document that it means; None where it may mean another."""
        return self.selector.single_id if merges_by_id(self.entry) else None

    def merges(self, other: Write[Any]) -> bool:
        return merges_single(self, other)

    def merged(self, other: Delete[D]) -> DeleteEach:
        return DeleteEach(self).merged(other)


class DeleteEach(EachWrite):
    """Deletions of single documents by their ids."""

    shows_document = False

    def apply(self, changes: Changes) -> Plan[list[Raw | None]]:
        befores = yield from self.find_befores()
        yield from delete_documents(self.entry, list(befores.values()), changes)
        return [befores.get(freeze(each.key)) for each in self.writes]


class DeleteMany(_Delete, ChunkedWrite):
    """A deletion of the documents of one chunk; with `purged`, a condition of soft-deleted ones, for good."""

    def __init__(self, entry: ModelEntry, filter: Any, *, purged: Raw | None = None) -> None:
        super().__init__(entry)
        require_filter(entry, filter)
        self._purges = purged is not None
        self._inseparable = next((rule for rule in entry.rules if rule.deletes_together), None)
        self.is_indivisible = self._inseparable is not None
        self.filter = parse_filter(entry.paths.fields, filter) if purged is None else purged

    def command(self) -> Plan[int] | None:
        return self._delete_alone() if self._is_plain and self.ids is None else None

    def _delete_alone(self) -> Plan[int]:
        entry = self.entry
        divided = entry.versions.divide(self.filter) is not None
        if divided and (yield from may_match_outdated(entry, self.filter)):
            raise CommitNeeded
        with translated(entry.model.__name__, [self.filter]):
            if entry.paths.deletion is None or self._purges:
                return (yield from delete_many(entry.collection, self.filter)).deleted_count
            return (
                yield from update_many(entry.collection, self.filter, _soft_deletion(entry))
            ).matched_count

    def apply(self, changes: Changes) -> Plan[int]:
        most = DELETE_TOGETHER_MAX
        limit = most + 1 if self.is_indivisible else 0
        befores = yield from find_matching(self.entry, self.selector.filter, limit=limit)
        if self._inseparable is not None and len(befores) > most:
            raise UsageError(
                f"more than {most:,} {self.entry.model.__name__} documents match"
                f"{self._inseparable.deletes_together}",
                code="delete-too-many",
            )
        yield from delete_documents(self.entry, befores, changes, purges=self._purges)
        return len(befores)

    def smaller(self) -> Plan[list[ChunkedWrite]]:
        return (yield from smaller_first(self.selector))


# -- in a commit -----------------------------------------------------------------------------------


def delete_documents(
    entry: ModelEntry, befores: Sequence[Raw], changes: Changes, *, purges: bool = False
) -> Plan[dict[Any, Raw]]:
    """Delete documents that were just read, and what depends on them.

    Softly, where the model says so, unless this `purges`. Returns what is
    stored of them then, by frozen id.
    """
    if not befores:
        return {}
    groups = list(entry.kinds.split(befores))
    # Before anything is written, so that a refusal leaves the caller's transaction usable.
    for exact, own in groups:
        yield from check_restrictions(restricting(exact), own)
    path = None if purges else entry.paths.deletion
    hooks: list[tuple[Rule, Batch]] = []
    for exact, own in groups:
        hooks += hooks_of(exact, (yield from _batch(exact, own, path)))
    yield from run_before(hooks, changes)
    ids = [each["_id"] for each in befores]
    left: dict[Any, Raw] = {}
    if path is None:
        yield from delete_many(entry.collection, {"_id": {"$in": ids}})
    else:
        left = yield from _delete_softly(entry, ids, changes)
    yield from changes.add(entry, [(each, left.get(freeze(each["_id"]))) for each in befores])
    yield from run_after(hooks, changes)
    for exact, own in groups:
        yield from follow_references(exact, copies_of(exact), own, changes)
    return left


def _delete_softly(entry: ModelEntry, ids: Sequence[Any], changes: Changes) -> Plan[dict[Any, Raw]]:
    """Set the date of the deletion. Returns what is stored then, by frozen id."""
    chosen = {"_id": {"$in": list(ids)}}
    if _upgrade_changes_date(entry):
        yield from upgrade_possible(entry, chosen, changes)
    yield from update_many(entry.collection, chosen, _soft_deletion(entry))
    return (yield from by_ids(entry.collection, ids))


def _batch(entry: ModelEntry, befores: Sequence[Raw], path: str | None) -> Plan[Batch]:
    """The documents of one class as its rules see them."""
    if not derivation(entry).acting:
        return Batch([])
    current = yield from load_documents(entry, befores)
    return Batch([(each, None if path is None else {**each, path: _PROVISIONAL}) for each in current])


def follow_references(
    entry: ModelEntry, rules: Sequence[DerivedRule], befores: Sequence[Raw], changes: Changes
) -> Plan[None]:
    """Do as `on_delete` says to the documents that refer to deleted ones."""
    most = entry.limits.cascade_max
    for rule in rules:
        keys = rule.unique_keys(befores)
        if rule.on_delete not in ("clear", "cascade") or not keys:
            continue
        # Whatever else they derive is computed again with the reference.
        yield from upgrade_matching_upgraded(rule.target, rule.targets_of(keys), changes, writes=None)
        referring = yield from find(rule.target.collection, rule.targets_of(keys), limit=most + 1)
        if len(referring) > most:
            raise _too_large(entry, rule)
        if not referring:
            continue
        if rule.on_delete == "cascade" and not rule.place.in_array:
            yield from delete_documents(rule.target, referring, changes)
        else:
            yield from detach(rule, referring, keys, changes)


def _too_large(entry: ModelEntry, rule: DerivedRule) -> UsageError:
    return UsageError(
        f"more than {entry.limits.cascade_max:,} {rule.target.model.__name__} documents refer to this "
        f"{entry.model.__name__}; delete or change them first, with delete_many or update_many",
        code="cascade-too-large",
    )


def smaller_first(selector: Selector, limit: int = 0) -> Plan[list[ChunkedWrite]]:
    """Return the writes to do first, in chunks, where too many documents refer to those to be deleted.

    Each chunk is consistent, and what remains afterwards is small. A deletion
    that is interrupted here continues when it is called again.
    """
    entry, condition = selector
    names = ["_id", entry.versions.field, *(rule.match.path for rule in copies_of(entry, None))]
    shown = dict.fromkeys(names, 1)
    rows = yield from find_matching(entry, condition, limit=limit, projection=shown)
    yield from check_restrictions(restricting(entry), rows)
    smaller: list[ChunkedWrite] = []
    for rule in copies_of(entry):
        referring = {rule.on.path: {"$in": rule.unique_keys(rows)}}
        if rule.place.in_array or rule.on_delete not in ("clear", "cascade"):
            continue
        if rule.on_delete == "cascade":
            smaller.append(DeleteMany(rule.target, referring))
        else:
            emptied = rule.path if rule.copied.holds_reference else rule.on.path
            smaller.append(UpdateMany(rule.target, referring, {"$set": {emptied: None}}))
    return smaller


def check_restrictions(rules: Sequence[DerivedRule], befores: Sequence[Raw]) -> Plan[None]:
    """Refuse a deletion that a reference with on_delete="restrict" forbids."""
    for rule in rules:
        yield from refuse_if_referred(rule, rule.targets_of(rule.unique_keys(befores)))


def refuse_if_referred(rule: DerivedRule, condition: Raw) -> Plan[None]:
    """Refuse a deletion while a document meets the condition that it refers to the deleted one."""
    others = yield from rule.target.targets.find(condition, limit=1)
    if others:
        key = others[0].document["_id"]
        raise DataError(
            f"this {rule.source.model.__name__} cannot be deleted, because {rule.target.model.__name__} "
            f"{key!r} refers to it ({rule.place.label} has on_delete='restrict'); delete that first",
            code="reference-restricted",
        )


def detach(rule: DerivedRule, referring: Sequence[Raw], keys: Sequence[Any], changes: Changes) -> Plan[None]:
    """Clear the references to deleted documents, or remove the elements that hold them."""
    target = rule.target
    gone = {freeze(key) for key in keys}
    operations = []
    pairs = []
    for before in referring:
        after = copy.deepcopy(before)
        if rule.on_delete == "cascade":
            rule.copied.remove(after, gone)
        else:
            rule.copied.clear(after, gone)
        sets = {**changed_fields(before, after), **BUMP}
        operations.append(UpdateOne(by_id(before["_id"]), [{"$set": sets}]))
        pairs.append((before, after))
    yield from bulk_write(target.collection, operations, ordered=False)
    # Other cards may hang on the same reference.
    finals = yield from follow_own(target, pairs)
    yield from changes.add(target, zip(referring, finals, strict=True))
