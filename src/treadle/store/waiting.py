"""A call of a thread that waits for its outcome: the counterpart of a future of asyncio."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class Waiting(Generic[R]):
    """A call that another thread performs, or that this thread is woken to perform with others."""

    __slots__ = ("_done", "_error", "_outcome", "_woken", "leads")

    def __init__(self) -> None:
        # What the thread is to perform before it continues to wait.
        self.leads: Any = None
        self._woken = threading.Event()
        self._done = False
        self._outcome: R | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._done

    def cancel(self) -> None:
        """End the call without an outcome, if it has none yet."""
        self._done = True

    def set_result(self, outcome: R) -> None:
        self._outcome = outcome
        self._end()

    def set_exception(self, error: Exception) -> None:
        self._error = error
        self._end()

    def lead(self, leads: Any) -> None:
        """Wake the thread, so that it performs something."""
        self.leads = leads
        self._woken.set()

    def wait(self, seconds: float) -> Any:
        """Wait until the call has ended, or is to perform something, which is returned."""
        self._woken.wait(None if seconds == float("inf") else max(0.0, seconds))
        leads, self.leads = self.leads, None
        if leads is not None and not self._done:
            self._woken.clear()
        return leads

    def result(self) -> R:
        """Return the outcome; raises the error of a call that failed."""
        if self._error is not None:
            raise self._error
        return self._outcome  # type: ignore[return-value]

    def _end(self) -> None:
        self._done = True
        self._woken.set()
