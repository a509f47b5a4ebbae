"""A plan taken back by `Store.teardown(fields=True)`; what cannot be restored is counted.

The models come from the user's own folder, never from the database. Every part can be repeated, so an undo
that was killed is run again. The plan's row goes last.
"""

from __future__ import annotations

from typing import Any

from pymongo.database import Database

from treadle.advisor.loop.apply import PLANS, Log, Report, open_store, row_of, silent
from treadle.advisor.loop.plan import AdoptionPlan
from treadle.errors import UsageError
from treadle.model.bson_types import RESERVED
from treadle.store.blocking.store import Store
from treadle.upkeep.jobs import Throttle


def undo(
    database: Database[Any],
    plan: AdoptionPlan,
    *,
    dry_run: bool = False,
    throttle: Throttle = None,
    log: Log = silent,
    progress: Report | None = None,
) -> list[str]:
    """Take everything back that the plan made. Returns what could not be restored, in sentences."""
    store = open_store(database, plan)
    if row_of(database, plan) is None:
        raise UsageError(
            f"This plan is not applied to {database.name}, or was undone; there is nothing to undo.",
            code="plan-not-applied",
        )
    if not dry_run:
        database[PLANS].update_one({"_id": plan.id}, {"$set": {"state": "undoing"}})
    for action in store.teardown(dry_run=dry_run, fields=True, throttle=throttle, progress=progress):
        log(str(action))
    log(f"forget the plan in {PLANS}")
    if dry_run:
        return []
    left = _left(store, plan)
    if not left:
        plans = database[PLANS]
        plans.delete_one({"_id": plan.id})
        if plans.find_one() is None:
            plans.drop()
    return left


def _left(store: Store, plan: AdoptionPlan) -> list[str]:
    """The fields of the plan that documents hold again."""
    lines = []
    for entry in store.graph.entries.values():
        for path in [*plan.draft.fields(entry.collection), RESERVED]:
            number = store.database[entry.collection].count_documents({path: {"$exists": True}})
            if number:
                lines.append(
                    f"{number:,} documents of {entry.collection} hold {path} again: a program writes it back "
                    "with whole documents that it had read. Stop or restart that program, then run treadle "
                    "undo again."
                )
    return lines
