"""A plan carried out on a live database: set up, fill, follow; each step verified.

Writers that know nothing of it go on meanwhile. What they change after the
fill began is in the server's history, and the worker applies it before a step
is verified. Each step that is done is noted in `treadle.plans`; a run that was
killed goes on with the first that is not, and a fill with its last page.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pymongo.database import Database

from treadle.advisor.plans import before
from treadle.advisor.plans.check import check
from treadle.advisor.plans.folder import ChangePlan, Step
from treadle.advisor.plans.models import load_models
from treadle.advisor.plans.settle import catch_up, verified
from treadle.errors import DataError, TreadleError, UsageError
from treadle.graph.limits import Limits
from treadle.graph.outcomes import Progress
from treadle.plan.capabilities import REPLICA_SET_OF_ONE
from treadle.store.blocking.store import Store

FINDINGS_NAMED_MAX = 5
# Larger pages than usual: a whole collection is gone through, and few writers meet it.
LIMITS = Limits(rebuild_page=500, verify_page=2_000, gentle_page=200, gentle_rest_min=2.0)
Tell = Callable[[str], None]


class Application:
    """One plan and one database."""

    def __init__(
        self,
        database: Database[Any],
        plan: ChangePlan,
        *,
        throttle: Any = None,
        tell: Tell = lambda text: None,
        progress: Callable[[Progress], None] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        before.require_database(database, plan)
        self.plan = plan
        self.store = Store(database, models=load_models(plan.models), limits=limits)
        self.database: Database[Any] = self.store.database
        self._throttle = throttle
        self._tell = tell
        self._progress = progress

    def dry_run(self) -> list[str]:
        """Everything that `run` would do, after the same checks; nothing is changed."""
        row = self._row()
        if row is None:
            check(self.store, self.plan)
        lines = []
        for step in self.plan.steps:
            if row is not None and step.name in row["done"]:
                lines.append(f"{step.name}: done already.")
                continue
            lines.append(f"{step.name}: {step.what}")
            if step.kind == "set up":
                lines += [f"  {action}" for action in self.store.setup(dry_run=True, validation="keep")]
            elif step.kind == "fill":
                documents = self.database[self._entry(step).collection].estimated_document_count()
                lines.append(f"  {documents:,} documents, about {step.seconds:,.0f} s. {step.load}.")
            lines.append(f"  To undo: {step.undo}")
        return lines

    def run(self) -> None:
        """Carry out the steps that are not done yet."""
        row = self._row()
        if row is None:
            check(self.store, self.plan)
            row = before.begin(self.store, self.plan)
        elif row["done"]:
            self._tell(f"Going on after: {', '.join(row['done'])}.")
        for number, step in enumerate(self.plan.steps, 1):
            if step.name in row["done"]:
                continue
            self._tell(f"{number} of {len(self.plan.steps)}: {step.name}. {step.what}")
            began = time.monotonic()
            self._carry_out(step)
            before.step_done(self.database, self.plan, step.name)
            self._tell(f"  done in {time.monotonic() - began:,.1f} s")
        before.mark(self.database, self.plan, state="applied")

    def _row(self) -> before.Row | None:
        self._require_streams()
        row = before.row_of(self.database, self.plan)
        if row is not None and row["state"] == "applied":
            raise UsageError(
                f"This plan is applied to {self.database.name} already; treadle prove shows what it gains, "
                "treadle undo takes it back.",
                code="plan-applied",
            )
        if row is not None and row["state"] == "undoing":
            raise UsageError(
                "This plan is half undone; finish with treadle undo, then apply it again.",
                code="plan-half-undone",
            )
        return row

    def _require_streams(self) -> None:
        try:
            self.store._capabilities()
        except TreadleError as error:
            if error.code not in ("transactions-needed", "streams-unavailable"):
                raise
            raise UsageError(
                "The plan follows the change stream, which this server does not have, as it is not a replica "
                f"set; {REPLICA_SET_OF_ONE}.",
                code="plan-needs-stream",
            ) from None

    def _entry(self, step: Step) -> Any:
        return before.entry_named(self.store, step.about)

    # -- steps ---------------------------------------------------------------------------------

    def _carry_out(self, step: Step) -> None:
        if step.kind == "set up":
            for action in self.store.setup(validation="keep"):
                self._tell(f"  {action}")
            left = self.store.setup(dry_run=True, validation="keep")
            if left:
                raise DataError(f"Set-up left something to do: {left[0]}.", code="plan-not-verified")
        elif step.kind == "fill":
            model = self._entry(step).model
            self.store.rebuild(model, resume=True, throttle=self._throttle, progress=self._progress)
            self._verify(model)
        else:
            handled = catch_up(self.store)
            self._tell(f"  applied {handled:,} changes that were made meanwhile")
            self._verify()

    def _verify(self, *models: type[Any]) -> None:
        check = partial(self.store.verify, *models, throttle=self._throttle)
        found = verified(self.store, verify=check)
        findings = [each for each in found if each.pattern != "set-aside"]
        if len(found) > len(findings):
            self._tell(f"  set aside, and not computed: {len(found) - len(findings):,}")
        if findings:
            listed = "; ".join(
                f"{each.model} {each.document_id!r} {each.path}" for each in findings[:FINDINGS_NAMED_MAX]
            )
            raise DataError(
                f"{len(findings):,} values are not what they should be: {listed}. Run treadle apply again, "
                "or treadle undo.",
                code="plan-not-verified",
            )
