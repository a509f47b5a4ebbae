"""Filters and sorts in the form in which they are sent.

Covers: query/filters, query/updates.
"""

from __future__ import annotations

import enum
import re
import uuid
from datetime import date, timedelta
from decimal import Decimal
from typing import Annotated

import pytest
from bson import Decimal128, ObjectId
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator

from tests.query.models import Address, Order, Size, Task, codec_of, paths_of
from treadle import Unchecked, UsageError
from treadle.query.filters import confine, parse_condition, parse_filter, parse_match, sort_keys
from treadle.query.updates import parse_update

pytestmark = pytest.mark.quick
TEXT = "0123456789abcdef01234567"
ID = ObjectId(TEXT)


def parsed(filter, scope=None):
    return parse_filter(paths_of(Order), filter, scope)


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"status": "open"}, {"status": "open"}),
        ({"price": Decimal("1.5")}, {"price": Decimal128("1.5")}),
        ({"status": {"$in": {"a"}}}, {"status": {"$in": ["a"]}}),
        ({"status": re.compile("^a")}, {"status": re.compile("^a")}),
        ({"customerId": TEXT}, {"customerId": ID}),
        ({"customerId": {"$in": (TEXT, None)}}, {"customerId": {"$in": [ID, None]}}),
        ({"customerId": {"$not": {"$ne": TEXT}}}, {"customerId": {"$not": {"$ne": ID}}}),
        ({"customerId": {"$regex": TEXT}}, {"customerId": {"$regex": TEXT}}),
        ({"status": TEXT, "either": TEXT}, {"status": TEXT, "either": TEXT}),
        ({"tags": {"$all": [TEXT]}}, {"tags": {"$all": [ID]}}),
        ({"tags": [TEXT]}, {"tags": [ID]}),
        ({"lines": {"$elemMatch": {"product_id": TEXT}}}, {"lines": {"$elemMatch": {"product_id": ID}}}),
        ({"tags": {"$elemMatch": {"$eq": TEXT}}}, {"tags": {"$elemMatch": {"$eq": ID}}}),
        ({"tags": {"$all": [{"$elemMatch": {"$in": [TEXT]}}]}}, {"tags": {"$all": [{"$elemMatch": {"$in": [ID]}}]}}),
        (
            {"lines": {"$elemMatch": {"$or": [{"product_id": TEXT}, {"quantity": 1}]}}},
            {"lines": {"$elemMatch": {"$or": [{"product_id": ID}, {"quantity": 1}]}}},
        ),
        ({"$or": [{"customerId": TEXT}, {"$nor": ({"_id": TEXT},)}]}, {"$or": [{"customerId": ID}, {"$nor": [{"_id": ID}]}]}),
        ({"address": Address(zip="1", owner_id=ID)}, {"address": {"city": "", "zip": "1", "owner_id": ID}}),
        ({"address": {"owner_id": TEXT, "x.y": TEXT}}, {"address": {"owner_id": ID, "x.y": TEXT}}),
        ({"$expr": {"$eq": ["$nmae", Decimal(1)]}}, {"$expr": {"$eq": ["$nmae", Decimal128("1")]}}),
        ({"$text": {"$search": "x"}, "$comment": "c"}, {"$text": {"$search": "x"}, "$comment": "c"}),
    ],
    ids=str,
)  # fmt: skip
def test_values_are_sent_as_they_are_stored(filter, expected):
    assert expected == parsed(filter)


@pytest.mark.parametrize(
    "filter",
    [
        {"stauts": 1},
        {"$or": [{"status": 1}, {"$nor": [{"stauts": 1}]}]},
        {"lines": {"$elemMatch": {"quantty": 1}}},
        {"lines": {"$not": {"$elemMatch": {"quantty": 1}}}},
        {"lines": {"$elemMatch": {"$or": [{"quantty": 1}]}}},
    ],
)
def test_a_name_that_leads_nowhere_is_refused_at_any_depth(filter):
    with pytest.raises(UsageError) as caught:
        parsed(filter)
    assert "field-unknown" == caught.value.code
    assert filter == parsed(Unchecked(filter))


