"""What a database was like before a plan: options, indexes and names, written down before anything changes.

The row of a plan in `treadle.plans` holds this, and which steps are done. So
a plan that was killed goes on where it was, on any machine, and `undo` knows
what to take back.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pymongo.database import Database
from pymongo.errors import DuplicateKeyError

from treadle.advisor.plans.folder import ChangePlan
from treadle.engine.indexes import compare_indexes
from treadle.errors import DataError, UsageError
from treadle.store.blocking.store import Store
from treadle.upkeep.set_up import maintenance_indexes

PLANS = "treadle.plans"
# Per collection the former values of the fields that the plan takes over.
FORMER = "treadle.former."
RESERVED = "_treadle"
SECONDS_MAX = 600
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


def check(store: Store, plan: ChangePlan) -> None:
    """Refuse what would not be exact to take back; nothing is changed yet."""
    database = store.database
    existing = options_of(database)
    for entry in store.graph.entries.values():
        if existing.get(entry.collection, {}).get("type") != "collection":
            raise DataError(
                f"The plan is about the collection {entry.collection}, which {database.name} does not have; "
                "is this the database that was scanned?",
                code="plan-other-database",
            )
    ours = sorted(name for name in existing if name.startswith("treadle."))
    if ours:
        others = [each["_id"] for each in database[PLANS].find({}, {"_id": 1}).limit(1)]
        advice = (
            "another plan is applied there; undo it first, or make one plan for both"
            if others
            else "add the declarations of models.py to the models of your application instead"
        )
        raise UsageError(
            f"{database.name} is maintained by Treadle already ({ours[0]}); {advice}.",
            code="plan-treadle-in-use",
        )
    for entry in store.graph.entries.values():
        fields = [*plan.fields(entry.collection, adopted=False), RESERVED]
        refused = _refused_fields(existing[entry.collection]["options"], fields)
        if refused:
            raise DataError(
                f"The validator of {entry.collection} lets no field {' or '.join(refused)} in "
                "(additionalProperties: false), and a plan changes no validator; add them to its properties.",
                code="plan-field-refused",
            )
        for field in fields:
            found = database[entry.collection].find_one(
                {field: {"$exists": True}}, {"_id": 1}, max_time_ms=SECONDS_MAX * 1000
            )
            if found is not None:
                raise DataError(
                    f"{entry.collection}.{field} holds data since the plan was made, which it would "
                    "overwrite; make the plan anew, or rename that field.",
                    code="plan-field-taken",
                )


def _refused_fields(options: Row, fields: list[str]) -> list[str]:
    """The fields that a collection's own validator does not know, where it refuses such."""
    schema = options.get("validator", {}).get("$jsonSchema", {})
    enforced = options.get("validationAction") != "warn" and options.get("validationLevel") != "off"
    if not enforced or schema.get("additionalProperties") is not False:
        return []
    patterns = schema.get("patternProperties", {})
    unknown = [each for each in fields if each not in schema.get("properties", {})]
    return [each for each in unknown if not any(re.search(pattern, each) for pattern in patterns)]


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
        made[entry.collection] = [index.document["name"] for index in missing]
    row: Row = {
        "_id": plan.id,
        "state": "applying",
        "begun": datetime.now(UTC),
        "done": [],
        "collections": collections,
        "indexes_made": made,
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


def mark(database: Database[Any], plan: ChangePlan, **sets: Any) -> None:
    database[PLANS].update_one({"_id": plan.id}, {"$set": sets})


def step_done(database: Database[Any], plan: ChangePlan, name: str) -> None:
    database[PLANS].update_one({"_id": plan.id}, {"$addToSet": {"done": name}})
