"""Verify, repair and rebuild of buckets; faults in the middle of writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pymongo import MongoClient

from tests.kit.fault_sweep import Write
from tests.kit.faults import REPLY_LOST
from tests.patterns.bucket.sensors import START, at, fill, reading_with, seen
from tests.support import shared_standalone
from treadle import DataError, DeclarationError, Store

# Options of the bucket, an update that damages its document, and the path of a finding.
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "count": ({}, {"$inc": {"count": 1}}, "count"),
    "sum": ({}, {"$inc": {"stats.temp.sum": 1}}, "stats.temp.sum"),
    "min": ({}, {"$set": {"stats.temp.min": -9.0}}, "stats.temp.min"),
    "no statistics": ({}, {"$unset": {"stats": ""}}, "stats.temp.min"),
    "end": ({}, {"$set": {"end": at(400)}}, "end"),
    "window": ({}, {"$set": {"readings.0.ts": at(90)}}, "readings.0.ts"),
    "start": ({}, {"$set": {"start": at(7)}}, "start"),
    "start, without a span": ({"span": None}, {"$set": {"start": at(-7)}}, "start"),
    "empty": ({}, {"$set": {"readings": []}}, "readings"),
    "repeated": ({"unique": "ts"}, {"$push": {"readings": {"ts": at(0), "temp": 0.0}}}, "readings.4.ts"),
    "reserved part": ({}, {"$set": {"_treadle": "x"}}, "_treadle"),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_verify_reports_it_and_repair_repairs_it(name, run, database):
    options, update, path = FAULTS[name]
    reading = reading_with(**options)
    store = run.store([reading])
    store.setup()
    fill(store, reading)
    assert [] == store.verify()
    before = seen(store, reading)
    database.command("collMod", "measured", validationLevel="off")
    database.measured.update_one({"start": START}, update)
    found = store.verify()
    assert path in {each.path for each in found}
    assert {"bucket"} == {each.pattern for each in found}
    assert 1 == store.repair()
    assert [] == store.verify()
    assert 0 == store.repair()
    if name == "empty":
        assert len(before) - 4 == store.count(reading)
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
    database.measured.update_one({"start": START}, {"$set": {"readings.0.temp": "hot"}})
    assert "validation" in {each.pattern for each in store.verify()}


def test_a_repeated_reading_in_another_bucket_of_the_window_is_found(run, database):
    reading = reading_with(unique="ts")
    store = run.store([reading])
    store.setup()
    fill(store, reading, range(8))
    database.measured.update_one(
        {"_treadle.sequence": 1}, {"$push": {"readings": {"ts": at(0), "temp": 7.0}}, "$inc": {"count": 1}}
    )
    assert "readings.4.ts" in {each.path for each in store.verify()}
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
    database.command("collMod", "measured", validationLevel="off")
    bucket = database.measured.find_one({"start": START})
    database.measured.update_one({"_id": bucket["_id"]}, {"$set": damage})
    damaged = database.measured.find_one({"_id": bucket["_id"]})
    with pytest.raises(DataError, match=str(bucket["_id"])) as caught:
        store.find(reading).to_list()
    assert "bucket-damaged" == caught.value.code
    assert {bucket["_id"]} == {each.document_id for each in store.verify()}
    # Others that are merely wrong are repaired all the same.
    database.measured.update_many({"_id": {"$ne": bucket["_id"]}}, {"$inc": {"count": 1}})
    assert database.measured.count_documents({}) - 1 == store.repair()
    store.rebuild()
    assert {bucket["_id"]} == {each.document_id for each in store.verify()}
    assert damaged == database.measured.find_one({"_id": bucket["_id"]})
    assert 6 == len(store.find(reading, {"ts": {"$gte": at(60)}}).to_list())


def test_a_document_that_is_no_bucket_is_named(run, database):
    reading = reading_with()
    store = run.store([reading])
    store.setup()
    fill(store, reading)
    database.command("collMod", "measured", validationLevel="off")
    other = database.measured.insert_one({"sensor_id": "t", "ts": at(0), "temp": 1.0}).inserted_id
    assert [other] == [each.document_id for each in store.verify(reading) if each.pattern == "bucket"]
    with pytest.raises(DataError, match=str(other)):
        store.find(reading).to_list()
    assert 12 == len(store.find(reading, {"sensor_id": "s"}).to_list())


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
        stores.database.measured.delete_many({})
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


# -- a server without transactions ----------------------------------------------------------------


@pytest.mark.heavy
def test_a_standalone_server_is_refused_before_anything_is_written():
    reading = reading_with()
    with shared_standalone() as alone, MongoClient[Any](alone.uri) as client:
        store = Store(client["alone"], [reading])
        for call in (store.setup, lambda: store.insert(reading(sensor_id="s", ts=at(0)))):
            with pytest.raises(DeclarationError, match="needs transactions") as caught:
                call()
            assert "transactions-needed" == caught.value.code
        assert [] == client["alone"].list_collection_names()
