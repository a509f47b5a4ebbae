"""Derived values from scratch: what every shortcut must equal.

`recompute` gives the gathered values of some targets. `Recomputation` gives
whole documents as they should be, and what has to be set in them. Set-up of
new targets, the worker, `verify`, `repair` and `rebuild` all go through here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from treadle.engine.contention import in_pieces
from treadle.engine.fill import fill_copies
from treadle.engine.older import found_in_commands, in_commands, older_sources
from treadle.engine.pipelines import derivation, stamps_of, update_pipeline
from treadle.graph.derived import CopyRule, FormulaRule, LocalRule
from treadle.graph.gather import GatherRule, contribution_stages
from treadle.graph.pattern import Entry, Maintain, Rule
from treadle.model.text import get_logger
from treadle.plan import Plan, Raw, aggregate, find
from treadle.plan.capabilities import Capabilities
from treadle.query.comparison import greatest, least, same, total
from treadle.query.keys import KEY, distinct, freeze, freeze_all
from treadle.query.paths import getter, outermost, put, top, value_at

Values = dict[Any, dict[str, Any]]
# The values of targets by their keys, the server, the keys frozen, and the targets themselves.
Gather = Callable[[Sequence[Any], Capabilities, Sequence[Any], Sequence[Raw]], Plan[Values]]

log = get_logger(__name__)


def recompute(
    rules: Iterable[GatherRule],
    keys: Sequence[Any],
    server: Capabilities,
    frozen: Sequence[Any] | None = None,
    documents: Sequence[Raw] | None = None,
) -> Plan[Values]:
    """Per target (frozen key) the stored path and exact value of each part of each rule.

    `frozen` are the keys as they are frozen, and `documents` the targets,
    where the caller knows.
    """
    known = freeze_all(keys) if frozen is None else list(frozen)
    by_name: dict[str, list[GatherRule]] = {}
    by_key: list[GatherRule] = []
    for rule in rules:
        (by_key if rule.to is None else by_name.setdefault(rule.to, [])).append(rule)
    values = yield from _recompute(by_key, keys, server, known)
    for named in by_name.values() if keys else ():
        if documents is None:
            target = named[0].target
            documents = yield from find(
                target.collection, {"_id": {"$in": list(keys)}}, dict.fromkeys(by_name, 1)
            )
        names = {freeze(each["_id"]): named[0].name_of(each) for each in documents}
        wanted = distinct(name for name in names.values() if name is not None)
        found = yield from _recompute(named, wanted, server, freeze_all(wanted))
        for key in known:
            name = names.get(key)
            parts = [rule.empty() for rule in named] if name is None else [found[freeze(name)]]
            for part in parts:
                values[key].update(part)
    return values


def _recompute(
    rules: Sequence[GatherRule], keys: Sequence[Any], server: Capabilities, frozen: Sequence[Any]
) -> Plan[Values]:
    """The same, by what sources know the targets by."""
    values: Values = {key: {} for key in frozen}
    if not keys or not rules:
        return values
    groups: dict[Any, list[GatherRule]] = {}
    older: dict[Any, list[Raw]] = {}
    for rule in rules:
        known = rule.source, rule.key.signature
        if known not in older:
            older[known] = yield from older_sources(rule, keys)
        split = older[known] or rule.source.counted_elsewhere is not None
        if rule.finds(keys) and not (split and rule.accumulators()):
            some = older[known]
            exact = found_in_commands(rule, keys, some) if some else rule.found(keys, server)
            for key, parts in (yield from exact).items():
                values[key].update(parts)
        else:
            groups.setdefault(rule.alike, []).append(rule)
    for together in groups.values():
        first = together[0]
        rows = yield from _group(together, keys, older[first.source, first.key.signature])
        finish = finishing(together)
        for key, parts in values.items():
            parts.update(finish(rows.get(key)))
    return values


def grouping_stages(rules: Sequence[GatherRule], keys: Sequence[Any]) -> list[Raw]:
    """The stages that give one row per target for rules with the same contributions."""
    *stages, last = contribution_stages(rules[0], keys)
    if list(last.get("$set", ())) == [KEY]:
        # A key that is grouped by at once takes a fifth less than one that is first set.
        return [*stages, {"$group": {"_id": last["$set"][KEY], **_numbered(rules)}}]
    return [*stages, last, {"$group": {"_id": f"${KEY}", **_numbered(rules)}}]


def _numbered(rules: Sequence[GatherRule]) -> Raw:
    """The accumulators of several rules, under names of their own."""
    return {
        f"{name}{number}": accumulator
        for number, rule in enumerate(rules)
        for name, accumulator in rule.accumulators().items()
    }


def finished(rules: Sequence[GatherRule], row: Raw | None) -> dict[str, Any]:
    """Stored path and value of each part of several rules, from the row of a target."""
    return finishing(rules)(row)


def finishing(rules: Sequence[GatherRule]) -> Callable[[Raw | None], dict[str, Any]]:
    """The same for many rows: what stands in which column is found once."""
    columns = [
        (rule.finish, [(name, f"{name}{number}") for name in rule.accumulators()])
        for number, rule in enumerate(rules)
    ]

    def finish_row(row: Raw | None) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for finish, names in columns:
            values.update(finish({name: row[column] for name, column in names} if row else None))
        return values

    return finish_row


def _group(rules: Sequence[GatherRule], keys: Sequence[Any], older: Sequence[Raw]) -> Plan[dict[Any, Raw]]:
    """Per target what the accumulators of several rules give."""
    rule, numbered = rules[0], _numbered(rules)
    grouping = grouping_stages(rules, keys)
    archive = rule.source.counted_elsewhere
    collections = [rule.source.collection, *([] if archive is None else [archive])]
    rows: dict[Any, Raw] = {}
    # A transaction takes no $unionWith.
    for collection in collections:
        for through in in_commands(rule.source, rule.key.match(keys), older):
            for row in (yield from aggregate(collection, [*through, *grouping])):
                mine = rows.setdefault(freeze(row["_id"]), row)
                if mine is not row:
                    for name, accumulator in numbered.items():
                        mine[name] = MERGED[next(iter(accumulator))](mine[name], row[name])
    return rows


# How the results of accumulators over parts of the sources become one.
MERGED = {"$sum": total, "$min": least, "$max": greatest}


def refuse_unfit(rules: Sequence[GatherRule], values: Raw) -> None:
    """Refuse values that their fields could not hold."""
    for rule in rules:
        if not all(rule.fits(values.get(path)) for path in rule.empty()):
            raise rule.too_large()


class Recomputation:
    """The derived values of one model's documents: all of them, or those maintained in one way."""

    def __init__(
        self, entry: Entry[Any], maintain: Maintain | None = None, without: Collection[Rule] = ()
    ) -> None:
        self.entry = entry
        self.gathers = [rule for rule in entry.having(GatherRule, maintain) if rule not in without]
        self.copies = [rule for rule in entry.having(CopyRule, maintain) if rule not in without]
        self.formulas = [rule for rule in entry.having(FormulaRule, maintain) if rule not in without]
        self.locals = [rule for rule in entry.having(LocalRule, maintain) if rule not in without]
        paths = {path for rule in self.gathers for path in rule.empty()}
        paths |= {rule.top for rule in self.copies} | {rule.path for rule in self.locals}
        # What a rewrite sets; copies with the field that holds them.
        self.paths = outermost(paths)
        self._getters = {path: getter(path) for path in self.paths}
        self._tops = {rule.top for rule in self.copies}
        self._gathered = [path for rule in self.gathers for path in rule.empty()]
        dotted = [*self._gathered, *(rule.path for rule in [*self.formulas, *self.locals])]
        # The fields in which `expected` sets values at some depth.
        self._inner = self._tops | {top(path) for path in dotted if "." in path}
        self._compared = [getter(path) for path in [*self.paths, *(rule.path for rule in self.formulas)]]
        # Rules that do not hold any value that is computed for them.
        choosy = [rule for rule in self.gathers if type(rule).fits is not GatherRule.fits]
        self._fitted = [(rule, getter(path)) for rule in choosy for path in rule.empty()]
        self._dated = [rule for rule in self.gathers if rule.stamps()]
        # What must be read of documents: all where copies or others need it, else the values alone.
        self.projection: Raw | None = None
        if not (self.copies or self.locals or entry.feeds):
            own = [*paths, *(rule.path for rule in self.formulas), *entry.key_projection()]
            own += [rule.to for rule in self.gathers if rule.to is not None]
            self.projection = dict.fromkeys(outermost(own), 1)

    @classmethod
    def of(
        cls, entry: Entry[Any], maintain: Maintain | None = None, without: frozenset[Rule] = frozenset()
    ) -> Recomputation:
        """The one of a model, made once; `without` rules that are to stay as they are."""
        if without:
            return cls(entry, maintain, without)
        made: dict[Maintain | None, Recomputation] = derivation(entry).recomputations
        if maintain not in made:
            made[maintain] = cls(entry, maintain)
        return made[maintain]

    def keys(self, documents: Sequence[Raw]) -> list[Any]:
        """What sources know these documents by."""
        if self.entry.group is None:
            return [each["_id"] for each in documents]
        return [self.entry.key_of(each) for each in documents]

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
        frozen: Sequence[Any] | None = None,
        gather: Gather | None = None,
    ) -> Plan[list[Raw]]:
        """The documents as they should be stored.

        `befores` tell which values of a moment they had, if that is not what
        they hold. With `guarded` the sources of copies are really written, so
        that nobody can change them before this transaction ends. Without
        `formulas` these are left to the update that writes the rest. `frozen`
        are the documents' keys, frozen, where the caller knows; `gather` gives
        what they gather in another way than by looking at all sources.
        """
        if not documents or not self.rules:
            return list(documents)
        entry = self.entry
        keys = self.keys(documents)
        expected = [self._copied(each) for each in documents]
        frozen = freeze_all(keys) if frozen is None else frozen
        gathering = partial(recompute, self.gathers) if gather is None else gather
        values = yield from gathering(keys, server, frozen, documents)
        for key, right in zip(frozen, expected, strict=True):
            for path, value in values[key].items():
                if "." in path:
                    put(right, path, value)
                else:
                    right[path] = value
        if self.copies:
            pairs = list(zip(befores or documents, expected, strict=True))
            yield from fill_copies(entry, pairs, self.copies, look_only=not guarded, guard_all=guarded)
        for rule in self.locals:
            for right, value in zip(expected, (yield from rule.values(expected)), strict=True):
                put(right, rule.path, value)
        if self.formulas and formulas:
            yield from self._compute(documents, expected)
        return expected

    def _copied(self, document: Raw) -> Raw:
        """A copy, as deep as values are set in it."""
        made = dict(document)
        for name in self._inner:
            if name in made:
                made[name] = copy.deepcopy(made[name])
        return made

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

        rows = yield from in_pieces(keys, attempt, alone)
        return {freeze(row["_id"]): row for row in rows}

    def sets(self, document: Raw, right: Raw, *, wrong: bool = False) -> Raw:
        """The paths that a rewrite sets, with their values as literals; if `wrong`, only incorrect ones."""
        sets = {}
        for path, get in self._getters.items():
            stored, value = get(document), get(right)
            if value is None and stored is None:
                continue
            if not wrong or not same(stored, value):
                sets[path] = {"$literal": value}
        return sets

    def differs(self, document: Raw, right: Raw) -> bool:
        """Whether any derived value of a document is not as it should be."""
        # A loop of its own, since a proof asks this of every document there is.
        for get in self._compared:  # noqa: SIM110
            if not same(get(document), get(right)):
                return True
        return False

    def is_right(self, document: Raw, right: Raw) -> bool:
        """Whether a document is as it should be, which its fields can hold."""
        if self.differs(document, right):
            return False
        return not self._fitted or all(rule.fits(get(right)) for rule, get in self._fitted)

    def rewrite(
        self,
        sets: Raw,
        document: Raw,
        right: Raw,
    ) -> list[Raw]:
        """The update that sets values, with the dates of those that change, and lets formulas follow."""
        refuse_unfit(self.gathers, {path: value_at(right, path) for path in self._gathered})
        changed = [
            rule
            for rule in self._dated
            if any(not same(value_at(document, path), value_at(right, path)) for path in rule.empty())
        ]
        return update_pipeline(self.entry, {**sets, **stamps_of(changed)}, {})
