"""What a request costs: its time, and the work of the server by its own profiler."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from pymongo.database import Database

PROFILE_BYTES = 32_000_000
PROFILER = "system.profile"
EVERYTHING, NOTHING = 2, 0


@dataclass(frozen=True, slots=True)
class Cost:
    """The median time of a request, and the work of one."""

    seconds: float
    commands: int
    documents_read: int
    bytes_answered: int


def milliseconds(seconds: float) -> str:
    """A time with about three digits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    value = seconds * 1000
    if value >= 100:
        return f"{value:.0f} ms"
    return f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def prepare_profiler(database: Database[Any]) -> None:
    """Make the profiler's collection large enough for all records; the default one drops the first."""
    database.create_collection(PROFILER, capped=True, size=PROFILE_BYTES)


def count(database: Database[Any], work: Callable[[], Any], times: int) -> tuple[int, int, int]:
    """The commands, documents read and bytes answered per run, over so many runs."""
    records = database[PROFILER]
    before = records.estimated_document_count()
    database.command("profile", EVERYTHING)
    try:
        for _ in range(times):
            work()
    finally:
        database.command("profile", NOTHING)
    # The commands that turn the profiler on and off are recorded too.
    operations = [
        record
        for record in records.find().sort("$natural", 1).skip(before)
        if "profile" not in record.get("command", {}) and record.get("ns") != f"{database.name}.{PROFILER}"
    ]
    documents = sum(int(record.get("docsExamined", 0)) for record in operations)
    answered = sum(int(record.get("responseLength", 0)) for record in operations)
    return round(len(operations) / times), round(documents / times), round(answered / times)


def clock(work: Callable[[], Any], times: int) -> tuple[float, Any]:
    """The median time of so many runs, and the answer of the last."""
    seconds = []
    for _ in range(times):
        start = perf_counter()
        answer = work()
        seconds.append(perf_counter() - start)
    return statistics.median(seconds), answer


def measure(
    database: Database[Any], work: Callable[[], Any], profiled_runs: int, timed_runs: int
) -> tuple[Cost, Any]:
    """What a request costs and what it answers; times are taken with the profiler off."""
    counts = count(database, work, profiled_runs)
    seconds, answer = clock(work, timed_runs)
    return Cost(seconds, *counts), answer
