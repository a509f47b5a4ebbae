"""The worker beside change-stream loops written by hand, what it costs the writers, and how soon it is there."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Annotated, Any

from bson import ObjectId
from pymongo import MongoClient, UpdateOne, WriteConcern
from pymongo.database import Database

from benchmarks.harness import Contender, Context, Goal, Group
from treadle import Count, Document, Id, Store, Sum

DATABASE = "treadle_benchmarks_stream"
SHOPS = 100
TOKEN_EVERY = 1_000
# Writes per second, and how many seconds 95 % of them may take at most until they are counted.
RATES = {1_000: 1.0, 5_000: 0.5}
# A writer that reaches less than this part of its rate measures something else.
REACHED_MIN = 0.9
# What writers reached, for the last group.
REACHED: dict[int, list[float]] = {rate: [] for rate in RATES}
BOUND = "the stream alone, keys by hand"
WAIT_SECONDS_MAX = 60.0
BATCH_SECONDS = 0.01
POLL_SECONDS = 0.01


class Sale(Document, collection="sales"):
    shop_id: Id
    amount: int


class Shop(Document, collection="shops"):
    name: str = ""
    sales: Annotated[int, Count(Sale, by="shop_id", maintain="stream")] = 0
    total: Annotated[int, Sum(Sale, "amount", by="shop_id", maintain="stream")] = 0


MODELS = [Sale, Shop]


def groups() -> list[Group]:
    """One group per figure."""
    return [
        Group("stream", "follow inserted sales, time per event", _follow, rounds=7),
        Group("stream", "insert a sale, with and without the worker", _beside, rounds=7),
        *(
            Group("stream", f"p95 of convergence at {rate:,} writes per second", _converge(rate), rounds=3)
            for rate in RATES
        ),
        Group("stream", "what the writers reached", _reached, rounds=1, unit="writes per second"),
    ]


def _open(context: Context) -> tuple[Store, Database[Any], list[Any]]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    client.drop_database(DATABASE)
    database = client[DATABASE]
    context.stack.callback(lambda: client.drop_database(DATABASE))
    store = Store(database, MODELS)
    store.setup()
    keys = [ObjectId() for _ in range(SHOPS)]
    database["shops"].insert_many([{"_id": key, "name": "shop", "sales": 0, "total": 0} for key in keys])
    store.worker().run_until_idle()
    return store, database, keys


def _sales(keys: list[Any], number: int) -> list[dict[str, Any]]:
    return [{"shop_id": keys[index % len(keys)], "amount": 1} for index in range(number)]


# -- events per second --------------------------------------------------------------------------------


def _follow(context: Context) -> list[Contender]:
    store, database, keys = _open(context)
    many, few = context.scale(20_000, 2_000), context.scale(1_000, 200)
    shops, tokens = database["shops"], database["tokens"]

    def prepare(number: int, stages: Sequence[dict[str, Any]] = ()) -> Any:
        """New sales, and a stream from just before them; whoever else follows is past them."""
        store.worker().run_until_idle()
        database["shops"].update_many({}, {"$set": {"seen": 0}})
        start = database.command("ping")["operationTime"]
        majority = database["sales"].with_options(write_concern=WriteConcern("majority"))
        majority.insert_many(_sales(keys, number))
        return database["sales"].watch(
            [{"$match": {"operationType": "insert"}}, *stages],
            start_at_operation_time=start,
            batch_size=TOKEN_EVERY,
        )

    def each(changes: Any) -> int:
        """The usual loop: add what an event brings, save its token."""
        with changes:
            for _ in range(few):
                event = changes.next()
                sale = event["fullDocument"]
                shops.update_one({"_id": sale["shop_id"]}, {"$inc": {"seen": sale["amount"]}})
                tokens.update_one({"_id": 1}, {"$set": {"token": event["_id"]}}, upsert=True)
        return few

    def coalesced(changes: Any) -> int:
        """The same with the sums of a thousand events at a time; a crash in between counts twice."""
        with changes:
            for start in range(0, many, TOKEN_EVERY):
                sums: dict[Any, int] = {}
                for _ in range(min(TOKEN_EVERY, many - start)):
                    event = changes.next()
                    sale = event["fullDocument"]
                    sums[sale["shop_id"]] = sums.get(sale["shop_id"], 0) + sale["amount"]
                shops.bulk_write(
                    [UpdateOne({"_id": key}, {"$inc": {"seen": value}}) for key, value in sums.items()]
                )
                tokens.update_one({"_id": 1}, {"$set": {"token": event["_id"]}}, upsert=True)
        return many

    def only_read(changes: Any) -> int:
        """What nobody who follows a stream can leave out, with no more of the documents than is needed."""
        with changes:
            for _ in range(many):
                changes.next()
        return many

    def prepare_keys() -> Any:
        shown = {"operationType": 1, "ns": 1, "documentKey": 1, "fullDocument.shop_id": 1}
        return prepare(many, [{"$project": shown}])

    def by_treadle(changes: Any) -> int:
        changes.close()
        store.worker().run_until_idle()
        return many

    def check(number: int) -> None:
        assert number == sum(shop["seen"] for shop in shops.find())

    def check_treadle(number: int) -> None:
        assert database["sales"].count_documents({}) == sum(shop["sales"] for shop in shops.find())

    return [
        Contender("$inc and token per event", lambda: prepare(few), each, few, check=check),
        Contender("sums and token per 1,000", lambda: prepare(many), coalesced, many, check=check),
        Contender(BOUND, prepare_keys, only_read, many),
        Contender(
            "Treadle's worker",
            lambda: prepare(many),
            by_treadle,
            many,
            goal=Goal(40, "microseconds", limit=BOUND),
            check=check_treadle,
        ),
    ]


# -- beside the writers -----------------------------------------------------------------------------------


def _work(uri: str) -> None:
    """Run the worker on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with MongoClient[Any](uri) as client:
        Store(client[DATABASE], MODELS).worker().run()


