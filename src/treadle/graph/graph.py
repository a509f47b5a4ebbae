"""The models of a Store, taken together: where each is stored, and what feeds what.

Every declaration is bound here, once per Store. A maintained field has a
level: one more than the highest level among the fields that feed it. Levels
are the order of maintenance; a field that would feed itself has none and is
refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from treadle.errors import DeclarationError, UsageError
from treadle.graph import kinds, versions
from treadle.graph.gather import GatherRule
from treadle.graph.layout import Layout
from treadle.graph.layouts import layout_of, refuse_derived
from treadle.graph.pattern import ClassPlace, Pattern, Place, Rule
from treadle.model.bson_types import to_bson
from treadle.model.codec import Codec, codec_of
from treadle.model.document import Document
from treadle.model.shape import Shape, field_shape
from treadle.patterns.approximation.rule import ApproximateRule
from treadle.patterns.computed import FormulaRule
from treadle.patterns.extended_reference import ReferenceRule
from treadle.patterns.outlier.rule import OutlierRule
from treadle.patterns.rollup import MembersRule, check_rollup
from treadle.patterns.tree.fields import Tree, TreeRule, place_tree, tree_declarations
from treadle.plan import Raw, by_id
from treadle.plan.capabilities import Capabilities
from treadle.query.paths import (
    ARRAYS,
    Path,
    Step,
    model_of,
    models_of,
    overlap,
    plain,
    refuse_array_of_arrays,
)

D = TypeVar("D", bound=Document)
R = TypeVar("R")


class Entry(Generic[D]):
    """One model of a Store, with all that its plans need to know."""

    def __init__(self, model: type[D]) -> None:
        if model.__treadle__.collection is None:
            raise DeclarationError(
                f'{model.__name__} has no collection; write class {model.__name__}(Document, collection="…")',
                code="collection-missing",
            )
        self.model = model
        self.settings = model.__treadle__
        self.collection: str = model.__treadle__.collection
        self.codec: Codec[D] = codec_of(model)
        _check_identity(model)
        self.identity_shape: Shape = field_shape(model.__name__, "id", model.__pydantic_fields__["id"])
        self._identity: TypeAdapter[Any] = TypeAdapter(model.__pydantic_fields__["id"].rebuild_annotation())
        # How its documents are stored, where that is not one by one.
        self.layout: Layout[D] | None = layout_of(self)
        # What this model maintains in itself.
        self.gathers: list[GatherRule] = []
        self.references: list[ReferenceRule] = []
        self.formulas: list[FormulaRule] = []
        self.outliers: list[OutlierRule] = []
        self.counters: list[ApproximateRule] = []
        # Those that each write keeps right, and what a write of this model feeds in others.
        self.inline_gathers: list[GatherRule] = []
        self.feeds_gathers: list[GatherRule] = []
        self.feeds_references: list[ReferenceRule] = []
        # What it feeds by way of the worker or of a schedule.
        self.feeds_later: list[Rule] = []
        # The references that forbid a deletion, however they are maintained.
        self.restricting: list[ReferenceRule] = []
        self.protected: dict[str, Rule] = {}
        self.tree: Tree | None = None
        # The other models of its collection, and which documents are its own (`kinds.py`).
        self.family: kinds.Family | None = None
        self.above: list[Entry[Any]] = []
        self.below: list[Entry[Any]] = []
        self.kinds: frozenset[Any] = frozenset()
        self.scope: Raw = {}
        self.exactly: Raw = {}
        self.declared: dict[str, Pattern] = {}
        # The versions of its documents (`versions.py`); None where it has none.
        self.lineage: versions.Lineage | None = None
        # Whether documents may be of other versions, and whether reading these may take the server.
        self.versioned = False
        self.attends = False
        self.warned = False
        # What is maintained in any document that a filter on this model may find.
        self.shielded = self.protected
        # The rule that makes and removes documents of this model, if it is a rollup.
        self.group: MembersRule | None = None
        # The rollups whose documents a write of this model may make, as long as nobody saw their indexes.
        self.unready: list[MembersRule] = []
        # Whether a write of this model concerns nothing else.
        self.plain = True
        # Whether a write of this model can come round to the very document that was written.
        self.loops = False
        # The stored paths that a write must not touch without being followed; None for all.
        self.watched: set[str] | None = set()

    @property
    def derived(self) -> list[Rule]:
        """What follows from other documents or other fields, value by value, outlier arrays and counters."""
        return [*self.gathers, *self.references, *self.formulas, *self.outliers, *self.counters]

    @property
    def all_outliers(self) -> list[OutlierRule]:
        """Its outlier arrays, with those that it inherits from the kinds above."""
        return [rule for each in [*self.above, self] for rule in each.outliers]

    @property
    def all_counters(self) -> list[ApproximateRule]:
        """Its counters, with those that it inherits from the kinds above."""
        return [rule for each in [*self.above, self] for rule in each.counters]

    @property
    def kept(self) -> dict[str, Any]:
        """What a replace leaves as it is stored, since others than callers write it all the time."""
        rules: list[OutlierRule | ApproximateRule] = [*self.all_outliers, *self.all_counters]
        return {path: value for rule in rules for path, value in rule.kept().items()}

    @property
    def rules(self) -> list[Rule]:
        return [*self.derived, *(self.tree.rules if self.tree is not None else ())]

    @property
    def feeds(self) -> list[Rule]:
        return [*self.feeds_gathers, *self.feeds_references]

    @property
    def root(self) -> Entry[Any]:
        """The entry that stands for the whole collection."""
        return self if self.family is None else self.family.root

    @property
    def related(self) -> list[Entry[Any]]:
        """The entries that some document may share with this one; itself among them."""
        return [*self.above, self, *self.below]

    def of(self, raw: Any) -> Entry[Any]:
        """The entry of a stored document's very class."""
        return self if self.family is None else self.family.of(raw)

    def holds(self, raw: Any) -> bool:
        """Whether a stored document is one of this model, or of a kind below it."""
        return not self.scope or self.of(raw).settings.kind in self.kinds

    @property
    def identifying(self) -> Raw:
        """The projection that tells a document's id and its class."""
        return {"_id": 1} if self.family is None else {"_id": 1, self.family.discriminator: 1}

    def one(self, identity: Any) -> Raw:
        """The filter for one document of this model, by its id."""
        return {**by_id(identity), **self.scope}

    def by_class(self, raws: Iterable[R]) -> Iterable[tuple[Entry[Any], list[R]]]:
        """Documents, or pairs that begin with one, by their very class."""
        if self.family is None:
            return [(self, list(raws))]
        groups: dict[Entry[Any], list[R]] = {}
        for each in raws:
            groups.setdefault(self.of(each[0] if isinstance(each, tuple) else each), []).append(each)
        return list(groups.items())

    def key_of(self, document: Mapping[str, Any]) -> Any:
        """What sources know a document of this model by: its id, or the values of its group."""
        return document["_id"] if self.group is None else self.group.key.of_target(document)

    def key_projection(self) -> dict[str, Any]:
        """What `key_of` needs of a document."""
        own = self.group.key.targets if self.group is not None else []
        return {**self.identifying, **dict.fromkeys(own, 1)}

    def at(self, key: Any) -> dict[str, Any]:
        """The filter for the document that a key belongs to."""
        return self.one(key) if self.group is None else self.group.key.target(key)

    def at_any(self, keys: Sequence[Any]) -> dict[str, Any]:
        """The filter for the documents that these keys belong to."""
        if self.group is None:
            return {"_id": {"$in": list(keys)}, **self.scope}
        if len(keys) == 1:
            return self.group.key.target(keys[0])
        if len(self.group.key.parts) == 1:
            return {self.group.key.parts[0].target: {"$in": [key[0] for key in keys]}}
        return {"$or": [self.group.key.target(key) for key in keys]} if keys else {"_id": {"$in": []}}

    def identity(self, value: Any) -> Any:
        """The stored form of an id that a caller gave; never an operator."""
        try:
            return to_bson(self._identity.validate_python(value), [])
        except ValidationError as error:
            raise UsageError(
                f"{value!r} is not an id of {self.model.__name__}: {error.errors()[0]['msg']}",
                code="id-invalid",
            ) from error


