"""One model of a Store, with all that plans need to know about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic

from typing_extensions import TypeVar

from treadle.errors import DeclarationError
from treadle.graph.ids import IdCodec
from treadle.graph.layout import Layout
from treadle.graph.limits import Limits
from treadle.graph.owned import ModelPaths
from treadle.graph.rule_set import Effects, RuleSet
from treadle.graph.scope import Scope
from treadle.graph.versions import VersionChain
from treadle.model.codec import Codec, codec_of
from treadle.model.document import Document
from treadle.plan import Raw, by_id
from treadle.query.field_paths import FieldPaths

# `ModelEntry` alone is a model of any class.
D = TypeVar("D", bound=Document, default=Any)
R = TypeVar("R")


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
        self.rules = ModelRules()
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


class ModelRules(RuleSet):
    """The rules of a model."""

    def __init__(self, rules: Iterable[Any] = (), group: Any = None) -> None:
        super().__init__(rules)
        # The `GroupRule` that makes and removes the documents of the model, where they stand for groups.
        self.group = group


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
