"""`--app`: the application's own Store, named on the command line."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.cli.invoke import invoke

APPLICATION = """
from pymongo import MongoClient
from treadle import Document, Store

class Product(Document, collection="products"):
    pass

store = Store(MongoClient({uri!r})[{name!r}], [Product])
number = 5
"""


@pytest.fixture
def application(server, database, tmp_path: Path):
    """A folder with an application, and a function that runs the command in it."""
    (tmp_path / "shop.py").write_text(APPLICATION.format(uri=server.uri, name=database.name))
    return partial(invoke, tmp_path)


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
