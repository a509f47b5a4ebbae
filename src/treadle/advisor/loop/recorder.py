"""Records what clients ask of a database, from the server's profiler, into a workload file.

Every operation has a time limit and a comment; what this process reads is not recorded. Memory is bounded:
requests go to the file as they come. Inserts are recorded without their documents, which the profiler
does not have.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

from pymongo import CursorType
from pymongo.database import Database
from pymongo.errors import PyMongoError

from treadle.advisor.loop import workload_file
from treadle.advisor.loop.perform import reading_view
from treadle.advisor.loop.profiler_level import (
    COMMAND_MILLISECONDS_MAX,
    Level,
    hello,
    raise_level,
    raised_by_recording,
    read_level,
    restore_profiler,
    server_time,
    set_back,
)
from treadle.advisor.loop.profiler_rows import Truncated, collection_of, parse, session_of
from treadle.advisor.loop.workload_file import MODE_PRIVATE, Request
from treadle.advisor.reading import NO_RIGHTS, Lost, Refused, translate_errors
from treadle.errors import DataError, UsageError

COMMENT = "treadle record"
SYSTEM_DATABASES = frozenset({"admin", "local", "config"})
AWAIT_MILLISECONDS = 250
PAUSE_SECONDS = 0.05
FILE_BYTES_MAX = 1_000_000_000
SESSIONS_MAX = 100_000
# What still comes in when the time is over.
DRAIN_SECONDS_MAX = 2.0
# The profiler ends by itself so much later than a recording should.
DEADLINE_MARGIN_SECONDS = 5.0

Progress = Callable[[float, int], None]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a recording did."""

    path: Path
    seconds: float
    operations: int
    reads: int
    writes: int
    # Commands that were too long for the profiler, and gaps in what it held.
    truncated: int
    lost: int
    bytes: int
    complete: bool
    former_level: int


def record(
    database: Database[Any],
    path: Path,
    *,
    seconds: float = 60.0,
    force: bool = False,
    bytes_max: int = FILE_BYTES_MAX,
    progress: Progress | None = None,
) -> Recorded:
    """Record for so many seconds; KeyboardInterrupt ends it early, with what there is.

    The profiler records everything in that time, and is at its former level afterwards. Where an earlier
    recording was killed, its former level is set back first.
    """
    if database.name in SYSTEM_DATABASES:
        raise UsageError(
            f"{database.name} is a database of the server's own; record one of yours.", code="record-refused"
        )
    former = _permitted(database)
    with _output(path, force) as file:
        recording = _Recording(reading_view(database), file, former, bytes_max)
        return recording.run(path, seconds, progress or (lambda elapsed, operations: None))


def _permitted(database: Database[Any]) -> Level:
    """The profiler's level; refused if this login may not change it, or another recording runs."""
    try:
        if translate_errors(lambda: hello(database)).get("msg") == "isdbgrid":
            raise Refused("this is a router")
        restore_profiler(database)
        former = read_level(database)
    except Refused as refused:
        if refused.reason == NO_RIGHTS:
            advice = f"log in as a user with the role dbAdmin on {database.name}"
        else:
            advice = "connect to a member that holds the data"
        raise DataError(
            f"The profiler of {database.name} cannot be used: {refused.reason}; {advice}.",
            code="record-refused",
        ) from None
    raised = raised_by_recording(former)
    if raised is not None:
        raise UsageError(
            f"Another recording of {database.name} is under way, or was killed; it is over at "
            f"{raised.deadline:%H:%M:%S} UTC.",
            code="record-refused",
        )
    return former


