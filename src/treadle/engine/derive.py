"""Derived values of whole documents, computed from scratch.

`derive` gives documents with all of their derived values. The worker,
schedules, `verify`, `repair` and `rebuild` all go through here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from treadle.engine.aggregation import Values, aggregate_values
from treadle.engine.pipelines import stamps_of
from treadle.engine.references import fill_copies
from treadle.engine.salvage import divide
from treadle.engine.target_updates import TargetUpdate
from treadle.errors import DataError
from treadle.graph.derived import DerivedRule, FormulaRule, LocalRule
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import Rule
from treadle.graph.rule_set import Maintain
from treadle.model.text import get_logger
from treadle.plan import Plan, Raw, aggregate
from treadle.query.comparison import same
from treadle.query.keys import freeze, freeze_all
from treadle.query.paths import getter, outermost, put, top, value_at

# How aggregates are computed: of targets by their keys, the keys frozen, and the targets themselves.
Gather: TypeAlias = Callable[[Sequence[Any], Sequence[Any], Sequence[Raw]], Plan[Values]]

R = TypeVar("R", bound=Rule)

log = get_logger(__name__)


class DerivedValues:
    """The derived values of one model's documents: all of them, or those maintained in one way."""

    def __init__(
        self, entry: ModelEntry, maintain: Maintain | None = None, without: Collection[Rule] = ()
    ) -> None:
        self.entry = entry

        def own(kind: type[R]) -> list[R]:
            return [rule for rule in entry.rules.of_type(kind, maintain) if rule not in without]

        self.aggregates = [rule for rule in own(DerivedRule) if not rule.is_copy]
        self.copies = [rule for rule in own(DerivedRule) if rule.is_copy]
        self.formulas, self.locals = own(FormulaRule), own(LocalRule)
        self.rules: list[Rule] = [*self.aggregates, *self.copies, *self.formulas, *self.locals]
        self._refusing = [(rule.aggregate.refuse, rule.path, getter(rule.path)) for rule in self.aggregates]
        self._dated = [rule for rule in self.aggregates if rule.stamp]
        self._values = [path for rule in self.aggregates for path in rule.empty()]
        self._formulas = [rule.path for rule in self.formulas]
        self._set_paths({rule.copied.top for rule in self.copies}, [rule.path for rule in self.locals])
        # Snapshots that lie in no other field, which may be missing.
        snapshots = [rule for rule in self.copies if rule.copied.snapshots]
        self._snapshots = {rule.path for rule in snapshots} & self._getters.keys()
        # Fields with copies that all follow their sources: null is as good as a missing one.
        self._synced = {rule.copied.top for rule in self.copies} - {rule.copied.top for rule in snapshots}
        self.projection = self._projection()

    def _set_paths(self, tops: set[str], computed: Sequence[str]) -> None:
        # What an update sets; copies with the field that holds them.
        paths = outermost({*self._values, *tops, *computed})
        self._getters = {path: getter(path) for path in paths}
        self._compared = [getter(path) for path in [*paths, *self._formulas]]
        # The fields in which `derive` sets values at some depth.
        inner = [*self._values, *self._formulas, *computed]
        self._inner = tops | {top(path) for path in inner if "." in path}

    def _projection(self) -> Raw | None:
        """Return what must be read of documents: everything where copies or others need it."""
        entry = self.entry
        if self.copies or self.locals or entry.effects.on_write or entry.versions.may_change:
            return None
        alternate_keys = [rule.alternate_key for rule in self.aggregates if rule.alternate_key]
        shown = [*self._values, *self._formulas, *alternate_keys, *entry.key_projection()]
        return dict.fromkeys(outermost(shown), 1)

    @classmethod
    def of(
        cls, entry: ModelEntry, maintain: Maintain | None = None, without: frozenset[Rule] = frozenset()
    ) -> DerivedValues:
        """Return the derived values of a model, made once; `without` rules whose values are to stay."""
        if without:
            return cls(entry, maintain, without)
        return entry.rules.memo((cls, maintain), lambda: cls(entry, maintain))

    def keys(self, documents: Sequence[Raw]) -> list[Any]:
        """Return by what sources refer to these documents."""
        if self.entry.rules.group is None:
            return [each["_id"] for each in documents]
        return [self.entry.key_of(each) for each in documents]

    def copied(self, document: Raw) -> Raw:
        """Return a copy of a document, as deep as values are set in it."""
        made = dict(document)
        for name in self._inner:
            if name in made:
                made[name] = copy.deepcopy(made[name])
        return made

    # -- a stored document, and what is derived ------------------------------------------------------

    def differs(self, document: Raw, derived: Raw) -> bool:
        """Return whether any derived value of a document is incorrect."""
        # A loop of its own, since a proof asks this of every document there is.
        for get in self._compared:  # noqa: SIM110
            if not same(get(document), get(derived)):
                return True
        return False

    def is_correct(self, document: Raw, derived: Raw) -> bool:
        """Return whether a document holds the derived values, and its fields can hold them."""
        if self.differs(document, derived):
            return False
        return all(refuse({path: get(derived)}) is None for refuse, path, get in self._refusing)

    def leave_refused(self, document: Raw, derived: Raw) -> list[tuple[DerivedRule, DataError]]:
        """Put back into `derived` what is stored for rules whose fields cannot hold their values.

        Returns these rules with the reasons. The values of all other rules are stored.
        """
        refused = []
        for rule, (refuse, path, get) in zip(self.aggregates, self._refusing, strict=True):
            if (error := refuse({path: get(derived)})) is not None:
                refused.append((rule, error))
                for each in rule.empty():
                    put(derived, each, value_at(document, each))
        return refused

    def update(self, document: Raw, derived: Raw, *, incorrect_only: bool = False) -> TargetUpdate:
        """Return the update that stores the derived values, with the dates of those that change."""
        sets = {}
        for path, get in self._getters.items():
            stored, value = get(document), get(derived)
            if incorrect_only or path in self._synced:
                is_stored = same(stored, value)
            else:
                is_stored = stored is None and value is None
            # A snapshot that found no source is stored as null: without the field it would count as unfilled.
            if not is_stored or (path in self._snapshots and path not in document):
                sets[path] = {"$literal": value}
        changed = [
            rule
            for rule in self._dated
            if any(not same(value_at(document, path), value_at(derived, path)) for path in rule.empty())
        ]
        return TargetUpdate(self.entry.key_of(derived), {**sets, **stamps_of(changed)})


