"""The documentation is true: its Python runs on a real server, and its links lead somewhere.

The `python` blocks of one page share a namespace, in their order. The README
is run as a reader would run it, with nothing prepared. The pages under `docs/`
find two names that stand for the reader's own: `database`, a PyMongo database,
and `uri`, the address of one. The blocks of `docs/testing.md` are files of a
test suite, and are run by pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TESTING = ROOT / "docs" / "testing.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
# What is not Python has another language; a Python block is never left out.
LANGUAGES = {"python", "console", "text", "json"}

FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


class Block(NamedTuple):
    language: str
    line: int
    code: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found[1], text.count("\n", 0, found.start()) + 2, found[2]) for found in FENCE.finditer(text)
    ]


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def perform(page: Path, module: types.ModuleType) -> None:
    """Run the blocks one after another; a traceback shows the page's own lines."""
    for block in python_blocks(page):
        # Without dont_inherit this file's __future__ import would be the page's too.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, str(page), "exec", dont_inherit=True), vars(module))


@pytest.fixture
def module(request, monkeypatch):
    """A module to run a page in: Pydantic looks up forward references in sys.modules."""
    made = types.ModuleType("treadle_page")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_the_readme_runs_as_it_stands(module):
    assert python_blocks(README)
    perform(README, module)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in (README, TESTING) and python_blocks(page)], ids=name
)
def test_the_page_runs(page, module, server, database):
    module.database = database
    base, _, options = server.uri.partition("?")
    module.uri = f"{base}{database.name}?{options}"
    perform(page, module)


def test_the_testing_page_is_a_test_suite_that_passes(tmp_path):
    files = []
    for block in python_blocks(TESTING):
        first = block.code.splitlines()[0]
        assert re.fullmatch(r"# \w+\.py", first), f"docs/testing.md:{block.line} does not name its file"
        files.append(first.removeprefix("# "))
        (tmp_path / files[-1]).write_text(block.code)
    assert "conftest.py" in files
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "."]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.parametrize("page", LINKING, ids=name)
def test_every_block_has_a_known_language(page):
    unknown = {f"{name(page)}:{block.line}": block.language for block in blocks(page)}
    assert {} == {place: given for place, given in unknown.items() if given not in LANGUAGES}


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = FENCE.sub("", page.read_text())
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in HEADING.findall(text)
    }


@pytest.mark.parametrize("page", LINKING, ids=name)
def test_every_link_leads_somewhere(page):
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert [] == broken


def test_every_page_is_reached_from_the_readme():
    """A page that nothing links to is never read."""
    seen, pending = set(), [README]
    while pending:
        page = pending.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for target in LINK.findall(FENCE.sub("", page.read_text())):
            if "://" not in target and target.partition("#")[0]:
                pending.append((page.parent / target.partition("#")[0]).resolve())
    assert set() == {name(page) for page in PAGES} - {name(page) for page in seen if page.is_file()}
