"""A pytest plugin: a throwaway MongoDB server for your tests.

Ask for it in a `conftest.py`:

    pytest_plugins = ["treadle.testing"]

`server` is a private single-node replica set for the whole test run;
`database` is an empty PyMongo database on it, dropped afterwards, and `uri`
its address; `store` and `async_store` are stores on it, of the models that
your fixture `models` gives.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterable
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from treadle.errors import UsageError
from treadle.plan.capabilities import Capabilities, read_capabilities
from treadle.server.local import LocalServer, start
from treadle.store.async_store import AsyncStore
from treadle.store.blocking.runner import Runner
from treadle.store.blocking.store import Store


@pytest.fixture(scope="session")
def server() -> Generator[LocalServer]:
    """A real mongod for this test run, removed afterwards."""
    with start(parameters={"enableTestCommands": 1}) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: LocalServer) -> Generator[MongoClient[dict[str, Any]]]:
    """One client for all tests; opened after the replica set is ready."""
    with MongoClient[dict[str, Any]](server.uri) as opened:
        yield opened


@pytest.fixture(scope="session")
def capabilities(client: MongoClient[dict[str, Any]]) -> Capabilities:
    """What the server can do, asked once for all Stores of the tests."""
    return Runner(client["test"]).run(read_capabilities())


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
def store(
    models: Iterable[type[Any]], database: Database[dict[str, Any]], capabilities: Capabilities
) -> Generator[Store]:
    """A Store on the test's own database, set up."""
    with Store(database, models) as opened:
        opened._assume(capabilities)
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
