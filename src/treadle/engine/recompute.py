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

import bson
from pymongo.errors import OperationFailure

from treadle.engine.fill import fill_copies
from treadle.engine.pipelines import stamps_of, update_pipeline
from treadle.graph.derived import CopyRule, FormulaRule, LocalRule
from treadle.graph.gather import GatherRule, source_stages
from treadle.graph.pattern import Entry, Maintain, Rule
from treadle.model.bson_types import CODEC_OPTIONS
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
            groups.setdefault(_signature(rule), []).append(rule)
    for together in groups.values():
        rows = yield from _group(together, keys)
        for key in values:
            for number, rule in enumerate(together):
                row = rows.get(key)
                group = {name: row[f"{name}{number}"] for name in rule.accumulators()} if row else None
                values[key].update(rule.finish(group))
    return values


def _signature(rule: GatherRule) -> Any:
    """Rules that agree in this share one `$group`."""
    where = bson.encode(rule.where, codec_options=CODEC_OPTIONS)
    return rule.source.collection, rule.key.signature, where, rule.per_element


def _group(rules: Sequence[GatherRule], keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
    accumulators = {
        f"{name}{number}": accumulator
        for number, rule in enumerate(rules)
        for name, accumulator in rule.accumulators().items()
    }
    rows = yield from aggregate(
        rules[0].source.collection,
        [*source_stages(rules[0], keys), {"$group": {"_id": f"${KEY}", **accumulators}}],
    )
    return {freeze(row["_id"]): row for row in rows}


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
        if not documents:
            return []
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
        # Not $project, where a plain number would mean to include a field.
        stages = [{"$match": {"_id": {"$in": list(keys)}}}, {"$replaceWith": {"_id": "$_id", **computed}}]
        try:
            rows = yield from aggregate(self.entry.collection, stages)
        except OperationFailure as error:
            if not is_about_one_document(error):
                raise
            if len(keys) == 1:
                name = self.entry.model.__name__
                log.warning("a formula of %s %r cannot be computed: %s", name, keys[0], error)
                return {}
            singles: dict[Any, Raw] = {}
            for key in keys:
                singles.update((yield from self._formulas_now([key])))
            return singles
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
