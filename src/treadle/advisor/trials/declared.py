"""What models declare, in stored names: what a request can be rewritten by.

Read from the rules of a `Graph`, so that models made by the advisor, by a plan
or by hand are the same to a trial. Patterns that no request can be rewritten
by are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from treadle.graph.graph import Graph
from treadle.model.document import Document
from treadle.patterns.approximation.rule import ApproximateRule
from treadle.patterns.bucket.rule import BucketRule
from treadle.patterns.computed.aggregates import (
    AverageRule,
    ComputedRule,
    CountRule,
    ExtremeRule,
    Max,
    SumRule,
)
from treadle.patterns.extended_reference import ReferenceRule
from treadle.patterns.outlier.rule import OutlierRule
from treadle.patterns.subset import SubsetRule
from treadle.patterns.tree.fields import TreeRule


@dataclass(frozen=True, slots=True)
class Card:
    """Copies of fields of `source` beside a reference to it."""

    collection: str
    place: str
    by: str
    source: str
    # The field of the source -> where its copy is.
    paths: Mapping[str, str] = field(hash=False)
    # What the reference holds of the source.
    key: str = "_id"
    maintain: str = "write"


@dataclass(frozen=True, slots=True)
class Value:
    """A value in the target that is computed from the documents of `source` that name it."""

    collection: str
    place: str
    source: str
    by: str
    # count, sum, average, min or max, and the field; none for a count.
    operator: str
    of: str
    where: Mapping[str, Any] = field(hash=False)
    # What the sources' reference holds of the target.
    key: str = "_id"
    maintain: str = "write"


@dataclass(frozen=True, slots=True)
class First:
    """The first few documents of `source`, embedded in the target that they name."""

    collection: str
    place: str
    source: str
    by: str
    sort: tuple[tuple[str, int], ...]
    size: int
    # The field of the source -> its name in the card.
    fields: Mapping[str, str] = field(hash=False)
    where: Mapping[str, Any] = field(hash=False)
    key: str = "_id"
    maintain: str = "write"


@dataclass(frozen=True, slots=True)
class Counter:
    """A field whose increments are collected."""

    collection: str
    place: str
    by: str
    name: str


@dataclass(frozen=True, slots=True)
class Readings:
    """A collection whose documents are stored in buckets."""

    collection: str
    model: type[Document]
    key: tuple[str, ...]
    time: str
    span: timedelta | None
    stats: frozenset[str]
    # The collection with one document per reading; the part's role -> its name; what is not in readings.
    source: str
    names: Mapping[str, str] = field(hash=False)
    outer: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array of which the document holds the first part."""

    collection: str
    place: str
    limit: int
    # Fields that the pattern adds to the document.
    added: frozenset[str]
    name: str


@dataclass(frozen=True, slots=True)
class Ancestors:
    """A hierarchy whose nodes hold the ids above them, root first."""

    collection: str
    parent: str
    place: str


@dataclass(frozen=True, slots=True)
class Patterns:
    """All that the models declare."""

    models: Mapping[str, type[Document]]
    cards: tuple[Card, ...] = ()
    values: tuple[Value, ...] = ()
    firsts: tuple[First, ...] = ()
    counters: tuple[Counter, ...] = ()
    readings: tuple[Readings, ...] = ()
    arrays: tuple[LongArray, ...] = ()
    trees: tuple[Ancestors, ...] = ()

    @property
    def derived(self) -> tuple[Card | Value | First, ...]:
        return (*self.cards, *self.values, *self.firsts)

    @property
    def written(self) -> bool:
        """Whether a value is kept right by the write itself, so that every writer uses the Store."""
        return any(each.maintain == "write" for each in self.derived)

    @property
    def collections(self) -> frozenset[str]:
        """The collections whose documents a pattern reads or writes."""
        others: tuple[Counter | Readings | LongArray | Ancestors, ...] = (
            *self.counters, *self.readings, *self.arrays, *self.trees,
        )  # fmt: skip
        names = {name for each in self.derived for name in (each.collection, each.source)}
        sources = {each.source for each in self.readings}
        return frozenset(names | {each.collection for each in others} | sources)

    @property
    def empty(self) -> bool:
        return not self.collections


def patterns_of(models: Iterable[type[Document]]) -> Patterns:
    """What these models declare; refused where the declarations do not fit together."""
    graph = Graph(models)
    kinds = (Card, Value, First, Counter, Readings, LongArray, Ancestors)
    found: dict[type, list[Any]] = {kind: [] for kind in kinds}
    for rule in graph.rules:
        pattern = _pattern(rule)
        if pattern is not None:
            found[type(pattern)].append(pattern)
    names = {entry.collection: entry.root.model for entry in graph.entries.values()}
    names.update((each.source, each.model) for each in found[Readings])
    return Patterns(names, *(tuple(each) for each in found.values()))


def _pattern(rule: Any) -> Any:
    if isinstance(rule, ReferenceRule) and not rule.place.in_array:
        paths = {
            each.source: rule.path if each.card is None else f"{rule.path}.{each.card}"
            for each in rule.copied
        }
        ends = (rule.target.collection, rule.path, rule.reference_path, rule.source.collection)
        return Card(*ends, paths, rule.to, rule.maintain)
    if isinstance(rule, SubsetRule) and rule.target.group is None:
        fields = {source: card for card, source in rule.card.items()}
        return First(
            rule.target.collection, rule.path, rule.source.collection, rule.by.stored,
            tuple(rule.sort), rule.size, fields, dict(rule.where), rule.to or "_id", rule.maintain,
        )  # fmt: skip
    if isinstance(rule, ComputedRule) and rule.target.group is None:
        return _value(rule)
    if isinstance(rule, ApproximateRule):
        return Counter(rule.target.collection, rule.path, rule.by_path, rule.place.label.partition(".")[2])
    if isinstance(rule, BucketRule):
        return _readings(rule)
    if isinstance(rule, TreeRule) and {"parent", "ancestors"} <= set(rule.roles):
        return Ancestors(rule.target.collection, rule.roles["parent"].stored, rule.roles["ancestors"].stored)
    if isinstance(rule, OutlierRule):
        added = frozenset(rule.maintained()) - {rule.path}
        return LongArray(rule.target.collection, rule.path, rule.limit, added, rule.place.field.name)
    return None


def _value(rule: ComputedRule) -> Value | None:
    kinds = {CountRule: "count", SumRule: "sum", AverageRule: "average"}
    operator = next((name for kind, name in kinds.items() if isinstance(rule, kind)), None)
    if operator is None and isinstance(rule, ExtremeRule):
        operator = "max" if isinstance(rule.declared, Max) else "min"
    of = getattr(rule, "value_path", "")
    if operator is None or rule.by.in_array or (operator != "count" and not of):
        return None
    return Value(
        rule.target.collection,
        rule.path,
        rule.source.collection,
        rule.by.stored,
        operator,
        of,
        dict(rule.where),
        rule.to or "_id",
        rule.maintain,
    )


def _readings(rule: BucketRule) -> Readings:
    spec = rule.lay_out().spec
    declared = spec.declared
    # The advisor's own declarations put buckets beside the readings.
    source = declared.adopt or spec.collection.removesuffix("_buckets")
    return Readings(
        spec.collection,
        rule.target.model,
        spec.key_names,
        spec.time.stored,
        declared.span,
        frozenset(each.path for each in spec.stats),
        source,
        asdict(spec.names),
        spec.outer_names,
    )
