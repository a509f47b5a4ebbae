"""Recorded reads in both ways, on one or two databases: answers compared, times from interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

from pymongo.database import Database

from treadle.advisor.loop.perform import Row, reading_view, timed
from treadle.advisor.loop.results import Measured, RequestResult, Side
from treadle.advisor.loop.rewrite import Rewritten, rewrite
from treadle.advisor.loop.statistics import quantile, ranged, ratio, typical
from treadle.advisor.loop.units import Group, Unit, describe
from treadle.advisor.proposals import Draft
from treadle.advisor.reading import Refused

ROUNDS = 9
ROUNDS_MIN = 4
# A machine that does other things interrupts some runs; the best of a few says what the request takes.
BEST_OF = 3
GROUP_SECONDS_MAX = 5.0
# Beside other writers, answers that differ are compared again as often.
ATTEMPTS_MAX = 5

# Performs something and gives (commands, documents examined, bytes answered) of it on a database.
Count = Callable[[Database[Row], Callable[[], Any]], tuple[int, int, int]]
Rewrite = Callable[[Unit], Rewritten | None]


@dataclass(frozen=True, slots=True)
class Pair:
    """A unit and what takes its place."""

    unit: Unit
    after: Rewritten


def compare_reads(
    before: Database[Any],
    after: Database[Any],
    groups: Sequence[Group],
    draft: Draft | Rewrite,
    seconds: float,
    *,
    rounds: int = ROUNDS,
    group_seconds_max: float = GROUP_SECONDS_MAX,
    count: Count | None = None,
    settle: Callable[[], object] | None = None,
    rest: bool = False,
) -> tuple[list[RequestResult], list[str]]:
    """Run the reads of each group in both ways; the results, and what could not be run.

    `seconds` is how long the recording took. `before` and `after` may be the
    same database, once the patterns are set up there. With `settle`, others
    write concurrently: two answers that differ are compared again after it.
    With `rest`, each request is followed by a pause as long as it took.
    """
    results: list[RequestResult] = []
    notes: list[str] = []
    views = reading_view(before), reading_view(after)
    for group in groups:
        pairs, reason = _pairs(group, draft)
        if pairs:
            comparison = _Comparison(*views, group, pairs, rounds, group_seconds_max, count, settle, rest)
            outcome = comparison.run(seconds)
            if isinstance(outcome, RequestResult):
                results.append(outcome)
                continue
            reason = outcome
        notes.append(f"{describe(group.units[0])}: {reason}")
    return results, notes


def count_differences(
    before: Database[Any], after: Database[Any], groups: Sequence[Group], draft: Draft | Rewrite
) -> tuple[int, int]:
    """How many answers differ, of how many that could be compared."""
    one, other = reading_view(before), reading_view(after)
    different = compared = 0
    for group in groups:
        for pair in _pairs(group, draft)[0]:
            try:
                answers = timed(one, pair.unit)[1], timed(other, pair.after.requests)[1]
            except Refused:
                continue
            if pair.after.applies is not None and not pair.after.applies(answers[0]):
                continue
            compared += 1
            different += not pair.after.same(*answers)
    return different, compared


def _pairs(group: Group, draft: Draft | Rewrite) -> tuple[list[Pair], str]:
    pairs = []
    for unit in group.units:
        after = rewrite(unit, draft) if isinstance(draft, Draft) else draft(unit)
        if after is not None:
            pairs.append(Pair(unit, after))
    return pairs, "the pattern does not change it"


def effort(pass_seconds: float, rounds: int, seconds_max: float) -> tuple[int, int]:
    """How many rounds, and of how many runs the best counts, where one pass in both ways takes so long.

    What takes long is interrupted in proportion less, so that one run says
    enough; below the least number of rounds there would be no interval.
    """
    passes = seconds_max / max(pass_seconds, 1e-9)
    best_of = min(BEST_OF, max(1, int(passes / rounds)))
    return min(rounds, max(ROUNDS_MIN, int(passes / best_of))), best_of


def alike(pairs: Sequence[Pair]) -> list[int]:
    """For each pair the place of the first whose requests have the same values."""
    first: dict[str, int] = {}
    return [
        first.setdefault(repr([(each.operation, each.collection, each.body) for each in pair.unit]), place)
        for place, pair in enumerate(pairs)
    ]


@dataclass(frozen=True, slots=True)
class _Work:
    """What the server does for one unit."""

    commands: float = 0.0
    examined: float = 0.0
    bytes: float = 0.0


@dataclass(slots=True)
class _Comparison:
    before: Database[Row]
    after: Database[Row]
    group: Group
    pairs: list[Pair]
    rounds: int
    seconds_max: float
    count: Count | None
    settle: Callable[[], object] | None
    rest: bool

    def run(self, seconds: float) -> RequestResult | str:
        """The result of one group; a sentence where nothing could be compared."""
        different, apart, refused = 0, 0, ""
        usable: list[Pair] = []
        begin = perf_counter()
        for pair in self.pairs:
            try:
                applies = pair.after.applies
                if applies is not None and not applies(self._timed(self.before, pair.unit)[1]):
                    apart += 1
                    refused = "its reads do not belong together"
                    continue
                different += not self._same(pair)
            except Refused as error:
                refused = f"it could not be performed: {error.reason}"
                continue
            usable.append(pair)
        if not usable:
            return refused
        # Of those that were not tried, as many again are no such read.
        recorded = max(1, round(self.group.recorded * (1 - apart / len(self.pairs))))
        self.pairs = usable
        times = self._times(perf_counter() - begin)
        if times is None:
            return "it could not be performed again"
        works = (
            self._work(self.before, lambda pair: pair.unit),
            self._work(self.after, lambda pair: pair.after.requests),
        )
        one, other = times
        return RequestResult(
            "read",
            describe(usable[0].unit),
            usable[0].after.label,
            recorded,
            recorded / max(seconds, 1e-9),
            len(usable),
            len(usable),
            different,
            side(one, works[0].commands, works[0].examined, works[0].bytes),
            side(other, works[1].commands, works[1].examined, works[1].bytes),
            ratio(one, other),
            usable[0].after.note,
        )

    def _timed(self, database: Database[Row], unit: Unit) -> tuple[float, list[list[Row]]]:
        seconds, answers = timed(database, unit)
        if self.rest:
            sleep(seconds)
        return seconds, answers

    def _same(self, pair: Pair) -> bool:
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                if self.settle is None:
                    break
                self.settle()
            first = self._timed(self.before, pair.unit)[1]
            if pair.after.same(first, self._timed(self.after, pair.after.requests)[1]):
                return True
        return False

    def _times(self, pass_seconds: float) -> tuple[list[list[float]], list[list[float]]] | None:
        """Seconds by round and pair, before and after; who goes first alternates.

        Where a pass takes long, requests that are the same to the value run
        once for all of them.
        """
        one: list[list[float]] = []
        other: list[list[float]] = []
        places = list(range(len(self.pairs)))
        if pass_seconds * ROUNDS_MIN > self.seconds_max:
            places = alike(self.pairs)
            pass_seconds *= len(set(places)) / len(places)
        rounds, best_of = effort(pass_seconds, self.rounds, self.seconds_max)
        deadline = perf_counter() + self.seconds_max
        for number in range(rounds):
            if number >= ROUNDS_MIN and perf_counter() > deadline:
                break
            first: dict[int, float] = {}
            second: dict[int, float] = {}
            for turn, place in enumerate(dict.fromkeys(places)):
                pair = self.pairs[place]
                ways = [(first, self.before, pair.unit), (second, self.after, pair.after.requests)]
                for times, database, requests in ways if (number + turn) % 2 == 0 else reversed(ways):
                    try:
                        times[place] = min(self._timed(database, requests)[0] for _ in range(best_of))
                    except Refused:
                        return None
            one.append([first[place] for place in places])
            other.append([second[place] for place in places])
        return one, other

    def _work(self, database: Database[Row], requests: Callable[[Pair], Unit]) -> _Work:
        """What a unit takes of the server in one way, where that is counted."""
        if self.count is None:
            return _Work()

        def work() -> None:
            for pair in self.pairs:
                # One answer at a time: each may be of several megabytes.
                timed(database, requests(pair))

        counted = self.count(database, work)
        return _Work(*(each / len(self.pairs) for each in counted))


def side(times: list[list[float]], commands: float, examined: float, answered: float) -> Side:
    """What one way costs, from seconds by round."""

    def milliseconds(share: float) -> Measured:
        return ranged([quantile(each, share) * 1000 for each in times])

    return Side(milliseconds(0.5), milliseconds(0.99), examined, answered, commands, typical(times) * 1000)
