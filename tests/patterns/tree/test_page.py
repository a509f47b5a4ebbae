"""The figures of all four representations, as a run of the benchmarks writes them into docs/trees.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks import trees


def test_the_page_s_table_is_written_from_a_run(tmp_path):
    page, results = tmp_path / "trees.md", tmp_path / "RESULTS.json"
    shutil.copy(trees.PAGE, page)
    before = page.read_text()
    measured = [
        {"group": "trees", "work": work, "contender": name + suffix, "microseconds": {"median": 1234.5}}
        for _, work, suffix in trees.ROWS
        for name in trees.TITLES.values()
    ]
    results.write_text(json.dumps({"entries": [{"results": measured}]}))
    trees.write_page(results, page)
    after = page.read_text()
    assert "| move of 10 | 1.2 | 1.2 | 1.2 | 1.2 |" in after.split("\n")
    table = trees.page_table(measured)
    # Nothing else changes, and a second run puts its figures in the same place.
    assert set(before.split("\n")) <= set(after.split("\n")) or trees.HEAD in before
    assert "\n".join(["", *table, ""]) in after
    trees.write_page(results, page)
    assert after == page.read_text()


def test_every_row_of_the_table_is_measured():
    works = {group.work for group in trees.groups()}
    assert [] == [work for _, work, _ in trees.ROWS if work not in works]


def test_the_page_shows_the_figures_of_the_last_run():
    """Nothing is copied by hand: `python -m benchmarks.trees benchmarks/RESULTS.json` writes it."""
    entries = json.loads((Path(trees.__file__).parent / "RESULTS.json").read_text())["entries"]
    table = trees.page_table([each for entry in entries for each in entry["results"]])
    assert "\n".join(table) in trees.PAGE.read_text()
