"""What `store.counter(…)` gives: the blocking and the asyncio handle of one counter."""

from __future__ import annotations

import asyncio
import random as chance
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pymongo
from pymongo.errors import DuplicateKeyError, OperationFailure, PyMongoError

from treadle import counter_exit, counters, shell
from treadle.combine import AsyncCombiner, Combiner
from treadle.counter_buffer import Buffer, Chunk, Flushed
from treadle.counters import ATTEMPTS_MAX, Drain, Flush, Sample
from treadle.graph import Entry
from treadle.maintenance.intents import log
from treadle.patterns.approximation import ApproximateRule
from treadle.plan import Plan, transact
from treadle.topology import Topology

if TYPE_CHECKING:
    from treadle.async_api import AsyncStore
    from treadle.sync_api import Store

C = TypeVar("C")

# How many callers of a durable counter share one write.
GROUP_MAX = 5000
# How long a flush may take that nobody asked for, and one at the end of the process.
DUE_SECONDS_MAX = 10.0
EXIT_SECONDS_MAX = 5.0
# After a flush that failed, those that come by themselves wait this long.
PAUSE_SECONDS = 1.0
UNKNOWN_SHOWN_MAX = 5
UNKNOWN_KEPT_MAX = 10_000
# How many parts of a durable buffer one flush moves at most; others may be adding all the time.
PARTS_MAX = 10_000


# By identity: True equals 1 as well, and small numbers are the same object everywhere.
ONE = 1


class _Nothing:
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


class _Handle:
    """What both handles share: the buffer, and what is said about it."""

    def __init__(self, entry: Entry[Any], field: str, random: Callable[[], float] | None) -> None:
        self.rule: ApproximateRule = counters.rule_named(entry, field)
        declared = self.rule.declared
        self._kind = declared.buffer
        self._random = random or chance.random
        self._buffer = Buffer(declared.every, declared.keys_max)
        self._events = self._buffer.events
        self._append = self._events.append
        # Ids of this very class are counted without looking at them.
        self._exact: Any = self.rule.exact_key if declared.buffer == "memory" else None
        self._exact = self._exact or _Nothing
        self._again_at = 0.0
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
            sums[key] = sums.get(key, 0) + rule.amount(n)
        return sums

    def _sampled(self, sums: Mapping[Any, Any]) -> list[Sample]:
        every = self.rule.declared.every
        return [
            Sample(self.rule, key, n * every) for key, n in sums.items() if n and self._random() * every < 1
        ]

    def _note(self, unknown: Mapping[Any, Any]) -> None:
        if not unknown:
            return
        shown = ", ".join(repr(key) for key in list(unknown)[:UNKNOWN_SHOWN_MAX])
        log.warning("%s: nothing to add to for %d ids: %s", self.rule.place.label, len(unknown), shown)
        for key, n in unknown.items():
            if key in self.unknown or len(self.unknown) < UNKNOWN_KEPT_MAX:
                self.unknown[key] = self.unknown.get(key, 0) + n

    def _failed(self, error: BaseException) -> None:
        """A flush that came by itself failed: nothing is lost, and the next one tries again."""
        log.warning("%s: a flush failed and will be tried again: %s", self.rule.place.label, error)
        self._again_at = time.monotonic() + PAUSE_SECONDS

    def _without(self, chunk: Chunk, bad: Mapping[Any, Any], done: Flushed) -> None:
        for key in bad:
            del chunk.sums[key]
        done.unknown.update(bad)

    def _unsettled(self, key: Any) -> list[Chunk]:
        return [chunk for chunk in self._buffer.unfinished if key in chunk.sums]

    def _exactly(self, server: Topology, key: Any, waiting: Any) -> Plan[Any]:
        """The stored number and what is not in it yet; nothing of it twice."""
        value = yield from counters.stored(self.rule, key)
        for chunk in self._unsettled(key):
            work = Flush(self.rule, chunk.sums, self._buffer.writer, chunk.number)
            if (yield from counters.was_added(work, server, key)):
                waiting -= chunk.sums[key]
        return self._total(value, waiting)

    def _total(self, value: Any, waiting: Any) -> Any:
        if value is None and not self.rule.declared.upsert:
            return None
        number = self.rule.number
        return number(value or 0) + number(waiting)

    def _durably(self, server: Topology, key: Any) -> Plan[Any]:
        """Stored and buffered at one moment."""

        def look() -> Plan[tuple[Any, Any]]:
            return (yield from counters.stored_and_buffered(self.rule, key))

        if server.transactions:
            value, waiting = yield from transact(look)
            return self._total(value, waiting)
        for _ in range(ATTEMPTS_MAX):
            before = yield from counters.buffered(self.rule, key)
            value, waiting = yield from look()
            if before.get(key, 0) == waiting:
                break
        return self._total(value, waiting)


