"""Workers, rebuilds and the server itself killed with kill -9, while others write: nothing drifts.

The processes are real, and so are the signals. Writers are plain PyMongo in
processes of their own. How many kills there were, how long take-overs and
convergence took is said at the end.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
from pymongo import MongoClient, WriteConcern
from pymongo.errors import PyMongoError

from tests import streamed
from tests.kit import processes
from tests.kit.tiers import IS_FULL
from tests.streamed import KEYS, ROLLED
from tests.support import long_transactions
from treadle import Limits, Store
from treadle.server import local as server

pytestmark = pytest.mark.heavy

SHOP = "tests.streamed:ROLLED"
WAIT_SECONDS_MAX = 40.0
KILLS_OF_WORKERS, KILLS_OF_REBUILDS, KILLS_OF_SCHEDULES = (45, 20, 20) if IS_FULL else (6, 3, 3)
LIFE_SECONDS = (0.1, 0.4)
# Each look at what is due is a day later than the one before.
DAYS = itertools.count()
DEADLY = ("insert", "update", "delete", "findAndModify", "commitTransaction", "getMore")


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest) -> Generator[dict[str, list[float]]]:
    """What was counted and measured; shown at the end of the file."""
    noted: dict[str, list[float]] = {}
    yield noted
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        kills = sum(noted.pop("kills", []))
        sys.stdout.write(f"\n{kills:.0f} processes killed in {request.module.__name__}\n")
        for name, values in noted.items():
            values.sort()
            p95 = values[min(len(values) - 1, int(len(values) * 0.95))]
            sys.stdout.write(
                f"  {name}: median {statistics.median(values):.2f} s, p95 {p95:.2f} s, most {values[-1]:.2f} s "
                f"of {len(values)}\n"
            )


@pytest.fixture
def shop(database: Any) -> Generator[Store]:
    store = Store(database, ROLLED)
    store.setup()
    for number, key in enumerate(KEYS):
        database["products"].insert_one(streamed.product(key, number))
    streamed.Writer(database, 99, numbers=60).write(150)
    yield store
    # Rebuilds that were killed have no successor; the server would keep what they locked for half a minute.
    database.client.admin.command({"killAllSessions": []})


def wait_for(condition: Callable[[], Any], seconds: float = WAIT_SECONDS_MAX) -> float:
    """Wait until something holds; how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it does not come"
        time.sleep(0.005)
    return time.monotonic() - start


def settled(store: Store, database: Any) -> None:
    """After a last look by a worker nothing is wrong, neither for `verify` nor for the oracle."""
    store.worker().run_until_idle()
    store.run_due(now=dt.datetime(3000, 1, 1, tzinfo=dt.UTC) + dt.timedelta(days=next(DAYS)))
    assert [] == store.verify()
    assert [] == streamed.wrong(database)


def leader(database: Any) -> Any:
    """Who holds the lease; None if nobody does."""
    return (database["treadle.leases"].find_one({"_id": "worker"}) or {}).get("owner") or None


class Probe(threading.Thread):
    """Inserts a review of a product of its own from time to time, and sees how long its count takes."""

    def __init__(self, database: Any) -> None:
        super().__init__()
        self.database = database.with_options(write_concern=WriteConcern("majority"))
        self.taken: list[float] = []
        self.done = threading.Event()

    def run(self) -> None:
        key = {"site": "probe", "number": 1}
        self.database["products"].insert_one(streamed.product(key, 1))
        for number in range(10_000):
            if self.done.is_set():
                return
            start = time.monotonic()
            review = {"_id": 10_000 + number, "productKey": key, "starRating": 1, "body": "p"}
            self.database["reviews"].insert_one(review)
            while self._count(key) < number + 1 and time.monotonic() < start + WAIT_SECONDS_MAX:
                time.sleep(0.01)
            self.taken.append(time.monotonic() - start)

    def _count(self, key: Any) -> int:
        found = self.database["products"].find_one({"_id": key}) or {}
        return int(found.get("summary", {}).get("review_count", 0))

    def __enter__(self) -> Probe:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.done.set()
        self.join(WAIT_SECONDS_MAX)


