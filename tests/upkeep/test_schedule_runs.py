"""Scheduled runs: several runners, crashes, lost history, servers without change streams."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import random
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pytest
from bson.decimal128 import Decimal128
from pymongo import MongoClient

from tests.kit.tiers import IS_FULL
from tests.upkeep.daily_sales import (
    HOURLY,
    NOON,
    UTC,
    CategoryStats,
    Customer,
    DailySales,
    Item,
    Product,
    Review,
    Sale,
    at,
    raw,
    summaries,
)
from tests.upkeep.followed import without_former_states
from treadle import Count, Document, Limits, Max, Rollup, Store, UsageError
from treadle.upkeep import merging

# -- when the stream cannot tell ---------------------------------------------------------------------


def test_without_former_states_everything_is_computed_anew(store, database):
    database.sales.insert_many([raw(n, "1", 2026, 3, 1) for n in range(5)])
    store.run_due(now=NOON)
    without_former_states(database, "sales")
    database.sales.insert_one(raw(7, "1", 2026, 3, 1))
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert not ran.whole, "an insert needs no former state"
    database.sales.delete_one({"product_id": 3})
    (ran,) = store.run_due(now=NOON + 2 * HOURLY)
    assert "no former state" in ran.why
    assert {(n, 1): (1, 1) for n in (0, 1, 2, 4, 7)} == summaries(database)
    assert [] == store.verify()


def test_a_dropped_source_and_lost_history_are_noticed(store, database):
    database.sales.insert_many([raw(n, "1", 2026, 3, 1) for n in range(3)])
    store.run_due(now=NOON)
    database.sales.drop()
    database.sales.insert_one(raw(8, "1", 2026, 3, 1))
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert "drop" in ran.why
    assert {(8, 1): (1, 1)} == summaries(database)
    # A place that the server does not know any more.
    store.run_due(now=NOON + 2 * HOURLY)
    token = database["treadle.schedules"].find_one()["position"]["token"]["_data"]
    gone = {"token": {"_data": token[:10] + "00000000" + token[18:]}, "start": None}
    database["treadle.schedules"].update_one({}, {"$set": {"position": gone}})
    database.sales.insert_one(raw(9, "1", 2026, 3, 1))
    (ran,) = store.run_due(now=NOON + 3 * HOURLY)
    assert "history" in ran.why
    assert {(8, 1): (1, 1), (9, 1): (1, 1)} == summaries(database)
    assert [] == store.verify()


def test_too_many_changes_are_not_looked_at_one_by_one(run, store, database, constants):
    constants(schedule_dirty_max=3)
    store = run.store([Sale, DailySales])
    database.sales.insert_many([raw(1, "1", 2026, 3, 1)])
    store.run_due(now=NOON)
    database.sales.insert_many([raw(n, "1", 2026, 3, 1) for n in range(20)])
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert not ran.whole, "one window"
    database.sales.insert_many([raw(n, "1", 2026, 2, 1 + n) for n in range(20)])
    (ran,) = store.run_due(now=NOON + 2 * HOURLY)
    assert "more changed" in ran.why
    assert 40 == len(database.daily_summaries.distinct("_id"))
    constants(schedule_dirty_max=5_000, schedule_events_page=2)
    store = run.store([Sale, DailySales], limits=Limits(schedule_events_max=3))
    database.sales.insert_many([raw(n, "1", 2026, 1, 1 + n) for n in range(20)])
    (ran,) = store.run_due(now=NOON + 3 * HOURLY)
    assert "more changed" in ran.why
    assert 60 == len(database.daily_summaries.distinct("_id"))
    assert [] == store.verify()


def test_another_declaration_is_computed_anew(run, database):
    def model(**fields: Any) -> Any:
        annotations = {"product_id": int, "count": Annotated[int, Count()], **fields}
        return type(Document)(
            "Totals",
            (Document,),
            {"__annotations__": annotations, "__module__": __name__, "count": 0},
            collection="totals",
            rollup=Rollup(Sale, keys={"product_id": "product_id"}, maintain="schedule", every=HOURLY),
        )

    database.sales.insert_many([raw(n % 2, "1", 2026, 3, 1) for n in range(4)])
    first = run.store([Sale, model()])
    first.setup()
    first.run_due(now=NOON)
    second = run.store([Sale, model(total=Annotated[Decimal | None, Max("amount")])])
    second.setup()
    (ran,) = second.run_due(now=NOON + HOURLY)
    assert "declaration" in ran.why
    assert [Decimal128("1")] * 2 == [each["total"] for each in database.totals.find()]
    assert [] == second.verify()


# -- runners -----------------------------------------------------------------------------------------


def test_two_runners_at_once_do_the_work_once(server, database):
    store = Store(database, [Sale, DailySales])
    store.setup()
    database.sales.insert_many([raw(n % 50, "1", 2026, 3, 1 + n % 4) for n in range(2000)])
    stores = [Store(MongoClient(server.uri)[database.name], [Sale, DailySales]) for _ in range(4)]
    ran: list[Any] = []
    barrier = threading.Barrier(4)

    def work(each: Store) -> None:
        barrier.wait()
        ran.extend(each.run_due(now=NOON))

    threads = [threading.Thread(target=work, args=(each,)) for each in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for each in stores:
        each.database.client.close()
    assert 1 == len(ran)
    assert [] == store.verify()


@pytest.mark.heavy
def test_raw_writers_and_runs_at_once(store, database):
    """Writers that do not use Treadle insert, change, move and delete while runs come one after another."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def write(number: int) -> None:
        chance = random.Random(number)
        try:
            while not stop.is_set():
                key = {"product_id": chance.randrange(5), "number": chance.randrange(40)}
                moved = {"created_at": at(2026, 3, chance.randrange(1, 5), chance.randrange(24))}
                match chance.randrange(4):
                    case 0:
                        database.sales.delete_one(key)
                    case 1:
                        database.sales.update_many(
                            key, {"$set": {**moved, "product_id": chance.randrange(5)}}
                        )
                    case _:
                        database.sales.insert_one({**key, **moved, "amount": Decimal128("1.5"), "paid": True})
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    wholes = []
    for number in range(12):
        wholes += [each.whole for each in store.run_due(now=NOON + number * HOURLY)]
    stop.set()
    for writer in writers:
        writer.join(60)
    assert [] == failed
    (last,) = store.run_due(now=NOON + 20 * HOURLY)
    assert [True, *[False] * 12] == [*wholes, last.whole]
    assert [] == store.verify()
    expected: dict[Any, list[Decimal]] = {}
    for each in database.sales.find():
        expected.setdefault((each["product_id"], each["created_at"].day), []).append(Decimal("1.5"))
    assert {key: (len(values), sum(values)) for key, values in expected.items()} == summaries(database)


