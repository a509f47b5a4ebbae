"""Documents that belong together, kept from both ends.

Covers: engine/expected_rule
"""

from __future__ import annotations

import datetime as dt
import os
import random
import threading
from typing import Annotated, Any

import pytest

from tests.kit.fault_sweep import Write
from tests.support import race
from treadle import (
    Count,
    DataError,
    Document,
    History,
    Insert,
    Links,
    Store,
    Update,
    UpdateMany,
    UsageError,
    migration,
)

# Few by default; TREADLE_STEPS=all plays as many as a release should have seen.
STEPS = 5_000 if os.environ.get("TREADLE_STEPS") == "all" else 300


class Node(Document, collection="school", discriminator="kind", links=Links("links")):
    id: str
    links: list[str] = []


class Course(Node, kind="course"):
    title: str = ""
    students: Annotated[int, Count("Student", by="links")] = 0


class Student(Node, kind="student"):
    name: str = ""


class Logged(Document, collection="logged", links=Links("links"), history=History()):
    id: str
    links: list[str] = []


MODELS = [Node, Course, Student]


def ends(database: Any, collection: str = "school") -> dict[str, set[str]]:
    return {each["_id"]: set(each["links"]) for each in database[collection].find()}


def lopsided(database: Any, collection: str = "school") -> list[tuple[str, str]]:
    """Links that are there from one end only, in plain Python."""
    stored = ends(database, collection)
    return [
        (one, other) for one, links in stored.items() for other in links if one not in stored.get(other, ())
    ]


class Kept(Document, collection="kept", links=Links("links"), soft_delete="deleted_at", history=History()):
    id: str
    links: list[str] = []
    deleted_at: dt.datetime | None = None


@pytest.fixture
def store(run):
    store = run.store(MODELS)
    store.setup()
    store.insert_many([Course(id="math"), Course(id="art")])
    return store


@pytest.mark.quick
def test_a_link_is_kept_from_both_ends(store, database):
    store.insert(Student(id="ada", links=["math", "art"]))
    store.insert(Student(id="ben", links=["math"]))
    assert {"math": {"ada", "ben"}, "art": {"ada"}, "ada": {"math", "art"}, "ben": {"math"}} == ends(database)
    store.update(Student, "ada", {"$pull": {"links": "art"}})
    store.update(Course, "art", {"$push": {"links": "ben"}})
    assert {"math": {"ada", "ben"}, "art": {"ben"}, "ada": {"math"}, "ben": {"math", "art"}} == ends(database)
    store.replace(Student(id="ben", links=["art"]))
    assert {"math": {"ada"}, "art": {"ben"}, "ada": {"math"}, "ben": {"art"}} == ends(database)
    assert [] == lopsided(database)
    assert [] == store.verify()
    # What is counted by links follows the other end too.
    assert (1, 1) == (store.get(Course, "math").students, store.get(Course, "art").students)


def test_a_link_is_stored_once_however_often_it_is_named(store, database):
    assert ["math"] == store.insert(Student(id="ada", links=["math", "math"])).links
    store.insert(Student(id="ben"))
    after = store.update(Student, "ada", {"$push": {"links": {"$each": ["ben", "math", "ben"]}}})
    assert ["math", "ben"] == after.links
    store.replace(Student(id="ada", links=["ben", "ben"]))
    assert ["ben"] == store.get(Student, "ada").links
    assert [] == store.get(Course, "math").links
    assert ["ada"] == store.get(Student, "ben").links
    database["school"].update_one({"_id": "ada"}, {"$push": {"links": "ben"}})
    (finding,) = store.verify(Node)
    assert (["ben", "ben"], ["ben"]) == (finding.stored, finding.expected)
    store.repair(Node)
    assert [] == store.verify(Node)


def test_links_vanish_with_their_document(store, database):
    store.insert_many([Student(id="ada", links=["math", "art"]), Student(id="ben", links=["math", "ada"])])
    store.delete(Student, "ada")
    assert {"math": {"ben"}, "art": set(), "ben": {"math"}} == ends(database)
    store.delete_many(Course, {})
    assert {"ben": set()} == ends(database)
    assert [] == store.verify()


def test_related_gives_each_as_its_own_class_in_one_query(store, heard, database):
    store.insert_many([Student(id="ada", links=["math"]), Student(id="ben", links=["math", "art"])])
    found = list(store.related(Course, "math"))
    assert {"math": Course, "ada": Student, "ben": Student} == {each.id: type(each) for each in found}
    assert ["ada"] == [each.id for each in store.related(Course, "math", {"name": ""}, sort="_id", limit=1)]
    assert [] == list(store.related(Course, "none"))
    other, listener = heard
    seen = Store(other, MODELS)
    listener.clear()
    assert 3 == len(list(seen.related(Node, "math")))
    # Also where they are more than a server sends at first.
    store.insert_many([Student(id=f"s{number}", links=["art"]) for number in range(150)])
    assert 152 == len(list(seen.related(Node, "art")))
    assert ["find", "find"] == [name for name in listener.names if name in ("find", "aggregate", "getMore")]
    sent, _ = [command["filter"] for name, command in listener.commands if name == "find"]
    assert "COLLSCAN" not in str(database["school"].find(sent).explain()["queryPlanner"]["winningPlan"])


