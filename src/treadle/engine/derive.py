"""Derived values of whole documents, computed from scratch.

`derive` gives documents with all of their derived values; `recompute` stores
what differs, inside a transaction, and adds the changes, so that others
follow. The worker, schedules, `verify`, `repair` and `rebuild` all go through
here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from treadle.engine.aggregation import Values, aggregate_values, refuse_unfit
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import TargetUpdate, derivation, literals, stamps_of, store_derived
from treadle.engine.references import fill_copies
from treadle.engine.salvage import divide
from treadle.errors import DataError
from treadle.graph.changes import Changes, load_images
from treadle.graph.derived import DerivedRule, FormulaRule, LocalRule
from treadle.graph.model_entry import Maintain, ModelEntry
from treadle.graph.quarantine import set_aside
from treadle.graph.rule import REVISION, Rule
from treadle.graph.scope import Failed, Image
from treadle.model.text import get_logger
from treadle.plan import Plan, Raw, aggregate, delete_many, find, update_many
from treadle.plan.decoding import Unreadable
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
        self._prepare_paths()
        self.projection = self._projection()

    def _prepare_paths(self) -> None:
        # What an update sets: copies with the field that holds them.
        tops, computed = {rule.copied.top for rule in self.copies}, [rule.path for rule in self.locals]
        paths = outermost({*self._values, *tops, *computed})
        self._getters = {path: getter(path) for path in paths}
        self._compared = [getter(path) for path in [*paths, *self._formulas]]
        # The fields in which `derive` sets values at some depth.
        inner = [*self._values, *self._formulas, *computed]
        self._inner = tops | {top(path) for path in inner if "." in path}
        # Snapshots that lie in no other field, which may be missing.
        self._snapshots = {rule.path for rule in self.copies if rule.copied.snapshots} & self._getters.keys()

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

    def update(self, document: Raw, derived: Raw) -> TargetUpdate:
        """Return the update that stores what differs, with the dates of what changes."""
        sets = {}
        for path, get in self._getters.items():
            value = get(derived)
            # A snapshot that found no source is stored as null: without the field it would count as unfilled.
            if not same(get(document), value) or (path in self._snapshots and path not in document):
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
        yield from fill_copies(chosen.entry, pairs, chosen.copies, guarded=guarded, lenient=True)
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


# -- storing what is derived -----------------------------------------------------------------------


class Groups(NamedTuple):
    """The ids of the documents of groups that were made, and the keys of those that were removed."""

    made: Sequence[Any] = ()
    removed: Sequence[Any] = ()


def recompute(
    chosen: DerivedValues,
    keys: Sequence[Any],
    changes: Changes,
    *,
    exact: bool = False,
    recall: Callable[[Raw], Raw] | None = None,
    unforced: Collection[Any] | None = None,
    gather: Gather | None = None,
) -> Plan[list[Any]]:
    """Derive the documents of these keys and store what differs. Returns the keys of those that changed.

    With `exact` only documents of the model's own class. `recall` gives a
    document as it was before, where snapshots depend on that. Each document
    is written, so that concurrent writers conflict, and the sources of its
    copies too. With `unforced` no source is written, and the documents of
    these frozen keys only if they are incorrect. `gather` is as in `derive`.
    """
    entry, forces_all = chosen.entry, unforced is None
    groups = Groups()
    if entry.rules.group is not None:
        groups = yield from _arrange_groups(entry, keys, changes)
    images = yield from _images(chosen, keys, exact, None if forces_all else chosen.projection)
    documents = [image.document for image in images]
    befores = documents if recall is None else [recall(each) for each in documents]
    # The worker's copies need their sources written too: it finds a copy correct and leaves it, while this
    # transaction still holds an older value for it.
    derived = yield from derive(chosen, documents, befores, guarded=forces_all, gather=gather)
    writes = _Writes(chosen, set(map(freeze, groups.made)), unforced)
    for image, correct in zip(images, derived, strict=True):
        for rule, error in chosen.leave_refused(image.document, correct):
            yield from set_aside(rule.place.label, entry.collection, entry.key_of(image.document), error)
        writes.add(image, correct)
    yield from writes.store(changes)
    if (groups.removed or writes.changed) and derivation(entry).feeds:
        yield from _note(entry, images, writes.made, changes)
    return [*groups.removed, *writes.changed]


class _Writes:
    """What a recomputation writes."""

    def __init__(self, chosen: DerivedValues, made: set[Any], unforced: Collection[Any] | None) -> None:
        self.chosen = chosen
        self.made = made
        self.unforced = unforced
        # The keys of the documents that change.
        self.changed: list[Any] = []
        self.updates: list[TargetUpdate] = []
        # The ids of outdated documents that are correct: storing them upgraded is up to `migrate`.
        self.bumped: list[Any] = []

    def add(self, image: Image, derived: Raw) -> None:
        document, key = image.document, self.chosen.entry.key_of(image.document)
        is_made = freeze(document["_id"]) in self.made
        if is_made or self.chosen.differs(document, derived):
            self.changed.append(key)
        elif self.unforced is not None and freeze(key) in self.unforced:
            return
        elif image.outdated:
            self.bumped.append(document["_id"])
            return
        # A document that was made here has its values, but not their dates.
        stored = {} if is_made else document
        update = self.chosen.update(stored, derived)
        update.upgraded = document if image.outdated else None
        self.updates.append(update)

    def store(self, changes: Changes) -> Plan[None]:
        entry = self.chosen.entry
        if self.updates:
            yield from store_derived(entry, self.updates)
            upgraded = [each.upgraded["_id"] for each in self.updates if each.upgraded is not None]
            changes.note_upgraded(entry, upgraded)
        if self.bumped:
            yield from update_many(entry.collection, {"_id": {"$in": self.bumped}}, {"$inc": {REVISION: 1}})


def _images(
    chosen: DerivedValues, keys: Sequence[Any], exact: bool, projection: Raw | None
) -> Plan[list[Image]]:
    entry = chosen.entry
    scope = entry.targets.exact if exact else entry.targets
    own = {"_id": {"$in": list(keys)}} if entry.rules.group is None else entry.filter_for_keys(keys)
    failed: Failed = []
    images = yield from scope.find(own, projection=projection, failed=failed)
    if failed:
        # The caller halves its batch until the document is alone, and quarantines it.
        raise Unreadable(entry.collection, failed)
    return images


def _note(entry: ModelEntry, images: Sequence[Image], made: set[Any], changes: Changes) -> Plan[None]:
    """Add the changes of recomputed documents."""
    keys = [image.document["_id"] for image in images]
    stored = yield from by_ids(entry.collection, keys)
    afters = yield from load_images(entry, [stored[freeze(key)] for key in keys])
    for before, after in zip(images, afters, strict=True):
        changes.note(entry, None if freeze(before.document["_id"]) in made else before, after)


# -- rollups ----------------------------------------------------------------------------------------


def _arrange_groups(entry: ModelEntry, keys: Sequence[Any], changes: Changes) -> Plan[Groups]:
    """Let each of these groups have one document if it has sources, else none.

    A document that is made here has all its values, so that its formulas can be evaluated.
    """
    group = entry.rules.group
    documents = yield from find(entry.collection, entry.filter_for_keys(keys), sort=[("_id", 1)])
    members = yield from aggregate_values([group], keys)
    missing = {freeze(key): key for key in keys if members[freeze(key)][group.path]}
    surplus: list[Raw] = []
    for each in documents:
        if missing.pop(freeze(entry.key_of(each)), None) is None:
            surplus.append(each)
    if surplus:
        yield from delete_many(entry.collection, {"_id": {"$in": [each["_id"] for each in surplus]}})
        yield from changes.add(entry, [(each, None) for each in surplus])
    made = (yield from _make_groups(entry, list(missing.values()))) if missing else []
    return Groups(made, [entry.key_of(each) for each in surplus])


def _make_groups(entry: ModelEntry, keys: Sequence[Any]) -> Plan[list[Any]]:
    rules = derivation(entry).aggregates
    values = yield from aggregate_values(rules, keys)
    updates = []
    for key in keys:
        refuse_unfit(rules, values[freeze(key)])
        updates.append(TargetUpdate(key, literals(values[freeze(key)]), blank={}))
    return (yield from store_derived(entry, updates)).made
