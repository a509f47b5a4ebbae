"""Readings without a sort come in the order of time within their series."""

from __future__ import annotations

import datetime as dt
import random

import pytest

from treadle import Bucket, Document, Limits, TimeSeries

START = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


class Spanned(
    Document,
    collection="spanned",
    bucket=Bucket(key="sensor", time="ts", span=dt.timedelta(minutes=10), limit=4),
):
    sensor: str
    ts: dt.datetime
    value: int = 0


class Endless(Document, collection="endless", bucket=Bucket(key=("site", "sensor"), time="ts", limit=3)):
    site: str = "a"
    sensor: str
    ts: dt.datetime
    value: int = 0


@pytest.mark.parametrize("model", [Spanned, Endless])
def test_find_without_sort_is_in_the_order_of_time_within_a_series(run, model, constants):
    constants(bucket_small_page=1)
    store = run.store([model], limits=Limits(bucket_page=2))
    store.setup()
    chance = random.Random(7)
    minutes = list(range(60))
    chance.shuffle(minutes)
    for start in range(0, 60, 7):
        store.insert_many(
            [
                model(sensor=sensor, ts=START + dt.timedelta(minutes=minute), value=minute)
                for minute in minutes[start : start + 7]
                for sensor in ("x", "y")
            ]
        )
    found = store.find(model).to_list()
    assert 120 == len(found)
    for sensor in ("x", "y"):
        times = [each.ts for each in found if each.sensor == sensor]
        assert sorted(times) == times
    assert [each.sensor for each in found] == ["x"] * 60 + ["y"] * 60
    some = store.find(model, {"sensor": "y", "value": {"$gte": 20}}, skip=3, limit=10).to_list()
    assert list(range(23, 33)) == [each.value for each in some]
    assert 0 == store.find_one(model, {"sensor": "x"}).value


class Weather(Document, collection="weather", timeseries=TimeSeries(time="ts", key="station")):
    station: int
    ts: dt.datetime
    temperature: float
    pressure: int = 1000
    note: str = ""


def test_a_time_series_summarises_all_its_numbers(run):
    store = run.store([Weather])
    store.setup()
    store.insert_many(
        [
            Weather(station=1, ts=START + dt.timedelta(hours=n), temperature=n, pressure=1000 + n)
            for n in range(3)
        ]
    )
    (summary,) = store.summary(Weather, 1)
    assert {"temperature", "pressure"} == set(summary.stats)
    assert (0, 2, 1001) == (summary["temperature"].min, summary["temperature"].max, summary["pressure"].avg)
