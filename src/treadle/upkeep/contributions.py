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

from treadle.engine.named import names_of, targets_of
from treadle.engine.older import as_current, may_be_older
from treadle.engine.pages import chunks
from treadle.graph.change import AFTER, Event
from treadle.graph.gather import GatherRule
from treadle.graph.pattern import Entry
from treadle.plan import Plan, Raw, bulk_write, delete_many, find, server_facts
from treadle.query.keys import GroupKey, distinct, freeze
from treadle.query.paths import outermost, overlap, plain, put, value_at
from treadle.upkeep.dirty import Dirty
from treadle.values import frozen

COLLECTION = "treadle.contributions"


@frozen
class Fed:
    """What an event says about the targets of a source from now on.

    The keys of the targets it names: exactly these, or these besides those
    before. Of a source that belongs to a group, the fields that decide which:
    all of them if `exact`, else those that changed.
    """

    keys: tuple[Any, ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()
    exact: bool = False


def settle(dirty: Dirty) -> Plan[list[Any]]:
    """Mark what changed sources fed and feed; the writes that bring the ledger up to date.

    Where updates do not say what they touched, the sources are read as they are
    now. What they fed in between is in the ledger as well: `record_seen` notes
    it. There a source that moved stays noted where it was until it is deleted.
    """
    if not dirty.entries:
        return []
    described = (yield from server_facts()).cluster_time
    sources: dict[Any, Raw] = {} if described else (yield from _read_updated(dirty))
    every = [_name(rule.source, event.key) for rule, event in dirty.entries]
    names = {freeze(name): name for name in every}
    rows: dict[Any, dict[str, dict[Any, Any]]] = {}
    for row in (yield from find(COLLECTION, {"_id": {"$in": list(names.values())}})):
        rows[freeze(row["_id"])] = {
            each["rule"]: {freeze(key): key for key in each["keys"]} for each in row["fed"]
        }
    for rule, event in dirty.entries:
        kept = not described and event.kind != "delete"
        current = sources.get(freeze(_name(rule.source, event.key)))
        if current is not None and event.kind == "update":
            event = Event("replace", event.key, None, {AFTER: current})
        if may_be_older(rule.source.root):
            yield from _in_current_version(rule, event, dirty)
        fed = told_by(rule, event)
        known = rows.setdefault(freeze(_name(rule.source, event.key)), {})
        before = known.get(rule.place.label, {})
        if isinstance(rule.key, GroupKey):
            # The one thing that is noted of it is what decides its group.
            olds = list(before.values())
            new = _changed(None if fed.exact or not olds else olds[0], fed.fields)
            states = dirty.sources.setdefault(rule, [])
            states.extend(each for each in (*olds, new) if each is not None)
            left = before if kept else {}
            known[rule.place.label] = left if new is None else {**left, freeze(new): new}
            continue
        now = {freeze(key): key for key in fed.keys}
        for key in (yield from targets_of(rule, list({**before, **now}.values()))):
            dirty.mark_fed(rule, key)
        known[rule.place.label] = now if fed.exact and not kept else {**before, **now}
    return [_write(names[frozen], known) for frozen, known in rows.items()]


def _in_current_version(rule: GatherRule, event: Event, dirty: Dirty) -> Plan[None]:
    """Let an event show its document as the current version has it; what it does not show is looked up."""
    if event.kind == "update":
        dirty.lookups.setdefault(rule, []).append(event.key)
    elif event.raw.get(AFTER):
        (after,) = yield from as_current(rule.source.root, [event.raw[AFTER]])
        event.raw = {**event.raw, AFTER: after}


def _read_updated(dirty: Dirty) -> Plan[dict[Any, Raw]]:
    """The fields that decide what updated sources feed, as they are now; one that is gone feeds nothing."""
    current: dict[Any, Raw] = {}
    paths: dict[Entry[Any], set[str]] = {}
    ids: dict[Entry[Any], list[Any]] = {}
    for rule, event in dirty.entries:
        if event.kind == "update":
            paths.setdefault(rule.source, {"_id"}).update(rule.key.paths)
            ids.setdefault(rule.source, []).append(event.key)
    for source, keys in ids.items():
        # A conversion from an older version may need any field.
        shown = None if may_be_older(source.root) else dict.fromkeys(outermost(paths[source]), 1)
        for key in keys:
            current[freeze(_name(source, key))] = {}
        for some in chunks(distinct(keys), source.limits.contributions_page):
            for document in (yield from find(source.collection, {"_id": {"$in": some}}, shown)):
                current[freeze(_name(source, document["_id"]))] = document
    return current


def record_seen(rules: Iterable[GatherRule], keys: Sequence[Any]) -> Plan[None]:
    """Note which sources were counted in some targets, in the transaction that counted them."""
    for rule in rules:
        shown = dict.fromkeys(outermost({"_id", *rule.key.paths}), 1)
        for some in chunks(keys, rule.source.limits.worker_targets_max):
            known: Sequence[Any] = some
            if rule.to is not None:
                targets = yield from find(rule.target.collection, {"_id": {"$in": list(some)}}, {rule.to: 1})
                known = names_of([rule], targets)
            documents = yield from find(rule.source.collection, rule.key.match(known), shown)
            yield from record(rule.source, [rule], documents, every=True)


def told_by(rule: GatherRule, event: Event) -> Fed:
    """The keys that an event says a source feeds, from the event alone.

    The document as it is now would not do: it may have moved on, and a target
    that counted it in between would never be told.
    """
    if event.kind == "delete":
        return Fed(exact=True)
    if isinstance(rule.key, GroupKey):
        return _fields(rule.key, event)
    after = event.raw.get(AFTER)
    if after is not None and event.kind in ("insert", "replace"):
        return Fed(tuple(rule.key.of_sources([after])), exact=True)
    (path,) = rule.key.paths
    keys: list[Any] = []
    exact = False
    for each in event.raw.get("values") or ():
        name = plain(each["k"])
        if not overlap(name, path):
            continue
        inside: Raw = {}
        put(inside, name, each["v"])
        keys += rule.key.of_sources([inside])
        exact = exact or (name == each["k"] and path.startswith(name))
    if any(overlap(plain(name), path) and plain(name) == name for name in event.raw.get("removed") or ()):
        exact = True
    return Fed(tuple(keys), exact=exact)


def _fields(key: GroupKey, event: Event) -> Fed:
    """The values that decide a source's group, as far as an event tells them."""
    paths = sorted(key.paths)
    if event.kind in ("insert", "replace"):
        raw = event.raw.get(AFTER) or {}
        return Fed(fields=tuple((path, value_at(raw, path)) for path in paths), exact=True)
    changed: list[tuple[str, Any]] = []
    for each in event.raw.get("values") or ():
        for path in paths:
            if path == each["k"] or path.startswith(each["k"] + "."):
                rest = path[len(each["k"]) + 1 :]
                changed.append((path, value_at(each["v"], rest)))
    for name in event.raw.get("removed") or ():
        changed.extend((path, None) for path in paths if path == name or path.startswith(name + "."))
    return Fed(fields=tuple(changed))


def _changed(state: Raw | None, fields: Sequence[tuple[str, Any]]) -> Raw | None:
    """The fields that decide a group, after some of them changed; None if there are none."""
    if state is None and not fields:
        return None
    new = copy.deepcopy(state or {})
    for path, value in fields:
        put(new, path, value)
    return new


def _name(source: Entry[Any], key: Any) -> Raw:
    return {"collection": source.collection, "id": key}


def _write(name: Raw, known: dict[str, dict[Any, Any]]) -> Any:
    fed = [{"rule": label, "keys": list(keys.values())} for label, keys in known.items() if keys]
    if not fed:
        return DeleteOne({"_id": name})
    return UpdateOne({"_id": name}, {"$set": {"fed": fed}}, upsert=True)


def record(
    source: Entry[Any], rules: Sequence[GatherRule], documents: Iterable[Raw], *, every: bool = False
) -> Plan[None]:
    """Note what these sources feed, besides what is noted of them; of groups the first, or `every` one."""
    operations = []
    for document in documents:
        for rule in rules:
            name, label = _name(source, document["_id"]), rule.place.label
            if isinstance(rule.key, GroupKey):
                state: Raw = {}
                for path in rule.key.paths:
                    put(state, path, value_at(document, path))
                # The worker may have noted a newer one, which stays.
                operations += _joined(name, label, [state], only_first=not every)
            elif keys := rule.key.of_sources([document]):
                operations += _joined(name, label, keys)
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
