"""Fields that say when a document was inserted, last written and deleted, and how often it was written.

`CreatedAt()` and `UpdatedAt()` stand on fields; `revision=` and
`soft_delete=` are class keywords that name a field. All are maintained by a
caller's own write of the document, never by changes of derived values.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from treadle.errors import DeclarationError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.owned import Owned
from treadle.graph.rule import Models, Pattern, Place, Rule

ADVICE = " with each write of the document; leave it out"


@dataclass(frozen=True)
class _Lifecycle(Pattern):
    """The base of these declarations."""

    # How the field is maintained; its path is that of the field.
    owned: ClassVar[Owned]
    type: ClassVar[type] = dt.datetime

    def bind(self, place: Place, graph: Models) -> Rule:
        self._check(place)
        return LifecycleRule(place, self)

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
        if shape.kind != "any" and (shape.kind != "scalar" or shape.python is not self.type):
            raise DeclarationError(f"{place.label} must be a {self.type.__name__}", code="maintained-type")


@dataclass(frozen=True)
class CreatedAt(_Lifecycle):
    """When the document was inserted, by the server's clock."""

    pattern: ClassVar[str] = "created_at"
    owned: ClassVar[Owned] = Owned("", ADVICE, on_write="now", insert_only=True)


@dataclass(frozen=True)
class UpdatedAt(_Lifecycle):
    """When a caller last wrote the document, by the server's clock; maintained values do not count."""

    pattern: ClassVar[str] = "updated_at"
    owned: ClassVar[Owned] = Owned("", ADVICE, on_write="now")


@dataclass(frozen=True)
class Revision(_Lifecycle):
    """How often the document was written; a caller who would overwrite a later revision is refused."""

    pattern: ClassVar[str] = "revision"
    owned: ClassVar[Owned] = Owned("", ADVICE, on_write="next", blank=0)
    type: ClassVar[type] = int


@dataclass(frozen=True)
class SoftDelete(_Lifecycle):
    """When the document was deleted. It stays stored, outside of the model's scopes."""

    pattern: ClassVar[str] = "soft_delete"
    owned: ClassVar[Owned] = Owned(
        "", " when the document is deleted; use delete() and restore()", blank=None
    )

    def _check(self, place: Place) -> None:
        super()._check(place)
        if not place.field.shape.optional:
            raise DeclarationError(
                f"{place.label} must be able to be None, for documents that are not deleted; write "
                "datetime | None",
                code="maintained-type",
            )


class LifecycleRule(Rule):
    """A field that the document's own writes set."""

    def __init__(self, place: Place, declared: _Lifecycle) -> None:
        super().__init__(place)
        self.pattern = declared.pattern
        self._owned = declared.owned._replace(path=self.path)

    def owns(self) -> Sequence[Owned]:
        return [self._owned]


KEYWORDS: dict[str, Pattern] = {"revision": Revision(), "soft_delete": SoftDelete()}


def declared(entry: ModelEntry) -> Iterator[tuple[Place, Pattern]]:
    """Yield the class keywords of a model that name such a field."""
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
