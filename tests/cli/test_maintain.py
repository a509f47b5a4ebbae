"""`treadle setup|verify|repair|rebuild --app …` on an application's own Store."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.typed import typed
from treadle import Finding
from treadle.commands import maintain

APPLICATION = """
from typing import Annotated
from pymongo import AsyncMongoClient, MongoClient
from treadle import AsyncStore, Count, Document, Id, Store

class Review(Document, collection="reviews"):
    product_id: Id

class Product(Document, collection="products"):
    count: Annotated[int, Count(Review, by="product_id")] = 0

models = [Review, Product]
store = Store(MongoClient({uri!r})[{name!r}], models)
number = 5

def asynchronous():
    return AsyncStore(AsyncMongoClient({uri!r})[{name!r}], models)
"""


@pytest.fixture
def application(server, database, tmp_path: Path):
    """A folder with an application, and a function that runs the command in it."""
    (tmp_path / "shop.py").write_text(APPLICATION.format(uri=server.uri, name=database.name))

    return partial(typed, tmp_path)


@pytest.mark.parametrize("app", ["shop:store", "shop:asynchronous"])
def test_what_a_raw_write_broke_is_found_and_mended(application, database, app):
    done = application("setup", "--app", app, "--dry-run")
    assert "would create collection products" in done.stdout
    assert [] == database.list_collection_names()
    assert 0 == application("setup", "--app", app).returncode
    assert "Everything is as declared." in application("setup", "--app", app).stdout
    product = database["products"].insert_one({"count": 0}).inserted_id
    database["reviews"].insert_many([{"product_id": product}] * 1 + [{"product_id": product}])
    found = application("verify", "--app", app)
    assert 1 == found.returncode
    assert "1 finding." in found.stdout
    listed = json.loads(application("verify", "--app", app, "--json").stdout)
    assert [("computed", "Product", {"$oid": str(product)}, "count", 0, 2)] == [
        tuple(each.values()) for each in listed
    ]
    assert 1 == application("repair", "--app", app, "--dry-run").returncode
    assert "Mended 1 document." in application("repair", "--app", app, "Product").stdout
    clean = application("verify", "--app", app)
    assert (0, "Every maintained value is right.\n") == (clean.returncode, clean.stdout)
    assert {"rebuilt": 1} == json.loads(application("rebuild", "--app", app, "--json").stdout)


def test_what_looks_like_markup_is_shown_as_it_is():
    """The console would swallow "[red]", and fail at "[/x]"."""
    written = io.StringIO()
    findings = [Finding("subset", "Product", "[/x]", "newest", "[red]", ["[/bold]"])]
    maintain.show_findings(findings, Console(file=written, width=200))
    assert all(text in written.getvalue() for text in ("[/x]", "[red]", "['[/bold]']"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--app", "shop"], "package.module:store"),
        (["--app", "nowhere:store"], "cannot be found"),
        (["--app", "shop:nothing"], "nothing called 'nothing'"),
        (["--app", "shop:number"], "not a Store"),
        (["--app", "shop:store", "Nope"], "no model 'Nope'"),
        ([], "--app"),
    ],
)
def test_bad_arguments_are_usage_errors_of_one_line(application, arguments, words):
    done = application("verify", *arguments)
    assert 2 == done.returncode
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_application_that_reaches_no_server_is_told_in_a_sentence(application, tmp_path: Path):
    (tmp_path / "dead.py").write_text(
        APPLICATION.format(uri="mongodb://u:secretpw@127.0.0.1:1/?serverSelectionTimeoutMS=200", name="x")
    )
    done = application("verify", "--app", "dead:store")
    assert (3, "") == (done.returncode, done.stdout)
    assert "No connection: 127.0.0.1:1" in done.stderr
    assert "secretpw" not in done.stderr
    assert 1 == len(done.stderr.strip().splitlines())
