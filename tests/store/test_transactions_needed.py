"""A standalone server: declarations that need transactions are refused before anything is written.

Covers: graph/graph, engine/write_path
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Generator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field
from pymongo import AsyncMongoClient, MongoClient

from tests.support import shared_standalone
from treadle import (
    Approximate,
    Archive,
    AsyncStore,
    BulkFailed,
    Conflict,
    Count,
    DataError,
    Day,
    DeclarationError,
    Delete,
    Document,
    DuplicateKey,
    ExtendedReference,
    Formula,
    History,
    Id,
    Insert,
    Links,
    Outlier,
    ParentReference,
    Rollup,
    Store,
    UpdatedAt,
    UsageError,
    migration,
)
from treadle.server.local import LocalServer

COMMANDS = "restart mongod with --replSet rs0, then run rs.initiate() once in mongosh"


class Review(Document, collection="reviews"):
    product_id: int = 1


class Product(Document, collection="products"):
    id: int = 1
    reviews: Annotated[int, Count(Review, by="product_id")] = 0


class Customer(Document, collection="customers"):
    id: int = 1
    name: str = "Ada"


class CustomerCard(BaseModel):
    name: str


class Order(Document, collection="orders"):
    customer_id: int = 1
    customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None


class Square(Document, collection="squares"):
    side: int = 2
    area: Annotated[int | None, Formula({"$multiply": ["$side", "$side"]})] = None


class Sale(Document, collection="sales"):
    at: dt.datetime = dt.datetime(2026, 3, 1)


class Daily(Document, collection="daily", rollup=Rollup(Sale, keys={"day": Day("at")}, maintain="schedule",
                                                        every=dt.timedelta(hours=1))):  # fmt: skip
    day: dt.datetime
    sales: Annotated[int, Count()] = 0


class Policy(Document, collection="policies", history=History()):
    limit: int = 1


class Letter(Document, collection="letters",
             archive=Archive(by="at", after=dt.timedelta(days=1), into="old_letters")):  # fmt: skip
    at: dt.datetime = dt.datetime(2026, 3, 1)


class Item(Document, collection="items", links=Links("links")):
    links: list[Id] = []


class Node(Document, collection="nodes", tree=ParentReference(parent="parent_id")):
    parent_id: Id | None = None


class Team(Document, collection="teams"):
    id: int = 1
    members: Annotated[list[int], Outlier(limit=3, overflow="team_members")] = []


class Page(Document, collection="pages"):
    id: int = 1
    shares: Annotated[int, Approximate(every=1, buffer="sampled")] = 0


class Post(Page, collection="posts"):
    likes: Annotated[int, Approximate(within=dt.timedelta(hours=1), buffer="durable")] = 0


class Visited(Document, collection="visited"):
    id: int = 1
    views: Annotated[int, Approximate(within=dt.timedelta(hours=1))] = 0


# By the label that the message must begin with: the models, and the first document of one of them.
REFUSED: dict[str, tuple[list[type[Document]], Callable[[], Document]]] = {
    "Product.reviews": ([Review, Product], Review),
    "Order.customer": ([Customer, Order], Order),
    "Square.area": ([Square], Square),
    "Daily": ([Sale, Daily], Sale),
    "Policy: history": ([Policy], Policy),
    "Letter: archive": ([Letter], Letter),
    "Item: links": ([Item], Item),
    "Node (tree=)": ([Node], Node),
    "Team.members": ([Team], Team),
    "Post.likes: approximation": ([Post], Post),
    "Visited.views: approximation": ([Visited], Visited),
}
EACH = pytest.mark.parametrize("label", REFUSED)


@pytest.fixture(scope="module")
def alone() -> Generator[LocalServer]:
    with shared_standalone() as server:
        yield server


@pytest.fixture
def plain(alone: LocalServer) -> Generator[Any]:
    """An empty database on a standalone server."""
    with MongoClient[Any](alone.uri, tz_aware=True) as client:
        client.drop_database("plain")
        yield client["plain"]


def check(error: DeclarationError, label: str) -> None:
    assert "transactions-needed" == error.code
    assert str(error).startswith(label)
    assert "needs transactions, which this standalone server does not have" in str(error)
    assert COMMANDS in str(error)


# -- refused ---------------------------------------------------------------------------------------


@EACH
def test_setup_and_the_first_write_refuse_it(plain, label):
    models, make = REFUSED[label]
    for call in (
        lambda store: store.setup(),
        lambda store: store.setup(dry_run=True),
        lambda store: store.insert(make()),
        lambda store: store.verify(),
    ):
        with pytest.raises(DeclarationError) as refused:
            call(Store(plain, models))
        check(refused.value, label)
    assert [] == plain.list_collection_names()


def test_a_flush_from_memory_is_refused_and_loses_nothing(alone, plain):
    async def flush() -> None:
        async with AsyncMongoClient[Any](alone.uri) as own:
            counter = AsyncStore(own["plain"], [Visited]).counter(Visited, "views")
            await counter.add(7)
            with pytest.raises(DeclarationError) as refused:
                await counter.flush()
            check(refused.value, "Visited.views: approximation")
            assert {7: 1} == await counter.pending()

    asyncio.run(flush())
    assert [] == plain.list_collection_names()


def test_a_transaction_block_is_refused(plain):
    store = Store(plain, [Customer])
    with pytest.raises(UsageError) as refused, store.transaction():
        store.insert(Customer())
    assert "transactions-unavailable" == refused.value.code
    assert COMMANDS in str(refused.value)


# -- plain, polymorphic and versioned models ---------------------------------------------------------


class Animal(Document, collection="animals", discriminator="kind", revision="revision", soft_delete="gone"):
    id: int
    name: Annotated[str, Field(max_length=5)] = ""
    weights: Annotated[list[int], Field(max_length=2)] = []
    revision: int = 0
    gone: dt.datetime | None = None
    touched: Annotated[dt.datetime | None, UpdatedAt()] = None


class Cat(Animal, kind="cat"):
    lives: Annotated[int, Field(ge=0)] = 9


class Dog(Animal, kind="dog"):
    bones: int = 0


class User(Document, collection="users", version=2):
    id: int
    phones: list[str] = []


@migration(User, from_version=1)
def phone_to_phones(document: dict[str, Any]) -> dict[str, Any]:
    document["phones"] = [document.pop("phone")]
    return document


ANIMALS = [Animal, Cat, Dog]


def test_plain_and_polymorphic_models_are_read_and_written(plain):
    store = Store(plain, ANIMALS)
    store.setup()
    store.insert(Cat(id=1, name="Tom"))
    store.insert_many([Dog(id=2), Dog(id=3)])
    assert 8 == store.update(Cat, 1, {"$inc": {"lives": -1}}).lives
    assert [4] == store.update(Animal, 1, {"$push": {"weights": 4}}).weights
    assert 2 == store.update_many(Dog, {}, {"$inc": {"bones": 1}})
    tom = store.get(Cat, 1)
    assert tom.touched is not None
    assert 2 == store.replace(tom.model_copy(update={"name": "Tim"})).revision - tom.revision + 1
    with pytest.raises(Conflict):
        store.replace(tom)
    assert store.upsert(Dog, {"_id": 4}, {"$inc": {"bones": 1}}, insert=Dog(id=4)).created
    assert not store.upsert(Dog, {"_id": 4}, {"$inc": {"bones": 1}}, insert=Dog(id=4)).created
    assert 1 == store.bulk([Insert(Dog(id=5)), Delete(Dog, 2)]).inserted
    store.delete(Animal, 3)
    assert "cat dog dog" == " ".join(type(each).__name__.lower() for each in store.find(Animal, sort="_id"))
    assert 3 == store.restore(Animal, 3).id
    assert [] == store.verify()


def test_a_refused_write_changes_nothing(plain):
    store = Store(plain, ANIMALS)
    store.insert(Cat(id=1, name="Tom", lives=1, weights=[1, 2]))
    before = plain["animals"].find_one()
    for update in ({"$inc": {"lives": -2}}, {"$push": {"weights": 3}}, {"$set": {"name": "Thomas"}}):
        for refuse in (store.update, store.update_many):
            with pytest.raises(DataError):
                refuse(Cat, {"_id": 1}, update)
    with pytest.raises(DuplicateKey):
        store.insert_many([Dog(id=2), Dog(id=1)])
    with pytest.raises(BulkFailed):
        store.bulk([Insert(Dog(id=1))], ordered=False)
    assert [before] == list(plain["animals"].find())


def test_versioned_models_are_read_and_written_but_not_migrated(plain):
    store = Store(plain, [User])
    store.setup()
    plain["users"].insert_one({"_id": 1, "phone": "1"})
    assert ["1"] == store.get(User, 1).phones
    store.insert(User(id=2, phones=["2"]))
    assert ["2", "3"] == store.update(User, 2, {"$push": {"phones": "3"}}).phones
    for call in (store.migrate, lambda model: store.migrate(model, dry_run=True)):
        with pytest.raises(UsageError) as refused:
            call(User)
        assert "transactions-unavailable" == refused.value.code
        assert COMMANDS in str(refused.value)
    assert {"_id": 1, "phone": "1"} == plain["users"].find_one({"_id": 1})
    with pytest.raises(UsageError) as refused:
        store.update(User, {"_id": 1}, {"$push": {"phones": "2"}})
    assert "transactions-unavailable" == refused.value.code
