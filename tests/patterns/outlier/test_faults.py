"""Outlier arrays under faults: lost replies, refusals and kill -9, at every command.

Whatever happened, after `recover` what was acknowledged is there once, what
raised is there once or not at all, and every invariant holds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import pytest
from pymongo import MongoClient, common
from pymongo.errors import PyMongoError

from tests import faults, victim
from tests.members import LIMIT, MODELS, Plain, items, wrong
from tests.support import lacking, shared_server
from treadle import DataError, Store
from treadle.server.local import LocalServer

pytestmark = pytest.mark.heavy

APP = "outlier"
DATABASE = "outliers"
COMMANDS_MAX = 60
KEYS = (1, 2)
CONTEXT = multiprocessing.get_context("forkserver")


class Case(NamedTuple):
    """A write, and how many items there are before it."""

    name: str
    begin: int
    act: Callable[[Store, Any], Any]


def array(store: Store, model: Any) -> Any:
    return store.array(model, "members", 1)


CASES = [
    Case("append-ordinary", LIMIT - 1, lambda store, model: array(store, model).append(100)),
    Case("append-spills", LIMIT, lambda store, model: array(store, model).append(100)),
    Case("append-to-page", LIMIT + 1, lambda store, model: array(store, model).append(100)),
    Case("append-new-page", LIMIT + 3, lambda store, model: array(store, model).append(100)),
    Case("extend", LIMIT + 1, lambda store, model: array(store, model).extend(range(100, 110))),
    Case("remove-embedded", LIMIT + 2, lambda store, model: array(store, model).remove(0)),
    Case("remove-from-page", LIMIT + 3, lambda store, model: array(store, model).remove(LIMIT + 1)),
    Case("remove-last-overflow", LIMIT + 1, lambda store, model: array(store, model).remove(LIMIT)),
    Case("insert-long", -1, lambda store, model: store.insert(model(id=1, members=range(100, 110)))),
    Case("delete", LIMIT + 4, lambda store, model: store.delete(model, 1)),
    Case("replace", LIMIT + 2, lambda store, model: store.replace(model(id=1, members=[7]))),
    Case("adopt", -20, lambda store, model: store.rebuild(model)),
]
BY_NAME = {case.name: case for case in CASES}
# Items come back here: two were removed from the embedded part before.
REFILL = Case("remove-and-refill", LIMIT + 9, lambda store, model: array(store, model).remove(2))
BY_NAME[REFILL.name] = REFILL
CASES.append(REFILL)


def reset(database: Any, store: Store, case: Case, model: Any) -> None:
    """The beginning of a case."""
    name = model.__treadle__.collection
    for each in (name, f"{name}_overflow", "treadle.intents"):
        database[each].delete_many({})
    store.insert(model(id=2, members=range(6)))
    if case.begin < -1:
        database[name].insert_one({"_id": 1, "members": list(range(-case.begin))})
    elif case.begin >= 0:
        store.insert(model(id=1, members=range(case.begin)))
    if case is REFILL:
        for number in (0, 1):
            store.array(model, "members", 1).remove(number)


def state(database: Any, model: Any) -> list[Any]:
    return items(database, model, 1)


class Bench:
    """One server; a store through the fail point's client and one through the proxy."""

    def __init__(self, server: LocalServer, proxy: faults.Proxy) -> None:
        self.server, self.proxy = server, proxy
        self.client: MongoClient[Any] = MongoClient(server.uri)
        self.database = self.client[DATABASE]
        self.heard = faults.Heard()
        self.struck = MongoClient[Any](proxy.uri, event_listeners=[self.heard], appname=APP)
        self.sound = Store(self.database, MODELS)
        self.sound.setup()
        self.store = Store(self.struck[DATABASE], MODELS)
        self.store.recover()
        self.points = 0

    def close(self) -> None:
        self.client.close()
        self.struck.close()

    def outcomes(self, case: Case, model: Any) -> tuple[list[Any], list[Any]]:
        """The items before and after the write, without any fault."""
        reset(self.database, self.sound, case, model)
        before = state(self.database, model)
        case.act(self.sound, model)
        return before, state(self.database, model)

    def check(self, model: Any, before: list[Any], after: list[Any], acknowledged: bool) -> None:
        found = state(self.database, model)
        assert found == after if acknowledged else found in (before, after)
        assert [] == [each for key in KEYS for each in wrong(self.database, model, key)]
        assert [] == list(self.database["treadle.intents"].find())

    def strike(self, case: Case, model: Any, fault: str) -> None:
        """The fault at each command in turn, until the write no longer meets it."""
        before, after = self.outcomes(case, model)
        for skip in range(COMMANDS_MAX):
            reset(self.database, self.sound, case, model)
            self.heard.clear()
            acknowledged = False
            with self._fault(fault, skip) as plan, contextlib.suppress(PyMongoError, DataError):
                case.act(self.store, model)
                acknowledged = True
            self.client.admin.command({"killAllSessions": []})
            self.store.recover()
            if case.name == "adopt":
                # What was not reached is reached by the next run.
                self.sound.rebuild(model)
            self.check(model, before, after, acknowledged)
            if not plan.struck:
                return
            self.points += 1
        raise AssertionError(f"{case.name} sends more than {COMMANDS_MAX} commands")

    @contextlib.contextmanager
    def _fault(self, fault: str, skip: int) -> Generator[Any]:
        kind, _, times = fault.partition("*")
        with getattr(self.proxy, kind)(skip, times=int(times or 1)) as plan:
            yield plan


