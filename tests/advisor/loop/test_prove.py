"""An applied plan is proven: values right, answers the same, reads as much quicker as the trial said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.advisor.loop.shops import plan_for, reads_of, shop
from treadle.advisor.loop.apply import apply, open_store
from treadle.advisor.loop.plan import AdoptionPlan
from treadle.advisor.loop.prove import (
    UNITS_MAX,
    Proof,
    Proven,
    _expected,
    _former_indexes,
    prove,
    reads_of_plan,
    rewriter,
)
from treadle.advisor.loop.results import (
    Measured,
    RequestResult,
    Side,
    TrialReport,
    TrialResult,
    WorkloadSummary,
)
from treadle.advisor.loop.workload_file import read as read_workload
from treadle.advisor.proposals import Draft, Index
from treadle.cli.prove import _verdict
from treadle.errors import UsageError


def promising(plan: AdoptionPlan, proof: Proof, ratio: Measured) -> AdoptionPlan:
    """The same plan, whose trial measured this gain for each read."""
    zero = Measured(0, 0, 0)
    side = Side(zero, zero, 0, 0, 0)
    requests = tuple(
        RequestResult("read", each.request, each.after, 1, 1.0, 1, 1, 0, side, side, ratio)
        for each in proof.reads
    )
    results = tuple(replace(each, requests=requests) for each in plan.trial.results)
    return replace(plan, trial=replace(plan.trial, results=results))


def test_reads_that_are_the_same_in_words_keep_their_own_gain() -> None:
    """A count and an average by the same field are both "grouped"; what takes their place tells them apart."""
    zero = Measured(0, 0, 0)
    side = Side(zero, zero, 0, 0, 0)
    requests = tuple(
        RequestResult("read", "reviews: grouped", after, 1, 1.0, 1, 1, 0, side, side, Measured(gain, 1, 9))
        for after, gain in (("count", 2.0), ("average", 3.0))
    )
    result = TrialResult("computed", "reviews.by", "", "do", "", requests)
    trial = TrialReport("shop", "6.0", WorkloadSummary(1.0, 1, 1, 0), (), (result,))
    plan = AdoptionPlan("p", "", "shop", (result.key,), Draft(), "", trial)
    gains = {after: each.value for (_, after), each in _expected(plan).items() if after}
    assert {"count": 2.0, "average": 3.0} == gains


@pytest.mark.parametrize(
    ("proven", "text"),
    [(9.0, "holds"), (40.0, "quicker"), (4.0, "below the trial's interval"), (1.0, "not as quick")],
)
def test_a_gain_below_the_interval_is_not_said_to_hold(proven: float, text: str) -> None:
    measured = Measured(proven, proven / 2, proven * 2)
    read = Proven("reviews: find", "products: find", Measured(10.0, 5.0, 20.0), measured, 0, 1)
    assert _verdict(read).startswith(text)


@pytest.mark.all
def test_a_plan_holds_what_its_trial_said_or_the_read_is_named(database: Any, tmp_path: Path) -> None:
    products = shop(database)
    plan = plan_for(database, "computed", "subset", "extended-reference")
    path = tmp_path / "reads.workload"
    reads_of(database, products, path)
    with pytest.raises(UsageError) as early:
        prove(database, plan, path)
    assert "plan-not-applied" == early.value.code
    apply(database, plan)
    proof = prove(database, plan, path)
    assert proof.holds
    assert () == proof.findings
    assert not proof.followed
    assert {0} == {each.different for each in proof.reads}
    assert {"reviews: find by product_id sorted by -date first 3"} <= {each.request for each in proof.reads}
    assert 2 <= len(proof.reads)
    # What was recorded as a scan is measured as one, though the plan made an index.
    former = _former_indexes(open_store(database, plan))
    assert {"_id_", "rating_1"} == set(former["reviews"])
    groups = reads_of_plan(plan, read_workload(path), former)
    assert {"$natural"} == {next(iter(unit[0].body["hint"])) for group in groups for unit in group.units}
    # Each scan loads the database that others use, so one of each shape must do.
    assert {1} == {len(each.units) for each in groups}
    quick = reads_of_plan(plan, read_workload(path), {})
    assert 1 < max(len(each.units) for each in quick) <= UNITS_MAX
    # With a plan that makes an index for these scans as well, each is measured once.
    index = Index("reviews", (("product_id", 1),))
    both = replace(plan, draft=replace(plan.draft, indexes=(index,)))
    assert len(groups) == len(reads_of_plan(both, read_workload(path), former))
    after = rewriter(plan)(groups[0].units[0])
    assert after is not None
    assert not any("hint" in each.body for each in after.requests)
    # Nothing is a million times quicker.
    promised = prove(database, promising(plan, proof, Measured(1e6, 9e5, 2e6)), path)
    assert not promised.holds
    assert not any(each.holds or each.within for each in promised.reads)
    # Quicker than the trial said is no fault, though it is outside of the interval.
    modest = prove(database, promising(plan, proof, Measured(0.001, 0.001, 0.002)), path)
    assert modest.holds
    assert not any(each.within for each in modest.reads)
    # What was written past Treadle is followed; what is wrong is named.
    database["reviews"].insert_one({"_id": "new", "product_id": products[0], "rating": 5})
    assert 1 <= prove(database, plan, path).behind
    database["products"].update_one({"_id": products[1]}, {"$set": {"review_count": 99}})
    database["treadle.streams"].update_one({}, {"$set": {"rules": []}})
    mended = prove(database, plan, path)
    assert mended.holds
