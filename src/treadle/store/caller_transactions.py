"""The transactions that callers have open: which calls belong to them, and which of them can commit nothing.

The block of `transaction()` or `with_transaction` is kept in a context
variable. Tasks and threads that are started inside the block may inherit that,
but are not the one that opened it: their calls are refused, because a session
serves one caller at a time.

A call that is refused after it has changed something cannot take that back.
If its caller continues all the same, nothing of the transaction may be
committed, as after an error of the server's own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from pymongo.asynchronous import client_session as asynchronous
from pymongo.synchronous import client_session as synchronous

from treadle.errors import UsageError
from treadle.graph.rule import REVISION
from treadle.plan import Call

# It makes concurrent writers conflict, and changes nothing that a reader sees.
_BUMP = {"$inc": {REVISION: 1}}


class Block(NamedTuple):
    """An open transaction of one Store, and the task or thread that opened it."""

    store: Any
    session: Any
    holder: Any


# Where the driver keeps the session of a `bind()` block; older ones have no such block.
_BOUND: list[ContextVar[Any]] = [
    module._SESSION for module in (asynchronous, synchronous) if hasattr(module, "_SESSION")
]
_OPEN: ContextVar[tuple[Block, ...]] = ContextVar("treadle_transactions", default=())


def has_driver_session() -> bool:
    """Whether the driver itself gives the caller's commands a session."""
    for bound in _BOUND:  # noqa: SIM110 - any() would take twice as long
        if bound.get() is not None:
            return True
    return False


def is_outside() -> bool:
    """Whether a call is inside no block of any Store, nor of the driver."""
    return not _OPEN.get() and not has_driver_session()


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


def _innermost(store: Any) -> Block | None:
    """The innermost open block of a Store; one inside another is a transaction of its own."""
    blocks = (each for each in reversed(_OPEN.get()) if each.store is store and each.session.in_transaction)
    return next(blocks, None)


@contextmanager
def enter(store: Any, session: Any) -> Generator[None]:
    """Let the calls inside belong to the transaction of a session."""
    before = _OPEN.get()
    _OPEN.set((*before, Block(store, session, _holder())))
    try:
        yield
    finally:
        _OPEN.set(before)


def _holder() -> Any:
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:
        return threading.current_thread()


class Transactions:
    """The transactions of one Store's callers, by their sessions."""

    def __init__(self) -> None:
        # Of the sessions that `changes` was asked for.
        self._changes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # Sessions of Treadle's own blocks, and those of them that can commit nothing any more.
        self._blocks: WeakSet[Any] = WeakSet()
        self._over: WeakSet[Any] = WeakSet()

    def begin(self, session: Any) -> None:
        """Note that a block has opened a transaction."""
        self._blocks.add(session)
        self._over.discard(session)

    def note(self, session: Any, command: Call) -> None:
        """Note a write, unless it only makes concurrent writers conflict."""
        if not self._changes or session not in self._changes:
            return
        if not command.collection.startswith("treadle.") and _BUMP not in command.arguments[1:2]:
            self._changes[session] += 1

    def changes(self, session: Any) -> int:
        """How many writes a session has sent since this was first asked."""
        return self._changes.setdefault(session, 0)

    def end(self, session: Any) -> None:
        """Note that nothing of the transaction can be committed."""
        if session in self._blocks:
            self._over.add(session)

    def require_open(self, session: Any) -> None:
        """Refuse to go on with a transaction of which nothing can be committed."""
        if session in self._over:
            raise UsageError(
                "a call inside this transaction was refused or cut off after it had changed something, so "
                "that nothing of the transaction can be committed; let the error leave the block, and begin "
                "a new one",
                code="transaction-ended",
            )
