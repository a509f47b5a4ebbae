"""Counters beside one write per event."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from bson import ObjectId
from pymongo import AsyncMongoClient, MongoClient
from pymongo.database import Database
from pymongo.write_concern import WriteConcern

from benchmarks.harness import Contender, Context, Goal, Group
from treadle import Approximate, AsyncStore, Document, Store

DATABASE = "treadle_benchmarks_approximation"
NEVER = dt.timedelta(hours=1)
PRODUCTS = 20
TASKS = 1000
CALL = 100
THREADS = 16
THREAD_EVENTS = 50


class Product(Document, collection="products"):
    plain: int = 0
    views: Annotated[int, Approximate(every=1000, within=NEVER)] = 0
    quick: Annotated[int, Approximate(every=10_000_000, within=NEVER)] = 0
    likes: Annotated[int, Approximate(every=1_000_000, within=NEVER, buffer="durable")] = 0


def groups() -> list[Group]:
    return [
        Group("approximation", "count events, time per event at majority", _count, rounds=9),
        Group("approximation", "add one event in memory", _add, rounds=9),
    ]


def _open(context: Context) -> tuple[Store, Database[Any], list[ObjectId]]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    client.drop_database(DATABASE)
    database = client.get_database(DATABASE, write_concern=WriteConcern("majority"))
    store = Store(database, [Product])
    store.setup()
    ids = [store.insert(Product()).id for _ in range(PRODUCTS)]
    context.stack.callback(lambda: client.drop_database(DATABASE))
    context.stack.callback(store.close)
    return store, database, ids


def _count(context: Context) -> list[Contender]:
    store, database, ids = _open(context)
    few, many = context.scale(300, 30), context.scale(20_000, 2_000)
    calls = context.scale(100, 10)
    views, likes = store.counter(Product, "views"), store.counter(Product, "likes")
    client: AsyncMongoClient[Any] = AsyncMongoClient(context.uri)
    tasks = AsyncStore(client[DATABASE], [Product])

    async def close() -> None:
        await tasks.close()
        await client.close()

    context.stack.callback(lambda: context.wait(close()))

    def each(_: Any) -> None:
        for number in range(few):
            database["products"].update_one({"_id": ids[number % PRODUCTS]}, {"$inc": {"plain": 1}})

    def events(_: Any) -> None:
        for number in range(few):
            database["events"].insert_one({"product": ids[number % PRODUCTS], "n": 1})

    def memory(_: Any) -> Any:
        before = sum(product.views for product in store.find(Product))
        for number in range(many):
            views.add(ids[number % PRODUCTS])
        views.flush()
        return before

    def check(before: Any) -> None:
        assert before + many == sum(product.views for product in store.find(Product))

    def together(_: Any) -> None:
        events = [ids[number % PRODUCTS] for number in range(CALL)]
        for _ in range(calls):
            likes.add_many(Counter(events))
        likes.flush()

    def in_threads(_: Any) -> None:
        def count(number: int) -> None:
            for turn in range(THREAD_EVENTS):
                likes.add(ids[(number + turn) % PRODUCTS])

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(count, range(THREADS)))
        likes.flush()

    async def in_tasks(_: Any) -> None:
        counter = tasks.counter(Product, "likes")

        async def count(number: int) -> None:
            for turn in range(10):
                await counter.add(ids[(number + turn) % PRODUCTS])

        await asyncio.gather(*[count(number) for number in range(TASKS)])
        await counter.flush()

    return [
        Contender("one update per event", lambda: None, each, few),
        Contender("one event document per event", lambda: None, events, few),
        Contender("memory, every 1,000", lambda: None, memory, many, goal=Goal(1 / 80), check=check),
        Contender(
            f"durable, add_many of {CALL} events", lambda: None, together, calls * CALL, goal=Goal(1 / 20)
        ),
        Contender(f"durable, add from {THREADS} threads", lambda: None, in_threads, THREADS * THREAD_EVENTS),
        Contender(
            f"durable, add from {TASKS:,} tasks", lambda: None, in_tasks, TASKS * 10, goal=Goal(1 / 20)
        ),
    ]


def _add(context: Context) -> list[Contender]:
    store, _, ids = _open(context)
    times = context.scale(200_000, 20_000)
    counter = store.counter(Product, "quick")

    def add(_: Any) -> None:
        one = counter.add
        for number in range(times):
            one(ids[number % PRODUCTS])

    return [Contender("counter.add(id)", counter.flush, add, times, goal=Goal(2.0, "microseconds"))]