class Operator(enum.Enum):
    WHERE = "$where"


class Sneaky(BaseModel):
    model_config = {"extra": "allow"}


@pytest.mark.parametrize("operator", ["$where", "$function", "$accumulator"])
def test_operators_that_run_code_are_refused_wherever_they_stand(operator):
    code = {operator: "return true"}
    for filter in (
        code,
        {"$expr": code},
        {"$and": [{"$or": [code]}]},
        {"$and": [Sneaky(**code)]},
        {"$and": [{Operator.WHERE: 1}]},
        {"status": code},
        {"status": {"$not": code}},
        {"status": {"$in": [code]}},
        {"anything": {"a": [code]}},
        {"anything": {"$elemMatch": code}},
        {"lines": {"$elemMatch": {"$or": [code]}}},
        Unchecked({"a": [code]}),
    ):
        with pytest.raises(UsageError, match="runs code"):
            parsed(filter)


@pytest.mark.parametrize(
    "filter", [[], "a", 5, {1.5: 2}, {None: 1}, {"status": 2**64}, {"status": "\ud800"}, {"status": object()}]
)
def test_what_cannot_be_sent_is_refused(filter):
    with pytest.raises(UsageError):
        parsed(filter)


def test_a_filter_nested_without_end_is_refused():
    deep: dict = {"status": "a"}
    value: list = []
    for _ in range(5000):
        deep, value = {"$and": [deep]}, [value]
    for filter in (deep, {"anything": value}, {"anything": {"$in": value}}):
        with pytest.raises(UsageError) as caught:
            parsed(filter)
        assert "document-too-deep" == caught.value.code


def test_the_scope_stands_beside_the_callers_conditions():
    """Inside `$and` the server would not see that a partial index covers the query."""
    scope = {"kind": {"$eq": "book"}, "deletedAt": None}
    codec = codec_of(Order)
    assert {**scope, "status": "a"} == confine(codec, {"status": "a"}, scope)
    assert scope == confine(codec, {}, scope)
    clash = confine(codec, {"kind": "toy", "status": "a", "$and": [{"total": 1}]}, scope)
    assert {**scope, "status": "a", "$and": [{"total": 1}, {"kind": "toy"}]} == clash
    with_attribute = parsed({"specs.color": "red", "status": "a"}, {"total": 1})
    assert {"total", "status", "$and"} == with_attribute.keys()


def test_the_condition_of_a_declaration_may_name_anything():
    condition = parse_condition(codec_of(Order), {"nmae": Decimal(1), "customerId": TEXT, "specs.a": 1})
    assert (Decimal128("1"), ID) == (condition["nmae"], condition["customerId"])
    assert [{"specs": {"$elemMatch": {"k": "a", "v": {"$eq": 1}}}}] == condition["$and"]


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        ({"takes": timedelta(5)}, {"takes": 5}),
        ({"takes": {"$in": (timedelta(5), 6)}}, {"takes": {"$in": [5, 6]}}),
        ({"named.a": {"$gt": timedelta(5)}}, {"named.a": {"$gt": 5}}),
        ({"size": Size.LARGE}, {"size": "LARGE"}),
        ({"size": {"$nin": [Size.LARGE, "SMALL"]}}, {"size": {"$nin": ["LARGE", "SMALL"]}}),
    ],
    ids=str,
)
def test_a_filter_compares_with_what_a_serializer_stores(filter, expected):
    assert expected == parse_filter(paths_of(Task), filter)


def test_a_match_stage_sees_the_pairs_that_are_stored():
    stage = {"specs.k": "a", "customerId": TEXT}
    assert {"specs.k": "a", "customerId": ID} == parse_match(paths_of(Order), stage)


