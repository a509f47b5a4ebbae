"""Schema versioning: documents of all versions are readable, and move up and down without losing a write."""

from __future__ import annotations

import datetime as dt
import threading
import warnings
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from bson.min_key import MinKey
from pydantic import BaseModel
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from treadle import (
    Approximate,
    Count,
    DataError,
    DeclarationError,
    Document,
    ExtendedReference,
    Formula,
    Id,
    OldDocuments,
    Outlier,
    Rollup,
    Store,
    Sum,
    UsageError,
    migration,
)
from treadle.engine import lazy, lease
from treadle.graph.versions import Lineage
from treadle.graph.watched import Watched
from treadle.server.local import start


class User(Document, collection="users", version=3):
    name: str
    phones: list[str] = []
    n: int = 0
    initial: str | None = None


@migration(User, from_version=1)
def split_phone(document: dict) -> dict:
    phone = document.pop("phone", None)
    document["phones"] = [] if phone is None else phone.split(",")
    return document


@split_phone.down
def join_phone(document: dict) -> dict:
    phones = document.pop("phones")
    if phones:
        document["phone"] = ",".join(phones)
    return document


@migration(User, from_version=2)
def add_initial(document: dict) -> dict:
    document["initial"] = document["name"][:1] or None
    return document


@add_initial.down
def drop_initial(document: dict) -> dict:
    document.pop("initial", None)
    return document


class Stored(Document, collection="users", version=3, migrate_on_read="store"):
    name: str
    phones: list[str] = []
    n: int = 0
    initial: str | None = None


for origin, step in ((1, split_phone), (2, add_initial)):
    migration(Stored, origin, up=step.up, down=step.back)


class Piped(Document, collection="piped", version=3):
    name: str
    first: str
    last: str | None = None
    tags: list[str] = []
    n: int = 0


migration(
    Piped,
    1,
    up=[{"$set": {"first": {"$arrayElemAt": [{"$split": ["$name", " "]}, 0]}, "last": {"$literal": None}}}],
    down=[{"$unset": ["first", "last"]}],
)
migration(Piped, 2, up=[{"$set": {"tags": []}}], down=[{"$unset": "tags"}])


class PipedStored(Document, collection="piped", version=3, migrate_on_read="store"):
    name: str
    first: str
    last: str | None = None
    tags: list[str] = []
    n: int = 0


for number in (1, 2):
    one = Lineage(Piped).steps[number]
    migration(PipedStored, number, up=one.up, down=one.back)


class Mixed(Document, collection="mixed", version=3):
    a: int
    b: int
    c: int


migration(Mixed, 1, up=[{"$set": {"b": {"$add": ["$a", 1]}}}], down=[{"$unset": "b"}])


@migration(Mixed, from_version=2)
def add_c(document: dict) -> dict:
    return {**document, "c": document["b"] + 1}


@add_c.down
def drop_c(document: dict) -> dict:
    del document["c"]
    return document


def old_users(database: Any, count: int = 10) -> list[dict[str, Any]]:
    documents: list[dict[str, Any]] = []
    for number in range(count):
        raw: dict[str, Any] = {"_id": number, "name": f"u{number}", "n": 0}
        if number % 3 == 0:
            raw["phone"] = f"{number},1"
        elif number % 3 == 1:
            raw |= {"schema_version": 1, "phone": "7"}
        else:
            raw |= {"schema_version": 2, "phones": ["5"]}
        documents.append(raw)
    database["users"].insert_many([dict(raw, _id=ObjectId(f"{raw['_id']:024x}")) for raw in documents])
    return documents


# -- reading ------------------------------------------------------------------------------------


def test_documents_of_all_versions_are_read_as_the_current_one(run, database):
    old_users(database)
    store = run.store([User])
    found = list(store.find(User, sort="_id"))
    assert [["0", "1"], ["7"], ["5"]] == [user.phones for user in found[:3]]
    assert "u" == found[0].initial
    assert found[4] == store.get(User, found[4].id) == store.find_one(User, {"_id": found[4].id})
    assert {1: 7, 2: 3} == store.migration_status(User), "in memory, unless told to store"
    assert found[0] == store.delete(User, found[0].id)


def test_a_new_document_says_its_version(run, database):
    store = run.store([User])
    store.insert(User(name="a"))
    assert 3 == database["users"].find_one()["schema_version"]
    assert {3: 1} == store.migration_status(User)


@pytest.mark.parametrize("version", [4, 99])
def test_a_version_from_the_future_is_an_error_that_names_it(run, database, version):
    database["users"].insert_one({"name": "x", "schema_version": version})
    with pytest.raises(DataError, match=str(version)) as caught:
        run.store([User]).find_one(User)
    assert "version-unknown" == caught.value.code


