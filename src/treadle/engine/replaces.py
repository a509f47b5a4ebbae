"""Whole documents in the place of stored ones: replacing, changing the kind, restoring a soft-deleted one."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any, TypeVar

from treadle.engine.aggregation import fill_aggregates
from treadle.engine.deletes import check_restrictions, follow_references, restricting
from treadle.engine.documents import (
    Hooks,
    as_stored,
    as_written,
    dump,
    gone,
    hooks_of,
    not_written,
    refuse_group,
    require_readable,
    require_soft_delete,
    run_after,
    run_before,
    stamp,
    stamp_expressions,
    translated,
    unchanged,
)
from treadle.engine.pipelines import BUMP, changed_fields, derivation, formula_stages
from treadle.engine.references import compute_formulas, fill_own, require_filled
from treadle.engine.version_upgrade import lowered, upgrade_possible, upgrade_stored
from treadle.errors import Conflict, DataError, TreadleError, UsageError
from treadle.graph.batch import Batch
from treadle.graph.changes import Changes
from treadle.graph.derived import DerivedRule, copies_of
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.write import Selector, Write
from treadle.model.bson_types import RESERVED
from treadle.model.document import Document
from treadle.plan import Plan, Raw, by_id, find_one, find_one_and_update, replace_one
from treadle.query.comparison import identical
from treadle.query.keys import freeze
from treadle.query.paths import has, put, value_at

D = TypeVar("D", bound=Document)


class Replace(Write[D]):
    """A whole document, except for what Treadle maintains in it."""

    entry: ModelEntry[D]

    def __init__(self, entry: ModelEntry[D], document: D, was: ModelEntry | None = None) -> None:
        refuse_group(entry, "replaced")
        self.entry = entry
        # The class that the stored document must have.
        self.was: ModelEntry = was or entry
        altered: list[Any] = []
        self.raw = dump(entry, document, altered)
        # An assignment to a field is not validated by itself.
        require_readable(entry, self.raw, "this would store")
        self.unchanged = unchanged(entry, self.raw)
        self._is_plain = entry.effects.is_plain and self.was.effects.is_plain
        self._result = as_stored(entry, document, self.raw, altered) if self._is_plain else document

    def _filter(self) -> Raw:
        """The filter for the document as it is said to be stored."""
        return {**by_id(self.raw["_id"]), **self.was.targets.exact.filter()}

    @property
    def selector(self) -> Selector:
        return Selector(self.entry, self._filter())

    @property
    def targets(self) -> frozenset[Hashable]:
        return frozenset({(self.entry.collection, freeze(self.raw["_id"]))})

    def _refusal(self) -> Plan[TreadleError]:
        """The error where there is no such document."""
        identity = self.raw["_id"]
        return (yield from not_written(self.entry, self._filter(), identity, self.unchanged, "replaced"))

    def command(self) -> Plan[Raw] | None:
        return self._replace_alone() if self._is_plain else None

    def _replace_alone(self) -> Plan[Raw]:
        (stored,) = yield from lowered(self.entry, [self.raw])
        with translated(self.entry.model.__name__, [self.raw], self.entry):
            result = yield from replace_one(self.entry.collection, self._filter(), stored)
        if not result.matched_count:
            raise (yield from self._refusal())
        return self.raw

    def apply(self, changes: Changes) -> Plan[Raw]:
        entry = self.entry
        if entry.versions.may_change:
            # What is kept of the stored document is read by its current names.
            yield from upgrade_possible(entry, by_id(self.raw["_id"]), changes)
        before = yield from find_one(entry.collection, {**self._filter(), **self.unchanged})
        if before is None:
            raise (yield from self._refusal())
        after = copy.deepcopy(self.raw)
        if RESERVED in before:
            after[RESERVED] = copy.deepcopy(before[RESERVED])
        hooks = self._hooks(before, after)
        yield from run_before(hooks, changes)
        yield from self._complete(before, after)
        yield from stamp(entry, [after], new=False)
        if derivation(entry).fills:
            yield from fill_own(entry, [(before, after)])
        with translated(entry.model.__name__, [after], entry):
            after = yield from self._store(before, after)
        if derivation(entry).formulas:
            (after,) = yield from compute_formulas(entry, [after["_id"]])
            require_filled(entry, [(before, after)], derivation(entry).formulas)
        yield from changes.add(entry, [(before, after)])
        yield from run_after(hooks, changes)
        return after

    def _hooks(self, before: Raw, after: Raw) -> Hooks:
        return hooks_of(self.entry, Batch([(before, after)]))

    def _complete(self, before: Raw, after: Raw) -> Plan[None]:
        """Keep what is maintained in the stored document."""
        for path, owned in self.entry.paths.owned.items():
            if self.was.paths.owned.get(path) is owned and not owned.refilled and has(before, path):
                put(after, path, value_at(before, path))
        yield from ()

    def _store(self, before: Raw, after: Raw) -> Plan[Raw]:
        entry, was = self.entry, self.was.paths.owned
        kept = {
            path: value
            for path, value in entry.paths.kept_on_replace().items()
            if was.get(path) is entry.paths.owned[path]
        }
        if kept:
            return (yield from _replace_keeping(entry, kept, before, after))
        chosen = {**by_id(after["_id"]), **self.unchanged}
        if not (yield from replace_one(entry.collection, chosen, after)).matched_count:
            raise (yield from self._refusal())
        return after

    def result(self, outcome: Raw) -> D:
        return self._result if self._is_plain else as_written(self.entry, outcome)


def _replace_keeping(entry: ModelEntry, kept: dict[str, Any], before: Raw, after: Raw) -> Plan[Raw]:
    """Replace a document except for what is written all the time. Returns the document after.

    One update that takes those values from the stored document itself: what
    was read a moment ago may be stale, and must not be written back.
    """
    values: Raw = {
        f"new.{path}": {"$ifNull": [f"$old.{path}", {"$literal": value}]} for path, value in kept.items()
    }
    rest = {name: value for name, value in after.items() if name != RESERVED}
    has_state = not identical(before.get(RESERVED), after.get(RESERVED))
    state: Any = {"$literal": after.get(RESERVED, {})} if has_state else f"$old.{RESERVED}"
    pipeline: list[Raw] = [
        {"$replaceWith": {"new": {"$literal": rest}, "old": "$$ROOT"}},
        {"$set": {**values, f"new.{RESERVED}": state}},
        {"$replaceWith": "$new"},
    ]
    stored = yield from find_one_and_update(entry.collection, by_id(after["_id"]), pipeline)
    return after if stored is None else stored


# -- change of kind --------------------------------------------------------------------------------


def former(graph: Graph, document: Document, was: Any) -> ModelEntry:
    """Return the entry of the kind that a document is said to have had."""
    entry = graph.entry(type(document))
    before = graph.entry(was)
    if entry.kinds.family is None or before.kinds.family is not entry.kinds.family:
        raise UsageError(
            f"{before.model.__name__} and {entry.model.__name__} are not kinds of one collection, so a "
            "document cannot change from one to the other",
            code="kind-change",
        )
    if before.kinds.kind is None:
        raise UsageError(
            f"was={before.model.__name__} is abstract; name the kind that the document has now",
            code="kind-change",
        )
    return before


class ChangeKind(Replace[D]):
    """A document over the stored one of another kind: it leaves that kind's rules and enters its own."""

    def _filter(self) -> Raw:
        assert self.was.kinds.family is not None
        kind = {
            self.was.kinds.family.discriminator: {"$in": self.was.kinds.family.stored_as(self.was.kinds.kind)}
        }
        return {**self.was.targets.exact.filter(), **by_id(self.raw["_id"]), **kind}

    def _refusal(self) -> Plan[TreadleError]:
        family = self.was.kinds.family
        assert family is not None
        identity, name = self.raw["_id"], family.discriminator
        active = {} if self.was.paths.deletion is None else {self.was.paths.deletion: None}
        stored = yield from find_one(self.entry.collection, {**by_id(identity), **active}, {name: 1})
        if stored is None:
            return gone(self.entry, identity)
        if stored.get(name) in family.stored_as(self.was.kinds.kind):
            return Conflict(self.entry.model.__name__, identity)
        return DataError(
            f"the document with _id {identity!r} is stored as kind {stored.get(name)!r}, not as "
            f"{self.was.kinds.kind!r} ({self.was.model.__name__}), so it was left alone; read it again "
            "and decide again",
            code="kind-differs",
        )

    def _hooks(self, before: Raw, after: Raw) -> Hooks:
        """To the rules of the new kind alone the document is new, to those of the old kind removed."""
        old, new = derivation(self.was).acting, derivation(self.entry).acting
        shared, entered, left = Batch([(before, after)]), Batch([(None, after)]), Batch([(before, None)])
        return [
            *((rule, shared if rule in old else entered) for rule in new),
            *((rule, left) for rule in old if rule not in new),
        ]

    def _left(self, rules: list[DerivedRule]) -> list[DerivedRule]:
        """The references to the old kind only, for which the document is gone."""
        return [rule for rule in rules if not rule.source.targets.admits(self.raw)]

    def _complete(self, before: Raw, after: Raw) -> Plan[None]:
        yield from check_restrictions(self._left(restricting(self.was)), [before])
        yield from super()._complete(before, after)
        gathered = derivation(self.was).aggregates
        entered = [rule for rule in derivation(self.entry).aggregates if rule not in gathered]
        if entered:
            yield from fill_aggregates(self.entry, entered, [after])

    def apply(self, changes: Changes) -> Plan[Raw]:
        after = yield from super().apply(changes)
        yield from follow_references(self.was, self._left(copies_of(self.was)), [after], changes)
        return after


