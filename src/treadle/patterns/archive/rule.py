"""Archive: documents of some age move to another collection, whole, and can be restored.

The invariant: each document is in exactly one of the two collections at every
moment, for every reader. A move is one transaction, so that an update which
races with it is kept. Derived values continue to count what is archived
(`counted=True`), because the model's Scope reads both collections. How
documents move is in `moves.py`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from pymongo import ASCENDING, IndexModel

from treadle.engine.document_layout import DocumentLayout
from treadle.engine.indexes import declared_indexes, version_indexes
from treadle.engine.pages import by_ids
from treadle.errors import DeclarationError
from treadle.graph.batch import Batch
from treadle.graph.binding import check_choice
from treadle.graph.calls import ArrayRule, CounterRule, HierarchyRule, PastRule
from treadle.graph.changes import Changes
from treadle.graph.derived import DerivedRule
from treadle.graph.layout import Layout
from treadle.graph.outcomes import Finding
from treadle.graph.rule import REVISION, SNAPSHOTS, Due, Models, Pattern, Place, Reads, Rule, Storage
from treadle.graph.scope import Role, ScopePart
from treadle.graph.stored_pages import matching
from treadle.patterns.archive.layout import ArchiveLayout
from treadle.patterns.archive.moves import ArchiveMoves
from treadle.plan import Plan, Raw, by_id, delete_one, find, find_one, transact, update_one
from treadle.plan.server_errors import DUPLICATE_KEY, DuplicateKey
from treadle.query.keys import freeze


@dataclass(frozen=True)
class Archive(Pattern):
    """Move documents to the collection `into` when the date in `by` is at least `after` old."""

    pattern: ClassVar[str] = "archive"
    keyword: ClassVar[str] = "archive"
    beside: ClassVar[bool] = True

    by: str
    after: dt.timedelta
    into: str
    counted: bool = True
    archived: Literal["refuse", "restore"] = "refuse"

    def bind(self, place: Place, graph: Models) -> Rule:
        check_choice(place, "archived", self.archived, ("refuse", "restore"))
        if not (isinstance(self.after, dt.timedelta) and self.after >= dt.timedelta(0)):
            raise DeclarationError(
                f"{place.label} has after={self.after!r}; it takes a timedelta", code="pattern-keyword"
            )
        if not isinstance(self.into, str) or not self.into:
            raise DeclarationError(
                f"{place.label} has into={self.into!r}; it takes the name of a collection",
                code="pattern-keyword",
            )
        entry = place.entry
        if entry.kinds.above:
            raise DeclarationError(
                f"{place.label} is one kind of {entry.kinds.above[0].model.__name__}; the kinds of one "
                "collection are archived together: declare archive= on that",
                code="archive-declaration",
            )
        return ArchiveRule(place, graph, self)


class ArchiveRule(ArchiveMoves):
    """An archive, as the rest of Treadle asks for it."""

    # A reader of both collections sees one moment by a snapshot.
    needs = SNAPSHOTS
    due_work = "archive old documents"
    # Only a look at both collections shows a document that is in both.
    page_projection = None

    # -- what it is about --------------------------------------------------------------------------

    def reads(self) -> Reads:
        return {self.target.collection: set()}

    def scope(self) -> ScopePart:
        roles: set[Role] = {"sources", "everything"} if self.declared.counted else {"everything"}
        return ScopePart(collections={self.into: frozenset(roles)})

    def storage(self) -> Storage:
        due = [(self.target, IndexModel([(self.by, ASCENDING)]))]
        return Storage(indexes=[*due, *((self.side, each) for each in self._needed_indexes())])

    def _needed_indexes(self) -> list[IndexModel]:
        """By which filters, and derived values, find what is archived."""
        needed = [
            index
            for rule in self.graph.rules
            if not isinstance(rule, ArchiveRule) and (self.declared.counted or not _aggregates(rule))
            for source, index in rule.storage().indexes
            if source.collection == self.target.collection
        ]
        return [*needed, *version_indexes(self.target)]

    def check(self, graph: Models) -> None:
        entry, label = self.target, self.place.label
        if entry.layout is not None:
            # What is stored together moves together, when the last of it is old enough.
            aged = entry.layout.aged_by(self.by)
            if aged is None:
                raise DeclarationError(
                    f"{label} archives by {self.declared.by!r}; what is stored together is archived by the "
                    "time of its readings",
                    code="archive-declaration",
                )
            self.by = aged
        beside = [rule for each in entry.kinds.related for rule in each.rules]
        for rule in beside:
            if isinstance(rule, (ArrayRule, CounterRule, HierarchyRule)):
                raise DeclarationError(
                    f"{label} has archive=, but {rule.place.label} is stored in, or written from, more than "
                    "the document alone, which would not move with it",
                    code="archive-declaration",
                )
            if isinstance(rule, PastRule) and not self.declared.counted:
                raise DeclarationError(
                    f"{label} has history= and Archive(counted=False); what is archived is no longer part of "
                    "the model then, but its history continues: leave counted= out",
                    code="archive-declaration",
                )
        if entry.rules.group is not None:
            raise DeclarationError(
                f"{label} is a rollup, whose documents come and go with their groups; archive its sources",
                code="archive-declaration",
            )
        for index in declared_indexes(entry):
            if "expireAfterSeconds" in index.document:
                raise DeclarationError(
                    f"{label} has archive= and an index with expire_after, which deletes what should be "
                    "archived; remove the index",
                    code="archive-expires",
                )

    # -- writes -----------------------------------------------------------------------------------

    def needs_commit(self, batch: Batch | None) -> bool:
        return batch is not None and bool(batch.known)

    def before(self, batch: Batch, changes: Changes) -> Plan[None]:
        known = [raw["_id"] for raw in batch.known]
        if known:
            other = yield from find_one(self.into, {"_id": {"$in": known}}, {"_id": 1})
            if other is not None:
                raise self._collision(other["_id"])

    def _collision(self, key: Any) -> DuplicateKey:
        """The error for a document whose id an archived one has."""
        name = self.target.model.__name__
        return DuplicateKey(
            name,
            {
                "code": DUPLICATE_KEY,
                "errmsg": f"E11000 duplicate key error collection: {self.into} index: _id_ dup key: {key!r}",
                "keyPattern": {"_id": 1},
                "keyValue": {"_id": key},
                "archive": self.into,
            },
            advice=f"the other {name} is archived in {self.into}; restore that one, or choose another value",
        )

    def layout(self, default: Layout[Any] | None) -> Layout[Any] | None:
        if self.target.layout is not None or not isinstance(default, DocumentLayout):
            return None
        return ArchiveLayout(self, default)

    def run_due(self, work: Due) -> Plan[int]:
        return (yield from self.archive(work.now, None, work.dry_run)) if work.kind == "due" else 0

    # -- verify and repair ---------------------------------------------------------------------------

    def verify(self, page: Sequence[Raw] | None) -> Plan[list[Finding]]:
        """Return the findings about documents that another program has put into both collections."""
        findings: list[Finding] = []
        last: list[Any] | None = None
        while page is None and (rows := (yield from matching(self.into, {}, last, self.limits.verify_page))):
            last = [rows[-1]["_id"]]
            stored = yield from by_ids(self.target.collection, [row["_id"] for row in rows])
            findings += [
                Finding(self.pattern, self.target.model.__name__, row["_id"], self.into, row, None)
                for row in rows
                if freeze(row["_id"]) in stored
            ]
        return findings

    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        """Remove archived copies of documents in their own collection, where they may have changed since."""
        repaired = []
        for row in (yield from find(self.into, {"_id": {"$in": list(keys or ())}}, {"_id": 1})):
            if (yield from transact(partial(self._remove_copy, by_id(row["_id"])))):
                repaired.append(row["_id"])
        return repaired

    def _remove_copy(self, chosen: Raw) -> Plan[bool]:
        # A write, so that a concurrent move of the same document conflicts.
        bumped = yield from update_one(self.target.collection, chosen, {"$inc": {REVISION: 1}})
        return bool(bumped.matched_count) and bool((yield from delete_one(self.into, chosen)).deleted_count)


def _aggregates(rule: Rule) -> bool:
    return isinstance(rule, DerivedRule) and not rule.is_copy
