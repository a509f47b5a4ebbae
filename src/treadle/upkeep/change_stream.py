"""A change stream on the whole database: how it is opened, read and closed, and what its events say.

It is read with plain commands rather than with the driver's own object, so
that the same plan serves both shells, and so that the position on quiet
collections is known too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import bson
from bson import ObjectId
from bson.errors import InvalidBSON
from bson.raw_bson import RawBSONDocument

from treadle.model.bson_types import CODEC_OPTIONS, RESERVED
from treadle.plan import Plan, Raw, database_command, insert_one, server_facts
from treadle.query.paths import plain

# What a reader writes to see it come round; its events lie in the stream as well.
BEATS = "treadle.beats"
# What an operator asked of rules; a worker reads it in the stream.
CONTROLS = "treadle.controls"
# What the cursor of a stream on a database belongs to.
CURSORS = "$cmd.aggregate"
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
        # The pieces so far of an event that comes in several.
        self._pieces: Raw = {}

    def open(self, stages: list[Raw]) -> Plan[None]:
        """Begin to read; an event that is too large arrives in pieces, where the server can split it."""
        server = yield from server_facts()
        if server.database:
            stages = [each.of(server.database) if isinstance(each, Among) else each for each in stages]
        if server.split_events:
            stages = [*stages, {"$changeStreamSplitLargeEvent": {}}]
        command = {"aggregate": 1, "pipeline": stages, "cursor": {"batchSize": 0}}
        self.cursor = (yield from database_command(command, writes=False))["cursor"]["id"]

    def read(self, most: int, await_seconds: float, *, raw: bool = False) -> Plan[list[Raw]]:
        """The next events, at most so many; after so many seconds none. The server may end the stream.

        With `raw`, each event has those of its fields that can be decoded.
        """
        command = {
            "getMore": self.cursor,
            "collection": CURSORS,
            "batchSize": most,
            "maxTimeMS": max(1, int(await_seconds * 1000)),
        }
        reply = (yield from database_command(command, writes=False, raw=raw))["cursor"]
        batch, token = reply["nextBatch"], reply.get("postBatchResumeToken")
        if raw:
            batch, token = list(map(_decode_fields, batch)), token and _decode_fields(token)
        events = list(self._whole(batch))
        self.cursor = reply["id"] or None
        if not self._pieces:
            self.token = token or (events[-1]["_id"] if events else self.token)
        return events

    def _whole(self, batch: list[Raw]) -> Iterator[Raw]:
        """The events of a batch; one that came in pieces when its last one is there."""
        for event in batch:
            if "splitEvent" not in event:
                yield event
                continue
            self._pieces.update(event)
            if event["splitEvent"]["fragment"] == event["splitEvent"]["of"]:
                whole, self._pieces = self._pieces, {}
                yield whole

    def close(self) -> Plan[None]:
        if self.cursor is not None:
            command = {"killCursors": CURSORS, "cursors": [self.cursor]}
            self.cursor = None
            yield from database_command(command, writes=False)


def places(place: Raw) -> list[Raw]:
    """The ways to find a place: by its token, and by time where the token's event is not watched here."""
    by_time = {"token": None, "start": place["start"]}
    return [place, by_time] if place["token"] is not None and place["start"] is not None else [place]


def operation_time() -> Plan[Any]:
    """The server's present place in its history."""
    return (yield from database_command({"ping": 1}, writes=False))["operationTime"]


def present_place() -> Plan[Raw]:
    """The place at which a stream begins that shows everything from now on."""
    return {"token": None, "start": (yield from operation_time())}


def beat() -> Plan[Any]:
    """Write something whose event says that everything before it has been read; its id."""
    identity = ObjectId()
    yield from insert_one(BEATS, {"_id": identity})
    return identity


class Among(dict[str, Any]):
    """The stage that lets the events of some collections through, and those of the whole database."""

    def __init__(self, collections: Iterable[str]) -> None:
        self._collections = list(collections)
        names = {"$in": self._collections}
        super().__init__({"$match": {"$or": [{"ns.coll": names}, {"to.coll": names}, _WHOLE]}})

    def of(self, database: str) -> Raw:
        """The same by whole names, which the server compares in two thirds of the time."""
        names = [{"db": database, "coll": name} for name in self._collections]
        return {"$match": {"$or": [*({end: name} for end in ("ns", "to") for name in names), _WHOLE]}}


_WHOLE: Raw = {"operationType": {"$in": ["dropDatabase", "invalidate"]}}


def first_stages(
    position: Raw, collections: Iterable[str], *, before: bool = False, after: bool = False
) -> list[Raw]:
    """The stages that begin at a position, with the events of some collections.

    With former states if `before`, and if `after` with those that updates
    made; each as far as the server has kept them.
    """
    if position.get("token") is not None:
        stream: Raw = {"startAfter": position["token"]}
    else:
        stream = {"startAtOperationTime": position["start"]}
    if before:
        stream["fullDocumentBeforeChange"] = "whenAvailable"
    if after:
        stream["fullDocument"] = "whenAvailable"
    return [{"$changeStream": stream}, Among(collections)]


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


def key_of(event: Mapping[str, Any]) -> Any:
    """The id of the document that an event is about, which stands flat or in its document key."""
    return event["id"] if "id" in event else event["documentKey"]["_id"]


def is_reserved(path: str) -> bool:
    """Whether a path is one of Treadle's own."""
    return path == RESERVED or path.startswith(RESERVED + ".")


# -- events with damaged documents ------------------------------------------------------------------


def _decode_fields(raw: Any) -> Raw:
    """Return the fields of a document of bytes that can be decoded, without the others."""
    fields: Raw = {}
    for name, value in raw.items():
        with contextlib.suppress(InvalidBSON):
            is_document = isinstance(value, RawBSONDocument)
            fields[name] = bson.decode(value.raw, codec_options=CODEC_OPTIONS) if is_document else value
    return fields


# -- former states ------------------------------------------------------------------------------


def has_pre_images(collection: Mapping[str, Any]) -> bool:
    """Whether a collection, as the server lists it, keeps former states."""
    option = collection.get("options", {}).get("changeStreamPreAndPostImages") or {}
    return bool(option.get("enabled"))
