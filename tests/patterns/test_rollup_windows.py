"""Rollup by windows of other lengths: with the write, by the worker, on a schedule, and repaired."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson.decimal128 import Decimal128

from tests.patterns.sales import Sale, at, sale
from treadle import Count, Day, Document, Hour, Max, Minute, Quarter, Rollup, Sum, Total, Week, Year

NEW_YORK = "America/New_York"
# As seen in New York, where the clock goes forward on the eighth of March at two.
MOMENTS = [
    at(2026, 1, 1, 4, 59),
    at(2026, 1, 1, 5),
    at(2026, 3, 7, 11, 7),
    at(2026, 3, 8, 9, 59),
    at(2026, 3, 8, 10),
    at(2026, 4, 1, 4, 22),
]


def declared(name: str, key: Any, maintain: Any, every: dt.timedelta | None) -> type[Document]:
    class Summary(
        Document,
        collection=f"summaries_{name}",
        rollup=Rollup(Sale, keys={"window": key}, maintain=maintain, every=every),
    ):
        window: dt.datetime
        total: Annotated[Decimal, Sum("amount")] = Decimal(0)
        count: Annotated[int, Count()] = 0

    Summary.__name__ = f"Summary{name.title()}"
    return Summary


KEYS = {
    "quarter": Quarter("created_at", timezone=NEW_YORK),
    "year": Year("created_at", timezone=NEW_YORK),
    "day": Day("created_at", timezone=NEW_YORK),
    "parts": Hour("created_at", timezone=NEW_YORK, size=6),
    "minutes": Minute("created_at", timezone=NEW_YORK, size=15),
    "week": Week("created_at", timezone=NEW_YORK),
}
EXPECTED = {
    "quarter": {at(2025, 10, 1, 4): 1, at(2026, 1, 1, 5): 4, at(2026, 4, 1, 4): 1},
    "year": {at(2025, 1, 1, 5): 1, at(2026, 1, 1, 5): 5},
    # Midnight is five in UTC, and four from the ninth of March.
    "day": {
        at(2025, 12, 31, 5): 1,
        at(2026, 1, 1, 5): 1,
        at(2026, 3, 7, 5): 1,
        at(2026, 3, 8, 5): 2,
        at(2026, 4, 1, 4): 1,
    },
    "parts": {
        at(2025, 12, 31, 23): 1,
        at(2026, 1, 1, 5): 1,
        at(2026, 3, 7, 11): 1,
        at(2026, 3, 8, 5): 1,
        at(2026, 3, 8, 10): 1,
        at(2026, 4, 1, 4): 1,
    },
    "minutes": {
        at(2026, 1, 1, 4, 45): 1,
        at(2026, 1, 1, 5): 1,
        at(2026, 3, 7, 11): 1,
        at(2026, 3, 8, 9, 45): 1,
        at(2026, 3, 8, 10): 1,
        at(2026, 4, 1, 4, 15): 1,
    },
    "week": {at(2025, 12, 29, 5): 2, at(2026, 3, 2, 5): 3, at(2026, 3, 30, 4): 1},
}


def counts(store: Any, models: dict[str, type[Document]]) -> dict[str, dict[dt.datetime, int]]:
    found = {}
    for name, model in models.items():
        rows = list(store.find(model))
        assert all(row.total == row.count for row in rows)
        found[name] = {row.window: row.count for row in rows}
    return found


@pytest.mark.parametrize("maintain", ["write", "stream", "schedule"])
def test_windows_of_every_length(run, database, maintain):
    every = dt.timedelta(hours=1) if maintain == "schedule" else None
    models = {name: declared(name, key, maintain, every) for name, key in KEYS.items()}
    store = run.store([Sale, *models.values()])
    store.setup()
    now = at(2027, 1, 5)

    def catch_up() -> None:
        nonlocal now
        if maintain == "stream":
            store.worker().run_until_idle()
        elif maintain == "schedule":
            now += dt.timedelta(hours=2)
            store.run_due(now=now)
        assert [] == store.verify()

    catch_up()
    store.insert_many([Sale(product_id=1, amount=Decimal(1), created_at=each) for each in MOMENTS])
    catch_up()
    assert EXPECTED == counts(store, models)
    # One sale moves by a millisecond, out of its year, its quarter, its six hours.
    store.update(Sale, {"created_at": MOMENTS[1]}, {"$inc": {"product_id": 1}})
    store.update(Sale, {"created_at": MOMENTS[1]}, {"$set": {"created_at": at(2026, 1, 1, 4, 59, 59)}})
    catch_up()
    found = counts(store, models)
    assert {at(2025, 1, 1, 5): 2, at(2026, 1, 1, 5): 4} == found["year"]
    assert 2 == found["parts"][at(2025, 12, 31, 23)]
    assert at(2026, 1, 1, 5) not in found["parts"], "its only sale has left"
    for name in models:
        database[f"summaries_{name}"].update_many({}, {"$set": {"count": 9}})
        database[f"summaries_{name}"].delete_one({"window": {"$lt": at(2026, 1, 1)}})
    assert {model.__name__ for model in models.values()} == {each.model for each in store.verify()}
    store.repair()
    assert found == counts(store, models)
    store.delete_many(Sale, {})
    catch_up()
    assert {name: {} for name in models} == counts(store, models)


@pytest.mark.parametrize("maintain", ["write", "stream", "schedule"])
def test_a_total_of_all_sources(run, database, maintain):
    """As the id, and beside another key; there with the first source, gone with the last."""
    every = dt.timedelta(hours=1) if maintain == "schedule" else None

    class AllSales(
        Document,
        collection="all_sales",
        rollup=Rollup(Sale, keys={"id": Total("sales")}, maintain=maintain, every=every),
    ):
        id: str
        total: Annotated[Decimal, Sum("amount")] = Decimal(0)
        count: Annotated[int, Count()] = 0
        largest: Annotated[Decimal | None, Max("amount")] = None

    class PerProduct(
        Document,
        collection="per_product",
        rollup=Rollup(
            Sale, keys={"name": Total(), "product_id": "product_id"}, maintain=maintain, every=every
        ),
    ):
        name: str
        product_id: int
        count: Annotated[int, Count()] = 0

    store = run.store([Sale, AllSales, PerProduct])
    store.setup()
    now = at(2027, 1, 5)

    def found() -> list[Any]:
        nonlocal now
        if maintain == "stream":
            store.worker().run_until_idle()
        elif maintain == "schedule":
            now += dt.timedelta(hours=2)
            store.run_due(now=now)
        assert [] == store.verify()
        totals = [(each.id, each.total, each.count, each.largest) for each in store.find(AllSales)]
        return [*totals, *sorted((each.name, each.product_id, each.count) for each in store.find(PerProduct))]

    assert [] == found()
    store.insert_many(
        [sale(1, "1", 2026, 1, 1), sale(2, "2", 2026, 2, 1), Sale(product_id=2, amount=Decimal(4))]
    )
    assert [("sales", 7, 3, 4), ("all", 1, 1), ("all", 2, 2)] == found()
    store.update(Sale, {"amount": Decimal(4)}, {"$set": {"amount": Decimal(1), "product_id": 1}})
    assert [("sales", 4, 3, 2), ("all", 1, 2), ("all", 2, 1)] == found()
    store.delete_many(Sale, {"product_id": 2})
    assert [("sales", 2, 2, 1), ("all", 1, 2)] == found()
    database.all_sales.update_one({}, {"$set": {"total": Decimal128("9")}})
    database.per_product.delete_many({})
    assert {"AllSales", "PerProduct"} == {each.model for each in store.verify()}
    store.repair()
    assert [("sales", 2, 2, 1), ("all", 1, 2)] == found()
    store.delete_many(Sale, {})
    assert [] == found()
