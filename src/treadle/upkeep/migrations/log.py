"""The log of migrations: which ran, when, by whom, for how long, and how each ended.

A row of `treadle.migrations` is written before the first document is changed,
and completed at the end. A run that was killed keeps its row without an end.
"""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import Any

from bson import ObjectId
from pymongo.errors import PyMongoError

from treadle.graph.limits import Limits
from treadle.graph.pattern import Entry
from treadle.plan import Plan, Raw, by_id, delete_many, find, update_one
from treadle.upkeep.migrations.run import Migrated, Run, status
from treadle.values import frozen

COLLECTION = "treadle.migrations"


@frozen
class MigrationRun:
    """One run of a migration, as the log has it."""

    # The model, and the version to reach; none for a one-off migration, which has a name of its own.
    model: str | None
    to: int | None
    # How many documents of each other version there were when it began.
    found: dict[int, int]
    # None for a run that goes on, or that was killed.
    outcome: str | None
    migrated: int
    remaining: int | None
    set_aside: int
    owner: str
    started: datetime
    ended: datetime | None
    once: str | None = None

    @property
    def seconds(self) -> float | None:
        """How long it took; None where it has not ended."""
        return None if self.ended is None else (self.ended - self.started).total_seconds()


def logged(entry: Entry[Any], runs: list[Run], work: Plan[Migrated]) -> Plan[Migrated]:
    """Do the work, and log it."""
    key, first = ObjectId(), runs[0]
    if first.options.strategy != "swap":
        # A swap counts by itself, once it follows what others write.
        first.found = yield from status(entry)
        if len(runs) == 1 and first.scope == entry.whole_scope:
            first.total = sum(number for version, number in first.found.items() if version != first.to)
    row: Raw = {
        "model": entry.model.__name__,
        "to": first.to,
        "found": _found(first),
        "owner": first.options.owner,
    }
    sets = {"started": "$$NOW", **{name: {"$literal": value} for name, value in row.items()}}
    yield from update_one(COLLECTION, by_id(key), [{"$set": sets}], upsert=True)
    yield from forget_old(entry.limits)
    try:
        result = yield from work
    except Exception as error:
        with contextlib.suppress(PyMongoError):
            done = sum(run.done for run in runs)
            yield from end(key, {"outcome": type(error).__name__, "migrated": done, "found": _found(first)})
        raise
    ended = {
        "outcome": "done" if result.finished else "stopped",
        "migrated": result.migrated,
        "remaining": result.remaining,
        "set_aside": len(result.set_aside),
        "found": _found(first),
    }
    yield from end(key, ended)
    return result


def _found(run: Run) -> list[list[int]]:
    """How many documents there were of each other version; a version is no name of a field."""
    return [[version, number] for version, number in run.found.items() if version != run.to]


def end(key: Any, sets: Raw) -> Plan[None]:
    """Complete a row."""
    yield from update_one(COLLECTION, by_id(key), {"$set": sets, "$currentDate": {"ended": True}})


def forget_old(limits: Limits) -> Plan[None]:
    """Let go of the oldest rows; what was done once must be known for ever."""
    most, forgettable = limits.migrations_kept, {"$nor": [{"once": {"$ne": None}, "outcome": "done"}]}
    old = yield from find(COLLECTION, forgettable, {"_id": 1}, sort=[("_id", -1)], skip=most, limit=1)
    if old:
        yield from delete_many(COLLECTION, {"_id": {"$lte": old[0]["_id"]}, **forgettable})


def listed(limits: Limits, models: list[str]) -> Plan[list[MigrationRun]]:
    """The last runs of these models, or of all, newest first."""
    chosen = {"model": {"$in": models}} if models else {}
    rows = yield from find(COLLECTION, chosen, sort=[("_id", -1)], limit=limits.migrations_kept)
    return [
        MigrationRun(
            model=row.get("model"),
            to=row.get("to"),
            found=dict(row.get("found", [])),
            outcome=row.get("outcome"),
            migrated=row.get("migrated", 0),
            remaining=row.get("remaining"),
            set_aside=row.get("set_aside", 0),
            owner=row["owner"],
            started=row["started"],
            ended=row.get("ended"),
            once=row.get("once"),
        )
        for row in rows
    ]
