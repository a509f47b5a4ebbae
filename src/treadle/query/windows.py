"""Windows of time: whole minutes, hours, days, weeks, months, quarters and years in a time zone.

A window is identified by its first instant. The server computes it without `$dateTrunc`, which cuts hours by
the offset that a zone had in the year 2000. In UTC Python computes the same.

A day that daylight saving makes longer or shorter is one window of 23 or 25 hours. An hour that occurs twice
is two windows. Windows of several hours begin when the zone's clock shows their time, so they too are longer
or shorter where the clock is moved.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

Unit: TypeAlias = Literal["minute", "hour", "day", "week", "month", "quarter", "year"]

LONGEST: Final = {
    "minute": dt.timedelta(minutes=1),
    "hour": dt.timedelta(hours=1),
    "day": dt.timedelta(days=1),
    "week": dt.timedelta(days=7),
    "month": dt.timedelta(days=31),
    "quarter": dt.timedelta(days=92),
    "year": dt.timedelta(days=366),
}
# How many months the units have that are not a fixed number of days.
_MONTHS = {"month": 1, "quarter": 3, "year": 12}
_NONE = dt.timedelta(0)
_MILLISECOND = dt.timedelta(milliseconds=1)
_HOUR = dt.timedelta(hours=1)
# A Monday, on which windows of all fixed lengths begin.
_FIRST = dt.datetime(1970, 1, 5)
# Zones have moved by as much as a day, when they crossed the date line.
ZONE_MARGIN = dt.timedelta(hours=26)
# Python knows the years 1 to 9999; in a zone a window may begin in the year before.
_UTC_RANGE = dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=dt.UTC)
_ZONE_RANGE = dt.datetime(1, 2, 3, tzinfo=dt.UTC), dt.datetime(9999, 12, 29, tzinfo=dt.UTC)
# Where a window may be as long as a year.
_LONG_RANGE = dt.datetime(2, 2, 3, tzinfo=dt.UTC), dt.datetime(9998, 12, 29, tzinfo=dt.UTC)
_UTC_NAMES = frozenset({"UTC", "GMT", "Z", "Etc/UTC", "Etc/GMT", "+00:00", "+0000", "+00"})
_OFFSET = re.compile(r"[+-]\d\d(:?[0-5]\d)?\Z")


class Window(NamedTuple):
    """The windows of one length in one time zone."""

    unit: Unit
    timezone: str = "UTC"
    # How many minutes or hours make one window.
    size: int = 1

    @property
    def utc(self) -> bool:
        """Whether Python can tell the window as well as the server."""
        return self.timezone in _UTC_NAMES

    @property
    def range(self) -> tuple[dt.datetime, dt.datetime]:
        """The first and the last date that have a window."""
        if self.utc:
            return _UTC_RANGE
        return _LONG_RANGE if self.unit in ("quarter", "year") else _ZONE_RANGE

    @property
    def length(self) -> dt.timedelta:
        """How long a window is where no clock is moved; the longest of months, quarters and years."""
        return LONGEST[self.unit] * self.size

    def start_of(self, date: Any) -> dt.datetime | None:
        """Return the first instant of a date's window in UTC; None where it has no window."""
        if not isinstance(date, dt.datetime):
            return None
        first, last = self.range
        if not first <= date.replace(tzinfo=dt.UTC) <= last:
            return None
        months = _MONTHS.get(self.unit)
        if months:
            month = date.month - (date.month - 1) % months
            return date.replace(month=month, day=1, hour=0, minute=0, second=0, microsecond=0)
        past: dt.timedelta = (date.replace(tzinfo=None) - _FIRST) % self.length
        return date - past

    def span(self, start: dt.datetime) -> tuple[dt.datetime, dt.datetime]:
        """Return a range of dates, without its end, that holds all of the window."""
        # A short window is computed from the date itself, so it is never longer than its length.
        margin = _NONE if self.utc or self.length <= _HOUR else ZONE_MARGIN
        return _shifted(start, -margin), _shifted(start, self.length + margin)

    def inside(self, start: dt.datetime) -> tuple[dt.datetime, dt.datetime] | None:
        """Return a range of dates, without its end, in the window; None where only the server can tell."""
        if not self.utc:
            return None
        months = _MONTHS.get(self.unit)
        return start, _shifted(start, dt.timedelta(days=28) * months if months else self.length)

    def expression(self, date: str) -> Any:
        """Return the first instant of the window of a date, as an aggregation expression.

        It is null for what is not a date, and for a date that is out of range.
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
        months = _MONTHS.get(self.unit)
        if self.utc and not months:
            return {"$subtract": [date, _remainder(date, self.length)]}
        if self.length <= _HOUR:
            return self._short(date)
        parts: dict[str, Any] = {"year": "$$p.year", "month": "$$p.month", "timezone": self.timezone}
        if months:
            past = {"$mod": [{"$subtract": ["$$p.month", 1]}, months]}
            parts["month"] = {"$subtract": ["$$p.month", past]}
        elif self.unit == "week":
            weekday = {"$isoDayOfWeek": {"date": date, "timezone": self.timezone}}
            parts["day"] = {"$subtract": ["$$p.day", {"$subtract": [weekday, 1]}]}
        else:
            parts["day"] = "$$p.day"
        start: Any = {"$dateFromParts": parts}
        if self.unit == "hour":
            parts["hour"] = {"$subtract": ["$$p.hour", {"$mod": ["$$p.hour", self.size]}]}
            # Of a time that occurs twice the server takes the second, which may lie after the date.
            start = {"$min": [start, self._hour(date)]}
        return {"$let": {"vars": {"p": self._parts(date)}, "in": start}}

    def _short(self, date: str) -> Any:
        """Return the start of an hour or a part of one; each hour on the clock begins a window."""
        hour = self._hour(date)
        if self.unit == "hour":
            return hour
        past = {"$mod": [{"$subtract": [date, "$$hour"]}, self.length // _MILLISECOND]}
        return {"$let": {"vars": {"hour": hour}, "in": {"$subtract": [date, past]}}}

    def _parts(self, date: str) -> Any:
        return {"$dateToParts": {"date": date, "timezone": self.timezone}}

    def _hour(self, date: str) -> Any:
        """Return the date without the minutes that the zone's clock shows at that instant."""
        past = {
            "$add": [
                {"$multiply": ["$$p.minute", 60_000]},
                {"$multiply": ["$$p.second", 1000]},
                "$$p.millisecond",
            ]
        }
        # If the clock has been moved by half an hour since then, the window begins at that move.
        minute = {"$minute": {"date": "$$start", "timezone": self.timezone}}
        moved = {"$add": ["$$start", {"$multiply": [{"$subtract": [60, "$$minute"]}, 60_000]}]}
        whole = {"$or": [{"$eq": ["$$minute", 0]}, {"$gt": [moved, date]}]}
        inner = {"$let": {"vars": {"minute": minute}, "in": {"$cond": [whole, "$$start", moved]}}}
        start = {"$let": {"vars": {"p": self._parts(date)}, "in": {"$subtract": [date, past]}}}
        return {"$let": {"vars": {"start": start}, "in": inner}}


def _remainder(date: str, length: dt.timedelta) -> Any:
    """Return how many milliseconds of a window have passed."""
    whole = length // _MILLISECOND
    # Before 1970 `$mod` is negative, so it is taken twice.
    return {"$mod": [{"$add": [{"$mod": [{"$subtract": [date, _FIRST]}, whole]}, whole]}, whole]}


def _shifted(date: dt.datetime, by: dt.timedelta) -> dt.datetime:
    """Return a date moved, but not beyond what Python can hold."""
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
