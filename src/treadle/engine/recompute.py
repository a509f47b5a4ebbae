"""Derived values from scratch: what every fast path must equal.

`recompute` computes the values of some targets from their sources.
`Recomputation` gives whole documents with all of their derived values, and
the updates that store these. The fill of new targets, the worker, `verify`,
`repair` and `rebuild` all go through here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from treadle.engine.pipelines import derivation, stamps_of, update_pipeline
from treadle.engine.references import fill_copies
from treadle.engine.salvage import divide
from treadle.errors import DataError
from treadle.graph.aggregate import ENTRY, State
from treadle.graph.derived import DerivedRule, FormulaRule, LocalRule, source_paths
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import Rule
from treadle.graph.rule_set import Maintain
from treadle.graph.scope import ROWS, beside
from treadle.model.text import get_logger
from treadle.plan import Plan, Raw, aggregate, find
from treadle.plan.capabilities import Capabilities
from treadle.query.comparison import same
from treadle.query.keys import KEY, distinct, freeze, freeze_all
from treadle.query.paths import getter, outermost, put, top, value_at

Values = dict[Any, dict[str, Any]]
# The values of targets by their keys, the server, the keys frozen, and the targets themselves.
Gather = Callable[[Sequence[Any], Capabilities, Sequence[Any], Sequence[Raw]], Plan[Values]]

R = TypeVar("R", bound=Rule)

log = get_logger(__name__)


def recompute(
    rules: Iterable[DerivedRule],
    keys: Sequence[Any],
    server: Capabilities,
    frozen: Sequence[Any] | None = None,
    documents: Sequence[Raw] | None = None,
) -> Plan[Values]:
    """Compute the values of some targets, by path, from their sources. Returns them by frozen key.

    `frozen` are the keys as they are frozen, and `documents` the targets,
    where the caller knows.
    """
    values: Values = {key: {} for key in (freeze_all(keys) if frozen is None else frozen)}
    by_name: dict[str, list[DerivedRule]] = {}
    by_key: list[DerivedRule] = []
    for rule in rules:
        (by_key if not rule.alternate_key else by_name.setdefault(rule.alternate_key, [])).append(rule)
    yield from _recompute(by_key, keys, server, values)
    for named in by_name.values() if keys else ():
        if documents is None:
            target = named[0].target
            documents = yield from find(
                target.collection, {"_id": {"$in": list(keys)}}, dict.fromkeys(by_name, 1)
            )
        yield from _recompute_named(named, documents, server, values)
    return values


def _recompute_named(
    rules: Sequence[DerivedRule], documents: Sequence[Raw], server: Capabilities, values: Values
) -> Plan[None]:
    """Compute the values of targets that their sources refer to by another field than the id."""
    names = {freeze(each["_id"]): rules[0].unique_key(each) for each in documents}
    wanted = distinct(name for name in names.values() if name is not None)
    by_name: Values = {freeze(name): {} for name in wanted}
    yield from _recompute(rules, wanted, server, by_name)
    for key in values:
        name = names.get(key)
        for part in [rule.empty() for rule in rules] if name is None else [by_name[freeze(name)]]:
            values[key].update(part)


def _recompute(
    rules: Sequence[DerivedRule], keys: Sequence[Any], server: Capabilities, values: Values
) -> Plan[None]:
    """Compute the values of targets, given what their sources refer to them by."""
    if not keys:
        return
    folds: dict[Any, list[DerivedRule]] = {}
    for rule in rules:
        if rule.first is None or (len(keys) > 1 and rule.aggregate.accumulators()):
            folds.setdefault(rule.group_key, []).append(rule)
            continue
        ranked = yield from _rank(rule, rule.first, keys, server)
        for key, state in ranked.items():
            values[key].update(rule.aggregate.finish(state))
    for together in folds.values():
        fold = Fold(together)
        rows = yield from _sources(together, keys, fold.stages(keys))
        states = fold.by_key(rows)
        for key, parts in values.items():
            parts.update(fold.finish(states.get(key)))


def _sources(rules: Sequence[DerivedRule], keys: Sequence[Any], stages: Sequence[Raw]) -> Plan[list[Raw]]:
    """Aggregate over all sources of some targets, for rules that agree in their sources."""
    rule = rules[0]
    own = beside(rule.match.condition(keys), rule.condition)
    return rule.source.sources.group(own, stages, reads=source_paths(rules), keep=_contributing(rule, keys))


def _contributing(rule: DerivedRule, keys: Sequence[Any]) -> Callable[[Raw], bool] | None:
    """Return which sources may contribute to some targets, where Python can tell."""
    if not rule.match.is_local:
        return None
    wanted = {freeze(key) for key in keys}
    return lambda source: not wanted.isdisjoint(rule.match.of(source))


class Fold:
    """Rules with the same contributions, whose states one `$group` computes."""

    def __init__(self, rules: Sequence[DerivedRule]) -> None:
        self._rules = rules
        self._columns = [
            (rule.aggregate, {name: f"{name}{number}" for name in rule.aggregate.accumulators()})
            for number, rule in enumerate(rules)
        ]
        self._accumulators = {
            columns[name]: accumulator.expression
            for value, columns in self._columns
            for name, accumulator in value.accumulators().items()
        }

    def stages(self, keys: Sequence[Any]) -> list[Raw]:
        """Return the stages that give one row per target, of sources that may contribute."""
        rule = self._rules[0]
        *stages, last = rule.match.stages(keys, rule.unit)
        if list(last.get("$set", ())) == [KEY]:
            # A key that is grouped by at once takes a fifth less than one that is first set.
            return [*stages, {"$group": {"_id": last["$set"][KEY], **self._accumulators}}]
        return [*stages, last, {"$group": {"_id": f"${KEY}", **self._accumulators}}]

    def by_key(self, rows: Iterable[Raw]) -> dict[Any, list[State]]:
        """Return the states of each target, one per rule, from the rows of all parts."""
        states: dict[Any, list[State]] = {}
        for row in rows:
            key = freeze(row["_id"])
            own: list[State] = [
                {name: row[column] for name, column in columns.items()} for _, columns in self._columns
            ]
            if key in states:
                pairs = zip(self._columns, states[key], own, strict=True)
                own = [value.merge([one, other]) for (value, _), one, other in pairs]
            states[key] = own
        return states

    def finish(self, states: Sequence[State] | None) -> dict[str, Any]:
        """Return the values of one target by path; `states` is None where it has no sources."""
        values: dict[str, Any] = {}
        for number, (value, _) in enumerate(self._columns):
            values.update(value.finish(value.empty() if states is None else states[number]))
        return values


def _rank(
    rule: DerivedRule, first: Sequence[Raw], keys: Sequence[Any], server: Capabilities
) -> Plan[dict[Any, State]]:
    """Find the first sources of each target by an index, in memory bounded per target."""
    if len(keys) > 1 and _may_look_up(rule, server):
        return (yield from _look_up(rule, first, keys))
    states: dict[Any, State] = {}
    for key in keys:
        chosen = rule.match.stages([key], rule.unit) if rule.unit else []
        mine = [{"$match": {KEY: {"$eq": key}}}] if rule.unit else []
        rows = yield from _sources([rule], [key], [*chosen, *mine, *first])
        state = rule.aggregate.of_first([row.get(ENTRY) for row in rows])
        scope = rule.source.sources
        divided = scope.archive is not None or scope.versions.may_change
        states[freeze(key)] = rule.aggregate.merge([state]) if divided else state
    return states


def _may_look_up(rule: DerivedRule, server: Capabilities) -> bool:
    """Return whether a `$lookup` finds the sources of a target; in a transaction it may not meet shards."""
    spread = server.sharded or any(each.model.__treadle__.shard_key for each in (rule.source, rule.target))
    return not (spread or rule.unit)


def _look_up(rule: DerivedRule, first: Sequence[Raw], keys: Sequence[Any]) -> Plan[dict[Any, State]]:
    """Find the first sources of many targets in one command for each part of the sources."""
    ranked = rule.aggregate
    # Of outdated sources, which are few at a time, all contributions.
    grouped: Raw = {"$group": {"_id": f"${KEY}", ENTRY: {"$push": ranked.expression()}}}
    rows = yield from rule.source.sources.lookup(
        keys,
        rule.match.path,
        rule.condition,
        first,
        [*rule.match.stages(keys), grouped],
        reads=rule.source_paths,
        keep=_contributing(rule, keys),
    )
    states = {freeze(key): ranked.empty() for key in keys}
    parts: dict[Any, list[State]] = {}
    for row in rows:
        if ROWS in row:
            key, state = row[KEY], ranked.of_first([each.get(ENTRY) for each in row[ROWS]])
        else:
            key, state = row["_id"], ranked.state_of(row[ENTRY])
        parts.setdefault(freeze(key), []).append(state)
    for key in states:
        states[key] = parts[key][0] if len(parts[key]) == 1 else ranked.merge(parts[key])
    return states


def refuse_unfit(rules: Sequence[DerivedRule], values: Raw) -> None:
    """Refuse values that their fields could not hold."""
    for rule in rules:
        if (error := rule.aggregate.refuse(values)) is not None:
            raise error


class Recomputation:
    """The derived values of one model's documents: all of them, or those maintained in one way."""

    def __init__(
        self, entry: ModelEntry[Any], maintain: Maintain | None = None, without: Collection[Rule] = ()
    ) -> None:
        self.entry = entry

        def own(kind: type[R]) -> list[R]:
            return [rule for rule in entry.rules.of_type(kind, maintain) if rule not in without]

        derived = own(DerivedRule)
        self.aggregates = [rule for rule in derived if not rule.is_copy]
        self.copies = [rule for rule in derived if rule.is_copy]
        self.formulas, self.locals = own(FormulaRule), own(LocalRule)
        self._gathered = [path for rule in self.aggregates for path in rule.empty()]
        computed = [rule.path for rule in self.locals]
        formulas = [rule.path for rule in self.formulas]
        tops = {rule.copied.top for rule in self.copies}
        # Those that lie in no other field, which may be missing.
        self._snapshots = {
            rule.path for rule in self.copies if rule.copied.snapshots and rule.path == rule.copied.top
        }
        # What a rewrite sets; copies with the field that holds them.
        self.paths = outermost({*self._gathered, *tops, *computed})
        self._getters = {path: getter(path) for path in self.paths}
        # The fields in which `expected` sets values at some depth.
        self._inner = tops | {top(path) for path in [*self._gathered, *formulas, *computed] if "." in path}
        self._compared = [getter(path) for path in [*self.paths, *formulas]]
        self._refusing = [(rule.aggregate.refuse, rule.path, getter(rule.path)) for rule in self.aggregates]
        self._dated = [rule for rule in self.aggregates if rule.stamps()]
        # What must be read of documents: all where copies or others need it, else the values alone.
        self.projection: Raw | None = None
        if not (self.copies or self.locals or entry.effects.on_write or entry.versions.may_change):
            named = [rule.alternate_key for rule in self.aggregates if rule.alternate_key]
            shown = outermost([*self._gathered, *formulas, *entry.key_projection(), *named])
            self.projection = dict.fromkeys(shown, 1)

    @classmethod
    def of(
        cls, entry: ModelEntry[Any], maintain: Maintain | None = None, without: frozenset[Rule] = frozenset()
    ) -> Recomputation:
        """Return the recomputation of a model, made once; `without` rules whose values are to stay."""
        if without:
            return cls(entry, maintain, without)
        made: dict[Maintain | None, Recomputation] = derivation(entry).recomputations
        if maintain not in made:
            made[maintain] = cls(entry, maintain)
        return made[maintain]

    def keys(self, documents: Sequence[Raw]) -> list[Any]:
        """Return what sources refer to these documents by."""
        if self.entry.rules.group is None:
            return [each["_id"] for each in documents]
        return [self.entry.key_of(each) for each in documents]

    @property
    def rules(self) -> list[Rule]:
        return [*self.aggregates, *self.copies, *self.formulas, *self.locals]

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
        """Return the documents with the derived values that they should have.

        `befores` are the documents that held the snapshots, if that is not
        `documents`. With `guarded` the sources of copies are really written,
        so that a concurrent writer of one conflicts. Without `formulas` these
        are left to the update that writes the rest. `frozen` are the
        documents' keys, frozen, where the caller knows them; `gather` computes
        the aggregates in another way than from all sources.
        """
        if not documents or not self.rules:
            return list(documents)
        entry = self.entry
        keys = self.keys(documents)
        expected = [self._copied(each) for each in documents]
        frozen = freeze_all(keys) if frozen is None else frozen
        gathering = partial(recompute, self.aggregates) if gather is None else gather
        values = yield from gathering(keys, server, frozen, documents)
        for key, correct in zip(frozen, expected, strict=True):
            for path, value in values[key].items():
                if "." in path:
                    put(correct, path, value)
                else:
                    correct[path] = value
        if self.copies:
            pairs = list(zip(befores or documents, expected, strict=True))
            yield from fill_copies(entry, pairs, self.copies, look_only=not guarded, guard_all=guarded)
        for rule in self.locals:
            for correct, value in zip(expected, (yield from rule.values(expected)), strict=True):
                put(correct, rule.path, value)
        if self.formulas and formulas:
            yield from self._compute(documents, expected)
        return expected

    def _copied(self, document: Raw) -> Raw:
        """Return a copy, as deep as values are set in it."""
        made = dict(document)
        for name in self._inner:
            if name in made:
                made[name] = copy.deepcopy(made[name])
        return made

    def _compute(self, documents: Sequence[Raw], expected: Sequence[Raw]) -> Plan[None]:
        rows = yield from self._formulas_now([each["_id"] for each in documents])
        for document, correct in zip(documents, expected, strict=True):
            row = rows.get(freeze(correct["_id"]))
            for number, formula in enumerate(self.formulas):
                # What the server cannot compute is not a finding.
                value = row.get(f"f{number}") if row is not None else value_at(document, formula.path)
                put(correct, formula.path, value)

    def _formulas_now(self, keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
        """Return what the formulas of these documents give; no row where the server cannot compute one."""
        computed = {f"f{number}": formula.expression for number, formula in enumerate(self.formulas)}

        def attempt(some: Sequence[Any]) -> Plan[list[Raw]]:
            # An outdated document had its formulas computed when it was upgraded.
            chain = self.entry.versions
            chosen = {"_id": {"$in": list(some)}, **(chain.current_only if chain.may_change else {})}
            # Not $project, where a plain number would mean to include a field.
            stages = [{"$match": chosen}, {"$replaceWith": {"_id": "$_id", **computed}}]
            return (yield from aggregate(self.entry.collection, stages))

        def alone(key: Any, error: Exception) -> Plan[list[Raw]]:
            log.warning("a formula of %s %r cannot be computed: %s", self.entry.model.__name__, key, error)
            return []
            yield  # pragma: no cover

        rows = yield from divide(keys, attempt, alone)
        return {freeze(row["_id"]): row for row in rows}

    def differs(self, document: Raw, correct: Raw) -> bool:
        """Return whether any derived value of a document is incorrect."""
        # A loop of its own, since a proof asks this of every document there is.
        for get in self._compared:  # noqa: SIM110
            if not same(get(document), get(correct)):
                return True
        return False

    def is_correct(self, document: Raw, correct: Raw) -> bool:
        """Return whether a document holds the correct values, and its fields can hold them."""
        if self.differs(document, correct):
            return False
        return all(refuse({path: get(correct)}) is None for refuse, path, get in self._refusing)

    def leave_refused(self, document: Raw, correct: Raw) -> list[tuple[DerivedRule, DataError]]:
        """Put back into `correct` what is stored for rules whose fields cannot hold their values.

        Returns these rules with the reasons. The values of all other rules are stored.
        """
        refused = []
        for rule, (refuse, path, get) in zip(self.aggregates, self._refusing, strict=True):
            if (error := refuse({path: get(correct)})) is not None:
                refused.append((rule, error))
                for each in rule.empty():
                    put(correct, each, value_at(document, each))
        return refused

    def rewrite(self, document: Raw, correct: Raw, *, incorrect_only: bool = False) -> list[Raw]:
        """Return the update that stores the correct values, with the dates of those that change.

        Formulas follow in the same update.
        """
        sets = {}
        for path, get in self._getters.items():
            stored, value = get(document), get(correct)
            is_stored = same(stored, value) if incorrect_only else stored is None and value is None
            # A snapshot that found no source is stored as null: without the field it would count as unfilled.
            if not is_stored or (path in self._snapshots and path not in document):
                sets[path] = {"$literal": value}
        changed = [
            rule
            for rule in self._dated
            if any(not same(value_at(document, path), value_at(correct, path)) for path in rule.empty())
        ]
        return update_pipeline(self.entry, {**sets, **stamps_of(changed)}, {})
