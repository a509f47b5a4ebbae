"""What set-up remembers: of each rule how it was declared, and of each collection that it only warns.

A rule whose declaration changed leaves stored values that follow from the
former one. The data does not show this, so set-up keeps a fingerprint of
each rule, and remembers that it must be rebuilt until that is done.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from pymongo import UpdateOne

from treadle.graph.graph import DERIVED, Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Action
from treadle.graph.rule import Rule
from treadle.plan import Plan, bulk_write, find, find_one, update_many

COLLECTION = "treadle.setup"
# How a value is maintained, not what it is.
_BESIDE = ("maintain", "every")
FINGERPRINT_BYTES = 8


def fingerprint(rule: Rule) -> str:
    """What tells one declaration of a value from another."""
    paths = sorted(owned.path for owned in rule.owns())
    said = repr((_plain(rule.declared), paths, _plain(rule.reads())))
    return hashlib.blake2b(said.encode(), digest_size=FINGERPRINT_BYTES).hexdigest()


def _plain(value: Any) -> Any:
    """A declaration as text that is the same in every process."""
    if isinstance(value, type):
        return value.__name__
    if dataclasses.is_dataclass(value):
        parts = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        kept = {name: _plain(part) for name, part in parts.items() if name not in _BESIDE}
        return type(value).__name__, kept
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_plain(item)) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return repr(value)


def compare(graph: Graph, actions: list[Action]) -> Plan[None]:
    """List the rules that must be rebuilt since their declaration changed, and remember how all are now."""
    known = {row["_id"]: row for row in (yield from find(COLLECTION, {"kind": "rule"}))}
    operations = []
    for rule in graph.rules:
        if not isinstance(rule, DERIVED) or not rule.owns():
            continue
        label, now = rule.place.label, fingerprint(rule)
        row = known.get(label)
        if row is not None and row["fingerprint"] == now:
            continue
        # One that is new beside others which set-up knows was added to what is stored already.
        stale = bool(known) and (yield from _has_documents(rule))
        if stale:
            actions.append(Action("rebuild needed:", label))
        update = {"$set": {"kind": "rule", "fingerprint": now, "stale": stale}}
        operations.append(UpdateOne({"_id": label}, update, upsert=True))
    if operations:
        yield from bulk_write(COLLECTION, operations, ordered=False)


def _has_documents(rule: Rule) -> Plan[bool]:
    holding = rule.source if rule.target.rules.group is not None else rule.target
    return (yield from find_one(holding.collection, {}, {"_id": 1})) is not None


def stale() -> Plan[set[str]]:
    """The rules that must be rebuilt."""
    return {row["_id"] for row in (yield from find(COLLECTION, {"kind": "rule", "stale": True}))}


def rebuilt(entries: Iterable[ModelEntry]) -> Plan[None]:
    """Note that the values of these models are as declared again."""
    yield from rebuilt_rules(rule for entry in entries for rule in entry.rules if isinstance(rule, DERIVED))


def rebuilt_rules(rules: Iterable[Rule]) -> Plan[None]:
    """Note that the values of these rules are as declared again."""
    labels = [rule.place.label for rule in rules]
    if labels:
        done = {"_id": {"$in": labels}, "stale": True}
        yield from update_many(COLLECTION, done, {"$set": {"stale": False}})


# -- validators that only warn -----------------------------------------------------------------------


def warns(collection: str) -> Plan[bool]:
    """Whether set-up let a collection's validator begin with warnings."""
    return (yield from find_one(COLLECTION, {"_id": validator_of(collection)})) is not None


def begin_with_warnings(collection: str) -> Plan[None]:
    yield from bulk_write(
        COLLECTION,
        [UpdateOne({"_id": validator_of(collection)}, {"$set": {"kind": "validator"}}, upsert=True)],
    )


def validator_of(collection: str) -> str:
    """The row that says that set-up lets a validator only warn."""
    return f"validator of {collection}"
