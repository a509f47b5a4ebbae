"""The models of a Store, taken together: where each is stored, and what feeds what.

Every declaration is bound here, once per Store. A maintained field has a
level: one more than the highest level among the fields that feed it. Levels
are the order of maintenance; a field that would feed itself has none and is
refused.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from treadle.errors import DeclarationError, UsageError
from treadle.graph import kinds
from treadle.graph.declarations import declarations
from treadle.graph.derived import (
    DerivedRule,
    FormulaRule,
    GroupRule,
    LocalRule,
    aggregates_in,
    aggregates_of,
    copies_in,
    copies_of,
)
from treadle.graph.limits import Limits
from treadle.graph.model_entry import ModelEntry
from treadle.graph.owned import NO_VALUE
from treadle.graph.rule import CARRIED_OUT, NOTHING, TRANSACTIONS, Needs, Rule
from treadle.graph.rule_set import Maintain, implements
from treadle.graph.shards import Shards
from treadle.graph.versions import VersionChain, WriteVersions
from treadle.model.document import Document
from treadle.plan.capabilities import Capabilities
from treadle.query.field_paths import FieldPaths
from treadle.query.paths import (
    Path,
    overlap,
    plain,
    resolve,
)

D = TypeVar("D", bound=Document)
# The families of derived data, which the engine maintains.
DERIVED = (DerivedRule, FormulaRule, LocalRule)
# Of each way to maintain a value: the capabilities that it takes.
_FOLLOWING: Needs = dict.fromkeys(("streams", "pre_images", "split_events"))
_MERGING: Needs = dict.fromkeys(("merges", "unions"), "declare maintain='write' or maintain='stream'")
NEEDED_BY: Mapping[Maintain, Needs] = {
    "write": NOTHING,
    "stream": {**_FOLLOWING, **TRANSACTIONS},
    "schedule": {**_FOLLOWING, **_MERGING},
}


def needs_of(rule: Rule) -> Needs:
    """Return the capabilities that a rule takes, each as in `Rule.needs`."""
    is_derived = isinstance(rule, DERIVED) or implements(rule, "record")
    needs = {**NEEDED_BY[rule.maintain], **(TRANSACTIONS if is_derived else NOTHING), **rule.needs}
    if rule.maintain == "stream" and isinstance(rule, DerivedRule) and not rule.is_copy:
        # The event of a deletion has the id alone; the pre-image has the key of the target.
        needs["pre_images"] = (
            "use MongoDB 6.0 or newer, which keeps them, or declare maintain='write' or maintain='schedule'"
        )
    return needs


@dataclass(slots=True, eq=False, repr=False)
class Stage:
    """The rules of one level, those that aggregate by their sources."""

    level: int
    aggregates: list[tuple[ModelEntry[Any], list[DerivedRule]]]
    copies: list[DerivedRule]
    # Those whose sources refer to the target by an alternate key.
    by_alternate_key: list[DerivedRule]


class Graph:
    """All models of a Store, by class and by name."""

    def __init__(
        self,
        models: Iterable[type[Any]],
        write_versions: WriteVersions = None,
        limits: Limits | None = None,
    ) -> None:
        if not isinstance(limits, Limits | None):
            raise UsageError(f"limits={limits!r} is no Limits", code="limits-invalid")
        self.limits = limits or Limits()
        self.entries: dict[type[Document], ModelEntry[Any]] = {}
        self.by_collection: dict[str, ModelEntry[Any]] = {}
        # Collections that patterns need beside the models' own, for set-up.
        self.sides: dict[str, ModelEntry[Any]] = {}
        for model in models:
            self._add(model)
        kinds.join(self)
        kinds.bind_versions(self, write_versions)
        kinds.bind_scopes(self)
        # Those above first: what a kind inherits is bound where it is declared.
        declared: kinds.Declared = {}
        for entry in sorted(self.entries.values(), key=lambda entry: len(entry.kinds.above)):
            for place, pattern in declarations(entry):
                if not kinds.is_inherited(declared, entry, place, pattern):
                    rule = pattern.bind(place, self)
                    rule.declared, rule.models = pattern, self
                    self._place(entry, rule)
        kinds.spread(self)
        # Every rule once.
        self.rules = list(dict.fromkeys(rule for entry in self.entries.values() for rule in entry.rules))
        for rule in self.rules:
            kinds.add_to_scopes(rule)
        for rule in self.rules:
            rule.check(self)
        self._refuse_maintained_names()
        self._refuse_derived_readings()
        self.shards = Shards(self.entries.values())
        self.shards.check(self.rules)
        self._find_levels()
        for entry in self.entries.values():
            self._find_watched(entry)
            if entry.kinds.root is entry:
                entry.versions.formulas = kinds.build_formula_stages(entry)
            owned, followed = entry.paths.owned_in_collection, entry.effects.followed
            entry.paths.fields = FieldPaths(entry.codec, owned, followed)
        # Per level what reacts to a change; asked for at every write.
        self.stages = [self._stage(level) for level in sorted({rule.level for rule in self.rules})]
        # What goes beside every change, however it came about.
        recording = [rule for rule in self.rules if rule.maintain == "write" and implements(rule, "record")]
        self.spreading = [rule for rule in recording if rule.spreads]
        self.recording = [rule for rule in recording if not rule.spreads]
        self.derives = any(not entry.effects.is_plain for entry in self.entries.values())
        for model, entry in self.entries.items():
            type.__setattr__(model, "__treadle_maintained__", entry.maintained_fields())

    def _add(self, model: Any) -> None:
        if not (isinstance(model, type) and issubclass(model, Document)):
            raise DeclarationError(
                f"{model!r} is not a Document; models= takes Document classes", code="model-invalid"
            )
        if model in self.entries:
            return
        entry: ModelEntry[Any] = ModelEntry(model, self.limits)
        root = kinds.root_of(model)
        if root is not None and root is not model:
            self._add(root)
        other = self.by_collection.setdefault(entry.collection, entry)
        if other is not entry and other.model is not root:
            raise DeclarationError(
                f"{model.__name__} and {other.model.__name__} both name the collection "
                f"{entry.collection!r}; give each its own",
                code="collection-shared",
            )
        self._refuse_shared_name(model)
        self.entries[model] = entry

    def _refuse_shared_name(self, model: type[Document]) -> None:
        """Refuse a second model of one class name: declarations may name their source by it."""
        for other in self.entries:
            if other.__name__ == model.__name__:
                places = " and ".join(f"{each.__module__}.{each.__qualname__}" for each in (other, model))
                raise DeclarationError(
                    f"two models of this Store are named {model.__name__!r}: {places}; rename one",
                    code="model-name-shared",
                )

    def entry(self, model: type[D]) -> ModelEntry[D]:
        """The entry of a model that was given to the Store."""
        try:
            return self.entries[model]
        except (KeyError, TypeError):
            raise self.not_a_model(model) from None

    def not_a_model(self, given: Any) -> UsageError:
        """What to say to a caller who names no model of this Store."""
        known = ", ".join(sorted(each.__name__ for each in self.entries)) or "none"
        if isinstance(given, type) and issubclass(given, Document):
            what = f"{given.__name__} is not among the models of this Store ({known}); add it to models="
        else:
            kind = type(given).__name__
            what = f"this takes one of the models of this Store ({known}), the class itself; it got "
            what += f"the class {given.__name__}" if isinstance(given, type) else f"a value of type {kind}"
        return UsageError(what, code="model-unknown")

    def not_a_document(self, given: Any) -> UsageError:
        """What to say to a caller who passes no document of this Store."""
        if isinstance(given, Document):
            return self.not_a_model(type(given))
        if isinstance(given, type):
            what = f"got the class {given.__name__} itself; make a document of it: {given.__name__}(…)"
        elif inspect.isawaitable(given):
            what = f"got a {type(given).__name__} that nobody has awaited; write await before it"
        elif isinstance(given, Mapping):
            what = "got a dict; make a document of it by its model: Order(**values), or Order.model_validate"
        else:
            what = f"got a value of type {type(given).__name__}"
        known = ", ".join(sorted(each.__name__ for each in self.entries)) or "none"
        return UsageError(
            f"this takes a document of one of the models of this Store ({known}), and {what}",
            code="model-unknown",
        )

    def chosen(self, models: Iterable[type[Document]]) -> list[ModelEntry[Any]]:
        """The entries of these models; of all, if none is named."""
        chosen = [each for model in models for each in [self.entry(model), *self.entry(model).kinds.below]]
        return list(dict.fromkeys(chosen)) or list(self.entries.values())

    # -- for the patterns' bind() -----------------------------------------------------

    def resolve(self, source: Any, where: str) -> ModelEntry[Any]:
        """The source of a declaration, which may be a class or a name."""
        if isinstance(source, str):
            for entry in self.entries.values():
                if entry.model.__name__ == source:
                    return entry
            near = difflib.get_close_matches(source, [model.__name__ for model in self.entries], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "add it to models="
            raise DeclarationError(
                f"{where} takes its data from {source!r}, which is not among this Store's models; {hint}",
                code="source-unknown",
            )
        if source not in self.entries:
            raise DeclarationError(
                f"{where} takes its data from {getattr(source, '__name__', source)}, which is not among the "
                "models of this Store; add it to models=",
                code="source-unknown",
            )
        return self.entries[source]

    def add_side(self, model: type[Document], where: str) -> ModelEntry[Any]:
        """The entry of a collection that a pattern keeps beside those of the models."""
        entry: ModelEntry[Any] = ModelEntry(model, self.limits)
        if entry.collection in self.by_collection or entry.collection in self.sides:
            raise DeclarationError(
                f"{where} names the collection {entry.collection!r}, which is used for something else; "
                "give it one of its own",
                code="collection-shared",
            )
        entry.versions = VersionChain(model)
        kinds.set_scopes(entry)
        self.sides[entry.collection] = entry
        return entry

    def check_reference(
        self, reference: Path, referenced: ModelEntry[Any], where: str, to: str | None = None
    ) -> str | None:
        held, expected, what = reference.shape, referenced.ids.shape, "the id of "
        named = None
        if to not in (None, "id", "_id"):
            named = resolve(referenced.codec, to, where, "reference-key")
            expected, what = named.shape, f"{to!r} of "
            if named.in_array or expected.kind in ("model", "map"):
                raise DeclarationError(
                    f"{where} has to={to!r}, which is no single value of {referenced.model.__name__}; name "
                    "a field that holds one value, different in each document",
                    code="reference-key",
                )
            referenced.paths.alternate_keys[named.stored] = named
        if held.kind == "scalar" and expected.kind == "scalar" and held.python is not expected.python:
            raise DeclarationError(
                f"{where} finds its {referenced.model.__name__} by {reference.python!r}, a "
                f"{held.python.__name__}, but {what}{referenced.model.__name__} is a "
                f"{expected.python.__name__}; declare the same type",
                code="reference-type",
            )
        return None if named is None else named.stored

    # -- binding ------------------------------------------------------------------------

    def _place(self, entry: ModelEntry[Any], rule: Rule) -> None:
        _require_carrier(rule)
        for own in rule.owns():
            for taken, other in entry.paths.owned.items():
                if overlap(own.path, taken) and not (own.path == taken and own.shared and other.shared):
                    label = entry.owner(taken).place.label
                    raise DeclarationError(
                        f"{rule.place.label} and {label} both maintain {own.path!r}; keep one",
                        code="path-maintained-twice",
                    )
            entry.paths.owned.setdefault(own.path, own)
        entry.rules.add(rule)
        if rule.source is not entry or isinstance(rule, DerivedRule):
            rule.source.effects.add(rule)
        if isinstance(rule, GroupRule):
            entry.rules.group = rule
        layout = rule.layout(None)
        if layout is not None:
            if entry.layout is not None:
                raise DeclarationError(
                    f"{entry.model.__name__} is to be stored in two ways; keep one of its class keywords "
                    f"{', '.join(f'{keyword}=' for keyword in entry.model.__treadle__.patterns)}",
                    code="layout-twice",
                )
            entry.layout = layout

    def _refuse_maintained_names(self) -> None:
        """A field by which others name a document is the caller's to write."""
        for entry in self.entries.values():
            for path in entry.paths.alternate_keys:
                for maintained in entry.paths.owned:
                    if overlap(path, maintained):
                        label = entry.owner(maintained).place.label
                        raise DeclarationError(
                            f"{label} is maintained, and to={path!r} finds documents of "
                            f"{entry.model.__name__} by it; name a field that callers write",
                            code="reference-key",
                        )

    def _refuse_derived_readings(self) -> None:
        """Whatever is not stored one by one feeds nothing and maintains nothing."""
        for rule in self.rules:
            touched = [rule.target, *(self.by_collection[name] for name in rule.reads())]
            for entry in touched:
                if entry.layout is not None and rule.layout(None) is None and not rule.scope().collections:
                    raise DeclarationError(
                        f"{rule.place.label} would have to follow each reading of {entry.model.__name__}, "
                        "which are not stored one by one; use the statistics of its buckets, or store the "
                        "readings as documents",
                        code="layout-derived",
                    )

    def check_server(self, server: Capabilities) -> Capabilities:
        """The server's capabilities, if every declaration can be kept with them."""
        if not server.retryable_writes and not server.standalone:
            raise UsageError(
                "this server refuses retryable writes, without which a write may be done twice after a lost "
                "connection; use a server that has them (Amazon DocumentDB has them from 8.0.2 on)",
                code="retryable-writes-missing",
            )
        if self.rules and not server.pipeline_updates:
            raise UsageError(
                "this server has no updates by pipeline, by which Treadle maintains values; use MongoDB 6.0 "
                "or newer, or an engine that has them",
                code="pipeline-updates-missing",
            )
        for rule in self.rules:
            if rule.maintain == "stream" and server.transactions and not server.streams:
                raise DeclarationError(
                    f"{rule.place.label}: maintain='stream' follows change streams, and this server has none "
                    "of a whole database with cluster times; declare maintain='write'",
                    code="streams-unavailable",
                )
            for name, instead in needs_of(rule).items():
                if instead is not None:
                    server.require(name, f"{rule.place.label}: {rule.pattern}", instead)
        return server

    @property
    def uses(self) -> frozenset[str]:
        """The capabilities on which anything declared here depends."""
        return frozenset().union(*map(needs_of, self.rules))

    def _find_levels(self) -> None:
        levels: dict[Rule, int] = {}
        under_way: list[Rule] = []

        def level(rule: Rule) -> int:
            if rule in levels:
                return levels[rule]
            if rule in under_way:
                around = " -> ".join(each.place.label for each in [*under_way[under_way.index(rule) :], rule])
                raise DeclarationError(
                    f"these fields would be computed from each other for ever: {around}; break the cycle",
                    code="maintenance-cycle",
                )
            under_way.append(rule)
            feeding = list(self._feeding(rule))
            levels[rule] = 1 + max(map(level, feeding), default=0)
            if isinstance(rule, LocalRule) and (feeding or rule.target.rules.group is not None):
                made = feeding[0].place.label if feeding else rule.target.model.__name__
                raise DeclarationError(
                    f"{rule.place.label} is computed in Python when a caller writes its document, but "
                    f"{made} changes with the writes of others; compute it from fields that callers write",
                    code="local-derived",
                )
            under_way.pop()
            return levels[rule]

        for rule in self.rules:
            rule.level = level(rule)

    def _stage(self, level: int) -> Stage:
        aggregates = []
        for entry in self.entries.values():
            own = [rule for rule in aggregates_of(entry) if rule.level == level and rule.source is entry]
            if own:
                aggregates.append((entry, own))
        copies = [
            rule
            for entry in self.entries.values()
            for rule in copies_in(entry, "write")
            if rule.level == level and rule.target is entry
        ]
        by_alternate_key = [rule for _, own in aggregates for rule in own if rule.alternate_key]
        return Stage(level, aggregates, copies, by_alternate_key)

    def _feeding(self, rule: Rule) -> Iterator[Rule]:
        """The rules whose maintained fields this rule reads."""
        for collection, paths in rule.reads().items():
            source = rule.source
            if source.collection != collection:
                source = self.by_collection[collection]
            for other in dict.fromkeys(each for related in source.kinds.related for each in related.rules):
                owned = [each.path for each in other.owns()]
                if (paths is None and other is not rule and owned) or any(
                    overlap(path, each) for path in paths or () for each in owned
                ):
                    yield other

    def _find_watched(self, entry: ModelEntry[Any]) -> None:
        watched: set[str] | None = set()
        own = [
            rule
            for each in entry.kinds.related
            for rule in each.rules
            if isinstance(rule, (FormulaRule, LocalRule)) or rule in each.rules.implementing("record")
        ]
        copies = [rule for each in entry.kinds.related for rule in copies_in(each)]
        for rule in [*entry.effects.on_write, *own]:
            paths = rule.reads().get(entry.collection, set())
            watched = None if watched is None or paths is None else watched | paths
        if watched is not None:
            watched |= {rule.on.path for rule in copies} | {rule.path for rule in copies}
            # What names a document decides what it gathers.
            watched |= {path for each in entry.kinds.related for path in each.paths.alternate_keys}
            if entry.kinds.family is not None:
                watched.add(entry.kinds.family.discriminator)
        entry.effects.followed = None if watched is None else {plain(path) for path in watched}
        restricting = any(rule.on_delete == "restrict" for rule in copies_of(entry, None))
        acting = any(each.rules for each in entry.kinds.related if each.layout is None)
        entry.effects.is_plain = not (acting or entry.effects.on_write or restricting)
        reached: set[str] = set()
        pending = [rule.target for rule in entry.effects.on_write]
        while pending:
            target = pending.pop()
            if target.collection not in reached:
                reached.add(target.collection)
                pending.extend(rule.target for rule in target.effects.on_write)
        named = [rule for each in entry.kinds.related for rule in aggregates_in(each) if rule.alternate_key]
        entry.effects.may_affect_itself = entry.collection in reached or bool(named)


def graph_of(rule: Rule) -> Graph:
    """The graph in which a rule is bound."""
    assert isinstance(rule.models, Graph)
    return rule.models


def _require_carrier(rule: Rule) -> None:
    """Refuse a rule that nothing carries out: it would be ignored."""
    sets = any(owned.on_write or owned.blank is not NO_VALUE for owned in rule.owns())
    carried = (
        isinstance(rule, DERIVED)
        or sets
        or any(
            implements(rule, method)
            for method in CARRIED_OUT
            # Work that has no name is never due.
            if method != "run_due" or rule.due_work
        )
    )
    if not carried:
        raise DeclarationError(
            f"{rule.place.label}: {type(rule).__name__} is no DerivedRule, FormulaRule or "
            f"LocalRule, and answers none of {', '.join(CARRIED_OUT)}, so nothing would carry it out",
            code="rule-not-carried-out",
        )
