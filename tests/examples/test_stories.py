"""Each story under `examples/` runs, holds what it claims, and is in the index."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

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


def test_a_story_runs_on_a_server_of_its_own():
    done = run("examples.computed")
    assert 0 == done.returncode, done.stderr
    assert "Everything held." in done.stdout


def test_a_story_runs_on_a_named_database_that_is_empty(server, database):
    base, _, options = server.uri.partition("?")
    uri = f"{base}{database.name}?{options}"
    done = run("examples.subset", uri)
    assert 0 == done.returncode, done.stderr
    assert 1 == database["products"].count_documents({}), "its documents stay"
    again = run("examples.subset", uri)
    assert (2, "") == (again.returncode, again.stdout)
    assert f"{database.name} is not empty; name a new database" in again.stderr
    assert 1 == database["products"].count_documents({})
