"""What operating costs: a sampled verify beside a whole one, a gentle rebuild beside a foreground load, the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Generator
from typing import Annotated, Any

import httpx
import uvicorn
from pymongo import MongoClient

from benchmarks.harness import Contender, Context, Goal, Group
from treadle import Count, Document, Store
from treadle.upkeep.jobs import Stopped
from treadle.web.application import create

TARGETS = 1_000_000
TARGETS_QUICK = 3_000
SAMPLE = 0.01
BATCH = 50_000
# The foreground: so many writes a second, for so long.
LOAD_PER_SECOND = 200
LOAD_SECONDS = 6.0
LOAD_SECONDS_QUICK = 0.5
REQUESTS_PER_SECOND = 200
BROWSERS = 20


class Review(Document, collection="reviews"):
    product_id: int


class Product(Document, collection="products", validation="off"):
    id: int
    name: str = "loom"
    review_count: Annotated[int, Count(Review, by="product_id", maintain="stream")] = 0


def groups() -> list[Group]:
    """Verify by sample, the gentle throttle, and the dashboard's answers."""
    return [
        Group("operating", f"verify {TARGETS:,} documents", _verify, rounds=3, seconds_max=300.0),
        Group("operating", "p99 of a foreground write while a rebuild runs", _gentle, rounds=5),
        Group("operating", "p99 of /api/status at 200 requests a second", _status, rounds=5),
        Group("operating", "commands that the server gets in 5 s", _browsers, rounds=3, unit="commands"),
    ]


def _store(context: Context, name: str, targets: int) -> tuple[Store, Any]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    client.drop_database(name)
    context.stack.callback(client.drop_database, name)
    store = Store(client[name], [Review, Product])
    store.setup()
    for start in range(0, targets, BATCH):
        numbers = range(start, min(targets, start + BATCH))
        rows = [{"_id": number, "name": "loom", "review_count": 0} for number in numbers]
        client[name].products.insert_many(rows, ordered=False)
    return store, client[name]


def _verify(context: Context) -> list[Contender]:
    store, _ = _store(context, "bench_verify", context.scale(TARGETS, TARGETS_QUICK))
    return [
        Contender("whole", lambda: None, lambda _: store.verify(Product), check=_nothing),
        Contender(
            f"sample={SAMPLE:g}",
            lambda: None,
            lambda _: store.verify(Product, sample=SAMPLE),
            goal=Goal(0.03),
            check=_nothing,
        ),
    ]


def _nothing(found: list[Any]) -> None:
    assert [] == found


# -- a foreground load beside a rebuild ----------------------------------------------------------


def _gentle(context: Context) -> list[Contender]:
    store, database = _store(context, "bench_gentle", context.scale(200_000, TARGETS_QUICK))
    seconds = context.scale(int(LOAD_SECONDS * 10), int(LOAD_SECONDS_QUICK * 10)) / 10

    def work(throttle: Any, rebuilds: bool) -> Any:
        def measured(_: Any) -> float:
            with _rebuilding(store, throttle) if rebuilds else contextlib.nullcontext():
                return _load(database, seconds)

        return measured

    return [
        Contender("alone", lambda: None, work(None, False), measured=True),
        Contender("gentle", lambda: None, work("gentle", True), measured=True, goal=Goal(1.3)),
        Contender("as fast as it goes", lambda: None, work(None, True), measured=True),
    ]


@contextlib.contextmanager
def _rebuilding(store: Store, throttle: Any) -> Generator[None]:
    """Rebuild again and again beside the block."""
    done = threading.Event()

    def repeat() -> None:
        while not done.is_set():
            with contextlib.suppress(Stopped):
                store.rebuild(Product, throttle=throttle)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        store.control_job(store.jobs()[0].id, "stop")
        thread.join()


def _load(database: Any, seconds: float) -> float:
    """The p99 of writes that come at a steady pace, in seconds."""
    times, start, number = [], time.perf_counter(), 0
    while (now := time.perf_counter()) - start < seconds:
        due = start + number / LOAD_PER_SECOND
        if now < due:
            time.sleep(due - now)
        before = time.perf_counter()
        database.visits.update_one({"_id": number % 1000}, {"$inc": {"n": 1}}, upsert=True)
        times.append(time.perf_counter() - before)
        number += 1
    return statistics.quantiles(times, n=100)[98]


# -- the dashboard ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _serving(store: Store) -> Generator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create(store), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        while httpx.get(f"{address}/api/status").json()["at"] is None:
            time.sleep(0.05)
        yield address
    finally:
        server.should_exit = True
        thread.join()


def _status(context: Context) -> list[Contender]:
    store, _ = _store(context, "bench_status", 100)
    address = context.stack.enter_context(_serving(store))
    seconds = context.scale(50, 5) / 10

    async def ask(_: Any) -> float:
        times: list[float] = []

        async def once(client: httpx.AsyncClient) -> None:
            before = time.perf_counter()
            (await client.get(f"{address}/api/status")).raise_for_status()
            times.append(time.perf_counter() - before)

        async with httpx.AsyncClient() as client, asyncio.TaskGroup() as tasks:
            for _ in range(int(REQUESTS_PER_SECOND * seconds)):
                tasks.create_task(once(client))
                await asyncio.sleep(1 / REQUESTS_PER_SECOND)
        return statistics.quantiles(times, n=100)[98]

    goal = Goal(50_000, "microseconds")
    return [Contender("from its cache", lambda: None, ask, measured=True, goal=goal)]


def _browsers(context: Context) -> list[Contender]:
    store, database = _store(context, "bench_browsers", 100)
    address = context.stack.enter_context(_serving(store))
    seconds = context.scale(50, 10) / 10

    def commands() -> int:
        counters = database.client.admin.command("serverStatus")["opcounters"]
        return int(sum(counters[name] for name in ("query", "command", "getmore", "update", "insert")))

    def watched(number: int) -> Any:
        async def look(_: Any) -> float:
            async def browse(client: httpx.AsyncClient) -> None:
                async with client.stream("GET", f"{address}/events") as reply:
                    async for line in reply.aiter_lines():
                        if line.startswith("data:"):
                            await client.get(f"{address}/", headers={"Accept": "text/html"})

            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(timeout=None, limits=limits) as client:
                tasks = [asyncio.create_task(browse(client)) for _ in range(number)]
                await asyncio.sleep(1)
                before = commands()
                await asyncio.sleep(seconds)
                grown = commands() - before
                for task in tasks:
                    task.cancel()
            return grown / 1e6

        return look

    return [
        Contender("one browser", lambda: None, watched(1), measured=True),
        Contender(f"{BROWSERS} browsers", lambda: None, watched(BROWSERS), measured=True, goal=Goal(1.2)),
    ]
