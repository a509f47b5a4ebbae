"""Many appends at once: one transaction, which looks the buckets up and updates them by their ids, or in vain."""

from __future__ import annotations

import threading
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest

from tests.patterns.bucket.test_writing import HOUR, at, batch, reading_with
from treadle import Bucket, Document, Store
from treadle.model.lazy_id import LazyObjectId
from treadle.patterns.bucket.grouping import group
from treadle.patterns.bucket.writing import LOOK_UP_MIN

MANY = LOOK_UP_MIN + 4


def test_many_appends_share_one_transaction(overheard):
    database, listener = overheard
    reading = reading_with()
    store = Store(database, [reading])
    store.setup()
    store.insert_many(batch(reading, range(10)))
    listener.clear()
    store.insert_many(batch(reading, range(10, 20)))
    assert ["update", "commitTransaction"] == listener.names
    assert 120 == store.count(reading)
    assert [] == store.verify()


def test_appends_that_meet_another_writer_are_made_one_by_one(overheard, database):
    """The other one holds a bucket in a transaction; ours gives way, and loses nothing."""
    through, listener = overheard
    reading = reading_with()
    store = Store(through, [reading])
    store.setup()
    store.insert_many(batch(reading, range(10)))
    other = Store(database, [reading])
    session = database.client.start_session()
    session.start_transaction()
    other.insert(reading(sensor_id="s2", ts=at(30), temp=30), session=session)
    listener.clear()
    timer = threading.Timer(0.2, session.commit_transaction)
    timer.start()
    store.insert_many(batch(reading, range(10, 20)))
    timer.join()
    session.end_session()
    assert "abortTransaction" in listener.names
    assert "commitTransaction" not in listener.names
    assert 121 == store.count(reading)
    assert [] == store.verify()
    # Whoever was in the way may still be there: the next call does not try again, the one after it does.
    for expected in [False, True]:
        listener.clear()
        store.insert_many(batch(reading, range(20, 30)))
        assert expected == ("commitTransaction" in listener.names)


def test_a_full_bucket_among_many_appends_goes_on_in_the_next(overheard, database):
    through, listener = overheard
    reading = reading_with(limit=20)
    store = Store(through, [reading])
    store.setup()
    store.insert_many(batch(reading, range(10)))
    Store(database, [reading]).insert_many(batch(reading, range(10, 18), sensors=1))
    listener.clear()
    store.insert_many(batch(reading, range(20, 25)))
    assert "abortTransaction" in listener.names
    assert 98 == store.count(reading)
    assert [20, 3] == [
        each["count"] for each in database.readings.find({"sensor_id": "s0"}).sort("_treadle.sequence", 1)
    ]
    assert [] == store.verify()
    # It is known now which buckets are full, so nothing is tried in vain.
    store.insert_many(batch(reading, range(25, 29)))
    listener.clear()
    store.insert_many(batch(reading, range(29, 35)))
    assert "abortTransaction" not in listener.names
    assert [] == store.verify()


