"""Every public write, with a fault at every one of its commands, on a replica set.

The server's fail point closes the connection or refuses a command; a proxy
loses replies of commands that were done. Whatever happened, after `recover`
what was acknowledged is there once, what raised is there once or not at all,
and every maintained value equals naive recomputation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import bson
import pytest
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tests import shop
from tests.kit import processes
from tests.kit.fault_sweep import ALL, FaultSweep, Stores, Write
from tests.kit.faults import CLOSED, COMMANDS, COMMIT, COMMIT_FAULTS, FAULTS, Fault
from tests.shop import FAN_OUTS, MODELS, SCENARIOS, SESSIONS, Customer, Scenario, Shop
from treadle import Store

pytestmark = pytest.mark.heavy


class Crashes:
    """The shop, its stores with large and with small bounds, and its scenarios as writes to sweep."""

    def __init__(self, sweep: FaultSweep) -> None:
        self.sweep = sweep
        self.stores = sweep.stores("crash", MODELS)
        self.shop = Shop(self.stores.database)
        self.small = self.stores.again(shop.SMALL)
        self._verified: set[bytes] = set()

    def stored(self) -> Any:
        return shop.stored(self.stores.database)

    def write(self, scenario: Scenario) -> Write:
        return Write(
            scenario.name,
            scenario.act,
            reset=self.shop.reset,
            read=lambda: shop.owned(self.stored()),
            check=self.check,
            refused=scenario.refused,
        )

    def stores_of(self, scenario: Scenario) -> Stores:
        return self.small if scenario in FAN_OUTS else self.stores

    def check(self, acknowledged: bool) -> None:
        """Nothing that Treadle maintains differs from naive recomputation, and `verify` agrees, if thinned now and then."""
        state = self.stored()
        assert [] == shop.wrong(state)
        # Verification depends on what is stored alone, so that the same state need not be verified twice.
        for documents in state.values():
            for document in documents:
                document.get("_treadle", {}).pop("n", None)
        fingerprint = bson.encode(state)
        if fingerprint not in self._verified:
            self._verified.add(fingerprint)
            # It takes as long as the write and its recovery together.
            if ALL or len(self._verified) % 4 == 0:
                assert [] == self.stores.sound.verify()

    def strike(self, scenario: Scenario, faults: list[Fault], *, every: int = 2) -> int:
        return self.sweep.strike(self.stores_of(scenario), self.write(scenario), faults, every=every)


@pytest.fixture(scope="module")
def crashes(fault_sweep: FaultSweep) -> Crashes:
    return Crashes(fault_sweep)


def names(cases: list[Any]) -> Any:
    return [case.name for case in cases]


@pytest.mark.parametrize("scenario", SCENARIOS + SESSIONS, ids=names(SCENARIOS + SESSIONS))
def test_a_fault_at_any_command_leaves_nothing_wrong(crashes, scenario, record_points):
    """Lost connections, refusals and lost replies, at each command of each public write."""
    record_points(crashes.strike(scenario, FAULTS))


@pytest.mark.parametrize("scenario", FAN_OUTS, ids=names(FAN_OUTS))
def test_a_fault_at_any_command_of_a_large_fan_out_leaves_nothing_wrong(crashes, scenario, record_points):
    """The copies are made after the transaction, chunk by chunk; recovery finishes them."""
    record_points(crashes.strike(scenario, FAULTS))


# Whatever a transaction holds, its commit is the same.
COMMITTING = (SCENARIOS + SESSIONS)[:: 1 if ALL else 3]


@pytest.mark.parametrize("scenario", COMMITTING, ids=names(COMMITTING))
def test_a_commit_whose_outcome_is_unknown_counts_once(crashes, scenario, record_points):
    """The commit's reply is lost again and again, or says that it may not have been replicated."""
    # Few of them harm a given write, so that each commit meets two of them, also if thinned.
    for faults in (COMMIT_FAULTS[::2], COMMIT_FAULTS[1::2]):
        record_points(crashes.strike(scenario, faults, every=1))


# -- several writers in one transaction ---------------------------------------------------------

WRITERS = 8
CONFLICT = {"errorCode": 112, "errorLabels": []}
GROUP_FAULTS = {
    "any-command": [
        Fault("connection-closed-twice", CLOSED, times=2),
        Fault("conflict-unlabelled", CONFLICT),
    ],
    "commit": [
        Fault("commit-unsatisfiable", {"writeConcernError": {"code": 100, "errmsg": "too few"}}, 1, COMMIT),
        Fault("commit-reply-lost-thrice", proxy="drop_reply", times=3, commands=COMMIT),
    ],
}
# After a fan-out its intent is deleted; nothing else here sends this command.
FAN_OUT_FAULTS = {**GROUP_FAULTS, "clearing": [Fault("clearing-refused", CONFLICT, 1, ("delete",))]}


