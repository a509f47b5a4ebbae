"""Documents of all versions are readable, and stored back where the model says so."""

from __future__ import annotations

import threading

import pytest
from bson import ObjectId

from tests.patterns.schema_versioning.users import Piped, PipedStored, Stored, User, old_users, split_phone
from treadle import DataError, Document, Store, UsageError, migration

# -- reading -----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_documents_of_all_versions_are_read_as_the_current_one(run, database):
    old_users(database)
    store = run.store([User])
    found = list(store.find(User, sort="_id"))
    assert [["0", "1"], ["7"], ["5"]] == [user.phones for user in found[:3]]
    assert "u" == found[0].initial
    assert found[4] == store.get(User, found[4].id) == store.find_one(User, {"_id": found[4].id})
    assert {1: 7, 2: 3} == store.migration_status(User), "in memory, unless told to store"
    assert found[0] == store.delete(User, found[0].id)


def test_what_is_no_known_version_is_an_error_that_names_it(run, database):
    store = run.store([User])
    for version in (4, "2", 0, 1.5, [1]):
        database["users"].insert_one({"name": "x", "schema_version": version})
        with pytest.raises(DataError) as caught:
            store.find_one(User)
        assert "version-unknown" == caught.value.code
        assert repr(version) in str(caught.value)
        database["users"].delete_many({})


def test_null_and_whole_floats_are_versions_too(run, database):
    database["users"].insert_many(
        [
            {"name": "x", "schema_version": None, "phone": "1"},
            {"name": "y", "schema_version": 3.0, "phones": ["1"]},
        ]
    )
    assert [["1"], ["1"]] == [user.phones for user in run.store([User]).find(User)]


def test_reading_stores_back_where_the_model_says_so(run, database):
    old_users(database)
    store = run.store([Stored])
    identities = [ObjectId(f"{number:024x}") for number in range(2)]
    store.get(Stored, identities[0])
    store.find_one(Stored, {"_id": identities[1]})
    assert 2 == store.migration_status(Stored)[3]
    found = list(store.find(Stored, sort="_id"))
    assert {3: 10} == store.migration_status(Stored)
    assert found == list(store.find(Stored, sort="_id"))
    raw = database["users"].find_one({"_id": found[0].id})
    assert {"_id", "name", "n", "phones", "initial", "schema_version"} == set(raw)


def test_a_reader_stores_nothing_in_a_transaction_and_does_not_fail_where_it_cannot(run, database):
    old_users(database, 1)
    store = run.store([Stored])
    with store.transaction() as session:
        assert ["0", "1"] == store.find_one(Stored, session=session).phones
    database.command("collMod", "users", validator={"phones": {"$exists": False}})
    assert ["0", "1"] == store.find_one(Stored).phones
    assert {1: 1} == store.migration_status(Stored)


def test_a_migration_that_fails_is_told_to_the_reader(run, database):
    database["users"].insert_one({"_id": ObjectId(), "name": 5, "schema_version": 2})
    with pytest.raises(DataError, match="version 3: TypeError") as caught:
        run.store([User]).find_one(User)
    assert "migration-failed" == caught.value.code


def test_pipelines_are_run_by_the_server_on_what_was_read(run, database):
    database["piped"].insert_many(
        [
            {"_id": ObjectId(), "name": "$name B", "n": 1},
            {"_id": ObjectId(), "name": "C", "first": "C", "schema_version": 2},
        ]
    )
    store = run.store([Piped])
    found = list(store.find(Piped, sort="_id"))
    assert [("$name", []), ("C", [])] == [(each.first, each.tags) for each in found]
    assert found[0] == store.get(Piped, found[0].id)
    assert {1: 1, 2: 1} == store.migration_status(Piped)
    assert found[0] == store.delete(Piped, found[0].id)


# -- concurrent writes -------------------------------------------------------------------------------


def test_treadles_own_state_survives_a_function_that_forgets_it(run, database):
    class Forgetful(Document, collection="forgetful", version=2): ...

    migration(Forgetful, 1, up=lambda document: {"_id": document["_id"], "a": 1})
    database["forgetful"].insert_one({"b": 1, "_treadle": {"n": 7}})
    assert 1 == run.store([Forgetful]).migrate(Forgetful).migrated
    raw = database["forgetful"].find_one()
    assert {"a": 1, "_treadle": {"n": 7}, "schema_version": 2} == {
        key: raw[key] for key in raw if key != "_id"
    }


@pytest.mark.parametrize("model", [Stored, PipedStored])
def test_no_increment_is_lost_while_readers_store_back(database, model):
    """By replacing the document, 242 of 1,200 were lost; guarded by the version alone, 243."""
    collection = model.__treadle__.collection
    documents, increments = 20, 15
    identities = [ObjectId() for _ in range(documents)]
    database[collection].insert_many([{"_id": each, "name": "a b", "n": 0} for each in identities])
    store = Store(database, [model])
    done = threading.Event()

    def old_writer(seed: int) -> None:
        for _ in range(increments):
            for identity in identities:
                database[collection].update_one({"_id": identity}, {"$inc": {"n": 1}})

    def old_resetter() -> None:
        # A release that knows no versions rewrites whole documents now and then.
        while not done.is_set():
            for identity in identities[::4]:
                database[collection].update_one(
                    {"_id": identity},
                    [{"$replaceWith": {"_id": "$_id", "name": "$name", "n": "$n"}}],
                )

    def reader() -> None:
        while not done.is_set():
            for document in store.find(model):
                assert document.name == "a b"

    threads = [threading.Thread(target=old_writer, args=(seed,)) for seed in range(3)]
    others = [threading.Thread(target=reader), threading.Thread(target=old_resetter)]
    for thread in [*threads, *others]:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    for thread in others:
        thread.join()
    assert [3 * increments] * documents == [raw["n"] for raw in database[collection].find()]


def test_code_in_a_pipeline_is_refused():
    class Some(Document, collection="some", version=2): ...

    with pytest.raises(UsageError, match="function"):
        migration(Some, 1, up=[{"$set": {"a": {"$function": {"body": "x", "args": [], "lang": "js"}}}}])


def test_a_function_may_be_called_as_it_is():
    assert {"phones": ["1"]} == split_phone({"phone": "1"})
