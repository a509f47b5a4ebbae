"""Which test files cover a module of the package.

`src/treadle/a/b.py` is covered by `tests/a/test_b.py`, or by each test file whose docstring has
a line "Covers: a/b, a/c". `python -m tests.kit.covers src/treadle/a/b.py` prints them, or the
folder of the package's tests where no file covers it yet. `tests/test_layout.py` lists those.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
PACKAGE = TESTS.parent / "src" / "treadle"


@functools.cache
def named_modules() -> dict[str, list[Path]]:
    """The test files that name each module in a line "Covers:"."""
    named: dict[str, list[Path]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        for line in re.findall(r"^Covers: (.+?)\.?$", docstring, re.MULTILINE):
            for module in line.split(","):
                named.setdefault(module.strip(), []).append(path)
    return named


@functools.cache
def files_covering(module: str) -> list[Path]:
    """The test files of a module such as "engine/lease"."""
    folder, _, name = module.rpartition("/")
    namesake = TESTS / folder / f"test_{name}.py"
    return [*([namesake] if namesake.exists() else []), *named_modules().get(module, [])]


@functools.cache
def modules() -> list[str]:
    """Every module of the package that is written by hand, as "engine/lease"."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(
        path.as_posix() for path in paths if not path.name.startswith("__") and "blocking" not in path.parts
    )


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: make test-of F=src/treadle/engine/lease.py\n")
        return 2
    path = Path(arguments[0]).resolve()
    if not (path.is_file() and path.is_relative_to(PACKAGE)):
        sys.stderr.write(f"{arguments[0]} is not a module below src/treadle\n")
        return 2
    module = path.relative_to(PACKAGE).with_suffix("").as_posix()
    found = files_covering(module)
    if not found:
        folder = TESTS / module
        while not folder.is_dir():
            folder = folder.parent
        sys.stderr.write(f"no test file is named after {module}; these are the tests of its package\n")
        found = [folder]
    sys.stdout.write("\n".join(str(each.relative_to(Path.cwd())) for each in found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
