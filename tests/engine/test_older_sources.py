"""Sources that are still stored in an older version: whoever reads them for others reads the current one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from treadle import (
    Average,
    Collect,
    Count,
    Day,
    Document,
    ExtendedReference,
    Max,
    Rollup,
    Subset,
    Sum,
    migration,
)

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Singer(Document, collection="singers", version=2):
    id: str
    name: str


@migration(Singer, from_version=1)
def _named(document: dict[str, Any]) -> dict[str, Any]:
    document["name"] = document.pop("stage_name")
    return document


class Card(BaseModel):
    name: str


class Song(Document, collection="songs"):
    singer_id: str
    singer: Annotated[Card | None, ExtendedReference(Singer, by="singer_id")] = None
    flat: Annotated[str | None, ExtendedReference(Singer, by="singer_id", field="name")] = None


class Sale(Document, collection="sales", version=2):
    shop_id: str
    amount: Decimal
    at: datetime = NOON
    good: bool = True


@migration(Sale, from_version=1)
def _renamed(document: dict[str, Any]) -> dict[str, Any]:
    document["shop_id"] = document.pop("shop")
    document["amount"] = document.pop("cents") / Decimal(100)
    document["good"] = document.pop("state") == "good"
    return document


class Item(BaseModel):
    amount: Decimal


def shop_models(maintain: str) -> list[type[Document]]:
    every = {"maintain": maintain, **({"every": timedelta(minutes=1)} if maintain == "schedule" else {})}

    class Shop(Document, collection="shops"):
        id: str
        number: Annotated[int, Count(Sale, by="shop_id", **every)] = 0
        total: Annotated[Decimal, Sum(Sale, "amount", by="shop_id", where={"good": True}, **every)] = Decimal(
            0
        )
        average: Annotated[Decimal | None, Average(Sale, "amount", by="shop_id", **every)] = None
        most: Annotated[Decimal | None, Max(Sale, "amount", by="shop_id", **every)] = None
        best: Annotated[list[Item], Subset(Sale, by="shop_id", sort="-amount", size=2, **every)] = []

    keys = {"shop_id": "shop_id", "day": Day("at")}

    class Daily(Document, collection="daily", rollup=Rollup(Sale, keys=keys, **every)):
        shop_id: str
        day: datetime
        number: Annotated[int, Count()]
        total: Annotated[Decimal, Sum("amount")]

    return [Sale, Shop, Daily]


def old_sale(shop: str, cents: int, state: str = "good") -> dict[str, Any]:
    return {"shop": shop, "cents": cents, "state": state, "at": NOON, "schema_version": 1}


def values(store: Any, models: list[type[Document]]) -> Any:
    shop = store.get(models[1], "a")
    daily = [(each.shop_id, each.number, each.total) for each in store.find(models[2], sort="shop_id")]
    amounts = [each.amount for each in shop.best]
    return shop.number, shop.total, shop.average, shop.most, amounts, daily


def test_a_copy_of_an_older_source(run, database):
    store = run.store([Singer, Song])
    database["singers"].insert_one({"_id": "a", "stage_name": "Ann"})
    song = store.insert(Song(singer_id="a"))
    assert ("Ann", "Ann") == (song.singer.name, song.flat)
    assert [] == store.verify()
    database["songs"].update_many({}, {"$set": {"flat": None}})
    assert ["flat"] == [each.path for each in store.verify()]
    assert 1 == store.repair()
    store.rebuild()
    assert song == store.get(Song, song.id)


@pytest.mark.parametrize(("maintain", "chunk"), [("write", 9), ("write", 1), ("stream", 1), ("schedule", 1)])
def test_values_of_older_sources(run, database, maintain, chunk, constants):
    """Renamed references, values and conditions: each counts as what its migration makes of it.

    In one command, or each in a command of its own.
    """
    models = shop_models(maintain)
    Shop = models[1]
    constants(older_chunk=chunk)
    store = run.store(models)
    store.setup()

    def follow() -> None:
        if maintain == "stream":
            store.worker().run_until_idle()
        if maintain == "schedule":
            follow.at += timedelta(days=1)
            store.run_due(now=follow.at)

    follow.at = datetime.now(UTC)
    if maintain == "stream":
        follow()
    store.insert(Shop(id="a"))
    database["sales"].insert_many([old_sale("a", 300), old_sale("a", 500, "bad"), old_sale("b", 100)])
    store.insert(Sale(shop_id="a", amount=Decimal(4)))
    follow()
    if maintain == "write":
        assert [] != store.verify()
        store.rebuild()
    d = Decimal
    days = [("a", 3, d(12)), ("b", 1, d(1))]
    assert (3, d(7), d(4), d(5), [d(5), d(4)], days) == values(store, models)
    assert [] == store.verify()
    store.insert(Sale(shop_id="a", amount=Decimal(1)))
    store.delete_many(Sale, {"amount": Decimal(4)})
    follow()
    days = [("a", 3, d(9)), ("b", 1, d(1))]
    assert (3, d(4), d(3), d(5), [d(5), d(3)], days) == values(store, models)
    assert [] == store.verify()
    # An older one is deleted, another updated.
    bad, other = (
        row["_id"] for row in database["sales"].find({"cents": {"$in": [500, 300]}}, sort=[("cents", -1)])
    )
    store.delete(Sale, bad)
    store.update(Sale, other, {"$set": {"shop_id": "b"}})
    follow()
    days = [("a", 1, d(1)), ("b", 2, d(4))]
    assert (1, d(1), d(1), d(1), [d(1)], days) == values(store, models)
    assert [] == store.verify()
    store.migrate(Sale)
    follow()
    assert (1, d(1), d(1), d(1), [d(1)], days) == values(store, models)
    assert [] == store.verify()
    assert store.rebuild() >= 0
    assert (1, d(1), d(1), d(1), [d(1)], days) == values(store, models)


def test_an_older_child_does_not_keep_its_siblings_out(run, database):
    models = shop_models("write")
    store = run.store(models)
    store.setup()
    database["sales"].insert_one(old_sale("a", 300))
    shop = store.insert(models[1](id="a"))
    assert (1, [Item(amount=Decimal(3))]) == (shop.number, shop.best)
    store.insert(Sale(shop_id="a", amount=Decimal(9)))
    assert [Decimal(9), Decimal(3)] == [each.amount for each in store.get(models[1], "a").best]
    assert [] == store.verify(models[1])


class Letter(Document, collection="letters", version=2):
    box_id: str
    pages: int
    text: str


@migration(Letter, from_version=1)
def _paged(document: dict[str, Any]) -> dict[str, Any]:
    document["pages"] = document.pop("sheets")
    return document


class Box(Document, collection="boxes"):
    id: str
    pages: Annotated[int, Sum(Letter, "pages", by="box_id")] = 0
    long: Annotated[int, Count(Letter, by="box_id", where={"pages": {"$gte": 10}})] = 0


class PerBox(Document, collection="per_box", rollup=Rollup(Letter, keys={"box_id": "box_id"})):
    box_id: str
    letters: Annotated[int, Count()]


def test_older_sources_of_more_than_a_command_holds(run, database):
    """What no rule reads of them does not travel: 20 MB of text stopped verify, repair and rebuild."""
    store = run.store([Letter, Box, PerBox])
    store.setup()
    store.insert(Box(id="a"))
    text = "x" * 1_000_000
    for number in range(20):
        database["letters"].insert_one({"box_id": "a", "sheets": number, "text": text})
    assert {"pages", "long", "box_id"} == {each.path for each in store.verify()}
    store.rebuild(Box)
    store.rebuild(PerBox)
    assert [] == store.verify()
    assert 190 == store.get(Box, "a").pages
    assert [20] == [each.letters for each in store.find(PerBox)]
    store.delete_many(Letter, {"box_id": "a"})
    assert (0, 0) == (store.get(Box, "a").pages, store.get(Box, "a").long)


@pytest.mark.parametrize("bound", [{"older_chunk": 7}, {"older_bytes_max": 400}])
def test_more_older_sources_than_one_command_holds(run, database, bound, constants):
    """In pieces, put together: the same as after the migration."""
    models = shop_models("write")
    constants(**bound)
    store = run.store(models)
    store.setup()
    store.insert(models[1](id="a"))
    states = ["good", "bad"]
    database["sales"].insert_many(
        [old_sale("abc"[number % 3], number * 7 % 100, states[number % 2]) for number in range(150)]
    )
    store.insert(Sale(shop_id="a", amount=Decimal("0.5")))
    assert store.verify()
    store.rebuild()
    assert [] == store.verify()
    counted = values(store, models)
    assert 51 == counted[0]
    store.migrate(Sale)
    store.rebuild()
    assert counted == values(store, models)


class Page(Document, collection="pages", version=2):
    book_id: str
    text: str


@migration(Page, from_version=1)
def _bound(document: dict[str, Any]) -> dict[str, Any]:
    document["book_id"] = document.pop("book")
    return document


class Book(Document, collection="books"):
    id: str
    texts: Annotated[list[str], Collect(Page, "text", by="book_id", size=2)] = []


def test_values_are_collected_from_more_older_sources_than_a_command_holds(run, database):
    """Half the pages of a book do not fit into one command; the first values of all parts are the first."""
    store = run.store([Page, Book])
    store.setup()
    rows = [
        {"book": "a", "text": f"{number:03}" + "x" * 60_000, "schema_version": 1} for number in range(300)
    ]
    database["pages"].insert_many(rows)
    store.insert(Page(book_id="a", text="000 new"))
    book = store.insert(Book(id="a"))
    assert ["000 new", rows[0]["text"]] == book.texts
    assert [] == store.verify(Book)
    database["pages"].delete_many({"text": {"$in": ["000 new", rows[0]["text"]]}})
    store.rebuild(Book)
    assert [rows[1]["text"], rows[2]["text"]] == store.get(Book, "a").texts
