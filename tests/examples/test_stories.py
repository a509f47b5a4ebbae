"""Each story under `examples/` runs, holds what it claims, and is in the index."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from examples.story import tell

from tests.examples.stories import FOLDER, NAMES, module, told

ROOT = FOLDER.parent
INDEX = (FOLDER / "README.md").read_text()
# The server does not let a single reading be changed, so there is nothing to break.
UNBROKEN = {"time_series", "polymorphic"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_story_holds(name, database, capsys):
    store = told(name, database)
    printed = capsys.readouterr().out
    assert printed.count("\n# ") >= 4, "a story is told in steps"
    assert "    {" in printed, "it shows a stored document"
    assert [] == store.verify()
    assert (name in UNBROKEN) == ("verify: all is as it should be" not in printed)


@pytest.mark.parametrize("name", NAMES)
def test_the_story_is_in_the_index(name):
    assert f"| [{name}]({name}.py) |" in INDEX
    assert module(name).__doc__.count("\n") >= 4, "it says what it is about"


def test_every_pattern_has_a_story():
    pages = {path.name for path in (ROOT / "docs" / "patterns").glob("*.md")}
    assert pages == set(re.findall(r"docs/patterns/([\w-]+\.md)", INDEX))


@pytest.mark.server
def test_a_story_runs_on_a_server_of_its_own():
    done = run("examples.computed")
    assert 0 == done.returncode, done.stderr
    assert "Everything held." in done.stdout


def test_a_story_runs_on_a_named_database_that_is_empty(server, database, capsys, monkeypatch):
    base, _, options = server.uri.partition("?")
    monkeypatch.setattr(sys, "argv", ["subset", f"{base}{database.name}?{options}"])
    subset = module("subset")
    assert 0 == tell(subset.story, subset.MODELS)
    assert "Everything held." in capsys.readouterr().out
    assert 1 == database["products"].count_documents({}), "its documents stay"
    assert 2 == tell(subset.story, subset.MODELS)
    printed = capsys.readouterr()
    assert ("", f"{database.name} is not empty; name a new database\n") == (printed.out, printed.err)


def test_a_story_that_cannot_connect_says_so_in_a_line(capsys, monkeypatch):
    subset = module("subset")
    for uri, status, words in (
        ("mongodb://127.0.0.1:9/story?serverSelectionTimeoutMS=100", 3, "127.0.0.1:9"),
        ("mongodb://127.0.0.1:9", 2, "database"),
    ):
        monkeypatch.setattr(sys, "argv", ["subset", uri])
        assert status == tell(subset.story, subset.MODELS)
        printed = capsys.readouterr()
        assert "" == printed.out
        assert words in printed.err