@pytest.mark.parametrize("version", ["2", 0, -1, 1.5, [1]])
def test_what_is_no_version_is_an_error(run, database, version):
    database["users"].insert_one({"name": "x", "schema_version": version})
    with pytest.raises(DataError) as caught:
        run.store([User]).find_one(User)
    assert "version-unknown" == caught.value.code


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
    found = list(store.find(Stored, sort="_id"))
    assert {3: 10} == store.migration_status(Stored)
    assert found == list(store.find(Stored, sort="_id"))
    raw = database["users"].find_one({"_id": found[0].id})
    assert {"_id", "name", "n", "phones", "initial", "schema_version"} == set(raw)


def test_each_way_of_reading_stores_back(run, database):
    old_users(database, 3)
    store = run.store([Stored])
    identities = [ObjectId(f"{number:024x}") for number in range(3)]
    store.get(Stored, identities[0])
    store.find_one(Stored, {"_id": identities[1]})
    assert {2: 1, 3: 2} == store.migration_status(Stored)


def test_a_reader_in_a_transaction_stores_nothing_back(run, database):
    old_users(database, 1)
    store = run.store([Stored])
    with store.transaction() as session:
        assert ["0", "1"] == store.find_one(Stored, session=session).phones
    assert {1: 1} == store.migration_status(Stored)


def test_a_reader_does_not_fail_because_it_could_not_store_back(run, database):
    old_users(database, 1)
    database.command("collMod", "users", validator={"phones": {"$exists": False}})
    assert ["0", "1"] == run.store([Stored]).find_one(Stored).phones


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


def test_pipelines_are_stored_back_too(run, database):
    database["piped"].insert_one({"name": "A B", "n": 1})
    store = run.store([PipedStored])
    assert "A" == store.find_one(PipedStored).first
    assert {3: 1} == store.migration_status(PipedStored)


def test_functions_and_pipelines_may_take_turns(run, database):
    database["mixed"].insert_many([{"a": 1}, {"a": 5, "b": 7, "schema_version": 2}])
    store = run.store([Mixed])
    assert [(1, 2, 3), (5, 7, 8)] == [(each.a, each.b, each.c) for each in store.find(Mixed, sort="_id")]
    assert 2 == store.migrate(Mixed).migrated
    assert {3: 2} == store.migration_status(Mixed)
    store.migrate(Mixed, to=1)
    assert [{"a": 1}, {"a": 5}] == [
        {key: value for key, value in raw.items() if key not in ("_id", "schema_version")}
        for raw in database["mixed"].find().sort("_id")
    ]


def test_find_warns_once_while_old_documents_remain(run, database):
    old_users(database)
    store = run.store([User])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            list(store.find(User, {"phones": "5"}))
            store.find_one(User, {"phones": "5"})
        list(store.find(User))
    assert [OldDocuments] == [each.category for each in caught if each.category is OldDocuments]
    store.migrate(User)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(run.store([User]).find(User, {"phones": "5"}))


# -- concurrent writes ----------------------------------------------------------------------------


def test_storing_back_compares_what_the_migration_read(database):
    """A compare-and-set on the version alone would write the old phone over the new one."""
    identity = ObjectId()
    database["users"].insert_one({"_id": identity, "name": "a", "n": 0, "phone": "1"})
    store = Store(database, [Stored])
    from treadle.engine.convert import convert, guarded_write

    (converted,) = store.runner.run(convert(store.graph.entry(Stored), [database["users"].find_one()]))
    write = guarded_write(converted)
    # An old writer, who does not know of versions.
    database["users"].update_one({"_id": identity}, {"$set": {"phone": "2"}})
    assert 0 == database["users"].bulk_write([write]).matched_count
    database["users"].update_one({"_id": identity}, {"$set": {"phone": "1"}, "$inc": {"n": 1}})
    assert 1 == database["users"].bulk_write([write]).matched_count
    raw = database["users"].find_one()
    assert (["1"], 1) == (raw["phones"], raw["n"]), "what it did not read is left as it is"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"phone": "1"}, {"phone": ["1"]}),
        ({"phone": ["1"]}, {"phone": [["1"]]}),
        ({"phone": None}, {}),
        ({}, {"phone": None}),
        ({"phone": None}, {"phone": [None]}),
        ({"phone": {"a": 1}}, {"phone": {"a": 1, "b": 2}}),
        ({"phone": {"a": 1}}, {"phone": [{"a": 1}]}),
        ({"phone": 1}, {"phone": 2}),
        ({"phone": "$name"}, {"phone": "a"}),
    ],
)
def test_the_comparison_is_exact(database, before, after):
    """A plain filter finds a value inside an array, and null where nothing is."""
    from treadle.engine.convert import Converted, guarded_write

    identity = ObjectId()
    database["users"].insert_one({"_id": identity, "name": "a", **before})
    raw = database["users"].find_one()
    converted = Converted(Lineage(User), raw, {**raw, "schema_version": 2, "x": 1}, {"phone"})
    write = guarded_write(converted)
    database["users"].replace_one({"_id": identity}, {"_id": identity, "name": "a", **after})
    assert 0 == database["users"].bulk_write([write]).matched_count
    database["users"].replace_one({"_id": identity}, raw)
    assert 1 == database["users"].bulk_write([write]).matched_count


