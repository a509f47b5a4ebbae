"""A write with a fault at each of its commands, for patterns with writes of their own.

The server's fail point closes the connection at the n-th command of the
write. Whatever was reached then, after `recover` the pattern's own check must
hold; it is told whether the write was acknowledged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import pytest
from pymongo import MongoClient, common
from pymongo.errors import PyMongoError

from tests import faults
from tests.support import shared_server
from treadle import DataError, Document, Limits, Store
from treadle.server.local import LocalServer

APP = "crash-points-of-patterns"
COMMANDS_MAX = 200
CLOSED: dict[str, Any] = {"closeConnection": True}
CONFLICT: dict[str, Any] = {"errorCode": 112, "errorLabels": ["TransientTransactionError"]}
# Once, which the driver may mend by itself; twice, which it does not; and a conflict.
FAULTS: dict[str, tuple[dict[str, Any], int]] = {
    "closed": (CLOSED, 1),
    "closed-twice": (CLOSED, 2),
    "conflict": (CONFLICT, 1),
}


class Crashing:
    """A server with faults, and a store whose client meets them."""

    def __init__(self, server: LocalServer) -> None:
        self.client: MongoClient[Any] = MongoClient(server.uri)
        self.heard = faults.Heard()
        uri = f"{server.uri}&serverMonitoringMode=poll"
        self.meeting: MongoClient[Any] = MongoClient(uri, event_listeners=[self.heard], appname=APP)
        self.points = 0

    def store(self, name: str, models: list[type[Document]], limits: Limits | None = None) -> Store:
        self.client.drop_database(name)
        store = Store(self.meeting[name], models, limits=limits)
        store.setup()
        return store

    def everywhere(
        self,
        store: Store,
        fault: str,
        reset: Callable[[], None],
        act: Callable[[Store], Any],
        check: Callable[[bool], None],
    ) -> int:
        """The fault at each command of `act` in turn, each time after `reset`; how many there were."""
        data, times = FAULTS[fault]
        for skip in range(COMMANDS_MAX):
            reset()
            self.heard.clear()
            acknowledged = False
            with faults.fail_point(self.client, self.heard, skip=skip, times=times, app=APP, **data):
                with contextlib.suppress(PyMongoError, DataError):
                    act(store)
                    acknowledged = True
                met = sum(name in faults.COMMANDS for name in self.heard.names) > skip
            # A transaction that nobody ended would keep its locks for three seconds.
            self.client.admin.command({"killAllSessions": []})
            store.recover()
            check(acknowledged)
            if not met:
                assert acknowledged
                return skip
        raise AssertionError(f"more than {COMMANDS_MAX} commands")

    def close(self) -> None:
        self.client.close()
        self.meeting.close()


@pytest.fixture(scope="module")
def crashing() -> Generator[Crashing]:
    """One server for the crash points of a file."""
    # The driver looks for a lost server twice a second; a crash point must not take that long.
    interval, common.MIN_HEARTBEAT_INTERVAL = common.MIN_HEARTBEAT_INTERVAL, 0.005
    with shared_server(transactionLifetimeLimitSeconds=3) as server:
        made = Crashing(server)
        yield made
        made.close()
    common.MIN_HEARTBEAT_INTERVAL = interval
