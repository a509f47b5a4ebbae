"""Kinds and versions: what reading them costs, and migrations beside the same work by hand and Beanie's."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

from pymongo import MongoClient, UpdateOne
from pymongo.database import Database

from benchmarks.harness import Contender, Context, Goal, Group
from treadle import Document, Store, migration

DATABASE = "bench_shapes"
DATE = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
DOCUMENTS, DOCUMENTS_QUICK = 10_000, 2_000
MIGRATED, MIGRATED_QUICK = 200_000, 4_000
BATCH = 1000
RANGE = 50_000
UPDATE_MANY = "by hand: pipeline update_many"
IN_RANGES = "by hand: the same in ranges of 50,000, and a last look"
SLOW_PART = 20
ROUNDS_MIGRATION = 3


class Plain(Document, collection="plain"):
    name: str
    email: str
    tier: str
    joined: dt.datetime
    visits: int


class Current(Document, collection="current", version=2):
    name: str
    email: str
    tier: str
    joined: dt.datetime
    visits: int


migration(Current, 1, up=lambda document: document)


class Item(Document, collection="items", discriminator="kind"):
    name: str
    email: str
    tier: str


class One(Item, kind="one"):
    joined: dt.datetime
    visits: int


class Two(Item, kind="two"):
    joined: dt.datetime
    visits: int


class Three(Item, kind="three"):
    joined: dt.datetime
    visits: int


class Four(Item, kind="four"):
    joined: dt.datetime
    visits: int


KINDS = ("one", "two", "three", "four")


class User(Document, collection="users", version=2):
    name: str
    phones: list[str]
    visits: int


@migration(User, from_version=1)
def split_phone(document: dict[str, Any]) -> dict[str, Any]:
    document["phones"] = [document.pop("phone")]
    return document


class Piped(Document, collection="users", version=2):
    name: str
    phones: list[str]
    visits: int


PIPELINE = [{"$set": {"phones": ["$phone"]}}, {"$unset": "phone"}]
migration(Piped, 1, up=PIPELINE)


def groups() -> list[Group]:
    return [
        Group("shapes", "read 10,000 documents of 4 kinds as models", _read_kinds),
        Group("shapes", "read 10,000 documents of the current version as models", _read_versions, 31),
        Group("shapes", "migrate 200,000 documents by a function", _migrate_by_function, ROUNDS_MIGRATION),
        Group("shapes", "migrate 200,000 documents by a pipeline", _migrate_by_pipeline, 5, seconds_max=30.0),
    ]


def _database(context: Context) -> Database[Any]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    client.drop_database(DATABASE)
    return client[DATABASE]


def _person(number: int) -> dict[str, Any]:
    return {
        "name": f"Person {number}",
        "email": f"person{number}@example.org",
        "tier": "gold" if number % 3 else "silver",
        "joined": DATE + dt.timedelta(minutes=number),
        "visits": number,
    }


def _reading(store: Store, model: type[Document], count: int, **more: Any) -> Contender:
    def work(_: Any) -> int:
        return len(store.find(model).to_list())

    def check(found: Any) -> None:
        assert count == found

    name = more.pop("name")
    return Contender(name, lambda: None, work, operations=count, check=check, **more)


def _read_kinds(context: Context) -> list[Contender]:
    database, count = _database(context), context.scale(DOCUMENTS, DOCUMENTS_QUICK)
    database["plain"].insert_many([{**_person(number), "kind": "one"} for number in range(count)])
    database["items"].insert_many([{**_person(number), "kind": KINDS[number % 4]} for number in range(count)])
    store = Store(database, [Plain, Item, One, Two, Three, Four])
    return [
        _reading(store, Plain, count, name="one model"),
        _reading(store, Item, count, name="4 kinds", goal=Goal(1.2)),
    ]


def _read_versions(context: Context) -> list[Contender]:
    database, count = _database(context), context.scale(DOCUMENTS, DOCUMENTS_QUICK)
    for name in ("plain", "current"):
        # The same bytes in both, so that only what is done with them differs.
        database[name].insert_many([{**_person(number), "schema_version": 2} for number in range(count)])
    store = Store(database, [Plain, Current])
    return [
        _reading(store, Plain, count, name="without versions"),
        _reading(store, Current, count, name="current version", goal=Goal(1.03)),
    ]


def _old_users(context: Context, count: int) -> tuple[Database[Any], Callable[..., Contender]]:
    """A database, and what makes a contender that gets so many users of the old version in it."""
    database = _database(context)
    template = database["template"]
    for start in range(0, count, 10_000):
        template.insert_many(
            [
                {"_id": number, "name": f"Person {number}", "phone": str(number), "visits": 0}
                for number in range(start, min(start + 10_000, count))
            ]
        )
    users = database["users"]

    def contender(name: str, work: Callable[[Any], Any], documents: int = count, **more: Any) -> Contender:
        def prepare() -> None:
            template.aggregate([{"$match": {"_id": {"$lt": documents}}}, {"$out": "users"}])
            database["treadle.leases"].drop()

        def check(_: Any) -> None:
            migrated = {"schema_version": 2, "phones.0": {"$exists": True}, "phone": {"$exists": False}}
            assert documents == users.count_documents(migrated)

        return Contender(name, prepare, work, operations=documents, check=check, **more)

    return database, contender


def _update_many(users: Any) -> None:
    users.update_many({"schema_version": {"$not": {"$gte": 2}}}, [*PIPELINE, {"$set": {"schema_version": 2}}])


def _migrate_by_pipeline(context: Context) -> list[Contender]:
    database, contender = _old_users(context, context.scale(MIGRATED, MIGRATED_QUICK))
    users, store = database["users"], Store(database, [Piped])
    return [
        contender(UPDATE_MANY, lambda _: _update_many(users)),
        contender(IN_RANGES, lambda _: _by_ranges(users)),
        contender("Treadle, pipeline", lambda _: store.migrate(Piped), goal=Goal(1.1, limit=IN_RANGES)),
    ]


def _migrate_by_function(context: Context) -> list[Contender]:
    count = context.scale(MIGRATED, MIGRATED_QUICK)
    database, contender = _old_users(context, count)
    users = database["users"]
    # Document by document it takes many minutes; a part of them tells as much.
    part = count // SLOW_PART

    store = Store(database, [User])
    made = [
        contender("by hand: bulk_write of 1,000, guarded", lambda _: _by_hand(users)),
        contender("Treadle, Python function", lambda _: store.migrate(User), goal=Goal(1.2)),
        contender(f"by hand: the literature's loop, of {part:,}", lambda _: _loop(users), part, rounds_max=1),
    ]
    beanie = _beanie(context)
    if beanie is not None:
        made.append(contender(f"Beanie, iterative migration, of {part:,}", beanie, part, rounds_max=1))
    return made


def _by_hand(users: Any) -> None:
    """What a careful person writes: in batches by `_id`, comparing what the change rests on."""
    last = -1
    while True:
        stale = {"_id": {"$gt": last}, "schema_version": {"$not": {"$gte": 2}}}
        documents = list(users.find(stale).sort("_id", 1).limit(BATCH))
        if not documents:
            return
        last = documents[-1]["_id"]
        operations = []
        for document in documents:
            phone = document["phone"]
            guard = {
                "_id": document["_id"],
                "phone": {"$eq": phone, "$not": {"$type": "array"}},
                "phones": {"$exists": False},
                "schema_version": {"$exists": False},
            }
            update = {"$set": {"phones": [phone], "schema_version": 2}, "$unset": {"phone": ""}}
            operations.append(UpdateOne(guard, update))
        assert len(operations) == users.bulk_write(operations, ordered=False).matched_count


def _by_ranges(users: Any) -> None:
    """The same by ranges of `_id`, so that it can be taken up again, and a last look whether all is done."""
    stale = {"schema_version": {"$not": {"$gte": 2}}}
    last = -1
    while True:
        after = {"_id": {"$gt": last}}
        ends = list(users.find(after, {"_id": 1}).sort("_id", 1).skip(RANGE - 1).limit(1))
        within = {"_id": {"$gt": last, "$lte": ends[0]["_id"]}} if ends else after
        users.update_many({**within, **stale}, [*PIPELINE, {"$set": {"schema_version": 2}}])
        if not ends:
            break
        last = ends[0]["_id"]
    assert users.find_one(stale) is None


def _loop(users: Any) -> None:
    for document in users.find({"schema_version": {"$not": {"$gte": 2}}}):
        phones = [document.pop("phone")]
        users.replace_one({"_id": document["_id"]}, {**document, "phones": phones, "schema_version": 2})


def _beanie(context: Context) -> Any:
    try:
        import beanie
        from pymongo import AsyncMongoClient
    except ImportError:
        return None

    class OldUser(beanie.Document):
        id: int  # type: ignore[assignment]
        name: str
        phone: str
        visits: int

        class Settings:
            name = "users"

    class NewUser(beanie.Document):
        id: int  # type: ignore[assignment]
        name: str
        phones: list[str]
        visits: int
        schema_version: int = 2

        class Settings:
            name = "users"

    async def split(input_document: OldUser, output_document: NewUser) -> None:
        output_document.phones = [input_document.phone]

    split.__annotations__ = {"input_document": OldUser, "output_document": NewUser}
    client: Any = AsyncMongoClient(context.uri)
    context.stack.callback(lambda: context.wait(client.close()))
    context.wait(beanie.init_beanie(database=client[DATABASE], document_models=[OldUser, NewUser]))
    controller = beanie.iterative_migration()(split)

    async def work(_: Any) -> None:
        await controller.run(session=None)

    return work
