"""What the sources of one target come to: a small algebra of pure values.

A *contribution* is what one source gives. A *state* is what several sources
give together. The *values* are what the target stores, by path. Nothing here
knows a server, a collection, a kind, a version or an archive.

Property tests hold the laws: merging the states of any parts of the sources
gives the state of all of them; `difference` gives what a computation from
scratch gives, or RECOMPUTE; `finish(empty())` is what a target without sources
stores; and the expression gives the server the contribution that Python reads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import reduce
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from pymongo import ASCENDING

from treadle.errors import DataError
from treadle.graph.numbers import DOUBLE_EXACT_MAX, NumberField, is_number, sum_after, terms, total
from treadle.model.bson_types import RESERVED
from treadle.plan import Raw
from treadle.query.comparison import greatest, identical, least, order_key
from treadle.query.keys import KEY, freeze
from treadle.query.paths import expression_of, getter, value_at

State: TypeAlias = Mapping[str, Any]
Values: TypeAlias = dict[str, Any]


class Answer(Enum):
    """What stands in for a value that an aggregate cannot give."""

    RECOMPUTE = auto()
    SERVER = auto()


RECOMPUTE: Final = Answer.RECOMPUTE
"""The difference of a state that cannot be told exactly."""
SERVER: Final = Answer.SERVER
"""The contribution of a source that only the server can evaluate."""
Recompute: TypeAlias = Literal[Answer.RECOMPUTE]


class Accumulator(NamedTuple):
    """One entry of a state: its `$group` accumulator, and how the results of two parts become one.

    The sources of a target are read in parts (collections, versions), so there is no default for `merge`.
    """

    expression: Raw
    merge: Callable[[Any, Any], Any]


class BlindUpdate(NamedTuple):
    """What an update sets in a target that was not read: values, then what follows from these."""

    values: Raw
    following: Mapping[str, Any] = MappingProxyType({})


UNCHANGED: Final = BlindUpdate({})


class TargetField(NamedTuple):
    """The field that holds the value: its name in messages, path, declared type, and what it takes."""

    label: str
    path: str
    python: Any
    takes: Callable[[Any], bool]


class Operand(NamedTuple):
    """What a source contributes: the server's expression, the same in Python, and the paths that decide it.

    `read` is None where only the server can tell. `path` is the stored path where it is one plain field, and
    `label` how messages name it.
    """

    expression: Any
    read: Callable[[Any], Any] | None
    reads: frozenset[str] | None
    path: str = ""
    label: str = ""


ONE: Final = Operand({"$literal": 1}, lambda source: 1, frozenset())


class Aggregate(ABC):
    """A value over the sources of a target. `tests/test_extending.py` declares one outside of the package."""

    def __init__(self, field: TargetField, operand: Operand = ONE) -> None:
        self.field = field
        self.path = field.path
        self.operand = operand

    def paths(self) -> list[str]:
        """Return the stored paths of the target that hold the value."""
        return [self.path]

    # -- one source -------------------------------------------------------------------------

    @property
    def reads(self) -> frozenset[str] | None:
        """The stored paths of a source that decide its contribution; None for any."""
        return self.operand.reads

    def contribution(self, source: Any) -> Any:
        """Return what a source, or one element of its array, gives to a target; perhaps SERVER."""
        return SERVER if self.operand.read is None else self.operand.read(source)

    def expression(self) -> Any:
        """Return the expression by which the server computes the same."""
        return self.operand.expression

    def is_unchanged(self, before: Any, after: Any) -> bool:
        """Return whether the value cannot change where one source gave `before` and gives `after`."""
        # Not by Python's `==`: True equals 1 there, and documents have no order.
        return identical(before, after)

    # -- several sources ----------------------------------------------------------------------

    @abstractmethod
    def empty(self) -> State:
        """Return the state of no sources."""

    @abstractmethod
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Return the accumulators that compute a state, by its entries."""

    @abstractmethod
    def finish(self, state: State) -> Values:
        """Return what the target stores."""

    def merge(self, parts: Sequence[State]) -> State:
        """Return the state of all parts together; there is at least one."""
        return {
            name: reduce(accumulator.merge, (part[name] for part in parts))
            for name, accumulator in self.accumulators().items()
        }

    def difference(self, state: State, removed: Sequence[Any], added: Sequence[Any]) -> State | Recompute:
        """Return the state after some contributions left and others joined, or RECOMPUTE."""
        return RECOMPUTE

    def stored_state(self, target: Raw) -> State | None:
        """Return the state that a stored target stands for; None where that cannot be told."""
        return None

    def first(self) -> list[Raw] | None:
        """Return the stages that leave those sources of one target which decide its value.

        None where all do, and differences may do without them.
        """
        return None

    @property
    def is_ranked(self) -> bool:
        """Whether few of many sources count, which `first` finds for each target."""
        return False

    def index_keys(self) -> list[tuple[str, int]]:
        """Return what follows the key of the target in the index that gives the order of `first`."""
        return []

    def grouping(self) -> list[Raw] | None:
        """Return the stages that give the states of targets by KEY, where a `$group` would take too much.

        None where a `$group` with the accumulators does.
        """
        return None

    # -- what the field of the target can hold ----------------------------------------------------

    def refuse(self, values: Values) -> DataError | None:
        """Return why the target could not hold these values, if it could not."""
        value = values.get(self.path)
        return None if value is None or self.field.takes(value) else self.cannot_hold()

    def blames(self, added: Sequence[Any]) -> bool:
        """Return whether contributions that a write added may be why its values are refused."""
        states = (self.difference(self.empty(), [], [each]) for each in added)
        return any(state is not RECOMPUTE and self.refuse(self.finish(state)) is not None for state in states)

    def cannot_hold(self) -> DataError:
        source = self.operand.label.partition(".")[0]
        return DataError(
            f"{self.field.label} would hold a value of {self.operand.label} that it cannot hold; correct the "
            f"{source} documents that have it, then run repair()",
            code="extreme-invalid",
        )

    # -- on the server ----------------------------------------------------------------------------

    def blind(self, removed: Sequence[Any], added: Sequence[Any]) -> BlindUpdate | Recompute:
        """Return the `BlindUpdate` that applies a difference to a target that was not read, or RECOMPUTE."""
        return RECOMPUTE

    def finish_expressions(self, state: Mapping[str, str]) -> Raw | None:
        """Return `finish` as expressions over the paths of a state's entries; None where there are none."""
        return None


