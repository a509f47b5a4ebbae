"""`treadle migrate status|run|rollback --app …`: as an application's operator uses it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.invoke import invoke, start

APPLICATION = """
import os, time
from pymongo import AsyncMongoClient, MongoClient
from treadle import AsyncStore, Document, Store, migration

class Note(Document, collection="notes"):
    pass

class User(Document, collection="users", version=2):
    name: str
    phones: list[str] = []

@migration(User, from_version=1)
def split_phone(document):
    time.sleep(float(os.environ.get("SLOW", 0)))
    document["phones"] = document.pop("phone").split(",")
    return document

@split_phone.down
def join_phone(document):
    document["phone"] = ",".join(document.pop("phones"))
    return document

store = Store(MongoClient({uri!r})[{name!r}], [User, Note])
none = Store(MongoClient({uri!r})[{name!r}], [Note])

def asynchronous():
    return AsyncStore(AsyncMongoClient({uri!r})[{name!r}], [User, Note])
"""


@pytest.fixture
def application(folder: Path):
    def treadle(*arguments: str, wait: bool = True, **more: str) -> Any:
        if wait:
            return invoke(folder, "migrate", *arguments, columns=80, **more)
        return start("migrate", *arguments, folder=folder, **more)

    return treadle


@pytest.mark.parametrize("app", ["shop:store", "shop:asynchronous"])
def test_an_operator_looks_rehearses_runs_and_rolls_back(application, database, app):
    database["users"].insert_many([{"name": f"u{number}", "phone": "1,2"} for number in range(30)])
    database["users"].insert_one({"_id": 5, "name": "bad"})
    shown = application("status", "--app", app)
    assert (0, "User (version 2): version 1: 31\n") == (shown.returncode, shown.stdout)
    rehearsed = application("run", "--app", app, "--dry-run")
    assert "User: 31 documents would be brought to version 2." in rehearsed.stdout
    assert "    - phone: '1,2'\n    + phones: ['1', '2']\n" in rehearsed.stdout
    assert 31 == database["users"].count_documents({"schema_version": {"$exists": False}})
    done = application("run", "--app", app, "--batch", "10", "--json")
    assert 1 == done.returncode
    (result,) = json.loads(done.stdout)
    assert (30, 1, True, 2) == tuple(result[key] for key in ("migrated", "remaining", "finished", "to"))
    assert [5] == [each["document_id"] for each in result["set_aside"]]
    assert "of 31" in done.stderr
    (listed,) = json.loads(application("status", "--app", app, "User", "--json").stdout)
    assert {"1": 1, "2": 30} == listed["versions"]
    assert "KeyError" in listed["set_aside"][0]["reason"]
    assert "1 set aside" in application("status", "--app", app).stdout
    database["users"].update_one({"_id": 5}, {"$set": {"phone": "9"}})
    assert (
        "1 document was brought to version 2, 0 remain." in application("run", "--app", app, "--retry").stdout
    )
    back = application("rollback", "--app", app, "--to", "1", "User")
    assert (0, "User: 31 documents were brought to version 1, 0 remain.\n") == (back.returncode, back.stdout)
    assert 31 == database["users"].count_documents({"phone": {"$exists": True}, "phones": {"$exists": False}})


def test_wrong_usage_is_told(application):
    for arguments in (
        ("run", "--app", "shop:store", "--to", "9"),
        ("run", "--app", "shop:store", "Nobody"),
        ("run", "--app", "shop:store", "Note"),
        ("run", "--app", "shop:none"),
        ("rollback", "--app", "shop:store"),
        ("run", "--app", "shop:store", "--throttle", "0"),
    ):
        done = application(*arguments)
        assert 2 == done.returncode, done.stderr
        assert done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("app", ["shop:store", pytest.param("shop:asynchronous", marks=pytest.mark.all)])
def test_an_interrupted_run_stops_after_its_batch_and_goes_on_later(application, database, app):
    database["users"].insert_many([{"name": f"u{number}", "phone": "1"} for number in range(300)])
    run = application("run", "--app", app, "--batch", "10", wait=False, SLOW="0.01")
    for _ in range(400):
        if database["users"].count_documents({"schema_version": 2}):
            break
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=60)
    assert 130 == run.returncode
    assert "continues from here" in out
    migrated = database["users"].count_documents({"schema_version": 2})
    assert 0 < migrated < 300
    assert 0 == migrated % 10
    assert 0 == application("run", "--app", app).returncode
    assert 300 == database["users"].count_documents({"schema_version": 2})
