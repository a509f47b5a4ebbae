"""Every error code has a heading in docs/errors.md, and every heading a code."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

from treadle import BulkFailed, DuplicateKey, Failure, UsageError
from treadle.server.failures import LOG_SIGNS

ROOT = Path(__file__).parent.parent


def codes_in_source() -> set[str]:
    """The codes that errors are raised with, or that resolve() is told to raise with."""
    found = {code for _, code, _ in LOG_SIGNS}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                # An error whose code is always the same.
                named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                defaults = [default for argument, default in named if argument.arg == "code"]
                found |= {each.value for each in defaults if isinstance(each, ast.Constant)}
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").endswith("_code"):
                # The code of a family of rules.
                found |= {node.value.value} if isinstance(node.value, ast.Constant) else set()
            if not isinstance(node, ast.Call):
                continue
            values = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            position = {"resolve": 3, "sentence": 1}.get(getattr(node.func, "id", ""))
            if position is not None:
                values += node.args[position : position + 1]
            for value in values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found.add(value.value)
    return found


def test_codes_and_headings_are_the_same():
    headings = set(
        re.findall(r"^## `([a-z0-9-]+)`$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    )
    assert codes_in_source() == headings


def test_errors_keep_their_code_through_pickling():
    error = pickle.loads(pickle.dumps(UsageError("stop", code="plan-not-fresh")))
    assert ("stop — plan-not-fresh", "plan-not-fresh") == (str(error), error.code)
    failed = pickle.loads(pickle.dumps(BulkFailed([Failure(3, "taken", "duplicate-key")], 5)))
    assert [Failure(3, "taken", "duplicate-key")] == failed.failures
    duplicate = pickle.loads(pickle.dumps(DuplicateKey("Person", {"code": 11000, "keyPattern": {"a": 1}})))
    assert (("a",), 11000) == (duplicate.fields, duplicate.details["code"])
