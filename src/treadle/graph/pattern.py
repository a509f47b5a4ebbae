"""The interface of patterns, and the models that it speaks of.

A pattern is a declaration: a frozen value on a field, or a class keyword.
When a Store is made, each declaration is bound to the place where it stands.
The resulting `Rule` answers what the rest of Treadle asks. Every method of a
rule has a default that does nothing; whoever asks looks up the rules that
answer (`Entry.answering`), and names no pattern. A rule that answers nothing
is refused, because nobody would carry it out.

Values that follow from other data have a family of their own, which the
engine maintains for them: `GatherRule` (from the documents that name the
target), `CopyRule` (from the document that the target names), `FormulaRule`
(from the target itself, computed by the server) and `LocalRule` (from the
target itself, computed in Python). They are in `derived.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from inspect import isawaitable
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

from bson import ObjectId
from pydantic import GetJsonSchemaHandler, TypeAdapter, ValidationError
from pymongo import IndexModel

from treadle.errors import DeclarationError, UsageError
from treadle.graph.batch import Batch
from treadle.graph.changes import Change, Changes
from treadle.graph.events import Event
from treadle.graph.layout import Layout
from treadle.graph.limits import Limits
from treadle.graph.outcomes import Finding, Report
from treadle.graph.scope import Scope, ScopePart
from treadle.graph.versions import VersionChain
from treadle.model.bson_types import RESERVED, to_bson
from treadle.model.codec import Codec, StoredField, codec_of
from treadle.model.document import Document
from treadle.model.encodable import refuse_unsendable, too_deep
from treadle.model.shape import Shape, field_shape
from treadle.model.text import quote
from treadle.plan import Plan, Raw, by_id
from treadle.plan.capabilities import Capabilities
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

    entry: Entry[Any]
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

    entries: dict[type[Document], Entry[Any]]
    by_collection: dict[str, Entry[Any]]
    limits: Limits
    # Every rule once, when all are bound.
    rules: list[Rule]

    def entry(self, model: type[D]) -> Entry[D]:
        """The entry of a model that was given to the Store."""

    def resolve(self, source: Any, where: str) -> Entry[Any]:
        """The source of a declaration, which may be a class or a name."""

    def add_side(self, model: type[Document], where: str) -> Entry[Any]:
        """The entry of a collection that a pattern keeps beside those of the models."""

    def check_reference(
        self, reference: Path, referenced: Entry[Any], where: str, to: str | None = None
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


class Rule:
    """A declaration at its place."""

    pattern: str = ""
    # The capabilities without which it cannot be kept right, each with what to do where one is missing.
    needs: Mapping[str, str] = NOTHING
    # Those that it makes use of, and does without.
    uses: frozenset[str] = frozenset()
    # Whether it can be kept right where the documents of its model are spread over shards.
    across_shards = True
    # Whether it is filled anew when something around it is written, so that callers may write that.
    refills = False
    # Whether its documents are deleted all together or not at all.
    deletes_together = False
    # Whether `record` changes other documents of the target, and so comes before what follows from them.
    spreads = False
    # Whether it must be told what a document was before an update; else that may be empty in a change.
    needs_before = True
    # What `run_due` does, for whoever lists it; empty where it does nothing.
    due_work = ""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.target = place.entry
        # The model whose documents it is made of; the target itself where there is no other.
        self.source: Entry[Any] = place.entry
        self.path = place.stored
        self.level = 0
        # How it is kept right: with each write, by the worker, or on a schedule.
        # What the model's author wrote; the graph sets it.
        self.declared: Any = None
        self.maintain: Maintain = "write"
        self.every: timedelta | None = None

    # -- what it is about: asked by the graph, by set-up and by the check of updates ----------

    def watches(self) -> Mapping[str, set[str] | None]:
        """Per source collection the stored paths that feed this; None for all."""
        return {}

    def maintained(self) -> set[str]:
        """The stored paths of the target that only Treadle writes."""
        return {self.path}

    def brought(self) -> set[str]:
        """Those of the maintained paths that an insert may bring, and only an update may not."""
        return set()

    def stamps(self) -> set[str]:
        """Stored paths that are written along, such as a date of computation."""
        return set()

    def shares(self, path: str, other: Rule) -> bool:
        """Whether another rule may maintain the same path."""
        return path in self.stamps() and path in other.stamps()

    def advice(self, maintained: str) -> str:
        """What a caller who wants to write a maintained path should do instead."""
        return " from the document's other fields; write those instead"

    def indexes(self) -> list[tuple[Entry[Any], IndexModel]]:
        """What set-up must create for this to be quick."""
        return []

    def unique_indexes(self) -> list[IndexModel]:
        """The indexes of the target without which this could not be kept right."""
        return []

    def check(self, graph: Models) -> None:
        """Called when all rules are bound; raises `DeclarationError` where they do not go together."""

    def scope(self) -> ScopePart:
        """What it contributes to the scopes of the target."""
        return ScopePart()

    def bring_back(self, filter: Raw) -> Plan[bool]:
        """Whether what a write did not find was brought back from an archive; raises where it must not be."""
        return False
        yield  # pragma: no cover

    def lay_out(self) -> Layout[Any] | None:
        """How the target's documents are stored, where that is not one by one."""
        return None

    def before_setup(
        self, existing: Mapping[str, Raw], missing: Mapping[str, list[IndexModel]]
    ) -> Plan[None]:
        """Refuse what stands in the way, before set-up changes anything."""
        yield from ()

    # -- writes of the target: asked by the engine --------------------------------------------

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

    def in_pieces(self, documents: Sequence[Any], most: int) -> Plan[list[tuple[list[Any], list[Any]]]]:
        """New documents, with what `given` holds of them, in the pieces and order in which to insert them."""
        return []
        yield  # pragma: no cover

    def touches(self, new: bool) -> dict[str, Touch]:
        """The stored paths that a caller's own write stamps: one of a `new` document, or of a stored one."""
        return {}

    def unchanged(self, raw: Raw) -> Raw:
        """The condition that nobody else has written a document since the caller read it."""
        return {}

    def before_replace(self, before: Raw, after: Raw) -> None:
        """Refuse a replacement that would change what only Treadle may."""

    def kept(self) -> dict[str, Any]:
        """What a replace leaves as it is stored, since others write it all the time; with a first value."""
        return {}

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
        """In the commit, when all else was written: what goes beside documents that came, changed or went.

        The net changes of the target's collection, of all kinds. A rule that
        answers this watches the paths of its own collection that concern it.
        """
        yield from ()

    def too_many(self, most: int) -> UsageError:
        """The refusal of a deletion of more documents than go together."""
        return UsageError(f"{self.place.label}: more than {most:,} documents match", code="delete-too-many")

    def translate(self, error: Exception) -> Exception | None:
        """The clear error in place of the server's, where it is about this rule."""
        return None

    # -- the worker, for rules that are maintained by stream ----------------------------------------

    def replay(self, events: Sequence[Event]) -> Plan[None]:
        """The changes of the target's collection as the server tells them, in order, each once.

        In the transaction that moves the worker's position past them.
        """
        yield from ()

    # -- proof and repair: asked by verify, repair and rebuild; `graph` is the Graph that imports this file

    def shown(self) -> Raw:
        """What a page of documents shows of its field, where that is not all."""
        return {}

    def examine(self, documents: Sequence[Raw]) -> Plan[list[Finding]]:
        """The findings in a page of documents."""
        return []
        yield  # pragma: no cover

    def examine_all(self, server: Capabilities, report: Report | None) -> Plan[list[Finding]]:
        """The findings that no page of documents shows."""
        return []
        yield  # pragma: no cover

    def mend(self, graph: Any, server: Capabilities, keys: Sequence[Any]) -> Plan[list[Any]]:
        """Bring these documents in order; the keys of those that changed."""
        return []
        yield  # pragma: no cover

    def tidy(self) -> Plan[None]:
        """The end of a rebuild: what no document has any more."""
        yield from ()

    # -- later: asked by recovery and by schedules -----------------------------------------------

    def recover(
        self, graph: Any, server: Capabilities, owner: str, is_dead: Callable[[str], bool]
    ) -> Plan[int]:
        """Finish what a crash left half done; how many such things there were."""
        return 0
        yield  # pragma: no cover

    def give_way(self, graph: Any, server: Capabilities) -> Plan[None]:
        """Finish what stands in the way of a write that met it (`Busy`)."""
        yield from ()

    def run_due(self, server: Capabilities, now: datetime, dry_run: bool) -> Plan[int]:
        """Do what is due at a time, or tell how much it would be; how many documents it concerned."""
        return 0
        yield  # pragma: no cover


