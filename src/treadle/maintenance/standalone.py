"""Maintenance on a server without transactions.

An intent is written first. Then the source is written, then everything that
it feeds is recomputed from the sources, then the intent goes. Deltas have no
place here: without a transaction nobody could tell whether one was applied.

Two recomputations of one target may overlap. Each reads the target's
revision, then the sources, and writes only if the revision is still the one
it read; so the last to write has seen everything that was there before it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bson import ObjectId

from treadle.canonical import same
from treadle.deletes import DeleteManyDocuments, DeleteOneDocument, cut, refuse_if_referred
from treadle.errors import DataError
from treadle.gather import freeze
from treadle.maintenance.fill import fill_references
from treadle.maintenance.intents import COLLECTION
from treadle.maintenance.ledger import Ledger
from treadle.maintenance.react import formula_stages, stamps_of, update_copies, update_pipeline
from treadle.maintenance.recompute import recompute
from treadle.paths import has, put, value_at
from treadle.pattern import REVISION
from treadle.plan import Plan, Raw, by_id, delete_one, find, find_one, update_one, wait
from treadle.topology import Topology
from treadle.writes import Insert, Replace, UpdateManyDocuments, UpdateOneDocument, Work, only

if TYPE_CHECKING:
    from treadle.graph import Entry, Graph
    from treadle.patterns.extended_reference import ReferenceRule

ATTEMPTS_MAX = 200
PAUSE_SECONDS = 0.002
PAUSE_MAX_SECONDS = 0.2
CHAIN_MAX = 20


def perform(graph: Graph, server: Topology, work: Work[Any], owner: str) -> Plan[Any]:
    """One write with its maintenance, under an intent."""
    if isinstance(work, Insert):
        return (yield from _insert(graph, server, work, owner))
    if isinstance(work, UpdateManyDocuments):
        return (yield from _each(graph, server, work, owner))
    if isinstance(work, DeleteManyDocuments):
        return (yield from _each(graph, server, work, owner))
    return (yield from _one(graph, server, work, owner))


def _insert(graph: Graph, server: Topology, work: Insert[Any], owner: str) -> Plan[list[Raw]]:
    keys = [raw["_id"] for raw in work.raws]
    intent = yield from _record(work.entry, keys, {}, owner)
    try:
        yield from work.body(graph, server, Ledger())
    except Exception:
        # Some of them may be stored all the same.
        yield from redo(graph, server, intent)
        yield from delete_one(COLLECTION, {"_id": intent["_id"]})
        raise
    yield from redo(graph, server, intent)
    yield from delete_one(COLLECTION, {"_id": intent["_id"]})
    found = yield from find(work.entry.collection, {"_id": {"$in": keys}})
    by_key = {freeze(each["_id"]): each for each in found}
    return [by_key.get(freeze(raw["_id"]), raw) for raw in work.raws]


def _one(graph: Graph, server: Topology, work: Any, owner: str) -> Plan[Any]:
    """An update, replacement or deletion of one document."""
    entry: Entry[Any] = work.entry
    condition = by_id(work.raw["_id"]) if isinstance(work, Replace) else work.filter
    for attempt in range(ATTEMPTS_MAX):
        before = yield from find_one(entry.collection, condition)
        if before is None:
            if isinstance(work, Replace):
                yield from work.body(graph, server, Ledger())
            return None
        if isinstance(work, DeleteOneDocument):
            yield from _check_restrictions(entry, before["_id"])
        intent = yield from _record(entry, [before["_id"]], _keys_of(entry, before), owner)
        # The write must meet the document that the intent speaks of.
        matched = yield from _write(work, {"$and": [_unmoved(entry, before), condition]}, before)
        if matched:
            yield from redo(graph, server, intent)
            yield from delete_one(COLLECTION, {"_id": intent["_id"]})
            if isinstance(work, DeleteOneDocument):
                return before
            return (yield from find_one(entry.collection, by_id(before["_id"])))
        yield from delete_one(COLLECTION, {"_id": intent["_id"]})
        yield from wait(_pause(attempt))
    raise _starved(entry)


def _write(work: Any, condition: Raw, before: Raw) -> Plan[bool]:
    entry: Entry[Any] = work.entry
    if isinstance(work, UpdateOneDocument):
        result = yield from update_one(entry.collection, condition, work.update)
        return bool(result.matched_count)
    if isinstance(work, Replace):
        result = yield from update_one(entry.collection, condition, _replacement(entry, work.raw, before))
        return bool(result.matched_count)
    deleted = yield from delete_one(entry.collection, condition)
    return bool(deleted.deleted_count)


def _replacement(entry: Entry[Any], raw: Raw, before: Raw) -> list[Raw]:
    """A pipeline that replaces what is the caller's and keeps the rest as it is by then."""
    kept = {
        path: f"$__before.{path}"
        for path in entry.protected
        if path.split(".")[0] != path or has(before, [path])
    }
    references = {rule.path for rule in entry.references}
    kept = {path: value for path, value in kept.items() if path not in references}
    owned = {name: value for name, value in raw.items() if name not in kept}
    return [
        {
            "$replaceWith": {
                "$mergeObjects": [{"$literal": owned}, {"__before": "$$ROOT", "_treadle": "$_treadle"}]
            }
        },
        *([{"$set": kept}] if kept else []),
        {"$unset": "__before"},
    ]


