"""What a batch of events leaves to be recomputed.

Events are only noted here. Which targets they concern is found out for the
whole batch at once, so that a thousand events of one key cost little more
than one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from treadle.engine.propagate import targets_of
from treadle.graph.derived import DerivedRule
from treadle.graph.events import AFTER, Event
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import Rule
from treadle.plan import Plan, Raw, find
from treadle.query.keys import distinct, freeze, freeze_all
from treadle.query.paths import outermost


@dataclass(slots=True)
class Mark:
    """One document whose maintained values are dirty."""

    key: Any
    # The key frozen, once the document stands among the targets.
    frozen: Any = None
    # Whether a source changed, or only the document itself.
    sourced: bool = False
    # The fields with references and cards as they were before, where a reference changed;
    # `renewed`, the paths with positions, where it changed and the event had no state from before.
    cards: Raw | None = None
    renewed: frozenset[str] = frozenset()
    # Such fields as they were between the events of one batch.
    between: list[Raw] = field(default_factory=list)
    # The sources that were inserted, with their times; None if anything else happened to its sources.
    arrived: list[tuple[Any, Raw]] | None = field(default_factory=list)

    def add(self, later: Mark) -> None:
        """Make this the mark of a later event as well."""
        self.sourced = self.sourced or later.sourced
        self.renewed |= later.renewed
        if later.arrived is None or self.arrived is None:
            self.arrived = None
        elif later.arrived:
            self.arrived = [*self.arrived, *later.arrived]
        # The earliest is what was there before all of them; what came between is gone again.
        if self.cards is None:
            self.cards = later.cards
        elif later.cards is not None:
            self.between = [*self.between, later.cards]


@dataclass(slots=True)
class Dirty:
    """What a batch of events leaves to be recomputed."""

    marks: dict[ModelEntry, list[Mark]] = field(default_factory=dict)
    # What targets name sources by whose copies must follow, and sources that are gone; and the ids of
    # sources whose names are to be read.
    copies: dict[DerivedRule, list[Any]] = field(default_factory=dict)
    gone: dict[DerivedRule, list[Any]] = field(default_factory=dict)
    unnamed: dict[DerivedRule, list[Any]] = field(default_factory=dict)
    # The names that sources gave up, where what refers to them by these is not to be changed or deleted.
    lost: dict[DerivedRule, list[Any]] = field(default_factory=dict)
    # Sources before and after their changes, whose targets are to be marked; ids of those to be read for
    # that, and of rollups' documents whose groups are to be marked.
    sources: dict[DerivedRule, list[Raw]] = field(default_factory=dict)
    lookups: dict[DerivedRule, list[Any]] = field(default_factory=dict)
    # Events of sources that were inserted, where a target's total is remembered (`totals.py`).
    inserted: dict[DerivedRule, list[Mapping[str, Any]]] = field(default_factory=dict)
    documents: dict[ModelEntry, list[Any]] = field(default_factory=dict)
    # Changed documents, in order, for rules that take each change by itself.
    events: dict[Rule, list[Event]] = field(default_factory=dict)
    # Rules that need a backfill, because collections were dropped or renamed, or because an event had no
    # pre-image of a source, with its collection.
    upset: set[Rule] = field(default_factory=set)
    blind: dict[Rule, str] = field(default_factory=dict)
    # How many documents could not be processed, and were set aside.
    aside: int = 0

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))

    def mark_fed(self, rule: DerivedRule, key: Any) -> None:
        """Mark a target of a changed source."""
        self.marks.setdefault(rule.target, []).append(Mark(key, sourced=True, arrived=None))

    def mark(
        self,
        target: ModelEntry,
        key: Any,
        *,
        sourced: bool = False,
        cards: Raw | None = None,
        renewed: frozenset[str] = frozenset(),
    ) -> None:
        self.marks.setdefault(target, []).append(Mark(key, None, sourced, cards, renewed))

    def targets(self) -> dict[ModelEntry, list[Mark]]:
        """The documents to recompute, each once."""
        targets = {}
        for entry, marks in self.marks.items():
            merged: dict[Any, Mark] = {}
            keys = freeze_all([mark.key for mark in marks], ids=entry.rules.group is None)
            for frozen, mark in zip(keys, marks, strict=True):
                mark.frozen = frozen
                first = merged.setdefault(frozen, mark)
                if first is not mark:
                    first.add(mark)
            # What no document can have as its id.
            merged.pop(None, None)
            targets[entry] = list(merged.values())
        return targets


def mark_targets(dirty: Dirty) -> Plan[None]:
    """Mark what changed sources fed and feed, and the groups of rollups' documents that changed."""
    for rule, ids in dirty.lookups.items():
        projection = (
            None if rule.source.versions.may_change else dict.fromkeys(outermost(rule.match.fields), 1)
        )
        documents = yield from find(rule.source.collection, {"_id": {"$in": distinct(ids)}}, projection)
        dirty.sources.setdefault(rule, []).extend(documents)
    for rule, states in dirty.sources.items():
        for key in (yield from targets_of(rule, states)):
            dirty.mark_fed(rule, key)
    for rule, events in dirty.inserted.items():
        _mark_arrivals(rule, events, dirty)
    for copied, ids in dirty.unnamed.items():
        documents = yield from find(
            copied.source.collection, {"_id": {"$in": distinct(ids)}}, {copied.match.path: 1}
        )
        dirty.copies.setdefault(copied, []).extend(copied.unique_keys(documents))
    dirty.unnamed.clear()
    for entry, ids in dirty.documents.items():
        there = {"_id": {"$in": distinct(ids)}}
        for document in (yield from find(entry.collection, there, entry.key_projection())):
            dirty.mark(entry, entry.key_of(document))
        if entry.rules.group.identity:
            for key in ids:
                dirty.mark(entry, [key])


def _mark_arrivals(rule: DerivedRule, events: Sequence[Mapping[str, Any]], dirty: Dirty) -> None:
    """Mark the targets of inserted sources, each with its own."""
    key_in, arrivals = rule.match.one, dict[Any, tuple[Any, list[tuple[Any, Raw]]]]()
    for event in events:
        document = event[AFTER]
        if (key := key_in(document)) is not None:
            arrivals.setdefault(freeze(key), (key, []))[1].append((event.get("clusterTime"), document))
    marks = dirty.marks.setdefault(rule.target, [])
    marks += [Mark(key, sourced=True, arrived=arrived) for key, arrived in arrivals.values()]