# -- kill -9 ---------------------------------------------------------------------------------------------


def kill_again_and_again(number: int, seed: int, *start: Any) -> None:
    """Let a process live for a moment, and the next one after it."""
    lives = random.Random(seed)
    for _ in range(number):
        process = processes.start(*start)
        time.sleep(lives.uniform(*LIFE_SECONDS))
        assert -signal.SIGKILL == processes.end(process)


def test_killed_workers_and_rebuilds_leave_no_drift(server, database, shop, said):
    """Four writers go on meanwhile, and a probe measures how long its own writes take to show."""
    what = (SHOP, server.uri, database.name)
    lanes = [
        threading.Thread(target=kill_again_and_again, args=(KILLS_OF_WORKERS, 1, processes.work, *what)),
        threading.Thread(target=kill_again_and_again, args=(KILLS_OF_REBUILDS, 2, processes.rebuild, *what)),
        threading.Thread(target=kill_again_and_again, args=(KILLS_OF_SCHEDULES, 3, processes.run_due, *what)),
    ]
    with (
        processes.writers(server.uri, database.name, 7.0 if IS_FULL else 4.0, pause=0.005),
        Probe(database) as probe,
    ):
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        # One that lives shows what the others left.
        last = processes.start(processes.work, *what)
        time.sleep(1.0)
    said.setdefault("kills", []).append(KILLS_OF_WORKERS + KILLS_OF_REBUILDS + KILLS_OF_SCHEDULES)
    said.setdefault("convergence while workers are killed", []).extend(probe.taken)
    start = time.monotonic()
    wait_for(lambda: not streamed.wrong(database))
    said.setdefault("drift gone after the last writer", []).append(time.monotonic() - start)
    assert 0 == processes.end(last, signal.SIGTERM)
    settled(shop, database)


