"""Bringing right what the worker's events made doubtful, in transactions.

Everything is recomputed from the sources as they are inside the transaction.
A document that cannot be written (too large, or refused by a validator) is
found by halving, set aside, and the others go on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bson.errors import BSONError
from pymongo import UpdateOne
from pymongo.errors import OperationFailure

from treadle.engine import intents
from treadle.engine.contention import Contended, attempting, pieces
from treadle.engine.deletes import delete_documents, detach
from treadle.engine.groups import arrange
from treadle.engine.ledger import Ledger
from treadle.engine.react import UNBOUNDED, FanOut, copy_to, feeds_beyond, react
from treadle.engine.recompute import Recomputation
from treadle.engine.set_aside import set_aside
from treadle.errors import DataError, UsageError
from treadle.graph.change import Change
from treadle.graph.derived import CopyRule
from treadle.graph.gather import freeze
from treadle.graph.graph import Graph
from treadle.graph.pattern import REVISION, Entry
from treadle.plan import Plan, Raw, bulk_write, by_id, find, find_one, transact, update_many
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import is_about_one_document
from treadle.query.comparison import same
from treadle.query.paths import outermost, value_at
from treadle.upkeep.events import Doubt, Mark

# Documents that one transaction recomputes, and deletions that it follows.

Finish = Callable[[], Plan[None]]
# What may be about one document: the server's refusals, the data, and what the driver cannot read.
POISONOUS = (OperationFailure, DataError, UsageError, BSONError)
# Of a target that an event's key names in another numeric type, nothing more is known.
UNKNOWN = Mark(None, sourced=True)


@dataclass(frozen=True, slots=True)
class Targets:
    """Documents of one model whose own values are doubtful."""

    entry: Entry[Any]
    marks: Sequence[Mark]

    def __len__(self) -> int:
        return len(self.marks)

    @property
    def items(self) -> int:
        return len(self.marks)

    def part(self, start: int, end: int) -> Targets:
        return Targets(self.entry, self.marks[start:end])

    def hold(self) -> Plan[None]:
        """Write these documents before their sources are read, so that other writers wait meanwhile."""
        sourced = [mark.key for mark in self.marks if mark.sourced]
        if sourced:
            condition = self.entry.at_any(sourced)
            yield from update_many(self.entry.collection, condition, {"$inc": {REVISION: 1}})

    def bring_right(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[None]:
        yield from recompute_targets(server, self.entry, self.marks, ledger)

    def set_aside(self, graph: Graph, server: Capabilities, error: Exception) -> Plan[None]:
        entry = self.entry
        yield from set_aside(entry.model.__name__, entry.collection, self.marks[0].key, error)


@dataclass(frozen=True, slots=True)
class Copies:
    """Sources whose copies must follow them."""

    rule: CopyRule
    keys: Sequence[Any]

    def __len__(self) -> int:
        # Each may have many copies.
        limits = self.rule.target.limits
        return len(self.keys) * max(1, limits.worker_targets_max // limits.worker_copies_max)

    @property
    def items(self) -> int:
        return len(self.keys)

    def part(self, start: int, end: int) -> Copies:
        return Copies(self.rule, self.keys[start:end])

    def hold(self) -> Plan[None]:
        """Copies are written as soon as their source is read."""
        yield from ()

    def bring_right(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[None]:
        rule = self.rule
        followed = feeds_beyond(rule.target, rule.level)
        sources = yield from find(
            rule.source.collection, {"_id": {"$in": list(self.keys)}, **rule.source.scope}
        )
        for source in sources:
            yield from copy_to(rule, source["_id"], source, {}, followed, ledger)

    def set_aside(self, graph: Graph, server: Capabilities, error: Exception) -> Plan[None]:
        # One of the copies cannot be written: all but that one.
        yield from copy_widely(graph, server, self.rule, self.keys[0])


def apply(graph: Graph, server: Capabilities, doubt: Doubt, fence: Finish, finish: Finish) -> Plan[int]:
    """Recompute all that is doubtful; `finish` belongs to the last transaction, `fence` to the others.

    How many documents and sources were looked at.
    """
    for rule, gone in doubt.gone.items():
        for key in gone.values():
            yield from _follow_deletion(graph, server, rule, key, doubt, fence)
    for rule, new in doubt.copies.items():
        if not rule.synced:
            # Nothing to follow; but who was there before its source takes the values of this moment.
            referring = rule.referring(*new.values())
            for each in (yield from find(rule.target.collection, referring, {"_id": 1})):
                doubt.mark(rule.target, each["_id"], sourced=False)
    units: list[Targets | Copies] = []
    # Targets before copies: a card that was another reference's must not first be made half new.
    for entry, marks in doubt.targets.items():
        listed = list(marks.values())
        most = graph.limits.worker_targets_max
        units.extend(Targets(entry, listed[at : at + most]) for at in range(0, len(listed), most))
    most, fan_out = graph.limits.worker_copies_max, graph.limits.fan_out_max
    for rule, keys in doubt.copies.items():
        few = []
        for key in keys.values() if rule.synced else ():
            referring = rule.referring(key)
            if (yield from find(rule.target.collection, referring, {"_id": 1}, skip=fan_out, limit=1)):
                yield from copy_widely(graph, server, rule, key)
            else:
                few.append(key)
        units.extend(Copies(rule, few[at : at + most]) for at in range(0, len(few), most))
    packed = _pack(units, graph.limits.worker_targets_max)
    for number, together in enumerate(packed):
        last = number == len(packed) - 1
        yield from _transaction(graph, server, together, doubt, fence, finish if last else fence)
    if not packed:
        yield from transact(finish)
    return sum(len(unit) for unit in units)


def _pack(units: Sequence[Targets | Copies], most: int) -> list[list[Targets | Copies]]:
    packed: list[list[Targets | Copies]] = []
    room = 0
    for unit in units:
        if len(unit) > room or not packed:
            packed.append([])
            room = most
        packed[-1].append(unit)
        room -= len(unit)
    return packed


def _transaction(
    graph: Graph,
    server: Capabilities,
    units: Sequence[Targets | Copies],
    doubt: Doubt,
    fence: Finish,
    end: Finish,
) -> Plan[None]:
    try:
        yield from transact(_attempting(graph, server, units, end))
    except (*POISONOUS, Contended) as error:
        if not _is_about_one_document(error):
            raise
        for unit in units:
            yield from _in_pieces(graph, server, unit, doubt, fence, error)
        yield from transact(end)


def _attempting(
    graph: Graph, server: Capabilities, units: Sequence[Targets | Copies], end: Finish
) -> Callable[[], Plan[None]]:
    """What a transaction does, each time it is attempted."""

    def attempt() -> Plan[None]:
        ledger = Ledger()
        for unit in units:
            yield from unit.bring_right(graph, server, ledger)
        yield from react(graph, server, ledger, copies_max=UNBOUNDED)
        yield from end()

    def hold() -> Plan[None]:
        for unit in units:
            yield from unit.hold()

    return attempting(graph.limits, attempt, hold, sum(unit.items for unit in units))


def _is_about_one_document(error: Exception) -> bool:
    return not isinstance(error, OperationFailure) or is_about_one_document(error)


def _in_pieces(
    graph: Graph,
    server: Capabilities,
    unit: Targets | Copies,
    doubt: Doubt,
    fence: Finish,
    reason: Exception,
) -> Plan[None]:
    """Do a unit in pieces: until a document that cannot be written stands alone, or others leave room."""
    for start, end in pieces(graph.limits, unit.items, reason):
        part = unit.part(start, end)
        try:
            yield from transact(_attempting(graph, server, [part], fence))
        except (*POISONOUS, Contended) as error:
            if not _is_about_one_document(error):
                raise
            if part.items > 1:
                yield from _in_pieces(graph, server, part, doubt, fence, error)
                continue
            doubt.aside += 1
            yield from part.set_aside(graph, server, error)


def copy_widely(graph: Graph, server: Capabilities, rule: CopyRule, key: Any) -> Plan[None]:
    """Make the copies of one source in chunks, around any that cannot be made."""
    yield from intents.finish(graph, server, FanOut(rule, key), {"after": None, "n": -1})


# -- targets -----------------------------------------------------------------------------------


def recompute_targets(
    server: Capabilities, entry: Entry[Any], marks: Sequence[Mark], ledger: Ledger
) -> Plan[None]:
    """Recompute the stream-maintained values of these documents.

    One whose sources changed is really written even if its value stays: a
    slower recomputation of `repair` must meet it. One that was only touched
    itself is written if something is wrong, so that the worker does not
    follow its own writes for ever.
    """
    recomputation = Recomputation(entry, "stream")
    by_key = {freeze(mark.key): mark for mark in marks}
    keys = [mark.key for mark in marks]
    made: set[Any] = set()
    if entry.group is not None:
        arranged = yield from arrange(server, entry, keys, ledger)
        made = {freeze(each) for each in arranged.made}
    documents = yield from find(entry.collection, entry.at_any(keys), _shown(recomputation))
    if not documents:
        return
    present = [each["_id"] for each in documents]
    if entry.feeds:
        yield from ledger.note_before(entry, [each for each in present if freeze(each) not in made])
    of_document = [by_key.get(freeze(entry.key_of(each)), UNKNOWN) for each in documents]
    befores = [_recalled(recomputation, *pair) for pair in zip(documents, of_document, strict=True)]
    expected = yield from recomputation.expected(server, documents, befores)
    operations = []
    for document, right, mark in zip(documents, expected, of_document, strict=True):
        sets = {
            path: literal
            for path, literal in recomputation.sets(document, right, whole=True).items()
            if not same(value_at(document, path), literal["$literal"])
        }
        if sets or mark.sourced or recomputation.differs(document, right):
            pipeline = recomputation.rewrite(sets, stamped=bool(sets) or mark.sourced)
            operations.append(UpdateOne(by_id(document["_id"]), pipeline))
    if not operations:
        return
    yield from bulk_write(entry.collection, operations, ordered=False)
    if entry.feeds:
        rows = yield from find(entry.collection, {"_id": {"$in": present}})
        afters = {freeze(each["_id"]): each for each in rows}
        for document in documents:
            frozen = freeze(document["_id"])
            before = None if frozen in made else document
            ledger.add(Change(entry.collection, document["_id"], before, afters[frozen]))


def _shown(recomputation: Recomputation) -> Raw | None:
    """What is read of the documents: all of it where copies or others need it, else the values alone."""
    entry = recomputation.entry
    if recomputation.copies or recomputation.locals or entry.feeds:
        return None
    paths = [*recomputation.paths, *(rule.path for rule in recomputation.formulas), "_id"]
    return {
        **dict.fromkeys(outermost(paths), 1),
        **(entry.key_projection() if entry.group is not None else {}),
    }


def _recalled(recomputation: Recomputation, document: Raw, mark: Mark) -> Raw:
    """A document with the values of a moment that are each reference's own."""
    keeping = [rule for rule in recomputation.copies if rule.snapshots]
    if not keeping:
        return document
    before = copy.deepcopy(document)
    for rule in keeping:
        rule.recall(before, mark.cards, mark.renewed)
    return before


