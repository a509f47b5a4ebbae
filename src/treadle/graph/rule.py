"""The interface of patterns, and the models that it speaks of.

A pattern is a declaration: a frozen value on a field, or a class keyword.
When a Store is made, each declaration is bound to the place where it stands.
The resulting `Rule` answers what the rest of Treadle asks. Every method of a
rule has a default that does nothing; whoever asks looks up the rules that
answer (`ModelEntry.answering`), and names no pattern. A rule that answers nothing
is refused, because nobody would carry it out.

Values that follow from other data have a family of their own, which the
engine maintains for them: `GatherRule` (from the documents that name the
target), `CopyRule` (from the document that the target names), `FormulaRule`
(from the target itself, computed by the server) and `LocalRule` (from the
target itself, computed in Python). They are in `derived.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from inspect import isawaitable
from typing import Any, ClassVar, Final, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from bson import ObjectId
from pydantic import GetJsonSchemaHandler, TypeAdapter, ValidationError
from pymongo import IndexModel

from treadle.errors import DeclarationError, UsageError
from treadle.graph.batch import Batch
from treadle.graph.changes import Change, Changes
from treadle.graph.events import Event
from treadle.graph.layout import Layout
from treadle.graph.limits import Limits
from treadle.graph.outcomes import Finding
from treadle.graph.scope import Scope, ScopePart
from treadle.graph.versions import VersionChain
from treadle.model.bson_types import RESERVED, to_bson
from treadle.model.codec import Codec, StoredField, codec_of
from treadle.model.document import Document
from treadle.model.encodable import refuse_unsendable, too_deep
from treadle.model.shape import Shape, field_shape
from treadle.model.text import quote
from treadle.plan import Plan, Raw, by_id
from treadle.query.field_paths import FieldPaths
from treadle.query.paths import ARRAYS, Path, Step

D = TypeVar("D", bound=Document)
R = TypeVar("R")
Kind = TypeVar("Kind", bound="Rule")
Maintain: TypeAlias = Literal["write", "stream", "schedule"]
# How a caller's write stamps a path: with the server's time, or with one more than before.
Touch: TypeAlias = Literal["now", "next"]
ModelReference: TypeAlias = type[Document] | str
REVISION = f"{RESERVED}.n"
STATE = f"{RESERVED}.state"


@dataclass(frozen=True)
class Place:
    """Where a declaration stands: document, path to the declaring model, field."""

    entry: ModelEntry[Any]
    owner: Codec[Any]
    steps: tuple[Step, ...]
    field: StoredField

    @property
    def label(self) -> str:
        """How messages name it: `Order.lines.product`."""
        return ".".join([self.entry.model.__name__, *(step.name for step in self.steps), self.field.name])

    @property
    def stored(self) -> str:
        return ".".join([*(step.stored for step in self.steps), self.field.stored])

    @property
    def in_array(self) -> bool:
        return any(step.array for step in self.steps)


@dataclass(frozen=True)
class ClassPlace(Place):
    """Where a class keyword stands: the document as a whole."""

    keyword: str

    @property
    def label(self) -> str:
        return self.entry.model.__name__

    @property
    def stored(self) -> str:
        return f"{STATE}.{self.keyword}"


class Models(Protocol):
    """All models of a Store, as rules see them; `graph.py` has the one implementation."""

    entries: dict[type[Document], ModelEntry[Any]]
    by_collection: dict[str, ModelEntry[Any]]
    limits: Limits
    # Every rule once, when all are bound.
    rules: list[Rule]

    def entry(self, model: type[D]) -> ModelEntry[D]:
        """The entry of a model that was given to the Store."""

    def resolve(self, source: Any, where: str) -> ModelEntry[Any]:
        """The source of a declaration, which may be a class or a name."""

    def add_side(self, model: type[Document], where: str) -> ModelEntry[Any]:
        """The entry of a collection that a pattern keeps beside those of the models."""

    def check_reference(
        self, reference: Path, referenced: ModelEntry[Any], where: str, to: str | None = None
    ) -> str | None:
        """Refuse a reference whose type cannot hold the id, or the field `to`, that it is to hold.

        The stored path of `to`; None where it is the id.
        """


class Pattern:
    """The base of all declarations."""

    pattern: ClassVar[str] = ""
    # The class keyword that a pattern of the whole model goes with; None for one on a field.
    keyword: ClassVar[str | None] = None
    # Whether one of the whole model goes together with others that say how its documents are stored.
    beside: ClassVar[bool] = False
    # Whether the field that it stands on is Treadle's to write, which a JSON schema says as `readOnly`.
    read_only: ClassVar[bool] = True

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> Raw:
        described = handler(schema)
        return {**described, "readOnly": True} if self.read_only else described

    def bind(self, place: Place, graph: Models) -> Rule:
        """Check the declaration where it stands; raises `DeclarationError`."""
        raise NotImplementedError(f"{type(self).__name__} has no bind()")  # pragma: no cover


NOTHING: Mapping[str, str] = {}
TRANSACTIONS: Mapping[str, str] = {"transactions": ""}


# What a replace does with an owned path: nothing is kept of it.
NOT_KEPT: Final = object()
Reads: TypeAlias = Mapping[str, Set[str] | None]


class Owned(NamedTuple):
    """A stored path of the target that callers do not write."""

    path: str
    # How the refusal of an update ends: what maintains the path, or what to do instead.
    advice: str = " from the document's other fields; write those instead"
    # Whether an insert may set it.
    insert_may_set: bool = False
    # What a caller's own write of the document sets it to: the server's time, or one more than before.
    on_write: Touch | None = None
    # Whether that is done by inserts only.
    insert_only: bool = False
    # The first value of a path that is written all the time: a replace keeps what is stored at that moment.
    initial: Any = NOT_KEPT
    # Whether it is filled again after each write, so that callers may write what surrounds it.
    refilled: bool = False
    # Whether other rules may own it as well, such as a date of computation.
    shared: bool = False


class Storage(NamedTuple):
    """What `setup()` must create for a rule, and check first."""

    # For speed; an index that begins with the same keys will do.
    indexes: Sequence[tuple[ModelEntry[Any], IndexModel]] = ()
    # Of the target: writes are refused while one of these is missing.
    unique: Sequence[IndexModel] = ()
    # Returns the error that explains what a unique index refused, if it is about this rule.
    explain: Callable[[Exception], Exception | None] | None = None
    # Refuses what stands in the way, before anything is changed: gets the options of the collections that
    # exist, and the indexes that are missing, both by collection.
    check: Callable[[Mapping[str, Raw], Mapping[str, list[IndexModel]]], Plan[None]] | None = None


class Due(NamedTuple):
    """A call of `run_due`: work that has become due, or that a crash left unfinished."""

    kind: Literal["due", "recover"]
    now: datetime | None = None
    dry_run: bool = False


class Rule:
    """A declaration bound to its model."""

    pattern: str = ""
    # The capabilities of the server that it requires, each with what to do where one is missing.
    needs: Mapping[str, str] = NOTHING
    # Capabilities that it uses and does without.
    uses: frozenset[str] = frozenset()
    # Whether it works where the documents of its model are spread over shards.
    across_shards = True
    # Why documents are deleted all together or not at all, and what to do instead: how the refusal of a large
    # deletion ends. Empty where each goes by itself.
    deletes_together = ""
    # Whether `record` changes other documents of the target, and so comes before what is derived from them.
    spreads = False
    # Whether it needs a document's state before an update; otherwise a change's `before` may be empty.
    needs_before = True
    # Whether `verify` examines pages of documents. Of each document a page holds this projection.
    verifies_pages = True
    page_projection: Mapping[str, Any] = NOTHING
    # What `run_due` does, as listings name it. A rule without it has no work that becomes due.
    due_work = ""
    # All models of the Store; set when the rule is bound.
    models: Models

    def __init__(self, place: Place) -> None:
        self.place = place
        self.target = place.entry
        # The model from whose documents it is made; by default the target itself.
        self.source: ModelEntry[Any] = place.entry
        self.path = place.stored
        self.level = 0
        # What the model's author wrote; set when the rule is bound.
        self.declared: Any = None
        self.maintain: Maintain = "write"
        self.every: timedelta | None = None

    # -- declarations ---------------------------------------------------------------------------

    def reads(self) -> Reads:
        """Return per collection the stored paths that this is made from; None for all paths."""
        return {}

    def owns(self) -> Sequence[Owned]:
        """Return the stored paths of the target that callers do not write."""
        return [Owned(self.path)]

    def storage(self) -> Storage:
        """Return the indexes that this needs, and what to check before `setup()` changes anything."""
        return Storage()

    def scope(self) -> ScopePart:
        """Return what this contributes to the scopes of the target."""
        return ScopePart()

    def layout(self, default: Layout[Any] | None) -> Layout[Any] | None:
        """Return how the target's documents are stored and called, if not by the default layout.

        Called with None when the Store is made: then a rule that stores
        documents in another way than one by one returns its layout.
        """
        return None

    def check(self, graph: Models) -> None:
        """Refuse other declarations that conflict with this one; called when all rules are bound."""

    # -- writes of the target -------------------------------------------------------------------

    def prepare(self, raw: Raw) -> Any:
        """Put into a new document what it must carry; what is returned is noted in the batch."""

    def inserts_alone(self, batch: Batch) -> bool:
        """Whether these documents can be inserted by one plain command; asked where it acts on inserts."""
        return False

    def before_insert(self, batch: Batch, changes: Changes) -> Plan[Any]:
        """In the commit, before the documents are stored; what is returned goes to `after_insert`."""
        yield from ()

    def after_insert(self, batch: Batch, state: Any, changes: Changes) -> Plan[None]:
        """In the commit, after the documents are stored: what must be written beside them."""
        yield from ()

    def before_replace(self, before: Raw, after: Raw) -> None:
        """Refuse a replacement that would change what only Treadle may."""

    def before_delete(self, documents: Sequence[Raw], changes: Changes) -> Plan[None]:
        """In the commit, before these documents are deleted; raises where they must not be."""
        yield from ()

    def before_restore(self, document: Raw, changes: Changes) -> Plan[Any]:
        """What a deleted document must carry when it comes back; what is returned goes to `after_restore`."""
        return None
        yield  # pragma: no cover

    def after_restore(self, state: Any, changes: Changes) -> Plan[None]:
        """What must be written beside a document that came back."""
        return None
        yield  # pragma: no cover

    def after_delete(self, keys: Sequence[Any], changes: Changes) -> Plan[None]:
        """In the commit, after documents were deleted: what must go with them."""
        yield from ()

    def record(self, changes: Sequence[Change], ledger: Changes) -> Plan[None]:
        """Write, in the commit, what goes beside documents that were inserted, changed or deleted.

        Gets the net changes of the target's collection, of all kinds, after
        everything else was written. Such a rule reads paths of its own
        collection, or it is never asked.
        """
        yield from ()

    def replay(self, events: Sequence[Event]) -> Plan[None]:
        """Do the same for changes from the stream: in order, each once, if `maintain` is "stream".

        Runs in the transaction that stores the worker's position after these events.
        """
        yield from ()

    # -- operations -----------------------------------------------------------------------------

    def verify(self, page: Sequence[Raw] | None) -> Plan[list[Finding]]:
        """Return the findings in a page of documents; without a page, those that no page shows."""
        return []
        yield  # pragma: no cover

    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        """Repair these documents; returns the keys of those that changed.

        Without keys, at the end of a rebuild: remove what belongs to no document.
        """
        return []
        yield  # pragma: no cover

    def run_due(self, work: Due) -> Plan[int]:
        """Do what is due, or finish what a crash interrupted. Returns the number of documents concerned."""
        return 0
        yield  # pragma: no cover


# A rule must override one of these, derive its value, or own a path that each write sets.
CARRIED_OUT = (
    "layout", "prepare", "before_insert", "after_insert", "before_replace", "before_delete",
    "before_restore", "after_restore", "after_delete",
    "record", "replay", "verify", "repair", "run_due",
)  # fmt: skip


class ModelEntry(Generic[D]):
    """One model of a Store, with all that its plans need to know."""

    def __init__(self, model: type[D], limits: Limits) -> None:
        if model.__treadle__.collection is None:
            raise DeclarationError(
                f'{model.__name__} has no collection; write class {model.__name__}(Document, collection="…")',
                code="collection-missing",
            )
        self.model = model
        self.limits = limits
        self.settings = model.__treadle__
        self.collection: str = model.__treadle__.collection
        self.codec: Codec[D] = codec_of(model)
        self.identity_shape: Shape = _identity_shape(model)
        info, plain = model.__pydantic_fields__["id"], Document.__pydantic_fields__["id"]
        # An ObjectId needs no validation, unless the model asks for more.
        plain_id = (info.annotation, info.metadata) == (plain.annotation, plain.metadata)
        self._exact_id: type | None = ObjectId if plain_id else None
        # What is declared here and on the kinds above, and what is made of this model's documents.
        self.rules: list[Rule] = []
        self.sourcing: list[Rule] = []
        self._lookups: dict[Any, list[Any]] = {}
        self._field_paths: FieldPaths | None = None
        self._made: dict[Any, Any] = {}
        # How its documents are stored, where that is not one by one.
        self.layout: Layout[D] | None = None
        # The rule that makes and removes documents of this model, if it stands for groups (a `GroupRule`).
        self.group: Any = None
        self.declared: dict[str, Pattern] = {}
        # The unique fields other than the id by which documents of others name those of this model.
        self.named_by: dict[str, Path] = {}
        # What only Treadle writes; and what is so in any document that a filter on this model may find.
        self.owned: dict[str, Owned] = {}
        self.owned_in_collection = self.owned
        # The other models of its collection, and which documents are its own (`kinds.py`).
        self.family: Family | None = None
        # The entry that stands for the whole collection.
        self.root: ModelEntry[Any] = self
        self.above: list[ModelEntry[Any]] = []
        self.below: list[ModelEntry[Any]] = []
        self.kinds: frozenset[Any] = frozenset()
        # Its documents by role: what rules maintain; what derived values count, archived documents
        # included unless the archive is not counted; what exists; and what is soft-deleted.
        self.targets: Scope
        self.sources: Scope
        self.everything: Scope
        self.deleted: Scope
        # The stored path of the date of a deletion; None where deleted documents are not kept.
        self.deletion_path: str | None = None
        # How a stored document becomes a current one; all models of a collection share it.
        self.versions: VersionChain
        # Whether a write of this model concerns nothing else.
        self.plain = True
        # Whether a write of this model can come round to the very document that was written.
        self.loops = False
        # The stored paths that a write must not touch without being followed; None for all.
        self.watched: set[str] | None = set()
        # What its rules ask of each write; the engine makes it at the first one.
        self.derivation: Any = None

    def read_only(self) -> frozenset[str]:
        """The names of the fields that nobody but Treadle writes."""
        fields = self.codec.by_stored
        return frozenset(
            fields[path].name
            for path, owned in self.owned.items()
            if path in fields and not owned.insert_may_set
        )

    # -- rules, by what they can do --------------------------------------------------------------

    def having(self, kind: type[Kind], maintain: Maintain | None = None) -> list[Kind]:
        """The rules of this model that are of a family; those maintained in one way, if asked."""
        return self._looked_up((kind, maintain), self.rules, kind, maintain)

    def feeding(self, kind: type[Kind], maintain: Maintain | None = "write") -> list[Kind]:
        """The rules of a family that are made of documents of this model."""
        return self._looked_up((kind, maintain, "sourcing"), self.sourcing, kind, maintain)

    @property
    def feeds(self) -> list[Rule]:
        """What must follow a write of this model in the same commit."""
        return self.feeding(Rule)

    def _looked_up(
        self, key: Any, rules: Sequence[Rule], kind: type[Kind], maintain: Maintain | None
    ) -> list[Kind]:
        if key not in self._lookups:
            self._lookups[key] = [
                rule
                for rule in rules
                if isinstance(rule, kind) and (maintain is None or rule.maintain == maintain)
            ]
        return self._lookups[key]

    def owner(self, path: str) -> Rule:
        """The rule of this model, or of a related one, that owns a path."""
        return next(
            rule
            for each in self.related
            for rule in each.rules
            for owned in rule.owns()
            if owned.path == path
        )

    def answering(self, method: str) -> list[Rule]:
        """The rules of this model that answer a method of the interface."""
        if method not in self._lookups:
            default = getattr(Rule, method)
            self._lookups[method] = [
                rule for rule in self.rules if getattr(type(rule), method) is not default
            ]
        return self._lookups[method]

    def once(self, key: Any, make: Callable[[], R]) -> R:
        """What follows from the rules of this model, made when it is first asked for."""
        if key not in self._made:
            self._made[key] = make()
        made: R = self._made[key]
        return made

    @property
    def field_paths(self) -> FieldPaths:
        """The stored paths that filters, updates and sorts may name."""
        if self._field_paths is None:
            self._field_paths = FieldPaths(self.codec, self.owned_in_collection, self.watched)
        return self._field_paths

    def add(self, rule: Rule) -> None:
        """Make a rule part of this model."""
        self.rules.append(rule)
        self.forget_lookups()

    def forget_lookups(self) -> None:
        self._lookups.clear()
        self._made.clear()
        self._field_paths = None

    @property
    def kept(self) -> dict[str, Any]:
        """What a replace leaves as it is stored."""
        return {path: owned.initial for path, owned in self.owned.items() if owned.initial is not NOT_KEPT}

    # -- kinds ---------------------------------------------------------------------------------

    @property
    def related(self) -> list[ModelEntry[Any]]:
        """The entries that some document may share with this one; itself among them."""
        return [*self.above, self, *self.below]

    def name(self, reference: Path) -> None:
        """Note a field by which others name documents of this model, and which set-up makes unique."""
        self.named_by[reference.stored] = reference

    def of(self, raw: Any) -> ModelEntry[Any]:
        """The entry of a stored document's very class."""
        return self if self.family is None else self.family.of(raw)

    def holds(self, raw: Any) -> bool:
        """Whether a current document is one of this model, or of a kind below it, and not deleted."""
        return self.targets.admits(raw)

    @property
    def identifying(self) -> Raw:
        """The projection that tells a document's id and its class."""
        return {"_id": 1} if self.family is None else {"_id": 1, self.family.discriminator: 1}

    def by_class(self, raws: Iterable[R]) -> Iterable[tuple[ModelEntry[Any], list[R]]]:
        """Documents, or pairs that begin with one, by their very class."""
        if self.family is None:
            return [(self, list(raws))]
        groups: dict[ModelEntry[Any], list[R]] = {}
        for each in raws:
            groups.setdefault(self.of(each[0] if isinstance(each, tuple) else each), []).append(each)
        return list(groups.items())

    # -- documents by id and by key ----------------------------------------------------------------

    def one(self, identity: Any) -> Raw:
        """The filter for one document of this model, by its id."""
        return self.targets.filter(by_id(identity))

    def key_of(self, document: Mapping[str, Any]) -> Any:
        """What sources know a document of this model by: its id, or the values of its group."""
        return document["_id"] if self.group is None else self.group.key.of_target(document)

    def key_projection(self) -> dict[str, Any]:
        """What `key_of` needs of a document."""
        own = self.group.key.targets if self.group is not None else []
        return {**self.identifying, **dict.fromkeys(own, 1)}

    def at(self, key: Any) -> dict[str, Any]:
        """The filter for the document that a key belongs to."""
        target: dict[str, Any] = self.one(key) if self.group is None else self.group.key.target(key)
        return target

    def at_any(self, keys: Sequence[Any]) -> dict[str, Any]:
        """The filter for the documents that these keys belong to."""
        if self.group is None:
            return self.targets.filter({"_id": {"$in": list(keys)}})
        if len(keys) == 1:
            return self.at(keys[0])
        if len(self.group.key.parts) == 1:
            return {self.group.key.parts[0].target: {"$in": [key[0] for key in keys]}}
        return {"$or": [self.group.key.target(key) for key in keys]} if keys else {"_id": {"$in": []}}

    @cached_property
    def _identity(self) -> TypeAdapter[Any]:
        # Most callers give an ObjectId, which needs none.
        return TypeAdapter(self.model.__pydantic_fields__["id"].rebuild_annotation())

    def identity(self, value: Any) -> Any:
        """The stored form of an id that a caller gave; never an operator."""
        if type(value) is self._exact_id:
            return value
        try:
            identity = to_bson(self._identity.validate_python(value), [])
        except ValidationError as error:
            raise UsageError(
                f"{quote(value)} is not an id of {self.model.__name__}: "
                + ("write await before it" if isawaitable(value) else error.errors()[0]["msg"]),
                code="id-invalid",
            ) from error
        except RecursionError:
            raise too_deep(self.model.__name__) from None
        if not isinstance(identity, (dict, list)):
            refuse_unsendable(identity)
        return identity