def test_a_worker_killed_at_any_command_leaves_no_drift(server, database, shop, said):
    """Just before each command in turn, transactions included, until one comes to its end."""
    writer = streamed.Writer(database, 7, numbers=60)
    what = (processes.catch_up, SHOP, database.name)
    settled(shop, database)
    step = 1 if IS_FULL else 3
    for skip in range(0, 60, step):
        # The writer may meet what the last one had locked; this one lets go of it.
        process = processes.start(processes.die_before, server.uri, DEADLY, skip, *what)
        writer.write(15)
        process.join(WAIT_SECONDS_MAX)
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:
            break
    else:
        pytest.fail("no worker came to its end")
    assert skip >= 10
    said.setdefault("kills", []).append(skip // step)
    settled(shop, database)


def test_a_successor_lets_go_of_what_a_killed_worker_had_locked(server, database, shop):
    """It was killed inside a transaction, which the server would keep open."""
    settled(shop, database)
    database["reviews"].insert_one({"_id": 1000, "productKey": KEYS[0], "starRating": 5, "body": ""})
    with long_transactions(database.client):
        what = (processes.catch_up, SHOP, database.name)
        assert processes.kill_before(server.uri, ["commitTransaction"], 0, *what)
    # Whoever takes the lease ends the session of whoever had it; the server itself would take ten minutes.
    start = time.monotonic()
    settled(shop, database)
    database["products"].update_one({"_id": KEYS[0]}, {"$set": {"unitPrice": 50}})
    assert time.monotonic() - start < 3 * WAIT_SECONDS_MAX
    settled(shop, database)


# -- taking over ---------------------------------------------------------------------------------------


def test_another_process_takes_over_at_once_after_kill_9(server, database, shop, said):
    """It stands by on the same host, and can tell that the leader has ended."""
    what = (processes.work, SHOP, server.uri, database.name)
    current = processes.start(*what)
    wait_for(lambda: leader(database))
    for _ in range(4 if IS_FULL else 2):
        waiting = processes.start(*what)
        time.sleep(1.0)
        owner = leader(database)
        assert f":{current.pid}:" in owner
        assert -signal.SIGKILL == processes.end(current)
        taken = wait_for(lambda waiting=waiting: f":{waiting.pid}:" in (leader(database) or ""))
        assert taken < Limits().worker_lease_seconds
        said.setdefault("take-over on one host", []).append(taken)
        said.setdefault("kills", []).append(1)
        current = waiting
    assert 0 == processes.end(current, signal.SIGTERM)
    settled(shop, database)


def test_another_host_takes_over_when_the_lease_has_run_out(server, database, shop, said):
    """Nobody there can tell whether the leader has ended; the server's clock decides."""
    lease = 2.0
    options = {"limits": Limits(worker_lease_seconds=lease), "elsewhere": True}
    first = processes.start(processes.work, SHOP, server.uri, database.name, **options)
    wait_for(lambda: leader(database))
    second = processes.start(processes.work, SHOP, server.uri, database.name, **options)
    time.sleep(lease * 1.5)
    # Renewed for as long as it lives.
    assert f":{first.pid}:" in leader(database)
    processes.end(first)
    taken = wait_for(lambda: f":{second.pid}:" in (leader(database) or ""))
    said.setdefault("take-over from another host, lease of 2 s", []).append(taken)
    said.setdefault("kills", []).append(1)
    assert taken < lease + 5 * Limits().worker_standby_seconds
    assert 0 == processes.end(second, signal.SIGTERM)
    settled(shop, database)


@pytest.mark.parametrize("clock_seconds", [pytest.param(3600.0, marks=pytest.mark.all), -3600.0])
def test_a_wrong_clock_neither_takes_a_lease_nor_holds_it_too_long(server, database, shop, clock_seconds):
    """A client whose clock is an hour off stands by like any other, leads, and is followed."""
    lease = 1.0
    options = {"limits": Limits(worker_lease_seconds=lease), "elsewhere": True}
    right = processes.start(processes.work, SHOP, server.uri, database.name, **options)
    wait_for(lambda: leader(database))
    wrong = processes.start(
        processes.work, SHOP, server.uri, database.name, **options, clock_seconds=clock_seconds
    )
    time.sleep(1.5 * lease)
    assert f":{right.pid}:" in leader(database)
    processes.end(right)
    assert (
        wait_for(lambda: f":{wrong.pid}:" in (leader(database) or ""))
        < lease + 5 * Limits().worker_standby_seconds
    )
    database["reviews"].insert_one({"_id": 1000, "productKey": KEYS[0], "starRating": 5, "body": ""})
    wait_for(lambda: not streamed.wrong(database))
    third = processes.start(processes.work, SHOP, server.uri, database.name, **options)
    time.sleep(1.5 * lease)
    assert f":{wrong.pid}:" in leader(database)
    processes.end(wrong)
    assert (
        wait_for(lambda: f":{third.pid}:" in (leader(database) or ""))
        < lease + 5 * Limits().worker_standby_seconds
    )
    assert 0 == processes.end(third, signal.SIGTERM)
    settled(shop, database)


def test_a_leader_that_wakes_up_after_its_lease_does_no_harm(server, database, shop, said):
    """Stopped in the middle of its work, replaced, and woken again: fenced, nothing wrong."""
    options = {"limits": Limits(worker_lease_seconds=0.6), "elsewhere": True}
    workers = [processes.start(processes.work, SHOP, server.uri, database.name, **options) for _ in range(2)]
    wait_for(lambda: leader(database))
    with processes.writers(server.uri, database.name, 6.0 if IS_FULL else 3.0, count=2, pause=0.005):
        for _ in range(4 if IS_FULL else 2):
            owner = leader(database)
            sleeper = next(each for each in workers if f":{each.pid}:" in owner)
            os.kill(sleeper.pid, signal.SIGSTOP)
            taken = wait_for(lambda owner=owner: leader(database) not in (owner, None))
            said.setdefault("take-over from a sleeper, lease of 0.6 s", []).append(taken)
            time.sleep(0.2)
            os.kill(sleeper.pid, signal.SIGCONT)
            time.sleep(0.3)
            assert sleeper.is_alive()
    wait_for(lambda: not streamed.wrong(database))
    assert [0, 0] == [processes.end(each, signal.SIGTERM) for each in workers]
    settled(shop, database)


# -- the server itself ---------------------------------------------------------------------------------


def test_a_killed_server_loses_nothing_that_was_acknowledged(tmp_path, said):
    """mongod is killed and started again on the same data; the worker resumes by itself."""
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(server.start(tmp_path / "data"))
        client: MongoClient[Any] = stack.enter_context(MongoClient(running.uri))
        database = client["killed"]
        store = Store(database, ROLLED)
        store.setup()
        for number, key in enumerate(KEYS):
            database["products"].insert_one(streamed.product(key, number))
        worker = processes.start(processes.work, SHOP, running.uri, "killed")
        wait_for(lambda: leader(database))
        acknowledged: list[Any] = []
        done = threading.Event()

        def insert() -> None:
            reviews = database["reviews"].with_options(write_concern=WriteConcern("majority", j=True))
            with MongoClient[Any](running.uri):
                number = 5000
                while not done.is_set():
                    number += 1
                    review = {
                        "_id": number,
                        "productKey": dict(KEYS[number % 6]),
                        "starRating": 3,
                        "body": "",
                    }
                    with contextlib.suppress(PyMongoError):
                        reviews.insert_one(review)
                        acknowledged.append(number)

        writer = threading.Thread(target=insert)
        writer.start()
        try:
            time.sleep(0.7)
            before = len(acknowledged)
            os.kill(running.pid, signal.SIGKILL)
            stack.enter_context(server.start(tmp_path / "data"))
            said.setdefault("kills", []).append(1)
            wait_for(lambda: len(acknowledged) > before + 20)
        finally:
            done.set()
            writer.join()
        said.setdefault("drift gone after the server was killed", []).append(
            wait_for(lambda: not streamed.wrong(database))
        )
        stored = {each["_id"] for each in database["reviews"].find({}, {"_id": 1})}
        assert set() == set(acknowledged) - stored
        assert worker.is_alive()
        assert 0 == processes.end(worker, signal.SIGTERM)
        settled(store, database)


# -- adopting a pattern ----------------------------------------------------------------------------------

ADOPTED = int(os.environ.get("TREADLE_ADOPTED", "30000"))


@pytest.mark.all
def test_a_pattern_is_adopted_while_writers_go_on(server, database, said):
    """A large collection from before, a rebuild, then the worker: no gap between them."""
    products = [{"site": "many", "number": number} for number in range(300)]
    database["products"].insert_many([streamed.product(key, 1) for key in [*products, *KEYS]])
    rows = [
        {"_id": 100_000 + number, "productKey": products[number % 300], "starRating": number % 5, "body": "x"}
        for number in range(ADOPTED)
    ]
    database["reviews"].insert_many(rows)
    store = Store(database, ROLLED)
    store.setup()
    start = time.monotonic()
    done = threading.Event()

    def move() -> None:
        order = random.Random(5)
        while not done.is_set():
            number = 100_000 + order.randrange(ADOPTED)
            database["reviews"].update_one({"_id": number}, {"$set": {"productKey": order.choice(products)}})
            database["reviews"].delete_one({"_id": 100_000 + order.randrange(ADOPTED)})

    mover = threading.Thread(target=move)
    mover.start()
    with processes.writers(server.uri, database.name, 4.0, count=2, pause=0.01):
        store.rebuild()
        said.setdefault(f"rebuild of {ADOPTED:,} under writers", []).append(time.monotonic() - start)
        worker = processes.start(processes.work, SHOP, server.uri, database.name)
    done.set()
    mover.join()
    taken = wait_for(lambda: not store.worker().lag().events)
    said.setdefault("nothing left to read after the adoption", []).append(taken)
    assert 0 == processes.end(worker, signal.SIGTERM)
    store.worker().run_until_idle()
    store.run_due(now=dt.datetime(3000, 1, 1, tzinfo=dt.UTC) + dt.timedelta(days=next(DAYS)))
    assert [] == store.verify()
