"""The rules of derived data. The engine maintains them all: on a write, by the stream, on a schedule, in
`verify`, `repair` and `rebuild`. A pattern says what a value should be, and never writes it itself.

A `DerivedRule` computes a value from the documents of a source. One end of the relation is unique: a count
gathers the sources that refer to its target, and an extended reference copies the one source to which its
target refers. A `FormulaRule` and a `LocalRule` compute a value from the document's own fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import bson
from pymongo import ASCENDING, IndexModel

from treadle.errors import DeclarationError
from treadle.graph.aggregate import Aggregate, Ranked, SourceCount, TargetField, Values
from treadle.graph.binding import sibling
from treadle.graph.copied_fields import CopiedFields
from treadle.graph.model_entry import Maintain, ModelEntry
from treadle.graph.owned import Owned
from treadle.graph.rule import STATE, Models, Place, Reads, Rule, Storage
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import Plan, Raw
from treadle.query.expressions import field_references, filter_references, require_known_names
from treadle.query.filters import parse_condition
from treadle.query.keys import Key, Slot, key_at, may_be_id, same_key, slot_value, unwind
from treadle.query.paths import resolve, value_at

OnDelete = Literal["keep", "restrict", "clear", "cascade"]
# The key of a target, and what it is given.
Contribution: TypeAlias = tuple[Any, Any]
ID = Key("_id")


class Relation(NamedTuple):
    """The sources of a value, the key of a source, the key of a target, and which sources count."""

    source: ModelEntry
    match: Key
    on: Key
    where: Raw


def relation_of(
    place: Place,
    graph: Models,
    source: Any,
    by: str | None,
    where: Mapping[str, Any] | None,
    to: str | None = None,
) -> Relation:
    """Return the sources that refer to the target in their field `by`; in a rollup, those of the rollup."""
    if place.entry.rules.group is not None:
        given = (
            source is not None and graph.resolve(source, place.label) is not place.entry.rules.group.source
        )
        return _group_relation(place, where or {}, refused=given or by is not None or to is not None)
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
    return Relation(entry, key_at(path), ID if name is None else Key(name), condition)


def _group_relation(place: Place, where: Mapping[str, Any], *, refused: bool) -> Relation:
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
    return Relation(group.source, group.match, group.on, condition)


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


class DerivedRule(Rule):
    """A value of the target, computed from the sources whose `match` key equals the target's `on` key.

    A source has a set of keys, and a target one slot for the value, or one per element of an array, each with
    its key. `unit` are the arrays whose elements contribute by themselves. `declared` says `maintain` and
    `every`, and perhaps `computed_at` and `on_delete`.
    """

    def __init__(
        self,
        place: Place,
        relation: Relation,
        aggregate: Aggregate,
        declared: Any,
        *,
        unit: Sequence[str] = (),
    ) -> None:
        super().__init__(place)
        self.pattern = declared.pattern
        self.source, self.match, self.on, self.condition = relation
        self.aggregate = aggregate
        self.path = aggregate.path
        # Whether the value is that of the one source to which the target refers.
        self.is_copy = isinstance(aggregate, CopiedFields)
        if place.in_array and not self.is_copy:
            raise DeclarationError(
                f"{place.label} stands inside an array; a value that is computed from another "
                "collection belongs to the document itself or to a nested model",
                code="maintained-in-array",
            )
        self.maintain, self.every = declared.maintain, declared.every
        if not self.is_copy:
            self.maintain, self.every = maintenance_of(place, declared)
        # The path of the date of computation, if it is declared.
        computed_at = getattr(declared, "computed_at", None)
        self.stamp = sibling(place, computed_at, "computed_at") if computed_at else None
        # What becomes of the targets that refer to a source which is deleted.
        self.on_delete: OnDelete = getattr(declared, "on_delete", "keep")
        # The key at the end of the relation where it is unique, and its field, if that is not the id.
        self.unique = self.match if self.is_copy else self.on
        self.alternate_key = self.unique.path if self.unique.path not in ("", "_id") else None
        # No shard knows the values of such a field on other shards.
        self.across_shards = self.alternate_key is None
        self.where = self.condition if self.is_copy else self._own_sources()
        self.unit = tuple(unit)
        left = [array for array in self.match.arrays if array not in self.unit]
        self._unit_key = self.match._replace(arrays=tuple(left))

    def _own_sources(self) -> Raw:
        """Return what the declaration asks of its sources, and that they are of the source's own kinds."""
        own = self.source.targets.filter()
        if own and self.condition:
            return {"$and": [own, self.condition]}
        return dict(own) or self.condition

    @property
    def copied(self) -> CopiedFields:
        """The aggregate of a copy."""
        assert isinstance(self.aggregate, CopiedFields)
        return self.aggregate

    # -- declarations ---------------------------------------------------------------------------

    def reads(self) -> Reads:
        condition = filter_references(self.where) if self.where else set()
        own = self.aggregate.reads
        watched = None if condition is None or own is None else {*self.match.fields, *condition, *own}
        if self.is_copy and watched is not None:
            # No write changes an id.
            watched.discard("_id")
        return {self.source.collection: watched}

    def owns(self) -> Sequence[Owned]:
        source = self.source
        if self.is_copy:
            advice = f"; write {self.on.path!r}, or the {source.model.__name__} that it names"
            return [Owned(path, advice, refilled=True) for path in self.aggregate.paths()]
        advice = f" from {source.collection}; write the {source.model.__name__} documents instead"
        stamps = [Owned(self.stamp, advice, shared=True)] if self.stamp else []
        return [*(Owned(path, advice) for path in self.value_paths()), *stamps]

    def value_paths(self) -> Sequence[str]:
        """The stored paths that hold what is computed."""
        return self.aggregate.paths()

    def empty(self) -> Values:
        """Return the stored values of a target without sources, by path."""
        return self.aggregate.finish(self.aggregate.empty())

    def storage(self) -> Storage:
        if self.is_copy:
            return Storage(indexes=[(self.target, IndexModel([*self.on.index_keys(), ("_id", ASCENDING)]))])
        keys = self.match.index_keys(windows_first=self.maintain == "schedule")
        if self.is_ordered:
            keys = [*keys, *(each for each in self.aggregate.index_keys() if each[0] not in dict(keys))]
        return Storage(indexes=[(self.source, IndexModel(keys))] if keys else [])

    @property
    def guards_source(self) -> bool:
        """Whether a copy must not be made while its source changes, so that making one writes the source."""
        if not self.is_copy:
            return False
        if self.maintain != "write":
            # The worker looks at the source again.
            return self.on_delete == "restrict"
        return bool(self.copied.synced) or self.on_delete != "keep"

    # -- how values are computed ------------------------------------------------------------------

    @cached_property
    def group_key(self) -> Any:
        """Rules that agree in this have the same sources by target, and share one `$group`."""
        where = bson.encode(self.where, codec_options=CODEC_OPTIONS)
        return self.source.collection, self.match, where, self.unit

    @cached_property
    def is_ordered(self) -> bool:
        """Whether an index can give the sources of one target in the order of the aggregate."""
        plain = not (self.match.group or self.match.arrays)
        return plain or (isinstance(self.aggregate, Ranked) and not self.unit)

    @cached_property
    def first(self) -> list[Raw] | None:
        """The stages that leave those sources of one target which decide its value, by an index."""
        return self.aggregate.first() if self.is_ordered else None

    @property
    def source_paths(self) -> frozenset[str] | None:
        """The paths of a source that say to which targets it contributes, and what; None for any."""
        own = self.aggregate.reads
        return None if own is None else own.union(self.match.fields)

    @cached_property
    def server_side(self) -> bool:
        """Whether only the server can tell what a source contributes."""
        return bool(self.condition) or not self.match.is_local or self.aggregate.operand.read is None

    def contributions(self, source: Raw | None) -> list[Contribution]:
        """Return the key of each target that this source contributes to, with its contribution."""
        if source is None:
            return []
        contribution = self.aggregate.contribution
        if not (self.unit or self.match.arrays):
            key = self.match.one(source)
            return [] if key is None else [(key, contribution(source))]
        return [
            (key, contribution(part))
            for part in unwind(source, self.unit)
            for key in self._unit_key.of(part).values()
        ]

    def is_unchanged(self, old: Sequence[Contribution], new: Sequence[Contribution]) -> bool:
        """Return whether no value can change where a source contributed `old`, and contributes `new`."""
        return len(old) == len(new) and all(
            same_key(one, other) and self.aggregate.is_unchanged(before, after)
            for (one, before), (other, after) in zip(old, new, strict=True)
        )

    # -- the two ends of the relation ------------------------------------------------------------

    def slots(self, target: Raw) -> list[Slot]:
        """Return where a target holds the value, each with the key of what it is computed from."""
        return list(self.on.slots(target, self.path))

    def keys(self, target: Raw) -> list[Any]:
        """Return the keys of the sources to which a target refers."""
        return [slot.key for slot in self.slots(target) if may_be_id(slot.key)]

    def values(self, target: Raw) -> list[tuple[str, Any]]:
        """Return the values that a target stores, by path, positions included."""
        if self.is_copy:
            return [(slot.path, slot_value(target, slot)) for slot in self.slots(target)]
        return [(path, value_at(target, path)) for path in self.empty()]

    def unique_key(self, document: Raw) -> Any:
        """Return by what a document at the unique end is referred to; None where nothing can refer to it."""
        key = self.unique.value(document)
        return key if self.unique.group or may_be_id(key) else None

    def unique_keys(self, documents: Iterable[Raw]) -> list[Any]:
        """Return by what these documents at the unique end are referred to."""
        return [key for each in documents if (key := self.unique_key(each)) is not None]

    def sources_of(self, keys: Sequence[Any]) -> Raw:
        """Return the filter for the sources to which targets refer by these keys."""
        return self.source.targets.filter(self.match.exactly(keys))

    def targets_of(self, keys: Sequence[Any]) -> Raw:
        """Return the filter for the targets that refer to sources by these keys."""
        return self.target.targets.filter(self.on.exactly(keys))


