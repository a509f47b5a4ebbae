"""Rollups under many writers, without transactions, and under random writes."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tests.patterns.sales import (
    DailySales,
    Sale,
    sale,
)
from tests.support import race
from treadle import Store

WRITERS = 8

# -- many writers ------------------------------------------------------------------------------------


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
        race(store.repair, *(lambda n=number: write(n) for number in range(3)))  # type: ignore[misc]
        store.repair()
        assert [] == store.verify()
    finally:
        for client in clients:
            client.close()
