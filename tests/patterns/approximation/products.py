"""Products whose views and likes are counted approximately."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any

from tests.support import Colour
from treadle import Approximate, Document

NEVER = timedelta(hours=1)
SOON = timedelta(milliseconds=50)


class Product(Document, collection="products"):
    id: int
    views: Annotated[int, Approximate(every=10, within=NEVER)] = 0
    likes: Annotated[
        int, Approximate(every=10, within=NEVER, buffer="durable", flushed_at="last_flushed")
    ] = 0
    hits: Annotated[int, Approximate(every=10, buffer="sampled")] = 0
    worth: Annotated[Decimal, Approximate(every=1000, within=NEVER)] = Decimal(0)
    last_flushed: datetime | None = None


KINDS = ["views", "likes"]


def stored(database: Any, field: str, key: int = 1) -> Any:
    found = database["products"].find_one({"_id": key})
    return None if found is None else found[field]


def store_of(run: Any, *keys: int, **options: Any) -> Any:
    store = run.store([Product], **options)
    store.setup()
    store.insert_many([Product(id=key) for key in keys or (1,)])
    return store


class Narrow(Document, collection="products"):
    id: int
    views: Annotated[int, Approximate(every=10**6, within=NEVER, keys_max=5)] = 0


class Painted(Document, collection="painted"):
    colour: Colour
    n: Annotated[float, Approximate(every=4, within=NEVER, by="colour", upsert=True)] = 0.0
