"""Batches in which one document cannot be handled, or that other writers keep changing.

`salvage` halves a batch until the document that fails is alone, and
quarantines it, so that it stops no other.

A transaction that reads documents before it writes them starts again whenever
another writer changed one of them in between, and a large one may never
commit. So it is tried once as it is; after a conflict it writes its documents
first (`attempting`), so that other writers wait; after further conflicts it
is split (`Contended`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from treadle.graph.quarantine import set_aside
from treadle.plan import Plan
from treadle.plan.server_errors import is_about_one_document, is_duplicate

# Attempts after which a transaction among many writers is split.
CONTENDED_ATTEMPTS_MAX = 3
# Into how many pieces.
CONTENDED_PIECES = 8

R = TypeVar("R")
T = TypeVar("T")


class Contended(Exception):
    """Other writers change these documents faster than so many can be recomputed at once."""


def attempting(
    attempt: Callable[[], Plan[R]], hold: Callable[[], Plan[None]], items: int
) -> Callable[[], Plan[R]]:
    """Return the body of a transaction that may be retried; `hold` writes its documents."""
    attempts = 0

    def body() -> Plan[R]:
        nonlocal attempts
        attempts += 1
        if attempts > CONTENDED_ATTEMPTS_MAX and items > 1:
            raise Contended
        if attempts > 1:
            yield from hold()
        return (yield from attempt())

    return body


def divides(error: Exception) -> bool:
    """Whether fewer documents at once may succeed: one of them fails, or other writers change them."""
    return isinstance(error, Contended) or is_about_one_document(error)


def salvage(
    label: str,
    collection: str,
    items: Sequence[T],
    attempt: Callable[[Sequence[T]], Plan[list[R]]],
    *,
    key_of: Callable[[T], Any] | None = None,
    lost: Callable[[T, Exception], list[R]] | None = None,
    reason: Exception | None = None,
) -> Plan[list[R]]:
    """Attempt all items, and quarantine those that fail even alone. Returns the results of all others.

    `label` and `collection` name the row of a quarantined document. An item
    is its key, unless `key_of` is given; `lost` gives the results of an item
    that failed. With a `reason` all at once have failed before.
    """

    def quarantine(item: T, error: Exception) -> Plan[list[R]]:
        yield from set_aside(label, collection, item if key_of is None else key_of(item), error)
        return [] if lost is None else lost(item, error)

    return (yield from divide(items, attempt, quarantine, reason))


def divide(
    items: Sequence[T],
    attempt: Callable[[Sequence[T]], Plan[list[R]]],
    alone: Callable[[T, Exception], Plan[list[R]]],
    reason: Exception | None = None,
) -> Plan[list[R]]:
    """Attempt all items at once; where that fails, in halves, until the one that fails is `alone`.

    Among many writers the pieces are smaller. With a `reason` all at once
    have failed before.
    """
    if not items:
        return []
    if reason is None or len(items) == 1:
        try:
            return (yield from attempt(items))
        except Exception as error:  # A bug of ours does not divide, and is raised.
            if not divides(error):
                raise
            if len(items) == 1:
                return (yield from _alone(items[0], error, attempt, alone, is_again=reason is not None))
            reason = error
    number = max(2, CONTENDED_PIECES) if isinstance(reason, Contended) else 2
    size = max(1, -(-len(items) // number))
    results: list[R] = []
    for start in range(0, len(items), size):
        results += yield from divide(items[start : start + size], attempt, alone)
    return results


def _alone(
    item: T,
    error: Exception,
    attempt: Callable[[Sequence[T]], Plan[list[R]]],
    alone: Callable[[T, Exception], Plan[list[R]]],
    *,
    is_again: bool,
) -> Plan[list[R]]:
    """Deal with an item that failed alone."""
    if is_duplicate(error) and not is_again:
        # The other document may have been one that a concurrent writer did not commit.
        return (yield from divide([item], attempt, alone, error))
    return (yield from alone(item, error))
