"""What the plan machinery itself costs: the real runners, with commands that cost nothing.

These are absolute times, so their goal is loose. The difference between a
plan and a call of the driver drowns in the noise of the network; here the
runners' `_perform` gives a constant, and all that remains is their own work.
"""

from __future__ import annotations

from typing import Any

from pymongo import AsyncMongoClient, MongoClient

from benchmarks.harness import Contender, Context, Goal, Group
from treadle.plan import Call, Plan
from treadle.store.async_runner import AsyncRunner
from treadle.store.blocking.runner import Runner

COMMANDS = 20_000
COMMANDS_QUICK = 2_000
GOAL = Goal(10, "microseconds")
FOUND = {"_id": 1}


class ConstantRunner(Runner):
    """Answers every command with the same document."""

    def _perform(self, command: Any, session: Any, answers: bool = False) -> Any:
        return FOUND


class ConstantAsyncRunner(AsyncRunner):
    """Answers every command with the same document."""

    async def _perform(self, command: Any, session: Any, answers: bool = False) -> Any:
        return FOUND


def groups() -> list[Group]:
    """Time per command, in one long plan and in plans of one command."""
    return [
        Group("plan_overhead", "one plan of many commands, per command", _long),
        Group("plan_overhead", "many plans of one command, per command", _short),
    ]


def _plan(commands: int) -> Plan[int]:
    found = 0
    for number in range(commands):
        result = yield Call("people", "find_one", ({"_id": number},), {}, writes=False)
        found += result["_id"]
    return found


def _runners(context: Context) -> tuple[ConstantRunner, ConstantAsyncRunner]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    other: AsyncMongoClient[Any] = AsyncMongoClient(context.uri)
    context.stack.callback(lambda: context.wait(other.close()))
    return ConstantRunner(client["treadle_benchmarks"]), ConstantAsyncRunner(other["treadle_benchmarks"])


def _contenders(blocking: Any, asynchronous: Any, commands: int) -> list[Contender]:
    def check(found: int) -> None:
        assert commands == found, f"{found} of {commands} commands were performed"

    def prepare() -> None:
        return None

    return [
        Contender("Runner", prepare, blocking, operations=commands, goal=GOAL, check=check),
        Contender("AsyncRunner", prepare, asynchronous, operations=commands, goal=GOAL, check=check),
    ]


def _long(context: Context) -> list[Contender]:
    commands = context.scale(COMMANDS, COMMANDS_QUICK)
    runner, async_runner = _runners(context)

    def blocking(_: None) -> int:
        return runner.run(_plan(commands))

    async def asynchronous(_: None) -> int:
        return await async_runner.run(_plan(commands))

    return _contenders(blocking, asynchronous, commands)


def _short(context: Context) -> list[Contender]:
    commands = context.scale(COMMANDS, COMMANDS_QUICK)
    runner, async_runner = _runners(context)

    def blocking(_: None) -> int:
        return sum([runner.run(_plan(1)) for _ in range(commands)])

    async def asynchronous(_: None) -> int:
        return sum([await async_runner.run(_plan(1)) for _ in range(commands)])

    return _contenders(blocking, asynchronous, commands)
