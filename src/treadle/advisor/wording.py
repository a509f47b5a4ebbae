"""Numbers and names as people read them."""

from __future__ import annotations

import itertools

from treadle.model.text import escape_text


def size(number: float) -> str:
    """Bytes with a unit: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def share(part: float, whole: float) -> str:
    """A percentage that never rounds something to nothing."""
    if not whole or not part:
        return "0 %"
    percent = 100 * part / whole
    if percent >= 10:
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if percent >= 0.1 else "under 0.1 %"


def duration(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"


def nice(value: float) -> int:
    """The next round number that is not smaller: 50, 100, 200, 500 …"""
    rounds = (step * 10**power for power in itertools.count() for step in (1, 2, 5))
    return int(next(number for number in rounds if number >= value))


def plural(count: int, word: str, several: str | None = None) -> str:
    return f"{count:,} {word if count == 1 else several or word + 's'}"


def names(values: list[str], most: int = 8) -> str:
    """A few names, and how many more there are."""
    first = ", ".join(values[:most])
    return first if len(values) <= most else f"{first} and {len(values) - most:,} more"


def cut(text: str, length: int) -> str:
    """Printable text that is not longer than this."""
    text = escape_text(text)
    return text if len(text) <= length else text[: length - 1] + "…"
