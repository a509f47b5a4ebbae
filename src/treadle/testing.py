"""A pytest plugin: a throwaway MongoDB server, and tests that run sync and async.

Ask for it in a `conftest.py`:

    pytest_plugins = ["treadle.testing"]

`server` is a private single-node replica set for the whole test run;
`database` is an empty PyMongo database on it, dropped afterwards, and `uri`
its address; `store` and `async_store` are stores on it, of the models that
your fixture `models` gives; `run` is parametrised: a test that takes it runs
twice, once through `Store` and once through `AsyncStore`, and is written once.

    def test_rename_reaches_the_order(run):
        store = run.store([Customer, Order])
        ...

`run(plan)` performs a plan. `run.store(models)` gives a store whose calls
block, whichever of the two works beneath.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.database import Database

from treadle.errors import UsageError
from treadle.plan import Plan
from treadle.server.local import LocalServer, start
from treadle.store.async_runner import AsyncRunner
from treadle.store.async_store import AsyncStore
from treadle.store.blocking.runner import Runner
from treadle.store.blocking.store import Store

R = TypeVar("R")


@pytest.fixture(scope="session")
def server() -> Generator[LocalServer]:
    """A real mongod for this test run, removed afterwards."""
    parameters = {"enableTestCommands": 1, "transactionLifetimeLimitSeconds": 30}
    with start(parameters=parameters) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: LocalServer) -> Generator[MongoClient[dict[str, Any]]]:
    """One client for all tests; opened after the replica set is ready."""
    with MongoClient[dict[str, Any]](server.uri) as opened:
        yield opened


@pytest.fixture
def database(client: MongoClient[dict[str, Any]]) -> Generator[Database[dict[str, Any]]]:
    """An empty database of its own for each test."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield client[name]
    client.drop_database(name)


@pytest.fixture
def uri(server: LocalServer, database: Database[dict[str, Any]]) -> str:
    """The address of the test's own database."""
    base, _, options = server.uri.partition("?")
    return f"{base}{database.name}?{options}"


@pytest.fixture
def models() -> list[type[Any]]:
    """The models of `store` and `async_store`; every test suite has its own."""
    raise UsageError(
        "store and async_store take their models from a fixture of yours; add to conftest.py: "
        "@pytest.fixture def models(): return [Customer, Order]",
        code="fixture-missing",
    )


@pytest.fixture
def store(models: Iterable[type[Any]], database: Database[dict[str, Any]]) -> Generator[Store]:
    """A Store on the test's own database, set up."""
    with Store(database, models) as opened:
        opened.setup()
        yield opened


@pytest.fixture
def async_store(models: Iterable[type[Any]], database: Database[dict[str, Any]], uri: str) -> AsyncStore:
    """An AsyncStore on the test's own database, set up.

    Its client connects in the event loop of the test, whichever plugin or
    `asyncio.run` has made that.
    """
    Store(database, models).setup()
    return AsyncStore.open(uri, models)


@pytest.fixture(params=["sync", "async"])
def run(
    request: pytest.FixtureRequest, server: LocalServer, database: Database[dict[str, Any]]
) -> Generator[Run | AsyncRun]:
    """Performs plans and makes stores, on each of the two shells in turn."""
    if request.param == "sync":
        yield Run(database)
        return
    async_run = AsyncRun(server.uri, database.name)
    try:
        yield async_run
    finally:
        async_run.close()


class Run:
    """Plans and stores on the blocking shell."""

    def __init__(self, database: Database[dict[str, Any]]) -> None:
        self.database = database
        self._runner = Runner(database)

    def __call__(self, plan: Plan[R], session: Any = None) -> R:
        return self._runner.run(plan, session)

    def store(self, models: Iterable[type[Any]], **options: Any) -> Any:
        """A store on this test's database."""
        return Store(self.database, models, **options)


class AsyncRun:
    """Plans and stores on the asyncio shell, behind calls that block."""

    def __init__(self, uri: str, database: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(uri)
        self.database = self._client[database]
        self._runner = AsyncRunner(self.database)

    def __call__(self, plan: Plan[R], session: Any = None) -> R:
        return self.wait(self._runner.run(plan, session))

    def wait(self, work: Awaitable[R]) -> R:
        """The result of a coroutine, on this test's event loop."""
        return self._loop.run_until_complete(work)

    def store(self, models: Iterable[type[Any]], **options: Any) -> Any:
        """An `AsyncStore` whose calls block."""
        return Blocking(AsyncStore(self.database, models, **options), self)

    def close(self) -> None:
        # As asyncio.run does at its end: the timers of counters, for example, are tasks of the loop.
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self.wait(self._client.close())
        self._loop.close()


class Blocking:
    """Any asyncio object of Treadle, with its coroutines awaited on the spot."""

    def __init__(self, inner: Any, run: AsyncRun) -> None:
        self._inner = inner
        self._run = run

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return self._call(attribute) if inspect.ismethod(attribute) else attribute

    def _call(self, method: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            result = method(*arguments, **options)
            if inspect.iscoroutine(result):
                return self._run.wait(result)
            if type(result).__module__.startswith("treadle."):
                return Blocking(result, self._run)
            return self._context(result) if hasattr(result, "__aenter__") else result

        return call

    @contextmanager
    def _context(self, manager: Any) -> Iterator[Any]:
        value = self._run.wait(manager.__aenter__())
        try:
            yield value
        except BaseException as error:
            if not self._run.wait(manager.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self._run.wait(manager.__aexit__(None, None, None))

    def __enter__(self) -> Blocking:
        self._run.wait(self._inner.__aenter__())
        return self

    def __exit__(self, *exception: object) -> None:
        self._run.wait(self._inner.__aexit__(*exception))

    def __iter__(self) -> Iterator[Any]:
        iterator = aiter(self._inner)
        while True:
            try:
                yield self._run.wait(anext(iterator))
            except StopAsyncIteration:
                return

    def __next__(self) -> Any:
        try:
            return self._run.wait(anext(self._inner))
        except StopAsyncIteration:
            raise StopIteration from None
