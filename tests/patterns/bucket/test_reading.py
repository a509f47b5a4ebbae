"""Reading from buckets means what it means for single documents; ids of readings.

Covers: patterns/bucket/query, patterns/bucket/series, patterns/bucket/layout
"""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128

from tests.patterns.bucket.sensors import HOUR, START, Reading, at, reading_with
from treadle import Archive, Bucket, DataError, Document, Id, Store, Unchecked, UsageError

# -- reading -----------------------------------------------------------------------------------------


def test_filters_mean_what_the_server_means(filled, database):
    """The same filters beside a plain collection."""
    store, measured = filled()
    plain = database.plain
    plain.insert_many([{**each.model_dump(exclude={"id"}), "ts": each.ts} for each in store.find(measured)])
    filters: list[dict[str, Any]] = [
        {"temp": {"$gt": 50}},
        {"temp": {"$lte": 50, "$gte": 10}},
        {"temp": None},
        {"temp": {"$ne": None}},
        {"temp": {"$exists": True}},
        {"temp": {"$in": [10, 20.0, None]}},
        {"temp": {"$nin": [10, 20, None]}},
        {"temp": {"$mod": [20, 10]}},
        {"temp": {"$lt": "text"}},
        {"temp": {"$not": {"$gt": 50}}},
        {"temp": {"$gte": Decimal128("100")}},
        {"temp": float("inf")},
        {"label": "$ts"},
        {"label": {"$regex": "^.t"}},
        {"label": {"$gt": ""}},
        {"$or": [{"temp": 10}, {"ts": {"$gte": at(160)}}]},
        {"$or": [{"sensor_id": "a", "temp": 10}, {"sensor_id": "b", "label": "$ts"}]},
        {"$nor": [{"temp": {"$gte": 30}}, {"temp": None}]},
        {"$and": [{"sensor_id": {"$in": ["a", "c"]}}, {"temp": {"$gt": 20}}, {"ts": {"$lt": at(90)}}]},
        {"$expr": {"$gt": ["$temp", 30]}},
        {"sensor_id": {"$regex": "b"}, "temp": {"$type": "double"}},
        {"$comment": "nothing", "temp": 10},
        {"ts": {"$type": "date"}, "temp": {"$lt": 20}},
        # The bucket that starts before a range is searched too.
        {"sensor_id": "a", "ts": {"$gte": at(50), "$lt": at(70)}},
        {"sensor_id": "a", "ts": {"$gt": at(50), "$lte": at(70)}},
        {"sensor_id": "a", "ts": {"$lt": at(10)}},
        {"sensor_id": "a", "ts": {"$gt": at(170)}},
        {"sensor_id": "a", "ts": {"$gte": at(70), "$lt": at(50)}},
        {"sensor_id": "a", "ts": at(60)},
        {"sensor_id": "a", "ts": {"$in": [at(0), at(60), at(65)]}},
        {"ts": {"$in": []}},
        {"sensor_id": "a", "ts": {"$not": {"$gt": at(10)}}},
        {"sensor_id": "a", "ts": {"$gte": at(150), "$ne": at(160)}},
        Unchecked({"missing": 1}),
        Unchecked({"missing": None, "temp": 10}),
        {},
    ]
    for filter in filters:
        expected = sorted((each["sensor_id"], each["ts"]) for each in plain.find(filter))
        found = sorted(
            (each.sensor_id, each.ts.replace(tzinfo=None)) for each in store.find(measured, filter)
        )
        assert expected == found, filter
        assert len(expected) == store.count(measured, filter), filter


def test_sort_skip_and_limit(filled):
    store, measured = filled()

    def minutes(**options: Any) -> list[int]:
        return [
            round((each.ts - START) / timedelta(minutes=1))
            for each in store.find(measured, {"sensor_id": "a"}, **options)
        ]

    every = list(range(0, 180, 10))
    assert every == minutes(sort="ts")
    assert every[::-1] == minutes(sort="-ts")
    assert every[5:8] == minutes(sort="ts", skip=5, limit=3)
    assert every[::-1][2:4] == minutes(sort=[("ts", -1)], skip=2, limit=2)
    assert 3 == len(minutes(limit=3))
    assert [170, 160] == minutes(sort="-temp", limit=2)
    # Null comes before numbers; ties break by series and time.
    assert [0, 30, 60, 90, 120, 150, 10] == minutes(sort="temp", limit=7)
    assert [10, 20] == minutes(sort=["temp", "-ts"], skip=6, limit=2)
    assert 170.0 == store.find_one(measured, {"sensor_id": "b"}, sort="-ts").temp
    assert store.find_one(measured, {"sensor_id": "c"}) is None
    both = [(each.ts, each.id) for each in store.find(measured, sort="ts")]
    assert sorted(both) == both


