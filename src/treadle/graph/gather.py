"""The rule of a value that is computed from the documents that refer to the target.

A source refers to its targets in the field `by`, or belongs to the group that
a target stands for (`query/keys.py`). What the value is, and how it changes
with a source, is said by an `Aggregate` (`aggregate.py`); the rule adds where
the sources are, which of them count, and to which targets each contributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from types import MappingProxyType
from typing import Any

import bson
from pymongo import ASCENDING, IndexModel

from treadle.errors import DeclarationError
from treadle.graph.aggregate import Aggregate, SourceCount, TargetField, Values
from treadle.graph.binding import sibling
from treadle.graph.model_entry import ModelEntry
from treadle.graph.owned import Owned
from treadle.graph.rule import STATE, Models, Place, Reads, Rule, Storage
from treadle.graph.rule_set import Maintain
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import Raw
from treadle.query.expressions import filter_references
from treadle.query.filters import parse_condition
from treadle.query.keys import GroupKey, ReferenceKey, RuleKey
from treadle.query.keys import freeze as freeze
from treadle.query.keys import may_be_id as may_be_id
from treadle.query.paths import Path, inside, resolve, value_at, values_at


@dataclass(slots=True, eq=False, repr=False)
class Origin:
    """The sources of a value, how they refer to their targets, and which of them count."""

    source: ModelEntry[Any]
    key: RuleKey
    where: Raw
    # The unique field of the target that sources refer to; None for its id.
    to: str | None = None


def origin_of(
    place: Place,
    graph: Models,
    source: Any,
    by: str | None,
    where: Mapping[str, Any] | None,
    to: str | None = None,
) -> Origin:
    """Return what a declaration says about its sources; inside a rollup, what the rollup says."""
    if place.entry.rules.group is not None:
        given = (
            source is not None and graph.resolve(source, place.label) is not place.entry.rules.group.source
        )
        return _group_origin(place, where or {}, refused=given or by is not None or to is not None)
    if source is None:
        raise DeclarationError(
            f"{place.label} names no source; only inside a rollup is there one already", code="source-unknown"
        )
    entry = graph.resolve(source, place.label)
    condition = parse_condition(entry.codec, where or {})
    if by is None:
        raise DeclarationError(
            f"{place.label} needs by=, the field of {entry.model.__name__} that holds the id of "
            f"its {place.entry.model.__name__}",
            code="reference-field-missing",
        )
    path = resolve(entry.codec, by, place.label, "reference-field-missing")
    name = graph.check_reference(path, place.entry, place.label, to)
    return Origin(entry, ReferenceKey(path), condition, name)


def _group_origin(place: Place, where: Mapping[str, Any], *, refused: bool) -> Origin:
    """Return what a rollup says about the sources of a value inside it."""
    group: GroupRule = place.entry.rules.group
    if refused:
        raise DeclarationError(
            f"{place.label} stands in a rollup, whose source is {group.source.model.__name__}; "
            "leave out the source, by= and to=",
            code="rollup-source",
        )
    conditions = [each for each in (group.condition, parse_condition(group.source.codec, where)) if each]
    condition = {"$and": conditions} if len(conditions) > 1 else (conditions or [{}])[0]
    return Origin(group.source, group.key, condition)


def maintenance_of(place: Place, declared: Any) -> tuple[Maintain, timedelta | None]:
    """Return how a declaration is maintained; inside a rollup, as the rollup is."""
    group = place.entry.rules.group
    if group is None:
        return declared.maintain, declared.every
    if declared.maintain not in ("write", group.maintain) or declared.every not in (None, group.every):
        raise DeclarationError(
            f"{place.label} has maintain={declared.maintain!r}, but a rollup is maintained as a whole; "
            "say it in Rollup(…, maintain=…)",
            code="pattern-keyword",
        )
    return group.maintain, group.every


def target_field(place: Place) -> TargetField:
    """Return the declaring field, as an aggregate sees it."""
    entry, path = place.entry, place.stored

    def takes(value: Any) -> bool:
        return entry.paths.fields[path].type.accepts(value)

    return TargetField(place.label, path, place.field.shape.python, takes)


class GatherRule(Rule):
    """A derived field whose value is an aggregate of the documents that refer to the target.

    `declared` holds `maintain`, `every` and perhaps `computed_at`.
    """

    def __init__(
        self, place: Place, origin: Origin, aggregate: Aggregate, declared: Any, *, per_element: bool = False
    ) -> None:
        super().__init__(place)
        if place.in_array:
            raise DeclarationError(
                f"{place.label} stands inside an array; a value that is computed from another "
                "collection belongs to the document itself or to a nested model",
                code="maintained-in-array",
            )
        self.pattern = declared.pattern
        self.aggregate = aggregate
        self.path = aggregate.path
        self.maintain, self.every = maintenance_of(place, declared)
        computed_at = getattr(declared, "computed_at", None)
        self.stamp = sibling(place, computed_at, "computed_at") if computed_at else None
        self.source = origin.source
        self.key = origin.key
        # The unique field by which sources refer to their target; None for its id. No shard knows the values
        # of such a field on other shards.
        self.to = origin.to
        self.across_shards = origin.to is None
        # What the declaration itself asks of its sources.
        self.condition = self.where = origin.where
        if self.source.targets.filter():
            # Only documents of the source's own kinds; that much is known without asking the server.
            own = self.source.targets.filter()
            self.where = {"$and": [own, self.where]} if self.where else dict(own)
        # Whether the value lies in the same array as the key, and each element contributes by itself.
        self.per_element = per_element

    @cached_property
    def group_key(self) -> Any:
        """Rules that agree in this have the same sources by target, and share one `$group`."""
        where = bson.encode(self.where, codec_options=CODEC_OPTIONS)
        return self.source.collection, self.key.signature, where, self.per_element

    @property
    def by(self) -> Path:
        """The field in which a source refers to its target."""
        assert isinstance(self.key, ReferenceKey), f"{self.place.label} stands in a rollup"
        return self.key.by

    @cached_property
    def first(self) -> list[Raw] | None:
        """The stages that find the first sources of one target by an index; None where a `$group` must."""
        plain = isinstance(self.key, ReferenceKey) and not self.key.array_depth
        folds = bool(self.aggregate.accumulators())
        return self.aggregate.first() if plain or not folds else None

    def reads(self) -> Reads:
        condition = filter_references(self.where) if self.where else set()
        own = self.aggregate.reads
        watched = None if condition is None or own is None else {*self.key.paths, *condition, *own}
        return {self.source.collection: watched}

    @property
    def source_paths(self) -> frozenset[str] | None:
        """The paths of a source that say to which targets it contributes, and what; None for any."""
        own = self.aggregate.reads
        return None if own is None else own | self.key.paths

    def stamps(self) -> set[str]:
        """Return the path of the date of computation, if it is declared."""
        return {self.stamp} if self.stamp else set()

    @cached_property
    def server_side(self) -> bool:
        """Whether only the server can tell what a source contributes."""
        return bool(self.condition) or not self.key.local or self.aggregate.operand.read is None

    def owns(self) -> Sequence[Owned]:
        source = self.source
        advice = f" from {source.collection}; write the {source.model.__name__} documents instead"
        stamps = [Owned(path, advice, shared=True) for path in self.stamps()]
        return [*(Owned(path, advice) for path in self.value_paths()), *stamps]

    def value_paths(self) -> Sequence[str]:
        """The stored paths that hold what is computed."""
        return [self.path]

    def contributions(self, raw: Raw | None) -> list[tuple[Any, Any]]:
        """Return the key of each target that this source contributes to, with its contribution."""
        if raw is None or not self.source.targets.admits(raw):
            return []
        key, contribution = self.key, self.aggregate.contribution
        if not key.array_depth:
            one = key.one(raw)
            return [] if one is None else [(one, contribution(raw))]
        if self.per_element:
            return self._element_contributions(raw, key.array_depth)
        assert isinstance(key, ReferenceKey)
        return [(each, contribution(raw)) for each in key.several(raw)]

    def _element_contributions(self, raw: Raw, depth: int) -> list[tuple[Any, Any]]:
        contributions = []
        rest = inside(self.by.stored, depth)
        for element in values_at(raw, self.by.steps[:depth]):
            key = value_at(element, rest)
            if key is not None:
                contributions.append((key, self.aggregate.contribution(element)))
        return contributions

    def name_of(self, target: Raw) -> Any:
        """Return the value by which sources refer to a target; None where none can."""
        name = target.get("_id") if self.to is None else value_at(target, self.to)
        return name if self.to is None or may_be_id(name) else None

    def empty(self) -> Values:
        """Return the stored values of a target without sources, by path."""
        return self.aggregate.finish(self.aggregate.empty())

    def storage(self) -> Storage:
        keys = self.key.index_keys(windows_first=self.maintain == "schedule")
        if self.first is not None and not self.per_element:
            keys = [*keys, *(each for each in self.aggregate.index_keys() if each[0] not in dict(keys))]
        indexes = [IndexModel(keys)] if keys else []
        chain = self.source.versions
        if chain.current > 1:
            # By which documents of older versions are found, to be read in the current one.
            indexes.append(IndexModel([(chain.field, ASCENDING)]))
        return Storage(indexes=[(self.source, index) for index in indexes])


class GroupRule(GatherRule):
    """How many sources a group has; creates the document of a group, and removes it."""

    key: GroupKey
    needs: Mapping[str, str] = MappingProxyType(
        {"unions": "compute this rollup elsewhere, by a job of your own"}
    )

    def __init__(self, place: Place, origin: Origin, declared: Any) -> None:
        field = TargetField(place.label, f"{STATE}.members", int, lambda value: True)
        super().__init__(place, origin, SourceCount(field), declared)

    def value_paths(self) -> Sequence[str]:
        return [self.path, *self.key.targets]

    def storage(self) -> Storage:
        """Return, beside the indexes, the unique one that keeps a group to one document."""
        keys = [(path, ASCENDING) for path in self.key.targets]
        unique = [] if self.key.identity else [IndexModel(keys, unique=True)]
        return super().storage()._replace(unique=unique)

    def blank(self) -> Raw:
        """Return what the update of a group's document sets where it creates the document."""
        return {
            path: {"$ifNull": [f"${path}", {"$literal": value}]}
            for rule in self.target.rules.of_type(GatherRule)
            for path, value in rule.empty().items()
        }


def source_paths(rules: Iterable[GatherRule]) -> frozenset[str] | None:
    """Return the paths of a source that several rules read; None for any."""
    paths: frozenset[str] = frozenset()
    for rule in rules:
        if rule.source_paths is None:
            return None
        paths |= rule.source_paths
    return paths
