"""What the server at hand can do; read once per Store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from treadle.errors import TreadleError, UsageError
from treadle.plan import Plan, database_command, transact, wait

R = TypeVar("R")

REPLICA_SET_OF_ONE = (
    "make it a replica set of one (restart mongod with --replSet rs0, then run rs.initiate() once in mongosh)"
)

# MongoDB's own default for the life of a session.
SESSION_MINUTES = 30
SNAPSHOTS_SINCE = (5, 0)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The facts on which plans depend."""

    transactions: bool
    version: tuple[int, ...]
    session_timeout_seconds: float = SESSION_MINUTES * 60.0

    @property
    def streams(self) -> bool:
        """Whether there are change streams: on the same servers as transactions."""
        return self.transactions

    @property
    def snapshots(self) -> bool:
        """Whether a session can read as of one moment without a transaction."""
        return self.version >= SNAPSHOTS_SINCE

    def together(self, make: Callable[[], Plan[R]], pause_seconds: float = 0.0) -> Plan[R]:
        """Run the plan that `make` makes in a transaction; where there are none, just so after a pause."""
        if self.transactions:
            return (yield from transact(make))
        if pause_seconds:
            yield from wait(pause_seconds)
        return (yield from make())

    def require_transactions(
        self,
        what: str,
        instead: str | None = None,
        code: str = "transactions-unavailable",
        error: type[TreadleError] = UsageError,
    ) -> None:
        """Refuse what a standalone server cannot do; `instead` is another way out."""
        if not self.transactions:
            choices = REPLICA_SET_OF_ONE + (f", or {instead}" if instead else "")
            raise error(
                f"{what} needs transactions, which this standalone server does not have; {choices}", code=code
            )


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
