"""What a database was like before a plan: options, indexes and names, written down before anything changes.

The row of a plan in `treadle.plans` holds this, and which steps are done. So
a plan that was killed goes on where it was, on any machine, and `undo` knows
what to take back.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pymongo.database import Database
from pymongo.errors import DuplicateKeyError

from treadle.advisor.plans.folder import ChangePlan
from treadle.engine.indexes import compare_indexes, maintenance_indexes
from treadle.errors import UsageError
from treadle.graph.model_entry import ModelEntry
from treadle.store.blocking.store import Store
from treadle.upkeep import position
from treadle.upkeep.position import signature

PLANS = "treadle.plans"
STREAMS = position.COLLECTION
RESERVED = "_treadle"
Row = dict[str, Any]


def options_of(database: Database[Any]) -> dict[str, Row]:
    """Every collection and view with its type and options."""
    return {
        each["name"]: {"type": each["type"], "options": each.get("options", {})}
        for each in database.list_collections()
    }


def indexes_of(database: Database[Any], collection: str) -> dict[str, Row]:
    return {each["name"]: dict(each) for each in database[collection].list_indexes()}


def row_of(database: Database[Any], plan: ChangePlan) -> Row | None:
    """What is known of this plan in this database; None where it was never begun, or was undone."""
    return database[PLANS].find_one({"_id": plan.id})


def require_database(database: Database[Any], plan: ChangePlan) -> None:
    """Refuse another database than the one that the plan was made for."""
    if database.name != plan.database:
        raise UsageError(
            f"The plan was made for the database {plan.database}, and the URI names {database.name}; "
            "make a plan for that one.",
            code="plan-other-database",
        )


def begin(store: Store, plan: ChangePlan) -> Row:
    """Write down what is there now, and what will be made; the row of the plan."""
    database = store.database
    collections = [entry.collection for entry in store.graph.entries.values()]
    existing = options_of(database)
    made = {}
    for entry in store.graph.entries.values():
        present = list(indexes_of(database, entry.collection).values())
        missing, _ = compare_indexes(entry, present)
        missing += maintenance_indexes(store.graph, entry, present)
        made[entry.collection] = [
            {"name": index.document["name"], "key": dict(index.document["key"])} for index in missing
        ]
    actions = store.setup(dry_run=True, validation="keep")
    rules = store.graph.rules
    row: Row = {
        "_id": plan.id,
        "state": "applying",
        "begun": datetime.now(UTC),
        "done": [],
        "collections": collections,
        "indexes_made": made,
        "images_made": [each.collection for each in actions if each.what == "keep former states of"],
        # By these its part of Treadle's own state is known.
        "rules": [rule.place.label for rule in rules],
        "signatures": [signature(rule) for rule in rules],
        # So that it can be undone whatever becomes of the folder's files.
        "places": [asdict(each) for each in plan.places],
        "models": plan.models,
        "before": {
            "names": sorted(existing),
            "options": [{"name": name, **existing[name]} for name in collections],
            "indexes": [
                {"name": name, "indexes": list(indexes_of(database, name).values())} for name in collections
            ],
        },
    }
    try:
        database[PLANS].insert_one(row)
    except DuplicateKeyError:
        return database[PLANS].find_one({"_id": plan.id}) or row
    return row


def require_no_other(database: Database[Any], identity: str | None = None) -> None:
    """Refuse a database to which another plan is applied, wholly or in part."""
    row = database[PLANS].find_one({"_id": {"$ne": identity}})
    if row is None:
        return
    begun = f"{row['begun']:%Y-%m-%d %H:%M}"
    if row["state"] != "applied":
        raise UsageError(
            f"A plan of {database.name} (begun {begun}) is half done; finish it with treadle apply, or take "
            "it back with treadle undo, in its own folder.",
            code="plan-treadle-in-use",
        )
    raise UsageError(
        f"Another plan is applied to {database.name} (begun {begun}); take it back with treadle undo in its "
        "folder, or make its models.py part of your application and declare more there.",
        code="plan-treadle-in-use",
    )


def entry_named(store: Store, name: str) -> ModelEntry:
    return next(entry for model, entry in store.graph.entries.items() if model.__name__ == name)


def mark(database: Database[Any], plan: ChangePlan, **sets: Any) -> None:
    database[PLANS].update_one({"_id": plan.id}, {"$set": sets})


def step_done(database: Database[Any], plan: ChangePlan, name: str) -> None:
    database[PLANS].update_one({"_id": plan.id}, {"$addToSet": {"done": name}})
