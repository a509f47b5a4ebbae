"""`treadle run-due` on an application's own Store, and schedules beside `treadle watch`."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.cli.invoke import invoke, start

APPLICATION = """
from datetime import datetime, timedelta
from typing import Annotated
from pymongo import AsyncMongoClient, MongoClient
from treadle import AsyncStore, Count, Document, Rollup, Store

class Sale(Document, collection="sales"):
    product: str

class PerProduct(Document, collection="per_product",
                 rollup=Rollup(Sale, keys={{"id": "product"}}, maintain="schedule", every=timedelta(seconds=1))):
    id: str
    count: Annotated[int, Count()] = 0

models = [Sale, PerProduct]
store = Store(MongoClient({uri!r})[{name!r}], models)

def asynchronous():
    return AsyncStore(AsyncMongoClient({uri!r})[{name!r}], models)
"""
APPS = ["shop:store", "shop:asynchronous"]
SECONDS_MAX = 60


@pytest.fixture
def folder(server, database, tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APPLICATION.format(uri=server.uri, name=database.name))
    database.sales.insert_many([{"product": name} for name in ("loom", "loom", "reed")])
    return tmp_path


def treadle(folder: Path, *arguments: str) -> tuple[int, str]:
    done = invoke(folder, *arguments)
    return done.returncode, done.stdout


@pytest.mark.parametrize("app", APPS)
def test_run_due_does_what_is_due(folder, database, app):
    assert 0 == treadle(folder, "setup", "--app", app)[0]
    code, output = treadle(folder, "run-due", "--app", app, "--dry-run")
    assert (0, "PerProduct is due.") == (code, output.strip())
    assert 0 == database.per_product.count_documents({})
    code, output = treadle(folder, "run-due", "--app", app, "--json")
    (ran,) = json.loads(output)
    assert (0, "PerProduct", 2, None) == (code, ran["name"], ran["written"], ran["error"])
    assert {"loom": 2, "reed": 1} == {each["_id"]: each["count"] for each in database.per_product.find()}
    database["treadle.schedules"].update_one({}, {"$inc": {"n": 0}})
    code, output = treadle(folder, "run-due", "--app", app)
    assert 0 == code
    assert "PerProduct" in output or "Nothing is due." in output


def test_a_failed_run_exits_with_1(folder, database):
    treadle(folder, "setup", "--app", "shop:store")
    database.sales.insert_one({"product": "odd"})
    database.command({"collMod": "per_product", "validator": {"$expr": {"$eq": [1, 2]}}})
    database.create_collection("treadle.set_aside", validator={"$expr": {"$eq": [1, 2]}})
    code, output = treadle(folder, "run-due", "--app", "shop:store", "--json")
    assert 1 == code
    assert json.loads(output)[0]["error"]


@pytest.mark.parametrize("app", [pytest.param(APPS[0], marks=pytest.mark.all), APPS[1]])
def test_watch_runs_due_schedules(folder, database, app):
    treadle(folder, "setup", "--app", app)
    with start("watch", "--app", app, folder=folder) as child:
        try:
            until = time.monotonic() + SECONDS_MAX
            while not database.per_product.count_documents({"_id": "loom"}):
                assert time.monotonic() < until
                time.sleep(0.1)
            database.sales.insert_one({"product": "late"})
            while not database.per_product.count_documents({"_id": "late"}):
                assert time.monotonic() < until
                time.sleep(0.1)
            child.send_signal(signal.SIGTERM)
            assert 0 == child.wait(SECONDS_MAX)
        finally:
            child.kill()
