"""A ledger of contributions: which targets each source fed when the worker last saw it.

A deletion's event carries only the document's id. Where the server keeps no
former states of documents (before 6.0, or where set-up could not turn them
on), this is how the worker knows which targets a source has left. A row is
written in the transaction that moves the worker's position, never before the
targets themselves have followed. It may name a target too many, which costs a
recomputation; never one too few.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from pymongo import DeleteOne, UpdateOne

from treadle.graph.gather import GatherRule
from treadle.graph.pattern import Entry
from treadle.plan import Plan, Raw, aggregate, bulk_write, delete_many, find
from treadle.query.keys import GroupKey, freeze
from treadle.query.paths import outermost, put, value_at
from treadle.upkeep import position
from treadle.upkeep.events import Doubt

COLLECTION = "treadle.contributions"


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
    states: dict[GatherRule, list[Raw]] = {}
    for rule, source, fed in doubt.entries:
        known = rows.setdefault(freeze(_name(rule.source, source)), {})
        before = known.get(rule.place.label, {})
        if isinstance(rule.key, GroupKey):
            # The one thing that is noted of it is what decides its group.
            old = next(iter(before.values()), None)
            new = _changed(None if fed.exact else old, fed.fields)
            states.setdefault(rule, []).extend(each for each in (old, new) if each is not None)
            known[rule.place.label] = {} if new is None else {0: new}
            continue
        now = {freeze(key): key for key in fed.keys}
        for key in {**before, **now}.values():
            doubt.mark(rule.target, key, sourced=True)
        known[rule.place.label] = now if fed.exact else {**before, **now}
    for rule, decisive in states.items():
        for key in (yield from groups_of(rule, decisive)):
            doubt.mark(rule.target, key, sourced=True)
    return [_write(names[frozen], known) for frozen, known in rows.items()]


def _changed(state: Raw | None, fields: Sequence[tuple[str, Any]]) -> Raw | None:
    """The fields that decide a group, after some of them changed; None if there are none."""
    if state is None and not fields:
        return None
    new = copy.deepcopy(state or {})
    for path, value in fields:
        put(new, path, value)
    return new


def groups_of(rule: GatherRule, states: Sequence[Raw]) -> Plan[list[Any]]:
    """The groups that these fields decide; windows in a time zone are the server's to tell."""
    assert isinstance(rule.key, GroupKey)
    if rule.key.local:
        found = [rule.key.one(state) for state in states]
        return [key for key in found if key is not None]
    each = {
        "$map": {
            "input": {"$literal": list(states)},
            "in": [part.expression("$this.") for part in rule.key.parts],
        }
    }
    # Any document will do to compute with; the worker's own row is always there.
    rows = yield from aggregate(position.COLLECTION, [{"$limit": 1}, {"$project": {"keys": each}}])
    checked = [rule.key.checked(values) for row in rows for values in row["keys"]]
    return [key for key in checked if key is not None]


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
            keys: list[Any] = []
            if isinstance(rule.key, GroupKey):
                state: Raw = {}
                for path in rule.key.paths:
                    put(state, path, value_at(document, path))
                # The worker may have noted a newer one, which stays.
                operations.extend(
                    _joined(_name(source, document["_id"]), rule.place.label, [state], only_first=True)
                )
            else:
                keys = rule.keys_of(document)
            if keys:
                operations.extend(_joined(_name(source, document["_id"]), rule.place.label, keys))
    if operations:
        yield from bulk_write(COLLECTION, operations)


def _joined(name: Raw, label: str, keys: list[Any], *, only_first: bool = False) -> list[Any]:
    """Writes that add keys to those of a rule; the worker may have noted newer ones meanwhile."""
    first = {"$push": {"fed": {"rule": label, "keys": keys if only_first else []}}}
    writes = [
        UpdateOne({"_id": name}, {"$setOnInsert": {"fed": []}}, upsert=True),
        UpdateOne({"_id": name, "fed.rule": {"$ne": label}}, first),
    ]
    if not only_first:
        added = {"$addToSet": {"fed.$.keys": {"$each": keys}}}
        writes.append(UpdateOne({"_id": name, "fed.rule": label}, added))
    return writes


def forget(collections: Sequence[str]) -> Plan[None]:
    """Drop the rows of collections whose former states the server keeps by now."""
    if collections:
        yield from delete_many(COLLECTION, {"_id.collection": {"$in": list(collections)}})


def sources(entry: Entry[Any], last: list[Any] | None, rules: Sequence[GatherRule]) -> Plan[list[Raw]]:
    """The next page of a source collection, with what the rules find their targets by."""
    stages: list[Raw] = [{"$sort": {"_id": 1}}, {"$limit": entry.limits.contributions_page}]
    if last is not None:
        # Compares ids of all types, which a plain range does not.
        stages.insert(0, {"$match": {"$expr": {"$gt": ["$_id", {"$literal": last[0]}]}}})
    fields = {path for rule in rules for path in rule.key.paths}
    stages.append({"$project": dict.fromkeys(outermost(fields), 1)})
    return (yield from aggregate(entry.collection, stages))
