"""`treadle watch` and `treadle status` on an application's own Store."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tests.cli import invoke

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
def start(server, database, tmp_path: Path):
    """A function that starts the command in a folder with an application."""
    (tmp_path / "shop.py").write_text(APPLICATION.format(uri=server.uri, name=database.name))
    running = []

    def treadle(*arguments: str) -> subprocess.Popen[str]:
        running.append(invoke.start(*arguments, folder=tmp_path, COLUMNS="200"))
        return running[-1]

    yield treadle
    for child in running:
        child.kill()
        child.communicate()


def _output(child: subprocess.Popen[str]) -> str:
    out, error = child.communicate(timeout=60)
    assert 0 == child.returncode, error
    return out


def _wait_for(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize("app", ["shop:store", "shop:asynchronous"])
def test_watch_follows_raw_writers_shows_metrics_and_stops_on_sigterm(start, database, app):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "keep former states of reviews" in _output(start("setup", "--app", app))
    product = database["products"].insert_one({"count": 0, "again": 0}).inserted_id
    watching = start("watch", "--app", app, "--metrics-port", str(port))
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
    assert "" == database["treadle.leases"].find_one({"_id": "worker"})["owner"]


def test_status_shows_modes_lag_and_findings(start, database):
    _output(start("setup", "--app", "shop:store"))
    product = database["products"].insert_one({"count": 0, "again": 0}).inserted_id
    assert "NOT RUNNING" in _output(start("status", "--app", "shop:store"))
    _output(start("rebuild", "--app", "shop:store"))
    database["reviews"].insert_many([{"product_id": product} for _ in range(3)])
    found = start("verify", "--app", "shop:store")
    found.communicate(timeout=60)
    assert 1 == found.returncode
    told = json.loads(_output(start("status", "--app", "shop:store", "--json")))
    rules = {rule["rule"]: rule for rule in told["rules"]}
    assert "stream" == rules["Product.count"]["maintain"]
    assert 3 <= rules["Product.count"]["dirty"]
    assert rules["Product.count"]["lag_seconds"] >= 0
    assert rules["Product.again"]["dirty"] is None
    assert 1 == rules["Product.count"]["findings"] == rules["Product.again"]["findings"]
    assert rules["Product.count"]["verified_at"]
    assert told["worker"]["active"] is False
    assert 3 <= told["worker"]["events"]
    shown = _output(start("status", "--app", "shop:store"))
    assert "Product.count" in shown
    assert "1 findings" in shown


def test_a_metrics_port_that_is_taken_is_told(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        child = start("watch", "--app", "shop:store", "--metrics-port", str(taken.getsockname()[1]))
        _, error = child.communicate(timeout=60)
    assert 2 == child.returncode
    assert "choose another --metrics-port" in error


@pytest.mark.parametrize("app", ["shop:store", "shop:asynchronous"])
def test_run_due_computes_once_and_is_shown(start, database, app):
    _output(start("setup", "--app", app))
    product = database["products"].insert_one({"count": 0, "again": 0, "hourly": 0}).inserted_id
    database["reviews"].insert_many([{"product_id": product} for _ in range(3)])
    assert "Product every 1:00:00 is due." in _output(start("run-due", "--app", app, "--dry-run"))
    assert 0 == database["products"].find_one()["hourly"]
    (ran,) = json.loads(_output(start("run-due", "--app", app, "--json")))
    assert ("Product", ["Product.hourly"], None) == (ran["model"], ran["rules"], ran["error"])
    assert 3 == database["products"].find_one()["hourly"]
    assert "Nothing is due." in _output(start("run-due", "--app", app))
    told = json.loads(_output(start("status", "--app", app, "--json")))
    (rule,) = [each for each in told["rules"] if each["rule"] == "Product.hourly"]
    assert ("schedule", 3600.0) == (rule["maintain"], rule["every_seconds"])
    assert rule["last_run"]
    assert rule["last_seconds"] >= 0
