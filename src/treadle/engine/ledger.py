"""What one transaction has changed so far, per document: first before, last after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from treadle.graph.change import Change
from treadle.graph.gather import GatherRule, contribution_stages
from treadle.graph.pattern import Entry
from treadle.plan import Plan, Raw, aggregate
from treadle.query.keys import KEY, freeze

# By rule and frozen id of the source: (key of the target, value).
Contributions: TypeAlias = dict[GatherRule, dict[Any, list[tuple[Any, Any]]]]


class Ledger:
    """The net changes of a transaction, and what their befores contributed."""

    # Whether all that is done under it happens together or not at all.
    transactional = True

    def __init__(self) -> None:
        self._changes: dict[str, dict[Any, Change]] = {}
        self._evaluated: Contributions = {}

    def add(self, change: Change) -> None:
        """Note a change; several of one document become one."""
        of_collection = self._changes.setdefault(change.collection, {})
        key = freeze(change.id)
        earlier = of_collection.get(key)
        if earlier is not None:
            change = Change(change.collection, change.id, earlier.before, change.after, earlier.fresh)
        of_collection[key] = change

    def of(self, collection: str) -> list[Change]:
        """The net changes of a collection."""
        return list(self._changes.get(collection, {}).values())

    def note_before(self, entry: Entry[Any], ids: Sequence[Any]) -> Plan[None]:
        """Let the server say what these sources contribute before they are written.

        Only where a rule has a condition or an expression, which nobody but
        the server evaluates in just the way the server does.
        """
        rules = [rule for rule in entry.feeding(GatherRule) if rule.server_side]
        if not rules:
            return
        seen = self._evaluated.setdefault(rules[0], {})
        new = [identity for identity in ids if freeze(identity) not in seen]
        for rule, by_source in (yield from evaluate(rules, new)).items():
            self._evaluated.setdefault(rule, {}).update(by_source)

    def reads_before(self, entry: Entry[Any]) -> bool:
        """Whether `note_before` has to know which documents are about to be written."""
        return any(rule.server_side for rule in entry.feeding(GatherRule))

    def note_new(self, entry: Entry[Any], ids: Sequence[Any]) -> Plan[None]:
        """Called before documents are inserted; in a transaction there is nothing to do."""
        return
        yield  # pragma: no cover

    def before(self, rule: GatherRule, change: Change) -> list[tuple[Any, Any]]:
        """What a changed source contributed before."""
        if change.before is None:
            return []
        if rule.server_side:
            return self._evaluated.get(rule, {}).get(freeze(change.id), [])
        return rule.contributions(change.before)


def evaluate(rules: Sequence[GatherRule], ids: Sequence[Any]) -> Plan[Contributions]:
    """The contributions of these sources, as the server sees them."""
    contributions: Contributions = {rule: {freeze(identity): [] for identity in ids} for rule in rules}
    if not ids:
        return contributions
    together: dict[Any, list[GatherRule]] = {}
    for rule in rules:
        alone = None if set(rule.evaluation()) <= {"value"} else rule
        together.setdefault((rule.alike, alone), []).append(rule)
    for alike in together.values():
        rows: list[Raw] = yield from aggregate(
            alike[0].source.collection,
            [
                {"$match": {"_id": {"$in": list(ids)}}},
                *contribution_stages(alike[0], None),
                {"$project": {KEY: 1, **_projection(alike)}},
            ],
        )
        for row in rows:
            if row.get(KEY) is None:
                continue
            for number, rule in enumerate(alike):
                part = row if len(alike) == 1 else {"value": row.get(f"value{number}")}
                contributions[rule][freeze(row["_id"])].append((row[KEY], rule.evaluated(part)))
    return contributions


def keys_now(rules: Sequence[GatherRule], documents: Sequence[Raw]) -> Plan[dict[GatherRule, list[Any]]]:
    """The targets that these sources name or belong to, whether or not they count there."""
    keys: dict[GatherRule, list[Any]] = {}
    by_signature: dict[Any, list[Any]] = {}
    for rule in rules:
        if rule.key.local:
            keys[rule] = [key for document in documents for key, _ in rule.contributions(document)]
            continue
        signature = (rule.source.collection, rule.key.signature)
        if signature not in by_signature:
            own = {"$match": {"_id": {"$in": [document["_id"] for document in documents]}}}
            stages = [own, *rule.key.stages(None, False), {"$project": {KEY: 1}}]
            rows = yield from aggregate(rule.source.collection, stages)
            by_signature[signature] = [row[KEY] for row in rows]
        keys[rule] = by_signature[signature]
    return keys


def _projection(rules: Sequence[GatherRule]) -> Raw:
    if len(rules) == 1:
        return rules[0].evaluation()
    return {
        f"value{number}": rule.evaluation()["value"]
        for number, rule in enumerate(rules)
        if "value" in rule.evaluation()
    }
