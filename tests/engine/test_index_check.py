"""Writes are refused while the server lacks a unique index on which they rely."""

from __future__ import annotations

import asyncio
import warnings
from datetime import datetime
from typing import Annotated, Any

import pytest
from pymongo import AsyncMongoClient, IndexModel, MongoClient
from pymongo.errors import OperationFailure

from tests.kit.command_log import CommandLog
from treadle import (
    AsyncStore,
    Count,
    Delete,
    Document,
    ExtendedReference,
    Indexed,
    Insert,
    NotSetUp,
    Outlier,
    Rollup,
    Store,
    TreadleError,
    Update,
)
from treadle.engine.index_check import require_unique_indexes

LOOKS = ("listIndexes", "listCollections")


class Account(Document, collection="accounts"):
    email: Annotated[str, Indexed(unique=True)]
    size: Annotated[int, Indexed()] = 0
    fans: Annotated[list[int], Outlier(limit=2, overflow="more_fans")] = []


class Member(Document, collection="members", soft_delete="left_at"):
    email: Annotated[str, Indexed(unique=True)]
    size: int = 0
    left_at: datetime | None = None


class Plain(Document, collection="plain"):
    name: Annotated[str, Indexed()] = ""


class Pair(Document, collection="pairs", indexes=[IndexModel([("a", 1), ("b", -1)], unique=True)]):
    a: int
    b: int = 0


class Item(Document, collection="items", discriminator="type"):
    title: str = ""


class Book(Item, kind="book"):
    isbn: Annotated[str | None, Indexed(unique=True)] = None


class Film(Item, kind="film"):
    minutes: int = 0


class Carrier(Document, collection="carriers"):
    code: str
    name: str = ""
    loads: Annotated[int, Count("Load", by="carrier", to="code")] = 0


class Load(Document, collection="loads"):
    carrier: str
    carrier_name: Annotated[str | None, ExtendedReference(Carrier, by="carrier", to="code", field="name")] = (
        None
    )


class Sale(Document, collection="sales"):
    day: str


class Days(Document, collection="days", rollup=Rollup(Sale, keys={"day": "day"})):
    day: str
    sales: Annotated[int, Count()] = 0


MODELS = [Account, Member, Plain, Pair, Item, Book, Film]


@pytest.fixture
def log() -> CommandLog:
    return CommandLog()


@pytest.fixture
def make(server, database, log):
    """Make a Store whose commands are logged."""
    with MongoClient[dict[str, Any]](server.uri, event_listeners=[log]) as client:
        yield lambda models: Store(client[database.name], models)


def upsert(store: Store) -> Any:
    return store.upsert(Account, {"email": "a"}, {"$set": {"size": 1}}, Account(email="a"))


