"""Sources that are still stored in an older version: whoever reads them for others reads the current one."""

from __future__ import annotations

from datetime import UTC, datetime
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
    Max,
    Rollup,
    Subset,
    Sum,
    migration,
)

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


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


def shop_models() -> list[type[Document]]:
    class Shop(Document, collection="shops"):
        id: str
        number: Annotated[int, Count(Sale, by="shop_id")] = 0
        total: Annotated[Decimal, Sum(Sale, "amount", by="shop_id", where={"good": True})] = Decimal(0)
        average: Annotated[Decimal | None, Average(Sale, "amount", by="shop_id")] = None
        most: Annotated[Decimal | None, Max(Sale, "amount", by="shop_id")] = None
        best: Annotated[list[Item], Subset(Sale, by="shop_id", sort="-amount", size=2)] = []

    keys = {"shop_id": "shop_id", "day": Day("at")}

    class Daily(Document, collection="daily", rollup=Rollup(Sale, keys=keys)):
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


@pytest.mark.parametrize("bound", [{"convert_documents_max": 7}, {"convert_bytes_max": 400}])
def test_more_older_sources_than_one_command_holds(run, database, bound, constants):
    """In pieces, put together: the same as after the migration."""
    models = shop_models()
    constants(**bound)
    store = run.store(models)
    store.setup()
    store.insert(models[1](id="a"))
    states = ["good", "bad"]
    database["sales"].insert_many(
        [old_sale("abc"[number % 3], number * 7 % 100, states[number % 2]) for number in range(60)]
    )
    store.insert(Sale(shop_id="a", amount=Decimal("0.5")))
    assert store.verify()
    store.rebuild()
    assert [] == store.verify()
    counted = values(store, models)
    assert 21 == counted[0]
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
