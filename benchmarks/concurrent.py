"""500 tasks at once on one event loop: insert and get; and requests to FastAPI under 64 connections.

The applications (`web_app.py`) run with uvicorn in processes of their own,
one core for whichever is asked; the requests are written by hand, so that the
one who asks costs as little as can be.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from bson import ObjectId
from pymongo import AsyncMongoClient, MongoClient

from benchmarks.harness import Contender, Context, Goal, Group
from benchmarks.libraries import COLLECTION, DATABASE, AsyncLibrary, AsyncTreadle, Person, asynchronous
from benchmarks.people import person
from benchmarks.web_app import DATABASE as WEB_DATABASE
from benchmarks.web_app import LIBRARIES
from treadle import AsyncStore, Limits

TASKS = 500
TASKS_QUICK = 100
CONNECTIONS = 64
REQUESTS = 3_000
REQUESTS_QUICK = 300
PRODUCTS = 500
START_SECONDS_MAX = 60.0
BOUND = "one request by hand, to as many tasks"
GOALS = {"insert": 0.08, "get": 0.08}


def groups() -> list[Group]:
    """Each call from many tasks, and each request."""
    return [
        *(Group("concurrent", f"500 tasks: {call}", _calls(call)) for call in GOALS),
        Group("concurrent", "a single caller: get by id", _single, rounds=31),
        Group("concurrent", "FastAPI, 64 connections: GET /products/{id}", _requests(_get), rounds=9),
        Group("concurrent", "FastAPI, 64 connections: POST /reviews", _requests(_post), rounds=9),
    ]


# -- tasks -----------------------------------------------------------------------------------------


def _calls(call: str) -> Callable[[Context], Sequence[Contender]]:
    def make(context: Context) -> list[Contender]:
        count = context.scale(TASKS, TASKS_QUICK)
        libraries = asynchronous(context)
        client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
        people = client[DATABASE][COLLECTION]
        people.drop()
        context.stack.callback(client.drop_database, DATABASE)
        stored = [person(number) for number in range(count)]
        people.insert_many(stored)

        def contender(library: AsyncLibrary) -> Contender:
            def prepare() -> list[Any]:
                if call == "insert":
                    return [library.build(person(number)) for number in range(count)]
                return [ObjectId(each["_id"].binary) for each in stored]

            async def work(arguments: list[Any]) -> list[Any]:
                perform = getattr(library, call)
                return await asyncio.gather(*(perform(each) for each in arguments))

            def check(results: list[Any]) -> None:
                assert count == len(results)
                assert None not in results

            goal = Goal(GOALS[call], limit=BOUND) if isinstance(library, AsyncTreadle) else None
            return Contender(library.name, prepare, work, operations=count, goal=goal, check=check)

        def bound() -> Contender:
            ours: AsyncMongoClient[Any] = AsyncMongoClient(context.uri)
            context.stack.callback(lambda: context.wait(ours.close()))
            least = _Least(ours, call)
            prepare = contender(libraries[0]).prepare
            return Contender(BOUND, prepare, least.work, operations=count)

        return [*(contender(library) for library in libraries), bound()]

    return make


class _Least:
    """The least that any library can do: one request for all, whose answers go to the tasks as models."""

    def __init__(self, client: AsyncMongoClient[Any], call: str) -> None:
        self._collection = client[DATABASE][COLLECTION]
        self._perform = getattr(self, f"_{call}")

    async def work(self, arguments: list[Any]) -> list[Any]:
        loop, waiting = asyncio.get_running_loop(), list[asyncio.Future[Any]]()
        started: list[asyncio.Task[None]] = []

        async def all_at_once() -> None:
            for future, document in zip(waiting, await self._perform(arguments), strict=True):
                future.set_result(document)

        async def one(_: Any) -> Any:
            waiting.append(loop.create_future())
            mine = waiting[-1]
            if len(waiting) == len(arguments):
                started.append(loop.create_task(all_at_once()))
            return await mine

        return await asyncio.gather(*map(one, arguments))

    async def _insert(self, documents: list[Any]) -> list[Any]:
        await self._collection.insert_many(documents, ordered=False)
        return documents

    async def _get(self, keys: list[Any]) -> list[Any]:
        found = self._collection.find({"_id": {"$in": keys}}, batch_size=len(keys) + 1)
        return [Person.model_validate(each) for each in await found.to_list()]


def _single(context: Context) -> list[Contender]:
    """What it costs a caller who is alone that others might come."""
    count = context.scale(TASKS, TASKS_QUICK)
    client: AsyncMongoClient[Any] = AsyncMongoClient(context.uri)
    context.stack.callback(lambda: context.wait(client.close()))
    stores = {
        most: AsyncStore(client[DATABASE], [Person], limits=Limits(together_max=most))
        for most in (1, Limits().together_max)
    }
    stored = context.wait(stores[1].insert(Person.model_validate(person(1))))

    def contender(name: str, store: AsyncStore, goal: Goal | None = None) -> Contender:
        async def work(_: None) -> None:
            for _ in range(count):
                await store.get(Person, stored.id)

        return Contender(name, lambda: None, work, operations=count, goal=goal)

    first, second = stores.values()
    return [contender("alone by declaration", first), contender("alone by chance", second, Goal(1.02))]


# -- requests --------------------------------------------------------------------------------------


def _get(number: int, ids: Sequence[str]) -> bytes:
    return f"GET /products/{ids[number % len(ids)]} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def _post(number: int, ids: Sequence[str]) -> bytes:
    body = f'{{"product_id":"{ids[number % len(ids)]}","rating":{number % 5},"text":"fine"}}'
    head = (
        f"POST /reviews HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    return f"{head}\r\n\r\n{body}".encode()


def _requests(request: Callable[[int, Sequence[str]], bytes]) -> Callable[[Context], Sequence[Contender]]:
    def make(context: Context) -> list[Contender]:
        count = context.scale(REQUESTS, REQUESTS_QUICK)
        client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
        client.drop_database(WEB_DATABASE)
        context.stack.callback(client.drop_database, WEB_DATABASE)
        keys = [ObjectId() for _ in range(PRODUCTS)]
        client[WEB_DATABASE]["products"].insert_many(
            [{"_id": key, "name": "loom", "price": 12.5, "tags": ["wood"], "stock": 3} for key in keys]
        )
        messages = [request(number, [str(key) for key in keys]) for number in range(count)]

        def contender(library: str) -> Contender:
            port = _serve(library, context)

            async def work(_: None) -> list[bytes]:
                return await _ask(port, messages)

            def check(answers: list[bytes]) -> None:
                assert count == len(answers)
                assert {b"HTTP/1.1 200 OK"} == set(answers)

            goal = Goal(1.0) if library == "Treadle" else None
            return Contender(library, lambda: None, work, operations=count, goal=goal, check=check)

        return [contender(library) for library in LIBRARIES]

    return make


def _serve(library: str, context: Context) -> int:
    """The port of an application that was started, and is ended with the group."""
    command = [sys.executable, "-m", "benchmarks.web_app", library]
    environment = {**os.environ, "MONGODB_URI": context.uri}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)

    def end() -> None:
        process.terminate()
        process.wait(START_SECONDS_MAX)

    context.stack.callback(end)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    context.wait(_answers(port))
    return port


async def _answers(port: int) -> None:
    until = monotonic() + START_SECONDS_MAX
    while monotonic() < until:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


async def _ask(port: int, messages: Sequence[bytes]) -> list[bytes]:
    """The first line of each answer."""
    pending = iter(messages)
    answers: list[bytes] = []

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for message in pending:
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            answers.append(lines[0])
            lengths = [int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")]
            await reader.readexactly(lengths[0] if lengths else 0)
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))
    return answers
