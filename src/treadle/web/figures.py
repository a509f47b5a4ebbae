"""The figures that all pages show: read once per interval, however many browsers look.

A task asks the Store for its status, its jobs, what was set aside and what
verify found. Pages, JSON and metrics are made of the last answer. It
asks less often while no page is open. A database that does not answer is no
error of a page: the page says so and shows the last figures, and the task
continues to ask.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pymongo
from bson import json_util
from pymongo.errors import PyMongoError

from treadle.errors import TreadleError
from treadle.model.text import get_logger
from treadle.upkeep.findings import KeptFinding
from treadle.upkeep.jobs import JobStatus
from treadle.upkeep.quarantine import SetAsideDocument
from treadle.upkeep.status import RuleStatus, Status

READ_SECONDS_MAX = 5.0
# While no page is open; and for how long one counts as open after a request.
IDLE_SECONDS = 15.0
LOOKING_SECONDS = 30.0
HOUR_SECONDS = 3600.0
SAMPLES_MAX = 720

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """How far behind the rules were at one moment, and how much history was left, in seconds."""

    at: float
    lags: dict[str, float]
    headrooms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """What was known at one moment."""

    number: int = 0
    at: datetime | None = None
    status: Status | None = None
    jobs: list[JobStatus] = field(default_factory=list)
    aside: list[SetAsideDocument] = field(default_factory=list)
    findings: list[KeptFinding] = field(default_factory=list)
    # One sentence where the last reading failed.
    error: str | None = None

    @property
    def rules(self) -> list[RuleStatus]:
        return self.status.rules if self.status is not None else []

    def rule(self, name: str) -> RuleStatus | None:
        return next((each for each in self.rules if each.rule == name), None)


class Board:
    """The last figures, the last hour, and the requests that wait for the next ones."""

    def __init__(self, store: Any, interval: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self.interval = interval
        self.figures = Figures()
        self.history: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self.readings = 0
        self._monotonic = monotonic
        self._looked = -HOUR_SECONDS
        self._next = asyncio.Event()
        self._wake = asyncio.Event()
        self._cached: dict[str, bytes] = {}

    async def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a method of the Store, which may be one that blocks."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments, **options)
        return await asyncio.to_thread(method, *arguments, **options)

    async def run(self) -> None:
        """Read again and again."""
        while True:
            # Cleared first: a request that arrives during a reading wants another one.
            self._wake.clear()
            await self.read()
            try:
                await asyncio.wait_for(self._wake.wait(), self._pause())
            except TimeoutError:
                continue

    def _pause(self) -> float:
        looked = self._monotonic() - self._looked < LOOKING_SECONDS
        return self.interval if looked else max(self.interval, IDLE_SECONDS)

    def look(self) -> Figures:
        """Return the last figures; a page is open, so that the next ones are read soon."""
        idle = self._monotonic() - self._looked >= LOOKING_SECONDS
        self._looked = self._monotonic()
        if idle:
            self._wake.set()
        return self.figures

    def hurry(self) -> int:
        """Read now: something was done that shows in the figures after this number."""
        self._wake.set()
        return self.readings

    async def read(self) -> None:
        """Ask the Store; what it says, or that it does not answer."""
        before = self.figures
        self.readings += 1
        number = self.readings
        try:
            # Quick to fail. What follows reads a change stream, whose waits a deadline would make errors.
            with pymongo.timeout(READ_SECONDS_MAX):
                await self.call(self.store.database.command, "ping")
            figures = await self._ask(number)
            self._sample(figures)
        except (PyMongoError, OSError, TreadleError) as error:
            # The driver's own words run over many lines, and may name what has no place in a page.
            log.warning("the dashboard could not read its figures: %s", type(error).__name__)
            sentence = f"The database does not answer ({type(error).__name__}); trying again."
            figures = replace(before, number=number, error=sentence)
        self.figures = figures
        self._cached.clear()
        self._next.set()
        self._next = asyncio.Event()

    async def _ask(self, number: int) -> Figures:
        store = self.store
        return Figures(
            number,
            datetime.now(UTC),
            await self.call(store.status),
            await self.call(store.jobs),
            await self.call(store.set_aside),
            await self.call(store.findings),
        )

    def _sample(self, figures: Figures) -> None:
        streamed = [rule for rule in figures.rules if rule.maintain == "stream"]
        self.history.append(
            Sample(
                self._monotonic(),
                {rule.rule: rule.lag_seconds or 0.0 for rule in streamed},
                {rule.rule: rule.headroom for rule in streamed if rule.headroom is not None},
            )
        )
        while self.history and self.history[0].at < self._monotonic() - HOUR_SECONDS:
            self.history.popleft()

    async def following(self, number: int) -> Figures:
        """The figures after that number; at once where they are there already."""
        while self.figures.number <= number:
            await self._next.wait()
        return self.figures

    # -- as JSON, made once per reading ---------------------------------------------------------

    def json(self, name: str) -> bytes:
        """What an endpoint answers; made once, however often it is asked for."""
        if name not in self._cached:
            self._cached[name] = dumps(getattr(self, f"_{name}")())
        return self._cached[name]

    def _status(self) -> dict[str, Any]:
        figures, status = self.figures, self.figures.status
        return {
            "at": figures.at,
            "ok": figures.error is None,
            "error": figures.error,
            "worker": None if status is None else status.worker,
            "rules": figures.rules,
            "set_aside": 0 if status is None else status.set_aside,
            "intents": 0 if status is None else status.intents,
            "findings": len(figures.findings),
            "jobs": sum(job.state in ("running", "paused") for job in figures.jobs),
        }

    def _rules(self) -> dict[str, Any]:
        return {"rules": self.figures.rules}

    def _jobs(self) -> dict[str, Any]:
        return {"jobs": self.figures.jobs}

    def _set_aside(self) -> dict[str, Any]:
        rows = [{"name": each.token, **asdict(each)} for each in self.figures.aside]
        for row in rows:
            row["reason"] = without_values(row["reason"])
        return {"set_aside": rows}

    def _findings(self) -> dict[str, Any]:
        return {"findings": self.figures.findings}


def without_values(reason: str) -> str:
    """A reason without the values that the server quotes in it."""
    for mark in (" dup key", ", full error", ": {", " { "):
        reason = reason.partition(mark)[0]
    return reason


def dumps(value: Any) -> bytes:
    """JSON of dataclasses, with dates as ISO 8601 and ids as relaxed Extended JSON."""
    return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if isinstance(value, datetime):
        return value.isoformat()
    try:
        return json_util.default(value)
    except TypeError:
        return str(value)
