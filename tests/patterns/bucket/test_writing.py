"""Appends: what is unique under races; values that do not fit."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from treadle import Bucket, DataError, Document, Store, UsageError

START = datetime(2026, 1, 1, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)


def reading_with(**options: Any) -> Any:
    chosen = {"key": "sensor_id", "time": "ts", "span": HOUR, "stats": ("temp",)}

    class Reading(Document, collection="readings", bucket=Bucket(**{**chosen, **options})):
        sensor_id: str
        ts: datetime
        temp: float = 0.0
        label: str = ""

    return Reading


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def batch(reading: Any, minutes: Any, sensors: int = 6) -> list[Any]:
    return [
        reading(sensor_id=f"s{number}", ts=at(minute), temp=minute)
        for minute in minutes
        for number in range(sensors)
    ]


# -- unique ------------------------------------------------------------------------------------------


def test_what_is_unique_does_not_slip_into_a_second_bucket(overheard, database):
    """Another writer fills the bucket with a reading that this batch wanted to put into the next one."""
    through, listener = overheard
    reading = reading_with(limit=5, unique="ts")
    store, other = Store(through, [reading]), Store(database, [reading])
    store.setup()
    other.insert_many(batch(reading, range(2), sensors=1))
    listener.before(("update",), 0, lambda: other.insert(batch(reading, [13], sensors=1)[0]))
    stored = store.insert_many(batch(reading, range(10, 14), sensors=1))
    assert 1 == stored.duplicates
    assert 6 == store.count(reading) == len({each.ts for each in store.find(reading)})
    assert [] == store.verify()


# -- values that do not fit ----------------------------------------------------------------------------


def test_a_change_that_could_not_be_read_back_changes_nothing(run, database):
    reading = reading_with()
    store = run.store([reading])
    store.setup()
    store.insert_many(batch(reading, range(3), sensors=1))
    before = list(database.readings.find())
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
    with pytest.raises(UsageError) as caught:
        store.insert_many([*batch(reading, [9], sensors=1), wrong])
    assert "model-inconsistent" == caught.value.code
    assert before == list(database.readings.find())
    # What others wrote can be mended, and otherwise changed.
    database.readings.update_one({}, {"$set": {"readings.1.label": 5}})
    assert 3 == store.update_many(reading, {}, {"$inc": {"temp": 1}})
    assert 3 == store.update_many(reading, {}, {"$set": {"label": "mended"}})
    assert ["mended"] * 3 == [each.label for each in store.find(reading)]


def test_series_of_different_types_stay_apart(run):
    class Mixed(Document, collection="mixed", bucket=Bucket(key="k", time="ts", span=HOUR, metadata="note")):
        k: Any
        ts: datetime
        note: Any = None
        n: int = 0

    store = run.store([Mixed])
    store.setup()
    keys = [1, True, "1", None, 0, False, {"a": 1}]
    made = [
        Mixed(k=key, ts=at(1), note=note, n=number) for number, key in enumerate(keys) for note in (0, False)
    ]
    store.insert_many(made)
    assert len({each.id for each in made}) == len(keys)
    for number, key in enumerate(keys):
        found = store.find(Mixed, {"n": number}).to_list()
        assert [repr((key, 0)), repr((key, False))] == sorted(repr((each.k, each.note)) for each in found)
    with pytest.raises(UsageError, match="list"):
        store.insert_many([Mixed(k="fine", ts=at(1)), Mixed(k=[1, 2], ts=at(1))])
    assert 2 * len(keys) == store.count(Mixed)
    assert [] == store.verify()


def test_a_sum_beyond_64_bits_is_a_float(run):
    class Large(
        Document,
        collection="large",
        bucket=Bucket(key="k", time="ts", span=HOUR, stats="n"),
    ):
        k: str
        ts: datetime
        n: int = 0

    store = run.store([Large])
    store.setup()
    for _ in range(3):
        store.insert(Large(k="one by one", ts=at(1), n=2**62))
    store.insert_many([Large(k="at once", ts=at(1), n=2**62) for _ in range(3)])
    store.insert_many([Large(k=key, ts=at(2), n=1) for key in ("one by one", "at once", "c", "d", "e")])
    for key in ("one by one", "at once"):
        (entry,) = store.summary(Large, key)
        assert (1, 2**62, 3.0 * 2**62) == (entry["n"].min, entry["n"].max, entry["n"].sum)
    assert [] == store.verify()


def test_readings_of_very_different_size_find_room(run):
    """The first one is small, and says nothing of the others."""
    reading = reading_with()
    store = run.store([reading])
    store.setup()
    many = batch(reading, range(12), sensors=1)
    for each in many[1:]:
        each.label = "x" * 2_000_000
    store.insert_many(many)
    assert 12 == store.count(reading)
    assert [] == store.verify()
