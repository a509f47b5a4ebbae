"""What models declare, in stored names: what a request can be rewritten by.

Read from the rules of a `Graph`, so that models made by the advisor, by a plan
or by hand are the same to a trial. Only patterns that a plan can apply are
here: copies, computed values and subsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.graph.aggregate import Extreme, FirstDocuments, NumberAverage, NumberSum, SourceCount
from treadle.graph.derived import DerivedRule
from treadle.graph.graph import Graph
from treadle.model.document import Document


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


@dataclass(frozen=True, slots=True)
class Patterns:
    """All that the models declare."""

    models: Mapping[str, type[Document]]
    cards: tuple[Card, ...] = ()
    values: tuple[Value, ...] = ()
    firsts: tuple[First, ...] = ()

    @property
    def derived(self) -> tuple[Card | Value | First, ...]:
        return (*self.cards, *self.values, *self.firsts)

    @property
    def collections(self) -> frozenset[str]:
        """The collections whose documents a pattern reads or writes."""
        return frozenset(name for each in self.derived for name in (each.collection, each.source))

    @property
    def empty(self) -> bool:
        return not self.derived


def patterns_of(models: Iterable[type[Document]]) -> Patterns:
    """What these models declare; refused where the declarations do not fit together."""
    graph = Graph(models)
    found: dict[type, list[Any]] = {kind: [] for kind in (Card, Value, First)}
    for rule in graph.rules:
        pattern = _pattern(rule)
        if pattern is not None:
            found[type(pattern)].append(pattern)
    names = {entry.collection: entry.kinds.root.model for entry in graph.entries.values()}
    return Patterns(names, *(tuple(each) for each in found.values()))


def _pattern(rule: Any) -> Any:
    if isinstance(rule, DerivedRule) and rule.is_copy and not rule.place.in_array:
        paths = {
            each.source: f"{rule.path}.{each.card}" if each.card else rule.path for each in rule.copied.fields
        }
        ends = (rule.target.collection, rule.path, rule.on.path, rule.source.collection)
        return Card(*ends, paths, rule.match.path)
    if isinstance(rule, DerivedRule) and not rule.is_copy and rule.target.rules.group is None:
        ranked = rule.aggregate
        if not isinstance(ranked, FirstDocuments):
            return _value(rule)
        fields = {source: card for card, source in ranked.card.items()}
        return First(
            rule.target.collection, rule.path, rule.source.collection, rule.match.path,
            tuple(ranked.sort), ranked.size, fields, dict(rule.where), rule.on.path,
        )  # fmt: skip
    return None


def _value(rule: DerivedRule) -> Value | None:
    aggregate, of = rule.aggregate, rule.aggregate.operand.path
    operator = {SourceCount: "count", NumberSum: "sum", NumberAverage: "average"}.get(type(aggregate))
    if isinstance(aggregate, Extreme):
        operator = aggregate.operator.removeprefix("$")
    if operator is None or rule.match.arrays or (operator != "count" and not of):
        return None
    return Value(
        rule.target.collection,
        rule.path,
        rule.source.collection,
        rule.match.path,
        operator,
        of,
        dict(rule.where),
        rule.on.path,
    )