# The methods by which something carries a rule out.
CARRIED_OUT = (
    "lay_out", "prepare", "touches", "before_insert", "after_insert", "before_replace", "before_delete",
    "before_restore", "after_restore",
    "after_delete",
    "record", "replay", "examine", "examine_all", "mend", "recover", "run_due",
)  # fmt: skip


class Entry(Generic[D]):
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
        self.protected: dict[str, Rule] = {}
        self.shielded = self.protected
        # The other models of its collection, and which documents are its own (`kinds.py`).
        self.family: Family | None = None
        # The entry that stands for the whole collection.
        self.root: Entry[Any] = self
        self.above: list[Entry[Any]] = []
        self.below: list[Entry[Any]] = []
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
        brought = {path for rule in self.rules for path in rule.brought()}
        fields = self.codec.by_stored
        return frozenset(
            fields[path].name for path in self.protected if path in fields and path not in brought
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
            self._field_paths = FieldPaths(self.codec, self.shielded, self.watched)
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
        return {path: value for rule in self.answering("kept") for path, value in rule.kept().items()}

    # -- kinds ---------------------------------------------------------------------------------

    @property
    def related(self) -> list[Entry[Any]]:
        """The entries that some document may share with this one; itself among them."""
        return [*self.above, self, *self.below]

    def name(self, reference: Path) -> None:
        """Note a field by which others name documents of this model, and which set-up makes unique."""
        self.named_by[reference.stored] = reference

    def of(self, raw: Any) -> Entry[Any]:
        """The entry of a stored document's very class."""
        return self if self.family is None else self.family.of(raw)

    def holds(self, raw: Any) -> bool:
        """Whether a current document is one of this model, or of a kind below it, and not deleted."""
        return self.targets.admits(raw)

    @property
    def identifying(self) -> Raw:
        """The projection that tells a document's id and its class."""
        return {"_id": 1} if self.family is None else {"_id": 1, self.family.discriminator: 1}

    def by_class(self, raws: Iterable[R]) -> Iterable[tuple[Entry[Any], list[R]]]:
        """Documents, or pairs that begin with one, by their very class."""
        if self.family is None:
            return [(self, list(raws))]
        groups: dict[Entry[Any], list[R]] = {}
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

    def of(self, raw: Any) -> Entry[Any]:
        """The entry of the very class of a stored document; the root where its kind is not known."""
        kind = raw.get(self.discriminator) if isinstance(raw, dict) else None
        try:
            return self.by_kind.get(self.default if kind is None else kind, self.root)
        except TypeError:
            return self.root
