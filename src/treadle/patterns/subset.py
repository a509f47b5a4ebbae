"""Subset: the first N of a child collection, embedded in the parent.

The embedded items are cards of the children, with the child's `_id`, so that
edits and deletes reach them. They are always exactly the first N by the sort,
ties broken by `_id`. A new child is merged into the array by the update
itself where the server can sort arrays and the card holds the
sort keys; everything else refills the array from the children's index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel

from treadle.errors import DeclarationError
from treadle.graph.binding import check_maintenance
from treadle.graph.gather import RECOMPUTE, GatherRule, maintenance_of, origin
from treadle.graph.pattern import Maintain, ModelReference, Models, Pattern, Place, Rule
from treadle.model.codec import codec_of
from treadle.plan import Plan, Raw, aggregate, find
from treadle.plan.capabilities import Capabilities
from treadle.query.comparison import order_key
from treadle.query.keys import KEY, freeze
from treadle.query.paths import ARRAYS, model_of, outermost, resolve, value_at
from treadle.query.safety import Sort, sort_keys

SIZE_MAX = 1000


@dataclass(frozen=True)
class Subset(Pattern):
    """The first `size` documents of `source` that name this one in `by`, as cards."""

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
        return SubsetRule(place, graph, self)


class SubsetRule(GatherRule):
    pattern = "subset"
    needs: Mapping[str, str] = MappingProxyType(
        dict.fromkeys(("array_sorts", "lookup_pipelines"), "use MongoDB 6.0 or newer, which has it")
    )
    names_sources = True

    def __init__(self, place: Place, graph: Models, declared: Subset) -> None:
        sources = declared.source, declared.by, declared.where, declared.to
        super().__init__(place, origin(place, graph, *sources))
        self.maintain, self.every = maintenance_of(place, declared)
        if not isinstance(declared.size, int) or not 1 <= declared.size <= SIZE_MAX:
            raise DeclarationError(
                f"{place.label} has size={declared.size!r}; a subset embeds from 1 to {SIZE_MAX} items",
                code="pattern-keyword",
            )
        self.size = declared.size
        self.card = self._card(place)
        self.sort = self._sort(place, declared.sort)
        # The embedded items can be sorted only by what they hold.
        self.embedded_sort = self._embedded_sort()

    def _card(self, place: Place) -> dict[str, str]:
        """Stored name in the card -> stored name in the child."""
        shape = place.field.shape
        model: type[BaseModel] | None = model_of(shape)
        if shape.kind not in ARRAYS or model is None:
            raise DeclarationError(
                f"{place.label} must be a list of cards: list[…Card]", code="maintained-type"
            )
        card = {"_id": "_id"}
        for field in codec_of(model).fields:
            if field.stored == "_id":
                continue
            source = resolve(self.source.codec, field.name, place.label, "embedded-field-missing")
            card[field.stored] = source.stored
        return card

    def _sort(self, place: Place, sort: Sort) -> list[tuple[str, int]]:
        keys = []
        for path, direction in sort_keys(sort, tie_breaker=False) or []:
            resolved = resolve(self.source.codec, path, place.label, "source-field-missing")
            if resolved.in_array or resolved.shape.kind in ARRAYS:
                raise DeclarationError(
                    f"{place.label} sorts by {path!r}, which is an array; sort by a single value",
                    code="source-field-in-array",
                )
            keys.append((resolved.stored, direction))
        return keys if any(path == "_id" for path, _ in keys) else [*keys, ("_id", 1)]

    def _embedded_sort(self) -> dict[str, int] | None:
        in_card = {source: card for card, source in self.card.items()}
        if not all(path in in_card for path, _ in self.sort):
            return None
        return {in_card[path]: direction for path, direction in self.sort}

    def value_paths(self) -> set[str]:
        return {*self.card.values(), *(path for path, _ in self.sort)}

    def value(self, raw: Raw) -> tuple[Raw, list[Any]]:
        # The sort keys are part of it: a child may change its place without its card.
        return self.item(raw), [value_at(raw, path) for path, _ in self.sort]

    def evaluation(self) -> dict[str, Any]:
        return dict.fromkeys(outermost(self.value_paths()), 1)

    def evaluated(self, row: Raw) -> tuple[Raw, list[Any]]:
        return self.value(row)

    def item(self, raw: Mapping[str, Any]) -> Raw:
        """The card of a child, as it is embedded."""
        return {card: raw[source] for card, source in self.card.items() if source in raw}

    def empty(self) -> dict[str, Any]:
        return {self.path: []}

    def difference(self, removed: Sequence[Any], added: Sequence[Any]) -> Any:
        if removed or self.embedded_sort is None:
            return RECOMPUTE
        return [item for item, _ in added] or None

    def apply(self, difference: list[Raw]) -> tuple[dict[str, Any], dict[str, Any]]:
        new = {"$literal": [item["_id"] for item in difference]}
        others = {
            "$filter": {
                "input": {"$ifNull": [f"${self.path}", []]},
                "as": "item",
                "cond": {"$not": [{"$in": ["$$item._id", new]}]},
            }
        }
        merged = {"$concatArrays": [others, {"$literal": difference}]}
        ordered = {"$sortArray": {"input": merged, "sortBy": self.embedded_sort}}
        return {self.path: {"$slice": [ordered, self.size]}}, {}

    def index_keys(self) -> list[tuple[str, int]]:
        return [*super().index_keys(), *(key for key in self.sort if key[0] != self.by.stored)]

    # -- from the sources ---------------------------------------------------------

    def finds(self, keys: Sequence[Any]) -> bool:
        return True

    def found(self, keys: Sequence[Any], server: Capabilities) -> Plan[dict[Any, dict[str, Any]]]:
        """The exact items of each target."""
        apart = self.source.sources.archive is not None or self._spread(server)
        together = len(keys) > 1 and not apart
        refill = self._refill_many if together else self._refill_each
        return {key: {self.path: items} for key, items in (yield from refill(keys)).items()}

    def found_among(self, keys: Sequence[Any], sources: Sequence[Raw]) -> Plan[dict[Any, dict[str, Any]]]:
        """The same where some of the children are not stored as they are to be read."""
        found: dict[Any, dict[str, Any]] = {}
        for key in keys:
            stages = [
                *sources,
                {"$match": {self.by.stored: {"$eq": key}}},
                *([{"$match": self.where}] if self.where else []),
                {"$sort": dict(self.sort)},
                {"$limit": self.size},
                {"$project": dict.fromkeys(outermost(self.card.values()), 1)},
            ]
            children = yield from aggregate(self.source.collection, stages)
            found[freeze(key)] = {self.path: [self.item(child) for child in children]}
        return found

    def _spread(self, server: Capabilities) -> bool:
        """Whether a `$lookup` may meet shards, which none in a transaction may."""
        return server.sharded or any(each.settings.shard_key for each in (self.source, self.target))

    def _refill_each(self, keys: Sequence[Any]) -> Plan[dict[Any, list[Raw]]]:
        items: dict[Any, list[Raw]] = {}
        for key in keys:
            mine: Raw = {self.by.stored: {"$eq": key}}
            chosen = {"$and": [mine, self.where]} if self.where else mine
            children = yield from self._first(self.source.collection, chosen, self.value_paths())
            if (place := self.source.sources.archive) is not None:
                children += yield from self._first(place, chosen, self.value_paths())
                for path, direction in reversed(self.sort):
                    children.sort(key=lambda each: order_key(value_at(each, path)), reverse=direction == -1)
                children = children[: self.size]
            items[freeze(key)] = [self.item(child) for child in children]
        return items

    def _first(self, collection: str, chosen: Raw, paths: Iterable[str]) -> Plan[list[Raw]]:
        """The first children of a target in one collection."""
        shown = dict.fromkeys(outermost(paths), 1)
        return (yield from find(collection, chosen, shown, sort=self.sort, limit=self.size))

    def _refill_many(self, keys: Sequence[Any]) -> Plan[dict[Any, list[Raw]]]:
        """One query for many targets, in memory bounded by `size` per target."""
        inner: list[Raw] = [{"$match": self.where}] if self.where else []
        inner += [
            {"$sort": dict(self.sort)},
            {"$limit": self.size},
            {"$project": dict.fromkeys(outermost(self.card.values()), 1)},
        ]
        own = self.to or "_id"
        join = {"from": self.source.collection, "localField": own, "foreignField": self.by.stored}
        rows = yield from aggregate(
            self.target.collection,
            [
                {"$match": {own: {"$in": list(keys)}}},
                {"$project": {own: 1}},
                {"$lookup": {**join, "pipeline": inner, "as": KEY}},
            ],
        )
        items = {freeze(value_at(row, own)): [self.item(child) for child in row[KEY]] for row in rows}
        # Targets that are about to be inserted are not there to look up from.
        items.update((yield from self._refill_each([key for key in keys if freeze(key) not in items])))
        return items