def test_a_runner_that_was_replaced_moves_nothing(store, database, monkeypatch):
    """It slept until its lease had run out; another run was done meanwhile."""
    database.sales.insert_many([raw(1, "1", 2026, 3, 1), raw(2, "1", 2026, 3, 1)])
    real = merging.run_merge
    slept = []

    def sleepy(collection: str, stages: Any) -> Any:
        if not slept:
            slept.append(True)
            database["treadle.leases"].update_one({"_id": "schedule"}, {"$set": {"until": at(2020, 1, 1)}})
            database["treadle.leases"].update_one({"_id": "schedule"}, {"$inc": {"n": 1}})
        yield from real(collection, stages)

    monkeypatch.setattr(merging, "run_merge", sleepy)
    assert [] == store.run_due(now=NOON)
    assert None is database["treadle.schedules"].find_one({"position": {"$exists": True}})
    database.sales.delete_one({"product_id": 2})
    assert 1 == len(store.run_due(now=NOON))
    assert {(1, 1): (1, 1)} == summaries(database)
    assert [] == store.verify()


def test_an_error_is_told_recorded_and_tried_again(run, database):
    """The index is gone: the other jobs are done, and this one is due until it succeeds."""
    store = run.store([Sale, Product, DailySales, CategoryStats])
    store.setup()
    database.daily_summaries.drop_index("product_id_1_day_1")
    database.sales.insert_one(raw(1, "1", 2026, 3, 1))
    outcomes = {each.name: each.error for each in store.run_due(now=NOON)}
    assert outcomes["CategoryStats"] is None
    assert "run setup()" in outcomes["DailySales"]
    row = database["treadle.schedules"].find_one({"_id": "DailySales"})
    assert "run setup()" in row["outcome"]
    store.setup()
    (ran,) = store.run_due(now=NOON + dt.timedelta(seconds=1))
    assert (None, 1) == (ran.error, ran.written)


