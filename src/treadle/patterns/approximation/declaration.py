"""Approximation: a number that changes too often to be written each time.

What it guarantees: nothing is counted twice, and nothing that was acknowledged
as durable is lost. In memory (`buffer="memory"`) events are collected and
added up; a crash loses at most what is in the buffer. Durable ones
(`buffer="durable"`) go to a collection first and are moved from there. Sampled
ones (`buffer="sampled"`) are written one in `every`, worth `every`. The number
belongs to `store.counter(…)`; how it is written is in `add_amounts.py`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pymongo import IndexModel

from treadle.engine.write_path import WritePath
from treadle.errors import DeclarationError
from treadle.graph.binding import check_choice, check_whole_number
from treadle.graph.graph import graph_of
from treadle.graph.outcomes import Finding
from treadle.graph.owned import Owned
from treadle.graph.rule import Models, Pattern, Place, Reads, Rule, Storage
from treadle.patterns.approximation import problems
from treadle.patterns.approximation.counter_field import CounterField
from treadle.patterns.approximation.handle import CounterHandle
from treadle.plan import Plan, Raw

Buffering = Literal["memory", "durable", "sampled"]

EVERY_MAX = 10_000_000
KEYS_MAX = 10_000_000


@dataclass(frozen=True)
class Approximate(Pattern):
    """A number that `store.counter(…)` adds to, written every so many events or so much time."""

    pattern: ClassVar[str] = "approximation"

    every: int = 100
    within: dt.timedelta | None = dt.timedelta(seconds=5)
    buffer: Buffering = "memory"
    collection: str | None = None
    by: str = "id"
    upsert: bool = False
    flushed_at: str | None = None
    keys_max: int = 100_000

    def bind(self, place: Place, graph: Models) -> Rule:
        check_choice(place, "buffer", self.buffer, ("memory", "durable", "sampled"))
        check_whole_number(place, "every", self.every, EVERY_MAX)
        check_whole_number(place, "keys_max", self.keys_max, KEYS_MAX)
        if self.within is not None and not (
            isinstance(self.within, dt.timedelta) and self.within > dt.timedelta(0)
        ):
            raise DeclarationError(
                f"{place.label} has within={self.within!r}; it takes a timedelta above zero, or None",
                code="pattern-keyword",
            )
        if self.collection is not None and self.buffer != "durable":
            raise DeclarationError(
                f'{place.label} has collection=, which is for buffer="durable"; remove one of them',
                code="pattern-keyword",
            )
        return ApproximateRule(place, graph, self)


class ApproximateRule(CounterField):
    """A counter, as the rest of Treadle calls it."""

    def reads(self) -> Reads:
        return {self.target.collection: set()}

    def owns(self) -> Sequence[Owned]:
        advice = f"; call store.counter({self.target.model.__name__}, {self.name!r}).add(id, n) instead"
        flushed = [Owned(self.flushed_path, advice, initial=None, shared=True)] if self.flushed_path else []
        return [Owned(self.path, advice, initial=self.zero), *flushed]

    def storage(self) -> Storage:
        if self.by_path == "_id":
            return Storage()
        # Two documents for one key would each hold a part of its count.
        return Storage(indexes=[(self.target, IndexModel([(self.by_path, 1)], unique=True))])

    def calls(self, write_path: WritePath) -> CounterHandle:
        return CounterHandle(self, write_path)

    # -- verify and repair ---------------------------------------------------------------------

    def verify(self, page: Sequence[Raw] | None) -> Plan[list[Finding]]:
        if page is None:
            return (yield from problems.find_stale(self))
        return problems.find_missing(self, page)

    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        if keys is not None:
            return (yield from problems.repair_counts(graph_of(self), self, keys))
        yield from problems.delete_old_batches()
        return []
