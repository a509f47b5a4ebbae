"""The workload file: what is written is what is read, and a damaged file is refused."""

from __future__ import annotations

import datetime as dt
import uuid
from pathlib import Path

import pytest
from bson import Binary, Decimal128, Int64, ObjectId, Regex

from treadle.advisor.loop import workload_file
from treadle.advisor.loop.results import (
    Copied,
    Measured,
    RequestResult,
    Side,
    TrialReport,
    TrialResult,
    WorkloadSummary,
    report_from_json,
)
from treadle.advisor.loop.values import replaced, shape, values
from treadle.advisor.loop.workload_file import Request
from treadle.errors import UsageError

STARTED = dt.datetime(2026, 5, 1, 12, tzinfo=dt.UTC)


def write(path: Path, *requests: Request, end: bool = True) -> Path:
    lines = [workload_file.header_line("shop", STARTED), *(each.as_line() for each in requests)]
    lines += [workload_file.end_line(seconds=60.0, operations=len(requests), lost=0)] if end else []
    path.write_text("\n".join(lines) + "\n")
    return path


def test_every_type_comes_back_as_it_was(tmp_path):
    body = {
        "filter": {
            "_id": ObjectId(),
            "n": {"$gte": 3, "$lt": Int64(2**40)},
            "x": 1.0,
            "price": Decimal128("1.10"),
            "when": dt.datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=dt.UTC),
            "key": Binary.from_uuid(uuid.uuid4()),
            "name": Regex("^a", "i"),
            "line": "two\nlines",
        },
        "sort": {"b": -1, "a": 1},
        "limit": 5,
    }
    request = Request("find", "orders", body, 1.5, 2.0, 10, 5, 300, "IXSCAN { a: 1 }", 2)
    (read,) = workload_file.read(write(tmp_path / "w", request))
    assert request == read
    assert isinstance(read.body["filter"]["n"]["$lt"], Int64)
    assert isinstance(read.body["filter"]["x"], float)
    assert ["b", "a"] == list(read.body["sort"])


def test_a_recording_that_was_killed_is_usable(tmp_path):
    path = write(tmp_path / "w", Request("count", "orders", {"query": {"a": 1}}, 3.0), end=False)
    with path.open("a") as file:
        file.write('{"op": "find", "in"')
    workload = workload_file.read(path)
    assert 1 == len(list(workload))
    assert WorkloadSummary(3.0, 1, 1, 0, False) == workload.summary()


def test_the_summary_counts_reads_and_writes(tmp_path):
    path = write(
        tmp_path / "w",
        Request("find", "orders"),
        Request("insert", "orders", {"document": {"_id": 1}}),
        Request("modify", "orders", {"query": {}}),
    )
    assert WorkloadSummary(60.0, 3, 1, 2, True) == workload_file.read(path).summary()


@pytest.mark.parametrize(
    "text",
    ["", "[1]", '{"op": "query", "ns": "shop.orders"}', '{"treadle_workload": 2}', '{"treadle_workload": 1}'],
)
def test_what_is_no_workload_is_refused(tmp_path, text):
    path = tmp_path / "w"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        workload_file.read(path)
    assert "workload-invalid" == refused.value.code


def test_a_damaged_line_is_named(tmp_path):
    path = write(tmp_path / "w", Request("find", "orders"))
    path.write_text(path.read_text() + "what?\n")
    with pytest.raises(UsageError, match="line 4"):
        list(workload_file.read(path))


def test_requests_of_one_shape_differ_in_values_only():
    def find(value: object, limit: int = 5) -> str:
        return shape(Request("find", "reviews", {"filter": {"product_id": value}, "limit": limit}))

    assert find(1) == find("a") == find(ObjectId())
    assert find({"$in": [1, 2]}) == find({"$in": [1, 2, 3]})
    assert find(1) != find({"$gt": 1})
    assert find(1) != find(1, limit=6)


def test_values_in_pipelines_are_found_and_structure_stays():
    pipeline = [
        {"$match": {"a": "secret", "$expr": {"$eq": ["$b", "hidden"]}, "n": {"$in": [7, 8]}}},
        {"$lookup": {"from": "customers", "localField": "c", "foreignField": "_id", "as": "c"}},
        {"$group": {"_id": {"$dateTrunc": {"date": "$t", "unit": "hour"}}, "n": {"$sum": 1}}},
        {"$project": {"_id": 0, "tag": {"$literal": "mine"}}},
        {"$limit": 50},
    ]
    request = Request("aggregate", "orders", {"pipeline": pipeline})
    assert [("a", "secret"), ("", "hidden"), ("n", 7), ("n", 8), ("", "mine")] == list(values(request))
    text = str(replaced(request, lambda path, value: "?").body)
    assert not [word for word in ("secret", "hidden", "mine", "7", "8") if word in text]
    assert all(word in text for word in ("customers", "hour", "$b", "50", "'$sum': 1"))


def test_values_of_writes_are_found():
    update = {
        "q": {"_id": 5},
        "u": {
            "$set": {"name": "secret"},
            "$inc": {"n": 1},
            "$push": {"tags": {"$each": ["x"], "$slice": -5}},
        },
    }
    found = list(values(Request("update", "orders", update)))
    assert [("_id", 5), ("name", "secret"), ("tags", "x")] == found
    insert = Request("insert", "orders", {"document": {"_id": 1, "lines": [{"sku": "s"}]}})
    assert [("_id", 1), ("lines.sku", "s")] == list(values(insert))


def test_a_report_goes_to_json_and_comes_back():
    figure = Measured(2.0, 1.5, 2.5)
    side = Side(figure, figure, 10.0, 200.0, 1.0)
    request = RequestResult("read", "a", "b", 5, 0.1, 5, 5, 0, side, side, figure)
    result = TrialResult("computed", "reviews.product_id", "…", "do", "why", (request,), figure)
    report = TrialReport(
        "shop", "8.0.1", WorkloadSummary(1, 2, 1, 1), (Copied("a", 1, 2),), (result,), ("note",)
    )
    assert report == report_from_json(report.as_json())
    assert "computed@reviews.product_id" == result.key
    assert figure.holds(1.5)
    assert not figure.holds(2.6)
    for damaged in ({}, {"schema": "treadle-trial/1"}):
        with pytest.raises(UsageError):
            report_from_json(damaged)
