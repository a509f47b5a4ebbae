"""Records what clients ask of a database: from the profiler, and bodies of inserts from the change stream.

Every operation has a time limit and a comment; what this process reads is
not recorded. Memory is bounded: requests go to the file as they come, and of
the documents that wait for their insert only some are held.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import bson
import pymongo
from pymongo import CursorType
from pymongo.database import Database
from pymongo.errors import PyMongoError

from treadle.advisor.loop import workload_file
from treadle.advisor.loop.perform import reading_view
from treadle.advisor.loop.profiler_level import (
    COMMAND_MILLISECONDS_MAX,
    EVERYTHING,
    Level,
    Note,
    hello,
    mend,
    notes_folder,
    raise_level,
    read_level,
    server_process,
    set_back,
)
from treadle.advisor.loop.profiler_rows import Truncated, collection_of, parse, session_of
from treadle.advisor.loop.workload_file import Request
from treadle.advisor.reading import NO_RIGHTS, Lost, Refused, translate_errors
from treadle.errors import DataError, UsageError

COMMENT = "treadle record"
SYSTEM_DATABASES = frozenset({"admin", "local", "config"})
AWAIT_MILLISECONDS = 250
PAUSE_SECONDS = 0.05
FILE_BYTES_MAX = 1_000_000_000
# Documents that wait for the profiler to tell of their insert: as many bytes in all, and each.
WAITING_BYTES_MAX = 20_000_000
DOCUMENT_BYTES_MAX = 500_000
SESSIONS_MAX = 100_000
# Events of the change stream that are read before the profiler is looked at again.
EVENTS_MAX = 10_000
INSERTS_WAITING_MAX = 10_000
# What still comes in when the time is over.
DRAIN_SECONDS_MAX = 2.0

Progress = Callable[[float, int], None]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a recording did."""

    path: Path
    seconds: float
    operations: int
    reads: int
    writes: int
    # Commands that were too long for the profiler, inserts without their document, gaps in what it held.
    truncated: int
    without_body: int
    lost: int
    bytes: int
    complete: bool
    former_level: int
    # Says that an earlier recording was killed, and that its level was set back first.
    mended: str = ""


def record(
    database: Database[Any],
    path: Path,
    *,
    seconds: float = 60.0,
    force: bool = False,
    bytes_max: int = FILE_BYTES_MAX,
    progress: Progress | None = None,
    notes: Path | None = None,
) -> Recorded:
    """Record for so many seconds; KeyboardInterrupt ends it early, with what there is.

    The profiler is at level 2 meanwhile, and at its former level afterwards.
    Where an earlier recording was killed, its former level is set back first.
    """
    if database.name in SYSTEM_DATABASES:
        raise UsageError(
            f"{database.name} is a database of the server's own; record one of yours.", code="record-refused"
        )
    former, mended = _permitted(database, notes)
    note = Note(notes or notes_folder(), process := server_process(database.client), database.name)
    if not note.take(process, database.name, former, path):
        raise UsageError(
            f"Another recording of {database.name} is under way; wait for it to end.", code="record-refused"
        )
    is_set_back = True
    try:
        with _output(path, force) as file:
            recording = _Recording(reading_view(database), file, former, bytes_max)
            recorded = recording.run(path, seconds, progress or (lambda elapsed, operations: None))
            return replace(recorded, mended=mended)
    except DataError as error:
        is_set_back = error.code != "profiler-left-on"
        raise
    finally:
        note.drop(is_set_back)


def _permitted(database: Database[Any], notes: Path | None) -> tuple[Level, str]:
    """The profiler's level, and what was mended; refused where this login, or anybody, cannot change it."""
    try:
        if translate_errors(lambda: hello(database.client)).get("msg") == "isdbgrid":
            raise Refused("this is a router")
        mended = mend(database, notes) or ""
        return read_level(database), mended
    except Refused as refused:
        if refused.reason == NO_RIGHTS:
            advice = f"log in as a user with the role dbAdmin on {database.name}"
        else:
            advice = "connect to a member that holds the data"
        raise DataError(
            f"The profiler of {database.name} cannot be used: {refused.reason}; {advice}.",
            code="record-refused",
        ) from None


