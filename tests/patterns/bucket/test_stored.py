"""What is stored of readings: buckets, views, indexes and validators.

Covers: patterns/bucket/setup, patterns/bucket/bucket_document, patterns/bucket/spec, patterns/bucket/declaration
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson.decimal128 import Decimal128
from pydantic import BaseModel

from tests.patterns.bucket.sensors import HOUR, START, Reading, at, reading_with, stored
from treadle import Bucket, DataError, DeclarationError, Document, Id, Indexed, UsageError

# -- what is stored ----------------------------------------------------------------------------------


def test_a_reading_without_a_value_does_not_count_for_the_average(run, database):
    measured = reading_with()
    store = run.store([measured])
    store.setup()
    store.insert_many(
        [measured(sensor_id="s", ts=at(1), temp=1.5), measured(sensor_id="s", ts=at(2), label="x")]
    )
    (bucket,) = stored(database, "measured")
    assert [
        {"ts": at(1), "temp": 1.5, "label": ""},
        {"ts": at(2), "temp": None, "label": "x"},
    ] == bucket["readings"]
    assert {"temp": {"min": 1.5, "max": 1.5, "sum": 1.5, "count": 1}} == bucket["stats"]


class Site(
    Document,
    collection="sites",
    naming="camel",
    bucket=Bucket(
        key=("site_name", "sensor_id"),
        time="measured_at",
        span=HOUR,
        stats=("air_pressure", "price"),
        metadata=("unit", "location"),
        names={
            "start": "hour",
            "count": "nSamples",
            "readings": "samples",
            "stats": "totals",
            "end": "until",
        },
    ),
):
    site_name: str
    sensor_id: int
    measured_at: datetime
    air_pressure: int
    price: Decimal
    unit: str = "hPa"
    location: str | None = None


def site(minutes: float, pressure: int = 1000, **more: Any) -> Site:
    values = {"site_name": "north", "sensor_id": 7, "price": Decimal("1.10"), **more}
    return Site(measured_at=at(minutes), air_pressure=pressure, **values)


def test_names_keys_and_metadata_are_as_declared(run, database):
    store = run.store([Site])
    store.setup()
    store.insert_many([site(1), site(2, 1010)])
    (bucket,) = database.sites.find({}, {"_id": 0, "until": 0})
    assert {
        "siteName": "north",
        "sensorId": 7,
        "unit": "hPa",
        "location": None,
        "hour": START.replace(tzinfo=None),
        "nSamples": 2,
        "samples": [
            {"measuredAt": at(1).replace(tzinfo=None), "airPressure": 1000, "price": Decimal128("1.10")},
            {"measuredAt": at(2).replace(tzinfo=None), "airPressure": 1010, "price": Decimal128("1.10")},
        ],
        "totals": {
            "airPressure": {"min": 1000, "max": 1010, "sum": 2010},
            "price": {"min": Decimal128("1.10"), "max": Decimal128("1.10"), "sum": Decimal128("2.20")},
        },
    } == bucket
    (entry,) = store.summary(Site, ("north", 7), START, at(60))
    assert (2, Decimal("2.20"), Decimal("1.10")) == (
        entry.count,
        entry["price"].sum,
        entry.stats["price"]["avg"],
    )
    assert entry == store.summary(Site, {"site_name": "north", "sensor_id": 7})[0]
    assert [] == store.summary(Site, ("north", 8))
    with pytest.raises(UsageError, match="which Site series"):
        store.summary(Site, "north")
    assert 2 == store.count(Site, {"siteName": "north", "airPressure": {"$gte": 1000}})
    assert [1010, 1000] == [
        each.air_pressure for each in store.find(Site, {"sensorId": 7}, sort="-measuredAt")
    ]
    assert [] == store.verify()


def test_a_reading_with_other_metadata_gets_a_bucket_of_its_own(run, database):
    """What is lifted out of the readings is never lost."""
    store = run.store([Site])
    store.setup()
    for minute in range(4):
        store.insert(site(minute, location="roof" if minute % 2 else None))
    found = store.find(Site, sort="measuredAt").to_list()
    assert [None, "roof", None, "roof"] == [each.location for each in found]
    assert [2, 2] == [each["nSamples"] for each in database.sites.find()]
    store.update(Site, found[0].id, {"$set": {"location": "roof"}})
    assert [1, 3] == sorted(each["nSamples"] for each in database.sites.find())
    assert [] == store.verify()


def test_a_full_bucket_starts_a_new_one(run, database):
    """The 61st reading lands in a second document, by one call each and by one call for all."""
    store = run.store([Reading])
    store.setup()
    for second in range(61):
        store.insert(Reading(sensor_id="one", ts=START + timedelta(seconds=second), temp=1))
    many = [Reading(sensor_id="all", ts=START + timedelta(seconds=second), temp=1) for second in range(130)]
    store.insert_many(many[:1])
    store.insert_many(many[1:])
    counts = {}
    for each in stored(database):
        counts.setdefault(each["sensor_id"], []).append(
            (each.get("_treadle", {}).get("sequence", 0), each["count"])
        )
    assert {"one": [(0, 60), (1, 1)], "all": [(0, 60), (1, 60), (2, 10)]} == counts


@pytest.mark.quick
def test_the_window_is_that_of_the_readings_own_time_in_utc(run, database):
    """Not that of its arrival, and not that of its own zone's hours."""
    store = run.store([Reading])
    store.setup()
    india = timezone(timedelta(hours=5, minutes=30))
    store.insert(Reading(sensor_id="s", ts=at(90), temp=1))
    store.insert(Reading(sensor_id="s", ts=at(5).astimezone(india), temp=2))
    store.insert(Reading(sensor_id="s", ts=at(59.9999), temp=3))
    store.insert(Reading(sensor_id="s", ts=at(60), temp=4))
    assert [(START, 2), (at(60), 2)] == [(each["start"], each["count"]) for each in stored(database)]
    assert [2, 3, 4, 1] == [each.temp for each in store.find(Reading, sort="ts")]