def test_fields_that_no_path_reaches_are_compared_with_the_whole(database):
    from treadle.engine.convert import Converted, guarded_write

    raw = {"_id": 1, "a.b": 1, "n": 0}
    database["users"].insert_one(dict(raw))
    write = guarded_write(
        Converted(Lineage(User), raw, {"_id": 1, "a.b": 2, "n": 0, "schema_version": 2}, {"a.b"})
    )
    database["users"].update_one({"_id": 1}, {"$inc": {"n": 1}})
    assert 0 == database["users"].bulk_write([write]).matched_count
    database["users"].update_one({"_id": 1}, {"$inc": {"n": -1}})
    assert 1 == database["users"].bulk_write([write]).matched_count
    assert 2 == database["users"].find_one()["a.b"]


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


# -- updates ----------------------------------------------------------------------------------


def test_an_update_brings_an_old_document_up_first(run, database):
    old_users(database, 3)
    store = run.store([User])
    identity = ObjectId(f"{0:024x}")
    after = store.update(User, identity, {"$push": {"phones": "9"}})
    assert ["0", "1", "9"] == after.phones
    assert 3 == database["users"].find_one({"_id": identity})["schema_version"]
    assert store.update(User, ObjectId(), {"$inc": {"n": 1}}) is None
    assert 2 == store.update_many(
        User, {"n": 0, "_id": {"$ne": identity}}, {"$push": {"phones": "9"}, "$inc": {"n": 5}}
    )
    assert [["0", "1", "9"], ["7", "9"], ["5", "9"]] == [each.phones for each in store.find(User, sort="_id")]
    assert [0, 5, 5] == [each.n for each in store.find(User, sort="_id")]


def test_an_update_of_a_current_document_is_one_command(heard):
    database, listener = heard
    store = Store(database, [User])
    user = store.insert(User(name="a"))
    listener.clear()
    store.update(User, user.id, {"$inc": {"n": 1}})
    store.get(User, user.id)
    assert ["findAndModify", "find"] == listener.names


def test_the_version_cannot_be_updated(run):
    store = run.store([User])
    user = store.insert(User(name="a"))
    for update in ({"$set": {"schema_version": 1}}, [{"$unset": "schema_version"}]):
        with pytest.raises(UsageError) as caught:
            store.update(User, user.id, update)
        assert "field-maintained" == caught.value.code


def test_replace_writes_the_current_version(run, database):
    old_users(database, 1)
    store = run.store([User])
    user = store.find_one(User)
    store.replace(user)
    raw = database["users"].find_one()
    assert (3, ["0", "1"]) == (raw["schema_version"], raw["phones"])
    assert "phone" not in raw


# -- rolling deploys ------------------------------------------------------------------------------


def test_a_store_can_go_on_writing_an_old_version(run, database):
    store = run.store([User], write_versions={User: 1})
    user = store.insert(User(name="a", phones=["1", "2"], initial="a"))
    raw = database["users"].find_one()
    assert {"_id": user.id, "schema_version": 1, "name": "a", "n": 0, "phone": "1,2"} == raw
    assert user == store.get(User, user.id)
    after = store.update(User, user.id, {"$push": {"phones": "3"}, "$inc": {"n": 1}})
    assert ["1", "2", "3"] == after.phones
    assert ("1,2,3", 1, 1) == tuple(
        database["users"].find_one()[key] for key in ("phone", "n", "schema_version")
    )
    assert 1 == store.update_many(User, {"name": "a"}, {"$push": {"phones": "4"}})
    assert "1,2,3,4" == database["users"].find_one()["phone"]
    store.replace(User(id=user.id, name="b"))
    assert {"_id": user.id, "schema_version": 1, "name": "b", "n": 0} == database["users"].find_one()
    (two,) = store.insert_many([User(name="c")])
    assert 1 == database["users"].find_one({"_id": two.id})["schema_version"]


