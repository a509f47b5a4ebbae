"""Changes of readings: exact counts and statistics, no duplicates, many writers, transactions."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from bson.decimal128 import Decimal128
from pydantic import BaseModel

from tests.patterns.bucket.sensors import HOUR, at, reading_with, stored
from treadle import Bucket, Document, Store, Unchecked, UsageError

# -- changing ----------------------------------------------------------------------------------------


def test_count_and_statistics_stay_exact_when_readings_change(filled, database):
    """Also min and max, when the extreme itself goes; an empty bucket goes too."""
    store, measured = filled(limit=None)

    def statistics(start: datetime) -> Any:
        return next(
            each
            for each in stored(database, "measured")
            if each["start"] == start and each["sensor_id"] == "a"
        )

    store.delete(measured, {"sensor_id": "a", "ts": at(110)})
    assert (5, {"min": 70.0, "max": 100.0, "sum": 250.0, "count": 3}) == (
        statistics(at(60))["count"],
        statistics(at(60))["stats"]["temp"],
    )
    store.update(measured, {"sensor_id": "a", "ts": at(70)}, {"$set": {"temp": 500.0}})
    assert {"min": 80.0, "max": 500.0, "sum": 680.0, "count": 3} == statistics(at(60))["stats"]["temp"]
    assert 3 == store.update_many(
        measured, {"sensor_id": "a", "ts": {"$gte": at(60), "$lt": at(90)}}, {"$unset": {"temp": ""}}
    )
    assert {"min": 100.0, "max": 100.0, "sum": 100.0, "count": 1} == statistics(at(60))["stats"]["temp"]
    assert 5 == store.delete_many(measured, {"sensor_id": "a", "ts": {"$gte": at(60), "$lt": at(120)}})
    assert not [
        each for each in stored(database, "measured") if each["start"] == at(60) and each["sensor_id"] == "a"
    ]
    assert 18 == store.delete_many(measured, {"sensor_id": "b"})
    assert 12 == store.delete_many(measured, {})
    assert 0 == database.measured.count_documents({})


def test_updates_mean_what_the_server_means(run, database):
    """Each operator beside the same update of a plain document."""

    class Part(BaseModel):
        x: int = 1

    class Rich(
        Document, collection="rich", bucket=Bucket(key="a", time="ts", span=HOUR, stats=("n", "price"))
    ):
        a: str
        ts: datetime
        n: int = 3
        price: Decimal = Decimal("2.50")
        note: str | None = None
        part: Part = Part()
        when: datetime | None = None

    store = run.store([Rich])
    store.setup()
    updates: list[Any] = [
        {"$inc": {"n": 2}},
        {"$mul": {"n": 3}},
        {"$mul": {"n": -2}},
        {"$inc": {"price": Decimal("0.01")}},
        {"$inc": {"price": 1}},
        Unchecked({"$inc": {"fresh": 2}}),
        Unchecked({"$mul": {"fresh": 2}}),
        {"$min": {"n": 1}},
        {"$max": {"n": 10, "note": "z"}},
        {"$set": {"part.x": 9, "note": "$n"}},
        {"$unset": {"note": ""}},
        Unchecked({"$rename": {"note": "n2"}}),
        {"$setOnInsert": {"n": 99}, "$set": {"note": "a"}},
        [{"$set": {"n": {"$add": ["$n", 1]}, "note": {"$literal": "$n"}}}],
        [{"$set": {"part": {"x": "$n"}}}, {"$unset": "note"}],
    ]
    for number, update in enumerate(updates):
        raw = {
            "ts": at(number),
            "n": 3,
            "price": Decimal128("2.50"),
            "note": "m",
            "part": {"x": 1},
            "when": None,
        }
        store.insert(Rich(a="s", ts=at(number), note="m"))
        database.plain.insert_one({"_id": number, **raw})
        from treadle.model.bson_types import to_bson

        database.plain.update_one({"_id": number}, to_bson(update, []))
        assert 1 == store.update_many(Rich, {"ts": at(number)}, update)
        expected = database.plain.find_one({"_id": number}, {"_id": 0})
        (bucket,) = database.rich.find()
        assert expected == bucket["readings"][number], update
    store.update(Rich, {"ts": at(0)}, {"$currentDate": {"when": True}})
    assert abs(store.find_one(Rich, {"ts": at(0)}).when - datetime.now(UTC)) < timedelta(minutes=5)
    assert [] == store.verify()


def test_a_move_meets_no_reading_twice(run):
    """Readings that an update brings into a bucket which it has yet to visit are left alone there."""
    measured = reading_with(limit=3)
    store = run.store([measured])
    store.setup()
    store.insert_many([measured(sensor_id="s", ts=at(60 * hour + 1), temp=hour) for hour in range(8)])
    assert 8 == store.update_many(measured, {}, [{"$set": {"ts": {"$add": ["$ts", 3_600_000]}}}])
    assert [at(60 * hour + 61) for hour in range(8)] == [each.ts for each in store.find(measured, sort="ts")]
    assert [] == store.verify()


# -- unique ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"unique": "label"}], ids=str)
def test_a_reading_that_comes_twice_is_stored_once(options, run):
    """Also when its bucket has been full since; it is counted."""
    measured = reading_with(**{"unique": "ts", **options})
    store = run.store([measured])
    store.setup()
    batch = [measured(sensor_id="s", ts=at(minute), temp=minute, label=f"m{minute}") for minute in range(11)]
    assert 0 == store.insert_many(batch).duplicates
    again = store.insert_many([*batch, measured(sensor_id="s", ts=at(20), label="m20"), batch[0]])
    assert (12, ["m20"]) == (again.duplicates, [each.label for each in again])
    store.rebuild()
    assert 12 == store.insert_many([*batch, again[0]]).duplicates
    first = store.insert(measured(sensor_id="s", ts=at(3), temp=99, label="m3"))
    assert 3.0 == first.temp
    store.insert(measured(sensor_id="other", ts=at(3), label="m3"))
    assert 13 == store.count(measured)
    if "unique" not in options:
        with pytest.raises(UsageError, match="forbids"):
            store.update(measured, {"sensor_id": "s", "ts": at(20)}, {"$set": {"ts": at(5)}})
    assert [] == store.verify()


def test_sixteen_threads_with_the_same_readings_store_each_once(database):
    measured = reading_with(unique="ts", limit=5)
    store = Store(database, [measured])
    store.setup()
    refused = []

    def write() -> None:
        for minute in range(12):
            refused.append(
                store.insert_many(
                    [measured(sensor_id="s", ts=at(minute)), measured(sensor_id="s", ts=at(minute + 12))]
                ).duplicates
            )

    in_threads(write)
    assert 24 == store.count(measured)
    assert 16 * 24 - 24 == sum(refused)
    assert [] == store.verify()


# -- many at once ------------------------------------------------------------------------------------


def in_threads(*works: Any, count: int = 16) -> None:
    failed: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=guarded, args=(works[number % len(works)],)) for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failed


@pytest.mark.parametrize("options", [{"limit": 25}, {"limit": None}, {"span": None, "limit": 25}], ids=str)
def test_sixteen_threads_on_one_bucket_are_exact(options, database):
    """Without the unique index some would open the same bucket twice; without sequence numbers many would fail."""
    measured = reading_with(**options)
    store = Store(database, [measured])
    store.setup()

    def write() -> None:
        for number in range(15):
            store.insert(measured(sensor_id="s", ts=at(number), temp=1))

    in_threads(write)
    buckets = stored(database, "measured")
    assert 240 == sum(each["count"] for each in buckets) == store.count(measured)
    assert 240.0 == sum(each["stats"]["temp"]["sum"] for each in buckets)
    assert [] == store.verify()
    keys = [(each["start"], each.get("_treadle", {}).get("sequence", 0)) for each in buckets]
    assert len(set(keys)) == len(keys)
    if options["limit"] is None:
        assert 1 == len(buckets)
    else:
        assert 25 >= max(each["count"] for each in buckets)


def test_changes_and_appends_at_once_lose_nothing(database):
    """Updates, deletions, appends and conversions meet in one bucket; each increment arrives."""
    measured = reading_with(limit=None)
    store = Store(database, [measured])
    store.setup()
    store.insert_many(
        [
            measured(sensor_id="s", ts=at(0), temp=0),
            *(measured(sensor_id="s", ts=at(1), temp=1) for _ in range(40)),
        ]
    )

    def append() -> None:
        for _ in range(10):
            store.insert(measured(sensor_id="s", ts=at(2), temp=2))

    def change() -> None:
        for _ in range(5):
            store.update(measured, {"sensor_id": "s", "ts": at(0)}, {"$inc": {"temp": 1}})

    def remove() -> None:
        for _ in range(5):
            assert store.delete(measured, {"sensor_id": "s", "ts": at(1)}) is not None

    in_threads(append, change, remove, lambda: store.rebuild(measured), count=12)
    assert 15.0 == store.find_one(measured, {"ts": at(0)}).temp
    assert (25, 30) == (store.count(measured, {"ts": at(1)}), store.count(measured, {"ts": at(2)}))
    assert [] == store.verify()


# -- transactions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"unique": "ts"}, {"span": None}], ids=str)
def test_everything_takes_part_in_a_transaction(options, run):
    """A full bucket is met without an error, which would end the transaction."""
    measured = reading_with(**options)
    store = run.store([measured])
    store.setup()
    store.insert_many([measured(sensor_id="s", ts=at(minute), temp=1) for minute in range(4)])

    def work(session: Any) -> None:
        store.insert(measured(sensor_id="s", ts=at(10), temp=2), session=session)
        store.insert_many(
            [measured(sensor_id="s", ts=at(minute), temp=3) for minute in range(20, 30)], session=session
        )
        assert 15 == store.count(measured, session=session)
        assert 15 == len(store.find(measured, sort="ts", session=session).to_list())
        store.update(measured, {"ts": at(0)}, {"$set": {"ts": at(100)}}, session=session)
        store.delete(measured, {"ts": at(1)}, session=session)
        assert 14 == sum(each.count for each in store.summary(measured, "s", session=session))

    with pytest.raises(ZeroDivisionError), store.transaction() as session:
        work(session)
        raise ZeroDivisionError
    assert 4 == store.count(measured)
    assert [] == store.verify()
    with store.transaction() as session:
        work(session)
    assert 14 == store.count(measured)
    assert [] == store.verify()
