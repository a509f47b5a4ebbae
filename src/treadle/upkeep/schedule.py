"""Scheduled maintenance: what is declared with `maintain="schedule"` is computed when it is due.

A rollup's job computes whole closed windows: those that closed since the last
run, and those that late data changed, which the change stream tells
(`late_data.py`). Fields of other models are recomputed each time. Both end in
a `$merge` on the server (`merging.py`).

One runner at a time works, under a lease whose number only grows. A run that
was replaced without noticing does no harm: whatever it computes it computes
from the sources as they are, it removes only what no later run has stamped,
and its place in the stream is not saved. The next runner ends its session, so
that nothing of it still runs on the server.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pymongo.errors import OperationFailure

from treadle.engine.index_check import require_unique_indexes
from treadle.engine.lease import Lease, LeaseLost
from treadle.engine.version_upgrade import has_outdated
from treadle.errors import DataError, UsageError
from treadle.graph.derived import DerivedRule, aggregates_in
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.quarantine import code_of
from treadle.graph.rule import Due, Rule
from treadle.model.text import escape_text, get_logger
from treadle.plan import Plan, Raw, count_documents, find, find_one, update_one
from treadle.plan.capabilities import Capabilities, clock
from treadle.plan.server_errors import is_about_one_document
from treadle.query.keys import freeze
from treadle.upkeep import merging
from treadle.upkeep.change_stream import present_place
from treadle.upkeep.closed_windows import COLLECTION, Bounds, bounds_at, is_closed
from treadle.upkeep.controls import paused_rules
from treadle.upkeep.late_data import changed_since
from treadle.upkeep.position import signature
from treadle.upkeep.rebuild import repair_documents
from treadle.upkeep.sweep import Sweep
from treadle.upkeep.verify import examine_each

# Changed groups; with more, everything is computed.
SCHEDULE_DIRTY_MAX = 5_000
# Documents whose scheduled fields are examined at a time.
SCHEDULE_PAGE = 200

# A schedule of this length or more begins with the full minute, so that a cron job is not a second early.
MINUTES_FROM = dt.timedelta(minutes=10)

log = get_logger(__name__)


@dataclass(frozen=True)
class Ran:
    """What one scheduled run did."""

    name: str
    pattern: str
    model: str
    rules: tuple[str, ...]
    # The time for which it ran.
    at: dt.datetime
    # Whether everything was computed, and not only what had changed; and if so, why.
    whole: bool = False
    why: str = ""
    written: int = 0
    removed: int = 0
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Job:
    """Rules of one model that are computed together."""

    name: str
    entry: ModelEntry
    rules: tuple[Rule, ...]
    every: dt.timedelta

    def describe(self, at: dt.datetime) -> Ran:
        labels = tuple(rule.place.label for rule in self.rules)
        return Ran(self.name, self.rules[0].pattern, self.entry.model.__name__, labels, at)


def jobs(graph: Graph) -> list[Job]:
    """What is scheduled, in the order in which one feeds the other."""
    planned: list[Job] = []
    for entry in graph.entries.values():
        by_period: dict[dt.timedelta, list[Rule]] = {}
        for rule in entry.rules:
            if rule.maintain == "schedule" and rule.every is not None:
                by_period.setdefault(rule.every, []).append(rule)
        name = entry.model.__name__
        if entry.rules.group is not None and entry.rules.group.maintain == "schedule":
            (every,) = {rule.every for rule in aggregates_in(entry) if rule.every is not None}
            planned.append(Job(name, entry, tuple(by_period.pop(every)), every))
        for every, rules in by_period.items():
            planned.append(Job(f"{name} every {every}", entry, tuple(rules), every))
    return sorted(planned, key=lambda job: min(rule.level for rule in job.rules))


class Scheduler:
    """One call of `run_due`: the lease that it holds, and the plans."""

    def __init__(
        self, graph: Graph, server: Capabilities, *, owner: str, session: Any, is_dead: Callable[[str], bool]
    ) -> None:
        self.graph = graph
        self.server = server
        self.lease = Lease(merging.LEASE, graph.limits.schedule_lease_seconds, owner, is_dead, session)

    def run_due(self, now: dt.datetime | None, dry_run: bool) -> Plan[list[Ran]]:
        """Do what is due, unless another runner is at it; what was done."""
        given = None if now is None else _aware(now)
        done = yield from self._run_jobs(given, dry_run)
        # What rules do on their own needs no lease: two who do it do not disturb each other.
        working = [rule for rule in self.graph.rules if rule.due_work]
        paused = (yield from paused_rules(self.graph)) if working else set()
        for rule in working:
            if rule in paused:
                continue
            name = rule.target.model.__name__
            at = given or (yield from clock())
            ran = Ran(f"{name} {rule.due_work}", rule.pattern, name, (), at)
            try:
                number = yield from rule.run_due(Due("due", at, dry_run))
            except Exception as error:
                if not _ends_one_job(error):
                    raise
                log.warning("%s: the scheduled run failed (%s)", ran.name, code_of(error))
                done.append(replace(ran, error=escape_text(str(error), 500)))
                continue
            if number:
                done.append(ran if dry_run else replace(ran, written=number))
        return done

    def _run_jobs(self, given: dt.datetime | None, dry_run: bool) -> Plan[list[Ran]]:
        """Compute what is scheduled and due."""
        planned = jobs(self.graph)
        if not planned:
            return []
        server_now = yield from clock()
        rows = {row["_id"]: row for row in (yield from find(COLLECTION, {}))}
        paused = yield from paused_rules(self.graph)
        due = [
            job
            for job in planned
            if is_due(job, rows.get(job.name), given, server_now) and paused.isdisjoint(job.rules)
        ]
        if dry_run or not due:
            return [job.describe(given or server_now) for job in due]
        if not (yield from self.lease.take()):
            return []
        done: list[Ran] = []
        try:
            for job in due:
                # Another runner may have done it just before.
                row = yield from find_one(COLLECTION, {"_id": job.name})
                server_now = yield from clock()
                if is_due(job, row, given, server_now):
                    done.append((yield from self._run(job, row or {}, given or server_now)))
        except LeaseLost:
            log.warning("another scheduled run has begun; this one stops")
        return done

    def _run(self, job: Job, row: Raw, now: dt.datetime) -> Plan[Ran]:
        """One job; an error is recorded and logged, and the next job runs."""
        started = yield from clock()
        changes: Raw = {}
        try:
            if job.entry.rules.group is not None and job.entry.rules.group in job.rules:
                ran, changes = yield from self._roll_up(job, row, now)
            else:
                ran = yield from self._compute(job, now)
        except Exception as error:
            if not _ends_one_job(error):
                raise
            yield from self.lease.check()
            log.warning("%s: the scheduled run failed (%s)", job.name, code_of(error))
            ran = replace(job.describe(now), error=escape_text(str(error), 500))
        finished = yield from clock()
        ran = replace(ran, seconds=max(0.0, (finished - started).total_seconds()))
        yield from self._record(job, row, ran, started, changes)
        return ran

    def _record(self, job: Job, row: Raw, ran: Ran, started: dt.datetime, changes: Raw) -> Plan[None]:
        """Keep what a run did, if this runner still holds the lease."""
        sets: Raw = {
            **changes,
            "n": self.lease.token,
            "rules": list(ran.rules),
            "every_seconds": job.every.total_seconds(),
            "last_run": started,
            "last_for": ran.at,
            "last_seconds": ran.seconds,
            "outcome": ran.error or "done",
            "whole": ran.whole,
            "why": ran.why,
            "written": ran.written,
            "removed": ran.removed,
        }
        if ran.error is None:
            sets["due"] = next_due(job, row.get("due"), ran.at)
        yield from self.lease.check()
        yield from update_one(COLLECTION, {"_id": job.name}, {"$setOnInsert": {"n": 0}}, upsert=True)
        yield from update_one(COLLECTION, {"_id": job.name, "n": {"$lte": self.lease.token}}, {"$set": sets})

    # -- rollups ------------------------------------------------------------------------------

    def _roll_up(self, job: Job, row: Raw, now: dt.datetime) -> Plan[tuple[Ran, Raw]]:
        """Compute the groups that closed since the last run, and those that changed since."""
        entry, group = job.entry, job.entry.rules.group
        yield from require_unique_indexes(entry)
        bounds = yield from bounds_at(group, now)
        known: Bounds | None = row.get("bounds")
        declared = entry.rules.memo(("declared", job.name), lambda: _declared(job))
        if known is not None and len(known) == len(bounds):
            # What was closed once stays so, also for a clock that is set back.
            bounds = [
                new if old is None or new is None else max(old, new)
                for old, new in zip(known, bounds, strict=True)
            ]
        position: Raw | None = None
        why = "the first run" if known is None else ""
        if known is not None and row.get("declared") != declared:
            why = "the declaration has changed"
        keys: list[list[Any]] = []
        if not self.server.streams:
            why = why or "this server has no change streams"
        else:
            position = yield from present_place()
            if not why and known is not None and row.get("position") is not None:
                changed = yield from changed_since(
                    entry, self.server, row["position"], known, row.get("last_run")
                )
                why = changed.unknown or ""
                position = changed.position or position
                keys = [key for key in changed.keys.values() if is_closed(key, known)]
            else:
                why = why or "the last run noted no place in the stream"
        yield from self.lease.check()
        run = merging.GroupRun(self.graph, self.server, entry, self.lease)
        windows = run.windows(keys)
        if len(windows) > SCHEDULE_DIRTY_MAX:
            why = "more changed than would be worth computing one by one"
        if why or known is None:
            yield from run.everything(bounds)
        else:
            yield from run.some(windows, known, bounds)
        ran = replace(job.describe(now), whole=bool(why), why=why, written=run.written, removed=run.removed)
        return ran, {"bounds": bounds, "position": position, "declared": declared}

    # -- fields ---------------------------------------------------------------------------------

    def _compute(self, job: Job, now: dt.datetime) -> Plan[Ran]:
        """Compute the fields of all documents of a model."""
        entry = job.entry
        mergeable = [
            rule
            for rule in job.rules
            if isinstance(rule, DerivedRule) and not rule.is_copy and merging.can_merge(rule)
        ]
        # A merge joins by id.
        mergeable = [rule for rule in mergeable if not rule.alternate_key]
        older = False
        for source in {rule.source for rule in mergeable}:
            older = older or (yield from has_outdated(source))
        has_archive = any(rule.source.sources.archive is not None for rule in mergeable)
        if entry.effects.on_write or entry.rules.group is not None or older or has_archive:
            # Others follow from it, or a source must be converted: a merge on the server does neither.
            mergeable = []
        written = 0
        rest = [rule for rule in job.rules if rule not in mergeable]
        if mergeable:
            stages = merging.merge_fields(entry, mergeable, self.lease)
            try:
                yield from merging.run_merge(entry.collection, stages)
                written = yield from count_documents(entry.collection, {})
            except Exception as error:
                if not is_about_one_document(error):
                    raise
                rest = list(job.rules)
        if rest:
            written = max(written, (yield from self._mend_all(entry)))
        return replace(job.describe(now), whole=True, written=written)

    def _mend_all(self, entry: ModelEntry) -> Plan[int]:
        """Examine every document and repair those that differ. Returns the number examined."""

        def visit(documents: Sequence[Raw]) -> Plan[None]:
            findings = yield from examine_each(self.server, entry, documents)
            wrong = {freeze(each.document_id) for each in findings}
            yield from self.lease.check()
            keys = [entry.key_of(each) for each in documents if freeze(each["_id"]) in wrong]
            yield from repair_documents(self.graph, self.server, entry, keys)

        return (yield from Sweep(entry, SCHEDULE_PAGE, visit).all())


def _ends_one_job(error: Exception) -> bool:
    """Whether the other jobs can go on all the same."""
    return isinstance(error, (OperationFailure, DataError, UsageError)) or is_about_one_document(error)


# -- when ---------------------------------------------------------------------------------------


def _aware(now: dt.datetime) -> dt.datetime:
    if not isinstance(now, dt.datetime):
        raise UsageError(f"now={now!r} is no datetime", code="now-invalid")
    aware = now if now.tzinfo is not None else now.replace(tzinfo=dt.UTC)
    aware = aware.astimezone(dt.UTC)
    # As precise as the server's own time.
    return aware.replace(microsecond=aware.microsecond // 1000 * 1000)


def is_due(job: Job, row: Raw | None, given: dt.datetime | None, server_now: dt.datetime) -> bool:
    """Whether a job is to run; several runs that were missed are one."""
    if row is None or row.get("due") is None:
        return True
    due: dt.datetime = row["due"]
    if given is not None:
        return given >= due
    # A run for a time that lies ahead does not hold up those of the real time.
    ran: dt.datetime = row["last_run"]
    return server_now >= due or server_now >= ran + job.every


def next_due(job: Job, due: dt.datetime | None, now: dt.datetime) -> dt.datetime:
    """The next time after now, in steps from the first run."""
    if due is None:
        due = now.replace(second=0, microsecond=0) if job.every >= MINUTES_FROM else now
    behind = max(0, (now - due) // job.every)
    return due + job.every * (behind + 1)


def _declared(job: Job) -> list[str]:
    """The rules by their declarations: a changed one recomputes everything."""
    declared = [pattern for patterns in job.entry.model.__treadle__.patterns.values() for pattern in patterns]
    return sorted([*map(repr, declared), *(signature(rule) for rule in job.rules)])
