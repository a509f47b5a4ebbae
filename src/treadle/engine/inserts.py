"""New documents: plain, or of models that feed others or maintain something themselves."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from itertools import compress
from operator import not_
from typing import Any, TypeVar

from pymongo.errors import BulkWriteError, WriteError

from treadle.engine.aggregation import fill_aggregates
from treadle.engine.documents import (
    as_stored,
    as_written,
    dump,
    dump_all,
    hooks_of,
    refuse_group,
    run_after,
    run_before,
    stamp,
    translated,
)
from treadle.engine.pipelines import derivation, stamps_of
from treadle.engine.references import compute_formulas, fill_own, require_filled
from treadle.engine.version_upgrade import lowered
from treadle.errors import UsageError
from treadle.graph.batch import Batch
from treadle.graph.changes import Changes
from treadle.graph.derived import DerivedRule
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import Rule
from treadle.graph.write import Write
from treadle.model.bson_types import RESERVED, check_batch, require_encodable
from treadle.model.document import Document
from treadle.model.lazy_id import ReservedId, reserve_id
from treadle.plan import (
    Call,
    Plan,
    Raw,
    delete_many,
    find,
    insert_many,
    is_inside,
    server_facts,
    transact,
    update_many,
)
from treadle.plan.server_errors import refusals, translate
from treadle.query.keys import freeze
from treadle.query.paths import put, value_at

D = TypeVar("D", bound=Document)


class Insert(Write[list[D]]):
    """New documents of one model; all are stored, or none."""

    entry: ModelEntry[D]

    def __init__(
        self, entry: ModelEntry[D], documents: Sequence[D], given: Mapping[Rule, Sequence[Any]] | None = None
    ) -> None:
        refuse_group(entry, "inserted")
        self.entry = entry
        self.documents = list(documents)
        derived = self._derived = derivation(entry)
        # No document refers to an id that is not visible yet, unless these refer to each other.
        reserves = not (entry.effects.is_plain or derived.among_themselves)
        self.reserved_ids: list[ReservedId | None] = [
            reserve_id(document) if reserves else None for document in self.documents
        ]
        self.raws, self._as_stored = self._encode()
        # Per document whether nothing can refer to it yet.
        self._fresh = [reserved is not None for reserved in self.reserved_ids]
        # By rule and frozen id what a caller passed along.
        self._given: dict[Rule, dict[Any, Any]] = {}
        for rule, passed in (given or {}).items():
            self._given[rule] = {
                freeze(raw["_id"]): each for raw, each in zip(self.raws, passed, strict=True)
            }

    def _encode(self) -> tuple[list[Raw], list[D]]:
        """The documents to store, and as a later read will give them if Treadle maintains nothing in them."""
        entry, altered = self.entry, list[Any]()
        raws = dump_all(entry, self.documents, altered)
        for raw, reserved in zip(raws, self.reserved_ids, strict=True):
            if reserved is not None:
                raw["_id"] = reserved.value
        pairs = zip(self.documents, raws, strict=True)
        stored = [as_stored(entry, document, raw, altered) for document, raw in pairs]
        if len(raws) > 1:
            check_batch(raws, entry.model.__name__)
        if not entry.effects.is_plain:
            self._blank(raws)
        return raws, stored

    def _blank(self, raws: list[Raw]) -> None:
        """Set what new documents hold as long as they have no sources, whatever their caller passed."""
        for raw in raws:
            raw.pop(RESERVED, None)
            for path, value in self._derived.blanks.items():
                put(raw, path, copy.deepcopy(value))

    def command(self) -> Plan[list[Raw]] | None:
        derived = self._derived
        if derived.followed or (derived.is_referred_to and not all(self._fresh)):
            return None
        if derived.acting:
            batch = self._batch(self.raws)
            if any(rule.needs_commit(batch) for rule in derived.acting):
                return None
        return self._store_alone()

    def _batch(self, raws: Sequence[Raw]) -> Batch:
        return Batch([(None, raw) for raw in raws], self._fresh, self._given)

    @property
    def targets(self) -> frozenset[Hashable]:
        return frozenset(
            (collection, freeze(each))
            for collection, key in self._derived.references
            for raw in self.raws
            for each in key.of(raw)
        )

    # -- several as one ------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return len(self.raws)

    def merges(self, other: Write[Any]) -> bool:
        return isinstance(other, Insert) and other.entry is self.entry

    def merged(self, other: Insert[D]) -> Insert[D]:
        both = copy.copy(self)
        both.raws = [*self.raws, *other.raws]
        both._fresh = [*self._fresh, *other._fresh]
        both._given = {
            rule: {**self._given.get(rule, {}), **other._given.get(rule, {})}
            for rule in {**self._given, **other._given}
        }
        return both

    # -- storing -------------------------------------------------------------------------------

    def _store_alone(self) -> Plan[list[Raw]]:
        def store(changes: Changes) -> Plan[list[Raw]]:
            return self._store(self._for_attempt(), changes, alone=True)

        if len(self.raws) == 1 or (yield from is_inside()):
            return (yield from store(Changes()))
        if (yield from server_facts()).transactions:
            return (yield from transact(lambda: store(Changes())))
        return (yield from store(Changes(transactional=False)))

    def _for_attempt(self) -> list[Raw]:
        """The documents for one attempt, which rules may change."""
        return copy.deepcopy(self.raws) if self._derived.acting else self.raws

    def apply(self, changes: Changes) -> Plan[list[Raw]]:
        entry, derived, raws = self.entry, self._derived, self._for_attempt()
        gathered = self._gathering(raws)
        for some, rules in gathered:
            yield from fill_aggregates(entry, rules, some)
        yield from self._store(raws, changes)
        for some, rules in gathered:
            if dates := stamps_of(rules):
                yield from self._date(some, dates)
        if derived.formulas:
            raws = yield from compute_formulas(entry, [raw["_id"] for raw in raws])
            require_filled(entry, [(None, raw) for raw in raws], derived.formulas)
        yield from changes.add(entry, [(None, raw) for raw in raws])
        changes.note_new_ids(entry, [raw["_id"] for raw in compress(raws, self._fresh)])
        return raws

    def _gathering(self, raws: list[Raw]) -> list[tuple[list[Raw], list[DerivedRule]]]:
        """The documents that may have sources already, each with the rules that gather these."""
        written, by_alternate_key = self._derived.written, self._derived.by_alternate_key
        if not written:
            return []
        fresh = list(compress(raws, self._fresh))
        known = list(compress(raws, map(not_, self._fresh)))
        # No document refers to a fresh id; to the alternate key of a new document any may.
        gathered = [(known, written), (fresh, by_alternate_key)]
        return [(some, rules) for some, rules in gathered if some and rules]

    def _store(self, raws: list[Raw], changes: Changes, *, alone: bool = False) -> Plan[list[Raw]]:
        """Store the documents, with what rules put into them and write beside them.

        Where this is `alone`, no last step of a commit lowers them.
        """
        entry, batch = self.entry, self._batch(raws)
        hooks = hooks_of(entry, batch)
        yield from stamp(entry, raws, new=True)
        yield from run_before(hooks, changes)
        if self._derived.fills:
            yield from fill_own(entry, [(None, raw) for raw in raws])
        stored = batch.order or raws
        if alone and entry.versions.writes_older:
            stored = yield from lowered(entry, stored)
        with translated(entry.model.__name__, raws, entry):
            if len(stored) == 1:
                yield Call(entry.collection, "insert_one", (stored[0],), ids=(stored[0]["_id"],))
            elif changes.transactional:
                yield from insert_many(entry.collection, stored)
            else:
                yield from _insert_or_undo(entry.collection, stored)
        yield from run_after(hooks, changes)
        return raws

    def _date(self, raws: Sequence[Raw], dates: Raw) -> Plan[None]:
        """Date the values that were gathered."""
        by_key = {freeze(raw["_id"]): raw for raw in raws}
        condition = {"_id": {"$in": [raw["_id"] for raw in raws]}}
        yield from update_many(self.entry.collection, condition, [{"$set": dates}])
        for row in (yield from find(self.entry.collection, condition, dict.fromkeys(dates, 1))):
            for path in dates:
                put(by_key[freeze(row["_id"])], path, value_at(row, path))

    # -- afterwards ----------------------------------------------------------------------------

    def result(self, outcome: list[Raw]) -> list[D]:
        if not self.entry.paths.owned:
            return self._as_stored
        return [as_written(self.entry, copy.deepcopy(raw)) for raw in outcome]


def _insert_or_undo(collection: str, raws: Sequence[Raw]) -> Plan[None]:
    """Store documents in order; where one is refused, those before it are deleted again."""
    try:
        yield Call(collection, "insert_many", (raws,))
    except BulkWriteError as error:
        at = next((each["index"] for each in refusals(error)), 0)
        if at:
            yield from delete_many(collection, {"_id": {"$in": [raw["_id"] for raw in raws[:at]]}})
        raise


def insert_unordered(
    entry: ModelEntry[D], documents: Sequence[D]
) -> Plan[tuple[list[D], dict[int, Exception]]]:
    """Store those documents of a plain model that are accepted, in one command.

    Returns these, and by position why the others were refused.
    """
    refused, stored, raws = dict[int, Exception](), dict[int, D](), list[Raw]()
    for position, document in enumerate(documents):
        altered: list[Any] = []
        try:
            raw = dump(entry, document, altered)
            require_encodable(raw, entry.model.__name__)
            stored[position] = as_stored(entry, document, raw, altered)
            raws.append(raw)
        except UsageError as error:
            refused[position] = error
    positions = list(stored)
    for at, refusal in (yield from _store_accepted(entry, raws)).items():
        refused[positions[at]] = refusal
    return [each for position, each in stored.items() if position not in refused], refused


def _store_accepted(entry: ModelEntry, raws: list[Raw]) -> Plan[dict[int, Exception]]:
    """Store documents in any order. Returns by position why the server refused some."""
    if not raws:
        return {}
    try:
        documents = yield from lowered(entry, raws)
        yield Call(entry.collection, "insert_many", (documents,), {"ordered": False})
    except BulkWriteError as error:
        if (error.details or {}).get("writeConcernErrors"):
            raise
        errors = {each["index"]: each for each in refusals(error)}
        return {at: _refusal(entry, each) for at, each in errors.items()}
    return {}


def _refusal(entry: ModelEntry, details: Raw) -> Exception:
    error = WriteError(details.get("errmsg", ""), details.get("code"), details)
    return translate(error, entry.model.__name__)
