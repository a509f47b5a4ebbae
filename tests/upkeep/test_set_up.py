"""setup(): what is declared is made, once."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import pytest
from pymongo import ASCENDING, DESCENDING, IndexModel

from treadle import DataError, Document, DuplicateKey, Indexed, Store


class User(
    Document,
    collection="users",
    indexes=[IndexModel([("name", ASCENDING), ("age", DESCENDING)], name="by_name")],
):
    email: Annotated[str, Indexed(unique=True)]
    name: str
    age: int = 0
    seen: Annotated[dt.datetime | None, Indexed(expire_after=dt.timedelta(days=1))] = None


def test_a_dry_run_lists_what_the_real_one_does_and_the_second_does_nothing(run, database):
    store = run.store([User])
    planned = store.setup(dry_run=True)
    assert [] == database.list_collection_names()
    done = store.setup()
    assert planned == done
    assert {"create collection users", "create index users: by_name (name 1, age -1)"} <= {
        str(each) for each in done
    }
    assert [] == store.setup()
    assert [] == store.setup(dry_run=True)


def test_the_validator_and_the_indexes_are_really_there(run, database):
    run.store([User]).setup()
    indexes = database["users"].index_information()
    assert {"_id_", "email_1", "by_name", "seen_1"} == set(indexes)
    assert indexes["email_1"]["unique"]
    assert 86400 == indexes["seen_1"]["expireAfterSeconds"]
    options = database["users"].options()
    assert "moderate" == options["validationLevel"]
    assert {"_id", "email", "name"} == set(options["validator"]["$jsonSchema"]["required"])


def test_what_differs_is_changed(run, database):
    run.store([User]).setup()

    class Wider(Document, collection="users", validation="strict"):
        email: Annotated[str, Indexed(unique=True)]
        name: str | None = None
        seen: Annotated[dt.datetime | None, Indexed(expire_after=dt.timedelta(days=2))] = None

    store = run.store([Wider])
    assert ["change validator", "change index"] == [each.what for each in store.setup()]
    assert "strict" == database["users"].options()["validationLevel"]
    assert 172800 == database["users"].index_information()["seen_1"]["expireAfterSeconds"]
    assert [] == store.setup()

    class Open(Document, collection="users", validation="off"):
        email: str

    store = run.store([Open])
    assert ["change validator"] == [each.what for each in store.setup()]
    assert [] == store.setup()
    database["users"].insert_one({"anything": 1})


def test_an_index_of_the_same_keys_and_another_name_will_do(run, database):
    database["users"].create_index([("email", 1)], unique=True, name="made_by_hand")
    store = run.store([User])
    assert "email" not in " ".join(str(each) for each in store.setup())
    assert [] == store.setup()


@pytest.mark.parametrize(
    "existing",
    [
        {"keys": [("email", 1)], "name": "email_1"},
        {"keys": [("other", 1)], "name": "email_1"},
        {"keys": [("email", 1)], "name": "by_hand"},
    ],
)
def test_a_conflicting_index_is_named_and_nothing_is_changed(run, database, existing):
    database["users"].create_index(existing["keys"], name=existing["name"])
    before = database["users"].options()
    with pytest.raises(DataError) as caught:
        run.store([User]).setup()
    assert "index-conflict" == caught.value.code
    assert existing["name"] in str(caught.value)
    assert "email" in str(caught.value)
    assert before == database["users"].options()
    assert {"_id_", existing["name"]} == set(database["users"].index_information())


def test_a_unique_index_over_duplicates_names_the_keys(run, database):
    database["users"].insert_many(
        [{"email": "a@x", "name": "1"}, {"email": "a@x", "name": "2"}, {"email": "b@x"}]
    )
    with pytest.raises(DataError) as caught:
        run.store([User]).setup()
    assert "index-duplicates" == caught.value.code
    assert "email='a@x' (2 times)" in str(caught.value)
    assert "b@x" not in str(caught.value)


def test_a_view_in_the_place_of_a_collection_is_refused(run, database):
    database.command({"create": "users", "viewOn": "other", "pipeline": []})
    with pytest.raises(DataError, match="is a view"):
        run.store([User]).setup()


def test_set_up_from_two_processes_at_once(server, database):
    """Both see an empty database; the slower one finds the work done."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Store(database, [User]).setup(), range(4)))
    assert [] == Store(database, [User]).setup()


def test_a_nullable_field_without_a_default_can_be_unique(run, database):
    class Badge(Document, collection="badges"):
        number: Annotated[int | None, Indexed(unique=True)]

    store = run.store([Badge])
    store.setup()
    store.insert_many([Badge(number=None), Badge(number=None), Badge(number=1)])
    with pytest.raises(Exception, match="E11000"):
        store.insert(Badge(number=1))


def test_an_optional_field_can_be_unique_and_sparse(run, database):
    class User(Document, collection="users"):
        email: Annotated[str | None, Indexed(unique=True, sparse=True)] = None
        phone: Annotated[str | None, Indexed(unique=True, sparse=True)]
        nick: Annotated[str, Indexed(unique=True, sparse=True)] = ""

    store = run.store([User])
    store.setup()
    assert [] == store.setup()
    store.insert_many([User(phone=None, nick="a"), User(phone=None, nick="b", email="b@example.org")])
    with pytest.raises(DuplicateKey):
        store.insert(User(phone=None, nick="c", email="b@example.org"))
    assert database["users"].index_information()["nick_1"]["sparse"]
