"""The blocking shell is what tools/blocking.py makes of the asyncio shell."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tools import blocking

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("source", blocking.sources(), ids=lambda path: path.name)
def test_a_generated_file_is_what_the_tool_makes(source: Path) -> None:
    assert blocking.generate(source) == blocking.target(source).read_text(encoding="utf-8"), (
        "run `make shell`"
    )


def test_every_file_of_the_blocking_shell_is_generated() -> None:
    files = {path.name for path in (blocking.STORE / "blocking").glob("*.py")}
    assert {"__init__.py", *(blocking.target(source).name for source in blocking.sources())} == files


@pytest.mark.all
def test_the_check_of_the_command_names_a_file_that_was_edited_by_hand(tmp_path: Path) -> None:
    """A copy of the tool and of the store, one generated file of which was changed."""
    for name in ("tools", "src/treadle/store"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("pyproject.toml", "src/treadle/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    edited = tmp_path / "src/treadle/store/blocking/array.py"
    edited.write_text(edited.read_text(encoding="utf-8").replace("== 1", "== 2"))

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "tools/blocking.py", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    assert (1, "blocking/array.py\n") == run("--check")
    assert (0, "blocking/array.py\n") == run()
    assert (0, "") == run("--check")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("async def read(self) -> int: ...", "def read(self) -> int: ..."),
        ("return (await self.run(plan, session))[0]", "return self.run(plan, session)[0]"),
        ("return await (await self.open(read)).to_list()", "return self.open(read).to_list()"),
        ("call(await one(), await two())", "call(one(), two())"),
        ("work: Callable[[AsyncSession], Awaitable[R]]", "work: Callable[[Session], R]"),
        (
            "from treadle.store.async_array import AsyncArray",
            "from treadle.store.blocking.array import Array",
        ),
        ('text = "await this"  # an async def', 'text = "await this"  # an async def'),
        ("class A:\n    def __await__(self):\n        return 1\n    n = 2", "class A:\n    n = 2"),
        ("if True:  # ASYNC\n    a = 1\nelse:\n    # why\n    b = 2\nc = 3", "# why\nb = 2\nc = 3"),
        ("if False:  # BLOCKING\n    b = 2\nc = 3", "b = 2\nc = 3"),
        ("if True:  # ASYNC\n    if False:  # BLOCKING\n        a = 1\nc = 3", "c = 3"),
    ],
)
def test_what_becomes_of_asyncio(source: str, expected: str) -> None:
    assert expected == blocking.translate(textwrap.dedent(source))
