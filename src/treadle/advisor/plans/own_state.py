"""Treadle's own state of a plan, where an application on the same database has its own beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pymongo.database import Database

from treadle.advisor.plans import before
from treadle.advisor.plans.models import load_models
from treadle.engine import lease
from treadle.graph.quarantine import SET_ASIDE
from treadle.patterns.approximation import flush
from treadle.patterns.tree import state as tree_state
from treadle.upkeep import change_stream, closed, findings, fingerprints, jobs, position, setup_record

# What only a worker writes; where there was none before the plan, it came with it.
_OF_WORKER = (position.COLLECTION, change_stream.BEATS)
# What no plan writes; where there is any, an application has begun to use Treadle since.
_OF_OTHERS = (closed.COLLECTION, flush.LEDGER, tree_state.COLLECTION)


def is_alone(row: before.Row) -> bool:
    """Whether nobody else used Treadle on the database when the plan was applied."""
    return not any(name.startswith("treadle.") for name in row["before"]["names"])


def made(database: Database[Any], names: Iterable[str], row: before.Row) -> list[str]:
    """Treadle's own collections that came with the plan, among those that are there since."""
    ours = [name for name in names if name.startswith("treadle.") and name != before.PLANS]
    if is_alone(row):
        return [name for name in ours if name not in _OF_OTHERS or database[name].find_one() is None]
    return [name for name in ours if name in _OF_WORKER or database[name].find_one() is None]


def forget(database: Database[Any], row: before.Row) -> None:
    """Delete what is noted about the plan's rules and models, and nothing about those of others."""
    if is_alone(row):
        return
    rules, models = row["rules"], [model.__name__ for model in load_models(row["models"])]
    since = {"$gte": row["begun"]}
    others = {"models": {"$elemMatch": {"$nin": models}}}
    recorded = [*rules, *map(setup_record.row_name, row["collections"])]
    database[fingerprints.COLLECTION].delete_many({"_id": {"$in": recorded}})
    database[SET_ASIDE].delete_many({"_id.rule": {"$in": rules}})
    database[findings.COLLECTION].delete_many({"rule": {"$in": rules}})
    database[findings.VERIFICATIONS].delete_many({"_id": {"$in": models}, "at": since})
    database[jobs.COLLECTION].delete_many({"started": since, "$nor": [others]})
    # Whoever applies the plan again is not told that its values are there.
    database[position.COLLECTION].update_many({}, {"$pull": {"rules": {"$in": row["signatures"]}}})
    if position.COLLECTION not in row["before"]["names"]:
        database[lease.COLLECTION].delete_one({"_id": position.NAME})
