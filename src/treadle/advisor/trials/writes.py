"""What recorded writes cost: without the pattern and with it, on two copies, interleaved.

Where the pattern follows the change stream, clients go on writing as they do:
the same write runs on both copies, and the worker's own work is measured
beside it, per write. Where the Store keeps the pattern right, the Store's call
takes the place of the write. Before each run the documents are put into the
state in which the write has something to do (`raw_writes`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from time import perf_counter
from typing import Any

from pymongo.database import Database
from pymongo.errors import PyMongoError

from treadle.advisor.trials.answers import at, same
from treadle.advisor.trials.compare import Count, side
from treadle.advisor.trials.counting import counter_of
from treadle.advisor.trials.declared import Counter, Patterns
from treadle.advisor.trials.following import catch_up
from treadle.advisor.trials.perform import Row, reading_view
from treadle.advisor.trials.raw_writes import NotTried, Preparation, Prepared, restore, write
from treadle.advisor.trials.results import RequestResult
from treadle.advisor.trials.statistics import ratio
from treadle.advisor.trials.store_writes import StoreWrites, maintained
from treadle.advisor.trials.units import Group, call_name, describe
from treadle.errors import TreadleError
from treadle.store.blocking.store import Store

ROUNDS = 4
ROUNDS_MIN = 2
GROUP_SECONDS_MAX = 2.0
GROUPS_MAX = 40
# A worker does many writes in one batch, so what it takes per write is measured over many.
UNITS_MAX = 20
IDLE_ROUNDS = 3
# How many increments are collected at a time when a counter is tried.
INCREMENTS = 200

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
    patterns: Patterns
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
        if counter_of(group.first, self.patterns.counters) is not None:
            return self._counted(group)
        prepared: list[Prepared] = []
        reasons: list[NotTried] = []
        for unit in group.units[:UNITS_MAX]:
            try:
                prepared.append(self.preparation.prepare(unit[0]))
            except NotTried as reason:
                reasons.append(reason)
        if not prepared:
            raise reasons[0]
        streamed = self._streamed(group.first.collection)
        one, other = self._plain(prepared), self._kept(prepared, streamed)
        times, upkeep = self._rounds(one, other)
        counts = [self._work(one, self.before), self._work(other, self.after)]
        # Counting the work of one way left the other behind; both end with the writes performed.
        for way in (one, other):
            way.restore()
            for act in way.acts:
                act()
        self.settle()
        collection = self.patterns.models.get(group.first.collection)
        name = collection.__name__ if collection is not None else group.first.collection
        label = (
            f"the same write{'; the worker follows' if self.followed else ''}"
            if streamed
            else f"store.{call_name(group.first)}({name}, …)"
        )
        took = upkeep if streamed and self.followed else None
        return self._result(group, label, (len(prepared), 0, 0), times, counts, took)

    def _streamed(self, collection: str) -> bool:
        """Whether clients go on writing to this collection as they do, and a worker follows."""
        laid_out = {each.source for each in self.patterns.readings}
        laid_out |= {each.collection for each in self.patterns.arrays}
        laid_out |= {each.collection for each in self.patterns.trees}
        return collection not in laid_out and not self.patterns.written

    def _plain(self, prepared: Sequence[Prepared]) -> Way:
        acts = [lambda each=each: write(self.before, each.request) for each in prepared]
        return Way(acts, lambda: restore(self.before, prepared))

    def _kept(self, prepared: Sequence[Prepared], streamed: bool) -> Way:
        if streamed:
            kept = maintained(self.store, prepared[0].request.collection)
            acts = [lambda each=each: write(self.after, each.request) for each in prepared]
            return Way(acts, lambda: restore(self.after, prepared, kept))
        calls = StoreWrites(self.store, self.patterns, self.before)
        if any(each.source == prepared[0].request.collection for each in self.patterns.readings):
            if any(each.request.operation != "insert" for each in prepared):
                raise NotTried("of readings in buckets only inserts are tried")
            return Way([calls.act(each) for each in prepared], lambda: None)
        return Way([calls.act(each) for each in prepared], lambda: calls.restore(prepared))

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

    def _result(
        self,
        group: Group,
        label: str,
        numbers: tuple[int, int, int],
        times: tuple[Times, Times],
        counts: Sequence[tuple[float, float, float]],
        upkeep: float | None = None,
    ) -> RequestResult:
        one, other = times
        return RequestResult(
            "write",
            describe(group.units[0]),
            label,
            group.recorded,
            group.recorded / max(self.seconds, 1e-9),
            *numbers,
            side(one, *counts[0]),
            side(other, *counts[1]),
            ratio(one, other),
            upkeep_ms=None if upkeep is None else upkeep * 1000,
        )

    # -- counters --------------------------------------------------------------------------------

    def _counted(self, group: Group) -> RequestResult:
        """Increments one by one, against increments that are collected and written as sums."""
        found = [counter_of(unit[0], self.patterns.counters) for unit in group.units]
        raised = [each for each in found if each is not None]
        counter = raised[0][0]
        pairs = list(islice(cycle([(key, amount) for _, key, amount in raised]), INCREMENTS))
        collection = self.before[counter.collection]
        handle = self.store.counter(self.patterns.models[counter.collection], counter.name)
        updates = [unit[0].body["u"] for unit in group.units]

        def one_by_one() -> None:
            for (key, _), update in zip(pairs, cycle(updates), strict=False):
                collection.update_one({counter.by: key}, update)

        def collected() -> None:
            for key, amount in pairs:
                handle.add(key, amount)
            handle.flush()

        times: tuple[Times, Times] = ([], [])
        for number in range(self.rounds):
            ways = [(times[0], one_by_one), (times[1], collected)]
            for taken, act in ways if number % 2 == 0 else reversed(ways):
                taken.append([_seconds(act) / len(pairs)])
        counts = [(0.0, 0.0, 0.0)] * 2
        if self.count is not None:
            works = ((self.before, one_by_one), (self.after, collected))
            totals = [self.count(database, act) for database, act in works]
            counts = [(a / len(pairs), b / len(pairs), c / len(pairs)) for a, b, c in totals]
        keys = {repr(key): key for key, _ in pairs}
        different = sum(not self._agree(counter, key) for key in keys.values())
        label = f"{counter.collection}: counter of {counter.place}"
        return self._result(group, label, (len(pairs), len(keys), different), times, counts)

    def _agree(self, counter: Counter, key: Any) -> bool:
        rows = [
            database[counter.collection].find_one({counter.by: key}, {counter.place: 1}) or {}
            for database in (self.before, self.after)
        ]
        return same(*(at(row, counter.place) for row in rows))


def _seconds(act: Act) -> float:
    start = perf_counter()
    act()
    return perf_counter() - start