class Counter(_Handle):
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
        if n is ONE and id.__class__ is self._exact:
            self._append(id)
            if len(self._events) >= self._buffer.room and self._buffer.fold():
                self._flush_when_due()
            return
        self.add_many({id: n})

    def add_many(self, counts: Mapping[Any, Any]) -> None:
        """Count events of several documents at once."""
        sums = self._amounts(counts)
        if self._kind == "memory":
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
                if not self._store._write(sample, None):
                    self._note(sample.sums)

    def _record(self, group: Sequence[Any]) -> list[Any]:
        """Store the amounts of several threads in one write; each hears how it went."""
        try:
            self._store.runner.run(counters.record(self.rule, added_up(group)))
        except PyMongoError as error:
            return [error] * len(group)
        return [None] * len(group)

    def flush(self) -> Flushed:
        """Write everything that is pending; what was done, and which ids no document has."""
        with self._flushing:
            done = self._drain() if self._kind == "durable" else self._write_all()
        self._note(done.unknown)
        return done

    def _write_all(self) -> Flushed:
        buffer, done = self._buffer, Flushed()
        buffer.take()
        while buffer.unfinished:
            chunk = buffer.unfinished[0]
            missing = self._write_chunk(chunk, done)
            done.documents += len(chunk.sums) - len(missing)
            done.unknown.update(missing)
            buffer.unfinished.popleft()
            self._unmark(chunk)
        return done

    def _write_chunk(self, chunk: Chunk, done: Flushed) -> dict[Any, Any]:
        for _ in range(ATTEMPTS_MAX):
            work = Flush(self.rule, chunk.sums, self._buffer.writer, chunk.number)
            try:
                missing = self._store._write(work, None, combine=False)
                break
            except DuplicateKeyError as error:
                # Another writer made the same document; the next attempt finds it.
                last: Exception = error
            except OperationFailure as error:
                bad = self._store.runner.run(counters.unfit(self.rule, chunk.sums))
                if not counters.is_unfit(error) or not bad:
                    raise
                self._without(chunk, bad, done)
                last = error
        else:
            raise last
        return missing

    def _unmark(self, chunk: Chunk) -> None:
        """Without transactions: the batch is over, so its marks may go; one that stays does no harm."""
        if self._store._topology().transactions:
            return
        work = Flush(self.rule, chunk.sums, self._buffer.writer, chunk.number)
        try:
            self._store.runner.run(counters.unmark(self.rule, chunk.sums, work.mark))
        except PyMongoError as error:
            log.warning("%s: the marks of a batch stay: %s", self.rule.place.label, error)

    def _drain(self) -> Flushed:
        done = Flushed()
        self._buffer.take()
        self._buffer.unfinished.clear()
        left_out: dict[Any, Any] = {}
        for _ in range(PARTS_MAX):
            work = Drain(self.rule, left_out)
            try:
                events, sums, refused = self._store._write(work, None, combine=False)
            except OperationFailure as error:
                bad = self._store.runner.run(counters.unfit(self.rule, work.sums))
                if not counters.is_unfit(error) or not bad or set(bad) <= set(left_out):
                    raise
                left_out.update(bad)
                continue
            if not events:
                break
            done.documents += len(sums) - len(refused.keys() & sums.keys())
            for key, n in refused.items():
                done.unknown[key] = done.unknown.get(key, 0) + n
        return done

    def _flush_when_due(self) -> None:
        """A flush that the caller did not ask for; what goes wrong with it is told in the log."""
        if time.monotonic() < self._again_at and not self._buffer.overfull:
            return
        try:
            with pymongo.timeout(DUE_SECONDS_MAX):
                self.flush()
        except Exception as error:
            self._failed(error)
            if self._buffer.overfull:
                raise

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
            return self._store.runner.run(counters.buffered(self.rule))
        return self._buffer.pending()

    def read(self, id: Any, exact: bool = False) -> Any:
        """The stored number, or the exact one: with what is pending. None if there is no document."""
        key, run = self.rule.key(id), self._store.runner.run
        if exact and self._kind == "durable":
            return run(self._durably(self._store._topology(), key))
        if exact and self._kind == "memory":
            with self._flushing:
                waiting = self._buffer.pending().get(key, 0)
                return run(self._exactly(self._store._topology(), key, waiting))
        return self._total(run(counters.stored(self.rule, key)), 0)

    def close(self) -> None:
        """Flush, and stop the timer; the counter can still be used, and then flushed by hand."""
        self._stop.set()
        self.flush()
        counter_exit.unregister(self)
        if self._kind == "memory" and self._store._topology().transactions:
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


