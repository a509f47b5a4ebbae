"""Windows of time: whole hours, days, weeks and months as they are lived in a time zone.

A window is known by its first instant. The server computes it with
expressions that MongoDB 4.4 has; `$dateTrunc` is newer, and cuts hours by the
offset that a zone had in the year 2000. In UTC Python computes the same.

A day that daylight saving makes longer or shorter is one window of 23 or 25
hours. An hour that is lived twice is two windows.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

Unit: TypeAlias = Literal["hour", "day", "week", "month"]

LONGEST: Final = {
    "hour": dt.timedelta(hours=1),
    "day": dt.timedelta(days=1),
    "week": dt.timedelta(days=7),
    "month": dt.timedelta(days=31),
}
# The first of January 1970 was a Thursday; weeks begin on Monday.
_WEEK_SHIFT_MS = 3 * 24 * 3_600_000
# Zones have moved by as much as a day, when they crossed the date line.
ZONE_MARGIN = dt.timedelta(hours=26)
# Python knows the years 1 to 9999; in a zone a window may begin in the year before.
_UTC_RANGE = dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=dt.UTC)
_ZONE_RANGE = dt.datetime(1, 2, 3, tzinfo=dt.UTC), dt.datetime(9999, 12, 29, tzinfo=dt.UTC)
_UTC_NAMES = frozenset({"UTC", "GMT", "Z", "Etc/UTC", "Etc/GMT", "+00:00", "+0000", "+00"})
_OFFSET = re.compile(r"[+-]\d\d(:?[0-5]\d)?\Z")


@dataclass(frozen=True, slots=True)
class Window:
    """The windows of one length in one time zone."""

    unit: Unit
    timezone: str = "UTC"

    @property
    def utc(self) -> bool:
        """Whether Python can tell the window as well as the server."""
        return self.timezone in _UTC_NAMES

    @property
    def range(self) -> tuple[dt.datetime, dt.datetime]:
        """The dates that have a window."""
        return _UTC_RANGE if self.utc else _ZONE_RANGE

    def start_of(self, date: Any) -> dt.datetime | None:
        """The first instant of a date's window, in UTC; None for what is no date."""
        if not isinstance(date, dt.datetime):
            return None
        hour: dt.datetime = date.replace(minute=0, second=0, microsecond=0)
        if self.unit == "hour":
            return hour
        day = hour.replace(hour=0)
        if self.unit == "week":
            return day - dt.timedelta(days=day.weekday())
        return day.replace(day=1) if self.unit == "month" else day

    def span(self, start: dt.datetime) -> tuple[dt.datetime, dt.datetime]:
        """A range of dates, the end not included, that holds all of the window."""
        # An hour is cut off a date itself, so that it never is longer than an hour.
        margin = dt.timedelta(0) if self.utc or self.unit == "hour" else ZONE_MARGIN
        return _shifted(start, -margin), _shifted(start, LONGEST[self.unit] + margin)

    def expression(self, date: str) -> Any:
        """The first instant of the window of a date, as an aggregation expression.

        Null for what is no date, and for a date that is out of range.
        """
        first, last = self.range
        valid = {
            "$and": [
                {"$eq": [{"$type": date}, "date"]},
                {"$gte": [date, first]},
                {"$lte": [date, last]},
            ]
        }
        return {"$cond": [valid, self._start(date), None]}

    def _start(self, date: str) -> Any:
        if self.utc:
            if self.unit == "month":
                return {"$dateFromParts": {"year": {"$year": date}, "month": {"$month": date}}}
            length = LONGEST[self.unit] // dt.timedelta(milliseconds=1)
            # Before 1970 the remainder is negative, so it is taken twice.
            shift = _WEEK_SHIFT_MS if self.unit == "week" else 0
            since = {"$add": [{"$toLong": date}, shift]} if shift else {"$toLong": date}
            return {"$subtract": [date, {"$mod": [{"$add": [{"$mod": [since, length]}, length]}, length]}]}
        if self.unit == "hour":
            return self._hour(date)
        parts: dict[str, Any] = {"year": "$$p.year", "month": "$$p.month", "timezone": self.timezone}
        if self.unit == "day":
            parts["day"] = "$$p.day"
        elif self.unit == "week":
            weekday = {"$isoDayOfWeek": {"date": date, "timezone": self.timezone}}
            parts["day"] = {"$subtract": [{"$add": ["$$p.day", 1]}, weekday]}
        return {"$let": {"vars": {"p": self._parts(date)}, "in": {"$dateFromParts": parts}}}

    def _parts(self, date: str) -> Any:
        return {"$dateToParts": {"date": date, "timezone": self.timezone}}

    def _hour(self, date: str) -> Any:
        """The date without its minutes, as they are in the zone at that very instant."""
        past = {
            "$add": [
                {"$multiply": ["$$p.minute", 60_000]},
                {"$multiply": ["$$p.second", 1000]},
                "$$p.millisecond",
            ]
        }
        # Where the clock was moved by half an hour since, the window begins at that move.
        minute = {"$minute": {"date": "$$start", "timezone": self.timezone}}
        moved = {"$add": ["$$start", {"$multiply": [{"$subtract": [60, "$$minute"]}, 60_000]}]}
        whole = {"$or": [{"$eq": ["$$minute", 0]}, {"$gt": [moved, date]}]}
        inner = {"$let": {"vars": {"minute": minute}, "in": {"$cond": [whole, "$$start", moved]}}}
        start = {"$let": {"vars": {"p": self._parts(date)}, "in": {"$subtract": [date, past]}}}
        return {"$let": {"vars": {"start": start}, "in": inner}}


def _shifted(date: dt.datetime, by: dt.timedelta) -> dt.datetime:
    """A date moved, but not beyond what can be stored."""
    first, last = _UTC_RANGE
    if by < dt.timedelta(0):
        return date + by if date - first > -by else first
    return date + by if last - date > by else last


def is_timezone(name: Any) -> bool:
    """Whether a name looks like a zone of the time zone database, or like an offset."""
    if not isinstance(name, str):
        return False
    if name in _UTC_NAMES or _OFFSET.match(name):
        return True
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True
