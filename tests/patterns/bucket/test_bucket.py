"""Bucket: what is declared, what is stored, and that every call speaks of readings."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import BaseModel

from treadle import (
    Bucket,
    Count,
    DataError,
    DeclarationError,
    Document,
    Formula,
    Id,
    Indexed,
    Rollup,
    Store,
    TimeSeries,
    UsageError,
)

START = datetime(2026, 1, 1, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)
LAYOUTS = ["rows", "columns", "packed"]


class Reading(
    Document,
    collection="sensor_data",
    bucket=Bucket(key="sensor_id", time="ts", span=HOUR, limit=60, stats=("temp",)),
):
    sensor_id: str
    ts: datetime
    temp: float


def reading_in(layout: str, **options: Any) -> type[Document]:
    chosen = {
        "key": "sensor_id",
        "time": "ts",
        "span": HOUR,
        "limit": 4,
        "stats": ("temp",),
        "layout": layout,
    }

    class Measured(Document, collection="measured", bucket=Bucket(**{**chosen, **options})):
        sensor_id: str
        ts: datetime
        temp: float | None = None
        label: str = ""

    return Measured


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def stored(database: Any, collection: str = "sensor_data") -> list[dict[str, Any]]:
    found = list(
        database[collection]
        .with_options(codec_options=CODEC)
        .find()
        .sort([("start", 1), ("_treadle.sequence", 1)])
    )
    for each in found:
        del each["_id"]
    return found


from treadle.model.bson_types import CODEC_OPTIONS as CODEC  # noqa: E402

# -- declarations ---------------------------------------------------------------------------------


def declare(model: dict[str, Any] | None = None, **options: Any) -> None:
    chosen = {"key": "sensor_id", "time": "ts", "span": HOUR, **options}
    fields = {"sensor_id": str, "ts": datetime, "temp": float, "tags": list[str], **(model or {})}
    made = type(Document)(
        "Odd",
        (Document,),
        {"__annotations__": fields, "__module__": __name__},
        collection="odd",
        bucket=Bucket(**chosen),
    )
    from treadle.graph.graph import Graph

    Graph([made])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"span": None}, "neither span= nor limit="),
        ({"span": timedelta(0)}, "whole milliseconds"),
        ({"span": timedelta(microseconds=1500)}, "whole milliseconds"),
        ({"limit": 0}, "whole number from 1"),
        ({"limit": True}, "whole number from 1"),
        ({"key": "sensor"}, "no field 'sensor'"),
        ({"key": ()}, "no key"),
        ({"key": ("sensor_id", "sensor_id")}, "one part to play"),
        ({"key": "tags"}, "list 'tags'"),
        ({"key": "id"}, "one part to play"),
        ({"time": "temp"}, "must be a datetime"),
        ({"stats": "sensor_id"}, "no number"),
        ({"stats": ("tags",)}, "no number"),
        ({"metadata": "ts"}, "one part to play"),
        ({"unique": "sensor_id"}, "measured single value"),
        ({"unique": "tags"}, "measured single value"),
        ({"layout": "wide"}, "'rows' or 'columns' or 'packed'"),
        ({"compression": "lzma"}, "None or 'zstd'"),
        ({"names": {"begin": "hour"}}, "it renames start"),
        ({"names": {"start": "end"}}, "different names"),
        ({"names": {"start": "_id"}}, "different names"),
        ({"names": {"start": "sensor_id"}}, "beside a part of that name"),
        ({"expire_after": timedelta(milliseconds=3)}, "a second or more"),
        ({"ids": "none"}, "'derived' or 'stored'"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(options, said):
    with pytest.raises(DeclarationError, match=said) as caught:
        declare(**options)
    assert "bucket-declaration" == caught.value.code


def test_a_bucket_belongs_on_the_class():
    class Odd(Document, collection="odd"):
        value: Annotated[int, Bucket(key="a", time="b", limit=1)]

    from treadle.graph.graph import Graph

    with pytest.raises(DeclarationError, match="class keyword bucket="):
        Graph([Odd])


def test_one_layout_per_model():
    class Odd(
        Document,
        collection="odd",
        bucket=Bucket(key="a", time="ts", limit=1),
        timeseries=TimeSeries(time="ts"),
    ):
        a: str
        ts: datetime

    from treadle.graph.graph import Graph

    with pytest.raises(DeclarationError, match="keep one"):
        Graph([Odd])


@pytest.mark.parametrize(
    "keyword",
    [{"discriminator": "type"}, {"version": 2}, {"rollup": Rollup("Reading", keys={"a": "sensor_id"})}],
    ids=lambda keyword: next(iter(keyword)),
)
def test_what_concerns_documents_does_not_go_with_readings(keyword):
    from treadle.graph.graph import Graph

    with pytest.raises(DeclarationError, match=r"keep one|readings have none|Rollup|tree"):

        class Odd(Document, collection="odd", bucket=Bucket(key="a", time="ts", limit=1), **keyword):
            a: str
            ts: datetime

        Graph([Odd, Reading])


def test_derived_data_of_readings_is_refused():
    """Readings are not documents, so nothing can follow each of them."""
    from treadle.graph.graph import Graph

    class Sensor(Document, collection="sensors"):
        id: str
        number: Annotated[int, Count(Reading, by="sensor_id")] = 0

    with pytest.raises(DeclarationError, match="statistics of its buckets") as caught:
        Graph([Reading, Sensor])
    assert "layout-derived" == caught.value.code

    class Doubled(Document, collection="doubled", bucket=Bucket(key="a", time="ts", limit=3)):
        a: str
        ts: datetime
        twice: Annotated[float | None, Formula({"$multiply": ["$a", 2]})] = None

    with pytest.raises(DeclarationError, match="not stored one by one"):
        Graph([Doubled])


# -- what is stored -------------------------------------------------------------------------------


def test_a_bucket_looks_as_the_literature_draws_it(run, database):
    store = run.store([Reading])
    store.setup()
    store.insert(Reading(sensor_id="s1", ts=at(1), temp=20.5))
    store.insert_many(
        [Reading(sensor_id="s1", ts=at(3), temp=22.0), Reading(sensor_id="s1", ts=at(2), temp=19.0)]
    )
    assert [
        {
            "sensor_id": "s1",
            "start": START,
            "end": START + HOUR - timedelta(milliseconds=1),
            "count": 3,
            "readings": [
                {"ts": at(1), "temp": 20.5},
                {"ts": at(3), "temp": 22.0},
                {"ts": at(2), "temp": 19.0},
            ],
            "stats": {"temp": {"min": 19.0, "max": 22.0, "sum": 61.5}},
        }
    ] == stored(database)


def test_columns_hold_one_array_per_field_and_times_as_offsets(run, database):
    measured = reading_in("columns")
    store = run.store([measured])
    store.setup()
    store.insert_many(
        [measured(sensor_id="s", ts=at(1), temp=1.5), measured(sensor_id="s", ts=at(2), label="x")]
    )
    (bucket,) = stored(database, "measured")
    assert {"ts": [60_000, 120_000], "temp": [1.5, None], "label": ["", "x"]} == bucket["readings"]
    # A reading without a value does not count for the average.
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
    measured = reading_in("rows", span=timedelta(days=7), limit=None)
    store = run.store([measured])
    store.insert(measured(sensor_id="s", ts=datetime(2026, 1, 4, 23, 59, tzinfo=UTC)))
    store.insert(measured(sensor_id="s", ts=datetime(2026, 1, 5, tzinfo=UTC)))
    assert [datetime(2025, 12, 29, tzinfo=UTC), datetime(2026, 1, 5, tzinfo=UTC)] == [
        each["start"] for each in stored(database, "measured")
    ]


def test_windows_by_limit_alone_begin_with_their_first_reading(run, database):
    measured = reading_in("rows", span=None, limit=3)
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
    for layout in LAYOUTS:
        database.drop_collection("measured")
        measured = reading_in(layout)
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
        store.rebuild()
        # Closed long ago, so the server can no longer look into packed ones.
        assert (0 if layout == "packed" else 4) == len(list(database["measured.flat"].find()))
        assert summary == database["measured.summary"].find_one({}, {"_id": 0})


def test_a_bulk_insert_is_one_update_per_bucket(heard):
    database, listener = heard
    store = Store(database, [Reading])
    store.setup()
    # From here on it is known what the server can do.
    store.delete(Reading, {"sensor_id": "nobody"})
    listener.clear()
    store.insert_many(
        [Reading(sensor_id=key, ts=at(minute), temp=1) for minute in range(120) for key in ("a", "b", "c")]
    )
    assert ["insert"] == listener.names
    assert 6 == len(listener.commands[0][1]["documents"])
    listener.clear()
    store.insert_many(
        [
            Reading(sensor_id=key, ts=at(minute), temp=1)
            for minute in range(120, 150)
            for key in ("a", "b", "c")
        ]
    )
    store.insert_many(
        [
            Reading(sensor_id=key, ts=at(minute), temp=1)
            for minute in range(150, 180)
            for key in ("a", "b", "c")
        ]
    )
    assert ["insert", "update"] == listener.names
    assert 3 == len(listener.commands[1][1]["updates"])
    # A process that does not know the windows finds them taken, and appends.
    listener.clear()
    Store(database, [Reading]).insert_many(
        [Reading(sensor_id="d", ts=at(minute), temp=1) for minute in range(20)]
    )
    Store(database, [Reading]).insert_many(
        [Reading(sensor_id="d", ts=at(minute), temp=1) for minute in range(20, 40)]
    )
    assert ["insert", "insert", "update"] == [name for name in listener.names if name != "buildInfo"]
    assert 580 == store.count(Reading)
    assert [] == store.verify()


def test_set_up_makes_what_expires_and_what_is_compressed(run, database):
    measured = reading_in("columns", expire_after=timedelta(days=30), compression="zstd")
    store = run.store([measured])
    assert store.setup()
    assert [] == store.setup()
    assert 30 * 24 * 3600 == database.measured.index_information()["end_1"]["expireAfterSeconds"]
    (found,) = database.list_collections(filter={"name": "measured"})
    assert "block_compressor=zstd" in found["options"]["storageEngine"]["wiredTiger"]["configString"]
    key = next(index for index in database.measured.list_indexes() if "start" in index["key"])
    assert "block_compressor=zstd" in key["storageEngine"]["wiredTiger"]["configString"]
    longer = run.store([reading_in("columns", expire_after=timedelta(days=60), compression="zstd")])
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
    assert "validator-refused" == caught.value.code


def test_a_strict_validator_looks_at_the_readings_too(run, database):
    from pymongo.errors import WriteError

    for layout, wrong in (
        ("rows", {"readings": {"ts": at(1), "temp": "hot"}}),
        ("columns", {"readings.ts": 1, "readings.temp": "hot"}),
    ):

        class Strict(
            Document,
            collection=f"strict_{layout}",
            validation="strict",
            bucket=Bucket(key="sensor_id", time="ts", span=HOUR, layout=layout),
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
            database[f"strict_{layout}"].update_one({}, {"$push": wrong})


def test_a_view_does_not_take_a_name_that_is_in_use(run, database):
    database.create_collection("sensor_data.flat")
    with pytest.raises(DataError, match="for a view"):
        run.store([Reading]).setup()
    assert ["sensor_data.flat"] == database.list_collection_names()


def test_single_documents_that_would_pass_for_buckets_are_refused(run, database):
    """They have a field of the name that the start of a bucket has."""

    class Shift(Document, collection="shifts", bucket=Bucket(key="k", time="start", span=HOUR)):
        k: str
        start: datetime

    database.shifts.insert_one({"k": "a", "start": at(1)})
    with pytest.raises(DataError, match="rename the part") as caught:
        run.store([Shift]).setup()
    assert "collection-conflict" == caught.value.code
    database.shifts.delete_many({})
    store = run.store([Shift])
    store.setup()
    store.insert(Shift(k="a", start=at(1)))
    assert [] == store.setup()
    assert 1 == store.count(Shift, {"start": at(1)})


def test_set_up_says_that_buckets_are_of_another_span(run, database, caplog):
    longer = reading_in("rows", span=24 * HOUR, limit=None)
    store = run.store([longer])
    store.setup()
    store.insert_many([longer(sensor_id="s", ts=at(60 * hour)) for hour in range(5)])
    assert [] == store.setup()
    assert [] == caplog.records
    shorter = reading_in("rows", limit=None)
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


# -- reading --------------------------------------------------------------------------------------


@pytest.fixture
def filled(run):
    def fill(layout: str, **options: Any) -> tuple[Any, type[Document]]:
        measured = reading_in(layout, **options)
        store = run.store([measured])
        store.setup()
        store.insert_many(
            [
                measured(
                    sensor_id=key,
                    ts=at(minute),
                    temp=minute if minute % 3 else None,
                    label="$ts" if minute == 20 else "",
                )
                for minute in range(0, 180, 10)
                for key in ("a", "b")
            ]
        )
        store.rebuild()
        return store, measured

    return fill


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_range_is_exact_at_both_ends(layout, filled):
    """The bucket that starts before the range is searched too; readings come back, not buckets."""
    store, measured = filled(layout)
    cases: list[tuple[Any, list[int]]] = [
        ({"$gte": at(50), "$lt": at(70)}, [50, 60]),
        ({"$gt": at(50), "$lte": at(70)}, [60, 70]),
        ({"$gte": at(170)}, [170]),
        ({"$lt": at(10)}, [0]),
        ({"$eq": at(60)}, [60]),
        (at(60), [60]),
        ({"$in": [at(0), at(60), at(65)]}, [0, 60]),
        ({"$in": []}, []),
        ({"$gt": at(170)}, []),
        ({"$gte": at(70), "$lt": at(50)}, []),
        ({"$not": {"$gt": at(10)}}, [0, 10]),
        ({"$gte": at(150), "$ne": at(160)}, [150, 170]),
    ]
    for condition, minutes in cases:
        filter = {"sensor_id": "a", "ts": condition}
        assert [at(minute) for minute in minutes] == [
            each.ts for each in store.find(measured, filter, sort="ts")
        ], condition
        assert len(minutes) == store.count(measured, filter), condition
        assert [at(minute) for minute in reversed(minutes)] == [
            each.ts for each in store.find(measured, filter, sort="-ts")
        ], condition


@pytest.mark.parametrize("layout", LAYOUTS)
def test_filters_mean_what_the_server_means(layout, filled, database):
    """Whatever Python does not judge itself goes to the server; both agree with a plain collection."""
    store, measured = filled(layout)
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
        {"missing": 1},
        {"missing": None, "temp": 10},
        {},
    ]
    for filter in filters:
        expected = sorted((each["sensor_id"], each["ts"]) for each in plain.find(filter))
        found = sorted(
            (each.sensor_id, each.ts.replace(tzinfo=None)) for each in store.find(measured, filter)
        )
        assert expected == found, filter
        assert len(expected) == store.count(measured, filter), filter


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sort_skip_and_limit(layout, filled):
    store, measured = filled(layout)

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
    # Nothing comes before numbers; ties break by the id, which is the time within a series.
    assert [0, 30, 60, 90, 120, 150, 10] == minutes(sort="temp", limit=7)
    assert [10, 20] == minutes(sort=["temp", "-ts"], skip=6, limit=2)
    assert 170.0 == store.find_one(measured, {"sensor_id": "b"}, sort="-ts").temp
    assert store.find_one(measured, {"sensor_id": "c"}) is None
    both = [(each.ts, each.id) for each in store.find(measured, sort="ts")]
    assert sorted(both) == both


def test_find_streams(heard):
    """The first reading arrives before the last bucket was read; closing stops it."""
    database, listener = heard
    measured = reading_in("rows", limit=None)
    store = Store(database, [measured])
    store.setup()
    store.insert_many([measured(sensor_id="a", ts=at(60 * hour)) for hour in range(400)])
    listener.clear()
    for sort in (None, "ts", "-ts"):
        found = store.find(measured, {"sensor_id": "a"}, sort=sort)
        next(iter(found))
        found.close()
    assert "getMore" not in listener.names


def test_a_sort_that_would_hold_everything_is_refused(filled, monkeypatch):
    store, measured = filled("rows")
    monkeypatch.setattr("treadle.patterns.bucket.reading.HELD_MAX", 10)
    monkeypatch.setattr("treadle.patterns.bucket.reading.PAGE", 2)
    with pytest.raises(UsageError) as caught:
        store.find(measured, sort="temp").to_list()
    assert "sort-too-large" == caught.value.code
    assert 3 == len(store.find(measured, sort="temp", limit=3).to_list())
    assert 36 == len(store.find(measured, sort="ts").to_list())


def test_bad_calls_are_refused(run, filled):
    store, measured = filled("rows")
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

    with pytest.raises(UsageError, match="stored one by one"):
        run.store([Plain]).summary(Plain, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_summaries_and_tuples(layout, filled):
    store, measured = filled(layout, limit=None)
    entries = store.summary(measured, "a", at(60), at(120))
    assert [(at(60), 6)] == [(each.start, each.count) for each in entries]
    assert (70.0, 110.0, 360.0, 90.0) == tuple(
        entries[0].stats["temp"][part] for part in ("min", "max", "sum", "avg")
    )
    assert 3 == len(store.summary(measured, "a"))
    assert [(at(50), 50.0), (at(60), None)] == store.readings(measured, "a", at(50), at(70), fields=["temp"])
    assert [(at(20), 20.0, "$ts")] == store.readings(measured, "a", at(20), at(21))
    assert [(at(0),)] == store.readings(measured, "a", at(0), at(1), fields=[])


# -- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_id_of_a_reading_is_its_series_and_its_time(layout, filled, run):
    store, measured = filled(layout)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_id_that_the_model_declares_is_stored(layout, run):
    class Named(Document, collection="named", bucket=Bucket(key="a", time="ts", span=HOUR, layout=layout)):
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


# -- changing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_count_and_statistics_stay_exact_when_readings_change(layout, filled, database):
    """Also min and max, when the extreme itself goes; an empty bucket goes too."""
    store, measured = filled(layout, limit=None)

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
        {"$inc": {"fresh": 2}},
        {"$mul": {"fresh": 2}},
        {"$min": {"n": 1}},
        {"$max": {"n": 10, "note": "z"}},
        {"$set": {"part.x": 9, "note": "$n"}},
        {"$unset": {"note": ""}},
        {"$rename": {"note": "n2"}},
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
    measured = reading_in("rows", limit=3)
    store = run.store([measured])
    store.setup()
    store.insert_many([measured(sensor_id="s", ts=at(60 * hour + 1), temp=hour) for hour in range(8)])
    assert 8 == store.update_many(measured, {}, [{"$set": {"ts": {"$add": ["$ts", 3_600_000]}}}])
    assert [at(60 * hour + 61) for hour in range(8)] == [each.ts for each in store.find(measured, sort="ts")]
    assert [] == store.verify()


# -- unique ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"span": None, "limit": 3}, {"unique": "label"}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reading_that_comes_twice_is_stored_once(layout, options, run):
    """Also when its bucket has been full since, or is packed; it is counted."""
    measured = reading_in(layout, **{"unique": "ts", **options})
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
    measured = reading_in("rows", unique="ts", limit=5)
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


# -- many at once ---------------------------------------------------------------------------------


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
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_sixteen_threads_on_one_bucket_are_exact(layout, options, database):
    """Without the unique index some would open the same bucket twice; without sequence numbers many would fail."""
    measured = reading_in(layout, **options)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_changes_and_appends_at_once_lose_nothing(layout, database):
    """Updates, deletions, appends and conversions meet in one bucket; each increment arrives."""
    measured = reading_in(layout, limit=None)
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


# -- transactions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"unique": "ts"}, {"span": None}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_takes_part_in_a_transaction(layout, options, run):
    """A full bucket is met without an error, which would end the transaction."""
    measured = reading_in(layout, **options)
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


# -- odd sizes ------------------------------------------------------------------------------------


def test_a_bucket_that_would_become_too_large_goes_on_in_the_next(run, database):
    measured = reading_in("rows", limit=None)
    store = run.store([measured])
    store.setup()
    text = "x" * 5_000_000
    for minute in range(2):
        store.insert(measured(sensor_id="s", ts=at(minute), label=text))
    store.insert_many([measured(sensor_id="s", ts=at(minute), label=text) for minute in range(2, 6)])
    assert 6 == store.count(measured)
    assert 1 < database.measured.count_documents({})
    with pytest.raises(UsageError) as caught:
        store.insert(measured(sensor_id="s", ts=at(9), label="x" * 17_000_000))
    assert "document-too-large" == caught.value.code
    assert 6 == store.count(measured)


def test_bad_input_changes_nothing(run, database):
    class Wide(Document, collection="wide", bucket=Bucket(key="a", time="ts", span=HOUR, stats="n")):
        a: str
        ts: datetime
        n: int = 0

    store = run.store([Wide])
    store.setup()
    good = Wide(a="s", ts=at(1))
    with pytest.raises(UsageError):
        store.insert_many([good, Wide(a="s", ts=at(2), n=2**70)])
    with pytest.raises(UsageError):
        store.insert_many([good, Wide(a="t\ud800", ts=at(2))])
    assert 0 == store.count(Wide)
    store.insert_many([])
    assert 0 == store.count(Wide)


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
