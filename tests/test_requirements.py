"""What `make` installs by hash is what is pinned, and all of it."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OUT_OF_DATE = "run `make hashes` after a change of constraints.txt or of the extras"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", (ROOT / file).read_text(), re.MULTILINE)
    return {normal(name): version for name, version in found}


# What each file lists: the packages of these extras.
FILES = [("requirements-dev.txt", {"dev"}), ("requirements-demo.txt", {"cli", "local"})]


@pytest.mark.parametrize(("file", "extras"), FILES)
def test_the_hashed_versions_are_the_pinned_ones(file, extras):
    constraints, hashed = pins("constraints.txt"), pins(file)
    different = {name: version for name, version in hashed.items() if constraints.get(name) != version}
    assert {} == different, OUT_OF_DATE


@pytest.mark.parametrize(("file", "extras"), FILES)
def test_all_that_is_needed_is_hashed(file, extras):
    needed = [
        each
        for each in requires("treadle") or []
        if "extra ==" not in each or extras & set(re.findall(r"extra == ['\"](\w+)", each))
    ]
    names = {normal(re.match(r"[A-Za-z0-9._-]+", each).group()) for each in needed} - {"treadle"}
    assert set() == names - set(pins(file)), OUT_OF_DATE


def test_the_demo_installs_no_development_tool():
    assert not {"pytest", "mypy", "ruff", "sphinx", "fastapi"} & set(pins("requirements-demo.txt"))


@pytest.mark.parametrize(("file", "extras"), FILES)
def test_every_requirement_has_hashes_and_names_no_registry(file, extras):
    text = (ROOT / file).read_text()
    entries = re.split(r"\n(?=\S)", text.strip())[1:]
    assert len(pins(file)) == len(entries)
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "//" not in text
