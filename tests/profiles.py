"""Servers that lack something: tables of hosted engines, and a proxy in front of a real mongod.

`HOSTED` has the capabilities of two engines as their documentation states them.
Neither was run.

The proxy reads each command of MongoDB's wire protocol, refuses what a profile
says that the server lacks, and removes fields from replies. The real server
performs everything else.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import bson
from bson.codec_options import CodecOptions, DatetimeConversion

from tests.kit.faults import HEADER, OP_MSG, Proxy, _end, _read_message
from treadle.plan.capabilities import Capabilities
from treadle.server.local import LocalServer

Raw = dict[str, Any]
# What is decoded is encoded again as it was, dates of any year included.
OPTIONS: CodecOptions[Raw] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)
OP_REPLY = 1
REPLY_HEAD = 20
NOT_SUPPORTED = 115
UNKNOWN_STAGE = 40324
SET_FIELDS = (
    "setName",
    "setVersion",
    "hosts",
    "primary",
    "me",
    "electionId",
    "lastWrite",
    "passives",
    "arbiters",
)
HISTORY_FIELDS = ("operationTime", "$clusterTime")
WRITES = ("insert", "update", "delete", "findAndModify")


@dataclass(frozen=True)
class Profile:
    """What a server refuses, and what its replies lack."""

    name: str
    refuse: Callable[[Raw], tuple[int, str] | None] = lambda body: None
    # Fields of every reply, and of how the server describes itself, that are left out; and some that are set.
    hidden: tuple[str, ...] = ()
    hello_hidden: tuple[str, ...] = ()
    hello: tuple[tuple[str, Any], ...] = ()


def stages_of(body: Raw) -> Iterator[Raw]:
    """The stages of a pipeline, also of one that is only explained."""
    inner = body["explain"] if isinstance(body.get("explain"), dict) else body
    if isinstance(inner.get("pipeline"), list):
        yield from inner["pipeline"]


def lacks_options(body: Raw, *names: str) -> tuple[int, str] | None:
    if next(iter(body)) in ("create", "collMod"):
        for name in names:
            if name in body:
                return NOT_SUPPORTED, f"{name} is not supported"
    return None


# Everything that MongoDB 6.0 has.
MONGODB = Capabilities(
    transactions=True,
    transaction_seconds=60,
    retryable_writes=True,
    streams=True,
    pre_images=True,
    pipeline_updates=True,
    merges=True,
    unions=True,
    graph_lookups=True,
    snapshots=True,
    time_series=True,
    validators=True,
)
HOSTED = {
    # Its change streams are of the whole cluster, and their events have no cluster time.
    "azure-documentdb": replace(
        MONGODB,
        transaction_seconds=30,
        operations_max=25_000,
        streams=False,
        pre_images=False,
        time_series=False,
    ),
    # 8.0.2 and newer: earlier versions have no retryable writes.
    "aws-documentdb": replace(
        MONGODB,
        transaction_seconds=30,
        operations_max=25_000,
        pre_images=False,
        merges=False,
        graph_lookups=False,
        time_series=False,
    ),
}


# -- the wire ----------------------------------------------------------------------------------------


class ProfileProxy(Proxy):
    """A proxy through which a server looks like another engine."""

    def __init__(self, server: LocalServer, profile: Profile) -> None:
        self.profile = profile
        super().__init__(server)

    def _requests(self, client: socket.socket, server: socket.socket, lost: set[int]) -> None:
        while True:
            message = _read_message(client)
            _, number, _, kind = HEADER.unpack_from(message)
            if kind == OP_MSG:
                _, body = body_of(message)
                refusal = self.profile.refuse(body)
                if refusal is not None:
                    code, words = refusal
                    client.sendall(reply_to(number, {"ok": 0.0, "code": code, "errmsg": words}))
                    continue
            server.sendall(message)

    def _replies(self, client: socket.socket, server: socket.socket, lost: set[int]) -> None:
        while True:
            message = _read_message(server)
            kind = HEADER.unpack_from(message)[3]
            start, body = body_of(message) if kind == OP_MSG else (HEADER.size + REPLY_HEAD, {})
            if kind == OP_REPLY:
                body = bson.decode(message[start : _end(message, start)], OPTIONS)
            client.sendall(with_body(message, start, body) if self._change(body) else message)

    def _change(self, body: Raw) -> bool:
        greets = "maxWireVersion" in body
        hidden = [*self.profile.hidden, *(self.profile.hello_hidden if greets else ())]
        changed = False
        for name in hidden:
            changed = body.pop(name, None) is not None or changed
        if greets and self.profile.hello:
            body.update(self.profile.hello)
            changed = True
        return changed


def body_of(message: bytes) -> tuple[int, Raw]:
    """Where the body of a message is, and what it says."""
    offset = HEADER.size + 4
    while message[offset] == 1:
        offset += 1 + int.from_bytes(message[offset + 1 : offset + 5], "little")
    start = offset + 1
    return start, bson.decode(message[start : _end(message, start)], OPTIONS)


def with_body(message: bytes, start: int, body: Raw) -> bytes:
    """The message with another body; sequences of documents stay."""
    _, number, answered, kind = HEADER.unpack_from(message)
    rest = message[HEADER.size : start] + bson.encode(body) + message[_end(message, start) :]
    return HEADER.pack(HEADER.size + len(rest), number, answered, kind) + rest


def reply_to(number: int, body: Raw) -> bytes:
    rest = b"\0\0\0\0\0" + bson.encode(body)
    return HEADER.pack(HEADER.size + len(rest), 0, number, OP_MSG) + rest
