"""`--app`: the application's own Store, named on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.invoke import RUN_SECONDS_MAX, assert_one_sentence, invoke, start

APPLICATION = """
from pymongo import MongoClient
from treadle import Document, Store

class Product(Document, collection="products"):
    pass

store = Store(MongoClient({uri!r})[{name!r}], [Product])
number = 5
"""


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


@pytest.mark.parametrize(
    ("code", "app", "words"),
    [
        ("x = 1\nx = 1 / 0\n", "broken:store", "(broken.py, line 2): ZeroDivisionError: division by zero"),
        ("x = 1\nif x\n", "broken:store", "(broken.py, line 2): SyntaxError: expected ':'"),
        ("import no_such_module", "broken:store", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys\nsys.exit('not today')", "broken:store", "SystemExit: not today"),
        ("def make():\n    raise ValueError('a\\nb')", "broken:make", "(broken.py, line 2): ValueError: a;"),
        (
            "from treadle import Document, Count\nfrom typing import Annotated\n\n\n"
            "class A(Document, collection='a', version='x'):\n    pass\n",
            "broken:store",
            "(broken.py, line 5)",
        ),
    ],
)
def test_a_broken_application_is_told_in_a_sentence_and_the_rest_on_demand(tmp_path: Path, code, app, words):
    (tmp_path / "broken.py").write_text(code)
    done = invoke(tmp_path, "verify", "--app", app)
    assert (2, "") == (done.returncode, done.stdout)
    assert words in done.stderr
    assert_one_sentence(done.stderr)
    for arguments in (("--traceback", "verify", "--app", app), ("verify", "--app", app, "--traceback")):
        traced = invoke(tmp_path, *arguments)
        assert 2 == traced.returncode
        assert "Traceback" in traced.stderr
        assert traced.stderr.endswith(done.stderr)


def test_the_environment_may_name_the_application(application):
    assert 0 == application("verify", TREADLE_APP="shop:store").returncode
    assert 2 == application("verify", "--app", "nowhere:store", TREADLE_APP="shop:store").returncode


def test_an_application_that_reaches_no_server_is_told_in_a_sentence(application, tmp_path: Path):
    (tmp_path / "dead.py").write_text(
        APPLICATION.format(uri="mongodb://u:secretpw@127.0.0.1:1/?serverSelectionTimeoutMS=200", name="x")
    )
    done = application("verify", "--app", "dead:store")
    assert (3, "") == (done.returncode, done.stdout)
    assert "No connection: 127.0.0.1:1" in done.stderr
    assert "secretpw" not in done.stderr
    assert 1 == len(done.stderr.strip().splitlines())


def test_told_to_keep_the_working_directory_out_python_prefers_what_is_installed(application, tmp_path: Path):
    """`rich` is imported only once the application has been loaded; a file of that name must not stand in."""
    (tmp_path / "rich.py").write_text("raise SystemExit('the wrong rich')")
    arguments = ("verify", "--app", "shop:store")
    kept_out = start(*arguments, folder=tmp_path, PYTHONSAFEPATH="1")
    output, errors = kept_out.communicate(timeout=RUN_SECONDS_MAX)
    assert (0, "") == (kept_out.returncode, errors)
    assert "Every maintained value is right" in output
    assert "the wrong rich" in start(*arguments, folder=tmp_path).communicate(timeout=RUN_SECONDS_MAX)[1]
