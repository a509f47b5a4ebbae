"""`run_due` in both shells: a session of its own, and a lease that is renewed beside the work.

What a run does is the plan in `maintenance/schedule.py`. The lease is renewed
from a thread (or task) of its own, because one recomputation on the server may
take longer than the lease lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import threading
from typing import TYPE_CHECKING, Any

from bson import ObjectId
from pymongo.errors import PyMongoError

from treadle.patterns.bucket.upkeep import packing
from treadle.store import shell
from treadle.upkeep.schedule import LEASE_SECONDS, Ran, Scheduler, jobs

if TYPE_CHECKING:
    from treadle.plan.capabilities import Capabilities
    from treadle.store.async_store import AsyncStore
    from treadle.store.blocking_store import Store

RENEW_SECONDS = LEASE_SECONDS / 3


def _scheduler(store: Store | AsyncStore, server: Capabilities, session: Any) -> Scheduler:
    return Scheduler(
        store.graph,
        server,
        owner=f"{shell.owner()}/{ObjectId()}",
        session=session.session_id["id"],
        is_dead=shell.is_dead,
    )


def is_scheduled(store: Store | AsyncStore) -> bool:
    """Whether there is anything for `run_due` to do, now or later."""
    return bool(jobs(store.graph) or packing(store.graph))


def run_due(store: Store, now: dt.datetime | None, dry_run: bool) -> list[Ran]:
    """Do what is due, blocking."""
    with store.runner.database.client.start_session() as session:
        scheduler = _scheduler(store, store._capabilities(), session)
        done = threading.Event()

        def renew() -> None:
            while not done.wait(RENEW_SECONDS):
                # The lease runs out by itself if the server cannot be reached.
                with contextlib.suppress(PyMongoError):
                    store.runner.run(scheduler.renewal())

        thread = threading.Thread(target=renew, name="treadle-schedule", daemon=True)
        thread.start()
        try:
            return store.runner.run(scheduler.run_due(now, dry_run), session)
        finally:
            done.set()
            thread.join()
            with contextlib.suppress(PyMongoError):
                store.runner.run(scheduler.resign())


async def run_due_async(store: AsyncStore, now: dt.datetime | None, dry_run: bool) -> list[Ran]:
    """Do what is due, with asyncio."""
    async with store.runner.database.client.start_session() as session:
        scheduler = _scheduler(store, await store._capabilities(), session)

        async def renew() -> None:
            while True:
                await asyncio.sleep(RENEW_SECONDS)
                with contextlib.suppress(PyMongoError):
                    await store.runner.run(scheduler.renewal())

        renewing = asyncio.create_task(renew())
        try:
            return await store.runner.run(scheduler.run_due(now, dry_run), session)
        finally:
            renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await renewing
            with contextlib.suppress(PyMongoError):
                await store.runner.run(scheduler.resign())
