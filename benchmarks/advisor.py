"""The advisor's scan beside one bare `$group` pass over the same documents, and the memory that it takes."""

from __future__ import annotations

import datetime as dt
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from bson import ObjectId
from pymongo import MongoClient
from pymongo.database import Database

from benchmarks.harness import Contender, Context, Goal, Group
from treadle.advisor import Limits, Report, scan

DATABASE = "treadle_benchmarks_advisor"
FIELDS = {"customers": "tier", "products": "stock", "orders": "status", "reviews": "rating", "events": "what"}
NAMES = tuple(FIELDS)
DATE = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
BATCH = 10_000
MEMORY_MB_MAX = 300
# The peak of a process that scans, in MB, as the kernel counts it.
MEASURED = """
import resource, sys
from pymongo import MongoClient
from treadle.advisor import scan
from treadle.advisor.html import html
with MongoClient(sys.argv[1]) as client:
    html(scan(client[sys.argv[2]]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def groups() -> list[Group]:
    return [
        Group(
            "advisor", "scan 1,000,000 small documents in 5 collections, time per document", _scan, rounds=5
        ),
        Group("advisor", "peak memory of a process that scans them", _memory, rounds=1, unit="MB"),
    ]


def _fill(database: Database[Any], each: int) -> None:
    """Five collections of `each` small documents, three of which refer to others."""
    chance = random.Random(1)
    customers = [ObjectId() for _ in range(each)]
    products = [ObjectId() for _ in range(each)]

    def document(name: str, number: int) -> dict[str, Any]:
        at = DATE + dt.timedelta(seconds=number)
        if name == "customers":
            return {"_id": customers[number], "name": f"name {number}", "tier": "gold", "joined": at}
        if name == "products":
            return {
                "_id": products[number],
                "name": f"name {number}",
                "price": number / 7,
                "stock": number % 9,
            }
        if name == "orders":
            customer = customers[chance.randrange(each)]
            return {"customer_id": customer, "status": "paid", "total": number / 3, "at": at}
        if name == "reviews":
            return {
                "product_id": products[chance.randrange(each)],
                "rating": number % 5,
                "text": "good",
                "at": at,
            }
        return {
            "customer_id": customers[chance.randrange(each)],
            "what": "click",
            "page": number % 99,
            "at": at,
        }

    for name in NAMES:
        for start in range(0, each, BATCH):
            numbers = range(start, min(start + BATCH, each))
            database[name].insert_many([document(name, number) for number in numbers], ordered=False)
    database["orders"].create_index("customer_id")
    database["reviews"].create_index("product_id")


def _open(context: Context) -> tuple[Database[Any], int]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    each = context.scale(200_000, 20_000)
    database = client[DATABASE]
    if {name: database[name].estimated_document_count() for name in NAMES} != dict.fromkeys(NAMES, each):
        client.drop_database(DATABASE)
        _fill(database, each)
    return database, each


def _scan(context: Context) -> list[Contender]:
    database, each = _open(context)

    def passed(pipeline: Callable[[str], list[dict[str, Any]]]) -> Callable[[None], int]:
        def work(_: None) -> int:
            rows = [row for name in NAMES for row in database[name].aggregate(pipeline(name))]
            return sum(row["n"] for row in rows)

        return work

    counting = passed(lambda name: [{"$group": {"_id": None, "n": {"$sum": 1}}}])
    by_field = passed(lambda name: [{"$group": {"_id": f"${FIELDS[name]}", "n": {"$sum": 1}}}])
    by_size = passed(lambda name: [{"$group": {"_id": {"$bsonSize": "$$ROOT"}, "n": {"$sum": 1}}}])

    # A quick run has small collections; with limits as much smaller they are looked at in the same way.
    limits = Limits(
        structure_documents=context.scale(100_000, 10_000), sample_documents=context.scale(4_000, 400)
    )

    def whole(_: None) -> Report:
        return scan(database, limits=limits)

    def check_count(found: int) -> None:
        assert 5 * each == found

    def check_report(report: Report) -> None:
        assert set(NAMES) == set(report.scan.collections)
        assert {("orders", "customers"), ("reviews", "products"), ("events", "customers")} == {
            (relation.child, relation.parent) for relation in report.scan.relations
        }
        assert 5 * each == sum(facts.sizes.count for facts in report.scan.collections.values() if facts.sizes)

    sampled = {"$sampleRate": limits.sample_documents / each}

    def by_hand(_: None) -> int:
        """Sizes of all documents, a uniform sample, and one collection whose references have no index."""
        documents = {name: list(database[name].aggregate([{"$match": sampled}])) for name in NAMES}
        referred = [document["customer_id"] for document in documents["events"][:1_000]]
        among = {"$match": {"customer_id": {"$in": referred}}}
        list(database["events"].aggregate([among, {"$group": {"_id": "$customer_id", "n": {"$sum": 1}}}]))
        return by_size(None)

    total, passes = 5 * each, "the passes that it takes, by hand"
    return [
        Contender("one bare $group, by a field", lambda: None, by_field, total, check=check_count),
        # What the others are: reading no field at all, and reading every byte.
        Contender("one bare $group, only counting", lambda: None, counting, total, check=check_count),
        Contender("one bare $group, by size", lambda: None, by_size, total, check=check_count),
        # A uniform sample has no shorter way than a pass.
        Contender(passes, lambda: None, by_hand, total, check=check_count),
        Contender("scan", lambda: None, whole, total, goal=Goal(2.5, limit=passes), check=check_report),
    ]


def _memory(context: Context) -> list[Contender]:
    _open(context)
    context.stack.callback(lambda: MongoClient[Any](context.uri).drop_database(DATABASE))

    def peak(_: None) -> float:
        command = [sys.executable, "-c", MEASURED, context.uri, DATABASE]
        megabytes = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        # The harness counts seconds; a microsecond stands for a megabyte here.
        return megabytes / 1e6

    goal = Goal(MEMORY_MB_MAX, "MB")
    return [Contender("scan and HTML report", lambda: None, peak, goal=goal, measured=True)]
