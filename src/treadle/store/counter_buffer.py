"""Events of a counter in memory: collected without a lock, added up, and kept until they are written.

`append` of a deque is atomic, so that adding an event costs neither a lock
nor a look-up. Events are folded into sums when there are many of them, or
when they are to be written. A batch that could not be written, or of which
it is not known whether it was, stays `unfinished` under its number.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from bson import ObjectId

from treadle.graph.calls import Chunk, Sums
from treadle.graph.limits import Limits

# Events that are kept one by one before they are added up.
COUNTER_FOLD_MAX = 1_024
# Text and bytes up to this length are taken as ids without a check.
PLAIN_KEY_LENGTH_MAX = 1_000
INT64 = 2**63

C = TypeVar("C")

_MAKING = threading.Lock()


def only_one(counters: dict[Any, C], key: Any, make: Callable[[], C]) -> C:
    """The counter under a key, made if there is none; two would each hold a part of the events."""
    if key not in counters:
        with _MAKING:
            if key not in counters:
                counters[key] = make()
    return counters[key]


def is_plain(key: Any) -> bool:
    """Whether an ObjectId, int, str or bytes can certainly be stored as an id."""
    if isinstance(key, ObjectId):
        return True
    if isinstance(key, int):
        return -INT64 <= key < INT64
    return len(key) <= PLAIN_KEY_LENGTH_MAX and (isinstance(key, bytes) or key.isascii() is True)


class Buffer:
    """The events of one counter in one process."""

    def __init__(
        self, every: int, keys_max: int, limits: Limits, plus: Callable[[Any, Any], Any] = operator.add
    ) -> None:
        self._plus = plus
        self._limits = limits
        self.every = every
        self.keys_max = keys_max
        self.events: deque[Any] = deque()
        self.reset()

    def reset(self) -> None:
        """Forget everything; for the child of a fork, whose parent has it."""
        # The same deque, because its `append` is held by others.
        self.events.clear()
        self._lock = threading.Lock()
        self._sums: dict[Any, Any] = {}
        self._weight: float = 0
        self.writer = ObjectId()
        self._numbers = 0
        self.unfinished: deque[Chunk] = deque()
        self._set_room()

    def _set_room(self) -> None:
        # How many events may be collected before their weight must be checked.
        # Cut before it is made an integer: the sum of large amounts may be infinite.
        self.room = int(max(1, min(COUNTER_FOLD_MAX, self.every - self._weight)))

    def _add_to(self, sums: dict[Any, Any], more: Sums) -> None:
        for key, n in more.items():
            sums[key] = self._plus(sums.get(key, 0), n)

    def add(self, sums: Sums) -> bool:
        """Add amounts that are not single events; whether a flush is due."""
        with self._lock:
            self._add_to(self._sums, sums)
            self._weight += sum(max(1, abs(n)) for n in sums.values())
        return self.fold()

    def fold(self) -> bool:
        """Add up the single events; whether a flush is due."""
        with self._lock:
            events, sums, plus = self.events, self._sums, self._plus
            number = len(events)
            # Not those that arrive during this: they wait for the next time.
            for _ in range(number):
                key = events.popleft()
                sums[key] = plus(sums.get(key, 0), 1)
            self._weight += number
            self._set_room()
            return self._weight >= self.every or len(sums) >= self.keys_max

    def take(self) -> None:
        """Move all sums to `unfinished`, before anything is written.

        Only the first chunk may have been begun. What waits behind it since an
        earlier flush failed is added up with the new, so that a server that
        stays away does not fill the memory with the same ids again and again.
        """
        self.fold()
        with self._lock:
            chunks, sums = list(self.unfinished), self._sums
            for chunk in chunks[1:]:
                self._add_to(sums, chunk.sums)
            self.unfinished = deque(chunks[:1])
            self._number([(key, n) for key, n in sums.items() if n], self._limits.counter_chunk)
            self._sums = {}
            self._weight = 0
            self._set_room()

    def _number(self, items: list[tuple[Any, Any]], size: int) -> None:
        """Put amounts behind what is unfinished, under new numbers."""
        for start in range(0, len(items), size):
            self.unfinished.append(Chunk(self.next_number(), dict(items[start : start + size])))

    def next_number(self) -> int:
        """A number for the next batch or event; they only grow."""
        self._numbers += 1
        return self._numbers

    def divide(self, size: int) -> None:
        """Write the first chunk, and those behind it, in smaller ones.

        Only for a chunk that was certainly not written. Those behind it were
        not begun, so they may have new numbers; they must, because a writer's
        numbers only grow.
        """
        with self._lock:
            chunks, self.unfinished = self.unfinished, deque()
            for chunk in chunks:
                self._number(list(chunk.sums.items()), size)

    def pending(self) -> dict[Any, Any]:
        """What is not known to be written, by key."""
        self.fold()
        with self._lock:
            sums = dict(self._sums)
            chunks = list(self.unfinished)
        for chunk in chunks:
            self._add_to(sums, chunk.sums)
        return {key: n for key, n in sums.items() if n}

    @property
    def empty(self) -> bool:
        return not (self.events or self._sums or self.unfinished)

    @property
    def overfull(self) -> bool:
        """Whether more keys wait than may; then the caller that adds must get the error of the last flush."""
        parts = [self._sums, *(chunk.sums for chunk in list(self.unfinished))]
        if sum(map(len, parts)) <= self.keys_max:
            return False
        # The same id may wait in several.
        with self._lock:
            return len(set().union(*parts)) > self.keys_max