class SingleValue(Aggregate):
    """An aggregate whose state has one entry, which is the value that the target stores."""

    entry: str
    nothing: Any = None

    def empty(self) -> State:
        return {self.entry: self.nothing}

    def finish(self, state: State) -> Values:
        return {self.path: state[self.entry]}

    def stored_state(self, target: Raw) -> State | None:
        value = value_at(target, self.path)
        return {self.entry: self.nothing if value is None else value}

    def finish_expressions(self, state: Mapping[str, str]) -> Raw | None:
        return {self.path: {"$ifNull": [state[self.entry], self.nothing]}}


class SourceCount(SingleValue):
    """How many sources there are."""

    entry = "count"
    nothing = 0

    def accumulators(self) -> Mapping[str, Accumulator]:
        return {"count": Accumulator({"$sum": 1}, total)}

    def difference(self, state: State, removed: Sequence[Any], added: Sequence[Any]) -> State | Recompute:
        return {"count": state["count"] + len(added) - len(removed)}

    def refuse(self, values: Values) -> DataError | None:
        return None

    def blind(self, removed: Sequence[Any], added: Sequence[Any]) -> BlindUpdate:
        change = len(added) - len(removed)
        return BlindUpdate({self.path: {"$add": [_or_zero(self.path), change]}}) if change else UNCHANGED


def _or_zero(path: str) -> Raw:
    return {"$ifNull": [f"${path}", 0]}


