"""The laws of aggregates, without a server: `merge`, `difference`, `finish` and `refuse`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from bson import Decimal128
from hypothesis import given
from hypothesis import strategies as st

from treadle.graph.aggregate import (
    RECOMPUTE,
    SERVER,
    Accumulator,
    Aggregate,
    DistinctValues,
    Extreme,
    FirstDocuments,
    NumberAverage,
    NumberSum,
    Operand,
    SourceCount,
    TargetField,
)

INT64 = 2**63


def field(python: type = int, takes: Callable[[Any], bool] = lambda value: True) -> TargetField:
    return TargetField("Shop.value", "value", python, takes)


N = Operand("$n", lambda source: source.get("n"), frozenset({"n"}), "n", "Sale.n")


class Case(NamedTuple):
    """An aggregate, and what a `$group` or `first` gives of some sources: an oracle in plain Python."""

    aggregate: Aggregate
    state: Callable[[Sequence[Any]], Any]


def numbers(sources: Sequence[Any]) -> list[Any]:
    return [each["n"] for each in sources if each["n"] is not None]


def summed(sources: Sequence[Any]) -> Any:
    some = numbers(sources)
    if any(isinstance(each, Decimal128) for each in some):
        return Decimal128(sum((each.to_decimal() for each in some), Decimal(0)))
    return float(sum(map(Fraction, some))) if any(isinstance(each, float) for each in some) else sum(some)


def ranked(sources: Sequence[Any]) -> list[Any]:
    return sorted(sources, key=lambda each: (each["n"] is not None, each["n"], -each["_id"]), reverse=True)[
        :3
    ]


FIRST = FirstDocuments(field(), "Sale", {"n": "n"}, [("n", -1)], 3)
HIDDEN = FirstDocuments(field(), "Sale", {"_id": "_id"}, [("n", -1)], 3)
INTEGERS = {
    "count": Case(SourceCount(field()), lambda some: {"count": len(some)}),
    "sum": Case(NumberSum(field(), N), lambda some: {"sum": summed(some)}),
    "average": Case(
        NumberAverage(field(float), N), lambda some: {"sum": summed(some), "count": len(numbers(some))}
    ),
    "min": Case(Extreme(field(), N, "$min"), lambda some: {"extreme": min(numbers(some), default=None)}),
    "max": Case(Extreme(field(), N, "$max"), lambda some: {"extreme": max(numbers(some), default=None)}),
    "distinct": Case(DistinctValues(field(), N, 3), lambda some: {"entries": sorted({*numbers(some)})[:3]}),
    "first": Case(FIRST, lambda some: {"entries": [FIRST.contribution(each) for each in ranked(some)]}),
    "first hidden": Case(
        HIDDEN, lambda some: {"entries": [HIDDEN.contribution(each) for each in ranked(some)]}
    ),
}
DECIMALS = {
    "sum": Case(NumberSum(field(Decimal), N), lambda some: {"sum": summed(some)}),
    "average": Case(
        NumberAverage(field(Decimal), N), lambda some: {"sum": summed(some), "count": len(numbers(some))}
    ),
}


def sources_of(values: st.SearchStrategy[Any], most: int = 12) -> st.SearchStrategy[list[dict[str, Any]]]:
    lists = st.lists(st.one_of(st.none(), values), max_size=most)
    return lists.map(lambda each: [{"_id": number, "n": value} for number, value in enumerate(each)])


WHOLE = sources_of(st.one_of(st.integers(-9, 9), st.integers(-(2**59), 2**59)))
SHORT_DECIMALS = st.decimals(-(10**9), 10**9, places=3).map(Decimal128)


@pytest.mark.parametrize("name", INTEGERS)
@given(data=st.data())
def test_the_merge_of_any_partition_is_the_whole(name, data):
    case = INTEGERS[name]
    sources = data.draw(WHOLE)
    parts = [[] for _ in range(data.draw(st.integers(1, 4)))]
    for each in sources:
        parts[data.draw(st.integers(0, len(parts) - 1))].append(each)
    merged = case.aggregate.merge([case.state(part) for part in parts])
    assert case.aggregate.finish(case.state(sources)) == case.aggregate.finish(merged)


def changed(data: Any, sources: Sequence[Any], values: st.SearchStrategy[Any]) -> tuple[list[Any], Any, Any]:
    """Some sources left, some changed, and some joined: the sources after, and what left and joined."""
    leaving = [each for each in sources if data.draw(st.booleans())]
    kept = [each for each in sources if each not in leaving]
    again = [{**each, "n": data.draw(values)} for each in leaving if data.draw(st.booleans())]
    new = [{"_id": 100 + number, "n": data.draw(values)} for number in range(data.draw(st.integers(0, 3)))]
    return [*kept, *again, *new], leaving, [*again, *new]


@pytest.mark.parametrize("name", INTEGERS)
@given(data=st.data())
def test_a_difference_is_what_a_recomputation_gives(name, data):
    case = INTEGERS[name]
    contribution = case.aggregate.contribution
    before = data.draw(WHOLE)
    after, left, joined = changed(data, before, st.one_of(st.none(), st.integers(-9, 9)))
    state = case.aggregate.difference(
        case.state(before), [*map(contribution, left)], [*map(contribution, joined)]
    )
    if name in ("count", "sum", "average"):
        assert state is not RECOMPUTE, "integers never need one"
    if state is not RECOMPUTE:
        assert case.aggregate.finish(case.state(after)) == case.aggregate.finish(state)


@pytest.mark.parametrize("name", INTEGERS)
@given(data=st.data())
def test_a_stored_target_stands_for_its_state(name, data):
    """What is read off a target takes part in a difference as the state does that was stored."""
    case = INTEGERS[name]
    contribution = case.aggregate.contribution
    before = data.draw(WHOLE)
    target: dict[str, Any] = {}
    for path, value in case.aggregate.finish(case.state(before)).items():
        *way, last = path.split(".")
        holder = target
        for step in way:
            holder = holder.setdefault(step, {})
        holder[last] = value
    stored = case.aggregate.stored_state(target)
    if stored is None:
        assert case.aggregate.first() is not None, "nothing but an index finds it without reading all sources"
        return
    after, left, joined = changed(data, before, st.integers(-9, 9))
    state = case.aggregate.difference(stored, [*map(contribution, left)], [*map(contribution, joined)])
    if state is not RECOMPUTE:
        assert case.aggregate.finish(case.state(after)) == case.aggregate.finish(state)


@pytest.mark.parametrize("name", DECIMALS)
@given(data=st.data())
def test_decimals_are_added_exactly(name, data):
    case = DECIMALS[name]
    contribution = case.aggregate.contribution
    before = data.draw(sources_of(SHORT_DECIMALS))
    after, left, joined = changed(data, before, SHORT_DECIMALS)
    state = case.aggregate.difference(
        case.state(before), [*map(contribution, left)], [*map(contribution, joined)]
    )
    assert state is not RECOMPUTE
    exact, found = (case.aggregate.finish(each)["value"] for each in (case.state(after), state))
    assert (exact is None) is (found is None)
    assert exact is None or exact.to_decimal() == found.to_decimal()


@given(st.lists(st.tuples(st.floats(-1e15, 1e15), st.integers(0, 5)), max_size=60))
def test_a_sum_of_floats_stays_within_a_relative_1e_9(steps):
    """Over many differences, in which values join and leave again, or it asks for a recomputation."""
    case = NumberSum(field(float), N)
    held: list[float] = []
    state: Any = {"sum": 0}
    for value, leaving in steps:
        removed = [held.pop(0) for _ in range(min(leaving, len(held)))]
        held.append(value)
        state = case.difference(state, removed, [value])
        exact = math.fsum(held)
        if state is RECOMPUTE:
            state = {"sum": exact}
        assert math.isclose(exact, case.finish(state)["value"], rel_tol=1e-9, abs_tol=0)


def test_one_float_of_many_leaves_without_a_recomputation():
    case = NumberAverage(field(float), N)
    assert {"sum": 999.5, "count": 3} == case.difference({"sum": 1000.0, "count": 4}, [0.5], [])
    assert RECOMPUTE is case.difference({"sum": 1000.0, "count": 2}, [999.9], [])


@pytest.mark.parametrize(
    ("state", "removed", "added"),
    [
        (INT64 - 1, [], [1]),
        (Decimal128("9" * 34), [], [Decimal128("0.1")]),
        (1e300, [], [float("inf")]),
        (float("nan"), [1], []),
        (Decimal128("1"), [], [0.1]),
    ],
)
def test_a_sum_that_could_be_inexact_is_recomputed(state, removed, added):
    assert RECOMPUTE is NumberSum(field(Decimal), N).difference({"sum": state}, removed, added)


def test_an_average_keeps_its_sum_in_the_type_of_its_sources():
    """The sum of integers as a double forgot the small ones beside a large one (r06)."""
    case = NumberAverage(field(float), N)
    state = case.difference({"sum": 1, "count": 1}, [], [2**60])
    assert {"sum": 1 + 2**60, "count": 2} == state
    assert {"value": 1.0, "_treadle.state.value": {"sum": 1, "count": 1}} == case.finish(
        case.difference(state, [2**60], [])
    )


@pytest.mark.parametrize("name", INTEGERS)
def test_a_target_without_sources_stores_the_empty_value(name):
    case = INTEGERS[name]
    assert case.aggregate.finish(case.state([])) == case.aggregate.finish(case.aggregate.empty())
    assert case.aggregate.refuse(case.aggregate.finish(case.aggregate.empty())) is None


def test_zero_is_stored_in_the_type_of_the_field():
    assert Decimal128("0") == NumberSum(field(Decimal), N).finish({"sum": 0})["value"]
    zero = NumberSum(field(float), N).finish({"sum": 0})["value"]
    assert (0.0, float) == (zero, type(zero))


def test_an_accumulator_without_a_merge_cannot_be_declared():
    """One that is read in parts could not be put together: archives, versions and chunks need it."""
    with pytest.raises(TypeError):
        Accumulator({"$stdDevPop": "$n"})  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        type("Deviation", (Aggregate,), {})(field(), N)


def test_an_expression_is_the_servers_to_evaluate():
    by_server = Operand({"$multiply": ["$a", "$b"]}, None, frozenset({"a", "b"}))
    assert SERVER is NumberSum(field(), by_server).contribution({"a": 1, "b": 2})
    assert SERVER is DistinctValues(field(), by_server, 3).contribution({"a": 1, "b": 2})


# -- what a field cannot hold ------------------------------------------------------------------------


def is_int(value: Any) -> bool:
    return type(value) is int


def test_a_value_that_the_field_does_not_take_is_refused():
    largest = Extreme(field(takes=is_int), N, "$max")
    error = largest.refuse({"value": "many"})
    assert error is not None
    assert ("extreme-invalid", True) == (error.code, "Sale.n" in str(error))
    assert largest.refuse({"value": 3}) is largest.refuse({"value": None}) is None
    listed = DistinctValues(field(takes=lambda some: all(map(is_int, some))), N, 3)
    assert listed.refuse({"value": [1, "many"]}) is not None
    cards = FirstDocuments(
        field(takes=lambda some: all(is_int(each["n"]) for each in some)), "Sale", {"n": "n"}, [("n", 1)], 3
    )
    assert cards.refuse({"value": [{"_id": 1, "n": "many"}]}) is not None


@pytest.mark.parametrize(
    "aggregate",
    [
        Extreme(field(takes=is_int), N, "$max"),
        DistinctValues(field(takes=lambda some: all(map(is_int, some))), N, 3),
        FirstDocuments(
            field(takes=lambda some: all(is_int(each["n"]) for each in some)),
            "Sale",
            {"n": "n"},
            [("n", 1)],
            3,
        ),
    ],
    ids=lambda each: type(each).__name__,
)
def test_only_a_write_that_brings_such_a_value_is_to_blame(aggregate):
    hostile, harmless = (aggregate.contribution({"_id": 1, "n": value}) for value in ("many", 5))
    assert aggregate.blames([harmless, hostile])
    assert not aggregate.blames([harmless])
    assert not aggregate.blames([])


def test_a_small_number_is_not_to_blame_for_an_infinite_sum():
    case = NumberSum(field(Decimal, lambda value: value.to_decimal().is_finite()), N)
    assert case.refuse({"value": Decimal128("Infinity")}) is not None
    assert not case.blames([Decimal128("1")])
    assert case.blames([Decimal128("9E6144")])


def test_an_integer_beyond_64_bits_is_refused():
    case = NumberSum(field(int), N)
    error = case.refuse({"value": float(INT64)})
    assert error is not None
    assert "sum-too-large" == error.code
    assert case.refuse({"value": INT64 - 1}) is None
    assert case.refuse({"value": 2.0}) is None


# -- blind updates -----------------------------------------------------------------------------------


def test_a_source_that_does_not_change_the_maximum_still_writes_the_target():
    """A no-op update takes no lock, so a concurrent recomputation would not notice the source."""
    assert Extreme(field(), N, "$max").blind([], [1]).values
    assert NumberSum(field(), N).blind([], [0]).values
    assert not NumberSum(field(), N).blind([2], [2]).values
    assert not SourceCount(field()).blind([1], [1]).values


@pytest.mark.parametrize(
    ("aggregate", "removed", "added"),
    [
        (NumberSum(field(float), N), [0.5], []),
        (NumberAverage(field(float), N), [2**53], []),
        (NumberSum(field(), N), [], [2**62, 2**62]),
        (NumberSum(field(Decimal), N), [Decimal128("1E+30")], []),
        (Extreme(field(), N, "$min"), [1], [2]),
        (DistinctValues(field(), N, 3), [[1]], [[2]]),
        (FIRST, [FIRST.contribution({"_id": 1, "n": 1})], []),
        (HIDDEN, [], [HIDDEN.contribution({"_id": 1, "n": 1})]),
    ],
)
def test_a_target_is_not_changed_unread_where_that_could_be_wrong(aggregate, removed, added):
    assert RECOMPUTE is aggregate.blind(removed, added)


def test_a_deeply_nested_value_takes_no_longer_than_its_size():
    """Another program may store one; comparing it must not double with each level."""
    nested: Any = 1
    for _ in range(90):
        nested = {"a": nested}
    largest = Extreme(field(), N, "$max")
    assert {"extreme": nested} == largest.difference({"extreme": 5}, [], [nested])
