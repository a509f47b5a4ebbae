"""Many writers of few documents, beside the same work written by hand in PyMongo.

A load runs for a fixed time, in one process or in two, and each call is timed. Treadle and PyMongo take
turns. What by hand needs a transaction or a guard to be correct has one there, too.

    python -m benchmarks.contention --uri mongodb://… [--seconds 5] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Annotated, Any

from bson import ObjectId
from pydantic import BaseModel
from pymongo import AsyncMongoClient, MongoClient

from treadle import AsyncStore, Count, Document, ExtendedReference, Id, Store

DATABASE = "contention"
PARENTS = 8
HANDS = ("by hand", "Treadle")
P95 = 0.95
Times = dict[str, list[float]]
Call = Callable[[], Awaitable[Any]]


class Organiser(Document, collection="organisers"):
    id: int
    name: str


class OrganiserCard(BaseModel):
    name: str


class Review(Document, collection="reviews"):
    event_id: int


class Seat(Document, collection="seats"):
    order_id: Id


class Order(Document, collection="orders"):
    event_id: int


class Event(Document, collection="events"):
    id: int
    reviews: Annotated[int, Count(Review, by="event_id")] = 0
    orders: Annotated[int, Count(Order, by="event_id")] = 0


class Show(Document, collection="shows"):
    organiser_id: int
    organiser: Annotated[OrganiserCard | None, ExtendedReference(Organiser, by="organiser_id")] = None


MODELS = [Organiser, Review, Seat, Order, Event, Show]


@dataclass(frozen=True, slots=True)
class Load:
    """How many tasks of one process make each kind of call, on how many parents."""

    title: str
    tasks: Mapping[str, int]
    parents: int = PARENTS
    processes: int = 1


LOADS = {
    "beside": Load("plain inserts beside transactions on eight hot parents", {"review": 16, "order": 16}),
    "one": Load("inserts below one hot parent, from two processes", {"review": 8}, 1, 2),
    "rename": Load("renames beside inserts", {"rename": 4, "show": 16}),
}


# -- one process -----------------------------------------------------------------------------------


class WithTreadle:
    """The calls of the loads by a Store."""

    def __init__(self, client: AsyncMongoClient[Any]) -> None:
        self._store = AsyncStore(client[DATABASE], MODELS)
        self._numbers = itertools.count()

    async def review(self, parent: int) -> None:
        await self._store.insert(Review(event_id=parent))

    async def order(self, parent: int) -> None:
        async def place(session: Any) -> None:
            order = Order(event_id=parent)
            await self._store.insert(Seat(order_id=order.id), session=session)
            await self._store.insert(order, session=session)
            await self._store.insert(Seat(order_id=order.id), session=session)

        await self._store.with_transaction(place)

    async def rename(self, parent: int) -> None:
        await self._store.update(Organiser, parent, {"$set": {"name": str(next(self._numbers))}})

    async def show(self, parent: int) -> None:
        await self._store.insert(Show(organiser_id=parent))


class ByHand:
    """The same by PyMongo's own transactions."""

    def __init__(self, client: AsyncMongoClient[Any]) -> None:
        self._client = client
        self._database = client[DATABASE]
        self._numbers = itertools.count()

    async def _commit(self, work: Callable[[Any], Awaitable[None]]) -> None:
        async with self._client.start_session() as session:
            await session.with_transaction(work)

    async def review(self, parent: int) -> None:
        async def work(session: Any) -> None:
            await self._database.reviews.insert_one({"event_id": parent}, session=session)
            await self._database.events.update_one({"_id": parent}, {"$inc": {"reviews": 1}}, session=session)

        await self._commit(work)

    async def order(self, parent: int) -> None:
        async def work(session: Any) -> None:
            order = ObjectId()
            await self._database.seats.insert_one({"order_id": order}, session=session)
            await self._database.orders.insert_one({"_id": order, "event_id": parent}, session=session)
            await self._database.events.update_one({"_id": parent}, {"$inc": {"orders": 1}}, session=session)
            await self._database.seats.insert_one({"order_id": order}, session=session)

        await self._commit(work)

    async def rename(self, parent: int) -> None:
        name = str(next(self._numbers))

        async def work(session: Any) -> None:
            await self._database.organisers.update_one(
                {"_id": parent}, {"$set": {"name": name}}, session=session
            )
            await self._database.shows.update_many(
                {"organiser_id": parent}, {"$set": {"organiser.name": name}}, session=session
            )

        await self._commit(work)

    async def show(self, parent: int) -> None:
        async def work(session: Any) -> None:
            # Written, so that a concurrent rename conflicts instead of missing the new show.
            organiser = await self._database.organisers.find_one_and_update(
                {"_id": parent}, {"$inc": {"touched": 1}}, session=session
            )
            show = {"organiser_id": parent, "organiser": {"name": organiser["name"]}}
            await self._database.shows.insert_one(show, session=session)

        await self._commit(work)