def added_up(group: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """The sums of several callers as one."""
    if len(group) == 1:
        return dict(group[0])
    total: dict[Any, Any] = {}
    for sums in group:
        for key, n in sums.items():
            total[key] = total.get(key, 0) + n
    return total


class AsyncCounter(_Handle):
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
        if n is ONE and id.__class__ is self._exact and self._task is not None:
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
                if not await self._store._write(sample, None):
                    self._note(sample.sums)

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._flushing = asyncio.Lock()
            self._task = loop.create_task(_async_tick(weakref.ref(self), self._seconds))

    async def _record(self, group: Sequence[Any]) -> list[Any]:
        """Store the amounts of several tasks in one write; each hears how it went."""
        try:
            await self._store.runner.run(counters.record(self.rule, added_up(group)))
        except PyMongoError as error:
            return [error] * len(group)
        return [None] * len(group)

    async def flush(self) -> Flushed:
        """Write everything that is pending; what was done, and which ids no document has."""
        async with self._flushing:
            done = await (self._drain() if self._kind == "durable" else self._write_all())
        self._note(done.unknown)
        return done

    async def _write_all(self) -> Flushed:
        buffer, done = self._buffer, Flushed()
        buffer.take()
        while buffer.unfinished:
            chunk = buffer.unfinished[0]
            missing = await self._write_chunk(chunk, done)
            done.documents += len(chunk.sums) - len(missing)
            done.unknown.update(missing)
            buffer.unfinished.popleft()
            await self._unmark(chunk)
        return done

    async def _write_chunk(self, chunk: Chunk, done: Flushed) -> dict[Any, Any]:
        for _ in range(ATTEMPTS_MAX):
            work = Flush(self.rule, chunk.sums, self._buffer.writer, chunk.number)
            try:
                missing = await self._store._write(work, None, combine=False)
                break
            except DuplicateKeyError as error:
                # Another writer made the same document; the next attempt finds it.
                last: Exception = error
            except OperationFailure as error:
                bad = await self._store.runner.run(counters.unfit(self.rule, chunk.sums))
                if not counters.is_unfit(error) or not bad:
                    raise
                self._without(chunk, bad, done)
                last = error
        else:
            raise last
        return missing

    async def _unmark(self, chunk: Chunk) -> None:
        """Without transactions: the batch is over, so its marks may go; one that stays does no harm."""
        if (await self._store._topology()).transactions:
            return
        work = Flush(self.rule, chunk.sums, self._buffer.writer, chunk.number)
        try:
            await self._store.runner.run(counters.unmark(self.rule, chunk.sums, work.mark))
        except PyMongoError as error:
            log.warning("%s: the marks of a batch stay: %s", self.rule.place.label, error)

    async def _drain(self) -> Flushed:
        done = Flushed()
        self._buffer.take()
        self._buffer.unfinished.clear()
        left_out: dict[Any, Any] = {}
        for _ in range(PARTS_MAX):
            work = Drain(self.rule, left_out)
            try:
                events, sums, refused = await self._store._write(work, None, combine=False)
            except OperationFailure as error:
                bad = await self._store.runner.run(counters.unfit(self.rule, work.sums))
                if not counters.is_unfit(error) or not bad or set(bad) <= set(left_out):
                    raise
                left_out.update(bad)
                continue
            if not events:
                break
            done.documents += len(sums) - len(refused.keys() & sums.keys())
            for key, n in refused.items():
                done.unknown[key] = done.unknown.get(key, 0) + n
        return done

    async def _flush_when_due(self) -> None:
        """A flush that the caller did not ask for; what goes wrong with it is told in the log."""
        if time.monotonic() < self._again_at and not self._buffer.overfull:
            return
        try:
            with pymongo.timeout(DUE_SECONDS_MAX):
                await self.flush()
        except Exception as error:
            self._failed(error)
            if self._buffer.overfull:
                raise

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
            return await self._store.runner.run(counters.buffered(self.rule))
        return self._buffer.pending()

    async def read(self, id: Any, exact: bool = False) -> Any:
        """The stored number, or the exact one: with what is pending. None if there is no document."""
        key, run = self.rule.key(id), self._store.runner.run
        if exact and self._kind == "durable":
            return await run(self._durably(await self._store._topology(), key))
        if exact and self._kind == "memory":
            async with self._flushing:
                waiting = self._buffer.pending().get(key, 0)
                return await run(self._exactly(await self._store._topology(), key, waiting))
        return self._total(await run(counters.stored(self.rule, key)), 0)

    async def close(self) -> None:
        """Flush, and stop the timer; the counter can still be used, and then flushed by hand."""
        task, self._task = self._task, None
        await self.flush()
        if task is not None:
            task.cancel()
        counter_exit.unregister(self)
        if self._kind == "memory" and (await self._store._topology()).transactions:
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
