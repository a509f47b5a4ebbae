"""History: each state that a document had is kept, once, with the time for which it held.

What it keeps right (Document Versioning, a slowly changing dimension of type
2): per document states 1, 2, 3 without a hole; each begins where the one
before it ended; one is open while the document lives, and none afterwards.
The row of a state is written in the commit of the write that begins it,
whatever that write is, or by the worker with `maintain="stream"`. How rows
are written is in `rows.py`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from treadle.engine.write_path import WritePath
from treadle.errors import DeclarationError
from treadle.graph.binding import check_choice, check_whole_number
from treadle.graph.calls import PastRule
from treadle.graph.changes import Change, Changes
from treadle.graph.events import Event
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding
from treadle.graph.rule import TRANSACTIONS, Due, Models, Needs, Pattern, Place, Reads, Rule
from treadle.patterns.history import followed, inspection, trimming
from treadle.patterns.history.handle import HistoryHandle
from treadle.patterns.history.rows import HistoryRows
from treadle.plan import Plan, Raw

KEEP_MAX = 1_000_000


@dataclass(frozen=True)
class History(Pattern):
    """Keep each state of the model's documents; `keep` bounds them by number of ended states, or by age."""

    pattern: ClassVar[str] = "history"
    keyword: ClassVar[str] = "history"
    beside: ClassVar[bool] = True

    collection: str | None = None
    keep: int | dt.timedelta | None = None
    maintain: Literal["write", "stream"] = "write"

    def bind(self, place: Place, graph: Models) -> Rule:
        check_choice(place, "maintain", self.maintain, ("write", "stream"))
        if isinstance(self.keep, dt.timedelta):
            if self.keep <= dt.timedelta(0):
                raise DeclarationError(
                    f"{place.label} has keep={self.keep!r}; an age is above zero", code="pattern-keyword"
                )
        elif self.keep is not None:
            check_whole_number(place, "keep", self.keep, KEEP_MAX)
        return (WrittenHistory if self.maintain == "write" else FollowedHistory)(place, graph, self)


class HistoryRule(HistoryRows, PastRule):
    """A history, as the rest of Treadle asks for it."""

    needs = TRANSACTIONS

    def __init__(self, place: Place, graph: Models, declared: Any) -> None:
        super().__init__(place, graph, declared)
        if declared.keep is not None:
            self.due_work = "remove states that keep= no longer holds"

    def reads(self) -> Reads:
        return {self.target.collection: None}

    def calls(self, write_path: WritePath, entry: ModelEntry) -> HistoryHandle:
        return HistoryHandle(self, write_path, entry)

    def run_due(self, work: Due) -> Plan[int]:
        return (yield from trimming.trim(self, work.now, work.dry_run)) if work.now is not None else 0

    # -- proof and repair ----------------------------------------------------------------------------

    def verify(self, page: Sequence[Raw] | None) -> Plan[list[Finding]]:
        return inspection.examine_rows(self) if page is None else inspection.examine(self, page)

    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        if keys is not None:
            return (yield from inspection.mend(self, keys))
        yield from inspection.tidy(self)
        return []


class WrittenHistory(HistoryRule):
    """A history that is written with each write."""

    def record(self, changes: Sequence[Change], ledger: Changes) -> Plan[None]:
        return self.advance(changes, ledger)


class FollowedHistory(HistoryRule):
    """A history that the worker writes."""

    # The states that were are nowhere else.
    needs: Needs = MappingProxyType({**TRANSACTIONS, "pre_images": 'declare maintain="write"'})

    def __init__(self, place: Place, graph: Models, declared: Any) -> None:
        super().__init__(place, graph, declared)
        self.maintain = "stream"

    def replay(self, events: Sequence[Event]) -> Plan[None]:
        return followed.replay(self, events)
