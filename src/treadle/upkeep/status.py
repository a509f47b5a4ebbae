"""How the maintenance stands: per rule its mode, how far behind, last run, and what verify found last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pymongo import UpdateOne
from pymongo.errors import OperationFailure

from treadle.engine import intents, lease
from treadle.engine.set_aside import SET_ASIDE
from treadle.graph.gather import freeze
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Finding, Report
from treadle.graph.pattern import Entry, Rule
from treadle.plan import Plan, Raw, bulk_write, find, find_one
from treadle.plan.capabilities import Capabilities, clock
from treadle.plan.server_errors import HISTORY_LOST
from treadle.query.paths import plain
from treadle.upkeep import position
from treadle.upkeep.change_stream import BEATS, ChangeStream, operation_time
from treadle.upkeep.closed import COLLECTION as SCHEDULES
from treadle.upkeep.events import Watch
from treadle.upkeep.verify import verify

VERIFICATIONS = "treadle.verifications"


@dataclass(frozen=True, slots=True)
class Lag:
    """How far behind the worker is."""

    seconds: float
    events: int


@dataclass(frozen=True, slots=True)
class Pending:
    """What the worker has not handled yet: how far behind, and which documents changed."""

    lag: Lag = Lag(0.0, 0)
    documents: dict[str, set[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RuleStatus:
    """One declaration, and how well it is kept."""

    rule: str
    pattern: str
    model: str
    maintain: str
    every_seconds: float | None = None
    lag_seconds: float | None = None
    dirty: int | None = None
    last_run: datetime | None = None
    last_seconds: float | None = None
    findings: int | None = None
    verified_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The worker, as the database knows it."""

    active: bool
    owner: str | None = None
    lag_seconds: float = 0.0
    events: int = 0
    saved_at: datetime | None = None
    owed: int = 0
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """The whole of a Store."""

    rules: list[RuleStatus]
    worker: WorkerStatus | None
    set_aside: int
    intents: int


def status(graph: Graph, server: Capabilities, name: str = position.NAME) -> Plan[Status]:
    """How the maintenance of all rules stands."""
    rules = [rule for rule in graph.rules if rule.maintained()]
    streamed = any(rule.maintain == "stream" for rule in rules)
    waiting = Pending()
    worker: WorkerStatus | None = None
    if streamed and server.streams:
        waiting = yield from pending(graph, name)
        worker = yield from _worker(name, waiting)
    verified = {row["_id"]: row for row in (yield from find(VERIFICATIONS, {}))}
    runs = {label: row for row in (yield from find(SCHEDULES, {})) for label in row.get("rules", [])}
    described = [_of_rule(rule, waiting, verified, runs.get(rule.place.label) or {}) for rule in rules]
    aside = yield from find(SET_ASIDE, {}, {"_id": 1})
    unfinished = yield from find(intents.COLLECTION, {}, {"_id": 1})
    return Status(described, worker, len(aside), len(unfinished))


def _of_rule(rule: Rule, waiting: Pending, verified: dict[str, Raw], run: Raw) -> RuleStatus:
    label = rule.place.label
    row = verified.get(rule.target.model.__name__) or {}
    findings = {each["rule"]: each["findings"] for each in row.get("rules", [])}
    stream = rule.maintain == "stream"
    concerned = {*rule.watches(), rule.target.collection}
    dirty = sum(len(keys) for name, keys in waiting.documents.items() if name in concerned)
    return RuleStatus(
        rule=label,
        pattern=rule.pattern,
        model=rule.target.model.__name__,
        maintain=rule.maintain,
        every_seconds=rule.every.total_seconds() if rule.every is not None else None,
        lag_seconds=(waiting.lag.seconds if dirty else 0.0) if stream else None,
        dirty=dirty if stream else None,
        last_run=run.get("last_run"),
        last_seconds=run.get("last_seconds"),
        findings=findings.get(label),
        verified_at=row.get("at"),
    )


