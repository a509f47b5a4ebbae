"""Computed: a count, sum, average, minimum, maximum or the distinct values of other documents; and formulas.

The declarations are checked here. How each value is computed, and how it
changes with a source, is in `graph/aggregate.py`.
"""

from __future__ import annotations

import decimal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from treadle.errors import DeclarationError
from treadle.graph.aggregate import (
    Aggregate,
    DistinctValues,
    Extreme,
    NumberAverage,
    NumberSum,
    Operand,
    SourceCount,
)
from treadle.graph.binding import check_maintenance, check_whole_number
from treadle.graph.derived import (
    DerivedRule,
    FormulaRule,
    Relation,
    relation_of,
    require_optional,
    target_field,
)
from treadle.graph.model_entry import Maintain
from treadle.graph.rule import ModelReference, Models, Pattern, Place, Rule
from treadle.model.bson_types import clean
from treadle.model.shape import Shape
from treadle.query.expressions import field_references, require_known_names
from treadle.query.keys import key_at
from treadle.query.paths import ARRAYS, Path, getter, resolve, values_at

COLLECT_SIZE_MAX = 1000


@dataclass(frozen=True)
class Count(Pattern):
    """The number of documents of `source` that refer to this one in their field `by`.

    By its id, or by the unique field `to`.
    """

    pattern: ClassVar[str] = "computed"

    source: ModelReference | None = None
    by: str | None = None
    where: Mapping[str, Any] | None = None
    maintain: Maintain = "write"
    every: timedelta | None = None
    computed_at: str | None = None
    to: str | None = None

    def bind(self, place: Place, graph: Models) -> Rule:
        check_maintenance(place, self.maintain, self.every)
        relation = relation_of(place, graph, self.source, self.by, self.where, self.to)
        _require_type(place, (int,), "a count is an int")
        return DerivedRule(place, relation, SourceCount(target_field(place)), self)


@dataclass(frozen=True)
class _OfField(Pattern):
    pattern: ClassVar[str] = "computed"

    source: ModelReference | Mapping[str, Any] | None = None
    field: str | Mapping[str, Any] | None = None
    by: str | None = None
    where: Mapping[str, Any] | None = None
    maintain: Maintain = "write"
    every: timedelta | None = None
    computed_at: str | None = None
    to: str | None = None

    def bind(self, place: Place, graph: Models) -> Rule:
        check_maintenance(place, self.maintain, self.every)
        source, field = self.source, self.field
        if place.entry.rules.group is not None and field is None:
            # In a rollup the source is known, so the first argument is the field.
            source, field = None, source
        relation = relation_of(place, graph, source, self.by, self.where, self.to)
        operand, shape, unit = _operand(place, relation, field, several=isinstance(self, Collect))
        return DerivedRule(place, relation, self._aggregate(place, operand, shape), self, unit=unit)

    def _aggregate(self, place: Place, operand: Operand, shape: Shape | None) -> Aggregate:
        raise NotImplementedError  # pragma: no cover


@dataclass(frozen=True)
class Sum(_OfField):
    """The sum of `field`, or of an expression, over the documents that refer to this one."""

    def _aggregate(self, place: Place, operand: Operand, shape: Shape | None) -> Aggregate:
        _require_type(place, (int, float, decimal.Decimal), "a sum is an int, a float or a Decimal")
        _require_numbers(place, operand, shape)
        return NumberSum(target_field(place), operand)


@dataclass(frozen=True)
class Average(_OfField):
    """The average of `field`; None where there is nothing to average."""

    def _aggregate(self, place: Place, operand: Operand, shape: Shape | None) -> Aggregate:
        _require_type(place, (float, decimal.Decimal), "an average is a float or a Decimal")
        _require_numbers(place, operand, shape)
        require_optional(place)
        return NumberAverage(target_field(place), operand)


@dataclass(frozen=True)
class Min(_OfField):
    """The smallest `field`; None where there is none."""

    operator: ClassVar[str] = "$min"

    def _aggregate(self, place: Place, operand: Operand, shape: Shape | None) -> Aggregate:
        require_optional(place)
        _require_same(place, place.field.shape, operand, shape)
        return Extreme(target_field(place), operand, self.operator)


@dataclass(frozen=True)
class Max(Min):
    """The largest `field`; None where there is none."""

    operator: ClassVar[str] = "$max"


@dataclass(frozen=True)
class Collect(_OfField):
    """The distinct values of `field` over the documents that refer to this one, sorted; the first `size`."""

    size: int = 100

    def bind(self, place: Place, graph: Models) -> Rule:
        if place.entry.rules.group is not None:
            raise DeclarationError(
                f"{place.label} stands in a rollup, which counts and does not collect; declare it on a model "
                "of its own, with by=",
                code="rollup-source",
            )
        return super().bind(place, graph)

    def _aggregate(self, place: Place, operand: Operand, shape: Shape | None) -> Aggregate:
        check_whole_number(place, "size", self.size, COLLECT_SIZE_MAX)
        own = place.field.shape
        if own.kind not in ARRAYS or own.optional:
            raise DeclarationError(
                f"{place.label} is a {own.name}; the values that it collects are a list, which may be empty: "
                "list[…]",
                code="maintained-type",
            )
        if own.items:
            _require_same(place, own.items[0], operand, shape, of="list of ")
        return DistinctValues(target_field(place), operand, self.size)