def test_a_document_that_cannot_be_written_does_not_stop_the_others(store, database):
    database.sales.insert_many([raw(n, "1", 2026, 3, 1) for n in range(4)])
    store.run_due(now=NOON)
    database.command({"collMod": "daily_summaries", "validator": {"order_count": {"$lt": 3}}})
    database.sales.insert_many([raw(2, "1", 2026, 3, 1), raw(2, "1", 2026, 3, 1), raw(3, "1", 2026, 3, 1)])
    (ran,) = store.run_due(now=NOON + HOURLY)
    assert ran.error is None
    assert ((1, 1), (2, 2)) == (summaries(database)[2, 1], summaries(database)[3, 1])
    assert 1 == database["treadle.set_aside"].count_documents({})


def test_a_dry_run_says_what_is_due_and_does_nothing(store, database):
    database.sales.insert_one(raw(1, "1", 2026, 3, 1))
    (due,) = store.run_due(now=NOON, dry_run=True)
    assert ("DailySales", 0) == (due.name, due.written)
    assert ("DailySales.total_amount" in due.rules, {}) == (True, summaries(database))
    assert 1 == len(store.run_due(now=NOON))


def test_the_clock_is_the_servers(store, database, monkeypatch):
    """A client whose clock is wrong by an hour neither closes windows early nor runs too often."""
    now = database.client.admin.command("hello")["localTime"].replace(tzinfo=UTC)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    database.sales.insert_many(
        [raw(1, "1", now.year - 1, 1, 1), {**raw(2, "1", 2020, 1, 1), "created_at": now}]
    )
    assert 1 == len(store.run_due())
    assert [1] == [each["product_id"] for each in database.daily_summaries.find()]
    assert [] == store.run_due()


def test_now_must_be_a_date(store):
    with pytest.raises(UsageError) as raised:
        store.run_due(now="noon")
    assert "now-invalid" == raised.value.code


def test_the_status_shows_the_last_run(store, database):
    store.run_due(now=NOON)
    (rule,) = (each for each in store.status().rules if each.rule == "DailySales.order_count")
    assert ("schedule", 3600.0) == (rule.maintain, rule.every_seconds)
    assert rule.last_run is not None
    assert rule.last_seconds is not None


# -- kill -9 -----------------------------------------------------------------------------------------

RUNNER = f"""
import sys
from pymongo import MongoClient
from {__name__} import DailySales, Sale, NOON
from treadle import Store
store = Store(MongoClient(sys.argv[1])[sys.argv[2]], [Sale, DailySales])
print("ready", flush=True)
print(len(store.run_due(now=NOON)), flush=True)
"""


@pytest.mark.parametrize("models", [[Sale, DailySales], [Customer, Review, Item]], ids=["groups", "fields"])
def test_a_command_of_a_run_that_was_replaced_writes_nothing(database, models):
    """Sent before its client was killed, and begun by the server when another run had the lease."""
    store = Store(database, models)
    store.setup()
    database.sales.insert_many([raw(1, "1", 2026, 3, 1), raw(2, "1", 2026, 3, 1)])
    database["items"].insert_one({"_id": 1, "label": "", "count": 0})
    database.reviews.insert_one({"item_id": 1, "rating": 5})
    real = store.runner._perform
    merged = []

    def perform(command: Any, *rest: Any) -> Any:
        # What runs a transaction is no dataclass.
        fields = dataclasses.fields(command) if dataclasses.is_dataclass(command) else ()
        if "$merge" in repr([getattr(command, each.name) for each in fields]):
            merged.append(command)
            database["treadle.leases"].update_one({"_id": "schedule"}, {"$inc": {"n": 1}})
        return real(command, *rest)

    store.runner._perform = perform  # type: ignore[method-assign]
    assert not [each for each in store.run_due(now=NOON) if each.model in ("DailySales", "Item")]
    assert merged
    assert [0] == [each["count"] for each in database["items"].find()]
    assert [] == list(database.daily_summaries.find())


@pytest.mark.heavy
def test_a_killed_run_is_done_again(server, database):
    """Killed at many moments; whoever comes next finishes at once, and nothing is wrong."""
    store = Store(database, [Sale, DailySales])
    store.setup()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    sales = [raw(n % 40, "1", 2026, 3, 1 + n % 4) for n in range(20_000 if IS_FULL else 5_000)]
    database.sales.insert_many(sales)
    for number in range(6 if IS_FULL else 1):
        command = [sys.executable, "-c", RUNNER, server.uri, database.name]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env=environment, cwd=Path(__file__).parents[2]
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.02 * (number + 1))
            process.send_signal(signal.SIGKILL)
            process.wait()
        database.sales.delete_many({"product_id": number})
        # An hour later: it may have been done before it was killed.
        store.run_due(now=NOON + HOURLY)
        assert [] == store.verify()
        assert 39 - number == len(summaries(database))
        database["treadle.schedules"].delete_many({})