def _worker(name: str, waiting: Pending) -> Plan[WorkerStatus]:
    row = (yield from find_one(position.COLLECTION, {"_id": name})) or {}
    held = yield from lease.holder(name)
    return WorkerStatus(
        active=held is not None,
        owner=held.get("owner") if held is not None else None,
        lag_seconds=waiting.lag.seconds,
        events=waiting.lag.events,
        saved_at=row.get("saved"),
        owed=len(row.get("owed", [])),
        counts=row.get("counts", {}),
    )


def pending(graph: Graph, name: str) -> Plan[Pending]:
    """What lies between the worker's saved position and the present; costs the worker nothing."""
    row = yield from find_one(position.COLLECTION, {"_id": name})
    if row is None:
        return Pending()
    places = [row]
    if row["token"] is not None and row["start"] is not None:
        # By time, where the token's own event is of a collection that is not watched here.
        places.append({"token": None, "start": row["start"]})
    for place in places:
        try:
            return (yield from _pending_from(graph, place))
        except OperationFailure as error:
            if error.code not in HISTORY_LOST:
                raise
    # Nobody can count any more what was missed; the worker will go over everything.
    return Pending(Lag((yield from _seconds_since(row.get("saved"))), 0))


def _pending_from(graph: Graph, place: Raw) -> Plan[Pending]:
    stages = [
        *Watch(graph).stages(place),
        {"$match": {"ns.coll": {"$ne": BEATS}}},
        {"$project": {"clusterTime": 1, "ns": 1, "documentKey": 1}},
    ]
    # What is written from here on is not counted, or beside busy writers counting would not end.
    now = yield from operation_time()
    stream = ChangeStream()
    yield from stream.open(stages)
    documents: dict[str, set[Any]] = {}
    number, first, limits = 0, None, graph.limits
    while stream.cursor is not None and number < limits.status_events_max:
        events = yield from stream.read(limits.status_events_page, limits.status_await_milliseconds / 1000)
        batch = [event for event in events if event["clusterTime"] <= now]
        if not batch:
            break
        first = first or batch[0]["clusterTime"].as_datetime()
        number += len(batch)
        for event in batch:
            if "documentKey" in event:
                key = freeze(event["documentKey"]["_id"])
                documents.setdefault(event["ns"]["coll"], set()).add(key)
        if len(batch) < len(events):
            break
    yield from stream.close()
    return Pending(Lag((yield from _seconds_since(first)), number), documents)


def _seconds_since(moment: datetime | None) -> Plan[float]:
    """How long ago something was, by the server's clock."""
    if moment is None:
        return 0.0
    return max(0.0, ((yield from clock()) - moment).total_seconds())


# -- what verify found last ---------------------------------------------------------------------


def verify_and_note(
    graph: Graph, server: Capabilities, entries: Sequence[Entry[Any]], report: Report | None = None
) -> Plan[list[Finding]]:
    """The findings in these models; how many there were is noted for `status`."""
    findings = yield from verify(graph, server, entries, report)
    # Somebody who may only read can verify all the same.
    with contextlib.suppress(OperationFailure):
        yield from _note(entries, findings)
    return findings


def _note(entries: Iterable[Entry[Any]], findings: Sequence[Finding]) -> Plan[None]:
    operations = []
    for entry in entries:
        mine = [each.path for each in findings if each.model == entry.model.__name__]
        rules = [
            {"rule": rule.place.label, "findings": sum(_is_of(rule, path) for path in mine)}
            for rule in entry.rules
        ]
        if rules:
            values = {"rules": {"$literal": rules}, "findings": len(mine), "at": "$$NOW"}
            operations.append(UpdateOne({"_id": entry.model.__name__}, [{"$set": values}], upsert=True))
    if operations:
        yield from bulk_write(VERIFICATIONS, operations, ordered=False)


def _is_of(rule: Rule, path: str) -> bool:
    bare = plain(path)
    return bare == rule.path or bare.startswith(rule.path + ".") or bare.endswith(f".state.{rule.path}")
