"""A plan's folder: what was tried is what is applied, and anything else is refused in a sentence.

Covers: advisor/loop/plan, advisor/loop/readme
"""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.advisor.loop.shops import plan_for, reads_of, shop
from treadle.advisor import scan
from treadle.advisor.loop.plan import MODELS, PLAN, README, READS, make, read, write
from treadle.advisor.loop.prove import write_reads
from treadle.advisor.loop.readme import readme
from treadle.advisor.loop.results import Measured, TrialReport, TrialResult, WorkloadSummary
from treadle.errors import DataError, UsageError


def written(database: Any, folder: Path) -> Any:
    products = shop(database)
    plan = plan_for(database, "computed", "subset", "extended-reference")
    write(plan, folder, readme(plan))
    write_reads(plan, reads_of(database, products, folder.parent / "all.workload"), folder)
    return plan


def test_what_is_written_is_read_again(database: Any, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    plan = written(database, folder)
    assert plan == read(folder)
    assert {PLAN, MODELS, README, READS} == {each.name for each in folder.iterdir()}
    # Recorded values are for nobody else.
    assert 0o600 == stat.S_IMODE((folder / READS).stat().st_mode)
    text = (folder / README).read_text()
    for step in plan.steps:
        assert step.name in text
        assert step.undo in text
    # It may be written again, and what is in the way is named.
    write(plan, folder, readme(plan))
    (folder / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="holds other files"):
        write(plan, folder, readme(plan))


def test_what_is_no_plan_is_refused(database: Any, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    written(database, folder)

    def refused(change: Any) -> str:
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        change(copy)
        with pytest.raises(UsageError) as error:
            read(copy)
        shutil.rmtree(copy, ignore_errors=True)
        return error.value.code

    def edit(name: str, change: Any) -> Any:
        return lambda copy: (copy / name).write_text(change((copy / name).read_text()))

    assert "plan-folder-invalid" == refused(shutil.rmtree)
    assert "plan-folder-invalid" == refused(lambda copy: (copy / PLAN).unlink())
    assert "plan-folder-invalid" == refused(lambda copy: (copy / MODELS).unlink())
    assert "plan-folder-invalid" == refused(edit(PLAN, lambda text: "no JSON"))
    assert "plan-folder-invalid" == refused(edit(PLAN, lambda text: "[]"))
    assert "plan-folder-invalid" == refused(
        edit(PLAN, lambda text: text.replace("treadle-plan/2", "other/9"))
    )
    assert "plan-folder-edited" == refused(edit(MODELS, lambda text: text + "\nimport this\n"))
    assert "plan-folder-edited" == refused(
        edit(PLAN, lambda text: text.replace('"operator": "count"', '"operator": "sum"'))
    )
    assert "plan-folder-edited" == refused(edit(PLAN, lambda text: json.dumps({**json.loads(text), "x": 1})))


def test_what_the_trial_does_not_support_is_left_out_with_the_reason(database: Any) -> None:
    shop(database)
    report = scan(database)
    results = []
    for each in report.findings:
        verdict: Any = {"computed": "do", "subset": "do not"}.get(each.code)
        if verdict is not None:
            results.append(
                TrialResult(
                    each.code,
                    each.where,
                    each.declaration,
                    verdict,
                    "It costs more.",
                    ratio=Measured(3, 2, 4),
                )
            )
    trial = TrialReport(database.name, "6.0", WorkloadSummary(1.0, 1, 1, 0), (), tuple(results))
    plan = make(report, trial, identity="x", made="now")
    assert ("computed@reviews.product_id",) == plan.findings
    reasons = {each.key.partition("@")[0]: each.reason for each in plan.left_out}
    assert "It costs more." == reasons["subset"]
    assert "It was not tried: --only names other findings." == reasons["extended-reference"]
    assert "recent_reviews" not in plan.models
    assert "3.0 (2.0 to 4.0) times" in readme(plan)
    assert ["set up", "fill", "verify"] == [step.kind for step in plan.steps]
    nothing = TrialReport(database.name, "6.0", WorkloadSummary(1.0, 1, 1, 0), (), ())
    with pytest.raises(DataError, match="supports no finding") as empty:
        make(report, nothing, identity="x", made="now")
    assert "plan-empty" == empty.value.code
