"""What runs beside the work of a shell: in a thread for the blocking one, in a task for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any

from pymongo.errors import PyMongoError

from treadle.graph.quarantine import log
from treadle.plan.server_errors import is_bug

# How often a lease is renewed within its time.
LEASE_RENEWALS = 3
# A timer that is never due.
FOREVER_SECONDS = 1e9


@contextlib.contextmanager
def repeating(seconds: float, call: Callable[[], object]) -> Generator[None]:
    """Call something every so often until the block ends; an error of the server skips one turn."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(seconds):
            with contextlib.suppress(PyMongoError):
                call()

    thread = threading.Thread(target=repeat, name="treadle-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.asynccontextmanager
async def repeating_async(seconds: float, call: Callable[[], Awaitable[object]]) -> AsyncGenerator[None]:
    """The same in a task."""
    done = False

    async def repeat() -> None:
        while not done:
            await asyncio.sleep(seconds)
            with contextlib.suppress(PyMongoError):
                await call()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        # Said as well, for a call that is just ending may swallow the cancellation.
        done = True
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def is_sigterm_unhandled() -> bool:
    """Whether this is the main thread, and SIGTERM has no handler."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@contextlib.contextmanager
def on_terminate(stop: Callable[[], None]) -> Generator[None]:
    """Let SIGTERM call `stop`, where this is the main thread and there is no other handler."""
    if not is_sigterm_unhandled():
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def start_timer(reference: Callable[[], Any], seconds: float | None) -> threading.Event:
    """Flush a counter every so often, as long as it lives and until what is returned is set."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(seconds):
            counter = reference()
            if counter is None:
                return
            try:
                counter.tick()
            except Exception as error:
                # An error would end the timer; the next turn tries again.
                log.warning("%s: %s", counter.rule.place.label, error, exc_info=is_bug(error))
            del counter

    if seconds is not None:
        threading.Thread(target=repeat, name="treadle-counter", daemon=True).start()
    return stop


def start_timer_async(reference: Callable[[], Any], seconds: float | None) -> asyncio.Task[None]:
    """The same in a task, which flushes once more when the loop ends: it cancels its tasks and waits."""

    async def repeat() -> None:
        try:
            while True:
                await asyncio.sleep(seconds if seconds is not None else FOREVER_SECONDS)
                counter = reference()
                if counter is None:
                    return
                await counter.tick()
                del counter
        except asyncio.CancelledError:
            counter = reference()
            if counter is not None and counter._timer is not None:
                await counter.tick()
            raise

    # In an empty context: the deadline of the call that began it is not the timer's.
    return asyncio.create_task(repeat(), context=contextvars.Context())
