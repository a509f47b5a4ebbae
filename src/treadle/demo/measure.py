"""What a request costs: its time, and what the server did for it by the server's own profiler."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator
from contextlib import contextmanager
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


def prepare_profiler(database: Database[Any]) -> None:
    """A place for the records that holds them all; the server's own would forget the first."""
    database.create_collection(PROFILER, capped=True, size=PROFILE_BYTES)


@contextmanager
def profiled(database: Database[Any]) -> Generator[None]:
    """Let the server write down every operation of the block."""
    database.command("profile", EVERYTHING)
    try:
        yield
    finally:
        database.command("profile", NOTHING)


def count(database: Database[Any], work: Callable[[], Any], times: int) -> tuple[int, int, int]:
    """The commands, the documents read and the bytes answered of one of so many runs."""
    records = database[PROFILER]
    before = records.estimated_document_count()
    with profiled(database):
        for _ in range(times):
            work()
    # The commands that turn the profiler on and off are records of their own.
    seen = [
        record
        for record in records.find().sort("$natural", 1).skip(before)
        if "profile" not in record.get("command", {}) and record.get("ns") != f"{database.name}.{PROFILER}"
    ]
    documents = sum(int(record.get("docsExamined", 0)) for record in seen)
    answered = sum(int(record.get("responseLength", 0)) for record in seen)
    return round(len(seen) / times), round(documents / times), round(answered / times)


def clock(work: Callable[[], Any], times: int) -> tuple[float, Any]:
    """The median time of so many runs, and what the last of them gave."""
    taken = []
    for _ in range(times):
        start = perf_counter()
        answer = work()
        taken.append(perf_counter() - start)
    return statistics.median(taken), answer


def measure(database: Database[Any], work: Callable[[], Any], seen: int, times: int) -> tuple[Cost, Any]:
    """What a request costs and what it answers; `seen` runs with the profiler on, `times` without it."""
    counted = count(database, work, seen)
    seconds, answer = clock(work, times)
    return Cost(seconds, *counted), answer
