"""teardown(): what setup made is taken back, and nothing of the user's.

Covers: upkeep/teardown, upkeep/setup_record
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

import pytest
from pydantic import BaseModel
from pymongo import ASCENDING, IndexModel

from treadle import (
    Bucket,
    Count,
    DataError,
    Document,
    ExtendedReference,
    Formula,
    History,
    Id,
    Indexed,
    Outlier,
    Rollup,
    Store,
    Subset,
    Sum,
    UsageError,
)  # fmt: skip


class Line(Document, collection="unused"):
    """Only to have a second collection that nothing refers to."""

    tags: Annotated[list[str], Outlier(limit=2, overflow="line_overflow")] = []


class ShopCard(BaseModel):
    name: str


class Item(BaseModel):
    shop_id: Id
    shop: Annotated[ShopCard | None, ExtendedReference("Shop", by="shop_id")] = None
    sold_by: Annotated[
        str | None, ExtendedReference("Shop", by="shop_id", field="name", policy="snapshot")
    ] = None


class SaleCard(BaseModel):
    amount: int


class Shop(Document, collection="shops"):
    name: str
    sale_count: Annotated[int, Count("Sale", by="shop_id")] = 0
    label: Annotated[str | None, Formula({"$concat": ["$name", "!"]})] = None
    last_sales: Annotated[list[SaleCard], Subset("Sale", by="shop_id", sort="-id", size=2)] = []


class Sale(Document, collection="sales", indexes=[IndexModel([("amount", ASCENDING)])]):
    shop_id: Id
    amount: int
    code: Annotated[str | None, Indexed(unique=True)] = None
    items: list[Item] = []


class PerShop(Document, collection="per_shop", rollup=Rollup(Sale, keys={"shop_id": "shop_id"})):
    shop_id: Id
    total: Annotated[int, Sum("amount")] = 0


MODELS = [Shop, Sale, PerShop]


def state(database: Any) -> Any:
    """Every collection with its options, indexes and documents."""
    listed = {each["name"]: each for each in database.list_collections()}
    return {
        name: (
            each["type"],
            each["options"],
            sorted(database[name].index_information()) if each["type"] == "collection" else None,
            sorted(database[name].find(), key=lambda row: str(row["_id"])),
        )
        for name, each in listed.items()
    }


def test_what_setup_made_goes_and_what_was_there_stays(run, database) -> None:
    defaults = {"validationLevel": "strict", "validationAction": "error"}
    database.create_collection("sales", validator={"amount": {"$gte": 0}}, **defaults)
    database["sales"].create_index("shop_id", name="by_hand")
    database["shops"].create_index("name")
    before = state(database)
    store = run.store(MODELS)
    store.setup(validation="enforce")
    assert before != state(database)
    would = store.teardown(dry_run=True)
    done = store.teardown()
    assert would == done
    assert {("drop index", "sales"), ("restore validator", "sales"), ("remove validator", "shops")} <= {
        (each.what, each.collection) for each in done
    }
    left = state(database)
    # An empty collection is not dropped: a concurrent insert would be lost.
    assert [] == left.pop("per_shop")[3]
    left["shops"] = (*left["shops"][:1], {}, *left["shops"][2:])
    assert before == left
    assert [] == store.teardown()
    assert store.setup()


def test_fields_go_from_documents_and_arrays_but_snapshots_stay(run, database) -> None:
    store = run.store(MODELS)
    store.setup()
    shop = store.insert(Shop(name="corner"))
    item = {"shop_id": shop.id}
    sale = store.insert(Sale(shop_id=shop.id, amount=3, items=[item]))
    assert 1 == database["per_shop"].count_documents({})
    listed = store.teardown(dry_run=True, fields=True)
    assert listed == store.teardown(fields=True)
    assert {"_id": shop.id, "name": "corner"} == database["shops"].find_one()
    assert [{"shop_id": shop.id, "sold_by": "corner"}] == database["sales"].find_one({"_id": sale.id})[
        "items"
    ]
    assert {"shops", "sales"} == set(database.list_collection_names())
    kept = [each for each in listed if each.what == "keep"]
    assert ["items.sold_by is a snapshot, and cannot be computed again"] == [each.detail for each in kept]
    # Documents that are rebuilt are as before.
    store.setup()
    store.rebuild()
    assert [] == store.verify()
    assert 1 == store.get(Shop, shop.id).sale_count


def test_what_holds_the_only_copy_stays_and_is_counted(run, database) -> None:
    class Post(Document, collection="posts", history=History("posts_history")):
        tags: Annotated[list[str], Outlier(limit=1, overflow="post_overflow", page_size=2)] = []

    class Reading(
        Document, collection="readings", bucket=Bucket(key="sensor", time="at", span=dt.timedelta(hours=1))
    ):
        sensor: str
        at: dt.datetime
        value: float

    store = run.store([Post, Reading])
    store.setup()
    post = store.insert(Post())
    for tag in "abc":
        store.array(Post, "tags", post.id).append(tag)
    store.insert(Reading(sensor="s", at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC), value=1.0))
    sides = {"posts_history", "readings", *(n for n in database.list_collection_names() if "overflow" in n)}
    before = {name: list(database[name].find()) for name in sides}
    done = store.teardown(fields=True)
    assert sides == {each.collection for each in done if each.what == "keep"}
    assert before == {name: list(database[name].find()) for name in sides}
    assert {"readings.flat", "readings.summary"} == {
        each.collection for each in done if each.what == "drop view"
    }
    assert not [name for name in database.list_collection_names() if name.startswith("treadle.")]


def test_the_state_of_other_models_stays(run, database) -> None:
    one, other = run.store(MODELS), run.store([Line])
    one.setup()
    other.setup()
    rows = {"collection unused"}
    one.teardown(fields=True)
    assert rows <= {row["_id"] for row in database["treadle.setup"].find()}
    assert "collection shops" not in {row["_id"] for row in database["treadle.setup"].find()}
    assert [] == other.setup()
    other.teardown()
    assert "treadle.setup" not in database.list_collection_names()


def test_an_unknown_format_is_refused_by_setup_and_dropped_by_teardown(run, database) -> None:
    database["treadle.setup"].insert_one({"_id": "Shop.sale_count", "kind": "rule"})
    database["shops"].insert_one({"name": "old", "_treadle": {"n": 1}})
    database["shops"].create_index("name")
    store = run.store(MODELS)
    with pytest.raises(DataError, match="state-format-unknown"):
        store.setup()
    store.teardown(fields=True)
    assert ["shops"] == database.list_collection_names()
    assert [{"name": "old"}] == list(database["shops"].find({}, {"_id": 0}))
    assert store.setup()


def test_a_worker_that_leads_is_named(database) -> None:
    class Buyer(Document, collection="buyers"):
        sales: Annotated[int, Count("Bought", by="buyer_id", maintain="stream")] = 0

    class Bought(Document, collection="bought"):
        buyer_id: Id

    store = Store(database, [Buyer, Bought])
    store.setup()
    store.rebuild()
    lease = {"owner": "another", "session": None, "n": 5}
    later = [{"$set": {**lease, "until": {"$add": ["$$NOW", 60_000]}}}]
    database["treadle.leases"].update_one({"_id": "worker"}, later, upsert=True)
    with pytest.raises(UsageError, match="teardown-worker-running"):
        store.teardown()
    database["treadle.leases"].delete_one({"_id": "worker"})
    store.teardown(fields=True)
    assert not [name for name in database.list_collection_names() if name.startswith("treadle.")]
