"""What a plan is refused for, before anything changes: what would not be exact to take back."""

from __future__ import annotations

import re
from typing import Any

from pymongo.database import Database

from treadle.advisor.plans import before
from treadle.advisor.plans.folder import ChangePlan
from treadle.errors import DataError, UsageError
from treadle.store.blocking.store import Store

SECONDS_MAX = 600


def check(store: Store, plan: ChangePlan) -> None:
    """Refuse what would not be exact to take back; nothing is changed yet."""
    database = store.database
    existing = before.options_of(database)
    for entry in store.graph.entries.values():
        if existing.get(entry.collection, {}).get("type") != "collection":
            raise DataError(
                f"The plan is about the collection {entry.collection}, which {database.name} does not have; "
                "is this the database that was scanned?",
                code="plan-other-database",
            )
    others = {each["_id"]: each for each in database[before.PLANS].find({"_id": {"$ne": plan.id}})}
    _check_others(database.name, plan, others)
    if not others:
        _check_application(database, existing)
    maintained = {name for each in others.values() for name in each["collections"]}
    for entry in store.graph.entries.values():
        new = plan.fields(entry.collection, adopted=False)
        refused = _refused_fields(existing[entry.collection]["options"], [*new, before.RESERVED])
        if refused:
            raise DataError(
                f"The validator of {entry.collection} does not allow {' or '.join(refused)} "
                "(additionalProperties: false), and a plan changes no validator; add them to its properties.",
                code="plan-field-refused",
            )
        _check_fields(database, entry.collection, new, entry.collection in maintained)
    for collection in store.graph.sides:
        if collection in existing and not _is_of(others, collection):
            raise DataError(
                f"The plan is to make the collection {collection}, which exists by now; rename that one, or "
                "make a new plan.",
                code="plan-field-taken",
            )
    for step in plan.steps:
        if step.kind == "validate":
            entry = before.entry_named(store, step.about)
            if existing[entry.collection]["options"].get("validator"):
                raise DataError(
                    f"{entry.collection} was given a validator after the plan was made; make a new plan.",
                    code="plan-field-taken",
                )


def _check_others(database: str, plan: ChangePlan, others: dict[str, before.Row]) -> None:
    """Refuse what was applied since the plan was made, or is half done; those it was made on are welcome."""
    missing = [each for each in plan.on if each not in others]
    if missing:
        raise UsageError(
            f"The plan was made on top of another one, which was undone on {database} since; make it anew "
            "with treadle plan.",
            code="plan-treadle-in-use",
        )
    for identity, row in others.items():
        if row["state"] != "applied":
            raise before.half_done(database, row)
        if identity not in plan.on:
            raise UsageError(
                f"Another plan was applied to {database} (begun {row['begun']:%Y-%m-%d %H:%M}) since this "
                "one was made; make it anew with treadle plan, which builds on that, or undo that first.",
                code="plan-treadle-in-use",
            )


def _check_application(database: Database[Any], existing: dict[str, before.Row]) -> None:
    """Refuse a database whose application has a worker: one worker follows it, with one set of models."""
    followed = {"rules.0": {"$exists": True}}
    if before.STREAMS in existing and database[before.STREAMS].find_one(followed) is not None:
        raise UsageError(
            f"The models of an application follow the changes of {database.name} already, and one worker "
            "follows a database; add the declarations of models.py to these models instead, then run "
            "setup(), rebuild() and that worker.",
            code="plan-treadle-in-use",
        )


def _is_of(others: dict[str, before.Row], collection: str) -> bool:
    return any(collection in each.get("collections_made", ()) for each in others.values())


def _check_fields(database: Database[Any], collection: str, fields: list[str], maintained: bool) -> None:
    for field in fields if maintained else [*fields, before.RESERVED]:
        found = database[collection].find_one(
            {field: {"$exists": True}}, {"_id": 1}, max_time_ms=SECONDS_MAX * 1000
        )
        if found is None:
            continue
        if field == before.RESERVED:
            raise UsageError(
                f"The models of an application maintain documents of {collection} already; add the "
                "declarations of models.py to these models instead.",
                code="plan-treadle-in-use",
            )
        raise DataError(
            f"{collection}.{field} was written after the plan was made, and the plan would overwrite it; "
            "rename that field, or make a new plan.",
            code="plan-field-taken",
        )


def _refused_fields(options: before.Row, fields: list[str]) -> list[str]:
    """The fields that a collection's own validator does not know, where it refuses such."""
    schema = options.get("validator", {}).get("$jsonSchema", {})
    enforced = options.get("validationAction") != "warn" and options.get("validationLevel") != "off"
    if not enforced or schema.get("additionalProperties") is not False:
        return []
    patterns = schema.get("patternProperties", {})
    unknown = [each for each in fields if each not in schema.get("properties", {})]
    return [each for each in unknown if not any(re.search(pattern, each) for pattern in patterns)]
