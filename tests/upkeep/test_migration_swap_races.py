"""What others do while a collection is swapped: unique values move, indexes come, a process is paused."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient, MongoClient

from tests import faults
from treadle import AsyncStore, DataError, Document, Indexed, Store, migration
from treadle.engine.lease import LONG_AGO
from treadle.plan.server_errors import QUERY_PLAN_KILLED
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