class GroupRule(DerivedRule):
    """How many sources a group has; creates the document of a group, and removes it."""

    needs: Mapping[str, str] = MappingProxyType(
        {"unions": "compute this rollup elsewhere, by a job of your own"}
    )

    def __init__(self, place: Place, relation: Relation, declared: Any) -> None:
        field = TargetField(place.label, f"{STATE}.members", int, lambda value: True)
        super().__init__(place, relation, SourceCount(field), declared)

    @property
    def identity(self) -> bool:
        """Whether the key of a group is the `_id` of its document."""
        return self.on.fields == ["_id"]

    def value_paths(self) -> Sequence[str]:
        return [self.path, *self.on.fields]

    def storage(self) -> Storage:
        """Return, beside the indexes, the unique one that keeps a group to one document."""
        keys = [(path, ASCENDING) for path in self.on.fields]
        unique = [] if self.identity else [IndexModel(keys, unique=True)]
        return super().storage()._replace(unique=unique)

    def blank(self) -> Raw:
        """Return what the update of a group's document sets where it creates the document."""
        return {
            path: {"$ifNull": [f"${path}", {"$literal": value}]}
            for rule in aggregates_in(self.target)
            for path, value in rule.empty().items()
        }


def source_paths(rules: Iterable[DerivedRule]) -> frozenset[str] | None:
    """Return the paths of a source that several rules read; None for any."""
    paths: frozenset[str] = frozenset()
    for rule in rules:
        if rule.source_paths is None:
            return None
        paths |= rule.source_paths
    return paths