def test_keys_and_values_of_python_types():
    value = uuid.UUID(int=1)
    assert {"anything": {"2026-01-01": value}} == parsed({"anything": {date(2026, 1, 1): value}})


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        (None, None),
        ("-status", [("status", -1), ("_id", 1)]),
        (["+status", "-_id"], [("status", 1), ("_id", -1)]),
        ([("status", -1), "total"], [("status", -1), ("total", 1), ("_id", 1)]),
        ({"status": 1}, [("status", 1), ("_id", 1)]),
        ([], [("_id", 1)]),
    ],
)
def test_sorts_are_pymongos_with_ties_broken_by_id(sort, expected):
    assert expected == sort_keys(sort, paths_of(Order))
    if sort == "-status":
        assert [("status", -1)] == sort_keys(sort, tie_breaker=False)


@pytest.mark.parametrize(
    ("sort", "code"),
    [
        (5, "sort-invalid"), ([("status", 2)], "sort-invalid"), ("", "sort-invalid"), ("--status", "field-unknown"),
        ([(5, 1)], "sort-invalid"), ("$natural", "sort-invalid"), ("stauts", "field-unknown"),
        ("customer_id", "python-name"), ({"lines.quantty": 1}, "field-unknown"),
    ],
)  # fmt: skip
def test_a_sort_that_sorts_by_nothing_is_refused(sort, code):
    with pytest.raises(UsageError) as caught:
        sort_keys(sort, paths_of(Order))
    assert code == caught.value.code


class Point:
    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y


AsList = Annotated[
    Point,
    PlainValidator(lambda value: value if isinstance(value, Point) else Point(*value)),
    PlainSerializer(lambda point: [point.x, point.y], return_type=list[int]),
]


class Trip(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    start: AsList
    stops: list[AsList] = []
    by_name: dict[str, AsList] = {}


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"start": Point(1, 2)}, {"start": [1, 2]}),
        ({"start": {"$in": [Point(1, 2), None]}}, {"start": {"$in": [[1, 2], None]}}),
        ({"start": {"$ne": Point(1, 2)}}, {"start": {"$ne": [1, 2]}}),
        ({"stops": Point(1, 2)}, {"stops": [1, 2]}),
        ({"stops": [Point(1, 2)]}, {"stops": [[1, 2]]}),
        ({"by_name.home": Point(1, 2)}, {"by_name.home": [1, 2]}),
        ({"by_name": {"home": Point(1, 2)}}, {"by_name": {"home": [1, 2]}}),
        ({"by_name": {"$in": [{"home": Point(1, 2)}, None]}}, {"by_name": {"$in": [{"home": [1, 2]}, None]}}),
        ({"$or": [{"stops": {"$elemMatch": {"$eq": Point(1, 2)}}}]}, {"$or": [{"stops": {"$elemMatch": {"$eq": [1, 2]}}}]}),
    ],
)  # fmt: skip
def test_a_serializer_stores_a_value_in_every_position_of_a_filter(given, stored):
    assert stored == parse_filter(paths_of(Trip), given)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"$set": {"start": Point(1, 2)}}, {"$set": {"start": [1, 2]}}),
        ({"$set": {"start": [1, 2]}}, {"$set": {"start": [1, 2]}}),
        ({"$set": {"stops": [Point(1, 2)]}}, {"$set": {"stops": [[1, 2]]}}),
        ({"$set": {"by_name": {"home": Point(1, 2)}}}, {"$set": {"by_name": {"home": [1, 2]}}}),
        ({"$set": {"stops.0": Point(1, 2), "by_name.home": Point(1, 2)}}, {"$set": {"stops.0": [1, 2], "by_name.home": [1, 2]}}),
        ({"$push": {"stops": {"$each": [Point(1, 2)]}}}, {"$push": {"stops": {"$each": [[1, 2]]}}}),
        ({"$pull": {"stops": Point(1, 2)}}, {"$pull": {"stops": [1, 2]}}),
    ],
)  # fmt: skip
def test_a_serializer_stores_a_value_in_every_position_of_an_update(given, stored):
    assert stored == parse_update(paths_of(Trip), given).update
