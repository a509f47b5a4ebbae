"""Models with a shard key: no command by id goes out without it, and what cannot work is refused by name.

There is no mongos here. A command listener sees what would be sent to one, and
a proxy refuses what one refuses.

Covers: graph/shards
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel
from pymongo import IndexModel, MongoClient

from tests.kit.command_log import CommandLog
from tests.profiles import NOT_SUPPORTED, SET_FIELDS, Profile, ProfileProxy, stages_of
from treadle import (
    Count,
    Document,
    ExtendedReference,
    Id,
    Store,
    Subset,
    Sum,
    UsageError,
)
from treadle.graph.shards import LOOKUP, choices
from treadle.plan.capabilities import Capabilities
from treadle.upkeep import verify
from treadle.upkeep.set_up import STATE
from treadle.upkeep.verify import _looks


class Card(BaseModel):
    name: str


class OrderCard(BaseModel):
    amount: int


class Order(Document, collection="orders", shard_key=("region", "customer_id")):
    region: str
    customer_id: Id
    amount: int = 0
    customer: Annotated[Card | None, ExtendedReference("Customer", by="customer_id")] = None


class Customer(
    Document,
    collection="customers",
    shard_key=("region",),
    indexes=[IndexModel([("region", 1), ("email", 1)], unique=True)],
):
    region: str
    name: str
    email: str = ""
    orders: Annotated[int, Count(Order, by="customer_id")] = 0
    total: Annotated[int, Sum(Order, "amount", by="customer_id")] = 0
    last: Annotated[list[OrderCard], Subset(Order, by="customer_id", sort="-amount", size=2)] = []


class Followed(Document, collection="followed"):
    orders: Annotated[int, Count(Order, by="customer_id", maintain="stream")] = 0


KEYS = {"orders": ("region", "customer_id"), "customers": ("region",)}
MODELS = [Order, Customer]


def has(filter: Any, path: str) -> bool:
    return path in filter or any(has(part, path) for part in filter.get("$and", ()))


def filters_of(name: str, body: Any) -> Iterator[tuple[str, Any, bool]]:
    """Collection, filter, and whether the command is refused by a mongos without the key."""
    if name == "distinct":
        yield body[name], body["query"], False
    if name in ("find", "findAndModify"):
        yield body[name], body.get("filter", body.get("query", {})), name == "findAndModify"
    for each in body.get("updates", ()):
        yield body[name], each["q"], not each.get("multi", False)
    for each in body.get("deletes", ()):
        yield body[name], each["q"], each.get("limit") == 1
    if name == "aggregate" and body["pipeline"] and "$match" in body["pipeline"][0]:
        yield body[name], body["pipeline"][0]["$match"], False


def without_key(name: str, body: Any) -> list[Any]:
    """The filters by which a command speaks of documents of a sharded model, and not of their shard."""
    if body.get("comment") == LOOKUP:
        return []
    return [
        (name, collection, filter)
        for collection, filter, one in filters_of(name, body)
        if (choices(filter, "_id") is not None or one)
        and not all(has(filter, path) for path in KEYS.get(collection, ()))
    ]


def mongos_refuses(body: Any) -> tuple[int, str] | None:
    name = next(iter(body))
    if "startTransaction" in body or body.get("autocommit") is False:
        stages = {key for stage in stages_of(body) for key in stage}
        if stages & {"$lookup", "$graphLookup", "$unionWith"}:
            return NOT_SUPPORTED, "not allowed in a transaction on a sharded collection"
        if name == "create":
            return NOT_SUPPORTED, "collections are not made in a transaction over several shards"
    if name == "createIndexes" and body[name] in KEYS:
        for index in body["indexes"]:
            if index.get("unique") and [*index["key"]][: len(KEYS[body[name]])] != [*KEYS[body[name]]]:
                return 67, "cannot create unique index unless it begins with the shard key"
    if name == "findAndModify" and without_key(name, body):
        return 31_025, "query for sharded findAndModify must have the shard key"
    return None


@pytest.fixture
def sharded(server: Any, database: Any) -> Iterator[tuple[Store, CommandLog]]:
    """A store through the likeness of a mongos, and what it sent."""
    listener = CommandLog()
    with (
        ProfileProxy(server, Profile("mongos", mongos_refuses)) as proxy,
        MongoClient(proxy.uri, event_listeners=[listener]) as client,
    ):
        store = Store(client[database.name], MODELS)
        store.setup()
        listener.clear()
        yield store, listener


def test_no_command_by_id_goes_out_without_its_key(sharded, database):
    store, listener = sharded
    ann, ben = store.insert_many(
        [Customer(region="eu", name="Ann", email="a"), Customer(region="us", name="Ben", email="b")]
    )
    orders = store.insert_many([Order(region="eu", customer_id=ann.id, amount=n) for n in (1, 2, 3)])
    store.insert(Order(region="us", customer_id=ben.id, amount=9))
    store.update(Customer, ann.id, {"$set": {"name": "Anna"}})
    store.update(Order, {"amount": 2}, {"$inc": {"amount": 10}})
    store.update_many(Order, {"region": "eu"}, {"$inc": {"amount": 1}})
    store.replace(store.get(Customer, ben.id).model_copy(update={"name": "Benno"}))
    assert store.delete(Order, orders[0].id) is not None
    assert store.delete(Order, ObjectId()) is None
    assert store.update(Order, {"amount": 4711}, {"$set": {"amount": 1}}) is None
    assert "Anna" == store.get(Order, orders[1].id).customer.name
    assert "Benno" == store.find_one(Order, {"region": "us"}).customer.name
    assert ["Anna"] == [each.customer.name for each in store.find(Order, {"_id": orders[1].id})]
    assert [] == list(store.find(Order, {"_id": ObjectId()}))
    assert ["Anna"] == store.distinct(Order, "customer.name", {"_id": {"$in": [orders[1].id]}})
    got = store.get_many(Customer, [ann.id, ben.id])
    assert [(2, 17, [13, 4]), (1, 9, [9])] == [
        (each.orders, each.total, [card.amount for card in each.last]) for each in got
    ]
    database["customers"].update_one({"_id": ann.id}, {"$set": {"total": 0}})
    assert 1 == len(store.verify())
    assert 1 == store.repair()
    store.rebuild()
    assert [] == store.verify()
    store.delete_many(Order, {"region": "us"})
    assert 0 == store.get(Customer, ben.id).orders
    assert [] == [each for name, body in listener.commands for each in without_key(name, body)]
    assert listener.commands


def test_set_up_makes_the_collections_of_transactions(sharded, database):
    store, _ = sharded
    assert STATE <= set(database.list_collection_names())
    assert [] == store.setup()


def test_a_filter_without_the_key_takes_one_lookup(sharded):
    store, listener = sharded
    ann = store.insert(Customer(region="eu", name="Ann"))
    listener.clear()
    store.update(Customer, {"region": "eu", "_id": ann.id}, {"$set": {"name": "Anna"}})
    assert [] == [body for _, body in listener.commands if body.get("comment") == LOOKUP]
    store.update(Customer, ann.id, {"$set": {"name": "Ann"}})
    (lookup,) = [body for _, body in listener.commands if body.get("comment") == LOOKUP]
    assert {"_id": {"$in": [ann.id]}} == lookup["filter"]


def test_a_worker_reads_its_stream_through_one_router(server, database):
    routers = Profile("mongos", hello_hidden=SET_FIELDS, hello=(("msg", "isdbgrid"),))
    with ProfileProxy(server, routers) as one, ProfileProxy(server, routers) as other:
        both = one.uri.replace("/?", f",127.0.0.1:{other.port}/?").replace(
            "directConnection=true", "directConnection=false"
        )
        with MongoClient(both) as client, pytest.raises(UsageError, match="names 2") as refused:
            Store(client[database.name], [Followed, Customer, Order]).worker().run_until_idle()
        assert "stream-routers" == refused.value.code


def test_verify_waits_for_what_a_cold_shard_holds_up():
    more = _looks(Capabilities(sharded=True)) - _looks(Capabilities())
    assert verify.COLD_SHARD_SECONDS == verify.VERIFY_LOOK_SECONDS * more


def test_an_upsert_must_say_into_which_shard(database):
    store = Store(database, MODELS)
    from treadle.plan import find_one_and_update

    with pytest.raises(UsageError) as refused:
        store.runner.run(
            find_one_and_update("customers", {"email": "x"}, {"$set": {"name": "x"}}, upsert=True)
        )
    assert "shard-key-missing" == refused.value.code
    made = {"$set": {"name": "x"}, "$setOnInsert": {"region": "eu"}}
    document = store.runner.run(find_one_and_update("customers", {"_id": 1}, made, upsert=True))
    assert {"_id": 1, "region": "eu", "name": "x"} == document
