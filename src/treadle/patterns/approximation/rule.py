"""Approximation: a number that changes too often to be written each time.

What it keeps right: nothing is counted twice, and nothing that was
acknowledged as durable is lost. In memory (`buffer="memory"`) events are
collected and added up; a crash loses at most what is in the buffer. Durable
ones (`buffer="durable"`) go to a collection first and are moved from there.
Sampled ones (`buffer="sampled"`) are written one in `every`, worth `every`.
The number belongs to `store.counter(…)`; how it is written is in `flush.py`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pymongo import IndexModel

from treadle.engine.protocol import WriteProtocol
from treadle.errors import DeclarationError
from treadle.graph.binding import check_choice, check_whole_number
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Finding, Report
from treadle.graph.pattern import Entry, Models, Pattern, Place, Rule
from treadle.patterns.approximation import inspection
from treadle.patterns.approximation.fields import CounterFields
from treadle.patterns.approximation.handle import CounterHandle
from treadle.plan import Plan, Raw
from treadle.plan.capabilities import Capabilities

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


class ApproximateRule(CounterFields):
    """A counter, as the rest of Treadle asks for it."""

    def watches(self) -> Mapping[str, set[str] | None]:
        return {self.target.collection: set()}

    def stamps(self) -> set[str]:
        return {self.flushed_path} if self.flushed_path else set()

    def indexes(self) -> list[tuple[Entry[Any], IndexModel]]:
        # Two documents for one key would each hold a part of its count.
        return [] if self.by_path == "_id" else [(self.target, IndexModel([(self.by_path, 1)], unique=True))]

    def advice(self, maintained: str) -> str:
        return f"; call store.counter({self.target.model.__name__}, {self.name!r}).add(id, n) instead"

    def kept(self) -> dict[str, Any]:
        return {self.path: self.zero, **dict.fromkeys(self.stamps())}

    def calls(self, protocol: WriteProtocol) -> CounterHandle:
        return CounterHandle(self, protocol)

    # -- proof and repair ----------------------------------------------------------------------

    def examine(self, documents: Sequence[Raw]) -> Plan[list[Finding]]:
        return inspection.examine(self, documents)
        yield  # pragma: no cover (a plan that asks for nothing)

    def examine_all(self, server: Capabilities, report: Report | None) -> Plan[list[Finding]]:
        return inspection.overdue(self)

    def mend(self, graph: Graph, server: Capabilities, keys: Sequence[Any]) -> Plan[list[Any]]:
        return inspection.mend(graph, server, self, keys)

    def tidy(self) -> Plan[None]:
        return inspection.forget_old_writers(self)
