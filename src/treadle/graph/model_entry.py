"""One model of a Store, with all that plans need to know about it: its documents, ids, kinds and rules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from inspect import isawaitable
from typing import Any, Generic, Literal, TypeAlias

from bson import ObjectId
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypeVar

from treadle.errors import DeclarationError, UsageError
from treadle.graph.layout import Layout
from treadle.graph.limits import Limits
from treadle.graph.owned import ModelPaths
from treadle.graph.scope import Scope
from treadle.graph.versions import VersionChain
from treadle.model.bson_types import refuse_unsendable, to_bson, too_deep
from treadle.model.codec import Codec, codec_of
from treadle.model.document import Document
from treadle.model.shape import Shape, field_shape
from treadle.model.text import quote
from treadle.plan import Raw, by_id
from treadle.query.field_paths import FieldPaths
from treadle.query.paths import ARRAYS

Maintain: TypeAlias = Literal["write", "stream", "schedule"]
# `ModelEntry` alone is a model of any class.
D = TypeVar("D", bound=Document, default=Any)
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class ModelEntry(Generic[D]):
    """One model of a Store."""

    # How a stored document becomes a current one; all models of a collection share it.
    versions: VersionChain
    # The documents by role: what rules maintain; what derived values count (archived documents
    # included, unless the archive is not counted); what exists; and what is soft-deleted.
    targets: Scope
    sources: Scope
    everything: Scope
    deleted: Scope

    def __init__(self, model: type[D], limits: Limits) -> None:
        if model.__treadle__.collection is None:
            raise DeclarationError(
                f'{model.__name__} has no collection; write class {model.__name__}(Document, collection="…")',
                code="collection-missing",
            )
        self.model = model
        self.limits = limits
        self.collection: str = model.__treadle__.collection
        self.codec: Codec[D] = codec_of(model)
        self.ids = IdCodec(model)
        self.paths = ModelPaths(FieldPaths(self.codec))
        self.kinds = Kinds(self)
        # What is declared here and on the kinds above.
        self.rules = RuleSet()
        # What is derived from documents of this model.
        self.effects = Effects()
        # How documents are stored and called; None where they are stored one by one.
        self.layout: Layout[D] | None = None

    def maintained_fields(self) -> frozenset[str]:
        """Return the Python names of the fields that only Treadle writes."""
        fields = self.codec.by_stored
        return frozenset(
            fields[path].name
            for path, owned in self.paths.owned.items()
            if path in fields and not owned.insert_may_set
        )

    def owner(self, path: str) -> Any:
        """Return the rule of this model, or of a related one, that owns a path."""
        rules = (rule for each in self.kinds.related for rule in each.rules)
        return next(rule for rule in rules if any(owned.path == path for owned in rule.owns()))

    # -- documents by id and by key ----------------------------------------------------------------

    def filter_for_id(self, identity: Any) -> Raw:
        """Return the filter for one document of this model."""
        return self.targets.filter(by_id(identity))

    def key_of(self, document: Mapping[str, Any]) -> Any:
        """Return what sources know a document by: its id, or the values of its group."""
        group = self.rules.group
        return document["_id"] if group is None else group.on.value(document)

    def key_projection(self) -> Raw:
        """Return what `key_of` needs of a document."""
        group = self.rules.group
        own = group.on.fields if group is not None else []
        return {**self.kinds.projection, **dict.fromkeys(own, 1)}

    def filter_for_key(self, key: Any) -> Raw:
        """Return the filter for the document that a key belongs to."""
        group = self.rules.group
        target: Raw = self.filter_for_id(key) if group is None else group.on.exactly([key])
        return target

    def filter_for_keys(self, keys: Sequence[Any]) -> Raw:
        """Return the filter for the documents that these keys belong to."""
        group = self.rules.group
        if group is None:
            return self.targets.filter({"_id": {"$in": list(keys)}})
        targets: Raw = group.on.exactly(keys)
        return targets


# -- rules --------------------------------------------------------------------------------------------


def default(method: F) -> F:
    """Mark a method of the interface that means nothing unless a rule overrides it."""
    method.is_default = True  # type: ignore[attr-defined]
    return method


def implements(rule: object, method: str) -> bool:
    """Whether a rule overrides a method of the interface."""
    return not getattr(getattr(type(rule), method), "is_default", False)


class RuleSet:
    """Some rules in the order of their declaration. Lookups are remembered until a rule is added."""

    # Rules are defined above models (a rule has a target and a source), hence `Any`; `of_type` is typed.
    def __init__(self, rules: Iterable[Any] = (), group: Any = None) -> None:
        self._rules = [*rules]
        # What follows from the rules, by what asked for it.
        self.facts: dict[Hashable, Any] = {}
        # Of the rules of a model the one that makes and removes its documents, where they stand for groups.
        self.group = group

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def add(self, rule: Any) -> None:
        self._rules.append(rule)
        self.facts.clear()

    def of_type(self, kind: type[R], maintain: Maintain | None = None) -> list[R]:
        """Return the rules of a class; those maintained in one way, if asked."""
        key = kind, maintain
        if key not in self.facts:
            rules = [each for each in self._rules if maintain is None or each.maintain == maintain]
            self.facts[key] = [each for each in rules if isinstance(each, kind)]
        chosen: list[R] = self.facts[key]
        return chosen

    def implementing(self, method: str) -> list[Any]:
        """Return the rules that override a method of the interface."""
        return self.memo(method, lambda: [rule for rule in self._rules if implements(rule, method)])

    def memo(self, key: Hashable, make: Callable[[], R]) -> R:
        """Return what follows from these rules, made when it is first asked for."""
        try:
            made: R = self.facts[key]
        except KeyError:
            made = self.facts[key] = make()
        return made


class Effects(RuleSet):
    """What a write of a model entails: the rules derived from its documents, and what the graph found."""

    def __init__(self, rules: Iterable[Any] = ()) -> None:
        super().__init__(rules)
        # Whether a write entails nothing else, so that one plain command is all of it.
        self.is_plain = True
        # Whether what follows can change the document that was written.
        self.may_affect_itself = False
        # The stored paths that a write must not change without being followed; None for all.
        self.followed: set[str] | None = set()

    @property
    def on_write(self) -> list[Any]:
        """The rules that must follow a write in the same commit."""
        return self.memo("on write", lambda: [rule for rule in self if rule.maintain == "write"])


# -- kinds --------------------------------------------------------------------------------------------


class Kinds:
    """Which documents of its collection are a model's own, where several models share it."""

    def __init__(self, entry: ModelEntry) -> None:
        self._entry = entry
        # What the class itself says; None for an abstract one, which stands for the kinds below it.
        self.kind = entry.model.__treadle__.kind
        # All models of the collection; None where there is only one.
        self.family: KindFamily | None = None
        # The entry that stands for the whole collection, and the classes above and below this one.
        self.root: ModelEntry = entry
        self.above: list[ModelEntry] = []
        self.below: list[ModelEntry] = []
        # What the discriminator holds in documents of this model; empty where it may hold anything.
        self.stored: frozenset[Any] = frozenset()

    @property
    def related(self) -> list[ModelEntry]:
        """The entries that some document may share with this one; itself among them."""
        return [*self.above, self._entry, *self.below]

    @property
    def projection(self) -> Raw:
        """The projection that contains a document's id and its class."""
        return {"_id": 1} if self.family is None else {"_id": 1, self.family.discriminator: 1}

    def of(self, raw: Any) -> ModelEntry:
        """Return the entry of a stored document's own class."""
        return self._entry if self.family is None else self.family.of(raw)

    def split(self, raws: Iterable[R]) -> Iterable[tuple[ModelEntry, list[R]]]:
        """Return documents, or tuples that begin with one, by their own class."""
        if self.family is None:
            return [(self._entry, list(raws))]
        groups: dict[ModelEntry, list[R]] = {}
        for each in raws:
            groups.setdefault(self.of(each[0] if isinstance(each, tuple) else each), []).append(each)
        return list(groups.items())


