"""Rollup declarations that cannot work, and what callers may not do with groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from bson.decimal128 import Decimal128

from tests.patterns.sales import CategoryStats, DailySales, Product, Sale, at, rows, sale
from treadle import (
    Count,
    Document,
    Formula,
    Rollup,
    UsageError,
)

# -- what callers may not do -------------------------------------------------------------------------


def test_documents_of_a_rollup_are_treadles(run):
    store = run.store([Sale, DailySales])
    store.setup()
    store.insert(sale(1, "1", 2026, 3, 1))
    found = store.find_one(DailySales, {})
    attempts: list[Callable[[], Any]] = [
        lambda: store.insert(found),
        lambda: store.insert_many([found]),
        lambda: store.replace(found),
        lambda: store.delete(DailySales, found.id),
        lambda: store.delete_many(DailySales, {}),
    ]
    for attempt in attempts:
        with pytest.raises(UsageError, match="write the Sale documents instead") as raised:
            attempt()
        assert "rollup-maintained" == raised.value.code
    for path in ("day", "product_id", "total_amount", "_treadle.state.members"):
        with pytest.raises(UsageError) as raised:
            store.update(DailySales, found.id, {"$set": {path: 1}})
        assert "field-maintained" == raised.value.code, path
    assert found == store.find_one(DailySales, {})


class Noted(Document, collection="noted", rollup=Rollup(Sale, keys={"product_id": "product_id"})):
    product_id: int
    count: Annotated[int, Count()] = 0
    note: str = ""
    shouted: Annotated[str | None, Formula({"$toUpper": "$note"})] = None


def test_a_callers_own_fields_may_be_updated(run):
    store = run.store([Sale, Noted])
    store.setup()
    store.insert(sale(1, "1", 2026, 3, 1))
    updated = store.update(Noted, {"product_id": 1}, {"$set": {"note": "good"}})
    assert ("good", "GOOD") == (updated.note, updated.shouted)
    store.insert(sale(1, "1", 2026, 3, 1))
    found = store.find_one(Noted, {})
    assert ("good", 2) == (found.note, found.count)
    store.rebuild()
    assert "good" == store.find_one(Noted, {}).note


def test_without_its_unique_index_nothing_is_written(run, database):
    store = run.store([Sale, DailySales])
    with pytest.raises(UsageError, match=r"run setup\(\)") as raised:
        store.insert(sale(1, "1", 2026, 3, 1))
    assert "index-missing" == raised.value.code
    assert [] == rows(database, "sales")
    with pytest.raises(UsageError):
        database.sales.insert_one({"product_id": 1, "amount": Decimal128("1"), "created_at": at(2026, 1, 1)})
        store.rebuild()
    store.setup()
    store.insert(sale(1, "1", 2026, 3, 1))
    assert 1 == len(rows(database, "daily_summaries"))


def test_set_up_makes_the_indexes(run, database):
    store = run.store([Sale, DailySales, Product, CategoryStats])
    store.setup()
    (index,) = (each for each in database.daily_summaries.index_information().values() if each.get("unique"))
    assert [("product_id", 1), ("day", 1)] == index["key"]
    assert [("product_id", 1), ("created_at", 1)] in [
        each["key"] for each in database.sales.index_information().values()
    ]
    assert {"_id_"} == set(database.category_stats.index_information()), "the id is unique already"
