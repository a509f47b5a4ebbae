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


def at(minutes: int, seconds: int = 0) -> Reading:
    return Reading(sensor=1, at=START + timedelta(minutes=minutes, seconds=seconds))


@pytest.fixture
def full(database: Any) -> Store:
    """A Store that does not know that the bucket of the first window is full."""
    before = Store(database, [Reading])
    before.setup()
    before.insert(at(0))
    return Store(database, [Reading], limits=Limits(bucket_attempts_max=1))


def test_readings_that_found_a_bucket_before_others_did_not_are_counted(full: Store) -> None:
    with pytest.raises(PartlyDone, match="found no bucket") as raised:
        full.insert_many([at(0, 1), at(1)])
    assert 1 == raised.value.done
    assert [at(0).at, at(1).at] == [each.at for each in full.find(Reading)]


def test_a_single_reading_that_found_none_is_simply_refused(full: Store) -> None:
    with pytest.raises(DataError) as raised:
        full.insert(at(0, 1))
    assert "bucket-contended" == raised.value.code


def test_in_a_transaction_nothing_is_said_to_stay(database: Any) -> None:
    """A full bucket is closed first, where values are unique, which takes an attempt."""
    store = Store(database, [Once], limits=Limits(bucket_attempts_max=1))
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
    database: Any, full: Store
) -> None:
    store = Store(
        database, [Reading], limits=Limits(bucket_pause_seconds=10**6, bucket_pause_max_seconds=10**6)
    )
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