def test_weeks_begin_on_monday(run, database):
    measured = reading_with(span=timedelta(days=7), limit=None)
    store = run.store([measured])
    store.insert(measured(sensor_id="s", ts=datetime(2026, 1, 4, 23, 59, tzinfo=UTC)))
    store.insert(measured(sensor_id="s", ts=datetime(2026, 1, 5, tzinfo=UTC)))
    assert [datetime(2025, 12, 29, tzinfo=UTC), datetime(2026, 1, 5, tzinfo=UTC)] == [
        each["start"] for each in stored(database, "measured")
    ]


def test_windows_by_limit_alone_begin_with_their_first_reading(run, database):
    measured = reading_with(span=None, limit=3)
    store = run.store([measured])
    store.setup()
    store.insert_many([measured(sensor_id="s", ts=at(minute)) for minute in range(0, 70, 10)])
    assert [(at(0), at(20), 3), (at(30), at(50), 3), (at(60), at(60), 1)] == [
        (each["start"], each["end"], each["count"]) for each in stored(database, "measured")
    ]
    # Late, between two windows and within a full one.
    store.insert(measured(sensor_id="s", ts=at(25)))
    store.insert(measured(sensor_id="s", ts=at(5)))
    store.insert(measured(sensor_id="s", ts=at(-5)))
    store.insert(measured(sensor_id="s", ts=at(65)))
    assert [at(-5), at(0), at(5), at(10), at(20), at(25), at(30)] == [
        each.ts for each in store.find(measured, {"ts": {"$lte": at(30)}}, sort="ts")
    ]
    assert 2 == store.count(measured, {"ts": {"$gte": at(21), "$lte": at(30)}})
    assert [] == store.verify()


