"""The handle of one counter: `store.counter(…)` of the asyncio shell.

It has what a plan must not: the events in memory, a lock, a timer, a clock
and chance. What is written, and how, is in the calls of its rule.
"""

from __future__ import annotations

import asyncio
import random as chance
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pymongo
from pymongo.errors import PyMongoError

from treadle.engine.indexes import EXAMPLES_MAX
from treadle.errors import TreadleError, UsageError
from treadle.graph.calls import CounterRule, Flushed, rule_named
from treadle.graph.model_entry import ModelEntry
from treadle.graph.quarantine import log
from treadle.plan import Failed
from treadle.plan.server_errors import is_bug
from treadle.store import counter_exit
from treadle.store.async_batching import AsyncBatcher
from treadle.store.async_writer import AsyncWriter
from treadle.store.background import start_timer, start_timer_async
from treadle.store.call_context import NEVER, holding_async, within
from treadle.store.counter_buffer import Buffer, is_plain
from treadle.store.shared_commands import copy_error

if TYPE_CHECKING:
    from treadle.patterns.approximation.handle import CounterHandle

# Callers of a durable counter who share one write.
COUNTER_COMBINED_MAX = 5_000
# How long storing such a write may take. A flusher remembers for longer than this what it has moved.
COUNTER_RECORD_SECONDS = 60.0
# How long a flush may take that no caller asked for.
COUNTER_DUE_SECONDS = 10.0
# How long the flush at the end of the process may take.
COUNTER_EXIT_SECONDS = 20.0
# How long flushes that no caller asked for pause after a failure.
COUNTER_PAUSE_SECONDS = 1.0
# Ids without a document that are remembered.
COUNTER_UNKNOWN_MAX = 10_000


class _NoClass:
    """The class of no id."""