def _check_identity(model: type[Document]) -> None:
    shape = field_shape(model.__name__, "id", model.__pydantic_fields__["id"])
    if shape.optional or shape.kind in ARRAYS:
        raise DeclarationError(
            f"{model.__name__}.id may be None or a list, which MongoDB does not take as the id of a "
            "document; leave it out, and an ObjectId is made",
            code="id-invalid",
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """The rules of one level: gathering ones by their source, and those that copy."""

    level: int
    gathers: list[tuple[Entry[Any], list[GatherRule]]]
    references: list[ReferenceRule]


class Graph:
    """All models of a Store, by class and by name."""

    def __init__(
        self, models: Iterable[type[Document]], write_versions: Mapping[type[Document], int] | None = None
    ) -> None:
        self.entries: dict[type[Document], Entry[Any]] = {}
        self.by_collection: dict[str, Entry[Any]] = {}
        # Collections that patterns need beside the models' own, for set-up.
        self.sides: dict[str, Entry[Any]] = {}
        for model in models:
            self._add(model)
        kinds.join(self)
        versions.trace(self, write_versions)
        # Those above first: what a kind inherits is bound where it is declared.
        for entry in sorted(self.entries.values(), key=lambda entry: len(entry.above)):
            for place, pattern in declarations(entry):
                if not kinds.is_inherited(entry, place, pattern):
                    self._place(entry, pattern.bind(place, self))
            check_rollup(entry)
        kinds.spread(self)
        refuse_derived(self)
        self._find_levels()
        for entry in self.entries.values():
            self._find_watched(entry)
        # Per level what reacts to a change; asked for at every write.
        self.stages = [self._stage(level) for level in sorted({rule.level for rule in self.rules})]
        self.derives = any(not entry.plain for entry in self.entries.values())

    def _add(self, model: Any) -> None:
        if not (isinstance(model, type) and issubclass(model, Document)):
            raise DeclarationError(
                f"{model!r} is not a Document; models= takes Document classes", code="model-invalid"
            )
        if model in self.entries:
            return
        entry: Entry[Any] = Entry(model)
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
        self.entries[model] = entry

    def entry(self, model: type[D]) -> Entry[D]:
        """The entry of a model that was given to the Store."""
        try:
            return self.entries[model]
        except (KeyError, TypeError):
            known = ", ".join(sorted(each.__name__ for each in self.entries)) or "none"
            raise UsageError(
                f"{getattr(model, '__name__', model)!s} is not among the models of this Store ({known}); "
                "add it to models=",
                code="model-unknown",
            ) from None

    def chosen(self, models: Iterable[type[Document]]) -> list[Entry[Any]]:
        """The entries of these models; of all, if none is named."""
        chosen = [each for model in models for each in [self.entry(model), *self.entry(model).below]]
        return list(dict.fromkeys(chosen)) or list(self.entries.values())

    @property
    def rules(self) -> list[Rule]:
        return list(dict.fromkeys(rule for entry in self.entries.values() for rule in entry.rules))

    def check_server(self, server: Capabilities) -> Capabilities:
        """The server's capabilities, if every declaration can be kept with them."""
        for rule in self.rules:
            if rule.needs_transactions:
                what = f"{rule.place.label}: {rule.pattern}"
                server.require_transactions(what, code="transactions-needed", error=DeclarationError)
        return server

    # -- for the patterns' bind() -----------------------------------------------------

    def resolve(self, source: Any, where: str) -> Entry[Any]:
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

    def add_side(self, model: type[Document], where: str) -> Entry[Any]:
        """The entry of a collection that a pattern keeps beside those of the models."""
        entry: Entry[Any] = Entry(model)
        if entry.collection in self.by_collection or entry.collection in self.sides:
            raise DeclarationError(
                f"{where} names the collection {entry.collection!r}, which is used for something else; "
                "give it one of its own",
                code="collection-shared",
            )
        self.sides[entry.collection] = entry
        return entry

    def check_reference(self, reference: Path, referenced: Entry[Any], where: str) -> None:
        """Refuse a reference whose type cannot hold the id that it is to hold."""
        held, wanted = reference.shape, referenced.identity_shape
        if held.kind == "scalar" and wanted.kind == "scalar" and held.python is not wanted.python:
            raise DeclarationError(
                f"{where} finds its {referenced.model.__name__} by {reference.python!r}, a "
                f"{held.python.__name__}, but the id of {referenced.model.__name__} is a "
                f"{wanted.python.__name__}; declare the same type",
                code="reference-type",
            )

    # -- binding ------------------------------------------------------------------------

    def _place(self, entry: Entry[Any], rule: Rule) -> None:
        if isinstance(rule, TreeRule):
            place_tree(entry, rule)
            return
        for path in [*rule.maintained(), *rule.stamps()]:
            for taken, other in entry.protected.items():
                shared_stamp = path in rule.stamps() and taken in other.stamps()
                if overlap(path, taken) and not shared_stamp:
                    raise DeclarationError(
                        f"{rule.place.label} and {other.place.label} both maintain {path!r}; keep one",
                        code="path-maintained-twice",
                    )
            entry.protected[path] = rule
        if isinstance(rule, MembersRule):
            entry.group = rule
        if isinstance(rule, GatherRule):
            entry.gathers.append(rule)
            if rule.maintain == "write":
                entry.inline_gathers.append(rule)
                rule.source.feeds_gathers.append(rule)
            else:
                rule.source.feeds_later.append(rule)
        elif isinstance(rule, ReferenceRule):
            entry.references.append(rule)
            if rule.maintain == "write":
                rule.source.feeds_references.append(rule)
            else:
                rule.source.feeds_later.append(rule)
            if rule.on_delete == "restrict":
                rule.source.restricting.append(rule)
        elif isinstance(rule, FormulaRule):
            entry.formulas.append(rule)
        elif isinstance(rule, OutlierRule):
            entry.outliers.append(rule)
        elif isinstance(rule, ApproximateRule):
            entry.counters.append(rule)

    def _find_levels(self) -> None:
        levels: dict[Rule, int] = {}
        under_way: list[Rule] = []

        def level(rule: Rule) -> int:
            if rule in levels:
                return levels[rule]
            if rule in under_way:
                around = " -> ".join(each.place.label for each in [*under_way[under_way.index(rule) :], rule])
                raise DeclarationError(
                    f"these fields would be computed from each other for ever: {around}; break the circle",
                    code="maintenance-cycle",
                )
            under_way.append(rule)
            levels[rule] = 1 + max((level(other) for other in self._feeding(rule)), default=0)
            under_way.pop()
            return levels[rule]

        for rule in self.rules:
            rule.level = level(rule)
        for entry in self.entries.values():
            entry.formulas.sort(key=lambda rule: rule.level)

    def _stage(self, level: int) -> Stage:
        gathers = [
            (entry, [rule for rule in entry.feeds_gathers if rule.level == level and rule.source is entry])
            for entry in self.entries.values()
        ]
        references = [
            rule
            for entry in self.entries.values()
            for rule in entry.references
            if rule.level == level and rule.maintain == "write" and rule.target is entry
        ]
        return Stage(level, [pair for pair in gathers if pair[1]], references)

    def _feeding(self, rule: Rule) -> Iterator[Rule]:
        """The rules whose maintained fields this rule reads."""
        for collection, paths in rule.watches().items():
            source: Entry[Any] = getattr(rule, "source", rule.target)
            if source.collection != collection:
                source = self.by_collection[collection]
            protected = [pair for each in source.related for pair in each.protected.items()]
            for maintained, other in protected:
                if other is rule and paths is None:
                    continue
                if paths is None or any(overlap(path, maintained) for path in paths):
                    yield other

    def _find_watched(self, entry: Entry[Any]) -> None:
        watched: set[str] | None = set()
        formulas = [rule for each in entry.related for rule in each.formulas]
        references = [rule for each in entry.related for rule in each.references]
        for rule in [*entry.feeds, *formulas]:
            paths = rule.watches().get(entry.collection, set())
            watched = None if watched is None or paths is None else watched | paths
        if watched is not None:
            watched |= {rule.reference_path for rule in references}
            watched |= {rule.path for rule in references}
            if entry.family is not None:
                watched.add(entry.family.discriminator)
        entry.watched = None if watched is None else {plain(path) for path in watched}
        entry.plain = not (any(each.rules for each in entry.related) or entry.feeds or entry.restricting)
        versions.keep_paths(entry)
        reached: set[str] = set()
        pending = [rule.target for rule in entry.feeds]
        while pending:
            target = pending.pop()
            if target.collection not in reached:
                reached.add(target.collection)
                pending.extend(rule.target for rule in target.feeds)
        entry.loops = entry.collection in reached
        groups = [other.group for other in self.entries.values() if other.collection in reached]
        entry.unready = [group for group in groups if group is not None and not group.key.identity]


def declarations(entry: Entry[Any]) -> Iterator[tuple[Place, Pattern]]:
    """Each pattern that stands on a document, on a field of it or of a nested model."""
    yield from tree_declarations(entry)
    if entry.settings.rollup is not None:
        # Before the fields, which ask it what they are computed from.
        yield ClassPlace(entry, entry.codec, (), entry.codec.by_name["id"]), entry.settings.rollup
    yield from _declared(entry, entry.codec, (), ())


def _declared(
    entry: Entry[Any], codec: Codec[Any], steps: tuple[Step, ...], inside: tuple[type[BaseModel], ...]
) -> Iterator[tuple[Place, Pattern]]:
    if codec.model in inside:
        return
    for field in codec.fields:
        found = [mark for mark in field.shape.metadata if isinstance(mark, Pattern)]
        if len(found) > 1:
            raise DeclarationError(
                f"{entry.model.__name__}.{field.name} has {len(found)} patterns; a field takes one",
                code="path-maintained-twice",
            )
        for mark in found:
            yield Place(entry, codec, steps, field), mark
        model = model_of(field.shape)
        if model is None:
            _refuse_in_union(entry, field, (*inside, codec.model))
        if model is not None and not found:
            step = Step(field.name, field.stored, field.shape.kind in ARRAYS)
            for place, mark in _declared(entry, codec_of(model), (*steps, step), (*inside, codec.model)):
                refuse_array_of_arrays(field.shape, place.label)
                yield place, mark


def _refuse_in_union(entry: Entry[Any], field: Any, inside: tuple[type[BaseModel], ...]) -> None:
    """Refuse a pattern in a model that a field may or may not hold: it would never be maintained."""
    for model in models_of(field.shape):
        for place, _ in _declared(entry, codec_of(model), (), inside):
            raise DeclarationError(
                f"{model.__name__}.{place.field.name} has a pattern, but stands in {entry.model.__name__}."
                f"{field.name}, which may hold another model instead; declare it outside of the union",
                code="pattern-in-union",
            )
