"""Transactions on documents that others write all the time, or of which one cannot be written.

What was read of such documents is old before it can be written: the whole
transaction begins again, and a large one may never end. So it is
tried once as it is; after a conflict it writes its documents before it reads
anything, so that others wait; and if there are too many for that, it is cut
to smaller pieces. In pieces, too, the one document is found that stops all
the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from treadle.plan import Plan
from treadle.plan.server_errors import is_about_one_document, is_duplicate

# Attempts after which a transaction among many writers is cut to pieces.
CONTENDED_ATTEMPTS_MAX = 3
# How many pieces.
CONTENDED_PIECES = 8

R = TypeVar("R")
T = TypeVar("T")


class Contended(Exception):
    """Others write these documents faster than so many can be recomputed at once."""


def attempting(
    attempt: Callable[[], Plan[R]], hold: Callable[[], Plan[None]], items: int
) -> Callable[[], Plan[R]]:
    """What a transaction does each time it is tried; `hold` really writes its documents."""
    attempts = 0

    def patiently() -> Plan[R]:
        nonlocal attempts
        attempts += 1
        if attempts > CONTENDED_ATTEMPTS_MAX and items > 1:
            raise Contended
        if attempts > 1:
            yield from hold()
        return (yield from attempt())

    return patiently


def divides(error: Exception) -> bool:
    """Whether fewer documents at once may fare better: one of them is in the way, or others write them."""
    return isinstance(error, Contended) or is_about_one_document(error)


def in_pieces(
    items: Sequence[T],
    attempt: Callable[[Sequence[T]], Plan[list[R]]],
    alone: Callable[[T, Exception], Plan[list[R]]],
    reason: Exception | None = None,
) -> Plan[list[R]]:
    """Attempt all items at once; where that fails, in halves, until the one that fails stands `alone`.

    Where others leave no room the pieces are smaller. With a `reason` all at
    once has failed before.
    """
    if not items:
        return []
    if reason is None or len(items) == 1:
        try:
            return (yield from attempt(items))
        except Exception as error:
            if not divides(error):
                raise
            if len(items) == 1 and is_duplicate(error) and reason is None:
                # It may have been another writer's document, which has settled by now.
                return (yield from in_pieces(items, attempt, alone, error))
            if len(items) == 1:
                return (yield from alone(items[0], error))
            reason = error
    number = max(2, CONTENDED_PIECES) if isinstance(reason, Contended) else 2
    size = max(1, -(-len(items) // number))
    results: list[R] = []
    for start in range(0, len(items), size):
        results += yield from in_pieces(items[start : start + size], attempt, alone)
    return results
