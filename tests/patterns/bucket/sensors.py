"""Readings of sensors in buckets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from treadle import Bucket, Document
from treadle.model.bson_types import CODEC_OPTIONS as CODEC

START = datetime(2026, 1, 1, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)


class Reading(
    Document,
    collection="sensor_data",
    bucket=Bucket(key="sensor_id", time="ts", span=HOUR, limit=60, stats=("temp",)),
):
    sensor_id: str
    ts: datetime
    temp: float


def reading_with(**options: Any) -> type[Document]:
    chosen = {"key": "sensor_id", "time": "ts", "span": HOUR, "limit": 4, "stats": ("temp",)}

    class Measured(Document, collection="measured", bucket=Bucket(**{**chosen, **options})):
        sensor_id: str
        ts: datetime
        temp: float | None = None
        label: str = ""

    return Measured


def fill(store: Any, reading: Any, minutes: Any = range(0, 120, 10)) -> None:
    store.insert_many([reading(sensor_id="s", ts=at(minute), temp=minute) for minute in minutes])


def seen(store: Any, reading: Any) -> list[tuple[str, datetime, float]]:
    return sorted((each.sensor_id, each.ts, each.temp) for each in store.find(reading))


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


def in_threads(work: Callable[[int], Any], count: int = 16) -> None:
    """Call `work` with a number in each of several threads, and expect no error."""
    failed: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failed
