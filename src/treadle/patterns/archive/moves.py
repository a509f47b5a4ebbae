"""Moves between a collection and its archive: each chunk one transaction.

The documents are read, stored there and deleted here in one snapshot. Who
changes one of them meanwhile conflicts with the deletion: the move begins
again with the new state, or the change does, and finds the document archived.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from functools import partial
from typing import Any

from pymongo.errors import OperationFailure

from treadle.engine.derive import DerivedValues, recompute
from treadle.engine.documents import as_written, translated
from treadle.engine.pipelines import formula_stages
from treadle.engine.salvage import salvage
from treadle.engine.write_path import commit_changes
from treadle.errors import UsageError
from treadle.graph.changes import Changes
from treadle.graph.derived import FormulaRule
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Pace, Progress, Report, resting
from treadle.graph.stored_pages import chunks
from treadle.model.bson_types import as_moment
from treadle.patterns.archive.places import ArchivePlaces
from treadle.plan import (
    Plan,
    Raw,
    by_id,
    count_documents,
    delete_many,
    find,
    find_one,
    find_one_and_delete,
    insert_many,
    insert_one,
    transact,
    update_many,
)
from treadle.plan.capabilities import clock
from treadle.plan.server_errors import is_refusal
from treadle.query.keys import freeze

SIZE = "_treadle_bytes"


def due(rule: ArchivePlaces, now: dt.datetime) -> Raw:
    """The condition that a document is old enough; one without a date, or deleted softly, never is."""
    living: Raw = {} if rule.target.paths.deletion is None else {rule.target.paths.deletion: None}
    return {rule.by: {"$lte": now - rule.declared.after}, **living}


def archive(rule: ArchivePlaces, now: Any, report: Report | None, dry_run: bool) -> Plan[int]:
    """Move what is old enough; how many documents."""
    moment = (yield from clock()) if now is None else as_moment(now)
    entry, aged = rule.target, due(rule, moment)
    condition = aged
    outdated: list[Any] = []
    if entry.targets.splits(aged):
        # A migration changes what the condition names.
        outdated = [image.document["_id"] for image in (yield from entry.targets.find_outdated(aged))]
        condition = {"$and": [entry.versions.current_only, aged]}
    if dry_run:
        return len(outdated) + (yield from count_documents(entry.collection, condition))
    total = len(outdated) + (yield from count_documents(entry.collection, condition)) if report else 0
    most = entry.limits.archive_chunk
    if isinstance(report, Pace):
        most = report.sized(most)
    moved, width = 0, most
    stuck: list[Any] = []

    def attempt(keys: Any) -> Plan[list[int]]:
        chosen = {"$and": [{"_id": {"$in": list(keys)}}, condition]}
        body = partial(_move, rule, chosen)
        return [(yield from commit_changes(rule.graph, body))]

    def attempt_outdated(keys: Any) -> Plan[list[int]]:
        return [(yield from commit_changes(rule.graph, partial(_move_outdated, rule, keys, aged)))]

    def leave(key: Any, error: Exception) -> list[int]:
        stuck.append(key)
        return []

    for some in chunks(outdated, most):
        moves = yield from salvage(entry.model.__name__, entry.collection, some, attempt_outdated, lost=leave)
        moved += sum(moves)
    while True:
        left = {"$and": [condition, {"_id": {"$nin": stuck}}]} if stuck else condition
        keys, cut = yield from _next(rule, left, width)
        if not keys:
            return moved
        # Large documents are not looked at again and again for the few of them that move at a time.
        width = min(most, 2 * (len(keys) if cut else width))
        moved += sum((yield from salvage(entry.model.__name__, entry.collection, keys, attempt, lost=leave)))
        if report:
            report(Progress(entry.model.__name__, moved, max(total, moved)))
        yield from resting(report, len(keys))


def _next(rule: ArchivePlaces, left: Raw, most: int) -> Plan[tuple[list[Any], bool]]:
    """The ids of the oldest documents that are left, as many as one transaction can hold.

    And whether there were more than that.
    """
    shown: Raw = {"_id": 1, SIZE: {"$bsonSize": "$$ROOT"}}
    try:
        rows = yield from find(rule.target.collection, left, shown, sort=[(rule.by, 1)], limit=most)
    except OperationFailure as error:
        if not is_refusal(error):
            raise
        # A server that does not tell sizes.
        rows = yield from find(rule.target.collection, left, {"_id": 1}, sort=[(rule.by, 1)], limit=most)
    total, keys = 0, list[Any]()
    for row in rows:
        total += row.get(SIZE, 0)
        if keys and total > rule.limits.archive_chunk_bytes:
            break
        keys.append(row["_id"])
    return keys, len(keys) < len(rows)


def _move(rule: ArchivePlaces, chosen: Raw, changes: Changes) -> Plan[int]:
    """One chunk, in its transaction."""
    entry = rule.target
    befores = yield from find(entry.collection, chosen)
    if not befores:
        return 0
    keys = [each["_id"] for each in befores]
    afters = yield from _with_formulas(entry, befores)
    yield from insert_many(rule.into, afters)
    yield from delete_many(entry.collection, {"_id": {"$in": keys}})
    yield from changes.add(entry, zip(befores, afters, strict=True), after_in=rule.into)
    return len(keys)


def _move_outdated(rule: ArchivePlaces, keys: Sequence[Any], condition: Raw, changes: Changes) -> Plan[int]:
    """Move those of some outdated documents that match once they are upgraded, as they are stored."""
    own: Raw = {"$and": [{"_id": {"$in": list(keys)}}, condition]}
    images = yield from rule.target.targets.find_outdated(own)
    chosen = {"_id": {"$in": [image.document["_id"] for image in images]}}
    return (yield from _move(rule, chosen, changes)) if images else 0


def _with_formulas(entry: ModelEntry, documents: list[Raw]) -> Plan[list[Raw]]:
    """These documents with the formulas that the worker or a schedule has not evaluated yet.

    Nothing evaluates them in the archive.
    """
    formulas = [rule for each in entry.kinds.related for rule in each.rules.of_type(FormulaRule)]
    if all(rule.maintain == "write" for rule in formulas):
        return documents
    chosen = {"_id": {"$in": [each["_id"] for each in documents]}}
    current = {**chosen, **entry.versions.current_only}
    yield from update_many(entry.collection, current, formula_stages(entry.kinds.root))
    stored = {freeze(each["_id"]): each for each in (yield from find(entry.collection, chosen))}
    return [stored[freeze(each["_id"])] for each in documents]


def restore(rule: ArchivePlaces, id: Any) -> Plan[Any]:
    """Bring one document back; the document, or None where the archive does not have it."""
    raw = yield from _restore(rule, by_id(rule.target.ids.encode(id)))
    return None if raw is None else as_written(rule.target, raw)


def bring_back(rule: ArchivePlaces, filter: Raw) -> Plan[bool]:
    """Bring back the first archived document that a write is about, or refuse the write.

    Whether the write finds one now.
    """

    def look() -> Plan[tuple[Raw | None, Raw | None]]:
        living: Raw = {} if entry.paths.deletion is None else {entry.paths.deletion: None}
        there = yield from find_one(rule.into, filter, {"_id": 1})
        here = yield from find_one(entry.collection, {"$and": [filter, living]}, {"_id": 1})
        return there, here

    entry = rule.target
    # At one moment, so that whoever moves it meanwhile hides it from neither look.
    archived, here = yield from transact(look)
    if archived is None:
        return here is not None
    if rule.declared.archived == "refuse":
        raise UsageError(
            f"{rule.target.model.__name__} {archived['_id']!r} is archived in {rule.into} and cannot be "
            'written there; restore() it first, or declare Archive(archived="restore")',
            code="document-archived",
        )
    yield from _restore(rule, by_id(archived["_id"]))
    return True


def _restore(rule: ArchivePlaces, chosen: Raw) -> Plan[Raw | None]:
    entry = rule.target

    def body(changes: Changes) -> Plan[Raw | None]:
        raw = yield from find_one_and_delete(rule.into, chosen)
        if raw is None:
            return None
        with translated(entry.model.__name__, [raw], entry):
            yield from insert_one(entry.collection, raw)
        return (yield from arrive(raw, changes))

    def arrive(raw: Raw, changes: Changes) -> Plan[Raw | None]:
        key, exact = raw["_id"], entry.kinds.of(raw)
        yield from changes.add(entry, [(raw, raw)], before_in=rule.into)
        derived = DerivedValues.of(exact)
        if derived.rules:
            # While it was away nobody kept what it derives from others.
            yield from recompute(derived, [key], changes, exact=True)
        return (yield from find_one(entry.collection, by_id(key)))

    return (yield from commit_changes(rule.graph, body))