def test_the_views_show_readings_and_averages_to_everyone(run, database):
    measured = reading_with()
    store = run.store([measured])
    store.setup()
    store.insert_many([measured(sensor_id="s", ts=at(minute), temp=minute) for minute in (1, 2, 6)])
    store.insert(measured(sensor_id="s", ts=at(7)))
    flat = list(database["measured.flat"].find({"temp": {"$gt": 1}}, sort=[("ts", 1)]))
    assert [
        {"sensor_id": "s", "ts": at(minute).replace(tzinfo=None), "temp": minute, "label": ""}
        for minute in (2, 6)
    ] == flat
    (summary,) = database["measured.summary"].find({}, {"_id": 0})
    assert {"min": 1.0, "max": 6.0, "sum": 9.0, "avg": 3.0} == summary["stats"]["temp"]
    assert 4 == len(list(database["measured.flat"].find()))
    # A bucket that another program damaged does not hide the others.
    database.command("collMod", "measured", validationLevel="off")
    store.insert(measured(sensor_id="t", ts=at(7)))
    database.measured.update_one({"sensor_id": "s"}, {"$set": {"readings": "lost"}})
    assert ["t"] == [each["sensor_id"] for each in database["measured.flat"].find()]


def test_set_up_makes_what_expires(run, database):
    store = run.store([reading_with(expire_after=timedelta(days=30))])
    assert store.setup()
    assert [] == store.setup()
    assert 30 * 24 * 3600 == database.measured.index_information()["end_1"]["expireAfterSeconds"]
    longer = run.store([reading_with(expire_after=timedelta(days=60))])
    (action,) = longer.setup()
    assert "change index" == action.what


def test_the_validator_is_that_of_buckets(run, database):
    from pymongo.errors import WriteError

    store = run.store([Reading])
    store.setup()
    store.insert(Reading(sensor_id="s", ts=at(1), temp=1))
    with pytest.raises(WriteError):
        database.sensor_data.insert_one({"sensor_id": "s", "ts": at(1), "temp": 1.0})
    with pytest.raises(WriteError):
        database.sensor_data.update_one({}, {"$set": {"readings": "none"}})
    with pytest.raises(DataError) as caught:
        store.update_many(Reading, {}, {"$set": {"sensor_id": 5}})
    assert "document-invalid" == caught.value.code


def test_a_strict_validator_looks_at_the_readings_too(run, database):
    from pymongo.errors import WriteError

    class Strict(
        Document,
        collection="strict",
        validation="strict",
        bucket=Bucket(key="sensor_id", time="ts", span=HOUR),
    ):
        sensor_id: str
        ts: datetime
        temp: float | None = None

    store = run.store([Strict])
    store.setup()
    assert [] == store.setup()
    store.insert_many([Strict(sensor_id="s", ts=at(minute)) for minute in range(20)])
    store.insert(Strict(sensor_id="s", ts=at(1), temp=1))
    with pytest.raises(WriteError):
        database.strict.update_one({}, {"$push": {"readings": {"ts": at(1), "temp": "hot"}}})


def test_a_view_does_not_take_a_name_that_is_in_use(run, database):
    database.create_collection("sensor_data.flat")
    with pytest.raises(DataError, match="for a view"):
        run.store([Reading]).setup()
    assert ["sensor_data.flat"] == database.list_collection_names()


@pytest.mark.parametrize("document", [{"k": "a", "ts": at(1)}, {"k": "a", "start": at(1)}], ids=str)
def test_a_collection_of_single_documents_is_refused(document, run, database):
    class Shift(Document, collection="shifts", bucket=Bucket(key="k", time="start", span=HOUR)):
        k: str
        start: datetime

    database.shifts.insert_one(dict(document))
    with pytest.raises(DataError, match="give adopt= its new name") as caught:
        run.store([Shift]).setup()
    assert "collection-conflict" == caught.value.code
    assert ["_id_"] == list(database.shifts.index_information())
    database.shifts.delete_many({})
    store = run.store([Shift])
    store.setup()
    store.insert(Shift(k="a", start=at(1)))
    assert [] == store.setup()
    assert 1 == store.count(Shift, {"start": at(1)})