@dataclass(frozen=True)
class Formula(Pattern):
    """An aggregation expression over the document's own fields, by their stored names."""

    pattern: ClassVar[str] = "computed"

    expression: Any
    maintain: Maintain = "write"
    every: timedelta | None = None

    def bind(self, place: Place, graph: Models) -> Rule:
        check_maintenance(place, self.maintain, self.every)
        rule = FormulaRule(place, clean(self.expression))
        rule.maintain, rule.every = self.maintain, self.every
        return rule


# -- what is computed from a source -----------------------------------------------------------------


def _operand(
    place: Place, relation: Relation, field: Any, *, several: bool
) -> tuple[Operand, Shape | None, tuple[str, ...]]:
    """Return what a declaration is computed from, its declared type, and the arrays to take apart.

    An expression has no type. Of the arrays that hold both the value and the key each element contributes by
    itself. With `several`, a source may contribute all values of an array.
    """
    codec, model = relation.source.codec, relation.source.model.__name__
    label = f"{model}.{field}"
    if isinstance(field, Mapping):
        expression = clean(dict(field))
        require_known_names(expression, codec, place.label)
        references = field_references(expression)
        reads = None if references is None else frozenset(references)
        return Operand(expression, None, reads, label=label), None, ()
    if not isinstance(field, str):
        raise DeclarationError(
            f"{place.label} needs the field of {model} that it is computed from", code="source-field-missing"
        )
    path = resolve(codec, field, place.label, "source-field-missing")
    operand = Operand(f"${path.stored}", getter(path.stored), frozenset({path.stored}), path.stored, label)
    if not path.in_array:
        return operand, path.shape, ()
    if several and not relation.match.arrays:
        if sum(step.array for step in path.steps) > 1:
            raise DeclarationError(
                f"{place.label} collects {path.python!r}, which lies in an array within another; collect "
                "what lies in one array",
                code="source-field-in-array",
            )
        steps = path.steps
        return operand._replace(read=lambda raw: list(values_at(raw, steps)), path=""), path.shape, ()
    _require_same_array(place, relation, path)
    return operand, path.shape, relation.match.arrays


def _require_same_array(place: Place, relation: Relation, path: Path) -> None:
    """Refuse a value that lies in another array than the key to which it belongs."""
    key = relation.match
    if key.group:
        raise DeclarationError(
            f"{place.label} is computed from {path.python!r}, which lies in an array; a rollup counts "
            "whole documents: use an expression such as {'$sum': '$lines.amount'}",
            code="source-field-in-array",
        )
    if path.steps[-1].array or key_at(path).arrays != key.arrays:
        raise DeclarationError(
            f"{place.label} is computed from {path.python!r}, which lies in another array than "
            f"{key.path!r}; both must belong to the same elements",
            code="source-field-in-array",
        )


# -- types ------------------------------------------------------------------------------------------


def _require_type(place: Place, allowed: tuple[type, ...], rule: str) -> None:
    shape = place.field.shape
    if shape.kind != "scalar" or shape.python not in allowed:
        raise DeclarationError(f"{place.label} is a {shape.name}; {rule}", code="maintained-type")


def _require_same(place: Place, held: Shape, operand: Operand, shape: Shape | None, *, of: str = "") -> None:
    """Refuse two plain types that differ; of an expression nothing is known."""
    if shape is None or {shape.kind, held.kind} != {"scalar"} or shape.python is held.python:
        return
    raise DeclarationError(
        f"{place.label} is a {of}{held.name}, but {operand.label} is a {shape.name}; declare the same",
        code="maintained-type",
    )


def _require_numbers(place: Place, operand: Operand, shape: Shape | None) -> None:
    """Refuse to sum what is not a number, and a field that cannot hold the sum."""
    own, origin = place.field.shape, operand.label
    if shape is None or shape.kind in ("any", "union", "custom"):
        return
    if shape.kind == "enum" and issubclass(shape.python, int):
        return
    fits = {int: (int, float, decimal.Decimal), float: (float,), decimal.Decimal: (decimal.Decimal,)}
    if shape.kind != "scalar" or shape.python not in fits:
        raise DeclarationError(
            f"{place.label} is computed from {origin}, which is a {shape.name}; "
            "name a field that is an int, a float or a Decimal",
            code="maintained-type",
        )
    if own.python not in fits[shape.python]:
        raise DeclarationError(
            f"{place.label} is a {own.name}, which cannot hold a sum of {origin}, "
            f"which is a {shape.name}; declare it as {shape.name}",
            code="maintained-type",
        )
