"""Deletions, and what `on_delete` asks for of the documents that refer to deleted ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from bson import ObjectId
from pymongo import UpdateOne

from treadle.engine import crud
from treadle.engine.inserts import refuse_group
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import BUMP, changed_fields
from treadle.engine.soft_delete import bury, burying
from treadle.engine.updates import UpdateManyDocuments, follow_own
from treadle.engine.validation import as_written
from treadle.engine.version_upgrade import upgrade_matching_upgraded, upgraded
from treadle.errors import DataError, UsageError
from treadle.graph.changes import Changes
from treadle.graph.derived import DerivedRule, aggregates_of, copies_of
from treadle.graph.model_entry import ModelEntry
from treadle.graph.write import ChunkedWrite, Write, confined
from treadle.model.document import Document
from treadle.plan import (
    Plan,
    Raw,
    bulk_write,
    by_id,
    delete_many,
    find,
    find_one,
    find_one_and_delete,
    find_one_and_update,
    update_many,
)
from treadle.query.filters import parse_filter
from treadle.query.keys import distinct, freeze

# Nodes of a tree that delete_many deletes, all or none.
DELETE_TOGETHER_MAX = 10_000

D = TypeVar("D", bound=Document)
# The methods of rules that a deletion concerns.
_CONCERNED = ("before_delete", "after_delete", "record")


def restricting(entry: ModelEntry[Any]) -> list[DerivedRule]:
    """The references that forbid a deletion, however they are maintained."""
    return [rule for rule in copies_of(entry, None) if rule.on_delete == "restrict"]


class _Delete:
    """What deletions of one document and of many have in common."""

    shows_document = False

    def __init__(self, entry: ModelEntry[Any]) -> None:
        refuse_group(entry, "deleted")
        self.entry = entry

    @property
    def _is_plain(self) -> bool:
        entry = self.entry
        return not (
            aggregates_of(entry)
            or restricting(entry)
            or any(rule.on_delete != "keep" for rule in copies_of(entry))
            or any(each.rules.implementing(method) for each in entry.kinds.related for method in _CONCERNED)
        )


class DeleteOneDocument(_Delete, Write[D | None]):
    """A deletion of one document, which others may have to follow."""

    def __init__(self, entry: ModelEntry[D], id_or_filter: Any) -> None:
        super().__init__(entry)
        self.filter = crud.which(entry, id_or_filter)

    def command(self) -> Plan[Raw | None] | None:
        return self._delete_alone() if self._is_plain else None

    def _delete_alone(self) -> Plan[Raw | None]:
        entry = self.entry
        with crud.translated(entry.model.__name__, [self.filter]):
            if entry.paths.deletion is None:
                raw = yield from find_one_and_delete(entry.collection, self.filter)
            else:
                raw = yield from find_one_and_update(entry.collection, self.filter, burying(entry))
        return (yield from self._current(raw))

    @property
    def key(self) -> list[Any]:
        """The id of the one document that it means; nothing where another may be meant."""
        named = self.filter.get("_id")
        return [named] if type(named) is ObjectId and self.filter == self.entry.filter_for_id(named) else []

    def _current(self, raw: Raw | None) -> Plan[Raw | None]:
        """The deleted document as the current version has it."""
        if raw is None:
            return raw
        try:
            return (yield from upgraded(self.entry, [raw]))[0]
        except DataError:
            # What no migration can read must be possible to delete.
            return raw

    def apply(self, changes: Changes) -> Plan[Raw | None]:
        entry = self.entry
        asked = any(each.rules.implementing("before_delete") for each in entry.kinds.related)
        if asked or entry.paths.deletion is not None:
            before = yield from find_one(entry.collection, self.filter)
            if before is not None:
                left = yield from delete_documents(entry, [before], changes)
                before = left.get(freeze(before["_id"]), before)
        else:
            before = yield from find_one_and_delete(entry.collection, self.filter)
            if before is not None:
                yield from changes.add(entry, [(before, None)])
                yield from follow_deletions(entry.kinds.of(before), [before], changes)
        return (yield from self._current(before))

    def result(self, outcome: Raw | None) -> D | None:
        return None if outcome is None else as_written(self.entry, outcome)

    def smaller(self) -> Plan[list[ChunkedWrite]]:
        return (yield from smaller_first(self.entry, self.filter, limit=1))


class DeleteEach(_Delete, Write[list[Raw | None]]):
    """Deletions of single documents by their ids, in one round of commands."""

    def __init__(self, deletions: Sequence[DeleteOneDocument[Any]]) -> None:
        self.entry = deletions[0].entry
        self.keys = [key for each in deletions for key in each.key]

    def apply(self, changes: Changes) -> Plan[list[Raw | None]]:
        found = yield from by_ids(self.entry.collection, distinct(self.keys))
        befores = {key: each for key, each in found.items() if self.entry.targets.admits(each)}
        yield from delete_documents(self.entry, list(befores.values()), changes)
        # The second deletion of a document finds nothing.
        return [befores.pop(freeze(key), None) for key in self.keys]


class DeleteManyDocuments(_Delete, ChunkedWrite):
    """A deletion of the documents of one chunk."""

    def __init__(self, entry: ModelEntry[Any], filter: Any, *, for_good: Raw | None = None) -> None:
        super().__init__(entry)
        crud.require_filter(entry, filter)
        # Whether documents that are deleted already are removed.
        self.for_good = for_good is not None
        self._inseparable = next((rule for rule in entry.rules if rule.deletes_together), None)
        self.is_indivisible = self._inseparable is not None
        self.filter = parse_filter(entry.paths.fields, filter) if for_good is None else for_good

    def command(self) -> Plan[int] | None:
        return self._delete_alone() if self._is_plain and self.keys is None else None

    def _delete_alone(self) -> Plan[int]:
        entry = self.entry
        with crud.translated(entry.model.__name__, [self.filter]):
            if entry.paths.deletion is None or self.for_good:
                return (yield from delete_many(entry.collection, self.filter)).deleted_count
            return (yield from update_many(entry.collection, self.filter, burying(entry))).matched_count

    def apply(self, changes: Changes) -> Plan[int]:
        most = DELETE_TOGETHER_MAX
        limit = most + 1 if self.is_indivisible else 0
        befores = yield from find(self.entry.collection, confined(self.filter, self.keys), limit=limit)
        if self._inseparable is not None and len(befores) > most:
            raise UsageError(
                f"more than {most:,} {self.entry.model.__name__} documents match"
                f"{self._inseparable.deletes_together}",
                code="delete-too-many",
            )
        yield from delete_documents(self.entry, befores, changes, for_good=self.for_good)
        return len(befores)

    def smaller(self) -> Plan[list[ChunkedWrite]]:
        return (yield from smaller_first(self.entry, confined(self.filter, self.keys)))


def delete_documents(
    entry: ModelEntry[Any], befores: Sequence[Raw], changes: Changes, *, for_good: bool = False
) -> Plan[dict[Any, Raw]]:
    """Delete documents that were just read, and what depends on them; what is left of them, by frozen id.

    Those of a model that keeps its deleted documents are buried, unless this is `for_good`.
    """
    if not befores:
        return {}
    keys = [each["_id"] for each in befores]
    groups = list(entry.kinds.split(befores))
    # Before anything is written, so that a refusal leaves the caller's transaction usable.
    for exact, own in groups:
        yield from check_restrictions(restricting(exact), own)
    for exact, group in groups:
        for rule in exact.rules.implementing("before_delete"):
            yield from rule.before_delete(group, changes)
    buries = entry.paths.deletion is not None and not for_good
    left: dict[Any, Raw] = {}
    if buries:
        left = yield from bury(entry, befores, changes)
    else:
        yield from delete_many(entry.collection, {"_id": {"$in": keys}})
        yield from changes.add(entry, [(before, None) for before in befores])
    for exact, own in groups:
        yield from follow_deletions(exact, own, changes, removed=not buries)
    return left


def follow_deletions(
    entry: ModelEntry[Any], befores: Sequence[Raw], changes: Changes, *, removed: bool = True
) -> Plan[None]:
    """Let everything follow that depends on deleted documents; `removed` ones are not even stored."""
    yield from check_restrictions(restricting(entry), befores)
    for rule in entry.rules.implementing("after_delete") if removed else ():
        yield from rule.after_delete([each["_id"] for each in befores], changes)
    yield from follow_references(entry, copies_of(entry), befores, changes)


def follow_references(
    entry: ModelEntry[Any], rules: Sequence[DerivedRule], befores: Sequence[Raw], changes: Changes
) -> Plan[None]:
    """Do as `on_delete` says to the documents that refer to deleted ones."""
    most = entry.limits.cascade_max
    for rule in rules:
        keys = rule.unique_keys(befores)
        if rule.on_delete not in ("clear", "cascade") or not keys:
            continue
        yield from upgrade_matching_upgraded(rule.target, rule.targets_of(keys), changes)
        referring = yield from find(rule.target.collection, rule.targets_of(keys), limit=most + 1)
        if len(referring) > most:
            raise _too_large(entry, rule)
        if not referring:
            continue
        if rule.on_delete == "cascade" and not rule.place.in_array:
            yield from delete_documents(rule.target, referring, changes)
        else:
            yield from detach(rule, referring, keys, changes)


def _too_large(entry: ModelEntry[Any], rule: DerivedRule) -> UsageError:
    return UsageError(
        f"more than {entry.limits.cascade_max:,} {rule.target.model.__name__} documents refer to this "
        f"{entry.model.__name__}; delete or change them first, with delete_many or update_many",
        code="cascade-too-large",
    )


def smaller_first(entry: ModelEntry[Any], condition: Raw, limit: int = 0) -> Plan[list[ChunkedWrite]]:
    """What to do first, in chunks, where too many documents refer to those to be deleted.

    Each chunk is right in itself, and what remains afterwards is small. A
    deletion that is interrupted here goes on when it is called again.
    """
    shown = {"_id": 1, **dict.fromkeys((rule.match.path for rule in copies_of(entry, None)), 1)}
    rows = yield from find(entry.collection, condition, shown, limit=limit)
    yield from check_restrictions(restricting(entry), rows)
    smaller: list[ChunkedWrite] = []
    for rule in copies_of(entry):
        referring = {rule.on.path: {"$in": rule.unique_keys(rows)}}
        if rule.place.in_array or rule.on_delete not in ("clear", "cascade"):
            continue
        if rule.on_delete == "cascade":
            smaller.append(DeleteManyDocuments(rule.target, referring))
        else:
            emptied = rule.path if rule.copied.holds_reference else rule.on.path
            smaller.append(UpdateManyDocuments(rule.target, referring, {"$set": {emptied: None}}))
    return smaller


def check_restrictions(rules: Sequence[DerivedRule], befores: Sequence[Raw]) -> Plan[None]:
    """Refuse a deletion that a reference with on_delete="restrict" forbids."""
    for rule in rules:
        yield from refuse_if_referred(rule, rule.targets_of(rule.unique_keys(befores)))


def refuse_if_referred(rule: DerivedRule, condition: Raw) -> Plan[None]:
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
