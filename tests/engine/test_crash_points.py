"""Every public write, with a fault at every one of its commands, on a replica set.

The server's fail point closes the connection or refuses a command; a proxy
loses replies of commands that were done. Whatever happened, after `recover`
what was acknowledged is there once, what raised is there once or not at all,
and every maintained value equals naive recomputation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import bson
import pytest
from pymongo import MongoClient, common
from pymongo.errors import PyMongoError

from tests import faults, shop, victim
from tests.shop import FAN_OUTS, MODELS, SCENARIOS, SESSIONS, Customer, Scenario, Shop
from tests.support import shared_server
from treadle import DataError, Store
from treadle.server.local import LocalServer

pytestmark = pytest.mark.heavy

APP = "crash-points"
COMMANDS_MAX = 300
ALL = os.environ.get("TREADLE_CRASH_POINTS") == "all"
# For other servers: every command that is sent is struck there too, by one fault or another.
FEW, FEW_STEP = os.environ.get("TREADLE_CRASH_POINTS") == "few", 12
ALL_SCENARIOS = SCENARIOS + SESSIONS + FAN_OUTS
FAN_OUT_NAMES = {scenario.name for scenario in FAN_OUTS}


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong at one command, by the fail point or by the proxy."""

    name: str
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    times: int = 1
    commands: tuple[str, ...] = tuple(faults.COMMANDS)
    proxy: str = ""
    # Only each n-th command, a different one of n in each scenario; all with TREADLE_CRASH_POINTS=all.
    step: int = 1


COMMIT = ("commitTransaction",)
FAULTS = [
    Fault("connection-closed", {"closeConnection": True}),
    # The driver retries once by itself; here that fails too.
    Fault("connection-closed-twice", {"closeConnection": True}, times=2, step=8),
    Fault("conflict", {"errorCode": 112, "errorLabels": ["TransientTransactionError"]}, step=12),
    Fault("conflict-unlabelled", {"errorCode": 112, "errorLabels": []}, step=14),
    Fault("shutting-down", {"errorCode": 91, "errorLabels": ["RetryableWriteError"]}, times=2, step=14),
    Fault("interrupted", {"errorCode": 11600, "errorLabels": ["RetryableWriteError"]}, step=14),
    Fault("reply-lost", proxy="drop_reply"),
    Fault("reply-lost-twice", proxy="drop_reply", times=2, step=9),
    Fault("request-lost", proxy="close_before", step=14),
]
COMMIT_FAULTS = [
    Fault("commit-closed-thrice", {"closeConnection": True}, times=3, commands=COMMIT),
    Fault("commit-reply-lost-thrice", proxy="drop_reply", times=3, commands=COMMIT),
    Fault("commit-timed-out", {"writeConcernError": {"code": 64, "errmsg": "waiting timed out"}}, 2, COMMIT),
    Fault("commit-stepping-down", {"writeConcernError": {"code": 91, "errmsg": "shutdown"}}, 1, COMMIT),
    Fault("commit-unsatisfiable", {"writeConcernError": {"code": 100, "errmsg": "too few"}}, 1, COMMIT),
    Fault("commit-refused", {"errorCode": 20, "errorLabels": []}, 1, COMMIT),
]


