"""Writers, workers and jobs that go on until they are told to stop, whatever happens to the servers.

The writers are threads on a Store, or tasks on an AsyncStore. Beside them run
a worker with a standby, one of each shell, the schedules, and migrations of
documents that somebody writes in the old version.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

from pymongo import MongoClient
from pymongo.errors import PyMongoError
from pymongo.write_concern import WriteConcern

from benchmarks.torture.journal import Journal, Outcome, outcome_of
from benchmarks.torture.models import (
    CLUBS,
    CUSTOMERS,
    MODELS,
    PRODUCTS,
    TALLIES,
    Club,
    Customer,
    Product,
    Tally,
    User,
)
from benchmarks.torture.writers import Step, Writer
from treadle import AsyncStore, Store, TreadleError
from treadle.store import call_context

Shell = Literal["sync", "async"]
# Between two steps of a writer, and two runs of a job.
PAUSE_SECONDS = 0.01
JOB_SECONDS = 0.3
JOIN_SECONDS_MAX = 120.0


class Load:
    """Everything that runs while the servers fail; its journal says what it was told."""

    def __init__(self, uri: str, shell: Shell, seed: int, writers: int = 4, **options: Any) -> None:
        self.uri = uri
        self.shell = shell
        self.seed = seed
        self.options = options
        self.journal = Journal()
        self.writers = [Writer(number, seed, self.journal) for number in range(writers)]
        # For the standby, the jobs and what comes after; opened here, so that it knows the models' server.
        self.store: Store = Store.open(uri, MODELS, **options)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._workers: list[Any] = []

    def prepare(self) -> None:
        """Set up, and store what the writers share."""
        self.store.setup()
        self.store.insert_many([Customer(id=number, name="first") for number in range(CUSTOMERS)])
        self.store.insert_many([Product(id=number) for number in range(PRODUCTS)])
        self.store.insert_many([Club(id=number) for number in range(CLUBS)])
        self.store.insert_many([Tally(id=number) for number in range(TALLIES)])
        for number in range(CUSTOMERS):
            self.journal.states["customers", number] = {"first"}

    def start(self) -> None:
        if self.shell == "sync":
            self._store = Store.open(self.uri, MODELS, **self.options)
            self._workers.append(self._store.worker())
            self._run(self._workers[0].run)
            for writer in self.writers:
                self._run(partial(self._write, writer))
        else:
            self._run(lambda: asyncio.run(self._write_async()))
        standby = self.store.worker()
        self._workers.append(standby)
        self._run(standby.run)
        self._run(lambda: self._repeat(self.store.run_due))
        self._run(self._migrate)

    def stop(self) -> None:
        """Let every writer, worker and job end after what it is doing."""
        self._stopping.set()
        for worker in self._workers:
            worker.stop()
        for thread in self._threads:
            thread.join(JOIN_SECONDS_MAX)
            if thread.is_alive():
                self.journal.unexpected.append(TimeoutError(f"{thread.name} did not end"))
        if self.shell == "sync":
            # With it go the counters in memory.
            self._store.close()

    def followed(self) -> int:
        """How many events the workers have followed so far."""
        return sum(worker.totals.get("events", 0) for worker in self._workers)

    # -- writers -----------------------------------------------------------------------------------

    def _run(self, work: Callable[[], Any]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self.journal.unexpected.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _write(self, writer: Writer) -> None:
        steps = writer.steps()
        step = next(steps)
        while not self._stopping.is_set():
            error: Exception | None = None
            try:
                with hurry(step):
                    step.call(self._store)
            except Exception as raised:
                error = raised
            step = steps.send(self._noted(error))
            self._stopping.wait(PAUSE_SECONDS)

    async def _write_async(self) -> None:
        async with AsyncStore.open(self.uri, MODELS, **self.options) as store:
            worker = store.worker()
            self._workers.append(worker)

            async def write(writer: Writer) -> None:
                steps = writer.steps()
                step = next(steps)
                while not self._stopping.is_set():
                    error: BaseException | None = None
                    try:
                        with hurry(step):
                            await cancelling(step.call(store), step.cancelled_after)
                    except (Exception, asyncio.CancelledError) as raised:
                        error = raised
                    step = steps.send(self._noted(error))
                    await asyncio.sleep(PAUSE_SECONDS)

            await asyncio.gather(worker.run(), *(write(writer) for writer in self.writers))

    def _noted(self, error: BaseException | None) -> Outcome:
        outcome: Outcome = "acknowledged" if error is None else outcome_of(error)
        self.journal.note(outcome, error)
        return outcome

    # -- jobs --------------------------------------------------------------------------------------

    def _repeat(self, job: Callable[[], Any]) -> None:
        while not self._stopping.is_set():
            try:
                job()
            except (PyMongoError, TreadleError) as error:
                self.journal.errors[f"job: {type(error).__name__}"] += 1
            self._stopping.wait(JOB_SECONDS)

    def _migrate(self) -> None:
        """Somebody goes on writing the old version, and it is migrated again and again."""
        serial = 0
        with MongoClient[dict[str, Any]](self.uri) as client:
            users = client.get_default_database()["users"].with_options(
                write_concern=WriteConcern("majority")
            )

            def old_and_new() -> None:
                nonlocal serial
                serial += 1
                key = f"old-{serial}"
                outcome: Outcome = "acknowledged"
                try:
                    users.insert_one({"_id": key, "schema_version": 1, "name": key})
                except PyMongoError as error:
                    outcome = outcome_of(error)
                    raise
                finally:
                    self.journal.write(outcome, {("users", key): key})
                self.store.migrate(User, batch=10)

            self._repeat(old_and_new)


def hurry(step: Step) -> AbstractContextManager[None]:
    """The deadline of a step's caller."""
    return call_context.within(step.seconds)


async def cancelling(call: Awaitable[Any], seconds: float | None) -> Any:
    """What a call gives whose task is cancelled when it takes longer."""
    if seconds is None:
        return await call
    task = asyncio.ensure_future(call)
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    return await task


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether something came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
