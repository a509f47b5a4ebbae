"""What `setup()` found and made, recorded in `treadle.setup` so that `teardown()` can take back exactly that.

A row per collection that setup changed. It is written before the change, so that a setup which is killed
leaves nothing unrecorded:

- `before`: type and options of the collection before setup changed it first; None if setup created it.
- `indexes`: name and keys of the indexes that setup made.
- `expiries`: index names with the expiry that setup changed.
- `validator`: the validator that setup set, as BSON; `pre_images`: whether setup switched them on.

One more row, `format`, names the version of all these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import bson

from treadle.engine.indexes import existing_indexes
from treadle.errors import DataError
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import (
    Call,
    Command,
    DatabaseCommand,
    Plan,
    Raw,
    database_command,
    find,
    find_one,
    intercept,
    update_one,
)
from treadle.upkeep.fingerprints import COLLECTION

R = TypeVar("R")

FORMAT = "format"
VERSION = 1
IMAGES = "changeStreamPreAndPostImages"
VALIDATION = ("validator", "validationLevel", "validationAction")
STATE_PREFIX = "treadle."


class CollectionRecord(NamedTuple):
    """What setup did to one collection or view."""

    collection: str
    # None where setup created it.
    before: Raw | None
    indexes: list[Raw]
    expiries: list[Raw]
    validator: Raw | None
    pre_images: bool
    view_on: str | None

    @property
    def former_options(self) -> Raw:
        options: Raw = (self.before or {}).get("options", {})
        return options


def row_name(collection: str) -> str:
    return f"collection {collection}"


def is_known_format() -> Plan[bool]:
    """Return whether the recorded state, if there is any, has the format of this version."""
    # In this order: a concurrent setup writes the format before any other row.
    other = yield from find_one(COLLECTION, {"_id": {"$ne": FORMAT}}, {"_id": 1})
    row = yield from find_one(COLLECTION, {"_id": FORMAT})
    return other is None if row is None else bool(row.get("version") == VERSION)


def require_known_format() -> Plan[None]:
    if not (yield from is_known_format()):
        raise DataError(
            f"{COLLECTION} was written by another version of Treadle; run teardown(), setup() and rebuild()",
            code="state-format-unknown",
        )


def begin() -> Plan[None]:
    """Record the format, before anything else is recorded."""
    made = {"$setOnInsert": {"kind": FORMAT, "version": VERSION}}
    yield from update_one(COLLECTION, {"_id": FORMAT}, made, upsert=True)


def records() -> Plan[list[CollectionRecord]]:
    rows = yield from find(COLLECTION, {"kind": "collection"}, sort=[("_id", 1)])
    return [
        CollectionRecord(
            row["collection"],
            _decoded(row["before"]),
            row.get("indexes", []),
            row.get("expiries", []),
            _decoded(row.get("validator")),
            row.get("pre_images", False),
            row.get("view_on"),
        )
        for row in rows
    ]


def recording(plan: Plan[R]) -> Plan[R]:
    """Run a plan, and record what its commands do to collections, indexes, views and validators."""
    known: set[str] = set()

    def perform(command: Command) -> Plan[Any]:
        changed = _changed_collection(command)
        if changed is not None and not known:
            yield from begin()
            known.add(COLLECTION)
        if isinstance(command, DatabaseCommand) and changed is not None:
            if changed not in known:
                known.add(changed)
                yield from _record_former(changed, command.document)
            yield from _record(changed, command.document)
        return (yield command)

    return intercept(plan, perform)


def _changed_collection(command: Command) -> str | None:
    """Return the collection that a command sets up, or that of these rows; None for any other command."""
    if isinstance(command, DatabaseCommand) and command.changes_schema:
        collection: str = next(iter(command.document.values()))
        return None if collection.startswith(STATE_PREFIX) else collection
    writes = isinstance(command, Call) and command.writes and command.collection == COLLECTION
    return COLLECTION if writes else None


def _record(collection: str, command: Mapping[str, Any]) -> Plan[None]:
    if "createIndexes" in command:
        made = [{"name": each["name"], "key": _pairs(each["key"])} for each in command["indexes"]]
        yield from _note(collection, {"$addToSet": {"indexes": {"$each": made}}})
    elif "index" in command:
        yield from _record_expiry(collection, command["index"]["name"])
    elif "collMod" in command and IMAGES in command:
        yield from _note(collection, {"$set": {"pre_images": True}})
    if "validator" in command:
        made_validator = {each: command[each] for each in VALIDATION if each in command}
        yield from _note(collection, {"$set": {"validator": _encoded(made_validator)}})


def _record_former(collection: str, command: Mapping[str, Any]) -> Plan[None]:
    listing = {"listCollections": 1, "filter": {"name": collection}}
    reply = yield from database_command(listing, writes=False)
    listed = next(iter(reply["cursor"]["firstBatch"]), None)
    before = None if listed is None else {"type": listed["type"], "options": listed.get("options", {})}
    first = {
        "kind": "collection",
        "collection": collection,
        "before": None if before is None else _encoded(before),
        "view_on": command.get("viewOn"),
    }
    yield from update_one(COLLECTION, {"_id": row_name(collection)}, {"$setOnInsert": first}, upsert=True)


def _record_expiry(collection: str, name: str) -> Plan[None]:
    present = yield from existing_indexes(collection)
    seconds = next((each.get("expireAfterSeconds") for each in present if each["name"] == name), None)
    change = {"$push": {"expiries": {"name": name, "seconds": seconds}}}
    yield from update_one(COLLECTION, {"_id": row_name(collection), "expiries.name": {"$ne": name}}, change)


def _note(collection: str, update: Raw) -> Plan[None]:
    yield from update_one(COLLECTION, {"_id": row_name(collection)}, update)


def _pairs(keys: Mapping[str, Any]) -> list[list[Any]]:
    return [[path, kind] for path, kind in dict(keys).items()]


def _encoded(value: Mapping[str, Any]) -> bytes:
    """A value whose keys may begin with `$`, which an update could not store as it is."""
    return bson.encode(value, codec_options=CODEC_OPTIONS)


def _decoded(value: bytes | None) -> Raw | None:
    return None if value is None else bson.decode(value, codec_options=CODEC_OPTIONS)
