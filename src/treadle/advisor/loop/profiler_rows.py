"""Documents of the server's profiler as requests; nothing here talks to a server.

Left out are cursors that go on, the server's housekeeping, what Treadle's own
tools read, and operations on other databases.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from treadle.advisor.loop.workload_file import Request

OWN_COMMENTS = frozenset({"treadle scan", "treadle record", "treadle trial"})
# What of a command makes its request; names of collections, sessions and times are elsewhere.
_PARTS = {
    "find": ("filter", "sort", "projection", "limit", "skip", "collation", "hint", "let"),
    "aggregate": ("pipeline", "collation", "hint", "let"),
    "count": ("query", "limit", "skip", "collation"),
    "distinct": ("key", "query", "collation"),
    "update": ("q", "u", "multi", "upsert", "arrayFilters", "collation", "c"),
    "delete": ("q", "limit", "collation"),
    "modify": ("query", "update", "remove", "new", "sort", "fields", "upsert", "arrayFilters"),
    "insert": (),
}


class Truncated(Exception):
    """The server kept only the beginning of a command, since it is long."""


def parse(row: Mapping[str, Any], database: str, started: datetime, session: int) -> Request | None:
    """The request of one profiler document; None for what is no client's request."""
    collection = collection_of(row, database)
    if collection is None:
        return None
    command = row.get("command")
    if not isinstance(command, Mapping):
        return None
    if "$truncated" in command:
        raise Truncated
    operation = _operation(str(row.get("op")), command)
    if operation is None:
        return None
    body = {name: command[name] for name in _PARTS[operation] if name in command}
    moment = row.get("ts")
    at = (moment - started).total_seconds() if isinstance(moment, datetime) else 0.0
    returned = row.get("nreturned", row.get("nMatched", row.get("ndeleted", row.get("ninserted", 0))))
    return Request(
        operation,
        collection,
        body,
        max(0.0, at),
        _number(row.get("millis")),
        int(_number(row.get("docsExamined"))),
        int(_number(returned)),
        int(_number(row.get("responseLength"))),
        str(row.get("planSummary", "")).partition(" ")[0],
        session,
    )


def collection_of(row: Mapping[str, Any], database: str) -> str | None:
    """The collection of a client's operation; None for anything else."""
    namespace = row.get("ns")
    if not isinstance(namespace, str) or not namespace.startswith(f"{database}."):
        return None
    collection = namespace[len(database) + 1 :]
    if not collection or collection.startswith(("system.", "$cmd")):
        return None
    command = row.get("command")
    own = isinstance(command, Mapping) and command.get("comment") in OWN_COMMENTS
    return None if own or row.get("op") in ("getmore", "killcursors") else collection


def session_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """The client and session of an operation."""
    command = row.get("command")
    lsid = command.get("lsid") if isinstance(command, Mapping) else None
    identity = lsid.get("id") if isinstance(lsid, Mapping) else None
    return str(row.get("client", "")), repr(identity)


def _operation(kind: str, command: Mapping[str, Any]) -> str | None:
    if kind == "insert" and "aggregate" in command:
        # What `$out` writes.
        return "aggregate"
    if kind in ("insert", "update"):
        return kind
    if kind == "remove":
        return "delete"
    for name in ("find", "aggregate", "count", "distinct"):
        if name in command:
            return name
    return "modify" if "findAndModify" in command or "findandmodify" in command else None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if 0 <= value < 1e15 else 0.0