def test_find_streams(heard):
    """The first reading arrives before the last bucket was read; closing stops it."""
    database, listener = heard
    measured = reading_with(limit=None)
    store = Store(database, [measured])
    store.setup()
    store.insert_many([measured(sensor_id="a", ts=at(60 * hour)) for hour in range(400)])
    listener.clear()
    for sort in (None, "ts", "-ts"):
        found = store.find(measured, {"sensor_id": "a"}, sort=sort)
        next(iter(found))
        found.close()
    assert "getMore" not in listener.names


class Spanned(
    Document,
    collection="spanned",
    bucket=Bucket(key="sensor", time="ts", span=timedelta(minutes=10), limit=4),
):
    sensor: str
    ts: datetime
    value: int = 0


class Endless(Document, collection="endless", bucket=Bucket(key=("site", "sensor"), time="ts", limit=3)):
    site: str = "a"
    sensor: str
    ts: datetime
    value: int = 0


def shuffled(model: Any) -> list[Any]:
    minutes = list(range(60))
    random.Random(7).shuffle(minutes)
    return [model(sensor=sensor, ts=at(minute), value=minute) for minute in minutes for sensor in ("x", "y")]


@pytest.mark.parametrize("model", [Spanned, Endless])
def test_find_without_sort_is_in_the_order_of_time_within_a_series(run, model, constants):
    constants(rows_first=2, rows_page=3)
    store = run.store([model])
    store.setup()
    readings = shuffled(model)
    for start in range(0, 120, 14):
        store.insert_many(readings[start : start + 14])
    found = store.find(model).to_list()
    assert [("x", minute) for minute in range(60)] + [("y", minute) for minute in range(60)] == [
        (each.sensor, each.value) for each in found
    ]
    some = store.find(model, {"sensor": "y", "value": {"$gte": 20}}, skip=3, limit=10).to_list()
    assert list(range(23, 33)) == [each.value for each in some]
    assert 0 == store.find_one(model, {"sensor": "x"}).value
    assert 41 == store.find_one(model, {"value": {"$gt": 40}}, sort="ts").value
    assert 19 == store.find_one(model, {"value": {"$lt": 20}}, sort="-ts").value


class Moving(
    Document,
    collection="moving",
    bucket=Bucket(key="sensor", time="ts", span=timedelta(minutes=10), limit=4, unique="ts"),
    archive=Archive(by="ts", after=timedelta(days=1), into="moving_archive"),
):
    sensor: str
    ts: datetime
    value: int = 0


@pytest.mark.parametrize("sort", [None, "ts", "-ts", "-value"])
def test_archived_readings_are_read_in_the_same_order(sort, run, constants):
    """Also where a window has buckets in both collections."""
    constants(rows_first=2, rows_page=3)
    store = run.store([Moving])
    store.setup()
    readings = shuffled(Moving)
    store.insert_many(readings[:60])
    store.archive(Moving, now=at(40) + timedelta(days=1))
    store.insert_many(readings[60:])
    found = [(each.sensor, each.value) for each in store.find(Moving, sort=sort, archived=True)]
    by_value = [(sensor, value) for value in range(60) for sensor in ("x", "y")]
    assert sorted(by_value) == sorted(found)
    expected = by_value if sort else sorted(by_value)
    values = [value for _, value in expected]
    assert (values[::-1] if sort in ("-ts", "-value") else values) == [value for _, value in found]
    assert found[3:8] == [
        (each.sensor, each.value) for each in store.find(Moving, sort=sort, skip=3, limit=5, archived=True)
    ]


def test_the_newest_ten_stop_early(heard):
    database, listener = heard
    store = Store(database, [Reading])
    store.setup()
    store.insert_many([Reading(sensor_id="a", ts=at(minute), temp=minute) for minute in range(3000)])
    listener.clear()
    newest = [each.temp for each in store.find(Reading, {"sensor_id": "a"}, sort="-ts", limit=10)]
    assert list(range(2999, 2989, -1)) == newest
    assert ["aggregate"] == [name for name in listener.names if name != "killCursors"]


def test_a_filter_follows_the_collation_of_the_collection(run, database):
    """The server judges it, as it would judge single documents."""
    measured = reading_with()
    database.create_collection("measured", collation={"locale": "en", "strength": 2})
    store = run.store([measured])
    store.setup()
    store.insert_many([measured(sensor_id="a", ts=at(1), label="Hot"), measured(sensor_id="a", ts=at(2))])
    assert (
        1 == store.count(measured, {"label": "hot"}) == len(store.find(measured, {"label": "hot"}).to_list())
    )


