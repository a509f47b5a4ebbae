"""The deadline of a call: until when its caller waits.

PyMongo's own, so that every command of a call obeys it: `pymongo.timeout`,
or else what the Store was given as `timeout=`, or the client's `timeoutMS`,
for the call as a whole. The driver bounds commands; what waits in between is
bounded here: a queue, a lock, a pause. The driver has no public way to ask
how much time is left, and this is the one place that knows its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import pymongo
from pymongo import _csot
from pymongo.errors import PyMongoError

from treadle.errors import DataError

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
