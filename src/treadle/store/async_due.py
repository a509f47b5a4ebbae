"""`run_due` of the asyncio shell: a session of its own, and a lease that is renewed beside the work.

What a run does is the plan in `upkeep/schedule.py`. The lease is renewed
beside it, because one recomputation on the server may take longer than the
lease lasts.
"""

from __future__ import annotations

import contextlib
import datetime as dt

from pymongo.errors import PyMongoError

from treadle import upkeep
from treadle.store import common
from treadle.store.async_writer import AsyncWriter
from treadle.store.background import repeating_async

# How often the worker and run_due renew a lease within its time.
LEASE_RENEWALS = 3


async def run_due(store: AsyncWriter, now: dt.datetime | None, dry_run: bool) -> list[upkeep.schedule.Ran]:
    """Do what is due."""
    async with store.runner.database.client.start_session() as session, store._owning() as owner:
        scheduler = upkeep.schedule.Scheduler(
            store.graph,
            await store._capabilities(),
            owner=owner,
            session=session.session_id["id"],
            is_dead=common.is_dead,
        )
        seconds = store.graph.limits.schedule_lease_seconds / LEASE_RENEWALS
        try:
            async with repeating_async(seconds, lambda: store.runner.run(scheduler.lease.renew())):
                return await store.runner.run(scheduler.run_due(now, dry_run), session)
        finally:
            with contextlib.suppress(PyMongoError):
                await store.runner.run(scheduler.lease.release())