# -- deleted sources -------------------------------------------------------------------------------


def _follow_deletion(
    graph: Graph, server: Capabilities, rule: CopyRule, key: Any, doubt: Doubt, fence: Finish
) -> Plan[None]:
    """Do as `on_delete` says to what refers to a source that is gone, a thousand at a time."""
    condition: Raw = rule.referring(key)
    if rule.on_delete == "restrict":
        # A writer that does not use Treadle deleted it all the same; the copies lose their source.
        for each in (yield from find(rule.target.collection, condition, {"_id": 1})):
            doubt.mark(rule.target, each["_id"], sourced=True)
        return
    stuck: list[Any] = []
    most = graph.limits.worker_gone_max
    while (yield from find_one(rule.source.collection, rule.source.one(key), {"_id": 1})) is None:
        within = {**condition, "_id": {"$nin": stuck}} if stuck else condition
        found = yield from find(rule.target.collection, within, {"_id": 1}, limit=most)
        keys = [each["_id"] for each in found]
        if keys:
            stuck += yield from _cut_loose(graph, server, rule, key, keys, doubt, fence)
        if len(keys) < most:
            return


def _cut_loose(
    graph: Graph,
    server: Capabilities,
    rule: CopyRule,
    key: Any,
    keys: Sequence[Any],
    doubt: Doubt,
    fence: Finish,
) -> Plan[list[Any]]:
    """Delete these documents, or clear their references; those for which it cannot be done, set aside."""

    def attempt() -> Plan[None]:
        if (yield from find_one(rule.source.collection, rule.source.one(key), {"_id": 1})) is not None:
            # It came back; its insertion is another event.
            return
        condition = {"_id": {"$in": list(keys)}, rule.reference_path: {"$eq": key}}
        referring = yield from find(rule.target.collection, condition)
        ledger = Ledger()
        if rule.on_delete == "cascade" and not rule.place.in_array:
            yield from delete_documents(rule.target, referring, ledger)
        elif referring:
            yield from detach(rule, referring, [key], ledger)
        yield from react(graph, server, ledger, copies_max=UNBOUNDED)
        yield from fence()

    try:
        yield from transact(attempt)
    except POISONOUS as error:
        if not _is_about_one_document(error):
            raise
        if len(keys) == 1:
            # Another reference forbids it, or the document cannot be written: somebody must decide.
            doubt.aside += 1
            yield from set_aside(rule.place.label, rule.target.collection, keys[0], error)
            return [keys[0]]
        middle = len(keys) // 2
        first = yield from _cut_loose(graph, server, rule, key, keys[:middle], doubt, fence)
        return [*first, *(yield from _cut_loose(graph, server, rule, key, keys[middle:], doubt, fence))]
    return []
