"""The part of the asyncio shell for operators: verification and repair, pauses, what was set aside, jobs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Literal

from pymongo.errors import PyMongoError

from treadle import upkeep
from treadle.graph.calls import MovingRule, rule_of
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Action, Finding, Report
from treadle.model.document import Document
from treadle.plan import Plan
from treadle.store import common
from treadle.store.async_reads import AsyncReads
from treadle.store.background import LEASE_RENEWALS, repeating_async


class AsyncOperations(AsyncReads):
    """The calls of a store for its operator."""

    # -- the inverse of setup --------------------------------------------------------------

    async def teardown(
        self,
        *models: type[Document],
        dry_run: bool = False,
        fields: bool = False,
        throttle: upkeep.jobs.Throttle = None,
        progress: Report | None = None,
    ) -> list[Action]:
        """Take back what `setup()` made for all models, or for these. Returns what was done.

        Drops indexes, validators, views, pre-images and Treadle's own state;
        what was there before setup stays. `fields=True` also removes derived
        fields, `_treadle` and the documents of rollups. What holds the only
        copy of its data stays, and is counted. Stop the worker first.
        """
        entries = self.graph.chosen(models)
        if not dry_run and await self.runner.run(upkeep.setup_record.is_known_format()):
            # Finishes what a crash left half done, which nothing would after this.
            await self._capabilities()
        job = self._job("teardown", models, "", throttle, progress)
        done = await self.runner.run(
            upkeep.teardown.teardown(self.graph, entries, job, dry_run=dry_run, fields=fields)
        )
        if not dry_run:
            self.write_path.index_check.clear()
        return done

    # -- proof and repair ---------------------------------------------------------------

    async def verify(
        self,
        *models: type[Document],
        sample: float | None = None,
        since: datetime | None = None,
        resume: bool = False,
        fields: Sequence[str] | None = None,
        throttle: upkeep.jobs.Throttle = None,
        progress: Report | None = None,
    ) -> list[Finding]:
        """Return every stored value that differs from its recomputed one; of all models, or of these.

        `sample=0.01` looks at one percent of the documents, `since=` at what
        changed since then and what follows from it, `resume=True` continues
        where a verify of the same models was interrupted. With `fields`, what
        is about these fields.
        """
        upkeep.verification.check(sample, since, resume)
        entries = self.graph.chosen(models)
        only = None if fields is None else upkeep.rebuild.rules_of(entries, fields)
        if since is None:
            server = await self._capabilities()
        else:
            server = await self._capabilities_with("streams", "pre_images")
        whole = sample is None and since is None
        options: dict[str, Any] = {"sample": sample, "since": since, "resume": resume}
        async with self._owning() as owner:
            job = self._job("verify", models, owner, throttle, progress, every_page=whole)
            found = await self.runner.run(
                upkeep.verification.prove(self.graph, server, entries, job, is_dead=common.is_dead, **options)
            )
        return found if only is None else [each for each in found if upkeep.rebuild.is_about(only, each)]

    async def repair(
        self,
        *models: type[Document],
        ids: Sequence[Any] | None = None,
        fields: Sequence[str] | None = None,
        throttle: upkeep.jobs.Throttle = None,
        progress: Report | None = None,
    ) -> int:
        """Repair what `verify` finds, while writers continue. Returns the number of repaired documents.

        With `ids`, only these documents of one model; with `fields`, only
        these fields, and the formulas that follow from them.
        """
        entries = self.graph.chosen(models)
        only = None if fields is None else upkeep.rebuild.rules_of(entries, fields)
        server = await self._capabilities()
        if ids is not None:
            (entry,) = entries
            return len(
                await self.runner.run(upkeep.rebuild.repair_some(self.graph, server, entry, ids, only))
            )
        async with self._recorded("repair", models, throttle, progress) as job:
            work = upkeep.rebuild.repair(self.graph, server, entries, job, only)
            return await self._settle(entries, work)

    async def rebuild(
        self,
        *models: type[Document],
        resume: bool = False,
        throttle: upkeep.jobs.Throttle = None,
        progress: Report | None = None,
    ) -> int:
        """Recompute every maintained value, as after a pattern was added to old data.

        `resume=True` notes every page, and continues where such a rebuild of the
        same models was interrupted.
        """
        entries = self.graph.chosen(models)
        server = await self._capabilities()
        async with self._recorded("rebuild", models, throttle, progress, resume=resume) as job:
            return await self._settle(entries, upkeep.rebuild.rebuild(self.graph, server, entries, job))

    async def archive(
        self,
        model: type[Document],
        now: datetime | None = None,
        throttle: upkeep.jobs.Throttle = None,
        dry_run: bool = False,
        progress: Report | None = None,
    ) -> int:
        """Move documents that are old enough, by the server's clock or at `now`. Returns their number."""
        rule = rule_of(self.graph.entry(model), MovingRule)
        await self._capabilities()
        if dry_run:
            return await self.runner.run(rule.archive(now, None, True))
        async with self._recorded("archive", [model], throttle, progress) as job:
            return await self.runner.run(rule.archive(now, job, False))

    async def run_due(self, now: datetime | None = None, dry_run: bool = False) -> list[upkeep.schedule.Ran]:
        """Do the scheduled work that is due, by the server's clock or at `now`. Returns what was done."""
        async with self.runner.database.client.start_session() as session, self._owning() as owner:
            scheduler = upkeep.schedule.Scheduler(
                self.graph,
                await self._capabilities(),
                owner=owner,
                session=session.session_id["id"],
                is_dead=common.is_dead,
            )
            seconds = self.graph.limits.schedule_lease_seconds / LEASE_RENEWALS
            try:
                async with repeating_async(seconds, lambda: self.runner.run(scheduler.lease.renew())):
                    return await self.runner.run(scheduler.run_due(now, dry_run), session)
            finally:
                with contextlib.suppress(PyMongoError):
                    await self.runner.run(scheduler.lease.release())

    async def findings(self) -> list[upkeep.findings.KeptFinding]:
        """Return where the last verify of each model found something wrong, without values."""
        return await self.runner.run(upkeep.findings.listed(self.graph))

    async def status(self) -> upkeep.status.Status:
        """Return the state of the maintenance: per rule its mode, state, lag, last run and last findings."""
        async with self.runner.database.client.start_session() as session:
            return await self.runner.run(
                upkeep.status.status(self.graph, await self._capabilities()), session
            )

    # -- versions -----------------------------------------------------------------------

    async def migrate(
        self,
        model: type[Document],
        to: int | None = None,
        dry_run: bool = False,
        batch: int | None = None,
        throttle: upkeep.jobs.Throttle = None,
        retry: bool = False,
        stop: Callable[[], bool] | None = None,
        progress: Report | None = None,
    ) -> upkeep.migrate.Migrated:
        """Convert all documents of a model to a version, up or down, while readers and writers continue."""
        batch = self.graph.limits.migration_batch if batch is None else batch
        entry = self.graph.entry(model)
        server = await self._capabilities()
        options = upkeep.migrate.Options("", common.is_dead, batch, None, retry, stop, progress)
        perform = partial(upkeep.migrate.perform, self.graph, server, entry, to, dry_run)
        if dry_run:
            return await self.runner.run(perform(options))
        async with self._recorded("migrate", [model], throttle, progress) as job:
            options = replace(options, owner=job.owner, throttle=throttle, report=job)
            return await self.runner.run(perform(options))

    async def migration_status(self, model: type[Document]) -> dict[int, int]:
        """Return the number of documents of each version."""
        return await self.runner.run(upkeep.migrate.status(self.graph.entry(model)))

    async def migration_failures(self, model: type[Document]) -> list[upkeep.migrate.SetAside]:
        """Return the documents that could not be migrated, and why."""
        return await self.runner.run(upkeep.migrate.set_aside(self.graph.entry(model)))

    # -- rules that are paused -------------------------------------------------------------

    async def pause(self, rule: str) -> bool:
        """Stop maintaining a rule, such as "Product.review_count". Returns whether it was active.

        Until `resume`, and for every process. No event is lost.
        """
        return await self.runner.run(upkeep.controls.pause(self.graph, rule))

    async def resume(self, rule: str) -> upkeep.controls.Resumed:
        """Maintain a rule again. Returns "behind" if it catches up, "building" if it must be rebuilt."""
        return await self.runner.run(upkeep.controls.resume(self.graph, rule))

    # -- what was set aside -------------------------------------------------------------------

    async def set_aside(self, rule: str | None = None) -> list[upkeep.quarantine.SetAsideDocument]:
        """Return the documents that could not be processed, and why; of all rules, or of one."""
        return await self.runner.run(upkeep.quarantine.listed(self.graph, rule))

    async def retry(self, item: upkeep.quarantine.SetAsideDocument | str) -> bool:
        """Process a document again that was set aside. Returns whether that succeeded."""
        server = await self._capabilities()
        found = (
            await self.runner.run(upkeep.quarantine.named(self.graph, item))
            if isinstance(item, str)
            else item
        )
        return await self.runner.run(upkeep.quarantine.retry(self.graph, server, found))

    async def discard(self, item: upkeep.quarantine.SetAsideDocument | str) -> bool:
        """Forget a document that was set aside, and leave it as it is. Returns whether it was still noted."""
        found = (
            await self.runner.run(upkeep.quarantine.named(self.graph, item))
            if isinstance(item, str)
            else item
        )
        return await self.runner.run(upkeep.quarantine.discard(found))

    # -- long runs ----------------------------------------------------------------------------------

    async def jobs(self) -> list[upkeep.jobs.JobStatus]:
        """Return the last long runs of any process, newest first, with their progress and the time left."""
        return await self.runner.run(upkeep.jobs.listed(self.graph.limits))

    async def control_job(
        self,
        id: str,
        asked: Literal["pause", "resume", "stop"] | None = None,
        throttle: upkeep.jobs.Throttle | Literal["keep"] = "keep",
    ) -> None:
        """Pause, resume or stop a long run of any process, or change its throttle."""
        await self.runner.run(upkeep.jobs.control(id, asked, throttle))

    def _job(
        self,
        kind: str,
        models: Sequence[type[Document]],
        owner: str,
        throttle: upkeep.jobs.Throttle,
        progress: Report | None,
        *,
        every_page: bool = False,
    ) -> upkeep.jobs.Job:
        return upkeep.jobs.Job(
            self.graph.limits,
            kind,
            [model.__name__ for model in models],
            owner=owner,
            monotonic=time.monotonic,
            throttle=throttle,
            report=progress,
            every_page=every_page,
        )

    async def _settle(self, entries: Sequence[ModelEntry], work: Plan[int]) -> int:
        """Perform a repair or rebuild. Returns its result; what it has settled is reported no more."""
        server = await self._capabilities()
        done = await self.runner.run(upkeep.retries.settling(self.graph, server, entries, work))
        await self.runner.run(upkeep.findings.look_again(self.graph, server, entries))
        return done

    @asynccontextmanager
    async def _recorded(
        self,
        kind: str,
        models: Sequence[type[Document]],
        throttle: upkeep.jobs.Throttle,
        progress: Report | None,
        *,
        resume: bool = False,
    ) -> AsyncGenerator[upkeep.jobs.Job]:
        """Give a job whose row says how it ended; with `resume`, the row of one that did not."""
        async with self._owning() as owner:
            job = self._job(kind, models, owner, throttle, progress, every_page=resume)
            if resume:
                await self.runner.run(upkeep.jobs.take_over(job, common.is_dead))
            await self.runner.run(job.begin())
            try:
                yield job
            except upkeep.jobs.Stopped:
                await self.runner.run(job.end("stopped"))
                raise
            except Exception as error:
                # Whatever ended the job, its row says so.
                await self.runner.run(job.end_quietly(type(error).__name__))
                raise
            await self.runner.run(job.end("done"))
