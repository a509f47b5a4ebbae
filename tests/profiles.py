"""Other engines, as their documentation describes them: a proxy in front of a real mongod.

The proxy reads each command of MongoDB's wire protocol, refuses what an engine
says that it lacks, and leaves out of replies what it says that it does not
send. What passes is done by the real server. So a profile shows what Treadle
does about a gap, not that it runs on that engine.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import bson
from bson.codec_options import CodecOptions, DatetimeConversion

from tests.kit.faults import HEADER, OP_MSG, Proxy, _end, _read_message
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
    """What an engine refuses, how it changes a request, and what its replies lack."""

    name: str
    refuse: Callable[[Raw], tuple[int, str] | None] = lambda body: None
    rewrite: Callable[[Raw], bool] = lambda body: False
    # Fields of every reply, and of how the server describes itself, that are left out; and some that are set.
    hidden: tuple[str, ...] = ()
    hello_hidden: tuple[str, ...] = ()
    hello: tuple[tuple[str, Any], ...] = ()


def stages_of(body: Raw) -> Iterator[Raw]:
    """The stages of a pipeline, also of one that is only explained."""
    inner = body["explain"] if isinstance(body.get("explain"), dict) else body
    if isinstance(inner.get("pipeline"), list):
        yield from inner["pipeline"]


def lacks_stages(body: Raw, *names: str) -> tuple[int, str] | None:
    for stage in stages_of(body):
        for name in names:
            if name in stage:
                return UNKNOWN_STAGE, f"Unrecognized pipeline stage name: '{name}'"
    return None


def lacks_options(body: Raw, *names: str) -> tuple[int, str] | None:
    if next(iter(body)) in ("create", "collMod"):
        for name in names:
            if name in body:
                return NOT_SUPPORTED, f"{name} is not supported"
    return None


def stream_of(body: Raw) -> Raw | None:
    return next((stage["$changeStream"] for stage in stages_of(body) if "$changeStream" in stage), None)


# -- the engines -------------------------------------------------------------------------------------


def azure_refuses(body: Raw) -> tuple[int, str] | None:
    stream = stream_of(body)
    if stream is not None:
        if not stream.get("allChangesForCluster"):
            return NOT_SUPPORTED, "change streams are supported at cluster level only"
        if {"startAtOperationTime", "fullDocumentBeforeChange"} & set(stream):
            return NOT_SUPPORTED, "this option of change streams is not supported"
    if next(iter(body)) == "killSessions":
        return NOT_SUPPORTED, "killSessions is restricted"
    return lacks_stages(body, "$changeStreamSplitLargeEvent") or lacks_options(
        body, "timeseries", "changeStreamPreAndPostImages"
    )


def azure_rewrites(body: Raw) -> bool:
    """Events without time and description, and none of drops and renames."""
    if stream_of(body) is None:
        return False
    kinds = ["insert", "update", "replace", "delete"]
    body["pipeline"][1:1] = [
        {"$match": {"operationType": {"$in": kinds}}},
        {"$unset": ["clusterTime", "wallTime", "updateDescription"]},
    ]
    return True


def amazon_refuses(body: Raw) -> tuple[int, str] | None:
    if "txnNumber" in body and body.get("autocommit") is not False:
        return 301, "Retryable writes are not supported"
    if stream_of(body) is not None:
        return 136, "change streams are not enabled for this collection"
    return lacks_stages(body, "$merge", "$graphLookup", "$changeStreamSplitLargeEvent") or lacks_options(
        body, "timeseries", "changeStreamPreAndPostImages"
    )


def ferret_refuses(body: Raw) -> tuple[int, str] | None:
    if "startTransaction" in body or next(iter(body)) in ("commitTransaction", "abortTransaction"):
        return NOT_SUPPORTED, "transactions are not supported"
    return lacks_stages(body, "$changeStream") or lacks_options(
        body, "timeseries", "changeStreamPreAndPostImages"
    )


PROFILES = {
    each.name: each
    for each in (
        Profile(
            "azure-documentdb",
            azure_refuses,
            azure_rewrites,
            HISTORY_FIELDS,
            hello=(("maxWriteBatchSize", 25_000),),
        ),
        Profile("aws-documentdb-5", amazon_refuses, hello=(("maxWireVersion", 13),)),
        Profile("ferretdb", ferret_refuses, hidden=HISTORY_FIELDS, hello_hidden=SET_FIELDS),
        Profile("mongodb-4.4", hello=(("maxWireVersion", 9),)),
    )
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
                start, body = body_of(message)
                refusal = self.profile.refuse(body)
                if refusal is not None:
                    code, words = refusal
                    client.sendall(reply_to(number, {"ok": 0.0, "code": code, "errmsg": words}))
                    continue
                if self.profile.rewrite(body):
                    message = with_body(message, start, body)
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
