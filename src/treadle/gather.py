"""Values that a target gathers from the documents which name it.

The parent of Computed and Subset. A source names its targets in the field
`by`. What one source gives to one target is a contribution. A change of a
source is the difference of its contributions before and after; where a
difference cannot be applied exactly, the group is recomputed from its sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import bson
from pymongo import ASCENDING, IndexModel

from treadle.bson_types import CODEC_OPTIONS
from treadle.errors import DeclarationError
from treadle.paths import Path, filter_references, resolve, value_at, values_at
from treadle.pattern import Place, Rule
from treadle.plan import Raw
from treadle.query import clean

if TYPE_CHECKING:
    from treadle.graph import Entry, Graph

KEY = "__treadle_key"


class _Recompute:
    def __repr__(self) -> str:
        return "RECOMPUTE"


RECOMPUTE: Final = _Recompute()
"""The answer of a rule that cannot apply a difference exactly."""


def freeze(key: Any) -> Any:
    """A key that can stand in a dict, also for sub-documents."""
    return bson.encode({"": key}, codec_options=CODEC_OPTIONS) if isinstance(key, (dict, list)) else key


class GatherRule(Rule):
    """A maintained field whose value follows from a source collection."""

    def __init__(
        self, place: Place, graph: Graph, source: Any, by: str | None, where: Mapping[str, Any] | None
    ) -> None:
        super().__init__(place)
        if place.in_array:
            raise DeclarationError(
                f"{place.label} stands inside an array; a value that is gathered from another "
                "collection belongs to the document itself or to a nested model",
                code="maintained-in-array",
            )
        self.source: Entry[Any] = graph.resolve(source, place.label)
        if by is None:
            raise DeclarationError(
                f"{place.label} needs by=, the field of {self.source.model.__name__} that holds the id of "
                f"its {self.target.model.__name__}",
                code="reference-field-missing",
            )
        self.by: Path = resolve(self.source.codec, by, place.label, "reference-field-missing")
        graph.check_reference(self.by, self.target, place.label)
        self.key_segments = self.by.stored.split(".")
        self.key_depth = self.by.array_depth
        self.where: Raw = clean(dict(where or {}))
        self.conditional = bool(self.where)
        if self.source.scope:
            # Only documents of the source's own kinds; that much is known without asking the server.
            self.where = {"$and": [self.source.scope, self.where]} if self.where else dict(self.source.scope)
        # Values inside the array that holds the key belong to that one element.
        self.per_element = False
        self.segments = self.path.split(".")

    def watches(self) -> Mapping[str, set[str] | None]:
        condition = filter_references(self.where)
        own = self.value_paths()
        watched = None if condition is None or own is None else {self.by.stored} | condition | own
        return {self.source.collection: watched}

    def value_paths(self) -> set[str] | None:
        """The source's stored paths that the value is made of."""
        return set()

    @property
    def server_side(self) -> bool:
        """Whether only the server can tell what a source contributes."""
        return self.conditional

    # -- contributions ----------------------------------------------------------

    def contributions(self, raw: Raw | None) -> list[tuple[Any, Any]]:
        """(target id, value) for each target that this source feeds."""
        return self.possible_contributions(raw) if raw is not None and self.source.holds(raw) else []

    def possible_contributions(self, raw: Raw | None) -> list[tuple[Any, Any]]:
        """The same for a source whose kind is not at hand; it may be too many."""
        if raw is None:
            return []
        depth = self.key_depth
        if not depth:
            key = value_at(raw, self.key_segments)
            return [] if key is None else [(key, self.value(raw))]
        if self.per_element:
            return self._element_contributions(raw, depth)
        distinct = {freeze(key): key for key in values_at(raw, self.by.steps) if key is not None}
        return [(key, self.value(raw)) for key in distinct.values()]

    def _element_contributions(self, raw: Raw, depth: int) -> list[tuple[Any, Any]]:
        found = []
        rest = [step.stored for step in self.by.steps[depth:]]
        for element in values_at(raw, self.by.steps[:depth]):
            key = value_at(element, rest)
            if key is not None:
                found.append((key, self.element_value(element, depth)))
        return found

    def value(self, raw: Raw) -> Any:
        """What a source document contributes to each of its targets."""
        return None

    def element_value(self, element: Any, depth: int) -> Any:
        """What one element of the source's array contributes."""
        return None

    # -- the target -----------------------------------------------------------------

    def empty(self) -> dict[str, Any]:
        """Stored path and value of each part, for a target that nothing feeds."""
        return {self.path: None}

    def difference(self, removed: Sequence[Any], added: Sequence[Any], version: tuple[int, ...]) -> Any:
        """What to do to the target: None, RECOMPUTE, or something for `apply`."""
        return RECOMPUTE

    def apply(self, difference: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The pipeline's `$set`s: of the parts first, then of what follows from them."""
        return {}, {}

    def evaluation(self) -> dict[str, Any]:
        """What to project so that `evaluated` can read a contribution off the result."""
        return {}

    def evaluated(self, row: Raw) -> Any:
        """The value of a contribution that the server evaluated."""
        return None

    def index_keys(self) -> list[tuple[str, int]]:
        return [(self.by.stored, ASCENDING)]

    def indexes(self) -> list[tuple[Entry[Any], IndexModel]]:
        return [(self.source, IndexModel(self.index_keys()))]


def source_stages(rule: GatherRule, keys: Sequence[Any]) -> list[Raw]:
    """Stages that leave one document per contribution, with its target's id in KEY."""
    stages: list[Raw] = [{"$match": {rule.by.stored: {"$in": list(keys)}}}]
    return [*stages, *contribution_stages(rule, keys)]


def contribution_stages(rule: GatherRule, keys: Sequence[Any] | None) -> list[Raw]:
    """The same for sources that are chosen already; `keys` restricts the targets."""
    stages: list[Raw] = []
    if rule.where:
        stages.append({"$match": rule.where})
    path = rule.by.stored
    if not rule.by.in_array:
        return [*stages, {"$set": {KEY: f"${path}"}}]
    if rule.per_element:
        for number, step in enumerate(rule.by.steps):
            if step.array:
                stages.append({"$unwind": "$" + ".".join(s.stored for s in rule.by.steps[: number + 1])})
        if keys is not None:
            stages.append({"$match": {path: {"$in": list(keys)}}})
        return [*stages, {"$set": {KEY: f"${path}"}}]
    values: Any = f"${path}"
    for _ in range(sum(step.array for step in rule.by.steps) - 1):
        # A missing inner array must not make the whole vanish.
        inner = {"$cond": [{"$isArray": "$$this"}, "$$this", []]}
        flat = {"$concatArrays": ["$$value", inner]}
        values = {"$reduce": {"input": values, "initialValue": [], "in": flat}}
    values = {"$cond": [{"$isArray": values}, values, []]}
    # A source that names a target twice still counts once.
    distinct = (
        {"$setIntersection": [values, {"$literal": list(keys)}]}
        if keys is not None
        else {"$setUnion": [values, []]}
    )
    return [*stages, {"$set": {KEY: distinct}}, {"$unwind": f"${KEY}"}]