# -- restoring -------------------------------------------------------------------------------------


class Restore(Write[D | None]):
    """A soft-deleted document as it was, with what it derives from others as that is now."""

    entry: ModelEntry[D]

    def __init__(self, entry: ModelEntry[D], identity: Any) -> None:
        self.entry = entry
        self._path = require_soft_delete(entry, "restore")
        self.filter = {**by_id(entry.ids.encode(identity)), **entry.deleted.filter()}

    @property
    def targets(self) -> frozenset[Hashable]:
        return self.selector.targets

    def apply(self, changes: Changes) -> Plan[Raw | None]:
        before = yield from find_one(self.entry.collection, self.filter)
        if before is None:
            return None
        (before,) = yield from upgrade_stored(self.entry, [before], changes)
        entry = self.entry.kinds.of(before)
        derived = derivation(entry)
        after = copy.deepcopy(before)
        put(after, self._path, None)
        if derived.aggregates:
            yield from fill_aggregates(entry, derived.aggregates, [after])
        if derived.fills:
            yield from fill_own(entry, [(before, after)])
        hooks = hooks_of(entry, Batch([(before, after)]))
        yield from run_before(hooks, changes)
        sets = {**changed_fields(before, after), **stamp_expressions(entry), **BUMP}
        with translated(entry.model.__name__, [after], entry):
            stored = yield from find_one_and_update(
                entry.collection, self.filter, [{"$set": sets}, *formula_stages(entry)]
            )
        if stored is not None:
            yield from changes.add(entry, [(before, stored)])
            yield from run_after(hooks, changes)
        return stored

    def result(self, outcome: Raw | None) -> D | None:
        return None if outcome is None else as_written(self.entry, outcome)
