"""A process that swaps is paused for longer than its lease, before each of its commands in turn.

Whoever takes over writes meanwhile; when the first one goes on, it changes nothing of that.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient, MongoClient

from tests import faults
from treadle import AsyncStore, DataError, Document, Indexed, Store, migration
from treadle.engine.lease import LONG_AGO
from treadle.graph.limits import Limits

NUMBER = 5
COMMANDS_MAX = 100
SWAP = {"strategy": "swap"}


class Desk(Document, collection="desks", version=2):
    floor: int
    owner: Annotated[str | None, Indexed(unique=True)] = None


migration(
    Desk,
    from_version=1,
    up=[{"$set": {"floor": "$level"}}, {"$unset": "level"}],
    down=[{"$set": {"level": "$floor"}}, {"$unset": "floor"}],
)


# Before these a pause is tried always; before all others, too, where TREADLE_SWAP_PAUSES=all.
WRITING = frozenset({"aggregate", "create", "createIndexes", "collMod", "renameCollection", "drop"})
OTHERS = frozenset({"find", "findAndModify", "insert", "update", "delete", "listCollections", "listIndexes"})
ALL = os.environ.get("TREADLE_SWAP_PAUSES") == "all"
LIMITS = Limits(migration_look_seconds=0.001, worker_await_seconds=0.01)


@pytest.fixture
def desks(database: Any) -> list[dict[str, Any]]:
    Store(database, [Desk]).setup()
    return filled(database)


def filled(database: Any) -> list[dict[str, Any]]:
    documents = [{"_id": ObjectId(), "level": each, "owner": f"owner {each}"} for each in range(NUMBER)]
    database.desks.delete_many({})
    database.desks.insert_many(documents)
    return documents


def described(database: Any) -> Any:
    (listed,) = database.list_collections(filter={"name": "desks"})
    return listed["options"], sorted(database.desks.index_information())


def shadows(database: Any) -> list[str]:
    return [name for name in database.list_collection_names() if name.startswith("treadle.swap.")]


def expire(database: Any) -> None:
    """Somebody took the lease, and it has run out. What runs beside a swap does not renew it any more."""
    over = {"$set": {"until": LONG_AGO}, "$inc": {"n": 1}}
    assert database["treadle.leases"].update_one({"_id": "migrate:desks"}, over).matched_count


def recovered(store: Any) -> None:
    store.recover()


def migrated(store: Any) -> None:
    assert store.migrate(Desk).finished


def swapped(store: Any) -> None:
    assert store.migrate(Desk, strategy="swap").finished


@pytest.mark.heavy
@pytest.mark.parametrize("take_over", [recovered, swapped, *([migrated] if ALL else [])])
def test_a_pause_before_any_command_changes_nothing_of_what_others_do(
    take_over: Callable[[Any], None], desks: list[dict[str, Any]], server: Any, database: Any
) -> None:
    heard, before, other = faults.Heard(), described(database), Store(database, [Desk], limits=LIMITS)
    other.migration_status(Desk)
    paused = 0
    with MongoClient[Any](server.uri, event_listeners=[heard]) as client:
        for skip in range(COMMANDS_MAX):
            documents, ids = filled(database), []
            store = Store(client[database.name], [Desk], limits=LIMITS)
            store.migration_status(Desk)

            def act(documents: Any = documents, ids: list[Any] = ids) -> None:
                if database["treadle.leases"].find_one({"_id": "migrate:desks"}):
                    expire(database)
                take_over(other)
                ids.append(other.insert(Desk(floor=9, owner="new")).id)
                other.update(Desk, documents[0]["_id"], {"$set": {"owner": "changed"}})
                other.delete(Desk, documents[1]["_id"])

            heard.before(WRITING | (OTHERS if ALL else set()), skip, act)
            try:
                store.migrate(Desk, strategy="swap")
            except DataError as error:
                assert error.code in ("migration-running", "migration-failed"), skip
            heard.clear()
            if not ids:
                break
            paused += 1
            owners = {each["_id"]: each["owner"] for each in database.desks.find()}
            expected = {each["_id"]: each["owner"] for each in documents} | {ids[0]: "new"}
            expected[documents[0]["_id"]] = "changed"
            del expected[documents[1]["_id"]]
            assert (skip, expected) == (skip, owners)
            assert (skip, before, []) == (skip, described(database), shadows(database))
            database.desks.insert_one({"level": 1})
    assert 8 <= paused < COMMANDS_MAX


def test_a_deletion_is_not_done_again_too_late(
    desks: list[dict[str, Any]], server: Any, database: Any
) -> None:
    """Paused between the rename and that, it would delete what was stored anew."""
    heard, again = faults.Heard(), desks[2]["_id"]

    def take_over() -> None:
        expire(database)
        other = Store(database, [Desk])
        other.recover()
        assert 0 == database.desks.count_documents({"_id": again})
        other.insert(Desk(id=again, floor=7))

    def renaming() -> None:
        database.desks.delete_one({"_id": again})
        # The next update is that of the lease, in the transaction that deletes.
        heard.before(["update"], 0, take_over)

    with MongoClient[Any](server.uri, event_listeners=[heard]) as client:
        heard.before(["renameCollection"], 0, renaming)
        assert Store(client[database.name], [Desk]).migrate(Desk, strategy="swap").finished
    assert 7 == database.desks.find_one({"_id": again})["floor"]
    database.desks.insert_one({"floor": 1, "schema_version": 2})


def test_a_swap_does_not_rename_when_a_paused_one_has_let_writes_through(
    desks: list[dict[str, Any]], server: Any, database: Any
) -> None:
    """The first one is paused before its last command, and goes on while the second holds writes up."""
    waits, goes_on, before = threading.Event(), threading.Event(), described(database)
    first, second = faults.Heard(), faults.Heard()

    def pause() -> None:
        waits.set()
        assert goes_on.wait(60)

    def late() -> None:
        goes_on.set()
        paused.join(60)
        database.desks.insert_one({"_id": "late", "level": 3})

    with (
        MongoClient[Any](server.uri, event_listeners=[first]) as one,
        MongoClient[Any](server.uri, event_listeners=[second]) as two,
    ):
        # Three commands set validators: that of the old collection, that of the new one, and the last.
        first.before(["collMod"], 2, pause)
        paused = threading.Thread(target=Store(one[database.name], [Desk]).migrate, args=(Desk,), kwargs=SWAP)
        paused.start()
        assert waits.wait(60)
        expire(database)
        # The second ends what the first holds up, then sets its own two, and looks once more.
        second.before(["collMod"], 2, lambda: second.before(["listCollections"], 0, late))
        with pytest.raises(DataError) as refused:
            Store(two[database.name], [Desk]).migrate(Desk, to=1, strategy="swap")
    assert "migration-failed" == refused.value.code
    assert "late" in {each["_id"] for each in database.desks.find()}
    assert (before, []) == (described(database), shadows(database))


@pytest.mark.parametrize("command", ["aggregate", "createIndexes", "collMod", "renameCollection"])
def test_a_cancelled_swap_leaves_nothing(
    command: str, desks: list[dict[str, Any]], server: Any, database: Any
) -> None:
    heard, before = faults.Heard(), described(database)

    async def scenario() -> None:
        async with AsyncMongoClient[Any](server.uri, event_listeners=[heard]) as client:
            store = AsyncStore(client[database.name], [Desk])
            await store.migration_status(Desk)
            task = asyncio.create_task(store.migrate(Desk, strategy="swap"))
            # Of the aggregations, the third is the one that copies.
            heard.before([command], 2 if command == "aggregate" else 0, task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    assert (before, []) == (described(database), shadows(database))
    assert NUMBER == database.desks.count_documents({})


def test_an_interrupted_swap_leaves_nothing(desks: list[dict[str, Any]], server: Any, database: Any) -> None:
    """Ctrl-C in the blocking Store."""
    heard, before = faults.Heard(), described(database)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with MongoClient[Any](server.uri, event_listeners=[heard]) as client:
        store = Store(client[database.name], [Desk])
        store.migration_status(Desk)
        heard.before(["createIndexes"], 0, interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.migrate(Desk, strategy="swap")
    assert (before, desks, []) == (described(database), list(database.desks.find()), shadows(database))


def test_what_a_killed_swap_left_is_removed_when_its_lease_is_over(run: Any, database: Any) -> None:
    """And not before."""
    store = run.store([Desk])
    store.setup()
    database.desks.insert_one({"level": 1})
    row = {"owner": "another host:1:1/swap", "n": 3, "until": datetime(2999, 1, 1, tzinfo=UTC)}
    database["treadle.leases"].update_one({"_id": "migrate:desks"}, {"$set": row}, upsert=True)
    database.create_collection("treadle.swap.3.desks")
    assert 0 == store.recover()
    assert ["treadle.swap.3.desks"] == shadows(database)
    expire(database)
    assert 1 == store.recover()
    assert [] == shadows(database)


@pytest.mark.usefixtures("desks")
def test_an_error_is_told_although_nothing_can_be_removed(server: Any, database: Any) -> None:
    """What removes the new collection fails as well; the first error is the one that counts."""
    admin = database.client.admin
    failing = {"failCommands": ["drop"], "appName": "failing", "errorCode": 8000}
    point = {"configureFailPoint": "failCommand", "mode": "alwaysOn", "data": failing}

    def stop() -> bool:
        admin.command(point)
        raise ZeroDivisionError

    with MongoClient[Any](server.uri, appname="failing") as client:
        store = Store(client[database.name], [Desk])
        try:
            with pytest.raises(ZeroDivisionError):
                store.migrate(Desk, strategy="swap", stop=stop)
        finally:
            admin.command({**point, "mode": "off"})
        assert 1 == len(shadows(database))
        assert 1 == store.recover()
    assert [] == shadows(database)
