"""Databases that a plan is applied to, and a comparison of everything in them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bson import ObjectId
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tests.advisor.symptoms import at, profiled
from treadle.advisor import Report, scan
from treadle.advisor.loop.plan import AdoptionPlan, make
from treadle.advisor.loop.results import TrialReport, TrialResult, WorkloadSummary
from treadle.advisor.loop.workload_file import Request, Workload, end_line, header_line
from treadle.advisor.loop.workload_file import read as read_workload

PRODUCTS, REVIEWS = 30, 400


def shop(database: Any) -> list[ObjectId]:
    """Products and reviews that are counted, paged and joined."""
    products = [ObjectId() for _ in range(PRODUCTS)]
    database["products"].insert_many(
        [{"_id": each, "name": f"p{n}", "price": 9.5} for n, each in enumerate(products)]
    )
    database["reviews"].insert_many(
        [
            {
                "_id": n if n % 2 else f"r{n}",
                "product_id": products[n % PRODUCTS],
                "rating": n % 5,
                "date": at(n / 10),
                **({"extra": {"b": 1, "a": [n]}} if n % 3 else {}),
            }
            for n in range(REVIEWS)
        ]
    )
    database["reviews"].create_index([("rating", 1)])
    read(database, products)
    return products


def read(database: Any, products: list[ObjectId]) -> None:
    with profiled(database):
        for each in products[:20]:
            matching: dict[str, Any] = {"$match": {"product_id": each}}
            database["reviews"].count_documents({"product_id": each})
            list(database["reviews"].find({"product_id": each}).sort("date", -1).limit(3))
            join = {"from": "products", "localField": "product_id", "foreignField": "_id", "as": "p"}
            for _ in range(4):
                list(database["reviews"].aggregate([matching, {"$lookup": join}]))


def plan_for(database: Any, *codes: str) -> AdoptionPlan:
    """A plan for the findings of these codes, as if a trial had supported them."""
    report: Report = scan(database)
    return make(report, tried(report, *codes), identity=str(ObjectId()), made="2025-01-01T00:00:00+00:00")


def tried(report: Report, *codes: str) -> TrialReport:
    """A trial that supports the findings of these codes, and tried no others."""
    results = tuple(
        TrialResult(each.code, each.where, each.declaration, "do", "It pays.")
        for each in report.findings
        if each.code in codes
    )
    assert set(codes) == {each.code for each in results}
    return TrialReport(report.scan.database, "6.0", WorkloadSummary(1.0, 1, 1, 0), (), results)


def everything(database: Any) -> dict[str, Any]:
    """Every document byte for byte, every index and every option."""
    raw = CodecOptions(document_class=RawBSONDocument)
    found: dict[str, Any] = {}
    for each in database.list_collections():
        name = each["name"]
        if name.startswith("system."):
            continue
        found[name] = (
            each["type"],
            each.get("options"),
            # A view has none.
            sorted((dict(index) for index in database[name].list_indexes()), key=lambda index: index["name"])
            if each["type"] == "collection"
            else [],
            sorted(document.raw for document in database[name].with_options(raw).find()),
        )
    return found


def reads_of(database: Any, products: list[ObjectId], path: Path) -> Workload:
    """The shop's reads in a workload file."""
    requests = []
    for number, each in enumerate(products):
        join = {"from": "products", "localField": "product_id", "foreignField": "_id", "as": "p"}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("find", {"filter": {"product_id": each}, "sort": {"date": -1}, "limit": 3}),
            ("aggregate", {"pipeline": [{"$match": {"product_id": each}}, {"$count": "n"}]}),
            ("aggregate", {"pipeline": [{"$match": {"product_id": each}}, {"$lookup": join}]}),
        ]
        # There is no index for it yet.
        requests += [Request(kind, "reviews", body, number * 1.0, plan="COLLSCAN") for kind, body in bodies]
    lines = [header_line(database.name, datetime.now(UTC)), *(each.as_line() for each in requests)]
    path.write_text("\n".join([*lines, end_line(seconds=30.0)]) + "\n")
    return read_workload(path)