def test_bad_calls_are_refused(run, filled):
    store, measured = filled()
    for filter in (
        {"$text": {"$search": "x"}},
        {"$where": "1"},
        [1],
        {"_id": {"$gt": ObjectId()}},
        {"$or": [{"_id": ObjectId()}, {"temp": {"$mod": [2, 0]}}]},
    ):
        with pytest.raises(UsageError):
            store.count(measured, filter)
    for update in (
        {"$push": {"temp": 1}},
        {"$set": {"_id": 1}},
        {"temp": 1},
        {"$set": {"_treadle.n": 1}},
        {"$set": {"a.0.b": 1}},
        {"$inc": {"label": 1}},
        {"$set": {"temp": "hot"}},
        {"$unset": {"ts": ""}},
    ):
        with pytest.raises(UsageError):
            store.update(measured, {"sensor_id": "a", "ts": at(10)}, update)
    with pytest.raises(UsageError, match="not a whole number"):
        store.find(measured, limit=-1)
    with pytest.raises(UsageError, match="filter is needed"):
        store.delete_many(measured, None)
    with pytest.raises(UsageError, match="no datetime"):
        store.summary(measured, "a", "yesterday")
    with pytest.raises(UsageError, match="no field"):
        store.readings(measured, "a", fields=["heat"])
    assert [] == store.verify()

    class Plain(Document, collection="plain"):
        value: int

    with pytest.raises(UsageError, match="stored as one document each"):
        run.store([Plain]).summary(Plain, 1)


def test_summaries_and_tuples(filled):
    store, measured = filled(limit=None)
    entries = store.summary(measured, "a", at(60), at(120))
    assert [(at(60), 6)] == [(each.start, each.count) for each in entries]
    assert (70.0, 110.0, 360.0, 90.0) == tuple(
        entries[0].stats["temp"][part] for part in ("min", "max", "sum", "avg")
    )
    assert 3 == len(store.summary(measured, "a"))
    assert [(at(50), 50.0), (at(60), None)] == store.readings(measured, "a", at(50), at(70), fields=["temp"])
    assert [(at(20), 20.0, "$ts")] == store.readings(measured, "a", at(20), at(21))
    assert [(at(0),)] == store.readings(measured, "a", at(0), at(1), fields=[])


# -- ids ---------------------------------------------------------------------------------------------


def test_the_id_of_a_reading_is_its_series_and_its_time(filled, run):
    store, measured = filled()
    new = store.insert(measured(sensor_id="new", ts=at(1), temp=1))
    assert new.id == store.find_one(measured, {"sensor_id": "new"}).id
    store.rebuild()
    assert new == store.get(measured, new.id) == store.find_one(measured, {"_id": new.id, "temp": 1})
    assert store.find_one(measured, {"_id": new.id, "temp": 2}) is None
    assert store.get(measured, ObjectId()) is None
    assert 2 == store.count(
        measured, {"_id": {"$in": [new.id, store.find_one(measured, {"temp": 10}).id, ObjectId()]}}
    )
    assert 5.0 == store.update(measured, new.id, {"$set": {"temp": 5.0}}).temp
    moved = store.update(measured, new.id, {"$set": {"ts": at(300)}})
    assert store.get(measured, new.id) is None
    assert moved == store.get(measured, moved.id)
    moved.temp = 6.0
    moved.ts = at(301)
    again = store.replace(moved)
    assert (6.0, at(301)) == (again.temp, again.ts)
    with pytest.raises(DataError) as caught:
        store.replace(moved.model_copy(update={"id": ObjectId()}))
    assert "document-gone" == caught.value.code
    assert again == store.delete(measured, again.id)
    assert store.delete(measured, again.id) is None
    assert [] == store.verify()


def test_an_id_that_means_two_readings_changes_neither(run):
    store = run.store([Reading])
    store.setup()
    store.insert_many([Reading(sensor_id="s", ts=at(1), temp=value) for value in (1, 2)])
    (identity,) = {each.id for each in store.find(Reading)}
    for act in (
        lambda: store.delete(Reading, identity),
        lambda: store.update(Reading, identity, {"$set": {"temp": 3}}),
    ):
        with pytest.raises(UsageError) as caught:
            act()
        assert "reading-ambiguous" == caught.value.code
    assert store.delete(Reading, {"sensor_id": "s", "temp": 1}).temp == 1
    assert store.delete(Reading, identity).temp == 2


def test_an_id_that_the_model_declares_is_stored(run):
    class Named(Document, collection="named", bucket=Bucket(key="a", time="ts", span=HOUR)):
        id: Id
        a: str
        ts: datetime

    store = run.store([Named])
    store.setup()
    one, two = ObjectId(), ObjectId()
    store.insert_many([Named(id=one, a="s", ts=at(1)), Named(id=two, a="s", ts=at(1))])
    store.rebuild()
    assert two == store.get(Named, two).id
    assert two == store.delete(Named, two).id
    assert [one] == [each.id for each in store.find(Named, {"_id": {"$gte": one}})]