class NumberSum(Aggregate):
    """The sum of the numbers among the contributions.

    The state keeps the type of the sources; `finish` converts to the type of the field.
    """

    def __init__(self, field: TargetField, operand: Operand) -> None:
        super().__init__(field, operand)
        self.number = NumberField(field.python, field.takes)

    def empty(self) -> State:
        return {"sum": 0}

    def accumulators(self) -> Mapping[str, Accumulator]:
        return {"sum": Accumulator({"$sum": self.expression()}, total)}

    def finish(self, state: State) -> Values:
        return {self.path: self.number.stored(state["sum"])}

    def difference(self, state: State, removed: Sequence[Any], added: Sequence[Any]) -> State | Recompute:
        whole = sum_after(state["sum"], removed, added)
        return RECOMPUTE if whole is None else {"sum": whole}

    def stored_state(self, target: Raw) -> State | None:
        stored = value_at(target, self.path)
        return {"sum": stored} if is_number(stored) else None

    def refuse(self, values: Values) -> DataError | None:
        value = values.get(self.path)
        return None if value is None or self.number.holds(value) else self.too_large()

    def blames(self, added: Sequence[Any]) -> bool:
        return any(map(self.number.could_overflow, added))

    @property
    def is_bounded(self) -> bool:
        """Whether there are sums that the field cannot hold, so that a blind update may fail."""
        return not self.number.holds(math.inf)

    def too_large(self) -> DataError:
        if self.number.python is int:
            reason = "go beyond the 64 bits of an integer and be inexact, or hold a fraction"
            advice = "declare it as a Decimal"
        else:
            reason = "go beyond the largest number that its field can hold, or not be a number"
            source = self.operand.label.partition(".")[0]
            advice = f"correct the {source or 'source'} documents that it is computed from"
        return DataError(f"{self.field.label} would {reason}; {advice}", code="sum-too-large")

    def blind(self, removed: Sequence[Any], added: Sequence[Any]) -> BlindUpdate | Recompute:
        change = terms(removed, added)
        if change is None:
            return RECOMPUTE
        if not change and _numbers(removed) == _numbers(added):
            return UNCHANGED
        whole: Any = {"$add": [_or_zero(self.path), *({"$literal": term} for term in change)]}
        checked = any(map(self.number.could_overflow, change))
        return BlindUpdate({self.path: (self.number.expression if checked else self.number.converted)(whole)})

    def finish_expressions(self, state: Mapping[str, str]) -> Raw:
        return {self.path: self.number.expression({"$ifNull": [state["sum"], 0]})}


class NumberAverage(NumberSum):
    """The average of the numbers among the contributions; null where there is none.

    Its sum and count lie in the target's reserved sub-document; an average of averages is not an average.
    """

    def __init__(self, field: TargetField, operand: Operand) -> None:
        super().__init__(field, operand)
        self.state_path = f"{RESERVED}.state.{field.path}"
        self._sum, self._count = f"${self.state_path}.sum", f"${self.state_path}.count"
        self._following = {self.path: self.number.quotient_expression(self._sum, self._count)}

    def empty(self) -> State:
        return {"sum": 0, "count": 0}

    def accumulators(self) -> Mapping[str, Accumulator]:
        counted = {"$sum": {"$cond": [{"$isNumber": self.expression()}, 1, 0]}}
        return {**super().accumulators(), "count": Accumulator(counted, total)}

    def finish(self, state: State) -> Values:
        if not state["count"]:
            return {self.path: None, self.state_path: dict(self.empty())}
        return {self.path: self.number.quotient(state["sum"], state["count"]), self.state_path: dict(state)}

    def difference(self, state: State, removed: Sequence[Any], added: Sequence[Any]) -> State | Recompute:
        whole = sum_after(state["sum"], removed, added)
        if whole is None:
            return RECOMPUTE
        return {"sum": whole, "count": state["count"] + _numbers(added) - _numbers(removed)}

    def stored_state(self, target: Raw) -> State | None:
        stored = value_at(target, self.state_path)
        whole = isinstance(stored, dict) and is_number(stored.get("sum")) and is_number(stored.get("count"))
        return stored if whole else None

    def blind(self, removed: Sequence[Any], added: Sequence[Any]) -> BlindUpdate | Recompute:
        change = terms(removed, added)
        # A sum beyond 64 bits is a double, from which a large integer may not be subtracted.
        if change is None or any(is_number(each) and _is_large(each) for each in removed):
            return RECOMPUTE
        numbers = _numbers(added) - _numbers(removed)
        if not change and not numbers:
            return UNCHANGED
        whole: Any = {"$add": [{"$ifNull": [self._sum, 0]}, *({"$literal": term} for term in change)]}
        count = {"$add": [{"$ifNull": [self._count, 0]}, numbers]}
        return BlindUpdate({self._sum[1:]: self.number.held(whole), self._count[1:]: count}, self._following)

    def finish_expressions(self, state: Mapping[str, str]) -> Raw:
        whole, count = {"$ifNull": [state["sum"], 0]}, {"$ifNull": [state["count"], 0]}
        return {
            self.path: self.number.quotient_expression(whole, count),
            f"{self.state_path}.sum": self.number.held(whole),
            f"{self.state_path}.count": count,
        }


