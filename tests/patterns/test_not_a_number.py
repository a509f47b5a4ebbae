"""What is not a number, in any form that BSON has: findings agree with the server, and clear."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson.decimal128 import Decimal128
from pydantic import BaseModel, Field

from treadle import (
    Average,
    Bucket,
    Count,
    Document,
    ExtendedReference,
    Max,
    Min,
    Rollup,
    Subset,
    Sum,
)
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.query.comparison import same

INFINITE, NAN = float("inf"), float("nan")
ODD: dict[str, list[Any]] = {
    "double": [NAN],
    "decimal": [Decimal128("NaN")],
    "signalling": [Decimal128("sNaN")],
    "all": [NAN, Decimal128("sNaN"), Decimal128("-NaN")],
    "infinite": [INFINITE, Decimal128("-Infinity")],
    "zero": [-0.0, Decimal128("-0")],
    "large": [Decimal128("9.9E6144"), Decimal128("9.9E6144")],
    "small": [Decimal128("1E-6176")],
}


# Fields that can hold such sums; where they cannot, the target is set aside (test_computed_corners.py).
Odd = Annotated[Decimal, Field(allow_inf_nan=True)]


class Sale(Document, collection="sales", validation="off"):
    shop_id: str
    group: Any = None
    amount: Any = None


class Amount(Document, collection="amounts", validation="off"):
    sale_id: Any
    amount: Annotated[Any, ExtendedReference(Sale, by="sale_id", field="amount")] = None


class Card(BaseModel):
    amount: Any = None


class Shop(Document, collection="shops", validation="off"):
    id: str
    number: Annotated[int, Count(Sale, by="shop_id")] = 0
    total: Annotated[Odd, Sum(Sale, "amount", by="shop_id")] = Decimal(0)
    average: Annotated[Odd | None, Average(Sale, "amount", by="shop_id")] = None
    least: Annotated[Any, Min(Sale, "amount", by="shop_id")] = None
    most: Annotated[Any, Max(Sale, "amount", by="shop_id")] = None
    largest: Annotated[list[Card], Subset(Sale, by="shop_id", sort="-amount", size=2)] = []


class Group(Document, collection="groups", validation="off", rollup=Rollup(Sale, keys={"group": "group"})):
    group: Any
    number: Annotated[int, Count()]
    total: Annotated[Odd, Sum("amount")]
    most: Annotated[Any, Max("amount")]


MODELS = [Sale, Amount, Shop, Group]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("key", ["plain", "odd"])
def test_findings_clear(run, database, name, key):
    """Stored by another writer, as a value and as the key of a group: found, mended, and done with."""
    store = run.store(MODELS)
    store.setup()
    for shop in ("a", "b"):
        store.insert(Shop(id=shop))
    store.insert_many([Sale(shop_id=shop, group="g", amount=Decimal(5)) for shop in "ab"])
    raw = database.sales.with_options(codec_options=CODEC_OPTIONS)
    made = [{"shop_id": "a", "group": each if key == "odd" else "g", "amount": each} for each in ODD[name]]
    ids = raw.insert_many(made).inserted_ids
    database.amounts.insert_many([{"sale_id": each} for each in ids])
    assert store.verify()
    store.repair()
    assert [] == store.verify()
    assert 0 == store.repair()
    store.rebuild()
    assert [] == store.verify()
    assert 5 == store.get(Shop, "b").most == store.get(Shop, "b").total
    # And on the way of writes: one more, and one less.
    extra = store.insert(Sale(shop_id="a", group="g", amount=Decimal(1)))
    store.delete(Sale, extra.id)
    database.sales.delete_many({"_id": {"$in": ids[1:]}})
    store.delete_many(Sale, {"_id": ids[0]})
    store.repair()
    assert [] == store.verify()


@pytest.mark.parametrize("name", ODD)
def test_statistics_of_buckets_agree_with_the_server(run, database, name):
    class Measured(
        Document, collection="measured", validation="off",
        bucket=Bucket(key="sensor", time="ts", span=timedelta(hours=1), stats=("value",)),
    ):  # fmt: skip
        sensor: str
        ts: datetime
        value: Decimal | None = None

    store = run.store([Measured])
    store.setup()
    start = datetime(2026, 1, 1, tzinfo=UTC)
    store.insert_many(
        [Measured(sensor="s", ts=start + timedelta(minutes=each), value=Decimal(each)) for each in range(4)]
    )
    raw = database.measured.with_options(codec_options=CODEC_OPTIONS)
    bucket = raw.find_one()
    values = [*ODD[name], Decimal128("2")]
    rows = [{"ts": start + timedelta(minutes=number), "value": each} for number, each in enumerate(values)]
    raw.update_one({"_id": bucket["_id"]}, {"$set": {"readings": rows}})
    assert store.verify()
    store.repair()
    assert [] == store.verify()
    store.rebuild()
    assert [] == store.verify()
    group = {"_id": None, **{part: {f"${part}": "$value"} for part in ("min", "max", "sum")}}
    database.flat.insert_many(rows)
    (expected,) = database.flat.aggregate([{"$group": group}])
    stored = raw.find_one()["stats"]["value"]
    for part in ("min", "max", "sum"):
        assert same(expected[part], stored[part]), part
