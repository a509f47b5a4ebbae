"""Appends: one transaction or one upsert, all or nothing, exact among concurrent writers.

Covers: patterns/bucket/writing, patterns/bucket/grouping
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from tests.patterns.bucket.sensors import HOUR, at, in_threads, reading_with
from treadle import Archive, Bucket, DataError, Document, PartlyDone, Store, UsageError
from treadle.patterns.bucket.grouping import group
from treadle.patterns.bucket.writing import window_conditions


def batch(reading: Any, minutes: Any, sensors: int = 6) -> list[Any]:
    return [
        reading(sensor_id=f"s{number}", ts=at(minute), temp=minute)
        for minute in minutes
        for number in range(sensors)
    ]


def counts(database: Any, **filter: Any) -> list[int]:
    return [each["count"] for each in database.measured.find(filter).sort("_treadle.sequence", 1)]


@pytest.fixture
def opened(overheard, database):
    """A store with a bucket of ten readings for each of six sensors, and another store of another client."""

    def open_buckets(minutes: Any = range(10), **options: Any) -> Any:
        through, listener = overheard
        reading = reading_with(**{"limit": None, **options})
        store = Store(through, [reading])
        store.setup()
        store.insert_many(batch(reading, minutes))
        listener.clear()
        return reading, store, Store(database, [reading]), listener

    return open_buckets


# -- commands --------------------------------------------------------------------------------------


def test_one_bucket_takes_one_command_and_several_take_one_transaction(opened, database):
    reading, store, _, listener = opened()
    store.insert(reading(sensor_id="s0", ts=at(11)))
    store.insert_many([reading(sensor_id="s9", ts=at(minute)) for minute in range(20)])
    assert ["update", "update"] == listener.names
    listener.clear()
    stored = store.insert_many(batch(reading, range(20, 30), 8))
    assert ["aggregate", "update", "insert", "commitTransaction"] == listener.names
    assert [6, 2] == [len(listener.commands[at][1][name]) for at, name in ((1, "updates"), (2, "documents"))]
    assert {each.id for each in stored} <= {each.id for each in store.find(reading)}
    assert [] == store.verify()


def test_updates_name_buckets_by_their_ids_alone(opened, database):
    """With any other condition the server takes twice as long."""
    reading, store, _, _ = opened()
    database.command("profile", 2)
    store.insert_many(batch(reading, range(10, 20)))
    database.command("profile", 0)
    updates = list(database.system.profile.find({"op": "update", "ns": f"{database.name}.measured"}))
    assert [{"_id"}] * 6 == [set(each["command"]["q"]) for each in updates]


def test_conditions_find_the_windows_of_batches_and_no_others(database):
    class Reading(
        Document, collection="readings", bucket=Bucket(key=("site", "sensor"), time="ts", span=HOUR)
    ):
        site: str
        sensor: int
        ts: datetime

    spec = Store(database, [Reading]).graph.entry(Reading).layout.spec

    def conditions(windows: Any) -> list[dict[str, Any]]:
        raws = [{"site": site, "sensor": sensor, "ts": at(60 * hour)} for site, sensor, hour in windows]
        return window_conditions(spec, group(spec, raws))

    one = {"sensor": {"$eq": 1}}
    assert [
        {"site": {"$eq": site}, "start": {"$eq": at(0)}, "sensor": {"$in": [0, 1, 2]}} for site in "ab"
    ] == conditions([(site, sensor, 0) for site in "ab" for sensor in range(3)])
    assert [{"site": {"$eq": "a"}, **one, "start": {"$in": [at(0), at(60)]}}] == conditions(
        [("a", 1, 0), ("a", 1, 1)]
    )
    # A condition that these share would find windows that no reading belongs to.
    assert 3 == len(conditions([("a", number, number) for number in range(3)]))


# -- which bucket ----------------------------------------------------------------------------------


def test_a_full_bucket_continues_in_the_next(opened, database):
    reading, store, other, _ = opened(limit=20)
    other.insert_many(batch(reading, range(20, 28), 1))
    store.insert_many(batch(reading, range(10, 15)))
    assert [20, 3] == counts(database, sensor_id="s0")
    assert [15] == counts(database, sensor_id="s1")
    for minute in range(30, 38):
        store.insert(reading(sensor_id="s1", ts=at(minute)))
    assert [20, 3] == counts(database, sensor_id="s1")
    assert [] == store.verify()


def test_readings_go_only_into_a_bucket_of_their_own_series_and_metadata(overheard, database):
    class Reading(
        Document,
        collection="measured",
        bucket=Bucket(key=("site", "sensor"), time="ts", span=HOUR, metadata="unit", stats="n"),
    ):
        site: str
        sensor: int
        ts: datetime
        unit: str = "C"
        n: int = 1

    store = Store(overheard[0], [Reading])
    store.setup()
    many = [{"site": "a", "sensor": number} for number in range(6)]
    store.insert_many([Reading(**each, ts=at(minute)) for minute in range(10) for each in many])
    database.measured.update_one({"sensor": 3}, {"$set": {"site": "b"}})
    database.measured.update_one({"sensor": 4}, {"$set": {"unit": "F"}})
    store.insert_many([Reading(**each, ts=at(20)) for each in many])
    assert [10] == counts(database, site="b")
    assert [1] == counts(database, site="a", sensor=3)
    assert {1, 10} == set(counts(database, sensor=4))
    assert 66 == store.count(Reading)
    assert [] == store.verify()


def test_keys_that_only_the_server_takes_for_equal_share_the_room_of_their_bucket(run, database):
    class Reading(Document, collection="measured", bucket=Bucket(key="part", time="ts", span=HOUR, limit=20)):
        part: Decimal
        ts: datetime

    store = run.store([Reading])
    store.setup()
    parts = [Decimal(number) for number in range(1, 4)]
    store.insert_many([Reading(part=part, ts=at(minute)) for minute in range(10) for part in parts])
    twice = [*parts, *(part + Decimal("0.00") for part in parts)]
    store.insert_many([Reading(part=part, ts=at(20 + minute)) for minute in range(6) for part in twice])
    assert {20, 2} == set(counts(database))
    assert 66 == store.count(Reading)
    assert [] == store.verify()


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


def test_a_bucket_that_would_become_too_large_continues_in_the_next(run, database):
    """One by one, and of very different sizes at once; a reading too large for any bucket changes nothing."""
    measured = reading_with(limit=None)
    store = run.store([measured])
    store.setup()
    text = "x" * 5_000_000
    for minute in range(4):
        store.insert(measured(sensor_id="s", ts=at(minute), label=text))
    small = measured(sensor_id="s", ts=at(6))
    store.insert_many([small, *(measured(sensor_id="s", ts=at(7 + each), label=text) for each in range(3))])
    assert 8 == store.count(measured)
    assert 1 < database.measured.count_documents({})
    with pytest.raises(UsageError) as caught:
        store.insert(measured(sensor_id="s", ts=at(9), label="x" * 17_000_000))
    assert "document-too-large" == caught.value.code
    assert 8 == store.count(measured)


def test_a_sum_beyond_64_bits_is_a_float(run):
    class Large(Document, collection="large", bucket=Bucket(key="k", time="ts", span=HOUR, stats="n")):
        k: str
        ts: datetime
        n: int = 0

    store = run.store([Large])
    store.setup()
    for _ in range(3):
        store.insert(Large(k="one by one", ts=at(1), n=2**62))
    store.insert_many([Large(k="at once", ts=at(1), n=2**62) for _ in range(3)])
    for _ in range(3):
        store.insert_many([Large(k=key, ts=at(1), n=2**62) for key in ("among others", "other")])
    store.insert_many([Large(k=key, ts=at(2), n=1) for key in ("one by one", "at once", "among others")])
    for key in ("one by one", "at once", "among others"):
        (entry,) = store.summary(Large, key)
        assert (1, 2**62, 3.0 * 2**62) == (entry["n"].min, entry["n"].max, entry["n"].sum)
    assert [] == store.verify()


def test_a_derived_id_is_the_only_one_that_a_reading_is_given(run):
    """The one that it would have had by itself is never generated."""
    reading = reading_with()
    store = run.store([reading])
    store.setup()
    made = batch(reading, range(2), 2)
    before = [vars(each)["id"] for each in made]
    stored = store.insert_many(made)
    assert {"LazyObjectId"} == {type(each).__name__ for each in before}
    assert [each.id for each in stored] == [store.get(reading, each.id).id for each in stored]


# -- all or nothing --------------------------------------------------------------------------------


def test_nothing_is_stored_beside_readings_that_the_server_refuses(opened, database):
    reading, store, _, _ = opened()
    full = {"$or": [{"sensor_id": {"$ne": "s1"}}, {"count": {"$lte": 10}}]}
    database.command("collMod", "measured", validator={"$and": [full, {"sensor_id": {"$ne": "new"}}]})
    before = list(database.measured.find())
    for many in (batch(reading, [10, 11]), [reading(sensor_id=key, ts=at(200)) for key in ("old", "new")]):
        with pytest.raises(DataError) as raised:
            store.insert_many(many)
        assert "validator-refused" == raised.value.code
        assert before == list(database.measured.find())


def test_more_than_one_transaction_holds_is_stored_in_parts_and_says_so(opened, database, constants):
    constants(bucket_transaction_max=4)
    reading, store, _, _ = opened()
    database.command(
        "collMod", "measured", validator={"$or": [{"sensor_id": {"$ne": "s5"}}, {"count": {"$lte": 10}}]}
    )
    with pytest.raises(PartlyDone, match="validator of Measured's collection refused") as raised:
        store.insert_many(batch(reading, [10, 11]))
    assert 8 == raised.value.done == store.count(reading) - 60
    with pytest.raises(DataError) as inside, store.transaction():
        store.insert_many(batch(reading, [10, 11]))
    assert not isinstance(inside.value, PartlyDone)
    assert 68 == store.count(reading)


@pytest.mark.parametrize("other", [None, "t"], ids=["one series", "two series"])
def test_a_change_in_place_of_readings_that_do_not_fit_changes_nothing(other, run):
    class Wide(Document, collection="wide", bucket=Bucket(key="a", time="ts", span=HOUR, stats="n")):
        a: str
        ts: datetime
        n: int = 0

    store = run.store([Wide])
    store.setup()
    for wrong in (Wide(a="s", ts=at(2), n=2**70), Wide(a="t\ud800", ts=at(2))):
        with pytest.raises(UsageError):
            store.insert_many([Wide(a=other or "s", ts=at(1)), wrong])
    store.insert_many([])
    assert 0 == store.count(Wide)


# -- concurrent writers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (lambda other, reading: other.insert_many(batch(reading, range(30, 38), 1)), [20, 3]),
        (lambda other, reading: other.collection(reading).delete_one({"sensor_id": "s0"}), [5]),
    ],
    ids=["filled", "deleted"],
)
def test_what_another_writer_does_after_the_look_is_seen(
    between: Callable[..., Any], expected, opened, database
):
    reading, store, other, listener = opened(limit=20)
    listener.before(("update",), 0, lambda: between(other, reading))
    store.insert_many(batch(reading, range(10, 15)))
    assert "abortTransaction" in listener.names
    assert expected == counts(database, sensor_id="s0")
    assert [15] == counts(database, sensor_id="s1")
    assert [] == store.verify()


def test_a_bucket_that_another_writer_opens_after_the_look_is_shared(opened, database):
    reading, store, other, listener = opened([])
    listener.before(("insert",), 0, lambda: other.insert_many(batch(reading, range(5))))
    store.insert_many(batch(reading, range(10, 15)))
    assert [10] * 6 == counts(database)
    assert [] == store.verify()


def test_a_writer_waits_for_the_buckets_of_a_transaction(opened, database):
    reading, store, other, _ = opened()
    session = database.client.start_session()
    session.start_transaction()
    other.insert(reading(sensor_id="s2", ts=at(30), temp=30), session=session)
    timer = threading.Timer(0.2, session.commit_transaction)
    timer.start()
    store.insert_many(batch(reading, range(10, 20)))
    timer.join()
    session.end_session()
    assert 121 == store.count(reading)
    assert [] == store.verify()


@pytest.mark.parametrize(
    "options", [{"limit": 25}, {"limit": None}, {"span": None, "limit": 25}, {"unique": "label"}], ids=str
)
def test_threads_on_few_buckets_are_exact(options, database):
    """Without the unique index some would open the same bucket twice."""
    measured = reading_with(**options)
    store = Store(database, [measured])
    store.setup()

    def write(number: int) -> None:
        for at_once in range(10):
            store.insert(measured(sensor_id="s0", ts=at(at_once), temp=1, label=f"{number} {at_once}"))
            many = batch(measured, range(at_once * 5, at_once * 5 + 5), 2)
            for place, each in enumerate(many):
                each.temp, each.label = 1, f"{number} {at_once} {place}"
            store.insert_many(many)

    in_threads(write, count=8)
    buckets = list(database.measured.find())
    assert 8 * 10 * 11 == sum(each["count"] for each in buckets) == store.count(measured)
    assert 880.0 == sum(each["stats"]["temp"]["sum"] for each in buckets)
    assert [] == store.verify()
    if options.get("limit", 4) is None:
        assert 2 == len(buckets)
    else:
        assert options.get("limit", 4) == max(each["count"] for each in buckets)


# -- unique ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"unique": "label"}], ids=str)
def test_a_reading_that_comes_twice_is_stored_once(options, run):
    """Also when its bucket has been full since; it is counted."""
    measured = reading_with(**{"unique": "ts", **options})
    store = run.store([measured])
    store.setup()
    many = [measured(sensor_id="s", ts=at(minute), temp=minute, label=f"m{minute}") for minute in range(11)]
    assert 0 == store.insert_many(many).duplicates
    again = store.insert_many([*many, measured(sensor_id="s", ts=at(20), label="m20"), many[0]])
    assert (12, ["m20"]) == (again.duplicates, [each.label for each in again])
    store.rebuild()
    assert 12 == store.insert_many([*many, again[0]]).duplicates
    first = store.insert(measured(sensor_id="s", ts=at(3), temp=99, label="m3"))
    assert 3.0 == first.temp
    store.insert(measured(sensor_id="other", ts=at(3), label="m3"))
    assert 13 == store.count(measured)
    if "unique" not in options:
        with pytest.raises(UsageError, match="forbids"):
            store.update(measured, {"sensor_id": "s", "ts": at(20)}, {"$set": {"ts": at(5)}})
    assert [] == store.verify()


class Once(
    Document,
    collection="once",
    bucket=Bucket(key="sensor_id", time="ts", span=HOUR, limit=5, unique="ts", metadata="unit"),
    archive=Archive(by="ts", after=timedelta(days=1), into="once_archive"),
):
    sensor_id: str
    ts: datetime
    unit: str = "C"


def once(minute: int, unit: str = "C") -> Once:
    return Once(sensor_id="s", ts=at(minute), unit=unit)


@pytest.mark.parametrize("archived", [False, True], ids=["active", "archived"])
def test_another_writer_with_other_metadata_stores_no_reading_twice(archived, overheard, database):
    """It comes after the look at the window, whose buckets the two would not share."""
    through, listener = overheard
    store, other = Store(through, [Once]), Store(database, [Once])
    store.setup()
    store.insert(once(1))
    if archived:
        assert 1 == store.archive(Once, now=at(100_000))
    listener.before(("update", "insert"), 0, lambda: other.insert(once(2, "F")))
    assert 1 == store.insert_many([once(2), once(3)]).duplicates
    assert [at(1), at(2), at(3)] == [each.ts for each in store.find(Once, sort="ts", archived=True)]
    assert [] == store.verify()


def test_a_reading_of_an_archived_window_is_known(run, database):
    """Also to `insert`, which returns the first one, and to `verify`."""
    store = run.store([Once])
    store.setup()
    store.insert_many([once(minute) for minute in range(7)])
    assert 2 == store.archive(Once, now=at(100_000))
    assert 3 == store.insert_many([once(1), once(9), once(6, "F"), once(9)]).duplicates
    assert "C" == store.insert(once(6, "F")).unit
    assert 8 == len(list(store.find(Once, archived=True)))
    assert [] == store.verify()
    database.once.insert_one({**database.once_archive.find_one({"count": 5}), "_id": 1})
    assert 5 == len(store.verify(Once))
    store.repair()
    assert [] == store.verify()


def test_threads_with_the_same_readings_store_each_once(database):
    store = Store(database, [Once])
    store.setup()
    refused = []

    def write(number: int) -> None:
        for minute in range(6):
            unit = "CF"[number % 2]
            refused.append(store.insert_many([once(minute, unit), once(minute + 60, unit)]).duplicates)

    in_threads(write, count=8)
    assert 12 == store.count(Once)
    assert 8 * 12 - 12 == sum(refused)
    assert [] == store.verify()