class Bench:
    """A shop on a server with faults, one store through a client that meets them."""

    def __init__(self, server: LocalServer, proxy: faults.Proxy) -> None:
        self.server = server
        self.proxy = proxy
        self.client: MongoClient[Any] = MongoClient(server.uri)
        self.heard = {"": faults.Heard(), "proxy": faults.Heard()}
        uris = {"": f"{server.uri}&serverMonitoringMode=poll", "proxy": proxy.uri}
        self.clients = {
            way: MongoClient[Any](uri, event_listeners=[self.heard[way]], appname=APP)
            for way, uri in uris.items()
        }
        self.shop = Shop(self.client["crash"])
        # By the way to the server, and by whether every fan-out is a large one.
        self.stores = {
            (way, small): Store(client["crash"], MODELS, limits=shop.SMALL if small else None)
            for way, client in self.clients.items()
            for small in (False, True)
        }
        for store in self.stores.values():
            store.recover()
        self.after: dict[str, Any] = {}
        self.points = 0
        self._verified: set[bytes] = set()

    def close(self) -> None:
        for client in [self.client, *self.clients.values()]:
            client.close()

    def owned_after(self, scenario: Scenario) -> Any:
        """What callers own after the write, without any fault."""
        if scenario.name not in self.after:
            self.shop.reset()
            with contextlib.suppress(DataError):
                scenario.act(self.stores["", scenario.name in FAN_OUT_NAMES])
            self.after[scenario.name] = shop.owned(shop.stored(self.client["crash"]))
            self.check(acknowledged=not scenario.refused, scenario=scenario)
        return self.after[scenario.name]

    def check(self, *, acknowledged: bool, scenario: Scenario) -> None:
        """Nothing lost, nothing doubled, nothing stale, nothing still owed."""
        state = shop.stored(self.client["crash"])
        own, after = shop.owned(state), self.after[scenario.name]
        if acknowledged:
            assert after == own
        else:
            assert own in (shop.owned(self.shop.beginning), after)
        assert [] == shop.wrong(state)
        assert [] == self.shop.intents()
        # Verification depends on what is stored alone, so that the same state need not be verified twice.
        for documents in state.values():
            for document in documents:
                document.get("_treadle", {}).pop("n", None)
        fingerprint = bson.encode(state)
        if fingerprint not in self._verified:
            assert [] == self.stores["", False].verify()
            self._verified.add(fingerprint)

    def arm(self, fault: Fault, skip: int) -> AbstractContextManager[Any]:
        """Let the fault happen at the command after `skip` others."""
        if fault.proxy:
            strike: Callable[..., AbstractContextManager[Any]] = getattr(self.proxy, fault.proxy)
            return strike(skip, names=fault.commands, times=fault.times)
        return faults.fail_point(
            self.client,
            self.heard[""],
            skip=skip,
            times=fault.times,
            app=APP,
            commands=fault.commands,
            **fault.data,
        )

    def strike(self, scenario: Scenario, fault: Fault, skip: int) -> bool:
        """Perform the write with the fault after `skip` commands; whether the fault was met."""
        way = "proxy" if fault.proxy else ""
        store, heard = self.stores[way, scenario.name in FAN_OUT_NAMES], self.heard[way]
        self.shop.reset()
        heard.clear()
        acknowledged = False
        with self.arm(fault, skip):
            try:
                scenario.act(store)
                acknowledged = True
            except (PyMongoError, DataError):
                pass
            met = sum(name in fault.commands for name in heard.names) > skip
        if not met:
            assert acknowledged is not scenario.refused
        # A transaction that nobody ended would keep its locks for three seconds; other tests wait for that.
        self.client.admin.command({"killAllSessions": []})
        store.recover()
        self.check(acknowledged=acknowledged, scenario=scenario)
        self.points += met
        return met

    def strike_everywhere(self, scenario: Scenario, fault: Fault) -> int:
        """The same fault at each command in turn, until the write no longer meets it; how many there were."""
        self.owned_after(scenario)
        before = self.points
        step = 1 if ALL else max(fault.step, scenario.step) * (FEW_STEP if FEW else 1)
        first = (ALL_SCENARIOS.index(scenario) + len(fault.name)) % step
        for skip in range(first, COMMANDS_MAX, step):
            if not self.strike(scenario, fault, skip):
                return self.points - before
        raise AssertionError(f"{scenario.name} sends more than {COMMANDS_MAX} commands")


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Generator[Bench]:
    """One server and one shop for the whole file; says at the end how many crash points were tried."""
    # The driver looks for a lost server twice a second; a crash point must not take that long.
    interval, common.MIN_HEARTBEAT_INTERVAL = common.MIN_HEARTBEAT_INTERVAL, 0.005
    with shared_server(transactionLifetimeLimitSeconds=3) as server, faults.Proxy(server) as proxy:
        made = Bench(server, proxy)
        yield made
        made.close()
    common.MIN_HEARTBEAT_INTERVAL = interval


def names(cases: list[Any]) -> Any:
    return [case.name for case in cases]


@pytest.mark.parametrize("fault", FAULTS, ids=names(FAULTS))
@pytest.mark.parametrize("scenario", SCENARIOS + SESSIONS, ids=names(SCENARIOS + SESSIONS))
def test_a_fault_at_any_command_leaves_nothing_wrong(bench, scenario, fault, tried):
    """Lost connections, refusals and lost replies, at each command of each public write."""
    tried(bench.strike_everywhere(scenario, fault))


@pytest.mark.parametrize("fault", FAULTS, ids=names(FAULTS))
@pytest.mark.parametrize("scenario", FAN_OUTS, ids=names(FAN_OUTS))
def test_a_fault_at_any_command_of_a_large_fan_out_leaves_nothing_wrong(bench, scenario, fault, tried):
    """The copies are made after the transaction, chunk by chunk; recovery finishes them."""
    tried(bench.strike_everywhere(scenario, fault))


@pytest.mark.parametrize(
    ("scenario", "fault"),
    [
        pytest.param(scenario, fault, id=f"{scenario.name}-{fault.name}")
        for number, scenario in enumerate(SCENARIOS + SESSIONS)
        for fault in COMMIT_FAULTS
        if ALL or (number + COMMIT_FAULTS.index(fault)) % 3 == 0
    ],
)
def test_a_commit_whose_outcome_is_unknown_counts_once(bench, scenario, fault, tried):
    """The commit's reply is lost again and again, or says that it may not have been replicated."""
    tried(bench.strike_everywhere(scenario, fault))


# -- several writers in one transaction ---------------------------------------------------------

