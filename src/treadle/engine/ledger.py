"""What one transaction has changed so far, per document: first before, last after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from treadle.engine.older import older_among, through_versions
from treadle.engine.pipelines import derivation
from treadle.engine.version_upgrade import upgraded_leniently
from treadle.graph.change import Change
from treadle.graph.gather import GatherRule, contribution_stages
from treadle.graph.pattern import Entry, Rule
from treadle.plan import Plan, Raw, aggregate
from treadle.query.keys import KEY, freeze

# By rule and frozen id of the source: (key of the target, value).
Contributions: TypeAlias = dict[GatherRule, dict[Any, list[tuple[Any, Any]]]]


class Ledger:
    """The net changes of a transaction, and what their befores contributed."""

    def __init__(self, *, whole: bool = False, joined: bool = False, transactional: bool = True) -> None:
        # Whether everything must happen in this commit, and nothing can be left for later.
        self.whole = whole
        # Whether the transaction is the caller's own, and may hold earlier writes of the same documents.
        self.joined = joined
        # Whether all that is done under it happens together or not at all.
        self.transactional = transactional
        # The net changes, by collection and frozen id.
        self.changes: dict[str, dict[Any, Change]] = {}
        # The documents, by collection and frozen id, that were outdated: whether what is made of them
        # counted them is not known.
        self.outdated: set[tuple[str, Any]] = set()
        self._evaluated: Contributions = {}
        # By rule, collection and frozen id what was recorded last.
        self._recorded: dict[Rule, dict[Any, Raw | None]] = {}

    def add(self, change: Change) -> None:
        """Note a change; several of one document become one."""
        of_collection = self.changes.setdefault(change.collection, {})
        key = freeze(change.id)
        earlier = of_collection.get(key)
        if earlier is not None:
            change = Change(change.collection, change.id, earlier.before, change.after, earlier.fresh)
        of_collection[key] = change

    def of(self, collection: str) -> list[Change]:
        """The net changes of a collection."""
        changes = self.changes.get(collection)
        return list(changes.values()) if changes else []

    def unrecorded(self, rule: Rule) -> list[Change]:
        """The changes of a rule's own documents since it was last asked to record them."""
        changes = self.changes.get(rule.target.collection)
        if not changes:
            return []
        recorded, new = self._recorded.setdefault(rule, {}), []
        for key, change in changes.items():
            before, fresh = recorded.get(key, change.before), change.fresh and key not in recorded
            if before is not change.after:
                new.append(Change(change.collection, change.id, before, change.after, fresh))
                recorded[key] = change.after
        return new

    def note_before(self, entry: Entry[Any], ids: Sequence[Any]) -> Plan[None]:
        """Let the server say what these sources contribute before they are written.

        Only where a rule has a condition or an expression, which nobody but
        the server evaluates in just the way the server does.
        """
        rules = derivation(entry).on_server
        if not rules:
            return
        seen = self._evaluated.setdefault(rules[0], {})
        new = [identity for identity in ids if freeze(identity) not in seen]
        for rule, by_source in (yield from evaluate(rules, new)).items():
            self._evaluated.setdefault(rule, {}).update(by_source)

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
        together.setdefault(rule.group_key, []).append(rule)
    older: dict[str, list[Raw]] = {}
    for alike in together.values():
        source = alike[0].source
        if source.collection not in older:
            older[source.collection] = yield from older_among(source.root, ids)
        values = {f"value{number}": rule.aggregate.expression() for number, rule in enumerate(alike)}
        rows: list[Raw] = yield from aggregate(
            source.collection,
            [
                *through_versions(source.root, {"_id": {"$in": list(ids)}}, older[source.collection]),
                *contribution_stages(alike[0], None),
                {"$project": {KEY: 1, **values}},
            ],
        )
        for row in rows:
            if row.get(KEY) is None:
                continue
            for number, rule in enumerate(alike):
                contributions[rule][freeze(row["_id"])].append((row[KEY], row.get(f"value{number}")))
    return contributions


def keys_now(rules: Sequence[GatherRule], documents: Sequence[Raw]) -> Plan[dict[GatherRule, list[Any]]]:
    """The targets that these sources name or belong to, whether or not they count there."""
    keys: dict[GatherRule, list[Any]] = {}
    by_signature: dict[Any, list[Any]] = {}
    if rules:
        documents = yield from upgraded_leniently(rules[0].source, documents)
    for rule in rules:
        if rule.key.local:
            keys[rule] = [key for document in documents for key, _ in rule.contributions(document)]
            continue
        signature = (rule.source.collection, rule.key.signature)
        if signature not in by_signature:
            ids = [document["_id"] for document in documents]
            older = yield from older_among(rule.source.root, ids)
            own = through_versions(rule.source.root, {"_id": {"$in": ids}}, older)
            stages = [*own, *rule.key.stages(None, False), {"$project": {KEY: 1}}]
            rows = yield from aggregate(rule.source.collection, stages)
            by_signature[signature] = [row[KEY] for row in rows]
        keys[rule] = by_signature[signature]
    return keys
