"""New documents of models that feed others or maintain something themselves."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from treadle.engine import crud
from treadle.engine.alternate_keys import guard_arrivals
from treadle.engine.auto_fields import stamp
from treadle.engine.pipelines import derivation, stamps_of
from treadle.engine.recompute import recompute, refuse_unfit
from treadle.engine.references import compute_formulas, fill_own, require_filled
from treadle.engine.validation import as_written
from treadle.engine.version_upgrade import lowered
from treadle.errors import UsageError
from treadle.graph.batch import Batch
from treadle.graph.changes import Changes
from treadle.graph.derived import DerivedRule
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import Rule
from treadle.graph.write import Write
from treadle.model.bson_types import RESERVED
from treadle.model.document import Document
from treadle.model.encodable import check_batch
from treadle.model.lazy_id import ReservedId, publish_ids, reserve_id
from treadle.plan import (
    Call,
    Plan,
    Raw,
    find,
    insert_many,
    is_inside,
    server_facts,
    transact,
    update_many,
)
from treadle.query.keys import freeze
from treadle.query.paths import put, value_at

D = TypeVar("D", bound=Document)


def refuse_group(entry: ModelEntry[Any], done: str) -> None:
    """Refuse what would make, replace or remove the document of a group."""
    if entry.rules.group is not None:
        source = entry.rules.group.source
        raise UsageError(
            f"{entry.model.__name__} documents cannot be {done}, because Treadle makes and removes them as "
            f"their groups of {source.model.__name__} come and go; write the {source.model.__name__} "
            "documents instead",
            code="rollup-maintained",
        )


class Insert(Write[list[D]]):
    """New documents of one model."""

    entry: ModelEntry[D]

    def __init__(
        self, entry: ModelEntry[D], documents: Sequence[D], given: Mapping[Rule, Sequence[Any]] | None = None
    ) -> None:
        refuse_group(entry, "inserted")
        self.entry = entry
        self.documents = list(documents)
        derived = self._derived = derivation(entry)
        self.reserved: list[ReservedId | None] = []
        # The documents as later reads will show them, if Treadle maintains nothing in them.
        self.as_stored: list[D] = []
        raws: list[Raw] = []
        fresh: list[bool] = []
        for document in self.documents:
            # Nobody refers to an id that nobody can know, unless the documents refer to each other.
            reserved = None if derived.among_themselves else reserve_id(document)
            altered: list[Any] = []
            raw = crud.dump(entry, document, altered)
            if reserved is not None:
                raw["_id"] = reserved.value
            self.as_stored.append(crud.as_stored(entry, document, raw, altered))
            raw.pop(RESERVED, None)
            self.reserved.append(reserved)
            raws.append(raw)
            fresh.append(reserved is not None)
        if len(raws) > 1:
            check_batch(raws, entry.model.__name__)
        self.batch = Batch(raws, fresh, given={rule: list(each) for rule, each in (given or {}).items()})
        if derived.blanks:
            for raw in raws:
                for path, value in derived.blanks.items():
                    put(raw, path, copy.deepcopy(value))
        for rule in derived.prepares:
            self.batch.notes[rule] = [rule.prepare(raw) for raw in raws]

    def command(self) -> Plan[list[Raw]] | None:
        return self._store_alone() if self._is_plain else None

    @property
    def _is_plain(self) -> bool:
        derived = self._derived
        if derived.followed or ((derived.written or derived.copied) and not all(self.batch.fresh)):
            return False
        return all(rule.inserts_alone(self.batch) for rule in derived.inserting)

    @property
    def size(self) -> int:
        return len(self.batch.raws)

    def merges(self, other: Write[Any]) -> bool:
        return isinstance(other, Insert) and other.entry is self.entry

    def merged(self, other: Insert[D]) -> Insert[D]:
        both = copy.copy(self)
        both.documents = [*self.documents, *other.documents]
        both.reserved = [*self.reserved, *other.reserved]
        both.as_stored = [*self.as_stored, *other.as_stored]
        both.batch = self.batch.joined(other.batch)
        return both

    def _store_alone(self) -> Plan[list[Raw]]:
        def store() -> Plan[list[Raw]]:
            return (yield from self._store(Changes(), alone=True))

        if len(self.batch.raws) == 1 or (yield from is_inside()):
            return (yield from store())
        # All or none, whether or not anything follows.
        if (yield from server_facts()).transactions:
            return (yield from transact(store))
        return (yield from self._store(Changes(), alone=True, undo=True))

    def apply(self, changes: Changes) -> Plan[list[Raw]]:
        entry, derived, raws = self.entry, self._derived, self.batch.raws
        gathered: list[tuple[list[Raw], list[DerivedRule]]] = []
        if derived.written:
            new = [raw for raw, fresh in zip(raws, self.batch.fresh, strict=True) if fresh]
            # Nobody knows the id of a fresh one; its name anybody may.
            gathered = [(self.batch.known, derived.written), (new, derived.by_alternate_key)]
        for some, rules in gathered:
            if some and rules:
                yield from self._gather(some, rules)
        raws = yield from self._store(changes)
        for some, rules in gathered:
            if some and (dates := stamps_of(rules)):
                yield from self._date(some, dates)
        if derived.formulas:
            raws = yield from compute_formulas(entry, [raw["_id"] for raw in raws])
            require_filled(entry, [(None, raw) for raw in raws], derived.formulas)
        yield from changes.add(entry, [(None, raw) for raw in raws])
        fresh = zip(raws, self.batch.fresh, strict=True)
        changes.note_new_ids(entry, [raw["_id"] for raw, is_new in fresh if is_new])
        return raws

    def _store(self, changes: Changes, *, alone: bool = False, undo: bool = False) -> Plan[list[Raw]]:
        """Store the documents, with what rules put into them and write beside them.

        Where this is `alone`, no last step of a commit lowers them.
        """
        entry, derived, batch = self.entry, self._derived, self.batch
        batch.order = None
        if derived.touches[True]:
            yield from stamp(entry, batch.raws, new=True)
        states = {}
        for rule in derived.before_insert:
            states[rule] = yield from rule.before_insert(batch, changes)
        if derived.fills:
            yield from fill_own(entry, [(None, raw) for raw in batch.raws])
        raws = batch.order or batch.raws
        if alone:
            raws = yield from lowered(entry, raws)
        with crud.translated(entry.model.__name__, batch.raws, entry):
            if len(raws) == 1:
                yield Call(entry.collection, "insert_one", (raws[0],))
            elif undo:
                yield from crud.insert_or_undo(entry.collection, raws)
            else:
                yield from insert_many(entry.collection, raws)
        for rule in derived.after_insert:
            yield from rule.after_insert(batch, states.get(rule), changes)
        return batch.raws

    def publish(self) -> list[Any]:
        return publish_ids(self.reserved)

    def _gather(self, known: Sequence[Raw], rules: Sequence[DerivedRule]) -> Plan[None]:
        """Fill targets that are inserted after their sources."""
        keys = [raw["_id"] for raw in known]
        yield from guard_arrivals(self.entry, rules, known)
        values = yield from recompute(rules, keys, (yield from server_facts()), documents=known)
        for raw in known:
            refuse_unfit(rules, values[freeze(raw["_id"])])
            for path, value in values[freeze(raw["_id"])].items():
                put(raw, path, value)

    def _date(self, known: Sequence[Raw], dates: Raw) -> Plan[None]:
        """Date the values that were gathered."""
        by_key = {freeze(raw["_id"]): raw for raw in known}
        condition = {"_id": {"$in": [raw["_id"] for raw in known]}}
        yield from update_many(self.entry.collection, condition, [{"$set": dates}])
        for row in (yield from find(self.entry.collection, condition, dict.fromkeys(dates, 1))):
            for path in dates:
                put(by_key[freeze(row["_id"])], path, value_at(row, path))

    def result(self, outcome: list[Raw]) -> list[D]:
        if not self.entry.paths.owned:
            return self.as_stored
        return [as_written(self.entry, copy.deepcopy(raw)) for raw in outcome]
