"""For each rule a database that has its symptom, and a near miss that has not."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bson import Binary, ObjectId
from pymongo.database import Database

from tests.advisor.tables import table
from treadle.advisor import Finding

START = dt.datetime(2025, 1, 1, tzinfo=dt.UTC)
Fill = Callable[[Database[Any]], None]


@dataclass(frozen=True)
class Case:
    """A symptom with the numbers that its finding must give, and a near miss."""

    code: str
    symptom: Fill
    near_miss: Fill
    where: str
    evidence: dict[str, Any]
    severity: str = "warning"


CASES: dict[str, Case] = {}


def case(
    code: str,
    where: str,
    evidence: dict[str, Any],
    *,
    symptom: tuple[Any, ...],
    near_miss: tuple[Any, ...],
    severity: str = "warning",
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """What to fill a database with, so that it has the symptom, and so that it nearly has it."""

    def note(fill: Callable[..., None]) -> Callable[..., None]:
        def bad(database: Database[Any]) -> None:
            fill(database, *symptom)

        def good(database: Database[Any]) -> None:
            fill(database, *near_miss)

        CASES[code] = Case(code, bad, good, where, evidence, severity)
        return fill

    return note


def at(days: float) -> dt.datetime:
    return START + dt.timedelta(days=days)


def identity(days: float, number: int) -> ObjectId:
    return ObjectId(int(at(days).timestamp()).to_bytes(4, "big") + number.to_bytes(8, "big"))


@contextmanager
def profiled(database: Database[Any]) -> Iterator[None]:
    """What happens inside is recorded by the server's own profiler."""
    database.command("profile", 2)
    try:
        yield
    finally:
        database.command("profile", 0)


def scanning(database: Database[Any], collection: str, **command: Any) -> dict[str, Any]:
    """What the profiler writes of a find that no index serves."""
    return {
        "op": "query",
        "ns": f"{database.name}.{collection}",
        "command": {"find": collection, **command},
        "docsExamined": 5_000,
        "planSummary": "COLLSCAN",
    }


def shop(database: Database[Any], reviews: int = 600) -> tuple[list[ObjectId], list[ObjectId]]:
    """Products and their reviews, which hold nothing but the product's id."""
    products = [identity(number, number) for number in range(30)]
    database["products"].insert_many(
        [{"_id": each, "name": f"p{number}", "price": 9.5} for number, each in enumerate(products)]
    )
    ids = [identity(number / 10, 1000 + number) for number in range(reviews)]
    table(
        database,
        "reviews",
        "_id product_id rating text date",
        [
            (each, products[number % 30], number % 5 + 1, "good", at(number / 10))
            for number, each in enumerate(ids)
        ],
    )
    database["reviews"].create_index([("product_id", 1), ("date", -1)])
    return products, ids


@case(
    "extended-reference",
    "reviews.product_id",
    {
        "references": 600,
        "parents": 30,
        "orphans": "0 of 600 checked",
        "children per parent, median": 20,
        "children per parent, max": 20,
        "reads in the workload": 20,
        "of these, together with the parent": 20,
    },
    symptom=(True,),
    near_miss=(False,),
)
def joined(database: Database[Any], lookup: bool) -> None:
    products, _ = shop(database)
    with profiled(database):
        for each in products[:20]:
            stages: list[dict[str, Any]] = [{"$match": {"product_id": each}}, {"$limit": 3}]
            if lookup:
                stages.append(
                    {
                        "$lookup": {
                            "from": "products",
                            "localField": "product_id",
                            "foreignField": "_id",
                            "as": "p",
                        }
                    }
                )
            list(database["reviews"].aggregate(stages))


@case(
    "computed",
    "reviews.product_id",
    {"aggregating reads": 40, "writes of the sources": 3, "documents examined per read": "10"},
    symptom=(3,),
    near_miss=(50,),
)
def counted(database: Database[Any], writes: int) -> None:
    products, ids = shop(database)
    with profiled(database):
        for each in products[:20]:
            database["reviews"].count_documents({"product_id": each})
            list(
                database["reviews"].aggregate(
                    [{"$match": {"product_id": each}}, {"$group": {"_id": None, "mean": {"$avg": "$rating"}}}]
                )
            )
        for number in range(writes):
            database["reviews"].update_one({"_id": ids[number]}, {"$set": {"rating": 3}})


