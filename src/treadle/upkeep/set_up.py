"""What `setup()` does: collections, validators and indexes, made to be as declared.

It reads what is there, changes what differs, and lists each change as an
`Action`. A second run finds nothing to do. What Treadle did not declare is
left alone. An index that conflicts with another is found before anything is
changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pymongo import IndexModel

from treadle.engine.indexes import (
    change_validator,
    compare_indexes,
    declared_indexes,
    existing_collections,
    existing_indexes,
    key_pairs,
    require_collection,
    serves_all,
    set_up_collection,
    set_up_indexes,
)
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Action
from treadle.graph.pattern import Entry
from treadle.plan import Plan, Raw, database_command
from treadle.plan.capabilities import read_capabilities
from treadle.plan.dry_run import dry
from treadle.upkeep import validation
from treadle.upkeep.change_stream import has_pre_images, keeps_former_states
from treadle.upkeep.collection_schema import collection_schema
from treadle.upkeep.events import Watch
from treadle.upkeep.late_data import needs_before


def setup(graph: Graph, dry_run: bool = False) -> Plan[list[Action]]:
    """Make the database as the models declare; the list of actions."""
    if dry_run:
        return (yield from dry(_setup(graph), []))
    return (yield from _setup(graph))


def _setup(graph: Graph) -> Plan[list[Action]]:
    server = graph.check_server((yield from read_capabilities()))
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
        yield from rule.before_setup(existing, missing)
    actions: list[Action] = []
    for entry in entries:
        if entry.layout is not None:
            yield from entry.layout.setup(existing, actions)
            continue
        yield from _set_up_collection(entry, existing.get(entry.collection), actions)
        yield from set_up_indexes(entry, missing[entry.collection], changes[entry.collection], actions)
    if keeps_former_states(server):
        # Elsewhere the worker keeps a ledger of contributions instead.
        yield from _keep_former_states(graph, existing, actions)
    return actions


def _keep_former_states(graph: Graph, existing: Mapping[str, Raw], actions: list[Action]) -> Plan[None]:
    """Let the server keep former states of documents where the worker has to know them."""
    for collection in sorted({*Watch(graph).needs_before(), *needs_before(graph)}):
        if not has_pre_images(existing.get(collection, {})):
            actions.append(Action("keep former states of", collection, "for the worker"))
            yield from database_command(
                {"collMod": collection, "changeStreamPreAndPostImages": {"enabled": True}}
            )


def _set_up_collection(entry: Entry[Any], existing: Raw | None, actions: list[Action]) -> Plan[None]:
    schema = None if entry.settings.validation == "off" else collection_schema(entry)
    change = yield from set_up_collection(entry, existing, schema, actions)
    if change is not None and not validation.is_newer(entry, change[0]["validator"]):
        detail = yield from validation.describe_change(entry, *change)
        yield from change_validator(entry, change[1], detail, actions)


def maintenance_indexes(graph: Graph, entry: Entry[Any], present: list[Raw]) -> list[IndexModel]:
    """The indexes that the patterns need on a collection, as far as no other serves."""
    declared = [index.document for index in declared_indexes(entry)]
    serving = [key_pairs(each) for each in [*present, *declared] if serves_all(each)]
    needed = [
        index
        for rule in graph.rules
        for source, index in rule.indexes()
        if source.collection == entry.collection
    ]
    # The longest first: an index also serves whatever its beginning serves.
    needed.sort(key=lambda index: -len(key_pairs(index.document)))
    missing = []
    for index in needed:
        keys = key_pairs(index.document)
        essential = keys[:-1] if keys[-1] == ("_id", 1) and len(keys) == 2 else keys
        if not any(each[: len(essential)] == essential for each in serving):
            missing.append(index)
            serving.append(keys)
    return missing
