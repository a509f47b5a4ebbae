"""Whether the server knows today's time zones: its tables may be years old.

A rollup by such a zone cuts its windows by the server's offsets, and a program
reads them by its own. The server is asked for the offset of each day, and
compared with Python's `zoneinfo`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from pymongo.errors import OperationFailure

from treadle.graph.graph import Graph
from treadle.plan import Plan, Raw, aggregate
from treadle.plan.capabilities import NOWHERE
from treadle.plan.server_errors import UNKNOWN_TIME_ZONE, is_refusal

FIRST = datetime(2000, 1, 1, 12, tzinfo=UTC)
# To the end of 2027: offsets of later days are not known.
DAYS = 10_226
# What `treadle doctor` looks at: large zones, and those whose rules changed in the last years.
WELL_KNOWN = (
    *("Africa/Cairo", "Africa/Casablanca", "Africa/Juba", "America/Mexico_City", "America/New_York"),
    *("America/Sao_Paulo", "Asia/Almaty", "Asia/Amman", "Asia/Kolkata", "Asia/Tehran", "Asia/Tokyo"),
    *("Australia/Sydney", "Europe/Berlin", "Europe/London", "Europe/Moscow", "Pacific/Apia", "Pacific/Fiji"),
)


def declared_zones(graph: Graph) -> list[str]:
    """The time zones by which windows are cut."""
    groups = [entry.rules.group for entry in graph.entries.values() if entry.rules.group is not None]
    windows = [part.window for group in groups for part in group.match.group if part.window is not None]
    return sorted({window.timezone for window in windows if not window.utc})


def wrong_zones(zones: Iterable[str], step_days: int = 1) -> Plan[dict[str, date | None]]:
    """Zones for which the server has another offset than Python; the first such day, None if unknown."""
    wrong: dict[str, date | None] = {}
    for zone in zones:
        try:
            offsets = yield from _offsets(zone, step_days)
        except OperationFailure as error:
            if error.code == UNKNOWN_TIME_ZONE:
                wrong[zone] = None
            elif not is_refusal(error):
                raise
            continue
        known = ZoneInfo(zone)
        for number, offset in enumerate(offsets):
            day = FIRST + timedelta(days=number * step_days)
            if f"{day.astimezone(known):%z}"[:5] != offset:
                wrong[zone] = day.date()
                break
    return wrong


def _offsets(zone: str, step_days: int) -> Plan[list[str]]:
    """The server's offset at noon of some days, in one document."""
    day = {"$add": [FIRST, {"$multiply": ["$$this", 86_400_000]}]}
    offset = {"$dateToString": {"date": day, "timezone": zone, "format": "%z"}}
    stages: list[Raw] = [
        # A facet gives one document even where there is no collection.
        {"$facet": {"nothing": [{"$limit": 1}]}},
        {"$project": {"offsets": {"$map": {"input": {"$range": [0, DAYS, step_days]}, "in": offset}}}},
    ]
    rows = yield from aggregate(NOWHERE, stages)
    offsets: list[str] = rows[0]["offsets"] if rows else []
    return offsets


def describe(zone: str, day: date | None) -> str:
    """What is wrong, and what to do."""
    what = "does not know the time zone" if day is None else f"has another offset from {day} on for"
    return (
        f"the server {what} {zone}; windows are cut by the server: update its tables (mongod "
        "--timeZoneInfo with a current database)"
    )
