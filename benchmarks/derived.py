"""Extended Reference, Computed and Subset beside the same work by hand, and beside not having them."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from time import perf_counter
from typing import Annotated, Any

from bson import ObjectId
from pydantic import BaseModel
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from benchmarks.harness import Contender, Context, Goal, Group
from treadle import Average, Count, Document, ExtendedReference, Id, Store, Subset, Sum
from treadle.engine.inserts import Insert

DATE = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
THREADS = 8


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    text: str
    date: dt.datetime


class ReviewCard(BaseModel):
    rating: int
    text: str
    date: dt.datetime


class Product(Document, collection="products"):
    name: str
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    rating_total: Annotated[int, Sum(Review, "rating", by="product_id")] = 0
    avg_rating: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    recent: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-date", size=5)] = []


class Customer(Document, collection="customers"):
    name: str
    tier: str = "silver"


class CustomerCard(BaseModel):
    name: str
    tier: str


class Order(Document, collection="orders"):
    customer_id: Id
    customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None
    status: str = "open"


def groups() -> list[Group]:
    """One group per figure."""
    pages = [2_847, 100_000]
    renames = [100, 10_000, 100_000]
    return [
        Group("derived", "insert a review that maintains count, sum, average and subset", _insert_one),
        Group("derived", "the same write through the queue of writers, alone", _queue),
        Group("derived", f"{THREADS} threads on one hot product, time per review", _hot, rounds=9),
        Group("derived", f"{THREADS} threads on one hot product, p99 of one insert", _hot_p99, rounds=9),
        Group("derived", "insert 10,000 reviews over 100 products, time per review", _bulk, rounds=5),
        *(Group("derived", f"product page with {number:,} reviews", _page(number)) for number in pages),
        *(
            Group("derived", f"rename a customer with {number:,} orders", _rename(number), rounds=9)
            for number in renames
        ),
    ]


def _open(context: Context) -> tuple[Store, Database[Any]]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    client.drop_database("treadle_benchmarks_derived")
    database = client["treadle_benchmarks_derived"]
    store = Store(database, [Review, Product, Customer, Order])
    store.setup()
    context.stack.callback(lambda: client.drop_database("treadle_benchmarks_derived"))
    return store, database


def _by_hand(database: Database[Any], product_id: Any) -> None:
    """The same maintenance, written out with PyMongo."""
    review = {"_id": ObjectId(), "product_id": product_id, "rating": 4, "text": "good", "date": DATE}
    card = {"$literal": {key: review[key] for key in ("_id", "rating", "text", "date")}}
    merged = {"$concatArrays": ["$recent", [card]]}
    update = [
        {
            "$set": {
                "review_count": {"$add": ["$review_count", 1]},
                "rating_total": {"$add": ["$rating_total", 4]},
                "recent": {
                    "$slice": [{"$sortArray": {"input": merged, "sortBy": {"date": -1, "_id": 1}}}, 5]
                },
            }
        },
        {"$set": {"avg_rating": {"$divide": ["$rating_total", "$review_count"]}}},
    ]

    def work(session: Any) -> None:
        database["reviews"].insert_one(review, session=session)
        database["products"].update_one({"_id": product_id}, update, session=session)

    with database.client.start_session() as session:
        session.with_transaction(work)


def _same_by_hand(database: Database[Any], review: Review) -> None:
    """What Treadle sends, written out: of a model, at the same concerns, right whatever is stored before.

    Numbers that are missing or no longer exact, an item that is there already, a
    group that is empty, and a revision by which recomputations meet it.
    """
    raw = review.model_dump()
    identity = raw["_id"] = raw.pop("id")
    card = {key: raw[key] for key in ("_id", "rating", "text", "date")}
    others = {
        "input": {"$ifNull": ["$recent", []]},
        "as": "item",
        "cond": {"$not": [{"$in": ["$$item._id", {"$literal": [identity]}]}]},
    }
    merged = {"$concatArrays": [{"$filter": others}, {"$literal": [card]}]}
    whole = [{"$gt": ["$$n", -(2.0**63)]}, {"$lt": ["$$n", 2.0**63]}, {"$eq": ["$$n", {"$trunc": "$$n"}]}]
    held = {"$or": [{"$in": [{"$type": "$$n"}, ["int", "long"]]}, {"$and": whole}]}
    refused = {"$toLong": {"$concat": ["not ", {"$toString": "$$n"}]}}
    total = {"$add": [{"$ifNull": ["$rating_total", 0]}, {"$literal": raw["rating"]}]}
    mean = "_treadle.state.avg_rating"
    update = [
        {
            "$set": {
                "review_count": {"$add": [{"$ifNull": ["$review_count", 0]}, 1]},
                "rating_total": {"$let": {"vars": {"n": total}, "in": {"$cond": [held, "$$n", refused]}}},
                f"{mean}.sum": {"$add": [{"$ifNull": [f"${mean}.sum", 0.0]}, {"$literal": raw["rating"]}]},
                f"{mean}.count": {"$add": [{"$ifNull": [f"${mean}.count", 0]}, 1]},
                "recent": {
                    "$slice": [{"$sortArray": {"input": merged, "sortBy": {"date": -1, "_id": 1}}}, 5]
                },
                "_treadle.n": {"$add": [{"$ifNull": ["$_treadle.n", 0]}, 1]},
            }
        },
        {
            "$set": {
                "avg_rating": {
                    "$cond": [
                        {"$gt": [f"${mean}.count", 0]},
                        {"$divide": [f"${mean}.sum", f"${mean}.count"]},
                        None,
                    ]
                }
            }
        },
    ]

    def work(session: Any) -> None:
        database["reviews"].insert_one(raw, session=session)
        database["products"].update_one({"_id": raw["product_id"]}, update, session=session)

    with database.client.start_session() as session:
        session.with_transaction(work, ReadConcern("snapshot"), WriteConcern("majority"))


def _review(product_id: Any) -> Review:
    return Review(product_id=product_id, rating=4, text="good", date=DATE)


def _insert_one(context: Context) -> list[Contender]:
    store, database = _open(context)
    times = context.scale(60, 10)
    same = "the same three commands by hand, of a model"

    def prepare() -> Any:
        return store.insert(Product(name="p")).id

    def by_hand(product_id: Any) -> Any:
        for _ in range(times):
            _by_hand(database, product_id)
        return product_id

    def same_by_hand(product_id: Any) -> Any:
        for _ in range(times):
            _same_by_hand(database, _review(product_id))
        return product_id

    def by_treadle(product_id: Any) -> Any:
        for _ in range(times):
            store.insert(_review(product_id))
        return product_id

    def check(product_id: Any) -> None:
        found = store.get(Product, product_id)
        assert found is not None
        assert (times, 4.0 * times, 4.0, 5) == (
            found.review_count, found.rating_total, found.avg_rating, len(found.recent),
        )  # fmt: skip

    return [
        Contender("PyMongo by hand", prepare, by_hand, times, check=check),
        Contender(same, prepare, same_by_hand, times, check=check),
        Contender("Treadle", prepare, by_treadle, times, goal=Goal(1.10, limit=same), check=check),
    ]


def _queue(context: Context) -> list[Contender]:
    store, _ = _open(context)
    times = context.scale(60, 10)
    entry = store.graph.entry(Review)

    def prepare() -> Any:
        return store.insert(Product(name="p")).id

    def directly(product_id: Any) -> None:
        for _ in range(times):
            store._commit([Insert(entry, [_review(product_id)])], None)

    def queued(product_id: Any) -> None:
        for _ in range(times):
            store._group_commit.submit(Insert(entry, [_review(product_id)]))

    return [
        Contender("without the queue", prepare, directly, times),
        Contender("with the queue", prepare, queued, times, goal=Goal(1.05)),
    ]


def _in_threads(work: Callable[[], Any], each: int) -> list[float]:
    """Every single time that the threads took, in order."""
    taken: list[float] = []

    def run() -> None:
        for _ in range(each):
            start = perf_counter()
            work()
            taken.append(perf_counter() - start)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(taken)


def _hot_contenders(
    context: Context, goal: Goal, measure: Callable[[list[float]], Any], *, measured: bool
) -> list[Contender]:
    store, database = _open(context)
    each = context.scale(40, 10)

    def prepare() -> Any:
        return store.insert(Product(name="p")).id

    def by_hand(product_id: Any) -> Any:
        return measure(_in_threads(lambda: _by_hand(database, product_id), each))

    def by_treadle(product_id: Any) -> Any:
        return measure(_in_threads(lambda: store.insert(_review(product_id)), each))

    operations = 1 if measured else each * THREADS
    return [
        Contender("PyMongo by hand", prepare, by_hand, operations, measured=measured),
        Contender("Treadle", prepare, by_treadle, operations, goal=goal, measured=measured),
    ]


def _hot(context: Context) -> list[Contender]:
    return _hot_contenders(context, Goal(1 / 5), lambda taken: None, measured=False)


def _hot_p99(context: Context) -> list[Contender]:
    return _hot_contenders(context, Goal(1 / 4), lambda taken: taken[int(len(taken) * 0.99)], measured=True)


def _bulk(context: Context) -> list[Contender]:
    store, _ = _open(context)
    total, few = context.scale(10_000, 1_000), context.scale(300, 50)

    def prepare(number: int) -> list[Review]:
        products = store.insert_many([Product(name="p") for _ in range(100)])
        return [_review(products[index % 100].id) for index in range(number)]

    def one_by_one(reviews: list[Review]) -> None:
        for review in reviews:
            store.insert(review)

    return [
        Contender("one by one", lambda: prepare(few), one_by_one, few),
        Contender("insert_many", lambda: prepare(total), store.insert_many, total, goal=Goal(1 / 20)),
    ]


def _page(reviews: int) -> Callable[[Context], list[Contender]]:
    def make(context: Context) -> list[Contender]:
        store, database = _open(context)
        number = min(reviews, context.scale(reviews, 3_000))
        product = store.insert(Product(name="p"))
        rows = [_review(product.id) for _ in range(number)]
        store.insert_many(rows)
        times = context.scale(20, 5)

        def aggregate(_: None) -> Any:
            for _ in range(times):
                found = database["products"].find_one({"_id": product.id}, {"name": 1})
                sums = {"count": {"$sum": 1}, "total": {"$sum": "$rating"}, "average": {"$avg": "$rating"}}
                group = [{"$match": {"product_id": product.id}}, {"$group": {"_id": None, **sums}}]
                totals = next(iter(database["reviews"].aggregate(group)))
                newest = database["reviews"].find({"product_id": product.id}).sort([("date", -1), ("_id", 1)])
                answer = (found, totals["count"], list(newest.limit(5)))
            return answer[1]

        def maintained(_: None) -> Any:
            for _ in range(times):
                found = store.get(Product, product.id)
            assert found is not None
            return found.review_count

        def check(answer: Any) -> None:
            assert number == answer

        return [
            Contender("aggregated on read", lambda: None, aggregate, times, check=check),
            Contender("maintained", lambda: None, maintained, times, goal=Goal(1 / 12), check=check),
        ]

    return make


def _rename_by_hand(database: Database[Any], customer_id: Any, name: str, session: Any) -> None:
    database["customers"].find_one_and_update({"_id": customer_id}, {"$set": {"name": name}}, session=session)
    copies = {"customer_id": customer_id}
    assert [] == list(database["orders"].find(copies, {"_id": 1}, skip=2_000, limit=1, session=session))
    database["orders"].update_many(copies, {"$set": {"customer.name": name}}, session=session)


def _rename(orders: int) -> Callable[[Context], list[Contender]]:
    def make(context: Context) -> list[Contender]:
        store, database = _open(context)
        number = min(orders, context.scale(orders, 2_000))
        ann = store.insert(Customer(name="Ann"))
        store.insert_many([Order(customer_id=ann.id) for _ in range(number)])
        copies = {"customer_id": ann.id}
        # One rename of few orders is over too soon to be measured.
        times = max(1, 1_000 // number)
        serial = count()

        def prepare() -> list[str]:
            return [f"name {next(serial)}" for _ in range(times)]

        def bare(names: list[str]) -> str:
            for name in names:
                database["orders"].update_many(copies, {"$set": {"customer.name": name}})
            return names[-1]

        def by_hand(names: list[str]) -> str:
            """The same in one transaction: the rename, a look at how many copies there are, the copies."""
            for name in names:
                with database.client.start_session() as session:
                    session.with_transaction(partial(_rename_by_hand, database, ann.id, name))
            return names[-1]

        def same_by_hand(names: list[str]) -> str:
            """The least that a rename can be of which nobody knows beforehand that it changes nothing."""
            for name in names:
                with database.client.start_session() as session:
                    session.with_transaction(
                        lambda current, name=name: database["customers"].find_one_and_update(
                            {"_id": ann.id}, {"$set": {"name": name}}, session=current
                        )
                    )
            return names[-1]

        def by_treadle(names: list[str]) -> str:
            for name in names:
                store.update(Customer, ann.id, {"$set": {"name": name}})
            return names[-1]

        def shown() -> list[str]:
            """A name that all copies have, and the customer has not."""
            name = f"name {next(serial)}"
            database["orders"].update_many(copies, {"$set": {"customer.name": name}})
            return [name]

        def check(name: str) -> None:
            assert number == database["orders"].count_documents({"customer.name": name})

        def current() -> list[str]:
            return [database["customers"].find_one({"_id": ann.id})["name"]] * times

        whole, each = "Treadle, rename and copies", number * times
        limit = "" if times == 1 else "rename and copies in a transaction, by hand"
        least = "" if times == 1 else "to the same name in a transaction, by hand"
        made = [
            Contender("bare update_many of the copies", prepare, bare, each, check=check),
            *([Contender(limit, prepare, by_hand, each, check=check)] if limit else []),
            Contender(whole, prepare, by_treadle, each, goal=Goal(1.35, limit=limit), check=check),
            *([Contender(least, current, same_by_hand, each, baseline=whole)] if least else []),
            Contender(
                "Treadle, to the same name",
                current,
                by_treadle,
                each,
                baseline=whole,
                goal=Goal(0.3, limit=least),
            ),
        ]
        if times == 1:
            made.append(
                Contender(
                    "Treadle, to a name that all copies show already",
                    shown,
                    by_treadle,
                    each,
                    baseline=whole,
                    goal=Goal(0.3),
                    check=check,
                )
            )
        return made

    return make
