"""All models of a Store: where each is stored, and the rules that are bound to it, once per Store."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from treadle.errors import DeclarationError, UsageError
from treadle.graph import kinds
from treadle.graph.declarations import declarations
from treadle.graph.derived import (
    DerivedRule,
    FormulaRule,
    GroupRule,
    LocalRule,
)
from treadle.graph.levels import find_effects, levels_of, set_levels
from treadle.graph.limits import Limits
from treadle.graph.model_entry import Maintain, ModelEntry, implements
from treadle.graph.owned import NO_VALUE, Owned
from treadle.graph.rule import CARRIED_OUT, NOTHING, TRANSACTIONS, Needs, Rule
from treadle.graph.shards import Shards
from treadle.graph.versions import VersionChain, WriteVersions
from treadle.model.document import Document
from treadle.plan.capabilities import Capabilities
from treadle.query.field_paths import FieldPaths
from treadle.query.paths import (
    Path,
    overlap,
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
    # Transactions first: where they are missing, the advice is another than for what else is.
    needs = {**(TRANSACTIONS if is_derived else NOTHING), **NEEDED_BY[rule.maintain], **rule.needs}
    if rule.maintain == "stream" and isinstance(rule, DerivedRule) and not rule.is_copy:
        # The event of a deletion has the id alone; the pre-image has the key of the target.
        needs["pre_images"] = (
            "use MongoDB 6.0 or newer, which keeps them, or declare maintain='write' or maintain='schedule'"
        )
    return needs


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
        self.entries: dict[type[Document], ModelEntry] = {}
        self.by_collection: dict[str, ModelEntry] = {}
        # Collections that patterns need beside the models' own, for set-up.
        self.sides: dict[str, ModelEntry] = {}
        for model in models:
            self._add(model)
        kinds.join(self)
        kinds.bind_versions(self, write_versions)
        kinds.bind_scopes(self)
        self._bind_declarations()
        # Every rule once.
        self.rules: list[Rule] = list(
            dict.fromkeys(rule for entry in self.entries.values() for rule in entry.rules)
        )
        for rule in self.rules:
            kinds.add_to_scopes(rule)
        self.shards = Shards(self.entries.values())
        self._check_rules()
        set_levels(self.rules, self.by_collection)
        for entry in self.entries.values():
            self._complete(entry)
        # What follows a change, level by level, and what is written beside every change.
        self.levels = levels_of([*self.entries.values()], self.rules)
        recording = [rule for rule in self.rules if rule.maintain == "write" and implements(rule, "record")]
        self.spreading = [rule for rule in recording if rule.spreads]
        self.recording = [rule for rule in recording if not rule.spreads]
        self.derives = any(not entry.effects.is_plain for entry in self.entries.values())

    def _bind_declarations(self) -> None:
        """Bind each declaration once, at the topmost model that has it, and let kinds inherit the rule."""
        declared: kinds.Declared = {}
        for entry in sorted(self.entries.values(), key=lambda entry: len(entry.kinds.above)):
            for place, pattern in declarations(entry):
                if not kinds.is_inherited(declared, entry, place, pattern):
                    rule = pattern.bind(place, self)
                    rule.declared, rule.models = pattern, self
                    self._add_rule(entry, rule)
        kinds.spread(self)

    def _check_rules(self) -> None:
        for rule in self.rules:
            rule.check(self)
        for rule in self.rules:
            self._refuse_reading_layouts(rule)
        for entry in self.entries.values():
            _refuse_maintained_keys(entry)
        self.shards.check(self.rules)

    def _complete(self, entry: ModelEntry) -> None:
        """Set what is known of a model once all rules and their levels are."""
        find_effects(entry)
        entry.paths.fields = FieldPaths(entry.codec, entry.paths.owned_in_collection, entry.effects.followed)
        if entry.kinds.root is entry:
            entry.versions.formulas = kinds.build_formula_stages(entry)
            entry.versions.current_fields = kinds.stored_fields(entry)
        type.__setattr__(entry.model, "__treadle_maintained__", entry.maintained_fields())

    def _add(self, model: Any) -> None:
        if not (isinstance(model, type) and issubclass(model, Document)):
            raise DeclarationError(
                f"{model!r} is not a Document; models= takes Document classes", code="model-invalid"
            )
        if model in self.entries:
            return
        entry: ModelEntry = ModelEntry(model, self.limits)
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
        """Return the entry of a model that was given to the Store."""
        try:
            return self.entries[model]
        except (KeyError, TypeError):
            raise self.not_a_model(model) from None

    def not_a_model(self, given: Any) -> UsageError:
        """Return the error for a value that is no model of this Store."""
        known = ", ".join(sorted(each.__name__ for each in self.entries)) or "none"
        if isinstance(given, type) and issubclass(given, Document):
            what = f"{given.__name__} is not among the models of this Store ({known}); add it to models="
        else:
            kind = type(given).__name__
            what = f"this takes one of the models of this Store ({known}), the class itself; it got "
            what += f"the class {given.__name__}" if isinstance(given, type) else f"a value of type {kind}"
        return UsageError(what, code="model-unknown")

    def not_a_document(self, given: Any) -> UsageError:
        """Return the error for a value that is no document of this Store."""
        if isinstance(given, Document):
            return self.not_a_model(type(given))
        if isinstance(given, type):
            what = f"got the class {given.__name__} itself; make a document of it: {given.__name__}(…)"
        elif inspect.isawaitable(given):
            what = f"got a {type(given).__name__} that was not awaited; write await before it"
        elif isinstance(given, Mapping):
            what = "got a dict; make a document of it by its model: Order(**values), or Order.model_validate"
        else:
            what = f"got a value of type {type(given).__name__}"
        known = ", ".join(sorted(each.__name__ for each in self.entries)) or "none"
        return UsageError(
            f"this takes a document of one of the models of this Store ({known}), and {what}",
            code="model-unknown",
        )

    def chosen(self, models: Iterable[type[Document]]) -> list[ModelEntry]:
        """Return the entries of these models and their kinds; of all, if none is named."""
        chosen = [each for model in models for each in [self.entry(model), *self.entry(model).kinds.below]]
        return list(dict.fromkeys(chosen)) or list(self.entries.values())

    # -- for `bind` of patterns ----------------------------------------------------------------------

    def resolve(self, source: Any, where: str) -> ModelEntry:
        """Return the source of a declaration, which may be a class or a name."""
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

    def add_side(self, model: type[Document], where: str) -> ModelEntry:
        """Return the entry of a collection that a pattern keeps beside those of the models."""
        entry: ModelEntry = ModelEntry(model, self.limits)
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
        self, reference: Path, referenced: ModelEntry, where: str, to: str | None = None
    ) -> str | None:
        held, expected, what = reference.shape, referenced.ids.shape, "the id of "
        key = None if to in (None, "id", "_id") else _alternate_key(referenced, to, where)
        if key is not None:
            referenced.paths.alternate_keys[key.stored] = key
            expected, what = key.shape, f"{to!r} of "
        if held.kind == "scalar" and expected.kind == "scalar" and held.python is not expected.python:
            raise DeclarationError(
                f"{where} finds its {referenced.model.__name__} by {reference.python!r}, a "
                f"{held.python.__name__}, but {what}{referenced.model.__name__} is a "
                f"{expected.python.__name__}; declare the same type",
                code="reference-type",
            )
        return None if key is None else key.stored

    # -- binding ------------------------------------------------------------------------

    def _add_rule(self, entry: ModelEntry, rule: Rule) -> None:
        _require_carrier(rule)
        for own in rule.owns():
            _claim(entry, rule, own)
        entry.rules.add(rule)
        if rule.source is not entry or isinstance(rule, DerivedRule):
            rule.source.effects.add(rule)
        if isinstance(rule, GroupRule):
            entry.rules.group = rule
        layout = rule.layout(None)
        if layout is not None and entry.layout is not None:
            keywords = ", ".join(f"{keyword}=" for keyword in entry.model.__treadle__.patterns)
            raise DeclarationError(
                f"{entry.model.__name__} is to be stored in two ways; keep one of its class keywords "
                f"{keywords}",
                code="layout-twice",
            )
        entry.layout = layout or entry.layout

    def _refuse_reading_layouts(self, rule: Rule) -> None:
        """Refuse a rule that would follow documents which are not stored one by one."""
        if rule.layout(None) is not None or rule.scope().collections:
            return
        for entry in [rule.target, *(self.by_collection[name] for name in rule.reads())]:
            if entry.layout is not None:
                raise DeclarationError(
                    f"{rule.place.label} would have to follow each reading of {entry.model.__name__}, "
                    "which are not stored one by one; use the statistics of its buckets, or store the "
                    "readings as documents",
                    code="layout-derived",
                )

    def check_server(self, server: Capabilities) -> Capabilities:
        """Refuse declarations for which the server lacks something; returns its capabilities."""
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
            _require_capabilities(rule, server)
        return server

    @property
    def uses(self) -> frozenset[str]:
        """The capabilities on which anything declared here depends."""
        return frozenset().union(*map(needs_of, self.rules))


def graph_of(rule: Rule) -> Graph:
    """Return the graph in which a rule is bound."""
    assert isinstance(rule.models, Graph)
    return rule.models


def _alternate_key(entry: ModelEntry, name: str, where: str) -> Path:
    """Return the field by which documents of a model are referred to; refuses one of several values."""
    path = resolve(entry.codec, name, where, "reference-key")
    if path.in_array or path.shape.kind in ("model", "map"):
        raise DeclarationError(
            f"{where} has to={name!r}, which is no single value of {entry.model.__name__}; name a field that "
            "holds one value, different in each document",
            code="reference-key",
        )
    return path


def _claim(entry: ModelEntry, rule: Rule, own: Owned) -> None:
    """Note a path that a rule maintains; refuses one that another rule maintains."""
    for taken, other in entry.paths.owned.items():
        if overlap(own.path, taken) and not (own.path == taken and own.shared and other.shared):
            label = entry.owner(taken).place.label
            raise DeclarationError(
                f"{rule.place.label} and {label} both maintain {own.path!r}; keep one",
                code="path-maintained-twice",
            )
    entry.paths.owned.setdefault(own.path, own)


def _refuse_maintained_keys(entry: ModelEntry) -> None:
    """Refuse an alternate key that is not the caller's to write."""
    for path in entry.paths.alternate_keys:
        for maintained in entry.paths.owned:
            if overlap(path, maintained):
                raise DeclarationError(
                    f"{entry.owner(maintained).place.label} is maintained, and to={path!r} finds documents "
                    f"of {entry.model.__name__} by it; name a field that callers write",
                    code="reference-key",
                )


def _require_capabilities(rule: Rule, server: Capabilities) -> None:
    """Refuse a rule for which the server lacks something."""
    if rule.maintain == "stream" and server.transactions and not server.streams:
        raise DeclarationError(
            f"{rule.place.label}: maintain='stream' follows change streams, and this server has none of a "
            "whole database with cluster times; declare maintain='write'",
            code="streams-unavailable",
        )
    for name, instead in needs_of(rule).items():
        if instead is not None:
            server.require(name, f"{rule.place.label}: {rule.pattern}", instead)


def _require_carrier(rule: Rule) -> None:
    """Refuse a rule that nothing carries out: it would be ignored."""
    # Work without a name is never due.
    methods = [each for each in CARRIED_OUT if each != "run_due" or rule.due_work]
    sets_paths = any(owned.on_write or owned.blank is not NO_VALUE for owned in rule.owns())
    if sets_paths or isinstance(rule, DERIVED) or any(implements(rule, each) for each in methods):
        return
    raise DeclarationError(
        f"{rule.place.label}: {type(rule).__name__} is no DerivedRule, FormulaRule or LocalRule, and answers "
        f"none of {', '.join(CARRIED_OUT)}, so nothing would carry it out",
        code="rule-not-carried-out",
    )
