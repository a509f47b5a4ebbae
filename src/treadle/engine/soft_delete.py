"""Documents that are deleted and still stored: how they are buried, brought back, and removed for good.

Everybody takes a buried document for gone, because its model's scope leaves
it out. So what it fed is taken back when it is buried, and what it holds of
others is computed anew when it comes back.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeVar

from treadle.engine import crud
from treadle.engine.alternate_keys import guard_arrivals
from treadle.engine.auto_fields import stamp_expressions, touches_of
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import BUMP, changed_fields, derivation, formula_stages
from treadle.engine.recompute import recompute, refuse_unfit
from treadle.engine.references import fill_own
from treadle.engine.validation import as_written
from treadle.engine.version_upgrade import upgrade_stored
from treadle.errors import UsageError
from treadle.graph.changes import Changes
from treadle.graph.model_entry import ModelEntry
from treadle.graph.write import Write
from treadle.model.document import Document
from treadle.plan import Plan, Raw, by_id, find_one, find_one_and_update, server_facts, update_many
from treadle.query.filters import clean
from treadle.query.keys import freeze
from treadle.query.paths import put

D = TypeVar("D", bound=Document)


def require_tombstone(entry: ModelEntry[Any], call: str) -> str:
    """The path that tells a model's deleted documents; refuses a model that keeps none."""
    if entry.paths.deletion is None:
        raise UsageError(
            f"{call} is for models that keep their deleted documents, and {entry.model.__name__} does not; "
            'declare soft_delete="deleted_at" with a field deleted_at: datetime | None = None',
            code="soft-delete-undeclared",
        )
    return entry.paths.deletion


def burying(entry: ModelEntry[Any]) -> list[Raw]:
    """The update that takes a document for deleted."""
    stamps = stamp_expressions(touches_of(entry, new=False))
    return [{"$set": {require_tombstone(entry, "delete"): "$$NOW", **stamps}}]


def bury(entry: ModelEntry[Any], befores: Sequence[Raw], changes: Changes) -> Plan[dict[Any, Raw]]:
    """Take documents that were just read for deleted; by frozen id what is stored now."""
    keys = [each["_id"] for each in befores]
    yield from update_many(entry.collection, {"_id": {"$in": keys}, **entry.targets.filter()}, burying(entry))
    afters = yield from by_ids(entry.collection, keys)
    yield from changes.add(entry, [(each, afters.get(freeze(each["_id"]))) for each in befores])
    return afters


class Restore(Write[D | None]):
    """A deleted document as it was, with what it holds of others as that is now."""

    entry: ModelEntry[D]

    def __init__(self, entry: ModelEntry[D], identity: Any) -> None:
        self.entry = entry
        self.path = require_tombstone(entry, "restore")
        self.filter = {**by_id(entry.ids.encode(identity)), **entry.deleted.filter()}

    def apply(self, changes: Changes) -> Plan[Raw | None]:
        before = yield from find_one(self.entry.collection, self.filter)
        if before is None:
            return None
        (before,) = yield from upgrade_stored(self.entry, [before], changes)
        entry, key = self.entry.kinds.of(before), before["_id"]
        derived = derivation(entry)
        after = copy.deepcopy(before)
        put(after, self.path, None)
        if derived.aggregates:
            # Sources that came meanwhile did not find it, as if it were new.
            yield from guard_arrivals(entry, derived.aggregates, [after])
            server = yield from server_facts()
            values = yield from recompute(derived.aggregates, [key], server, documents=[after])
            refuse_unfit(derived.aggregates, values[freeze(key)])
            for path, value in values[freeze(key)].items():
                put(after, path, value)
        if derived.fills:
            yield from fill_own(entry, [(before, after)])
        notes = {}
        for rule in entry.rules.implementing("before_restore"):
            notes[rule] = yield from rule.before_restore(after, changes)
        sets = {**changed_fields(before, after), **stamp_expressions(touches_of(entry, new=False)), **BUMP}
        with crud.translated(entry.model.__name__, [after], entry):
            stored = yield from find_one_and_update(
                entry.collection, self.filter, [{"$set": sets}, *formula_stages(entry)]
            )
        if stored is not None:
            yield from changes.add(entry, [(before, stored)])
            for rule, note in notes.items():
                yield from rule.after_restore(note, changes)
        return stored

    def result(self, outcome: Raw | None) -> D | None:
        return None if outcome is None else as_written(self.entry, outcome)


def purged(entry: ModelEntry[Any], before: datetime | None) -> Raw:
    """The condition of the deleted documents that are to be removed for good."""
    path = require_tombstone(entry, "purge")
    if before is None:
        return entry.deleted.filter()
    if not isinstance(before, datetime):
        raise UsageError(f"purge takes before= as a datetime, not {before!r}", code="filter-invalid")
    return {**entry.targets.with_deleted.filter(), path: {"$lt": clean(before)}}
