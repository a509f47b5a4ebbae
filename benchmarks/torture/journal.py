"""What became of every write, as its writer was told.

A cell is one thing that one writer alone writes: a document, an item of an
array, a reading. The journal keeps the states that it may be in: one after a
write that was acknowledged or that certainly failed, two or more after one
whose outcome is unknown. Counters have a least and a greatest amount.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

from pymongo.errors import ConnectionFailure, PyMongoError

from treadle.errors import TreadleError
from treadle.plan.server_errors import is_outcome_unknown, is_transient, lacks_majority

Outcome = Literal["acknowledged", "refused", "unknown"]
Cell = tuple[str, Any]
# The state of what is not there.
ABSENT = None


def outcome_of(error: BaseException) -> Outcome:
    """What an error says about its write: that nothing of it was written, or that nobody knows."""
    if isinstance(error, asyncio.CancelledError):
        return "unknown"
    if getattr(error, "code", None) == "write-outcome-unknown" or is_outcome_unknown(error):
        return "unknown"
    if isinstance(error, TreadleError) or is_transient(error):
        return "refused"
    if isinstance(error, PyMongoError):
        lost = isinstance(error, ConnectionFailure) or lacks_majority(error) or error.timeout
        return "unknown" if lost else "refused"
    raise error


@dataclass
class Journal:
    """Shared by all writers; each cell belongs to one of them."""

    states: dict[Cell, set[Any]] = field(default_factory=dict)
    # Of those whose outcome is unknown: they may arrive after a later write.
    late: defaultdict[Cell, set[Any]] = field(default_factory=lambda: defaultdict(set))
    least: Counter[Cell] = field(default_factory=Counter)
    greatest: Counter[Cell] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    # When each write was acknowledged, on the monotonic clock.
    moments: list[float] = field(default_factory=list)
    unexpected: list[BaseException] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settled(self, cell: Cell) -> Any:
        """The state of a cell, if it is certain; raises KeyError otherwise."""
        states = self.states.get(cell, {ABSENT})
        if len(states) > 1:
            raise KeyError(cell)
        return next(iter(states))

    def note(self, outcome: Outcome, error: BaseException | None = None) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            if error is not None:
                self.errors[f"{type(error).__name__} {getattr(error, 'code', None) or ''}".strip()] += 1
            if outcome == "acknowledged":
                self.moments.append(time.monotonic())

    def write(self, outcome: Outcome, changes: dict[Cell, Any]) -> None:
        """Note what a write made of its cells."""
        for cell, state in changes.items():
            if outcome == "acknowledged":
                self.states[cell] = {state} | self.late[cell]
            elif outcome == "unknown":
                self.late[cell].add(state)
                self.states[cell] = self.states.get(cell, {ABSENT}) | {state}
            else:
                self.states.setdefault(cell, {ABSENT})

    def count(self, outcome: Outcome, cell: Cell, amount: int) -> None:
        """Note an amount that was added to a counter."""
        with self._lock:
            if outcome == "acknowledged":
                self.least[cell] += amount
            if outcome != "refused":
                self.greatest[cell] += amount