def _each(graph: Graph, server: Topology, work: Any, owner: str) -> Plan[int]:
    """A bulk write, one document at a time."""
    entry: Entry[Any] = work.entry
    found = yield from find(entry.collection, only(work.filter, work.keys), {"_id": 1})
    done = 0
    for each in found:
        single: Any
        condition = {"$and": [by_id(each["_id"]), work.filter]}
        if isinstance(work, UpdateManyDocuments):
            single = copy.copy(work)
            single.__class__ = UpdateOneDocument
        else:
            single = DeleteOneDocument.__new__(DeleteOneDocument)
            single.entry = entry
        single.filter = condition
        done += (yield from _one(graph, server, single, owner)) is not None
    return done


def _check_restrictions(entry: Entry[Any], key: Any) -> Plan[None]:
    for rule in entry.feeds_references:
        if rule.on_delete == "restrict":
            yield from refuse_if_referred(rule, {rule.reference_path: {"$eq": key}})


def _keys_of(entry: Entry[Any], before: Raw) -> dict[str, list[Any]]:
    """The targets that a document feeds, by rule; whether its condition holds does not matter."""
    return {rule.place.label: [key for key, _ in rule.contributions(before)] for rule in entry.feeds_gathers}


def _unmoved(entry: Entry[Any], before: Raw) -> Raw:
    """That the document still feeds the targets which it fed when it was read."""
    condition: Raw = by_id(before["_id"])
    for rule in entry.feeds_gathers:
        top = rule.by.steps[0].stored
        condition[top] = {"$eq": before[top]} if top in before else {"$exists": False}
    return condition


def _record(entry: Entry[Any], keys: Sequence[Any], feeds: dict[str, list[Any]], owner: str) -> Plan[Raw]:
    identity = {"kind": "write", "n": ObjectId()}
    intent = {"collection": entry.collection, "keys": list(keys), "feeds": feeds, "owner": owner}
    yield from update_one(
        COLLECTION, {"_id": identity}, {"$setOnInsert": intent, "$currentDate": {"at": True}}, upsert=True
    )
    return {"_id": identity, **intent}


def _pause(attempt: int) -> float:
    return min(PAUSE_SECONDS * float(attempt + 1), PAUSE_MAX_SECONDS)


def _starved(entry: Entry[Any]) -> DataError:
    return DataError(
        f"{entry.model.__name__} changed {ATTEMPTS_MAX} times while it was being written; "
        "try again when fewer writers are at it",
        code="write-contended",
    )


# -- recomputation -----------------------------------------------------------------------------


def redo(graph: Graph, server: Topology, intent: Raw) -> Plan[None]:
    """Bring right everything that the documents of an intent are and feed."""
    entry = graph.by_collection[intent["collection"]]
    pending: list[tuple[Entry[Any], Any, dict[str, list[Any]]]] = [
        (entry, key, intent["feeds"]) for key in intent["keys"]
    ]
    for _ in range(CHAIN_MAX):
        following: list[tuple[Entry[Any], Any, dict[str, list[Any]]]] = []
        for each, key, feeds in pending:
            changed = yield from _redo_one(server, each, key, feeds)
            following.extend((target, target_key, {}) for target, target_key in changed if target.feeds)
        if not following:
            return
        distinct = {(each.collection, freeze(key)): (each, key, feeds) for each, key, feeds in following}
        pending = list(distinct.values())


