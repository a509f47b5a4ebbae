"""Transactions interleaved by hand: what one of them does not see, the others must conflict about.

Random concurrency does not notice a missing increment of `_treadle.n`, or a
missing guard, because the moments between two reads are short. Here all
snapshots are taken before any of the transactions writes. One that conflicts
runs again after the others have committed, as a client's retry would.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import pytest
from pydantic import BaseModel
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern

from treadle import Count, Document, ExtendedReference, Max, Store, Sum

Work: TypeAlias = Callable[[Store, ClientSession | None], Any]


class Item(Document, collection="items"):
    id: int
    owner_id: int
    points: int = 0
    name: Annotated[str | None, ExtendedReference("Boss", by="owner_id", field="name")] = None


class Owner(Document, collection="owners"):
    id: int
    best: Annotated[int | None, Max(Item, "points", by="owner_id")] = None


class Boss(Document, collection="bosses"):
    id: int
    name: str = ""


class Line(BaseModel):
    product_id: int | None = None
    quantity: int = 1
    name: Annotated[str | None, ExtendedReference("Product", by="product_id", field="name")] = None
    was: Annotated[
        str | None, ExtendedReference("Product", by="product_id", field="name", policy="snapshot")
    ] = None


class Piece(BaseModel):
    sku: int | None = None
    quantity: int = 1


class Order(Document, collection="orders"):
    id: int
    lines: list[Line] = []


class Sale(Document, collection="sales"):
    id: int
    items: list[Piece] = []


class Product(Document, collection="products"):
    id: int
    name: str = ""
    sales: Annotated[int, Count(Sale, by="items.sku")] = 0
    sold: Annotated[int, Sum(Sale, "items.quantity", by="items.sku")] = 0
    best: Annotated[int | None, Max(Sale, "items.quantity", by="items.sku")] = None
    orders: Annotated[int, Count(Order, by="lines.product_id")] = 0


class Account(Document, collection="accounts"):
    id: int
    code: str
    invoices: Annotated[int, Count("Invoice", by="code", to="code")] = 0


class Invoice(Document, collection="invoices"):
    id: int
    code: str
    holder: Annotated[int | None, ExtendedReference(Account, by="code", to="code", field="id")] = None


MODELS = (Item, Owner, Boss, Order, Sale, Product, Account, Invoice)


def insert(document: Document) -> Work:
    return lambda store, session: store.insert(document.model_copy(deep=True), session=session)


def update(model: type[Document], key: Any, change: Any) -> Work:
    return lambda store, session: store.update(model, key, change, session=session)


def delete(model: type[Document], key: Any) -> Work:
    return lambda store, session: store.delete(model, key, session=session)


def push(order: int, product: int, **options: Any) -> Work:
    each = {"$each": [{"product_id": product, "quantity": 1}], **options}
    return update(Order, order, {"$push": {"lines": each}})


RENAME = update(Product, 1, {"$set": {"name": "v2"}})
PRODUCTS: list[Document] = [
    Product(id=1, name="v1"),
    Product(id=2, name="w"),
    Order(id=1),
    Order(id=2, lines=[Line(product_id=2), Line(product_id=1)]),
]
# What is stored before, and the transactions, which are played in every order.
RACES: dict[str, tuple[list[Document], list[Work]]] = {
    "a source that does not move the maximum, and the deletion of the maximum": (
        [Owner(id=1), Item(id=1, owner_id=1, points=9), Item(id=2, owner_id=1, points=1)],
        [insert(Item(id=3, owner_id=1, points=5)), delete(Item, 1)],
    ),
    "the deletions of two sources with the maximum": (
        [Owner(id=1), *(Item(id=each, owner_id=1, points=9) for each in (1, 2))],
        [delete(Item, 1), delete(Item, 2)],
    ),
    "a target and its first source": ([], [insert(Item(id=3, owner_id=1, points=5)), insert(Owner(id=1))]),
    "a copy and the rename of its source": (
        [Boss(id=1, name="v1")],
        [insert(Item(id=3, owner_id=1)), update(Boss, 1, {"$set": {"name": "v2"}})],
    ),
    "a copy and the arrival of its source": (
        [],
        [insert(Item(id=3, owner_id=1)), insert(Boss(id=1, name="v1"))],
    ),
    "two pushes of one product, and its rename": (PRODUCTS, [push(1, 1), push(2, 1), RENAME]),
    "a push to the front, and a rename": (PRODUCTS, [push(2, 2, **{"$position": 0}), RENAME]),
    "a push, and the deletion of the product": (PRODUCTS, [push(1, 1), delete(Product, 1)]),
    "a push, and the arrival of the product": (
        [Order(id=1)],
        [push(1, 1), insert(Product(id=1, name="v1"))],
    ),
    "two sales that name one product": (
        PRODUCTS,
        [insert(Sale(id=n, items=[Piece(sku=1, quantity=n), Piece(sku=2)])) for n in (1, 2)],
    ),
    "the deletion of the best sale, and another sale": (
        [*PRODUCTS, Sale(id=1, items=[Piece(sku=1, quantity=9)])],
        [delete(Sale, 1), insert(Sale(id=2, items=[Piece(sku=1, quantity=3), Piece(sku=1)]))],
    ),
    "a pull, and a rename": (
        PRODUCTS,
        [update(Order, 2, {"$pull": {"lines": {"product_id": 2}}}), RENAME],
    ),
    "an invoice, and the account that takes its code": (
        [Account(id=1, code="a")],
        [insert(Invoice(id=1, code="b")), update(Account, 1, {"$set": {"code": "b"}})],
    ),
    "an invoice, and the account that gives its code away": (
        [Account(id=1, code="a")],
        [insert(Invoice(id=1, code="a")), update(Account, 1, {"$set": {"code": "b"}})],
    ),
}


def started(database: Any, documents: list[Document]) -> Store:
    """A store with these documents and no others."""
    for name in database.list_collection_names():
        database[name].delete_many({})
    store = Store(database, MODELS)
    store.setup()
    for document in documents:
        store.insert(document.model_copy(deep=True))
    # Two sessions must not conflict over the creation of this collection.
    database["treadle.guards"].insert_one({"_id": "made by the test"})
    return store


def race(store: Store, works: list[Work]) -> None:
    """Play transactions of which no one sees what another writes; run again the ones that conflict."""
    database, again = store.collection(Item).database, []
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(database.client.start_session()) for _ in works]
        for session in sessions:
            session.start_transaction(ReadConcern("snapshot"))
            database["orders"].find_one({}, session=session)
        for session, work in zip(sessions, works, strict=True):
            try:
                work(store, session)
            except OperationFailure as error:
                assert error.has_error_label("TransientTransactionError")
                session.abort_transaction()
                again.append(work)
        for session in sessions:
            if session.in_transaction:
                session.commit_transaction()
    for work in again:
        work(store, None)


@pytest.mark.parametrize("title", RACES)
def test_no_order_of_writes_leaves_a_wrong_value(title, database):
    documents, works = RACES[title]
    for order in itertools.permutations(works):
        store = started(database, documents)
        race(store, list(order))
        assert [] == store.verify(), [works.index(work) for work in order]
