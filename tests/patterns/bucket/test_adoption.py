"""Adoption of single documents, into buckets and into a time series; also when killed in the middle."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from pymongo import MongoClient

from tests.kit.fault_sweep import Write
from tests.patterns.bucket.sensors import at, in_threads, reading_with, seen
from treadle import Document, Store, TimeSeries

WRITTEN = 100


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
    # Writers that do not know of buckets yet may continue.
    database.old.insert_many(single(5, 5000))
    store.rebuild()
    assert 455 == store.count(reading)


@pytest.mark.parametrize("command", ["insert", "delete"])
def test_adoption_loses_no_change_of_a_single_document(command, overheard, database):
    """Another program changes one and deletes one on their way, and corrects the time of a repeated one."""
    through, listener = overheard
    reading = reading_with(unique="ts", adopt="old")
    database.old.insert_many(single(6))
    database.old.insert_one({"sensor_id": "s0", "ts": at(0), "temp": 9.0})
    store = Store(through, [reading])
    store.setup()

    def change() -> None:
        database.old.update_one({"ts": at(3), "temp": 3.0}, {"$set": {"temp": 33.0}})
        database.old.delete_one({"ts": at(1)})
        database.old.update_one({"temp": 9.0}, {"$set": {"ts": at(7)}})

    listener.before((command,), 0, change)
    store.rebuild()
    assert [0.0, 2.0, 4.0, 5.0, 9.0, 33.0] == sorted(each.temp for each in store.find(reading))
    assert [] == store.verify()


class Moved(Document, collection="moved", timeseries=TimeSeries(time="ts", key="sensor_id", adopt="old")):
    sensor_id: str
    ts: datetime
    temp: float


def test_a_time_series_adopts_each_document_once_even_after_a_crash(run, database, caplog):
    store = run.store([Moved])
    store.setup()
    documents = single(600)
    database.old.insert_many(documents)
    database.old.insert_one({"sensor_id": "s", "temp": 1.0})
    # A crash came after the copy and before the deletion.
    database.moved.insert_many(documents[:200])
    assert 601 == len(store.verify())
    told: list[Any] = []
    assert 600 == store.rebuild(Moved, progress=told.append)
    assert "is not adopted: it has no date in 'ts'" in caplog.text
    assert (600, 1) == (store.count(Moved), database.old.count_documents({}))
    assert 600 == told[-1].done
    assert documents[3]["_id"] == store.get(Moved, documents[3]["_id"]).id
    assert 0 == store.rebuild()


@pytest.mark.parametrize("command", ["insert", "delete"])
def test_a_time_series_keeps_a_document_that_was_changed_after_it_was_copied(command, overheard, database):
    through, listener = overheard
    database.old.insert_many(single(3))
    store = Store(through, [Moved])
    store.setup()
    listener.before((command,), 0, lambda: database.old.update_one({"temp": 1.0}, {"$set": {"temp": 11.0}}))
    store.rebuild()
    store.rebuild()
    assert [11.0] == [each["temp"] for each in database.old.find()]
    assert (3, 1) == (store.count(Moved), len(store.verify()))


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

    def old() -> None:
        for number in range(WRITTEN):
            database.old.insert_one(single(1, 2000 + number)[0])

    def new() -> None:
        for number in range(WRITTEN):
            store.insert(reading(sensor_id="s0", ts=at(number % 60), temp=1))

    works = [old, new, store.rebuild, store.rebuild]
    in_threads(lambda number: works[number](), count=4)
    store.rebuild()
    assert 1200 + 2 * WRITTEN == store.count(reading)
    assert [] == store.verify()


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
        stores.database.measured.delete_many({})
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
