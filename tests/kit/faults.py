"""Faults at the n-th command: the server's own fail point, and a proxy that loses replies.

The proxy forwards MongoDB's wire protocol byte by byte and reads just enough
of each request to know its command. A reply that is dropped has been produced
in full by the server: the command was done, and its client never hears of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import bson
from pymongo import MongoClient

from tests.kit.command_log import GREETINGS, CommandLog
from treadle.server.local import LocalServer

# The proxy counts neither these nor anything else that is not part of a write.
UNCOUNTED = GREETINGS | {"killCursors"}
WRITES = ("insert", "update", "delete", "findAndModify")
COMMIT = ("commitTransaction",)
COMMANDS = (*WRITES, "find", "aggregate", "getMore", *COMMIT, "abortTransaction")
HEADER = struct.Struct("<iiii")
OP_MSG = 2013
MESSAGE_BYTES_MAX = 48_000_000


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong at one command: by the server's fail point, or in the proxy if it names one of its faults."""

    name: str
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    times: int = 1
    commands: tuple[str, ...] = COMMANDS
    proxy: str = ""


CLOSED = {"closeConnection": True}
REPLY_LOST = Fault("reply-lost", proxy="drop_reply")
# The driver retries once by itself; here that fails too.
REPLY_LOST_TWICE = Fault("reply-lost-twice", proxy="drop_reply", times=2)
LOST_REPLIES = [REPLY_LOST, REPLY_LOST_TWICE]
# For writes that read much: the driver repeats a read whose reply is lost, and nothing was changed.
LOST_REPLIES_OF_WRITES = [dataclasses.replace(each, commands=(*WRITES, *COMMIT)) for each in LOST_REPLIES]
FAULTS = [
    Fault("connection-closed", CLOSED),
    Fault("connection-closed-twice", CLOSED, times=2),
    Fault("conflict", {"errorCode": 112, "errorLabels": ["TransientTransactionError"]}),
    Fault("conflict-unlabelled", {"errorCode": 112, "errorLabels": []}),
    Fault("shutting-down", {"errorCode": 91, "errorLabels": ["RetryableWriteError"]}, times=2),
    Fault("interrupted", {"errorCode": 11600, "errorLabels": ["RetryableWriteError"]}),
    *LOST_REPLIES,
    Fault("request-lost", proxy="close_before"),
]
COMMIT_FAULTS = [
    Fault("commit-closed-thrice", CLOSED, times=3, commands=COMMIT),
    Fault("commit-reply-lost-thrice", proxy="drop_reply", times=3, commands=COMMIT),
    Fault("commit-timed-out", {"writeConcernError": {"code": 64, "errmsg": "waiting timed out"}}, 2, COMMIT),
    Fault("commit-stepping-down", {"writeConcernError": {"code": 91, "errmsg": "shutdown"}}, 1, COMMIT),
    Fault("commit-unsatisfiable", {"writeConcernError": {"code": 100, "errmsg": "too few"}}, 1, COMMIT),
    Fault("commit-refused", {"errorCode": 20, "errorLabels": []}, 1, COMMIT),
]


@contextlib.contextmanager
def fail_point(
    client: MongoClient[Any],
    log: CommandLog,
    *,
    skip: int,
    times: int,
    app: str,
    commands: Collection[str] = COMMANDS,
    **data: Any,
) -> Iterator[Callable[[], bool]]:
    """After `skip` of these commands of the client named `app`, the next `times` fail as `data` says.

    Yields whether it came to that.

    The fail point can skip, or fail some times, but not both; so it is set
    when the log sees that the command in question is about to be sent. There is
    one fail point per server; the name of the client tells whose commands fail.
    """
    document = {"failCommands": list(commands), "appName": app, **data}
    on = {"configureFailPoint": "failCommand", "mode": {"times": times}, "data": document}
    answers: list[Any] = []
    log.before(commands, skip, lambda: answers.append(client.admin.command(on)))
    try:
        yield lambda: bool(answers)
    finally:
        log.clear()
        client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})


