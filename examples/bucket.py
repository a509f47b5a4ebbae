"""Bucket: the readings of a sensor, one document per hour.

A document per reading means millions of tiny documents, each with its own
index entries. Here sixty of them share one, under the names that the pattern's
literature gives to its parts. The calls speak of readings all the same.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from examples.story import only, show, step, tell, verified

from treadle import Bucket, Document, Store


class Reading(
    Document,
    collection="sensor_data",
    bucket=Bucket(
        key="sensor_id",
        time="timestamp",
        span=timedelta(hours=1),
        limit=60,
        stats=("temperature",),
        unique="timestamp",
        names={
            "start": "start_date",
            "end": "end_date",
            "readings": "measurements",
            "count": "transaction_count",
        },
    ),
):
    sensor_id: int
    timestamp: datetime
    temperature: float


MODELS = [Reading]

TEN = datetime(2019, 1, 31, 10, tzinfo=UTC)


def reading(minute: int, temperature: float, sensor: int = 12345) -> Reading:
    return Reading(sensor_id=sensor, timestamp=TEN + timedelta(minutes=minute), temperature=temperature)


def story(store: Store) -> None:
    store.setup()
    collection = store.collection(Reading)

    step("Three hours of readings, one a minute, arrive in one batch")
    store.insert_many([reading(minute, 40 + minute % 3) for minute in range(180)])
    print(f"  {store.count(Reading)} readings in {collection.count_documents({})} documents")
    assert (180, 3) == (store.count(Reading), collection.count_documents({}))
    show("the first bucket, two of its readings", collection.find_one({}, {"measurements": {"$slice": 2}}))

    step("A range that begins in the middle of an hour, exact at both ends")
    part = {
        "sensor_id": 12345,
        "timestamp": {"$gte": TEN + timedelta(minutes=58), "$lt": TEN + timedelta(minutes=62)},
    }
    assert [41.0, 42.0, 40.0, 41.0] == [
        each.temperature for each in store.find(Reading, part, sort="timestamp")
    ]

    step("Statistics come from the buckets; no reading is read")
    summary = list(store.summary(Reading, 12345, TEN, TEN + timedelta(hours=3)))
    for entry in summary:
        print(f"  {entry.start:%H:%M}  {entry.count} readings, {entry.stats['temperature'].avg} on average")
    assert 41.0 == summary[-1].stats["temperature"].avg

    step("A retry sends a reading twice, and one comes an hour late")
    again = store.insert_many([reading(179, 42), reading(-30, 10)])
    assert 1 == len(again), "the other was there already"
    assert TEN - timedelta(hours=1) == only(collection, {"measurements.temperature": 10})["start_date"]

    step("A faulty reading is corrected: sum, minimum and maximum follow")
    store.update(Reading, {"sensor_id": 12345, "timestamp": TEN}, {"$set": {"temperature": 99.0}})
    stats = only(collection, {"start_date": TEN})["stats"]["temperature"]
    assert {"min": 40.0, "max": 99.0, "sum": 2519.0} == stats

    step("mongosh and Compass read the views that setup() made")
    show("sensor_data.summary", store.database["sensor_data.summary"].find_one({"start_date": TEN}))
    assert 181 == store.database["sensor_data.flat"].count_documents({"sensor_id": 12345})

    step("Somebody writes a wrong total")
    collection.update_one({"start_date": TEN}, {"$inc": {"transaction_count": 5}})
    assert 1 == verified(store)
    store.repair()
    assert 0 == verified(store)
    assert 60 == only(collection, {"start_date": TEN})["transaction_count"]


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
