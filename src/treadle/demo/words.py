"""Figures as the demo says them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.demo.story import Compared


def milliseconds(seconds: float) -> str:
    """A time with about three digits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    value = seconds * 1000
    if value >= 100:
        return f"{value:.0f} ms"
    return f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def faster(each: Compared) -> str:
    """How the times compare; said as it is, also where nothing was won."""
    ratio = each.before.seconds / each.after.seconds
    if ratio >= 1.1:
        return f"{ratio:.0f} times as fast" if ratio >= 10 else f"{ratio:.1f} times as fast"
    return "about as fast" if ratio > 0.9 else f"{1 / ratio:.1f} times as slow"


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