class Proxy:
    """A TCP proxy on 127.0.0.1 in front of one mongod, with a fault for the n-th command."""

    def __init__(self, server: LocalServer) -> None:
        self._target = server.port
        self._lock = threading.Lock()
        self._strike: Strike | None = None
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        login = server.uri.removeprefix("mongodb://").rpartition("@")[0]
        options = "authSource=admin&directConnection=true&serverMonitoringMode=poll"
        self.uri = f"mongodb://{login}@127.0.0.1:{self.port}/?{options}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and close every connection."""
        _close(self._listener)
        with self._lock:
            for each in list(self._open):
                _close(each)

    @contextlib.contextmanager
    def drop_reply(self, skip: int, *, names: Collection[str] = (), times: int = 1) -> Iterator[Strike]:
        """Let the command after `skip` others be done, and lose its reply with the connection."""
        yield from self._arm(Strike(skip, times, frozenset(names), forward=True))

    @contextlib.contextmanager
    def close_before(self, skip: int, *, names: Collection[str] = (), times: int = 1) -> Iterator[Strike]:
        """Lose the command after `skip` others, before the server sees it."""
        yield from self._arm(Strike(skip, times, frozenset(names), forward=False))

    def _arm(self, strike: Strike) -> Iterator[Strike]:
        with self._lock:
            self._strike = strike
        try:
            yield strike
        finally:
            with self._lock:
                self._strike = None

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            lost: set[int] = set()
            for pump in (self._requests, self._replies):
                threading.Thread(target=self._pump, args=(pump, client, server, lost), daemon=True).start()

    def _pump(self, pump: Any, client: socket.socket, server: socket.socket, lost: set[int]) -> None:
        with contextlib.suppress(OSError, EOFError):
            pump(client, server, lost)
        for each in (client, server):
            _close(each)
        with self._lock:
            self._open -= {client, server}

    def _requests(self, client: socket.socket, server: socket.socket, lost: set[int]) -> None:
        while True:
            message = _read_message(client)
            _, number, _, _ = HEADER.unpack_from(message)
            name = command_name(message)
            with self._lock:
                struck = self._strike is not None and self._strike.strikes(name)
                forward = struck and self._strike is not None and self._strike.forward
            if struck and not forward:
                return
            if struck:
                lost.add(number)
            server.sendall(message)

    def _replies(self, client: socket.socket, server: socket.socket, lost: set[int]) -> None:
        while True:
            message = _read_message(server)
            _, _, answered, _ = HEADER.unpack_from(message)
            if answered in lost:
                return
            client.sendall(message)


class Strike:
    """Which commands are struck; counts those that pass."""

    def __init__(self, skip: int, times: int, names: frozenset[str], forward: bool) -> None:
        self._skip = skip
        self._times = times
        self._names = names
        self.forward = forward
        self.struck = 0

    def strikes(self, name: str) -> bool:
        """Whether to strike this command; called once for each, in order."""
        if name in UNCOUNTED or (self._names and name not in self._names):
            return False
        if self._skip > 0:
            self._skip -= 1
            return False
        if self.struck >= self._times:
            return False
        self.struck += 1
        return True


def command_name(message: bytes) -> str:
    """The command of a request; 'hello' for the old kinds of message that only greet."""
    _, _, _, kind = HEADER.unpack_from(message)
    if kind != OP_MSG:
        return "hello"
    offset = HEADER.size + 4
    while message[offset] == 1:
        # A sequence of documents may stand before the body.
        offset += 1 + int.from_bytes(message[offset + 1 : offset + 5], "little")
    return next(iter(bson.decode(message[offset + 1 : _end(message, offset + 1)])))


def _end(message: bytes, offset: int) -> int:
    return offset + int.from_bytes(message[offset : offset + 4], "little")


def _read_message(source: socket.socket) -> bytes:
    head = _read(source, HEADER.size)
    length = HEADER.unpack(head)[0]
    if not HEADER.size <= length <= MESSAGE_BYTES_MAX:
        raise EOFError
    return head + _read(source, length - HEADER.size)


def _read(source: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = source.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _close(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        each.close()
