"""Subset: the first N documents of a child collection, embedded in the parent as cards.

A card holds the child's `_id`, so that edits and deletes reach it. The cards
are always exactly the first N by the sort, ties broken by `_id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from treadle.errors import DeclarationError
from treadle.graph.aggregate import FirstDocuments
from treadle.graph.binding import check_maintenance
from treadle.graph.derived import DerivedRule, Relation, relation_of, target_field
from treadle.graph.model_entry import Maintain
from treadle.graph.rule import ModelReference, Models, Pattern, Place, Rule
from treadle.model.codec import codec_of
from treadle.query.filters import Sort, sort_keys
from treadle.query.paths import ARRAYS, model_of, resolve

SIZE_MAX = 1000


@dataclass(frozen=True)
class Subset(Pattern):
    """The first `size` documents of `source` that refer to this one in `by`, as cards."""

    pattern: ClassVar[str] = "subset"

    source: ModelReference
    by: str
    sort: Sort
    size: int
    where: Mapping[str, Any] | None = None
    maintain: Maintain = "write"
    every: timedelta | None = None
    to: str | None = None

    def bind(self, place: Place, graph: Models) -> Rule:
        check_maintenance(place, self.maintain, self.every)
        relation = relation_of(place, graph, self.source, self.by, self.where, self.to)
        if not isinstance(self.size, int) or not 1 <= self.size <= SIZE_MAX:
            raise DeclarationError(
                f"{place.label} has size={self.size!r}; a subset embeds from 1 to {SIZE_MAX} items",
                code="pattern-keyword",
            )
        fields, sort = _card(place, relation), _sort(place, relation, self.sort)
        source = relation.source.model.__name__
        aggregate = FirstDocuments(target_field(place), source, fields, sort, self.size)
        return DerivedRule(place, relation, aggregate, self)


def _card(place: Place, relation: Relation) -> dict[str, str]:
    """Return the stored name in the source of each field of the card, by its stored name there."""
    shape = place.field.shape
    model = model_of(shape)
    if shape.kind not in ARRAYS or model is None:
        raise DeclarationError(f"{place.label} must be a list of cards: list[…Card]", code="maintained-type")
    fields = {}
    for field in codec_of(model).fields:
        if field.stored != "_id":
            source = resolve(relation.source.codec, field.name, place.label, "embedded-field-missing")
            fields[field.stored] = source.stored
    return fields


def _sort(place: Place, relation: Relation, sort: Sort) -> list[tuple[str, int]]:
    keys = []
    for path, direction in sort_keys(sort, tie_breaker=False) or []:
        resolved = resolve(relation.source.codec, path, place.label, "source-field-missing")
        if resolved.in_array or resolved.shape.kind in ARRAYS:
            raise DeclarationError(
                f"{place.label} sorts by {path!r}, which is an array; sort by a single value",
                code="source-field-in-array",
            )
        keys.append((resolved.stored, direction))
    return keys
