"""Who may import what: the plans know no client, no clock and no chance."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "treadle"
PURE = sorted(
    [
        *(SOURCE / "patterns").rglob("*.py"),
        *(SOURCE / "advisor" / "rules").rglob("*.py"),
        *(
            SOURCE / name
            for name in ("plan.py", "graph.py", "crud.py", "pattern.py", "change.py", "dry_run.py")
        ),
    ]
)
FORBIDDEN = {"asyncio", "time", "random", "threading", "socket", "secrets"}
PYMONGO_ALLOWED = {"errors", "results", "operations"}
PYMONGO_NAMES_ALLOWED = {
    "ReturnDocument", "IndexModel", "InsertOne", "UpdateOne", "UpdateMany", "ReplaceOne", "DeleteOne", "DeleteMany",
    "ASCENDING", "DESCENDING",
}  # fmt: skip
CORE_DEPENDENCIES = {
    "pymongo",
    "bson",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "treadle",
}


def imports(path: Path) -> set[tuple[str, str]]:
    """(module, name) pairs that a file imports, TYPE_CHECKING blocks included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update((node.module or "", alias.name) for alias in node.names)
    return found


@pytest.mark.parametrize("path", [path for path in PURE if path.exists()], ids=lambda path: path.name)
def test_plans_import_no_client_clock_or_chance(path):
    for module, name in imports(path):
        top, _, rest = module.partition(".")
        assert top not in FORBIDDEN, f"{path.name} imports {module}"
        if top == "pymongo":
            allowed = rest in PYMONGO_ALLOWED or (not rest and name in PYMONGO_NAMES_ALLOWED)
            assert allowed, f"{path.name} imports {name or module} from {module}"
        assert module not in ("treadle.store", "treadle.server"), f"{path.name}: {module}"


def test_the_core_needs_pymongo_and_pydantic_only():
    """Importing Treadle loads nothing that only an extra would install."""
    code = "import sys, treadle; treadle.Store; print('\\n'.join(sorted({name.split('.')[0] for name in sys.modules})))"
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    assert not loaded & {"typer", "rich", "jinja2", "starlette", "uvicorn", "pytest", "hypothesis", "click"}
    assert {"pymongo", "pydantic"} <= loaded


@pytest.mark.parametrize("path", sorted(SOURCE.glob("*.py")), ids=lambda path: path.name)
def test_core_files_import_core_dependencies_only(path):
    if path.name in ("cli.py", "testing.py"):
        return
    for module, _ in imports(path):
        top = module.split(".")[0]
        assert top in CORE_DEPENDENCIES or top in sys.stdlib_module_names, f"{path.name} imports {module}"
