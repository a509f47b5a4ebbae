"""A change stream on the whole database: how it is opened, read and closed, and what its events say.

It is read with plain commands rather than with the driver's own object, so
that the same plan serves both shells, and so that the position on quiet
collections is known too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bson import ObjectId

from treadle.engine.indexes import existing_collections
from treadle.model.bson_types import RESERVED
from treadle.plan import Plan, Raw, database_command, insert_one
from treadle.plan.capabilities import Capabilities
from treadle.query.paths import plain

# What a reader writes to see it come round; its events lie in the stream as well.
BEATS = "treadle.beats"
BEFORE = "fullDocumentBeforeChange"
AFTER = "fullDocument"
# Whole collections, or the database, were dropped or renamed.
UPHEAVALS = frozenset({"drop", "rename", "dropDatabase", "invalidate"})
UPDATED = {"$objectToArray": {"$ifNull": ["$updateDescription.updatedFields", {}]}}
REMOVED = "updateDescription.removedFields"
CUT = "updateDescription.truncatedArrays.field"


class ChangeStream:
    """A stream that is read on from where it was opened."""

    def __init__(self) -> None:
        self.cursor: int | None = None
        # Where to go on after what was read.
        self.token: Any = None

    def open(self, stages: list[Raw]) -> Plan[None]:
        command = {"aggregate": 1, "pipeline": stages, "cursor": {"batchSize": 0}}
        self.cursor = (yield from database_command(command, writes=False))["cursor"]["id"]

    def read(self, most: int, await_seconds: float) -> Plan[list[Raw]]:
        """The next events, at most so many; after so many seconds none. The server may end the stream."""
        command = {
            "getMore": self.cursor,
            "collection": "$cmd.aggregate",
            "batchSize": most,
            "maxTimeMS": max(1, int(await_seconds * 1000)),
        }
        reply = (yield from database_command(command, writes=False))["cursor"]
        events: list[Raw] = reply["nextBatch"]
        self.cursor = reply["id"] or None
        self.token = reply.get("postBatchResumeToken") or (events[-1]["_id"] if events else None)
        return events

    def close(self) -> Plan[None]:
        if self.cursor is not None:
            command = {"killCursors": "$cmd.aggregate", "cursors": [self.cursor]}
            self.cursor = None
            yield from database_command(command, writes=False)


def operation_time() -> Plan[Any]:
    """The server's present place in its history."""
    return (yield from database_command({"ping": 1}, writes=False))["operationTime"]


def beat() -> Plan[Any]:
    """Write something whose event says that everything before it has been read; its id."""
    identity = ObjectId()
    yield from insert_one(BEATS, {"_id": identity})
    return identity


def first_stages(position: Raw, collections: Iterable[str], *, before: bool = False) -> list[Raw]:
    """The stages that begin at a position, with the events of some collections; former states if `before`."""
    if position.get("token") is not None:
        stream: Raw = {"startAfter": position["token"]}
    else:
        stream = {"startAtOperationTime": position["start"]}
    if before:
        stream["fullDocumentBeforeChange"] = "whenAvailable"
    names = {"$in": list(collections)}
    whole = {"operationType": {"$in": ["dropDatabase", "invalidate"]}}
    return [{"$changeStream": stream}, {"$match": {"$or": [{"ns.coll": names}, {"to.coll": names}, whole]}}]


def touched_projection() -> Raw:
    """What an event must show for `touched`."""
    return {
        "touched": {"$map": {"input": UPDATED, "in": "$$this.k"}},
        "removed": f"${REMOVED}",
        "cut": f"${CUT}",
    }


def touched(event: Mapping[str, Any]) -> set[str]:
    """The paths that an update touched, without positions."""
    names = [*(event.get("touched") or ()), *(event.get("removed") or ()), *(event.get("cut") or ())]
    return {plain(name) for name in names}


def is_reserved(path: str) -> bool:
    """Whether a path is one of Treadle's own."""
    return path == RESERVED or path.startswith(RESERVED + ".")


# -- former states ------------------------------------------------------------------------------


def keeps_former_states(server: Capabilities) -> bool:
    """Whether the server can be told to keep documents as they were before a change."""
    return server.streams and server.version >= (6, 0)


def pre_images() -> Plan[list[str]]:
    """The collections whose former states the server keeps."""
    collections = yield from existing_collections()
    return [name for name, each in collections.items() if has_pre_images(each)]


def has_pre_images(collection: Mapping[str, Any]) -> bool:
    """Whether a collection, as the server lists it, keeps former states."""
    option = collection.get("options", {}).get("changeStreamPreAndPostImages") or {}
    return bool(option.get("enabled"))
