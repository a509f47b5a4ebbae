"""A replica set of three for the tests of this folder, and clients and stores on it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Generator, Iterable
from typing import Any

import pytest
from benchmarks.torture.replica_set import Cluster, Member
from pymongo import AsyncMongoClient, MongoClient

from tests.kit.run import AsyncRun
from treadle.store.blocking.store import Store

Open = Callable[..., Any]


@pytest.fixture(scope="session")
def running() -> Generator[Cluster]:
    with Cluster() as started:
        yield started


@pytest.fixture
def cluster(running: Cluster) -> Generator[Cluster]:
    """Three real servers as one set, whole again after each test."""
    running.heal()
    yield running
    running.heal()


@pytest.fixture
def name(cluster: Cluster) -> Generator[str]:
    """The name of an empty database."""
    chosen = f"test_{uuid.uuid4().hex[:12]}"
    yield chosen
    cluster.heal()
    cluster.client.drop_database(chosen)


@pytest.fixture
def lagging(cluster: Cluster) -> Generator[Member]:
    """A secondary that fetches what is written and applies none of it."""
    member = cluster.secondaries[0]
    cluster.lag(member)
    yield member
    cluster.catch_up(member)


@pytest.fixture(params=["sync", "async"])
def open_store(
    request: pytest.FixtureRequest, cluster: Cluster, name: str, event_loop: asyncio.AbstractEventLoop
) -> Generator[Open]:
    """Opens stores whose calls block, on each of the two shells in turn; options are the client's."""
    clients: list[MongoClient[Any]] = []
    runs: list[AsyncRun] = []

    def open_(models: Iterable[Any], *, limits: Any = None, **options: Any) -> Any:
        if request.param == "sync":
            clients.append(MongoClient(cluster.uri, **options))
            return Store(clients[-1][name], models, limits=limits)
        client: AsyncMongoClient[Any] = AsyncMongoClient(cluster.uri, **options)
        run = AsyncRun(event_loop, client[name])
        runs.append(run)
        return run.store(models, limits=limits)

    yield open_
    for run in runs:
        run.end_tasks()
        run.wait(run.database.client.close())
    for client in clients:
        client.close()
