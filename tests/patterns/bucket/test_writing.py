"""Appends: many in one transaction, in vain or not; what is unique under races; values that do not fit."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import MongoClient

from tests import faults
from treadle import Bucket, DataError, Document, Store, UsageError

START = datetime(2026, 1, 1, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)


def reading_in(layout: str = "rows", **options: Any) -> Any:
    chosen = {"key": "sensor_id", "time": "ts", "span": HOUR, "stats": ("temp",), "layout": layout}

    class Reading(Document, collection="readings", bucket=Bucket(**{**chosen, **options})):
        sensor_id: str
        ts: datetime
        temp: float = 0.0
        label: str = ""

    return Reading


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


@pytest.fixture
def heard(server, database):
    """A database whose client notes its commands, and can do something just before one of them."""
    listener = faults.Heard()
    with MongoClient[Any](server.uri, event_listeners=[listener]) as client:
        client.admin.command("ping")
        yield client[database.name], listener


def batch(reading: Any, minutes: Any, sensors: int = 6) -> list[Any]:
    return [
        reading(sensor_id=f"s{number}", ts=at(minute), temp=minute)
        for minute in minutes
        for number in range(sensors)
    ]


# -- many appends at once ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_many_appends_share_one_transaction(layout, heard):
    database, listener = heard
    reading = reading_in(layout)
    store = Store(database, [reading])
    store.setup()
    store.insert_many(batch(reading, range(10)))
    listener.clear()
    store.insert_many(batch(reading, range(10, 20)))
    assert ["update", "commitTransaction"] == listener.names
    assert 120 == store.count(reading)
    assert [] == store.verify()


def test_appends_that_meet_another_writer_are_made_one_by_one(heard, database):
    """The other one holds a bucket in a transaction; ours gives way, and loses nothing."""
    through, listener = heard
    reading = reading_in()
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


def test_a_full_bucket_among_many_appends_goes_on_in_the_next(heard, database):
    through, listener = heard
    reading = reading_in(limit=20)
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
    reading = reading_in("columns", limit=40)
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


# -- unique ------------------------------------------------------------------------------------------


def test_what_is_unique_does_not_slip_into_a_second_bucket(heard, database):
    """Another writer fills the bucket with a reading that this batch wanted to put into the next one."""
    through, listener = heard
    reading = reading_in(limit=5, unique="ts")
    store, other = Store(through, [reading]), Store(database, [reading])
    store.setup()
    other.insert_many(batch(reading, range(2), sensors=1))
    listener.before(("update",), 0, lambda: other.insert(batch(reading, [13], sensors=1)[0]))
    stored = store.insert_many(batch(reading, range(10, 14), sensors=1))
    assert 1 == stored.duplicates
    assert 6 == store.count(reading) == len({each.ts for each in store.find(reading)})
    assert [] == store.verify()


# -- values that do not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_change_that_could_not_be_read_back_changes_nothing(layout, run, database):
    reading = reading_in(layout)
    store = run.store([reading])
    store.setup()
    store.insert_many(batch(reading, range(3), sensors=1))
    before = list(database.readings.find())
    for update in ({"$set": {"label": 5}}, {"$unset": {"sensor_id": ""}}, [{"$set": {"label": {"a": 1}}}]):
        with pytest.raises(DataError, match="does not fit its model") as caught:
            store.update(reading, {"ts": at(1)}, update)
        assert "validator-refused" == caught.value.code
        with pytest.raises(DataError, match="does not fit its model"):
            store.update_many(reading, {}, update)
    wrong = store.find_one(reading, {"ts": at(1)})
    wrong.label = 7
    with pytest.raises(DataError):
        store.replace(wrong)
    wrong.ts = at(2)
    with pytest.raises(UsageError) as caught:
        store.insert_many([*batch(reading, [9], sensors=1), wrong])
    assert "model-inconsistent" == caught.value.code
    assert before == list(database.readings.find())
    # What others wrote can be mended, and otherwise changed.
    column = "readings.label.1" if layout == "columns" else "readings.1.label"
    database.readings.update_one({}, {"$set": {column: 5}})
    assert 3 == store.update_many(reading, {}, {"$inc": {"temp": 1}})
    assert 3 == store.update_many(reading, {}, {"$set": {"label": "mended"}})
    assert ["mended"] * 3 == [each.label for each in store.find(reading)]


def test_series_of_different_types_stay_apart(run):
    class Mixed(Document, collection="mixed", bucket=Bucket(key="k", time="ts", span=HOUR, metadata="note")):
        k: Any
        ts: datetime
        note: Any = None
        n: int = 0

    store = run.store([Mixed])
    store.setup()
    keys = [1, True, "1", None, 0, False, {"a": 1}]
    made = [
        Mixed(k=key, ts=at(1), note=note, n=number) for number, key in enumerate(keys) for note in (0, False)
    ]
    store.insert_many(made)
    assert len({each.id for each in made}) == len(keys)
    for number, key in enumerate(keys):
        found = store.find(Mixed, {"n": number}).to_list()
        assert [repr((key, 0)), repr((key, False))] == sorted(repr((each.k, each.note)) for each in found)
    with pytest.raises(UsageError, match="list"):
        store.insert_many([Mixed(k="fine", ts=at(1)), Mixed(k=[1, 2], ts=at(1))])
    assert 2 * len(keys) == store.count(Mixed)
    assert [] == store.verify()


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_sum_beyond_64_bits_is_a_float(layout, run):
    class Large(
        Document,
        collection="large",
        bucket=Bucket(key="k", time="ts", span=HOUR, stats="n", layout=layout),
    ):
        k: str
        ts: datetime
        n: int = 0

    store = run.store([Large])
    store.setup()
    for _ in range(3):
        store.insert(Large(k="one by one", ts=at(1), n=2**62))
    store.insert_many([Large(k="at once", ts=at(1), n=2**62) for _ in range(3)])
    store.insert_many([Large(k=key, ts=at(2), n=1) for key in ("one by one", "at once", "c", "d", "e")])
    for key in ("one by one", "at once"):
        (entry,) = store.summary(Large, key)
        assert (1, 2**62, 3.0 * 2**62) == (entry["n"].min, entry["n"].max, entry["n"].sum)
    assert [] == store.verify()


def test_readings_of_very_different_size_find_room(run):
    """The first one is small, and says nothing of the others."""
    reading = reading_in()
    store = run.store([reading])
    store.setup()
    many = batch(reading, range(12), sensors=1)
    for each in many[1:]:
        each.label = "x" * 2_000_000
    store.insert_many(many)
    assert 12 == store.count(reading)
    assert [] == store.verify()