class KindFamily:
    """The entries that share one collection, root first."""

    def __init__(self, root: ModelEntry, members: Sequence[ModelEntry]) -> None:
        self.root = root
        self.members = members
        settings = root.model.__treadle__
        self.discriminator: str = settings.discriminator or ""
        self.by_kind: dict[Any, ModelEntry] = {}
        for entry in members:
            kind = entry.kinds.kind
            other = entry if kind is None else self.by_kind.setdefault(kind, entry)
            if other is not entry:
                raise DeclarationError(
                    f"{entry.model.__name__} and {other.model.__name__} both have kind={kind!r}; "
                    "give each its own",
                    code="kind-twice",
                )
        # The kind of documents that name none.
        self.default: Any = settings.default_kind
        if self.default is not None and self.default not in self.by_kind:
            known = ", ".join(map(repr, self.by_kind)) or "none"
            raise DeclarationError(
                f"{root.model.__name__} has default_kind={self.default!r}, which is none of the kinds that "
                f"this Store knows ({known}); add its model to models=",
                code="kind-invalid",
            )

    def stored_as(self, kind: Any) -> list[Any]:
        """Return what the discriminator of a kind's documents holds; None is also where there is none."""
        return [kind, None] if kind == self.default and kind is not None else [kind]

    def of(self, raw: Any) -> ModelEntry:
        """Return the entry of a stored document's own class; the root where its kind is not known."""
        kind = raw.get(self.discriminator) if isinstance(raw, dict) else None
        try:
            return self.by_kind.get(self.default if kind is None else kind, self.root)
        except TypeError:
            return self.root


# -- ids ----------------------------------------------------------------------------------------------


class IdCodec:
    """How the ids of a model are checked and stored."""

    def __init__(self, model: type[Document]) -> None:
        self._model = model
        self.shape: Shape = field_shape(model.__name__, "id", model.__pydantic_fields__["id"])
        if self.shape.optional or self.shape.kind in ARRAYS:
            raise DeclarationError(
                f"{model.__name__}.id may be None or a list, which MongoDB does not take as the id of a "
                "document; leave it out, and an ObjectId is made",
                code="id-invalid",
            )
        info, plain = model.__pydantic_fields__["id"], Document.__pydantic_fields__["id"]
        # An ObjectId needs no validation, unless the model asks for more.
        is_plain = (info.annotation, info.metadata) == (plain.annotation, plain.metadata)
        self._exact: type | None = ObjectId if is_plain else None

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        # Most callers give an ObjectId, which needs none.
        return TypeAdapter(self._model.__pydantic_fields__["id"].rebuild_annotation())

    def encode(self, value: Any) -> Any:
        """Return the stored form of an id that a caller gave; never an operator."""
        if type(value) is self._exact:
            return value
        try:
            identity = to_bson(self._adapter.validate_python(value), [])
        except ValidationError as error:
            hint = "write await before it" if isawaitable(value) else error.errors()[0]["msg"]
            raise UsageError(
                f"{quote(value)} is not an id of {self._model.__name__}: {hint}", code="id-invalid"
            ) from error
        except RecursionError:
            raise too_deep(self._model.__name__) from None
        if not isinstance(identity, (dict, list)):
            refuse_unsendable(identity)
        return identity
