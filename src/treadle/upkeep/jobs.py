"""Long runs as an operator sees them: how far they came, how long they will take, and how to slow them down.

A job is a row of `treadle.jobs`. The process that performs it writes its
progress, and reads there whether it was paused, stopped, or given another throttle. A
user who may only read has no row, and everything else works the same.

`throttle=` is a number of documents per second, or "gentle": small pages, a
rest after each that is many times as long as the page took, and longer rests
while requests queue at the server, while its replicas fall behind, or while
its answers become slower.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias

from bson import ObjectId
from pymongo.errors import OperationFailure, PyMongoError

from treadle.errors import DataError, UsageError
from treadle.graph.limits import Limits
from treadle.graph.outcomes import Finding, Pace, Progress, Report
from treadle.plan import Plan, Raw, database_command, delete_many, find, find_one, update_one, wait

# The longest sleep at a time of a migration with a rate.
MIGRATION_WAIT_SECONDS = 10.0
# How often a job writes how far it came, and reads what was asked of it.
JOB_NOTE_SECONDS = 1.0
# How long a job may say nothing before it is taken for dead.
JOB_LOST_SECONDS = 60.0
# And at most.
GENTLE_REST_MAX = 200.0
# The longest rest.
GENTLE_REST_SECONDS_MAX = 10.0
# How often it looks at the server.
GENTLE_LOOK_SECONDS = 1.0
# How much slower than usual answers mean that the server is busy.
GENTLE_SLOWER = 1.5
# How far a majority may be behind the primary.
GENTLE_REPLICATION_SECONDS = 2.0

COLLECTION = "treadle.jobs"
GENTLE = "gentle"

Throttle: TypeAlias = float | Literal["gentle"] | None
JobState: TypeAlias = Literal["running", "paused", "done", "stopped", "failed", "lost"]


class Stopped(DataError):
    """An operator stopped the job; what it did so far stays done."""


@dataclass(frozen=True)
class JobStatus:
    """A long run, as the database knows it."""

    id: str
    kind: str
    models: tuple[str, ...]
    state: JobState
    model: str | None
    done: int
    total: int
    rate: float | None
    seconds_left: float | None
    throttle: Throttle
    started: datetime | None
    updated: datetime | None
    owner: str
    note: str = ""
    findings: dict[str, int] = field(default_factory=dict)


def check_throttle(throttle: Any) -> None:
    """Refuse what is no pace."""
    number = isinstance(throttle, (int, float)) and not isinstance(throttle, bool)
    if throttle is None or throttle == GENTLE or (number and 0 < throttle < math.inf):
        return
    raise UsageError(
        f'throttle={throttle!r} is no pace; it takes documents per second, such as 500, or "gentle"',
        code="throttle-invalid",
    )


class Job(Pace):
    """One long run: reports, rests, and obeys."""

    def __init__(
        self,
        limits: Limits,
        kind: str,
        models: Sequence[str],
        *,
        owner: str,
        monotonic: Callable[[], float],
        throttle: Throttle = None,
        report: Report | None = None,
        every_page: bool = False,
    ) -> None:
        check_throttle(throttle)
        self.limits = limits
        self.kind = kind
        self.models = list(models)
        self.identity = ObjectId()
        self.throttle: Throttle = throttle
        self.owner = owner
        self.report = report
        # What is done in every pause, such as to hold a lease for longer.
        self.tending: Callable[[], Plan[Any]] | None = None
        # Whether the caller wants it to stop.
        self.stopping: Callable[[], bool] | None = None
        # Whether each page is noted, so that another run can go on from there.
        self.every_page = every_page
        self.keeping: Callable[[Sequence[Finding]], Plan[None]] | None = None
        self.finished: list[str] = []
        self.begun: dict[str, list[Any] | None] = {}
        self._monotonic = monotonic
        self._recorded = True
        self._progress = Progress("", 0, 0)
        self._first: dict[str, float] = {}
        self._page_began = self._noted = monotonic()
        self._gentleness = Gentleness(limits, monotonic)

    # -- what a run asks of it ------------------------------------------------------------------

    def __call__(self, progress: Progress) -> None:
        now = self._monotonic()
        began = self._first.setdefault(progress.model, self._page_began)
        rate = progress.done / (now - began) if now > began else 0.0
        left = (progress.total - progress.done) / rate if rate else None
        self._progress = Progress(progress.model, progress.done, progress.total, left)
        if self.report is not None:
            self.report(self._progress)

    def sized(self, most: int) -> int:
        if self.throttle is None:
            return most
        return min(most, self.limits.gentle_page if self.throttle == GENTLE else max(1, int(self.throttle)))

    def begins_after(self, model: str) -> list[Any] | None:
        return self.begun.get(model)

    def rest(self, documents: int, last: list[Any] | None = None) -> Plan[None]:
        worked = self._monotonic() - self._page_began
        if self.every_page or self._monotonic() - self._noted >= JOB_NOTE_SECONDS:
            yield from self._note(last)
        if self.throttle == GENTLE:
            yield from self._pause((yield from self._gentleness.rest_seconds(worked)))
        elif self.throttle is not None:
            yield from self._pause(documents / float(self.throttle) - worked)
        self._page_began = self._monotonic()

    def found(self, findings: Sequence[Finding]) -> Plan[None]:
        if self.keeping is not None and self._recorded:
            yield from self.keeping(findings)

    # -- its row ----------------------------------------------------------------------------------

    def begin(self) -> Plan[None]:
        """Make the row, and delete the oldest ones."""
        sets: Raw = {
            "kind": self.kind,
            "models": self.models,
            "owner": self.owner,
            "state": "running",
            "throttle": self.throttle,
            "started": "$$NOW",
        }
        literal = {name: value if value == "$$NOW" else {"$literal": value} for name, value in sets.items()}
        yield from self._write([{"$set": {**literal, "updated": "$$NOW"}}], upsert=True)
        if self._recorded:
            old = yield from find(
                COLLECTION, {}, {"_id": 1}, sort=[("_id", -1)], skip=self.limits.jobs_kept, limit=1
            )
            if old:
                yield from delete_many(COLLECTION, {"_id": {"$lte": old[0]["_id"]}})

    def model_done(self, model: str) -> Plan[None]:
        """Note that a model is done with."""
        self.finished.append(model)
        if self.every_page:
            yield from self._write({"$set": {"finished": self.finished, "at": None}})

    def end(self, state: JobState, note: str = "", **besides: Any) -> Plan[None]:
        """Note how it ended."""
        sets = {**self._figures(), "state": state, "note": note[:500], **besides}
        yield from self._write({"$set": sets, "$currentDate": {"updated": True}})

    def end_quietly(self, note: str) -> Plan[None]:
        """Note that it failed, if the server still takes that."""
        with contextlib.suppress(PyMongoError):
            yield from self.end("failed", note)

    def _figures(self) -> Raw:
        progress = self._progress
        began = self._first.get(progress.model, self._page_began)
        seconds = self._monotonic() - began
        return {
            "model": progress.model,
            "done": progress.done,
            "total": progress.total,
            "rate": progress.done / seconds if seconds > 0 else None,
            "seconds_left": progress.seconds_left,
        }

    def _note(self, last: list[Any] | None) -> Plan[None]:
        """Write how far it came, and read what was asked of it."""
        self._noted = self._monotonic()
        sets = self._figures()
        if self.every_page:
            sets["at"] = {"model": self._progress.model, "after": last}
        yield from self._write({"$set": sets, "$currentDate": {"updated": True}})
        if not self._recorded:
            return
        row = yield from find_one(COLLECTION, {"_id": self.identity})
        while row is not None and row.get("asked") == "pause":
            yield from self._write({"$set": {"state": "paused"}, "$currentDate": {"updated": True}})
            yield from self._pause(JOB_NOTE_SECONDS)
            row = yield from find_one(COLLECTION, {"_id": self.identity})
        if row is None:
            return
        if row.get("asked") == "stop":
            raise Stopped(f"this {self.kind} was stopped by an operator; start it again", code="job-stopped")
        if row.get("state") == "paused":
            yield from self._write({"$set": {"state": "running"}})
        self.throttle = row.get("throttle")

    def _write(self, update: Any, *, upsert: bool = False) -> Plan[None]:
        if self._recorded:
            try:
                yield from update_one(COLLECTION, {"_id": self.identity}, update, upsert=upsert)
            except OperationFailure:
                # A user who may only read can verify all the same.
                self._recorded = False

    def _pause(self, seconds: float) -> Plan[None]:
        """Wait, in pieces between which a lease is held for longer."""
        step = MIGRATION_WAIT_SECONDS
        while seconds > 0:
            yield from wait(min(seconds, step))
            seconds -= step
            if self.stopping is not None and self.stopping():
                return
            if self.tending is not None:
                yield from self.tending()


class Gentleness:
    """How long to rest after a page, from how the server itself fares."""

    def __init__(self, limits: Limits, monotonic: Callable[[], float]) -> None:
        self._limits = limits
        self._monotonic = monotonic
        self._factor = limits.gentle_rest_min
        self._looked = -math.inf
        self._latency: tuple[int, int] | None = None
        self._usual: float | None = None

    def rest_seconds(self, worked: float) -> Plan[float]:
        """So many times as long as the page took."""
        if self._monotonic() - self._looked >= GENTLE_LOOK_SECONDS:
            self._looked = self._monotonic()
            if (yield from self._is_pressed()):
                self._factor = min(self._factor * 2, GENTLE_REST_MAX)
            else:
                self._factor = max(self._factor * 0.8, self._limits.gentle_rest_min)
        return min(worked * self._factor, GENTLE_REST_SECONDS_MAX)

    def _is_pressed(self) -> Plan[bool]:
        """Whether requests queue, replicas fall behind, or answers have become slower."""
        unread = dict.fromkeys(("wiredTiger", "metrics", "locks", "tcmalloc", "network", "transactions"), 0)
        try:
            reply = yield from database_command({"serverStatus": 1, **unread}, writes=False, admin=True)
        except OperationFailure:
            # Without the right to ask, the rests alone must do.
            return False
        queued = (reply.get("globalLock") or {}).get("currentQueue", {}).get("total", 0)
        lagged = (reply.get("flowControl") or {}).get("isLagged", False)
        written = (reply.get("repl") or {}).get("lastWrite") or {}
        behind = 0.0
        if "lastWriteDate" in written and "majorityWriteDate" in written:
            behind = (written["lastWriteDate"] - written["majorityWriteDate"]).total_seconds()
        late = behind > GENTLE_REPLICATION_SECONDS
        return bool(queued) or bool(lagged) or late or self._is_slower(reply.get("opLatencies") or {})

    def _is_slower(self, latencies: Raw) -> bool:
        """Whether the answers since the last look took much longer than usual."""
        kinds = [latencies.get(name) or {} for name in ("reads", "writes")]
        now = (
            sum(int(kind.get("latency", 0)) for kind in kinds),
            sum(int(kind.get("ops", 0)) for kind in kinds),
        )
        before, self._latency = self._latency, now
        if before is None or now[1] <= before[1]:
            return False
        mean = (now[0] - before[0]) / (now[1] - before[1])
        usual = mean if self._usual is None else self._usual
        # What is usual follows slowly, so that a burst does not become it.
        self._usual = min(usual * 1.02, mean) if mean < usual else usual * 1.02
        return mean > usual * GENTLE_SLOWER


# -- what an operator asks -----------------------------------------------------------------------


def listed(limits: Limits) -> Plan[list[JobStatus]]:
    """The last jobs, newest first."""
    rows = yield from find(COLLECTION, {}, sort=[("_id", -1)], limit=limits.jobs_kept)
    if not rows:
        return []
    now = (yield from database_command({"hello": 1}, writes=False, admin=True))["localTime"]
    return [_described(row, now) for row in rows]


def _described(row: Raw, now: datetime) -> JobStatus:
    state, updated = row["state"], row.get("updated")
    quiet = (now - updated).total_seconds() if updated is not None else 0.0
    if state in ("running", "paused") and quiet > JOB_LOST_SECONDS:
        # Its process has ended without saying so.
        state = "lost"
    return JobStatus(
        id=str(row["_id"]),
        kind=row["kind"],
        models=tuple(row["models"]),
        state=state,
        model=row.get("model") or None,
        done=row.get("done", 0),
        total=row.get("total", 0),
        rate=row.get("rate"),
        seconds_left=row.get("seconds_left"),
        throttle=row.get("throttle"),
        started=row.get("started"),
        updated=updated,
        owner=row["owner"],
        note=row.get("note", ""),
        findings={each["rule"]: each["findings"] for each in row.get("findings", [])},
    )


def control(
    identity: str,
    asked: Literal["pause", "resume", "stop"] | None = None,
    throttle: Throttle | Literal["keep"] = "keep",
) -> Plan[None]:
    """Ask something of a job that runs; it obeys within a second or a page."""
    sets: Raw = {} if asked is None else {"asked": None if asked == "resume" else asked}
    if throttle != "keep":
        check_throttle(throttle)
        sets["throttle"] = throttle
    chosen = {"_id": ObjectId(identity) if ObjectId.is_valid(identity) else None}
    result = yield from update_one(COLLECTION, chosen, {"$set": sets})
    if not result.matched_count:
        raise UsageError(f"there is no job {identity!r}; list them with jobs()", code="job-unknown")


def quiet_seconds(row: Raw) -> Plan[float]:
    """How long a job has said nothing."""
    now: datetime = (yield from database_command({"hello": 1}, writes=False, admin=True))["localTime"]
    return float((now - row["updated"]).total_seconds())


def take_over(job: Job, is_dead: Callable[[str], bool]) -> Plan[bool]:
    """Go on where the last run of this kind over these models was interrupted; whether there is one."""
    row = yield from unfinished(job.kind, job.models)
    if row is None:
        return False
    runs = row["state"] in ("running", "paused") and not is_dead(row["owner"])
    if runs and (yield from quiet_seconds(row)) <= JOB_LOST_SECONDS:
        raise DataError(
            f"that {job.kind} still runs, in {row['owner']}; wait for it, or stop it", code="job-running"
        )
    job.identity = row["_id"]
    job.finished = list(row.get("finished", []))
    at = row.get("at")
    if at is not None:
        job.begun[at["model"]] = at["after"]
    return True


def unfinished(kind: str, models: Sequence[str]) -> Plan[Raw | None]:
    """The last job of a kind over these models that did not come to its end."""
    rows = yield from find(COLLECTION, {"kind": kind, "models": list(models)}, sort=[("_id", -1)], limit=1)
    return rows[0] if rows and rows[0]["state"] != "done" else None