WRITERS = 8
GROUP_POINTS_MAX = 40
GROUP_FAULTS = [
    Fault("connection-closed-twice", {"closeConnection": True}, times=2, step=2),
    Fault("conflict-unlabelled", {"errorCode": 112, "errorLabels": []}, step=2),
    Fault("commit-unsatisfiable", {"writeConcernError": {"code": 100, "errmsg": "too few"}}, 1, COMMIT),
    Fault("commit-reply-lost-thrice", proxy="drop_reply", times=3, commands=COMMIT),
]
# After a fan-out its intent is deleted; nothing else here sends this command.
CLEARING_REFUSED = Fault("clearing-refused", {"errorCode": 112, "errorLabels": []}, 1, ("delete",))


def count_visits(bench: Bench, fault: Fault, skip: int, small: bool) -> tuple[int, bool]:
    """Writers who rename one customer and count their visits, all at once: how many heard of success."""
    way = "proxy" if fault.proxy else ""
    store, heard = bench.stores[way, small], bench.heard[way]
    start_line = threading.Barrier(WRITERS)
    acknowledged: list[int] = []

    def visit(number: int) -> None:
        start_line.wait()
        with contextlib.suppress(PyMongoError):
            store.update(Customer, 1, {"$set": {"name": f"Ann {number}"}, "$inc": {"visits": 1}})
            acknowledged.append(number)

    heard.clear()
    with bench.arm(fault, skip):
        threads = [threading.Thread(target=visit, args=(number,)) for number in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        met = sum(name in fault.commands for name in heard.names) > skip
    return len(acknowledged), met


def strike_group(bench: Bench, fault: Fault, small: bool) -> int:
    """Concurrent writers with the fault at each command in turn; how many crash points there were."""
    points = 0
    for skip in range(0, GROUP_POINTS_MAX, 1 if ALL else fault.step):
        bench.shop.reset()
        acknowledged, met = count_visits(bench, fault, skip, small)
        if not met:
            break
        points += 1
        bench.client.admin.command({"killAllSessions": []})
        bench.stores["", small].recover()
        state = shop.stored(bench.client["crash"])
        visits = state["customers"][0]["visits"]
        assert acknowledged <= visits <= WRITERS, f"{acknowledged} heard of success; skip {skip}"
        assert [] == shop.wrong(state)
        assert [] == bench.shop.intents()
    assert points > 0
    return points


@pytest.mark.parametrize("fault", GROUP_FAULTS, ids=names(GROUP_FAULTS))
def test_writes_that_share_a_transaction_count_once(bench, fault, tried):
    """What was committed together is not repeated one by one because of a fault."""
    tried(strike_group(bench, fault, small=False))


@pytest.mark.parametrize(
    "fault", [*GROUP_FAULTS, CLEARING_REFUSED], ids=names([*GROUP_FAULTS, CLEARING_REFUSED])
)
def test_writes_that_share_a_large_fan_out_count_once(bench, fault, tried):
    """A fault in the copying after the shared commit must not make the others repeat what was committed."""
    tried(strike_group(bench, fault, small=True))


# -- kill -9 -----------------------------------------------------------------------------------------

# In the middle of a transaction its locks stay for three seconds; these are awaited all at once.
KILLS = [
    ("insert-review", 3, False),
    ("insert-order", 5, False),
    ("update-customer", 6, False),
    ("delete-customer-cascades", 9, False),
    ("with-transaction", 8, False),
    *[("fan-out-customer", skip, True) for skip in range(4, 40, 4)],
    *[("fan-out-product", skip, True) for skip in (9, 13, 17)],
]


def test_kill_9_inside_a_transaction_or_between_chunks(bench, tried):
    """Another process's Store finishes what was committed, and nothing is there of what was not."""
    victim.prepare()
    shops = [Shop(bench.client[f"killed_{number}"]) for number in range(len(KILLS))]
    for each, (name, skip, small) in zip(shops, KILLS, strict=True):
        uri, database = bench.server.uri, each.database.name
        assert victim.kill(uri, database, name, skip, faults.COMMANDS, small), f"{name} ended before {skip}"
    for each, (name, skip, _) in zip(shops, KILLS, strict=True):
        after = bench.owned_after(shop.BY_NAME[name])
        store = Store(each.database, MODELS)
        store.recover()
        state = shop.stored(each.database)
        assert shop.owned(state) in (shop.owned(each.beginning), after), f"{name} at {skip}"
        assert [] == shop.wrong(state), f"{name} at {skip}"
        assert [] == store.verify()
        assert [] == each.intents()
    tried(len(KILLS))


def test_documents_of_a_killed_client_can_be_written_again(bench):
    """The dead transaction keeps its locks until the server ends it; a write waits for that, and is done."""
    victim.prepare()
    killed = Shop(bench.client["killed_again"])
    assert victim.kill(bench.server.uri, "killed_again", "update-customer", 8, faults.COMMANDS)
    store = Store(killed.database, MODELS)
    store.update(Customer, 1, {"$set": {"name": "Eve"}, "$inc": {"visits": 1}})
    state = shop.stored(killed.database)
    assert (1, "Eve") == (state["customers"][0]["visits"], state["customers"][0]["name"])
    assert [] == shop.wrong(state)
    assert [] == store.verify()
