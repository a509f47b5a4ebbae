"""Indexes that a model asks for, on its fields or as PyMongo's IndexModel."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


@dataclass(frozen=True)
class Indexed:
    """Marks a field as indexed: `email: Annotated[str, Indexed(unique=True)]`.

    A unique index on a field that may be None is partial: documents without a
    value do not collide. `descending`, `sparse`, `expire_after` (TTL, on a
    date) and `name` are as the server has them. On a field of one kind, the
    index is partial: it holds only documents of that kind. `text=True` puts
    the field into the collection's one text index, which `search` uses; a
    number is its weight there. In a model with `soft_delete=` a unique index
    leaves deleted documents out, unless `deleted=True`.
    """

    unique: bool = False
    descending: bool = False
    sparse: bool = False
    expire_after: timedelta | None = None
    name: str | None = None
    text: bool | int = False
    deleted: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)