def test_treadles_own_state_survives_a_way_down_that_forgets_it(run, database):
    class Named(Document, collection="named", version=2):
        name: str
        full: str = ""

    class Signed(Document, collection="signed"):
        name_id: Id
        name: Annotated[str | None, ExtendedReference(Named, by="name_id", field="name")] = None

    step = migration(Named, 1, up=lambda document: {**document, "full": "x"})
    step.down(lambda document: {"_id": document["_id"], "name": document["name"]})
    store = run.store([Named, Signed], write_versions={Named: 1})
    named = store.insert(Named(name="a"))
    store.insert(Signed(name_id=named.id))
    before = database["named"].find_one()["_treadle"]
    store.update(Named, named.id, {"$set": {"name": "b"}})
    after = database["named"].find_one()
    assert (1, "b") == (after["schema_version"], after["name"])
    assert set(before) <= set(after["_treadle"])
    assert [] == store.verify()


def test_nobody_else_sees_the_new_version_while_the_old_one_is_written(database):
    store = Store(database, [User], write_versions={User: 1})
    user = store.insert(User(name="a"))
    done = threading.Event()
    seen: set[Any] = set()

    def look() -> None:
        while not done.is_set():
            seen.add(database["users"].find_one()["schema_version"])

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(30):
        store.update(User, user.id, {"$push": {"phones": "1"}})
    done.set()
    thread.join()
    assert {1} == seen
    assert 30 == len(store.get(User, user.id).phones)


def test_write_versions_that_cannot_be_are_refused(database):
    class Plain(Document, collection="plains"):
        n: int = 0

    def code(models: list[Any], versions: Any) -> str:
        with pytest.raises((DeclarationError, UsageError)) as caught:
            Store(database, models, write_versions=versions)
        return caught.value.code

    assert "version-invalid" == code([User], {User: 4})
    assert "version-invalid" == code([User], {User: 0})
    assert "version-invalid" == code([Plain], {Plain: 1})
    assert "model-unknown" == code([Plain], {User: 1})
    assert "migration-no-way-down" == code([Piped], {Piped: 1})


def test_writing_an_old_version_takes_transactions():
    with start(replica_set=False) as alone, MongoClient(alone.uri) as client:
        store = Store(client["old"], [User], write_versions={User: 1})
        user = store.insert(User(name="a"))
        with pytest.raises(UsageError) as caught:
            store.update(User, user.id, {"$inc": {"n": 1}})
        assert "write-version-update" == caught.value.code
        store.replace(User(id=user.id, name="b"))
        assert "b" == store.get(User, user.id).name
        # With the current version there is nothing to miss.
        client["old"]["users"].insert_one({"_id": ObjectId(), "name": "old", "phone": "1"})
        new = Store(client["old"], [User])
        assert ["1", "2"] == new.update(User, {"name": "old"}, {"$push": {"phones": "2"}}).phones
        assert 1 == new.migrate(User).migrated


# -- declarations ---------------------------------------------------------------------------------


def test_gaps_are_found_when_the_store_is_made(database):
    class Gap(Document, collection="gaps", version=4): ...

    migration(Gap, 1, up=lambda document: document)
    migration(Gap, 3, up=lambda document: document)
    with pytest.raises(DeclarationError, match="2 to 3") as caught:
        Store(database, [Gap])
    assert "migration-missing" == caught.value.code


def test_migrations_that_cannot_work_are_refused():
    class Some(Document, collection="some", version=2): ...

    def code(make: Any) -> str:
        with pytest.raises(DeclarationError) as caught:
            make()
        return caught.value.code

    migration(Some, 1, up=lambda document: document)
    assert "migration-twice" == code(lambda: migration(Some, 1, up=[{"$set": {"a": 1}}]))
    assert "version-invalid" == code(lambda: migration(Some, 0, up=[{"$set": {"a": 1}}]))
    assert "migration-invalid" == code(lambda: migration(Some, 2, up=[{"$match": {}}]))
    assert "migration-invalid" == code(lambda: migration(Some, 2, up=[]))
    assert "version-invalid" == code(lambda: migration(dict, 2, up=[{"$set": {"a": 1}}]))

    def no_version() -> None:
        class Bad(Document, collection="bad", version="2"): ...

    assert "version-invalid" == code(no_version)


