"""Proof, repair and adoption of buckets; also when killed in the middle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from pymongo import MongoClient

from tests.kit.command_log import CommandLog
from tests.kit.fault_sweep import Write
from tests.kit.faults import REPLY_LOST
from tests.support import shared_standalone
from treadle import Bucket, DataError, Document, Store, UsageError
from treadle.plan.capabilities import Capabilities

START = datetime(2026, 1, 1, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)
WRITTEN = 200
SERVER = Capabilities(transactions=True)


def reading_with(**options: Any) -> Any:
    chosen = {"key": "sensor_id", "time": "ts", "span": HOUR, "limit": 5, "stats": ("temp",)}

    class Reading(Document, collection="readings", bucket=Bucket(**{**chosen, **options})):
        sensor_id: str
        ts: datetime
        temp: float = 0.0

    return Reading


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def fill(store: Any, reading: Any, minutes: Any = range(0, 120, 10)) -> None:
    store.insert_many([reading(sensor_id="s", ts=at(minute), temp=minute) for minute in minutes])


def seen(store: Any, reading: Any) -> list[tuple[str, datetime, float]]:
    return sorted((each.sensor_id, each.ts, each.temp) for each in store.find(reading))


# -- verify and repair ----------------------------------------------------------------------------


def first(database: Any) -> Any:
    return database.readings.find_one({"start": START}, sort=[("_treadle.sequence", 1)])


FAULTS: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str]] = {
    "count": ({}, lambda db: db.readings.update_one({"start": START}, {"$inc": {"count": 1}}), "count"),
    "sum": (
        {},
        lambda db: db.readings.update_one({"start": START}, {"$inc": {"stats.temp.sum": 1}}),
        "stats.temp.sum",
    ),
    "min": (
        {},
        lambda db: db.readings.update_one({"start": START}, {"$set": {"stats.temp.min": -9.0}}),
        "stats.temp.min",
    ),
    "no statistics": (
        {},
        lambda db: db.readings.update_one({"start": START}, {"$unset": {"stats": ""}}),
        "stats.temp.min",
    ),
    "end": ({}, lambda db: db.readings.update_one({"start": START}, {"$set": {"end": at(400)}}), "end"),
    "window": (
        {},
        lambda db: db.readings.update_one({"start": START}, {"$set": {"readings.0.ts": at(90)}}),
        "readings.0.ts",
    ),
    "start": ({}, lambda db: db.readings.update_one({"start": START}, {"$set": {"start": at(7)}}), "end"),
    "empty": (
        {},
        lambda db: db.readings.update_one({"start": START}, {"$set": {"readings": []}}),
        "readings",
    ),
    "repeated": (
        {"unique": "ts"},
        lambda db: db.readings.update_one(
            {"start": START}, {"$push": {"readings": {"ts": at(0), "temp": 0.0}}}
        ),
        "count",
    ),
    "overlap": (
        {"span": None},
        lambda db: db.readings.update_one({"start": START}, {"$set": {"_treadle.next": at(500)}}),
        "_treadle.next",
    ),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_verify_names_it_and_repair_mends_it(name, run, database):
    options, damage, path = FAULTS[name]
    reading = reading_with(**options)
    store = run.store([reading])
    store.setup()
    fill(store, reading)
    assert [] == store.verify()
    before = seen(store, reading)
    database.command("collMod", "readings", validationLevel="off")
    damage(database)
    found = store.verify()
    assert path in {each.path for each in found}
    assert {"bucket"} == {each.pattern for each in found}
    assert 1 == store.repair()
    assert [] == store.verify()
    assert 0 == store.repair()
    if name == "empty":
        assert len(before) - 5 == store.count(reading)
    elif name != "window":
        assert before == seen(store, reading)
    else:
        assert [("s", at(90), 0.0)] == [each for each in seen(store, reading) if each[2] == 0]


def test_a_reading_of_the_wrong_type_is_found(run, database):
    """The validator of a bucket lets it pass unless it is strict; verify does not."""
    reading = reading_with()
    store = run.store([reading])
    store.setup()
    fill(store, reading)
    database.readings.update_one({"start": START}, {"$set": {"readings.0.temp": "hot"}})
    assert "validation" in {each.pattern for each in store.verify()}


def test_a_repeated_reading_in_another_bucket_of_the_window_is_found(run, database):
    reading = reading_with(unique="ts")
    store = run.store([reading])
    store.setup()
    fill(store, reading, range(8))
    database.readings.update_one(
        {"_treadle.sequence": 1}, {"$push": {"readings": {"ts": at(0), "temp": 7.0}}, "$inc": {"count": 1}}
    )
    assert "readings.3.ts" in {each.path for each in store.verify()}
    store.repair()
    assert [] == store.verify()
    assert (8, 0.0) == (store.count(reading), store.find_one(reading, {"ts": at(0)}).temp)


@pytest.mark.parametrize(
    "damage",
    [
        {"readings": "lost"}, {"readings": {"ts": [1]}}, {"readings": b"\x01"}, {"readings.0": 1},
        {"readings.0.ts": "noon"}, {"start": "noon"},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_bucket_is_named_and_left_alone(damage, run, database):
    """Nothing is guessed: reading it fails with its id, and so does no other bucket."""
    reading = reading_with()
    store = run.store([reading])
    store.setup()
    fill(store, reading)
    database.command("collMod", "readings", validationLevel="off")
    bucket = first(database)
    database.readings.update_one({"_id": bucket["_id"]}, {"$set": damage})
    damaged = database.readings.find_one({"_id": bucket["_id"]})
    with pytest.raises(DataError, match=str(bucket["_id"])) as caught:
        store.find(reading).to_list()
    assert "bucket-damaged" == caught.value.code
    assert {bucket["_id"]} == {each.document_id for each in store.verify()}
    # Others that are merely wrong are repaired all the same.
    database.readings.update_many({"_id": {"$ne": bucket["_id"]}}, {"$inc": {"count": 1}})
    assert database.readings.count_documents({}) - 1 == store.repair()
    store.rebuild()
    assert {bucket["_id"]} == {each.document_id for each in store.verify()}
    assert damaged == database.readings.find_one({"_id": bucket["_id"]})
    assert 6 == len(store.find(reading, {"ts": {"$gte": at(60)}}).to_list())


def test_a_document_that_is_no_bucket_is_named(run, database):
    reading = reading_with()
    store = run.store([reading])
    store.setup()
    fill(store, reading)
    database.command("collMod", "readings", validationLevel="off")
    other = database.readings.insert_one({"sensor_id": "t", "ts": at(0), "temp": 1.0}).inserted_id
    assert [other] == [each.document_id for each in store.verify(reading) if each.pattern == "bucket"]
    with pytest.raises(DataError, match=str(other)):
        store.find(reading).to_list()
    assert 12 == len(store.find(reading, {"sensor_id": "s"}).to_list())


def test_odd_notes_of_a_bucket_are_no_obstacle(run, database):
    """`_treadle` is nobody's to write, but anybody can."""
    reading = reading_with(span=None)
    store = run.store([reading])
    store.setup()
    store.insert_many([reading(sensor_id="a", ts=at(minute)) for minute in range(0, 60, 5)])
    ids = [each["_id"] for each in database.readings.find().sort("start")]
    for odd in ([1], {"next": "tomorrow"}, "x"):
        database.readings.update_one({"_id": ids[0]}, {"$set": {"_treadle": odd}})
        assert {ids[0]} == {each.document_id for each in store.verify()}
        store.repair()
        store.rebuild()
        assert 12 == store.count(reading)


