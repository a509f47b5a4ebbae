"""Moves between a collection and its archive: each chunk one transaction.

The documents are read, stored in the one collection and deleted in the other
in one snapshot. A concurrent change of one of them conflicts with the
deletion: either the move begins again with the new state, or the change does,
and finds the document archived.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from pymongo import IndexModel
from pymongo.errors import OperationFailure

from treadle.engine.derive import DerivedValues, recompute
from treadle.engine.documents import as_written, translated
from treadle.engine.indexes import declared_indexes
from treadle.engine.pipelines import formula_stages
from treadle.engine.salvage import salvage
from treadle.engine.write_path import WritePath, commit_changes
from treadle.errors import DeclarationError, UsageError
from treadle.graph.calls import MovingRule
from treadle.graph.changes import Changes
from treadle.graph.derived import FormulaRule
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Pace, Progress, Report, resting
from treadle.graph.rule import Models, Place
from treadle.graph.stored_pages import chunks
from treadle.model.bson_types import as_moment
from treadle.model.document import Document
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
from treadle.query.paths import resolve, value_at

SIZE = "_treadle_bytes"
DATES = (dt.datetime, dt.date)


class _Old(NamedTuple):
    """A document that is old enough."""

    id: Any
    date: Any


class ArchiveMoves(MovingRule):
    """The two collections of a model, and what moves between them."""

    pattern = "archive"

    def __init__(self, place: Place, graph: Models, declared: Any) -> None:
        super().__init__(place)
        self.declared = declared
        self.graph: Any = graph
        self.limits = place.entry.limits
        path = resolve(place.entry.codec, declared.by, place.label, "source-field-missing")
        if path.in_array or path.shape.python not in DATES:
            raise DeclarationError(
                f"{place.label} archives by {declared.by!r}, which must be a date or a datetime of the "
                "document itself",
                code="maintained-type",
            )
        self.by = path.stored
        self.into: str = declared.into
        self.side: ModelEntry = graph.add_side(_archived_model(place, self.into), place.label)

    @property
    def _active(self) -> Raw:
        """The condition that a document is not soft-deleted."""
        deletion = self.target.paths.deletion
        return {} if deletion is None else {deletion: None}

    # -- into the archive ----------------------------------------------------------------------------

    def archive(self, now: Any, report: Report | None, dry_run: bool) -> Plan[int]:
        moment = (yield from clock()) if now is None else as_moment(now)
        entry = self.target
        # One without a date, or soft-deleted, is never old enough.
        aged = condition = {self.by: {"$lte": moment - self.declared.after}, **self._active}
        outdated: list[Any] = []
        if entry.targets.splits(aged):
            # A migration changes what the condition names.
            outdated = [image.document["_id"] for image in (yield from entry.targets.find_outdated(aged))]
            condition = {"$and": [entry.versions.current_only, aged]}
        total = 0
        if dry_run or report:
            total = len(outdated) + (yield from count_documents(entry.collection, condition))
        if dry_run:
            return total
        size = entry.limits.archive_chunk
        if isinstance(report, Pace):
            size = report.sized(size)
        moved = 0
        for some in chunks(outdated, size):
            moved += yield from self._move_possible(some, partial(self._move_outdated, aged), [])
        return (yield from self._archive_current(condition, size, moved, total, report))

    def _archive_current(
        self, condition: Raw, size: int, moved: int, total: int, report: Report | None
    ) -> Plan[int]:
        """Move current documents, the oldest first. Returns the number of all that moved."""
        name, width, left = self.target.model.__name__, size, condition
        failed: list[_Old] = []
        while True:
            rows, is_cut = yield from self._next(left, width)
            if not rows:
                return moved
            # Large documents are not read again and again for the few of them that move at a time.
            width = min(size, 2 * (len(rows) if is_cut else width))
            lost: list[Any] = []
            move = partial(self._move_current, condition)
            moved += yield from self._move_possible([row.id for row in rows], move, lost)
            if lost or failed:
                # All that were older have moved or failed, so that the search continues from here.
                last = rows[-1].date
                failed = [*failed, *_among(rows, lost)]
                failed = [row for row in failed if row.date == last]
                beyond = {self.by: {"$gte": last}, "_id": {"$nin": [row.id for row in failed]}}
                left = {"$and": [condition, beyond]}
            if report:
                report(Progress(name, moved, max(total, moved)))
            yield from resting(report, len(rows))

    def _next(self, left: Raw, most: int) -> Plan[tuple[list[_Old], bool]]:
        """Return the oldest documents that are left, as many as one transaction can hold.

        And whether more were read than that.
        """
        shown: Raw = {"_id": 1, self.by: 1}
        options: Raw = {"sort": [(self.by, 1)], "limit": most}
        sized = {**shown, SIZE: {"$bsonSize": "$$ROOT"}}
        try:
            rows = yield from find(self.target.collection, left, sized, **options)
        except OperationFailure as error:
            if not is_refusal(error):
                raise
            # A server that does not tell sizes.
            rows = yield from find(self.target.collection, left, shown, **options)
        total, chosen = 0, list[_Old]()
        for row in rows:
            total += row.get(SIZE, 0)
            if chosen and total > self.limits.archive_chunk_bytes:
                break
            chosen.append(_Old(row["_id"], value_at(row, self.by)))
        return chosen, len(chosen) < len(rows)

    def _move_possible(self, keys: Sequence[Any], move: Any, lost: list[Any]) -> Plan[int]:
        """Move documents in one commit; those that cannot be are quarantined, and added to `lost`."""

        def attempt(some: Sequence[Any]) -> Plan[list[int]]:
            return [(yield from commit_changes(self.graph, partial(move, some)))]

        def leave(key: Any, error: Exception) -> list[int]:
            lost.append(key)
            return []

        name = self.target.model.__name__
        return sum((yield from salvage(name, self.target.collection, keys, attempt, lost=leave)))

    def _move_current(self, condition: Raw, keys: Sequence[Any], changes: Changes) -> Plan[int]:
        chosen = {"$and": [{"_id": {"$in": list(keys)}}, condition]}
        return (yield from self.into_archive(chosen, changes))

    def _move_outdated(self, aged: Raw, keys: Sequence[Any], changes: Changes) -> Plan[int]:
        """Move those outdated documents that match once they are upgraded, as they are stored."""
        own: Raw = {"$and": [{"_id": {"$in": list(keys)}}, aged]}
        images = yield from self.target.targets.find_outdated(own)
        ids = [image.document["_id"] for image in images]
        return (yield from self.into_archive({"_id": {"$in": ids}}, changes)) if ids else 0

    def into_archive(self, chosen: Raw, changes: Changes) -> Plan[int]:
        """Move the documents that match, in a transaction. Returns their number."""
        entry = self.target
        befores = yield from find(entry.collection, chosen)
        if not befores:
            return 0
        afters = yield from self._with_formulas(befores)
        yield from insert_many(self.into, afters)
        yield from delete_many(entry.collection, {"_id": {"$in": [each["_id"] for each in befores]}})
        yield from changes.add(entry, zip(befores, afters, strict=True), after_in=self.into)
        return len(befores)

    def _with_formulas(self, documents: list[Raw]) -> Plan[list[Raw]]:
        """Evaluate the formulas of the worker and of schedules, which do not reach into the archive."""
        entry = self.target
        formulas = [rule for each in entry.kinds.related for rule in each.rules.of_type(FormulaRule)]
        if all(rule.maintain == "write" for rule in formulas):
            return documents
        chosen = {"_id": {"$in": [each["_id"] for each in documents]}}
        current = {**chosen, **entry.versions.current_only}
        yield from update_many(entry.collection, current, formula_stages(entry.kinds.root))
        stored = {freeze(each["_id"]): each for each in (yield from find(entry.collection, chosen))}
        return [stored[freeze(each["_id"])] for each in documents]

    # -- out of the archive --------------------------------------------------------------------------

    def restore(self, write_path: WritePath, id: Any) -> Plan[Any]:
        raw = yield from self._restore(by_id(self.target.ids.encode(id)))
        return None if raw is None else as_written(self.target, raw)

    def restore_for_write(self, filter: Raw) -> Plan[bool]:
        """Restore the first archived document that a write is about, or refuse the write.

        Returns whether the write has a document now.
        """

        def look() -> Plan[tuple[Raw | None, Raw | None]]:
            archived = yield from find_one(self.into, filter, {"_id": 1})
            active = {"$and": [filter, self._active]}
            return archived, (yield from find_one(self.target.collection, active, {"_id": 1}))

        # In one snapshot, so that a concurrent move hides the document from neither read.
        archived, active = yield from transact(look)
        if archived is None:
            return active is not None
        if self.declared.archived == "refuse":
            raise UsageError(
                f"{self.target.model.__name__} {archived['_id']!r} is archived in {self.into} and cannot be "
                'written there; restore() it first, or declare Archive(archived="restore")',
                code="document-archived",
            )
        yield from self._restore(by_id(archived["_id"]))
        return True

    def _restore(self, chosen: Raw) -> Plan[Raw | None]:
        return (yield from commit_changes(self.graph, partial(self.out_of_archive, chosen)))

    def out_of_archive(self, chosen: Raw, changes: Changes) -> Plan[Raw | None]:
        """Move one document back, in a transaction. Returns it; None where the archive does not have it."""
        entry = self.target
        raw = yield from find_one_and_delete(self.into, chosen)
        if raw is None:
            return None
        with translated(entry.model.__name__, [raw], entry):
            yield from insert_one(entry.collection, raw)
        yield from changes.add(entry, [(raw, raw)], before_in=self.into)
        derived = DerivedValues.of(entry.kinds.of(raw))
        if derived.rules:
            # What it derives from others was not maintained in the archive.
            yield from recompute(derived, [raw["_id"]], changes, exact=True)
        return (yield from find_one(entry.collection, by_id(raw["_id"])))


def _among(rows: Sequence[_Old], keys: Sequence[Any]) -> list[_Old]:
    frozen = set(map(freeze, keys))
    return [row for row in rows if freeze(row.id) in frozen]


def _archived_model(place: Place, collection: str) -> type[Document]:
    """Return the model of the archive, for its collection and indexes."""
    kind: Any = type(Document)
    indexes = [each for each in declared_indexes(place.entry) if "expireAfterSeconds" not in each.document]
    made: type[Document] = kind(
        f"{place.entry.model.__name__}_archive",
        (Document,),
        {"__annotations__": {}, "__module__": __name__},
        collection=collection,
        validation="off",
        indexes=list(map(_not_unique, indexes)),
    )
    return made


def _not_unique(index: IndexModel) -> IndexModel:
    """Return an index as the archive has it: a document may have a value that an archived one had before."""
    options = {name: value for name, value in index.document.items() if name not in ("key", "unique")}
    return IndexModel(list(dict(index.document["key"]).items()), **options)
