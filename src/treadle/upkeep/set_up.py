"""What `setup()` does: collections, validators and indexes, made to be as declared.

It reads what is there, changes what differs, and lists each change as an
`Action`. A second run finds nothing to do. What Treadle did not declare is
left alone. An index that conflicts with another is found before anything is
changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from pymongo import IndexModel

from treadle.engine.indexes import (
    change_validator,
    compare_indexes,
    existing_collections,
    existing_indexes,
    maintenance_indexes,
    require_collection,
    set_up_collection,
    set_up_indexes,
)
from treadle.errors import UsageError
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Action
from treadle.model.text import get_logger
from treadle.plan import Plan, Raw, create, database_command, find_one
from treadle.plan.capabilities import Capabilities, read_capabilities
from treadle.plan.dry_run import list_writes
from treadle.upkeep import fingerprints, setup_record, validation, zones
from treadle.upkeep.change_stream import has_pre_images
from treadle.upkeep.collection_schema import collection_schema
from treadle.upkeep.events import Watch
from treadle.upkeep.late_data import needs_before

log = get_logger(__name__)
# Whether validators that began with warnings are made binding, or those that are there are left alone.
Enforcement: TypeAlias = Literal["enforce", "keep"] | None

# The collections that transactions write to; see "State in the database" in docs/architecture.md.
STATE = frozenset(
    f"treadle.{name}"
    for name in (
        "batches",
        "guards",
        "intents",
        "leases",
        "set_aside",
        "streams",
        "verifications",
    )
)


def setup(graph: Graph, dry_run: bool = False, validation: Enforcement = None) -> Plan[list[Action]]:
    """Make the database as the models declare; the list of actions."""
    if validation not in (None, "enforce", "keep"):
        raise UsageError(
            f"setup has validation={validation!r}; it takes 'enforce', 'keep', or nothing",
            code="setup-invalid",
        )
    server = graph.check_server((yield from read_capabilities(graph.uses | {"validators"})))
    for zone, day in (yield from zones.wrong_zones(zones.declared_zones(graph))).items():
        log.warning("%s", zones.describe(zone, day))
    _warn_of_stored_filters(graph)
    yield from setup_record.require_known_format()
    plan = _setup(graph, server, validation)
    if dry_run:
        return (yield from list_writes(plan, [], server))
    return (yield from setup_record.recording(plan))


def _warn_of_stored_filters(graph: Graph) -> None:
    for entry in graph.by_collection.values():
        for step in entry.versions.steps_of_unknown_fields:
            text = "filters match outdated documents of %s as they are stored, because %s names no fields="
            log.warning(text, entry.model.__name__, step.label)


def _setup(graph: Graph, server: Capabilities, validation: Enforcement) -> Plan[list[Action]]:
    existing = yield from existing_collections()
    # One per collection; a family's root speaks for all its kinds.
    entries = [*graph.by_collection.values(), *graph.sides.values()]
    missing: dict[str, list[IndexModel]] = {}
    changes: dict[str, list[Raw]] = {}
    for entry in entries:
        if entry.layout is not None:
            continue
        if entry.collection in existing:
            require_collection(entry, existing[entry.collection])
            present = yield from existing_indexes(entry.collection)
        else:
            present = []
        missing[entry.collection], changes[entry.collection] = compare_indexes(entry, present)
        missing[entry.collection] += maintenance_indexes(graph, entry, present)
    for rule in graph.rules:
        check = rule.storage().check
        if check is not None:
            yield from check(existing, missing)
    actions: list[Action] = []
    for entry in entries:
        if entry.layout is not None:
            yield from entry.layout.setup(existing, actions)
            continue
        if validation != "keep" or entry.collection not in existing:
            enforce = validation == "enforce"
            now = existing.get(entry.collection)
            yield from set_up_validator(entry, server, now, actions, enforce=enforce)
        yield from set_up_indexes(entry, missing[entry.collection], changes[entry.collection], actions)
    if server.sharded or graph.shards.keys:
        # No collection is made inside a transaction over several shards.
        for name in sorted(STATE - existing.keys()):
            actions.append(Action("create collection", name, "for Treadle's own state"))
            yield from create(name)
    if server.pre_images:
        yield from _keep_former_states(graph, existing, actions)
    yield from fingerprints.compare(graph, actions)
    return actions


def _keep_former_states(graph: Graph, existing: Mapping[str, Raw], actions: list[Action]) -> Plan[None]:
    """Let the server keep former states of documents where the worker has to know them."""
    for collection in sorted({*Watch(graph).needs_before(), *needs_before(graph)}):
        if not has_pre_images(existing.get(collection, {})):
            actions.append(Action("keep former states of", collection, "for the worker"))
            yield from database_command(
                {"collMod": collection, "changeStreamPreAndPostImages": {"enabled": True}}
            )


def set_up_validator(
    entry: ModelEntry,
    server: Capabilities,
    existing: Raw | None,
    actions: list[Action],
    *,
    enforce: bool,
) -> Plan[None]:
    validated = entry.model.__treadle__.validation != "off" and server.validators
    schema = collection_schema(entry) if validated else None
    change = yield from set_up_collection(entry, existing, schema, actions)
    if change is None or validation.is_newer(entry, change[0]["validator"]):
        return
    now, options = change
    gently = not enforce and (yield from _begins_with_warnings(entry, now, options))
    if gently:
        options = {**options, "validationAction": "warn"}
        if now == options:
            return
    detail = yield from validation.describe_change(entry, now, options)
    if gently:
        detail += "; setup(validation='enforce') makes it binding"
        yield from fingerprints.begin_with_warnings(entry.collection)
    yield from change_validator(entry, options, detail, actions)


def _begins_with_warnings(entry: ModelEntry, now: Raw, options: Raw) -> Plan[bool]:
    """Whether a validator must not refuse anything yet: others write to a collection that had none."""
    if not options["validator"] or options["validationAction"] != "error":
        return False
    if now["validator"]:
        return now["validationAction"] == "warn" and (yield from fingerprints.warns(entry.collection))
    return (yield from find_one(entry.collection, {}, {"_id": 1})) is not None
