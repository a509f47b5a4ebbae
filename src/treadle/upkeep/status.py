"""How the maintenance stands: per rule its mode, how far behind, last run, and what verify found last."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from pymongo.errors import OperationFailure

from treadle.engine import fan_outs, lease
from treadle.graph.graph import Graph
from treadle.graph.quarantine import SET_ASIDE
from treadle.graph.rule import Rule
from treadle.plan import Plan, Raw, find, find_one
from treadle.plan.capabilities import Capabilities, clock
from treadle.plan.server_errors import HISTORY_LOST
from treadle.query.keys import freeze
from treadle.upkeep import controls, fingerprints, position
from treadle.upkeep.change_stream import BEATS, CONTROLS, ChangeStream, operation_time, places
from treadle.upkeep.closed_windows import COLLECTION as SCHEDULES
from treadle.upkeep.events import Watch
from treadle.upkeep.findings import VERIFICATIONS
from treadle.upkeep.headroom import Window, headroom, read_window
from treadle.upkeep.quarantine import SetAsideDocument, listed
from treadle.upkeep.verification import STATUS_AWAIT_MILLISECONDS, STATUS_EVENTS_PAGE

# Those that status lists.
SET_ASIDE_LISTED_MAX = 100
# Pending events that are counted.
STATUS_EVENTS_MAX = 100_000

RuleState = Literal["building", "following", "paused", "behind", "failed"]


@dataclass(frozen=True)
class Lag:
    """How far behind the worker is."""

    seconds: float
    events: int


@dataclass(frozen=True)
class Pending:
    """What the worker has not handled yet: how far behind, and by collection what changed."""

    lag: Lag = Lag(0.0, 0)
    documents: dict[str, set[Any]] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def of(self, rule: Rule) -> tuple[Lag, int]:
        """How far behind one rule is, and how many documents changed that concern it."""
        concerned = {*rule.reads(), rule.target.collection} & self.events.keys()
        # A server without a clock in its history tells no seconds.
        seconds = max((self.seconds.get(name, 0.0) for name in concerned), default=0.0)
        number = sum(self.events[name] for name in concerned)
        return Lag(seconds, number), sum(len(self.documents[name]) for name in concerned)


@dataclass(frozen=True)
class RuleStatus:
    """One declaration, and how well it is kept."""

    rule: str
    pattern: str
    model: str
    maintain: str
    # How it is kept right: "write", "stream" or "schedule"; the same as `maintain`.
    mode: str = "write"
    state: RuleState = "following"
    every_seconds: float | None = None
    lag_seconds: float | None = None
    lag_events: int | None = None
    # Seconds until the server's history no longer reaches back to where the rule stands, and of how many.
    headroom: float | None = None
    headroom_of: float | None = None
    headroom_low: bool = False
    paused_at: datetime | None = None
    set_aside: int = 0
    dirty: int | None = None
    last_run: datetime | None = None
    last_seconds: float | None = None
    next_run: datetime | None = None
    outcome: str | None = None
    whole: bool | None = None
    why: str = ""
    findings: int | None = None
    verified_at: datetime | None = None
    # Whether its declaration changed since its values were computed.
    rebuild_needed: bool = False


@dataclass(frozen=True)
class WorkerStatus:
    """The worker, as the database knows it."""

    active: bool
    owner: str | None = None
    lag_seconds: float = 0.0
    events: int = 0
    saved_at: datetime | None = None
    until: datetime | None = None
    led_since: datetime | None = None
    # Who led before, and why it does no longer.
    former: str | None = None
    handed_over: str | None = None
    error: str | None = None
    headroom: float | None = None
    headroom_of: float | None = None
    headroom_low: bool = False
    owed: int = 0
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Status:
    """The whole of a Store."""

    rules: list[RuleStatus]
    worker: WorkerStatus | None
    # How many documents are set aside, and which, the latest first.
    set_aside: int
    intents: int
    aside: list[SetAsideDocument] = field(default_factory=list)


def status(graph: Graph, server: Capabilities, name: str = position.NAME) -> Plan[Status]:
    """How the maintenance of all rules stands."""
    rules = [rule for rule in graph.rules if rule.owns()]
    seen = _Seen()
    if any(rule.maintain == "stream" for rule in rules) and server.streams:
        seen.waiting = yield from pending(graph, name)
        seen.row = (yield from find_one(position.COLLECTION, {"_id": name})) or {}
        seen.window = yield from read_window()
        seen.worker = yield from _worker(name, seen)
    for label, row in (yield from controls.rows(graph)).items():
        stopped = controls.together(graph, label)
        seen.controls |= dict.fromkeys(stopped, row)
        if row.get("place") is not None:
            caught = yield from _pending_at(graph, row["place"], only=stopped)
            seen.behind |= dict.fromkeys(stopped, caught)
    seen.verified = {row["_id"]: row for row in (yield from find(VERIFICATIONS, {}))}
    seen.runs = {label: row for row in (yield from find(SCHEDULES, {})) for label in row.get("rules", [])}
    seen.now = yield from clock()
    aside = yield from find(SET_ASIDE, {}, {"_id.rule": 1})
    for each in aside:
        seen.aside[each["_id"]["rule"]] = seen.aside.get(each["_id"]["rule"], 0) + 1
    unfinished = yield from find(fan_outs.COLLECTION, {}, {"_id": 1})
    stale = yield from fingerprints.stale()
    described = [
        replace(_of_rule(graph, rule, seen), rebuild_needed=rule.place.label in stale) for rule in rules
    ]
    first = yield from listed(graph, most=SET_ASIDE_LISTED_MAX)
    return Status(described, seen.worker, len(aside), len(unfinished), first)


@dataclass(slots=True)
class _Seen:
    """What the database says, before it is told rule by rule."""

    waiting: Pending = field(default_factory=Pending)
    row: Raw = field(default_factory=dict)
    worker: WorkerStatus | None = None
    window: Window | None = None
    controls: dict[Rule, Raw] = field(default_factory=dict)
    # What rules that are paused, or catching up, have not seen.
    behind: dict[Rule, Pending] = field(default_factory=dict)
    verified: dict[str, Raw] = field(default_factory=dict)
    runs: dict[str, Raw] = field(default_factory=dict)
    aside: dict[str, int] = field(default_factory=dict)
    now: datetime | None = None


def _of_rule(graph: Graph, rule: Rule, seen: _Seen) -> RuleStatus:
    label = rule.place.label
    verified = seen.verified.get(rule.target.model.__name__) or {}
    findings = {each["rule"]: each["findings"] for each in verified.get("rules", [])}
    run, control = seen.runs.get(label) or {}, seen.controls.get(rule) or {}
    stream = rule.maintain == "stream"
    lag, dirty = seen.behind.get(rule, seen.waiting).of(rule)
    room = headroom(seen.window, control.get("place") or seen.row) if stream else None
    return RuleStatus(
        rule=label,
        pattern=rule.pattern,
        model=rule.target.model.__name__,
        maintain=rule.maintain,
        mode=rule.maintain,
        state=_state(graph, rule, seen, lag),
        every_seconds=rule.every.total_seconds() if rule.every is not None else None,
        lag_seconds=lag.seconds if stream else None,
        lag_events=lag.events if stream else None,
        headroom=None if room is None else room.seconds,
        headroom_of=None if room is None else room.window_seconds,
        headroom_low=room is not None and room.low,
        paused_at=control.get("at") if control.get("paused") else None,
        # Some are noted under the name of their model.
        set_aside=seen.aside.get(label, 0) + seen.aside.get(rule.target.model.__name__, 0),
        dirty=dirty if stream else None,
        last_run=run.get("last_run"),
        last_seconds=run.get("last_seconds"),
        next_run=run.get("due"),
        outcome=run.get("outcome"),
        whole=run.get("whole"),
        why=run.get("why", ""),
        findings=findings.get(label),
        verified_at=verified.get("at"),
    )


def _state(graph: Graph, rule: Rule, seen: _Seen, lag: Lag) -> RuleState:
    control = seen.controls.get(rule)
    if control is not None and control["paused"]:
        return "paused"
    if rule.maintain == "schedule":
        return _state_of_schedule(rule, seen)
    if rule.maintain == "write":
        return "following"
    if seen.worker is None or seen.worker.error is not None:
        return "failed"
    owed = {each["collection"] for each in seen.row.get("owed", [])}
    if position.signature(rule) not in seen.row.get("rules", []) or rule.target.collection in owed:
        return "building"
    late = lag.seconds > graph.limits.worker_lag_max_seconds
    return "behind" if control is not None or late or not seen.worker.active else "following"


def _state_of_schedule(rule: Rule, seen: _Seen) -> RuleState:
    run = seen.runs.get(rule.place.label)
    if run is None or rule.every is None:
        return "building"
    if run.get("outcome") != "done":
        return "failed"
    # A run that is due is one period late before anybody needs to know.
    late = seen.now is not None and run.get("due") is not None and seen.now > run["due"] + rule.every
    return "behind" if late else "following"


def _worker(name: str, seen: _Seen) -> Plan[WorkerStatus]:
    row, waiting = seen.row, seen.waiting
    held = yield from lease.holder(name)
    handed = row.get("led") or {}
    room = headroom(seen.window, row)
    return WorkerStatus(
        active=held is not None,
        owner=held.get("owner") if held is not None else None,
        lag_seconds=waiting.lag.seconds,
        events=waiting.lag.events,
        saved_at=row.get("saved"),
        until=held.get("until") if held is not None else None,
        led_since=handed.get("since"),
        former=handed.get("former"),
        handed_over=handed.get("why"),
        error=row.get("error"),
        headroom=None if room is None else room.seconds,
        headroom_of=None if room is None else room.window_seconds,
        headroom_low=room is not None and room.low,
        owed=len(row.get("owed", [])),
        counts=row.get("counts", {}),
    )


def pending(graph: Graph, name: str) -> Plan[Pending]:
    """What lies between the worker's saved position and the present; costs the worker nothing."""
    row = yield from find_one(position.COLLECTION, {"_id": name})
    return Pending() if row is None else (yield from _pending_at(graph, row))


