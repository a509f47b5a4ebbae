"""Everyday calls: cards, pages, bulk writes, and what validating an update costs."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial
from typing import Annotated, Any

from bson import ObjectId
from pydantic import BaseModel, create_model
from pymongo import DeleteOne, InsertOne, MongoClient, UpdateOne
from pymongo.database import Database
from pymongo.write_concern import WriteConcern

from benchmarks.harness import Contender, Context, Goal, Group
from treadle import Count, Delete, Document, Id, Insert, Store, Sum, Unchecked, Update

DATABASE = "treadle_benchmarks_everyday"
FIELDS = 30
CHUNK = 1_000


class Wide(Document, collection="wide"):
    number: int
    name: str
    price: float


# Thirty fields in all: numbers, texts and short lists in turn.
Record: Any = create_model(
    "Record",
    __base__=Wide,
    __cls_kwargs__={"collection": "records"},
    **{f"field{at}": ((int, str, list[int])[at % 3], ...) for at in range(FIELDS - 3)},  # type: ignore[call-overload]
)


class Card(BaseModel):
    number: int
    name: str
    price: float


class Parent(Document, collection="parents"):
    children: Annotated[int, Count("Child", by="parent_id")] = 0
    total: Annotated[int, Sum("Child", "amount", by="parent_id")] = 0


class Child(Document, collection="children"):
    parent_id: Id
    amount: int = 0


class Account(Document, collection="accounts"):
    name: str
    visits: int = 0
    tags: list[str] = []


def groups() -> list[Group]:
    return [
        Group("everyday", "find 3 of 30 fields into a card", _card, rounds=11),
        Group("everyday", "a page of 1,000 documents", _page, rounds=11),
        Group("everyday", "a bulk of 10,000 mixed writes of children", _bulk, rounds=3),
        Group("everyday", "an update, validated before it is sent", _validation, rounds=21),
    ]


def _open(context: Context, models: list[type[Any]]) -> tuple[Store, Database[Any]]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri, tz_aware=True))
    client.drop_database(DATABASE)
    database = client.get_database(DATABASE, write_concern=WriteConcern("majority"))
    store = Store(database, models)
    store.setup()
    context.stack.callback(lambda: client.drop_database(DATABASE))
    return store, database


def _record(number: int) -> Any:
    kinds: tuple[Any, ...] = (number, f"text {number}", [number, number + 1, number + 2])
    fields = {f"field{at}": kinds[at % 3] for at in range(FIELDS - 3)}
    return Record(number=number, name=f"record {number}", price=number % 97 / 7, **fields)


def _card(context: Context) -> list[Contender]:
    store, _ = _open(context, [Record])
    number = context.scale(2_000, 200)
    store.insert_many([_record(each) for each in range(number)])

    def check(found: list[Any]) -> None:
        assert number == len(found)
        assert 0 == sorted(each.number for each in found)[0]

    return [
        Contender("whole models", lambda: None, lambda _: store.find(Record).to_list(), number, check=check),
        Contender(
            "Treadle, into=Card",
            lambda: None,
            lambda _: store.find(Record, into=Card).to_list(),
            number,
            goal=Goal(0.6),
            check=check,
        ),
    ]


def _page(context: Context) -> list[Contender]:
    store, database = _open(context, [Account])
    number, size = context.scale(10_000, 600), context.scale(1_000, 100)
    store.insert_many([Account(name=f"name {each % 500:03}", visits=each) for each in range(number)])
    database["accounts"].create_index([("name", 1), ("_id", 1)])
    first = store.page(Account, sort="name", size=size)
    last = first.items[-1]

    def by_hand(_: Any) -> list[Account]:
        later = {"$or": [{"name": {"$gt": last.name}}, {"name": last.name, "_id": {"$gt": last.id}}]}
        rows = database["accounts"].find(later).sort([("name", 1), ("_id", 1)]).limit(size + 1).to_list()
        return [Account.model_validate(row) for row in rows[:size]]

    def check(found: list[Account]) -> None:
        assert size == len(found)
        assert (last.name, last.id) < (found[0].name, found[0].id)

    return [
        Contender("by hand", lambda: None, by_hand, size, check=check),
        Contender(
            "Treadle",
            lambda: None,
            lambda _: store.page(Account, sort="name", size=size, after=first.next).items,
            size,
            goal=Goal(1.1),
            check=check,
        ),
    ]


# -- bulk ------------------------------------------------------------------------------------------


def _bulk(context: Context) -> list[Contender]:
    store, database = _open(context, [Parent, Child])
    number = context.scale(10_000, 500)
    parents = [each.id for each in store.insert_many([Parent() for _ in range(10)])]

    def prepare() -> list[tuple[str, ObjectId, ObjectId, int]]:
        """Half of them inserts, then updates and deletions of what was there before, in a fixed disorder."""
        store.delete_many(Child, {})
        chance = random.Random(7)
        there = store.insert_many(
            [Child(parent_id=chance.choice(parents), amount=1) for _ in range(number // 2)]
        )
        kinds = ["update"] * (number * 3 // 10) + ["delete"] * (number // 5)
        planned = [(kind, each.id, each.parent_id, 5) for kind, each in zip(kinds, there, strict=False)]
        planned += [("insert", ObjectId(), chance.choice(parents), 3) for _ in range(number - len(planned))]
        chance.shuffle(planned)
        return planned

    def by_hand(ordered: bool, planned: list[tuple[str, ObjectId, ObjectId, int]]) -> None:
        for start in range(0, number, CHUNK):
            with database.client.start_session() as session:
                session.with_transaction(partial(_write, database, planned[start : start + CHUNK], ordered))

    def treadle(ordered: bool, planned: list[tuple[str, ObjectId, ObjectId, int]]) -> None:
        store.bulk([_operation(*each) for each in planned], ordered=ordered)

    def check(_: Any) -> None:
        assert [] == store.verify(Parent)

    return [
        Contender(
            "bulk_write by hand, and the parents", prepare, partial(by_hand, True), number, check=check
        ),
        Contender("Treadle", prepare, partial(treadle, True), number, goal=Goal(1.2), check=check),
        Contender("by hand, in any order", prepare, partial(by_hand, False), number, check=check),
        Contender(
            "Treadle, in any order",
            prepare,
            partial(treadle, False),
            number,
            baseline="by hand, in any order",
            check=check,
        ),
    ]


def _operation(kind: str, key: ObjectId, parent: ObjectId, amount: int) -> Any:
    if kind == "insert":
        return Insert(Child(id=key, parent_id=parent, amount=amount))
    if kind == "delete":
        return Delete(Child, key)
    return Update(Child, key, {"$set": {"amount": amount}})


def _write(
    database: Database[Any], planned: list[tuple[str, ObjectId, ObjectId, int]], ordered: bool, session: Any
) -> None:
    """One chunk as one would write it: what was there, the writes, and the difference for each parent."""
    keys = [key for kind, key, _, _ in planned if kind != "insert"]
    before = {
        each["_id"]: each for each in database["children"].find({"_id": {"$in": keys}}, session=session)
    }
    counts: dict[Any, int] = defaultdict(int)
    totals: dict[Any, int] = defaultdict(int)
    writes: list[Any] = []
    for kind, key, parent, amount in planned:
        if kind == "insert":
            child = Child(id=key, parent_id=parent, amount=amount)
            writes.append(InsertOne({"_id": child.id, "parent_id": child.parent_id, "amount": child.amount}))
            counts[parent] += 1
            totals[parent] += amount
        elif kind == "update":
            writes.append(UpdateOne({"_id": key}, {"$set": {"amount": amount}}))
            totals[parent] += amount - before[key]["amount"]
        else:
            writes.append(DeleteOne({"_id": key}))
            counts[parent] -= 1
            totals[parent] -= before[key]["amount"]
    database["children"].bulk_write(writes, ordered=ordered, session=session)
    database["parents"].bulk_write(
        [
            UpdateOne({"_id": each}, {"$inc": {"children": counts[each], "total": totals[each]}})
            for each in totals
        ],
        session=session,
    )


# -- validation ------------------------------------------------------------------------------------


def _validation(context: Context) -> list[Contender]:
    store, _ = _open(context, [Account])
    account = store.insert(Account(name="Ada"))
    times = context.scale(250, 20)
    change = {"$set": {"name": "Ada L."}, "$inc": {"visits": 1}, "$addToSet": {"tags": "new"}}

    def update(sent: Any) -> Any:
        for _ in range(times):
            after = store.update(Account, account.id, sent)
        return after

    def check(after: Any) -> None:
        assert ["new"] == after.tags

    return [
        Contender("Unchecked({…})", lambda: Unchecked(change), update, times, check=check),
        Contender("Treadle", lambda: change, update, times, goal=Goal(1.05), check=check),
    ]
