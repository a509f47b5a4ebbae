"""What goes on while a new primary is elected: set-up, the worker, the end of a process, callers in a hurry."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from datetime import timedelta
from typing import Annotated, Any

import pymongo
import pytest
from benchmarks.torture.replica_set import Cluster
from pymongo import MongoClient, monitoring
from pymongo.errors import PyMongoError

from tests.cluster.conftest import Open
from treadle import Approximate, Count, Document, Indexed, Store
from treadle.plan.capabilities import NOWHERE

pytestmark = [pytest.mark.all, pytest.mark.heavy, pytest.mark.server]
NEVER = timedelta(hours=1)
# Much more than a deadline here, much less than without one.
SOON_SECONDS = 30.0


class Review(Document, collection="reviews"):
    id: int
    product_id: int
    text: Annotated[str, Indexed()] = ""


class Product(Document, collection="products"):
    id: int
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    streamed: Annotated[int, Count(Review, by="product_id", maintain="stream")] = 0
    views: Annotated[int, Approximate(every=10**6, within=NEVER)] = 0


MODELS = [Review, Product]


class Before(monitoring.CommandListener):
    """Notes the commands that are sent, and does something once, just before one of them."""

    def __init__(self, name: str = "", act: Any = None) -> None:
        self.name, self.act = name, act
        self.commands: list[Any] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.commands.append(event.command)
        if event.command_name == self.name and self.act is not None:
            act, self.act = self.act, None
            act()

    def succeeded(self, event: Any) -> None: ...
    def failed(self, event: Any) -> None: ...


@pytest.mark.parametrize("at", ["create", "createIndexes", "collMod", "listIndexes"])
def test_setup_goes_on_through_an_election(cluster: Cluster, name: str, at: str) -> None:
    cluster.client[name].create_collection("products")
    listener = Before(at, cluster.step_down)
    with MongoClient[Any](cluster.uri, event_listeners=[listener]) as client:
        store = Store(client[name], MODELS)
        done = [str(each) for each in store.setup()]
        assert listener.act is None
        assert "create collection reviews" in done
        assert [] == store.setup()


def test_what_setup_did_is_on_a_majority_whatever_the_uri_says(cluster: Cluster, name: str) -> None:
    listener = Before()
    with MongoClient[Any](cluster.uri, w=1, event_listeners=[listener]) as client:
        Store(client[name], MODELS).setup()
    names = {"create", "collMod", "createIndexes"}
    # What is sent only to find out what the server can do changes nothing.
    schema = [each for each in listener.commands if names & {*each} and next(iter(each.values())) != NOWHERE]
    assert names == {next(iter(each)) for each in schema}
    assert [{"w": "majority"}] * len(schema) == [each["writeConcern"] for each in schema]


@contextlib.contextmanager
def without_majority(cluster: Cluster) -> Generator[None]:
    """One secondary alone: there is no primary, and none can be elected."""
    alone = cluster.secondaries[0]
    for member in cluster.members:
        if member is not alone:
            cluster.kill(member)
    yield
    cluster.heal()


def test_a_worker_that_begins_without_a_primary_waits_for_one(
    cluster: Cluster, name: str, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    Store(cluster.client[name], MODELS).setup()
    cluster.client[name]["products"].insert_one({"_id": 1})
    worker = open_store(MODELS).worker()
    with without_majority(cluster), caplog.at_level(logging.WARNING, "treadle"):
        thread = threading.Thread(target=worker.run)
        thread.start()
        until(lambda: "waits for a primary" in caplog.text)
    cluster.client[name]["reviews"].insert_one({"_id": 1, "product_id": 1})
    until(lambda: 1 == cluster.client[name]["products"].find_one().get("streamed"))
    worker.stop()
    thread.join(30)
    assert not thread.is_alive()


def until(condition: Any, seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


SCRIPT = f"""
import os, signal, sys
from pymongo import MongoClient
from {__name__} import MODELS, Product
from treadle import Store

store = Store(MongoClient(sys.argv[1])[sys.argv[2]], MODELS)
counter = store.counter(Product, "views")
counter.add(1, 3)
os.kill(int(sys.argv[3]), signal.SIGKILL)
"""


def test_the_flush_at_exit_outlasts_an_election(cluster: Cluster, name: str) -> None:
    store = Store(cluster.client[name], MODELS)
    store.setup()
    store.insert(Product(id=1))
    process = cluster.primary.process
    assert process is not None
    arguments = [cluster.uri, name, str(process.pid)]
    subprocess.run([sys.executable, "-c", SCRIPT, *arguments], check=True, timeout=60)
    process.wait()
    assert 3 == cluster.client[name]["products"].find_one()["views"]


@pytest.mark.parametrize("fault", ["hang", "kill all"])
def test_callers_in_a_hurry_hear_in_time(cluster: Cluster, name: str, open_store: Open, fault: str) -> None:
    store = open_store(MODELS)
    store.setup()
    store.insert(Product(id=1))
    for member in cluster.members:
        # The server itself ends no transaction that is given up in this time.
        with cluster.direct(member) as client:
            client.admin.command("setParameter", transactionLifetimeLimitSeconds=10 * int(SOON_SECONDS))
    if fault == "hang":
        cluster.hang(cluster.primary)
    else:
        for member in cluster.members:
            cluster.kill(member)
    started = time.monotonic()
    with pymongo.timeout(0.5), pytest.raises(PyMongoError) as caught:
        store.insert(Review(id=1, product_id=1))
    assert time.monotonic() - started < SOON_SECONDS
    assert caught.value.timeout or isinstance(caught.value, pymongo.errors.ConnectionFailure)
    cluster.heal()
    # What was given up holds no lock, and may have been written or not, but not by half.
    started = time.monotonic()
    store.insert(Review(id=2, product_id=1))
    assert time.monotonic() - started < SOON_SECONDS
    found = cluster.client[name]["reviews"].count_documents({})
    assert found == cluster.client[name]["products"].find_one()["review_count"]


def test_those_who_queue_in_an_outage_hear_like_the_first(cluster: Cluster, name: str) -> None:
    heard: list[float] = []
    with MongoClient[Any](cluster.uri, serverSelectionTimeoutMS=500) as client:
        store = Store(client[name], MODELS)
        store.setup()
        store.insert(Product(id=1))
        for member in cluster.members:
            cluster.kill(member)

        def insert(number: int) -> None:
            started = time.monotonic()
            with pytest.raises(PyMongoError):
                store.insert(Review(id=number, product_id=1))
            heard.append(time.monotonic() - started)

        threads = [threading.Thread(target=insert, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 6 == len(heard)
    assert max(heard) < SOON_SECONDS
