"""Which groups of a scheduled rollup changed since its last run, read from the change stream.

A run first writes a beat, then reads the stream from where the last run ended
until the beat comes. Whatever was written before the beat has then been seen:
inserts, updates, deletions by any program, also by a TTL index. The keys before a
change come from the server's pre-images. Where they are missing, or the
history is lost, everything is recomputed.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bson import ObjectId
from bson.errors import InvalidBSON
from pymongo.errors import OperationFailure

from treadle.graph.derived import GroupRule, aggregates_in
from treadle.graph.events import AFTER, BEFORE
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.stored_pages import chunks
from treadle.plan import Plan, Raw, aggregate, delete_many
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import HISTORY_LOST, TOO_LARGE
from treadle.query.expressions import filter_references
from treadle.query.keys import KEY, distinct, freeze
from treadle.query.paths import overlap, plain
from treadle.upkeep.change_stream import (
    BEATS,
    ChangeStream,
    beat,
    first_stages,
    is_reserved,
    touched,
    touched_projection,
)
from treadle.upkeep.closed_windows import Bounds, closed_match, is_closed

# Changes that are read at a time.
SCHEDULE_EVENTS_PAGE = 20_000
# The first, after which inserts into known windows are passed over.
SCHEDULE_EVENTS_FIRST = 50
# Changed windows whose inserts the server passes over.
SCHEDULE_WINDOWS_PASSED = 40
# Reads without a change after which everything is computed.
SCHEDULE_EMPTY_READS_MAX = 30
# How long a read waits.
SCHEDULE_READ_MILLISECONDS = 1_000
# Updated sources whose group is looked up at a time.
SCHEDULE_LOOKUP_MAX = 5_000

# As precise as the date in an ObjectId.
SECOND = dt.timedelta(seconds=1)
# How far the clock of a process that makes ids may be ahead.
AHEAD_MAX = dt.timedelta(hours=1)


def needs_before(graph: Graph) -> list[str]:
    """The collections whose former states say which windows a change concerns."""
    groups = [entry.rules.group for entry in graph.entries.values() if entry.rules.group is not None]
    return sorted({group.source.collection for group in groups if group.maintain == "schedule"})


@dataclass(slots=True)
class ChangedGroups:
    """What changed: keys of groups, sources to be looked at, and where the stream continues."""

    keys: dict[Any, list[Any]] = field(default_factory=dict)
    ids: list[Any] = field(default_factory=list)
    # Set where the stream cannot tell; everything is recomputed.
    unknown: str | None = None
    position: Raw | None = None


def changed_since(
    entry: ModelEntry, server: Capabilities, position: Raw, bounds: Bounds, last_run: dt.datetime | None
) -> Plan[ChangedGroups]:
    """The closed groups whose sources changed since a position in the stream, that of the last run."""
    group = entry.rules.group
    changed = ChangedGroups()
    awaited = yield from beat()
    try:
        window = _single_window(group)
        if window is not None and last_run is not None:
            changed.keys = yield from _newest(group, bounds, last_run, awaited.generation_time)
        yield from _read(
            group, partial(_stages, group, bounds, server.pre_images), window, position, awaited, changed
        )
    except InvalidBSON:
        changed.unknown = "a changed document cannot be decoded"
    except OperationFailure as error:
        if error.code not in HISTORY_LOST | TOO_LARGE:
            raise
        changed.unknown = "the server's history does not reach back to the last run"
        if error.code in TOO_LARGE:
            changed.unknown = "a changed document is too large for the stream"
    yield from delete_many(BEATS, {"_id": awaited})
    if changed.unknown is None:
        yield from _look_up(group, changed)
    return changed


def _read(
    group: GroupRule,
    stages: Callable[[Raw, Sequence[Any]], list[Raw]],
    window: int | None,
    position: Raw,
    awaited: Any,
    changed: ChangedGroups,
) -> Plan[None]:
    """Note what the stream says, up to the beat that was written before.

    A window is computed as a whole, so that one insert into it tells as much as
    all of them. The server passes over those into windows that are known.
    """
    watched, limits = _watched(group), group.target.limits
    passed: list[Any] = []
    page = SCHEDULE_EVENTS_PAGE
    if window is not None:
        page = min(page, SCHEDULE_EVENTS_FIRST)
        passed = distinct(key[window] for key in changed.keys.values())[:SCHEDULE_WINDOWS_PASSED]
    stream = ChangeStream()
    yield from stream.open(stages(position, passed))
    number = empty = 0
    while empty < SCHEDULE_EMPTY_READS_MAX:
        events = yield from stream.read(page, SCHEDULE_READ_MILLISECONDS / 1000)
        empty = 0 if events else empty + 1
        for event in events:
            if event.get("coll") != BEATS:
                number += 1
                _note(group, event, watched, changed)
            elif event["operationType"] == "insert" and event["documentKey"]["_id"] == awaited:
                changed.position = {"token": event["_id"], "start": None}
                yield from stream.close()
                return
        if stream.cursor is None:
            changed.unknown = "the stream was ended by the server"
        if number > limits.schedule_events_max:
            changed.unknown = "more changed than would be worth looking at one by one"
        if changed.unknown is not None:
            return
        if window is not None and len(events) == page:
            known = distinct(key[window] for key in changed.keys.values())
            if not len(passed) < len(known) <= SCHEDULE_WINDOWS_PASSED:
                window, page = None, SCHEDULE_EVENTS_PAGE
                continue
            # Where there are many windows, not for each new one.
            page = min(2 * page, SCHEDULE_EVENTS_PAGE)
            # By time: the token of an event that is passed over would not be found again. What happened at
            # that very time is read twice, which is harmless.
            passed, place = known, {"token": None, "start": events[-1]["clusterTime"]}
            yield from stream.close()
            yield from stream.open(stages(place, passed))
    changed.unknown = "the stream did not come to an end"


def _newest(
    group: GroupRule, bounds: Bounds, last_run: dt.datetime, now: dt.datetime
) -> Plan[dict[Any, list[Any]]]:
    """The closed groups of the sources that were made last, going by their ids, since the last run.

    A guess at which windows late data came into: to read its first event the
    server loads much of its history. Whatever it misses, the stream tells; what
    was there before is computed once more.
    """
    since = ObjectId.from_datetime(last_run + SECOND)
    # What a wrong clock made would be the newest in each run for years.
    until = ObjectId.from_datetime(now + AHEAD_MAX)
    newest: list[Raw] = [
        {"$match": {"_id": {"$gte": since, "$lt": until}}},
        {"$sort": {"_id": -1}},
        {"$limit": SCHEDULE_EVENTS_FIRST},
    ]
    stages = [*newest, *group.match.stages(), {"$group": {"_id": f"${KEY}"}}]
    keys = [row["_id"] for row in (yield from aggregate(group.source.collection, stages))]
    return {
        freeze(key): key
        for key in keys
        if key is not None and group.match.checked(key) is not None and is_closed(key, bounds)
    }


def _single_window(group: GroupRule) -> int | None:
    """The number of the key's one window, if Python can tell it, and whatever has none concerns no group."""
    windows = [(number, part) for number, part in enumerate(group.match.group) if part.window is not None]
    if len(windows) != 1 or not group.match.is_local or group.source.versions.may_change:
        return None
    ((number, part),) = windows
    return None if part.optional else number


