"""The workload file: requests with their values, one per line, in one local file.

The first line is a header, each other line a request, the last line a summary:

    {"treadle_workload": 1, "database": "shop", "started": …, …}
    {"op": "find", "in": "orders", "at": 0.51, "ms": 2, …, "body": {"filter": …, "sort": …}}
    {"end": {"seconds": 60.0, "operations": 1200, "lost": 0, …}}

A body is canonical Extended JSON, so every BSON type comes back as it was. A
file without its last line is that of a recording that was killed; what it
holds is usable. Nothing here talks to a server.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bson import json_util
from bson.codec_options import DatetimeConversion
from bson.errors import BSONError

from treadle.advisor.loop.results import WorkloadSummary
from treadle.errors import UsageError

VERSION = 1
MARK = "treadle_workload"
# It holds values.
MODE_PRIVATE = 0o600
LINE_BYTES_MAX = 64_000_000
READ_OPERATIONS = frozenset({"find", "aggregate", "count", "distinct"})
WRITE_OPERATIONS = frozenset({"insert", "update", "delete", "modify"})
_JSON = json_util.JSONOptions(
    json_mode=json_util.JSONMode.CANONICAL,
    tz_aware=True,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)
_NONE = "is no workload file; make one with treadle record"
# What is raised on the way where a request, or a line, is not what it should be.
MALFORMED = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, BSONError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """One operation that a client sent, with its values.

    `body` holds what the command holds: `filter`, `sort`, `projection`, `limit`
    and `skip` of a find; `pipeline`; `query` of a count, `key` and `query` of a
    distinct; `document` of an insert (absent where it was not seen); `q`, `u`,
    `multi`, `upsert` of an update; `q` and `limit` of a delete; `query`,
    `update`, `remove`, `new`, `sort`, `fields` of a findAndModify ("modify").
    """

    operation: str
    collection: str
    body: Mapping[str, Any] = field(default_factory=dict)
    # Seconds since the recording began, and milliseconds on the server.
    at: float = 0.0
    milliseconds: float = 0.0
    examined: int = 0
    returned: int = 0
    bytes: int = 0
    plan: str = ""
    session: int = 0

    @property
    def is_read(self) -> bool:
        return self.operation in READ_OPERATIONS

    def as_line(self) -> str:
        head = {
            "op": self.operation,
            "in": self.collection,
            "at": round(self.at, 3),
            "ms": self.milliseconds,
            "examined": self.examined,
            "returned": self.returned,
            "bytes": self.bytes,
            "plan": self.plan,
            "session": self.session,
        }
        body = json_util.dumps(self.body, json_options=_JSON)
        return f'{json.dumps(head)[:-1]}, "body": {body}}}'

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> Request:
        operation, collection, body = line["op"], line["in"], line["body"]
        if operation not in READ_OPERATIONS | WRITE_OPERATIONS or not isinstance(collection, str):
            raise ValueError
        if not isinstance(body, Mapping):
            raise TypeError
        return cls(
            operation,
            collection,
            body,
            float(line.get("at", 0)),
            float(line.get("ms", 0)),
            int(line.get("examined", 0)),
            int(line.get("returned", 0)),
            int(line.get("bytes", 0)),
            str(line.get("plan", "")),
            int(line.get("session", 0)),
        )

    def as_profile(self, database: str, started: datetime) -> dict[str, Any]:
        """The same as a document of the server's profiler, which the advisor's rules count."""
        kinds = {"find": "query", "insert": "insert", "update": "update", "delete": "remove"}
        command = dict(self.body)
        if self.operation == "modify":
            command["findAndModify"] = self.collection
        elif self.operation in READ_OPERATIONS:
            command = {self.operation: self.collection, **command}
        elif self.operation == "insert":
            command = {"insert": self.collection}
        return {
            "op": kinds.get(self.operation, "command"),
            "ns": f"{database}.{self.collection}",
            "command": {**command, "lsid": {"id": self.session}},
            "planSummary": self.plan,
            "millis": self.milliseconds,
            "docsExamined": self.examined,
            "nreturned": self.returned,
            "ts": started + timedelta(seconds=self.at),
        }


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload file: what its header and its last line say, and its requests, read again each time."""

    path: Path
    database: str
    started: datetime

    def __iter__(self) -> Iterator[Request]:
        """The requests, in the order of the file; a damaged line is refused when it is reached."""
        for number, line in _lines(self.path):
            if number == 1 or "end" in line:
                continue
            try:
                yield Request.from_line(line)
            except MALFORMED:
                raise _invalid(self.path, f"has no request in line {number:,}") from None

    def profile_documents(self, database: str | None = None) -> Iterator[dict[str, Any]]:
        """The requests as documents of the profiler, for a scan; of another database where one is named."""
        for request in self:
            yield request.as_profile(database or self.database, self.started)

    def summary(self) -> WorkloadSummary:
        """Counts over the whole file; one pass."""
        counts = {True: 0, False: 0}
        last, seconds, complete = 0.0, None, False
        for number, line in _lines(self.path):
            if "end" in line:
                end = line["end"]
                seconds, complete = float(end.get("seconds", 0)), not end.get("lost", 0)
            elif number > 1:
                counts[line.get("op") in READ_OPERATIONS] += 1
                last = max(last, float(line.get("at", 0)))
        total = sum(counts.values())
        return WorkloadSummary(
            last if seconds is None else seconds, total, counts[True], counts[False], complete
        )


def read(path: Path) -> Workload:
    """A workload file; anything else is refused."""
    lines = _lines(path)
    _, header = next(lines, (0, dict[str, Any]()))
    lines.close()
    version = header.get(MARK)
    if version is None:
        raise _invalid(path, _NONE)
    if version != VERSION:
        raise _invalid(path, f"has version {version!r}, and this Treadle reads {VERSION}; update Treadle")
    try:
        started = header["started"]
        if not isinstance(started, datetime):
            raise TypeError
        return Workload(path, str(header["database"]), started)
    except MALFORMED:
        raise _invalid(path, "has a damaged header; record it again") from None


def is_workload(start: bytes) -> bool:
    """Whether a file that begins so is a workload file."""
    return start.lstrip().startswith(f'{{"{MARK}"'.encode())


def header_line(database: str, started: datetime, **more: Any) -> str:
    head = {MARK: VERSION, "database": database}
    facts = {"started": started.astimezone(UTC), **more}
    rest = json_util.dumps(facts, json_options=json_util.RELAXED_JSON_OPTIONS)
    return f"{json.dumps(head)[:-1]}, {rest[1:]}"


def end_line(**facts: Any) -> str:
    return json.dumps({"end": facts})


def _lines(path: Path) -> Generator[tuple[int, dict[str, Any]]]:
    """(number, parsed line) of a file; the last one may be cut off, as a kill leaves it."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES_MAX):
                number += 1
                if not line.strip():
                    continue
                try:
                    value = json_util.loads(line.decode(), json_options=_JSON)
                    if not isinstance(value, dict):
                        raise TypeError
                except MALFORMED:
                    if number > 1 and not line.endswith(b"\n"):
                        return
                    raise _invalid(
                        path, _NONE if number == 1 else f"has no request in line {number:,}"
                    ) from None
                yield number, value
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror}") from None


def _invalid(path: Path, reason: str) -> UsageError:
    return UsageError(f"The workload {path} {reason}", code="workload-invalid")
