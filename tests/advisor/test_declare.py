"""A model of any collection is Python that a dry set-up accepts, whatever its names and types."""

from __future__ import annotations

import datetime as dt
import uuid
import warnings
from typing import Any

import pytest
from bson import Code, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import Binary
from bson.decimal128 import Decimal128

from tests.advisor.test_rules import compiled
from treadle import Store
from treadle.advisor import Limits, scan
from treadle.advisor.declare import Source, class_name, commented, python_name, quoted

ODD: dict[str, list[dict[str, Any]]] = {
    "compound_ids": [{"_id": {"a": n, "b": "x"}, "v": n} for n in range(60)],
    "text_ids": [{"_id": f"t{n}", "v": n} for n in range(60)],
    "mixed_ids": [{"_id": n if n % 2 else str(n)} for n in range(60)],
    "uuids": [{"_id": Binary(uuid.UUID(int=n).bytes, 4), "other": Binary(b"x", 0)} for n in range(60)],
    "types": [
        {
            "decimal": Decimal128("1.5"),
            "stamp": Timestamp(1, n),
            "code": Code("x"),
            "least": MinKey(),
            "most": MaxKey(),
            "regex": Regex("a", "i"),
            "nothing": None,
            "nan": float("nan"),
            "big": 2**62,
            "at": dt.datetime(2025, 1, 1),
        }
        for n in range(60)
    ],
    "class": [
        {"class": "a", "None": 1, "self": 2, "schema": 3, "json": "x", "id": 4, "copy": 5} for _ in range(60)
    ],
    "Document": [
        {"Document": 1, "Field": 2, "datetime": dt.datetime(2025, 1, 1), "Id": ObjectId()} for _ in range(60)
    ],
    "123": [{"x": [[1, 2], [3]], "y": [], "z": [{"a": [1, 2]}], "123": 1} for _ in range(60)],
    "with\nnewline\t\"quotes\" '''": [
        {"a\nb": 1, "q\"'": 2, "\\": 3, "#c": 4, "$x": 5, "a.b": 6} for _ in range(60)
    ],
    "__v": [
        {"__v": 0, "_treadle": {"n": 1}, "_hidden": 1, "hidden": 2, "model_dump": 3, "": 4} for _ in range(60)
    ],
    "long": [{"k" * 300 + str(n % 3): 1, "é" * 50: 2} for n in range(60)],
    "wide": [{f"f{place}": place for place in range(300)} for _ in range(60)],
    "deep": [{"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": 1}}}}}}}} for _ in range(60)],
    "nothing": [{} for _ in range(60)],
}


@pytest.mark.parametrize(
    "limits", [Limits(), Limits(structure_documents=10, sample_documents=30)], ids=["whole", "sampled"]
)
def test_any_collection_can_be_declared(limits: Limits, database: Any) -> None:
    for name, documents in ODD.items():
        database[name].insert_many([dict(each) for each in documents])
    report = scan(database, limits=limits)
    assert () == report.failures
    assert set(ODD) == set(report.scan.collections)
    for facts in report.scan.collections.values():
        assert facts.skipped is None
        source = Source()
        source.document(facts)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Store(database, models=compiled(source.text())).setup(dry_run=True)


def test_names() -> None:
    assert "OrderItem" == class_name("shop.order_items")
    assert "Category" == class_name("categories")
    assert "Collection123" == class_name("123")
    assert "Document_" == class_name("documents")
    taken: set[str] = set()
    assert ["customerId", "class_", "id_", "v", "field_1", "field_model_dump", "a_b", "a_b_2"] == [
        python_name(each, taken)
        for each in ("customerId", "class", "id", "__v", "1", "model_dump", "a-b", "a b")
    ]


def test_no_name_breaks_out_of_its_string() -> None:
    for name in ('"', "'", "\n", "\\", "\u202e", "\"'", "é"):
        made = quoted(name)
        assert made.isascii()
        assert name == eval(made)
    assert "\n" not in commented("a\nimport os")
