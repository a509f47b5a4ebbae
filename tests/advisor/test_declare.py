"""A model of any collection is Python that a dry set-up accepts, whatever its names and types."""

from __future__ import annotations

import datetime as dt
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from bson import Code, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import Binary
from bson.decimal128 import Decimal128

from tests.advisor.test_rules import compiled
from treadle import Store
from treadle.advisor import Limits, scan
from treadle.advisor.declare import class_name, declaration, python_name, quote
from treadle.advisor.wording import cut

AT = dt.datetime(2025, 1, 1)
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
    # Each of these names would hide a type from the fields below it.
    "hiding": [
        {
            **({} if n % 2 else dict.fromkeys(("list", "str", "datetime", "Decimal", "Any", "Id", "dict"))),
            "a": ["x"],
            "b": "x",
            "c": dt.datetime(2025, 1, 1),
            "d": Decimal128("1"),
            "e": {"f": ObjectId(), "str": None, "int": 1, "g": 2, "h": "x"},
            "i": [1, "x"],
            "j": None if n % 3 else [1],
        }
        for n in range(60)
    ],
    # The nested part's class would be called like a type.
    "sums": [{"x": {"y": n}} for n in range(60)],
    "i": [{"d": {"y": n}, "e": ObjectId()} for n in range(60)],
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
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Store(database, models=compiled(declaration(facts))).setup(dry_run=True)


IDENTITIES: dict[str, Callable[[int], Any]] = {
    "objectId": lambda n: ObjectId(n.to_bytes(12, "big")),
    "int": lambda n: n,
    # As older shells write numbers.
    "double": float,
    "numbers": lambda n: float(n) if n % 2 else n,
    "string": lambda n: f"c{n}",
    "uuid": lambda n: Binary.from_uuid(uuid.UUID(int=n + 2**100)),
    "bytes": lambda n: Binary(n.to_bytes(9, "big")),
}


@pytest.mark.parametrize("kind", IDENTITIES)
def test_references_are_declared_like_the_ids_they_hold(kind: str, database: Any) -> None:
    """Whatever the ids are, each declaration is accepted, and reads what is stored."""
    identity = IDENTITIES[kind]
    database["customers"].insert_many([{"_id": identity(n), "name": f"n{n}", "at": n} for n in range(60)])
    database["orders"].insert_many(
        [{"customer_id": identity(n * n % 60), "total": n, "placed": AT, "lines": [n]} for n in range(300)]
    )
    database["nodes"].insert_many(
        [
            {"_id": identity(n), "name": f"n{n}", "parent_id": identity((n - 1) // 2) if n else None}
            for n in range(60)
        ]
    )
    operations = [
        {"find": "orders", "filter": {"customer_id": 1}, "sort": {"lines": 1, "placed": -1}, "limit": 5},
        {"count": "orders", "query": {"customer_id": 1}},
        {
            "aggregate": "orders",
            "pipeline": [
                {"$match": {"customer_id": 1}},
                {"$group": {"_id": None, "t": {"$sum": "$total"}, "m": {"$max": "$placed"}}},
            ],
        },
        {
            "aggregate": "orders",
            "pipeline": [{"$lookup": {"from": "customers", "localField": "customer_id"}}],
        },
    ]
    workload = [
        {"op": "query" if "find" in each else "command", "ns": f"{database.name}.orders", "command": each}
        for each in operations
        for _ in range(20)
    ]
    report = scan(database, workload=workload)
    assert {"extended-reference", "computed", "subset", "tree"} <= {each.code for each in report.findings}
    assert () == report.failures
    for each in report.findings:
        documents = compiled(each.declaration)
        store = Store(database, models=documents)
        store.setup(dry_run=True)
        for model in documents:
            assert store.find_one(model, {}) is not None, each.code


def test_an_array_of_a_nested_model_is_declared_there(database: Any) -> None:
    database["people"].insert_many(
        [{"name": "n", "social": {"fans": [1] * (3_000 if n == 7 else n % 5), "x": 1}} for n in range(300)]
    )
    report = scan(database)
    finding = next(each for each in report.findings if each.code == "outlier")
    assert "people.social.fans" == finding.where
    store = Store(database, models=compiled(finding.declaration))
    assert any("fan_overflow" in str(action) for action in store.setup(dry_run=True))
    assert "huge-array" not in {each.code for each in report.findings}


def test_an_array_that_no_pattern_can_be_put_on_is_a_huge_one(database: Any) -> None:
    """No model can have a field with a dot in its name, nor so the array beside it."""
    database["people"].insert_many(
        [{"odd": {"a.b": 1, "fans": [1] * (3_000 if n == 7 else n % 5)}} for n in range(300)]
    )
    found = {each.code: each.where for each in scan(database).findings}
    assert "outlier" not in found
    assert "people.odd.fans" == found["huge-array"]


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
        literal = quote(name)
        assert literal.isascii()
        assert name == eval(literal)
    assert "\n" not in cut("a\nimport os", 60)
