"""Trying documents that were set aside again.

A document that was set aside is tried again by `recover`, `repair` and
`rebuild`, and by the worker when it has nothing else to do, each time after a
longer pause. One that fails again is recorded once more; the row of one that
does not is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from treadle.engine.copies import FanOut
from treadle.engine.fan_outs import finish
from treadle.engine.propagate import targets_of
from treadle.graph.derived import aggregates_of, copies_in, copies_of
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.quarantine import SET_ASIDE, around
from treadle.plan import Plan, Raw, by_id, delete_one, find
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import distinct, freeze
from treadle.upkeep.apply import apply
from treadle.upkeep.dirty import Dirty
from treadle.upkeep.rebuild import repair_documents

# Documents that were set aside and are tried again at a time.
SET_ASIDE_RETRIED_MAX = 1_000

# Documents that could not be migrated are tried again by migrate(retry=True).
NOT_MIGRATIONS: Raw = {"_id.rule": {"$not": {"$regex": "^migrate "}}}
# After each attempt twice as long as before, up to an hour.
_PAUSE = {"$multiply": [1000, {"$min": [3600, {"$pow": [2, {"$min": ["$attempts", 12]}]}]}]}
DUE: Raw = {"$expr": {"$lt": [{"$add": ["$at", _PAUSE]}, "$$NOW"]}}


def retry_all(graph: Graph, server: Capabilities, *, due: bool = False) -> Plan[int]:
    """Try what was set aside again, or what is due for it; how many documents came in."""
    chosen: list[Raw] = [NOT_MIGRATIONS, {"_id.collection": {"$in": list(graph.by_collection)}}]
    rows = yield from _rows(graph, [*chosen, DUE] if due else chosen)
    done = 0
    for row in rows:
        done += yield from retry(graph, server, row)
    return done


def settling(graph: Graph, server: Capabilities, entries: Iterable[ModelEntry], work: Plan[int]) -> Plan[int]:
    """Perform work on all documents of some models, and delete the rows that it has settled."""
    listed = list(entries)
    collections = {each for entry in listed for each in _read_by(entry)}
    # Some are of collections that have no model, such as those from which readings are adopted.
    own = [{"_id.collection": {"$in": sorted(collections)}}]
    own.append({"_id.rule": {"$in": [entry.model.__name__ for entry in listed]}})
    chosen = [NOT_MIGRATIONS, {"$or": own}]
    before = {freeze(row["_id"]): row for row in (yield from _rows(graph, chosen))}
    done = yield from work
    for row in (yield from _rows(graph, chosen)) if before else ():
        noted = before.get(freeze(row["_id"]))
        if noted is not None and noted.get("attempts") == row.get("attempts"):
            if _is_named(graph, row):
                yield from retry(graph, server, row)
            else:
                # The work covered every document, and this one did not fail.
                yield from _delete(row)
    return done


def _rows(graph: Graph, conditions: Sequence[Raw]) -> Plan[list[Raw]]:
    most = SET_ASIDE_RETRIED_MAX
    return find(SET_ASIDE, {"$and": list(conditions)}, sort=[("at", 1)], limit=most)


def _read_by(entry: ModelEntry) -> set[str]:
    """The collections that the rules of a model write and read."""
    return {entry.collection}.union(*(rule.reads() for rule in entry.rules))


def _is_named(graph: Graph, row: Raw) -> bool:
    """Whether a row names a document that can be tried by itself."""
    entry = graph.by_collection.get(row["_id"]["collection"])
    named = not row.get("as_text") and row["_id"]["key"] is not None
    return named and entry is not None and entry.layout is None


def _delete(row: Raw) -> Plan[bool]:
    """Delete a row, unless its document was set aside once more."""
    unchanged = {"_id": {"$eq": row["_id"]}, "attempts": row.get("attempts")}
    return bool((yield from delete_one(SET_ASIDE, unchanged)).deleted_count)


def retry(graph: Graph, server: Capabilities, row: Raw) -> Plan[bool]:
    """Try one document again; whether it came in, so that its row is gone."""
    if not _is_named(graph, row):
        return False
    identity = row["_id"]
    collection, key = identity["collection"], identity["key"]
    bringing = _bring_in(graph, server, graph.by_collection[collection], key)
    yield from around(identity["rule"], collection, key, bringing)
    return (yield from _delete(row))


def _bring_in(graph: Graph, server: Capabilities, entry: ModelEntry, key: Any) -> Plan[None]:
    """Recompute what a document derives from others, and what others derive from it."""
    yield from _mend(graph, server, entry, [key])
    if entry.rules.group is not None:
        return
    for image in (yield from entry.kinds.root.targets.with_deleted.find(by_id(key))):
        document = image.document
        yield from _detach(graph, server, entry.kinds.of(document), document)
        for rule in copies_of(entry):
            if not (rule.copied.synced and rule.source.targets.admits(document)):
                continue
            fan_out = FanOut(rule, rule.unique_key(document))
            yield from finish(graph, fan_out, {"after": None, "n": -1})
        for rule in aggregates_of(entry):
            yield from _mend(graph, server, rule.target, (yield from targets_of(rule, [document])))


def _mend(graph: Graph, server: Capabilities, entry: ModelEntry, keys: Sequence[Any]) -> Plan[None]:
    """Repair documents of a model and of the kinds below it."""
    if entry.rules.group is not None:
        yield from repair_documents(graph, server, entry, keys)
        return
    root = entry.kinds.root
    images = yield from root.targets.with_deleted.find({"_id": {"$in": list(keys)}})
    for exact, own in root.kinds.split(image.document for image in images):
        yield from repair_documents(graph, server, exact, [each["_id"] for each in own])


def _detach(graph: Graph, server: Capabilities, entry: ModelEntry, document: Raw) -> Plan[None]:
    """Do as `on_delete` says where a source is gone to which the document still refers."""
    dirty = Dirty()
    for rule in copies_in(entry, "stream"):
        references = distinct(slot.key for slot in rule.slots(document) if slot.key is not None)
        if rule.on_delete == "keep" or not references:
            continue
        there = yield from find(rule.source.collection, rule.sources_of(references), {rule.match.path: 1})
        present = set(map(freeze, rule.unique_keys(there)))
        gone = [key for key in references if freeze(key) not in present]
        if gone:
            dirty.gone[rule] = gone
    if dirty.gone:
        yield from apply(graph, server, dirty, _nothing, _nothing)


def _nothing() -> Plan[None]:
    yield from ()
