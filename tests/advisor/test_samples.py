"""A sample that is sent whole shows what the server would have said about it."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from bson import Binary, Code, DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp

from tests.advisor.test_truths import airline, relations
from treadle.advisor import Limits, samples, scan, structure
from treadle.advisor.reading import Reader

VALUES: list[Any] = [
    *("text", 1, Int64(1), 1.5, True, None, Decimal128("1.5"), ObjectId(), {"a": 1}, [1], b"x"),
    *(Binary(b"x" * 16, 4), Regex("a"), Code("f()"), Timestamp(1, 1), MinKey(), MaxKey(), 2**40),
    *(DBRef("people", 1), dt.datetime(2025, 1, 1, tzinfo=dt.UTC)),
]


def test_types_and_shapes_are_named_as_the_server_names_them(database: Any) -> None:
    rows = [{"_id": n, "value": value} for n, value in enumerate(VALUES)]
    rows += [{"owner_id": n, "text": "x", "_treadle": {}} for n in range(30)]
    database["things"].insert_many(rows)
    reader = Reader.on(database, 10, False)
    documents = reader.aggregate("things", [])
    ours, keys = samples.shape_rows(documents, 6)
    pipeline = structure.shapes_pipeline([], 1_000, keys)
    assert {"owner_id", "value"} == set(keys)
    theirs = reader.aggregate("things", pipeline)
    shapes = [sorted(structure.read_shapes(each), key=str) for each in (theirs, ours)]
    assert shapes[0] == shapes[1]
    values = [sorted(map(repr, structure.read_values(each, keys)["value"])) for each in (theirs, ours)]
    assert values[0] == values[1]


@pytest.mark.parametrize("padding", [0, 2_000])
def test_a_large_collection_tells_the_same_whole_or_taken_apart(padding: int, database: Any) -> None:
    """Small documents are sent, larger ones are taken apart by the server."""
    airline(database)
    database["flights"].update_many({}, {"$set": {"log": "x" * padding}})
    report = scan(database, limits=Limits(structure_documents=300, sample_documents=250))
    assert {"airlines", "airports", "planes"} == {parent for _, _, parent, _ in relations(report)}
    facts = report.scan.collections["flights"]
    assert {"_id", "carrier", "tailnum", "origin", "dest", "delay", "gate", "log"} == set(facts.fields)
    assert 250 == pytest.approx(facts.looked_at, rel=0.4)
