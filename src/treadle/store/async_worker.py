"""The worker of the asyncio shell: it holds a session, renews the lease beside the work, and can be stopped.

What a worker does is the plan in `upkeep/stream.py`. The lease is renewed
beside it, because a recomputation may take longer than the lease lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pymongo
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import PyMongoError

from treadle import upkeep
from treadle.engine.lease import LeaseLost
from treadle.errors import DataError
from treadle.graph.quarantine import log
from treadle.plan import Plan, wait
from treadle.plan.capabilities import Capabilities, clock
from treadle.plan.server_errors import is_passing
from treadle.store import common
from treadle.store.async_writer import AsyncWriter
from treadle.store.background import LEASE_RENEWALS, on_terminate, repeating_async
from treadle.upkeep.stream import WORKER_AWAIT_SECONDS, WORKER_BACKOFF_SECONDS

# How long run_until_idle waits for another worker.
WORKER_WAIT_SECONDS = 60.0


class AsyncWorker:
    """Maintains what is declared with `maintain="stream"`, whichever program writes the sources."""

    def __init__(self, store: AsyncWriter, name: str) -> None:
        self._store = store
        self._name = name
        self._stopping = False
        self._follower: upkeep.stream.Follower | None = None

    @property
    def leading(self) -> bool:
        """Whether this is the one worker that is active just now."""
        return self._follower is not None and self._follower.lease.held

    @property
    def totals(self) -> dict[str, int]:
        """What this worker has counted so far: events, recomputed documents, and what went wrong."""
        return dict(self._follower.totals) if self._follower is not None else {}

    def stop(self) -> None:
        """Ask `run` to end after the batch at hand; safe from any thread and from a signal handler."""
        self._stopping = True

    async def run(self) -> None:
        """Work, or stand by while another worker does, until `stop` is called or SIGTERM comes."""
        self._stopping = False
        with on_terminate(self.stop):
            server = await self._server()
            if server is None:
                return
            async with self._at_work(server) as (follower, session):
                try:
                    await self._store.runner.run(follower.run(lambda: self._stopping), session)
                finally:
                    # Also after an interruption, so that no standby has to wait for the lease to run out.
                    with contextlib.suppress(PyMongoError):
                        await self._store.runner.run(follower.resign(), session)

    async def run_until_idle(self) -> int:
        """Handle everything that was written before this call; how many events there were."""
        async with self._at_work(await self._store._capabilities()) as (follower, session):
            return await self._store.runner.run(_until_idle(follower), session)

    async def lag(self) -> upkeep.status.Lag:
        """How far behind the worker is, whichever process it runs in."""
        upkeep.stream.require_streams(self._store.graph, await self._store._capabilities())
        async with self._store.runner.database.client.start_session() as session:
            return (
                await self._store.runner.run(upkeep.status.pending(self._store.graph, self._name), session)
            ).lag

    async def _server(self) -> Capabilities | None:
        """What the server can do; waits for a primary as one that works does, None if told to stop."""
        limits = self._store.graph.limits
        pause = WORKER_BACKOFF_SECONDS
        while not self._stopping:
            try:
                # Not for as long as a client waits for a server: SIGTERM may arrive in that time.
                with pymongo.timeout(limits.worker_lease_seconds):
                    await self._store.runner.run(clock())
                return await self._store._capabilities()
            except PyMongoError as error:
                if not (error.timeout or is_passing(error)):
                    raise
                log.warning("the worker waits for a primary: %s", error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, WORKER_AWAIT_SECONDS)
        return None

    @asynccontextmanager
    async def _at_work(
        self, server: Capabilities
    ) -> AsyncGenerator[tuple[upkeep.stream.Follower, AsyncClientSession]]:
        """Give a follower with its session; its lease is renewed until the block ends."""
        client = self._store.runner.database.client
        common.require_one_router(server, client)
        async with client.start_session() as session, self._store._owning() as owner:
            follower = self._following(server, session, owner)
            # The lease runs out by itself if the server cannot be reached.
            seconds = follower.limits.worker_lease_seconds / LEASE_RENEWALS
            renewing = repeating_async(seconds, lambda: self._store.runner.run(follower.tend()))
            async with renewing:
                yield follower, session

    def _following(self, server: Capabilities, session: Any, owner: str) -> upkeep.stream.Follower:
        self._follower = upkeep.stream.Follower(
            self._store.graph,
            server,
            name=self._name,
            owner=owner,
            session=session.session_id["id"],
            is_dead=common.is_dead,
        )
        return self._follower


def _until_idle(follower: upkeep.stream.Follower) -> Plan[int]:
    """Lead, catch up, resign."""
    waited, limits = 0.0, follower.limits
    while not (yield from follower.lead()):
        if waited >= WORKER_WAIT_SECONDS:
            raise DataError(
                f"another worker has been leading for {WORKER_WAIT_SECONDS:.0f} s; it does this work, "
                "or ask it to stop",
                code="lease-busy",
            )
        yield from wait(limits.worker_standby_seconds)
        waited += limits.worker_standby_seconds
    try:
        handled = yield from follower.run_until_idle()
    except LeaseLost:
        raise DataError(
            "the lease went to another worker, which continues from here", code="lease-busy"
        ) from None
    yield from follower.resign()
    return handled
