"""What others do while a collection is swapped: unique values move, indexes come, a process is paused."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient, MongoClient

from tests import faults
from treadle import AsyncStore, DataError, Document, Indexed, PartlyDone, Store, migration
from treadle.engine.lease import LONG_AGO
from treadle.plan.server_errors import QUERY_PLAN_KILLED, SWAPPING
from treadle.upkeep.migrations import swap

NUMBER = 20


class Seat(Document, collection="seats", version=2):
    row: int
    guest: Annotated[str | None, Indexed(unique=True)] = None


migration(Seat, from_version=1, up=[{"$set": {"row": "$line"}}, {"$unset": "line"}])


@pytest.fixture
def seats(database: Any) -> list[dict[str, Any]]:
    Store(database, [Seat]).setup()
    documents = [{"_id": ObjectId(), "line": number, "guest": f"guest {number}"} for number in range(NUMBER)]
    database.seats.insert_many(documents)
    return documents


def migrated(server: Any, database: Any, command: str, skip: int, act: Any) -> None:
    """A swap during which somebody acts just before one of its commands."""
    listener = faults.Heard()
    with MongoClient[Any](server.uri, event_listeners=[listener]) as client:
        store = Store(client[database.name], [Seat])
        store.migration_status(Seat)
        done: list[bool] = []
        listener.before([command], skip, lambda: done.append(act()))
        assert store.migrate(Seat, strategy="swap").finished
    assert 1 == len(done)


def guests(database: Any) -> dict[Any, Any]:
    return {each["_id"]: each.get("guest") for each in database.seats.find()}


@pytest.mark.parametrize("when", [("createIndexes", 0), ("collMod", 0)])
def test_a_unique_value_may_move(seats: list[dict[str, Any]], server: Any, database: Any, when: Any) -> None:
    """It is never in two documents at once, but the copy of one may be older than that of the other."""
    one, other = seats[0]["_id"], seats[1]["_id"]

    def move() -> None:
        database.seats.update_one({"_id": one}, {"$unset": {"guest": 1}})
        database.seats.update_one({"_id": other}, {"$set": {"guest": "guest 0"}})
        database.seats.update_one({"_id": one}, {"$set": {"guest": "guest 1"}})

    migrated(server, database, *when, move)
    expected = {each["_id"]: each["guest"] for each in seats} | {one: "guest 1", other: "guest 0"}
    assert expected == guests(database)


def test_a_unique_value_may_move_while_documents_are_copied(
    seats: list[dict[str, Any]], server: Any, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = swap._build

    def copied_twice(run: Any, shadow: str) -> Any:
        yield from swap._copy(run, shadow)
        database[shadow].insert_one({"_id": (new := ObjectId()), "row": 1, "guest": "guest 0"})
        database.seats.delete_one({"_id": seats[0]["_id"]})
        database.seats.insert_one({"_id": new, "line": 1, "guest": "guest 0"})
        monkeypatch.setattr(swap, "_copy", lambda *_: iter(()))
        yield from build(run, shadow)

    monkeypatch.setattr(swap, "_build", copied_twice)
    assert Store(database, [Seat]).migrate(Seat, strategy="swap").finished
    assert NUMBER == len(guests(database))


def test_what_is_set_up_while_documents_are_copied_stays(
    seats: list[dict[str, Any]], server: Any, database: Any
) -> None:
    validator = {"guest": {"$ne": "nobody"}}

    def set_up() -> None:
        database.seats.create_index("row", name="rows")
        database.seats.drop_index("guest_1")
        database.command({"collMod": "seats", "validator": validator})

    migrated(server, database, "createIndexes", 0, set_up)
    assert {"_id_", "rows"} == database.seats.index_information().keys()
    (listed,) = database.list_collections(filter={"name": "seats"})
    assert validator == listed["options"]["validator"]


def test_an_index_of_the_last_moment_is_not_lost(
    seats: list[dict[str, Any]], server: Any, database: Any
) -> None:
    with pytest.raises(DataError) as refused:
        migrated(server, database, "collMod", 0, lambda: database.seats.create_index("row", name="rows"))
    assert "migration-failed" == refused.value.code
    assert {"_id_", "guest_1", "rows"} == database.seats.index_information().keys()
    assert seats == list(database.seats.find())
    Store(database, [Seat]).insert(Seat(row=5))


@pytest.mark.usefixtures("seats")
def test_whoever_was_paused_before_its_rename_renames_nothing(server: Any, database: Any) -> None:
    """Its lease has run out and somebody else has let writes through; they would be lost."""
    added: list[Any] = []

    def take_over() -> None:
        lease = {"_id": "migrate:seats"}
        assert database["treadle.leases"].update_one(lease, {"$set": {"until": LONG_AGO}}).modified_count
        other = Store(database, [Seat])
        other.recover()
        added.append(other.insert(Seat(row=5)).id)

    with pytest.raises(DataError) as refused:
        migrated(server, database, "renameCollection", 0, take_over)
    assert "migration-running" == refused.value.code
    assert NUMBER + 1 == len(guests(database))
    assert added[0] in guests(database)
    assert [] == [name for name in database.list_collection_names() if name.startswith("treadle.swap.")]


def test_values_that_are_equal_after_the_migration_change_nothing(
    seats: list[dict[str, Any]], server: Any, database: Any
) -> None:
    class Shared(Document, collection="seats", version=2):
        guest: Annotated[str | None, Indexed(unique=True)] = None

    migration(Shared, from_version=1, up=[{"$set": {"guest": "everybody"}}])
    with pytest.raises(DataError, match="E11000") as refused:
        Store(database, [Shared]).migrate(Shared, strategy="swap")
    assert "migration-failed" == refused.value.code
    assert seats == list(database.seats.find())


def test_a_read_that_a_rename_ends_is_made_again(
    run: Any, seats: list[dict[str, Any]], database: Any
) -> None:
    """The server ends it, because what it reads is dropped."""
    store, ids = run.store([Seat]), [each["_id"] for each in seats]
    store.setup()
    failing = {"failCommands": ["find"], "errorCode": QUERY_PLAN_KILLED}
    point = {"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": failing}
    before = database.client.admin.command(point)["count"]
    try:
        assert ids == [each.id for each in store.get_many(Seat, ids)]
    finally:
        after = database.client.admin.command({**point, "mode": "off"})["count"]
    assert 1 == after - before


@pytest.mark.parametrize("command", ["drop", "getMore", "collMod"])
def test_a_failover_after_the_rename_holds_nobody_up(
    seats: list[dict[str, Any]], server: Any, database: Any, command: str
) -> None:
    """Whatever fails while writes are let through again is done once more."""
    heard, admin = faults.Heard(), database.client.admin
    failing = {"failCommands": [command], "appName": "failing", "closeConnection": True}
    point = {"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": failing}
    with MongoClient[Any](server.uri, event_listeners=[heard], appname="failing") as client:
        store = Store(client[database.name], [Seat])
        heard.before(["renameCollection"], 0, lambda: admin.command(point))
        try:
            assert store.migrate(Seat, strategy="swap").finished
        finally:
            admin.command({**point, "mode": "off"})
    database.seats.insert_one({"row": 1, "schema_version": 2})
    assert NUMBER + 1 == database.seats.count_documents({"schema_version": 2})


def test_a_swap_that_is_cancelled_lets_writes_through(
    seats: list[dict[str, Any]], server: Any, database: Any
) -> None:
    heard = faults.Heard()

    async def scenario() -> None:
        async with AsyncMongoClient[Any](server.uri, event_listeners=[heard]) as client:
            store = AsyncStore(client[database.name], [Seat])
            task = asyncio.create_task(store.migrate(Seat, strategy="swap"))
            # The first closes the old collection, the second the new one.
            heard.before(["collMod"], 1, task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    database.seats.insert_one({"row": 1, "schema_version": 2})
    assert NUMBER + 1 == len(guests(database))


# -- what others read and write meanwhile -----------------------------------------------------------


@pytest.fixture
def many(database: Any) -> list[Any]:
    """More than come in the first reply of a server; ids of several types."""
    keys = [*range(120), *(f"seat {number}" for number in range(120)), *(ObjectId() for _ in range(60))]
    database.seats.insert_many([{"_id": key, "row": 1, "schema_version": 2} for key in keys])
    return keys


class Place(Document, collection="seats"):
    id: Any
    row: int


def swapped(database: Any) -> None:
    """Another collection takes the place of the one that is read."""
    database.other.insert_many(list(database.seats.find()))
    database.other.replace_one({"_id": 1_000}, {"row": 1, "schema_version": 2}, upsert=True)
    database.other.rename("seats", dropTarget=True)


@pytest.mark.parametrize(("sort", "limit"), [("_id", None), ("-_id", None), ("_id", 200)])
def test_a_read_in_the_order_of_ids_goes_on_after_a_swap(
    run: Any, many: list[Any], database: Any, sort: str, limit: int | None
) -> None:
    store = run.store([Place])
    results = store.find(Place, sort=sort, limit=limit)
    keys = [next(results).id for _ in range(3)]
    swapped(database)
    keys += [each.id for each in results]
    expected = [each["_id"] for each in database.seats.find().sort("_id", -1 if sort == "-_id" else 1)]
    if sort == "-_id":
        expected.remove(1_000)
        keys = [key for key in keys if key != 1_000]
    assert expected[:limit] == keys


def test_a_read_in_another_order_says_that_it_was_interrupted(
    run: Any, many: list[Any], database: Any
) -> None:
    store = run.store([Place])
    for read in (lambda: store.find(Place), lambda: store.aggregate(Place, [{"$match": {"row": 1}}])):
        results = read()
        next(results)
        swapped(database)
        with pytest.raises(DataError, match="read them again") as refused:
            list(results)
        assert "read-interrupted" == refused.value.code


def failing(database: Any, command: str) -> Any:
    """The next such command of the client fails as one does whose collection was replaced."""
    data = {"failCommands": [command], "errorCode": QUERY_PLAN_KILLED}
    return {"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": data}


def test_what_is_ended_before_it_gave_anything_is_sent_again(
    run: Any, many: list[Any], database: Any
) -> None:
    store, admin = run.store([Place]), database.client.admin
    store.setup()
    calls = [
        ("find", lambda: len(list(store.find(Place))), len(many)),
        ("aggregate", lambda: len(list(store.aggregate(Place, [{"$match": {"row": 1}}]))), len(many)),
        ("findAndModify", lambda: store.update(Place, 5, {"$inc": {"row": 1}}).row, 2),
        ("findAndModify", lambda: store.delete(Place, 6).id, 6),
    ]
    for command, call, expected in calls:
        before = admin.command(failing(database, command))["count"]
        try:
            actual = call()
        finally:
            after = admin.command({**failing(database, command), "mode": "off"})["count"]
        assert (expected, 1) == (actual, after - before)


def test_an_update_of_many_is_not_sent_again_when_some_of_it_is_done(run: Any, database: Any) -> None:
    """A swap may begin to hold writes up in the middle of it: what was changed would be changed twice."""
    store = run.store([Place])
    database.seats.insert_many([{"_id": number, "row": number} for number in range(10)])
    held_up = {"$expr": {"$or": [{"$lt": ["$_id", 5]}, {"$eq": [SWAPPING, ""]}]}}
    database.command({"collMod": "seats", "validator": held_up})
    with pytest.raises(PartlyDone, match="being swapped") as refused:
        store.update_many(Place, {"row": {"$gte": 0}}, {"$inc": {"row": 1}})
    assert "partly-done" == refused.value.code
    assert [*range(1, 6), *range(5, 10)] == [each["row"] for each in database.seats.find().sort("_id", 1)]


def test_a_write_in_a_callers_transaction_is_refused_by_name(database: Any) -> None:
    store = Store(database, [Place])
    database.create_collection("seats", validator={"$expr": {"$eq": [SWAPPING, ""]}})
    with pytest.raises(DataError, match="being swapped") as refused, store.transaction():
        store.insert(Place(id=1, row=1))
    assert "write-held-up" == refused.value.code