WRITES = {
    "insert": lambda store: store.insert(Account(email="a")),
    "insert_many": lambda store: store.insert_many([Account(email="a"), Account(email="a")]),
    "insert_many, unordered": lambda store: store.insert_many([Account(email="a")], ordered=False),
    "update": lambda store: store.update(Account, {"email": "a"}, {"$set": {"size": 1}}),
    "update_many": lambda store: store.update_many(Account, {}, {"$set": {"size": 1}}),
    "upsert": upsert,
    "replace": lambda store: store.replace(Account(email="a")),
    "change": lambda store: store.change(Account(email="a"), email="b"),
    "delete": lambda store: store.delete(Account, {"email": "a"}),
    "delete_many": lambda store: store.delete_many(Account, {}),
    "array": lambda store: store.array(Account, "fans", Account(email="a").id).append(1),
    "bulk": lambda store: store.bulk([Insert(Plain()), Insert(Account(email="a"))]),
    "bulk, unordered": lambda store: store.bulk([Insert(Plain()), Delete(Account, {})], ordered=False),
    "bulk in chunks": lambda store: store.bulk(
        [*(Insert(Plain()) for _ in range(1_500)), Update(Account, {}, {"$set": {"size": 1}})]
    ),
    "restore": lambda store: store.restore(Member, Account(email="a").id),
    "purge": lambda store: store.purge(Member),
    "soft delete": lambda store: store.delete(Member, {"email": "a"}),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_is_refused_before_anything_is_sent(make, log, write):
    store = make(MODELS)
    store.recover()
    for _ in range(2):
        log.clear()
        with pytest.raises(TreadleError) as raised:
            write(store)
        assert "index-missing" == raised.value.code
        assert "email_1 (email 1) unique" in str(raised.value)
        assert "treadle setup --app" in str(raised.value)
        assert {"listIndexes"} == set(log.names)
    assert [] == store.find(Plain).to_list()


def test_inside_a_transaction_the_refused_call_leaves_it_open(make):
    store = make(MODELS)
    store.collection(Account).insert_one({"email": "a"})
    with store.transaction():
        store.insert(Plain(name="kept"))
        with pytest.raises(TreadleError, match="index-missing"):
            store.insert(Account(email="a"))
    assert ["kept"] == [each.name for each in store.find(Plain)]


def test_another_process_ends_the_refusal(make, log):
    store = make(MODELS)
    with pytest.raises(TreadleError, match="index-missing"):
        store.insert(Account(email="a"))
    make(MODELS).setup()
    log.clear()
    store.insert(Account(email="a"))
    assert log.count(LOOKS)
    log.clear()
    store.insert(Account(email="b"))
    store.update(Account, {"email": "b"}, {"$set": {"size": 1}})
    assert 0 == log.count(LOOKS)
    with pytest.raises(TreadleError, match="duplicate-key"):
        store.insert(Account(email="b"))


def test_its_own_set_up_ends_the_refusal_without_a_look(make, log):
    store = make(MODELS)
    with pytest.raises(TreadleError, match="index-missing"):
        store.insert(Account(email="a"))
    store.setup(dry_run=True)
    with pytest.raises(TreadleError, match="index-missing"):
        store.insert(Account(email="a"))
    store.setup()
    log.clear()
    store.insert(Account(email="a"))
    assert 0 == log.count(LOOKS)


def test_plain_models_send_nothing_more(make, log):
    store = make(MODELS)
    store.insert(Plain())
    store.insert_many([Plain(), Plain()])
    store.update(Plain, {}, {"$set": {"name": "a"}})
    store.delete_many(Plain, {})
    assert 0 == log.count(LOOKS)


@pytest.mark.parametrize(
    ("document", "index"),
    [(Pair(a=1), "a_1_b_-1"), (Book(), "isbn_1_book"), (Film(), "isbn_1_book")],
    ids=["keyword", "kind", "another kind"],
)
def test_other_unique_indexes(make, document, index):
    store = make(MODELS)
    with pytest.raises(TreadleError, match=rf"{index} .*index-missing"):
        store.insert(document)
    store.setup()
    store.insert(document)


def test_an_index_of_another_kind_is_not_enough(make):
    store = make(MODELS)
    partial = {"partialFilterExpression": {"type": "film"}}
    store.collection(Item).create_index("isbn", name="films", unique=True, **partial)
    with pytest.raises(TreadleError, match="index-missing"):
        store.insert(Book(isbn="1"))


def test_an_index_over_all_documents_is_enough(make):
    store = make(MODELS)
    store.collection(Item).create_index("isbn", name="own", unique=True)
    store.insert(Book(isbn="1"))


@pytest.mark.parametrize("document", [Carrier(code="a"), Load(carrier="a")], ids=["named", "naming"])
def test_alternate_keys(make, document):
    store = make([Carrier, Load])
    with pytest.raises(TreadleError, match=r"'carriers' .*code_1 .*index-missing"):
        store.insert(document)
    store.setup()
    store.insert(document)


def test_rollups_refuse_the_writes_of_their_sources(make):
    store = make([Sale, Days])
    with pytest.raises(TreadleError, match=r"Sale .*'days' .*day_1 .*index-missing"):
        store.insert(Sale(day="a"))
    store.setup()
    store.insert(Sale(day="a"))


def test_other_missing_indexes_are_a_warning_once(make):
    store = make(MODELS)
    for model, field in ((Account, "email"), (Member, "email")):
        partial = {"partialFilterExpression": {"left_at": None}} if model is Member else {}
        store.collection(model).create_index(field, unique=True, **partial)
    with pytest.warns(NotSetUp, match="size_1") as warned:
        store.insert(Account(email="a"))
    assert [__file__] == [each.filename for each in warned]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.insert(Account(email="b"))
        store.insert(Member(email="b"))


@pytest.mark.parametrize("code", [13, 8000])
def test_a_login_that_may_not_list_indexes_may_write(make, code, caplog):
    plan = require_unique_indexes(make(MODELS).graph.entry(Account))
    next(plan)
    with pytest.raises(StopIteration):
        plan.throw(OperationFailure("not authorized", code))
    assert "accounts: cannot list its indexes" in caplog.text


def test_the_asyncio_store_refuses_and_warns_at_the_line_of_the_caller(server, database):
    async def body():
        async with AsyncMongoClient(server.uri) as client:
            store = AsyncStore(client[database.name], MODELS)
            with pytest.raises(TreadleError, match="index-missing"):
                await store.insert(Account(email="a"))
            await store.collection(Account).create_index("email", unique=True)
            with pytest.warns(NotSetUp, match="size_1") as warned:
                await store.insert(Account(email="a"))
            assert [__file__] == [each.filename for each in warned]

    asyncio.run(body())