def _redo_one(
    server: Topology, entry: Entry[Any], key: Any, feeds: dict[str, list[Any]]
) -> Plan[list[tuple[Entry[Any], Any]]]:
    """Recompute a document and its targets; the targets that changed."""
    yield from refresh(server, entry, key)
    document = yield from find_one(entry.collection, by_id(key))
    changed: list[tuple[Entry[Any], Any]] = []
    targets: dict[tuple[str, Any], tuple[Entry[Any], Any]] = {}
    for rule in entry.feeds_gathers:
        current = [target for target, _ in rule.contributions(document)]
        for target_key in [*feeds.get(rule.place.label, []), *current]:
            targets[(rule.target.collection, freeze(target_key))] = (rule.target, target_key)
    for target, target_key in targets.values():
        if (yield from refresh(server, target, target_key)):
            changed.append((target, target_key))
    for reference in entry.feeds_references:
        changed.extend((yield from _copy_until_stable(server, reference, key)))
    return changed


def refresh(server: Topology, entry: Entry[Any], key: Any) -> Plan[bool]:
    """Recompute everything that one document maintains; whether it changed."""
    if not entry.rules:
        return False
    for attempt in range(ATTEMPTS_MAX):
        document = yield from find_one(entry.collection, by_id(key))
        if document is None:
            return False
        wanted = copy.deepcopy(document)
        if entry.gathers:
            values = yield from recompute(entry.gathers, [key], server.version)
            for path, value in values[freeze(key)].items():
                put(wanted, path.split("."), value)
        yield from fill_references(entry, [(document, wanted)])
        paths = {path for rule in entry.gathers for path in rule.empty()}
        sets = {path: {"$literal": value_at(wanted, path.split("."))} for path in paths}
        for rule in entry.references:
            top = rule.steps[0].stored if rule.steps else rule.name
            if top in wanted:
                sets[top] = {"$literal": wanted[top]}
        changed = any(
            not same(value_at(document, path.split(".")), value["$literal"]) for path, value in sets.items()
        )
        revision = value_at(document, REVISION.split("."))
        unchanged: Raw = {"_id": {"$eq": key}, REVISION: {"$eq": revision} if revision is not None else None}
        for rule in entry.references:
            top = rule.steps[0].stored if rule.steps else rule.name
            reference_top = rule.reference_path.split(".")[0]
            for name in {top, reference_top}:
                unchanged[name] = {"$eq": document[name]} if name in document else {"$exists": False}
        stamps = stamps_of(entry.gathers) if changed else {}
        # Written even where nothing changes: a slower writer must notice.
        result = yield from update_one(
            entry.collection, unchanged, update_pipeline(entry, {**sets, **stamps}, {})
        )
        if result.matched_count:
            return changed or bool(formula_stages(entry))
        yield from wait(_pause(attempt))
    raise _starved(entry)


def _copy_until_stable(server: Topology, rule: ReferenceRule, key: Any) -> Plan[list[tuple[Entry[Any], Any]]]:
    """Copy a source until it is no longer changed by somebody else meanwhile."""
    condition = {rule.reference_path: {"$eq": key}}
    source = yield from find_one(rule.source.collection, by_id(key))
    for attempt in range(ATTEMPTS_MAX):
        if source is None:
            return (yield from _after_deletion(server, rule, key))
        if rule.synced:
            yield from update_copies(rule, key, source, {})
        again = yield from find_one(rule.source.collection, by_id(key))
        if again is not None and not rule.changed(source, again):
            break
        source = again
        yield from wait(_pause(attempt))
    found = (
        yield from find(rule.target.collection, condition, {"_id": 1}) if rule.target.feeds else _nothing()
    )
    return [(rule.target, each["_id"]) for each in found]


def _nothing() -> Plan[list[Raw]]:
    return []
    yield  # pragma: no cover


def _after_deletion(server: Topology, rule: ReferenceRule, key: Any) -> Plan[list[tuple[Entry[Any], Any]]]:
    """Do as `on_delete` says, again where it was interrupted."""
    if rule.on_delete not in ("clear", "cascade"):
        return []
    changed: list[tuple[Entry[Any], Any]] = []
    found: Iterable[Raw] = yield from find(rule.target.collection, {rule.reference_path: {"$eq": key}})
    for before in found:
        if rule.on_delete == "cascade" and not rule.place.in_array:
            feeds = _keys_of(rule.target, before)
            yield from delete_one(rule.target.collection, by_id(before["_id"]))
            yield from _redo_one(server, rule.target, before["_id"], feeds)
        else:
            after = copy.deepcopy(before)
            cut(rule, after, {freeze(key)})
            sets = {name: {"$literal": value} for name, value in after.items() if before.get(name) != value}
            yield from update_one(rule.target.collection, by_id(before["_id"]), [{"$set": sets}])
            yield from _redo_one(server, rule.target, before["_id"], _keys_of(rule.target, before))
        changed.append((rule.target, before["_id"]))
    return changed
