"""The one small interface that every pattern implements.

A pattern is a declaration: a frozen value on a field or a class. When a Store
is made, each declaration is bound to the place where it stands, and the
resulting `Rule` answers what the Store needs to know. Every method of a rule
has a default that does nothing.

Derived data comes in three kinds, told apart by how targets are found:
`GatherRule` (a target gathers from the documents that name it),
`ReferenceRule` (a target copies from the document that it names) and
`FormulaRule` (a target computes from itself). `maintenance/react.py` combines
them, so that one target is updated once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pymongo import IndexModel

from treadle.errors import DeclarationError
from treadle.model.bson_types import RESERVED
from treadle.model.codec import Codec, StoredField
from treadle.model.document import Document
from treadle.query.paths import Step

if TYPE_CHECKING:
    from treadle.graph.graph import Entry, Graph

Maintain: TypeAlias = Literal["write", "stream", "schedule"]
ModelReference: TypeAlias = type[Document] | str
REVISION = f"{RESERVED}.n"
STATE = f"{RESERVED}.state"


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class ClassPlace(Place):
    """Where a class keyword stands: the document as a whole."""

    @property
    def label(self) -> str:
        return self.entry.model.__name__

    @property
    def stored(self) -> str:
        return f"{STATE}.members"


class Pattern:
    """The base of all declarations."""

    pattern: ClassVar[str] = ""

    def bind(self, place: Place, graph: Graph) -> Rule:
        """Check the declaration where it stands; raises `DeclarationError`."""
        raise NotImplementedError(f"{type(self).__name__} has no bind()")  # pragma: no cover


class Rule:
    """A declaration at its place."""

    pattern: ClassVar[str] = ""
    # Whether it cannot be had on a standalone server.
    needs_transactions: bool = False

    def __init__(self, place: Place) -> None:
        self.place = place
        self.target = place.entry
        self.path = place.stored
        self.level = 0
        # How it is kept right: with each write, by the worker, or on a schedule.
        self.maintain: Maintain = "write"
        self.every: timedelta | None = None

    def watches(self) -> Mapping[str, set[str] | None]:
        """Per source collection the stored paths that feed this; None for all."""
        return {}

    def maintained(self) -> set[str]:
        """The stored paths of the target that only Treadle writes."""
        return {self.path}

    def stamps(self) -> set[str]:
        """Stored paths that are written along, such as a date of computation."""
        return set()

    def instead(self, maintained: str) -> str | None:
        """What a caller who wants to write a maintained path should do; None for the usual advice."""
        return None

    def indexes(self) -> list[tuple[Entry[Any], IndexModel]]:
        """What set-up must create for this to be quick."""
        return []


def check_choice(place: Place, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse a keyword's value that is not one of those allowed."""
    if value not in allowed:
        raise DeclarationError(
            f"{place.label} has {name}={value!r}; it takes {' or '.join(map(repr, allowed))}",
            code="pattern-keyword",
        )


def check_maintenance(place: Place, maintain: Any, every: Any) -> None:
    """Refuse a way of maintenance that is none, and a schedule without a period."""
    check_choice(place, "maintain", maintain, ("write", "stream", "schedule"))
    if maintain == "schedule" and not (isinstance(every, timedelta) and every > timedelta(0)):
        raise DeclarationError(
            f"{place.label} has maintain='schedule' and every={every!r}; say how often, such as "
            "every=timedelta(hours=1)",
            code="pattern-keyword",
        )
    if maintain != "schedule" and every is not None:
        raise DeclarationError(
            f"{place.label} has every={every!r}, which goes with maintain='schedule'", code="pattern-keyword"
        )


def sibling(place: Place, name: str, keyword: str) -> str:
    """The stored path of a field beside the declaring one."""
    field = place.owner.by_name.get(name)
    if field is None:
        raise DeclarationError(
            f"{place.label} has {keyword}={name!r}, but {place.owner.model.__name__} has no such field",
            code="source-field-missing",
        )
    return ".".join([*(step.stored for step in place.steps), field.stored])
