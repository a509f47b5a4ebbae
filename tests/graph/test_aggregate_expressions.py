"""Aggregates on a server: its expressions, accumulators and blind updates agree with Python.

Covers: graph/aggregate, graph/numbers, query/keys
"""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest
from bson import Decimal128

from treadle.graph.aggregate import (
    RECOMPUTE,
    DistinctValues,
    Extreme,
    FirstDocuments,
    NumberAverage,
    NumberSum,
    Operand,
    SourceCount,
    TargetField,
)
from treadle.graph.numbers import is_number
from treadle.query.keys import KEY

N = Operand("$n", lambda source: source.get("n"), frozenset({"n"}), "n", "Sale.n")


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same; numbers by value, NaN is NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(same(one.get(key), other.get(key)) for key in one.keys() | other.keys())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if is_number(one) and is_number(other):
        one, other = (Decimal(str(each)) for each in (one, other))
        return one.compare(other).is_nan() or abs(one - other) <= abs(one) * Decimal("1e-14")
    return type(one) is type(other) and one == other


def field(python: type) -> TargetField:
    return TargetField("Shop.value", "value", python, lambda value: True)


AGGREGATES = {
    "count": SourceCount(field(int)),
    "sum": NumberSum(field(Decimal), N),
    "average": NumberAverage(field(Decimal), N),
    "float average": NumberAverage(field(float), N),
    "min": Extreme(field(int), N, "$min"),
    "max": Extreme(field(int), N, "$max"),
    "distinct": DistinctValues(field(int), N, 3),
    "first": FirstDocuments(field(int), "Sale", {"n": "n", "said": "text"}, [("n", -1)], 3),
}
NUMBERS = [0, 1, -7, 2**40, 2**60, 2.5, -0.25, Decimal128("1.10"), Decimal128("-3")]
ODD = [None, "text", True, [1, None, 2], {"a": 1}, float("nan"), Decimal128("NaN")]


def with_sources(database: Any, values: list[Any]) -> list[dict[str, Any]]:
    sources = [{"_id": number, "n": value, "text": str(number)} for number, value in enumerate(values)]
    del sources[0]["n"]
    database["sources"].insert_many(sources)
    return sources


@pytest.mark.parametrize("name", AGGREGATES)
def test_a_contribution_is_what_the_expression_gives(database, name):
    sources = with_sources(database, ["missing", *NUMBERS, *ODD])
    value = AGGREGATES[name]
    rows = database["sources"].aggregate(
        [{"$sort": {"_id": 1}}, {"$project": {"contribution": value.expression()}}]
    )
    for source, row in zip(sources, rows, strict=True):
        assert same(value.contribution(source), row.get("contribution")), source


def grouped(database: Any, value: Any, chosen: dict[str, Any], first: list[Any] | None = None) -> Any:
    """The state of the sources that match, as the server computes it."""
    accumulators = {name: each.expression for name, each in value.accumulators().items()}
    stages = value.grouping() or [{"$group": {"_id": f"${KEY}", **accumulators}}]
    rows = database["sources"].aggregate(
        [{"$match": chosen}, *(first or []), {"$set": {KEY: {"$literal": 1}}}, *stages]
    )
    return next(({name: row[name] for name in accumulators} for row in rows), value.empty())


@pytest.mark.parametrize("name", AGGREGATES)
def test_the_states_of_parts_merge_to_the_state_of_all(database, name):
    value, choice = AGGREGATES[name], random.Random(1)
    with_sources(database, ["missing", *NUMBERS, *ODD[:3]])
    whole = value.finish(grouped(database, value, {}))
    for _ in range(5):
        some = {"_id": {"$in": choice.sample(range(len(NUMBERS) + 4), 5)}}
        parts = [grouped(database, value, each) for each in (some, {"$nor": [some]})]
        assert same(whole, value.finish(value.merge(parts)))


@pytest.mark.parametrize("name", ["min", "max", "distinct", "first"])
def test_the_first_sources_decide_the_value(database, name):
    value = AGGREGATES[name]
    with_sources(database, ["missing", *NUMBERS])
    assert same(grouped(database, value, {}), grouped(database, value, {}, value.first()))
    assert same(value.empty(), grouped(database, value, {"_id": -1}, value.first()))


@pytest.mark.parametrize("name", AGGREGATES)
def test_a_blind_update_is_what_a_recomputation_gives(database, name):
    """Or there is none; step by step, with sources that join, leave and change."""
    value, choice = AGGREGATES[name], random.Random(name)
    database["targets"].insert_one({"_id": 1})
    database["targets"].update_one({"_id": 1}, {"$set": value.finish(value.empty())})
    with_sources(database, ["missing", *NUMBERS])
    database["sources"].delete_many({})
    held: dict[int, dict[str, Any]] = {}
    blind = 0
    for number in range(60):
        removed, added = [], []
        if held and choice.random() < 0.3:
            left = held.pop(choice.choice([*held]))
            database["sources"].delete_one({"_id": left["_id"]})
            removed.append(left)
        if choice.random() < 0.8:
            # A sum of doubles and large integers is rounded, by the server as well.
            pool = [
                each for each in NUMBERS if "average" not in name or not is_number(each) or abs_small(each)
            ]
            new = {"_id": number, "n": choice.choice([*pool, None]), "text": "new"}
            database["sources"].insert_one(new)
            held[number] = new
            added.append(new)
        update = value.blind([*map(value.contribution, removed)], [*map(value.contribution, added)])
        exact = value.finish(grouped(database, value, {}))
        if update is RECOMPUTE:
            stages = [{"$set": {path: {"$literal": each} for path, each in exact.items()}}]
        else:
            blind += 1
            stages = [{"$set": dict(each)} for each in update if each]
        if stages:
            database["targets"].update_one({"_id": 1}, stages)
        stored = database["targets"].find_one()
        for path, expected in exact.items():
            found = stored
            for step in path.split("."):
                found = found[step]
            if path == "value" and name != "float average":
                assert same(expected, found), (number, removed, added)
            elif is_number(expected):
                assert abs(float(str(expected)) - float(str(found))) < 1e-6
    assert blind > 20


def abs_small(number: Any) -> bool:
    return abs(float(str(number))) < 2**50


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, each in AGGREGATES.items()
        if each.finish_expressions({"sum": "", "count": "", "extreme": ""})
    ],
)
def test_the_server_finishes_as_python_does(database, name):
    value = AGGREGATES[name]
    with_sources(database, ["missing", *NUMBERS])
    for chosen in ({}, {"n": None}, {"_id": -1}):
        state = grouped(database, value, chosen)
        database["states"].delete_many({})
        database["states"].insert_one({"state": dict(state)})
        expressions = value.finish_expressions({column: f"$state.{column}" for column in state})
        (row,) = database["states"].aggregate([{"$replaceWith": {"_id": 1, "out": wrapped(expressions)}}])
        found = {each["path"]: each.get("value") for each in row["out"]}
        for path, expected in value.finish(state).items():
            if not isinstance(expected, dict):
                assert same(expected, found[path]), (path, chosen)


def wrapped(expressions: dict[str, Any]) -> list[Any]:
    """Expressions by dotted path, which no document can name by themselves."""
    return [{"path": {"$literal": path}, "value": each} for path, each in expressions.items()]