def test_threads_with_many_appends_are_exact(database):
    reading = reading_with(limit=40)
    store = Store(database, [reading])
    store.setup()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for number in range(5):
                store.insert_many(batch(reading, range(number * 10, number * 10 + 10)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failed
    assert 6 * 5 * 60 == store.count(reading)
    assert 40 >= max(each["count"] for each in database.readings.find())
    assert [] == store.verify()


# -- buckets that are looked up first -----------------------------------------------------------------


@pytest.fixture
def opened(overheard, database):
    """A store with a bucket of ten readings for each of many sensors, and one of another process."""

    def open_buckets(**options: Any) -> Any:
        through, listener = overheard
        reading = reading_with(**options)
        store = Store(through, [reading])
        store.setup()
        store.insert_many(batch(reading, range(10), MANY))
        listener.clear()
        return reading, store, Store(database, [reading]), listener

    return open_buckets


def counts(database: Any, **filter: Any) -> list[int]:
    return [each["count"] for each in database.readings.find(filter).sort("_treadle.sequence", 1)]


def test_many_buckets_are_looked_up_and_updated_by_their_ids(opened, database):
    reading, store, _, listener = opened(limit=60)
    database.command("profile", 2)
    stored = store.insert_many(batch(reading, range(10, 20), MANY))
    database.command("profile", 0)
    assert ["find", "update", "commitTransaction"] == listener.names
    updates = list(database.system.profile.find({"op": "update", "ns": f"{database.name}.readings"}))
    assert MANY == len(updates)
    assert {"_id"} == {name for each in updates for name in each["command"]["q"]}
    assert [20] * MANY == counts(database)
    assert {each.id for each in stored} <= {each.id for each in store.find(reading)}
    assert [] == store.verify()


def test_a_bucket_that_another_writer_fills_after_the_look_takes_no_more(opened, database):
    reading, store, other, listener = opened(limit=20)
    theirs = batch(reading, range(30, 38), 1)
    listener.before(("update",), 0, lambda: other.insert_many(theirs))
    store.insert_many(batch(reading, range(10, 15), MANY))
    assert ["find", "update", "abortTransaction"] == listener.names[:3]
    assert [20, 3] == counts(database, sensor_id="s0")
    assert MANY * 15 + 8 == store.count(reading)
    assert [] == store.verify()


def test_a_bucket_that_is_deleted_after_the_look_loses_nothing(opened, database):
    reading, store, _, listener = opened()
    listener.before(("update",), 0, lambda: database.readings.delete_one({"sensor_id": "s3"}))
    store.insert_many(batch(reading, range(10, 15), MANY))
    assert [5] == counts(database, sensor_id="s3")
    assert MANY * 15 - 10 == store.count(reading)
    assert [] == store.verify()


def test_a_bucket_that_is_full_when_it_is_looked_for_goes_on_in_the_next(opened, database):
    reading, store, other, listener = opened(limit=20)
    database.readings.delete_many({"sensor_id": {"$nin": ["s0", "s1"]}})
    other.insert_many(batch(reading, range(20, 36), 2)[1::2])
    store.insert_many(batch(reading, range(10, 15), MANY))
    assert "find" == listener.names[0]
    assert [15] == counts(database, sensor_id="s0")
    assert [20, 11] == counts(database, sensor_id="s1")
    assert [5] == counts(database, sensor_id="s2")
    assert [] == store.verify(reading)


def test_readings_go_only_into_a_bucket_of_their_own_series_and_metadata(overheard, database):
    """Whatever this process remembers: others gave the bucket another key, or other metadata."""

    class Reading(
        Document,
        collection="readings",
        bucket=Bucket(key=("site", "sensor"), time="ts", span=HOUR, metadata="unit", stats="n"),
    ):
        site: str
        sensor: int
        ts: datetime
        unit: str = "C"
        n: int = 1

    through, listener = overheard
    store = Store(through, [Reading])
    store.setup()
    many = [{"site": "a", "sensor": number} for number in range(MANY)]
    store.insert_many([Reading(**each, ts=at(minute)) for minute in range(10) for each in many])
    database.readings.update_one({"sensor": 3}, {"$set": {"site": "b"}})
    database.readings.update_one({"sensor": 4}, {"$set": {"unit": "F"}})
    listener.clear()
    store.insert_many([Reading(**each, ts=at(20)) for each in many])
    assert "find" == listener.names[0]
    assert [10] == counts(database, site="b")
    assert [1] == counts(database, site="a", sensor=3)
    assert [10, 1] == [each["count"] for each in database.readings.find({"sensor": 4}).sort("count", -1)]
    assert MANY * 11 == store.count(Reading)
    assert [] == store.verify()


def test_keys_that_only_the_server_takes_for_equal_share_the_room_of_their_bucket(overheard, database):
    class Reading(Document, collection="readings", bucket=Bucket(key="part", time="ts", span=HOUR, limit=20)):
        part: Decimal
        ts: datetime

    through, listener = overheard
    store = Store(through, [Reading])
    store.setup()
    parts = [Decimal(number) for number in range(1, MANY)]
    store.insert_many([Reading(part=part, ts=at(minute)) for minute in range(10) for part in parts])
    listener.clear()
    twice = [*parts, *(part + Decimal("0.00") for part in parts)]
    store.insert_many([Reading(part=part, ts=at(20 + minute)) for minute in range(6) for part in twice])
    assert "find" == listener.names[0]
    assert {20, 2} == set(counts(database))
    assert (MANY - 1) * 22 == store.count(Reading)
    assert [] == store.verify()


def test_conditions_find_the_windows_of_batches_and_no_others(database):
    class Reading(
        Document, collection="readings", bucket=Bucket(key=("site", "sensor"), time="ts", span=HOUR)
    ):
        site: str
        sensor: int
        ts: datetime

    spec = (layout := Store(database, [Reading]).graph.entry(Reading).layout).spec
    many = range(LOOK_UP_MIN)

    def conditions(windows: Any) -> Any:
        raws = [{"site": site, "sensor": sensor, "ts": at(60 * hour)} for site, sensor, hour in windows]
        return layout.writer._conditions(group(spec, raws))

    assert [
        {"site": {"$eq": site}, "start": {"$eq": at(0)}, "sensor": {"$in": [*many]}} for site in "ab"
    ] == [
        {name: each for name, each in condition.items() if name != "_treadle.sequence"}
        for condition in conditions([(site, sensor, 0) for site in "ab" for sensor in many])
    ]
    (along,) = conditions([("a", 1, hour) for hour in many])
    assert {"$in": [at(60 * hour) for hour in many]} == along["start"]
    # Any condition for these would find windows that nobody asked for.
    assert [] == conditions([("a", number, number) for number in many])


def test_a_derived_id_is_the_only_one_that_a_reading_is_given(run):
    """The one that it would have had by itself is never made."""
    reading = reading_with()
    store = run.store([reading])
    store.setup()
    made = batch(reading, range(2), 2)
    before = [vars(each)["id"] for each in made]
    stored = store.insert_many(made)
    assert {LazyObjectId} == set(map(type, before))
    assert [each.id for each in stored] == [store.get(reading, each.id).id for each in stored]
