"""Derived values from scratch: what every shortcut must equal.

`recompute` gives the gathered values of some targets. `Recomputation` gives
whole documents as they should be, and what has to be set in them. Set-up of
new targets, the worker, `verify`, `repair`, `rebuild` and servers without
transactions all go through here.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from treadle.engine.contention import in_pieces
from treadle.engine.fill import fill_copies
from treadle.engine.pipelines import stamps_of, update_pipeline
from treadle.graph.derived import CopyRule, FormulaRule, LocalRule
from treadle.graph.gather import GatherRule, source_stages
from treadle.graph.pattern import Entry, Maintain, Rule
from treadle.plan import Plan, Raw, aggregate
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import is_about_one_document
from treadle.query.comparison import same
from treadle.query.keys import KEY, freeze
from treadle.query.paths import outermost, put, value_at

Values = dict[Any, dict[str, Any]]

log = logging.getLogger("treadle")


def recompute(rules: Iterable[GatherRule], keys: Sequence[Any], version: tuple[int, ...]) -> Plan[Values]:
    """Per target (frozen key) the stored path and exact value of each part of each rule."""
    values: Values = {freeze(key): {} for key in keys}
    if not keys:
        return values
    groups: dict[Any, list[GatherRule]] = {}
    for rule in rules:
        if rule.finds(keys):
            for key, parts in (yield from rule.found(keys, version)).items():
                values[key].update(parts)
        else:
            groups.setdefault(rule.alike, []).append(rule)
    for together in groups.values():
        accumulators = [rule.accumulators() for rule in together]
        rows = yield from _group(together[0], keys, accumulators)
        for key in values:
            row = rows.get(key)
            for number, rule in enumerate(together):
                group = {name: row[f"{name}{number}"] for name in accumulators[number]} if row else None
                values[key].update(rule.finish(group))
    return values


def _group(rule: GatherRule, keys: Sequence[Any], accumulators: Sequence[Raw]) -> Plan[dict[Any, Raw]]:
    """Per target what the accumulators of several rules give; `rule` is one of them."""
    numbered = {
        f"{name}{number}": accumulator
        for number, each in enumerate(accumulators)
        for name, accumulator in each.items()
    }
    stages = [*source_stages(rule, keys), {"$group": {"_id": f"${KEY}", **numbered}}]
    return {freeze(row["_id"]): row for row in (yield from aggregate(rule.source.collection, stages))}


class Recomputation:
    """The derived values of one model's documents: all of them, or those maintained in one way."""

    def __init__(self, entry: Entry[Any], maintain: Maintain | None = None) -> None:
        self.entry = entry
        self.gathers = entry.having(GatherRule, maintain)
        self.copies = entry.having(CopyRule, maintain)
        self.formulas = entry.having(FormulaRule, maintain)
        self.locals = entry.having(LocalRule, maintain)
        paths = {path for rule in self.gathers for path in rule.empty()}
        paths |= {rule.top for rule in self.copies} | {rule.path for rule in self.locals}
        # What a rewrite sets; copies with the field that holds them.
        self.paths = outermost(paths)
        # What must be read of documents: all where copies or others need it, else the values alone.
        self.shown: Raw | None = None
        if not (self.copies or self.locals or entry.feeds):
            own = [*paths, *(rule.path for rule in self.formulas), *entry.key_projection()]
            self.shown = dict.fromkeys(outermost(own), 1)

    @classmethod
    def of(cls, entry: Entry[Any], maintain: Maintain | None = None) -> Recomputation:
        """The one of a model, made once."""
        return entry.once((cls, maintain), lambda: cls(entry, maintain))

    @property
    def rules(self) -> list[Rule]:
        return [*self.gathers, *self.copies, *self.formulas, *self.locals]

    def expected(
        self,
        server: Capabilities,
        documents: Sequence[Raw],
        befores: Sequence[Raw] | None = None,
        *,
        guarded: bool = False,
        formulas: bool = True,
    ) -> Plan[list[Raw]]:
        """The documents as they should be stored.

        `befores` tell which values of a moment they had, if that is not what
        they hold. With `guarded` the sources of copies are really written, so
        that nobody can change them before this transaction ends. Without
        `formulas` these are left to the update that writes the rest.
        """
        if not documents or not self.rules:
            return list(documents)
        entry = self.entry
        keys = [entry.key_of(each) for each in documents]
        expected = [copy.deepcopy(each) for each in documents]
        values = yield from recompute(self.gathers, keys, server.version)
        for key, right in zip(keys, expected, strict=True):
            for path, value in values[freeze(key)].items():
                put(right, path, value)
        if self.copies:
            pairs = list(zip(befores or documents, expected, strict=True))
            yield from fill_copies(entry, pairs, self.copies, look_only=not guarded, guard_all=guarded)
        for rule in self.locals:
            for right, value in zip(expected, (yield from rule.values(expected)), strict=True):
                put(right, rule.path, value)
        if self.formulas and formulas:
            yield from self._compute(documents, expected)
        return expected

    def _compute(self, documents: Sequence[Raw], expected: Sequence[Raw]) -> Plan[None]:
        rows = yield from self._formulas_now([each["_id"] for each in documents])
        for document, right in zip(documents, expected, strict=True):
            row = rows.get(freeze(right["_id"]))
            for number, formula in enumerate(self.formulas):
                # What the server cannot compute is neither right nor wrong.
                value = row.get(f"f{number}") if row is not None else value_at(document, formula.path)
                put(right, formula.path, value)

    def _formulas_now(self, keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
        """What the formulas of these documents give; nothing for one that the server cannot compute."""
        computed = {f"f{number}": formula.expression for number, formula in enumerate(self.formulas)}

        def attempt(some: Sequence[Any]) -> Plan[list[Raw]]:
            # Not $project, where a plain number would mean to include a field.
            stages = [{"$match": {"_id": {"$in": list(some)}}}, {"$replaceWith": {"_id": "$_id", **computed}}]
            return (yield from aggregate(self.entry.collection, stages))

        def alone(key: Any, error: Exception) -> Plan[list[Raw]]:
            log.warning("a formula of %s %r cannot be computed: %s", self.entry.model.__name__, key, error)
            return []
            yield  # pragma: no cover

        rows = yield from in_pieces(self.entry.limits, keys, attempt, alone, is_about_one_document)
        return {freeze(row["_id"]): row for row in rows}

    def sets(self, document: Raw, right: Raw, *, whole: bool = False) -> Raw:
        """The paths that a rewrite sets, with their values as literals; empty ones too if `whole`."""
        values = {path: value_at(right, path) for path in self.paths}
        tops = {rule.top for rule in self.copies}
        return {
            path: {"$literal": value}
            for path, value in values.items()
            if value is not None
            or value_at(document, path) is not None
            or (whole and (path not in tops or path in right))
        }

    def differs(self, document: Raw, right: Raw) -> bool:
        """Whether any derived value of a document is not as it should be."""
        paths = [*self.paths, *(formula.path for formula in self.formulas)]
        return any(not same(value_at(document, path), value_at(right, path)) for path in paths)

    def rewrite(self, sets: Raw, *, stamped: bool) -> list[Raw]:
        """The update that sets values, with the dates of their computation, and lets formulas follow."""
        return update_pipeline(self.entry, {**sets, **(stamps_of(self.gathers) if stamped else {})}, {})
