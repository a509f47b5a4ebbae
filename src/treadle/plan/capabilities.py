"""What the server at hand can do; read once per Store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.plan import Plan, database_command

# MongoDB's own default for the life of a session.
SESSION_MINUTES = 30


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The facts on which plans depend."""

    transactions: bool
    version: tuple[int, ...]
    session_timeout_seconds: float = SESSION_MINUTES * 60.0


def read_capabilities() -> Plan[Capabilities]:
    """Ask the server."""
    hello = yield from database_command({"hello": 1}, writes=False, admin=True)
    build = yield from database_command({"buildInfo": 1}, writes=False, admin=True)
    return capabilities_of(hello, build)


def capabilities_of(hello: Mapping[str, Any], build: Mapping[str, Any]) -> Capabilities:
    clustered = "setName" in hello or hello.get("msg") == "isdbgrid"
    # A server that has no sessions has no transactions either.
    minutes = hello.get("logicalSessionTimeoutMinutes")
    version = tuple(int(part) for part in build["versionArray"][:3])
    return Capabilities(clustered and minutes is not None, version, (minutes or SESSION_MINUTES) * 60.0)
