"""The end of a process, and its forks: what is in memory is written before it is gone.

At a normal exit, and at the exit of a child of `multiprocessing`, every
counter is flushed. SIGTERM ends a Python process without any of that, unless
there is a handler. If there is none when the first counter is made in the main
thread, Treadle turns it into a normal exit with status 143. A handler that is
there already is left alone: it exits in its own way, and the flush follows if
that way is a normal exit.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from typing import Any, Protocol

from treadle.store.background import is_sigterm_unhandled


class Live(Protocol):
    """What a counter must be able to do here."""

    def flush_at_exit(self, spent_seconds: float) -> None: ...
    def reset(self) -> None: ...


_LIVE: set[Live] = set()
_PREPARED = False


def register(counter: Live) -> None:
    """Flush this counter when the process ends, and let a forked child begin with an empty buffer."""
    global _PREPARED
    _LIVE.add(counter)
    if _PREPARED:
        return
    _PREPARED = True
    atexit.register(flush_all)
    os.register_at_fork(after_in_child=_after_fork)
    if is_sigterm_unhandled():
        signal.signal(signal.SIGTERM, _terminate)


def unregister(counter: Live) -> None:
    _LIVE.discard(counter)


def flush_all() -> None:
    """Flush what is there; a counter that cannot be flushed says so in the log."""
    started = time.monotonic()
    for counter in list(_LIVE):
        # All of them together take no longer than one of them may.
        counter.flush_at_exit(time.monotonic() - started)


def _terminate(number: int, frame: Any) -> None:
    # An exception unwinds whatever this thread was doing, locks included; flushing right here could not.
    sys.exit(128 + number)


def _after_fork() -> None:
    for counter in list(_LIVE):
        counter.reset()
    # Children of `multiprocessing` leave without the handlers of atexit, but with its own finalizers.
    # Not imported for this: a program with such children has imported it.
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.register_after_fork(flush_all, lambda _: util.Finalize(None, flush_all, exitpriority=100))
