"""`with store.deferred():` derived values follow once, at the end of the block, inside its transaction."""

from __future__ import annotations

import asyncio
import random
from typing import Annotated, Any

import pytest
from pydantic import BaseModel
from pymongo import MongoClient

from tests.kit.command_log import CommandLog
from tests.support import shared_server
from treadle import (
    AncestorArray,
    AsyncStore,
    Count,
    Document,
    ExtendedReference,
    Formula,
    History,
    Max,
    Rollup,
    Store,
    Subset,
    Sum,
    UsageError,
)

ROUNDS = 12


class Line(Document, collection="lines"):
    product: int | None = None
    amount: int = 0
    name: Annotated[str | None, ExtendedReference("Product", by="product", field="name")] = None


class LineCard(BaseModel):
    amount: int


class Product(Document, collection="products", history=History(collection="products_history")):
    id: int
    name: str = ""
    lines: Annotated[int, Count(Line, by="product")] = 0
    total: Annotated[int, Sum(Line, "amount", by="product", where={"amount": {"$gt": 1}})] = 0
    most: Annotated[int | None, Max(Line, "amount", by="product")] = None
    top: Annotated[list[LineCard], Subset(Line, by="product", sort="-amount", size=2)] = []
    doubled: Annotated[int | None, Formula({"$multiply": [2, "$total"]})] = None


class ByAmount(Document, collection="by_amount", rollup=Rollup(Line, keys={"id": "amount"})):
    id: int
    lines: Annotated[int, Count()]


class Node(Document, collection="nodes", tree=AncestorArray(parent="parent_id", ancestors="ancestors")):
    id: int
    parent_id: int | None = None
    ancestors: list[int] = []


MODELS = [Line, Product, ByAmount, Node]


def test_each_target_is_written_once(server, database):
    listener = CommandLog()
    with MongoClient(server.uri, event_listeners=[listener]) as client:
        store = Store(client[database.name], MODELS)
        store.setup()
        store.insert(Product(id=1, name="Loom"))
        listener.clear()
        with store.deferred():
            for amount in range(10):
                store.insert(Line(product=1, amount=amount))
            assert 0 == store.get(Product, 1).lines
        updates = [
            body for name, body in listener.commands if name == "update" and body["update"] == "products"
        ]
        assert 1 == sum("lines" in str(each["updates"]) for each in updates)
        product = store.get(Product, 1)
        assert (10, 44, 9, 88) == (product.lines, product.total, product.most, product.doubled)
        assert [9, 8] == [each.amount for each in product.top]
        assert [] == store.verify()


def test_random_blocks_leave_everything_right(database):
    """All kinds of writes of both sides, in blocks of their own and inside transactions."""
    store = Store(database, MODELS)
    store.setup()
    chance = random.Random(11)
    for number in range(ROUNDS):
        with store.transaction() if number % 2 else store.deferred(), store.deferred():
            for _ in range(6):
                act = chance.randrange(7)
                lines = list(store.find(Line))
                line = chance.choice(lines) if lines else None
                product = chance.randrange(3)
                if act == 0 and store.get(Product, product) is None:
                    store.insert(Product(id=product, name="new"))
                elif act == 1:
                    store.update(Product, product, {"$set": {"name": str(number)}})
                elif act == 2:
                    store.delete(Product, product)
                elif act == 3 and line is not None:
                    store.change(line, product=product, amount=chance.randrange(5))
                elif act == 4 and line is not None:
                    store.delete(Line, line.id)
                else:
                    store.insert_many([Line(product=product, amount=chance.randrange(5)) for _ in range(2)])
        assert [] == store.verify()


def test_an_error_takes_everything_back(database):
    store = Store(database, MODELS)
    store.setup()
    store.insert(Product(id=1))
    with pytest.raises(ZeroDivisionError), store.deferred():
        store.insert(Line(product=1))
        raise ZeroDivisionError
    assert 0 == store.count(Line)
    assert 0 == store.get(Product, 1).lines
    store.insert(Line(product=1))
    assert 1 == store.get(Product, 1).lines


def test_an_error_that_the_transaction_around_it_survives_commits_nothing(database):
    store = Store(database, MODELS)
    store.setup()
    store.insert(Product(id=1))
    with pytest.raises(UsageError, match="transaction-ended"), store.transaction():
        with pytest.raises(ValueError, match="changed my mind"), store.deferred():
            store.insert(Line(product=1, amount=2))
            raise ValueError("changed my mind")
        with pytest.raises(UsageError, match="transaction-ended"):
            store.insert(Line(product=1, amount=3))
    assert [] == store.verify()
    assert 0 == store.count(Line)
    with store.transaction():
        with pytest.raises(ValueError, match="before any write"), store.deferred():
            raise ValueError("before any write")
        store.insert(Line(product=1, amount=2))
    assert [] == store.verify()
    assert 1 == store.count(Line)


def test_histories_have_one_state_per_block_and_trees_work_in_it(database):
    store = Store(database, MODELS)
    store.setup()
    with store.deferred():
        store.insert(Product(id=1, name="a"))
        store.update(Product, 1, {"$set": {"name": "b"}})
        store.tree(Node).insert(Node(id=1))
        store.tree(Node).insert(Node(id=2), parent=1)
    assert ["b"] == [each.document.name for each in store.history(Product, 1)]
    assert [1, 2] == [each.id for each in store.tree(Node).path(2)]
    assert [] == store.verify()


def test_the_same_with_asyncio(server, database):
    async def work() -> Any:
        async with AsyncStore.open(server.uri.replace("/?", f"/{database.name}?"), MODELS) as store:
            await store.setup()
            await store.insert(Product(id=1))
            async with store.deferred():
                for amount in range(3):
                    await store.insert(Line(product=1, amount=amount))
                assert 0 == (await store.get(Product, 1)).lines
            assert 3 == (await store.get(Product, 1)).lines
            async with store.transaction():
                async with store.deferred():
                    await store.delete_many(Line, {"product": 1})
                assert 0 == (await store.get(Product, 1)).lines
            return await store.verify()

    assert [] == asyncio.run(work())


@pytest.mark.server
def test_without_transactions_it_is_refused():
    with shared_server(replica_set=False) as server, MongoClient[Any](server.uri) as client:
        store = Store(client["deferred"], [Plain])
        with pytest.raises(UsageError, match="transactions-unavailable"), store.deferred():
            raise AssertionError


class Plain(Document, collection="products2"):
    id: int
