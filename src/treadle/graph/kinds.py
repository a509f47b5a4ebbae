"""Several models in one collection: which documents are whose.

The models that share a collection and its discriminator are a family. Its
root is the topmost class; a class with `kind=` is concrete, one without is
abstract and stands for the kinds below it. Each model of a family has an
`Entry` of its own, with a scope: the condition that its documents meet.

A rule is bound once, at the topmost model that declares it, and touches only
what lies in that model's scope. So a document has the rules of its own class
and of those above it, and feeds the rules whose source is one of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from treadle.errors import DeclarationError
from treadle.graph.store_codec import StoreCodec
from treadle.model.bson_types import to_bson
from treadle.model.keywords import stamped_names
from treadle.plan import Raw

if TYPE_CHECKING:
    from treadle.graph.graph import Entry, Graph
    from treadle.graph.pattern import Pattern, Place, Rule
    from treadle.model.document import Document

R = TypeVar("R")

_OWN = ("gathers", "inline_gathers", "references", "formulas")
_FEEDS = ("feeds_gathers", "feeds_references", "feeds_later", "restricting")


class Family:
    """The entries that share one collection, root first."""

    def __init__(self, root: Entry[Any], members: Sequence[Entry[Any]]) -> None:
        self.root = root
        self.members = members
        self.discriminator: str = root.settings.discriminator or ""
        self.by_kind: dict[Any, Entry[Any]] = {}
        for entry in members:
            kind = entry.settings.kind
            if kind is None:
                continue
            other = self.by_kind.setdefault(kind, entry)
            if other is not entry:
                raise DeclarationError(
                    f"{entry.model.__name__} and {other.model.__name__} both have kind={kind!r}; "
                    "give each its own",
                    code="kind-twice",
                )

    def of(self, raw: Any) -> Entry[Any]:
        """The entry of the very class of a stored document; the root where its kind is not known."""
        kind = raw.get(self.discriminator) if isinstance(raw, dict) else None
        try:
            return self.by_kind.get(kind, self.root)
        except TypeError:
            return self.root


def root_of(model: type[Document]) -> type[Document] | None:
    """The topmost class of a model's family; None for a model without a discriminator."""
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


def join(graph: Graph) -> None:
    """Make the families of a Store, and give each entry its scope and its codec."""
    by_root: dict[type[Document], list[Entry[Any]]] = {}
    for entry in graph.entries.values():
        root = root_of(entry.model)
        if root is not None:
            by_root.setdefault(root, []).append(entry)
    for root, members in by_root.items():
        members.sort(key=lambda entry: len(entry.model.__mro__))
        family = Family(graph.entries[root], members)
        for entry in members:
            entry.family = family
            entry.above = [each for each in members if each is not entry and _is_below(entry, each)]
            entry.below = [each for each in members if each is not entry and _is_below(each, entry)]
        for entry in members:
            _check_member(entry, family)
            _confine(entry, family)
    for entry in graph.entries.values():
        names = frozenset(stamped_names(entry.model))
        if entry.family is not None or names:
            entry.codec = StoreCodec(entry.codec, entry.scope, names)
    for entry in graph.entries.values():
        if entry.family is not None:
            members = [each for each in [entry, *entry.below] if each.settings.kind is not None]
            codec: Any = entry.codec
            codec.dispatch(
                entry.family.discriminator,
                {each.settings.kind: each.codec for each in members},
                _unknown_model(entry),
            )


def _is_below(entry: Entry[Any], other: Entry[Any]) -> bool:
    return issubclass(entry.model, other.model)


