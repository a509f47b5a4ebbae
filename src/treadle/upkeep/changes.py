"""Which groups of a scheduled rollup changed since its last run, read from the change stream.

A run first writes a beat, then reads the stream from where the last run ended
until the beat comes. Whatever was written before the beat has then been seen:
inserts, updates, deletions by anybody, also by a TTL index. The keys before a
change come from the server's pre-images. Where they are missing, or the
history is lost, nobody can tell, and everything is computed anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bson import ObjectId
from pymongo.errors import OperationFailure

from treadle.graph.gather import GatherRule, GroupRule
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry
from treadle.model.bson_types import RESERVED
from treadle.plan import Plan, Raw, aggregate, database_command, delete_many, insert_one
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import HISTORY_LOST, TOO_LARGE
from treadle.query.keys import KEY, freeze
from treadle.query.paths import filter_references, overlap, plain
from treadle.upkeep.closed import Bounds, closed_match
from treadle.upkeep.position import resume

BEATS = "treadle.beats"
PRE_IMAGES_SINCE = (6, 0)


def needs_before(graph: Graph) -> list[str]:
    """The collections whose former states say which windows a change concerns."""
    groups = [entry.group for entry in graph.entries.values() if entry.group is not None]
    return sorted({group.source.collection for group in groups if group.maintain == "schedule"})


@dataclass(slots=True)
class Dirty:
    """What changed: keys of groups, sources to be looked at, and where the stream goes on."""

    keys: dict[Any, list[Any]] = field(default_factory=dict)
    ids: dict[Any, Any] = field(default_factory=dict)
    # Set where the stream cannot tell; everything is computed anew.
    unknown: str | None = None
    position: Raw | None = None


def changed_since(entry: Entry[Any], server: Capabilities, position: Raw, bounds: Bounds) -> Plan[Dirty]:
    """The closed groups whose sources changed since a position in the stream."""
    group = entry.group
    assert group is not None
    dirty = Dirty()
    beat = ObjectId()
    yield from insert_one(BEATS, {"_id": beat})
    try:
        yield from _read(group, server, position, bounds, beat, dirty)
    except OperationFailure as error:
        if error.code not in HISTORY_LOST | TOO_LARGE:
            raise
        dirty.unknown = "the server's history does not reach back to the last run"
        if error.code in TOO_LARGE:
            dirty.unknown = "a changed document is too large for the stream"
    yield from delete_many(BEATS, {"_id": beat})
    if dirty.unknown is None:
        yield from _look_up(group, bounds, dirty)
    return dirty


def _read(
    group: GroupRule, server: Capabilities, position: Raw, bounds: Bounds, beat: Any, dirty: Dirty
) -> Plan[None]:
    watched, limits = _watched(group), group.target.limits
    command = {
        "aggregate": 1,
        "pipeline": _pipeline(group, server, position, bounds),
        "cursor": {"batchSize": 0},
    }
    cursor = (yield from database_command(command, writes=False))["cursor"]["id"]
    events = empty = 0
    while empty < limits.schedule_empty_reads_max:
        reply = yield from database_command(
            {
                "getMore": cursor,
                "collection": "$cmd.aggregate",
                "batchSize": limits.schedule_events_page,
                "maxTimeMS": limits.schedule_read_milliseconds,
            },
            writes=False,
        )
        empty = 0 if reply["cursor"]["nextBatch"] else empty + 1
        for event in reply["cursor"]["nextBatch"]:
            if event.get("coll") == BEATS:
                if event["operationType"] == "insert" and event["documentKey"]["_id"] == beat:
                    dirty.position = {"token": event["_id"], "start": None}
                    yield from database_command(
                        {"killCursors": "$cmd.aggregate", "cursors": [cursor]}, writes=False
                    )
                    return
                continue
            events += 1
            _note(group, event, watched, dirty)
        cursor = reply["cursor"]["id"]
        if not cursor:
            dirty.unknown = "the stream was ended by the server"
        if events > limits.schedule_events_max:
            dirty.unknown = "more changed than would be worth looking at one by one"
        if dirty.unknown is not None:
            return
    dirty.unknown = "the stream did not come to an end"


def _pipeline(group: GroupRule, server: Capabilities, position: Raw, bounds: Bounds) -> list[Raw]:
    stream = resume(position)
    if server.version >= PRE_IMAGES_SINCE:
        stream["fullDocumentBeforeChange"] = "whenAvailable"
    source = group.source.collection
    names = {"$in": [source, BEATS]}
    concerns = [
        {"ns.coll": names},
        {"to.coll": names},
        {"operationType": {"$in": ["dropDatabase", "invalidate"]}},
    ]
    touched = {"$objectToArray": {"$ifNull": ["$updateDescription.updatedFields", {}]}}
    inserted = {"$and": [{"$eq": ["$operationType", "insert"]}, {"$eq": ["$ns.coll", source]}]}
    shown: Raw = {
        "operationType": 1,
        "coll": "$ns.coll",
        # Of inserts, which are most of what comes late, no more is needed than their key.
        "documentKey": {"$cond": [inserted, "$$REMOVE", "$documentKey"]},
        "touched": {"$cond": [inserted, "$$REMOVE", {"$map": {"input": touched, "in": "$$this.k"}}]},
        "removed": "$updateDescription.removedFields",
        "cut": "$updateDescription.truncatedArrays.field",
    }
    for name, path in (("after", "fullDocument"), ("before", "fullDocumentBeforeChange")):
        key = [part.expression(f"{path}.") for part in group.key.parts]
        shown[name] = {"$cond": [{"$eq": [{"$type": f"${path}"}, "object"]}, key, None]}
    stages: list[Raw] = [{"$changeStream": stream}, {"$match": {"$or": concerns}}, {"$project": shown}]
    # New documents of windows that are still open, or close just now, are computed anyway.
    closed = closed_match([f"after.{number}" for number in range(len(bounds))], bounds)
    if closed:
        others = [{"operationType": {"$ne": "insert"}}, {"coll": BEATS}, closed]
        stages.append({"$match": {"$or": others}})
    return stages


def _watched(group: GroupRule) -> set[str] | None:
    """The source's fields on which any value of the rollup depends; None for all."""
    found: set[str] = set()
    for rule in group.target.having(GatherRule):
        paths = rule.watches()[group.source.collection]
        paths = None if paths is None else {plain(path) for path in paths}
        if paths is None:
            return None
        found |= paths
    return found | (filter_references(group.where) or set())


