"""What the server at hand can do; read once per Store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from treadle.errors import TreadleError, UsageError
from treadle.plan import Plan, database_command, transact

R = TypeVar("R")

REPLICA_SET_OF_ONE = (
    "make it a replica set of one (restart mongod with --replSet rs0, then run rs.initiate() once in mongosh)"
)

SNAPSHOTS_SINCE = (5, 0)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The facts on which plans depend."""

    transactions: bool
    version: tuple[int, ...]

    @property
    def streams(self) -> bool:
        """Whether there are change streams: on the same servers as transactions."""
        return self.transactions

    @property
    def snapshots(self) -> bool:
        """Whether a session can read as of one moment without a transaction."""
        return self.version >= SNAPSHOTS_SINCE

    def together(self, make: Callable[[], Plan[R]]) -> Plan[R]:
        """The plan that `make` makes, in a transaction where the server has them."""
        return transact(make) if self.transactions else make()

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


def clock() -> Plan[datetime]:
    """The server's time: a client's own may be wrong."""
    now: datetime = (yield from database_command({"hello": 1}, writes=False, admin=True))["localTime"]
    return now


def read_capabilities() -> Plan[Capabilities]:
    """Ask the server."""
    hello = yield from database_command({"hello": 1}, writes=False, admin=True)
    build = yield from database_command({"buildInfo": 1}, writes=False, admin=True)
    return capabilities_of(hello, build)


def capabilities_of(hello: Mapping[str, Any], build: Mapping[str, Any]) -> Capabilities:
    clustered = "setName" in hello or hello.get("msg") == "isdbgrid"
    # A server that has no sessions has no transactions either.
    sessions = hello.get("logicalSessionTimeoutMinutes") is not None
    return Capabilities(clustered and sessions, tuple(int(part) for part in build["versionArray"][:3]))
