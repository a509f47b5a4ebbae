"""Shops, their sales and visits, and a worker that runs beside a test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator
from typing import Annotated, Any

from pydantic import BaseModel

from treadle import Count, Document, ExtendedReference, Id, Sum

WAIT_SECONDS_MAX = 30.0


class Sale(Document, collection="sales"):
    shop_id: Id
    amount: int = 1
    blob: str = ""


class Shop(Document, collection="shops"):
    name: str = ""
    blob: str = ""
    total: Annotated[int, Sum(Sale, "amount", by="shop_id", maintain="stream")] = 0
    count: Annotated[int, Count(Sale, by="shop_id", maintain="stream")] = 0


class ShopCard(BaseModel):
    name: str


class Visit(Document, collection="visits"):
    shop_id: Id | None
    shop: Annotated[
        ShopCard | None,
        ExtendedReference(Shop, by="shop_id", maintain="stream", on_delete="clear"),
    ] = None


MODELS = [Sale, Shop, Visit]


def settled(store: Any) -> dict[str, int]:
    """Let the worker catch up; nothing is wrong then; what it counted."""
    worker = store.worker()
    worker.run_until_idle()
    assert [] == store.verify()
    return worker.totals


def totals(database: Any, keys: list[Any]) -> list[int]:
    return [database["shops"].find_one({"_id": key}).get("total") for key in keys]


@contextlib.contextmanager
def working(worker: Any) -> Generator[threading.Thread]:
    """A worker that runs in a thread for as long as the block."""
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield thread
    finally:
        worker.stop()
        thread.join(WAIT_SECONDS_MAX)
        assert not thread.is_alive()


def wait_for(condition: Any, seconds: float = WAIT_SECONDS_MAX) -> float:
    """Wait until something holds; how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it does not come"
        time.sleep(0.01)
    return time.monotonic() - start


MEGABYTE = "x" * 1_000_000
