"""The context of a call: until when its caller waits, and which transaction it belongs to.

The deadline is PyMongo's own, so that every command of a call obeys it: `pymongo.timeout`, or else what the
Store was given as `timeout=`, or the client's `timeoutMS`, for the call as a whole. The driver bounds
commands; what waits in between is bounded here: a queue, a lock, a pause. The driver has no public way to
ask how much time is left, and this is the one place that knows its own.

The block of `transaction()` or `with_transaction` is kept in a context variable. Tasks and threads that are
started inside the block may inherit that, but are not the one that opened it: their calls are refused,
because a session serves one caller at a time. A call that is refused after it has changed something cannot
take that back. If its caller continues all the same, nothing of the transaction may be committed, as after
an error of the server's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pymongo
from pymongo import _csot
from pymongo.asynchronous import client_session as asynchronous
from pymongo.errors import PyMongoError
from pymongo.synchronous import client_session as synchronous

from treadle.errors import DataError, UsageError
from treadle.graph.rule import REVISION
from treadle.plan import Call

# -- deadlines ---------------------------------------------------------------------------------

# The first and the longest pause between two attempts. A longer one would leave a document idle that
# many callers wait for.
RETRY_PAUSE_SECONDS = 0.005
RETRY_PAUSE_MAX_SECONDS = 0.05

# A time in which no server is reached.
AT_ONCE_SECONDS = 0.000_1

NEVER = float("inf")
NONE: AbstractContextManager[None] = contextlib.nullcontext()
_RETRYING_SINCE: ContextVar[float | None] = ContextVar("treadle_retrying_since", default=None)


class TimedOut(DataError, PyMongoError):
    """A call took too long; the code tells whether anything can have been written.

    PyMongo's kind of error too, with `timeout` set, like those by which the driver itself ends a call.
    """

    @property
    def timeout(self) -> bool:
        return True


def remaining() -> float | None:
    """The seconds that are left, not below 0; None without a deadline."""
    left = _csot.remaining()
    return None if left is None else max(0.0, left)


def moment() -> float:
    """The deadline on the monotonic clock; infinite where there is none."""
    return _csot.DEADLINE.get() if _csot.TIMEOUT.get() else NEVER


def within(seconds: float | None) -> AbstractContextManager[None]:
    """Bound what runs inside, unless its caller has set a deadline already."""
    return NONE if seconds is None or _csot.TIMEOUT.get() else pymongo.timeout(seconds)


@contextlib.contextmanager
def instead(seconds: float | None) -> Generator[None]:
    """Another deadline in place of the caller's, for what must be done although its time is over."""
    timeout, deadline = _csot.TIMEOUT.set(None), _csot.DEADLINE.set(float("inf"))
    try:
        with within(seconds):
            yield
    finally:
        _csot.DEADLINE.reset(deadline)
        _csot.TIMEOUT.reset(timeout)


def instead_until(end: float) -> AbstractContextManager[None]:
    """The same with a moment of the monotonic clock; without a deadline if that is `NEVER`."""
    return instead(None if end == NEVER else max(AT_ONCE_SECONDS, end - time.monotonic()))


@contextlib.contextmanager
def retrying_since(start: float) -> Generator[None]:
    """Count the time of all retries inside from a moment, so that one call has one bound."""
    token = _RETRYING_SINCE.set(start)
    try:
        yield
    finally:
        _RETRYING_SINCE.reset(token)


def pause(seconds: float) -> float:
    """How long a pause may last; raises where the caller's time is over before the pause is."""
    left = remaining()
    if left is not None and left < seconds:
        raise passed("waiting to try again")
    return seconds


def passed(doing: str) -> TimedOut:
    """The deadline came while nothing was written."""
    return TimedOut(
        f"the caller's deadline passed while this call was {doing}; nothing of it was written",
        code="deadline-passed",
    )


