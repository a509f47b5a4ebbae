"""What `store.counter(…)` of the asyncio shell gives: the handle of one counter."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pymongo
from pymongo.errors import DuplicateKeyError, OperationFailure, PyMongoError

from treadle.engine.set_aside import log
from treadle.errors import TreadleError
from treadle.graph.pattern import Entry
from treadle.patterns.approximation import events as counter_events
from treadle.patterns.approximation import flush as counters
from treadle.patterns.approximation.buffer import Flushed
from treadle.patterns.approximation.events import Drain
from treadle.store import counter_exit
from treadle.store.async_writer import AsyncWriter
from treadle.store.background import start_timer, start_timer_async
from treadle.store.combine import AsyncCombiner
from treadle.store.counter_handle import CounterHandle, NoClass


class AsyncCounter(CounterHandle):
    """A counter, on asyncio; safe to share between several tasks."""

    def __init__(
        self, store: AsyncWriter, entry: Entry[Any], field: str, random: Callable[[], float] | None
    ) -> None:
        super().__init__(entry, field, random)
        self._store = store
        self.begin_anew()
        counter_exit.register(self)

    def begin_anew(self) -> None:
        """A fresh buffer and its own timer; a forked child must not write what its parent will."""
        self._buffer.begin_anew()
        self._flushing = asyncio.Lock()
        self._combiner = AsyncCombiner(
            self._record, self._limits.counter_combined_max, self._limits.combine_seconds
        )
        if True:  # ASYNC
            self._without_timer()
        else:
            self._stop = start_timer(weakref.ref(self), self._seconds)

    if True:  # ASYNC

        def _without_timer(self) -> None:
            # The next event starts the timer, which needs a running loop.
            self._timer: asyncio.Task[None] | None = None
            self._exact = NoClass

        def _start_timer(self) -> None:
            if self._timer is None:
                self._exact = self._quick_class
            elif not self._timer.done() and self._timer.get_loop() is asyncio.get_running_loop():
                return
            self._flushing = asyncio.Lock()
            self._timer = start_timer_async(weakref.ref(self), self._seconds)

    async def add(self, id: Any, n: Any = 1) -> None:
        """Count an event, or `n` of them, for the document of this id."""
        if id.__class__ is self._exact and n == 1 and n.__class__ is int:
            self._append(id)
            if len(self._events) >= self._buffer.room and self._buffer.fold():
                await self._flush_when_due()
            return
        await self.add_many({id: n})

    async def add_many(self, counts: Mapping[Any, Any]) -> None:
        """Count events of several documents at once."""
        sums = self._amounts(counts)
        if True:  # ASYNC
            self._start_timer()
        if self._kind == "memory":
            if self._exact is not self._quick_class or self._buffer.overfull:
                await self._make_room()
            if self._buffer.add(sums.items()):
                await self._flush_when_due()
        elif self._kind == "durable":
            error = await self._combiner.perform(sums)  # type: ignore[arg-type]
            if error is not None:
                raise error
            if self._buffer.add([(None, sum(max(1, abs(n)) for n in sums.values()))]):
                await self._flush_when_due()
        else:
            for sample in self._sampled(sums):
                try:
                    added = await self._store._write(sample, None)
                except (OperationFailure, OverflowError) as error:
                    if not counters.is_refusal(error):
                        raise
                    added = False
                if not added:
                    self._note(sample.sums)

    async def _record(self, group: Sequence[Any]) -> list[Any]:
        """Store the amounts of several tasks in one write; each hears how it went."""
        try:
            # First, because it refuses a server where durable counters cannot be kept.
            await self._store._capabilities()
            await self._store.runner.run(
                counter_events.record(self.rule, counter_events.joined(self.rule, group))
            )
        except (PyMongoError, TreadleError) as error:
            return [error] * len(group)
        return [None] * len(group)

    async def flush(self) -> Flushed:
        """Write everything that is pending; what was done, and which ids no document has."""
        done = Flushed()
        async with self._flushing:
            try:
                if self._kind == "durable":
                    await self._drain(done)
                else:
                    await self._write_all(done)
            finally:
                # Also what was found before something else failed: it is no longer pending.
                self._note(done.unknown)
        self._error = None
        return done

    async def _write_all(self, done: Flushed) -> None:
        buffer, collisions = self._buffer, 0
        buffer.take()
        while buffer.unfinished:
            chunk = buffer.unfinished[0]
            work = self._flush_of(chunk)
            try:
                missing = await self._store._write(work, None, combine=False)
            except DuplicateKeyError:
                # Another writer made the same document; the next attempt finds it.
                collisions += 1
                if collisions == self._limits.counter_attempts_max:
                    raise
                continue
            except (OperationFailure, OverflowError) as error:
                bad = await self._store.runner.run(counters.culprits(self.rule, chunk.sums, error))
                if not bad:
                    raise
                self._set_aside(work, chunk, bad, done)
                continue
            self._done_with(chunk, missing, done)
            await self._store.runner.run(counters.unmark(work))

    async def _drain(self, done: Flushed) -> None:
        self._buffer.take()
        self._buffer.unfinished.clear()
        left_out: dict[Any, Any] = {}
        for _ in range(self._limits.counter_parts_max):
            work = Drain(self.rule, left_out)
            try:
                outcome = await self._store._write(work, None, combine=False)
            except (OperationFailure, OverflowError) as error:
                bad = await self._store.runner.run(counters.culprits(self.rule, work.sums, error))
                if not bad or bad.keys() <= left_out.keys():
                    raise
                left_out.update(bad)
                continue
            if not self._drained(outcome, done):
                break

    async def _flush_when_due(self) -> None:
        """A flush that the caller did not ask for; what goes wrong with it is told in the log."""
        if self._resting():
            return
        try:
            with pymongo.timeout(self._limits.counter_due_seconds):
                await self.flush()
        except Exception as error:
            self._failed(error)

    async def _make_room(self) -> None:
        """Before more is added to a buffer that is full: write it, or refuse."""
        await self._flush_when_due()
        self._refuse_if_full()

    def flush_at_exit(self) -> None:
        """The process ends: write what is pending, or say that it is lost."""
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
                with pymongo.timeout(self._limits.counter_exit_seconds):
                    self.flush()
            except Exception as error:
                log.warning("%s: what was pending at exit is lost: %s", self.rule.place.label, error)

    async def tick(self) -> None:
        if self._kind == "durable" or not self._buffer.empty:
            await self._flush_when_due()

    async def pending(self) -> dict[Any, Any]:
        """What is not stored yet, by id; of a durable counter, of all processes."""
        if self._kind == "durable":
            return await self._store.runner.run(counter_events.buffered(self.rule))
        return self._buffer.pending()

    async def read(self, id: Any, exact: bool = False) -> Any:
        """The stored number, or the exact one: with what is pending. None if there is no document."""
        key, run = self.rule.key(id), self._store.runner.run
        if exact and self._kind == "durable":
            return await run(self._durably(key))
        if exact and self._kind == "memory":
            async with self._flushing:
                waiting = self._buffer.pending().get(key, 0)
                return await run(self._exactly(key, waiting))
        return self._total(await run(counters.stored(self.rule, key)), 0)

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
        if self._kind == "memory":
            await self._store.runner.run(counters.forget(self._buffer.writer))

    async def __aenter__(self) -> AsyncCounter:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.flush()