@pytest.mark.parametrize("keyword", [{"version": 2}, {"discriminator": "kind"}], ids=str)
def test_the_groups_of_a_rollup_have_no_versions_or_kinds(keyword):
    with pytest.raises(DeclarationError, match="rollup= and"):

        class PerProduct(
            Document, collection="per_product", rollup=Rollup(Review, keys={"id": "product_id"}), **keyword
        ):
            id: Id
            n: Annotated[int, Count()] = 0


def test_code_in_a_pipeline_is_refused():
    class Some(Document, collection="some", version=2): ...

    with pytest.raises(UsageError, match="function"):
        migration(Some, 1, up=[{"$set": {"a": {"$function": {"body": "x", "args": [], "lang": "js"}}}}])


def test_a_function_may_be_called_as_it_is():
    assert {"phones": ["1"]} == split_phone({"phone": "1"})


@pytest.mark.parametrize(
    "look",
    [
        dict,
        list,
        len,
        lambda document: {**document},
        lambda document: document | {},
        lambda document: {} | document,
        lambda document: document.copy(),
        lambda document: list(document.items()),
        sorted,
        lambda document: document == {},
        repr,
        bool,
        lambda document: __import__("copy").deepcopy(document),
        lambda document: __import__("copy").copy(document),
        lambda document: __import__("pickle").dumps(document),
        lambda document: __import__("json").dumps(document),
    ],
)
def test_whatever_looks_at_the_whole_has_read_all(look):
    watched = Watched({"a": 1, "b": 2})
    look(watched)
    assert watched.read is None


def test_single_looks_are_noted():
    watched = Watched({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5})
    _ = watched["a"], watched.get("b"), "x" in watched, watched.pop("c"), watched.setdefault("y", 1)
    watched["d"] = 5
    del watched["e"]
    assert {"a", "b", "x", "c", "y", "d", "e"} == watched.read
    watched.update(z=1)
    watched |= {"w": 1}
    assert {"z", "w"} <= watched.read


# -- in the background ------------------------------------------------------------------------


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


@pytest.mark.parametrize("batch", [1, 3, 1000])
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


def test_results_that_the_validator_or_bson_refuses_are_set_aside(run, database):
    class Strict(Document, collection="strict", version=2, validation="strict"):
        a: int

    def bad(document: dict) -> dict:
        document["a"] = {1: 5, 2: "text", 3: object(), 4: 2**70}[document["a"]]
        return document

    migration(Strict, 1, up=bad)
    database["strict"].insert_many([{"a": number} for number in (1, 2, 3, 4)])
    store = run.store([Strict])
    store.setup()
    result = store.migrate(Strict)
    assert (1, 3) == (result.migrated, len(result.set_aside))


class Large(Document, collection="large", version=2):
    id: int
    parts: list[Any]
    n: int = 0


@migration(Large, from_version=1)
def wrap_parts(document: dict) -> dict:
    document["parts"] = [{"text": part} for part in document["parts"]]
    return document


def large_documents(database: Any) -> None:
    """One that fits the limit, but not twice: in what is compared and in what is set."""
    database["large"].insert_many(
        [{"_id": number, "parts": ["x" * 1000] * (9000 if number == 1 else 1)} for number in range(3)]
    )


def test_a_document_too_large_to_be_compared_is_migrated_all_the_same(run, database):
    large_documents(database)
    result = run.store([Large]).migrate(Large)
    assert (3, 0, ()) == (result.migrated, result.remaining, result.set_aside)
    assert {"text": "x" * 1000} == database["large"].find_one({"_id": 1})["parts"][-1]


def test_an_update_brings_up_a_document_too_large_to_be_compared(run, database):
    large_documents(database)
    assert 1 == run.store([Large]).update(Large, 1, {"$inc": {"n": 1}}).n


def test_a_document_too_large_to_be_compared_is_set_aside_without_transactions():
    with start(replica_set=False) as alone, MongoClient(alone.uri) as client:
        large_documents(client["large"])
        result = Store(client["large"], [Large]).migrate(Large)
        assert (2, 1) == (result.migrated, len(result.set_aside))
        assert "transaction" in result.set_aside[0].reason


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
    assert 3 == len([1 for name, body in listener.commands if name == "find" and body["find"] == "large"])


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


def test_a_reader_does_not_fail_because_the_result_is_no_bson(run, database):
    database["exact"].insert_one({"price": "1.5"})
    assert Decimal("1.5") == run.store([ExactOnly]).find_one(ExactOnly).price


def test_an_update_stores_what_models_hold(run, database):
    database["exact"].insert_one({"price": "1.5"})
    store = run.store([ExactOnly])
    assert Decimal("2.5") == store.update(ExactOnly, {}, {"$inc": {"price": Decimal(1)}}).price


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


