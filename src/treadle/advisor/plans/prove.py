"""Whether an applied plan holds what its trial said: values right, reads as much quicker.

The recorded reads run on the real database in both ways, as they were
recorded and as the models allow. The gain of each is compared with the
interval that the trial gave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pymongo.database import Database

from treadle.advisor.plans import before
from treadle.advisor.plans.apply import LIMITS, Tell
from treadle.advisor.plans.folder import ChangePlan
from treadle.advisor.plans.models import load_models
from treadle.advisor.plans.reads import recorded, rewriter
from treadle.advisor.plans.settle import catch_up, is_followed, verified
from treadle.advisor.trials.compare import compare_reads
from treadle.advisor.trials.results import Measured
from treadle.errors import UsageError
from treadle.graph.outcomes import Finding, Progress
from treadle.store.blocking.store import Store


@dataclass(frozen=True, slots=True)
class Proven:
    """One read: the gain in the trial, and the gain on the real database."""

    request: str
    after: str
    tried: Measured | None
    proven: Measured
    different: int
    compared: int

    @property
    def within(self) -> bool:
        """Whether the gain lies in the trial's interval."""
        return self.tried is not None and self.tried.holds(self.proven.value)

    @property
    def holds(self) -> bool:
        """Whether answers are the same, and it is, within the errors, as quick as the trial said."""
        quick = self.tried is None or self.proven.high >= self.tried.low
        return quick and not self.different


@dataclass(frozen=True, slots=True)
class Proof:
    """What `prove` found."""

    findings: tuple[Finding, ...]
    reads: tuple[Proven, ...]
    # Reads of the trial that could not be run here, and why.
    notes: tuple[str, ...]
    # Changes that had not been followed yet, and whether a worker follows now.
    behind: int
    followed: bool

    @property
    def holds(self) -> bool:
        return not self.findings and bool(self.reads) and all(each.holds for each in self.reads)


def prove(
    database: Database[Any],
    plan: ChangePlan,
    workload: Path,
    *,
    tell: Tell = lambda text: None,
    progress: Callable[[Progress], None] | None = None,
) -> Proof:
    """Verify every value of the plan, then measure the recorded reads in both ways."""
    before.require_database(database, plan)
    row = before.row_of(database, plan)
    if row is None or row["state"] != "applied":
        raise UsageError(
            f"This plan is not applied to {database.name}; run treadle apply first.", code="plan-not-applied"
        )
    groups, seconds = recorded(plan, workload, row)
    store = Store(database, models=load_models(plan.models), limits=LIMITS)
    followed = is_followed(store)
    behind = catch_up(store)
    tell("Verifying every maintained value.")
    findings = verified(store, verify=lambda: store.verify(progress=progress))
    tell("Running the recorded reads in both ways.")
    # Others write: an answer may be of before a change that the worker had not followed yet.
    results, notes = compare_reads(
        database, database, groups, rewriter(plan), seconds, settle=lambda: catch_up(store)
    )
    expected = _expected(plan)
    reads = tuple(
        Proven(
            each.request,
            each.after,
            expected.get((each.request, each.after), expected.get((each.request, ""))),
            each.ratio,
            each.different,
            each.compared,
        )
        for each in results
    )
    return Proof(tuple(findings), reads, tuple(notes), behind, followed)


def _expected(plan: ChangePlan) -> dict[tuple[str, str], Measured]:
    """What the trial measured.

    By a read and what takes its place, since two may be the same in words, and
    by the read alone.
    """
    results = [request for result in plan.results for request in result.requests]
    reads = [each for each in results if each.kind == "read"]
    return {(each.request, after): each.ratio for each in reads for after in ("", each.after)}
