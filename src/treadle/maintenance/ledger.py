"""What one transaction has changed so far, per document: first before, last after."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from treadle.change import Change
from treadle.gather import KEY, GatherRule, contribution_stages, freeze
from treadle.plan import Plan, Raw, aggregate

if TYPE_CHECKING:
    from treadle.graph import Entry


class Ledger:
    """The net changes of a transaction, and what their befores contributed."""

    # Whether all that is done under it happens together or not at all.
    transactional = True

    def __init__(self) -> None:
        self._changes: dict[str, dict[Any, Change]] = {}
        self._evaluated: dict[GatherRule, dict[Any, list[tuple[Any, Any]]]] = {}

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
        for rule in entry.feeds_gathers:
            if not rule.server_side:
                continue
            known = self._evaluated.setdefault(rule, {})
            new = [identity for identity in ids if freeze(identity) not in known]
            known.update((yield from evaluate(rule, new)))

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

    def evaluate_after(
        self, rule: GatherRule, changes: Iterable[Change]
    ) -> Plan[dict[Any, list[tuple[Any, Any]]]]:
        """What the server says that changed sources contribute now, by source."""
        present = [change.id for change in changes if change.after is not None]
        return (yield from evaluate(rule, present))


def evaluate(rule: GatherRule, ids: Sequence[Any]) -> Plan[dict[Any, list[tuple[Any, Any]]]]:
    """The contributions of these sources, as the server sees them."""
    found: dict[Any, list[tuple[Any, Any]]] = {freeze(identity): [] for identity in ids}
    if not ids:
        return found
    rows: list[Raw] = yield from aggregate(
        rule.source.collection,
        [
            {"$match": {"_id": {"$in": list(ids)}}},
            *contribution_stages(rule, None),
            {"$project": {KEY: 1, **rule.evaluation()}},
        ],
    )
    for row in rows:
        if row.get(KEY) is not None:
            found[freeze(row["_id"])].append((row[KEY], rule.evaluated(row)))
    return found