def _is_large(number: Any) -> bool:
    return isinstance(number, int) and abs(number) >= DOUBLE_EXACT_MAX


def _numbers(contributions: Sequence[Any]) -> int:
    return sum(map(is_number, contributions))


class Extreme(SingleValue):
    """The least or greatest contribution, in the server's order; null where there is none."""

    entry = "extreme"

    def __init__(self, field: TargetField, operand: Operand, operator: str) -> None:
        super().__init__(field, operand)
        self.operator = operator
        self._better = least if operator == "$min" else greatest

    def accumulators(self) -> Mapping[str, Accumulator]:
        return {"extreme": Accumulator({self.operator: self.expression()}, self._better)}

    def difference(self, state: State, removed: Sequence[Any], added: Sequence[Any]) -> State | Recompute:
        extreme = state["extreme"]
        left = reduce(self._better, removed, None)
        if left is not None and order_key(self._better(left, extreme)) == order_key(left):
            return RECOMPUTE
        return {"extreme": reduce(self._better, added, extreme)}

    def first(self) -> list[Raw] | None:
        path = self.operand.path
        if not path:
            return None
        return [
            # Servers differ in whether a path into an array of other values is null; to none it exists.
            {"$match": {path: {"$exists": True, "$ne": None}}},
            {"$sort": {path: 1 if self.operator == "$min" else -1}},
            {"$limit": 1},
        ]

    def index_keys(self) -> list[tuple[str, int]]:
        return _ascending(self.operand.path)

    def blind(self, removed: Sequence[Any], added: Sequence[Any]) -> BlindUpdate | Recompute:
        if any(value is not None for value in removed):
            return RECOMPUTE
        candidates = [{"$literal": value} for value in added if value is not None]
        return (
            BlindUpdate({self.path: {self.operator: [f"${self.path}", *candidates]}})
            if candidates
            else UNCHANGED
        )


def _ascending(path: str) -> list[tuple[str, int]]:
    return [(path, ASCENDING)] if path else []


class Ranked(Aggregate):
    """The first `size` entries of all sources, in an order of their own."""

    size: int

    @abstractmethod
    def cut(self, entries: Sequence[Any]) -> list[Any]:
        """Return the first of these entries."""

    @abstractmethod
    def accumulator(self) -> Raw:
        """Return the accumulator of the first entries."""

    def accumulators(self) -> Mapping[str, Accumulator]:
        return {"entries": Accumulator(self.accumulator(), lambda one, other: self.cut([*one, *other]))}

    def empty(self) -> State:
        return {"entries": []}

    def finish(self, state: State) -> Values:
        return {self.path: state["entries"]}


class DistinctValues(Ranked):
    """The first distinct values, sorted; each contribution is a list, and nulls are left out."""

    def __init__(self, field: TargetField, operand: Operand, size: int) -> None:
        super().__init__(field, operand)
        self.size = size

    def contribution(self, source: Any) -> Any:
        return _values(super().contribution(source))

    def expression(self) -> Any:
        value = self.operand.expression
        values = {"$cond": [{"$isArray": [value]}, value, [value]]}
        return {"$filter": {"input": values, "cond": {"$ne": ["$$this", None]}}}

    def cut(self, entries: Sequence[Any]) -> list[Any]:
        distinct = {freeze(each): each for each in entries}
        return sorted(distinct.values(), key=order_key)[: self.size]

    def difference(self, state: State, removed: Sequence[Any], added: Sequence[Any]) -> State | Recompute:
        # Whether another source still has a value that leaves, only the sources can tell.
        if any(removed):
            return RECOMPUTE
        return {"entries": self.cut([*state["entries"], *(each for values in added for each in values)])}

    def accumulator(self) -> Raw:
        return {"$firstN": {"n": self.size, "input": "$_id.value"}}

    def first(self) -> list[Raw]:
        # Any source may have one of them.
        return []

    def grouping(self) -> list[Raw]:
        # A set as an accumulator would hold all values of a target.
        return [
            {"$project": {"_id": 0, KEY: 1, "value": self.expression()}},
            {"$unwind": "$value"},
            {"$group": {"_id": {KEY: f"${KEY}", "value": "$value"}}},
            {"$sort": {"_id.value": 1}},
            {"$group": {"_id": f"$_id.{KEY}", "entries": self.accumulator()}},
        ]

    def index_keys(self) -> list[tuple[str, int]]:
        return _ascending(self.operand.path)

    def blind(self, removed: Sequence[Any], added: Sequence[Any]) -> BlindUpdate | Recompute:
        new = {freeze(each): each for values in added for each in values}
        if any(freeze(each) not in new for values in removed for each in values):
            return RECOMPUTE
        if not new:
            return UNCHANGED
        every = {"$setUnion": [{"$ifNull": [f"${self.path}", []]}, {"$literal": list(new.values())}]}
        ordered = {"$sortArray": {"input": every, "sortBy": 1}}
        return BlindUpdate({self.path: {"$slice": [ordered, self.size]}})


