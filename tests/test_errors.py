"""Every error code has a heading in docs/errors.md, and every heading a code."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

from treadle import UsageError

ROOT = Path(__file__).parent.parent


def codes_in_source() -> set[str]:
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                if isinstance(node.value.value, str):
                    found.add(node.value.value)
    return found


def test_codes_and_headings_are_the_same():
    headings = set(
        re.findall(r"^## `([a-z0-9-]+)`$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    )
    assert codes_in_source() == headings


def test_errors_keep_their_code_through_pickling():
    error = pickle.loads(pickle.dumps(UsageError("stop", code="plan-not-fresh")))
    assert ("stop", "plan-not-fresh") == (str(error), error.code)