def _check_member(entry: Entry[Any], family: Family) -> None:
    name, root = entry.model.__name__, family.root
    if entry.identity_shape.python is not root.identity_shape.python:
        raise DeclarationError(
            f"{name} and {root.model.__name__} are stored in one collection, but have ids of different "
            "types; declare the id on the base",
            code="id-invalid",
        )
    for keyword in ("version_field", "validation", "validation_action"):
        if getattr(entry.settings, keyword) != getattr(root.settings, keyword):
            raise DeclarationError(
                f"{name} has another {keyword} than {root.model.__name__}, but they share a collection; "
                "declare it on the base",
                code="kind-invalid",
            )
    kind = entry.settings.kind
    field = entry.codec.by_stored.get(family.discriminator)
    if kind is None or field is None:
        return
    try:
        held = TypeAdapter(field.info.rebuild_annotation()).validate_python(kind)
        fits = to_bson(held, []) == kind
    except ValidationError:
        fits = False
    if not fits:
        raise DeclarationError(
            f"{name}.{field.name} is stored as the discriminator {family.discriminator!r}, but cannot hold "
            f"kind={kind!r}; declare it as Literal[{kind!r}], or leave the field out",
            code="kind-invalid",
        )


def _confine(entry: Entry[Any], family: Family) -> None:
    """Say which documents of the collection are an entry's own, and which are of its very class."""
    name = family.discriminator
    kinds = [each.settings.kind for each in [entry, *entry.below] if each.settings.kind is not None]
    own = entry.settings.kind
    if entry is family.root:
        # All of them, and those of unknown kinds are looked after here.
        entry.scope = {}
        entry.exactly = {name: {"$nin": [kind for kind in family.by_kind if kind != own]}}
        return
    entry.scope = {name: {"$eq": kinds[0]} if len(kinds) == 1 else {"$in": kinds}}
    entry.exactly = {name: {"$eq": own} if own is not None else {"$in": []}}
    entry.kinds = frozenset(kinds)


def _unknown_model(entry: Entry[Any]) -> Any:
    """What a document of an unknown kind is read as, by choice: the base class with the rest kept."""
    if entry.settings.unknown_kinds != "base":
        return None
    model = entry.model
    body = {
        "__module__": model.__module__,
        "__doc__": model.__doc__,
        "model_config": ConfigDict(extra="allow"),
    }
    metaclass: Any = type(model)
    made: type[Document] = metaclass(model.__name__, (model,), body)
    # Its kind is one more field that is kept.
    made.__treadle__ = dataclasses.replace(made.__treadle__, discriminator=None)
    return made


# -- the rules of a family ------------------------------------------------------------------


def is_inherited(entry: Entry[Any], place: Place, pattern: Pattern) -> bool:
    """Whether a declaration is that of a model above, where it is bound already."""
    entry.declared[place.stored] = pattern
    for other in entry.above:
        above = other.declared.get(place.stored)
        if above == pattern:
            return True
        if above is not None:
            raise DeclarationError(
                f"{place.label} and {other.model.__name__}.{place.field.name} are maintained in different "
                "ways, but one is the other's kind; declare it once, on the base",
                code="path-maintained-twice",
            )
    return False


def spread(graph: Graph) -> None:
    """Let each model of a family have the rules of those above it, and feed what its relatives feed."""
    families = [entry for entry in graph.entries.values() if entry.family is not None]
    own = {(entry, name): list(getattr(entry, name)) for entry in families for name in (*_OWN, *_FEEDS)}
    protected = {entry: dict(entry.protected) for entry in families}
    for entry in families:
        for name in _OWN:
            setattr(entry, name, _union(own[each, name] for each in [*entry.above, entry]))
        for name in _FEEDS:
            setattr(entry, name, _union(own[each, name] for each in entry.related))
        entry.protected = {}
        for each in [*entry.above, entry]:
            entry.protected |= protected[each]
        entry.shielded = {path: rule for each in entry.related for path, rule in protected[each].items()}


def _union(lists: Iterable[Iterable[R]]) -> list[R]:
    return list(dict.fromkeys(item for each in lists for item in each))


def scoped_formula(rule: Rule, expression: Any) -> Raw:
    """The `$set` of a formula; in documents of other kinds it changes nothing."""
    target = rule.target
    if not target.scope or target.family is None:
        return {rule.path: expression}
    segments = rule.path.split(".")
    value = expression
    for depth in range(len(segments) - 1, 0, -1):
        value = {"$mergeObjects": ["$" + ".".join(segments[:depth]), {segments[depth]: value}]}
    holds = {"$in": [f"${target.family.discriminator}", {"$literal": sorted(target.kinds, key=str)}]}
    return {segments[0]: {"$cond": [holds, value, f"${segments[0]}"]}}
