"""Interleaved timing: what a contender costs relative to another, on a machine that is never quiet.

The rules:
- All contenders of a group take turns in one process, in an order that is
  shuffled each round with a fixed seed, so that a slow minute hits them alike.
- Judge ratios, not times. The ratio is that of the medians; the spread is the
  quartiles of the ratios within each round.
- Each timed run starts after a full collection, with the collector on.
- A contender's first result is checked, so that nobody wins by doing less.
- A group that takes long gets fewer rounds, never less data. A first round that
  takes a third of a group's time counts; a shorter one is to warm up.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import statistics
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

R = TypeVar("R")

SEED = 20_240_601
ROUNDS = 21
ROUNDS_QUICK = 5
# A round that would begin after this is left out, except for the first three; those, after thrice this.
SECONDS_MAX = 18.0
ROUNDS_MIN = 3


@dataclass(frozen=True, slots=True)
class Goal:
    """The most that a contender may cost: a ratio to its baseline, microseconds per operation, or other units.

    `limit` says, with a number, what bounds a goal that is out of reach; the
    report shows it where the goal is missed. It may be the name of a contender of
    the same group, one that does only what nobody can leave out: then its figure
    is the number.
    """

    maximum: float
    kind: str = "ratio"
    limit: str = ""

    def __str__(self) -> str:
        if self.kind == "microseconds":
            return f"≤ {time_text(self.maximum)}"
        if self.kind != "ratio":
            return f"≤ {self.maximum:g} {self.kind}"
        return f"≤ {self.maximum:.2g}" if self.maximum < 1 else f"≤ {self.maximum:.2f}"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the work of a group.

    `prepare` is not timed and its result goes to `work`, which is timed and
    may be a coroutine function. `baseline` names the contender of the same
    group to compare with; the first of the group if it is None. `rounds_max`
    is for contenders so slow that they would take most of the time.
    """

    name: str
    prepare: Callable[[], Any]
    work: Callable[[Any], Any]
    operations: int = 1
    baseline: str | None = None
    goal: Goal | None = None
    check: Callable[[Any], None] | None = None
    rounds_max: int | None = None
    # The work returns the seconds that count, such as a percentile of its own.
    measured: bool = False


@dataclass(slots=True)
class Context:
    """What contenders are built from; closes what they opened when the group is over."""

    uri: str
    quick: bool
    runner: asyncio.Runner
    stack: ExitStack

    def wait(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """The result of a coroutine in the one event loop of all groups."""
        return self.runner.run(coroutine)

    def scale(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Group:
    """Contenders that do the same work; `make` connects and builds them when the group's turn comes.

    No round begins after `seconds_max`, apart from the first three. `unit` is
    for what is not a time, such as bytes: then a microsecond stands for one.
    """

    name: str
    work: str
    make: Callable[[Context], Sequence[Contender]]
    rounds: int = ROUNDS
    unit: str = ""
    seconds_max: float = SECONDS_MAX


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its quartiles."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class Result:
    """What one contender of one group cost."""

    group: str
    work: str
    contender: str
    rounds: int
    operations: int
    microseconds: Spread
    baseline: str | None
    ratio: float | None
    round_ratios: Spread | None
    goal: Goal | None
    seconds: list[float] = field(repr=False)
    unit: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where there is none."""
        if self.goal is None:
            return None
        value = self.ratio if self.goal.kind == "ratio" else self.microseconds.median
        return value is not None and value <= self.goal.maximum


def single(group: str, work: str, *, name: str, value: float, maximum: float, unit: str) -> Result:
    """A figure that was measured once, with the most that it may be."""
    return Result(
        group, work, name, 1, 1, Spread(value, value, value), None, None, None, Goal(maximum, unit),
        [value / 1e6], unit,
    )  # fmt: skip


def spread(values: Sequence[float]) -> Spread:
    """The median and the quartiles; of one or two values, as good as they give."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high)


def measure(group: Group, context: Context) -> list[Result]:
    """Run a group to its end; one result per contender, in the group's order."""
    rounds = min(group.rounds, ROUNDS_QUICK) if context.quick else group.rounds
    with ExitStack() as stack:
        inner = Context(context.uri, context.quick, context.runner, stack)
        contenders = list(group.make(inner))
        times = _interleave(contenders, rounds, inner, group)
    per_operation = {
        contender.name: [seconds / contender.operations for seconds in times[contender.name]]
        for contender in contenders
    }
    return [_result(group, contender, contenders[0].name, per_operation) for contender in contenders]


def _interleave(
    contenders: Sequence[Contender], rounds: int, context: Context, group: Group
) -> dict[str, list[float]]:
    title = f"{group.name}: {group.work}"
    began = perf_counter()
    order = random.Random(SEED)
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}

    def turn(number: int, *, first: bool = False) -> None:
        _progress(f"{title}: round {number + 1} of {rounds}")
        for contender in order.sample(contenders, len(contenders)):
            if contender.rounds_max is None or number < contender.rounds_max:
                times[contender.name].append(_time(contender, context, check=first))

    turn(0, first=True)
    warm_up = perf_counter() - began <= group.seconds_max / ROUNDS_MIN
    if warm_up:
        for each in times.values():
            each.clear()
    for number in range(0 if warm_up else 1, rounds):
        if number > 0 and perf_counter() - began > group.seconds_max * (1 if number >= ROUNDS_MIN else 3):
            break
        turn(number)
    _progress("")
    return times


def _time(contender: Contender, context: Context, *, check: bool) -> float:
    state = contender.prepare()
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        gc.collect()
        if inspect.iscoroutinefunction(contender.work):
            seconds, result = context.wait(_time_async(contender.work, state))
        else:
            start = perf_counter()
            result = contender.work(state)
            seconds = perf_counter() - start
    finally:
        if not was_enabled:
            gc.disable()
    if check and contender.check is not None:
        contender.check(result)
    return float(result) if contender.measured else seconds


async def _time_async(work: Callable[[Any], Any], state: Any) -> tuple[float, Any]:
    # Timed inside the loop, so that entering it is nobody's cost.
    start = perf_counter()
    result = await work(state)
    return perf_counter() - start, result


def _result(group: Group, contender: Contender, first: str, times: dict[str, list[float]]) -> Result:
    own = times[contender.name]
    name = contender.baseline or first
    # A contender with fewer rounds is compared with the baseline's same rounds.
    base = times[name][: len(own)]
    is_own = name == contender.name
    return Result(
        group=group.name,
        work=group.work,
        contender=contender.name,
        rounds=len(own),
        operations=contender.operations,
        microseconds=spread([seconds * 1e6 for seconds in own]),
        baseline=None if is_own else name,
        ratio=None if is_own else statistics.median(own) / statistics.median(base),
        round_ratios=None if is_own else spread([mine / other for mine, other in zip(own, base)]),
        goal=contender.goal,
        seconds=own,
        unit=group.unit,
    )


def time_text(microseconds: float) -> str:
    """A time in the unit that suits it, with three digits."""
    for limit, factor, unit in ((1e3, 1, "µs"), (1e6, 1e3, "ms")):
        if microseconds < limit * 0.9995:
            return f"{_digits(microseconds / factor)} {unit}"
    return f"{_digits(microseconds / 1e6)} s"


def _digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
