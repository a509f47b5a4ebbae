"""Stores that several files here begin with."""

from __future__ import annotations

from typing import Any

import pytest
from bson import ObjectId

from tests.upkeep import daily_sales, followed, marketplace


@pytest.fixture
def shops(run, database) -> Any:
    """A store that a worker follows, and the ids of three shops."""
    store = run.store([followed.Sale, followed.Shop])
    store.setup()
    followed.settled(store)
    keys = [ObjectId(), ObjectId(), ObjectId()]
    database["shops"].insert_many([{"_id": key, "name": "shop"} for key in keys])
    return store, keys


@pytest.fixture
def market(run, database) -> Any:
    """A store that a worker follows, and the ids of three shops with one sale each."""
    store = run.store(marketplace.MODELS)
    store.setup()
    keys = [ObjectId() for _ in range(3)]
    database["shops"].insert_many([{"_id": key, "name": "shop"} for key in keys])
    database["sales"].insert_many([{"shop_id": key, "amount": 5} for key in keys])
    marketplace.settled(store)
    return store, keys


@pytest.fixture
def store(run: Any) -> Any:
    """A store of daily sales, which are computed by schedule."""
    made = run.store([daily_sales.Sale, daily_sales.DailySales])
    made.setup()
    return made
