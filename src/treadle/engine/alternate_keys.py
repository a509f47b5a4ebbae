"""Documents that others name by a unique field of theirs, and not by their id.

A contribution goes to whoever has the name that its source holds. Everything
else in the engine speaks of targets by id, so names are looked up where a
source's change is followed to its targets, and ids where a target is computed
from its sources. Both happen in the commit: a target that is given another
name meanwhile is written by both, and one of the two starts again. Where
nobody has a name, its guard is written, as it is for an id (`fill.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from treadle.engine.references import guard
from treadle.errors import DataError
from treadle.graph.changes import Change
from treadle.graph.derived import CopyRule
from treadle.graph.gather import GatherRule
from treadle.graph.model_entry import ModelEntry
from treadle.graph.scope import Image
from treadle.graph.stored_pages import chunks
from treadle.plan import Plan, Raw, find, find_one
from treadle.query.comparison import same
from treadle.query.keys import distinct, freeze, may_be_id
from treadle.query.paths import value_at

# Documents that one query asks for by their keys.
READ_KEYS_MAX = 1_000


def ids_named(rule: GatherRule, names: Iterable[Any]) -> Plan[dict[Any, Any]]:
    """The ids of the targets that have these names, by frozen name."""
    assert rule.to is not None
    ids: dict[Any, Any] = {}
    for some in chunks(distinct(filter(may_be_id, names)), READ_KEYS_MAX):
        condition = {rule.to: {"$in": list(some)}, **rule.target.targets.filter()}
        for each in (yield from find(rule.target.collection, condition, {rule.to: 1})):
            ids[freeze(value_at(each, rule.to))] = each["_id"]
    return ids


def targets_of(rule: GatherRule, keys: Sequence[Any]) -> Plan[list[Any]]:
    """What the engine knows the targets of these keys by: the keys themselves, or the ids of who has them."""
    if rule.to is None:
        return list(keys)
    return list((yield from ids_named(rule, keys)).values())


def names_of(rules: Iterable[GatherRule], documents: Iterable[Raw]) -> list[Any]:
    """The names by which sources may know documents."""
    named = list(documents)
    paths = {rule.to: rule for rule in rules if rule.to is not None}
    names = [rule.name_of(each) for rule in paths.values() for each in named]
    return [name for name in names if name is not None]


def guard_arrivals(
    entry: ModelEntry[Any], rules: Iterable[GatherRule], documents: Sequence[Raw]
) -> Plan[None]:
    """Meet everybody who looked for these documents in vain, by id or by name."""
    ids = [each["_id"] for each in documents]
    yield from guard(entry.collection, [*ids, *names_of(rules, documents)])


def refuse_renaming(rules: Iterable[CopyRule], names: Sequence[Any]) -> Plan[None]:
    """Refuse to give documents another name as long as others refer to them by the one they have.

    A card that is cleared or kept loses its source; a document that would be
    deleted with its source must not vanish because of a correction.
    """
    for rule in rules:
        if rule.to == "_id" or rule.on_delete not in ("restrict", "cascade") or not names:
            continue
        other = yield from find_one(rule.target.collection, rule.referring(*names), {"_id": 1})
        if other is not None:
            raise DataError(
                f"{rule.to!r} of this {rule.source.model.__name__} cannot be changed, because "
                f"{rule.target.model.__name__} {other['_id']!r} refers to it ({rule.place.label} has "
                f"on_delete={rule.on_delete!r}); change that reference first",
                code="reference-restricted",
            )


def renamed(rule: GatherRule, changes: Iterable[Change]) -> list[Raw]:
    """Return the targets that were given another name than they had."""
    assert rule.to is not None
    documents = []
    for change in changes:
        if not isinstance(change.before, Image) or change.after is None:
            continue
        before, after = change.before.document, change.after.document
        if rule.target.targets.holds(change.after) and not same(
            value_at(before, rule.to), value_at(after, rule.to)
        ):
            documents.append(after)
    return documents
