"""The fixture `run`: performs plans and makes stores, on the asyncio Store or on the blocking one.

The blocking Store is generated from the asyncio one, and `store/test_blocking.py` holds that.
So `make test` runs the asyncio Store, and both only for tests marked `both_stores` or `quick`;
`make test-all` runs the blocking one for the rest (TREADLE_STORES=sync).

`run(plan)` performs a plan. `run.store(models)` makes a store whose calls block, whichever of
the two works beneath. One event loop and one client serve all tests of a process.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from pymongo import AsyncMongoClient
from pymongo.database import Database

from treadle.plan import Plan
from treadle.plan.capabilities import Capabilities
from treadle.server.local import LocalServer
from treadle.store.async_runner import AsyncRunner
from treadle.store.async_store import AsyncStore
from treadle.store.blocking.runner import Runner
from treadle.store.blocking.store import Store

R = TypeVar("R")
STORES = {"async": ["async"], "sync": ["sync"], "both": ["async", "sync"]}


def stores_for(definition: Any) -> list[str]:
    """Which Stores a test runs on."""
    if definition.get_closest_marker("both_stores") or definition.get_closest_marker("quick"):
        return STORES["both"]
    return STORES[os.environ.get("TREADLE_STORES", "async")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # A few files have a fixture `run` of their own, and a few tests choose the Store themselves.
    chosen = any(mark.args[0] == "run" for mark in metafunc.definition.iter_markers("parametrize"))
    if "run" in metafunc.fixturenames and not chosen and not hasattr(metafunc.module, "run"):
        metafunc.parametrize("run", stores_for(metafunc.definition), indirect=True)


@pytest.fixture(scope="session")
def event_loop() -> Generator[asyncio.AbstractEventLoop]:
    """The event loop of all tests of this process."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def async_client(
    server: LocalServer, event_loop: asyncio.AbstractEventLoop
) -> Generator[AsyncMongoClient[dict[str, Any]]]:
    """The asyncio client of all tests of this process."""
    opened: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(server.uri)
    event_loop.run_until_complete(opened.admin.command("hello"))
    yield opened
    event_loop.run_until_complete(opened.close())


@pytest.fixture
def run(
    request: pytest.FixtureRequest, database: Database[dict[str, Any]], capabilities: Capabilities
) -> Generator[Run | AsyncRun]:
    """Performs plans and makes stores."""
    if request.param == "sync":
        yield Run(database, capabilities)
        return
    client = request.getfixturevalue("async_client")
    async_run = AsyncRun(request.getfixturevalue("event_loop"), client[database.name], capabilities)
    try:
        yield async_run
    finally:
        async_run.end_tasks()


class Run:
    """Plans and stores on the blocking Store."""

    def __init__(self, database: Database[dict[str, Any]], capabilities: Capabilities | None) -> None:
        self.database = database
        self._capabilities = capabilities
        self._runner = Runner(database)

    def __call__(self, plan: Plan[R], session: Any = None) -> R:
        return self._runner.run(plan, session)

    def store(self, models: Iterable[type[Any]], **options: Any) -> Any:
        """A store on this test's database."""
        made = Store(self.database, models, **options)
        if self._capabilities is not None:
            made._assume(self._capabilities)
        return made


class AsyncRun:
    """Plans and stores on the asyncio Store, behind calls that block."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, database: Any, capabilities: Capabilities | None = None
    ) -> None:
        self._loop = loop
        self._capabilities = capabilities
        self.database = database
        self._runner = AsyncRunner(database)

    def __call__(self, plan: Plan[R], session: Any = None) -> R:
        return self.wait(self._runner.run(plan, session))

    def wait(self, work: Awaitable[R]) -> R:
        """The result of a coroutine, on the event loop of the tests."""
        return self._loop.run_until_complete(work)

    def store(self, models: Iterable[type[Any]], **options: Any) -> Any:
        """An `AsyncStore` whose calls block."""
        made = AsyncStore(self.database, models, **options)
        if self._capabilities is not None:
            made._assume(self._capabilities)
        return Blocking(made, self)

    def end_tasks(self) -> None:
        """Cancel what still runs, as asyncio.run does at its end: the timers of counters, for example."""
        tasks = {task for task in asyncio.all_tasks(self._loop) if not _belongs_to_driver(task)}
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))


def _belongs_to_driver(task: asyncio.Task[Any]) -> bool:
    """Whether the shared client made this task, which must outlive the test."""
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and "/pymongo/" in code.co_filename


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
