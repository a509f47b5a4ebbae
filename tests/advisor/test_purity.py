"""Only the profile reads data; everything else of the advisor is a function of facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_imports import SOURCE, imports
from treadle.advisor.rules import load

ADVISOR = SOURCE / "advisor"
# `reading.py` is how the profile and its parts talk to the server; the package itself checks its argument's class.
READERS = {"profile.py", "measure.py", "prove.py", "reading.py", "__init__.py"}
PURE = sorted(
    path for path in ADVISOR.rglob("*.py") if path.name not in READERS or path.parent.name == "rules"
)


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.stem)
def test_it_reads_no_data_no_clock_and_no_chance(path: Path) -> None:
    for module, _ in imports(path):
        assert module.partition(".")[0] not in {
            "pymongo",
            "time",
            "random",
            "threading",
            "asyncio",
            "socket",
            "os",
        }
        assert module.removeprefix("treadle.advisor.") not in {"profile", "measure", "prove", "reading"}, path


def test_every_rule_is_documented() -> None:
    page = (SOURCE.parent.parent / "docs" / "advisor.md").read_text()
    for code in load():
        assert f"`{code}`" in page
