"""What a document says about its own life: when it was made, last written, how often, and when deleted.

`CreatedAt()` and `UpdatedAt()` stand on fields; `revision=` and
`soft_delete=` are class keywords that name a field. All are maintained by the
write of a document itself, and by nothing else: what follows from the writes
of other documents is nobody's write of this one.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from treadle.errors import DeclarationError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.owned import Owned
from treadle.graph.rule import Models, Pattern, Place, Rule

ADVICE = " with each write of the document; leave it out"


@dataclass(frozen=True)
class _Lifecycle(Pattern):
    """What these declarations have in common: where they may stand."""

    expected: ClassVar[tuple[type, ...]] = (dt.datetime,)

    def _check(self, place: Place) -> None:
        entry, shape = place.entry, place.field.shape
        if place.in_array:
            raise DeclarationError(
                f"{place.label} stands inside an array; it belongs to the document itself or to a nested "
                "model",
                code="maintained-in-array",
            )
        if entry.rules.group is not None:
            raise DeclarationError(
                f"{place.label} stands in a rollup, whose documents Treadle makes and removes; use "
                "computed_at= for when a value was computed",
                code="rollup-maintained",
            )
        if entry.kinds.above:
            raise DeclarationError(
                f"{place.label} is declared on one kind, but writes go to the collection of "
                f"{entry.kinds.root.model.__name__}; declare it there, for all kinds",
                code="kind-invalid",
            )
        if shape.kind != "any" and not (shape.kind == "scalar" and shape.python in self.expected):
            names = " or ".join(each.__name__ for each in self.expected)
            raise DeclarationError(f"{place.label} must be a {names}", code="maintained-type")


@dataclass(frozen=True)
class CreatedAt(_Lifecycle):
    """When the document was inserted, by the server's clock."""

    pattern: ClassVar[str] = "created_at"

    def bind(self, place: Place, graph: Models) -> Rule:
        self._check(place)
        return StampRule(place, self.pattern, always=False)


@dataclass(frozen=True)
class UpdatedAt(_Lifecycle):
    """When a caller last wrote the document, by the server's clock; maintained values do not count."""

    pattern: ClassVar[str] = "updated_at"

    def bind(self, place: Place, graph: Models) -> Rule:
        self._check(place)
        return StampRule(place, self.pattern, always=True)


class StampRule(Rule):
    """A date that the document's own writes set."""

    def __init__(self, place: Place, pattern: str, always: bool) -> None:
        super().__init__(place)
        self.pattern = pattern
        self._always = always

    def owns(self) -> Sequence[Owned]:
        return [Owned(self.path, ADVICE, on_write="now", insert_only=not self._always)]


@dataclass(frozen=True)
class Revision(_Lifecycle):
    """How often the document was written; whoever writes over an older one is told."""

    pattern: ClassVar[str] = "revision"
    expected: ClassVar[tuple[type, ...]] = (int,)

    def bind(self, place: Place, graph: Models) -> Rule:
        self._check(place)
        return RevisionRule(place)


class RevisionRule(Rule):
    """A number that each write of the document raises."""

    pattern = "revision"

    def owns(self) -> Sequence[Owned]:
        return [Owned(self.path, ADVICE, on_write="next", blank=0)]


@dataclass(frozen=True)
class SoftDelete(_Lifecycle):
    """When the document was deleted; it stays stored, and everybody takes it for gone."""

    pattern: ClassVar[str] = "soft_delete"

    def bind(self, place: Place, graph: Models) -> Rule:
        self._check(place)
        if not place.field.shape.optional:
            raise DeclarationError(
                f"{place.label} must be able to be None, for documents that are not deleted; write "
                "datetime | None",
                code="maintained-type",
            )
        return SoftDeleteRule(place)


class SoftDeleteRule(Rule):
    """The date of a deletion that can be taken back."""

    pattern = "soft_delete"

    def owns(self) -> Sequence[Owned]:
        return [Owned(self.path, " when the document is deleted; use delete() and restore()", blank=None)]


KEYWORDS: dict[str, Pattern] = {"revision": Revision(), "soft_delete": SoftDelete()}


def declared(entry: ModelEntry[Any]) -> Iterator[tuple[Place, Pattern]]:
    """The class keywords of a model that name a field of its life."""
    for keyword, pattern in KEYWORDS.items():
        name = getattr(entry.model.__treadle__, keyword)
        if name is None:
            continue
        field = entry.codec.by_name.get(name)
        if field is None:
            raise DeclarationError(
                f"{entry.model.__name__} has {keyword}={name!r}, but no such field; declare it, such as "
                + (f"{name}: int = 0" if keyword == "revision" else f"{name}: datetime | None = None"),
                code="source-field-missing",
            )
        yield Place(entry, entry.codec, (), field), pattern
