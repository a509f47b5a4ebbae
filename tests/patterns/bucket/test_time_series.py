"""Time Series: the same calls on the server's native kind, and clear refusals where it refuses.

Covers: patterns/bucket/native
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel

from treadle import DataError, Document, TimeSeries, UsageError

START = datetime(2026, 1, 1, 10, tzinfo=UTC)


class Reading(
    Document,
    collection="series",
    timeseries=TimeSeries(
        time="ts",
        key="sensor_id",
        granularity="minutes",
        stats=("temp", "price"),
        expire_after=timedelta(days=9999),
    ),
):
    sensor_id: str
    ts: datetime
    temp: float | None = None
    price: Decimal = Decimal("1.10")


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


@pytest.fixture
def filled(run):
    store = run.store([Reading])
    store.setup()
    store.insert_many(
        [Reading(sensor_id=key, ts=at(minute), temp=minute or None) for minute in range(5) for key in "ab"]
    )
    return store


def test_set_up_makes_a_time_series(run, database):
    store = run.store([Reading])
    assert ["create collection"] == [each.what for each in store.setup(dry_run=True)]
    assert ["create collection"] == [each.what for each in store.setup()]
    assert [] == store.setup()
    (found,) = database.list_collections(filter={"name": "series"})
    assert "timeseries" == found["type"]
    assert ("ts", "sensor_id", "minutes") == tuple(
        found["options"]["timeseries"][name] for name in ("timeField", "metaField", "granularity")
    )
    assert 9999 * 24 * 3600 == found["options"]["expireAfterSeconds"]

    class Coarser(
        Document, collection="series", timeseries=TimeSeries(time="ts", key="sensor_id", granularity="hours")
    ):
        sensor_id: str
        ts: datetime

    coarser = run.store([Coarser])
    assert ["change collection"] == [each.what for each in coarser.setup()]
    assert [] == coarser.setup()

    class Other(Document, collection="series", timeseries=TimeSeries(time="ts")):
        ts: datetime

    with pytest.raises(DataError, match="another metaField"):
        run.store([Other]).setup()


def test_an_ordinary_collection_does_not_become_one(run, database):
    database.create_collection("series")
    with pytest.raises(DataError, match="adopt="):
        run.store([Reading]).setup()


@pytest.mark.quick
def test_the_calls_speak_of_readings(filled):
    store = filled
    one = store.insert(Reading(sensor_id="c", ts=at(9), temp=1))
    assert one == store.get(Reading, one.id)
    assert 11 == store.count(Reading)
    assert 3 == store.count(Reading, {"sensor_id": "a", "ts": {"$gte": at(1), "$lt": at(4)}})
    assert [4.0, 3.0] == [each.temp for each in store.find(Reading, {"sensor_id": "a"}, sort="-ts", limit=2)]
    assert at(1) == store.find_one(Reading, {"sensor_id": "a", "temp": {"$gt": 0}}, sort="ts").ts
    (entry,) = store.summary(Reading, "a", at(0), at(3))
    assert (at(0), at(2), 3) == (entry.start, entry.end, entry.count)
    assert (1.0, 2.0, 3.0, 1.5) == tuple(entry["temp"][part] for part in ("min", "max", "sum", "avg"))
    assert Decimal("3.30") == entry["price"].sum
    assert [] == store.summary(Reading, "nobody")
    with pytest.raises(UsageError, match="no field"):
        store.readings(Reading, "a", fields=["nothing"])
    assert [(at(3), 3.0), (at(4), 4.0)] == store.readings(Reading, "a", at(3), fields=["temp"])
    assert [(at(0), None, Decimal("1.10"))] == store.readings(Reading, "a", at(0), at(1))
    assert 5 == store.delete_many(Reading, {"sensor_id": "a"})
    assert 5 == store.update_many(Reading, {"sensor_id": "b"}, {"$set": {"sensor_id": "d"}})
    assert 5 == store.count(Reading, {"sensor_id": "d"})
    assert [] == store.verify()
    assert 0 == store.repair()


def test_what_the_server_refuses_is_refused_with_the_way_out(filled):
    store = filled
    one = store.find_one(Reading)
    refusals: list[Any] = [
        lambda: store.update(Reading, one.id, {"$set": {"temp": 1}}),
        lambda: store.replace(one),
        lambda: store.delete(Reading, one.id),
        lambda: store.update_many(Reading, {"sensor_id": "a"}, {"$set": {"temp": 1}}),
        lambda: store.update_many(Reading, {"temp": 1}, {"$set": {"sensor_id": "x"}}),
        lambda: store.delete_many(Reading, {"temp": 1}),
    ]
    for refused in refusals:
        with pytest.raises(UsageError, match="bucket=") as caught:
            refused()
        assert "timeseries-refused" == caught.value.code
    with (
        pytest.raises(UsageError, match="a transaction is not offered") as caught,
        store.transaction() as session,
    ):
        store.insert(Reading(sensor_id="a", ts=at(1)), session=session)
    assert "timeseries-refused" == caught.value.code
    assert 10 == store.count(Reading)


class Meta(BaseModel):
    site: str
    sensor: int


def test_several_keys_go_into_a_nested_model(run):
    class Nested(Document, collection="nested", timeseries=TimeSeries(time="ts", key="meta")):
        meta: Meta
        ts: datetime
        value: int

    store = run.store([Nested])
    store.setup()
    store.insert_many(
        [Nested(meta=Meta(site="n", sensor=number % 2), ts=at(number), value=number) for number in range(4)]
    )
    assert [(at(1), 1), (at(3), 3)] == store.readings(Nested, Meta(site="n", sensor=1))
    assert 2 == store.count(Nested, {"meta.sensor": 0})


class Weather(Document, collection="weather", timeseries=TimeSeries(time="ts", key="station")):
    station: int
    ts: datetime
    temperature: float
    pressure: int = 1000
    note: str = ""


def test_all_numbers_are_summarised_unless_some_are_named(run):
    store = run.store([Weather])
    store.setup()
    store.insert_many([Weather(station=1, ts=at(60 * n), temperature=n, pressure=1000 + n) for n in range(3)])
    (summary,) = store.summary(Weather, 1)
    assert {"temperature", "pressure"} == set(summary.stats)
    assert (0, 2, 1001) == (summary["temperature"].min, summary["temperature"].max, summary["pressure"].avg)


def test_other_reads_are_those_of_ordinary_documents(filled):
    store, ids = filled, []
    page = store.page(Reading, {"sensor_id": "a"}, sort="ts", size=3)
    while page is not None:
        ids += [each.id for each in page.items]
        page = (
            store.page(Reading, {"sensor_id": "a"}, sort="ts", size=3, after=page.next) if page.next else None
        )
    assert 5 == len(set(ids))
    assert ids[::-1] == [each.id for each in store.get_many(Reading, ids[::-1])]
    assert ["a", "b"] == sorted(store.distinct(Reading, "sensor_id"))
    assert [5] == [
        each["n"] for each in store.aggregate(Reading, [{"$match": {"sensor_id": "a"}}, {"$count": "n"}])
    ]
