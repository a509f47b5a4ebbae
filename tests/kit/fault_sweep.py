"""A write with a fault at each of its commands, or killed before each of them.

What every sweep holds: a write that was acknowledged is there exactly once; one
that raised is there exactly once or not at all; nothing is pending after
`recover`; and the check of the test itself passes.

By default a sweep is thinned: every second command of a write meets a fault, and
the faults take turns. `TREADLE_FAULTS=all` lets each command meet each
fault, and kills before each writing command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
import zlib
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient, common
from pymongo.database import Database
from pymongo.errors import PyMongoError

from tests.kit import processes
from tests.kit.command_log import CommandLog
from tests.kit.faults import COMMIT, FAULTS, WRITES, Fault, Proxy, fail_point
from tests.support import shared_server
from treadle import DataError, Document, Limits, Store
from treadle.server.local import LocalServer

ALL = os.environ.get("TREADLE_FAULTS") == "all"
APP = "fault-sweep"
# No write of the tests sends as many; a sweep that gets here does not end.
COMMANDS_MAX = 300
KILLS_MAX = 2
# The driver looks for a lost server twice a second; a fault must not take that long.
HEARTBEAT_SECONDS = 0.005


def _nothing() -> None: ...


@dataclasses.dataclass(frozen=True)
class Write:
    """A write to sweep, and how its outcome is read.

    `reset` prepares the database. It runs once; before each attempt the
    documents that it left are stored again. `read` returns what callers own; it is compared with its value before the
    write and after one without a fault. Without it, `check` alone decides,
    which is told whether the write was acknowledged. `settle` runs after the
    recovery, for work that only the next run completes. A `refused` write
    raises, and changes nothing.
    """

    name: str
    act: Callable[[Store], Any]
    reset: Callable[[], Any]
    check: Callable[[bool], Any]
    read: Callable[[], Any] = _nothing
    settle: Callable[[], Any] = _nothing
    refused: bool = False


class Snapshot:
    """The documents of a database at one moment, to be stored again."""

    def __init__(self, database: Database[Any]) -> None:
        self._database = database.with_options(codec_options=CodecOptions(RawBSONDocument))
        self._documents = {name: self._read(name) for name in self._names()}

    def _names(self) -> list[str]:
        return self._database.list_collection_names(filter={"type": "collection"})

    def _read(self, name: str) -> list[RawBSONDocument]:
        return list(self._database[name].find())

    def restore(self) -> None:
        for name in self._names():
            documents, stored = self._documents.get(name, []), self._read(name)
            if {each.raw for each in documents} == {each.raw for each in stored}:
                continue
            collection = self._database[name]
            collection.delete_many({})
            if documents:
                collection.insert_many(documents, bypass_document_validation=True)


class Stores:
    """Stores on one database: a sound one, one behind the fail point, one behind the proxy."""

    def __init__(self, sweep: FaultSweep, name: str, models: list[Any], limits: Limits | None) -> None:
        self._sweep, self._models, self._limits = sweep, models, limits
        self.database = sweep.client[name]
        self.sound = Store(self.database, models, limits=limits)
        self._behind = {
            way: Store(client[name], models, limits=limits) for way, client in sweep.clients.items()
        }
        for store in (self.sound, *self._behind.values()):
            store.recover()

    def behind(self, fault: Fault) -> Store:
        """Return the store that meets this fault."""
        return self._behind["proxy" if fault.proxy else "fail point"]

    def again(self, limits: Limits | None = None) -> Stores:
        """Return new stores on the same database, perhaps with other limits."""
        return Stores(self._sweep, self.database.name, self._models, limits or self._limits)

    def pending(self) -> list[Any]:
        """Return the work that was committed and not yet carried out."""
        return list(self.database["treadle.intents"].find())


class FaultSweep:
    """A server with faults: its fail point, a proxy in front of it, and processes to kill."""

    def __init__(self, server: LocalServer, proxy: Proxy) -> None:
        self.server, self.proxy = server, proxy
        self.client: MongoClient[Any] = MongoClient(server.uri)
        self.log = CommandLog()
        # While the monitor streams, the driver notices a closed connection late.
        uris = {"fail point": f"{server.uri}&serverMonitoringMode=poll", "proxy": proxy.uri}
        self.clients = {
            way: MongoClient[Any](uri, event_listeners=[self.log], appname=APP) for way, uri in uris.items()
        }

    def close(self) -> None:
        for client in (self.client, *self.clients.values()):
            client.close()

    def stores(self, name: str, models: list[type[Document]], limits: Limits | None = None) -> Stores:
        """Set up an empty database of this name, and return stores on it."""
        self.client.drop_database(name)
        Store(self.client[name], models, limits=limits).setup()
        return Stores(self, name, models, limits)

    def end_sessions(self) -> None:
        """End the transactions that a fault left open, which would keep their locks for seconds."""
        self.client.admin.command({"killAllSessions": []})

    @contextlib.contextmanager
    def arm(
        self, fault: Fault, skip: int, *, log: CommandLog | None = None, app: str = APP
    ) -> Generator[Callable[[], bool]]:
        """Let the fault happen at the command after `skip` others; yields whether it was met so far."""
        log = log or self.log
        if fault.proxy:
            drop: Any = getattr(self.proxy, fault.proxy)
            with drop(skip, names=fault.commands, times=fault.times) as strike:
                yield lambda: strike.struck > 0
            return
        options: dict[str, Any] = {"commands": fault.commands, "app": app, **fault.data}
        with fail_point(self.client, log, skip=skip, times=fault.times, **options) as is_met:
            yield is_met

    def at_each_command(
        self, name: str, faults: Sequence[Fault], attempt: Callable[[Fault, int], bool], *, every: int = 1
    ) -> int:
        """Call `attempt(fault, skip)` for the commands in turn, until it says that it met no fault.

        Thinned, one fault after the other takes its turn, at one of `every` so
        many commands; otherwise each goes through all commands. Returns the
        number of faults that were met.
        """
        assert 1 == len({fault.commands for fault in faults}), "they would not count the same commands"
        if ALL:
            return sum(
                self._attempts(name, lambda turn, fault=fault: fault, range(COMMANDS_MAX), attempt)
                for fault in faults
            )
        first = zlib.crc32(name.encode())
        # The first command always, for writes of a single one.
        skips = [0, *range(1 + first % every, COMMANDS_MAX, every)]
        return self._attempts(name, lambda turn: faults[(first + turn) % len(faults)], skips, attempt)

    def _attempts(
        self,
        name: str,
        choose: Callable[[int], Fault],
        skips: Sequence[int],
        attempt: Callable[[Fault, int], bool],
    ) -> int:
        for turn, skip in enumerate(skips):
            fault = choose(turn)
            try:
                if not attempt(fault, skip):
                    return turn
            except BaseException as error:
                error.add_note(f"{name}: {fault.name} after {skip} commands")
                raise
        raise AssertionError(f"{name} sends more than {COMMANDS_MAX} commands")

    def outcomes(self, stores: Stores, write: Write) -> tuple[Any, Any]:
        """What callers own before the write, and after it without any fault."""
        _, before, after = self._prepare(stores, write)
        return before, after

    def _prepare(self, stores: Stores, write: Write) -> tuple[Snapshot, Any, Any]:
        """Prepare the database, and perform the write without a fault."""
        write.reset()
        snapshot = Snapshot(stores.database)
        before = write.read()
        with contextlib.suppress(*[DataError] * write.refused):
            write.act(stores.sound)
        after = write.read()
        self._check(stores, write, not write.refused, before, after)
        return snapshot, before, after

    def _check(self, stores: Stores, write: Write, acknowledged: bool, before: Any, after: Any) -> None:
        write.settle()
        outcome = write.read()
        if acknowledged:
            assert after == outcome
        else:
            assert outcome in (before, after)
        assert [] == stores.pending()
        write.check(acknowledged)

    def strike(
        self, stores: Stores, write: Write, faults: Sequence[Fault] = FAULTS, *, every: int = 2
    ) -> int:
        """Sweep the faults over the commands of a write. Returns the number of faults that were met."""
        snapshot, before, after = self._prepare(stores, write)

        def attempt(fault: Fault, skip: int) -> bool:
            store = stores.behind(fault)
            snapshot.restore()
            acknowledged = False
            with self.arm(fault, skip) as is_met:
                with contextlib.suppress(PyMongoError, DataError):
                    write.act(store)
                    acknowledged = True
                met = is_met()
            if not met:
                assert acknowledged is not write.refused
            self.end_sessions()
            store.recover()
            self._check(stores, write, acknowledged, before, after)
            return met

        return self.at_each_command(write.name, faults, attempt, every=every)

    def kill(
        self,
        stores: Stores,
        write: Write,
        act: processes.Act,
        *arguments: Any,
        commands: Collection[str] = (*WRITES, *COMMIT),
    ) -> int:
        """Kill a process before its writing commands, at some of them if thinned. Returns the number of kills.

        Killing before each *writing* command covers every moment between two
        commands, because reads leave nothing behind. `act` is performed in the
        process as `processes.die_before` says.
        """
        snapshot, before, after = self._prepare(stores, write)
        snapshot.restore()
        with MongoClient[Any](self.server.uri, event_listeners=[self.log]) as client:
            perform = act(client, *arguments)
            self.log.clear()
            perform()
            count = self.log.count(commands)
        assert count > 0
        skips = range(count)
        chosen = skips if ALL else random.Random(write.name).sample(skips, min(KILLS_MAX, count))
        for skip in sorted(chosen):
            snapshot.restore()
            assert processes.kill_before(self.server.uri, commands, skip, act, *arguments)
            self.end_sessions()
            # As another process would: a new Store recovers, and goes by nothing but what is stored.
            self._check(stores.again(), write, False, before, after)
        return len(chosen)


@contextlib.contextmanager
def quick_heartbeats() -> Generator[None]:
    """Let drivers notice a lost server at once."""
    interval = common.MIN_HEARTBEAT_INTERVAL
    common.MIN_HEARTBEAT_INTERVAL = HEARTBEAT_SECONDS
    try:
        yield
    finally:
        common.MIN_HEARTBEAT_INTERVAL = interval


@pytest.fixture
def fast_heartbeat() -> Generator[None]:
    """Let the clients of a test notice a lost server at once."""
    with quick_heartbeats():
        yield


@pytest.fixture(scope="module")
def fault_sweep() -> Generator[FaultSweep]:
    """One server with faults for all tests of a file; it soon ends transactions of dead clients."""
    with (
        quick_heartbeats(),
        shared_server(transactionLifetimeLimitSeconds=3) as server,
        Proxy(server) as proxy,
        contextlib.closing(FaultSweep(server, proxy)) as sweep,
    ):
        yield sweep


@pytest.fixture(scope="module")
def _points(request: pytest.FixtureRequest) -> Generator[list[int]]:
    """The numbers of faults of each test of a file; their sum is printed at the end."""
    points: list[int] = []
    yield points
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        sys.stdout.write(f"\n{sum(points)} faults met in {request.module.__name__}\n")


@pytest.fixture
def record_points(_points: list[int], record_property: Any) -> Callable[[int], None]:
    """Record how many faults a test has met."""

    def record(points: int) -> None:
        _points.append(points)
        record_property("faults_met", points)

    return record
