"""Appending to arrays of every length: an outlier array beside a plain $push and $addToSet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from bson import ObjectId
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.write_concern import WriteConcern

from benchmarks.harness import Contender, Context, Goal, Group
from treadle import Document, Id, Outlier, Store

DATABASE = "treadle_benchmarks_outlier"
LENGTHS = [100, 1_000, 10_000, 100_000, 500_000]
# Beyond this, all lengths overflow, so that the figures say how the cost of overflow grows.
LIMIT = 50
BY_HAND = "two updates in a transaction, by hand"
GUARDED = "the same with Treadle's conditions, on its collections with their validators"
# Where an owner notes the number of its last page.
LAST = "_treadle.outlier.followers.last"
IN_ROOM = "$push and $inc by hand, where there is room and no overflow"


class Fan(Document, collection="fans"):
    """As most would declare it: what is embedded is ordinary, and more is rare."""

    followers: Annotated[list[Id], Outlier(limit=500, overflow="fan_overflow", page_size=1000)] = []
    follower_count: int = 0
    has_overflow: bool = False


class User(Document, collection="users"):
    followers: Annotated[list[Id], Outlier(limit=LIMIT, overflow="follower_overflow")] = []
    follower_count: int = 0
    has_overflow: bool = False


def groups() -> list[Group]:
    return [
        Group("outlier", "append one item to an array of so many", _append, rounds=11),
        Group("outlier", "the same with limit=500: the first is embedded", _declared, rounds=11),
        Group("outlier", "append to an ordinary document", _ordinary, rounds=11),
        Group("outlier", "1,000 items, time per item", _extend, rounds=7),
    ]


def _open(context: Context) -> tuple[Store, Database[Any]]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    client.drop_database(DATABASE)
    database = client.get_database(DATABASE, write_concern=WriteConcern("majority"))
    store = Store(database, [User, Fan])
    store.setup()
    context.stack.callback(lambda: client.drop_database(DATABASE))
    return store, database


def _append(context: Context) -> list[Contender]:
    store, database = _open(context)
    times = context.scale(30, 5)
    lengths = [length for length in LENGTHS if length <= context.scale(LENGTHS[-1], 10_000)]
    contenders = []
    for length in lengths:
        user = store.insert(User())
        store.array(User, "followers", user.id).extend(ObjectId() for _ in range(length))
        array = store.array(User, "followers", user.id)
        first = f"Treadle, {lengths[0]:,}"
        name = f"Treadle, {length:,}"
        goal = Goal(1.5) if length > lengths[0] else None

        def treadle(_: Any, array: Any = array) -> Any:
            for _ in range(times):
                array.append(ObjectId())
            return array

        contenders.append(Contender(name, lambda: None, treadle, times, baseline=first, goal=goal))
    for operator in ("$push", "$addToSet"):
        for length in lengths:
            key = f"{operator}{length}"
            database["naive"].insert_one({"_id": key, "followers": [ObjectId() for _ in range(length)]})

            def naive(_: Any, key: str = key, operator: str = operator) -> None:
                for _ in range(few(key)):
                    database["naive"].update_one({"_id": key}, {operator: {"followers": ObjectId()}})

            contenders.append(
                Contender(
                    f"{operator}, {length:,}", lambda: None, naive, few(key), f"{operator}, {lengths[0]:,}"
                )
            )
    return contenders


def _declared(context: Context) -> list[Contender]:
    store, database = _open(context)
    times = context.scale(30, 5)
    first, *others = [length for length in LENGTHS if length <= context.scale(LENGTHS[-1], 10_000)]
    owner, page = database["owners"], database["pages"]
    owner.insert_one({"_id": 1, "follower_count": 0})
    page.insert_one({"_id": 1, "followers": [ObjectId() for _ in range(500)], "count": 500})

    def new() -> Any:
        # Always the same length: what is embedded must not overflow meanwhile.
        fan = store.insert(Fan(followers=[ObjectId() for _ in range(first)]))
        return store.array(Fan, "followers", fan.id)

    def append(array: Any) -> None:
        for _ in range(times):
            array.append(ObjectId())

    def by_hand(_: Any) -> None:
        for _ in range(times):
            with database.client.start_session() as session:
                session.with_transaction(two_updates, write_concern=WriteConcern("majority"))

    def guarded(key: Any) -> None:
        def two(session: Any) -> None:
            condition = {"_id": key, "follower_count": {"$type": "number"}, LAST: 2}
            counted = database["fans"].update_one(condition, {"$inc": {"follower_count": 1}}, session=session)
            of_owner = {"fan_id": key, "page": 2, "count": {"$lte": 999}}
            push = {"$push": {"followers": ObjectId()}, "$inc": {"count": 1}}
            pushed = database["fan_overflow"].update_one(of_owner, push, session=session)
            assert counted.matched_count == pushed.matched_count == 1

        for _ in range(times):
            with database.client.start_session() as session:
                session.with_transaction(two, write_concern=WriteConcern("majority"))

    def overflowing() -> Any:
        fan = store.insert(Fan())
        store.array(Fan, "followers", fan.id).extend(ObjectId() for _ in range(1_000))
        return fan.id

    def shorten() -> None:
        page.update_one({"_id": 1}, [{"$set": {"followers": {"$slice": ["$followers", 500]}}}])

    def two_updates(session: Any) -> None:
        owner.update_one({"_id": 1}, {"$inc": {"follower_count": 1}}, session=session)
        push = {"$push": {"followers": ObjectId()}, "$inc": {"count": 1}}
        page.update_one({"_id": 1}, push, session=session)

    contenders = [
        Contender(f"Treadle, {first:,}", new, append, times),
        Contender(BY_HAND, shorten, by_hand, times),
        Contender(GUARDED, overflowing, guarded, times),
    ]
    for length in others:
        fan = store.insert(Fan())
        array = store.array(Fan, "followers", fan.id)
        array.extend(ObjectId() for _ in range(length))
        contenders.append(
            Contender(
                f"Treadle, {length:,}", partial(_same, array), append, times, goal=Goal(1.5, limit=GUARDED)
            )
        )
    return contenders


def _same(array: Any) -> Any:
    return array


def few(key: str) -> int:
    """A push to half a million items takes long; it need not be done often."""
    return 2 if key.endswith("00000") else 10


def _ordinary(context: Context) -> list[Contender]:
    store, database = _open(context)
    times = context.scale(40, 5)

    def new() -> Any:
        return store.insert(User()).id

    def push(key: Any) -> Any:
        for _ in range(times):
            change = {"$push": {"followers": ObjectId()}, "$inc": {"follower_count": 1}}
            database["users"].update_one({"_id": key}, change)
        return key

    def in_room(key: Any) -> Any:
        ordinary = {"has_overflow": {"$ne": True}, f"followers.{LIMIT - 1}": {"$exists": False}}
        for _ in range(times):
            change = {"$push": {"followers": ObjectId()}, "$inc": {"follower_count": 1}}
            database["users"].update_one({"_id": key, **ordinary}, change)
        return key

    def treadle(key: Any) -> Any:
        array = store.array(User, "followers", key)
        for _ in range(times):
            array.append(ObjectId())
        return key

    def check(key: Any) -> None:
        assert times == store.array(User, "followers", key).count()

    return [
        Contender("$push and $inc by hand", new, push, times, check=check),
        # By the id alone, the server needs no plan for the update.
        Contender(IN_ROOM, new, in_room, times, check=check),
        Contender("Treadle", new, treadle, times, goal=Goal(1.10, limit=IN_ROOM), check=check),
        Contender("Treadle, overflowing", _long(store), _appending(store, times), times),
    ]


def _long(store: Store) -> Callable[[], Any]:
    return lambda: store.insert(User(followers=[ObjectId() for _ in range(200)])).id


def _appending(store: Store, times: int) -> Callable[[Any], None]:
    def append(key: Any) -> None:
        array = store.array(User, "followers", key)
        for _ in range(times):
            array.append(ObjectId())

    return append


def _extend(context: Context) -> list[Contender]:
    store, _ = _open(context)
    number, few_items = 1_000, context.scale(200, 20)

    def together(key: Any) -> Any:
        assert number == store.array(User, "followers", key).extend(ObjectId() for _ in range(number))
        return key

    return [
        Contender("one by one", _long(store), _appending(store, few_items), few_items),
        Contender("extend", _long(store), together, number, goal=Goal(1 / 50)),
    ]
