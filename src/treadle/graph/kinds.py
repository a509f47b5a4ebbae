"""Several models in one collection: which documents are whose.

The models that share a collection and its discriminator are a family. Its
root is the topmost class; a class with `kind=` is concrete, one without is
abstract and stands for the kinds below it. Each model of a family has a
`ModelEntry` of its own, with its scopes.

A rule is bound once, at the topmost model that declares it, and concerns only
what lies in that model's scope. So a document has the rules of its own class
and of those above it, and affects the rules whose source is one of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError

from treadle.errors import DeclarationError
from treadle.graph.derived import FormulaRule
from treadle.graph.model_entry import Effects, KindFamily, ModelEntry, RuleSet
from treadle.graph.rule import Models, Pattern, Place, Rule
from treadle.graph.scope import ACTIVE, KIND, Condition, Scope, is_one_of
from treadle.graph.store_codec import StoreCodec
from treadle.graph.versions import MIGRATIONS, VersionChain, WriteVersions
from treadle.model.bson_types import to_bson
from treadle.model.codec import StoredField
from treadle.model.document import Document
from treadle.model.keywords import KindValue, stamped_names
from treadle.plan import Raw

R = TypeVar("R")


def root_of(model: type[Document]) -> type[Document] | None:
    """Return the topmost class of a model's family; None for a model without a discriminator."""
    settings = model.__treadle__
    if settings.discriminator is None:
        return None
    root = model
    for base in model.__mro__[1:]:
        own: Any = getattr(base, "__treadle__", None)
        if own is not None and (own.collection, own.discriminator) == (
            settings.collection,
            settings.discriminator,
        ):
            root = base
    return root


def join(graph: Models) -> None:
    """Make the families of a Store."""
    by_root: dict[type[Document], list[ModelEntry]] = {}
    for entry in graph.entries.values():
        root = root_of(entry.model)
        if root is not None:
            by_root.setdefault(root, []).append(entry)
    for root, members in by_root.items():
        members.sort(key=lambda entry: len(entry.model.__mro__))
        family = KindFamily(graph.entries[root], members)
        for entry in members:
            _join(entry, family)
        for entry in members:
            _check_member(entry, family)
            if entry is not family.root:
                entry.kinds.stored = frozenset(_stored_kinds(entry, family))


def _join(entry: ModelEntry, family: KindFamily) -> None:
    kinds, others = entry.kinds, [each for each in family.members if each is not entry]
    kinds.family, kinds.root = family, family.root
    kinds.above = [each for each in others if issubclass(entry.model, each.model)]
    kinds.below = [each for each in others if issubclass(each.model, entry.model)]


def _concrete(entry: ModelEntry) -> list[ModelEntry]:
    """Return an entry and those below it, as far as documents are stored as their class."""
    return [each for each in [entry, *entry.kinds.below] if each.kinds.kind is not None]


def _stored_kinds(entry: ModelEntry, family: KindFamily) -> list[Any]:
    """Return what the discriminator of an entry's documents holds."""
    return [stored for each in _concrete(entry) for stored in family.stored_as(each.kinds.kind)]


# What the kinds of a collection must agree in.
_SHARED_KEYWORDS = (
    "version", "version_field", "migrate_on_read", "validation", "validation_action", "revision",
    "soft_delete", "default_kind", "shard_key",
)  # fmt: skip


def _check_member(entry: ModelEntry, family: KindFamily) -> None:
    name, root = entry.model.__name__, family.root
    if entry.ids.shape.python is not root.ids.shape.python:
        raise DeclarationError(
            f"{name} and {root.model.__name__} are stored in one collection, but have ids of different "
            "types; declare the id on the base",
            code="id-invalid",
        )
    for keyword in _SHARED_KEYWORDS:
        if getattr(entry.model.__treadle__, keyword) != getattr(root.model.__treadle__, keyword):
            raise DeclarationError(
                f"{name} has another {keyword} than {root.model.__name__}, but they share a collection; "
                "declare it on the base",
                code="kind-invalid",
            )
    kind, field = entry.kinds.kind, entry.codec.by_stored.get(family.discriminator)
    if kind is not None and field is not None and not _can_hold(field, kind):
        raise DeclarationError(
            f"{name}.{field.name} is stored as the discriminator {family.discriminator!r}, but cannot hold "
            f"kind={kind!r}; declare it as Literal[{kind!r}], or leave the field out",
            code="kind-invalid",
        )


