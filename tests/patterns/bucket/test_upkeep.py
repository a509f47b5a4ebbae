"""Proof, repair, adoption, conversion and packing of buckets; also when killed in the middle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from bson import Binary, ObjectId
from bson.decimal128 import Decimal128
from pymongo import MongoClient

from tests.kit.command_log import CommandLog
from tests.kit.fault_sweep import Write
from tests.kit.faults import REPLY_LOST
from tests.support import shared_server
from treadle import Bucket, DataError, Document, Limits, Store, UsageError
from treadle.plan.capabilities import Capabilities

START = datetime(2026, 1, 1, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)
LAYOUTS = ["rows", "columns", "packed"]
WRITTEN = 200
SERVER = Capabilities(transactions=True)


def reading_in(layout: str, **options: Any) -> Any:
    chosen = {
        "key": "sensor_id",
        "time": "ts",
        "span": HOUR,
        "limit": 5,
        "stats": ("temp",),
        "layout": layout,
    }

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
    reading = reading_in("rows", **options)
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


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_reading_of_the_wrong_type_is_found(layout, run, database):
    """The validator of a bucket lets it pass unless it is strict; verify does not."""
    reading = reading_in(layout)
    store = run.store([reading])
    store.setup()
    fill(store, reading)
    path = "readings.0.temp" if layout == "rows" else "readings.temp.0"
    database.readings.update_one({"start": START}, {"$set": {path: "hot"}})
    assert "validation" in {each.pattern for each in store.verify()}


def test_a_repeated_reading_in_another_bucket_of_the_window_is_found(run, database):
    reading = reading_in("rows", unique="ts")
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


def test_a_damaged_bucket_is_named_and_left_alone(run, database):
    """Nothing is guessed: reading it fails with its id, and so does no other bucket."""
    reading = reading_in("packed")
    store = run.store([reading])
    store.setup()
    fill(store, reading)
    store.rebuild()
    bucket = first(database)
    assert isinstance(bucket["readings"], bytes)
    for wrong in (Binary(bucket["readings"][:-3]), Binary(b"\x09" + bucket["readings"][1:]), Binary(b"")):
        database.readings.update_one({"_id": bucket["_id"]}, {"$set": {"readings": wrong}})
        with pytest.raises(DataError, match=str(bucket["_id"])) as caught:
            store.find(reading).to_list()
        assert "bucket-damaged" == caught.value.code
        assert [bucket["_id"]] == [each.document_id for each in store.verify()]
        assert 0 == store.repair()
        store.rebuild()
        assert bytes(wrong) == first(database)["readings"]
    assert 6 == store.count(reading, {"ts": {"$gte": at(60)}})
    assert 12 == sum(each.count for each in store.summary(reading, "s"))
    columns = reading_in("columns")
    database.readings.delete_many({})
    store = run.store([columns])
    fill(store, columns)
    database.readings.update_one({"start": START}, {"$push": {"readings.ts": 1}})
    with pytest.raises(DataError, match="not equally long"):
        store.find(columns).to_list()


# -- conversion -----------------------------------------------------------------------------------


def test_a_collection_is_converted_between_layouts(run, database):
    """Same calls, same answers, and statistics that everyone can read in each of them."""
    rows = reading_in("rows")
    store = run.store([rows])
    store.setup()
    fill(store, rows)
    before, summary = seen(store, rows), store.summary(rows, "s")
    kinds = {"rows": list, "columns": dict, "packed": bytes}
    for layout in ("columns", "packed", "rows", "packed", "columns", "rows"):
        reading = reading_in(layout)
        store = run.store([reading])
        store.setup()
        assert before == seen(store, reading), "before the conversion"
        store.rebuild()
        assert {kinds[layout]} == {type(each["readings"]) for each in database.readings.find()}
        assert before == seen(store, reading)
        assert summary == store.summary(reading, "s")
        assert [] == store.verify()


@pytest.mark.parametrize(
    ("old", "new"), [("rows", "columns"), ("columns", "rows"), ("rows", "packed"), ("columns", "packed")]
)
def test_writers_of_the_old_layout_go_on_during_a_conversion(old, new, database):
    before, after = reading_in(old, limit=50), reading_in(new, limit=50)
    stores = [(Store(database, [before]), before), (Store(database, [after]), after)]
    stores[0][0].setup()
    fill(stores[0][0], before, range(40))
    stop = threading.Event()
    failed: list[BaseException] = []
    written = [0, 0]

    def write(number: int) -> None:
        store, reading = stores[number]
        try:
            while not stop.is_set() and written[number] < WRITTEN:
                store.insert(reading(sensor_id="s", ts=at(written[number] % 60), temp=1))
                written[number] += 1
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        stores[1][0].rebuild()
        stores[0][0].rebuild()
    stop.set()
    for thread in threads:
        thread.join()
    assert [] == failed
    assert 40 + sum(written) == stores[1][0].count(after) == stores[0][0].count(before)
    assert [] == stores[1][0].verify()


def test_closed_buckets_are_packed_when_due(run, database):
    reading = reading_in("packed", limit=None)
    store = run.store([reading])
    store.setup()
    fill(store, reading)
    layout = store.graph.entry(reading).layout
    assert 0 == run(layout.pack_due(at(60)))
    # The first window is over, and the grace after it.
    assert 1 == run(layout.pack_due(at(70)))
    assert [bytes, dict] == [type(each["readings"]) for each in database.readings.find(sort=[("start", 1)])]
    assert 0 == run(layout.pack_due(at(70)))
    store.insert(reading(sensor_id="s", ts=at(30), temp=99))
    assert {"min": 99.0, "max": 99.0, "sum": 99.0} == database.readings.find_one({"_treadle.sequence": 1})[
        "stats"
    ]["temp"]
    assert 2 == run(layout.pack_due(datetime.now(UTC)))
    assert 13 == store.count(reading)
    assert [30.0, 99.0] == sorted(each.temp for each in store.find(reading, {"ts": at(30)}))
    assert 5.0 == store.update(reading, {"sensor_id": "s", "ts": at(20)}, {"$set": {"temp": 5.0}}).temp
    assert bytes is type(first(database)["readings"])
    assert [] == store.verify()
    plain = reading_in("rows")
    assert 0 == run(run.store([plain]).graph.entry(plain).layout.pack_due(at(70)))


def test_scheduled_work_packs_what_is_due(run, database):
    reading = reading_in("packed", limit=None)
    store = run.store([reading])
    store.setup()
    fill(store, reading)
    assert [] == store.run_due(now=at(60))
    (would,) = store.run_due(now=at(70), dry_run=True)
    assert ("Reading packing", 0) == (would.name, would.written)
    (ran,) = store.run_due(now=at(70))
    assert ("bucket", "Reading", 1, None) == (ran.pattern, ran.model, ran.written, ran.error)
    assert [] == store.run_due(now=at(70))
    assert [1] == [each.written for each in store.run_due()]
    assert {bytes} == {type(each["readings"]) for each in database.readings.find()}
    assert [] == store.verify()
    by_limit = reading_in("packed", span=None, limit=3)
    database.readings.drop()
    store = run.store([by_limit])
    store.setup()
    fill(store, by_limit, range(8))
    assert [2] == [each.written for each in store.run_due()]
    assert [] == store.run_due()
    assert 8 == store.count(by_limit)


def test_due_packing_finds_open_buckets_by_an_index(database):
    reading = reading_in("packed")
    store = Store(database, [reading])
    store.setup()
    fill(store, reading)
    store.rebuild()
    plan = (
        database.readings.find({"$and": [{"readings.ts": {"$exists": True}}, {"start": {"$lte": at(999)}}]})
        .hint("treadle_open")
        .explain()
    )
    assert 0 == plan["executionStats"]["totalDocsExamined"]


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", ["readings", "old"])
def test_single_documents_are_adopted(layout, source, run, database):
    """From the same collection or another, whatever their ids, in pages, with progress; what is no reading stays."""
    reading = reading_in(layout, adopt=None if source == "readings" else source, limit=None)
    options = database.codec_options.with_options(uuid_representation=4)
    database[source].with_options(codec_options=options).insert_many(with_ids(single(450)))
    database[source].insert_one({"sensor_id": "s0", "temp": 1.0})
    store = run.store([reading], limits=Limits(adopt_page=50))
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
    assert 1 == database[source].count_documents({"start": {"$exists": False}, "count": {"$exists": False}})
    # Those who do not know of buckets yet may go on.
    database[source].insert_many(single(5, 5000))
    store.rebuild()
    assert 455 == store.count(reading)


@pytest.mark.parametrize("command", ["update", "delete"])
def test_adoption_loses_no_change_of_a_single_document(command, server, database):
    """Somebody changes one and deletes one while they are on their way; also after they were compared."""
    reading = reading_in("rows")
    database.readings.insert_many(single(6))
    heard = CommandLog()
    with MongoClient[Any](server.uri, event_listeners=[heard]) as client:
        store = Store(client[database.name], [reading])
        store.setup()

        def come_between() -> None:
            database.readings.update_one({"ts": at(3), "temp": 3.0}, {"$set": {"temp": 33.0}})
            database.readings.delete_one({"ts": at(0), "temp": 0.0})

        heard.before((command,), 0, come_between)
        store.rebuild()
        assert [1.0, 2.0, 4.0, 5.0, 33.0] == sorted(each.temp for each in store.find(reading))
        assert [] == store.verify()


def test_adoption_drops_a_repeated_reading_only_if_it_still_is_one(server, database):
    """Somebody corrects its time just before it would go."""
    reading = reading_in("rows", unique="ts")
    database.readings.insert_one({"sensor_id": "s0", "ts": at(0), "temp": 9.0})
    heard = CommandLog()
    with MongoClient[Any](server.uri, event_listeners=[heard]) as client:
        store = Store(client[database.name], [reading])
        store.setup()
        store.insert(reading(sensor_id="s0", ts=at(0), temp=0.0))

        def come_between() -> None:
            database.readings.update_one({"temp": 9.0}, {"$set": {"ts": at(7)}})

        heard.before(("delete",), 0, come_between)
        store.rebuild()
        store.rebuild()
        assert [0.0, 9.0] == sorted(each.temp for each in store.find(reading))
        assert [] == store.verify()


def test_documents_that_are_not_adopted_are_counted_in_the_log(database, caplog):
    database.readings.insert_many([{"sensor_id": "s", "temp": float(number)} for number in range(40)])
    store = Store(database, [reading_in("rows")])
    store.setup()
    store.rebuild()
    assert 11 == len(caplog.records)
    assert "40 documents of readings are not adopted" in caplog.records[-1].getMessage()
    assert 40 == database.readings.count_documents({})


def test_adoption_goes_on_under_writers(database):
    reading = reading_in("rows", limit=20)
    database.readings.insert_many(single(1200))
    store = Store(database, [reading])
    store.setup()
    failed: list[BaseException] = []

    def old() -> None:
        for number in range(WRITTEN):
            database.readings.insert_one(single(1, 2000 + number)[0])

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
@pytest.mark.parametrize("options", [{}, {"span": None}, {"unique": "ts"}], ids=str)
@pytest.mark.parametrize("act", list(ACTS))
def test_a_lost_reply_stores_nothing_twice(act, options, fault_sweep, record_points):
    """The command was done and its client never heard of it; the driver asks again, and nothing is done twice."""
    reading = reading_in("rows", **options)
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
    store = Store(client[database], [reading_in("rows", adopt="old")])
    store.recover()
    return store.rebuild


@pytest.mark.heavy
def test_an_adoption_that_is_killed_is_finished_by_the_next(fault_sweep, record_points):
    """kill -9 before each of its writes; nothing is lost and nothing is there twice."""
    reading = reading_in("rows", adopt="old")
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
        shared_server(replica_set=False) as alone,
        MongoClient[Any](alone.uri) as opened,
    ):
        for layout in LAYOUTS:
            database = opened[f"alone_{layout}"]
            reading = reading_in(layout, unique="ts", adopt="old")
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
        plain = reading_in("rows", adopt="old")
        store = Store(opened["alone_plain"], [plain])
        store.setup()
        opened["alone_plain"].old.insert_many(single(3))
        with pytest.raises(UsageError, match="needs transactions"):
            store.rebuild()
        assert 3 == opened["alone_plain"].old.count_documents({})
