"""The worker's two shells: they hold a session, renew the lease beside the work, and stop when asked.

What a worker does is the plan in `maintenance/stream.py`. The lease is renewed
from a thread (or task) of its own, because a recomputation may take longer
than the lease lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from bson import ObjectId
from pymongo.errors import PyMongoError

from treadle.engine import lease
from treadle.errors import DataError
from treadle.plan import Plan, wait
from treadle.store import shell
from treadle.upkeep import stream
from treadle.upkeep.status import Lag, pending
from treadle.upkeep.stream import Follower, LeaseLost

if TYPE_CHECKING:
    from treadle.plan.capabilities import Capabilities
    from treadle.store.async_store import AsyncStore
    from treadle.store.blocking_store import Store

RENEWALS_PER_LEASE = 3
WAIT_MAX_SECONDS = 60.0


class _Worker:
    """What both kinds of worker share."""

    def __init__(self, store: Any, name: str) -> None:
        self._store = store
        self._name = name
        self._stopping = False
        self._owner = f"{shell.owner()}/{ObjectId()}"
        self._follower: Follower | None = None

    @property
    def leading(self) -> bool:
        """Whether this is the one worker that is active just now."""
        return self._follower is not None and self._follower.token is not None and not self._follower.lost

    @property
    def totals(self) -> dict[str, int]:
        """What this worker has counted so far: events, recomputed documents, and what went wrong."""
        return dict(self._follower.totals) if self._follower is not None else {}

    def stop(self) -> None:
        """Ask `run` to end after the batch at hand; safe from any thread and from a signal handler."""
        self._stopping = True

    def _following(self, server: Capabilities, session: Any) -> Follower:
        self._follower = Follower(
            self._store.graph,
            server,
            name=self._name,
            owner=self._owner,
            session=session.session_id["id"],
            is_dead=shell.is_dead,
        )
        return self._follower

    def _running(self, follower: Follower) -> Plan[None]:
        return follower.run(lambda: self._stopping)

    def _renewal(self, follower: Follower) -> Plan[None]:
        """Renew the lease once, and notice if it is gone."""
        token = follower.token
        if token is None or follower.lost:
            return
        if not (yield from lease.renew(self._name, token, stream.LEASE_SECONDS)) and token == follower.token:
            follower.lost = True


def _until_idle(follower: Follower) -> Plan[int]:
    """Lead, catch up, resign."""
    waited = 0.0
    while not (yield from follower.lead()):
        if waited >= WAIT_MAX_SECONDS:
            raise DataError(
                "another worker has been leading for a minute; it does this work, or ask it to stop",
                code="lease-busy",
            )
        yield from wait(stream.STANDBY_SECONDS)
        waited += stream.STANDBY_SECONDS
    try:
        handled = yield from follower.run_until_idle()
    except LeaseLost:
        raise DataError(
            "the lease went to another worker meanwhile; it goes on from here", code="lease-busy"
        ) from None
    yield from follower.resign()
    return handled


class Worker(_Worker):
    """Keeps what is declared with `maintain="stream"` right, whoever writes the sources."""

    _store: Store

    def run(self) -> None:
        """Work, or stand by while another worker does, until `stop` is called or SIGTERM comes."""
        self._stopping = False
        with self._store.runner.database.client.start_session() as session:
            follower = self._following(self._store._capabilities(), session)
            with _on_terminate(self.stop), self._renewing(follower):
                try:
                    self._store.runner.run(self._running(follower), session)
                finally:
                    # Also after an interruption from the keyboard, so that nobody has to wait.
                    with contextlib.suppress(PyMongoError):
                        self._store.runner.run(follower.resign(), session)

    def run_until_idle(self) -> int:
        """Handle everything that was written before this call; how many events there were."""
        with self._store.runner.database.client.start_session() as session:
            follower = self._following(self._store._capabilities(), session)
            with self._renewing(follower):
                return self._store.runner.run(_until_idle(follower), session)

    def lag(self) -> Lag:
        """How far behind the worker is, whichever process it runs in."""
        stream.require_streams(self._store._capabilities())
        with self._store.runner.database.client.start_session() as session:
            return self._store.runner.run(pending(self._store.graph, self._name), session).lag

    @contextlib.contextmanager
    def _renewing(self, follower: Follower) -> Generator[None]:
        done = threading.Event()

        def renew() -> None:
            while not done.wait(stream.LEASE_SECONDS / RENEWALS_PER_LEASE):
                # The lease runs out by itself if the server cannot be reached.
                with contextlib.suppress(PyMongoError):
                    self._store.runner.run(self._renewal(follower))

        thread = threading.Thread(target=renew, name="treadle-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class AsyncWorker(_Worker):
    """The same for asyncio."""

    _store: AsyncStore

    async def run(self) -> None:
        """Work, or stand by while another worker does, until `stop` is called or SIGTERM comes."""
        self._stopping = False
        async with self._store.runner.database.client.start_session() as session:
            follower = self._following(await self._store._capabilities(), session)
            renewing = asyncio.create_task(self._renew(follower))
            try:
                with _on_terminate(self.stop):
                    await self._store.runner.run(self._running(follower), session)
            finally:
                await _end(renewing)
                with contextlib.suppress(PyMongoError):
                    await self._store.runner.run(follower.resign(), session)

    async def run_until_idle(self) -> int:
        """Handle everything that was written before this call; how many events there were."""
        async with self._store.runner.database.client.start_session() as session:
            follower = self._following(await self._store._capabilities(), session)
            renewing = asyncio.create_task(self._renew(follower))
            try:
                return await self._store.runner.run(_until_idle(follower), session)
            finally:
                await _end(renewing)

    async def lag(self) -> Lag:
        """How far behind the worker is, whichever process it runs in."""
        stream.require_streams(await self._store._capabilities())
        async with self._store.runner.database.client.start_session() as session:
            return (await self._store.runner.run(pending(self._store.graph, self._name), session)).lag

    async def _renew(self, follower: Follower) -> None:
        while True:
            await asyncio.sleep(stream.LEASE_SECONDS / RENEWALS_PER_LEASE)
            with contextlib.suppress(PyMongoError):
                await self._store.runner.run(self._renewal(follower))


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@contextlib.contextmanager
def _on_terminate(stop: Callable[[], None]) -> Generator[None]:
    """Let SIGTERM end the work gracefully, where this is the main thread and nobody else minds it."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