def test_set_up_says_that_buckets_are_of_another_span(run, database, caplog):
    longer = reading_with(span=24 * HOUR, limit=None)
    store = run.store([longer])
    store.setup()
    store.insert_many([longer(sensor_id="s", ts=at(60 * hour)) for hour in range(5)])
    assert [] == store.setup()
    assert [] == caplog.records
    shorter = reading_with(limit=None)
    store = run.store([shorter])
    store.setup()
    assert ["run rebuild" in each.getMessage() for each in caplog.records] == [True]
    assert store.verify()
    store.rebuild()
    assert 2 == store.count(shorter, {"ts": {"$gte": at(180)}})
    assert [] == store.verify()
    caplog.clear()
    store.setup()
    assert [] == caplog.records


def test_a_measured_field_can_be_indexed_but_not_uniquely(run, database):
    class Marked(Document, collection="marked", bucket=Bucket(key="a", time="ts", span=HOUR)):
        a: str
        ts: datetime
        code: Annotated[str, Indexed()]

    store = run.store([Marked])
    store.setup()
    assert [] == store.setup()
    assert "readings.code_1" in database.marked.index_information()

    class Wrong(Document, collection="wrong", bucket=Bucket(key="a", time="ts", span=HOUR)):
        a: str
        ts: datetime
        code: Annotated[str, Indexed(unique=True)]

    with pytest.raises(DeclarationError, match="use unique="):
        run.store([Wrong]).setup()


# -- odd values ---------------------------------------------------------------------------------------


def test_values_that_are_not_numbers_do_not_hide_others(run):
    store = run.store([Reading])
    store.setup()
    nan = float("nan")
    store.insert_many([Reading(sensor_id="s", ts=at(1), temp=nan), Reading(sensor_id="s", ts=at(2), temp=5)])
    store.insert(Reading(sensor_id="s", ts=at(3), temp=1))
    assert [1.0] == [each.temp for each in store.find(Reading, {"temp": {"$lt": 3}})]
    assert [5.0] == [each.temp for each in store.find(Reading, {"temp": {"$gt": 3}})]
    assert 1 == store.count(Reading, {"temp": nan})
    assert [] == store.verify()
    store.delete(Reading, {"ts": at(1)})
    assert 1.0 == store.summary(Reading, "s")[0]["temp"].min


def test_keys_of_odd_types(run):
    class Place(BaseModel):
        row: int
        col: int

    class Odd(
        Document,
        collection="odd",
        bucket=Bucket(key=("place", "day"), time="ts", span=HOUR, metadata="extra"),
    ):
        place: Place
        day: Id | None = None
        ts: datetime
        extra: dict[str, int] = {}

    store = run.store([Odd])
    store.setup()
    here, there = Place(row=1, col=2), Place(row=2, col=1)
    store.insert_many(
        [Odd(place=place, ts=at(minute), extra={"a": 1}) for minute in (1, 2) for place in (here, there)]
    )
    store.insert(Odd(place=here, ts=at(3)))
    assert 3 == store.count(Odd, {"place": {"row": 1, "col": 2}})
    assert 2 == store.count(Odd, {"place.row": 2})
    found = store.find_one(Odd, {"ts": at(3)})
    assert found == store.get(Odd, found.id)
    assert 2 == sum(each.count for each in store.summary(Odd, (there, None)))
    assert [] == store.verify()


class Weighed(
    Document,
    collection="weighed",
    bucket=Bucket(key="scale", time="ts", span=timedelta(hours=1), stats=("grams",)),
):
    scale: Decimal
    ts: datetime
    grams: float


def test_a_series_may_be_named_by_a_decimal(run):
    store = run.store([Weighed])
    store.setup()
    store.insert_many(
        [Weighed(scale=Decimal("1.5"), ts=START + timedelta(minutes=n), grams=n) for n in range(5)]
    )
    store.insert(Weighed(scale=Decimal("2.5"), ts=START, grams=9))
    assert 5 == store.count(Weighed, {"scale": Decimal("1.5")})
    assert [] == store.verify()
