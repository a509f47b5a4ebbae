"""Time Series: weather readings in the server's own kind of collection, which forgets them after a month.

The same calls as for buckets, on MongoDB's native time series. What the
server refuses there is refused with a sentence that says what to do.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from examples.story import show, step, tell
from pydantic import BaseModel, Field

from treadle import Document, Store, TimeSeries, UsageError


class Sensor(BaseModel):
    sensor_id: int = Field(alias="sensorId")
    type: str = "temperature"


class Weather(
    Document,
    collection="weather",
    timeseries=TimeSeries(
        time="timestamp",
        key="metadata",
        granularity="hours",
        expire_after=timedelta(days=30),
        stats=("temp",),
    ),
):
    metadata: Sensor
    timestamp: datetime
    temp: float


MODELS = [Weather]

TEMPERATURES = (12, 11, 11, 12, 16, 15, 13, 12, 11, 12, 17, 12)


def story(store: Store) -> None:
    step("setup() makes the collection")
    for action in store.setup():
        print(f"  {action}")

    step("Two days of readings, one every four hours")
    roof = Sensor(sensorId=5578)
    # The server drops what is older than a month, so the story takes place now.
    first = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=2)
    moments = [first + timedelta(hours=4 * number) for number in range(len(TEMPERATURES))]
    store.insert_many(
        [Weather(metadata=roof, timestamp=moment, temp=temp) for moment, temp in zip(moments, TEMPERATURES)]
    )
    store.insert(Weather(metadata=Sensor(sensorId=1), timestamp=first, temp=-4))
    show("weather", store.collection(Weather).find_one({"metadata.sensorId": 5578}))

    step("Questions as anywhere else")
    mine = {"metadata.sensorId": 5578}
    warm = store.find(Weather, {**mine, "temp": {"$gt": 15}}, sort="timestamp").to_list()
    assert [16, 17] == [reading.temp for reading in warm]
    assert 6 == store.count(Weather, {**mine, "timestamp": {"$lt": first + timedelta(days=1)}})
    (entry,) = store.summary(Weather, roof, first, first + timedelta(days=2))
    temp = entry.stats["temp"]
    print(f"  {entry.count} readings from {temp.min} to {temp.max}, {temp.avg:.2f} on average")
    assert (12, 11, 17, sum(TEMPERATURES) / 12) == (entry.count, temp.min, temp.max, temp.avg)

    step("A single reading cannot be changed here; buckets can do that")
    try:
        store.update(Weather, warm[0].id, {"$set": {"temp": 15.5}})
    except UsageError as error:
        print(f"  refused: {error}")
    else:
        raise AssertionError("the update went through")


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