@pytest.fixture(scope="module")
def bench() -> Generator[Bench]:
    interval, common.MIN_HEARTBEAT_INTERVAL = common.MIN_HEARTBEAT_INTERVAL, 0.005
    with shared_server(transactionLifetimeLimitSeconds=3) as server, faults.Proxy(server) as proxy:
        made = Bench(server, proxy)
        yield made
        made.close()
    common.MIN_HEARTBEAT_INTERVAL = interval


def pairs(faults: list[str]) -> list[Any]:
    """All models with all cases and faults would take long; each case meets each fault with one of them."""
    return [
        pytest.param(
            case,
            MODELS[(number + turn) % 4],
            fault,
            id=f"{case.name}-{MODELS[(number + turn) % 4].__name__}-{fault}",
        )
        for number, case in enumerate(CASES)
        for turn, fault in enumerate(faults)
    ]


@pytest.mark.parametrize(("case", "model", "fault"), pairs(["drop_reply", "drop_reply*2"]))
def test_a_fault_at_any_command_leaves_nothing_wrong(bench, case, model, fault, tried):
    before = bench.points
    bench.strike(case, model, fault)
    tried(bench.points - before)


# -- kill -9 -----------------------------------------------------------------------------------------


def perform(uri: str, case: str, number: int, skip: int) -> None:
    """Perform one case in a process that kills itself before one of its writing commands."""
    heard = faults.Heard()
    client: MongoClient[Any] = MongoClient(uri, event_listeners=[heard])
    store = Store(client[DATABASE], MODELS)
    store.recover()
    heard.clear()
    heard.before((*victim.WRITES, "commitTransaction"), skip, lambda: os.kill(os.getpid(), signal.SIGKILL))
    BY_NAME[case].act(store, MODELS[number])


@pytest.fixture(scope="module")
def fork_server() -> None:
    victim.prepare()


KILLED = ["append-spills", "remove-and-refill", "insert-long"]


@pytest.mark.parametrize("name", KILLED)
def test_kill_9_between_any_two_commands(bench, fork_server, name, tried):
    """The next Store, in another process, owes nothing and finds nothing wrong."""
    case = BY_NAME[name]
    number = KILLED.index(name) % 4
    model = MODELS[number]
    before, after = bench.outcomes(case, model)
    for skip in range(COMMANDS_MAX):
        reset(bench.database, bench.sound, case, model)
        process = CONTEXT.Process(target=perform, args=(bench.server.uri, name, number, skip))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        bench.client.admin.command({"killAllSessions": []})
        Store(bench.database, MODELS).recover()
        bench.check(model, before, after, acknowledged=process.exitcode == 0)
        if process.exitcode == 0:
            tried(skip)
            return


# -- without snapshots ---------------------------------------------------------------------------------


def test_an_iteration_that_would_pass_items_over_says_so(bench):
    """Items came back while it read."""
    reset(bench.database, bench.sound, Case("", 60, lambda store, model: None), Plain)
    own = lacking(Store(bench.database, MODELS), snapshots=False).array(Plain, "members", 1)
    reading = iter(own)
    next(reading)
    for number in range(3):
        own.remove(number)
    with pytest.raises(DataError) as moved:
        list(reading)
    assert "array-moved" == moved.value.code
