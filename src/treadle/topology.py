"""What the server at hand can do; read once per Store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.plan import Plan, database_command


@dataclass(frozen=True, slots=True)
class Topology:
    """The facts on which plans depend."""

    transactions: bool
    version: tuple[int, ...]
    session_timeout_seconds: float = 1800.0


def read_topology() -> Plan[Topology]:
    """Ask the server."""
    hello = yield from database_command({"hello": 1}, writes=False, admin=True)
    build = yield from database_command({"buildInfo": 1}, writes=False, admin=True)
    return topology_of(hello, build)


def topology_of(hello: Mapping[str, Any], build: Mapping[str, Any]) -> Topology:
    clustered = "setName" in hello or hello.get("msg") == "isdbgrid"
    minutes = hello.get("logicalSessionTimeoutMinutes") or 30
    version = tuple(int(part) for part in build["versionArray"][:3])
    return Topology(clustered and minutes is not None, version, minutes * 60.0)
