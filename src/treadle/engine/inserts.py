"""New documents of models that feed others or maintain something themselves."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from treadle.engine import crud
from treadle.engine.fill import compute_formulas, fill_own
from treadle.engine.guards import guard
from treadle.engine.ledger import Ledger
from treadle.engine.recompute import recompute
from treadle.engine.work import Work
from treadle.errors import UsageError
from treadle.graph.change import Batch, Change
from treadle.graph.derived import CopyRule, FormulaRule, LocalRule
from treadle.graph.gather import GatherRule
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry, Rule
from treadle.model.bson_types import RESERVED
from treadle.model.document import Document
from treadle.model.lazy_id import made, promise
from treadle.model.storable import check_batch
from treadle.plan import Plan, Raw, find, insert_many, insert_one, update_many
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze
from treadle.query.paths import put, value_at

D = TypeVar("D", bound=Document)


def refuse_group(entry: Entry[Any], done: str) -> None:
    """Refuse what would make, replace or remove the document of a group."""
    if entry.group is not None:
        source = entry.group.source
        raise UsageError(
            f"{entry.model.__name__} documents cannot be {done}, because Treadle makes and removes them as "
            f"their groups of {source.model.__name__} come and go; write the {source.model.__name__} "
            "documents instead",
            code="rollup-maintained",
        )


class Insert(Work[list[D]]):
    """New documents of one model."""

    entry: Entry[D]

    def __init__(
        self, entry: Entry[D], documents: Sequence[D], given: Mapping[Rule, Sequence[Any]] | None = None
    ) -> None:
        refuse_group(entry, "inserted")
        self.entry = entry
        self.documents = list(documents)
        # Nobody refers to an id that nobody can know, unless the documents refer to each other.
        among_themselves = any(rule.target.collection == entry.collection for rule in entry.feeding(CopyRule))
        self.promises = [None if among_themselves else promise(document) for document in self.documents]
        self.altered: list[list[Any]] = [[] for _ in self.documents]
        raws = [
            crud.dump(entry, document, altered)
            for document, altered in zip(self.documents, self.altered, strict=True)
        ]
        for document, raw, altered, promised in zip(
            self.documents, raws, self.altered, self.promises, strict=True
        ):
            if promised is not None:
                raw["_id"] = promised.value
            crud.as_stored(entry, document, raw, altered)
        if len(raws) > 1:
            check_batch(raws, entry.model.__name__)
        fresh = [promised is not None for promised in self.promises]
        self.batch = Batch(raws, fresh, given={rule: list(each) for rule, each in (given or {}).items()})
        for raw in raws:
            self._blank(raw)
        for rule in entry.answering("prepare"):
            self.batch.notes[rule] = [rule.prepare(raw) for raw in raws]

    def _blank(self, raw: Raw) -> None:
        """Put what nothing feeds yet into a new document."""
        raw.pop(RESERVED, None)
        for rule in self.entry.having(GatherRule):
            for path, value in rule.empty().items():
                put(raw, path, copy.deepcopy(value))
            for stamp in rule.stamps():
                put(raw, stamp, None)
        for formula in self.entry.having(FormulaRule):
            put(raw, formula.path, None)

    @property
    def alone(self) -> bool:
        """Whether one plain command will do."""
        entry = self.entry
        known = not all(self.batch.fresh)
        return not (
            bool(entry.feeding(GatherRule))
            or bool(entry.having(FormulaRule))
            or bool(entry.having(LocalRule))
            or any(rule.guards_source for rule in entry.having(CopyRule))
            or (known and bool([*entry.having(GatherRule, "write"), *entry.feeding(CopyRule)]))
            or not all(rule.inserts_alone(self.batch) for rule in entry.answering("inserts_alone"))
        )

    @property
    def size(self) -> int:
        return len(self.batch.raws)

    def joins(self, other: Work[Any]) -> bool:
        return isinstance(other, Insert) and other.entry is self.entry

    def joined(self, other: Insert[D]) -> Insert[D]:
        both = copy.copy(self)
        both.documents = [*self.documents, *other.documents]
        both.promises = [*self.promises, *other.promises]
        both.altered = [*self.altered, *other.altered]
        both.batch = self.batch.joined(other.batch)
        return both

    def direct(self, graph: Graph, server: Capabilities) -> Plan[list[Raw]]:
        return (yield from self.body(graph, server, Ledger()))

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[list[Raw]]:
        entry, batch = self.entry, self.batch
        raws = batch.raws
        batch.order = None
        yield from ledger.note_new(entry, [raw["_id"] for raw in raws])
        yield from self._gather_existing(server)
        states = {}
        for rule in entry.answering("before_insert"):
            states[rule] = yield from rule.before_insert(batch, ledger)
        yield from fill_own(entry, [(None, raw) for raw in raws])
        with crud.translated(entry.model.__name__, raws, entry):
            if len(raws) == 1:
                yield from insert_one(entry.collection, raws[0])
            else:
                yield from insert_many(entry.collection, batch.order or raws)
        for rule in entry.answering("after_insert"):
            yield from rule.after_insert(batch, states.get(rule), ledger)
        yield from self._stamp()
        if entry.having(FormulaRule):
            raws = yield from compute_formulas(entry, [raw["_id"] for raw in raws])
        for raw, fresh in zip(raws, batch.fresh, strict=True):
            ledger.add(Change(entry.collection, raw["_id"], None, raw, fresh))
        return raws

    def _stamp(self) -> Plan[None]:
        """Date the values of targets that were filled from their sources."""
        gathers = self.entry.having(GatherRule, "write")
        stamps = {stamp: "$$NOW" for rule in gathers for stamp in rule.stamps()}
        known = {freeze(raw["_id"]): raw for raw in self.batch.known}
        if not stamps or not known:
            return
        condition = {"_id": {"$in": [raw["_id"] for raw in known.values()]}}
        yield from update_many(self.entry.collection, condition, [{"$set": stamps}])
        for dated in (yield from find(self.entry.collection, condition, dict.fromkeys(stamps, 1))):
            for stamp in stamps:
                put(known[freeze(dated["_id"])], stamp, value_at(dated, stamp))

    def exposed(self) -> list[Any]:
        return [each.value for each in self.promises if each is not None and each.known]

    def _gather_existing(self, server: Capabilities) -> Plan[None]:
        """Fill a target that is inserted after its sources."""
        entry, known = self.entry, self.batch.known
        gathers = entry.having(GatherRule, "write")
        if not known or not gathers:
            return
        keys = [raw["_id"] for raw in known]
        yield from guard(entry.collection, keys)
        values = yield from recompute(gathers, keys, server.version)
        for raw in known:
            for path, value in values[freeze(raw["_id"])].items():
                put(raw, path, value)

    def result(self, outcome: list[Raw]) -> list[D]:
        return [
            self._as_stored(document, raw, altered)
            for document, raw, altered in zip(self.documents, outcome, self.altered, strict=True)
        ]

    def _as_stored(self, document: D, raw: Raw, altered: list[Any]) -> D:
        made(document.__dict__["id"])
        document.__pydantic_fields_set__.add("id")
        if not altered and not self.entry.protected:
            return document
        return self.entry.codec.load(copy.deepcopy(raw))
