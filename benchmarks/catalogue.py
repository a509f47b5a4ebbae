"""History, Archive, Attributes and Links beside the same work by hand."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

from pymongo import IndexModel, MongoClient
from pymongo.database import Database
from pymongo.write_concern import WriteConcern

from benchmarks.harness import Contender, Context, Goal, Group
from treadle import Archive, Attributes, Document, History, Links, Store

DATABASE = "treadle_benchmarks_catalogue"


class Policy(Document, collection="policies", history=History()):
    id: int
    holder: str
    premium: int


class Sale(
    Document,
    collection="sales",
    archive=Archive(by="date", after=dt.timedelta(days=365), into="sales_archive"),
):
    id: int
    amount: int
    date: dt.datetime


class Product(Document, collection="products"):
    id: int
    specs: Annotated[dict[str, int], Attributes()] = {}


class Node(Document, collection="nodes", discriminator="type", links=Links("links")):
    id: int
    links: list[int] = []


class Course(Node, kind="course"):
    pass


class Student(Node, kind="student"):
    name: str = ""


OLD = dt.datetime(2001, 1, 1, tzinfo=dt.UTC)
NAMES = [f"name{number}" for number in range(40)]


def groups() -> list[Group]:
    return [
        Group("catalogue", "an update with its history", _update, rounds=11),
        Group("catalogue", "a document as of a moment", _at, rounds=11),
        Group("catalogue", "archive documents, time per document", _archive, rounds=2),
        Group("catalogue", "a filter on an attribute", _filter, rounds=11),
        Group("catalogue", "indexes of 40 attributes, bytes per document", _storage, rounds=3, unit="bytes"),
        Group("catalogue", "a document and 100 that belong to it", _related, rounds=11),
    ]


def _open(context: Context, models: list[type[Document]]) -> tuple[Store, Database[Any]]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri, tz_aware=True))
    client.drop_database(DATABASE)
    database = client.get_database(DATABASE, write_concern=WriteConcern("majority"))
    store = Store(database, models)
    store.setup()
    context.stack.callback(lambda: client.drop_database(DATABASE))
    return store, database


def _update(context: Context) -> list[Contender]:
    store, database = _open(context, [Policy])
    times = context.scale(50, 5)
    store.insert_many([Policy(id=key, holder="Ada", premium=0) for key in (1, 2)])

    def by_hand(_: Any) -> None:
        for _ in range(times):
            with database.client.start_session() as session:
                session.with_transaction(two_writes, write_concern=WriteConcern("majority"))

    def two_writes(session: Any) -> None:
        # By the server's clock, which never goes back, and numbered, as Treadle has it.
        after = database["policies"].find_one_and_update(
            {"_id": 1}, {"$inc": {"premium": 1}}, return_document=True, session=session
        )
        history = database["policies_history"]
        ended = history.find_one_and_update(
            {"document_id": 1, "valid_to": {"$type": "null"}},
            [{"$set": {"valid_to": {"$max": ["$$NOW", {"$add": ["$valid_from", 1]}]}}}],
            projection={"revision": 1, "valid_to": 1},
            return_document=True,
            session=session,
        )
        row = {"document_id": 1, "revision": ended["revision"] + 1}
        row |= {"valid_from": ended["valid_to"], "valid_to": None, "document": after}
        history.insert_one(row, session=session)

    def treadle(_: Any) -> None:
        for _ in range(times):
            store.update(Policy, 2, {"$inc": {"premium": 1}})

    return [
        Contender("by hand, in a transaction", lambda: None, by_hand, times),
        Contender("Treadle", lambda: None, treadle, times, goal=Goal(1.35)),
    ]


def _at(context: Context) -> list[Contender]:
    store, database = _open(context, [Policy])
    times = context.scale(200, 10)
    store.insert(Policy(id=1, holder="Ada", premium=0))
    for _ in range(context.scale(200, 5)):
        store.update(Policy, 1, {"$inc": {"premium": 1}})
    moment = database["policies_history"].find_one({"revision": 3})["valid_from"]  # type: ignore[index]

    def by_hand(_: Any) -> None:
        for _ in range(times):
            row = database["policies_history"].find_one(
                {"document_id": 1, "valid_from": {"$lte": moment}}, sort=[("valid_from", -1)]
            )
            assert row is not None
            Policy.model_validate({**row["document"], "id": row["document"]["_id"]})

    def treadle(_: Any) -> None:
        for _ in range(times):
            assert store.at(Policy, 1, moment) is not None

    return [
        Contender("by hand", lambda: None, by_hand, times),
        Contender("Treadle", lambda: None, treadle, times, goal=Goal(1.10)),
    ]


def _archive(context: Context) -> list[Contender]:
    store, database = _open(context, [Sale])
    number, chunk = context.scale(200_000, 2_000), 1_000
    sales, archive = database["sales"], database["sales_archive"]

    def fill() -> None:
        for collection in (sales, archive):
            collection.delete_many({})
        for start in range(0, number, 10_000):
            keys = range(start, min(number, start + 10_000))
            sales.insert_many([{"_id": key, "amount": key, "date": OLD} for key in keys], ordered=False)

    def move(session: Any, keys: list[Any]) -> None:
        documents = list(sales.find({"_id": {"$in": keys}}, session=session))
        archive.insert_many(documents, session=session)
        sales.delete_many({"_id": {"$in": keys}}, session=session)

    def by_hand(_: Any) -> None:
        with database.client.start_session() as session:
            while keys := [
                each["_id"] for each in sales.find({"date": {"$lte": OLD}}, {"_id": 1}).limit(chunk)
            ]:
                session.with_transaction(
                    lambda own, keys=keys: move(own, keys), write_concern=WriteConcern("majority")
                )

    def treadle(_: Any) -> None:
        assert number == store.archive(Sale)

    return [
        Contender("copied and deleted by hand, in transactions", fill, by_hand, number),
        Contender("Treadle", fill, treadle, number, goal=Goal(1.20)),
    ]


def _filter(context: Context) -> list[Contender]:
    store, database = _open(context, [Product])
    times = context.scale(200, 10)
    store.insert_many(
        [
            Product(id=key, specs={name: key % (7 + at) for at, name in enumerate(NAMES)})
            for key in range(1_000)
        ]
    )
    sent = {"specs": {"$elemMatch": {"k": "name5", "v": {"$gte": 11}}}}

    def by_hand(_: Any) -> None:
        for _ in range(times):
            assert list(database["products"].find(sent, {"_id": 1}).limit(1))

    def treadle(_: Any) -> None:
        for _ in range(times):
            assert store.exists(Product, {"specs.name5": {"$gte": 11}})

    return [
        Contender("$elemMatch by hand", lambda: None, by_hand, times),
        Contender("Treadle", lambda: None, treadle, times, goal=Goal(1.10)),
    ]


def _storage(context: Context) -> list[Contender]:
    store, database = _open(context, [Product])
    number = context.scale(5_000, 500)
    values = [{name: (key * 7 + at) % 1_000 for at, name in enumerate(NAMES)} for key in range(number)]
    store.insert_many([Product(id=key, specs=each) for key, each in enumerate(values)])
    fields = database["fields"]
    fields.create_indexes([IndexModel([(name, 1)], sparse=True) for name in NAMES])
    fields.insert_many([{"_id": key, **each} for key, each in enumerate(values)])

    def size(name: str) -> float:
        database.client.admin.command("fsync")
        statistics = database.command("collStats", name)
        # A microsecond stands for a byte.
        return float(statistics["totalIndexSize"]) / number / 1e6

    return [
        Contender("40 fields with sparse indexes", lambda: None, lambda _: size("fields"), measured=True),
        Contender(
            "Treadle, one index", lambda: None, lambda _: size("products"), goal=Goal(0.5), measured=True
        ),
    ]


def _related(context: Context) -> list[Contender]:
    store, database = _open(context, [Node, Course, Student])
    times = context.scale(100, 5)
    store.insert_many([Course(id=key) for key in range(10)])
    store.insert_many([Student(id=100 + key, name="a", links=[key % 10]) for key in range(1_000)])
    chosen = {"$or": [{"_id": 3}, {"links": 3}]}
    load = store.graph.entry(Node).codec.load

    def by_hand(_: Any) -> None:
        for _ in range(times):
            assert 101 == len([load(raw) for raw in database["nodes"].find(chosen)])

    def treadle(_: Any) -> None:
        for _ in range(times):
            assert 101 == len(list(store.related(Course, 3)))

    return [
        Contender("one find by hand", lambda: None, by_hand, times),
        Contender("Treadle", lambda: None, treadle, times, goal=Goal(1.10)),
    ]
