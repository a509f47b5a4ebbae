"""Releases that know different versions, side by side."""

from __future__ import annotations

import threading
from typing import Annotated, Any

from bson import ObjectId

from tests.patterns.schema_versioning.users import User, split_phone
from treadle import Document, ExtendedReference, Id, Store, migration

# -- rolling deploys ---------------------------------------------------------------------------------


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


# -- the validator -----------------------------------------------------------------------------------


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
