"""Background migrations: up, down, in batches, one run at a time.

Covers: patterns/schema_versioning, engine/lease
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from bson.min_key import MinKey

from tests.patterns.schema_versioning.users import Piped, User, old_users
from treadle import DataError, Document, Store, UsageError, migration
from treadle.engine import lease


@pytest.mark.quick
def test_a_migration_goes_up_and_down(run, database):
    originals = old_users(database, 30)
    store = run.store([User])
    before = list(store.find(User, sort="_id"))
    result = store.migrate(User, batch=7)
    assert (30, 0, True, 3, ()) == (
        result.migrated,
        result.remaining,
        result.finished,
        result.to,
        result.set_aside,
    )
    assert {3: 30} == store.migration_status(User)
    assert before == list(store.find(User, sort="_id"))
    assert 0 == store.migrate(User).migrated
    down = store.migrate(User, to=1, batch=7)
    assert (30, True) == (down.migrated, down.finished)
    assert {1: 30} == store.migration_status(User)
    phones = [raw.get("phone", ",".join(raw.get("phones", []))) for raw in originals]
    assert phones == [raw["phone"] for raw in database["users"].find().sort("_id")]
    assert before == list(store.find(User, sort="_id"))


def test_pipelines_migrate_on_the_server_without_fetching_documents(heard):
    database, listener = heard
    database["piped"].insert_many([{"name": f"a{number} b", "n": number} for number in range(50)])
    store = Store(database, [Piped])
    listener.clear()
    assert 50 == store.migrate(Piped).migrated
    finds = [body for name, body in listener.commands if name == "find" and body["find"] == "piped"]
    assert finds
    assert all(body["projection"] == {"_id": 1} for body in finds)
    assert {3: 50} == store.migration_status(Piped)
    assert ["a0", "a1"] == [each.first for each in store.find(Piped, sort="_id", limit=2)]
    assert 50 == store.migrate(Piped, to=1).migrated
    assert {"_id", "name", "n", "schema_version"} == set(database["piped"].find_one())


@pytest.mark.parametrize("batch", [1, 1000])
def test_ids_of_any_types_are_reached(run, database, batch):
    class Odd(Document, collection="odd", version=2):
        id: Any
        a: int = 0

    class OddPiped(Document, collection="odd_piped", version=2):
        id: Any
        a: int = 0

    migration(Odd, 1, up=lambda document: {**document, "a": 1})
    migration(OddPiped, 1, up=[{"$set": {"a": 1}}])
    identities = [1, 2.5, "a", "$b", {"x": 1}, {"x": {"y": 1}}, ObjectId(), True, b"x", None]
    # NaN compares with no number.
    identities += [float("nan"), Decimal128("7"), MinKey()]
    store = run.store([Odd, OddPiped])
    for name, model in (("odd", Odd), ("odd_piped", OddPiped)):
        database[name].insert_many([{"_id": each} for each in identities])
        assert len(identities) == store.migrate(model, batch=batch).migrated
        assert {2: len(identities)} == store.migration_status(model)


def test_a_document_that_cannot_be_migrated_is_set_aside(run, database):
    database["users"].insert_many(
        [{"_id": ObjectId(), "name": "a", "phone": phone} for phone in ("1", 2, "3", None)]
    )
    database["users"].insert_one({"_id": ObjectId(), "name": "z", "schema_version": 17})
    store = run.store([User])
    bad = [raw["_id"] for raw in database["users"].find({"$or": [{"phone": 2}, {"name": "z"}]})]
    result = store.migrate(User, batch=2)
    assert (3, 2, True) == (result.migrated, result.remaining, result.finished)
    assert set(bad) == {each.document_id for each in result.set_aside}
    assert "AttributeError" in next(each.reason for each in result.set_aside if each.document_id == bad[0])
    assert list(result.set_aside) == store.migration_failures(User)
    # Not tried again unless asked for.
    database["users"].update_one({"_id": bad[0]}, {"$set": {"phone": "2"}})
    assert (0, 2) == (store.migrate(User).migrated, len(store.migration_failures(User)))
    again = store.migrate(User, retry=True)
    assert (1, 1) == (again.migrated, len(again.set_aside))
    assert {3: 4, 17: 1} == store.migration_status(User)


def test_a_document_on_which_a_pipeline_fails_is_set_aside(run, database):
    database["piped"].insert_many([{"name": "a b"}, {"name": 5}, {"name": "c d"}])
    store = run.store([Piped])
    result = store.migrate(Piped)
    assert (2, 1, 1, True) == (result.migrated, result.remaining, len(result.set_aside), result.finished)
    assert "split" in result.set_aside[0].reason
    with pytest.raises(DataError, match="split"):
        list(store.find(Piped))
    database["piped"].update_one({"name": 5}, {"$set": {"name": "e f"}})
    assert (1, 0) == (store.migrate(Piped, retry=True).migrated, len(store.migration_failures(Piped)))


def test_results_that_cannot_be_stored_are_set_aside(run, database):
    """What the validator or BSON refuses, what is not a document, and another id."""

    class Strict(Document, collection="strict", version=2, validation="strict"):
        id: int
        a: int

    def bad(document: dict) -> Any:
        results = {1: 5, 2: "text", 3: object(), 4: 2**70}
        if document["a"] in results:
            return {**document, "a": results[document["a"]]}
        return {5: None, 6: [], 7: "x", 8: {**document, "_id": 55}}[document["a"]]

    migration(Strict, 1, up=bad)
    database["strict"].insert_many([{"_id": number, "a": number} for number in range(1, 9)])
    store = run.store([Strict])
    store.setup(validation="enforce")
    result = store.migrate(Strict)
    assert (1, {*range(2, 9)}) == (result.migrated, {each.document_id for each in result.set_aside})


class Large(Document, collection="large", version=2):
    id: int
    parts: list[Any]


migration(Large, from_version=1, up=lambda raw: {**raw, "parts": [{"text": part} for part in raw["parts"]]})


def test_a_batch_of_large_documents_is_bounded_by_one_reply(heard):
    database, listener = heard
    database["large"].insert_many([{"_id": number, "parts": ["x" * 3_000_000]} for number in range(11)])
    store = Store(database, [Large])
    listener.clear()
    assert 11 == store.migrate(Large).migrated
    finds = [body for name, body in listener.commands if name == "find" and body["find"] == "large"]
    # Five of them fill the 16 MB that the server sends at a time.
    assert len(finds) > 2
    assert "getMore" not in [name for name, _ in listener.commands]
    # Small ones come a thousand at a time, not the 101 of the server's own first reply.
    database["large"].insert_many([{"_id": number, "parts": []} for number in range(100, 1200)])
    listener.clear()
    assert 1100 == store.migrate(Large).migrated
    # Each batch is read once more in the transaction that stores it.
    assert 5 == len([1 for name, body in listener.commands if name == "find" and body["find"] == "large"])


class Exact(Document, collection="exact", version=3, migrate_on_read="store"):
    price: Decimal
    days: list[dt.date] = []


@migration(Exact, from_version=1)
def to_decimal(document: dict) -> dict:
    document["price"] = Decimal(document["price"])
    document["days"] = {dt.date(2026, 1, 2)} if document["price"] < 9 else {object()}
    return document


migration(Exact, 2, up=[{"$set": {"more": 1}}])


class ExactOnly(Document, collection="exact", version=2, migrate_on_read="store"):
    price: Decimal
    days: Any = None


migration(ExactOnly, 1, up=to_decimal.up)


@pytest.mark.parametrize("model", [Exact, ExactOnly])
def test_functions_may_return_what_models_hold(run, database, model):
    """What BSON has no form for at all is set aside, also between a function and a pipeline."""
    database["exact"].insert_many([{"price": "1.5"}, {"price": "9"}, {"price": "2.5"}])
    result = run.store([model]).migrate(model)
    assert (2, 1) == (result.migrated, len(result.set_aside))
    assert "days" in result.set_aside[0].reason
    stored = list(database["exact"].find({"schema_version": model.__treadle__.version}))
    assert [Decimal128("1.5"), Decimal128("2.5")] == [each["price"] for each in stored]
    assert [dt.datetime(2026, 1, 2)] == [each.replace(tzinfo=None) for each in stored[0]["days"]]


def test_readers_and_updates_store_what_models_hold(run, database):
    database["exact"].insert_many([{"price": "1.5"}, {"price": "2.5"}])
    store = run.store([ExactOnly])
    assert Decimal("1.5") == store.find_one(ExactOnly, {"price": "1.5"}).price
    assert Decimal("3.5") == store.update(ExactOnly, {"price": "2.5"}, {"$inc": {"price": Decimal(1)}}).price


class First(Document, collection="first", version=1):
    a: int = 0


def test_documents_without_a_version_are_of_the_first_for_updates_too(run, database):
    """Adopting `version=1` writes nothing, and nothing needs to be brought up."""
    database["first"].insert_many([{"a": 1}, {"a": 2, "schema_version": None}, {"a": 3, "schema_version": 1}])
    store = run.store([First])
    store.setup()
    assert 11 == store.update(First, {"a": 1}, {"$inc": {"a": 10}}).a
    assert 3 == store.update_many(First, {"a": {"$gt": 0}}, {"$inc": {"a": 1}})
    assert [3, 4, 12] == sorted(raw["a"] for raw in database["first"].find())
    assert (0, 0) == (store.migrate(First).migrated, store.migrate(First).remaining)


def test_a_pipeline_that_fails_on_many_goes_on_with_the_others(database):
    class Numbered(Document, collection="numbered", version=2):
        id: int
        n: int

    migration(Numbered, 1, up=[{"$set": {"n": {"$toInt": "$text"}}}])
    database["numbered"].insert_many(
        [{"_id": number, "text": "5" if number % 2 else "x"} for number in range(2400)]
    )
    store = Store(database, [Numbered])
    result = store.migrate(Numbered)
    assert (1200, True) == (result.remaining, result.finished)
    assert 1200 == database["treadle.set_aside"].count_documents({})
    # More than are listed, and still none is tried again, nor counted twice.
    database["numbered"].insert_many([{"_id": number, "text": "5"} for number in range(3000, 3300)])
    again = store.migrate(Numbered)
    assert (300, 1200, True) == (again.migrated, again.remaining, again.finished)
    # Notes about documents that are gone do not count for others.
    database["numbered"].delete_many({"schema_version": {"$ne": 2}})
    database["numbered"].insert_one({"_id": 5000, "text": "5"})
    last = store.migrate(Numbered)
    assert (1, 0) == (last.migrated, database["treadle.set_aside"].count_documents({}))


def test_notes_about_documents_that_are_gone_do_not_end_a_run(database):
    database["users"].insert_many([{"_id": ObjectId(), "name": "a", "phone": 5} for _ in range(3)])
    store = Store(database, [User])
    assert 3 == len(store.migrate(User).set_aside)
    database["users"].delete_many({})
    database["users"].insert_many([{"_id": ObjectId(), "name": "b", "phone": "1"} for _ in range(3)])
    calls = iter([False, True])
    stopped = store.migrate(User, batch=1, stop=lambda: next(calls, True))
    assert (1, 2, False) == (stopped.migrated, stopped.remaining, stopped.finished)


def test_a_missing_way_down_is_told_before_anything_changes(run, database):
    class OneWay(Document, collection="one_way", version=3):
        a: int = 0

    @migration(OneWay, from_version=1)
    def up(document: dict) -> dict:
        return document

    @migration(OneWay, from_version=2)
    def further(document: dict) -> dict:
        return document

    @further.down
    def back(document: dict) -> dict:
        return document

    database["one_way"].insert_one({"_id": ObjectId(), "schema_version": 3})
    store = run.store([OneWay])
    with pytest.raises(UsageError, match="from version 2 to 1") as caught:
        store.migrate(OneWay, to=1)
    assert "migration-no-way-down" == caught.value.code
    assert {3: 1} == store.migration_status(OneWay)
    for to in (0, 4, "2", True):
        with pytest.raises(UsageError):
            store.migrate(OneWay, to=to)


def test_a_run_can_be_stopped_and_goes_on_where_it_was(run, database):
    old_users(database, 30)
    store = run.store([User])
    seen: list[int] = []
    result = store.migrate(
        User, batch=5, stop=lambda: len(seen) == 2, progress=lambda each: seen.append(each.done)
    )
    assert (10, 20, False) == (result.migrated, result.remaining, result.finished)
    assert [ObjectId(f"{9:024x}")] == database[lease.COLLECTION].find_one()["progress"]["after"]
    result = store.migrate(User, batch=5)
    assert (20, 0, True) == (result.migrated, result.remaining, result.finished)


def test_documents_that_old_writers_left_behind_are_found(run, database):
    old_users(database, 6)
    store = run.store([User])

    def meanwhile(progress: Any) -> None:
        if progress.done >= 4 and database["users"].count_documents({"name": "late"}) == 0:
            database["users"].insert_one(
                {"_id": ObjectId("00000000000000000000000f"), "name": "late", "phone": "1"}
            )
            database["users"].update_one(
                {"name": "u0"},
                {"$set": {"schema_version": 1, "phone": "8"}, "$unset": {"phones": "", "initial": ""}},
            )

    result = store.migrate(User, batch=2, progress=meanwhile)
    assert (0, True) == (result.remaining, result.finished)
    assert {3: 7} == store.migration_status(User)
    assert ["8"] == store.find_one(User, {"name": "u0"}).phones


def test_a_run_that_lost_its_lease_stops(run, database):
    old_users(database, 6)

    def steal(progress: Any) -> None:
        database[lease.COLLECTION].update_one({}, {"$inc": {"n": 1}})

    with pytest.raises(DataError) as caught:
        run.store([User]).migrate(User, batch=2, progress=steal)
    assert "migration-running" == caught.value.code


def test_a_throttled_run_waits_between_batches(database):
    old_users(database, 6)
    store = Store(database, [User])
    from treadle.plan import Wait

    waits: list[float] = []
    perform = store.runner._perform

    def noting(command: Any, *rest: Any) -> Any:
        if type(command) is Wait:
            waits.append(command.seconds)
            return None
        return perform(command, *rest)

    store.runner._perform = noting  # type: ignore[method-assign]
    store.migrate(User, batch=2, throttle=4)
    # Two documents at four a second, less the time that the batch itself took.
    assert waits
    assert all(0 <= each <= 0.5 for each in waits)
    # Not a thousand at once and then nothing for minutes.
    waits.clear()
    store.migrate(User, to=2, throttle=3)
    assert waits
    assert all(0 <= each <= 1.0 for each in waits)
    waits.clear()
    stopped = store.migrate(User, throttle=0.01, stop=lambda: bool(waits))
    assert (1, False) == (stopped.migrated, stopped.finished)
    assert 1 == len(waits)
    for options in ({"throttle": 0}, {"throttle": -1}, {"batch": 0}, {"batch": True}):
        with pytest.raises(UsageError):
            store.migrate(User, **options)


def test_a_dry_run_shows_what_would_become_of_some(run, database):
    old_users(database, 9)
    database["users"].insert_one({"_id": ObjectId(), "name": "bad", "phone": 1})
    before = list(database["users"].find())
    store = run.store([User])
    result = store.migrate(User, dry_run=True)
    assert (0, 10, 3, 1) == (result.migrated, result.remaining, len(result.samples), len(result.set_aside))
    assert {"_id", "name", "n", "phone"} == set(result.samples[0].before)
    assert ["0", "1"] == result.samples[0].after["phones"]
    assert before == list(database["users"].find())
    assert 0 == database["treadle.set_aside"].count_documents({})
    piped = run.store([Piped])
    database["piped"].insert_one({"name": "a b"})
    assert "a" == piped.migrate(Piped, dry_run=True).samples[0].after["first"]
    assert {1: 1} == piped.migration_status(Piped)


def test_a_model_without_versions_cannot_be_migrated(run):
    class Plain(Document, collection="plains"): ...

    store = run.store([Plain])
    for call in (store.migrate, store.migration_status):
        with pytest.raises(UsageError) as caught:
            call(Plain)
        assert "version-invalid" == caught.value.code


def test_a_run_is_not_kept_away_by_an_earlier_one_of_its_own_process(run, database):
    """Its release was cut off, so that the lease still names it; the work itself is over."""
    store = run.store([User])
    old_users(database, 3)
    held = []

    def interrupted(progress):
        held.append(database["treadle.leases"].find_one())
        with pytest.raises(DataError, match="being migrated already"):
            store_beside.migrate(User)
        raise RuntimeError("interrupted")

    store_beside = Store(database, [User])
    with pytest.raises(RuntimeError, match="interrupted"):
        store.migrate(User, batch=1, progress=interrupted)
    lease = {**held[0], "until": dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)}
    database["treadle.leases"].replace_one({"_id": lease["_id"]}, lease)
    assert store.migrate(User).finished
    assert lease["n"] < database["treadle.leases"].find_one()["n"]