def _pending_at(graph: Graph, row: Raw, only: Collection[Rule] | None = None) -> Plan[Pending]:
    for place in places(row):
        try:
            return (yield from _pending_from(graph, place, only))
        except OperationFailure as error:
            if error.code not in HISTORY_LOST:
                raise
    # What was missed cannot be counted; the worker will recompute everything.
    return Pending(Lag((yield from _seconds_since(row.get("saved"))), 0))


def _pending_from(graph: Graph, place: Raw, only: Collection[Rule] | None = None) -> Plan[Pending]:
    stages = [
        *Watch(graph, only=only).stages(place),
        {"$match": {"ns.coll": {"$nin": [BEATS, CONTROLS]}}},
        {"$project": {"clusterTime": 1, "ns": 1, "documentKey": 1}},
    ]
    # What is written from here on is not counted, or beside busy writers counting would not end.
    now = yield from operation_time()
    stream = ChangeStream()
    yield from stream.open(stages)
    documents: dict[str, set[Any]] = {}
    events_of: dict[str, int] = {}
    firsts: dict[str, datetime] = {}
    number = 0
    while stream.cursor is not None and number < STATUS_EVENTS_MAX:
        await_seconds = STATUS_AWAIT_MILLISECONDS / 1000
        events = yield from stream.read(STATUS_EVENTS_PAGE, await_seconds, raw=True)
        batch = [event for event in events if event["clusterTime"] <= now]
        if not batch:
            break
        number += len(batch)
        for event in batch:
            where = (event.get("ns") or {}).get("coll", "")
            firsts.setdefault(where, event["clusterTime"].as_datetime())
            events_of[where] = events_of.get(where, 0) + 1
            keys = documents.setdefault(where, set())
            if "documentKey" in event:
                keys.add(freeze(event["documentKey"]["_id"]))
        if len(batch) < len(events):
            break
    yield from stream.close()
    if not number:
        return Pending()
    present = yield from clock()
    seconds = {name: max(0.0, (present - first).total_seconds()) for name, first in firsts.items()}
    return Pending(Lag(max(seconds.values(), default=0.0), number), documents, events_of, seconds)


def _seconds_since(moment: datetime | None) -> Plan[float]:
    """How long ago something was, by the server's clock."""
    if moment is None:
        return 0.0
    return max(0.0, ((yield from clock()) - moment).total_seconds())
