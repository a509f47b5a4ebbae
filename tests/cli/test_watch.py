"""`treadle watch` and `treadle status` on an application's own Store."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tests.cli.invoke import invoke, start

APPLICATION = """
from datetime import timedelta
from typing import Annotated
from pymongo import AsyncMongoClient, MongoClient
from treadle import AsyncStore, Count, Document, Id, Store

class Review(Document, collection="reviews"):
    product_id: Id

class Product(Document, collection="products"):
    count: Annotated[int, Count(Review, by="product_id", maintain="stream")] = 0
    again: Annotated[int, Count(Review, by="product_id")] = 0
    hourly: Annotated[
        int, Count(Review, by="product_id", maintain="schedule", every=timedelta(hours=1))
    ] = 0

models = [Review, Product]
store = Store(MongoClient({uri!r})[{name!r}], models)

def asynchronous():
    return AsyncStore(AsyncMongoClient({uri!r})[{name!r}], models)
"""


@pytest.fixture
def watch(folder: Path):
    """A function that starts `treadle watch` beside the test."""
    with contextlib.ExitStack() as stack:

        def started(*arguments: str) -> subprocess.Popen[str]:
            child = stack.enter_context(start("watch", *arguments, folder=folder))
            stack.callback(child.kill)
            return child

        yield started


def output(folder: Path, *arguments: str) -> str:
    done = invoke(folder, *arguments)
    assert 0 == done.returncode, done.stderr
    return done.stdout


def _wait_for(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize("app", ["shop:store", pytest.param("shop:asynchronous", marks=pytest.mark.all)])
def test_watch_follows_raw_writers_shows_metrics_and_stops_on_sigterm(folder, watch, database, app):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "keep former states of reviews" in output(folder, "setup", "--app", app)
    product = database["products"].insert_one({"count": 0, "again": 0}).inserted_id
    watching = watch("--app", app, "--metrics-port", str(port))
    _wait_for(lambda: database["treadle.streams"].find_one({"rules.0": {"$exists": True}}) is not None)
    database["reviews"].insert_many([{"product_id": product} for _ in range(3)])
    _wait_for(lambda: database["products"].find_one()["count"] == 3)

    def metrics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            return str(answer.read(), "utf-8")

    # What is scheduled is due at once, as it has never run.
    _wait_for(lambda: database["treadle.schedules"].find_one() is not None)
    told = metrics()
    assert "treadle_worker_leading 1.0" in told
    assert 'treadle_worker_total{what="events"}' in told
    assert 'treadle_rule_dirty{maintain="stream",pattern="computed",rule="Product.count"}' in told
    watching.send_signal(signal.SIGTERM)
    _, error = watching.communicate(timeout=30)
    assert 0 == watching.returncode
    assert "leads" in error
    assert "Stopped." in error
    assert "Task was destroyed" not in error
    assert "" == database["treadle.leases"].find_one({"_id": "worker"})["owner"]


def test_status_shows_modes_lag_and_findings(folder, database):
    output(folder, "setup", "--app", "shop:store")
    product = database["products"].insert_one({"count": 0, "again": 0}).inserted_id
    assert "NOT RUNNING" in output(folder, "status", "--app", "shop:store")
    output(folder, "rebuild", "--app", "shop:store")
    database["reviews"].insert_many([{"product_id": product} for _ in range(3)])
    assert 1 == invoke(folder, "verify", "--app", "shop:store").returncode
    told = json.loads(output(folder, "status", "--app", "shop:store", "--json"))
    rules = {rule["rule"]: rule for rule in told["rules"]}
    assert "stream" == rules["Product.count"]["maintain"]
    assert 3 <= rules["Product.count"]["dirty"]
    assert rules["Product.count"]["lag_seconds"] >= 0
    assert rules["Product.again"]["dirty"] is None
    assert 1 == rules["Product.count"]["findings"] == rules["Product.again"]["findings"]
    assert rules["Product.count"]["verified_at"]
    assert told["worker"]["active"] is False
    assert 3 <= told["worker"]["events"]
    shown = output(folder, "status", "--app", "shop:store")
    assert "Product.count" in shown
    assert "1 finding, " in shown


def test_a_metrics_port_that_is_taken_is_told(watch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        child = watch("--app", "shop:store", "--metrics-port", str(taken.getsockname()[1]))
        _, error = child.communicate(timeout=60)
    assert 2 == child.returncode
    assert "choose another --metrics-port" in error


@pytest.mark.parametrize("app", ["shop:store", "shop:asynchronous"])
def test_run_due_computes_once_and_is_shown(folder, database, app):
    output(folder, "setup", "--app", app)
    product = database["products"].insert_one({"count": 0, "again": 0, "hourly": 0}).inserted_id
    database["reviews"].insert_many([{"product_id": product} for _ in range(3)])
    assert "Product every 1:00:00 is due." in output(folder, "run-due", "--app", app, "--dry-run")
    assert 0 == database["products"].find_one()["hourly"]
    (ran,) = json.loads(output(folder, "run-due", "--app", app, "--json"))
    assert ("Product", ["Product.hourly"], None) == (ran["model"], ran["rules"], ran["error"])
    assert 3 == database["products"].find_one()["hourly"]
    assert "Nothing is due." in output(folder, "run-due", "--app", app)
    told = json.loads(output(folder, "status", "--app", app, "--json"))
    (rule,) = [each for each in told["rules"] if each["rule"] == "Product.hourly"]
    assert ("schedule", 3600.0) == (rule["maintain"], rule["every_seconds"])
    assert rule["last_run"]
    assert rule["last_seconds"] >= 0
