"""A ledger of contributions: which targets each source fed when the worker last saw it.

A deletion's event carries only the document's id. Where the server keeps no
former states of documents (before 6.0, or where set-up could not turn them
on), this is how the worker knows which targets a source has left. A row is
written in the transaction that moves the worker's position, never before the
targets themselves have followed. It may name a target too many, which costs a
recomputation; never one too few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pymongo import DeleteOne, UpdateOne

from treadle.gather import GatherRule, freeze
from treadle.maintenance.events import Doubt
from treadle.plan import Plan, Raw, aggregate, bulk_write, delete_many, find

if TYPE_CHECKING:
    from treadle.graph import Entry

COLLECTION = "treadle.contributions"
PAGE = 1000


def settle(doubt: Doubt) -> Plan[list[Any]]:
    """Mark what changed sources fed and feed; the writes that bring the ledger up to date."""
    if not doubt.entries:
        return []
    names = {freeze(name): name for name in (_name(rule.source, key) for rule, key, _ in doubt.entries)}
    rows: dict[Any, dict[str, dict[Any, Any]]] = {}
    for row in (yield from find(COLLECTION, {"_id": {"$in": list(names.values())}})):
        rows[freeze(row["_id"])] = {
            each["rule"]: {freeze(key): key for key in each["keys"]} for each in row["fed"]
        }
    for rule, source, fed in doubt.entries:
        known = rows.setdefault(freeze(_name(rule.source, source)), {})
        before = known.get(rule.place.label, {})
        now = {freeze(key): key for key in fed.keys}
        for key in {**before, **now}.values():
            doubt.mark(rule.target, key, sourced=True)
        known[rule.place.label] = now if fed.exact else {**before, **now}
    return [_write(names[frozen], known) for frozen, known in rows.items()]


def _name(source: Entry[Any], key: Any) -> Raw:
    return {"collection": source.collection, "id": key}


def _write(name: Raw, known: dict[str, dict[Any, Any]]) -> Any:
    fed = [{"rule": label, "keys": list(keys.values())} for label, keys in known.items() if keys]
    if not fed:
        return DeleteOne({"_id": name})
    return UpdateOne({"_id": name}, {"$set": {"fed": fed}}, upsert=True)


def record(source: Entry[Any], rules: Sequence[GatherRule], documents: Iterable[Raw]) -> Plan[None]:
    """Note what these sources feed, besides what is noted of them."""
    operations = []
    for document in documents:
        for rule in rules:
            keys = [key for key, _ in rule.contributions(document)]
            if keys:
                operations.extend(_joined(_name(source, document["_id"]), rule.place.label, keys))
    if operations:
        yield from bulk_write(COLLECTION, operations)


def _joined(name: Raw, label: str, keys: list[Any]) -> list[Any]:
    """Writes that add keys to those of a rule; the worker may have noted newer ones meanwhile."""
    return [
        UpdateOne({"_id": name}, {"$setOnInsert": {"fed": []}}, upsert=True),
        UpdateOne({"_id": name, "fed.rule": {"$ne": label}}, {"$push": {"fed": {"rule": label, "keys": []}}}),
        UpdateOne({"_id": name, "fed.rule": label}, {"$addToSet": {"fed.$.keys": {"$each": keys}}}),
    ]


def forget(collections: Sequence[str]) -> Plan[None]:
    """Drop the rows of collections whose former states the server keeps by now."""
    if collections:
        yield from delete_many(COLLECTION, {"_id.collection": {"$in": list(collections)}})


def sources(collection: str, last: Any, rules: Sequence[GatherRule]) -> Plan[list[Raw]]:
    """The next page of a source collection, with what the rules find their targets by."""
    stages: list[Raw] = [{"$sort": {"_id": 1}}, {"$limit": PAGE}]
    if last is not None:
        # Compares ids of all types, which a plain range does not.
        stages.insert(0, {"$match": {"$expr": {"$gt": ["$_id", {"$literal": last}]}}})
    fields = {rule.by.stored for rule in rules}
    return (yield from aggregate(collection, [*stages, {"$project": dict.fromkeys(fields, 1)}]))