class _Worker:
    """The worker, in a process of its own, which has one core."""

    def __init__(self, context: Context, database: Database[Any]) -> None:
        self._uri, self._database = context.uri, database
        self._process: Any = None
        context.stack.callback(self.stop)

    def start(self) -> None:
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._process = spawn.Process(target=_work, args=(self._uri,), daemon=True)
            self._process.start()
        wait_until = time.monotonic() + WAIT_SECONDS_MAX
        while not self._leads() and time.monotonic() < wait_until:
            time.sleep(0.05)

    def _leads(self) -> bool:
        held = self._database["treadle.leases"].find_one({"_id": "worker"}) or {}
        return f":{self._process.pid}:" in (held.get("owner") or "")

    def stop(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGTERM)
            self._process.join(WAIT_SECONDS_MAX)
            self._process = None


def _beside(context: Context) -> list[Contender]:
    store, database, keys = _open(context)
    worker = _Worker(context, database)
    times = context.scale(2_000, 300)

    def without() -> None:
        worker.stop()
        store.worker().run_until_idle()

    def insert(_: None) -> None:
        sales = database["sales"]
        for index in range(times):
            sales.insert_one({"shop_id": keys[index % SHOPS], "amount": 1})

    return [
        Contender("without the worker", without, insert, times),
        Contender("with the worker", worker.start, insert, times, goal=Goal(1.4)),
    ]


# -- convergence --------------------------------------------------------------------------------------------


def _converge(rate: int) -> Callable[[Context], list[Contender]]:
    def make(context: Context) -> list[Contender]:
        _, database, keys = _open(context)
        worker = _Worker(context, database)
        seconds = context.scale(10, 3)

        def measure(_: None) -> float:
            return _p95(context.uri, database, keys, rate, seconds)

        def check(p95: float) -> None:
            assert 0 < p95 < WAIT_SECONDS_MAX

        most = RATES[rate]
        goal = None if most is None else Goal(most * 1e6, "microseconds")
        return [
            Contender(f"{rate:,} per second", worker.start, measure, goal=goal, check=check, measured=True)
        ]

    return make


def _p95(uri: str, database: Database[Any], keys: list[Any], rate: int, seconds: int) -> float:
    """How long 95 % of the sales took at most from their acknowledgement until their shop counts them."""
    before = {shop["_id"]: shop["sales"] for shop in database["shops"].find()}
    written: dict[Any, list[float]] = {key: [] for key in keys}
    with _polling(uri, database.name, before, written) as taken:
        start = time.perf_counter()
        done = 0
        while done < rate * seconds:
            due = min(rate * seconds, int((time.perf_counter() - start) * rate))
            if due > done:
                sales = [{"shop_id": keys[index % SHOPS], "amount": 1} for index in range(done, due)]
                database["sales"].insert_many(sales, ordered=False)
                now = time.perf_counter()
                for sale in sales:
                    written[sale["shop_id"]].append(now)
                done = due
            time.sleep(BATCH_SECONDS)
        reached = done / (time.perf_counter() - start)
        REACHED[rate].append(reached)
        assert reached >= REACHED_MIN * rate, f"the writer reached {reached:,.0f} per second of {rate:,}"
        until = time.monotonic() + WAIT_SECONDS_MAX
        while len(taken) < done and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
    assert done == len(taken), "not all of them arrived"
    return sorted(taken)[int(len(taken) * 0.95)]


def _reached(context: Context) -> list[Contender]:
    """What the groups before this one have noted."""

    def median(noted: list[float]) -> float:
        return statistics.median(noted) / 1e6

    return [
        Contender(f"{rate:,} per second asked for", partial(list, noted), median, measured=True)
        for rate, noted in REACHED.items()
        if noted
    ]


@contextlib.contextmanager
def _polling(
    uri: str, name: str, before: dict[Any, int], written: dict[Any, list[float]]
) -> Generator[list[float]]:
    """The times until each write was counted, by looking at the shops again and again."""
    taken: list[float] = []
    done = threading.Event()
    seen = dict.fromkeys(before, 0)

    def poll() -> None:
        with MongoClient[Any](uri) as client:
            shops = client[name]["shops"]
            while not done.is_set():
                found = list(shops.find({}, {"sales": 1}))
                now = time.perf_counter()
                for shop in found:
                    key, count = shop["_id"], shop["sales"] - before[shop["_id"]]
                    # Its acknowledgement may come after it was counted.
                    count = min(count, len(written[key]))
                    taken.extend(max(0.0, now - at) for at in written[key][seen[key] : count])
                    seen[key] = max(seen[key], count)
                time.sleep(POLL_SECONDS)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield taken
    finally:
        done.set()
        thread.join()
