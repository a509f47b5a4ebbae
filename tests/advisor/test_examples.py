"""The reports on the example databases are what they were; a change must be looked at.

TREADLE_SNAPSHOTS=write writes them anew.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from examples.databases.__main__ import NAMES
from examples.databases.maker import Maker

from tests.advisor.test_rules import check_declarations
from treadle.advisor import Limits, Report, scan

SNAPSHOTS = Path(__file__).parent / "snapshots"
# Whole collections, so that no chance is left.
LIMITS = Limits(sample_documents=200_000, references_checked=50_000)
EXPECTED = {
    "music_shop": {"normalised-everything", "extended-reference", "no-validation"},
    "sensors": {"bucket", "no-validation"},
    "social": {"outlier", "no-validation"},
    "catalogue": {"polymorphic", "schema-versioning", "mixed-types", "no-validation"},
    "comments": {"tree", "deep-nesting", "redundant-index", "no-validation"},
    "good_shop": set(),
}


def stable(report: Report) -> dict[str, Any]:
    """The JSON without what depends on the server's storage and clock."""
    found = report.as_json()
    del found["server_version"]
    # The test's database has a name of its own.
    found["database"] = ""
    for each in found["findings"]:
        each["evidence"] = {
            name: "…" if "index size" in name or name == "size" else value
            for name, value in each["evidence"].items()
        }
    for each in found["collections"]:
        for name in ("storage_bytes", "index_bytes", "indexes"):
            del each[name]
    return found


@pytest.mark.all
@pytest.mark.parametrize("name", NAMES)
def test_the_report_is_as_before(name: str, database: Any) -> None:
    importlib.import_module(f"examples.databases.{name}").fill(Maker(database))
    documents = sum(database[each].estimated_document_count() for each in database.list_collection_names())
    assert 10_000 <= documents <= 200_000
    report = scan(database, limits=LIMITS)
    assert () == report.failures
    assert EXPECTED[name] == {each.code for each in report.findings}
    if name == "good_shop":
        assert {"customers", "orders", "products", "reviews"} == {facts.name for facts in report.healthy}
    check_declarations(report, database)
    path = SNAPSHOTS / f"{name}.json"
    found = json.loads(json.dumps(stable(report)))
    if os.environ.get("TREADLE_SNAPSHOTS") == "write":
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    assert json.loads(path.read_text()) == found
