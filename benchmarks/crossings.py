"""How many files and rooms one operation goes through: `python -m benchmarks.crossings`.

Counts what a reader would have to follow: the distinct source files whose
functions run, and how often a function of one room calls a function of
another. A plan that continues after a command is no new call. Four operations:
an insert with a maintained count, an update of a field that other documents
copy, one batch of the stream worker, and a move in a tree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import treadle
from treadle import AncestorArray, Count, Document, ExtendedReference, Id, Store

SOURCE = Path(treadle.__file__).parent
INSERT = "an insert with a maintained count"
UPDATE = "an update of a copied field"


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    date: datetime


class Product(Document, collection="products"):
    name: str
    review_count: Annotated[int, Count(Review, by="product_id")] = 0


class Stock(Document, collection="stocks"):
    product_id: Id
    product_name: Annotated[str | None, ExtendedReference(Product, by="product_id", field="name")] = None


class Visit(Document, collection="visits"):
    page_id: Id


class Page(Document, collection="pages"):
    visits: Annotated[int, Count(Visit, by="page_id", maintain="stream")] = 0


class Category(
    Document, collection="categories", tree=AncestorArray(parent="parent_id", ancestors="ancestors")
):
    parent_id: Id | None = None
    ancestors: list[Id] = []


class Trace:
    """Files and crossings between rooms, while it is on."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.crossings = 0
        self._begun: set[FrameType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        room = _room(frame)
        if event != "call" or room is None:
            return
        self.files.add(frame.f_code.co_filename)
        if frame in self._begun:
            # A generator that goes on.
            return
        self._begun.add(frame)
        caller = frame.f_back
        while caller is not None and _room(caller) is None:
            caller = caller.f_back
        if caller is not None and _room(caller) != room:
            self.crossings += 1


def _room(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(SOURCE):
        return None
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "."


def traced(work: Callable[[], Any]) -> tuple[int, int]:
    """Files and crossings of one call."""
    trace = Trace()
    sys.setprofile(trace)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(trace.files), trace.crossings


def measure() -> dict[str, tuple[int, int]]:
    """Files and crossings per operation, each after it has run once."""
    with Store.local(models=[Review, Product, Stock, Visit, Page, Category]) as store:
        store.setup()
        product, copied = store.insert_many([Product(name="lamp"), Product(name="desk")])
        store.insert_many([Stock(product_id=copied.id), Stock(product_id=copied.id)])
        page = store.insert(Page())
        root, other, node = store.insert_many([Category(), Category(), Category()])
        worker = store.worker()

        def insert() -> None:
            store.insert(Review(product_id=product.id, rating=5, date=datetime.now(UTC)))

        def visit() -> None:
            store.collection(Visit).insert_many([{"page_id": page.id} for _ in range(10)])

        def rename(name: str) -> None:
            store.update(Product, copied.id, {"$set": {"name": name}})

        insert()
        rename("table")
        visit()
        worker.run_until_idle()
        store.tree(Category).move(node.id, root.id)
        visit()
        return {
            INSERT: traced(insert),
            UPDATE: traced(lambda: rename("chair")),
            "a stream batch": traced(worker.run_until_idle),
            "a tree move": traced(lambda: store.tree(Category).move(node.id, other.id)),
        }


if __name__ == "__main__":
    for name, (files, crossings) in measure().items():
        print(f"{name}: {files} files, {crossings} crossings")
