"""A replica set of several members on this machine, whose members can be killed, hung and restarted.

For tests of what happens when a server fails: `benchmarks.torture` and the
cluster tests. The caches are small and elections quick. The members end with
this process, however it ends: a keeper process reads from a pipe that nobody
writes to, and kills them when the pipe breaks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError

from treadle.server.local import find_mongod

NAME = "cluster"
READY_SECONDS_MAX = 180.0
POLL_SECONDS = 0.05
ELECTION_MILLISECONDS = 1_000
LOG_BYTES_SHOWN = 2_000

ARGUMENTS = (
    "--replSet", NAME, "--bind_ip", "127.0.0.1", "--nounixsocket", "--oplogSize", "64",
    "--wiredTigerCacheSizeGB", "0.25", "--wiredTigerEngineConfigString", "log=(file_max=16MB)", "--quiet",
)  # fmt: skip
PARAMETERS: Mapping[str, object] = {
    "enableTestCommands": 1,
    "diagnosticDataCollectionEnabled": "false",
    "transactionLifetimeLimitSeconds": 30,
    "shutdownTimeoutMillisForSignaledShutdown": 1_000,
}
# Kills its group, itself included, when its parent is gone; what clears the folder is in no group of it.
KEEPER = """
import os, signal, subprocess, sys
sys.stdin.read()
clear = ["sh", "-c", 'sleep 1; rm -rf "$0"', sys.argv[1]]
subprocess.Popen(clear, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
os.killpg(0, signal.SIGKILL)
"""


class Member:
    """One mongod of the set: its port and folder stay, its process comes and goes."""

    def __init__(self, number: int, folder: Path, port: int, mongod: Path) -> None:
        self.number = number
        self.folder = folder
        self.port = port
        self.mongod = mongod
        self.process: subprocess.Popen[bytes] | None = None
        self.hung = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def runs(self) -> bool:
        """Whether its process is there, hung or not."""
        return self.process is not None and self.process.poll() is None


class Cluster:
    """A running replica set; ends with `stop`, with the `with` block, or with this process."""

    def __init__(
        self,
        members: int = 3,
        *,
        mongod: Path | None = None,
        environment: Mapping[str, str] | None = None,
        parameters: Mapping[str, object] = {},
        election_milliseconds: int = ELECTION_MILLISECONDS,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="treadle-cluster-"))
        self._parameters = {**PARAMETERS, **parameters}
        self._environment = environment
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(self.folder)], stdin=subprocess.PIPE, process_group=0
        )
        binary = find_mongod() if mongod is None else mongod
        ports = _free_ports(members)
        self.members = [
            Member(number, self.folder / str(number), port, binary) for number, port in enumerate(ports)
        ]
        hosts = ",".join(member.address for member in self.members)
        self.uri = f"mongodb://{hosts}/?replicaSet={NAME}"
        try:
            for member in self.members:
                self.start(member, wait=False)
            self._initiate(election_milliseconds)
            self.client: MongoClient[dict[str, Any]] = MongoClient(
                self.uri, serverSelectionTimeoutMS=int(READY_SECONDS_MAX * 1000), heartbeatFrequencyMS=500
            )
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all members and remove their folders."""
        with contextlib.suppress(AttributeError):
            self.client.close()
        for member in self.members:
            if member.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    member.process.kill()
                member.process.wait()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- members ---------------------------------------------------------------------------------

    def start(self, member: Member, *, wait: bool = True, mongod: Path | None = None) -> None:
        """Start a member that does not run; with another mongod from now on, if one is given."""
        member.mongod = mongod or member.mongod
        member.folder.mkdir(exist_ok=True)
        command = [str(member.mongod), "--dbpath", str(member.folder), "--port", str(member.port), *ARGUMENTS]
        for name, value in self._parameters.items():
            command += ["--setParameter", f"{name}={value}"]
        with (member.folder / "output").open("ab") as output:
            # In the keeper's group, which ends with this process.
            member.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                process_group=self._keeper.pid,
                env={**os.environ, **(self._environment or {})},
            )
        member.hung = False
        if wait:
            self._until(
                lambda: self._state(member) in ("PRIMARY", "SECONDARY"), f"{member.address} is not up"
            )

    def kill(self, member: Member) -> None:
        """End a member's process without a word, as by kill -9 or a power cut."""
        if member.process is not None:
            member.process.kill()
            member.process.wait()
        member.hung = False

    def shut_down(self, member: Member) -> None:
        """End a member in order."""
        assert member.process is not None
        member.process.terminate()
        member.process.wait()

    def hang(self, member: Member) -> None:
        """Stop a member's process; its connections stay open and nobody answers."""
        assert member.process is not None
        member.process.send_signal(signal.SIGSTOP)
        member.hung = True

    def resume(self, member: Member) -> None:
        """Let a hung member go on where it was."""
        assert member.process is not None
        member.process.send_signal(signal.SIGCONT)
        member.hung = False

    def step_down(self, seconds: int = 5) -> None:
        """Let the primary hand over to another."""
        # Its own connection goes too; or there is no primary just now.
        with contextlib.suppress(AutoReconnect, OperationFailure):
            self.client.admin.command("replSetStepDown", seconds, secondaryCatchUpPeriodSecs=2, force=True)

    @contextlib.contextmanager
    def direct(self, member: Member, **options: Any) -> Any:
        """A client of this one member, whatever its state."""
        with MongoClient[dict[str, Any]](
            member.address,
            directConnection=True,
            serverSelectionTimeoutMS=2_000,
            connectTimeoutMS=1_000,
            socketTimeoutMS=5_000,
            **options,
        ) as client:
            yield client

    def fail_point(self, member: Member, name: str, mode: Any, **data: Any) -> None:
        """Switch one of the server's own faults on or off at one member."""
        with self.direct(member) as client:
            client.admin.command({"configureFailPoint": name, "mode": mode, "data": data})

    def lag(self, member: Member) -> None:
        """Let a secondary fetch what is written, and apply none of it until `catch_up`."""
        # Else it may hold up another that follows it, and with that the majority.
        for other in self.secondaries:
            if other is not member:
                with self.direct(other) as client:
                    client.admin.command("replSetSyncFrom", self.primary.address)
        self.fail_point(member, "rsSyncApplyStop", "alwaysOn")

    def catch_up(self, member: Member) -> None:
        self.fail_point(member, "rsSyncApplyStop", "off")

    # -- the set -----------------------------------------------------------------------------------

    @property
    def primary(self) -> Member:
        """The member that the others take for the primary; waits for an election."""
        primaries: list[Member] = []

        def look() -> bool:
            primaries[:] = [each for each in self.members if self._state(each) == "PRIMARY"]
            return bool(primaries)

        self._until(look, "there is no primary")
        return primaries[-1]

    @property
    def elected(self) -> bool:
        """Whether there is a primary just now."""
        return any(self._state(member) == "PRIMARY" for member in self.members)

    def uri_of(self, database: str) -> str:
        """The address of one database of the set."""
        return self.uri.replace("/?", f"/{database}?")

    @property
    def secondaries(self) -> list[Member]:
        primary = self.primary
        return [member for member in self.members if member is not primary and member.runs]

    def heal(self) -> None:
        """Start and resume every member, and wait until the set is whole."""
        for member in self.members:
            if not member.runs:
                self.start(member, wait=False)
            elif member.hung:
                self.resume(member)
        self.wait_until_healthy()

    def wait_until_healthy(self) -> None:
        """Wait until one member is the primary and all others follow it."""

        def healthy() -> bool:
            states = sorted(self._state(member) for member in self.members)
            if states != ["PRIMARY", *["SECONDARY"] * (len(self.members) - 1)]:
                return False
            # What is written from here on is on a majority of the set as it is now.
            self.client.admin.command("appendOplogNote", 1, data={"whole": 1}, writeConcern={"w": "majority"})
            return True

        self._until(healthy, "the set does not become whole")

    def _initiate(self, election_milliseconds: int) -> None:
        # The tags let a client's read preference name one member.
        members = [
            {"_id": each.number, "host": each.address, "tags": {"member": str(each.number)}}
            for each in self.members
        ]
        settings = {
            "electionTimeoutMillis": election_milliseconds,
            "heartbeatIntervalMillis": election_milliseconds // 4,
            "heartbeatTimeoutSecs": 2,
            "catchUpTimeoutMillis": 2_000,
        }
        config = {"_id": NAME, "members": members, "settings": settings}

        def initiate() -> bool:
            with self.direct(self.members[0]) as client:
                client.admin.command("replSetInitiate", config)
            return True

        self._until(initiate, "the set cannot be initiated")

    def _state(self, member: Member) -> str:
        if not member.runs or member.hung:
            return "DOWN"
        try:
            with self.direct(member) as client:
                hello = client.admin.command("hello")
        except PyMongoError:
            return "DOWN"
        if hello.get("isWritablePrimary"):
            return "PRIMARY"
        return "SECONDARY" if hello.get("secondary") else "OTHER"

    def _until(self, ready: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + READY_SECONDS_MAX
        last: object = ""
        while time.monotonic() < deadline:
            try:
                if ready():
                    return
            except PyMongoError as error:
                last = error
            time.sleep(POLL_SECONDS)
        tails = [self._tail(member) for member in self.members if not member.runs]
        raise TimeoutError(f"{problem} after {READY_SECONDS_MAX:.0f} s; {last} {' '.join(tails)}")

    def _tail(self, member: Member) -> str:
        with contextlib.suppress(OSError):
            return (member.folder / "output").read_text(errors="replace")[-LOG_BYTES_SHOWN:]
        return ""


def _free_ports(number: int) -> Sequence[int]:
    """Ports that nobody listens on; held all at once, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