def _can_hold(field: StoredField, kind: KindValue) -> bool:
    try:
        held = TypeAdapter(field.info.rebuild_annotation()).validate_python(kind)
    except ValidationError:
        return False
    return bool(to_bson(held, []) == kind)


# -- the scopes of a model ------------------------------------------------------------------


def bind_scopes(graph: Models) -> None:
    """Give each entry its scopes, and the codec that reads what these see."""
    codecs: dict[ModelEntry, StoreCodec[Any]] = {}
    for entry in graph.entries.values():
        set_scopes(entry)
        names = frozenset(stamped_names(entry.model))
        if entry.kinds.family is not None or names or entry.paths.deletion is not None:
            confined = bool(entry.kinds.stored)
            codec = StoreCodec(entry.codec, entry.targets.filter(), names, confined=confined)
            codec.versions = entry.versions if entry.versions.is_versioned else None
            entry.codec = codecs[entry] = codec
    for entry, codec in codecs.items():
        family = entry.kinds.family
        if family is not None:
            members = {each.kinds.kind: codecs[each] for each in _concrete(entry)}
            codec.dispatch(family.discriminator, members, family.default)
        elif entry.versions.is_versioned:
            codec.settle()


def set_scopes(entry: ModelEntry) -> None:
    """Make the scopes of an entry from its kinds and its soft delete."""
    own, exact = _kind_conditions(entry)
    field = entry.codec.by_name.get(entry.model.__treadle__.soft_delete or "")
    active, deleted = list[Condition](), list[Condition]()
    if field is not None:
        path = entry.paths.deletion = field.stored
        active = [Condition(ACTIVE, {path: None}, lambda raw: raw.get(path) is None)]
        deleted = [Condition(ACTIVE, {path: {"$ne": None}}, lambda raw: raw.get(path) is not None)]

    def made(more: Sequence[Condition]) -> Scope:
        return Scope(
            entry.model.__name__,
            (entry.collection,),
            (*own, *more),
            (*exact, *more),
            entry.versions,
            entry.limits.upgrade_chunk,
        )

    entry.targets = entry.sources = entry.everything = made(active)
    # Without soft delete there are none.
    entry.deleted = made(deleted or [Condition(ACTIVE, {"_id": {"$in": []}}, lambda raw: False)])


def add_to_scopes(rule: Rule) -> None:
    """Add the further collections of a rule to the scopes of its model and the related ones."""
    for collection, roles in rule.scope().collections.items():
        for entry in rule.target.kinds.related:
            for role in roles:
                scope: Scope = getattr(entry, role)
                setattr(entry, role, scope.within(*scope.collections, collection))


def _kind_conditions(entry: ModelEntry) -> tuple[list[Condition], list[Condition]]:
    """Return which documents of the collection are an entry's own, and which have its own class."""
    family, own = entry.kinds.family, entry.kinds.kind
    if family is None:
        return [], []

    def is_exact(raw: Raw) -> bool:
        return family.of(raw) is entry

    def is_below(raw: Raw) -> bool:
        return family.of(raw).kinds.kind in entry.kinds.stored

    name = family.discriminator
    if entry is family.root:
        # All of them; documents of unknown kinds are the root's.
        others = [kind for each in family.by_kind if each != own for kind in family.stored_as(each)]
        return [], [Condition(KIND, {name: {"$nin": others}}, is_exact)]
    below = {name: is_one_of(_stored_kinds(entry, family))}
    exact = {name: is_one_of([] if own is None else family.stored_as(own))}
    return [Condition(KIND, below, is_below)], [Condition(KIND, exact, is_exact)]


# -- the rules of a family ------------------------------------------------------------------


# The declarations of each model, by their places.
Declared: TypeAlias = dict[ModelEntry, dict[str, Pattern]]


def is_inherited(declared: Declared, entry: ModelEntry, place: Place, pattern: Pattern) -> bool:
    """Whether a declaration is inherited from a model above, where it is bound already."""
    declared.setdefault(entry, {})[place.stored] = pattern
    for other in entry.kinds.above:
        above = declared.get(other, {}).get(place.stored)
        if above == pattern:
            return True
        if above is not None:
            raise DeclarationError(
                f"{place.label} and {other.model.__name__}.{place.field.name} are maintained in different "
                "ways, but one is the other's kind; declare it once, on the base",
                code="path-maintained-twice",
            )
    return False