def visit_all_at_once(store: Store) -> int:
    """Writers rename one customer and count their visits, all at once. Returns how many were acknowledged."""
    start_line = threading.Barrier(WRITERS)
    acknowledged: list[int] = []

    def visit(number: int) -> None:
        start_line.wait()
        with contextlib.suppress(PyMongoError):
            store.update(Customer, 1, {"$set": {"name": f"Ann {number}"}, "$inc": {"visits": 1}})
            acknowledged.append(number)

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(acknowledged)


def strike_group(crashes: Crashes, stores: Stores, faults: list[Fault]) -> int:
    """Concurrent writers with a fault at each command in turn. Returns how many were met."""
    sweep = crashes.sweep

    def attempt(fault: Fault, skip: int) -> bool:
        crashes.shop.reset()
        with sweep.arm(fault, skip) as is_met:
            acknowledged = visit_all_at_once(stores.behind(fault))
            met = is_met()
        sweep.end_sessions()
        stores.sound.recover()
        state = crashes.stored()
        assert acknowledged <= state["customers"][0]["visits"] <= WRITERS
        assert [] == shop.wrong(state)
        assert [] == stores.pending()
        return met

    # Eight writers send many commands, and few commits and deletes among them.
    every = 8 if faults[0].commands == COMMANDS else 1
    points = sweep.at_each_command("visits", faults, attempt, every=every)
    assert points > 0
    return points


@pytest.mark.parametrize("at", GROUP_FAULTS)
def test_writes_that_share_a_transaction_count_once(crashes, at, record_points):
    """What was committed together is not repeated one by one because of a fault."""
    record_points(strike_group(crashes, crashes.stores, GROUP_FAULTS[at]))


@pytest.mark.parametrize("at", FAN_OUT_FAULTS)
def test_writes_that_share_a_large_fan_out_count_once(crashes, at, record_points):
    """A fault in the copying after the shared commit must not make the others repeat what was committed."""
    record_points(strike_group(crashes, crashes.small, FAN_OUT_FAULTS[at]))


# -- kill -9 -----------------------------------------------------------------------------------------

# In the middle of a transaction its locks stay for three seconds; these are awaited all at once.
KILLS = [
    ("insert-review", 3, False),
    ("with-transaction", 8, False),
    ("fan-out-customer", 16, True),
    ("fan-out-product", 13, True),
]
if ALL:
    KILLS += [
        ("insert-order", 5, False),
        ("update-customer", 6, False),
        ("delete-customer-cascades", 9, False),
        *[("fan-out-customer", skip, True) for skip in range(4, 40, 4)],
        *[("fan-out-product", skip, True) for skip in (9, 17)],
    ]


def killed(client: MongoClient[Any], database: str, scenario: str, small: bool) -> Callable[[], Any]:
    """In a process of its own: one scenario."""
    store = Store(client[database], MODELS, limits=shop.SMALL if small else None)
    store.recover()
    return lambda: shop.BY_NAME[scenario].act(store)


def test_kill_9_inside_a_transaction_or_between_chunks(crashes, record_points):
    """Another process's Store finishes what was committed, and nothing is there of what was not."""
    sweep = crashes.sweep
    shops = [Shop(sweep.client[f"killed_{number}"]) for number in range(len(KILLS))]
    for each, (name, skip, small) in zip(shops, KILLS, strict=True):
        database = each.database.name
        was_killed = processes.kill_before(sweep.server.uri, COMMANDS, skip, killed, database, name, small)
        assert was_killed, f"{name} ended before {skip}"
    outcomes = {
        name: sweep.outcomes(crashes.stores_of(shop.BY_NAME[name]), crashes.write(shop.BY_NAME[name]))
        for name in {name for name, _, _ in KILLS}
    }
    for each, (name, skip, _) in zip(shops, KILLS, strict=True):
        store = Store(each.database, MODELS)
        store.recover()
        state = shop.stored(each.database)
        assert shop.owned(state) in outcomes[name], f"{name} at {skip}"
        assert [] == shop.wrong(state), f"{name} at {skip}"
        assert [] == store.verify()
        assert [] == each.intents()
    record_points(len(KILLS))


def test_documents_of_a_killed_client_can_be_written_again(crashes):
    """The dead transaction keeps its locks until the server ends it; a write waits for that, and is done."""
    sweep = crashes.sweep
    again = Shop(sweep.client["killed_again"])
    uri, scenario = sweep.server.uri, "update-customer"
    assert processes.kill_before(uri, COMMANDS, 8, killed, "killed_again", scenario, False)
    store = Store(again.database, MODELS)
    store.update(Customer, 1, {"$set": {"name": "Eve"}, "$inc": {"visits": 1}})
    state = shop.stored(again.database)
    assert (1, "Eve") == (state["customers"][0]["visits"], state["customers"][0]["name"])
    assert [] == shop.wrong(state)
    assert [] == store.verify()
