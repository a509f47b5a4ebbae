"""Which groups of a scheduled rollup are closed, so that they are computed.

A window is closed when the next one has begun. What a run has computed are
the groups all of whose windows had closed at its time; the bounds, one per
window among the keys, are kept in `treadle.schedules`. A key that is no window
is always closed.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, TypeAlias

from treadle.graph.derived import GroupRule
from treadle.graph.model_entry import ModelEntry
from treadle.plan import Plan, Raw, aggregate, find_one

COLLECTION = "treadle.schedules"

# Per part of the key the first instant that is not closed; None where it is no window.
Bounds: TypeAlias = list[dt.datetime | None]


def bounds_at(group: GroupRule, now: dt.datetime) -> Plan[Bounds]:
    """What is closed at a time: per window among the keys, the first instant of the one under way."""
    bounds: Bounds = [part.window.start_of(now) if part.window else None for part in group.match.group]
    if group.match.is_local:
        return bounds
    starts = {
        f"s{number}": part.window.expression("$now")
        for number, part in enumerate(group.match.group)
        if part.window is not None
    }
    # The caller holds a lease, so that this collection has a document to compute with.
    (row,) = yield from aggregate(
        "treadle.leases",
        [{"$limit": 1}, {"$replaceWith": {"now": {"$literal": now}}}, {"$replaceWith": starts}],
    )
    return [row.get(f"s{number}") for number in range(len(bounds))]


# Of a scheduled model that no run has computed yet.
NOT_YET: Bounds = []


def scheduled_bounds(entry: ModelEntry) -> Plan[Bounds | None]:
    """What the last run of a scheduled rollup computed, or NOT_YET; None where nothing is scheduled."""
    if entry.rules.group is None or entry.rules.group.maintain != "schedule":
        return None
    row = yield from find_one(COLLECTION, {"_id": entry.model.__name__})
    bounds: Bounds | None = (row or {}).get("bounds")
    return NOT_YET if bounds is None else bounds


def is_closed(key: Sequence[Any], bounds: Bounds) -> bool:
    """Whether a group is one of those that are computed."""
    return all(
        bound is None or value is None or value < bound for value, bound in zip(key, bounds, strict=True)
    )


def closed_match(paths: Sequence[str], bounds: Bounds) -> Raw:
    """A filter for closed groups, whose key stands at these paths."""
    conditions: list[Raw] = [
        {"$or": [{path: {"$lt": bound}}, {path: None}]}
        for path, bound in zip(paths, bounds, strict=True)
        if bound is not None
    ]
    return {"$and": conditions} if conditions else {}
