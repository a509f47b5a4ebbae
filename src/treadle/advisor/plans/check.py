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
    before.require_no_other(database, plan.id)
    _check_application(database, existing)
    for entry in store.graph.entries.values():
        new = plan.fields(entry.collection)
        refused = _refused_fields(existing[entry.collection]["options"], [*new, before.RESERVED])
        if refused:
            raise DataError(
                f"The validator of {entry.collection} does not allow {' or '.join(refused)} "
                "(additionalProperties: false), and a plan changes no validator; add them to its properties.",
                code="plan-field-refused",
            )
        _check_fields(database, entry.collection, new)


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


def _check_fields(database: Database[Any], collection: str, fields: list[str]) -> None:
    for field in [*fields, before.RESERVED]:
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
