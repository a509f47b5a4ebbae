"""A plan carried out on a live database: `setup`, `rebuild`, a worker, `verify`.

Writers that know nothing of it continue. What they change after the fill began is in the change stream, and
the worker applies it before the values are verified. Each of these calls can be repeated, so an apply that
was killed is run again from the top: set-up finds its work done, and a fill continues at its page.

`treadle.plans` holds one row per plan, written before the first change: `_id`, `state`, `begun` and the
models that are filled. It is data; nothing in it is ever executed.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pymongo.database import Database
from pymongo.errors import PyMongoError

from treadle.advisor.loop.plan import AdoptionPlan
from treadle.advisor.model_text import load_models
from treadle.errors import DataError, TreadleError, UsageError
from treadle.graph.limits import Limits
from treadle.graph.outcomes import Finding, Progress
from treadle.model.bson_types import RESERVED
from treadle.model.document import Document
from treadle.plan.capabilities import REPLICA_SET_OF_ONE
from treadle.store.blocking.store import Store
from treadle.upkeep import position
from treadle.upkeep.jobs import Throttle
from treadle.upkeep.rebuild import in_order

PLANS = "treadle.plans"
FINDINGS_NAMED_MAX = 5
CHECK_SECONDS_MAX = 600
# Larger pages than usual: a whole collection is read, and few writers conflict with it.
LIMITS = Limits(rebuild_page=500, verify_page=2_000, gentle_page=200, gentle_rest_min=2.0)

Log = Callable[[str], None]
Report = Callable[[Progress], None]
Row = dict[str, Any]


def silent(text: str) -> None:
    """A log that is not read."""


def apply(
    database: Database[Any],
    plan: AdoptionPlan,
    *,
    throttle: Throttle = None,
    log: Log = silent,
    progress: Report | None = None,
    limits: Limits = LIMITS,
) -> None:
    """Carry out what is not done yet. What could not be taken back exactly is refused first."""
    store = open_store(database, plan, limits)
    row = _row_to_continue(store, plan)
    _require_streams(store)
    if row is None:
        check(store, plan)
        row = {"_id": plan.id, "state": "applying", "begun": datetime.now(UTC), "filled": []}
        database[PLANS].insert_one(row)
    for action in store.setup(validation="keep"):
        log(f"set up: {action}")
    for model in filled_models(store, plan):
        if model.__name__ not in row["filled"]:
            log(f"fill {store.collection(model).name}")
            store.rebuild(model, resume=True, throttle=throttle, progress=progress)
            database[PLANS].update_one({"_id": plan.id}, {"$addToSet": {"filled": model.__name__}})
    log("verify")
    findings = verify(store, throttle=throttle, progress=progress)
    _require_verified(findings, log)
    database[PLANS].update_one({"_id": plan.id}, {"$set": {"state": "applied"}})


def apply_dry_run(database: Database[Any], plan: AdoptionPlan) -> list[str]:
    """List what `apply` would do, after the same checks; nothing is changed."""
    store = open_store(database, plan)
    if _row_to_continue(store, plan) is None:
        _require_streams(store)
        check(store, plan)
    lines = []
    for step in plan.steps:
        lines.append(f"{step.name}: {step.what}")
        if step.kind == "set up":
            lines += [f"  {action}" for action in store.setup(dry_run=True, validation="keep")]
        elif step.kind == "fill":
            lines.append(f"  {step.documents:,} documents, about {step.seconds:,.0f} s.")
        lines.append(f"  To undo: {step.undo}")
    return lines


def open_store(database: Database[Any], plan: AdoptionPlan, limits: Limits = LIMITS) -> Store:
    """The Store of a plan; refuses another database than the one that the plan was made for."""
    if database.name != plan.database:
        raise UsageError(
            f"The plan was made for the database {plan.database}, and the URI names {database.name}; "
            "make a plan for that one.",
            code="plan-other-database",
        )
    return Store(database, models=load_models(plan.models), limits=limits)


def filled_models(store: Store, plan: AdoptionPlan) -> list[type[Document]]:
    """The models whose fields are filled, those first from which others are made."""
    entries = in_order(store.graph.entries.values())
    return [entry.model for entry in entries if plan.draft.fields(entry.collection)]


def row_of(database: Database[Any], plan: AdoptionPlan) -> Row | None:
    """What is recorded of this plan; None where it was never begun, or was undone."""
    return database[PLANS].find_one({"_id": plan.id})


def _row_to_continue(store: Store, plan: AdoptionPlan) -> Row | None:
    row = row_of(store.database, plan)
    if row is not None and row["state"] == "applied":
        raise UsageError(
            f"This plan is applied to {store.database.name} already; treadle prove shows what it gains, "
            "treadle undo takes it back.",
            code="plan-applied",
        )
    if row is not None and row["state"] == "undoing":
        raise UsageError(
            "This plan is half undone; finish with treadle undo, then apply it again.",
            code="plan-half-undone",
        )
    return row


def _require_streams(store: Store) -> None:
    try:
        store._capabilities()
    except TreadleError as error:
        if error.code not in ("transactions-needed", "streams-unavailable"):
            raise
        raise UsageError(
            "The plan follows the change stream, which this server does not have, as it is not a replica "
            f"set; {REPLICA_SET_OF_ONE}.",
            code="plan-needs-stream",
        ) from None


# -- proof ---------------------------------------------------------------------------------


def verify(store: Store, throttle: Throttle = None, progress: Report | None = None) -> list[Finding]:
    """The findings of `verify` while a worker follows: one that leads already, or one for this time."""
    # Named, so that teardown knows whose verification it was.
    check = partial(store.verify, *store.graph.entries, throttle=throttle, progress=progress)
    if not any(rule.maintain == "stream" for rule in store.graph.rules):
        return check()
    with following(store):
        return check()


@contextlib.contextmanager
def following(store: Store) -> Iterator[None]:
    """Let a worker follow the change stream in a thread; one that leads in another process stays leader."""
    with contextlib.suppress(DataError):
        # Without a worker elsewhere, what was written up to now is applied first.
        store.worker().run_until_idle()
    worker = store.worker()
    thread = threading.Thread(target=_run, args=(worker.run,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join()


def _run(work: Callable[[], None]) -> None:
    # Without a worker, verify reports what is late, so that nothing is lost by this.
    with contextlib.suppress(PyMongoError, TreadleError):
        work()


def _require_verified(found: list[Finding], log: Log) -> None:
    findings = [each for each in found if each.pattern != "set-aside"]
    if len(found) > len(findings):
        log(f"set aside, and not computed: {len(found) - len(findings):,}")
    if findings:
        listed = "; ".join(f"{each.model} {each.path}" for each in findings[:FINDINGS_NAMED_MAX])
        raise DataError(
            f"{len(findings):,} values are not what they should be: {listed}. Run treadle apply again, "
            "or treadle undo.",
            code="plan-not-verified",
        )


# -- what could not be taken back exactly ------------------------------------------------------


def check(store: Store, plan: AdoptionPlan) -> None:
    """Refuse what would not be exact to take back; nothing is changed yet."""
    database = store.database
    existing = {each["name"]: each for each in database.list_collections()}
    for entry in store.graph.entries.values():
        if existing.get(entry.collection, {}).get("type") != "collection":
            raise DataError(
                f"The plan is about the collection {entry.collection}, which {database.name} does not have; "
                "is this the database that was scanned?",
                code="plan-other-database",
            )
    require_no_other(database, plan.id)
    if database[position.COLLECTION].find_one({"rules.0": {"$exists": True}}) is not None:
        raise UsageError(
            f"The models of an application follow the changes of {database.name} already, and one worker "
            "follows a database; add the declarations of models.py to these models instead, then run "
            "setup(), rebuild() and that worker.",
            code="plan-treadle-in-use",
        )
    for entry in store.graph.entries.values():
        own = plan.draft.fields(entry.collection)
        refused = _refused_fields(existing[entry.collection].get("options", {}), [*own, RESERVED])
        if refused:
            raise DataError(
                f"The validator of {entry.collection} does not allow {' or '.join(refused)} "
                "(additionalProperties: false), and a plan changes no validator; add them to its properties.",
                code="plan-field-refused",
            )
        _check_fields(database, entry.collection, own)


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


def _check_fields(database: Database[Any], collection: str, fields: list[str]) -> None:
    """Refuse fields that hold data by now; one pass over the collection at most."""
    paths = [*fields, RESERVED]
    held = {"$or": [{path: {"$exists": True}} for path in paths]}
    shown = dict.fromkeys(paths, 1)
    found = database[collection].find_one(held, shown, max_time_ms=CHECK_SECONDS_MAX * 1000)
    if found is None:
        return
    if RESERVED in found:
        raise UsageError(
            f"The models of an application maintain documents of {collection} already; add the "
            "declarations of models.py to these models instead.",
            code="plan-treadle-in-use",
        )
    taken = next(path for path in fields if path in found)
    raise DataError(
        f"{collection}.{taken} was written after the plan was made, and the plan would overwrite it; "
        "rename that field, or make a new plan.",
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
