"""Rollups that the worker keeps right while others write: against a Python oracle, after each batch."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import pytest
from bson.decimal128 import Decimal128

from treadle import Average, Count, Day, Document, Formula, Limits, Max, Rollup, Store, Sum
from treadle.upkeep import stream

ROUNDS = 8
WRITES = 25
# The clock goes forward in Berlin on the second of these days.
FIRST = datetime(2024, 3, 30, tzinfo=UTC)


class Sale(Document, collection="sales"):
    product_id: int
    amount: Decimal
    created_at: datetime


class Daily(
    Document,
    collection="daily_summaries",
    rollup=Rollup(
        Sale, keys={"product_id": "product_id", "day": Day("created_at", timezone="UTC")}, maintain="stream"
    ),
):
    product_id: int
    day: datetime
    total_amount: Annotated[Decimal, Sum("amount")]
    order_count: Annotated[int, Count()]
    average_order_value: Annotated[Decimal | None, Average("amount")]
    doubled: Annotated[int | None, Formula({"$multiply": ["$order_count", 2]})]


class BerlinDay(
    Document,
    collection="berlin_days",
    rollup=Rollup(Sale, keys={"day": Day("created_at", timezone="Europe/Berlin")}, maintain="stream"),
):
    day: datetime
    order_count: Annotated[int, Count()]


class PerProduct(
    Document, collection="per_product", rollup=Rollup(Sale, keys={"id": "product_id"}, maintain="stream")
):
    id: int
    large: Annotated[int, Count(where={"amount": {"$gte": Decimal(5)}})]
    best: Annotated[Decimal | None, Max("amount")]


class PerDay(Document, collection="per_day", rollup=Rollup(Daily, keys={"day": "day"}, maintain="stream")):
    """A rollup of a rollup: what the worker writes itself feeds it."""

    day: datetime
    orders: Annotated[int, Sum("order_count")]


MODELS = [Sale, Daily, BerlinDay, PerProduct, PerDay]


def _decimal(value: Any) -> Decimal:
    return value.to_decimal()


def _expected(sales: list[dict[str, Any]]) -> dict[str, Any]:
    daily: Any = defaultdict(list)
    berlin: Any = defaultdict(int)
    products: Any = defaultdict(list)
    for sale in sales:
        when = sale["created_at"]
        day = when.replace(hour=0, minute=0, second=0, microsecond=0)
        daily[sale["product_id"], day].append(_decimal(sale["amount"]))
        local = when.astimezone(ZoneInfo("Europe/Berlin"))
        midnight = local.replace(hour=0, minute=0, second=0, microsecond=0).astimezone(UTC)
        berlin[midnight] += 1
        products[sale["product_id"]].append(_decimal(sale["amount"]))
    per_day: Any = defaultdict(int)
    for (_, day), amounts in daily.items():
        per_day[day] += len(amounts)
    return {
        "daily": {key: (sum(amounts), len(amounts), len(amounts) * 2) for key, amounts in daily.items()},
        "berlin": dict(berlin),
        "products": {key: (sum(a >= 5 for a in amounts), max(amounts)) for key, amounts in products.items()},
        "days": dict(per_day),
    }


def _stored(store: Any) -> dict[str, Any]:
    return {
        "daily": {
            (each.product_id, each.day): (each.total_amount, each.order_count, each.doubled)
            for each in store.find(Daily, {})
        },
        "berlin": {each.day: each.order_count for each in store.find(BerlinDay, {})},
        "products": {each.id: (each.large, each.best) for each in store.find(PerProduct, {})},
        "days": {each.day: each.orders for each in store.find(PerDay, {})},
    }


def _write(database: Any, chance: random.Random) -> None:
    """One write by somebody who knows nothing of rollups."""

    def moment() -> datetime:
        return FIRST + timedelta(minutes=chance.randrange(4 * 24 * 60))

    def sale() -> dict[str, Any]:
        amount = Decimal128(str(Decimal(chance.randrange(1000)) / 100))
        return {"product_id": chance.randrange(4), "amount": amount, "created_at": moment()}

    sales = database["sales"]
    ids = [each["_id"] for each in sales.find({}, {"_id": 1})]
    one = {"_id": chance.choice(ids)} if ids else {}
    what = chance.random()
    if what < 0.5 or not ids:
        sales.insert_one(sale())
    elif what < 0.62:
        sales.update_one(one, {"$set": {"created_at": moment()}})
    elif what < 0.7:
        sales.update_one(one, {"$set": {"product_id": chance.randrange(4)}})
    elif what < 0.76:
        sales.update_one(one, {"$set": {"amount": Decimal128("7.5")}})
    elif what < 0.82:
        sales.replace_one(one, sale())
    elif what < 0.95:
        sales.delete_one(one)
    elif what < 0.97:
        database["daily_summaries"].delete_one({})
    elif what < 0.98:
        database["berlin_days"].update_one({}, {"$set": {"order_count": 77}})
    else:
        database["per_product"].delete_many({})


@pytest.mark.heavy
def test_rollups_follow_writers_that_do_not_use_treadle(run, database):
    """Windows in UTC and over a change of the clock, an id as the key, a rollup of a rollup."""
    store = run.store(MODELS)
    store.setup()
    worker = store.worker()
    worker.run_until_idle()
    chance = random.Random(20240330)
    aware = database.with_options(codec_options=store.collection(Sale).codec_options)
    for _ in range(ROUNDS):
        for _ in range(WRITES):
            _write(aware, chance)
        worker.run_until_idle()
        assert _expected(list(aware["sales"].find())) == _stored(store)
        assert [] == store.verify()
    aware["sales"].delete_many({})
    worker.run_until_idle()
    assert {"daily": {}, "berlin": {}, "products": {}, "days": {}} == _stored(store)


def test_a_source_that_moves_on_before_its_event_is_read_leaves_nothing_behind(database):
    """A group that counted it in between must be told, though the document says nothing of it any more."""
    store = Store(database, [Sale, BerlinDay], limits=Limits(worker_batch_max=1))
    store.setup()

    def sale(days: int) -> dict[str, Any]:
        return {"product_id": 1, "amount": Decimal128("1"), "created_at": FIRST + timedelta(days=days)}

    def move(days: int) -> None:
        database["sales"].update_one({"_id": key}, {"$set": {"created_at": FIRST + timedelta(days=days)}})

    key = database["sales"].insert_one(sale(0)).inserted_id
    store.worker().run_until_idle()
    with database.client.start_session() as session:
        follower = stream.Follower(
            store.graph,
            store._capabilities(),
            name="worker",
            owner="test",
            session=session.session_id["id"],
            is_dead=lambda _: False,
        )
        assert store.runner.run(follower.lead(), session)
        database["sales"].insert_one(sale(1))
        move(1)
        # The event of the insertion is read, while the other sale is in the same group already.
        counted = {"day": FIRST + timedelta(hours=23), "order_count": 2}
        for _ in range(20):
            store.runner.run(follower.step(1.0, linger=False), session)
            if database["berlin_days"].find_one(counted):
                break
        assert 1 == database["berlin_days"].count_documents(counted)
        move(2)
        store.runner.run(follower.resign(), session)
    store.worker().run_until_idle()
    assert [] == store.verify()
    assert 2 == database["berlin_days"].count_documents({})
