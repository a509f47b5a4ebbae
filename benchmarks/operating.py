"""What operating costs: a sampled verify beside a whole one, a gentle rebuild beside a foreground load, the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator
from typing import Annotated, Any

from pymongo import MongoClient

from benchmarks.harness import Contender, Context, Goal, Group
from treadle import Count, Document, Store

TARGETS = 1_000_000
TARGETS_QUICK = 3_000
SAMPLE = 0.01
BATCH = 50_000
PAGE = 2_000
# The foreground: so many writes a second, for so long.
LOAD_PER_SECOND = 200
LOAD_SECONDS = 6.0
LOAD_SECONDS_QUICK = 0.5
REQUESTS_PER_SECOND = 200
CONNECTIONS = 10
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
        Group("operating", f"verify {TARGETS:,} documents", _verify, rounds=2, seconds_max=60.0),
        Group("operating", "p99 of a foreground write while a rebuild runs", _gentle, rounds=5),
        Group("operating", "p99 of /api/status at 200 requests a second", _status, rounds=5),
        Group("operating", "commands that the server gets in 6 s", _browsers, rounds=3, unit="commands"),
    ]


def _store(context: Context, name: str, targets: int, *, reviewed: int = 0) -> tuple[Store, Any]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    client.drop_database(name)
    context.stack.callback(client.drop_database, name)
    store = Store(client[name], [Review, Product])
    store.setup()
    for start in range(0, targets, BATCH):
        numbers = range(start, min(targets, start + BATCH))
        rows = [{"_id": number, "name": "loom", "review_count": reviewed} for number in numbers]
        client[name].products.insert_many(rows, ordered=False)
        if reviewed:
            client[name].reviews.insert_many([{"product_id": number} for number in numbers], ordered=False)
    return store, client[name]


def _verify(context: Context) -> list[Contender]:
    store, database = _store(context, "bench_verify", context.scale(TARGETS, TARGETS_QUICK), reviewed=1)
    # The quickest that we know: to group all reviews, or to unite both collections, takes about twice as long.
    found = {"from": "reviews", "localField": "_id", "foreignField": "product_id", "as": "found"}
    differ = {"$expr": {"$ne": ["$review_count", {"$size": "$found"}]}}
    by_hand = [{"$lookup": found}, {"$match": differ}]
    choosing = [{"$match": {"$sampleRate": SAMPLE}}, {"$project": {"_id": 1}}]

    def aggregated(_: None) -> list[Any]:
        return list(database.products.aggregate(by_hand))

    def chosen(_: None) -> int:
        """What a uniform choice of so many documents and a look at each of them takes at least."""
        ids = [row["_id"] for row in database.products.aggregate(choosing)]
        for start in range(0, len(ids), PAGE):
            some = {"$match": {"_id": {"$in": ids[start : start + PAGE]}}}
            assert [] == list(database.products.aggregate([some, *by_hand]))
        return len(ids)

    limit = "by hand: a pass that chooses, and the same aggregation of what it chose"
    return [
        Contender("one aggregation that counts and compares", lambda: None, aggregated, check=_nothing),
        Contender("whole", lambda: None, lambda _: store.verify(Product), goal=Goal(2.0), check=_nothing),
        Contender(limit, lambda: None, chosen, baseline="whole"),
        Contender(
            f"sample={SAMPLE:g}",
            lambda: None,
            lambda _: store.verify(Product, sample=SAMPLE),
            baseline="whole",
            goal=Goal(0.03, limit=limit),
            check=_nothing,
        ),
    ]


def _nothing(found: list[Any]) -> None:
    assert [] == found


# -- a foreground load beside a rebuild ----------------------------------------------------------


def _gentle(context: Context) -> list[Contender]:
    _, database = _store(context, "bench_gentle", context.scale(200_000, TARGETS_QUICK))
    seconds = context.scale(int(LOAD_SECONDS * 10), int(LOAD_SECONDS_QUICK * 10)) / 10

    def work(throttle: str | None) -> Any:
        def measured(_: Any) -> float:
            beside = _rebuilding(context, database, throttle) if throttle else contextlib.nullcontext()
            with beside:
                return _load(database, seconds)

        return measured

    return [
        Contender("alone", lambda: None, work(None), measured=True),
        Contender("gentle", lambda: None, work("gentle"), measured=True, goal=Goal(1.3)),
        Contender("as fast as it goes", lambda: None, work("full"), measured=True),
    ]


@contextlib.contextmanager
def _rebuilding(context: Context, database: Any, throttle: str) -> Generator[None]:
    """Rebuild again and again beside the block, in a process of its own, as an operator would."""
    database["treadle.jobs"].drop()
    work = f"from benchmarks.operating import rebuild_again; rebuild_again({throttle!r})"
    environment = {**os.environ, "BENCH_URI": context.uri, "BENCH_DATABASE": database.name}
    with subprocess.Popen([sys.executable, "-c", work], env=environment) as process:
        try:
            while database["treadle.jobs"].find_one() is None:
                assert process.poll() is None, "the rebuild has ended"
                time.sleep(0.05)
            yield
        finally:
            process.terminate()


def rebuild_again(throttle: str) -> None:
    """Rebuild until the process is told to end; then let go of what its transaction holds."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    store = app()
    while True:
        store.rebuild(Product, throttle="gentle" if throttle == "gentle" else None)


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


