"""How long the server's history still reaches back from where the worker stands.

The oplog is a ring: once it is full, its oldest entries go as new ones come.
A worker whose place is overtaken has missed changes and must look at
everything. `serverStatus` tells the oldest and the newest entry, and whether
anything has been cut off since the server started.
"""

from __future__ import annotations

from dataclasses import dataclass

from bson import Timestamp
from pymongo.errors import OperationFailure

from treadle.plan import Plan, Raw, database_command

# Below this part of the window it is time to act.
LOW = 0.25
# Sections of the reply that are not needed.
_UNREAD = ("wiredTiger", "metrics", "locks", "tcmalloc", "network", "transactions", "opLatencies", "repl")
# How a resume token begins: the type of a timestamp; its seconds and its number follow.
_TIMESTAMP = "82"


@dataclass(frozen=True)
class Window:
    """The server's history: its first and last entry."""

    first: Timestamp
    last: Timestamp
    # Whether nothing was cut off yet, so that the window still grows.
    growing: bool

    @property
    def seconds(self) -> int:
        return max(0, self.last.time - self.first.time)


@dataclass(frozen=True)
class Headroom:
    """How long until the oplog passes a place, at the pace of its own window."""

    seconds: float
    window_seconds: float
    # Whether no more than a quarter of the window is left.
    low: bool


def read_window() -> Plan[Window | None]:
    """The server's history; None where it does not say: no right to ask, or a router of shards."""
    command = {"serverStatus": 1, "oplog": 1, **dict.fromkeys(_UNREAD, 0)}
    try:
        reply = yield from database_command(command, writes=False, admin=True)
    except OperationFailure:
        return None
    oplog = reply.get("oplog") or {}
    if "earliestOptime" not in oplog or "latestOptime" not in oplog:
        return None
    cut = (reply.get("oplogTruncation") or {}).get("truncateCount", 0)
    # Some versions wrap a time with the number of the election.
    first, last = (
        each["ts"] if isinstance(each, dict) else each
        for each in (oplog["earliestOptime"], oplog["latestOptime"])
    )
    return Window(first, last, not cut)


def headroom(window: Window | None, place: Raw) -> Headroom | None:
    """What is left between the start of history and a place in it."""
    at = time_of(place)
    if window is None or at is None:
        return None
    seconds = float(max(0, min(at.time, window.last.time) - window.first.time))
    # As long as nothing was cut off, the start of history does not come closer.
    near = not window.growing and seconds <= LOW * window.seconds
    return Headroom(seconds, window.seconds, near or at < window.first)


def time_of(place: Raw) -> Timestamp | None:
    """When a place was: by its token, which moves on while nothing happens, else by its last event."""
    token = (place.get("token") or {}).get("_data")
    if isinstance(token, str) and token.startswith(_TIMESTAMP):
        try:
            return Timestamp(int(token[2:10], 16), int(token[10:18], 16))
        except ValueError:
            pass
    start: Timestamp | None = place.get("start")
    return start
