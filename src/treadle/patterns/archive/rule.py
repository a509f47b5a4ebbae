"""Archive: documents of some age move to another collection, whole, and can be brought back.

What it keeps right: each document is in one of the two places at every
moment, for every reader. A move is one transaction, so that an update which
races with it is kept. Derived values go on counting what is archived
(`counted=True`): whoever recomputes them reads both places. How documents
move is in `moves.py`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from pymongo import ASCENDING, IndexModel
from pymongo.errors import OperationFailure

from treadle.engine.indexes import declared_indexes, key_pairs, plainly
from treadle.engine.protocol import WriteProtocol
from treadle.engine.recompute import MERGED
from treadle.errors import DeclarationError
from treadle.graph.binding import check_choice
from treadle.graph.calls import ArrayRule, CounterRule, HierarchyRule, PastRule
from treadle.graph.change import Batch, Change, Changes
from treadle.graph.gather import GatherRule
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Finding, Report
from treadle.graph.pattern import TRANSACTIONS, Elsewhere, Entry, Models, Pattern, Place, Rule
from treadle.patterns.archive import distant, inspection, moves
from treadle.patterns.archive.places import ArchivePlaces
from treadle.plan import Call, Foreign, Plan, Raw, find_one
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import DUPLICATE_KEY, DuplicateKey, is_refusal
from treadle.query.keys import freeze
from treadle.query.paths import value_at


@dataclass(frozen=True)
class Archive(Pattern):
    """Move documents to the collection `into` when the date in `by` is at least `after` old.

    `into="archive.sales"` is the collection `sales` of another database of
    the same server, or with `client=` of another cluster.
    """

    pattern: ClassVar[str] = "archive"
    keyword: ClassVar[str] = "archive"
    beside: ClassVar[bool] = True

    by: str
    after: dt.timedelta
    into: str
    counted: bool = True
    archived: Literal["refuse", "restore"] = "refuse"
    client: Any = dataclasses.field(default=None, repr=False)

    def bind(self, place: Place, graph: Models) -> Rule:
        check_choice(place, "archived", self.archived, ("refuse", "restore"))
        if not (isinstance(self.after, dt.timedelta) and self.after >= dt.timedelta(0)):
            raise DeclarationError(
                f"{place.label} has after={self.after!r}; it takes a timedelta", code="pattern-keyword"
            )
        if not isinstance(self.into, str) or not all(self.into.split(".", 1)):
            raise DeclarationError(
                f"{place.label} has into={self.into!r}; it takes the name of a collection, or "
                "'database.collection'",
                code="pattern-keyword",
            )
        entry = place.entry
        if entry.above:
            raise DeclarationError(
                f"{place.label} is one kind of {entry.above[0].model.__name__}; the kinds of one collection "
                "are archived together: declare archive= on that",
                code="archive-declaration",
            )
        unique = [each for each in declared_indexes(entry) if each.document.get("unique")]
        return (UniqueArchive if unique else ArchiveRule)(place, graph, self, unique)


class ArchiveRule(ArchivePlaces):
    """An archive, as the rest of Treadle asks for it."""

    needs = TRANSACTIONS
    # By which a reader of both places sees one moment.
    uses = frozenset({"snapshots"})
    due_work = "archive old documents"

    # -- what it is about --------------------------------------------------------------------------

    def watches(self) -> Mapping[str, set[str] | None]:
        return {self.target.collection: set()}

    def elsewhere(self) -> Elsewhere:
        if not self.distant:
            return Elsewhere(self.into, self.declared.counted)
        counted = self.declared.counted
        seen = partial(distant.seen, self) if counted else None
        return Elsewhere(self.into, counted, partial(distant.hidden, self), seen)

    def indexes(self) -> list[tuple[Entry[Any], IndexModel]]:
        due = [(self.target, IndexModel([(self.by, ASCENDING)]))]
        return [*due, *((self.side, each) for each in self._needed_indexes() if self.side is not None)]

    def _needed_indexes(self) -> list[IndexModel]:
        """By which filters, and derived values, find what is archived."""
        others = (ArchiveRule,) if self.declared.counted else (ArchiveRule, GatherRule)
        return [
            index
            for rule in self.graph.rules
            if not isinstance(rule, others)
            for source, index in rule.indexes()
            if source.collection == self.target.collection
        ]

    def before_setup(
        self, existing: Mapping[str, Raw], missing: Mapping[str, list[IndexModel]]
    ) -> Plan[None]:
        # Several rules may ask for the same one.
        wanted = {each.document["name"]: each for each in [*self._needed_indexes(), *self.own_indexes()]}
        if not isinstance(self.into, Foreign) or not wanted:
            return
        try:
            yield Call(self.into, "create_indexes", (list(wanted.values()),))
        except OperationFailure as error:
            if not is_refusal(error):
                raise
            # How an index is stored is the other server's to choose, or was chosen when it was made.
            yield Call(self.into, "create_indexes", ([plainly(each) for each in wanted.values()],))

    def check(self, graph: Models) -> None:
        entry, label = self.target, self.place.label
        if entry.layout is not None:
            if self.distant:
                raise DeclarationError(
                    f"{label} is stored in buckets and has client=; a bucket that moved can be "
                    "opened anew here by a late reading, which only one cluster can see: leave client= out",
                    code="archive-declaration",
                )
            # What is stored together moves together, when the last of it is old enough.
            aged = entry.layout.aged_by(self.by)
            if aged is None:
                raise DeclarationError(
                    f"{label} archives by {self.declared.by!r}; what is stored together is archived by the "
                    "time of its readings",
                    code="archive-declaration",
                )
            self.by = aged
        beside = [rule for each in entry.related for rule in each.rules]
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
                    "the model then, but its history goes on: leave counted= out",
                    code="archive-declaration",
                )
        if entry.group is not None:
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
        if self.declared.counted:
            self._check_counting(graph)

    def _check_counting(self, graph: Models) -> None:
        """Refuse derived values that cannot be computed from two collections."""
        for rule in graph.rules:
            if not isinstance(rule, GatherRule) or rule.source.collection != self.target.collection:
                continue
            operators = {next(iter(each)) for each in rule.accumulators().values()}
            across = isinstance(self.into, Foreign) and rule.target.group is not None
            if across or operators - MERGED.keys():
                raise DeclarationError(
                    f"{rule.place.label} cannot be computed over {self.target.collection} and "
                    f"{self.into} together; archive into a collection of the same database, or with "
                    "counted=False",
                    code="archive-counted",
                )

    # -- writes -----------------------------------------------------------------------------------

    def inserts_alone(self, batch: Batch) -> bool:
        return all(batch.fresh)

    def before_insert(self, batch: Batch, changes: Changes) -> Plan[None]:
        known = [raw["_id"] for raw in batch.known]
        if known:
            if self.distant:
                gone = set(map(freeze, (yield from distant.hidden(self))))
                known = [key for key in known if freeze(key) not in gone]
            other = yield from find_one(self.into, {"_id": {"$in": known}}, {"_id": 1})
            if other is not None:
                raise self.collision("_id_", {"_id": other["_id"]})

    def collision(self, index: str, values: Raw) -> DuplicateKey:
        """The error of a unique index that would refuse the document, were both in one place."""
        name, kept = self.target.model.__name__, f"collection: {self.into} index: {index}"
        return DuplicateKey(
            name,
            {
                "code": DUPLICATE_KEY,
                "errmsg": f"E11000 duplicate key error {kept} dup key: {values}",
                "keyPattern": dict.fromkeys(values, 1),
                "keyValue": values,
            },
            advice=f"the other {name} is archived in {self.into}; restore that one, or choose another value",
        )

    def bring_back(self, filter: Raw) -> Plan[bool]:
        return moves.bring_back(self, filter)

    # -- calls --------------------------------------------------------------------------------------

    def archive(self, now: Any, report: Report | None, dry_run: bool) -> Plan[int]:
        return moves.archive(self, now, report, dry_run)

    def restore(self, protocol: WriteProtocol, id: Any) -> Plan[Any]:
        return moves.restore(self, id)

    def recover(
        self, graph: Graph, server: Capabilities, owner: str, is_dead: Callable[[str], bool]
    ) -> Plan[int]:
        """Undo the moves to another cluster that a crash left half done."""
        return (yield from distant.recover(self)) if self.distant else 0

    def run_due(self, server: Capabilities, now: dt.datetime, dry_run: bool) -> Plan[int]:
        return moves.archive(self, now, None, dry_run)

    # -- proof and repair ----------------------------------------------------------------------------

    def examine_all(self, server: Capabilities, report: Report | None) -> Plan[list[Finding]]:
        return inspection.doubled(self)

    def mend(self, graph: Graph, server: Capabilities, keys: Sequence[Any]) -> Plan[list[Any]]:
        return inspection.mend(self, keys)


class UniqueArchive(ArchiveRule):
    """The same for a model with unique indexes, which hold across both places."""

    def watches(self) -> Mapping[str, set[str] | None]:
        paths = {path for index in self.unique for path, _ in key_pairs(index.document)}
        return {self.target.collection: paths}

    def record(self, changes: Sequence[Change], ledger: Changes) -> Plan[None]:
        conditions = []
        for change in changes:
            for index in self.unique:
                values = self._values(index, change.after)
                if values is not None and values != self._values(index, change.before):
                    condition = {
                        path: {"$in": value} if isinstance(value, list) else {"$eq": value}
                        for path, value in values.items()
                    }
                    conditions.append((index, condition))
        if not conditions:
            return
        others: Raw = {}
        if self.distant:
            # A copy that is not archived, or that comes back just now, is no other document.
            unseen = yield from distant.hidden(self)
            others = {"_id": {"$nin": [*unseen, *(change.id for change in changes)]}}
        either = {"$or": [each for _, each in conditions], **others}
        if (yield from find_one(self.into, either, {"_id": 1})) is None:
            return
        for index, condition in conditions:
            other = yield from find_one(self.into, {**condition, **others})
            if other is not None:
                raise self.collision(
                    index.document["name"], {path: value_at(other, path) for path in condition}
                )

    def _values(self, index: IndexModel, document: Raw | None) -> Raw | None:
        """What a document has of a unique index; None where the index does not hold it."""
        if not document:
            return None
        values = {path: value_at(document, path) for path, _ in key_pairs(index.document)}
        partial = "partialFilterExpression" in index.document or index.document.get("sparse")
        return None if partial and any(value is None for value in values.values()) else values
