"""Only the profile reads data; everything else of the advisor is a function of facts."""

from __future__ import annotations

import pytest

from tests.test_house import IMPORTS, MODULES, SOURCE
from treadle.advisor.rules import load

ADVISOR = SOURCE / "advisor"
# `reading.py` is how the profile and its parts talk to the server; the package itself checks its argument's class.
READERS = {"profile.py", "measure.py", "prove.py", "compare.py", "reading.py", "__init__.py"}
# What the loop does with servers and files.
LOOP_READERS = {
    *("apply.py", "compare.py", "copying.py", "following.py", "perform.py", "profiler_level.py", "prove.py"),
    *("recorder.py", "storage.py", "trial.py", "undo.py", "write_cost.py"),
}
PURE = [
    module
    for module, path in MODULES.items()
    if ADVISOR in path.parents
    and (path.name not in READERS or path.parent.name == "rules")
    and not (path.parent.name == "loop" and path.name in LOOP_READERS)
]
OUTSIDE = {"pymongo", "time", "random", "threading", "asyncio", "socket", "os"}


@pytest.mark.parametrize("module", PURE)
def test_it_reads_no_data_no_clock_and_no_chance(module: str) -> None:
    imported = {each.imported for each in IMPORTS if each.importer == module}
    assert not {each.split(".")[0] for each in imported} & OUTSIDE
    assert not imported & {
        f"treadle.advisor.{name}" for name in ("profile", "measure", "prove", "compare", "reading")
    }


def test_every_rule_is_documented() -> None:
    page = (SOURCE.parent.parent / "docs" / "advisor.md").read_text()
    for code in load():
        assert f"`{code}`" in page