def test_documents_that_come_together_may_name_each_other(store, database):
    store.insert_many([Student(id="a", links=["b"]), Student(id="b", links=["a", "c"]), Student(id="c")])
    assert {"a": {"b"}, "b": {"a", "c"}, "c": {"b"}} == {
        key: links for key, links in ends(database).items() if key in "abc"
    }
    assert [] == store.verify()


def test_the_operations_of_a_bulk_see_both_ends(store, database):
    store.bulk(
        [
            Insert(Student(id="ada", links=["math", "ben"])),
            Insert(Student(id="ben")),
            Update(Course, "math", {"$pull": {"links": "ada"}}),
            UpdateMany(Student, {"links": "ada"}, {"$set": {"name": "Ben"}}),
            Update(Student, "ada", {"$push": {"links": "art"}}),
        ]
    )
    assert {"math": set(), "art": {"ada"}, "ada": {"ben", "art"}, "ben": {"ada"}} == ends(database)
    assert "Ben" == store.get(Student, "ben").name
    assert [] == store.verify()


def test_a_link_to_nothing_is_refused(store, database):
    for write in (
        lambda: store.insert(Student(id="ada", links=["none"])),
        lambda: store.update(Course, "math", {"$push": {"links": "none"}}),
        lambda: store.update_many(Course, {}, {"$set": {"links": ["none"]}}),
    ):
        with pytest.raises(UsageError) as raised:
            write()
        assert "link-dangling" == raised.value.code
    assert {"math": set(), "art": set()} == ends(database)


def test_the_other_end_s_change_is_a_state_as_well(run, database):
    store = run.store([Logged])
    store.setup()
    store.insert(Logged(id="a"))
    store.insert(Logged(id="b", links=["a"]))
    store.delete(Logged, "b")
    assert [[], ["b"], []] == [state.document.links for state in store.history(Logged, "a")]
    assert [] == store.verify()


def test_what_others_broke_is_found_and_mended(store, database):
    store.insert_many([Student(id="ada", links=["math"]), Student(id="ben", links=["math"])])
    raw = database["school"]
    raw.update_one({"_id": "math"}, {"$pull": {"links": "ada"}})
    raw.update_one({"_id": "ben"}, {"$push": {"links": "none"}})
    raw.update_one({"_id": "art"}, {"$push": {"links": "ben"}})
    found = {(each.document_id, each.model) for each in store.verify() if each.pattern == "links"}
    assert {("math", "Course"), ("ben", "Student")} == found
    store.repair()
    assert [] == store.verify()
    assert [] == lopsided(database)
    assert {"math": {"ada", "ben"}, "art": {"ben"}, "ada": {"math"}, "ben": {"math", "art"}} == ends(database)


def test_a_restored_document_drops_its_links_to_what_is_gone(run, database):
    store = run.store([Kept])
    store.setup()
    store.insert_many([Kept(id="a", links=["b", "c"]), Kept(id="b"), Kept(id="c")])
    store.delete(Kept, "a")
    store.delete(Kept, "b")
    store.restore(Kept, "a")
    assert {"a": {"c"}, "b": set(), "c": {"a"}} == ends(database, "kept")
    store.restore(Kept, "b")
    assert [] == lopsided(database, "kept")
    assert [["b", "c"], ["c"]] == [each.links for each in store.history(Kept, "a")][::-1]
    with pytest.raises(UsageError) as raised:
        store.update(Kept, "a", {"$push": {"links": "none"}})
    assert "link-dangling" == raised.value.code
    assert [] == store.verify()


def test_what_a_repair_changes_is_followed_and_recorded(store, run, database):
    """Counts by links are right, whether or not they had followed the write that broke a link."""
    store.insert_many([Student(id="ada", links=["math"]), Student(id="ben", links=["math"])])
    database["school"].update_one({"_id": "ada"}, {"$set": {"links": []}})
    database["school"].update_one({"_id": "math"}, {"$pull": {"links": "ben"}})
    assert 2 == store.repair(Node)
    assert 2 == store.get(Course, "math").students
    assert [] == store.verify()
    kept = run.store([Kept])
    kept.setup()
    kept.insert_many([Kept(id="a"), Kept(id="b", links=["a"])])
    database["kept"].update_one({"_id": "a"}, {"$set": {"links": []}})
    kept.repair()
    assert ["b"] == next(iter(kept.history(Kept, "a"))).links
    assert [] == kept.verify()


def test_a_document_whose_list_another_writer_spoilt_can_be_linked(store, database):
    database.command({"collMod": "school", "validationLevel": "off"})
    database["school"].update_one({"_id": "art"}, {"$set": {"links": None}})
    store.insert(Student(id="ada", links=["math", "art"]))
    assert {"math": {"ada"}, "art": {"ada"}, "ada": {"math", "art"}} == ends(database)
    assert [] == store.verify()


