"""The table of figures in docs/trees.md comes from a run of the benchmarks, and from nowhere else."""

from __future__ import annotations

import json
import shutil

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
    results.write_text(json.dumps({"results": measured}))
    trees.write_page(results, page)
    after = page.read_text()
    assert "| move of 10 | 1.2 | 1.2 | 1.2 | 1.2 |" in after.split("\n")
    # The rows that the page has are those that are written, and nothing else changes.
    titles = [line.split(" | ")[0] for line in before.split("\n")]
    assert titles == [line.split(" | ")[0] for line in after.split("\n")]


def test_every_row_of_the_table_is_measured():
    works = {group.work for group in trees.groups()}
    assert [] == [work for _, work, _ in trees.ROWS if work not in works]
