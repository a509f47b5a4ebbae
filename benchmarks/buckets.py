"""Buckets beside one document per reading, and beside the server's native kind.

The data is that of 100 sensors for a week, one reading per minute each. What
is read is stored once, at the start of a group; what is written goes into new
collections each time.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import random
from collections.abc import Callable, Sequence
from itertools import count
from operator import itemgetter
from typing import Any

import pymongo
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from benchmarks.harness import Contender, Context, Goal, Group
from treadle import Bucket, Document, Store, TimeSeries
from treadle.model.bson_types import CODEC_OPTIONS

START = dt.datetime(2026, 1, 5, tzinfo=dt.UTC)
MINUTE = dt.timedelta(minutes=1)
SENSORS = 100
DAYS = 7
HOUR = dt.timedelta(hours=1)
DAY = dt.timedelta(days=1)
LIMIT = 60
BUCKET = Bucket(key="sensor_id", time="ts", span=HOUR, limit=LIMIT, stats=("temp",))
Row = dict[str, Any]
_serial = count()


def model(collection: str, **keywords: Any) -> type[Document]:
    """Make a model of readings with a name of its own."""
    fields = {"sensor_id": int, "ts": dt.datetime, "temp": float}
    namespace = {"__annotations__": fields, "__module__": __name__}
    made: type[Document] = type(Document)(
        f"{collection.title()}Reading", (Document,), namespace, collection=collection, **keywords
    )
    return made


def rows(minutes: int, sensors: int = SENSORS) -> list[Row]:
    """Readings as they arrive: each minute one of every sensor; a slow walk with one decimal place."""
    chance = random.Random(7)
    temperatures = [20.0 + number % 10 for number in range(sensors)]
    made = []
    for minute in range(minutes):
        ts = START + minute * MINUTE
        for sensor in range(sensors):
            temperatures[sensor] = round(temperatures[sensor] + chance.choice((-0.1, 0.0, 0.0, 0.1)), 1)
            made.append({"sensor_id": sensor, "ts": ts, "temp": temperatures[sensor]})
    return made


def _database(context: Context) -> Database[Any]:
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri, tz_aware=True))
    name = f"buckets_{next(_serial)}"
    context.stack.callback(client.drop_database, name)
    return client.get_database(name, codec_options=CODEC_OPTIONS)


# -- ingest -----------------------------------------------------------------------------------


def _ingest(batch: int) -> Callable[[Context], list[Contender]]:
    def contenders(context: Context) -> list[Contender]:
        database = _database(context)
        total = context.scale(48_000, 12_000) if batch > 1000 else context.scale(12_000, 4000)
        data = rows(total // SENSORS)
        batches = [data[at : at + batch] for at in range(0, len(data), batch)]

        def naive() -> Any:
            collection = database[f"naive_{next(_serial)}"]
            collection.create_index([("sensor_id", 1), ("ts", 1)])
            return collection, [[dict(row) for row in part] for part in batches]

        def write_naive(state: Any) -> Any:
            collection, parts = state
            for part in parts:
                collection.insert_many(part)
            return collection

        def native() -> Any:
            name = f"native_{next(_serial)}"
            database.create_collection(
                name, timeseries={"timeField": "ts", "metaField": "sensor_id", "granularity": "minutes"}
            )
            return database[name], [[dict(row) for row in part] for part in batches]

        def treadle(**keywords: Any) -> Any:
            def prepare() -> Any:
                reading = model(f"treadle_{next(_serial)}", **keywords)
                store = Store(database, [reading])
                store.setup()
                return store, [[reading(**row) for row in part] for part in batches]

            return prepare

        def write(state: Any) -> Any:
            store, parts = state
            for part in parts:
                store.insert_many(part)
            return store

        small = batch <= 1000
        same = "the same by hand, rows"
        goal = Goal(1 / 0.85, limit=same) if small else Goal(1 / 2.2)
        by_hand = _by_hand(database, batches, total, same) if small else None
        return [
            Contender("one document each, insert_many", naive, write_naive, total),
            Contender("native, PyMongo", native, write_naive, total),
            *([] if by_hand is None else [by_hand]),
            Contender("Bucket, rows", treadle(bucket=BUCKET), write, total, goal=goal),
            Contender(
                "TimeSeries",
                treadle(timeseries=TimeSeries(time="ts", key="sensor_id", granularity="minutes")),
                write,
                total,
            ),
        ]

    return contenders


def _by_hand(database: Database[Any], batches: list[list[Row]], total: int, name: str) -> Contender:
    """Buckets from plain dicts, with what a Bucket promises and nothing else.

    One bucket per series, window and number by a unique index; count, min, max and sum in the same write as
    the readings; no bucket beyond its limit; all of a batch or nothing. New buckets are inserted, others are
    read in the transaction that updates them by their ids. What it would do where another writer comes
    between, which is where most of the work is, it leaves out.
    """

    def prepare() -> Any:
        collection = database[f"by_hand_{next(_serial)}"]
        collection.create_index([("sensor_id", 1), ("start", 1), ("sequence", 1)], unique=True)
        return collection, [[dict(row) for row in part] for part in batches]

    def work(state: Any) -> Any:
        collection, parts = state
        for part in parts:
            with database.client.start_session() as session, session.start_transaction():
                _write_by_hand(collection, part, session)
        return collection

    def check(collection: Any) -> None:
        stages: list[Any] = [{"$group": {"_id": None, "most": {"$max": "$count"}, "all": {"$sum": "$count"}}}]
        (found,) = collection.aggregate(stages)
        assert total == found["all"]
        assert LIMIT >= found["most"]

    return Contender(name, prepare, work, total, check=check)


def _write_by_hand(collection: Any, readings: list[Row], session: Any) -> None:
    windows: dict[Any, list[Row]] = {}
    for row in readings:
        windows.setdefault((row["sensor_id"], row["ts"].replace(minute=0, second=0)), []).append(row)
    asked = {
        "sensor_id": {"$in": [key for key, _ in windows]},
        "start": {"$in": [*{at for _, at in windows}]},
    }
    shown = {"sensor_id": 1, "start": 1, "sequence": 1, "count": 1}
    last: dict[Any, Row] = {}
    for each in collection.find(asked, shown, session=session).sort("sequence", 1):
        last[each["sensor_id"], each["start"]] = each
    new: list[Row] = []
    updates: list[Any] = []
    for (sensor, start), rows in windows.items():
        known = last.get((sensor, start))
        room = LIMIT - known["count"] if known else 0
        if known and (some := rows[:room]):
            updates.append(pymongo.UpdateOne({"_id": known["_id"]}, _append_by_hand(some)))
        for number, at in enumerate(range(room, len(rows), LIMIT), known["sequence"] + 1 if known else 0):
            new.append(_bucket_by_hand(sensor, start, number, rows[at : at + LIMIT]))
    if new:
        collection.insert_many(new, session=session)
    if updates:
        collection.bulk_write(updates, ordered=False, session=session)


def _bucket_by_hand(sensor: int, start: dt.datetime, number: int, rows: list[Row]) -> Row:
    temps = [row["temp"] for row in rows]
    return {
        "sensor_id": sensor,
        "start": start,
        "end": start + HOUR,
        "sequence": number,
        "count": len(rows),
        "readings": [{"ts": row["ts"], "temp": row["temp"]} for row in rows],
        "stats": {"temp": {"min": min(temps), "max": max(temps), "sum": sum(temps)}},
    }


def _append_by_hand(rows: list[Row]) -> Row:
    temps = [row["temp"] for row in rows]
    return {
        "$push": {"readings": {"$each": [{"ts": row["ts"], "temp": row["temp"]} for row in rows]}},
        "$inc": {"count": len(rows), "stats.temp.sum": sum(temps)},
        "$min": {"stats.temp.min": min(temps)},
        "$max": {"stats.temp.max": max(temps)},
    }


# -- what is stored once ----------------------------------------------------------------------


class Kept:
    """The same readings in every way, for reading and for weighing."""

    def __init__(self, context: Context) -> None:
        # Not closed with the group: the others read it too.
        client: MongoClient[Any] = MongoClient(context.uri)
        client.drop_database("buckets_kept")
        atexit.register(_dropped, client, "buckets_kept")
        self.database = client.get_database("buckets_kept", codec_options=CODEC_OPTIONS)
        self.days = context.scale(DAYS, 1)
        self.sensors = context.scale(SENSORS, 20)
        data = rows(self.days * 1440, self.sensors)
        self.total = len(data)
        self.naive = self.database["naive"]
        self.naive.create_index([("sensor_id", 1), ("ts", 1)])
        self.models: dict[str, Any] = {
            "native": model(
                "native", timeseries=TimeSeries(time="ts", key="sensor_id", granularity="minutes")
            ),
            "rows": model("rows", bucket=BUCKET),
        }
        self.store = Store(self.database, list(self.models.values()))
        self.store.setup()
        for at in range(0, len(data), 12_000):
            part = data[at : at + 12_000]
            for reading in self.models.values():
                self.store.insert_many([reading(**row) for row in part])
            self.naive.insert_many(part)
        self.compact()

    def compact(self) -> None:
        self.database.client.admin.command("fsync", 1)
        self.database.command({"compact": "rows", "force": True})
        self.database.client.admin.command("fsync", 1)

    def size(self, collection: str) -> float:
        """Storage and indexes, in bytes per reading."""
        found = self.database.command("collStats", collection)
        return float(found["storageSize"] + found["totalIndexSize"]) / self.total


def _dropped(client: MongoClient[Any], name: str) -> None:
    """Clean up on a server that is not ours; a private one has ended by now."""
    with contextlib.suppress(PyMongoError), pymongo.timeout(1):
        client.drop_database(name)


_KEPT: dict[str, Kept] = {}


def kept(context: Context) -> Kept:
    """Stored once for all groups that only read; a million readings take a while."""
    if context.uri not in _KEPT:
        _KEPT[context.uri] = Kept(context)
    return _KEPT[context.uri]


def _sizes(context: Context) -> list[Contender]:
    made = kept(context)

    def weigh(collection: str) -> Callable[[Any], float]:
        # The harness counts seconds; a microsecond stands for a byte here.
        return lambda _: made.size(collection) / 1e6

    return [
        Contender("one document each", lambda: None, weigh("naive"), measured=True),
        Contender("native", lambda: None, weigh("native"), measured=True),
        Contender("rows", lambda: None, weigh("rows"), measured=True, goal=Goal(12.0, "bytes")),
    ]


def _reads(context: Context) -> list[Contender]:
    made = kept(context)
    numbers = count()
    expected = 1440

    def sensor() -> int:
        return next(numbers) * 37 % made.sensors

    def check(found: Sequence[Any]) -> None:
        assert expected == len(found)

    begin = START + DAY * (made.days - 1)
    window = (begin, begin + DAY)

    def by_hand(number: int) -> list[tuple[Any, ...]]:
        cursor = made.database["native"].find(
            {"sensor_id": number, "ts": {"$gte": window[0], "$lt": window[1]}}, {"_id": 0, "ts": 1, "temp": 1}
        )
        return list(map(itemgetter("ts", "temp"), cursor.sort("ts", 1).to_list()))

    def tuples(name: str) -> Callable[[int], Any]:
        return lambda number: made.store.readings(made.models[name], number, *window)

    def models(number: int) -> Any:
        filter = {"sensor_id": number, "ts": {"$gte": window[0], "$lt": window[1]}}
        return made.store.find(made.models["rows"], filter, sort="ts").to_list()

    return [
        Contender("native, PyMongo, tuples", sensor, by_hand, check=check),
        Contender("TimeSeries, tuples", sensor, tuples("native"), check=check),
        Contender("Bucket, rows, tuples", sensor, tuples("rows"), goal=Goal(1 / 1.7), check=check),
        Contender("Bucket, rows, models", sensor, models, check=check),
    ]


def _averages(context: Context) -> list[Contender]:
    made = kept(context)
    numbers = count()
    begin = START + DAY * (made.days - 1)
    window = (begin, begin + DAY)

    def sensor() -> int:
        return next(numbers) * 37 % made.sensors

    def pipeline(collection: str) -> Callable[[int], float]:
        def average(number: int) -> float:
            match = {"sensor_id": number, "ts": {"$gte": window[0], "$lt": window[1]}}
            stages: list[Any] = [{"$match": match}, {"$group": {"_id": None, "avg": {"$avg": "$temp"}}}]
            return float(next(iter(made.database[collection].aggregate(stages)))["avg"])

        return average

    def from_statistics(number: int) -> float:
        entries = made.store.summary(made.models["rows"], number, *window)
        return float(sum(each.stats["temp"].sum for each in entries) / sum(each.count for each in entries))

    def check(found: float) -> None:
        assert 0 < found < 60

    return [
        Contender("one document each, $group", sensor, pipeline("naive"), check=check),
        Contender("native, $group", sensor, pipeline("native"), check=check),
        Contender("summary, rows", sensor, from_statistics, goal=Goal(1 / 3.5), check=check),
    ]


def groups() -> list[Group]:
    return [
        Group("buckets", "ingest in batches of 12,000 readings", _ingest(12_000), rounds=5),
        Group("buckets", "ingest in batches of 1,000 readings", _ingest(1000), rounds=11),
        Group("buckets", "storage and indexes, bytes per reading", _sizes, rounds=1, unit="bytes"),
        Group("buckets", "24 hours of one sensor", _reads),
        Group("buckets", "average of 24 hours", _averages),
    ]
