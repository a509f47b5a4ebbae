"""The transaction that a `transaction()` block or `with_transaction` has open, and which calls belong to it.

It is kept in a context variable. Tasks and threads that are started inside
the block may inherit that, but are not the one that opened it: their calls
are refused, because a session serves one caller at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from pymongo.asynchronous import client_session as asynchronous
from pymongo.synchronous import client_session as synchronous

from treadle.errors import UsageError


class Joined(NamedTuple):
    """An open transaction of one Store, and the task or thread that opened it."""

    store: Any
    session: Any
    holder: Any


# Where the driver keeps the session of a `bind()` block; older ones have no such block.
_BOUND: list[ContextVar[Any]] = [
    module._SESSION for module in (asynchronous, synchronous) if hasattr(module, "_SESSION")
]
_OPEN: ContextVar[tuple[Joined, ...]] = ContextVar("treadle_transactions", default=())


def by_driver() -> bool:
    """Whether the driver itself gives the caller's commands a session."""
    for bound in _BOUND:  # noqa: SIM110 - any() would take twice as long
        if bound.get() is not None:
            return True
    return False


def nobody() -> bool:
    """Whether a call stands in no block of any Store, nor of the driver."""
    return not _OPEN.get() and not by_driver()


def current(store: Any) -> Any:
    """The session of the transaction block around this call; None outside of one."""
    block = _innermost(store) if _OPEN.get() else None
    if block is None:
        return None
    if block.holder is _holder():
        return block.session
    raise UsageError(
        "this call comes from a task or thread that was started inside a transaction block, and "
        "only the one that opened the block can write in it; await the calls one after another "
        "(not by gather or wait_for), or start the task outside of the block",
        code="transaction-elsewhere",
    )


def refuse_other(store: Any, session: Any) -> None:
    """Refuse a caller's session that is in another transaction than the block around this call."""
    block = _innermost(store)
    if block is None or session is block.session or not session.in_transaction:
        return
    if block.holder is _holder():
        raise UsageError(
            "this call is inside a transaction block, and its session= is in another transaction; leave "
            "session= out, or make the call outside of the block",
            code="transaction-other",
        )


def _innermost(store: Any) -> Joined | None:
    """The innermost open block of a Store; one inside another is a transaction of its own."""
    blocks = (each for each in reversed(_OPEN.get()) if each.store is store and each.session.in_transaction)
    return next(blocks, None)


@contextmanager
def joining(store: Any, session: Any) -> Generator[None]:
    """Let the calls inside belong to the transaction of a session."""
    before = _OPEN.get()
    _OPEN.set((*before, Joined(store, session, _holder())))
    try:
        yield
    finally:
        _OPEN.set(before)


def _holder() -> Any:
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:
        return threading.current_thread()
