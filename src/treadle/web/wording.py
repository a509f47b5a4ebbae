"""Numbers and times as the pages write them."""

from __future__ import annotations

from datetime import UTC, datetime


def number(value: float | None) -> str:
    """1,234; a dash where nothing is known."""
    return "–" if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """0.4 s, 12 s, 5 min, 3 h, 2 d; a dash where nothing is known."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def when(moment: datetime | None) -> str:
    """2026-03-01 12:00:00 UTC."""
    return "never" if moment is None else f"{_aware(moment):%Y-%m-%d %H:%M:%S} UTC"


def ago(moment: datetime | None) -> str:
    """5 min ago."""
    if moment is None:
        return "never"
    seconds = (datetime.now(UTC) - _aware(moment)).total_seconds()
    return f"in {duration(-seconds)}" if seconds < 0 else f"{duration(seconds)} ago"


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