@contextlib.contextmanager
def _output(path: Path, force: bool) -> Iterator[BinaryIO]:
    """A file that only its owner may read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if force else os.O_EXCL)
    try:
        descriptor = os.open(path, flags, MODE_PRIVATE)
    except FileExistsError:
        raise UsageError(
            f"{path} exists; name another file, or add --force to overwrite it.", code="output-exists"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", code="output-invalid") from None
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), MODE_PRIVATE)
        yield file


@dataclass(slots=True)
class _Place:
    """How far the profiler was read: a time, and which rows of that very millisecond."""

    moment: datetime
    seen: set[str] = field(default_factory=set)

    def is_new(self, row: Mapping[str, Any]) -> bool:
        """Whether a row was not read before a cursor was reopened; several may be of one millisecond."""
        moment, mark = row["ts"].replace(tzinfo=UTC), repr(row)
        if moment != self.moment:
            self.moment, self.seen = moment, set()
        is_new = mark not in self.seen
        self.seen.add(mark)
        return is_new


@dataclass(slots=True)
class _Recording:
    database: Database[Any]
    file: BinaryIO
    former: Level
    bytes_max: int
    # By the server's clock, as the profiler's times are.
    started: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    looked: float = 0.0
    sessions: dict[tuple[str, str], int] = field(default_factory=dict)
    written: int = 0
    reads: int = 0
    writes: int = 0
    truncated: int = 0
    lost: int = 0
    full: bool = False

    def run(self, path: Path, seconds: float, progress: Progress) -> Recorded:
        complete = True
        self.started = server_time(self.database)
        begin = time.monotonic()
        try:
            # An interruption may come at once: from here on the level is set back.
            try:
                self._write_header()
                deadline = self.started + timedelta(seconds=seconds + DEADLINE_MARGIN_SECONDS)
                raise_level(self.database, self.former, deadline)
                begin = time.monotonic()
                self._follow(begin, seconds, progress)
            except KeyboardInterrupt:
                complete = False
        finally:
            self._restore()
        elapsed = time.monotonic() - begin
        recorded = Recorded(
            path, elapsed, self.reads + self.writes, self.reads, self.writes, self.truncated,
            self.lost + self.full, self.written, complete, self.former.level,
        )  # fmt: skip
        end = {"truncated": self.truncated, "lost": recorded.lost, "complete": complete}
        seconds_and_number = {"seconds": round(elapsed, 3), "operations": recorded.operations}
        self._write(workload_file.end_line(**seconds_and_number, **end))
        return recorded

    def _write_header(self) -> None:
        self._write(workload_file.header_line(self.database.name, self.started))
        self.file.flush()

    def _restore(self) -> None:
        """Set the level back, also when asked to stop once more in the meantime."""
        for _ in range(3):
            try:
                set_back(self.database, self.former)
                return
            except KeyboardInterrupt:
                continue
            except (Lost, Refused):
                time.sleep(PAUSE_SECONDS)
        raise DataError(
            f"The profiler of {self.database.name} was not set back, since the server did not answer. It "
            "ends by itself, and the next record, scan or doctor sets it back, or "
            f"db.setProfilingLevel({self.former.level}) in mongosh.",
            code="profiler-left-on",
        )

    # -- reading -------------------------------------------------------------------------------

    def _follow(self, begin: float, seconds: float, progress: Progress) -> None:
        """Read what the profiler records until the time is over, then what it recorded by then."""
        last = _Place(self.started)
        while not self.full:
            try:
                with self._tail(last.moment) as cursor:
                    if self._read(cursor, last, begin, seconds, progress):
                        return
            except PyMongoError as error:
                if getattr(error, "code", None) is None:
                    raise Lost(type(error).__name__) from None
                # What the profiler had kept was overwritten before it was read.
                self.lost += 1
            if time.monotonic() - begin >= seconds:
                return
            time.sleep(PAUSE_SECONDS)

    def _read(self, cursor: Any, last: _Place, begin: float, seconds: float, progress: Progress) -> bool:
        """Take what the cursor gives. Returns whether everything was read; False if it must be reopened."""
        drained = False
        while cursor.alive and not self.full:
            row = next(cursor, None)
            elapsed = time.monotonic() - begin
            if row is None or time.monotonic() - self.looked > PAUSE_SECONDS:
                progress(elapsed, self.reads + self.writes)
                self.looked = time.monotonic()
            if row is not None:
                if (row["ts"].replace(tzinfo=UTC) - self.started).total_seconds() > seconds:
                    return True
                if last.is_new(row):
                    self._take(row)
            elif elapsed >= seconds:
                if drained or elapsed > seconds + DRAIN_SECONDS_MAX:
                    return True
                drained = True
        return False

    def _tail(self, last: datetime) -> Any:
        cursor = self.database["system.profile"].find(
            {"ts": {"$gte": last}, "op": {"$nin": ["getmore", "killcursors"]}},
            cursor_type=CursorType.TAILABLE_AWAIT,
            comment=COMMENT,
            max_time_ms=COMMAND_MILLISECONDS_MAX,
        )
        return cursor.max_await_time_ms(AWAIT_MILLISECONDS)

    def _take(self, row: Mapping[str, Any]) -> None:
        if collection_of(row, self.database.name) is None:
            return
        session = session_of(row)
        if session not in self.sessions and len(self.sessions) < SESSIONS_MAX:
            self.sessions[session] = len(self.sessions) + 1
        try:
            request = parse(row, self.database.name, self.started, self.sessions.get(session, 0))
        except Truncated:
            self.truncated += 1
            return
        if request is not None:
            self._emit(request)

    # -- writing -------------------------------------------------------------------------------

    def _emit(self, request: Request) -> None:
        try:
            line = request.as_line()
        except (TypeError, ValueError, OverflowError, RecursionError):
            self.truncated += 1
            return
        if self.written + len(line) > self.bytes_max:
            self.full = True
            return
        self._write(line)
        if request.is_read:
            self.reads += 1
        else:
            self.writes += 1

    def _write(self, line: str) -> None:
        data = line.encode() + b"\n"
        self.written += len(data)
        self.file.write(data)
