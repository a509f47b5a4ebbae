"""Cards that the worker maintains."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from tests.upkeep.followed import Raw, of, settled, without_former_states
from treadle import Archive, Document, ExtendedReference, Limits, Store


class Person(Document, collection="people"):
    id: int
    name: str
    price: int = 0


class PersonCard(BaseModel):
    name: str | None = None
    price: int | None = None


class Held(BaseModel):
    id: int
    name: str | None = None


class Item(BaseModel):
    person_id: int
    person: Annotated[
        PersonCard | None,
        ExtendedReference(Person, by="person_id", snapshot=["price"], maintain="stream"),
    ] = None


class Letter(Document, collection="letters"):
    id: int
    person_id: int | None = None
    synced: Annotated[PersonCard | None, ExtendedReference(Person, by="person_id", maintain="stream")] = None
    mixed: Annotated[
        PersonCard | None,
        ExtendedReference(Person, by="person_id", snapshot=["price"], maintain="stream"),
    ] = None
    frozen: Annotated[
        PersonCard | None,
        ExtendedReference(Person, by="person_id", policy="snapshot", maintain="stream"),
    ] = None
    name: Annotated[
        str | None, ExtendedReference(Person, by="person_id", field="name", maintain="stream")
    ] = None
    first_name: Annotated[
        str | None,
        ExtendedReference(Person, by="person_id", field="name", policy="snapshot", maintain="stream"),
    ] = None
    held: Annotated[Held | None, ExtendedReference(Person, by="held.id", maintain="stream")] = None
    items: list[Item] = []


def test_odd_references_of_cards_do_not_stop_the_worker(run, database):
    import re

    from bson.dbref import DBRef

    store = run.store([Person, Letter])
    store.setup()
    database.command({"collMod": "letters", "validator": {}})
    database["people"].insert_one({"_id": 1, "name": "Ann", "price": 10})
    odd = [re.compile("."), {"$a": 1}, DBRef("people", 1), [1, 2], 1.0]
    database["letters"].insert_many(
        [{"_id": number, "person_id": key, "items": []} for number, key in enumerate(odd)]
    )
    database["letters"].insert_one({"_id": 9, "person_id": 1, "items": []})
    store.worker().run_until_idle()
    # The references are of no shape that the model has; the cards are as they should be.
    assert {"validation"} == {each.pattern for each in store.verify()}
    assert ("Ann", "Ann") == (of(database, "letters", 9)["name"], of(database, "letters", 4)["name"])
    database["people"].update_one({"_id": 1}, {"$set": {"name": "Eve"}})
    store.worker().run_until_idle()
    assert "Eve" == of(database, "letters", 9)["name"]


@pytest.fixture
def letters(run, database) -> Any:
    store = run.store([Person, Letter])
    store.setup()
    database["people"].insert_many(
        [{"_id": 1, "name": "Ann", "price": 10}, {"_id": 2, "name": "Bob", "price": 20}]
    )
    database["letters"].insert_one(
        {
            "_id": 1,
            "person_id": 1,
            "held": {"id": 1},
            "items": [{"person_id": 1}, {"person_id": 2}, {"person_id": 1}],
        }
    )
    settled(store)
    return store


def cards(database: Any, key: int = 1) -> Raw:
    found = of(database, "letters", key)
    found["items"] = [each["person"] for each in found["items"]]
    return found


def card(name: str, price: int) -> Raw:
    return {"name": name, "price": price}


@pytest.mark.parametrize("replaced", [False, True])
def test_a_snapshot_outlives_the_replacement_of_its_source(letters, database, replaced):
    """Whether the source was replaced, or deleted and inserted anew: the moment has passed."""
    new = {"name": "Eve", "price": 99}
    if replaced:
        database["people"].replace_one({"_id": 1}, new)
    else:
        database["people"].delete_one({"_id": 1})
        settled(letters)
        database["people"].insert_one({"_id": 1, **new})
    settled(letters)
    found = cards(database)
    assert (card("Eve", 99), card("Eve", 10), card("Ann", 10), "Eve", "Ann") == tuple(
        found[name] for name in ("synced", "mixed", "frozen", "name", "first_name")
    )
    assert [card("Eve", 10), card("Bob", 20), card("Eve", 10)] == found["items"]


def test_a_new_reference_takes_the_values_of_its_moment(letters, database):
    """The card of another is not kept for want of looking."""
    database["people"].update_one({"_id": 2}, {"$set": {"price": 21}})
    database["letters"].update_one(
        {"_id": 1}, {"$set": {"person_id": 2, "held.id": 2, "items.0.person_id": 2}}
    )
    settled(letters)
    found = cards(database)
    new = card("Bob", 21)
    assert [new, new, new, "Bob", "Bob", {"id": 2, "name": "Bob"}] == [
        found[name] for name in ("synced", "mixed", "frozen", "name", "first_name", "held")
    ]
    assert [new, card("Bob", 20), card("Ann", 10)] == found["items"]


def test_a_new_reference_whose_source_changes_at_once_is_no_mixture(letters, database):
    """The name may follow before the worker sees that the reference is another."""
    database["letters"].update_one({"_id": 1}, {"$set": {"person_id": 2, "items.0.person_id": 2}})
    database["people"].update_one({"_id": 2}, {"$set": {"name": "Ben", "price": 22}})
    settled(letters)
    found = cards(database)
    assert (card("Ben", 22), card("Ben", 22)) == (found["mixed"], found["items"][0])


def test_a_replacement_that_drops_the_cards_brings_them_back(letters, database):
    """Snapshots as they were, where the server kept the former state; the rest as it is now."""
    database["people"].update_one({"_id": 1}, {"$set": {"name": "Eve", "price": 99}})
    settled(letters)
    bare = {"person_id": 1, "held": {"id": 1}, "items": [{"person_id": 1}, {"person_id": 2}]}
    database["letters"].replace_one({"_id": 1}, bare)
    settled(letters)
    found = cards(database)
    assert [card("Eve", 99), card("Eve", 10), card("Ann", 10), "Eve", "Ann"] == [
        found[name] for name in ("synced", "mixed", "frozen", "name", "first_name")
    ]
    assert [card("Eve", 10), card("Bob", 20)] == found["items"]


def test_a_source_that_comes_after_its_copies_fills_what_follows_it(letters, database):
    """And what was never filled takes the values of that moment."""
    database["letters"].insert_one({"_id": 2, "person_id": 3, "items": [{"person_id": 3}]})
    settled(letters)
    database["people"].insert_one({"_id": 3, "name": "Cid", "price": 30})
    settled(letters)
    found = cards(database, 2)
    assert (card("Cid", 30), card("Cid", 30), "Cid") == (found["synced"], found["mixed"], found["name"])
    assert (card("Cid", 30), "Cid") == (found["frozen"], found["first_name"])


class Frozen(Document, collection="frozen"):
    id: int
    person_id: int
    name: Annotated[
        str | None,
        ExtendedReference(Person, by="person_id", field="name", policy="snapshot", maintain="stream"),
    ] = None


def test_a_snapshot_alone_waits_for_its_source(run, database):
    store = run.store([Person, Frozen])
    store.setup()
    database["frozen"].insert_one({"_id": 1, "person_id": 1})
    settled(store)
    database["people"].insert_one({"_id": 1, **ANN})
    settled(store)
    database["people"].replace_one({"_id": 1}, {"name": "Eve", "price": 1})
    settled(store)
    database["people"].update_one({"_id": 1}, {"$set": {"name": "Zoe"}})
    settled(store)
    assert "Ann" == of(database, "frozen", 1)["name"]


def test_snapshots_of_other_elements_stay_without_former_states(letters, database):
    """A changed reference in one element says nothing of the others."""
    without_former_states(database, "letters", "people")
    settled(letters)
    database["people"].update_many({}, {"$set": {"price": 99}})
    database["letters"].update_one({"_id": 1}, {"$set": {"items.0.person_id": 2}})
    settled(letters)
    assert [99, 20, 10] == [each["price"] for each in cards(database)["items"]]


def on_delete_model(on_delete: str, within: str) -> type[Document]:
    reference = ExtendedReference(Person, by="person_id", maintain="stream", on_delete=on_delete)

    class Entry(BaseModel):
        person_id: int | None = None
        person: Annotated[PersonCard | None, reference] = None

    if within == "array":

        class Listed(Document, collection="referring"):
            id: int
            entries: list[Entry] = []

        return Listed

    class Plain(Document, collection="referring"):
        id: int
        person_id: int | None = None
        person: Annotated[PersonCard | None, reference] = None

    return Plain


ANN = {"name": "Ann", "price": 10}

AFTER_DELETION = {
    ("keep", "field"): [{"_id": 1, "person_id": 1, "person": ANN}],
    ("restrict", "field"): [{"_id": 1, "person_id": 1, "person": None}],
    ("clear", "field"): [{"_id": 1, "person_id": None, "person": None}],
    ("cascade", "field"): [],
    ("keep", "array"): [
        {"_id": 1, "entries": [{"person_id": 1, "person": ANN}, {"person_id": None, "person": None}]}
    ],
    ("restrict", "array"): [
        {"_id": 1, "entries": [{"person_id": 1, "person": None}, {"person_id": None, "person": None}]}
    ],
    ("clear", "array"): [
        {"_id": 1, "entries": [{"person_id": None, "person": None}, {"person_id": None, "person": None}]}
    ],
    ("cascade", "array"): [{"_id": 1, "entries": [{"person_id": None, "person": None}]}],
}


@pytest.mark.parametrize(("on_delete", "within"), list(AFTER_DELETION))
def test_a_raw_deletion_is_followed_as_declared(run, database, on_delete, within):
    model = on_delete_model(on_delete, within)
    store = run.store([Person, model])
    store.setup()
    database["people"].insert_one({"_id": 1, **ANN})
    if within == "array":
        database["referring"].insert_one({"_id": 1, "entries": [{"person_id": 1}, {"person_id": None}]})
    else:
        database["referring"].insert_one({"_id": 1, "person_id": 1})
    settled(store)
    database["people"].delete_one({"_id": 1})
    settled(store)
    found = [{k: v for k, v in each.items() if k != "_treadle"} for each in database["referring"].find()]
    assert AFTER_DELETION[on_delete, within] == found


@pytest.mark.parametrize("on_delete", ["clear", "restrict", "cascade"])
def test_more_copies_than_one_transaction_takes_follow_a_deletion(run, database, on_delete, constants):
    """Two transactions and a half."""
    models = [Person, on_delete_model(on_delete, "field")]
    constants(worker_gone_max=100)
    store = run.store(models)
    store.setup()
    database["people"].insert_one({"_id": 1, **ANN})
    database["referring"].insert_many([{"_id": number, "person_id": 1} for number in range(250)])
    settled(store)
    database["people"].delete_one({"_id": 1})
    settled(store)
    assert 0 == database["referring"].count_documents({"person": {"$ne": None}})
    assert {"clear": 0, "cascade": 0, "restrict": 250}[on_delete] == database["referring"].count_documents(
        {"person_id": 1}
    )


def test_a_rename_with_many_copies_reaches_them_all(run, database):
    """In chunks, each a transaction."""
    models = [Person, on_delete_model("keep", "field")]
    store = run.store(models, limits=Limits(fan_out_max=100, fan_out_chunk=100))
    store.setup()
    database["people"].insert_one({"_id": 1, **ANN})
    database["referring"].insert_many([{"_id": number, "person_id": 1} for number in range(450)])
    settled(store)
    database["people"].update_one({"_id": 1}, {"$set": {"name": "Eve"}})
    settled(store)
    assert 450 == database["referring"].count_documents({"person.name": "Eve"})


@pytest.mark.parametrize("counted", [True, False])
def test_an_archived_source_leaves_references_alone(database, counted):
    """Its move is a deletion to the stream, but neither clears references nor deletes what refers to it."""
    archive = Archive(by="at", after=timedelta(days=1), into="writers_archive", counted=counted)
    writer: Any = type(Document)(
        "Writer",
        (Document,),
        {"__annotations__": {"id": int, "name": str, "at": datetime}, "__module__": __name__},
        collection="writers",
        archive=archive,
    )
    name, owned = (
        ExtendedReference(writer, by="writer_id", field="name", on_delete=on_delete, maintain="stream")
        for on_delete in ("clear", "cascade")
    )
    types = {"id": int, "writer_id": int | None, "name": Annotated[str | None, name]}
    fields = {"__annotations__": types, "writer_id": None, "name": None, "__module__": __name__}
    note: Any = type(Document)("Note", (Document,), fields, collection="notes")
    types = {**types, "name": Annotated[str | None, owned]}
    page: Any = type(Document)("Page", (Document,), {**fields, "__annotations__": types}, collection="pages")
    store = Store(database, [writer, note, page])
    store.setup()
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    store.insert(writer(id=1, name="Ada", at=moment))
    store.insert(note(id=1, writer_id=1))
    store.insert(page(id=1, writer_id=1))
    worker = store.worker()
    worker.run_until_idle()
    store.archive(writer, now=moment + timedelta(days=2))
    worker.run_until_idle()
    shown = "Ada" if counted else None
    assert (1, shown) == (store.require(note, 1).writer_id, store.require(note, 1).name)
    assert shown == store.require(page, 1).name
    assert [] == store.verify()
    store.restore(writer, 1)
    worker.run_until_idle()
    assert "Ada" == store.require(note, 1).name == store.require(page, 1).name