@case("subset", "posts.comments", {"documents": 100, "items, max": 140}, symptom=(60, 140), near_miss=(0, 40))
def embedded(database: Database[Any], least: int, most: int) -> None:
    chance = random.Random(1)
    database["posts"].insert_many(
        [
            {
                "title": f"t{number}",
                "comments": [
                    {"by": "x", "text": "y", "at": at(place)}
                    for place in range(
                        least if number == 0 else most if number == 1 else chance.randint(least, most)
                    )
                ],
            }
            for number in range(100)
        ]
    )


@case(
    "bucket",
    "readings.ts",
    {"documents": 6_000, "series": 20, "readings per series, median": 300, "time between readings": "30 s"},
    symptom=(False,),
    near_miss=(True,),
    severity="info",
)
def readings(database: Database[Any], status: bool) -> None:
    database["readings"].insert_many(
        [
            {
                "sensor_id": f"s{number % 20}",
                "ts": START + dt.timedelta(seconds=30 * (number // 20)),
                "value": number / 7,
                "unit": "C",
                **({"status": ["open", "paid"][number // 20 % 2]} if status else {}),
            }
            for number in range(6_000)
        ]
    )


@case(
    "outlier",
    "people.followers",
    {
        "documents": 400,
        "items, median": 4,
        "items, p99": 8,
        "items, max": 5_000,
        "documents beyond 50": "1 (0.2 %)",
    },
    symptom=(5_000,),
    near_miss=(300,),
)
def followed(database: Database[Any], most: int) -> None:
    database["people"].insert_many(
        [
            {"name": f"n{number}", "followers": list(range(most if number == 77 else number % 9))}
            for number in range(400)
        ]
    )


@case(
    "polymorphic",
    "items.type",
    {
        "documents looked at": 300,
        "discriminating field": "type",
        "kinds": 3,
        "kind-1": "33 % of the documents, 2 fields of its own",
    },
    symptom=(True,),
    near_miss=(False,),
    severity="info",
)
def items(database: Database[Any], by_kind: bool) -> None:
    own = [{"isbn": "1", "pages": 9}, {"volts": 230, "watts": 9}, {"size": "M", "colour": "red"}]
    chance = random.Random(2)
    database["items"].insert_many(
        [
            {
                "type": ["book", "lamp", "shirt"][number % 3],
                "title": f"t{number}",
                **own[number % 3 if by_kind else chance.randrange(3)],
            }
            for number in range(300)
        ]
    )


@case(
    "schema-versioning",
    "users",
    {
        "of the older shape": 120,
        "of the newer shape": 80,
        "only in older ones": "phone",
        "only in newer ones": "contact",
    },
    symptom=(True,),
    near_miss=(False,),
)
def versions(database: Database[Any], changed: bool) -> None:
    chance = random.Random(3)
    database["users"].insert_many(
        [
            {
                "_id": identity(number, number),
                "name": "n",
                "city": "c",
                **(
                    {"phone": "1"}
                    if (number < 120 if changed else chance.random() < 0.6)
                    else {"contact": {"phone": "1"}}
                ),
            }
            for number in range(200)
        ]
    )


@case(
    "tree",
    "categories.parent_id",
    {
        "nodes": 127,
        "roots": 1,
        "depth, max": 6,
        "children per parent, max": 2,
        "parents that do not exist": "0 of 126 checked",
    },
    symptom=(False,),
    near_miss=(True,),
    severity="info",
)
def nodes(database: Database[Any], ancestors: bool) -> None:
    # A binary tree: the parent of n is (n - 1) // 2.
    database["categories"].insert_many(
        [
            {
                "_id": number,
                "name": f"c{number}",
                "parent_id": (number - 1) // 2 if number else None,
                **({"ancestors": []} if ancestors else {}),
            }
            for number in range(127)
        ]
    )


@case(
    "approximation",
    "pages.views",
    {"increments": 200, "share of the collection's writes": "100 %"},
    symptom=(True,),
    near_miss=(False,),
)
def viewed(database: Database[Any], only: bool) -> None:
    database["pages"].insert_many(
        [{"_id": number, "title": f"t{number}", "views": 0} for number in range(50)]
    )
    with profiled(database):
        for number in range(200):
            update: dict[str, Any] = {"$inc": {"views": 1}}
            if not only:
                update["$set"] = {"title": f"u{number}"}
            database["pages"].update_one({"_id": number % 50}, update)


@case(
    "huge-array",
    "logs.lines",
    {"documents": 5, "items, median": 1_500, "items, max": 1_500},
    symptom=(1_500,),
    near_miss=(500,),
)
def long_lists(database: Database[Any], length: int) -> None:
    database["logs"].insert_many(
        [{"name": f"n{number}", "lines": list(range(length))} for number in range(5)]
    )


@case("bloated-document", "pages", {"documents": 30}, symptom=(5_000,), near_miss=(500,))
def bloated(database: Database[Any], size: int) -> None:
    database["pages"].insert_many(
        [
            {"title": f"t{number}", "parts": {f"p{place}": "x" * size for place in range(20)}}
            for number in range(30)
        ]
    )


@case(
    "deep-nesting",
    "pages.a.b.c.d",
    {"levels": 4, "fields deeper than three levels": 1, "documents with one": "100 %"},
    symptom=(True,),
    near_miss=(False,),
    severity="info",
)
def nested(database: Database[Any], deep: bool) -> None:
    database["pages"].insert_many(
        [{"a": {"b": {"c": {"d": 1} if deep else 1}}, "n": number} for number in range(50)]
    )


@case(
    "normalised-everything",
    "order_lines.order_id",
    {
        "collections": 4,
        "flat ones": "4 (100 %)",
        "children that could be embedded": "order_lines in orders",
        "order_lines per parent, max": 4,
    },
    symptom=(True,),
    near_miss=(False,),
)
def tables(database: Database[Any], lines: bool) -> None:
    database["customers"].insert_many([{"_id": number, "name": "n"} for number in range(40)])
    database["products"].insert_many([{"_id": number, "name": "p"} for number in range(60)])
    database["orders"].insert_many(
        [
            {"_id": number, "customer_id": number % 40, **({} if lines else {"lines": [{"product_id": 1}]})}
            for number in range(200)
        ]
    )
    if lines:
        table(
            database,
            "order_lines",
            "_id order_id product_id quantity",
            [
                (f"{number}-{place}", number, (number + place) % 60, 1)
                for number in range(200)
                for place in range(1 + number % 4)
            ],
        )
    else:
        database["countries"].insert_many([{"_id": number, "name": "c"} for number in range(40)])


@case(
    "blobs",
    "photos.content",
    {"documents with it": 20, "type": "binData", "size, mean": "60.0 kB", "size, max": "60.0 kB"},
    symptom=(60_000,),
    near_miss=(2_000,),
)
def pictures(database: Database[Any], size: int) -> None:
    database["photos"].insert_many(
        [{"title": f"t{number}", "content": Binary(bytes(size))} for number in range(20)]
    )


@case(
    "no-validation",
    "people",
    {"collections without a validator": 1, "documents in them": 150},
    symptom=(False,),
    near_miss=(True,),
    severity="info",
)
def plain(database: Database[Any], validated: bool) -> None:
    schema = {"validator": {"$jsonSchema": {"required": ["name"]}}} if validated else {}
    database.create_collection("people", **schema)
    database["people"].insert_many([{"name": f"n{number}"} for number in range(150)])


@case(
    "mixed-types",
    "stock.amount",
    {"documents looked at": 200, "number": "180 (90 %)", "string": "20 (10 %)"},
    symptom=(True,),
    near_miss=(False,),
)
def mixed(database: Database[Any], text: bool) -> None:
    odd: list[Any] = ["12"] if text else [1.5, None]
    database["stock"].insert_many(
        [
            {"name": "n", "amount": odd[number % len(odd)] if number % 10 == 0 else number}
            for number in range(200)
        ]
    )


@case(
    "unused-index",
    "people",
    {"unused indexes": "age_1", "indexes": 2},
    symptom=(False,),
    near_miss=(True,),
    severity="info",
)
def indexed(database: Database[Any], used: bool) -> None:
    database["people"].insert_many([{"name": f"n{number}", "age": number} for number in range(200)])
    database["people"].create_index("age")
    if used:
        database["people"].find_one({"age": 7})


@case(
    "redundant-index",
    "people",
    {"redundant indexes": "name_1 in name_1_age_-1", "indexes": 3},
    symptom=(False,),
    near_miss=(True,),
)
def prefixed(database: Database[Any], unique: bool) -> None:
    database["people"].insert_many([{"name": f"n{number}", "age": number} for number in range(200)])
    database["people"].create_index("name", unique=unique)
    database["people"].create_index([("name", 1), ("age", -1)])


@case("too-many-indexes", "wide", {"indexes": 14, "fields": 16}, symptom=(14,), near_miss=(8,))
def many_indexes(database: Database[Any], number: int) -> None:
    fields = [f"f{place}" for place in range(16)]
    database["wide"].insert_many([dict.fromkeys(fields, row) for row in range(120)])
    for name in fields[:number]:
        database["wide"].create_index(name)


@case(
    "query-without-index",
    "orders.code",
    {
        "queries": 4,
        "documents examined per query": "2,000",
        "documents returned per query": "1",
        "documents in the collection": 2_000,
    },
    symptom=(False,),
    near_miss=(True,),
)
def searched(database: Database[Any], index: bool) -> None:
    database["orders"].insert_many([{"code": f"c{number}", "total": number} for number in range(2_000)])
    if index:
        database["orders"].create_index("code")
    with profiled(database):
        for number in range(4):
            list(database["orders"].find({"code": f"c{number}"}))


@case(
    "case-insensitive-search",
    "people.name",
    {"queries": 6, "documents examined per query": "300", "case-insensitive index": "missing"},
    symptom=("i",),
    near_miss=("",),
)
def regular(database: Database[Any], options: str) -> None:
    database["people"].insert_many([{"name": f"n{number}"} for number in range(300)])
    with profiled(database):
        for number in range(6):
            list(database["people"].find({"name": {"$regex": f"^n{number}$", "$options": options}}))


@case(
    "too-many-collections",
    "events_#_#_#",
    {"such collections": 24, "collections": 24, "documents in those": 24},
    symptom=(24,),
    near_miss=(10,),
)
def daily(database: Database[Any], number: int) -> None:
    for day in range(1, number + 1):
        database[f"events_2025_01_{day:02}"].insert_one({"what": "x", "at": at(day)})


@case(
    "attributes",
    "products",
    {
        "sparse fields": 24,
        "of these, with an index of their own": 10,
        "fields that the workload searches by": 5,
        "such reads": 20,
    },
    symptom=(10,),
    near_miss=(4,),
)
def specified(database: Database[Any], indexes: int) -> None:
    database["products"].insert_many(
        [
            {
                "title": f"t{number}",
                **{f"spec_{(number * 7 + place) % 24:02}": number % 9 for place in range(4)},
            }
            for number in range(480)
        ]
    )
    for number in range(indexes):
        database["products"].create_index(f"spec_{number:02}", sparse=True)
    with profiled(database):
        for number in range(20):
            list(database["products"].find({f"spec_{number % 5:02}": 3}).limit(2))


@case(
    "history",
    "contract_history",
    {
        "former states": 180,
        "documents": 60,
        "states per document, mean": 3.0,
        "fields that both have": "holder, premium, tariff",
        "named by": "contract_id",
    },
    symptom=(True,),
    near_miss=(False,),
    severity="info",
)
def contracts(database: Database[Any], states: bool) -> None:
    """A second collection with the former states, or with what merely happened."""
    database["contracts"].insert_many(
        [
            {"_id": number, "holder": f"h{number}", "premium": number * 3, "tariff": "a"}
            for number in range(60)
        ]
    )
    database["contract_history"].insert_many(
        [
            {
                "contract_id": number % 60,
                "at": at(number),
                **(
                    {"holder": f"h{number}", "premium": number, "tariff": "a"}
                    if states
                    else {"what": "letter sent", "by": f"clerk {number % 4}"}
                ),
            }
            for number in range(180)
        ]
    )


@case(
    "links",
    "enrolments",
    {
        "link documents": 180,
        "between": "courses, students",
        "links per course_id, max": 9,
        "links per student_id, max": 3,
    },
    symptom=(False,),
    near_miss=(True,),
    severity="info",
)
def enrolled(database: Database[Any], grades: bool) -> None:
    students = [identity(number, number) for number in range(60)]
    courses = [identity(number, 1_000 + number) for number in range(20)]
    database["students"].insert_many([{"_id": each, "name": f"s{n}"} for n, each in enumerate(students)])
    database["courses"].insert_many([{"_id": each, "title": f"c{n}"} for n, each in enumerate(courses)])
    database["enrolments"].insert_many(
        [
            {
                "student_id": students[number % 60],
                "course_id": courses[number * 7 % 20],
                "since": at(number),
                **({"points": number % 30} if grades else {}),
            }
            for number in range(180)
        ]
    )


def finding_of(findings: tuple[Finding, ...], code: str) -> list[Finding]:
    return [each for each in findings if each.code == code]
