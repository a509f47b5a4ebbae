"""upsert, change, update's options, insert_many past refused documents, and the errors of writes.

Covers: engine/upserts, engine/document_layout, store/async_writer
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient, IndexModel
from pymongo.errors import DuplicateKeyError

from tests.support import race
from treadle import (
    AsyncStore,
    Bucket,
    BulkFailed,
    Count,
    DataError,
    Document,
    DuplicateKey,
    Id,
    Indexed,
    Store,
    Sum,
    TreadleError,
    UsageError,
    migration,
)


class Account(Document, collection="accounts"):
    email: Annotated[str, Indexed(unique=True)]
    visits: int = 0
    tags: list[str] = []
    nickname: str | None = None


class Shop(Document, collection="shops"):
    name: str = ""
    sales: Annotated[int, Count("Sale", by="shop_id")] = 0
    total: Annotated[int, Sum("Sale", "amount", by="shop_id")] = 0


class Sale(Document, collection="sales", indexes=[IndexModel([("shop_id", 1), ("number", 1)], unique=True)]):
    shop_id: Id
    number: int
    amount: int = 0


class Thing(Document, collection="things", discriminator="kind"):
    name: str


class Book(Thing, kind="book"):
    isbn: Annotated[str | None, Indexed(unique=True)] = None
    read: int = 0


class Film(Thing, kind="film"):
    minutes: int = 0


class Note(Document, collection="notes", version=2):
    slug: Annotated[str, Indexed(unique=True)]
    body: str = ""
    rank: int = 0


@migration(Note, from_version=1)
def rename(document: dict[str, Any]) -> dict[str, Any]:
    document["body"] = document.pop("text", "")
    return document


MODELS = [Account, Shop, Sale, Thing, Book, Film, Note]


@pytest.fixture
def store(run):
    store = run.store(MODELS)
    store.setup()
    return store


# -- upsert ------------------------------------------------------------------------------------


@pytest.mark.quick
def test_upsert_inserts_then_updates(store):
    first = store.upsert(
        Account, {"email": "a"}, {"$inc": {"visits": 1}}, insert=Account(email="a", visits=7)
    )
    assert (True, 7) == (first.created, first.document.visits)
    second = store.upsert(Account, {"email": "a"}, {"$inc": {"visits": 1}}, insert=Account(email="a"))
    assert (False, 8, first.document.id) == (second.created, second.document.visits, second.document.id)
    by_id = store.upsert(Account, first.document.id, {"$inc": {"visits": 1}}, insert=second.document)
    assert (False, 9) == (by_id.created, by_id.document.visits)


@pytest.mark.parametrize(
    "filter",
    [{"nickname": "x"}, {}, {"email": {"$gt": "a"}}, {"$or": [{"email": "a"}, {"email": "b"}]}],
)
def test_upsert_without_a_unique_index_is_refused(store, filter):
    with pytest.raises(UsageError, match="unique") as caught:
        store.upsert(Account, filter, {"$inc": {"visits": 1}}, insert=Account(email="a"))
    assert "upsert-not-unique" == caught.value.code
    assert 0 == store.count(Account)


def test_upsert_of_a_kind_goes_by_its_partial_index(store):
    store.insert(Film(name="x"))
    for _ in range(2):
        found = store.upsert(Book, {"isbn": "1"}, {"$inc": {"read": 1}}, insert=Book(name="x", isbn="1"))
    assert (False, 1) == (found.created, found.document.read)
    with pytest.raises(UsageError) as caught:
        store.upsert(Book, {"isbn": None}, {"$inc": {"read": 1}}, insert=Book(name="x"))
    assert "upsert-not-unique" == caught.value.code


@pytest.mark.parametrize("derived", [False, True])
def test_16_threads_make_one_document_and_lose_no_increment(database, derived):
    with Store(database, MODELS) as store:
        store.setup()
        shop = store.insert(Shop())

        def upsert() -> None:
            if derived:
                filter = {"shop_id": shop.id, "number": 1}
                store.upsert(Sale, filter, {"$inc": {"amount": 1}}, insert=Sale(**filter, amount=1))
            else:
                store.upsert(
                    Account, {"email": "a"}, {"$inc": {"visits": 1}}, insert=Account(email="a", visits=1)
                )

        race(*[upsert] * 16)
        if derived:
            assert [16] == [sale.amount for sale in store.find(Sale)]
            assert (1, 16) == (store.get(Shop, shop.id).sales, store.get(Shop, shop.id).total)
        else:
            assert [16] == [account.visits for account in store.find(Account)]


def test_100_tasks_make_one_document_and_lose_no_increment(server, database):
    async def body() -> None:
        async with AsyncMongoClient(server.uri) as client:
            store = AsyncStore(client[database.name], MODELS)
            await store.setup()
            shop = await store.insert(Shop())
            filter = {"shop_id": shop.id, "number": 1}
            done = await asyncio.gather(
                *[
                    store.upsert(Sale, filter, {"$inc": {"amount": 1}}, insert=Sale(**filter, amount=1))
                    for _ in range(100)
                ]
            )
            assert 1 == sum(each.created for each in done)
            assert 100 == (await store.require(Sale, filter)).amount
            assert 100 == (await store.require(Shop, shop.id)).total

    asyncio.run(body())


# -- change and update ----------------------------------------------------------------------------


@pytest.mark.quick
def test_change_writes_only_the_named_fields(store):
    account = store.insert(Account(email="a", nickname="x"))
    store.update(Account, account.id, {"$set": {"visits": 5}})
    changed = store.change(account, nickname=None, tags=["new"])
    assert (5, None, ["new"], "a") == (changed.visits, changed.nickname, changed.tags, changed.email)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"nmickname": "y"}, "field-unknown"),
        ({"visits": "many"}, "document-invalid"),
        ({"id": ObjectId()}, "update-invalid"),
        ({}, "update-invalid"),
    ],
)
def test_change_refuses_what_the_model_does(store, fields, code):
    account = store.insert(Account(email="a"))
    with pytest.raises(UsageError) as caught:
        store.change(account, **fields)
    assert code == caught.value.code
    assert account == store.get(Account, account.id)


def test_change_of_maintained_fields_and_of_missing_documents_is_refused(store):
    shop = store.insert(Shop())
    with pytest.raises(UsageError) as caught:
        store.change(shop, sales=3)
    assert "field-maintained" == caught.value.code
    with pytest.raises(DataError) as missing:
        store.change(Account(email="x"), visits=1)
    assert "document-gone" == missing.value.code


@pytest.mark.parametrize("model", [Account, Shop, Film, Note])
def test_update_returns_the_former_document_and_picks_the_first(store, model):
    made = {
        Account: lambda n: Account(email=str(n), visits=n),
        Shop: lambda n: Shop(name=str(n)),
        Film: lambda n: Film(name="f", minutes=n),
        Note: lambda n: Note(slug=str(n), rank=n),
    }[model]
    field = {Account: "visits", Shop: "name", Film: "minutes", Note: "rank"}[model]
    documents = store.insert_many([made(n) for n in (1, 2, 3)])
    value = "9" if model is Shop else 9
    before = store.update(model, {}, {"$set": {field: value}}, sort=f"-{field}", returns="before")
    assert documents[2] == before
    assert value == getattr(store.get(model, documents[2].id), field)
    assert documents[0] == store.update(model, {}, {"$set": {field: value}}, sort=field, returns="before")


def test_update_sorts_among_older_versions(store, database):
    store.insert(Note(slug="b", rank=1))
    database["notes"].insert_one({"slug": "a", "text": "old", "rank": 0})
    assert "a" == store.update(Note, {}, {"$inc": {"rank": 5}}, sort="rank").slug


def test_update_takes_array_filters(store):
    account = store.insert(Account(email="a", tags=["x", "y", "x"]))
    after = store.update(Account, account.id, {"$set": {"tags.$[each]": "z"}}, array_filters=[{"each": "x"}])
    assert ["z", "y", "z"] == after.tags


# -- insert_many ------------------------------------------------------------------------------------


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("model", [Account, Sale])
def test_ordered_insert_many_stores_all_or_nothing(store, looked, model):
    shop = store.insert(Shop())
    make = (
        (lambda n: Account(email=str(n))) if model is Account else (lambda n: Sale(shop_id=shop.id, number=n))
    )
    documents = [make(1), make(2), make(1)]
    if looked:
        assert all(each.id for each in documents)
    with pytest.raises(DuplicateKey) as caught:
        store.insert_many(documents)
    assert 0 == store.count(model)
    assert 0 == store.get(Shop, shop.id).sales
    assert isinstance(caught.value, DuplicateKeyError)


@pytest.mark.parametrize("model", [Account, Sale])
def test_unordered_insert_many_goes_on_past_refused_documents(store, model):
    shop = store.insert(Shop())
    make = (
        (lambda n: Account(email=str(n))) if model is Account else (lambda n: Sale(shop_id=shop.id, number=n))
    )
    store.insert(make(0))
    with pytest.raises(BulkFailed) as caught:
        store.insert_many([make(n) for n in (0, 1, 2, 1, 3)], ordered=False)
    assert "bulk-failed" == caught.value.code
    assert [(0, "duplicate-key"), (3, "duplicate-key")] == [
        (each.position, each.code) for each in caught.value.failures
    ]
    assert all(each.reason for each in caught.value.failures)
    assert 4 == store.count(model)
    assert (4 if model is Sale else 0) == store.get(Shop, shop.id).sales
    assert 2 == len(store.insert_many([make(7), make(8)], ordered=False))


def test_a_document_that_cannot_be_encoded_does_not_stop_the_others(store):
    bad = Account(email="a")
    bad.visits = 2**70
    with pytest.raises(BulkFailed) as caught:
        store.insert_many([bad, Account(email="b")], ordered=False)
    assert [(0, "value-not-storable")] == [(each.position, each.code) for each in caught.value.failures]
    assert ["b"] == [each.email for each in store.find(Account)]


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("call", ["insert", "insert_many", "update", "replace", "upsert", "change"])
def test_a_duplicate_is_told_with_its_index(store, call):
    second = store.insert_many([Account(email="a"), Account(email="b")])[1]
    second.email = "a"
    calls = {
        "insert": lambda: store.insert(Account(email="a")),
        "insert_many": lambda: store.insert_many([Account(email="c"), Account(email="a")]),
        "update": lambda: store.update(Account, second.id, {"$set": {"email": "a"}}),
        "replace": lambda: store.replace(second),
        "upsert": lambda: store.upsert(
            Account, {"email": "b"}, {"$set": {"email": "a"}}, insert=Account(email="b")
        ),
        "change": lambda: store.change(second, email="a"),
    }
    with pytest.raises(DuplicateKey) as caught:
        calls[call]()
    error = caught.value
    assert isinstance(error, UsageError)
    assert isinstance(error, DuplicateKeyError)
    assert ("duplicate-key", "email_1", ("email",)) == (error.code, error.index, error.fields)
    assert 11000 == error.details["code"]
    assert str(error).endswith("duplicate-key")


@pytest.mark.parametrize("given", [{"email": "a"}, Account, 5])
def test_what_is_no_document_is_told(store, given):
    for call in (store.insert, store.replace, lambda each: store.insert_many([each])):
        with pytest.raises(UsageError) as caught:
            call(given)
        assert "model-unknown" == caught.value.code
        assert (
            "dict" if isinstance(given, dict) else type(given).__name__ if given == 5 else "Account(…)"
        ) in (str(caught.value))
    with pytest.raises(UsageError, match="the class itself"):
        store.find_one(given if given is not Account else Account(email="x"), {})


def test_a_coroutine_is_told_as_such(store):
    async def document() -> Account:
        return Account(email="a")

    given = document()
    with pytest.raises(UsageError, match="await"):
        store.insert(given)
    given.close()


def test_what_an_upsert_would_insert_is_validated_first(store, database):
    account = Account(email="a")
    account.visits = "many"
    for each in (account, Account.model_construct(email="a", visits=None)):
        with pytest.raises(UsageError) as raised:
            store.upsert(Account, {"email": "a"}, {"$inc": {"visits": 1}}, insert=each)
        assert "document-invalid" == raised.value.code
    assert 0 == database.accounts.count_documents({})


def test_insert_many_of_one_document_says_so(store):
    with pytest.raises(UsageError, match="got one Account; use insert"):
        store.insert_many(Account(email="a"))


class Reading(
    Document, collection="readings", bucket=Bucket(key="sensor", time="ts", span=timedelta(hours=1))
):
    sensor: str
    ts: datetime
    value: int = 0


def test_readings_are_changed_and_shown_before(run):
    store = run.store([Reading])
    store.setup()
    reading = store.insert(Reading(sensor="a", ts=datetime(2026, 1, 1, tzinfo=UTC), value=1))
    assert 2 == store.change(reading, value=2).value
    assert 2 == store.update(Reading, {"sensor": "a"}, {"$inc": {"value": 1}}, returns="before").value
    assert 3 == store.get(Reading, reading.id).value
    for code, refused in {
        "document-invalid": lambda: store.change(reading, value="much"),
        "document-gone": lambda: store.change(store.delete(Reading, reading.id), value=3),
        "update-invalid": lambda: store.update(Reading, reading.id, {"$inc": {"value": 1}}, returns="now"),
        "layout-missing": lambda: store.update(Reading, {}, {"$inc": {"value": 1}}, sort="-ts"),
    }.items():
        with pytest.raises(TreadleError) as raised:
            refused()
        assert code == raised.value.code