@pytest.mark.parametrize("returned", [None, [], "x"])
def test_a_function_that_returns_no_document_is_set_aside(run, database, returned):
    class Silent(Document, collection="silent", version=2): ...

    migration(Silent, 1, up=lambda document: returned)
    database["silent"].insert_one({"_id": ObjectId()})
    assert 1 == len(run.store([Silent]).migrate(Silent).set_aside)


def test_a_function_may_not_change_the_id(run, database):
    class Mover(Document, collection="movers", version=2): ...

    migration(Mover, 1, up=lambda document: {**document, "_id": 5})
    database["movers"].insert_one({"_id": ObjectId()})
    result = run.store([Mover]).migrate(Mover)
    assert (0, 1) == (result.migrated, len(result.set_aside))


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


def test_one_run_at_a_time(run, database):
    old_users(database, 4)
    store = run.store([User])
    codes: list[str] = []

    def second(progress: Any) -> None:
        if not codes:
            try:
                Store(store_database, [User]).migrate(User)
            except DataError as error:
                codes.append(error.code)

    store_database = database
    assert 4 == store.migrate(User, batch=2, progress=second).migrated
    assert ["migration-running"] == codes


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

    def noting(command: Any, session: Any) -> Any:
        if type(command) is Wait:
            waits.append(command.seconds)
            return None
        return perform(command, session)

    store.runner._perform = noting  # type: ignore[method-assign]
    store.migrate(User, batch=2, throttle=4)
    assert [0.5, 0.5, 0.5] == [each for each in waits if each]
    # Not a thousand at once and then nothing for minutes.
    waits.clear()
    store.migrate(User, to=2, throttle=3)
    assert [1.0, 1.0] == [each for each in waits if each]
    waits.clear()
    stopped = store.migrate(User, throttle=0.01, stop=lambda: bool(waits))
    assert (1, False) == (stopped.migrated, stopped.finished)
    assert [10.0] == [each for each in waits if each]
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


# -- kinds ----------------------------------------------------------------------------------------


class Shape(Document, collection="shapes", discriminator="kind", version=2):
    name: str = ""


class Circle(Shape, kind="circle"):
    radius: float


class Square(Shape, kind="square", version=3):
    side: float
    colour: str


@migration(Shape, from_version=1)
def name_kind(document: dict) -> dict:
    if "kind" not in document:
        document["kind"] = "circle" if "radius" in document else "square"
    return document


@name_kind.down
def keep_kind(document: dict) -> dict:
    return document


@migration(Square, from_version=2)
def colour(document: dict) -> dict:
    document["colour"] = "red"
    return document


@colour.down
def bleach(document: dict) -> dict:
    document.pop("colour", None)
    return document


def test_each_kind_has_its_own_versions(run, database):
    store = run.store([Shape, Circle, Square])
    store.setup()
    database["shapes"].insert_many(
        [
            {"kind": "circle", "radius": 1.0},
            {"kind": "square", "side": 1.0},
            {"kind": "square", "side": 1.0, "schema_version": 2},
            # From before there were kinds.
            {"radius": 2.0},
            {"side": 2.0},
        ]
    )
    store.insert_many([Circle(radius=3), Square(side=3, colour="blue")])
    expected = [Circle, Square, Square, Circle, Square, Circle, Square]
    found = list(store.find(Shape, sort="_id"))
    assert expected == [type(each) for each in found]
    assert ["red", "red", "red", "blue"] == [each.colour for each in found if isinstance(each, Square)]
    assert store.migrate(Shape).finished
    assert found == list(store.find(Shape, sort="_id"))
    assert {2: 3, 3: 4} == store.migration_status(Shape)
    assert {3: 4} == store.migration_status(Square)
    store.update_many(Shape, {}, {"$set": {"name": "x"}})
    assert 7 == store.count(Shape, {"name": "x"})
    assert 4 == store.migrate(Square, to=2).migrated
    assert {2: 7} == store.migration_status(Shape)


def test_updates_bring_up_each_kind_in_its_own_way(run, database):
    store = run.store([Shape, Circle, Square])
    database["shapes"].insert_many(
        [{"kind": "circle", "radius": 1.0}, {"kind": "square", "side": 1.0}, {"side": 2.0}]
    )
    assert 3 == store.update_many(Shape, {}, {"$set": {"name": "x"}})
    assert {2: 1, 3: 2} == store.migration_status(Shape)
    database["shapes"].insert_one({"kind": "square", "side": 9.0})
    assert "red" == store.update(Square, {"side": 9}, {"$set": {"name": "y"}}).colour


# -- models that others follow ------------------------------------------------------------------


