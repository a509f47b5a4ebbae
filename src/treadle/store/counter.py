"""What `store.counter(…)` gives: the blocking and the asyncio handle of one counter."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pymongo
from pymongo.errors import DuplicateKeyError, OperationFailure, PyMongoError

from treadle.engine.intents import log
from treadle.graph.graph import Entry
from treadle.patterns.approximation import events as counter_events
from treadle.patterns.approximation import flush as counters
from treadle.patterns.approximation.buffer import Chunk, Flushed
from treadle.patterns.approximation.events import Drain
from treadle.patterns.approximation.flush import ATTEMPTS_MAX, Flush
from treadle.store import counter_exit, shell
from treadle.store.combine import AsyncCombiner, Combiner
from treadle.store.counter_handle import (
    DUE_SECONDS_MAX,
    EXIT_SECONDS_MAX,
    GROUP_MAX,
    PARTS_MAX,
    CounterHandle,
)

if TYPE_CHECKING:
    from treadle.store.async_store import AsyncStore
    from treadle.store.blocking_store import Store


class Counter(CounterHandle):
    """A counter, blocking; safe to share between threads."""

    def __init__(
        self, store: Store, entry: Entry[Any], field: str, random: Callable[[], float] | None
    ) -> None:
        super().__init__(entry, field, random)
        self._store = store
        self.begin_anew()
        counter_exit.register(self)

    def begin_anew(self) -> None:
        """A fresh buffer and its own timer; a forked child must not write what its parent will."""
        self._buffer.begin_anew()
        self._flushing = threading.RLock()
        self._combiner = Combiner(self._record, GROUP_MAX)
        self._stop = threading.Event()
        if self._seconds is not None:
            arguments = (weakref.ref(self), self._seconds, self._stop)
            threading.Thread(target=_tick, args=arguments, daemon=True, name="treadle-counter").start()

    def add(self, id: Any, n: Any = 1) -> None:
        """Count an event, or `n` of them, for the document of this id."""
        if n.__class__ is int and n == 1 and id.__class__ is self._exact:
            self._append(id)
            if len(self._events) >= self._buffer.room and self._buffer.fold():
                self._flush_when_due()
            return
        self.add_many({id: n})

    def add_many(self, counts: Mapping[Any, Any]) -> None:
        """Count events of several documents at once."""
        sums = self._amounts(counts)
        if self._kind == "memory":
            if self._exact is not self._quick_class or self._buffer.overfull:
                self._make_room()
            if self._buffer.add(sums.items()):
                self._flush_when_due()
        elif self._kind == "durable":
            error = self._combiner.perform(sums)  # type: ignore[arg-type]
            if error is not None:
                raise error
            if self._buffer.add([(None, sum(max(1, abs(n)) for n in sums.values()))]):
                self._flush_when_due()
        else:
            for sample in self._sampled(sums):
                try:
                    added = self._store._write(sample, None)
                except (OperationFailure, OverflowError) as error:
                    if not counters.is_refusal(error):
                        raise
                    added = False
                if not added:
                    self._note(sample.sums)

    def _record(self, group: Sequence[Any]) -> list[Any]:
        """Store the amounts of several threads in one write; each hears how it went."""
        try:
            self._store.runner.run(counter_events.record(self.rule, counter_events.joined(self.rule, group)))
        except PyMongoError as error:
            return [error] * len(group)
        return [None] * len(group)

    def flush(self) -> Flushed:
        """Write everything that is pending; what was done, and which ids no document has."""
        done = Flushed()
        with self._flushing:
            try:
                if self._kind == "durable":
                    self._drain(done)
                else:
                    self._write_all(done)
            finally:
                # Also what was found before something else failed: it is no longer pending.
                self._note(done.unknown)
        self._error = None
        return done

    def _write_all(self, done: Flushed) -> None:
        buffer, collisions = self._buffer, 0
        server = self._store._capabilities()
        buffer.take()
        while buffer.unfinished:
            chunk = buffer.unfinished[0]
            work = Flush(self.rule, chunk.sums, buffer.writer, chunk.number)
            try:
                missing = self._store._write(work, None, combine=False)
            except DuplicateKeyError:
                # Another writer made the same document; the next attempt finds it.
                collisions += 1
                if collisions == ATTEMPTS_MAX:
                    raise
                continue
            except (OperationFailure, OverflowError) as error:
                bad = self._store.runner.run(counters.culprits(self.rule, chunk.sums, error))
                if not bad:
                    raise
                self._set_aside(chunk, bad, done, server)
                continue
            self._done_with(chunk, missing, done)
            self._unmark(chunk)

    def _unmark(self, chunk: Chunk) -> None:
        """Without transactions: the batch is over, so its marks may go; one that stays does no harm."""
        if self._store._capabilities().transactions:
            return
        work = Flush(self.rule, chunk.sums, self._buffer.writer, chunk.number)
        try:
            self._store.runner.run(counters.unmark(self.rule, chunk.sums, work.mark))
        except PyMongoError as error:
            log.warning("%s: the marks of a batch stay: %s", self.rule.place.label, error)

    def _drain(self, done: Flushed) -> None:
        self._buffer.take()
        self._buffer.unfinished.clear()
        left_out: dict[Any, Any] = {}
        for _ in range(PARTS_MAX):
            work = Drain(self.rule, left_out)
            try:
                outcome = self._store._write(work, None, combine=False)
            except (OperationFailure, OverflowError) as error:
                bad = self._store.runner.run(counters.culprits(self.rule, work.sums, error))
                if not bad or bad.keys() <= left_out.keys():
                    raise
                left_out.update(bad)
                continue
            if not self._drained(outcome, done):
                break

    def _flush_when_due(self) -> None:
        """A flush that the caller did not ask for; what goes wrong with it is told in the log."""
        if self._resting():
            return
        try:
            with pymongo.timeout(DUE_SECONDS_MAX):
                self.flush()
        except Exception as error:
            self._failed(error)

    def _make_room(self) -> None:
        """Before more is added to a buffer that is full: write it, or refuse."""
        self._flush_when_due()
        self._refuse_if_full()

    def flush_at_exit(self) -> None:
        """What the process has left is written at its end."""
        if self._kind == "memory" and not self._buffer.empty:
            try:
                with pymongo.timeout(EXIT_SECONDS_MAX):
                    self.flush()
            except Exception as error:
                log.warning("%s: what was pending at exit is lost: %s", self.rule.place.label, error)

    def tick(self) -> None:
        if self._kind == "durable" or not self._buffer.empty:
            self._flush_when_due()

    def pending(self) -> dict[Any, Any]:
        """What is not stored yet, by id; of a durable counter, of all processes."""
        if self._kind == "durable":
            return self._store.runner.run(counter_events.buffered(self.rule))
        return self._buffer.pending()

    def read(self, id: Any, exact: bool = False) -> Any:
        """The stored number, or the exact one: with what is pending. None if there is no document."""
        key, run = self.rule.key(id), self._store.runner.run
        if exact and self._kind == "durable":
            return run(self._durably(self._store._capabilities(), key))
        if exact and self._kind == "memory":
            with self._flushing:
                waiting = self._buffer.pending().get(key, 0)
                return run(self._exactly(self._store._capabilities(), key, waiting))
        return self._total(run(counters.stored(self.rule, key)), 0)

    def close(self) -> None:
        """Flush, and stop the timer; the counter can still be used, and then flushed by hand."""
        self._stop.set()
        self.flush()
        counter_exit.unregister(self)
        if self._kind == "memory" and self._store._capabilities().transactions:
            self._store.runner.run(counters.forget(self._buffer.writer))

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.flush()


def _tick(reference: Callable[[], Counter | None], seconds: float, stop: threading.Event) -> None:
    """Flush every so often, as long as the counter lives."""
    while not stop.wait(seconds):
        counter = reference()
        if counter is None:
            return
        try:
            counter.tick()
        except Exception as error:
            log.warning("%s: %s", counter.rule.place.label, error)
        del counter


class AsyncCounter(CounterHandle):
    """A counter on asyncio; a task of the loop flushes it in time, no thread is needed."""

    def __init__(
        self, store: AsyncStore, entry: Entry[Any], field: str, random: Callable[[], float] | None
    ) -> None:
        super().__init__(entry, field, random)
        self._store = store
        self._task: asyncio.Task[None] | None = None
        self.begin_anew()
        counter_exit.register(self)

    def begin_anew(self) -> None:
        """A fresh buffer; a forked child must not write what its parent will."""
        self._buffer.begin_anew()
        self._flushing = asyncio.Lock()
        self._combiner = AsyncCombiner(self._record, GROUP_MAX)
        # The first event starts the timer, which needs a running loop.
        self._task = None

    async def add(self, id: Any, n: Any = 1) -> None:
        """Count an event, or `n` of them, for the document of this id."""
        if n.__class__ is int and n == 1 and id.__class__ is self._exact and self._task is not None:
            self._append(id)
            if len(self._events) >= self._buffer.room and self._buffer.fold():
                await self._flush_when_due()
            return
        await self.add_many({id: n})

    async def add_many(self, counts: Mapping[Any, Any]) -> None:
        """Count events of several documents at once."""
        sums = self._amounts(counts)
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

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._flushing = asyncio.Lock()
            self._task = loop.create_task(_async_tick(weakref.ref(self), self._seconds))

    async def _record(self, group: Sequence[Any]) -> list[Any]:
        """Store the amounts of several tasks in one write; each hears how it went."""
        try:
            await self._store.runner.run(
                counter_events.record(self.rule, counter_events.joined(self.rule, group))
            )
        except PyMongoError as error:
            return [error] * len(group)
        return [None] * len(group)

    async def flush(self) -> Flushed:
        """Write everything that is pending; what was done, and which ids no document has."""
        done = Flushed()
        async with self._flushing:
            try:
                await (self._drain(done) if self._kind == "durable" else self._write_all(done))
            finally:
                # Also what was found before something else failed: it is no longer pending.
                self._note(done.unknown)
        self._error = None
        return done

    async def _write_all(self, done: Flushed) -> None:
        buffer, collisions = self._buffer, 0
        server = await self._store._capabilities()
        buffer.take()
        while buffer.unfinished:
            chunk = buffer.unfinished[0]
            work = Flush(self.rule, chunk.sums, buffer.writer, chunk.number)
            try:
                missing = await self._store._write(work, None, combine=False)
            except DuplicateKeyError:
                # Another writer made the same document; the next attempt finds it.
                collisions += 1
                if collisions == ATTEMPTS_MAX:
                    raise
                continue
            except (OperationFailure, OverflowError) as error:
                bad = await self._store.runner.run(counters.culprits(self.rule, chunk.sums, error))
                if not bad:
                    raise
                self._set_aside(chunk, bad, done, server)
                continue
            self._done_with(chunk, missing, done)
            await self._unmark(chunk)

    async def _unmark(self, chunk: Chunk) -> None:
        """Without transactions: the batch is over, so its marks may go; one that stays does no harm."""
        if (await self._store._capabilities()).transactions:
            return
        work = Flush(self.rule, chunk.sums, self._buffer.writer, chunk.number)
        try:
            await self._store.runner.run(counters.unmark(self.rule, chunk.sums, work.mark))
        except PyMongoError as error:
            log.warning("%s: the marks of a batch stay: %s", self.rule.place.label, error)

    async def _drain(self, done: Flushed) -> None:
        self._buffer.take()
        self._buffer.unfinished.clear()
        left_out: dict[Any, Any] = {}
        for _ in range(PARTS_MAX):
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
            with pymongo.timeout(DUE_SECONDS_MAX):
                await self.flush()
        except Exception as error:
            self._failed(error)

    async def _make_room(self) -> None:
        """Before more is added to a buffer that is full: write it, or refuse."""
        await self._flush_when_due()
        self._refuse_if_full()

    def flush_at_exit(self) -> None:
        """The loop is over, and with it the client: what is left can only be told."""
        if self._kind == "memory" and not self._buffer.empty:
            log.warning(
                "%s: events were still pending when the process ended, and are lost; close the store, or "
                "use the counter with `async with`",
                self.rule.place.label,
            )

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
            return await run(self._durably(await self._store._capabilities(), key))
        if exact and self._kind == "memory":
            async with self._flushing:
                waiting = self._buffer.pending().get(key, 0)
                return await run(self._exactly(await self._store._capabilities(), key, waiting))
        return self._total(await run(counters.stored(self.rule, key)), 0)

    async def close(self) -> None:
        """Flush, and stop the timer; the counter can still be used, and then flushed by hand."""
        task, self._task = self._task, None
        await self.flush()
        if task is not None:
            task.cancel()
        counter_exit.unregister(self)
        if self._kind == "memory" and (await self._store._capabilities()).transactions:
            await self._store.runner.run(counters.forget(self._buffer.writer))

    async def __aenter__(self) -> AsyncCounter:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.flush()


async def _async_tick(reference: Callable[[], AsyncCounter | None], seconds: float | None) -> None:
    """Flush every so often, and when the loop ends: it cancels its tasks and waits for them."""
    try:
        while True:
            await asyncio.sleep(seconds if seconds is not None else shell.FOREVER_SECONDS)
            counter = reference()
            if counter is None:
                return
            await counter.tick()
            del counter
    except asyncio.CancelledError:
        counter = reference()
        if counter is not None and counter._task is not None:
            await counter.tick()
        raise