def spread(graph: Models) -> None:
    """Give each model of a family the rules of those above it, and the effects of all related ones."""
    families = [entry for entry in graph.entries.values() if entry.kinds.family is not None]
    rules = {entry: list(entry.rules) for entry in families}
    effects = {entry: list(entry.effects) for entry in families}
    owned = {entry: entry.paths.owned for entry in families}
    for entry in families:
        above, related = [*entry.kinds.above, entry], entry.kinds.related
        entry.rules = RuleSet(_union(rules[each] for each in above), entry.rules.group)
        entry.effects = Effects(_union(effects[each] for each in related))
        entry.paths.owned = {path: one for each in above for path, one in owned[each].items()}
        entry.paths.owned_in_collection = {path: one for each in related for path, one in owned[each].items()}


def _union(lists: Iterable[Iterable[R]]) -> list[R]:
    return list(dict.fromkeys(item for each in lists for item in each))


def _scoped_formula(rule: Rule, expression: Any) -> Raw:
    """Return the `$set` of a formula; in documents of other kinds it changes nothing."""
    target = rule.target
    if not target.kinds.stored or target.kinds.family is None:
        return {rule.path: expression}
    segments = rule.path.split(".")
    value = expression
    for depth in range(len(segments) - 1, 0, -1):
        value = {"$mergeObjects": ["$" + ".".join(segments[:depth]), {segments[depth]: value}]}
    kind: Any = f"${target.kinds.family.discriminator}"
    if None in target.kinds.stored:
        kind = {"$ifNull": [kind, None]}
    holds = {"$in": [kind, {"$literal": sorted(target.kinds.stored, key=str)}]}
    return {segments[0]: {"$cond": [holds, value, f"${segments[0]}"]}}


def build_formula_stages(target: ModelEntry) -> list[Raw]:
    """Return the update stages that evaluate the formulas of a model and the related ones, level by level."""
    if target.kinds.family is not None:
        # Each for itself: formulas of several kinds may set the same field.
        formulas = dict.fromkeys(
            rule for each in target.kinds.related for rule in each.rules.of_type(FormulaRule)
        )
        ordered = sorted(formulas, key=lambda rule: rule.level)
        return [{"$set": _scoped_formula(rule, rule.expression)} for rule in ordered]
    by_level: dict[int, Raw] = {}
    for formula in target.rules.of_type(FormulaRule):
        expression = formula.expression
        if target.rules.group is not None:
            # An empty group is about to be removed; a formula that divides by its count must not fail.
            filled = {"$gt": [f"${target.rules.group.path}", 0]}
            expression = {"$cond": [filled, expression, f"${formula.path}"]}
        by_level.setdefault(formula.level, {})[formula.path] = expression
    return [{"$set": sets} for _, sets in sorted(by_level.items())]


# -- the versions of a family ------------------------------------------------------------------


def bind_versions(graph: Models, write_versions: WriteVersions) -> None:
    """Give each entry the version chain of its collection, as this Store writes it."""
    chosen = dict(write_versions or {})
    for model in chosen:
        entry = graph.entry(model)
        if entry.model.__treadle__.version is None or entry.kinds.root is not entry:
            raise DeclarationError(
                f"write_versions names {model.__name__}, which has no version= of its own; name the base of "
                "a collection whose documents have versions",
                code="version-invalid",
            )
    for entry in graph.entries.values():
        if entry.kinds.root is entry:
            entry.versions = VersionChain(entry.model, chosen.get(entry.model))
    for entry in graph.entries.values():
        entry.versions = entry.kinds.root.versions
        if entry.kinds.root is not entry and MIGRATIONS in entry.model.__dict__:
            raise DeclarationError(
                f"{entry.model.__name__} has migrations of its own, but versions belong to the collection; "
                f"declare them on {entry.kinds.root.model.__name__}, for all kinds",
                code="version-invalid",
            )


def stored_fields(entry: ModelEntry) -> frozenset[str]:
    """The top-level stored names of the fields of a collection's models, its version left out."""
    names = {name for each in [entry, *entry.kinds.below] for name in each.codec.by_stored}
    if entry.kinds.family is not None:
        names.add(entry.kinds.family.discriminator)
    return frozenset(names - {"_id", entry.versions.field})
