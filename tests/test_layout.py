"""Every module has a test file that covers it, and tests import public names.

The exceptions stand in tests/layout_exceptions.txt. The list only shrinks: a line that is no longer
needed fails the test, and no line is added.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

from tests.kit.covers import TESTS, files_covering, modules, named_modules

# What users import. Everything else of the package is internal.
PUBLIC = {
    "treadle",
    "treadle.testing",
    "treadle.server",
    "treadle.fastapi",
    "treadle.metrics",
    "treadle.errors",
}
# How many lines the list had when it was last shortened.
EXCEPTIONS_MAX = 171


def exceptions(kind: str) -> set[str]:
    """The lines of the list of one kind: "uncovered" modules, or test files with "internal" imports."""
    lines = (TESTS / "layout_exceptions.txt").read_text().splitlines()
    return {line.partition(" ")[2] for line in lines if line.partition(" ")[0] == kind}


def internal_imports(path: Path) -> set[str]:
    """The internal modules that a test file imports, as "engine/lease"."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        else:
            continue
        imported |= {name for name in names if name.startswith("treadle.") and name not in PUBLIC}
    known = set(modules())
    return {name for each in imported if (name := each.removeprefix("treadle.").replace(".", "/")) in known}


def test_every_module_is_covered_by_a_test_file_or_listed() -> None:
    uncovered = {module for module in modules() if not files_covering(module)}
    assert sorted(exceptions("uncovered")) == sorted(uncovered)


def test_every_covers_line_names_a_module() -> None:
    assert [] == sorted(set(named_modules()) - set(modules()))


def test_tests_import_public_names_unless_they_cover_the_module() -> None:
    internal = set()
    for path in TESTS.rglob("test_*.py"):
        own = {module for module in modules() if path in files_covering(module)}
        if internal_imports(path) - own:
            internal.add(path.relative_to(TESTS).as_posix())
    assert sorted(exceptions("internal")) == sorted(internal)


def test_the_list_only_shrinks() -> None:
    assert len(exceptions("uncovered")) + len(exceptions("internal")) <= EXCEPTIONS_MAX


def test_the_smoke_set_for_other_servers_exists() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "test-servers"]
    printed = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True).stdout
    named = {
        word for word in re.split(r"[\s;]+", printed) if word.startswith("tests/") and word.endswith(".py")
    }
    assert len(named) > 10
    assert [] == sorted(name for name in named if not (TESTS.parent / name).exists())
