"""Bringing right what the worker's events made dirty, in transactions.

Everything is recomputed from the sources as they are inside the transaction.
A document that cannot be written (too large, or refused by a validator) is
found by halving, set aside, and the others go on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from treadle.engine import fan_outs
from treadle.engine.copies import UNBOUNDED, FanOut, copy_to, read_cards, upgrade_targets
from treadle.engine.deletes import delete_documents, detach
from treadle.engine.derive import DerivedValues, recompute
from treadle.engine.propagate import propagate
from treadle.engine.salvage import attempting, divide, divides, salvage
from treadle.engine.version_upgrade import upgrade_matching_upgraded
from treadle.engine.write_path import commit_changes
from treadle.graph.changes import Changes
from treadle.graph.derived import DerivedRule
from treadle.graph.graph import Graph
from treadle.graph.quarantine import set_aside
from treadle.graph.rule import REVISION, Rule
from treadle.graph.scope import NO_FILTER
from treadle.graph.stored_pages import chunks
from treadle.plan import Plan, Raw, find, find_one, transact, update_many
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import distinct, freeze, freeze_all
from treadle.upkeep.dirty import Dirty, Mark
from treadle.upkeep.totals import Counted, Totals, countable

# Targets in one transaction.
WORKER_TARGETS_MAX = 500
# Sources of copies in one transaction.
WORKER_COPIES_MAX = 50
# References to a deleted document that are followed in one transaction.
WORKER_GONE_MAX = 1_000

Finish = Callable[[], Plan[None]]


def apply(
    graph: Graph,
    server: Capabilities,
    dirty: Dirty,
    fence: Finish,
    finish: Finish,
    *,
    without: frozenset[Rule] = frozenset(),
    totals: Totals | None = None,
) -> Plan[int]:
    """Recompute all that is dirty; `finish` belongs to the last transaction, `fence` to the others.

    `without` some rules, which are paused; with `totals`, new sources are added
    to what was counted before. How many documents and sources were looked at.
    """
    return (yield from _Application(graph, server, dirty, fence, without, totals).perform(finish))


@dataclass(frozen=True)
class Targets:
    """Documents of one model whose own values are dirty."""

    chosen: DerivedValues
    items: Sequence[Mark]

    def __len__(self) -> int:
        return len(self.items)

    def part(self, items: Sequence[Any]) -> Targets:
        return Targets(self.chosen, items)

    def hold(self) -> Plan[None]:
        """Write these documents before their sources are read, so that other writers wait."""
        entry = self.chosen.entry
        sourced = [mark.key for mark in self.items if mark.sourced]
        if sourced:
            yield from update_many(entry.collection, entry.filter_for_keys(sourced), {"$inc": {REVISION: 1}})

    def recompute(self, ledger: Changes, counted: Counted | None) -> Plan[None]:
        """Recompute the stream-maintained values of these documents.

        One whose sources changed is really written even if its value stays: a
        slower recomputation of `repair` must conflict with it. One that was only touched
        itself is written if something is wrong, so that the worker does not
        follow its own writes endlessly.
        """
        keys, chosen = [mark.key for mark in self.items], self.chosen
        marks = {mark.frozen: mark for mark in self.items}
        # One that an event's key names in another numeric type is forced: nothing more is known of it.
        unforced = {frozen for frozen, mark in marks.items() if not mark.sourced}
        keeping = [rule for rule in chosen.copies if rule.copied.snapshots]

        def recall(document: Raw) -> Raw:
            """A document with the values of a moment that are each reference's own."""
            mark = marks.get(freeze(chosen.entry.key_of(document)), Mark(None))
            before = copy.deepcopy(document)
            for rule in keeping:
                rule.copied.recall(before, mark.cards, mark.between, mark.renewed)
            return before

        yield from recompute(
            chosen,
            keys,
            ledger,
            recall=recall if keeping else None,
            unforced=unforced,
            gather=None if counted is None else counted.gather,
        )


