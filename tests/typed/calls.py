"""What the calls of a Store return, as mypy and pyright see it in strict mode; `make lint` checks this file.

`assert_type` fails in the checker where a type is another one. Nothing here runs.
"""

from __future__ import annotations

from typing import Any, assert_type

from bson import ObjectId
from pydantic import BaseModel

from treadle import AsyncStore, Document, Migration, Page, Store, migration


class Order(Document, collection="orders", version=2):
    total: int


class Country(Document, collection="countries"):
    id: str
    name: str


class Card(BaseModel):
    total: int


@migration(Order, from_version=1)
def add_total(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "total": 0}


@add_total.down
def drop_total(document: dict[str, Any]) -> dict[str, Any]:
    return document


MODELS: list[type[Document]] = [Order, Country]


def blocking(store: Store, id: ObjectId) -> None:
    assert_type(add_total, Migration)
    assert_type(store.insert(Order(total=1)), Order)
    assert_type(store.get(Order, id), Order | None)
    assert_type(store.require(Order, id), Order)
    assert_type(store.require(Order, id, into=Card), Card)
    assert_type(store.get_many(Order, [id]), list[Order | None])
    assert_type(store.find(Order).to_list(), list[Order])
    assert_type(store.find(Order, into=Card).to_list(), list[Card])
    assert_type(store.page(Order, sort="total"), Page[Order])
    assert_type(store.update(Order, id, {"$inc": {"total": 1}}), Order | None)
    assert_type(store.exists(Order, {"total": 1}), bool)
    # What a generated id is; the Any beside it lets a model declare another type.
    generated: ObjectId = store.require(Order, id).id
    assert_type(store.require(Country, "fr").id, str)
    assert generated
    Store.open("mongodb://localhost/shop", MODELS)
    Store.open("mongodb://localhost/shop", [Order, Country])


async def asynchronous(store: AsyncStore, id: ObjectId) -> None:
    assert_type(await store.insert(Order(total=1)), Order)
    assert_type(await store.require(Order, id, into=Card), Card)
    assert_type([each async for each in store.find(Order, into=Card)], list[Card])
    assert_type(await store.page(Order, sort="total", into=Card), Page[Card])
