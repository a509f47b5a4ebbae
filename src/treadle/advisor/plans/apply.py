"""A plan carried out on a live database: set up, keep former values, fill, follow; each step verified.

Writers that know nothing of it go on meanwhile. What they change after the
fill began is in the server's history, and the worker applies it before a step
is verified. Each step that is done is noted in `treadle.plans`; a run that was
killed goes on with the first that is not, and a fill with its last page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pymongo
from pymongo.database import Database
from pymongo.errors import PyMongoError

from treadle.advisor.plans import before
from treadle.advisor.plans.check import check
from treadle.advisor.plans.folder import ChangePlan, Step
from treadle.advisor.plans.models import load_models
from treadle.advisor.plans.settle import catch_up, is_followed, verified
from treadle.engine.set_aside import SET_ASIDE
from treadle.errors import DataError, TreadleError, UsageError
from treadle.graph.limits import Limits
from treadle.graph.outcomes import Action, Progress
from treadle.store.blocking.store import Store
from treadle.upkeep.jobs import GENTLE
from treadle.upkeep.set_up import set_up_validator

FINDINGS_NAMED_MAX = 5
# No time at all would be no limit.
STOP_SECONDS_MIN = 0.001
STOP_FACTOR = 2
# Larger pages than usual: a whole collection is gone through, and few writers meet it. A process that was
# killed holds its documents for as long as the server lets a transaction live, a minute and some seconds.
LIMITS = Limits(
    rebuild_page=500, verify_page=2_000, retry_seconds=180.0, gentle_page=200, gentle_rest_min=2.0
)
# How much longer than without a pace a gentle step may take.
GENTLE_FACTOR = 20
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
        self._require_no_other_worker()
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

    def _require_no_other_worker(self) -> None:
        """A worker of the plans before this one would read on past what this one needs."""
        if self.plan.on and is_followed(self.store):
            raise UsageError(
                "A worker follows the plans that were applied before, and does not know what this one adds; "
                "stop treadle watch, and afterwards run it in the folder of this plan, which holds them all.",
                code="plan-worker-running",
            )

    def _require_streams(self) -> None:
        try:
            self.store._capabilities()
        except TreadleError as error:
            if error.code != "streams-unavailable":
                raise
            raise UsageError(
                "The plan follows the change stream, which this server does not have, as it is not a replica "
                "set. Make it one (rs.initiate()), or make the plan with --maintain write, for applications "
                "all of whose writers use Treadle.",
                code="plan-needs-stream",
            ) from None

    def _entry(self, step: Step) -> Any:
        return before.entry_named(self.store, step.about)

    # -- steps ---------------------------------------------------------------------------------

    def _carry_out(self, step: Step) -> None:
        if step.kind == "set up":
            with _stopping(step):
                for action in self.store.setup(validation="keep"):
                    self._tell(f"  {action}")
            left = self.store.setup(dry_run=True, validation="keep")
            if left:
                raise DataError(f"Set-up left something to do: {left[0]}.", code="plan-not-verified")
        elif step.kind == "validate":
            entry, actions = self._entry(step), list[Action]()
            existing = before.options_of(self.database)[entry.collection]
            run = set_up_validator(entry, self.store._capabilities(), existing, actions, enforce=False)
            self.store.runner.run(run)
        elif step.kind == "keep":
            with _stopping(step):
                self._keep(step)
        elif step.kind == "fill":
            self._fill(step)
        else:
            handled = catch_up(self.store)
            self._tell(f"  applied {handled:,} changes that were made meanwhile")
            self._verify()

    def _keep(self, step: Step) -> None:
        """Copy what the plan takes over, on the server, so that every value stays as it is."""
        fields = self.plan.fields(step.about, adopted=True)
        row = {
            "f": {field: f"${field}" for field in fields},
            "keys": {"$map": {"input": {"$objectToArray": "$$ROOT"}, "in": "$$this.k"}},
        }
        # What an interrupted run has copied stays as it is.
        former = before.former_of(self.plan.id, step.about)
        into = {"into": former, "whenMatched": "keepExisting", "whenNotMatched": "insert"}
        self.database[step.about].aggregate([{"$project": row}, {"$merge": into}])

    def _fill(self, step: Step) -> None:
        entry, began = self._entry(step), time.monotonic()
        known, seconds = self._set_aside(entry.collection), self._seconds_max(step)

        def stop() -> None:
            if time.monotonic() - began > seconds:
                raise _stopped(f"it took longer than {seconds:,.0f} s")
            aside = self._set_aside(entry.collection) - known
            if aside > step.stop_set_aside:
                raise _stopped(f"{aside:,} documents of {entry.collection} were set aside")

        def report(progress: Progress) -> None:
            if self._progress is not None:
                self._progress(progress)
            stop()

        self.store.rebuild(entry.model, resume=True, throttle=self._throttle, progress=report)
        stop()
        self._verify(entry.model)

    def _seconds_max(self, step: Step) -> float:
        """How long a fill may take at the pace that was asked for."""
        if self._throttle is None:
            return step.stop_seconds
        if self._throttle == GENTLE:
            return step.stop_seconds * GENTLE_FACTOR
        documents = self.database[self._entry(step).collection].estimated_document_count()
        return step.stop_seconds + STOP_FACTOR * documents / float(self._throttle)

    def _set_aside(self, collection: str) -> int:
        """How many of a collection's documents are set aside; a rule counts each once."""
        return int(self.database[SET_ASIDE].count_documents({"_id.collection": collection}))

    def _verify(self, *models: type[Any]) -> None:
        check = partial(self.store.verify, *models, throttle=self._throttle)
        findings = [each for each in verified(self.store, verify=check) if each.pattern != "set-aside"]
        if findings:
            listed = "; ".join(
                f"{each.model} {each.document_id!r} {each.path}" for each in findings[:FINDINGS_NAMED_MAX]
            )
            raise DataError(
                f"{len(findings):,} values are not what they should be: {listed}. Run treadle apply again, "
                "or treadle undo.",
                code="plan-not-verified",
            )


@contextmanager
def _stopping(step: Step) -> Iterator[None]:
    """End a command that takes longer than the step may; the server gives it up too."""
    try:
        with pymongo.timeout(max(STOP_SECONDS_MIN, step.stop_seconds)):
            yield
    except PyMongoError as error:
        if not error.timeout:
            raise
        raise _stopped(f"it took longer than {step.stop_seconds:,.0f} s") from error


def _stopped(reason: str) -> DataError:
    return DataError(
        f"The step was stopped: {reason}. treadle apply goes on from here, treadle undo takes it back.",
        code="plan-stopped",
    )
