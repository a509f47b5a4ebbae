"""Listing writes instead of performing them.

`dry` wraps a plan in another that passes the reads on to whichever runner
drives it, and keeps the writes. So the blocking and the asyncio shell share
it. A write's result is that of a write that matched nothing, which a plan
must be able to meet anyway.
"""

from __future__ import annotations

from inspect import GEN_CREATED, getgeneratorstate
from typing import Any, TypeVar

from pymongo.results import BulkWriteResult, DeleteResult, InsertManyResult, InsertOneResult, UpdateResult

from treadle.plan import (
    Aside,
    Call,
    Command,
    DatabaseCommand,
    Plan,
    Read,
    Transact,
    Wait,
    not_fresh,
)

R = TypeVar("R")


def dry(plan: Plan[R], writes: list[Command]) -> Plan[R]:
    """Run a plan's reads, and append its writes to `writes`."""
    if getgeneratorstate(plan) != GEN_CREATED:
        raise not_fresh()
    try:
        command = next(plan)
        while True:
            if isinstance(command, Transact):
                result = yield from dry(command.make(), writes)
            elif _writes(command):
                writes.append(command)
                result = nothing_matched(command)
            elif isinstance(command, (Aside, Wait)):
                result = None
            else:
                try:
                    result = yield command
                except Exception as error:
                    command = plan.throw(error)
                    continue
            command = plan.send(result)
    except StopIteration as stop:
        value: R = stop.value
        return value
    finally:
        plan.close()


def _writes(command: Command) -> bool:
    if isinstance(command, Read):
        stages = command.arguments[0] if command.method == "aggregate" else []
        return any(name in stage for stage in stages for name in ("$merge", "$out"))
    return isinstance(command, (Call, DatabaseCommand)) and command.writes


def nothing_matched(command: Command) -> Any:
    """What a command answers that concerned no document."""
    if isinstance(command, Read):
        return []
    if not isinstance(command, Call):
        return {"ok": 1.0}
    if command.method == "insert_one":
        return InsertOneResult(command.arguments[0].get("_id"), True)
    if command.method == "insert_many":
        return InsertManyResult([document.get("_id") for document in command.arguments[0]], True)
    if command.method in ("update_one", "update_many", "replace_one"):
        return UpdateResult({"n": 0, "nModified": 0}, True)
    if command.method in ("delete_one", "delete_many"):
        return DeleteResult({"n": 0}, True)
    if command.method == "bulk_write":
        empty = {"nInserted": 0, "nMatched": 0, "nModified": 0, "nRemoved": 0, "nUpserted": 0, "upserted": []}
        return BulkWriteResult(empty, True)
    return None