@dataclass(frozen=True)
class Copies:
    """Sources whose copies must follow them."""

    rule: DerivedRule
    items: Sequence[Any]

    def __len__(self) -> int:
        # Each may have many copies.
        return len(self.items) * max(1, WORKER_TARGETS_MAX // WORKER_COPIES_MAX)

    def part(self, items: Sequence[Any]) -> Copies:
        return Copies(self.rule, items)

    def hold(self) -> Plan[None]:
        """Copies are written as soon as their source is read."""
        yield from ()

    def recompute(self, ledger: Changes, counted: Counted | None) -> Plan[None]:
        yield from upgrade_targets(self.rule, self.items, ledger)
        cards = yield from read_cards(self.rule, self.items)
        for key in self.items:
            if freeze(key) in cards:
                yield from copy_to(self.rule, key, cards[freeze(key)], NO_FILTER, ledger)


Unit = Targets | Copies


class _Application:
    """The work of one batch."""

    def __init__(
        self,
        graph: Graph,
        server: Capabilities,
        dirty: Dirty,
        fence: Finish,
        without: frozenset[Rule],
        totals: Totals | None,
    ) -> None:
        self.graph = graph
        self.limits = graph.limits
        self.server = server
        self.dirty = dirty
        self.fence = fence
        self.without = without
        self.totals = totals

    def perform(self, finish: Finish) -> Plan[int]:
        for rule, changed in self.dirty.copies.items():
            if rule.on_delete != "keep":
                self.dirty.gone.setdefault(rule, []).extend((yield from _invisible(rule, distinct(changed))))
        for rule, gone in self.dirty.gone.items():
            for key in distinct(gone):
                yield from self._follow_deletion(rule, key)
        for rule, names in self.dirty.lost.items():
            yield from self._mark_referring(rule, distinct(names), sourced=True)
        for rule, new in self.dirty.copies.items():
            if not rule.copied.synced:
                # Nothing to follow; but who was there before its source takes the values of this moment.
                yield from self._mark_referring(rule, distinct(new), sourced=False)
        units: list[Unit] = []
        # Targets before copies: a card that was another reference's must not first be made half new.
        for entry, marks in self.dirty.targets().items():
            chosen = DerivedValues.of(entry, "stream", self.without)
            units += [Targets(chosen, some) for some in chunks(marks, WORKER_TARGETS_MAX)]
        for rule, changed in self.dirty.copies.items():
            few = []
            for key in distinct(changed) if rule.copied.synced else ():
                referring, most = rule.targets_of([key]), self.limits.fan_out_max
                if (yield from find(rule.target.collection, referring, {"_id": 1}, skip=most, limit=1)):
                    yield from self._copy_widely(rule, key)
                else:
                    few.append(key)
            units += [Copies(rule, some) for some in chunks(few, WORKER_COPIES_MAX)]
        packed = _pack(units, WORKER_TARGETS_MAX)
        for together in packed[:-1]:
            yield from self._recompute(together, self.fence)
        yield from self._recompute(packed[-1] if packed else [], finish)
        return sum(len(unit) for unit in units)

    def _mark_referring(self, rule: DerivedRule, keys: Sequence[Any], *, sourced: bool) -> Plan[None]:
        for each in (yield from find(rule.target.collection, rule.targets_of(keys), {"_id": 1})):
            self.dirty.mark(rule.target, each["_id"], sourced=sourced)

    def _recompute(self, units: Sequence[Unit], end: Finish) -> Plan[None]:
        """Do units in one transaction; in pieces, until a document that cannot be written stands alone."""
        try:
            yield from self._transaction(units, end)
        except Exception as error:
            if not divides(error):
                raise
            for unit in units:
                yield from self._in_pieces(unit, error)
            yield from transact(end)

    def _transaction(self, units: Sequence[Unit], end: Finish) -> Plan[None]:
        counted = [self._counted(unit) for unit in units]

        def attempt() -> Plan[None]:
            ledger = Changes()
            for unit, totals in zip(units, counted, strict=True):
                yield from unit.recompute(ledger, totals)
            if ledger:
                yield from propagate(self.graph, ledger, copies_max=UNBOUNDED)
            yield from end()

        def hold() -> Plan[None]:
            for unit in units:
                yield from unit.hold()

        yield from transact(attempting(attempt, hold, sum(len(unit.items) for unit in units)))
        for each in counted:
            if each is not None:
                each.keep()

    def _counted(self, unit: Unit) -> Counted | None:
        """The totals that a unit goes by."""
        if self.totals is None or isinstance(unit, Copies) or not countable(unit.chosen.entry):
            return None
        return Counted(self.totals, unit.chosen.entry, unit.items)

    def _in_pieces(self, unit: Unit, reason: Exception) -> Plan[None]:
        def attempt(items: Sequence[Any]) -> Plan[list[None]]:
            yield from self._transaction([unit.part(items)], self.fence)
            return []

        def alone(item: Any, error: Exception) -> Plan[list[None]]:
            self.dirty.aside += 1
            if isinstance(unit, Copies):
                # One of the copies cannot be written: all but that one.
                yield from self._copy_widely(unit.rule, item)
            else:
                entry = unit.chosen.entry
                yield from set_aside(entry.model.__name__, entry.collection, item.key, error)
            return []

        yield from divide(unit.items, attempt, alone, reason)

    def _copy_widely(self, rule: DerivedRule, key: Any) -> Plan[None]:
        """Make the copies of one source in chunks, around any that cannot be made."""
        yield from commit_changes(self.graph, partial(upgrade_targets, rule, [key]))
        yield from fan_outs.finish(self.graph, FanOut(rule, key), {"after": None, "n": -1})

    # -- deleted sources ---------------------------------------------------------------------------

    def _follow_deletion(self, rule: DerivedRule, key: Any) -> Plan[None]:
        """Do as `on_delete` says to what refers to a source that is gone, a thousand at a time."""
        if rule.on_delete == "restrict":
            # A writer that does not use Treadle deleted it all the same; the copies lose their source.
            yield from self._mark_referring(rule, [key], sourced=True)
            return

        def attempt(keys: Sequence[Any]) -> Plan[list[Any]]:
            yield from transact(lambda: self._detach(rule, key, keys))
            return []

        def leave(key: Any, error: Exception) -> list[Any]:
            # Another reference forbids it, or the document cannot be written: an operator must decide.
            self.dirty.aside += 1
            return [key]

        archive = rule.source.everything.archive
        if archive is not None and (yield from find_one(archive, rule.sources_of([key]), {"_id": 1})):
            # It was archived: the references stay, and so do the copies of a source that is counted there.
            if rule.source.sources.archive is None:
                yield from self._copy_widely(rule, key)
            return
        stuck: list[Any] = []
        most = WORKER_GONE_MAX
        while (yield from find_one(rule.source.collection, rule.sources_of([key]), {"_id": 1})) is None:
            within = {**rule.targets_of([key]), **({"_id": {"$nin": stuck}} if stuck else {})}
            rows = yield from find(rule.target.collection, within, {"_id": 1}, limit=most)
            if rows:
                keys = [row["_id"] for row in rows]
                label, collection = rule.place.label, rule.target.collection
                stuck += yield from salvage(label, collection, keys, attempt, lost=leave)
            if len(rows) < most:
                return

    def _detach(self, rule: DerivedRule, key: Any, keys: Sequence[Any]) -> Plan[None]:
        """Delete these documents, or clear their references."""
        if (yield from find_one(rule.source.collection, rule.sources_of([key]), {"_id": 1})) is not None:
            # It came back; its insertion is another event.
            return
        condition = {"_id": {"$in": list(keys)}, rule.on.path: {"$eq": key}}
        ledger = Changes()
        yield from upgrade_matching_upgraded(rule.target, condition, ledger, writes=None)
        referring = yield from find(rule.target.collection, condition)
        if rule.on_delete == "cascade" and not rule.place.in_array:
            yield from delete_documents(rule.target, referring, ledger)
        elif referring:
            yield from detach(rule, referring, [key], ledger)
        yield from propagate(self.graph, ledger, copies_max=UNBOUNDED)
        yield from self.fence()


def _invisible(rule: DerivedRule, keys: Sequence[Any]) -> Plan[list[Any]]:
    """Return those keys of changed sources by which targets refer to none: it was soft-deleted, say."""
    images = yield from rule.source.sources.find(rule.match.exactly(keys))
    visible = set(freeze_all(rule.unique_keys(image.document for image in images)))
    return [key for key in keys if freeze(key) not in visible]


def _pack(units: Sequence[Unit], most: int) -> list[list[Unit]]:
    """Units that one transaction does together."""
    packed: list[list[Unit]] = []
    room = 0
    for unit in units:
        if len(unit) > room or not packed:
            packed.append([])
            room = most
        packed[-1].append(unit)
        room -= len(unit)
    return packed
