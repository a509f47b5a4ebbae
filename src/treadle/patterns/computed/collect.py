"""Collect: the distinct values of a field over a source collection, sorted, up to a bound.

The array holds the first `size` of the distinct values, in the server's
order; nulls are none. A value that comes is merged into the array by the
update itself, which is exact because the array holds the first ones. When a
value leaves, only the sources know whether another still has it, and which is
the next one beyond the bound: that group is recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from treadle.errors import DataError, DeclarationError
from treadle.graph.binding import check_whole_number
from treadle.graph.gather import RECOMPUTE, contribution_stages
from treadle.graph.pattern import Models, Place, Rule
from treadle.patterns.computed.aggregates import FieldRule, _OfField, cannot_hold
from treadle.plan import Plan, Raw, aggregate
from treadle.plan.capabilities import Capabilities
from treadle.query.comparison import order_key
from treadle.query.keys import KEY, ReferenceKey, freeze
from treadle.query.paths import ARRAYS, value_at, values_at
from treadle.query.update_values import takes

SIZE_MAX = 1000
# The value of a contribution, in the server's pipelines.
VALUE = "__treadle_value"


@dataclass(frozen=True)
class Collect(_OfField):
    """The distinct values of `field` over the documents that name this one, sorted; the first `size`."""

    size: int = 100

    def _rule(self, place: Place, graph: Models) -> Rule:
        return CollectRule(place, graph, self)


class CollectRule(FieldRule):
    """The first distinct values of the sources."""

    needs: Mapping[str, str] = MappingProxyType(
        dict.fromkeys(("array_sorts", "lookup_pipelines"), "use MongoDB 6.0 or newer, which has it")
    )
    unites = True

    def __init__(self, place: Place, graph: Models, declared: Collect) -> None:
        if place.entry.group is not None:
            raise DeclarationError(
                f"{place.label} stands in a rollup, which counts and does not collect; declare it on a model "
                "of its own, with by=",
                code="rollup-source",
            )
        # The steps to the values, where a source holds several.
        self.several: Any = None
        super().__init__(place, graph, declared)
        check_whole_number(place, "size", declared.size, SIZE_MAX)
        self.size = declared.size
        own, shape = place.field.shape, self.value_shape
        held = own.items[0] if own.kind in ARRAYS and own.items else None
        if own.kind not in ARRAYS or own.optional:
            raise DeclarationError(
                f"{place.label} is a {own.name}; the values that it collects are a list, which may be empty: "
                "list[…]",
                code="maintained-type",
            )
        scalars = held is not None and shape is not None and {held.kind, shape.kind} == {"scalar"}
        if scalars and held is not None and shape is not None and held.python is not shape.python:
            raise DeclarationError(
                f"{place.label} is a list of {held.name}, but {self.origin} is a {shape.name}; declare "
                "the same",
                code="maintained-type",
            )

    def _pair_with_key(self, place: Place, path: Any) -> None:
        if not path.array_depth or self.key.array_depth:
            super()._pair_with_key(place, path)
            return
        if sum(step.array for step in path.steps) > 1:
            raise DeclarationError(
                f"{place.label} collects {path.python!r}, which lies in an array within another; collect "
                "what lies in one array",
                code="source-field-in-array",
            )
        self.several = path.steps

    # -- contributions -----------------------------------------------------------------------

    def value(self, raw: Raw) -> list[Any]:
        if self.several is None:
            return _values(value_at(raw, self.value_path))
        return [each for each in values_at(raw, self.several) if each is not None]

    def element_value(self, element: Any) -> list[Any]:
        return _values(super().element_value(element))

    def evaluated(self, row: Raw) -> list[Any]:
        return _values(row.get("value"))

    # -- the target --------------------------------------------------------------------------

    def empty(self) -> dict[str, Any]:
        return {self.path: []}

    def difference(self, removed: Sequence[Any], added: Sequence[Any]) -> Any:
        new = {freeze(each): each for values in added for each in values}
        if any(freeze(each) not in new for values in removed for each in values):
            return RECOMPUTE
        if not new:
            return None
        return list(new.values())

    def apply(self, difference: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        every = {"$setUnion": [{"$ifNull": [f"${self.path}", []]}, {"$literal": difference}]}
        ordered = {"$sortArray": {"input": every, "sortBy": 1}}
        return {self.path: {"$slice": [ordered, self.size]}}, {}

    def fits(self, value: Any) -> bool:
        return not isinstance(value, list) or takes(self.place.entry.codec, self.path, value)

    def spoils(self, values: Sequence[Any]) -> bool:
        return not all(map(self.fits, values))

    def too_large(self) -> DataError:
        return cannot_hold(self)

    def index_keys(self) -> list[tuple[str, int]]:
        indexed = self.value_path and not self.key.array_depth and self.several is None
        return [*super().index_keys(), *([(self.value_path, 1)] if indexed else [])]

    # -- from the sources --------------------------------------------------------------------

    def finds(self, keys: Sequence[Any]) -> bool:
        return True

    def found(self, keys: Sequence[Any], server: Capabilities) -> Plan[dict[Any, dict[str, Any]]]:
        split = self.source.sources.archive is not None or server.sharded
        plain = isinstance(self.key, ReferenceKey) and not self.key.array_depth
        collected: dict[Any, list[Any]] = {}
        if len(keys) > 1 and plain and not split:
            collected = yield from self._of_many(keys)
        for key in keys:
            # Targets that are about to be inserted are not there to look up from.
            if freeze(key) not in collected:
                collected[freeze(key)] = yield from self._of_one(key, [])
        return {key: {self.path: values} for key, values in collected.items()}

    def found_among(self, keys: Sequence[Any], sources: Sequence[Raw]) -> Plan[dict[Any, dict[str, Any]]]:
        found = {}
        for key in keys:
            found[freeze(key)] = {self.path: (yield from self._of_one(key, sources))}
        return found

    def united(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {self.path: self._least([value for part in parts for value in part[self.path]])}

    def _least(self, values: Sequence[Any]) -> list[Any]:
        distinct = {freeze(each): each for each in values}
        return sorted(distinct.values(), key=order_key)[: self.size]

    def _of_one(self, key: Any, sources: Sequence[Raw]) -> Plan[list[Any]]:
        first = [*sources, {"$match": self.key.match([key])}]
        mine: Raw = {"$match": {KEY: {"$eq": key}}}
        stages = [*first, *contribution_stages(self, [key]), mine, *self._first()]
        rows = yield from aggregate(self.source.collection, stages, allowDiskUse=True)
        if (place := self.source.sources.archive) is None:
            return [row["_id"] for row in rows]
        rows += yield from aggregate(place, stages, allowDiskUse=True)
        return self._least([row["_id"] for row in rows])

    def _of_many(self, keys: Sequence[Any]) -> Plan[dict[Any, list[Any]]]:
        """One query for many targets, in memory bounded by `size` per target."""
        own = self.to or "_id"
        inner = [*([{"$match": self.where}] if self.where else []), *self._first()]
        join = {"from": self.source.collection, "localField": own, "foreignField": self.by.stored}
        stages: list[Raw] = [
            {"$match": {own: {"$in": list(keys)}}},
            {"$project": {own: 1}},
            {"$lookup": {**join, "pipeline": inner, "as": KEY}},
        ]
        rows = yield from aggregate(self.target.collection, stages, allowDiskUse=True)
        return {freeze(value_at(row, own)): [each["_id"] for each in row[KEY]] for row in rows}

    def _first(self) -> list[Raw]:
        """Stages that leave the first distinct values of the contributions before them."""
        return [
            {"$project": {"_id": 0, VALUE: self.operand}},
            {"$unwind": f"${VALUE}"},
            {"$match": {VALUE: {"$ne": None}}},
            {"$group": {"_id": f"${VALUE}"}},
            {"$sort": {"_id": 1}},
            {"$limit": self.size},
        ]


def _values(value: Any) -> list[Any]:
    """What one source contributes: a value, or the elements of an array; null is none."""
    return [each for each in (value if isinstance(value, list) else [value]) if each is not None]