# -- adoption -------------------------------------------------------------------------------------


def single(count: int, begin: int = 0) -> list[dict[str, Any]]:
    return [
        {"sensor_id": f"s{number % 3}", "ts": at(number), "temp": float(number)}
        for number in range(begin, begin + count)
    ]


ID_MAKERS: list[Callable[[int], Any]] = [
    lambda number: number, lambda number: f"n{number}", lambda number: {"n": number},
    lambda number: UUID(int=number), lambda number: Decimal128(f"{number}.5"), at, lambda number: ObjectId(),
]  # fmt: skip


def with_ids(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The documents with ids of every type, among them some that compare with nothing."""
    odd = iter([float("nan"), None, True, False])
    for number, each in enumerate(documents):
        each["_id"] = next(odd, None) if number < 4 else ID_MAKERS[number % len(ID_MAKERS)](number)
    return documents


def test_single_documents_are_adopted(run, database, constants):
    """Whatever their ids, in pages, with progress; what is no reading stays."""
    reading = reading_with(adopt="old", limit=None)
    options = database.codec_options.with_options(uuid_representation=4)
    database.old.with_options(codec_options=options).insert_many(with_ids(single(450)))
    database.old.insert_one({"sensor_id": "s0", "temp": 1.0})
    constants(adopt_page=50)
    store = run.store([reading])
    store.setup()
    assert [] == store.setup()
    assert 451 == len([each for each in store.verify() if each.pattern == "bucket"])
    told: list[Any] = []
    store.rebuild(progress=told.append)
    assert 450 in {each.done for each in told}
    assert [
        (each["sensor_id"], each["ts"], each["temp"])
        for each in sorted(single(450), key=lambda each: (each["sensor_id"], each["ts"]))
    ] == seen(store, reading)
    assert 1 == len([each for each in store.verify() if each.pattern == "bucket"])
    assert 1 == database.old.count_documents({})
    # Those who do not know of buckets yet may go on.
    database.old.insert_many(single(5, 5000))
    store.rebuild()
    assert 455 == store.count(reading)


@pytest.mark.parametrize("command", ["update", "delete"])
def test_adoption_loses_no_change_of_a_single_document(command, server, database):
    """Somebody changes one and deletes one while they are on their way; also after they were compared."""
    reading = reading_with(adopt="old")
    database.old.insert_many(single(6))
    heard = CommandLog()
    with MongoClient[Any](server.uri, event_listeners=[heard]) as client:
        store = Store(client[database.name], [reading])
        store.setup()

        def come_between() -> None:
            database.old.update_one({"ts": at(3), "temp": 3.0}, {"$set": {"temp": 33.0}})
            database.old.delete_one({"ts": at(0), "temp": 0.0})

        heard.before((command,), 0, come_between)
        store.rebuild()
        assert [1.0, 2.0, 4.0, 5.0, 33.0] == sorted(each.temp for each in store.find(reading))
        assert [] == store.verify()


def test_adoption_drops_a_repeated_reading_only_if_it_still_is_one(server, database):
    """Somebody corrects its time just before it would go."""
    reading = reading_with(unique="ts", adopt="old")
    database.old.insert_one({"sensor_id": "s0", "ts": at(0), "temp": 9.0})
    heard = CommandLog()
    with MongoClient[Any](server.uri, event_listeners=[heard]) as client:
        store = Store(client[database.name], [reading])
        store.setup()
        store.insert(reading(sensor_id="s0", ts=at(0), temp=0.0))

        def come_between() -> None:
            database.old.update_one({"temp": 9.0}, {"$set": {"ts": at(7)}})

        heard.before(("delete",), 0, come_between)
        store.rebuild()
        store.rebuild()
        assert [0.0, 9.0] == sorted(each.temp for each in store.find(reading))
        assert [] == store.verify()


def test_documents_that_are_not_adopted_are_counted_in_the_log(database, caplog):
    database.old.insert_many([{"sensor_id": "s", "temp": float(number)} for number in range(40)])
    store = Store(database, [reading_with(adopt="old")])
    store.setup()
    store.rebuild()
    assert 11 == len(caplog.records)
    assert "40 documents of old are not adopted" in caplog.records[-1].getMessage()
    assert 40 == database.old.count_documents({})


def test_adoption_goes_on_under_writers(database):
    reading = reading_with(limit=20, adopt="old")
    database.old.insert_many(single(1200))
    store = Store(database, [reading])
    store.setup()
    failed: list[BaseException] = []

    def old() -> None:
        for number in range(WRITTEN):
            database.old.insert_one(single(1, 2000 + number)[0])

    def new() -> None:
        for number in range(WRITTEN):
            store.insert(reading(sensor_id="s0", ts=at(number % 60), temp=1))

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=guarded, args=(work,)) for work in (old, new, store.rebuild, store.rebuild)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.rebuild()
    assert [] == failed
    assert 1200 + 2 * WRITTEN == store.count(reading)
    assert [] == store.verify()


# -- faults ---------------------------------------------------------------------------------------


ACTS: dict[str, Callable[[Any, Any], Any]] = {
    "insert": lambda store, reading: store.insert(reading(sensor_id="s", ts=at(25), temp=1)),
    "insert into a full window": lambda store, reading: store.insert_many(
        [reading(sensor_id="s", ts=at(minute), temp=1) for minute in range(7)]
    ),
    "insert into many windows": lambda store, reading: store.insert_many(
        [reading(sensor_id="s", ts=at(minute), temp=1) for minute in range(25, 400, 60)]
    ),
    "update": lambda store, reading: store.update(reading, {"ts": at(20)}, {"$inc": {"temp": 1}}),
    "move": lambda store, reading: store.update(reading, {"ts": at(20)}, {"$set": {"ts": at(300)}}),
    "update_many": lambda store, reading: store.update_many(reading, {}, {"$inc": {"temp": 1}}),
    "delete": lambda store, reading: store.delete(reading, {"ts": at(20)}),
    "delete_many": lambda store, reading: store.delete_many(reading, {"sensor_id": "s"}),
    "rebuild": lambda store, reading: store.rebuild(),
}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"span": None}, marks=pytest.mark.all), {"unique": "ts"}], ids=str
)
@pytest.mark.parametrize("act", list(ACTS))
def test_a_lost_reply_stores_nothing_twice(act, options, fault_sweep, record_points):
    """The command was done and its client never heard of it; the driver asks again, and nothing is done twice."""
    reading = reading_with(**options)
    stores = fault_sweep.stores("buckets", [reading])

    def reset() -> None:
        stores.database.readings.delete_many({})
        fill(stores.sound, reading, range(0, 60, 10))

    def check(acknowledged: bool) -> None:
        assert acknowledged
        assert [] == stores.sound.verify()

    write = Write(
        f"{act} {options}",
        lambda store: ACTS[act](store, reading),
        reset,
        check,
        read=lambda: seen(stores.sound, reading),
    )
    points = fault_sweep.strike(stores, write, [REPLY_LOST])
    assert points > 0
    record_points(points)


def adopting(client: MongoClient[Any], database: str) -> Callable[[], Any]:
    """In a process of its own: take over what another collection holds."""
    store = Store(client[database], [reading_with(adopt="old")])
    store.recover()
    return store.rebuild


@pytest.mark.heavy
def test_an_adoption_that_is_killed_is_finished_by_the_next(fault_sweep, record_points):
    """kill -9 before each of its writes; nothing is lost and nothing is there twice."""
    reading = reading_with(adopt="old")
    stores = fault_sweep.stores("buckets", [reading])

    def reset() -> None:
        stores.database.readings.delete_many({})
        stores.database.old.delete_many({})
        stores.database.old.insert_many(single(60))

    def check(acknowledged: bool) -> None:
        assert [] == stores.sound.verify()
        assert 60 == len({each[:2] for each in seen(stores.sound, reading)})

    write = Write(
        "adoption",
        lambda store: store.rebuild(),
        reset,
        check,
        read=lambda: seen(stores.sound, reading),
        settle=stores.sound.rebuild,
    )
    record_points(fault_sweep.kill(stores, write, adopting, "buckets"))


# -- a server without transactions ----------------------------------------------------------------


@pytest.mark.heavy
def test_on_a_standalone_server_all_but_moves_is_offered():
    with (
        shared_standalone() as alone,
        MongoClient[Any](alone.uri) as opened,
    ):
        database = opened["alone"]
        reading = reading_with(unique="ts", adopt="old")
        store = Store(database, [reading])
        store.setup()
        fill(store, reading)
        fill(store, reading)
        store.rebuild()
        assert 12 == store.count(reading)
        assert 1.5 == store.update(reading, {"ts": at(20)}, {"$set": {"temp": 1.5}}).temp
        assert store.delete(reading, {"ts": at(30)}) is not None
        with pytest.raises(UsageError, match="standalone") as caught:
            store.update(reading, {"ts": at(20)}, {"$set": {"ts": at(300)}})
        assert "transactions-unavailable" == caught.value.code
        database.old.insert_many(single(30))
        store.rebuild()
        assert 41 == store.count(reading)
        assert [] == store.verify()
        plain = reading_with(adopt="old")
        store = Store(opened["alone_plain"], [plain])
        store.setup()
        opened["alone_plain"].old.insert_many(single(3))
        with pytest.raises(UsageError, match="needs transactions"):
            store.rebuild()
        assert 3 == opened["alone_plain"].old.count_documents({})