# -- the rules of a model, by direction ----------------------------------------------------------------


def aggregates_in(entry: ModelEntry, maintain: Maintain | None = None) -> list[DerivedRule]:
    """Return the rules that compute values of a model from the sources that refer to it."""
    return [rule for rule in entry.rules.of_type(DerivedRule, maintain) if not rule.is_copy]


def aggregates_of(entry: ModelEntry, maintain: Maintain | None = "write") -> list[DerivedRule]:
    """Return the rules that compute values of others from the documents of a model that refer to them."""
    return [rule for rule in entry.effects.of_type(DerivedRule, maintain) if not rule.is_copy]


def copies_in(entry: ModelEntry, maintain: Maintain | None = None) -> list[DerivedRule]:
    """Return the rules that copy to a model what its documents refer to."""
    return [rule for rule in entry.rules.of_type(DerivedRule, maintain) if rule.is_copy]


def copies_of(entry: ModelEntry, maintain: Maintain | None = "write") -> list[DerivedRule]:
    """Return the rules that copy documents of a model to those that refer to them."""
    return [rule for rule in entry.effects.of_type(DerivedRule, maintain) if rule.is_copy]


# -- values of the document's own fields -----------------------------------------------------------------


class FormulaRule(Rule):
    """A field that the server computes from other fields of the same document."""

    pattern = "computed"

    def __init__(self, place: Place, expression: Any) -> None:
        super().__init__(place)
        if place.in_array:
            raise DeclarationError(
                f"{place.label} stands inside an array; a Formula speaks of the document's own fields: "
                "compute the whole array with $map instead",
                code="maintained-in-array",
            )
        require_optional(place)
        require_known_names(expression, place.entry.codec, place.label)
        self.expression = expression

    def reads(self) -> Reads:
        return {self.target.collection: field_references(self.expression)}


class LocalRule(Rule):
    """A field that Python computes from other fields of the same document, perhaps with a look at others."""

    def values(self, documents: Sequence[Raw]) -> Plan[list[Any]]:
        """Return the value that each of these documents should hold, in its stored form.

        Asked for documents that are about to be stored as well as for those that are. A value that is
        correct as it stands must be returned as it is.
        """
        raise NotImplementedError  # pragma: no cover


def require_optional(place: Place) -> None:
    """Refuse a field that could not be None, where there may be nothing to compute it from."""
    if not place.field.shape.optional and place.field.shape.kind != "any":
        raise DeclarationError(
            f"{place.label} must be able to be None, for when there is nothing to compute it from; "
            f"write {getattr(place.field.shape.python, '__name__', '…')} | None",
            code="maintained-type",
        )
