"""Nothing reads a model's documents past its Scope.

A reader that combines kinds, versions, soft delete and the archive itself
forgets one of them. The reads of a model's own collection that remain outside
are listed by file in tests/scope_exceptions.txt; the list only shrinks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.kit.covers import TESTS

SOURCE = TESTS.parent / "src" / "treadle"
# Files and folders that may read a model's own collection, with the reason.
BY_DESIGN = {
    "graph/scope.py": "the scope itself",
    "graph/versions.py": "upgrades documents at hand, on the server",
    **dict.fromkeys(("engine/reads.py", "engine/queries.py", "engine/document_reads.py"), "the Store's own reads"),
    **dict.fromkeys(
        (
            "engine/bulk.py", "engine/deletes.py", "engine/inserts.py", "engine/replaces.py", "engine/updates.py",
            "engine/upserts.py", "engine/version_upgrade.py", "engine/write_path.py",
        ),
        "write functions read the documents that they write",
    ),
    "patterns/bucket/": "stored documents are buckets, not documents of the model",
    "patterns/tree/": "walks by the fields of the tree",
    "engine/indexes.py": "set-up looks for duplicates that a unique index refuses",
    "upkeep/merging.py": "schedules merge on the server",
    "upkeep/schedule.py": "counts what was merged",
    "upkeep/set_up.py": "looks whether there is any document",
    "upkeep/fingerprints.py": "looks whether there is any document",
    "upkeep/validation.py": "a validator is about documents as they are stored",
}  # fmt: skip
# Packages that know no model, or only look at a database.
OUTSIDE = ("plan/", "model/", "query/", "server/", "store/", "advisor/", "cli/", "web/", "demo/")
READS = {"find", "find_one", "aggregate", "count_documents", "matching"}
# How many such reads there were when the list was last shortened.
READS_MAX = 58


def reads(path: Path) -> Iterator[ast.Call]:
    """The reads of which the first argument is the collection of a model."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        of_model = isinstance(node.args[0], ast.Attribute) and node.args[0].attr == "collection"
        if of_model and (name in READS or (name in ("Call", "Read") and _is_read(node))):
            yield node


def _is_read(node: ast.Call) -> bool:
    method = node.args[1] if len(node.args) > 1 else None
    return isinstance(method, ast.Constant) and method.value in {"find", "find_one", "aggregate", "distinct"}


def reads_by_file() -> dict[str, int]:
    counted = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        number = len(list(reads(path)))
        if number and not name.startswith((*BY_DESIGN, *OUTSIDE)):
            counted[name] = number
    return counted


def listed() -> dict[str, int]:
    lines = (TESTS / "scope_exceptions.txt").read_text().splitlines()
    pairs = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: int(number) for number, name in pairs}


def test_documents_are_read_through_a_scope_or_listed() -> None:
    assert listed() == reads_by_file()


def test_the_list_only_shrinks() -> None:
    assert sum(listed().values()) <= READS_MAX


def test_reads_are_recognized(tmp_path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        "find(entry.collection, {})\n"
        "find(SET_ASIDE, {})\n"
        'Call(self.entry.collection, "find_one", ())\n'
        'Call(self.entry.collection, "insert_one", ())\n'
    )
    assert [1, 3] == [each.lineno for each in reads(path)]
