"""What ends after some readings were stored says so: nobody is told that nothing was written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pymongo
import pytest

from treadle import Bucket, DataError, Document, Limits, PartlyDone, Store

START = datetime(2026, 1, 1, tzinfo=UTC)


class Reading(
    Document,
    collection="readings",
    bucket=Bucket(key="sensor", time="at", span=timedelta(minutes=1), limit=1),
):
    sensor: int
    at: datetime


class Once(
    Document,
    collection="once",
    bucket=Bucket(key="sensor", time="at", span=timedelta(minutes=1), limit=1, unique="at"),
):
    sensor: int
    at: datetime


class Measured(
    Document,
    collection="measured",
    bucket=Bucket(key="sensor", time="at", span=timedelta(minutes=1), stats="value"),
):
    sensor: int
    at: datetime
    value: int = 0


def at(minutes: int, seconds: int = 0) -> Reading:
    return Reading(sensor=1, at=START + timedelta(minutes=minutes, seconds=seconds))


@pytest.fixture
def full(database: Any, constants: Any) -> Store:
    """A Store that does not know that the bucket of the first window is full."""
    before = Store(database, [Reading])
    before.setup()
    before.insert(at(0))
    constants(bucket_attempts_max=1)
    return Store(database, [Reading])


def test_readings_that_found_a_bucket_before_others_did_not_are_counted(full: Store) -> None:
    with pytest.raises(PartlyDone, match="found no bucket") as raised:
        full.insert_many([at(0, 1), at(1)])
    assert 1 == raised.value.done
    assert [at(0).at, at(1).at] == [each.at for each in full.find(Reading)]


def test_a_single_reading_that_found_none_is_simply_refused(full: Store) -> None:
    with pytest.raises(DataError) as raised:
        full.insert(at(0, 1))
    assert "bucket-contended" == raised.value.code


def test_in_a_transaction_nothing_is_said_to_stay(database: Any, constants: Any) -> None:
    """A full bucket is closed first, where values are unique, which takes an attempt."""
    constants(bucket_attempts_max=1)
    store = Store(database, [Once])
    store.setup()
    store.insert(Once(sensor=1, at=START))
    some = [Once(sensor=1, at=START + timedelta(seconds=each)) for each in (1, 60)]
    with pytest.raises(DataError) as raised, store.transaction():
        store.insert_many(some)
    assert "bucket-contended" == raised.value.code
    assert 1 == database["once"].count_documents({})
    with pytest.raises(PartlyDone):
        store.insert_many(some)


def test_a_deadline_that_passes_between_two_attempts_does_not_deny_the_first(
    database: Any, full: Store, constants: Any
) -> None:
    constants(bucket_attempts_max=500, bucket_pause_seconds=10**6, bucket_pause_max_seconds=10**6)
    store = Store(database, [Reading])
    # Whatever this process believes, the bucket is full by now: three attempts are in vain.
    writer = store._calls(Reading).writer
    locate = writer.placer.locate

    def stale(batch: Any, duplicates: list[int]) -> Any:
        batch.sequence = 0
        return [batch], []
        yield

    writer.placer.locate = stale
    with pytest.raises(PartlyDone, match="deadline passed") as raised, pymongo.timeout(60):
        store.insert_many([at(0, 1), at(1)])
    assert 1 == raised.value.done
    assert "nothing of it was written" not in str(raised.value)
    writer.placer.locate = locate


@pytest.mark.parametrize("each", [1, 8], ids=["appended", "as new buckets"])
def test_readings_beside_one_that_the_server_refuses_are_not_denied(database: Any, each: int) -> None:
    """Eight make a bucket that is inserted; fewer are appended, here without a transaction of many."""
    store = Store(database, [Measured])
    store.setup()
    database.command("collMod", "measured", validator={"sensor": {"$ne": 1}})
    some = [Measured(sensor=sensor, at=START) for sensor in range(3) for _ in range(each)]
    with pytest.raises(PartlyDone, match="validator of Measured's collection refused") as raised:
        store.insert_many(some)
    assert 2 * each == raised.value.done == store.count(Measured)
    assert [] == store.verify()


@pytest.mark.parametrize("ends", ["refused", "damaged"])
def test_readings_that_were_changed_before_another_bucket_ended_it_are_counted(
    database: Any, ends: str
) -> None:
    store = Store(database, [Measured], limits=Limits(bucket_page=1))
    store.setup()
    store.insert_many([Measured(sensor=sensor, at=START) for sensor in (1, 1, 2)])
    collection = database["measured"]
    if ends == "refused":
        rule = {"$or": [{"sensor": 1}, {"stats.value.sum": 0}]}
        database.command("collMod", "measured", validator=rule)
    else:
        database.command("collMod", "measured", validator={})
        collection.update_one({"sensor": 2}, {"$set": {"readings": "none"}})
    with pytest.raises(PartlyDone) as raised:
        store.update_many(Measured, {}, {"$set": {"value": 5}})
    assert 2 == raised.value.done
    assert 10 == collection.find_one({"sensor": 1})["stats"]["value"]["sum"]
    with pytest.raises(DataError) as inside, store.transaction():
        store.update_many(Measured, {}, {"$set": {"value": 7}})
    assert not isinstance(inside.value, PartlyDone)
    assert 10 == collection.find_one({"sensor": 1})["stats"]["value"]["sum"]