class Review(Document, collection="reviews", version=2):
    product_id: Id
    stars: int


@migration(Review, from_version=1)
def rename_rating(document: dict) -> dict:
    document["stars"] = document.pop("rating")
    return document


@rename_rating.down
def rename_stars(document: dict) -> dict:
    document["rating"] = document.pop("stars")
    return document


class Label(Document, collection="labels", version=2):
    text: str


migration(Label, 1, up=[{"$set": {"text": "$name"}}, {"$unset": "name"}])


class LabelCard(BaseModel):
    text: str | None = None


class Product(Document, collection="products"):
    label_id: Id | None = None
    label: Annotated[LabelCard | None, ExtendedReference(Label, by="label_id")] = None
    reviews: Annotated[int, Count(Review, by="product_id")] = 0
    stars: Annotated[int, Sum(Review, "stars", by="product_id")] = 0
    double: Annotated[int | None, Formula({"$multiply": ["$stars", 2]})] = None


def followed(store: Any, database: Any) -> None:
    label = ObjectId()
    database["labels"].insert_one({"_id": label, "name": "old"})
    product = store.insert(Product(label_id=label))
    database["reviews"].insert_many([{"product_id": product.id, "rating": number} for number in range(5)])
    store.rebuild(Product)
    assert (5, 0) == (store.get(Product, product.id).reviews, store.get(Product, product.id).stars)
    # An update of an old document is followed as well.
    review = store.find_one(Review)
    store.update(Review, review.id, {"$set": {"stars": 7}})
    assert 7 == store.get(Product, product.id).stars
    store.migrate(Review, batch=2)
    store.migrate(Label)
    after = store.get(Product, product.id)
    assert (5, 17, 34, "old") == (after.reviews, after.stars, after.double, after.label.text)
    assert [] == store.verify()
    store.migrate(Review, to=1)
    assert 0 == store.get(Product, product.id).stars
    assert [] == store.verify()


class Mark(Document, collection="marks", version=2, validation="strict"):
    id: int
    product_id: int
    stars: Any


@migration(Mark, from_version=1)
def rename_mark(document: dict) -> dict:
    document["stars"] = document.pop("rating")
    if document["stars"] == 3:
        document["stars"] = object()
    return document


class Marked(Document, collection="marked"):
    id: int
    marks: Annotated[int, Count(Mark, by="product_id", where={"stars": {"$gte": 1}})] = 0


def marks(database: Any) -> None:
    store = Store(database, [Mark, Marked])
    store.setup()
    store.insert(Marked(id=1))
    database["marks"].insert_many(
        [{"_id": number, "product_id": 1, "rating": number} for number in range(1, 6)]
    )
    database["marks"].create_index("stars", unique=True, partialFilterExpression={"stars": {"$gte": 0}})
    database["marks"].insert_one({"_id": 9, "product_id": 1, "stars": 5, "schema_version": 2})
    store.rebuild(Marked)
    result = store.migrate(Mark)
    assert (3, 2, True) == (result.migrated, result.remaining, result.finished)
    reasons = {each.document_id: each.reason for each in result.set_aside}
    assert {3, 5} == set(reasons)
    assert "stars" in reasons[3]
    assert "duplicate" in reasons[5]
    assert [] == store.verify()
    assert 4 == store.get(Marked, 1).marks


def test_what_cannot_be_written_where_others_follow_is_set_aside(database):
    """It undoes a transaction, and must not stop the run for ever."""
    marks(database)


def test_what_cannot_be_written_where_others_follow_is_set_aside_without_transactions():
    with start(replica_set=False) as alone, MongoClient(alone.uri) as client:
        marks(client["marks"])


def test_what_follows_from_a_migration_is_followed(run, database):
    followed(run.store([Review, Label, Product]), database)


def test_what_follows_from_a_migration_is_followed_without_transactions():
    with start(replica_set=False) as alone, MongoClient(alone.uri) as client:
        followed(Store(client["followed"], [Review, Label, Product]), client["followed"])


def test_an_old_version_cannot_be_written_where_rules_would_notice(database):
    store = Store(database, [Review, Label, Product], write_versions={Review: 1})
    product = store.insert(Product())
    with pytest.raises(UsageError) as caught:
        store.insert(Review(product_id=product.id, stars=3))
    assert "write-version-update" == caught.value.code
    assert 0 == database["reviews"].count_documents({})


# -- the validator ------------------------------------------------------------------------------