def unknown() -> TimedOut:
    """The deadline came while a shared commit was under way."""
    return TimedOut(
        "the caller's deadline passed while this write was being committed together with others; "
        "whether it was committed is not known: look before you try again",
        code="write-outcome-unknown",
    )


@contextlib.contextmanager
def holding(lock: Any, doing: str) -> Generator[None]:
    """Hold a lock of threads, waiting for it no longer than the caller does."""
    left = remaining()
    if not lock.acquire(timeout=-1 if left is None else left):
        raise passed(doing)
    try:
        yield
    finally:
        lock.release()


@contextlib.asynccontextmanager
async def holding_async(lock: Any, doing: str) -> AsyncGenerator[None]:
    """The same with a lock of asyncio."""
    try:
        async with asyncio.timeout(remaining()):
            await lock.acquire()
    except TimeoutError:
        raise passed(doing) from None
    try:
        yield
    finally:
        lock.release()


class Retries:
    """Until when, and after which pauses, something that failed for a transient reason is tried again.

    Until the caller's deadline. Without one, for as long as the server may hold the locks of a client
    that was killed (`Capabilities.lock_seconds`): whatever is locked for longer than that is in use.
    """

    def __init__(self, lock_seconds: float) -> None:
        self.has_deadline = moment() < NEVER
        self._seconds = lock_seconds
        start = _RETRYING_SINCE.get()
        start = time.monotonic() if start is None else start
        self._until = moment() if self.has_deadline else start + lock_seconds
        self._pause = RETRY_PAUSE_SECONDS

    def over(self) -> bool:
        """Whether it is too late for another attempt."""
        return time.monotonic() >= self._until

    def pause(self, chance: float) -> float:
        """Return the seconds before the next attempt.

        `chance`, a random number up to 1, keeps callers apart that failed at the same moment.
        """
        seconds, self._pause = self._pause, min(self._pause * 1.5, RETRY_PAUSE_MAX_SECONDS)
        return max(0.0, min(chance * seconds, self._until - time.monotonic()))

    def timed_out(self) -> TimedOut:
        """Return the error of a transaction that was tried until now, and wrote nothing."""
        if self.has_deadline:
            return passed("writing in a transaction")
        return TimedOut(
            f"other transactions kept the documents of this call in use for {self._seconds:.0f} seconds; "
            "nothing of it was written: try again when there are fewer writers at a time",
            code="write-contended",
        )


# -- transactions of callers ---------------------------------------------------------------------

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


@contextlib.contextmanager
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


@dataclass(slots=True)
class _State:
    """What is noted of a session: the writes that it has sent, and whether a block can still commit."""

    changes: int = 0
    is_block: bool = False
    is_over: bool = False


class Transactions:
    """The transactions of one Store's callers, by their sessions."""

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Any, _State] = WeakKeyDictionary()

    def begin(self, session: Any) -> None:
        """Note that a block has opened a transaction."""
        self._states[session] = _State(is_block=True)

    def note(self, session: Any, command: Call) -> None:
        """Note a write, unless it only makes concurrent writers conflict."""
        state = self._states.get(session) if self._states else None
        if state is not None and _changes_documents(command):
            state.changes += 1

    def changes(self, session: Any) -> int:
        """How many writes a session has sent since this was first asked."""
        return self._states.setdefault(session, _State()).changes

    def end(self, session: Any) -> None:
        """Note that nothing of the transaction can be committed."""
        state = self._states.get(session)
        if state is not None:
            state.is_over = state.is_block

    def require_open(self, session: Any) -> None:
        """Refuse to go on with a transaction of which nothing can be committed."""
        state = self._states.get(session)
        if state is not None and state.is_over:
            raise UsageError(
                "a call inside this transaction was refused or cut off after it had changed something, so "
                "that nothing of the transaction can be committed; let the error leave the block, and begin "
                "a new one",
                code="transaction-ended",
            )


def _changes_documents(command: Call) -> bool:
    return not command.collection.startswith("treadle.") and _BUMP not in command.arguments[1:2]
