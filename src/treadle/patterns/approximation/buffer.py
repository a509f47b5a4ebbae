"""Events of a counter in memory: collected without a lock, added up, and kept until they are written.

`append` of a deque is atomic, so that adding an event costs neither a lock
nor a look-up. Events are folded into sums when there are many of them, or
when they are to be written. A batch that could not be written, or of which
nobody knows whether it was, stays `unfinished` under its number.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bson import ObjectId

from treadle.graph.limits import Limits

Plus: TypeAlias = Callable[[Any, Any], Any]


@dataclass(slots=True)
class Chunk:
    """Sums that are written together, once, under one number."""

    number: int
    sums: dict[Any, Any]


@dataclass(slots=True)
class Flushed:
    """What a flush did: how many documents were updated, and which ids could not be."""

    documents: int = 0
    unknown: dict[Any, Any] = field(default_factory=dict)

    def tell(self, amounts: Mapping[Any, Any], plus: Plus = operator.add) -> None:
        """Amounts that could not be added."""
        for key, n in amounts.items():
            self.unknown[key] = plus(self.unknown.get(key, 0), n)


class Buffer:
    """The events of one counter in one process."""

    def __init__(self, every: int, keys_max: int, limits: Limits, plus: Plus = operator.add) -> None:
        self._limits = limits
        self._plus = plus
        self.every = every
        self.keys_max = keys_max
        self.events: deque[Any] = deque()
        self.begin_anew()

    def begin_anew(self) -> None:
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
        # How many events may be collected before somebody must look.
        # Cut before it is made an integer: the sum of large amounts may be infinite.
        self.room = int(max(1, min(self._limits.counter_fold_max, self.every - self._weight)))

    def add(self, counts: Iterable[tuple[Any, Any]]) -> bool:
        """Add amounts that are not single events; whether a flush is due."""
        with self._lock:
            for key, n in counts:
                self._sums[key] = self._plus(self._sums.get(key, 0), n)
                self._weight += max(1, abs(n))
        return self.fold()

    def fold(self) -> bool:
        """Add up the single events; whether a flush is due."""
        with self._lock:
            events, sums, plus = self.events, self._sums, self._plus
            number = len(events)
            # Not all: those that come meanwhile wait for the next time.
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
                for key, n in chunk.sums.items():
                    sums[key] = self._plus(sums.get(key, 0), n)
            self.unfinished = deque(chunks[:1])
            self._number([(key, n) for key, n in sums.items() if n], self._limits.counter_chunk)
            self._sums = {}
            self._weight = 0
            self._set_room()

    def _number(self, items: list[tuple[Any, Any]], size: int) -> None:
        """Put amounts behind what is unfinished, under new numbers."""
        for start in range(0, len(items), size):
            self._numbers += 1
            self.unfinished.append(Chunk(self._numbers, dict(items[start : start + size])))

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
            found = dict(self._sums)
            chunks = list(self.unfinished)
        for chunk in chunks:
            for key, n in chunk.sums.items():
                found[key] = self._plus(found.get(key, 0), n)
        return {key: n for key, n in found.items() if n}

    @property
    def empty(self) -> bool:
        return not (self.events or self._sums or self.unfinished)

    @property
    def overfull(self) -> bool:
        """Whether more keys wait than may; then whoever adds must hear of what stands in the way."""
        parts = [self._sums, *(chunk.sums for chunk in list(self.unfinished))]
        if sum(map(len, parts)) <= self.keys_max:
            return False
        # The same id may wait in several.
        with self._lock:
            return len(set().union(*parts)) > self.keys_max