def test_the_validator_knows_the_versions(run, database):
    store = run.store([User])
    store.setup()
    accepted = [
        {"name": 5},
        {"schema_version": 1},
        {"schema_version": None},
        {"schema_version": 2, "x": 1},
        {"schema_version": 3, "name": "a"},
    ]
    database["users"].insert_many(accepted)
    for refused in (
        {"schema_version": 3, "name": 5},
        {"schema_version": 4, "name": "a"},
        {"schema_version": "1"},
    ):
        with pytest.raises(OperationFailure, match="validation"):
            database["users"].insert_one(refused)


def test_an_older_release_does_not_take_a_newer_validator_back(run, database):
    run.store([User]).setup()

    class Before(Document, collection="users", version=2):
        name: str

    migration(Before, 1, up=lambda document: document)
    assert [] == run.store([Before]).setup()
    database["users"].insert_one({"schema_version": 3, "name": "a"})


def test_a_release_that_knows_the_next_migration_reads_and_writes_around_it(run, database):
    """Ship a migration one release ahead, and the old release reads what the new one wrote."""

    class Ahead(Document, collection="users", version=1):
        name: str
        phone: str | None = None
        n: int = 0

    migration(Ahead, 1, up=split_phone.up, down=split_phone.back)
    database["users"].insert_one(
        {"_id": ObjectId(), "name": "a", "n": 0, "phones": ["1", "2"], "schema_version": 2}
    )
    store = run.store([Ahead])
    store.setup()
    assert "1,2" == store.find_one(Ahead).phone
    assert 1 == store.update(Ahead, {"name": "a"}, {"$inc": {"n": 1}}).n
    assert "1,2" == database["users"].find_one()["phone"]
    database["users"].insert_one({"_id": ObjectId(), "name": "b", "n": 0, "phones": [], "schema_version": 2})
    assert 2 == store.migrate(Ahead, to=2).migrated + 1


# -- what follows from a document that a write brings to the current version ----------------------------------


class Kept(Document, collection="kept", version=2):
    category_id: int
    label: str = ""
    seen: Annotated[int, Approximate(every=100)] = 0
    tags: Annotated[list[str], Outlier(limit=2, overflow="kept_overflow")] = []


@migration(Kept, from_version=1)
def name_the_category(document: dict[str, Any]) -> dict[str, Any]:
    document["category_id"] = document.pop("cat")
    return document


class Shelf(Document, collection="kept_shelves"):
    id: int
    kept: Annotated[int, Count(Kept, by="category_id")] = 0


@pytest.mark.parametrize("write", ["update", "update_many", "append", "counter"])
def test_whoever_brings_a_document_up_takes_along_what_follows(run, database, write):
    store = run.store([Kept, Shelf])
    store.setup()
    store.insert(Shelf(id=1))
    key = database.kept.insert_one({"cat": 1, "label": "a", "schema_version": 1}).inserted_id
    assert [] == store.verify(Shelf)
    if write == "update":
        store.update(Kept, key, {"$set": {"label": "b"}})
    elif write == "update_many":
        store.update_many(Kept, {"label": "a"}, {"$set": {"label": "b"}})
    elif write == "append":
        store.array(Kept, "tags", key).append("x")
    else:
        counter = store.counter(Kept, "seen")
        counter.add(key, 3)
        counter.flush()
    assert 1 == store.get(Shelf, 1).kept
    assert [] == store.verify(Shelf)


def test_a_document_that_cannot_be_brought_up_stops_no_counter_and_no_repair(run, database):
    store = run.store([Kept, Shelf])
    store.setup()
    good = store.insert(Kept(category_id=1)).id
    bad = database.kept.insert_one({"label": "no category", "schema_version": 1}).inserted_id
    counter = store.counter(Kept, "seen")
    counter.add(bad, 2)
    counter.add(good, 3)
    flushed = counter.flush()
    assert {bad: 2} == flushed.unknown
    assert {} == counter.pending()
    assert 3 == store.get(Kept, good).seen
    store.repair()
    store.rebuild()
    assert {bad} == {each.document_id for each in store.verify()}


def test_an_update_of_very_many_old_documents_is_no_contention(run, database, monkeypatch):
    monkeypatch.setattr(lazy, "CHUNK", 2)
    store = run.store([User])
    store.setup()
    database.users.insert_many([{"name": "a", "phone": "1,2"} for _ in range(70)])
    assert 70 == store.update_many(User, {}, {"$set": {"name": "b"}})


def test_counters_are_read_in_the_current_version(run, database):
    store = run.store([Kept, Shelf])
    store.setup()
    key = database.kept.insert_one({"cat": 1, "schema_version": 1, "seen": 4}).inserted_id
    assert 4 == store.counter(Kept, "seen").read(key)
