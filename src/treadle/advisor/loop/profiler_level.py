"""The level of the server's profiler: raised for a recording, and set back however the recording ends.

While a recording runs, the profiler has a filter that matches until a deadline, so it ends by itself even if
the process is killed. The filter also holds the former level, as the name of an application that no client
has. So any verb, on any machine, sets the level back once the deadline has passed.

Until then a server whose recording was killed logs slow operations by that filter alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from bson import json_util
from pymongo.database import Database

from treadle.advisor.reading import translate_errors

EVERYTHING = 2
COMMAND_MILLISECONDS_MAX = 10_000
MARK = "treadle record, before: "


@dataclass(frozen=True, slots=True)
class Level:
    """How much the profiler records."""

    level: int
    slow_milliseconds: int
    sample_rate: float
    filter: Mapping[str, Any] | None = None

    def as_command(self) -> dict[str, Any]:
        body = {"slowms": self.slow_milliseconds, "sampleRate": self.sample_rate}
        return {"profile": self.level, **body, "filter": self.filter or "unset"}


@dataclass(frozen=True, slots=True)
class Raised:
    """A profiler that a recording raised: until when, and what it was before."""

    deadline: datetime
    former: Level


def read_level(database: Database[Any]) -> Level:
    """The present level; asking for it takes the right to change it."""
    reply = translate_errors(lambda: _command(database, {"profile": -1}))
    return Level(
        int(reply["was"]),
        int(reply.get("slowms", 100)),
        float(reply.get("sampleRate", 1.0)),
        reply.get("filter"),
    )


def server_time(database: Database[Any]) -> datetime:
    """The server's clock, by which the profiler's times are."""
    reply = translate_errors(lambda: hello(database))
    return reply["localTime"].replace(tzinfo=UTC)  # type: ignore[no-any-return]


def hello(database: Database[Any]) -> dict[str, Any]:
    """What the server says of itself."""
    return database.client.admin.command("hello", maxTimeMS=COMMAND_MILLISECONDS_MAX)


def raise_level(database: Database[Any], former: Level, deadline: datetime) -> None:
    """Let the profiler record every operation until a deadline by the server's clock."""
    mark = MARK + json_util.dumps(former.as_command(), json_options=json_util.CANONICAL_JSON_OPTIONS)
    matches = {"ts": {"$lt": deadline}, "appName": {"$ne": mark}}
    translate_errors(lambda: _command(database, {"profile": 1, "filter": matches}))


def set_back(database: Database[Any], former: Level) -> None:
    """Set the former level, unless another one was set since."""
    if raised_by_recording(read_level(database)) is not None:
        translate_errors(lambda: _command(database, former.as_command()))


def raised_by_recording(present: Level) -> Raised | None:
    """The recording that raised this level; None if none did."""
    values = list(_leaves(present.filter))
    marks = [each for each in values if isinstance(each, str) and each.startswith(MARK)]
    deadlines = [each for each in values if isinstance(each, datetime)]
    if not marks or not deadlines:
        return None
    command = json_util.loads(marks[0].removeprefix(MARK))
    former = command.get("filter")
    level = Level(
        int(command["profile"]),
        int(command["slowms"]),
        float(command["sampleRate"]),
        former if isinstance(former, Mapping) else None,
    )
    return Raised(deadlines[0].replace(tzinfo=UTC), level)


def restore_profiler(database: Database[Any]) -> str | None:
    """Set the level back where a recording was killed and its time is over; the sentence that says so."""
    raised = raised_by_recording(read_level(database))
    if raised is None or server_time(database) < raised.deadline + timedelta(seconds=1):
        return None
    set_back(database, raised.former)
    return f"A recording was killed; the profiler of {database.name} is back at level {raised.former.level}."


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _command(database: Database[Any], body: Mapping[str, Any]) -> dict[str, Any]:
    return database.command({**body, "comment": "treadle record"}, maxTimeMS=COMMAND_MILLISECONDS_MAX)
