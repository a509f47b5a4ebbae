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


@pytest.fixture(autouse=True)
def sales(database) -> None:
    database.sales.insert_many([{"product": name} for name in ("loom", "loom", "reed")])


def treadle(folder: Path, *arguments: str) -> tuple[int, str]:
    done = invoke(folder, *arguments)
    return done.returncode, done.stdout


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
