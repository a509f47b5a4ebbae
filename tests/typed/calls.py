"""What the calls of a Store return, as mypy and pyright see it in strict mode; `make lint` checks this file.

`assert_type` fails in the checker where a type is another one. Nothing here runs.
"""

from __future__ import annotations

from typing import Any, TypeVar, assert_type
from uuid import UUID

from bson import ObjectId
from pydantic import BaseModel

from treadle import AsyncStore, Document, Migration, Page, Store, migration

D = TypeVar("D", bound=Document)


class Order(Document, collection="orders", version=2):
    total: int


class Country(Document, collection="countries"):
    id: str
    name: str


class Region(Country):
    countries: int = 0


class Seat(Document, collection="seats"):
    id: int = 1


class Ticket(Document, collection="tickets"):
    id: UUID | None = None


class Card(BaseModel):
    total: int


@migration(Order, from_version=1)
def add_total(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "total": 0}


@add_total.down
def drop_total(document: dict[str, Any]) -> dict[str, Any]:
    return document


MODELS = [Order, Country, Seat]


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
    assert_type(store.require(Order, id).id, ObjectId)
    assert_type(store.require(Country, "fr").id, str)
    assert_type(store.require(Region, "eu").id, str)
    assert_type(store.require(Seat, 7).id, int)
    assert_type(store.require(Ticket, None).id, UUID | None)
    for order in store.find(Order):
        assert_type(order.id, ObjectId)
        order.id = ObjectId()
    Store.open("mongodb://localhost/shop", MODELS)
    Store.open("mongodb://localhost/shop", [Order, Country])
    Store.local(models=MODELS)
    Store.local(models=(Order, Country))


def any_document(document: D) -> D:
    """Whatever a function gives back for any document, `id` included, is as typed."""
    assert_type(document.id, ObjectId)
    return document


async def asynchronous(store: AsyncStore, id: ObjectId) -> None:
    assert_type(await store.insert(Order(total=1)), Order)
    assert_type(await store.require(Order, id, into=Card), Card)
    assert_type([each async for each in store.find(Order, into=Card)], list[Card])
    assert_type(await store.page(Order, sort="total", into=Card), Page[Card])
    assert_type((await store.require(Order, id)).id, ObjectId)
    assert_type((await store.require(Country, "fr")).id, str)
    assert_type(await store.get_many(Order, [id], into=Card), list[Card | None])
    assert_type(await store.aggregate(Order, [], into=Card).to_list(), list[Card])
    AsyncStore.local(models=MODELS)
