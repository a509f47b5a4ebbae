"""What one transaction has changed so far, per document: first before, last after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from treadle.engine.pipelines import derivation
from treadle.graph.change import Change
from treadle.graph.gather import GatherRule, reads_of
from treadle.graph.pattern import Entry, Rule
from treadle.graph.scope import beside
from treadle.plan import Plan, Raw
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
    for alike in together.values():
        rule = alike[0]
        values = {f"value{number}": each.aggregate.expression() for number, each in enumerate(alike)}
        stages = [*rule.key.stages(None, rule.per_element), {"$project": {KEY: 1, **values}}]
        own = beside({"_id": {"$in": list(ids)}}, rule.condition)
        rows = yield from rule.source.targets.group(own, stages, reads=reads_of(alike))
        for row in rows:
            if row.get(KEY) is None:
                continue
            for number, rule in enumerate(alike):
                contributions[rule][freeze(row["_id"])].append((row[KEY], row.get(f"value{number}")))
    return contributions
