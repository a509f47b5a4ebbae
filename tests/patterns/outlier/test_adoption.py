"""Outlier arrays of old data and of other declarations: adopted, verified and repaired.

Covers: patterns/outlier/problems, patterns/outlier/repack
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from bson import ObjectId

from tests.members import Plain, Unique, UniqueRows, items, wrong
from tests.support import race
from treadle import DataError, Document, Outlier, Progress, Store, migration

# -- adoption, proof and repair ----------------------------------------------------------------------


def test_naive_arrays_are_adopted(run, model, database):
    """Arrays of any length, with no count and no flag, and with repetitions."""
    database[model.__treadle__.collection].insert_many(
        [{"_id": number, "members": [*range(number), *range(2)]} for number in range(12)]
        + [{"_id": 20}, {"_id": 21, "members": None}]
    )
    store = run.store([model])
    store.setup()
    # An array that is null is not of the declared shape either.
    assert {"outlier", "validation"} == {each.pattern for each in store.verify()}
    heard: list[Progress] = []
    store.rebuild(progress=heard.append)
    assert (14, 14) == (heard[-1].done, heard[-1].total)
    assert [] == store.verify()
    for number in range(12):
        assert [] == wrong(database, model, number)
        unique = model in (Unique, UniqueRows)
        expected = [*range(number), *[each for each in range(2) if not (unique and each < number)]]
        assert expected == items(database, model, number)
    assert 0 == store.repair()


def test_writers_go_on_while_old_data_is_adopted(database, model):
    """Those who use the handle, before or after the rebuild reached the document."""
    collection = database[model.__treadle__.collection]
    collection.insert_many([{"_id": number, "members": list(range(9))} for number in range(12)])
    store = Store(database, [model])
    store.setup()

    def append(number: int) -> None:
        for key in range(12):
            store.array(model, "members", key).append(100 + number)

    race(store.rebuild, *[lambda number=number: append(number) for number in range(4)])
    for key in range(12):
        found = items(database, model, key)
        assert list(range(9)) == found[:9]
        assert {100, 101, 102, 103} == set(found[9:])
        assert [] == wrong(database, model, key)
    assert [] == store.verify()


def test_plain_pushes_during_the_adoption_are_not_lost(database):
    """Services that know nothing of Treadle push to the array until the last moment."""
    collection = database["plain"]
    collection.insert_one({"_id": 1, "members": list(range(5000))})
    store = Store(database, [Plain])
    store.setup()
    stop = threading.Event()
    pushed: list[int] = []

    def push() -> None:
        number = 10_000
        while not stop.is_set():
            # Only as long as nobody has adopted the document.
            change = {"$push": {"members": number}}
            if collection.update_one({"_id": 1, "member_count": {"$exists": False}}, change).matched_count:
                pushed.append(number)
            number += 1

    def adopt() -> None:
        try:
            store.rebuild()
        finally:
            stop.set()

    race(push, adopt)
    assert [*range(5000), *pushed] == items(database, Plain, 1)
    assert [] == wrong(database, Plain, 1)


class Crowd(Document, collection="crowds"):
    names: Annotated[list[str], Outlier(limit=100, overflow="crowd_overflow", page_size=1000)] = []
    name_count: int = 0


@pytest.mark.heavy
def test_an_array_of_sixteen_megabytes_is_adopted(database):
    names = [f"{number:06} {'x' * 150}" for number in range(95_000)]
    owner = database["crowds"].insert_one({"names": names}).inserted_id
    store = Store(database, [Crowd])
    store.setup()
    assert store.array(Crowd, "names", owner).append("the last")
    array = store.array(Crowd, "names", owner)
    assert 95_001 == array.count()
    assert [*names[-2:], "the last"] == array.page(31_667, 3)
    assert [*names, "the last"] == list(array)
    assert 95 == database["crowd_overflow"].count_documents({})
    assert [] == store.verify()


def test_overflow_that_others_wrote_is_taken_over(run, database):
    """The literature's own documents: a flag and pages, without anything of Treadle's."""
    database["plain"].insert_one({"_id": 1, "members": [0, 1, 2, 3], "member_count": 9, "has_overflow": True})
    pages = [{"plain_id": 1, "page": 2, "members": [4, 5, 6]}, {"plain_id": 1, "page": 3, "members": [7, 8]}]
    database["plain_overflow"].insert_many(pages)
    store = run.store([Plain])
    store.setup()
    array = store.array(Plain, "members", 1)
    assert list(range(9)) == list(array)
    array.append(9)
    assert list(range(10)) == items(database, Plain, 1)
    assert [] == wrong(database, Plain, 1)
    assert [] == store.verify()


DAMAGES: dict[str, Callable[[Any], Any]] = {
    "count": lambda db: db["unique"].update_one({"_id": 1}, {"$inc": {"member_count": 3}}),
    "flag": lambda db: db["unique"].update_one({"_id": 1}, {"$set": {"has_overflow": False}}),
    "flag-without-overflow": lambda db: db["unique"].update_one({"_id": 2}, {"$set": {"has_overflow": True}}),
    "overshoot": lambda db: db["unique"].update_one({"_id": 1}, {"$push": {"members": {"$each": [90, 91]}}}),
    "embedded-twice": lambda db: db["unique"].update_one(
        {"_id": 2}, {"$push": {"members": 0}, "$inc": {"member_count": 1}}
    ),
    "in-both-parts": lambda db: db["unique_overflow"].update_one(
        {"page": 3}, {"$push": {"members": 0}, "$inc": {"count": 1}}
    ),
    "page-count": lambda db: db["unique_overflow"].update_one({"page": 2}, {"$set": {"count": 1}}),
    "page-lost": lambda db: db["unique_overflow"].delete_one({"page": 2}),
    "empty-page": lambda db: db["unique_overflow"].insert_one(
        {"unique_id": 1, "page": 9, "members": [], "count": 0}
    ),
    "unnumbered-page": lambda db: db["unique_overflow"].update_one(
        {"page": 3}, {"$set": {"page": "3"}}, bypass_document_validation=True
    ),
    "long-page": lambda db: db["unique_overflow"].insert_one(
        {"unique_id": 1, "page": 9, "members": list(range(50, 59)), "count": 9}
    ),
    "orphan": lambda db: db["unique_overflow"].insert_one(
        {"unique_id": 77, "page": 2, "members": [1], "count": 1}
    ),
    "state-lost": lambda db: db["unique"].update_one({"_id": 1}, {"$unset": {"_treadle": ""}}),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_verify_finds_each_damage_and_repair_mends_it(run, database, damage):
    store = run.store([Unique])
    store.setup()
    store.insert(Unique(id=1, members=range(10)))
    store.insert(Unique(id=2, members=range(3)))
    assert [] == store.verify()
    DAMAGES[damage](database)
    found = store.verify()
    assert "outlier" in {each.pattern for each in found}
    assert 1 == store.repair()
    assert [] == store.verify()
    for key in (1, 2, 77):
        assert [] == wrong(database, Unique, key)
    store.array(Unique, "members", 1).append(1000)
    assert 1000 == items(database, Unique, 1)[-1]


# -- changed declarations ----------------------------------------------------------------------------


def changed(**keywords: Any) -> Any:
    """The same collections under another declaration."""
    options = {"limit": 6, "overflow": "thing_overflow", "page_size": 3, **keywords}

    class Thing(Document, collection="things"):
        members: Annotated[list[int], Outlier(**options)] = []
        member_count: int = 0
        has_overflow: bool = False

    return Thing


@pytest.mark.parametrize("layout", ["page", "documents"])
@pytest.mark.parametrize("limit", [2, 10])
def test_another_limit_keeps_the_order(run, layout, limit):
    before, after = changed(layout=layout), changed(layout=layout, limit=limit)
    thing = run.store([before]).insert(before(members=range(20)))
    store = run.store([after])
    array = store.array(after, "members", thing.id)
    array.append(20)
    assert list(range(21)) == list(array)
    store.rebuild()
    assert (list(range(21)), 21, []) == (list(array), array.count(), store.verify())
    array.append(21)
    assert [*range(10), *range(11, 22)] == (array.remove(10), list(array))[1]
    assert [] == store.verify()


def test_a_smaller_page_size_is_taken_up_by_a_rebuild(run, database):
    before, after = changed(), changed(page_size=2)
    thing = run.store([before]).insert(before(members=range(12)))
    store = run.store([after])
    assert {"thing_overflow"} == {each.path for each in store.verify()}
    store.rebuild()
    assert [2, 2, 2] == [page["count"] for page in database["thing_overflow"].find().sort("page")]
    assert (list(range(12)), []) == (list(store.array(after, "members", thing.id)), store.verify())


@pytest.mark.parametrize(
    ("stored", "declared"),
    [
        ({}, {"layout": "documents"}),
        ({"layout": "documents"}, {}),
        ({}, {"owner": "who"}),
        ({"layout": "documents"}, {"layout": "documents", "owner": "who"}),
    ],
    ids=str,
)
def test_overflow_of_another_declaration_is_refused_and_never_deleted(run, database, stored, declared):
    before, after = changed(**stored), changed(**declared)
    store = run.store([before])
    store.setup()
    thing = store.insert(before(members=range(20)))
    overflow = list(database["thing_overflow"].find())
    other = run.store([after])
    with pytest.raises(DataError) as refused:
        other.setup()
    assert "overflow-layout" == refused.value.code
    assert "thing_overflow" in {each.path for each in other.verify()}
    if "owner" not in declared:
        with pytest.raises(DataError, match="layout"):
            list(other.array(after, "members", thing.id))
        for mend in (other.repair, other.rebuild):
            with pytest.raises(DataError, match="layout"):
                mend()
    else:
        other.repair()
        other.rebuild()
        assert "thing_overflow" in {each.path for each in other.verify()}
    assert overflow == list(database["thing_overflow"].find())
    store.rebuild()
    assert list(range(20)) == list(store.array(before, "members", thing.id))


@pytest.mark.parametrize(
    "old",
    [
        {"members": None, "member_count": 0},
        {"members": [1], "member_count": None},
        {"members": [1], "member_count": "1"},
        {"member_count": 0},
        {"members": [1, 2], "member_count": None, "has_overflow": None},
    ],
    ids=str,
)
def test_an_append_brings_old_documents_in_order(run, database, model, old):
    """Also where the array or the count is there and is something else."""
    store = run.store([model])
    database[model.__treadle__.collection].insert_one({"_id": 1, **old})
    array = store.array(model, "members", 1)
    assert array.append(7)
    assert [*(old.get("members") or []), 7] == list(array) == items(database, model, 1)
    assert ([], []) == (wrong(database, model, 1), store.verify())


class Member(Document, collection="members", version=2):
    members: Annotated[list[int], Outlier(limit=3, overflow="member_overflow", page_size=2)] = []
    member_count: int = 0
    has_overflow: bool = False


migration(
    Member,
    from_version=1,
    up=[{"$set": {"members": "$names"}}, {"$unset": "names"}],
    down=[{"$set": {"names": "$members"}}, {"$unset": "members"}],
)


@pytest.mark.parametrize("length", [0, 2, 5])
def test_an_array_of_an_older_version_is_brought_up_first(run, database, length):
    """A migration that renames the array would put the old one in the place of what was appended."""
    store = run.store([Member])
    database["members"].insert_many([{"_id": ObjectId(), "names": list(range(length))} for _ in range(2)])
    for one in database["members"].find():
        array = store.array(Member, "members", one["_id"])
        if array.append(7) and one["_id"].binary[-1] % 2:
            assert 1 == array.remove(7)
            assert array.append(7)
        assert array.append(8)
        store.migrate(Member)
        assert [*range(length), 7, 8] == list(array)
    store.rebuild()
    assert [] == store.verify()


def test_an_outdated_document_is_read_and_verified_in_the_current_version(run, database):
    store = run.store([Member])
    key = ObjectId()
    database["members"].insert_one({"_id": key, "names": [*range(60)]})
    array = store.array(Member, "members", key)
    assert (60, True, [*range(60)]) == (array.count(), array.contains(59), list(array))
    assert {"outlier"} == {each.pattern for each in store.verify()}
    assert (1, []) == (store.repair(), store.verify())
    assert [*range(60)] == list(array)
