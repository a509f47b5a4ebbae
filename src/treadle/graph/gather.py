"""Values that a target gathers from the documents which name it.

The parent of Computed and Subset. A source names its targets in the field
`by`, or belongs to the group that a target stands for (`keys.py`). What one
source gives to one target is a contribution. A change of a source is the
difference of its contributions before and after; where a difference cannot be
applied exactly, the group is recomputed from its sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import bson
from pymongo import ASCENDING, IndexModel

from treadle.errors import DataError, DeclarationError
from treadle.graph.pattern import STATE, Entry, Maintain, Models, Place, Rule
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import Plan, Raw
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import GroupKey, Key, ReferenceKey
from treadle.query.keys import freeze as freeze
from treadle.query.keys import may_be_id as may_be_id
from treadle.query.pairs import paired_filter
from treadle.query.paths import Path, filter_references, inside, resolve, value_at, values_at
from treadle.query.safety import clean


class _Recompute:
    def __repr__(self) -> str:
        return "RECOMPUTE"


RECOMPUTE: Final = _Recompute()
"""The answer of a rule that cannot apply a difference exactly."""


@dataclass(slots=True, eq=False, repr=False)
class Origin:
    """Where a gathered value comes from: the sources, how they find their targets, and which count."""

    source: Entry[Any]
    key: Key
    where: Raw
    # The unique field of the target that a source names it by; None for its id.
    to: str | None = None


def origin(
    place: Place,
    graph: Models,
    source: Any,
    by: str | None,
    where: Mapping[str, Any] | None,
    to: str | None = None,
) -> Origin:
    """What a declaration says about its sources; inside a rollup, what the rollup says."""
    condition: Raw = clean(dict(where or {}))
    group = place.entry.group
    if group is not None:
        if (
            by is not None
            or to is not None
            or (source is not None and graph.resolve(source, place.label) is not group.source)
        ):
            raise DeclarationError(
                f"{place.label} stands in a rollup, whose source is {group.source.model.__name__}; "
                "leave out the source, by= and to=",
                code="rollup-source",
            )
        condition = paired_filter(group.source.codec, condition)
        both = [each for each in (group.condition, condition) if each]
        return Origin(group.source, group.key, {"$and": both} if len(both) > 1 else (both or [{}])[0])
    if source is None:
        raise DeclarationError(
            f"{place.label} names no source; only inside a rollup is there one already", code="source-unknown"
        )
    entry = graph.resolve(source, place.label)
    condition = paired_filter(entry.codec, condition)
    if by is None:
        raise DeclarationError(
            f"{place.label} needs by=, the field of {entry.model.__name__} that holds the id of "
            f"its {place.entry.model.__name__}",
            code="reference-field-missing",
        )
    path = resolve(entry.codec, by, place.label, "reference-field-missing")
    name = graph.check_reference(path, place.entry, place.label, to)
    return Origin(entry, ReferenceKey(path), condition, name)


def maintenance_of(place: Place, declared: Any) -> tuple[Maintain, timedelta | None]:
    """How a declaration is maintained; inside a rollup, as the rollup is."""
    group = place.entry.group
    if group is None:
        return declared.maintain, declared.every
    if declared.maintain not in ("write", group.maintain) or declared.every not in (None, group.every):
        raise DeclarationError(
            f"{place.label} has maintain={declared.maintain!r}, but a rollup is maintained as a whole; "
            "say it in Rollup(…, maintain=…)",
            code="pattern-keyword",
        )
    return group.maintain, group.every


class GatherRule(Rule):
    """A maintained field whose value follows from a source collection."""

    def __init__(self, place: Place, origin: Origin) -> None:
        super().__init__(place)
        if place.in_array:
            raise DeclarationError(
                f"{place.label} stands inside an array; a value that is gathered from another "
                "collection belongs to the document itself or to a nested model",
                code="maintained-in-array",
            )
        self.source = origin.source
        self.key = origin.key
        # The unique field by which sources name their target; None for its id. No shard knows the names
        # that others hold.
        self.to = origin.to
        self.across_shards = origin.to is None
        # What the declaration itself asks of its sources.
        self.condition = self.where = origin.where
        if self.source.targets.filter():
            # Only documents of the source's own kinds; that much is known without asking the server.
            self.where = (
                {"$and": [self.source.targets.filter(), self.where]}
                if self.where
                else dict(self.source.targets.filter())
            )
        # Values inside the array that holds the key belong to that one element.
        self.per_element = False

    # Whether what it finds for a target are the first of its sources in some order, with their ids.
    names_sources = False
    # Whether what it finds among parts of the sources can be put together by `united`.
    unites = False

    def united(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What it finds among all sources, from what it found among parts of them."""
        raise NotImplementedError  # pragma: no cover

    @cached_property
    def alike(self) -> Any:
        """Rules that agree in this have the same contributions, and share one `$group`."""
        where = bson.encode(self.where, codec_options=CODEC_OPTIONS)
        return self.source.collection, self.key.signature, where, self.per_element

    @property
    def by(self) -> Path:
        """The field in which a source names its target."""
        assert isinstance(self.key, ReferenceKey), f"{self.place.label} stands in a rollup"
        return self.key.by

    def watches(self) -> Mapping[str, set[str] | None]:
        condition = filter_references(self.where) if self.where else set()
        own = self.value_paths()
        watched = None if condition is None or own is None else set(self.key.paths) | condition | own
        return {self.source.collection: watched}

    def value_paths(self) -> set[str] | None:
        """The source's stored paths that the value is made of."""
        return set()

    @property
    def server_side(self) -> bool:
        """Whether only the server can tell what a source contributes."""
        return bool(self.condition) or not self.key.local

    def advice(self, maintained: str) -> str:
        source = self.source
        return f" from {source.collection}; write the {source.model.__name__} documents instead"

    # -- contributions ----------------------------------------------------------

    def contributions(self, raw: Raw | None) -> list[tuple[Any, Any]]:
        """(target id, value) for each target that this source feeds."""
        if raw is None or not self.source.holds(raw):
            return []
        key = self.key
        depth = key.array_depth
        if not depth:
            one = key.one(raw)
            return [] if one is None else [(one, self.value(raw))]
        if self.per_element:
            return self._element_contributions(raw, depth)
        assert isinstance(key, ReferenceKey)
        return [(each, self.value(raw)) for each in key.several(raw)]

    def _element_contributions(self, raw: Raw, depth: int) -> list[tuple[Any, Any]]:
        contributions = []
        rest = inside(self.by.stored, depth)
        for element in values_at(raw, self.by.steps[:depth]):
            key = value_at(element, rest)
            if key is not None:
                contributions.append((key, self.element_value(element)))
        return contributions

    def value(self, raw: Raw) -> Any:
        """What a source document contributes to each of its targets."""
        return None

    def element_value(self, element: Any) -> Any:
        """What one element of the source's array contributes."""
        return None

    # -- the target -----------------------------------------------------------------

    def name_of(self, target: Raw) -> Any:
        """What sources name a target by; None where nothing can name it."""
        name = target.get("_id") if self.to is None else value_at(target, self.to)
        return name if self.to is None or may_be_id(name) else None

    def empty(self) -> dict[str, Any]:
        """Stored path and value of each part, for a target that nothing feeds."""
        return {self.path: None}

    def difference(self, removed: Sequence[Any], added: Sequence[Any]) -> Any:
        """What to do to the target: None, RECOMPUTE, or something for `apply`."""
        return RECOMPUTE

    def apply(self, difference: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The pipeline's `$set`s: of the parts first, then of what follows from them."""
        return {}, {}

    def finds(self, keys: Sequence[Any]) -> bool:
        """Whether its values for these targets are found by a query of its own, and not by a `$group`."""
        return False

    def found(self, keys: Sequence[Any], server: Capabilities) -> Plan[dict[Any, dict[str, Any]]]:
        """Per target (frozen key) the stored path and exact value of each part, by its own query."""
        raise NotImplementedError  # pragma: no cover

    def found_among(self, keys: Sequence[Any], sources: Sequence[Raw]) -> Plan[dict[Any, dict[str, Any]]]:
        """The same by an aggregation over its source, of which these are the first stages."""
        raise NotImplementedError  # pragma: no cover

    def fits(self, value: Any) -> bool:
        """Whether its field can hold a value that was computed for it."""
        return True

    def spoils(self, values: Sequence[Any]) -> bool:
        """Whether contributions may be why its value would not fit, and not those that were there before."""
        return bool(values)

    def too_large(self) -> DataError:
        """The refusal of a write after which its value would not fit."""
        return DataError(
            f"{self.place.label} would go beyond the 64 bits of an integer and be inexact, or hold a "
            "fraction; declare it as a Decimal",
            code="sum-too-large",
        )

    def accumulators(self) -> dict[str, Any]:
        """The `$group` accumulators that compute it, by a name of their own."""
        return {}

    def tally(self, values: Sequence[Any]) -> dict[str, Any] | None:
        """What the accumulators give for these contributions alone; None where only the server can tell.

        What they give for all sources is then the exact sum of both.
        """
        return None

    def finish(self, group: Raw | None) -> dict[str, Any]:
        """Stored path and value of each part, from what the group gave."""
        return self.empty()

    def finish_expressions(self, group: Mapping[str, str]) -> dict[str, Any]:
        """The same as `finish`, for the server: `group` says by which path it finds an accumulator."""
        return {}

    def evaluation(self) -> dict[str, Any]:
        """What to project so that `evaluated` can read a contribution off the result."""
        return {}

    def evaluated(self, row: Raw) -> Any:
        """The value of a contribution that the server evaluated."""
        return None

    def index_keys(self) -> list[tuple[str, int]]:
        return self.key.index_keys(windows_first=self.maintain == "schedule")

    def indexes(self) -> list[tuple[Entry[Any], IndexModel]]:
        keys = self.index_keys()
        indexes = [IndexModel(keys)] if keys else []
        chain = self.source.versions
        if chain.current > 1:
            # By which documents of older versions are found, to be read in the current one.
            indexes.append(IndexModel([(chain.field, ASCENDING)]))
        return [(self.source, index) for index in indexes]


class CountingRule(GatherRule):
    """How many sources there are."""

    @cached_property
    def _counted(self) -> Raw:
        return {"$ifNull": [f"${self.path}", 0]}

    def value(self, raw: Raw) -> int:
        return 1

    def evaluated(self, row: Raw) -> int:
        return 1

    def empty(self) -> dict[str, Any]:
        return {self.path: 0}

    def difference(self, removed: Sequence[Any], added: Sequence[Any]) -> Any:
        return len(added) - len(removed) or None

    def apply(self, difference: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return {self.path: {"$add": [self._counted, difference]}}, {}

    def accumulators(self) -> dict[str, Any]:
        return {"count": {"$sum": 1}}

    def tally(self, values: Sequence[Any]) -> dict[str, Any] | None:
        return {"count": len(values)}

    def finish(self, group: Raw | None) -> dict[str, Any]:
        return {self.path: group["count"] if group else 0}

    def finish_expressions(self, group: Mapping[str, str]) -> dict[str, Any]:
        return {self.path: {"$ifNull": [group["count"], 0]}}


class GroupRule(CountingRule):
    """How many sources a group has; what makes the document of a group, and removes it."""

    key: GroupKey
    needs: Mapping[str, str] = MappingProxyType(
        {"unions": "compute this rollup elsewhere, by a job of your own"}
    )

    def __init__(self, place: Place, origin: Origin) -> None:
        super().__init__(place, origin)
        self.path = f"{STATE}.members"

    def maintained(self) -> set[str]:
        return {self.path, *self.key.targets}

    def unique_indexes(self) -> list[IndexModel]:
        """What keeps a group to one document."""
        if self.key.identity:
            return []
        return [IndexModel([(path, ASCENDING) for path in self.key.targets], unique=True)]

    def blank(self) -> Raw:
        """What the update of a group's document sets where it has just been made."""
        return {
            path: {"$ifNull": [f"${path}", {"$literal": value}]}
            for rule in self.target.having(GatherRule)
            for path, value in rule.empty().items()
        }


def elsewhere_stages(rule: GatherRule, stages: Sequence[Raw]) -> list[Raw]:
    """The stage that adds what these stages find among archived sources; not inside transactions."""
    place = rule.source.sources.archive
    return [] if place is None else [{"$unionWith": {"coll": place, "pipeline": list(stages)}}]


def contribution_stages(rule: GatherRule, keys: Sequence[Any] | None) -> list[Raw]:
    """Stages that leave one document per contribution, with its target's key in KEY, of chosen sources.

    `keys` restricts the targets.
    """
    chosen: list[Raw] = [{"$match": rule.where}] if rule.where else []
    return [*chosen, *rule.key.stages(keys, rule.per_element)]
