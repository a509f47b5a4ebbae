"""Rollups under many writers, without transactions, and under random writes."""

from __future__ import annotations

import datetime as dt
import random
import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tests.kit.tiers import IS_FULL
from tests.patterns.sales import (
    DailySales,
    HourlySummary,
    PerAnyShop,
    PerShop,
    Sale,
    at,
    sale,
)
from treadle import Average, Count, Document, Max, Min, Rollup, Store, Sum, Week

WRITERS = 8

# -- many writers ------------------------------------------------------------------------------------


def together(jobs: list[Callable[[], Any]]) -> None:
    """Run all at once; raises what one of them raised."""
    barrier = threading.Barrier(len(jobs))
    raised: list[BaseException] = []

    def perform(job: Callable[[], Any]) -> None:
        try:
            barrier.wait()
            job()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=perform, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if raised:
        raise raised[0]


def test_many_writers_who_open_a_day_make_one_document(server, database):
    """Each with a Store and a client of its own, so that nobody shares a transaction."""
    Store(database, [Sale, DailySales]).setup()
    clients = [MongoClient[Any](server.uri) for _ in range(WRITERS)]
    try:
        stores = [Store(client[database.name], [Sale, DailySales]) for client in clients]
        for day in range(1, 9):
            together([lambda s=store, d=day: s.insert(sale(1, "1.5", 2026, 3, d)) for store in stores])  # type: ignore[misc]
        found = list(database.daily_summaries.find())
        assert 8 == len(found)
        assert {(WRITERS, Decimal(12))} == {
            (each["order_count"], each["total_amount"].to_decimal()) for each in found
        }
        # The last leave while others come.
        ids = [each["_id"] for each in database.sales.find()]
        jobs: list[Callable[[], Any]] = []
        for number, store in enumerate(stores):
            mine = ids[number::WRITERS]
            jobs.append(lambda s=store, m=mine: [s.delete(Sale, each) for each in m])  # type: ignore[misc]
        together(jobs)
        assert 0 == database.daily_summaries.count_documents({})
        assert [] == stores[0].verify()
    finally:
        for client in clients:
            client.close()


def test_two_sessions_that_open_one_group_conflict(database):
    """The second could not know of the first one's document; it must not make another."""
    store = Store(database, [Sale, DailySales])
    store.setup()
    with store.database.client.start_session() as one, store.database.client.start_session() as two:
        one.start_transaction()
        two.start_transaction()
        store.insert(sale(1, "1", 2026, 3, 1), session=one)
        with pytest.raises(OperationFailure) as raised:
            store.insert(sale(1, "1", 2026, 3, 1), session=two)
        assert raised.value.has_error_label("TransientTransactionError")
        one.commit_transaction()
    assert 1 == store.count(DailySales)
    assert [] == store.verify()


def test_two_sessions_one_empties_a_group_that_the_other_joins(database):
    store = Store(database, [Sale, DailySales])
    store.setup()
    first = store.insert(sale(1, "1", 2026, 3, 1))
    with store.database.client.start_session() as one, store.database.client.start_session() as two:
        one.start_transaction()
        two.start_transaction()
        store.delete(Sale, first.id, session=one)
        with pytest.raises(OperationFailure) as raised:
            store.insert(sale(1, "2", 2026, 3, 1), session=two)
        assert raised.value.has_error_label("TransientTransactionError")
        one.commit_transaction()
    assert 0 == store.count(DailySales)
    store.insert(sale(1, "2", 2026, 3, 1))
    assert Decimal(2) == store.find_one(DailySales, {}).total_amount


def test_repair_and_writers_at_once(server, database):
    """Groups are mended while sources come and go; nothing is counted twice."""
    store = Store(database, [Sale, DailySales])
    store.setup()
    store.insert_many([sale(number % 3, "1", 2026, 3, 1 + number % 5) for number in range(60)])
    database.daily_summaries.delete_many({"product_id": 1})
    database.daily_summaries.update_many({"product_id": 2}, {"$set": {"order_count": 77}})
    clients = [MongoClient[Any](server.uri) for _ in range(3)]
    stores = [Store(client[database.name], [Sale, DailySales]) for client in clients]

    def write(number: int) -> None:
        chance = random.Random(number)
        for _ in range(25):
            made = stores[number].insert(sale(chance.randrange(3), "1", 2026, 3, chance.randrange(1, 6)))
            if chance.random() < 0.5:
                stores[number].delete(Sale, made.id)

    try:
        together([store.repair, *(lambda n=number: write(n) for number in range(3))])  # type: ignore[misc]
        store.repair()
        assert [] == store.verify()
    finally:
        for client in clients:
            client.close()


# -- at random ---------------------------------------------------------------------------------------


class Wide(
    Document,
    collection="wide",
    rollup=Rollup(
        Sale, keys={"shop": "shop", "week": Week("created_at", timezone="America/Sao_Paulo")}, where={"refunded": False}
    ),
):  # fmt: skip
    shop: str | None
    week: dt.datetime
    count: Annotated[int, Count()] = 0
    total: Annotated[Decimal, Sum("amount")] = Decimal(0)
    mean: Annotated[Decimal | None, Average("amount")] = None
    least: Annotated[Decimal | None, Min("amount")] = None
    most: Annotated[Decimal | None, Max("amount")] = None
    dear: Annotated[int, Count(where={"amount": {"$gt": Decimal(5)}})] = 0


@pytest.mark.parametrize("seed", range(3 if IS_FULL else 1))
def test_any_writes_leave_every_group_right(run, database, seed):
    store = run.store([Sale, DailySales, PerShop, PerAnyShop, HourlySummary, Wide])
    store.setup()
    chance = random.Random(seed)

    def one() -> Sale:
        moment = at(2026, 1, 1) + dt.timedelta(hours=chance.randrange(24 * 20))
        return Sale(
            product_id=chance.randrange(3),
            amount=Decimal(chance.randrange(1000)) / 100,
            created_at=chance.choice([moment, moment, moment, None]),
            shop=chance.choice(["a", "b", None]),
            refunded=chance.random() < 0.2,
        )

    updates: list[dict[str, Any]] = [
        {"$set": {"shop": None}},
        {"$set": {"created_at": at(2026, 1, 3, 5)}},
        {"$inc": {"amount": Decimal("0.25")}},
        {"$set": {"refunded": True}},
        {"$unset": {"created_at": ""}},
        {"$set": {"product_id": 2, "refunded": False}},
    ]
    for _ in range(25):
        which = {"product_id": chance.randrange(3)}
        action = chance.randrange(6)
        if action <= 1:
            store.insert_many([one() for _ in range(chance.randrange(1, 6))])
        elif action == 2:
            store.update(Sale, which, chance.choice(updates))
        elif action == 3:
            store.update_many(Sale, which, chance.choice(updates))
        elif action == 4:
            store.delete(Sale, which)
        elif chance.random() < 0.4:
            store.delete_many(Sale, {**which, "shop": chance.choice(["a", None])})
    assert [] == store.verify()
    groups: dict[Any, list[Decimal]] = {}
    for each in database.sales.find():
        if each.get("created_at") is not None:
            key = each["product_id"], each["created_at"].replace(hour=0)
            groups.setdefault(key, []).append(each["amount"].to_decimal())
    assert {key: (len(values), sum(values)) for key, values in groups.items()} == {
        (each["product_id"], each["day"]): (each["order_count"], each["total_amount"].to_decimal())
        for each in database.daily_summaries.find()
    }
