"""The operations of a bulk write, and what writes tell their callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from treadle.model.document import Document

D = TypeVar("D", bound=Document)
D_co = TypeVar("D_co", bound=Document, covariant=True)
Returns: TypeAlias = Literal["after", "before"]


@dataclass(frozen=True)
class Upserted(Generic[D_co]):
    """The document of an upsert, and whether it is a new one."""

    document: D_co
    created: bool


@dataclass(frozen=True)
class Bulk:
    """How many documents a bulk write inserted, updated and deleted."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0


@dataclass(frozen=True)
class Insert:
    """Store a new document."""

    document: Document


@dataclass(frozen=True)
class Update:
    """Update one document, by id or filter."""

    model: type[Document]
    filter: Any
    update: Any


@dataclass(frozen=True)
class UpdateMany:
    """Update all matching documents."""

    model: type[Document]
    filter: Any
    update: Any


@dataclass(frozen=True)
class Replace:
    """Write a whole document over the stored one."""

    document: Document


@dataclass(frozen=True)
class Upsert(Generic[D]):
    """Update the one document that matches, or store `insert`."""

    model: type[D]
    filter: Any
    update: Any
    insert: D


@dataclass(frozen=True)
class Delete:
    """Delete one document, by id or filter."""

    model: type[Document]
    filter: Any


@dataclass(frozen=True)
class DeleteMany:
    """Delete all matching documents."""

    model: type[Document]
    filter: Any


Operation: TypeAlias = Insert | Update | UpdateMany | Replace | Upsert[Any] | Delete | DeleteMany