def _identity_shape(model: type[Document]) -> Shape:
    shape = field_shape(model.__name__, "id", model.__pydantic_fields__["id"])
    if shape.optional or shape.kind in ARRAYS:
        raise DeclarationError(
            f"{model.__name__}.id may be None or a list, which MongoDB does not take as the id of a "
            "document; leave it out, and an ObjectId is made",
            code="id-invalid",
        )
    return shape


class Family:
    """The entries that share one collection, root first."""

    def __init__(self, root: ModelEntry[Any], members: Sequence[ModelEntry[Any]]) -> None:
        self.root = root
        self.members = members
        self.discriminator: str = root.settings.discriminator or ""
        self.by_kind: dict[Any, ModelEntry[Any]] = {}
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
        # The kind of documents that name none.
        self.default: Any = root.settings.default_kind
        if self.default is not None and self.default not in self.by_kind:
            known = ", ".join(map(repr, self.by_kind)) or "none"
            raise DeclarationError(
                f"{root.model.__name__} has default_kind={self.default!r}, which is none of the kinds that "
                f"this Store knows ({known}); add its model to models=",
                code="kind-invalid",
            )

    def stored_as(self, kind: Any) -> list[Any]:
        """What the discriminator of a kind's documents holds; None is also where there is none."""
        return [kind, None] if kind == self.default and kind is not None else [kind]

    def of(self, raw: Any) -> ModelEntry[Any]:
        """The entry of the very class of a stored document; the root where its kind is not known."""
        kind = raw.get(self.discriminator) if isinstance(raw, dict) else None
        try:
            return self.by_kind.get(self.default if kind is None else kind, self.root)
        except TypeError:
            return self.root