class AsyncCounter:
    """A counter, on asyncio; safe to share between several tasks."""

    def __init__(
        self, store: AsyncWriter, entry: ModelEntry, field: str, random: Callable[[], float] | None
    ) -> None:
        self._store = store
        self.rule = rule_named(entry, CounterRule, field)
        self._calls: CounterHandle = self.rule.calls(store.write_path)
        declared, self._limits = self.rule.declared, self.rule.limits
        self._kind = declared.buffer
        self._random = random or chance.random
        self._buffer = Buffer(declared.every, declared.keys_max, self._limits, self.rule.plus)
        self._events = self._buffer.events
        self._append = self._events.append
        # Ids of exactly this class are counted with a quick check.
        self._quick_class: Any = (self.rule.exact_key if self._kind == "memory" else None) or _NoClass
        self._exact = self._quick_class
        waits = declared.within is not None and self._kind != "sampled"
        self._seconds = declared.within.total_seconds() if waits else None
        self._again_at = 0.0
        self._error: Exception | None = None
        # Amounts that flushes could not add, because there is no such document.
        self.unknown: dict[Any, Any] = {}
        self.reset()
        counter_exit.register(self)

    def reset(self) -> None:
        """Begin with an empty buffer and timer; a forked child must not write what its parent will."""
        self._buffer.reset()
        self._flushing = asyncio.Lock()
        # In order: an event that went past one that is being stored again would make that look moved already.
        self._batcher = AsyncBatcher(self._record, size_max=COUNTER_COMBINED_MAX, wait_seconds=NEVER)
        if True:  # ASYNC
            self._without_timer()
        else:
            self._stop = start_timer(weakref.ref(self), self._seconds)

    if True:  # ASYNC

        def _without_timer(self) -> None:
            # The next event starts the timer, which needs a running loop.
            self._timer: asyncio.Task[None] | None = None
            self._exact = _NoClass

        def _start_timer(self) -> None:
            if self._timer is None:
                self._exact = self._quick_class
            elif not self._timer.done() and self._timer.get_loop() is asyncio.get_running_loop():
                return
            self._flushing = asyncio.Lock()
            self._timer = start_timer_async(weakref.ref(self), self._seconds)

    # -- adding ------------------------------------------------------------------------

    async def add(self, id: Any, n: Any = 1) -> None:
        """Count an event, or `n` of them, for the document of this id."""
        if id.__class__ is self._exact and n == 1 and n.__class__ is int and is_plain(id):
            self._append(id)
            if len(self._events) >= self._buffer.room and self._buffer.fold():
                await self._flush_when_due()
            return
        try:
            counts = {id: n}
        except TypeError as error:
            raise UsageError(f"{id!r:.100} cannot be an id: {error}", code="id-invalid") from None
        await self.add_many(counts)

    async def add_many(self, counts: Mapping[Any, Any]) -> None:
        """Count events of several documents at once."""
        sums = self._calls.amounts(counts)
        if True:  # ASYNC
            self._start_timer()
        if self._kind == "sampled":
            every = self.rule.declared.every
            for key, n in sums.items():
                if n and self._random() * every < 1:
                    self._note(await self._store._perform(self._calls.sample(key, n * every)))
            return
        if self._kind == "durable":
            with within(self._store._seconds):
                await self._batcher.submit(sums)
            # In memory they only count towards the next flush.
            sums = {None: sum(max(1, abs(n)) for n in sums.values())}
        elif self._exact is not self._quick_class or self._buffer.overfull:
            await self._make_room()
        if self._buffer.add(sums):
            await self._flush_when_due()

    async def _record(self, group: Sequence[Any], _: int | None) -> list[Any]:
        """Store the amounts of several tasks in one write; each gets its outcome."""
        try:
            with pymongo.timeout(COUNTER_RECORD_SECONDS):
                await self._store.runner.run(self._calls.record(self._buffer, group))
        except (PyMongoError, TreadleError) as error:
            return [Failed(copy_error(error)) for _ in group]
        return [None] * len(group)

    async def _make_room(self) -> None:
        """Write a buffer that is full before more is added, or refuse the event."""
        await self._flush_when_due()
        if self._buffer.overfull and self._error is not None:
            raise self._error
        self._exact = self._quick_class

    # -- flushing ----------------------------------------------------------------------

    async def flush(self) -> Flushed:
        """Write everything that is pending. Returns what was done, and the ids that no document has."""
        done = Flushed()
        async with self._in_turn():
            try:
                await self._store.runner.run(self._calls.flush(self._buffer, done))
            finally:
                # Also what was noticed before something else failed: it is no longer pending.
                self._note(done.unknown)
        self._error = None
        return done

    @asynccontextmanager
    async def _in_turn(self) -> AsyncGenerator[None]:
        """Run the block while no other flush is under way, within the caller's time."""
        with within(self._store._seconds):
            async with holding_async(self._flushing, "waiting for a flush"):
                yield

    def _note(self, unknown: Mapping[Any, Any]) -> None:
        if not unknown:
            return
        examples = ", ".join(f"{key!r:.100}" for key in list(unknown)[:EXAMPLES_MAX])
        log.warning(
            "%s: the amounts of %d ids cannot be added: %s", self.rule.place.label, len(unknown), examples
        )
        for key, n in unknown.items():
            if key in self.unknown or len(self.unknown) < COUNTER_UNKNOWN_MAX:
                self.unknown[key] = self.unknown.get(key, 0) + n

    async def _flush_when_due(self) -> None:
        """Flush without a caller; a failure is logged, and the next flush tries again."""
        if time.monotonic() >= self._again_at:
            try:
                with pymongo.timeout(COUNTER_DUE_SECONDS):
                    await self.flush()
                return
            except Exception as error:
                # No caller asked for this flush, so that none can be told.
                text = "%s: a flush failed and will be tried again: %s"
                log.warning(text, self.rule.place.label, error, exc_info=is_bug(error))
                self._error = error
                self._again_at = time.monotonic() + COUNTER_PAUSE_SECONDS
        if self._buffer.overfull:
            # The next call of add must see first whether there is room.
            self._exact = _NoClass

    async def tick(self) -> None:
        """Flush what is pending; called by the timer."""
        if self._kind == "durable" or not self._buffer.empty:
            await self._flush_when_due()

    def flush_at_exit(self, spent_seconds: float = 0.0) -> None:
        """Write what is pending when the process ends, or log that it is lost."""
        if self._kind != "memory" or self._buffer.empty:
            return
        if True:  # ASYNC
            # The loop is over, and with it the client.
            log.warning(
                "%s: events were still pending when the process ended, and are lost; close the store, or "
                "use the counter with `async with`",
                self.rule.place.label,
            )
        else:
            try:
                # At least a moment: counters that timed out before this one may have another server.
                with pymongo.timeout(max(1.0, COUNTER_EXIT_SECONDS - spent_seconds)):
                    self.flush()
            except Exception as error:
                # The process ends, and the other counters are still to be flushed.
                text = "%s: what was pending at exit is lost: %s"
                log.warning(text, self.rule.place.label, error, exc_info=is_bug(error))

    # -- reading -----------------------------------------------------------------------

    async def pending(self) -> dict[Any, Any]:
        """Return what is not stored yet, by id; of a durable counter, of all processes."""
        if self._kind == "durable":
            return await self._store._perform(self._calls.pending())
        return self._buffer.pending()

    async def read(self, id: Any, exact: bool = False) -> Any:
        """Return the stored number, or the exact one, with what is pending. None if there is no document."""
        plan = self._calls.read(id, exact, self._buffer)
        if not exact or self._kind != "memory":
            return await self._store._perform(plan, answers=not exact)
        async with self._in_turn():
            return await self._store.runner.run(plan)

    async def close(self) -> None:
        """Flush, and stop the timer; the counter can still be used, and then flushed by hand."""
        if True:  # ASYNC
            timer = self._timer
            self._without_timer()
            await self.flush()
            if timer is not None:
                timer.cancel()
        else:
            self._stop.set()
            self.flush()
        counter_exit.unregister(self)
        await self._store.runner.run(self._calls.close(self._buffer))

    async def __aenter__(self) -> AsyncCounter:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.flush()
