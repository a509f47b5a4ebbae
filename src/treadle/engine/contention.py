"""Transactions on documents that others write all the time.

What was read of such documents is old before it can be written: the whole
transaction begins again, and a large one may never end. So it takes its
chance once; spoilt, it writes its documents before it reads anything, and
others wait; and if that is of no use, because there are too many, it gives
up for smaller pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from treadle.graph.limits import Limits
from treadle.plan import Plan

R = TypeVar("R")


class Contended(Exception):
    """Others write these documents faster than so many can be recomputed at once."""


def attempting(
    limits: Limits, attempt: Callable[[], Plan[R]], hold: Callable[[], Plan[None]], items: int
) -> Callable[[], Plan[R]]:
    """What a transaction does each time it is tried; `hold` really writes its documents."""
    attempts = 0

    def patiently() -> Plan[R]:
        nonlocal attempts
        attempts += 1
        if attempts > limits.contended_attempts_max and items > 1:
            raise Contended
        if attempts > 1:
            yield from hold()
        return (yield from attempt())

    return patiently


def pieces(limits: Limits, items: int, reason: Exception) -> Iterator[tuple[int, int]]:
    """Where to cut: in halves around what cannot be written, smaller where others leave no room."""
    number = max(2, limits.contended_pieces) if isinstance(reason, Contended) else 2
    size = max(1, -(-items // number))
    for start in range(0, items, size):
        yield start, min(start + size, items)
