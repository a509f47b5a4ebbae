"""Computed: a count, sum, average, minimum or maximum over a source collection, and formulas.

A sum is kept by adding differences. An average is kept as its sum and count,
in the target's reserved sub-document, and derived from them: an average of
averages is not an average. A minimum or maximum takes new values by
difference; when a value leaves, that one group is recomputed, because what
the next one is only the sources know. So is a sum of floats from which a
value leaves: subtraction of floats does not undo addition.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from treadle.errors import DataError, DeclarationError
from treadle.graph.binding import check_maintenance, sibling
from treadle.graph.derived import FormulaRule, require_optional
from treadle.graph.gather import RECOMPUTE, CountingRule, GatherRule, maintenance_of, origin
from treadle.graph.pattern import STATE, Maintain, ModelReference, Models, Pattern, Place, Rule
from treadle.model.shape import Shape
from treadle.patterns.computed.numbers import Numbers, is_number, quotient, subtract
from treadle.plan import Plan, Raw, find
from treadle.plan.capabilities import Capabilities
from treadle.query.comparison import exact_sum
from treadle.query.keys import ReferenceKey, freeze
from treadle.query.paths import field_references, getter, inside, resolve, value_at
from treadle.query.safety import clean
from treadle.query.update_values import takes


@dataclass(frozen=True)
class _Aggregate(Pattern):
    """What these declarations share."""

    pattern: ClassVar[str] = "computed"

    def bind(self, place: Place, graph: Models) -> Rule:
        check_maintenance(place, getattr(self, "maintain", "write"), getattr(self, "every", None))
        return self._rule(place, graph)

    def _rule(self, place: Place, graph: Models) -> Rule:
        return RULES[type(self)](place, graph, self)


@dataclass(frozen=True)
class Count(_Aggregate):
    """How many documents of `source` name this one in their field `by`.

    By its id, or by the unique field `to`.
    """

    source: ModelReference | None = None
    by: str | None = None
    where: Mapping[str, Any] | None = None
    maintain: Maintain = "write"
    every: timedelta | None = None
    computed_at: str | None = None
    to: str | None = None


@dataclass(frozen=True)
class _OfField(_Aggregate):
    source: ModelReference | Mapping[str, Any] | None = None
    field: str | Mapping[str, Any] | None = None
    by: str | None = None
    where: Mapping[str, Any] | None = None
    maintain: Maintain = "write"
    every: timedelta | None = None
    computed_at: str | None = None
    to: str | None = None


@dataclass(frozen=True)
class Sum(_OfField):
    """The sum of `field`, or of an expression, over the documents that name this one."""


@dataclass(frozen=True)
class Average(_OfField):
    """The average of `field`; None where there is nothing to average."""


@dataclass(frozen=True)
class Min(_OfField):
    """The smallest `field`; None where there is none."""


@dataclass(frozen=True)
class Max(_OfField):
    """The largest `field`; None where there is none."""


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


class ComputedRule(GatherRule):
    """A gathered value that one `$group` can compute."""

    pattern = "computed"

    def __init__(self, place: Place, graph: Models, declared: Any) -> None:
        source, self.of_field = declared.source, getattr(declared, "field", None)
        if place.entry.group is not None and isinstance(declared, _OfField) and self.of_field is None:
            # In a rollup the source is known, so that the first argument is the field.
            source, self.of_field = None, source
        super().__init__(place, origin(place, graph, source, declared.by, declared.where, declared.to))
        self.maintain, self.every = maintenance_of(place, declared)
        self.stamp = sibling(place, declared.computed_at, "computed_at") if declared.computed_at else None

    def stamps(self) -> set[str]:
        return {self.stamp} if self.stamp else set()


class CountRule(ComputedRule, CountingRule):
    def __init__(self, place: Place, graph: Models, declared: Count) -> None:
        super().__init__(place, graph, declared)
        _require_type(place, (int,), "a count is an int")


class FieldRule(ComputedRule):
    """A value computed from one field, or one expression, of the sources."""

    def __init__(self, place: Place, graph: Models, declared: _OfField) -> None:
        super().__init__(place, graph, declared)
        self.expression: Any = None
        # The stored path of the field; empty where it is an expression.
        self.value_path = ""
        if isinstance(self.of_field, Mapping):
            self.expression = clean(self.of_field)
            self.value_shape: Shape | None = None
        elif isinstance(self.of_field, str):
            path = resolve(self.source.codec, self.of_field, place.label, "source-field-missing")
            self.value_shape = path.shape
            self.value_path = path.stored
            self._pair_with_key(place, path)
        else:
            raise DeclarationError(
                f"{place.label} needs the field of {self.source.model.__name__} that it is computed from",
                code="source-field-missing",
            )
        self._value_of = getter(self.value_path)

    def _pair_with_key(self, place: Place, path: Any) -> None:
        depth = path.array_depth
        if not depth:
            return
        if not isinstance(self.key, ReferenceKey):
            raise DeclarationError(
                f"{place.label} is computed from {path.python!r}, which lies in an array; a rollup counts "
                "whole documents: use an expression such as {'$sum': '$lines.amount'}",
                code="source-field-in-array",
            )
        key_depth = self.key.array_depth
        if depth != key_depth or path.steps[:depth] != self.by.steps[:depth] or len(path.steps) == depth:
            raise DeclarationError(
                f"{place.label} is computed from {path.python!r}, which lies in another array than "
                f"{self.by.python!r}; both must belong to the same elements",
                code="source-field-in-array",
            )
        self.per_element = True
        self.element_path = inside(path.stored, depth)

    @property
    def origin(self) -> str:
        """The field that it is computed from, for messages."""
        return f"{self.source.model.__name__}.{self.of_field}"

    def value_paths(self) -> set[str] | None:
        if self.expression is not None:
            return field_references(self.expression)
        return {self.value_path}

    @property
    def server_side(self) -> bool:
        return super().server_side or self.expression is not None

    def value(self, raw: Raw) -> Any:
        return self._value_of(raw)

    def element_value(self, element: Any) -> Any:
        return value_at(element, self.element_path)

    def evaluation(self) -> dict[str, Any]:
        return {"value": self.operand}

    def evaluated(self, row: Raw) -> Any:
        return row.get("value")

    @property
    def operand(self) -> Any:
        return self.expression if self.expression is not None else f"${self.value_path}"


class NumberRule(FieldRule):
    """Sum and Average."""

    kinds: ClassVar[tuple[type, ...]]
    meaning: ClassVar[str]

    def __init__(self, place: Place, graph: Models, declared: _OfField) -> None:
        super().__init__(place, graph, declared)
        self.numbers = Numbers(place, self.path)
        _require_type(place, self.kinds, self.meaning)
        self._check_source()

    def fits(self, value: Any) -> bool:
        # An average is kept beside its sum and count, which follow it.
        return value is None or isinstance(value, dict) or self.numbers.fits(value)

    def spoils(self, values: Sequence[Any]) -> bool:
        return any(map(self.numbers.spoils, values))

    def too_large(self) -> DataError:
        if self.numbers.python is int:
            return super().too_large()
        return DataError(
            f"{self.place.label} would go beyond the largest number that its field can hold, or be none; "
            f"look at the {self.source.model.__name__} documents that it is computed from",
            code="sum-too-large",
        )

    def _check_source(self) -> None:
        """Refuse to sum what is no number, and a field that cannot hold the sum."""
        shape, own = self.value_shape, self.place.field.shape
        if shape is None or shape.kind in ("any", "union", "custom"):
            return
        if shape.kind == "enum" and issubclass(shape.python, int):
            return
        fits = {int: (int, float, decimal.Decimal), float: (float,), decimal.Decimal: (decimal.Decimal,)}
        if shape.kind != "scalar" or shape.python not in fits:
            raise DeclarationError(
                f"{self.place.label} is computed from {self.origin}, which is a {shape.name}; "
                "name a field that is an int, a float or a Decimal",
                code="maintained-type",
            )
        if own.python not in fits[shape.python]:
            raise DeclarationError(
                f"{self.place.label} is a {own.name}, which cannot hold a sum of {self.origin}, "
                f"which is a {shape.name}; declare it as {shape.name}",
                code="maintained-type",
            )


class SumRule(NumberRule):
    kinds = (int, float, decimal.Decimal)
    meaning = "a sum is an int, a float or a Decimal"

    def empty(self) -> dict[str, Any]:
        return {self.path: self.numbers.zero}

    def difference(self, removed: Sequence[Any], added: Sequence[Any]) -> Any:
        return subtract(removed, added)

    def apply(self, difference: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {self.path: self.numbers.add(f"${self.path}", difference)}, {}

    def accumulators(self) -> dict[str, Any]:
        return {"sum": {"$sum": self.operand}}

    def tally(self, values: Sequence[Any]) -> dict[str, Any] | None:
        whole = exact_sum([value for value in values if value is not None])
        return None if whole is None else {"sum": whole}

    def finish(self, group: Raw | None) -> dict[str, Any]:
        return {self.path: self.numbers.stored(group["sum"]) if group else self.numbers.zero}

    def finish_expressions(self, group: Mapping[str, str]) -> dict[str, Any]:
        return {self.path: self.numbers.stored_expression(group["sum"])}


class AverageRule(NumberRule):
    kinds = (float, decimal.Decimal)
    meaning = "an average is a float or a Decimal"

    def __init__(self, place: Place, graph: Models, declared: Average) -> None:
        super().__init__(place, graph, declared)
        require_optional(place)
        self.state = f"{STATE}.{self.path}"
        self._sum, self._count = f"${self.state}.sum", f"${self.state}.count"
        quotient = {"$divide": [self._sum, self._count]}
        self._following = {self.path: {"$cond": [{"$gt": [self._count, 0]}, quotient, None]}}

    def empty(self) -> dict[str, Any]:
        return {self.path: None, self.state: {"sum": self.numbers.zero, "count": 0}}

    def difference(self, removed: Sequence[Any], added: Sequence[Any]) -> Any:
        change = subtract(removed, added)
        if change is None or change is RECOMPUTE:
            return change
        return change, sum(map(is_number, added)) - sum(map(is_number, removed))

    def apply(self, difference: tuple[list[Any], int]) -> tuple[dict[str, Any], dict[str, Any]]:
        change, count = difference
        parts = {
            self._sum[1:]: self.numbers.add(self._sum, change),
            self._count[1:]: {"$add": [{"$ifNull": [self._count, 0]}, count]},
        }
        return parts, self._following

    def accumulators(self) -> dict[str, Any]:
        return {
            "sum": {"$sum": self.operand},
            "count": {"$sum": {"$cond": [{"$isNumber": self.operand}, 1, 0]}},
        }

    def tally(self, values: Sequence[Any]) -> dict[str, Any] | None:
        numbers = [value for value in values if value is not None]
        whole = exact_sum(numbers)
        return None if whole is None else {"sum": whole, "count": len(numbers)}

    def finish(self, group: Raw | None) -> dict[str, Any]:
        if not group or not group["count"]:
            return self.empty()
        total, count = self.numbers.stored(group["sum"]), group["count"]
        return {self.path: quotient(total, count), self.state: {"sum": total, "count": count}}

    def finish_expressions(self, group: Mapping[str, str]) -> dict[str, Any]:
        total, count = self.numbers.stored_expression(group["sum"]), {"$ifNull": [group["count"], 0]}
        quotient = {"$cond": [{"$gt": [count, 0]}, {"$divide": [total, count]}, None]}
        return {self.path: quotient, f"{self.state}.sum": total, f"{self.state}.count": count}


def cannot_hold(rule: FieldRule) -> DataError:
    """The refusal of a value that a source has, and that its target could not hold."""
    return DataError(
        f"{rule.place.label} would hold a value of {rule.origin} that it cannot hold; mend the "
        f"{rule.source.model.__name__} documents that have it",
        code="extreme-invalid",
    )


class ExtremeRule(FieldRule):
    """Min and Max."""

    def __init__(self, place: Place, graph: Models, declared: _OfField) -> None:
        super().__init__(place, graph, declared)
        self.operator = "$min" if isinstance(declared, Min) else "$max"
        require_optional(place)
        shape = self.value_shape
        own = place.field.shape
        if shape is not None and {shape.kind, own.kind} == {"scalar"} and shape.python is not own.python:
            raise DeclarationError(
                f"{place.label} is a {own.name}, but {self.origin} is a {shape.name}; declare the same",
                code="maintained-type",
            )

    def empty(self) -> dict[str, Any]:
        return {self.path: None}

    def difference(self, removed: Sequence[Any], added: Sequence[Any]) -> Any:
        if any(value is not None for value in removed):
            return RECOMPUTE
        candidates = [value for value in added if value is not None]
        return candidates or None

    def apply(self, difference: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {
            self.path: {self.operator: [f"${self.path}", *({"$literal": value} for value in difference)]}
        }, {}

    def fits(self, value: Any) -> bool:
        return value is None or takes(self.place.entry.codec, self.path, value)

    def spoils(self, values: Sequence[Any]) -> bool:
        return not all(map(self.fits, values))

    def too_large(self) -> DataError:
        return cannot_hold(self)

    def accumulators(self) -> dict[str, Any]:
        return {"extreme": {self.operator: self.operand}}

    def finish(self, group: Raw | None) -> dict[str, Any]:
        return {self.path: group["extreme"] if group else None}

    def finish_expressions(self, group: Mapping[str, str]) -> dict[str, Any]:
        return {self.path: {"$ifNull": [group["extreme"], None]}}

    @property
    def _indexed(self) -> bool:
        """Whether the extreme of one group is the first entry of an index."""
        return bool(self.value_path) and isinstance(self.key, ReferenceKey) and not self.key.array_depth

    def index_keys(self) -> list[tuple[str, int]]:
        value = [(self.value_path, 1)] if self._indexed else []
        return [*super().index_keys(), *value]

    def finds(self, keys: Sequence[Any]) -> bool:
        return len(keys) == 1 and self._indexed

    def found(self, keys: Sequence[Any], server: Capabilities) -> Plan[dict[Any, dict[str, Any]]]:
        path = self.value_path
        # Servers differ in whether a path into an array of other things is null; none says that it exists.
        condition: list[Raw] = [{self.by.stored: {"$eq": keys[0]}}, {path: {"$exists": True, "$ne": None}}]
        if self.where:
            condition.append(self.where)
        direction = 1 if self.operator == "$min" else -1
        first = yield from find(
            self.source.collection, {"$and": condition}, {path: 1}, sort=[(path, direction)], limit=1
        )
        return {freeze(keys[0]): self.finish({"extreme": self.value(first[0])} if first else None)}


RULES: dict[type, Callable[..., Rule]] = {
    Count: CountRule,
    Sum: SumRule,
    Average: AverageRule,
    Min: ExtremeRule,
    Max: ExtremeRule,
}


def _require_type(place: Place, kinds: tuple[type, ...], rule: str) -> None:
    shape = place.field.shape
    if shape.kind != "scalar" or shape.python not in kinds:
        raise DeclarationError(f"{place.label} is a {shape.name}; {rule}", code="maintained-type")
