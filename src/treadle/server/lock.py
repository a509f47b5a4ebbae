"""File locks by which processes tell each other that they are alive.

The kernel drops such a lock when its process ends, however it ends. A forked
child closes the locks that it would share with its parent.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

POLL_SECONDS = 0.01
EXCLUSIVE = fcntl.LOCK_EX
SHARED = fcntl.LOCK_SH

_descriptors: set[int] = set()


def _close_after_fork() -> None:
    # The lock stays the parent's; a child that kept the descriptor would
    # prolong it beyond the parent's death.
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_after_fork)


class FileLock:
    """A file lock that ends with its process, and that a fork does not inherit."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        self.descriptor = os.open(path, flags, 0o600)
        _descriptors.add(self.descriptor)

    def attempt(self, mode: int) -> bool:
        try:
            fcntl.flock(self.descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def take(self, mode: int, deadline: float) -> bool:
        while not self.attempt(mode):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def is_last(self) -> bool:
        """Release the lock. Returns whether no other process holds it, except a guard that ends."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return self.attempt(EXCLUSIVE) or not self.attempt(SHARED)

    def close(self, *, unlock: bool = True) -> None:
        if self.descriptor in _descriptors:
            if unlock:  # Also for a copy that a fork has not closed yet.
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            _descriptors.remove(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1


def is_held(path: Path) -> bool:
    """Whether some process holds the lock; False where there is no such file."""
    try:
        lock = FileLock(path, create=False)
    except OSError:
        return False
    free = lock.attempt(EXCLUSIVE)
    lock.close()
    return not free
