"""Models with an archive in another cluster, and a process that moves their documents until it is killed."""

from __future__ import annotations

import datetime as dt
import os
import signal
from typing import Annotated, Any

from pydantic import BaseModel
from pymongo import MongoClient

from tests import victim
from tests.faults import Heard
from treadle import (
    Archive,
    Average,
    Collect,
    Count,
    Document,
    Indexed,
    Limits,
    Max,
    Min,
    Store,
    Subset,
    Sum,
)

UTC = dt.UTC
NOW = dt.datetime(2026, 6, 1, tzinfo=UTC)
OLD = NOW - dt.timedelta(days=400)
YEAR = dt.timedelta(days=365)
AT_ONCE = Limits(archive_chunk=4, find_page=3, archive_intent_seconds=0.001)
NUMBER = 9


class Card(BaseModel):
    amount: int


def models(client: Any, name: str, counted: bool = False) -> tuple[Any, Any]:
    class Sale(
        Document,
        collection="sales",
        archive=Archive(by="date", after=YEAR, into=f"{name}.sales", client=client, counted=counted),
    ):
        id: int
        code: Annotated[str | None, Indexed(unique=True)] = None
        shop_id: int = 1
        amount: int = 0
        date: dt.datetime | None = None

    class Shop(Document, collection="shops"):
        id: int
        sales: Annotated[int, Count(Sale, by="shop_id")] = 0

    class Counting(Document, collection="shops"):
        id: int
        sales: Annotated[int, Count(Sale, by="shop_id")] = 0
        total: Annotated[int, Sum(Sale, "amount", by="shop_id")] = 0
        average: Annotated[float | None, Average(Sale, "amount", by="shop_id")] = None
        least: Annotated[int | None, Min(Sale, "amount", by="shop_id")] = None
        most: Annotated[int | None, Max(Sale, "amount", by="shop_id")] = None
        best: Annotated[list[Card], Subset(Sale, by="shop_id", sort="-amount", size=3)] = []
        amounts: Annotated[list[int], Collect(Sale, "amount", by="shop_id", size=50)] = []

    return Sale, Counting if counted else Shop


def move_until_killed(uri: str, name: str, other_uri: str, other_name: str, counted: bool, skip: int) -> None:
    """Move documents to and fro, and die just before a writing command, there or here."""
    heard = Heard()
    Sale, Shop = models(MongoClient(other_uri, event_listeners=[heard]), other_name, counted)
    store = Store(MongoClient(uri, event_listeners=[heard])[name], [Sale, Shop], limits=AT_ONCE)
    store.recover()
    heard.before((*victim.WRITES, "commitTransaction"), skip, lambda: os.kill(os.getpid(), signal.SIGKILL))
    while True:
        for key in range(skip % 3, NUMBER, 3):
            store.restore(Sale, key)
        store.archive(Sale, now=NOW)
