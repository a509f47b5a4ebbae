"""The models of these tests."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

from pydantic import BaseModel

from treadle import (
    Archive,
    Average,
    Count,
    Day,
    Document,
    ExtendedReference,
    History,
    Indexed,
    Limits,
    Max,
    Min,
    Rollup,
    Subset,
    Sum,
)

UTC = dt.UTC
NOW = dt.datetime(2026, 6, 1, tzinfo=UTC)
OLD = NOW - dt.timedelta(days=400)
YEAR = dt.timedelta(days=365)
SMALL = Limits(archive_chunk=3, find_page=2, verify_page=2)


class Sale(Document, collection="sales", archive=Archive(by="date", after=YEAR, into="sales_archive")):
    id: int
    shop_id: int = 1
    amount: int = 1
    date: dt.datetime | None = None
    note: str = ""


class SaleCard(BaseModel):
    amount: int


class Shop(Document, collection="shops"):
    id: int
    sales: Annotated[int, Count(Sale, by="shop_id")] = 0
    total: Annotated[int, Sum(Sale, "amount", by="shop_id")] = 0
    average: Annotated[float | None, Average(Sale, "amount", by="shop_id")] = None
    least: Annotated[int | None, Min(Sale, "amount", by="shop_id")] = None
    most: Annotated[int | None, Max(Sale, "amount", by="shop_id")] = None
    large: Annotated[int, Count(Sale, by="shop_id", where={"amount": {"$gte": 5}})] = 0
    top: Annotated[list[SaleCard], Subset(Sale, by="shop_id", sort="-amount", size=2)] = []


class SaleDay(Document, collection="sale_days", rollup=Rollup(Sale, keys={"day": Day("date")})):
    day: dt.datetime
    count: Annotated[int, Count()] = 0


class Refund(Document, collection="refunds"):
    id: int
    sale_id: int
    sale: Annotated[SaleCard | None, ExtendedReference(Sale, by="sale_id")] = None


COUNTED = [Sale, Shop, SaleDay, Refund]


class Visit(
    Document,
    collection="visits",
    archive=Archive(by="date", after=YEAR, into="visits_archive", counted=False),
):
    id: int
    shop_id: int = 1
    date: dt.datetime


class Door(Document, collection="doors"):
    id: int
    visits: Annotated[int, Count(Visit, by="shop_id")] = 0


class Letter(
    Document,
    collection="letters",
    archive=Archive(by="date", after=YEAR, into="old_letters", archived="restore"),
):
    id: int
    number: Annotated[str, Indexed(unique=True)]
    code: Annotated[str | None, Indexed(unique=True)] = None
    date: dt.date
    text: str = ""


class Contract(
    Document,
    collection="contracts",
    archive=Archive(by="date", after=YEAR, into="old_contracts"),
    history=History(),
):
    id: int
    date: dt.datetime
    sales: Annotated[int, Count(Sale, by="shop_id")] = 0


class Deed(
    Document,
    collection="deeds",
    archive=Archive(by="date", after=YEAR, into="old_deeds", archived="restore"),
    history=History(),
    soft_delete="deleted_at",
):
    id: int
    owner: str = ""
    date: dt.datetime
    deleted_at: dt.datetime | None = None


def places(database: Any, key: Any, model: type[Document] = Sale) -> list[str]:
    """The collections that hold a document."""
    settings = model.__treadle__
    names = [settings.collection, settings.patterns["archive"][0].into]
    return [name for name in names if database[name].find_one({"_id": key})]
