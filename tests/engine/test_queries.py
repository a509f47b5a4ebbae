"""Callers' filters and sorts on fields that a migration changes: they find outdated documents too."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from treadle import Archive, Count, Document, Indexed, Store, UsageError, migration

OLD = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)


class Card(BaseModel):
    tel: str


class Contact(Document, collection="contacts", version=2):
    id: int
    team: str = "a"
    tel: Annotated[str, Indexed(unique=True)] = ""


migration(Contact, from_version=1, up=[{"$set": {"tel": "$phone"}}, {"$unset": "phone"}])


class Team(Document, collection="teams"):
    id: str
    size: Annotated[int, Count(Contact, by="team", where={"tel": {"$ne": "gone"}})] = 0


class Named(Document, collection="named", version=2):
    """Its function names its fields."""

    id: int
    tel: str = ""
    note: str = ""


@migration(Named, from_version=1, fields=("phone", "tel"))
def _tel(document: dict[str, Any]) -> dict[str, Any]:
    document["tel"] = document.pop("phone")
    return document


@_tel.down
def _phone(document: dict[str, Any]) -> dict[str, Any]:
    document["phone"] = document.pop("tel")
    return document


def fill(database: Any, name: str) -> None:
    """Odd ids are outdated; in front of each group of ids is one that does not match a search for "x"."""
    documents: list[dict[str, Any]] = []
    for number in range(1, 9):
        tel = "x" if number % 4 > 1 else f"other {number}"
        outdated = {"phone": tel} if number % 2 else {"tel": tel, "schema_version": 2}
        documents.append({"_id": number, "note": "same", **outdated})
    database[name].insert_many(documents)


@pytest.fixture
def named(run, database) -> Any:
    fill(database, "named")
    store = run.store([Named])
    store.setup()
    return store


def ids(documents: Any) -> list[int]:
    return [each.id for each in documents]


def test_reads_find_them(named):
    matching = {"tel": "x"}
    assert [2, 3, 6, 7] == ids(named.find(Named, matching, sort="_id"))
    assert [3, 6] == ids(named.find(Named, matching, sort="_id", skip=1, limit=2))
    assert [7, 6] == ids(named.find(Named, {**matching, "note": "same"}, sort="-_id", limit=2))
    assert [3, 7] == ids(named.find(Named, {"$and": [matching, {"_id": {"$in": [1, 3, 5, 7]}}]}, sort="_id"))
    assert 3 == named.find_one(Named, {**matching, "_id": {"$gt": 2}}, sort="_id").id
    assert "x" == named.find_one(Named, {**matching, "_id": 3}, into=Card).tel
    assert 4 == named.count(Named, matching)
    assert named.exists(Named, {**matching, "_id": 7})
    assert not named.exists(Named, {**matching, "_id": 5})
    assert [1, 4, 5, 8] == ids(named.find(Named, {"tel": {"$ne": "x"}}, sort="_id"))
    assert 8 == named.count(Named, {"$expr": {"$gt": [{"$strLenCP": "$tel"}, 0]}})


@pytest.mark.parametrize("former", [{"phone": "x"}, {"schema_version": {"$in": [None, 1]}, "phone": "x"}])
def test_a_name_of_an_older_version_is_looked_for_as_it_is_stored(named, former):
    assert [3, 7] == ids(named.find(Named, former, sort="_id"))


def test_updates_find_them(named):
    after = named.update(Named, {"tel": "x", "_id": {"$in": [1, 3]}}, {"$set": {"note": "found"}})
    assert (3, "found") == (after.id, after.note)
    assert 4 == named.update_many(Named, {"tel": "x"}, {"$set": {"note": "all"}})
    assert {1: 2, 2: 6} == named.migration_status(Named)
    assert [2, 3, 6, 7] == ids(named.find(Named, {"note": "all"}, sort="_id"))
    assert 0 == named.update_many(Named, {"tel": "nobody"}, {"$set": {"note": "none"}})
    assert named.update(Named, {"tel": "nobody"}, {"$set": {"note": "none"}}) is None


def test_deletions_find_them(named):
    assert 7 == named.delete(Named, {"tel": "x", "_id": {"$gt": 6}}).id
    assert 3 == named.delete_many(Named, {"tel": "x"})
    assert [1, 4, 5, 8] == ids(named.find(Named, sort="_id"))


def test_an_upsert_updates_the_one_that_there_is(run, database):
    database["contacts"].insert_one({"_id": 1, "team": "a", "phone": "1"})
    store = run.store([Contact, Team])
    store.setup()
    store.insert(Team(id="b"))
    update = {"$set": {"team": "b"}}
    done = store.upsert(Contact, {"tel": "1"}, update, insert=Contact(id=2, tel="1"))
    assert (False, 1, "b") == (done.created, done.document.id, done.document.team)
    assert store.upsert(Contact, {"tel": "2"}, update, insert=Contact(id=2, tel="2")).created
    assert 1 == store.get(Team, "b").size
    assert 1 == store.update_many(Contact, {"tel": "1"}, {"$set": {"tel": "gone"}})
    assert [0, []] == [store.get(Team, "b").size, store.verify(Team)]


def test_what_the_server_cannot_order_is_refused_while_there_are_outdated_documents(named):
    calls = [
        lambda: named.find(Named, sort="tel").to_list(),
        lambda: named.find_one(Named, sort="-tel"),
        lambda: named.update(Named, {}, {"$set": {"note": "a"}}, sort="tel"),
        lambda: named.page(Named, sort="tel"),
        lambda: named.page(Named, {"tel": "x"}, sort="note"),
        lambda: named.distinct(Named, "tel"),
        lambda: named.distinct(Named, "note", {"tel": "x"}),
    ]
    for call in calls:
        with pytest.raises(UsageError) as raised:
            call()
        assert "documents-outdated" == raised.value.code
    assert ["same"] == named.distinct(Named, "note")
    assert 8 == len(named.page(Named, sort="note").items)
    named.migrate(Named)
    for call in calls:
        call()


def test_a_store_that_writes_an_older_version_refuses_it_as_well(run):
    store = run.store([Named], write_versions={Named: 1})
    store.setup()
    store.insert(Named(id=1, tel="x"))
    assert [1] == ids(store.find(Named, {"tel": "x"}))
    with pytest.raises(UsageError) as raised:
        store.distinct(Named, "tel")
    assert "documents-outdated" == raised.value.code


def test_a_document_that_cannot_be_upgraded_does_not_match(named, database):
    database["named"].insert_one({"_id": 9, "note": "no phone"})
    assert [2, 3, 6, 7] == ids(named.find(Named, {"tel": "x"}, sort="_id"))
    assert 4 == named.update_many(Named, {"tel": "x"}, {"$set": {"note": "again"}})
    assert [9] == [each.document_id for each in named.set_aside()]


def test_archived_documents_are_found(run, database):
    class Sale(
        Document,
        collection="sales",
        version=2,
        archive=Archive(by="date", after=dt.timedelta(days=1), into="sales_archive"),
    ):
        id: int
        tel: str = ""
        date: dt.datetime

    migration(Sale, from_version=1, up=[{"$set": {"tel": "$phone"}}, {"$unset": "phone"}])
    store = run.store([Sale])
    store.setup()
    database["sales"].insert_many([{"_id": number, "phone": "x", "date": OLD} for number in (1, 2)])
    store.archive(Sale)
    database["sales"].insert_many(
        [{"_id": 3, "phone": "x", "date": OLD}, {"_id": 4, "phone": "y", "date": OLD}]
    )
    assert [1, 2, 3] == ids(store.find(Sale, {"tel": "x"}, sort="_id", archived=True))
    assert [2] == ids(store.find(Sale, {"tel": "x"}, sort="_id", skip=1, limit=1, archived=True))
    assert [3] == ids(store.find(Sale, {"tel": "x"}))


def test_a_renamed_discriminator_is_read_after_the_upgrade(run, database):
    class Item(Document, collection="items", version=2, discriminator="kind"):
        id: int

    class Book(Item, kind="book"):
        title: str = ""

    migration(Item, from_version=1, up=[{"$set": {"kind": "$type"}}, {"$unset": "type"}])
    store = run.store([Item, Book])
    store.setup()
    database["items"].insert_many([{"_id": 1, "type": "book"}, {"_id": 2, "type": "book", "title": "t"}])
    assert 1 == store.get(Book, 1).id
    assert [2, 1] == ids(store.get_many(Book, [2, 1]))
    assert [2] == ids(store.find(Book, {"title": "t"}))
    assert "u" == store.update(Book, 2, {"$set": {"title": "u"}}).title
    assert 1 == store.delete(Book, 1).id
    assert 1 == store.count(Book, {})


def test_setup_says_where_filters_match_what_is_stored(database, caplog):
    class Plain(Document, collection="plain", version=2):
        id: int
        tel: str = ""

    migration(Plain, 1, up=lambda document: {**document, "tel": "new"})
    store = Store(database, [Plain, Named])
    store.setup()
    assert ["Plain" in record.getMessage() for record in caplog.records] == [True]
    database["plain"].insert_one({"_id": 1, "tel": "old"})
    assert "new" == store.find_one(Plain, {"tel": "old"}).tel
    assert store.find(Plain, {"tel": "new"}, sort="tel").to_list() == []


def test_only_a_filter_on_a_changed_field_costs_more(heard):
    database, listener = heard
    fill(database, "named")
    store = Store(database, [Named])
    store.setup()
    listener.clear()
    store.find(Named, {"note": "same"}, sort="note").to_list()
    store.count(Named, {"note": "same"})
    store.find(Named, {"tel": "x", "_id": {"$in": [2, 6]}}).to_list()
    assert ["find", "aggregate", "find"] == listener.names
