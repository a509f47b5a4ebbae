"""Moves with a fault at each command, killed runs, and random histories against a plain dictionary."""

from __future__ import annotations

import datetime as dt
import os
import random
import signal
import time
from typing import Any

import pytest
from pymongo import MongoClient

from tests.kit import processes
from tests.kit.fault_sweep import Write
from tests.kit.tiers import IS_FULL
from tests.patterns.archive.models import COUNTED, NOW, OLD, SMALL, Door, Letter, Sale, Shop, Visit, places
from treadle import Store, UsageError

# Few by default; TREADLE_STEPS=all plays as many as a release should have seen.
STEPS = 5_000 if os.environ.get("TREADLE_STEPS") == "all" else 300 if IS_FULL else 60

WRITES = {
    "archive": lambda store: store.archive(Sale, now=NOW),
    "let-go": lambda store: store.archive(Visit, now=NOW),
    "restore": lambda store: store.restore(Sale, 0),
    "take-back": lambda store: store.restore(Visit, 0),
    "update": lambda store: store.update(Letter, 0, {"$set": {"text": "x"}}),
}


@pytest.mark.heavy
@pytest.mark.server
@pytest.mark.parametrize("write", WRITES)
def test_a_document_is_in_one_place_whatever_happens(write, fault_sweep, record_points):
    stores = fault_sweep.stores("archive", [*COUNTED, Visit, Door, Letter], SMALL)
    store, database = stores.sound, stores.database
    store.insert_many([Shop(id=1)])
    store.insert(Door(id=1))

    def reset() -> None:
        for name in ("sales", "visits", "letters"):
            database[name].delete_many({})
        for name in ("sales_archive", "visits_archive", "old_letters", "sale_days"):
            database[name].delete_many({})
        store.insert_many([Sale(id=key, date=OLD, amount=key) for key in range(5)])
        store.insert_many([Visit(id=key, date=OLD) for key in range(5)])
        store.insert(Letter(id=0, number="0", date=dt.date(2020, 1, 1)))
        if write in ("restore", "take-back", "update"):
            for model in (Sale, Visit, Letter):
                store.archive(model, now=NOW)
        store.repair()

    def check(acknowledged: bool) -> None:
        for model, count in ((Sale, 5), (Visit, 5), (Letter, 1)):
            assert [1] * count == [len(places(database, key, model)) for key in range(count)]
        assert [] == store.verify()
        assert (5, 10) == (database["shops"].find_one()["sales"], database["shops"].find_one()["total"])
        if acknowledged and write == "archive":
            assert 0 == database["sales"].count_documents({})

    # Documents are moved in chunks, so that a run that failed may have moved some of them.
    record_points(fault_sweep.strike(stores, Write(write, WRITES[write], reset, check)))


def move_for_ever(uri: str, name: str) -> None:
    """What a killed process does: archive all, bring some back, and again."""
    store = Store(MongoClient(uri)[name], COUNTED, limits=SMALL)
    while True:
        store.archive(Sale, now=NOW)
        for key in range(0, 60, 3):
            store.restore(Sale, key)


@pytest.mark.heavy
def test_twenty_kills_lose_nothing_and_double_nothing(server, database):
    store = Store(database, COUNTED, limits=SMALL)
    store.setup()
    store.insert(Shop(id=1))
    store.insert_many([Sale(id=key, date=OLD, amount=1) for key in range(60)])
    chance = random.Random(3)
    for _ in range(20):
        process = processes.start(move_for_ever, server.uri, database.name)
        time.sleep(0.05 + chance.random() / 10)
        os.kill(process.pid, signal.SIGKILL)
        process.join(processes.SECONDS_MAX)
        both = [len(places(database, key)) for key in range(60)]
        assert [1] * 60 == both
        assert list(range(60)) == [sale.id for sale in store.find(Sale, sort="_id", archived=True)]
    # Transactions that nobody ended hold documents until the server gives up on them.
    database.client.admin.command({"killAllSessions": []})
    assert (60, 60) == (store.require(Shop, 1).sales, store.require(Shop, 1).total)
    assert [] == store.verify()
    store.archive(Sale, now=NOW)
    assert 60 == database["sales_archive"].count_documents({})


class Oracle:
    """Sales, and which of them are archived, in the simplest way."""

    def __init__(self) -> None:
        self.sales: dict[int, dict[str, Any]] = {}
        self.archived: set[int] = set()

    def living(self) -> list[int]:
        return [key for key in self.sales if key not in self.archived]


def step(store: Store, oracle: Oracle, chance: random.Random) -> None:
    """One random call, and the same on plain data."""
    key, amount, shop = chance.randrange(12), chance.randrange(6), chance.randrange(2)
    what = chance.choice(
        ["insert", "insert", "update", "update", "many", "delete", "archive", "restore", "move"]
    )
    known, away = key in oracle.sales, key in oracle.archived
    date = chance.choice([OLD, NOW, None])
    if what == "insert" and not known:
        store.insert(Sale(id=key, amount=amount, shop_id=shop, date=date))
        oracle.sales[key] = {"amount": amount, "shop_id": shop, "date": date}
    elif what in ("update", "move", "delete") and away:
        with pytest.raises(UsageError):
            store.update(Sale, key, {"$set": {"amount": amount}})
    elif what == "update":
        store.update(Sale, key, {"$set": {"amount": amount, "date": date}})
        if known:
            oracle.sales[key] |= {"amount": amount, "date": date}
    elif what == "move":
        store.update(Sale, key, {"$set": {"shop_id": shop}})
        if known:
            oracle.sales[key]["shop_id"] = shop
    elif what == "many":
        store.update_many(Sale, {"shop_id": shop}, {"$inc": {"amount": 1}})
        for each in oracle.living():
            oracle.sales[each]["amount"] += oracle.sales[each]["shop_id"] == shop
    elif what == "delete":
        store.delete(Sale, key)
        oracle.sales.pop(key, None)
    elif what == "archive":
        due = {each for each in oracle.living() if oracle.sales[each]["date"] == OLD}
        assert len(due) == store.archive(Sale, now=NOW)
        oracle.archived |= due
    elif what == "restore":
        assert away == (store.restore(Sale, key) is not None)
        oracle.archived.discard(key)


@pytest.mark.heavy
def test_random_histories(database):
    chance = random.Random(11)
    store, oracle = Store(database, COUNTED, limits=SMALL), Oracle()
    store.setup()
    store.insert_many([Shop(id=key) for key in (0, 1)])
    for number in range(STEPS):
        step(store, oracle, chance)
        everywhere = {sale.id: sale for sale in store.find(Sale, sort="_id", archived=True)}
        assert sorted(oracle.sales) == list(everywhere)
        assert oracle.sales == {
            key: {"amount": sale.amount, "shop_id": sale.shop_id, "date": sale.date}
            for key, sale in everywhere.items()
        }
        assert sorted(oracle.living()) == [sale.id for sale in store.find(Sale, sort="_id")]
        for shop in store.find(Shop):
            amounts = sorted(sale["amount"] for sale in oracle.sales.values() if sale["shop_id"] == shop.id)
            assert (len(amounts), sum(amounts)) == (shop.sales, shop.total)
            extremes = (amounts[0], amounts[-1]) if amounts else (None, None)
            assert extremes == (shop.least, shop.most)
            assert amounts[::-1][:2] == [card.amount for card in shop.top]
        if number % 60 == 59:
            assert [] == store.verify()
            store.rebuild()
            assert [] == store.verify()