@contextlib.contextmanager
def _output(path: Path, force: bool) -> Iterator[BinaryIO]:
    """A file that nobody else may read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if force else os.O_EXCL)
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise UsageError(
            f"{path} exists; name another file, or add --force to overwrite it.", code="output-exists"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", code="output-invalid") from None
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        yield file


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
    # Per collection: documents whose insert was not seen yet, and inserts whose document was not.
    documents: dict[str, deque[tuple[int, Any]]] = field(default_factory=dict)
    inserts: dict[str, deque[Request]] = field(default_factory=dict)
    waiting_bytes: int = 0
    written: int = 0
    reads: int = 0
    writes: int = 0
    truncated: int = 0
    without_body: int = 0
    lost: int = 0
    full: bool = False

    def run(self, path: Path, seconds: float, progress: Progress) -> Recorded:
        complete = True
        stream = self._change_stream()
        try:
            self._begin()
            begin = time.monotonic()
            # An interruption may come at once: from here on the level is set back.
            try:
                raise_level(self.database, self.former)
                begin = time.monotonic()
                self._follow(stream, begin, seconds, progress)
            except KeyboardInterrupt:
                complete = False
        finally:
            self._restore()
            if stream is not None:
                with contextlib.suppress(PyMongoError):
                    stream.close()
        elapsed = time.monotonic() - begin
        self._finish_inserts()
        recorded = Recorded(
            path, elapsed, self.reads + self.writes, self.reads, self.writes, self.truncated,
            self.without_body, self.lost + self.full, self.written, complete, self.former.level,
        )  # fmt: skip
        self._write(
            workload_file.end_line(
                seconds=round(elapsed, 3),
                operations=recorded.operations,
                truncated=self.truncated,
                without_body=self.without_body,
                lost=recorded.lost,
                complete=complete,
            )
        )
        return recorded

    def _begin(self) -> None:
        """Write the header; the times of requests count from now."""
        self.started = hello(self.database.client)["localTime"].replace(tzinfo=UTC)
        header = workload_file.header_line(
            self.database.name, self.started, profiler_before=self.former.as_command()
        )
        self._write(header)
        self.file.flush()

    def _restore(self) -> None:
        """Set the level back, also when asked to stop once more meanwhile."""
        for _ in range(3):
            try:
                set_back(self.database, self.former)
                return
            except KeyboardInterrupt:
                continue
            except (Lost, Refused):
                time.sleep(PAUSE_SECONDS)
        raise DataError(
            f"The profiler of {self.database.name} is still at level {EVERYTHING}, since the server did not "
            "answer; the next record, scan or doctor sets it back, or "
            f"db.setProfilingLevel({self.former.level}) in mongosh.",
            code="profiler-left-on",
        )

    # -- reading -------------------------------------------------------------------------------

    def _follow(self, stream: Any, begin: float, seconds: float, progress: Progress) -> None:
        """Read what the profiler records until the time is over, then what it recorded by then."""
        last = self.started
        drained = False
        while not self.full:
            over = time.monotonic() - begin >= seconds
            try:
                with self._tail(last) as cursor:
                    while cursor.alive and not self.full:
                        row = next(cursor, None)
                        if row is None or time.monotonic() - self.looked > PAUSE_SECONDS:
                            self._read_stream(stream)
                            progress(time.monotonic() - begin, self.reads + self.writes)
                            self.looked = time.monotonic()
                        if row is not None:
                            moment = row.get("ts")
                            last = moment if isinstance(moment, datetime) else last
                            if (last - self.started).total_seconds() > seconds:
                                return
                            self._take(row)
                        elif time.monotonic() - begin >= seconds:
                            if drained or time.monotonic() - begin > seconds + DRAIN_SECONDS_MAX:
                                return
                            drained = True
            except PyMongoError as error:
                if getattr(error, "code", None) is None:
                    raise Lost(type(error).__name__) from None
                # What the profiler had kept was overwritten before it was read.
                self.lost += 1
            if over:
                return
            time.sleep(PAUSE_SECONDS)

    def _tail(self, last: datetime) -> Any:
        cursor = self.database["system.profile"].find(
            {"ts": {"$gt": last}, "op": {"$nin": ["getmore", "killcursors"]}},
            cursor_type=CursorType.TAILABLE_AWAIT,
            comment=COMMENT,
            max_time_ms=COMMAND_MILLISECONDS_MAX,
        )
        return cursor.max_await_time_ms(AWAIT_MILLISECONDS)

    def _change_stream(self) -> Any:
        """Inserts with their documents; None where the server has no change streams."""
        pipeline: list[Mapping[str, Any]] = [
            {"$match": {"operationType": "insert"}},
            {"$project": {"fullDocument": 1, "ns": 1}},
        ]
        try:
            with pymongo.timeout(COMMAND_MILLISECONDS_MAX / 1000):
                return self.database.watch(pipeline, max_await_time_ms=1, comment=COMMENT)
        except PyMongoError:
            return None

    def _read_stream(self, stream: Any) -> None:
        if stream is None:
            return
        for _ in range(EVENTS_MAX):
            try:
                event = stream.try_next()
            except PyMongoError:
                return
            if event is None:
                return
            self._hold(str(event["ns"]["coll"]), event.get("fullDocument"))

    def _hold(self, collection: str, document: Any) -> None:
        waiting = self.inserts.get(collection)
        if waiting:
            self._emit(replace(waiting.popleft(), body={"document": document}))
            return
        size = len(bson.encode(document, codec_options=self.database.codec_options))
        if size > DOCUMENT_BYTES_MAX or self.waiting_bytes + size > WAITING_BYTES_MAX:
            return
        self.waiting_bytes += size
        self.documents.setdefault(collection, deque()).append((size, document))

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
        if request is None:
            return
        if request.operation != "insert":
            self._emit(request)
            return
        number = max(1, min(request.returned, 1_000))
        single = replace(request, milliseconds=request.milliseconds / number, returned=1)
        for _ in range(number):
            self._insert(single)

    def _insert(self, request: Request) -> None:
        documents = self.documents.get(request.collection)
        if documents:
            size, document = documents.popleft()
            self.waiting_bytes -= size
            self._emit(replace(request, body={"document": document}))
            return
        waiting = self.inserts.setdefault(request.collection, deque())
        waiting.append(request)
        if len(waiting) > INSERTS_WAITING_MAX:
            self._bare(waiting.popleft())

    def _bare(self, request: Request) -> None:
        self.without_body += 1
        self._emit(request)

    def _finish_inserts(self) -> None:
        for waiting in self.inserts.values():
            while waiting:
                self._bare(waiting.popleft())

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
