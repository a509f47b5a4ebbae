"""The read that each pattern is for, without it and with it.

Without it is the query that a careful person writes with PyMongo, indexes
and all. With it there are two: by PyMongo on the documents that Treadle
keeps, since everybody can read them, and by Treadle, which gives models.
Patterns that are measured in families of their own (buckets, outliers,
counters, trees, versions) are not here again.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from typing import Annotated, Any

from bson import ObjectId
from pydantic import BaseModel
from pymongo import MongoClient
from pymongo.database import Database

from benchmarks.derived import Review, ReviewCard
from benchmarks.harness import Contender, Context, Group
from treadle import Average, Count, Day, Document, ExtendedReference, Id, Rollup, Store, Subset, Sum
from treadle.model.bson_types import CODEC_OPTIONS

FAMILY = "with_and_without"
DATABASE = "treadle_benchmarks_with_and_without"
FIRST = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
REVIEWS, REVIEWS_QUICK = 2_847, 300
SALES, SALES_QUICK = 200_000, 5_000
BATCH = 10_000
SHOWN = 50
KINDS = ("book", "film", "lamp", "shirt")


class Customer(Document, collection="customers"):
    name: str
    tier: str


class CustomerCard(BaseModel):
    name: str
    tier: str


class Order(Document, collection="orders"):
    customer_id: Id
    customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None
    placed: dt.datetime


class Product(Document, collection="products"):
    name: str
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    avg_rating: Annotated[float | None, Average(Review, "rating", by="product_id")] = None


class Page(Document, collection="pages"):
    name: str
    recent: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-date", size=5)] = []


class Sale(Document, collection="sales"):
    product_id: int
    amount: int
    at: dt.datetime


class DailySales(
    Document,
    collection="daily_sales",
    rollup=Rollup(
        Sale,
        keys={"product_id": "product_id", "day": Day("at")},
        maintain="schedule",
        every=dt.timedelta(hours=1),
    ),
):
    product_id: int
    day: dt.datetime
    total: Annotated[int, Sum("amount")] = 0
    orders: Annotated[int, Count()] = 0


class Item(Document, collection="items", discriminator="type"):
    title: str
    added: dt.datetime


class Book(Item, kind="book"):
    pages: int


class Film(Item, kind="film"):
    minutes: int


class Lamp(Item, kind="lamp"):
    watts: int


class Shirt(Item, kind="shirt"):
    size: int


MODELS: list[type[Document]] = [
    Customer, Order, Review, Product, Page, Sale, DailySales, Item, Book, Film, Lamp, Shirt,
]  # fmt: skip


def groups() -> list[Group]:
    return [
        Group(FAMILY, f"Extended Reference: {SHOWN} orders with their customers", _orders),
        Group(FAMILY, f"Computed: number and average of {REVIEWS:,} reviews", _averages),
        Group(FAMILY, f"Subset: a page with 5 of {REVIEWS:,} reviews", _page),
        Group(FAMILY, "Rollup: 30 days of one product's sales", _days),
        Group(FAMILY, "Polymorphic: the 20 newest of 4 kinds", _newest),
    ]


def _open(context: Context) -> tuple[Store, Database[Any]]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    client.drop_database(DATABASE)
    context.stack.callback(client.drop_database, DATABASE)
    database = client.get_database(DATABASE, codec_options=CODEC_OPTIONS)
    store = Store(database, MODELS)
    store.setup()
    return store, database


def _contenders(
    context: Context, works: dict[str, Callable[[], Any]], seen: Callable[[Any], Any]
) -> list[Contender]:
    """Contenders that must give the same answer, as far as `seen` shows it."""
    times = context.scale(20, 3)
    expected: list[Any] = []

    def repeated(work: Callable[[], Any]) -> Callable[[None], Any]:
        def repeat(_: None) -> Any:
            for _ in range(times):
                found = work()
            return found

        return repeat

    def check(found: Any) -> None:
        answer = seen(found)
        assert answer, "an empty answer proves nothing"
        expected.append(answer)
        assert expected[0] == answer, f"{answer} is not {expected[0]}"

    return [Contender(name, lambda: None, repeated(work), times, check=check) for name, work in works.items()]


def _orders(context: Context) -> list[Contender]:
    store, database = _open(context)
    chance = random.Random(1)
    customers = [{"_id": ObjectId(), "name": f"Customer {n}", "tier": "gold"} for n in range(2_000)]
    database["customers"].insert_many(customers)
    count = context.scale(50_000, 2_000)
    orders = [
        {"customer_id": chance.choice(customers)["_id"], "placed": FIRST + dt.timedelta(minutes=number)}
        for number in range(count)
    ]
    database["orders"].insert_many(orders)
    # Treadle breaks ties by `_id`, so the index ends with it; it serves everybody else too.
    database["orders"].create_index([("placed", -1), ("_id", 1)])
    store.rebuild(Order)
    newest = [{"$sort": {"placed": -1}}, {"$limit": SHOWN}]
    joined = {"from": "customers", "localField": "customer_id", "foreignField": "_id", "as": "customer"}

    def looked_up() -> Any:
        found = list(database["orders"].aggregate([*newest, {"$lookup": joined}]))
        return [each["customer"][0]["name"] for each in found]

    def second_query() -> Any:
        found = database["orders"].find().sort("placed", -1).limit(SHOWN).to_list()
        keys = list({each["customer_id"] for each in found})
        names = {each["_id"]: each["name"] for each in database["customers"].find({"_id": {"$in": keys}})}
        return [names[each["customer_id"]] for each in found]

    def copies() -> Any:
        found = database["orders"].find().sort("placed", -1).limit(SHOWN).to_list()
        return [each["customer"]["name"] for each in found]

    def by_treadle() -> Any:
        found = store.find(Order, sort="-placed", limit=SHOWN).to_list()
        return [each.customer.name for each in found if each.customer is not None]

    works = {
        "without: $lookup": looked_up,
        "without: a second query": second_query,
        "with, PyMongo": copies,
        "with, Treadle's models": by_treadle,
    }
    return _contenders(context, works, list)


def _reviewed(context: Context) -> tuple[Store, Database[Any], ObjectId]:
    store, database = _open(context)
    chance = random.Random(2)
    key = ObjectId()
    others = [ObjectId() for _ in range(20)]
    for each in (key, *others):
        number = context.scale(REVIEWS, REVIEWS_QUICK)
        reviews = [
            {
                "_id": ObjectId(),
                "product_id": each,
                "rating": chance.randint(1, 5),
                "text": "a review of the usual length, with a word or two on delivery " * 2,
                "date": FIRST + dt.timedelta(minutes=position),
            }
            for position in range(number)
        ]
        database["reviews"].insert_many(reviews)
        for collection in ("products", "pages"):
            database[collection].insert_one({"_id": each, "name": "Loom"})
        # The document that the literature warns of: with all its reviews inside.
        database["embedded"].insert_one({"_id": each, "name": "Loom", "reviews": reviews[::-1]})
    store.rebuild(Product, Page)
    return store, database, key


def _averages(context: Context) -> list[Contender]:
    store, database, key = _reviewed(context)
    sums = {"_id": None, "count": {"$sum": 1}, "average": {"$avg": "$rating"}}

    def aggregated() -> Any:
        (found,) = database["reviews"].aggregate([{"$match": {"product_id": key}}, {"$group": sums}])
        return found["count"], round(found["average"], 9)

    def stored() -> Any:
        found = database["products"].find_one({"_id": key})
        assert found is not None
        return found["review_count"], round(found["avg_rating"], 9)

    def by_treadle() -> Any:
        found = store.get(Product, key)
        assert found is not None
        assert found.avg_rating is not None
        return found.review_count, round(found.avg_rating, 9)

    works = {
        "without: $group on read": aggregated,
        "with, PyMongo": stored,
        "with, Treadle's models": by_treadle,
    }
    return _contenders(context, works, tuple)


def _page(context: Context) -> list[Contender]:
    store, database, key = _reviewed(context)

    def embedded() -> Any:
        found = database["embedded"].find_one({"_id": key})
        assert found is not None
        return [each["date"] for each in found["reviews"][:5]]

    def second_query() -> Any:
        assert database["pages"].find_one({"_id": key}, {"name": 1}) is not None
        newest = database["reviews"].find({"product_id": key}).sort([("date", -1), ("_id", 1)]).limit(5)
        return [each["date"] for each in newest]

    def subset() -> Any:
        found = database["pages"].find_one({"_id": key})
        assert found is not None
        return [each["date"] for each in found["recent"]]

    def by_treadle() -> Any:
        found = store.get(Page, key)
        assert found is not None
        return [each.date for each in found.recent]

    works = {
        "without: all reviews embedded": embedded,
        "without: a second, indexed query": second_query,
        "with, PyMongo": subset,
        "with, Treadle's models": by_treadle,
    }
    return _contenders(context, works, list)


def _days(context: Context) -> list[Contender]:
    store, database = _open(context)
    chance = random.Random(3)
    total = context.scale(SALES, SALES_QUICK)
    for start in range(0, total, BATCH):
        database["sales"].insert_many(
            [
                {
                    "product_id": chance.randrange(20),
                    "amount": chance.randint(1, 99),
                    "at": FIRST + dt.timedelta(minutes=chance.randrange(365 * 1440)),
                }
                for _ in range(min(BATCH, total - start))
            ]
        )
    database["sales"].create_index([("product_id", 1), ("at", 1)])
    store.run_due()
    window = {"$gte": FIRST + dt.timedelta(days=200), "$lt": FIRST + dt.timedelta(days=230)}
    day = {"$dateTrunc": {"date": "$at", "unit": "day"}}
    pipeline: list[dict[str, Any]] = [
        {"$match": {"product_id": 7, "at": window}},
        {"$group": {"_id": day, "total": {"$sum": "$amount"}, "orders": {"$sum": 1}}},
        {"$sort": {"_id": 1}},
    ]
    filter = {"product_id": 7, "day": window}

    def aggregated() -> Any:
        return [(each["_id"], each["total"]) for each in database["sales"].aggregate(pipeline)]

    def rolled_up() -> Any:
        return [(each["day"], each["total"]) for each in database["daily_sales"].find(filter).sort("day", 1)]

    def by_treadle() -> Any:
        return [(each.day, each.total) for each in store.find(DailySales, filter, sort="day")]

    works = {
        "without: $group on read": aggregated,
        "with, PyMongo": rolled_up,
        "with, Treadle's models": by_treadle,
    }
    return _contenders(context, works, list)


def _newest(context: Context) -> list[Contender]:
    store, database = _open(context)
    each_kind = context.scale(5_000, 500)
    own = dict(zip(KINDS, ("pages", "minutes", "watts", "size"), strict=True))
    for place, kind in enumerate(KINDS):
        documents = [
            {
                "_id": ObjectId(),
                "type": kind,
                "title": f"{kind} {number}",
                "added": FIRST + dt.timedelta(minutes=4 * number + place),
                own[kind]: number,
            }
            for number in range(each_kind)
        ]
        database["items"].insert_many(documents)
        database[f"only_{kind}"].insert_many(documents)
        database[f"only_{kind}"].create_index([("added", -1)])
    database["items"].create_index([("added", -1), ("_id", 1)])

    def separate() -> Any:
        found = [
            each for kind in KINDS for each in database[f"only_{kind}"].find().sort("added", -1).limit(20)
        ]
        return [each["title"] for each in sorted(found, key=lambda each: each["added"], reverse=True)[:20]]

    def together() -> Any:
        return [each["title"] for each in database["items"].find().sort("added", -1).limit(20)]

    def by_treadle() -> Any:
        return [each.title for each in store.find(Item, sort="-added", limit=20)]

    works = {
        "without: a collection per kind": separate,
        "with, PyMongo": together,
        "with, Treadle's models": by_treadle,
    }
    return _contenders(context, works, list)
