"""What both handles of a counter have in common: the buffer, and what is said about it."""

from __future__ import annotations

import random as chance
import threading
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeVar

from treadle.engine.set_aside import log
from treadle.graph.pattern import Entry
from treadle.patterns.approximation import events as counter_events
from treadle.patterns.approximation import flush as counters
from treadle.patterns.approximation.buffer import Buffer, Chunk, Flushed
from treadle.patterns.approximation.fields import CounterFields
from treadle.patterns.approximation.flush import Flush, Sample
from treadle.plan import Plan, transact

C = TypeVar("C")


class NoClass:
    """The class of no id."""


_MAKING = threading.Lock()


def only_one(made: dict[Any, C], key: Any, make: Callable[[], C]) -> C:
    """The counter under a key, made if there is none; two would each hold a part of the events."""
    found = made.get(key)
    if found is None:
        with _MAKING:
            found = made.get(key)
            if found is None:
                found = made[key] = make()
    return found


class CounterHandle:
    """What both handles share: the buffer, and what is said about it."""

    def __init__(self, entry: Entry[Any], field: str, random: Callable[[], float] | None) -> None:
        self.rule: CounterFields = counters.rule_named(entry, field)
        declared, self._limits = self.rule.declared, entry.limits
        self._kind = declared.buffer
        self._random = random or chance.random
        self._buffer = Buffer(declared.every, declared.keys_max, entry.limits, self.rule.plus)
        self._events = self._buffer.events
        self._append = self._events.append
        # Ids of this very class are counted without looking at them.
        self._quick_class: Any = (self.rule.exact_key if declared.buffer == "memory" else None) or NoClass
        self._exact = self._quick_class
        self._again_at = 0.0
        self._error: Exception | None = None
        # Amounts that flushes could not add, because there is no such document.
        self.unknown: dict[Any, Any] = {}

    @property
    def _seconds(self) -> float | None:
        within = self.rule.declared.within
        return None if within is None or self._kind == "sampled" else within.total_seconds()

    def _amounts(self, counts: Mapping[Any, Any]) -> dict[Any, Any]:
        rule = self.rule
        sums: dict[Any, Any] = {}
        for id, n in counts.items():
            key = rule.key(id)
            sums[key] = rule.plus(sums.get(key, 0), rule.amount(n))
        return sums

    def _sampled(self, sums: Mapping[Any, Any]) -> list[Sample]:
        every = self.rule.declared.every
        return [
            Sample(self.rule, key, n * every) for key, n in sums.items() if n and self._random() * every < 1
        ]

    def _note(self, unknown: Mapping[Any, Any]) -> None:
        if not unknown:
            return
        shown = ", ".join(repr(key) for key in list(unknown)[: self._limits.examples_max])
        log.warning(
            "%s: the amounts of %d ids cannot be added: %s", self.rule.place.label, len(unknown), shown
        )
        for key, n in unknown.items():
            if key in self.unknown or len(self.unknown) < self._limits.counter_unknown_max:
                self.unknown[key] = self.unknown.get(key, 0) + n

    def _failed(self, error: Exception) -> None:
        """A flush that came by itself failed: nothing is lost, and the next one tries again."""
        log.warning("%s: a flush failed and will be tried again: %s", self.rule.place.label, error)
        self._error = error
        self._again_at = time.monotonic() + self._limits.counter_pause_seconds
        self._look_first_if_full()

    def _look_first_if_full(self) -> None:
        """Where nothing can be written, let whoever adds see first whether there is room."""
        if self._buffer.overfull:
            self._exact = NoClass

    def _resting(self) -> bool:
        """Whether a flush failed a moment ago, so that those that come by themselves wait."""
        if time.monotonic() >= self._again_at:
            return False
        self._look_first_if_full()
        return True

    def _refuse_if_full(self) -> None:
        """Refuse an event that there is no room for; it is not counted."""
        if self._buffer.overfull and self._error is not None:
            raise self._error
        self._exact = self._quick_class

    def _flush_of(self, chunk: Chunk) -> Flush:
        return Flush(self.rule, chunk.sums, self._buffer.writer, chunk.number)

    def _set_aside(self, work: Flush, chunk: Chunk, bad: Mapping[Any, Any], done: Flushed) -> None:
        """Go on without the amounts that cannot be added."""
        done.tell(bad, self.rule.plus)
        # Another dict, because others may be reading this one.
        chunk.sums = {key: n for key, n in chunk.sums.items() if key not in bad}
        # The marks of a batch are its own, so that one with marks cannot be divided.
        if not work.marks and len(chunk.sums) > self._limits.counter_again_chunk:
            self._buffer.divide(self._limits.counter_again_chunk)

    def _done_with(self, chunk: Chunk, missing: Mapping[Any, Any], done: Flushed) -> None:
        done.documents += len(chunk.sums) - len(missing)
        done.tell(missing, self.rule.plus)
        self._buffer.unfinished.popleft()

    def _drained(self, outcome: tuple[int, dict[Any, Any], dict[Any, Any]], done: Flushed) -> bool:
        """Note what became of a part of the events; whether there may be more."""
        events, sums, refused = outcome
        done.documents += len(sums) - len(refused.keys() & sums.keys())
        done.tell(refused, self.rule.plus)
        return events > 0

    def _unsettled(self, key: Any) -> list[Chunk]:
        return [chunk for chunk in self._buffer.unfinished if key in chunk.sums]

    def _exactly(self, key: Any, waiting: Any) -> Plan[Any]:
        """The stored number and what is not in it yet; nothing of it twice."""
        value = yield from counters.stored(self.rule, key)
        for chunk in self._unsettled(key):
            if (yield from counters.was_added(self._flush_of(chunk), key)):
                n = chunk.sums[key]
                # Python's own minus would cut a long decimal.
                waiting = self.rule.plus(waiting, n.copy_negate() if isinstance(n, Decimal) else -n)
        return self._total(value, waiting)

    def _total(self, value: Any, waiting: Any) -> Any:
        if value is None and not self.rule.declared.upsert:
            return None
        number = self.rule.number
        return self.rule.plus(number(value or 0), number(waiting))

    def _durably(self, key: Any) -> Plan[Any]:
        """Stored and buffered at one moment."""
        value, waiting = yield from transact(lambda: counter_events.stored_and_buffered(self.rule, key))
        return self._total(value, waiting)
