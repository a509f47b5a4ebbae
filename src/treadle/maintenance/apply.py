"""Bringing right what the worker's events made doubtful, in transactions.

Everything is recomputed from the sources as they are inside the transaction.
A document that cannot be written (too large, or refused by a validator) is
found by halving, set aside, and the others go on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pymongo import UpdateOne
from pymongo.errors import OperationFailure

from treadle.canonical import same
from treadle.change import Change
from treadle.deletes import delete_documents, detach
from treadle.errors import DataError, UsageError
from treadle.gather import GatherRule, freeze
from treadle.maintenance import intents
from treadle.maintenance.events import Doubt, Mark
from treadle.maintenance.fill import fill_references
from treadle.maintenance.groups import arrange
from treadle.maintenance.ledger import Ledger
from treadle.maintenance.react import (
    FAN_OUT_MAX,
    UNBOUNDED,
    FanOut,
    copy_to,
    feeds_beyond,
    react,
    stamps_of,
    update_pipeline,
)
from treadle.maintenance.recompute import recompute
from treadle.maintenance.standalone import forget_stale_cards, top
from treadle.maintenance.verify import formulas_now
from treadle.paths import outermost, put, value_at
from treadle.patterns.extended_reference import ReferenceRule
from treadle.plan import Plan, Raw, bulk_write, by_id, find, find_one, transact
from treadle.topology import Topology

if TYPE_CHECKING:
    from treadle.graph import Entry, Graph

# Documents that one transaction recomputes, and deletions that it follows.
TARGETS_MAX = 500
COPIES_MAX = 50
GONE_MAX = 1000

Finish = Callable[[], Plan[None]]


@dataclass(frozen=True, slots=True)
class Targets:
    """Documents of one model whose own values are doubtful."""

    entry: Entry[Any]
    marks: Sequence[Mark]

    def __len__(self) -> int:
        return len(self.marks)

    def part(self, start: int, end: int) -> Targets:
        return Targets(self.entry, self.marks[start:end])

    def bring_right(self, graph: Graph, server: Topology, ledger: Ledger) -> Plan[None]:
        yield from recompute_targets(server, self.entry, self.marks, ledger)

    def set_aside(self, graph: Graph, server: Topology, error: Exception) -> Plan[None]:
        entry = self.entry
        yield from intents.set_aside(entry.model.__name__, entry.collection, self.marks[0].key, error)


@dataclass(frozen=True, slots=True)
class Copies:
    """Sources whose copies must follow them."""

    rule: ReferenceRule
    keys: Sequence[Any]

    def __len__(self) -> int:
        # Each may have many copies.
        return len(self.keys) * (TARGETS_MAX // COPIES_MAX)

    def part(self, start: int, end: int) -> Copies:
        return Copies(self.rule, self.keys[start:end])

    def bring_right(self, graph: Graph, server: Topology, ledger: Ledger) -> Plan[None]:
        rule = self.rule
        followed = feeds_beyond(rule.target, rule.level)
        sources = yield from find(rule.source.collection, {"_id": {"$in": list(self.keys)}})
        for source in sources:
            yield from copy_to(rule, source["_id"], source, {}, followed, ledger)

    def set_aside(self, graph: Graph, server: Topology, error: Exception) -> Plan[None]:
        # One of the copies cannot be written: all but that one.
        yield from copy_widely(graph, server, self.rule, self.keys[0])


def apply(graph: Graph, server: Topology, doubt: Doubt, finish: Finish) -> Plan[int]:
    """Recompute all that is doubtful; `finish` belongs to the last transaction.

    How many documents and sources were looked at.
    """
    for rule, gone in doubt.gone.items():
        for key in gone.values():
            yield from _follow_deletion(graph, server, rule, key, doubt)
    units: list[Targets | Copies] = []
    for rule, keys in doubt.copies.items():
        few = []
        for key in keys.values():
            referring = {rule.reference_path: {"$eq": key}}
            if (yield from find(rule.target.collection, referring, {"_id": 1}, skip=FAN_OUT_MAX, limit=1)):
                yield from copy_widely(graph, server, rule, key)
            else:
                few.append(key)
        units.extend(Copies(rule, few[at : at + COPIES_MAX]) for at in range(0, len(few), COPIES_MAX))
    for entry, marks in doubt.targets.items():
        listed = list(marks.values())
        units.extend(
            Targets(entry, listed[at : at + TARGETS_MAX]) for at in range(0, len(listed), TARGETS_MAX)
        )
    packed = _pack(units)
    for number, together in enumerate(packed):
        last = number == len(packed) - 1
        yield from _transaction(graph, server, together, finish if last else None)
    if not packed:
        yield from transact(finish)
    return sum(len(unit) for unit in units)


def _pack(units: Sequence[Targets | Copies]) -> list[list[Targets | Copies]]:
    packed: list[list[Targets | Copies]] = []
    room = 0
    for unit in units:
        if len(unit) > room or not packed:
            packed.append([])
            room = TARGETS_MAX
        packed[-1].append(unit)
        room -= len(unit)
    return packed


def _transaction(
    graph: Graph, server: Topology, units: Sequence[Targets | Copies], finish: Finish | None
) -> Plan[None]:
    def attempt() -> Plan[None]:
        ledger = Ledger()
        for unit in units:
            yield from unit.bring_right(graph, server, ledger)
        yield from react(graph, server, ledger, copies_max=UNBOUNDED)
        if finish is not None:
            yield from finish()

    try:
        yield from transact(attempt)
    except (OperationFailure, DataError) as error:
        if isinstance(error, OperationFailure) and not intents.is_about_one_document(error):
            raise
        for unit in units:
            yield from _around_poison(graph, server, unit)
        if finish is not None:
            yield from transact(finish)


def _around_poison(graph: Graph, server: Topology, unit: Targets | Copies) -> Plan[None]:
    """Halve a unit until the document that stops it stands alone."""

    def attempt() -> Plan[None]:
        ledger = Ledger()
        yield from unit.bring_right(graph, server, ledger)
        yield from react(graph, server, ledger, copies_max=UNBOUNDED)

    items = len(unit.marks) if isinstance(unit, Targets) else len(unit.keys)
    try:
        yield from transact(attempt)
    except (OperationFailure, DataError) as error:
        if isinstance(error, OperationFailure) and not intents.is_about_one_document(error):
            raise
        if items == 1:
            yield from unit.set_aside(graph, server, error)
            return
        middle = items // 2
        yield from _around_poison(graph, server, unit.part(0, middle))
        yield from _around_poison(graph, server, unit.part(middle, items))


def copy_widely(graph: Graph, server: Topology, rule: ReferenceRule, key: Any) -> Plan[None]:
    """Make the copies of one source in chunks, around any that cannot be made."""
    yield from intents.finish(graph, server, FanOut(rule, key), {"after": None, "n": -1})


# -- targets -----------------------------------------------------------------------------------


def recompute_targets(
    server: Topology, entry: Entry[Any], marks: Sequence[Mark], ledger: Ledger
) -> Plan[None]:
    """Recompute the stream-maintained values of these documents.

    One whose sources changed is really written even if its value stays: a
    slower recomputation of `repair` must meet it. One that was only touched
    itself is written if something is wrong, so that the worker does not
    follow its own writes for ever.
    """
    gathers = [rule for rule in entry.gathers if rule.maintain == "stream"]
    references = [rule for rule in entry.references if rule.maintain == "stream"]
    formulas = [rule for rule in entry.formulas if rule.maintain == "stream"]
    paths = {path for rule in gathers for path in rule.empty()} | {top(rule) for rule in references}
    whole = bool(references or entry.feeds)
    shown = None if whole else dict.fromkeys(outermost([*paths, *(rule.path for rule in formulas), "_id"]), 1)
    by_key = {freeze(mark.key): mark for mark in marks}
    keys = [mark.key for mark in marks]
    made: set[Any] = set()
    if entry.group is not None:
        arranged = yield from arrange(server, entry, keys, ledger)
        made = {freeze(each) for each in arranged.made}
        shown = {**shown, **entry.key_projection()} if shown is not None else None
    documents = yield from find(entry.collection, entry.at_any(keys), shown)
    if not documents:
        return
    present = [each["_id"] for each in documents]
    if entry.feeds:
        yield from ledger.note_before(entry, [each for each in present if freeze(each) not in made])
    wanted = yield from _wanted(server, entry, documents, by_key, gathers, references)
    stale = (yield from formulas_now(entry, present)) if formulas else {}
    operations = []
    for document, right in zip(documents, wanted, strict=True):
        sets = {}
        for path in outermost(paths):
            value = value_at(right, path.split("."))
            if not same(value_at(document, path.split(".")), value):
                sets[path] = {"$literal": value}
        sourced = by_key[freeze(entry.key_of(document))].sourced
        row = stale.get(freeze(document["_id"]))
        formula_differs = row is not None and any(
            not same(value_at(document, rule.path.split(".")), row.get(f"f{number}"))
            for number, rule in enumerate(entry.formulas)
            if rule in formulas
        )
        if sets or sourced or formula_differs:
            stamps = stamps_of(gathers) if sets or sourced else {}
            pipeline = update_pipeline(entry, {**sets, **stamps}, {})
            operations.append(UpdateOne(by_id(document["_id"]), pipeline))
    if not operations:
        return
    yield from bulk_write(entry.collection, operations, ordered=False)
    if entry.feeds:
        afters = yield from find(entry.collection, {"_id": {"$in": present}})
        found = {freeze(each["_id"]): each for each in afters}
        for document in documents:
            frozen = freeze(document["_id"])
            before = None if frozen in made else document
            ledger.add(Change(entry.collection, document["_id"], before, found[frozen]))


def _wanted(
    server: Topology,
    entry: Entry[Any],
    documents: Sequence[Raw],
    marks: dict[Any, Mark],
    gathers: Sequence[GatherRule],
    references: Sequence[ReferenceRule],
) -> Plan[list[Raw]]:
    """The documents as they should be."""
    if not references:
        wanted: list[Raw] = [{"_id": each["_id"]} for each in documents]
    else:
        wanted = [copy.deepcopy(each) for each in documents]
    keys = [entry.key_of(each) for each in documents]
    values = yield from recompute(gathers, keys, server.version)
    for key, right in zip(keys, wanted, strict=True):
        for path, value in values[freeze(key)].items():
            put(right, path.split("."), value)
    if references:
        pairs: list[tuple[Raw | None, Raw]] = []
        for document, right in zip(documents, wanted, strict=True):
            mark = marks[freeze(entry.key_of(document))]
            before = copy.deepcopy(document)
            for rule in references:
                if mark.cards is not None:
                    forget_stale_cards(rule, before, mark.cards)
                elif mark.renewed and rule.kept:
                    for container, _ in rule.references(before):
                        container.pop(rule.name, None)
            pairs.append((before, right))
        yield from fill_references(entry, pairs, look_only=True, rules=references)
    return wanted


# -- deleted sources -------------------------------------------------------------------------------


def _follow_deletion(
    graph: Graph, server: Topology, rule: ReferenceRule, key: Any, doubt: Doubt
) -> Plan[None]:
    """Do as `on_delete` says to what refers to a source that is gone, a thousand at a time."""
    while True:

        def attempt() -> Plan[list[Raw]]:
            if (yield from find_one(rule.source.collection, by_id(key), {"_id": 1})) is not None:
                # It came back; its insertion is another event.
                return []
            condition = {rule.reference_path: {"$eq": key}}
            referring = yield from find(rule.target.collection, condition, limit=GONE_MAX)
            ledger = Ledger()
            if rule.on_delete == "restrict":
                return referring
            if rule.on_delete == "cascade" and not rule.place.in_array:
                yield from delete_documents(rule.target, referring, ledger)
            else:
                yield from detach(rule, referring, [key], ledger)
            yield from react(graph, server, ledger, copies_max=UNBOUNDED)
            return referring

        try:
            done = yield from transact(attempt)
        except (DataError, UsageError) as error:
            # Another reference forbids it: nothing was changed, and somebody must decide.
            yield from intents.set_aside(rule.place.label, rule.source.collection, key, error)
            return
        if rule.on_delete == "restrict":
            # A writer that does not use Treadle deleted it all the same; the copies lose their source.
            for each in done:
                doubt.mark(rule.target, each["_id"], sourced=True)
            return
        if len(done) < GONE_MAX:
            return
