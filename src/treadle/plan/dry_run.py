"""Listing the writes of a plan instead of performing them."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from pymongo.results import BulkWriteResult, DeleteResult, InsertManyResult, InsertOneResult, UpdateResult

from treadle.plan import (
    Call,
    Command,
    DatabaseCommand,
    IsInside,
    Outside,
    Plan,
    Read,
    Request,
    ServerFacts,
    Transact,
    Wait,
    intercept,
)
from treadle.plan.capabilities import Capabilities

R = TypeVar("R")


def list_writes(plan: Plan[R], writes: list[Command], server: Capabilities) -> Plan[R]:
    """Perform the reads of a plan, and append its writes to `writes`.

    A write gets the result of one that matched nothing. Only reads reach the runner: `server` answers
    for what it can do, because a Store that asks may first recover what a crash left unfinished. A
    command that is neither raises `TypeError`.
    """
    return intercept(plan, partial(_perform, writes, server))


def _perform(writes: list[Command], server: Capabilities, command: Command) -> Plan[Any]:
    if isinstance(command, (Transact, Outside)):
        return (yield from list_writes(command.make(), writes, server))
    if isinstance(command, ServerFacts):
        return server
    if isinstance(command, Wait):
        return None
    if isinstance(command, (Call, DatabaseCommand, Read)):
        if is_write(command):
            writes.append(command)
            return nothing_matched(command)
    elif not isinstance(command, IsInside):
        raise TypeError(f"a dry run cannot perform {command!r}")
    return (yield command)


def is_write(command: Request) -> bool:
    """Whether a command may change the database; an aggregation does with `$merge` or `$out`."""
    if not isinstance(command, Read):
        return command.writes
    stages = command.arguments[0] if command.method == "aggregate" else []
    return any(name in stage for stage in stages for name in ("$merge", "$out"))


_UPDATED = UpdateResult({"n": 0, "nModified": 0}, True)
_DELETED = DeleteResult({"n": 0}, True)
_COUNTS = ("nInserted", "nMatched", "nModified", "nRemoved", "nUpserted")
_NOTHING_MATCHED = {
    **dict.fromkeys(("update_one", "update_many", "replace_one"), _UPDATED),
    **dict.fromkeys(("delete_one", "delete_many"), _DELETED),
    "bulk_write": BulkWriteResult({**dict.fromkeys(_COUNTS, 0), "upserted": []}, True),
}


def nothing_matched(command: Command) -> Any:
    """Return the result of a command that concerned no document."""
    if isinstance(command, Read):
        return []
    if not isinstance(command, Call):
        return {"ok": 1.0}
    if command.method == "insert_one":
        return InsertOneResult(command.arguments[0].get("_id"), True)
    if command.method == "insert_many":
        return InsertManyResult([document.get("_id") for document in command.arguments[0]], True)
    return _NOTHING_MATCHED.get(command.method)