def test_racing_writers_leave_no_link_from_one_end_only(database):
    stores = [Store(database, MODELS) for _ in range(4)]
    stores[0].setup()
    stores[0].insert_many([Course(id=f"c{number}") for number in range(3)])
    stop = threading.Event()

    def write(number: int) -> None:
        store, chance = stores[number], random.Random(number)
        for _ in range(12):
            key, course = f"s{chance.randrange(4)}", f"c{chance.randrange(3)}"
            try:
                what = chance.randrange(4)
                if what == 0:
                    store.insert(Student(id=key, links=[course]))
                elif what == 1:
                    store.update(Student, key, {"$addToSet": {"links": course}})
                elif what == 2:
                    store.update(Course, course, {"$pull": {"links": key}})
                else:
                    store.delete(Student, key)
            except (UsageError, DataError):
                continue
        stop.set()

    race(*[lambda number=number: write(number) for number in range(4)])
    assert [] == lopsided(database)
    assert [] == stores[0].verify()


def test_a_model_without_links_says_so(run):
    class Plain(Document, collection="plain"):
        name: str = ""

    store = run.store([Plain])
    with pytest.raises(UsageError) as raised:
        list(store.related(Plain, "x"))
    assert "links-undeclared" == raised.value.code


WRITES = {
    "insert": lambda store: store.insert(Student(id="new", links=["math", "art"])),
    "update": lambda store: store.update(Student, "ada", {"$set": {"links": ["art", "ben"]}}),
    "replace": lambda store: store.replace(Course(id="math", links=["ben"])),
    "delete": lambda store: store.delete(Course, "math"),
}


@pytest.mark.heavy
@pytest.mark.server
@pytest.mark.parametrize("write", WRITES)
def test_both_ends_are_written_or_neither(write, fault_sweep, record_points):
    stores = fault_sweep.stores("links", MODELS)
    store, database = stores.sound, stores.database

    def reset() -> None:
        database["school"].delete_many({})
        store.insert_many([Course(id="math"), Course(id="art")])
        store.insert_many([Student(id="ada", links=["math"]), Student(id="ben", links=["math", "art"])])

    def check(acknowledged: bool) -> None:
        assert [] == lopsided(database)
        assert [] == store.verify()

    swept = Write(write, WRITES[write], reset, check, read=lambda: ends(database))
    record_points(fault_sweep.strike(stores, swept))


@pytest.mark.heavy
def test_random_histories(database):
    """Against a set of pairs."""
    store, chance = Store(database, MODELS), random.Random(2)
    store.setup()
    living: set[str] = set()
    pairs: set[frozenset[str]] = set()
    keys = [f"k{number}" for number in range(7)]

    def of(key: str) -> set[str]:
        return {other for pair in pairs if key in pair for other in pair - {key}}

    for number in range(STEPS):
        key = chance.choice(keys)
        links = chance.sample(sorted(living - {key}), min(len(living - {key}), chance.randrange(4)))
        what = chance.choice(["put", "put", "set", "pull", "push", "delete", "related"])
        if what == "put" and key not in living:
            store.insert((Course if chance.random() < 0.5 else Student)(id=key, links=links))
            living.add(key)
            pairs |= {frozenset({key, other}) for other in links}
        elif key not in living:
            continue
        elif what in ("set", "put"):
            store.update(Node, key, {"$set": {"links": links}})
            pairs = {pair for pair in pairs if key not in pair} | {frozenset({key, other}) for other in links}
        elif what == "pull" and links:
            store.update(Node, key, {"$pull": {"links": {"$in": links}}})
            pairs -= {frozenset({key, other}) for other in links}
        elif what == "push" and links:
            store.update_many(Node, {"_id": {"$in": [key]}}, {"$addToSet": {"links": {"$each": links}}})
            pairs |= {frozenset({key, other}) for other in links}
        elif what == "delete":
            store.delete(Node, key)
            living.discard(key)
            pairs = {pair for pair in pairs if key not in pair}
        assert {each: of(each) for each in living} == ends(database)
        if key in living:
            assert {key, *of(key)} == {each.id for each in store.related(Node, key)}
        if number % 60 == 59:
            assert [] == store.verify()


class Note(Document, collection="notes", links=Links("links"), version=2):
    id: int
    links: list[int] = []


@migration(Note, from_version=1, fields=("links", "old"))
def rename_links(document: dict[str, Any]) -> dict[str, Any]:
    document["links"] = document.pop("old", [])
    return document


def test_the_other_end_of_a_link_may_be_outdated(run, database):
    store = run.store([Note])
    store.setup()
    database.notes.insert_many([{"_id": 1, "old": [2]}, {"_id": 2, "old": [1]}, {"_id": 3, "old": [1]}])
    (finding,) = store.verify()
    assert (1, [2], [2, 3]) == (finding.document_id, finding.stored, finding.expected)
    assert 1 == store.repair()
    assert [2, 3] == database.notes.find_one(1)["links"]
    store.insert(Note(id=4, links=[3]))
    store.delete(Note, 2)
    stored = {each["_id"]: each["links"] for each in database.notes.find()}
    assert {1: [3], 3: [1, 4], 4: [3]} == stored
    assert [] == store.verify()
