"""Progress on standard error: bars on a terminal, and elsewhere lines or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from treadle.cli.output import say, stderr

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

    from treadle.graph.outcomes import Progress

LINE_EVERY_SECONDS = 1.0


def _bars(console: Console, *columns: Any) -> Bars:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    first = TextColumn("{task.description}", markup=False)
    return Bars(
        first,
        BarColumn(),
        MofNCompleteColumn(),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def step_bar(console: Console | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """One bar that names the current step; call it with the name, the steps done and their total."""
    with _bars(console or stderr()) as bars:
        task = bars.add_task("", total=None)
        yield lambda name, done, total: bars.update(task, description=name, completed=done, total=total)


@contextmanager
def model_bars(lines: bool = False) -> Iterator[Callable[[Progress], None]]:
    """A bar for each model with rate and time left; with `lines`, a line per second without a terminal."""
    from rich.progress import TextColumn, TimeRemainingColumn

    console = stderr()
    if lines and not console.is_terminal:
        yield _print_lines()
        return
    with _bars(console, TextColumn("{task.fields[rate]}"), TimeRemainingColumn()) as bars:
        tasks: dict[str, Any] = {}
        started: dict[str, float] = {}

        def report(progress: Progress) -> None:
            name, now = progress.model, time.monotonic()
            if name not in tasks:
                tasks[name], started[name] = bars.add_task(name, rate=""), now
            seconds = now - started[name]
            rate = f"{progress.done / seconds:,.0f}/s" if seconds > 0 else ""
            bars.update(tasks[name], completed=progress.done, total=progress.total, rate=rate)

        yield report


def _print_lines() -> Callable[[Progress], None]:
    started: dict[str, float] = {}
    printed: dict[str, float] = {}

    def report(progress: Progress) -> None:
        now = time.monotonic()
        start = started.setdefault(progress.model, now)
        if now - printed.get(progress.model, 0.0) < LINE_EVERY_SECONDS and progress.done < progress.total:
            return
        printed[progress.model] = now
        say(describe(progress, now - start), err=True)

    return report


def describe(progress: Progress, seconds: float) -> str:
    """How many documents are done, at which rate, and how long the rest will take."""
    text = f"{progress.model}: {progress.done:,} of {progress.total:,}"
    if seconds <= 0 or not progress.done:
        return text
    rate = progress.done / seconds
    return f"{text}, {rate:,.0f}/s, {(progress.total - progress.done) / rate:,.0f} s left"
