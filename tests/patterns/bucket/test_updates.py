"""Changes of readings: exact counts and statistics, no duplicates, many writers, transactions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from bson.decimal128 import Decimal128
from pydantic import BaseModel

from tests.patterns.bucket.sensors import HOUR, at, in_threads, reading_with, stored
from treadle import Bucket, DataError, Document, Limits, PartlyDone, Store, Unchecked, UsageError

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


def as_bson(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_bson(each) for key, each in value.items()}
    return Decimal128(value) if isinstance(value, Decimal) else value


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
        database.plain.update_one({"_id": number}, as_bson(update))
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


def test_deleting_whole_buckets_counts_only_what_this_call_deleted(overheard, database):
    through, listener = overheard
    measured = reading_with()
    store = Store(through, [measured])
    store.setup()
    store.insert_many([measured(sensor_id="s", ts=at(60 * hour)) for hour in range(6)])
    listener.before(("delete",), 0, lambda: database.measured.delete_one({"start": at(0)}))
    assert 5 == store.delete_many(measured, {"sensor_id": "s"})
    assert 0 == store.count(measured)


@pytest.mark.parametrize("ends", ["refused", "damaged"])
def test_readings_that_were_changed_before_another_bucket_ended_it_are_counted(ends, database):
    measured = reading_with()
    store = Store(database, [measured], limits=Limits(bucket_page=1))
    store.setup()
    store.insert_many([measured(sensor_id=sensor, ts=at(1), temp=0) for sensor in "aab"])
    if ends == "refused":
        rule = {"$or": [{"sensor_id": "a"}, {"stats.temp.sum": 0}]}
        database.command("collMod", "measured", validator=rule)
    else:
        database.command("collMod", "measured", validator={})
        database.measured.update_one({"sensor_id": "b"}, {"$set": {"readings": "none"}})
    with pytest.raises(PartlyDone) as raised:
        store.update_many(measured, {}, {"$set": {"temp": 5}})
    assert 2 == raised.value.done
    assert 10 == database.measured.find_one({"sensor_id": "a"})["stats"]["temp"]["sum"]
    with pytest.raises(DataError) as inside, store.transaction():
        store.update_many(measured, {}, {"$set": {"temp": 7}})
    assert not isinstance(inside.value, PartlyDone)
    assert 10 == database.measured.find_one({"sensor_id": "a"})["stats"]["temp"]["sum"]


def test_a_change_that_could_not_be_read_back_changes_nothing(run, database):
    reading = reading_with()
    store = run.store([reading])
    store.setup()
    store.insert_many([reading(sensor_id="s", ts=at(minute), temp=minute) for minute in range(3)])
    before = list(database.measured.find())
    for update, code in (
        ({"$set": {"label": 5}}, "document-invalid"),
        ({"$unset": {"sensor_id": ""}}, "document-invalid"),
        ([{"$set": {"label": {"a": 1}}}], "validator-refused"),
    ):
        for call, chosen in ((store.update, {"ts": at(1)}), (store.update_many, {})):
            with pytest.raises(DataError, match="fit") as caught:
                call(reading, chosen, update)
            assert code == caught.value.code
    wrong = store.find_one(reading, {"ts": at(1)})
    wrong.label = 7
    with pytest.raises(DataError):
        store.replace(wrong)
    wrong.ts = at(2)
    with pytest.raises(UsageError) as refused:
        store.insert_many([reading(sensor_id="s", ts=at(9)), wrong])
    assert "model-inconsistent" == refused.value.code
    assert before == list(database.measured.find())
    # What another program wrote can be repaired, and otherwise changed.
    database.measured.update_one({}, {"$set": {"readings.1.label": 5}})
    assert 3 == store.update_many(reading, {}, {"$inc": {"temp": 1}})
    assert 3 == store.update_many(reading, {}, {"$set": {"label": "repaired"}})
    assert ["repaired"] * 3 == [each.label for each in store.find(reading)]


# -- many at once ------------------------------------------------------------------------------------


def test_changes_and_appends_at_once_lose_nothing(database):
    """Updates, deletions, appends and repairs meet in one bucket; each increment arrives."""
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

    works = [append, change, remove, lambda: store.rebuild(measured)]
    in_threads(lambda number: works[number % 4](), count=12)
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