def _passing_over(group: GroupRule, windows: Sequence[Any]) -> list[Raw]:
    """The stage that leaves out inserts into some windows.

    In ranges without any $not: only these the server applies to its history
    itself, which takes a fifth of the time of making events of it.
    """
    if not windows:
        return []
    part = next(part for part in group.match.group if part.window is not None)
    assert part.window is not None
    path = f"{AFTER}.{part.source}"
    inside = sorted(each for start in windows if (each := part.window.inside(start)) is not None)
    if not inside:
        return []
    # What lies before, between and after them.
    ends = [None, *(end for _, end in inside)]
    firsts = [*(first for first, _ in inside), None]
    outside: list[Raw] = []
    for after, before in zip(ends, firsts, strict=True):
        gap = {"$gte": after, "$lt": before}
        if after != before:
            outside.append({path: {name: value for name, value in gap.items() if value is not None}})
    return [{"$match": {"$or": [*outside, {"operationType": {"$ne": "insert"}}, {"ns.coll": BEATS}]}}]


def _stages(
    group: GroupRule, bounds: Bounds, before: bool, position: Raw, passed: Sequence[Any]
) -> list[Raw]:
    source = group.source.collection
    inserted = {"$and": [{"$eq": ["$operationType", "insert"]}, {"$eq": ["$ns.coll", source]}]}
    projection: Raw = {"documentKey": "$documentKey", **touched_projection()}
    # Of inserts, which are most of what comes late, no more is needed than their key.
    projection = {name: {"$cond": [inserted, "$$REMOVE", value]} for name, value in projection.items()}
    for name, path in (("after", AFTER), ("before", BEFORE)):
        key = [part.expression(f"{path}.") for part in group.match.group]
        projection[name] = {"$cond": [{"$eq": [{"$type": f"${path}"}, "object"]}, key, None]}
    if group.source.versions.may_change:
        chain = group.source.versions
        stale = [
            {
                "$and": [
                    {"$eq": [{"$type": f"${path}"}, "object"]},
                    {"$ne": [{"$ifNull": [f"${path}.{chain.field}", 1]}, chain.current]},
                ]
            }
            for path in (AFTER, BEFORE)
        ]
        projection["older"] = {"$or": stale}
    stages = first_stages(position, [source, BEATS], before=before) + _passing_over(group, passed)
    stages.append({"$project": {"operationType": 1, "clusterTime": 1, "coll": "$ns.coll", **projection}})
    # New documents of windows that are still open, or close just now, are computed anyway.
    closed = closed_match([f"after.{number}" for number in range(len(bounds))], bounds)
    if closed:
        others = [{"operationType": {"$ne": "insert"}}, {"coll": BEATS}, {"older": True}]
        stages.append({"$match": {"$or": [*others, closed]}})
    return stages


