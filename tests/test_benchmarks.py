"""What `make bench` keeps and writes; what it measures is no matter of tests."""

from __future__ import annotations

import gc
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks import __main__ as bench
from benchmarks import harness, report
from benchmarks.harness import Contender, Context, Goal, Group, time_text
from benchmarks.stored import LONG, Entry, Stored


def constant(name: str, seconds: float, **options: Any) -> Contender:
    return Contender(name, lambda: None, lambda _: seconds, measured=True, **options)


def first(context: Context) -> Sequence[Contender]:
    return [
        constant("by hand", 1e-3),
        constant("Treadle <fast>", 1.05e-3, goal=Goal(1.1)),
        constant("other", 3e-3, goal=Goal(2.0, limit="the server alone takes 2.5")),
        constant("bounded", 4e-3, goal=Goal(2.0, limit="bare")),
        constant("bare", 2.4e-3),
    ]


def broken(context: Context) -> Sequence[Contender]:
    raise ValueError("no luck at /home/someone/secret with mongodb://host:27017/x on box-7.example:27018")


@pytest.fixture
def run(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run `python -m benchmarks` with these groups; the exit code and the report."""

    def run(groups: list[Group], *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(bench, "discover", lambda: bench.Catalogue(list(groups)))
        output = tmp_path / "RESULTS.md"
        code = bench.main([*arguments, "--uri", server.uri, "--output", str(output)])
        return code, output.read_text(encoding="utf-8")

    # Each timed run begins with a full collection, and a session of many tests has a large heap.
    gc.freeze()
    yield run
    gc.unfreeze()


def test_goals_are_said_to_be_met_or_missed(run: Any, tmp_path: Path) -> None:
    code, report = run([Group("one", "work", first, rounds=3)])
    assert 0 == code
    assert "1 of 3 goals are met." in report
    missed = "| one | work | other | 3.00 times by hand (3.00 – 3.00) | ≤ 2.00 | the server alone takes 2.5 |"
    assert missed in report
    assert "| bounded | 4.00 times by hand (4.00 – 4.00) | ≤ 2.00 | 2.40: bare |" in report
    assert (
        "| Treadle <fast> | 1.05 ms | 1.05 ms – 1.05 ms | 1.05 | 1.05 – 1.05 |  | by hand | 3 × 1 | ≤ 1.10 | met |"
        in report
    )
    assert "| ≤ 2.00 | **missed** |" in report
    assert "![one: medians and quartiles](plots/one.svg)" in report
    for name in ("cores", "memory", "system", "python", "mongod", "pymongo", "pydantic", "beanie"):
        assert re.search(rf"^\| {name} \| \S", report, re.MULTILINE)
    drawn = ElementTree.parse(tmp_path / "plots" / "one.svg")
    texts = {element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"one", "work", "by hand", "Treadle <fast>", "goal ≤ 1.10", "1.05 ms (1.05×)"} <= texts


def test_the_report_shows_the_ratio_before_and_no_run_writes_it(run: Any, tmp_path: Path) -> None:
    run([Group("one", "work", first, rounds=3)])
    before = json.loads((tmp_path / "RESULTS.json").read_text(encoding="utf-8"))
    for result in before["entries"][0]["results"]:
        result["ratio"] = None if result["ratio"] is None else 1.5
    baseline = json.dumps(before)
    (tmp_path / report.BASELINE).write_text(baseline, encoding="utf-8")
    _, text = run([Group("one", "work", first, rounds=3)])
    assert "| 1.05 | 1.05 – 1.05 | 1.50 | by hand |" in text
    assert "| by hand | 1.00 ms | 1.00 ms – 1.00 ms |  |  | 1.00 ms |" in text
    assert baseline == (tmp_path / report.BASELINE).read_text(encoding="utf-8")


@pytest.mark.heavy
def test_a_group_that_fails_is_named_and_loses_no_other(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [
        Group("one", "work", broken),
        Group("one", "more", first, rounds=3),
        Group("two", "x", first, rounds=3),
    ]
    code, report = run(groups)
    assert 1 == code
    assert "- **one: work** failed: ValueError: no luck at … with … on …\n" in report
    assert 2 == report.count("| Treadle <fast> | 1.05 ms")
    assert "no luck" in capsys.readouterr().err


@pytest.mark.heavy
def test_running_a_family_again_keeps_the_others(run: Any, tmp_path: Path) -> None:
    groups = [Group("one", "work", first, rounds=3), Group("two", "work", first, rounds=3)]
    run(groups)
    changed = [groups[0], Group("two", "another work", first, rounds=5)]
    code, report = run(changed, "two")
    assert 0 == code
    assert "## one\n" in report
    assert "3 × 1" in report.partition("## two\n")[0]
    assert "### another work\n" in report
    assert "### work\n" not in report.partition("## two\n")[2]
    assert "5 × 1" in report.partition("## two\n")[2]
    stored = json.loads((tmp_path / "RESULTS.json").read_text())
    assert [("one", "work"), ("two", "another work")] == [
        (each["group"], each["work"]) for each in stored["entries"]
    ]
    before = report
    code, report = run(changed, "--report")
    assert (0, before) == (code, report)


@pytest.mark.parametrize(("seconds_max", "rounds", "runs"), [(1000.0, 8, 9), (10.0, 3, 4), (1.0, 1, 1)])
def test_rounds_are_cut_when_a_group_takes_long(
    run: Any, monkeypatch: pytest.MonkeyPatch, seconds_max: float, rounds: int, runs: int
) -> None:
    """By a clock on which a round takes three seconds: three rounds, or one where three take far too long.

    The first is to warm up; where it takes a third of the time, it counts.
    """
    monkeypatch.setattr(harness, "perf_counter", itertools.count().__next__)
    begun = itertools.count()
    only = Contender("only", begun.__next__, lambda _: 1.0, measured=True)
    group = Group("one", "work", lambda context: [only], rounds=8, seconds_max=seconds_max)
    _, report = run([group])
    assert f"| {rounds} × 1 |" in report
    assert runs == next(begun)
    assert re.search(r"^All works, as they are stored here, took 0\.\d minutes\.$", report, re.MULTILINE)


def test_a_quick_run_does_not_touch_the_stored_results() -> None:
    assert bench.RESULTS == bench._output(bench.parse([]))
    assert bench.RESULTS == bench._output(bench.parse(["trees"]))
    assert bench._output(bench.parse(["--quick"])) is None
    assert bench._output(bench.parse(["--rounds", "1"])) is None


def test_a_family_that_does_not_exist_is_refused(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [Group("trees", "work", first, rounds=3)]
    run(groups)
    assert 2 == run(groups, "tress")[0]
    assert "no such family: tress; there are trees" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0.5, "0.50 µs"),
        (999.0, "999 µs"),
        (999.9, "1.00 ms"),
        (12_345, "12.3 ms"),
        (2.5e6, "2.50 s"),
        (1e9, "1,000 s"),
    ],
)
def test_times_are_written_in_the_unit_that_suits_them(microseconds: float, text: str) -> None:
    assert text == time_text(microseconds)


def test_a_script_gives_lines_tables_and_goals(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "measuring.py").write_text(
        "print('three parts')\n"
        "print('| part | took |')\nprint('| --- | --- |')\nprint('| one | 3 s |')\n"
        'print(\'{"goal": {"name": "in all", "value": 7, "maximum": 5, "unit": "s"}}\')\n'
        'print(\'{"goal": {"name": "differences", "value": 0, "maximum": 0, "unit": "differences"}}\')\n'
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, report = run([bench.Script("one", "parts", "measuring", ())])
    assert 0 == code
    assert "1 of 2 goals are met." in report
    assert "| one | parts | in all | 7 s | ≤ 5 s |" in report
    assert "```text\nthree parts\n```\n\n| part | took |\n| --- | --- |\n| one | 3 s |\n\n" in report
    assert not (tmp_path / "plots" / "one.svg").exists()
    assert (0, report) == run([bench.Script("one", "parts", "measuring", ())], "--report")


def test_what_is_measured_only_where_it_is_named_is_no_part_of_the_whole() -> None:
    entries = [Entry(name, "work", "", seconds, {}) for name, seconds in (("one", 90.0), (LONG, 600.0))]
    told = "took 1.5 minutes. `long`, which is measured only where it is named, took 10.0 more."
    assert f"All works, as they are stored here, {told}" in report.markdown(Stored(entries), {}, {})