async def work(uri: str, load: Load, hand: str, seconds: float) -> None:
    """Make the calls of one process, when a line arrives; print how long each took."""
    async with AsyncExitStack() as stack:
        client: AsyncMongoClient[Any] = await stack.enter_async_context(AsyncMongoClient(uri))
        calls = WithTreadle(client) if hand == "Treadle" else ByHand(client)
        times: Times = {kind: [] for kind in load.tasks}
        for kind in load.tasks:
            await getattr(calls, kind)(0)
        print("ready", flush=True)
        sys.stdin.readline()
        end = monotonic() + seconds

        async def repeat(kind: str, chance: random.Random) -> None:
            while monotonic() < end:
                start = perf_counter()
                await getattr(calls, kind)(chance.randrange(load.parents))
                times[kind].append(perf_counter() - start)

        await asyncio.gather(
            *(
                repeat(kind, random.Random(f"{kind} {number}"))
                for kind, count in load.tasks.items()
                for number in range(count)
            )
        )
        print(json.dumps(times))


# -- all of them -----------------------------------------------------------------------------------


def prepare(client: MongoClient[Any]) -> None:
    """Store the parents, and a few shows of each organiser."""
    client.drop_database(DATABASE)
    store = Store(client[DATABASE], MODELS)
    store.setup()
    store.insert_many([Event(id=number) for number in range(PARENTS)])
    store.insert_many([Organiser(id=number, name="x") for number in range(PARENTS)])


def run(uri: str, name: str, hand: str, seconds: float) -> Times:
    """The times of all calls of a load, made by so many processes as it has."""
    command = [sys.executable, "-m", "benchmarks.contention", "--uri", uri, "--seconds", str(seconds)]
    processes = [
        subprocess.Popen(
            [*command, "--work", name, "--hand", hand],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(LOADS[name].processes)
    ]
    for process in processes:
        assert process.stdout is not None
        assert "ready\n" == process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [json.loads(process.communicate()[0]) for process in processes]
    assert not any(process.returncode for process in processes)
    return {kind: sorted(time for each in outputs for time in each[kind]) for kind in LOADS[name].tasks}


def measure(uri: str, name: str, seconds: float, rounds: int) -> None:
    """Print a table of one load, and its figures with their goals."""
    load, runs = LOADS[name], {hand: list[Times]() for hand in HANDS}
    with MongoClient[Any](uri) as client:
        for number in range(rounds):
            for hand in HANDS if number % 2 else HANDS[::-1]:
                prepare(client)
                runs[hand].append(run(uri, name, hand, seconds))
        client.drop_database(DATABASE)
    print(f"\n{load.title}: {rounds} runs of {seconds:g} s each, taken in turns; medians of the runs\n")
    print("| call | by | calls completed | median | p95 | longest |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind, tasks in load.tasks.items():
        figures = {hand: _figures([each[kind] for each in runs[hand]]) for hand in HANDS}
        for hand, (count, middle, late, longest) in figures.items():
            times = " | ".join(f"{value * 1000:.0f} ms" for value in (middle, late, longest))
            print(f"| {kind}, {tasks} tasks | {hand} | {count:.0f} | {times} |")
        mine, other = figures["Treadle"], figures["by hand"]
        _goal(f"{load.title}: {kind}, calls by hand for each of Treadle's", other[0] / mine[0], 1.0)
        _goal(f"{load.title}: {kind}, p95", mine[2] / other[2], 1.5)
        _goal(f"{load.title}: {kind}, longest", mine[3] / other[3], 1.5)


def _figures(runs: list[list[float]]) -> tuple[float, ...]:
    """How many calls were completed, and how long the median, the p95 and the longest took."""
    each = [(len(run), statistics.median(run), run[int(len(run) * P95)], run[-1]) for run in runs]
    return tuple(map(statistics.median, zip(*each, strict=True)))


def _goal(name: str, value: float, maximum: float) -> None:
    print(json.dumps({"goal": {"name": name, "value": value, "maximum": maximum, "unit": "times by hand"}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--uri", required=True)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=LOADS, nargs="*", default=list(LOADS))
    parser.add_argument("--work", choices=LOADS, help=argparse.SUPPRESS)
    parser.add_argument("--hand", choices=HANDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        asyncio.run(work(options.uri, LOADS[options.work], options.hand, options.seconds))
        return
    for name in options.only:
        measure(options.uri, name, options.seconds, options.rounds)


if __name__ == "__main__":
    main()