def _note(group: GroupRule, event: Mapping[str, Any], watched: set[str] | None, dirty: Dirty) -> None:
    """Note the groups that a change of a source concerns."""
    kind = event["operationType"]
    if kind not in ("insert", "update", "replace", "delete"):
        dirty.unknown = f"{group.source.collection}: {kind}"
        return
    moved = kind != "insert"
    if kind == "update":
        names = [*(event.get("touched") or ()), *(event.get("removed") or ()), *(event.get("cut") or ())]
        touched = {plain(name) for name in names if not name.startswith(RESERVED)}
        if watched is not None and not any(overlap(path, each) for path in touched for each in watched):
            return
        moved = any(overlap(path, each) for path in touched for each in group.key.paths)
    if event.get("after") is not None:
        _add(group, event["after"], dirty)
    elif kind == "update":
        identity = event["documentKey"]["_id"]
        dirty.ids[freeze(identity)] = identity
    if event.get("before") is not None:
        _add(group, event["before"], dirty)
    elif moved:
        dirty.unknown = f"{group.source.collection}: the server kept no former state of a changed document"


def _add(group: GroupRule, key: list[Any], dirty: Dirty) -> None:
    if all(value is not None or part.optional for value, part in zip(key, group.key.parts, strict=True)):
        dirty.keys[freeze(key)] = key


def _look_up(group: GroupRule, bounds: Bounds, dirty: Dirty) -> Plan[None]:
    """The present groups of sources that were updated."""
    ids, most = list(dirty.ids.values()), group.target.limits.schedule_lookup_max
    for start in range(0, len(ids), most):
        chunk = ids[start : start + most]
        rows = yield from aggregate(
            group.source.collection,
            [
                {"$match": {"_id": {"$in": chunk}}},
                *group.key.stages(None, False),
                {"$group": {"_id": f"${KEY}"}},
            ],
        )
        for row in rows:
            dirty.keys[freeze(row["_id"])] = row["_id"]
