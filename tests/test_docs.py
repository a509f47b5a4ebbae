"""The documentation is true: its Python runs on a real server, and its links lead somewhere.

The `python` blocks of one page share a namespace, in their order. The README
is run as a reader would run it, with nothing prepared. The pages under `docs/`
find two names that stand for the reader's own: `database`, a PyMongo database,
and `uri`, the address of one. The blocks of `docs/testing.md` are files of a
test suite, and are run by pytest. The tutorial is typed as a reader would type
it: its Python blocks are files, and its commands must print what it says, where
`…` stands for anything. Only the installation is left out; the tests are run by
an environment that has it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
from tools.draw_terminal import PICTURE, Customer, Order, draw

from treadle import Store
from treadle.server.local import start

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TESTING = ROOT / "docs" / "testing.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, *(ROOT / path for path in ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"))]
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


@pytest.mark.server
def test_the_readme_runs_as_it_stands(module):
    assert python_blocks(README)
    perform(README, module)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in (README, TESTING, TUTORIAL) and python_blocks(page)],
    ids=name,
)
def test_the_page_runs(page, module, database, uri):
    module.database, module.uri = database, uri
    perform(page, module)


def test_ten_everyday_tasks_take_fewer_lines_than_with_beanie():
    """What is compared is run by the page itself, which asserts that both give the same."""
    text = (ROOT / "docs" / "coming-from" / "beanie.md").read_text()
    tasks = re.split(r"^### \d+\. ", text, flags=re.MULTILINE)[1:]
    tasks[-1] = tasks[-1].partition("### All of them")[0]
    assert 10 == len(tasks)
    lines = [
        [sum(bool(line.strip()) for line in found[2].splitlines()) for found in FENCE.finditer(task)]
        for task in tasks
    ]
    assert all(2 == len(pair) for pair in lines)
    assert sum(treadle for _, treadle in lines) < sum(beanie for beanie, _ in lines)


@pytest.mark.all
@pytest.mark.server
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


class Typist:
    """Types a tutorial into a folder: writes its files, and performs its commands."""

    INSTALLATION = ("python -m venv ", ". .venv/", "pip install ")
    SECONDS_MAX = 60

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "COLUMNS": "100"}
        self.typed: list[str] = []
        self.beside: subprocess.Popen[str] | None = None

    def write(self, block: Block) -> None:
        """A file; whatever runs beside is stopped first, as it has the old files."""
        self.stop()
        first = block.code.splitlines()[0]
        assert re.fullmatch(r"# \w+\.py", first), f"line {block.line} does not name its file"
        (self.folder / first.removeprefix("# ")).write_text(block.code)

    def type(self, block: Block) -> None:
        """Commands, each with what it prints."""
        for said in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
            command, _, expected = said.partition("\n")
            if not command.startswith(self.INSTALLATION):
                self.typed.append(command)
                self.perform(command, expected)

    def perform(self, command: str, expected: str) -> None:
        program, *arguments = shlex.split(command)
        start = {"python": [sys.executable], "treadle": [sys.executable, "-m", "treadle.cli"]}[program]
        options = {"cwd": self.folder, "env": self.environment, "text": True}
        if arguments[0] == "watch":
            self.beside = subprocess.Popen([*start, *arguments], stderr=subprocess.PIPE, **options)
            assert "Watching" in self.beside.stderr.readline()
            return
        done = subprocess.run(
            [*start, *arguments], capture_output=True, check=False, timeout=self.SECONDS_MAX, **options
        )
        assert done.returncode == int("finding." in expected), f"{command}: {done.stdout}{done.stderr}"
        pattern = ".*".join(re.escape(piece) for piece in re.split("… *", expected))
        assert re.fullmatch(pattern, done.stdout, re.DOTALL), f"{command} printed:\n{done.stdout}"

    def stop(self) -> None:
        if self.beside is not None:
            self.beside.send_signal(signal.SIGINT)
            self.beside.communicate(timeout=self.SECONDS_MAX)
            assert 0 == self.beside.returncode
            self.beside = None


@pytest.mark.all
@pytest.mark.heavy
@pytest.mark.server
def test_the_tutorial_works_as_it_is_typed(tmp_path):
    typist = Typist(tmp_path)
    # The commands share a server that is there already, so that it starts once.
    with start(path=tmp_path / "shop-data"):
        try:
            for block in blocks(TUTORIAL):
                if block.language == "python":
                    typist.write(block)
                elif block.language == "console":
                    typist.type(block)
        finally:
            typist.stop()
    typed = {command.split()[1] for command in typist.typed}
    assert {"setup", "verify", "repair", "watch", "migrate"} <= typed


@pytest.mark.server
def test_the_picture_of_the_terminal_shows_what_the_session_prints(database):
    with Store(database, models=[Customer, Order]) as store:
        store.setup()
        assert PICTURE.read_text() == draw(store)


@pytest.mark.all
@pytest.mark.heavy
def test_the_files_of_the_readme_and_the_tutorial_are_typed(tmp_path):
    """In mypy's and pyright's strict mode; what is written again later stands beside the first version."""
    (tmp_path / "readme.py").write_text(python_blocks(README)[0].code)
    for block in python_blocks(TUTORIAL):
        path = tmp_path / block.code.splitlines()[0].removeprefix("# ")
        if path.exists():
            path = path.with_stem(f"{path.stem}_later")
        path.write_text(block.code)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    mypy = ["mypy", "--strict", "--config-file=", "--cache-dir=cache", "."]
    pyright = ["pyright", "--project", str(tmp_path), "--pythonpath", sys.executable]
    for checker in (mypy, pyright):
        command = [sys.executable, "-m", *checker]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("page", LINKING, ids=name)
def test_every_block_has_a_known_language(page):
    unknown = {f"{name(page)}:{block.line}": block.language for block in blocks(page)}
    assert {} == {place: given for place, given in unknown.items() if given not in LANGUAGES}


@pytest.mark.parametrize("page", LINKING, ids=name)
def test_every_row_of_a_table_has_its_cells(page):
    """A bar inside of code ends the cell all the same, and what follows is not shown."""
    odd, cells = [], 0
    for line in FENCE.sub("", page.read_text()).splitlines():
        found = len(re.split(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if cells and found not in (0, cells):
            odd.append(line)
        # The first row of a table says how many there are.
        cells = (cells or found) if found else 0
    assert [] == odd


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


def test_the_page_of_the_architecture_names_files_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = [
        path.as_posix()
        for folder in ("src", "tests", "docs", "tools", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    names = set(re.findall(r"`([\w/]+\.py)`", text))
    assert [] == sorted(name for name in names if not any(file.endswith(f"/{name}") for file in files))
