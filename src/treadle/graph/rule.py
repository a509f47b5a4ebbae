"""The interface of patterns: a declaration, bound to its place in a model, is a `Rule`.

A declaration (`Pattern`) is a frozen value on a field, or a class keyword.
When a Store is made, `bind` checks it where it stands and returns a rule. Each
method of a rule has a default that does nothing. The rest of Treadle names no
pattern; it looks up the rules that override a method (`RuleSet.implementing`)
or that are of a class in `derived.py`, which the engine maintains. A rule that
is neither would be ignored, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from pydantic import GetJsonSchemaHandler
from pymongo import IndexModel

from treadle.graph.batch import Batch
from treadle.graph.changes import Change, Changes
from treadle.graph.events import Event
from treadle.graph.layout import Layout
from treadle.graph.limits import Limits
from treadle.graph.model_entry import Maintain, ModelEntry, default
from treadle.graph.outcomes import Finding
from treadle.graph.owned import Owned
from treadle.graph.scope import ScopePart
from treadle.model.bson_types import RESERVED
from treadle.model.codec import Codec, StoredField
from treadle.model.document import Document
from treadle.plan import Plan, Raw
from treadle.query.paths import Path, Step

D = TypeVar("D", bound=Document)
ModelReference: TypeAlias = type[Document] | str
REVISION = f"{RESERVED}.n"
STATE = f"{RESERVED}.state"


@dataclass(frozen=True)
class Place:
    """Where a declaration stands: document, path to the declaring model, field."""

    entry: ModelEntry
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

    entries: dict[type[Document], ModelEntry]
    by_collection: dict[str, ModelEntry]
    limits: Limits
    # Every rule once, when all are bound.
    rules: list[Rule]

    def entry(self, model: type[D]) -> ModelEntry[D]:
        """The entry of a model that was given to the Store."""

    def resolve(self, source: Any, where: str) -> ModelEntry:
        """The source of a declaration, which may be a class or a name."""

    def add_side(self, model: type[Document], where: str) -> ModelEntry:
        """The entry of a collection that a pattern keeps beside those of the models."""

    def check_reference(
        self, reference: Path, referenced: ModelEntry, where: str, to: str | None = None
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


# Capabilities of the server, each with what to do where it is missing; None where a rule does without.
Needs: TypeAlias = Mapping[str, str | None]
NOTHING: Needs = {}
TRANSACTIONS: Needs = {"transactions": ""}
# Beside it, one moment of several collections.
SNAPSHOTS: Needs = {**TRANSACTIONS, "snapshots": None}
Reads: TypeAlias = Mapping[str, Set[str] | None]


class Storage(NamedTuple):
    """What `setup()` must create for a rule, and check first."""

    # For speed; an index that begins with the same keys will do.
    indexes: Sequence[tuple[ModelEntry, IndexModel]] = ()
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
    needs: Needs = NOTHING
    # Whether it works where the documents of its model are spread over shards.
    across_shards = True
    # Why documents are deleted all together or not at all, and what to do instead: how the refusal of a large
    # deletion ends. Empty where each goes by itself.
    deletes_together = ""
    # Whether `record` changes other documents of the target, and so comes before what is derived from them.
    spreads = False
    # Whether it needs a document's state before an update; otherwise a change's `before` may be empty.
    needs_before = True
    # What `verify` reads of each document of a page, beside the whole of it; None where it looks at no pages.
    page_projection: Mapping[str, Any] | None = NOTHING
    # What `run_due` does, as listings name it. A rule without it has no work that becomes due.
    due_work = ""
    # All models of the Store; set when the rule is bound.
    models: Models

    def __init__(self, place: Place) -> None:
        self.place = place
        self.target = place.entry
        # The model from whose documents it is made; by default the target itself.
        self.source: ModelEntry = place.entry
        self.path = place.stored
        self.level = 0
        # What the model's author wrote; set when the rule is bound.
        self.declared: Any = None
        self.maintain: Maintain = "write"
        self.every: timedelta | None = None

    # -- declarations ---------------------------------------------------------------------------

    @default
    def reads(self) -> Reads:
        """Return per collection the stored paths that this is made from; None for all paths."""
        return {}

    @default
    def owns(self) -> Sequence[Owned]:
        """Return the stored paths of the target that callers do not write."""
        return [Owned(self.path)]

    @default
    def storage(self) -> Storage:
        """Return the indexes that this needs, and what to check before `setup()` changes anything."""
        return Storage()

    @default
    def scope(self) -> ScopePart:
        """Return what this contributes to the scopes of the target."""
        return ScopePart()

    @default
    def layout(self, default: Layout[Any] | None) -> Layout[Any] | None:
        """Return how the target's documents are stored and called, if not by the default layout.

        Called with None when the Store is made: then a rule that stores
        documents in another way than one by one returns its layout.
        """
        return None

    @default
    def check(self, graph: Models) -> None:
        """Refuse other declarations that conflict with this one; called when all rules are bound."""

    # -- writes of the target -------------------------------------------------------------------

    @default
    def needs_commit(self, batch: Batch | None) -> bool:
        """Whether these documents must be written in a commit; None for documents to be deleted unread.

        Asked without I/O, of rules that implement `before` or `after`. If
        not, `before` and `after` send no command.
        """
        return True

    @default
    def before(self, batch: Batch, changes: Changes) -> Plan[None]:
        """Check and complete documents before they are stored or removed.

        For documents that are inserted, replaced, deleted or restored, and for those that change their
        kind: to a rule of one kind alone they are new, or removed. Updates by operators are not shown.
        """
        yield from ()

    @default
    def after(self, batch: Batch, changes: Changes) -> Plan[None]:
        """Write what belongs beside these documents, after they are stored or removed."""
        yield from ()

    @default
    def record(self, changes: Sequence[Change], ledger: Changes) -> Plan[None]:
        """Write, in the commit, what goes beside documents that were inserted, changed or deleted.

        Gets the net changes of the target's collection, of all kinds, after
        everything else was written. Such a rule reads paths of its own
        collection, or it is never asked.
        """
        yield from ()

    @default
    def replay(self, events: Sequence[Event]) -> Plan[None]:
        """Do the same for changes from the stream: in order, each once, if `maintain` is "stream".

        Runs in the transaction that stores the worker's position after these events.
        """
        yield from ()

    # -- operations -----------------------------------------------------------------------------

    @default
    def verify(self, page: Sequence[Raw] | None) -> Plan[list[Finding]]:
        """Return the findings in a page of documents; without a page, those that no page shows."""
        return []
        yield  # pragma: no cover

    @default
    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        """Repair these documents; returns the keys of those that changed.

        Without keys, at the end of a rebuild: remove what belongs to no document.
        """
        return []
        yield  # pragma: no cover

    @default
    def run_due(self, work: Due) -> Plan[int]:
        """Do what is due, or finish what a crash interrupted. Returns the number of documents concerned."""
        return 0
        yield  # pragma: no cover


# A rule must override one of these, derive its value, or own a path that each write sets.
CARRIED_OUT = ("layout", "before", "after", "record", "replay", "verify", "repair", "run_due")
