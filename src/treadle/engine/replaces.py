"""Whole documents in the place of stored ones."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from treadle.engine import crud
from treadle.engine.auto_fields import stamp, unchanged, why_not
from treadle.engine.inserts import refuse_group
from treadle.engine.pipelines import derivation
from treadle.engine.references import compute_formulas, fill_own, require_filled
from treadle.engine.validation import as_written, require_readable
from treadle.engine.version_upgrade import lowered, upgrade_possible
from treadle.errors import TreadleError
from treadle.graph.changes import Changes
from treadle.graph.model_entry import ModelEntry
from treadle.graph.write import Selector, Write
from treadle.model.bson_types import RESERVED
from treadle.model.document import Document
from treadle.plan import Plan, Raw, by_id, find_one, find_one_and_update, replace_one
from treadle.query.paths import has, put, value_at

D = TypeVar("D", bound=Document)


class Replace(Write[D]):
    """A whole document, except for what Treadle maintains in it."""

    entry: ModelEntry[D]
    # Whether rules have put something of their own into the new document's reserved state.
    prepared = False

    def __init__(self, entry: ModelEntry[D], document: D, was: ModelEntry[Any] | None = None) -> None:
        refuse_group(entry, "replaced")
        self.entry = entry
        # The class that the stored document must have.
        self.was: ModelEntry[Any] = was or entry
        altered: list[Any] = []
        self.raw = crud.dump(entry, document, altered)
        # An assignment to a field is not validated by itself.
        require_readable(entry, self.raw, "this would store")
        self.unchanged = unchanged(entry, self.raw)
        self._result = crud.as_stored(entry, document, self.raw, altered) if self._is_plain else document

    @property
    def _is_plain(self) -> bool:
        return self.entry.effects.is_plain and self.was.effects.is_plain

    def command(self) -> Plan[Raw] | None:
        return self._replace_alone() if self._is_plain else None

    def _filter(self) -> Raw:
        """The filter for the document as it is said to be stored."""
        return {**by_id(self.raw["_id"]), **self.was.targets.exact.filter()}

    @property
    def selector(self) -> Selector:
        return Selector(self.entry, self._filter())

    def _refusal(self) -> Plan[TreadleError]:
        """The error where there is no such document."""
        return (yield from why_not(self.entry, self._filter(), self.raw["_id"], self.unchanged, "replaced"))

    def _replace_alone(self) -> Plan[Raw]:
        entry = self.entry
        (stored,) = yield from lowered(entry, [self.raw])
        with crud.translated(entry.model.__name__, [self.raw], entry):
            result = yield from replace_one(entry.collection, self._filter(), stored)
        if not result.matched_count:
            raise (yield from self._refusal())
        return self.raw

    def apply(self, changes: Changes) -> Plan[Raw]:
        entry, identity = self.entry, self.raw["_id"]
        if entry.versions.may_change:
            # What is kept of the stored document is read by its current names.
            yield from upgrade_possible(entry, by_id(identity), changes)
        before = yield from find_one(entry.collection, {**self._filter(), **self.unchanged})
        if before is None:
            raise (yield from self._refusal())
        yield from self._check(before)
        after = yield from self._after(before)
        yield from stamp(entry, [after], new=False)
        if derivation(entry).fills:
            yield from fill_own(entry, [(before, after)])
        with crud.translated(entry.model.__name__, [after], entry):
            kept = self._kept()
            if kept:
                after = yield from _replace_keeping(entry, kept, after, self.prepared)
            elif not (
                yield from replace_one(entry.collection, {**by_id(identity), **self.unchanged}, after)
            ).matched_count:
                raise (yield from self._refusal())
        if derivation(entry).formulas:
            (after,) = yield from compute_formulas(entry, [identity])
            require_filled(entry, [(before, after)], derivation(entry).formulas)
        yield from changes.add(entry, [(before, after)])
        return after

    def _kept(self) -> dict[str, Any]:
        """What is left as it is stored, with a first value."""
        return self.entry.paths.kept_on_replace()

    def _check(self, before: Raw) -> Plan[None]:
        """Refuse what must not be replaced."""
        for rule in self.entry.rules.implementing("before_replace"):
            rule.before_replace(before, self.raw)
        yield from ()

    def _after(self, before: Raw) -> Plan[Raw]:
        """The new document, with what is maintained in the stored one kept."""
        after = copy.deepcopy(self.raw)
        for path, owned in self.entry.paths.owned.items():
            if self.was.paths.owned.get(path) is owned and not owned.refilled and has(before, path):
                put(after, path, value_at(before, path))
        if RESERVED in before:
            after[RESERVED] = copy.deepcopy(before[RESERVED])
        return after
        yield  # pragma: no cover

    def result(self, outcome: Raw) -> D:
        return self._result if self._is_plain else as_written(self.entry, outcome)


def _replace_keeping(
    entry: ModelEntry[Any], stored: dict[str, Any], document: Raw, prepared: bool
) -> Plan[Raw]:
    """Write a whole document, except for what others write all the time; the document after.

    One update that takes those values from the stored document itself: what
    was read a moment ago may be stale, and must not be written back.
    """
    kept: Raw = {
        f"new.{path}": {"$ifNull": [f"$old.{path}", {"$literal": value}]} for path, value in stored.items()
    }
    rest = {name: value for name, value in document.items() if name != RESERVED}
    state: Any = {"$literal": document.get(RESERVED, {})} if prepared else f"$old.{RESERVED}"
    pipeline: list[Raw] = [
        {"$replaceWith": {"new": {"$literal": rest}, "old": "$$ROOT"}},
        {"$set": {**kept, f"new.{RESERVED}": state}},
        {"$replaceWith": "$new"},
    ]
    after = yield from find_one_and_update(entry.collection, by_id(document["_id"]), pipeline)
    return document if after is None else after
