"""What recorded writes cost: without the pattern and with it, on two copies, interleaved.

Patterns follow the change stream, so clients write as they do: the same write
runs on both copies, and the worker's own work is measured beside it, per
write. Before each run the documents are put into the state in which the write
has something to do (`raw_writes`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from pymongo.database import Database
from pymongo.errors import PyMongoError

from treadle.advisor.trials.answers import RESERVED
from treadle.advisor.trials.compare import Count, side
from treadle.advisor.trials.following import catch_up
from treadle.advisor.trials.perform import Row, reading_view
from treadle.advisor.trials.raw_writes import NotTried, Preparation, Prepared, restore, write
from treadle.advisor.trials.results import RequestResult
from treadle.advisor.trials.statistics import ratio
from treadle.advisor.trials.units import Group, describe
from treadle.errors import TreadleError
from treadle.store.blocking.store import Store

ROUNDS = 4
ROUNDS_MIN = 2
GROUP_SECONDS_MAX = 2.0
GROUPS_MAX = 40
# A worker does many writes in one batch, so what it takes per write is measured over many.
UNITS_MAX = 20
IDLE_ROUNDS = 3

Act = Callable[[], Any]
Times = list[list[float]]


@dataclass(frozen=True, slots=True)
class Way:
    """Prepared writes in one of two ways: one call each, and how the documents are put back."""

    acts: Sequence[Act]
    restore: Act


@dataclass(slots=True)
class WriteTrial:
    """Writes of one trial, on the copy without the pattern and on the one with it."""

    before: Database[Any]
    store: Store
    seconds: float
    count: Count | None = None
    rounds: int = ROUNDS
    # Whether a write failed half way, so that the copies may differ for that.
    uneven: bool = False
    after: Database[Row] = field(init=False)
    preparation: Preparation = field(init=False)
    followed: bool = field(init=False)
    # What the worker takes to find that there is nothing to do.
    idle: float = 0.0

    def __post_init__(self) -> None:
        self.before, self.after = reading_view(self.before), reading_view(self.store.database)
        self.preparation = Preparation(self.before)
        self.followed = any(rule.maintain == "stream" for rule in self.store.graph.rules)

    def run(self, groups: Sequence[Group]) -> tuple[list[RequestResult], list[str]]:
        """The results, and what could not be tried, in words."""
        results: list[RequestResult] = []
        notes: list[str] = []
        self.settle()
        if self.followed:
            self.idle = min(self.settle() for _ in range(IDLE_ROUNDS))
        for group in groups[:GROUPS_MAX]:
            try:
                results.append(self._group(group))
                continue
            except NotTried as reason:
                why = str(reason)
            except TreadleError as error:
                self.uneven, why = True, f"Treadle refuses it ({error.code})"
            except PyMongoError as error:
                self.uneven, why = True, f"the server refuses it ({type(error).__name__})"
            notes.append(f"{describe(group.units[0])}: {why}.")
        if len(groups) > GROUPS_MAX:
            notes.append(
                f"{len(groups) - GROUPS_MAX:,} rarer shapes of writes: only the commonest are tried."
            )
        return results, notes

    def settle(self) -> float:
        """Let the worker apply everything that was written; the seconds of its work."""
        return catch_up(self.store) if self.followed else 0.0

    def _group(self, group: Group) -> RequestResult:
        prepared: list[Prepared] = []
        reasons: list[NotTried] = []
        for unit in group.units[:UNITS_MAX]:
            try:
                prepared.append(self.preparation.prepare(unit[0]))
            except NotTried as reason:
                reasons.append(reason)
        if not prepared:
            raise reasons[0]
        kept = maintained(self.store, group.first.collection)
        one, other = _way(self.before, prepared), _way(self.after, prepared, kept)
        times, upkeep = self._rounds(one, other)
        counts = [self._work(one, self.before), self._work(other, self.after)]
        # Counting the work of one way left the other behind; both end with the writes performed.
        for way in (one, other):
            way.restore()
            for act in way.acts:
                act()
        self.settle()
        return RequestResult(
            "write",
            describe(group.units[0]),
            f"the same write{'; the worker follows' if self.followed else ''}",
            group.recorded,
            group.recorded / max(self.seconds, 1e-9),
            len(prepared),
            0,
            0,
            side(times[0], *counts[0]),
            side(times[1], *counts[1]),
            ratio(*times),
            upkeep_ms=upkeep * 1000 if self.followed else None,
        )

    def _rounds(self, one: Way, other: Way) -> tuple[tuple[Times, Times], float]:
        """Seconds by round and write, before and after, and what the worker takes per write."""
        times: tuple[Times, Times] = ([], [])
        upkeep: list[float] = []
        deadline = perf_counter() + GROUP_SECONDS_MAX
        for number in range(self.rounds):
            if number >= ROUNDS_MIN and perf_counter() > deadline:
                break
            one.restore()
            other.restore()
            self.settle()
            first: list[float] = []
            second: list[float] = []
            for place, acts in enumerate(zip(one.acts, other.acts, strict=True)):
                ways = [(first, acts[0]), (second, acts[1])]
                for taken, act in ways if (number + place) % 2 == 0 else reversed(ways):
                    taken.append(_seconds(act))
            upkeep.append(max(0.0, self.settle() - self.idle) / len(one.acts))
            times[0].append(first)
            times[1].append(second)
        return times, statistics.median(upkeep)

    def _work(self, way: Way, database: Database[Row]) -> tuple[float, float, float]:
        if self.count is None:
            return 0.0, 0.0, 0.0
        way.restore()
        counted = self.count(database, lambda: [act() for act in way.acts])
        commands, examined, answered = (each / len(way.acts) for each in counted)
        return commands, examined, answered


def maintained(store: Store, collection: str) -> frozenset[str]:
    """The fields of a collection that only Treadle writes."""
    paths = [
        owned.path
        for rule in store.graph.rules
        if rule.target.collection == collection
        for owned in rule.owns()
    ]
    return frozenset({RESERVED, *(path.partition(".")[0] for path in paths)})


def _way(database: Database[Row], prepared: Sequence[Prepared], kept: frozenset[str] = frozenset()) -> Way:
    acts = [lambda each=each: write(database, each.request) for each in prepared]
    return Way(acts, lambda: restore(database, prepared, kept))


def _seconds(act: Act) -> float:
    start = perf_counter()
    act()
    return perf_counter() - start