def _values(value: Any) -> Any:
    if value is SERVER:
        return value
    return [each for each in (value if isinstance(value, list) else [value]) if each is not None]


class FirstDocuments(Ranked):
    """Cards of the first `size` sources by a sort, ties broken by `_id`.

    A card holds the source's `_id` and `fields`, by the names in the card.
    An entry holds the card and the sort keys: a source may change its place without its card.
    """

    def __init__(
        self,
        field: TargetField,
        source: str,
        fields: Mapping[str, str],
        sort: Sequence[tuple[str, int]],
        size: int,
    ) -> None:
        self.card = {"_id": "_id", **fields}
        self.sort = list(sort) if "_id" in dict(sort) else [*sort, ("_id", 1)]
        self.size = size
        self._getters = [getter(path) for path, _ in self.sort]
        card = {name: expression_of(path) for name, path in self.card.items()}
        by = [{"$ifNull": [expression_of(path), None]} for path, _ in self.sort]
        reads = frozenset({*self.card.values(), *(path for path, _ in self.sort)})
        super().__init__(field, Operand({"card": card, "by": by}, self._entry, reads, label=source))
        self._embedded_sort = self._sort_of_cards()

    def _sort_of_cards(self) -> dict[str, int] | None:
        """Return the sort by the names in the card; None where the cards do not hold all of its keys."""
        in_card = {path: name for name, path in self.card.items()}
        if not dict(self.sort).keys() <= in_card.keys():
            return None
        return {in_card[path]: direction for path, direction in self.sort}

    def _entry(self, source: Raw) -> Raw:
        card = {name: source[path] for name, path in self.card.items() if path in source}
        return {"card": card, "by": [get(source) for get in self._getters]}

    def cut(self, entries: Sequence[Any]) -> list[Any]:
        entries = list(entries)
        for number, (_, direction) in reversed([*enumerate(self.sort)]):
            entries.sort(key=lambda entry: order_key(entry["by"][number]), reverse=direction == -1)
        return entries[: self.size]

    def finish(self, state: State) -> Values:
        return {self.path: [entry["card"] for entry in state["entries"]]}

    def difference(self, state: State, removed: Sequence[Any], added: Sequence[Any]) -> State | Recompute:
        return RECOMPUTE if removed else {"entries": self.cut([*state["entries"], *added])}

    def accumulator(self) -> Raw:
        return {"$topN": {"n": self.size, "sortBy": dict(self.sort), "output": self.expression()}}

    def first(self) -> list[Raw]:
        return [{"$sort": dict(self.sort)}, {"$limit": self.size}]

    @property
    def is_ranked(self) -> bool:
        return True

    def index_keys(self) -> list[tuple[str, int]]:
        return self.sort

    def blind(self, removed: Sequence[Any], added: Sequence[Any]) -> BlindUpdate | Recompute:
        if removed or self._embedded_sort is None:
            return RECOMPUTE
        cards = [entry["card"] for entry in added]
        ids = {"$literal": [card["_id"] for card in cards]}
        # A retried insert finds its card there already.
        others = {
            "$filter": {
                "input": {"$ifNull": [f"${self.path}", []]},
                "as": "item",
                "cond": {"$not": [{"$in": ["$$item._id", ids]}]},
            }
        }
        merged = {"$concatArrays": [others, {"$literal": cards}]}
        ordered = {"$sortArray": {"input": merged, "sortBy": self._embedded_sort}}
        return BlindUpdate({self.path: {"$slice": [ordered, self.size]}}) if cards else UNCHANGED