def app() -> Store:
    """The Store that `treadle serve` shows, in a process of its own."""
    client: MongoClient[Any] = MongoClient(os.environ["BENCH_URI"])
    return Store(client[os.environ["BENCH_DATABASE"]], [Review, Product])


@contextlib.contextmanager
def _serving(context: Context, name: str) -> Generator[int]:
    """The port of a `treadle serve` that has one core, as other programs see it."""
    command = [
        sys.executable,
        "-m",
        "treadle.cli",
        "serve",
        "--app",
        "benchmarks.operating:app",
        "--port",
        "0",
    ]
    environment = {**os.environ, "BENCH_URI": context.uri, "BENCH_DATABASE": name}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
            assert process.stderr is not None
            address = re.search(r":(\d+)/", process.stderr.readline())
            assert address is not None
            port = int(address[1])
            asyncio.run(_until_read(port))
            yield port
        finally:
            process.terminate()


async def _until_read(port: int) -> None:
    """Wait until there are figures."""
    client = await Client.open(port)
    for _ in range(600):
        if json.loads(await client.get("/api/status"))["at"] is not None:
            break
        await asyncio.sleep(0.05)
    client.close()


class Client:
    """One connection that is kept, and costs next to nothing itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def get(self, path: str) -> bytes:
        """The body of an answer."""
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n\r\n".encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = re.search(rb"content-length: (\d+)", head)
        return await self._reader.readexactly(int(length[1])) if length else b""

    async def lines(self) -> AsyncGenerator[bytes]:
        """The lines of an answer without an end, whose head was read."""
        while line := await self._reader.readline():
            yield line

    def close(self) -> None:
        self._writer.close()


def _status(context: Context) -> list[Contender]:
    _store(context, "bench_status", 100)
    port = context.stack.enter_context(_serving(context, "bench_status"))
    seconds = context.scale(30, 5) / 10

    async def ask(_: Any) -> float:
        clients = [await Client.open(port) for _ in range(CONNECTIONS)]
        times: list[float] = []

        async def every(number: int, client: Client) -> None:
            """Each connection asks at its own moments; a late answer makes the next question late too."""
            start = time.perf_counter() + number / REQUESTS_PER_SECOND
            for turn in range(int(REQUESTS_PER_SECOND * seconds / CONNECTIONS)):
                due = start + turn * CONNECTIONS / REQUESTS_PER_SECOND
                await asyncio.sleep(due - time.perf_counter())
                await client.get("/api/status")
                # From the moment at which it was due, so that waiting for a turn counts.
                times.append(time.perf_counter() - due)

        async with asyncio.TaskGroup() as tasks:
            for number, client in enumerate(clients):
                tasks.create_task(every(number, client))
        for client in clients:
            client.close()
        return statistics.quantiles(times, n=100)[98]

    goal = Goal(50_000, "microseconds")
    return [Contender("from its cache", lambda: None, ask, measured=True, goal=goal)]


def _browsers(context: Context) -> list[Contender]:
    _, database = _store(context, "bench_browsers", 100)
    port = context.stack.enter_context(_serving(context, "bench_browsers"))
    seconds = context.scale(60, 20) / 10

    def commands() -> int:
        counters = database.client.admin.command("serverStatus")["opcounters"]
        return int(sum(counters[name] for name in ("query", "command", "getmore", "update", "insert")))

    def watched(number: int) -> Any:
        async def look(_: Any) -> float:
            async def browse() -> None:
                events, pages = await Client.open(port), await Client.open(port)
                await events.get("/events")
                async for line in events.lines():
                    if b"data:" in line:
                        await pages.get("/")

            tasks = [asyncio.create_task(browse()) for _ in range(number)]
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