def derive(
    chosen: DerivedValues,
    documents: Sequence[Raw],
    befores: Sequence[Raw] | None = None,
    *,
    guarded: bool = False,
    gather: Gather | None = None,
) -> Plan[list[Raw]]:
    """Return current documents with the derived values that they should have.

    `befores` are the documents that held the snapshots, if not `documents`.
    With `guarded` the sources of copies are really written, so that a
    concurrent writer of one conflicts. `gather` computes the aggregates in
    another way than from all sources.
    """
    if not documents or not chosen.rules:
        return list(documents)
    derived = [chosen.copied(each) for each in documents]
    if chosen.aggregates:
        yield from _aggregate(chosen, documents, derived, gather)
    if chosen.copies:
        pairs = list(zip(befores or documents, derived, strict=True))
        yield from fill_copies(chosen.entry, pairs, chosen.copies, look_only=not guarded, guard_all=guarded)
    for rule in chosen.locals:
        for each, value in zip(derived, (yield from rule.values(derived)), strict=True):
            put(each, rule.path, value)
    if chosen.formulas:
        yield from _evaluate(chosen, documents, derived)
    return derived


def _aggregate(
    chosen: DerivedValues, documents: Sequence[Raw], derived: Sequence[Raw], gather: Gather | None
) -> Plan[None]:
    keys = chosen.keys(documents)
    frozen = freeze_all(keys)
    compute = gather or partial(aggregate_values, chosen.aggregates)
    values = yield from compute(keys, frozen, documents)
    for key, document in zip(frozen, derived, strict=True):
        for path, value in values[key].items():
            if "." in path:
                put(document, path, value)
            else:
                document[path] = value


def _evaluate(chosen: DerivedValues, documents: Sequence[Raw], derived: Sequence[Raw]) -> Plan[None]:
    """Evaluate the formulas of stored documents."""
    rows = yield from _formula_rows(chosen, [each["_id"] for each in documents])
    for document, each in zip(documents, derived, strict=True):
        row = rows.get(freeze(each["_id"]))
        for number, formula in enumerate(chosen.formulas):
            # What the server cannot evaluate is not a finding.
            value = value_at(document, formula.path) if row is None else row.get(f"f{number}")
            put(each, formula.path, value)


def _formula_rows(chosen: DerivedValues, keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
    """Return what the formulas of these documents give; no row where the server cannot evaluate one."""
    entry = chosen.entry
    expressions = {f"f{number}": formula.expression for number, formula in enumerate(chosen.formulas)}

    def attempt(some: Sequence[Any]) -> Plan[list[Raw]]:
        # The formulas of an outdated document were evaluated when it was upgraded.
        current = entry.versions.current_only if entry.versions.may_change else {}
        # Not $project, where a plain number would mean to include a field.
        stages = [
            {"$match": {"_id": {"$in": list(some)}, **current}},
            {"$replaceWith": {"_id": "$_id", **expressions}},
        ]
        return (yield from aggregate(entry.collection, stages))

    def alone(key: Any, error: Exception) -> Plan[list[Raw]]:
        log.warning("a formula of %s %r cannot be computed: %s", entry.model.__name__, key, error)
        return []
        yield  # pragma: no cover

    rows = yield from divide(keys, attempt, alone)
    return {freeze(row["_id"]): row for row in rows}