def _watched(group: GroupRule) -> set[str] | None:
    """The source's fields on which any value of the rollup depends; None for all."""
    watched = filter_references(group.where) or set()
    for rule in aggregates_in(group.target):
        paths = rule.reads()[group.source.collection]
        if paths is None:
            return None
        watched |= {plain(path) for path in paths}
    return watched


def _note(
    group: GroupRule, event: Mapping[str, Any], watched: set[str] | None, changed: ChangedGroups
) -> None:
    """Note the groups that a change of a source concerns."""
    kind = event["operationType"]
    if kind not in ("insert", "update", "replace", "delete"):
        changed.unknown = f"{group.source.collection}: {kind}"
        return
    if event.get("older"):
        changed.unknown = f"{group.source.collection}: a document of an older version changed"
        return
    moved = kind != "insert"
    if kind == "update":
        paths = [path for path in touched(event) if not is_reserved(path)]
        if watched is not None and not any(overlap(path, each) for path in paths for each in watched):
            return
        moved = any(overlap(path, each) for path in paths for each in group.match.fields)
    if event.get("after") is None and kind == "update":
        changed.ids.append(event["documentKey"]["_id"])
    for key in (event.get("after"), event.get("before")):
        if key is not None and group.match.checked(key) is not None:
            changed.keys[freeze(key)] = key
    if event.get("before") is None and moved:
        changed.unknown = f"{group.source.collection}: the server kept no former state of a changed document"


def _look_up(group: GroupRule, changed: ChangedGroups) -> Plan[None]:
    """The present groups of sources that were updated."""
    for ids in chunks(distinct(changed.ids), SCHEDULE_LOOKUP_MAX):
        there = {"$match": {"_id": {"$in": ids}}}
        stages = [there, *group.match.stages(), {"$group": {"_id": f"${KEY}"}}]
        for row in (yield from aggregate(group.source.collection, stages)):
            changed.keys[freeze(row["_id"])] = row["_id"]
