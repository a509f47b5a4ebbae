"""Outlier: embedded up to the limit, the rest in a collection of its own, and never a wrong count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tests.members import (
    LIMIT,
    MODELS,
    Plain,
    Rows,
    Unique,
    UniqueRows,
    items,
    overflow_of,
    stored,
    wrong,
)
from tests.support import Colour, race
from treadle import (
    AsyncStore,
    DataError,
    DeclarationError,
    Document,
    Formula,
    Id,
    Outlier,
    Progress,
    Store,
    Sum,
    UsageError,
    migration,
)

THREADS = 16


class User(Document, collection="users"):
    name: str
    followers: Annotated[list[Id], Outlier(limit=3, overflow="follower_overflow", page_size=2)] = []
    follower_count: int = 0
    has_overflow: bool = False


@pytest.fixture(params=MODELS, ids=lambda model: model.__name__)
def model(request):
    return request.param


# -- stored shapes ------------------------------------------------------------------------------


def test_what_is_stored_is_what_the_literature_draws(run, database):
    store = run.store([User])
    ann = store.insert(User(name="Ann"))
    ids = [ObjectId() for _ in range(6)]
    array = store.array(User, "followers", ann.id)
    for each in ids:
        assert array.append(each) is True
    raw = database["users"].find_one()
    raw.pop("_treadle")
    assert {
        "_id": ann.id,
        "name": "Ann",
        "followers": ids[:3],
        "follower_count": 6,
        "has_overflow": True,
    } == raw
    pages = list(database["follower_overflow"].find({}, {"_id": 0}).sort("page"))
    assert [
        {"user_id": ann.id, "page": 2, "followers": ids[3:5], "count": 2},
        {"user_id": ann.id, "page": 3, "followers": ids[5:], "count": 1},
    ] == pages
    assert ids[:3] == store.get(User, ann.id).followers
    assert ids == list(array)


def test_documents_layout_is_one_document_per_item(run, database):
    store = run.store([Rows])
    store.insert(Rows(id=1, members=[10, 11, 12, 13, 14]))
    store.array(Rows, "members", 1).append(15)
    rows = list(database["rows_overflow"].find({}, {"_id": 0}).sort("position"))
    assert [{"rows_id": 1, "position": 1, "item": 14}, {"rows_id": 1, "position": 2, "item": 15}] == rows


class Inner(BaseModel):
    fan_ids: Annotated[
        list[str],
        Outlier(limit=2, overflow="fans", page_size=2, flag="favorites_outlier", count="stats.total"),
    ] = []
    favorites_outlier: bool = False


class Stats(BaseModel):
    total: int = 0


class BookShelf(Document, collection="shelves", naming="camel"):
    social: Inner = Inner()
    stats: Stats = Stats()
    best_books: Annotated[
        list[str],
        Outlier(limit=1, overflow="best", layout="documents", item="the_book", flag="has_more_books"),
    ] = []
    has_more_books: bool = False


def test_nested_camel_and_own_names(run, database):
    """Stored names follow the model's naming; counts without a field live in the reserved sub-document."""
    store = run.store([BookShelf])
    store.setup()
    shelf = store.insert(BookShelf(best_books=["a", "b"]))
    fans = store.array(BookShelf, "social.fan_ids", shelf.id)
    assert 3 == fans.extend(["x", "y", "z"])
    raw = database["shelves"].find_one()
    assert {"fan_ids": ["x", "y"], "favorites_outlier": True} == raw["social"]
    assert {"total": 3} == raw["stats"]
    assert (["a"], True) == (raw["bestBooks"], raw["hasMoreBooks"])
    assert 2 == raw["_treadle"]["outlier"]["bestBooks"]["count"]
    assert {"bookShelfId", "page", "fan_ids", "count", "_id"} == set(database["fans"].find_one())
    assert {"bookShelfId", "position", "theBook", "_id"} == set(database["best"].find_one())
    assert ["x", "y", "z"] == list(fans)
    assert ["a", "b"] == list(store.array(BookShelf, "best_books", shelf.id))
    assert 2 == store.array(BookShelf, "best_books", shelf.id).count()
    assert [] == store.verify()


class Like(BaseModel):
    who: str
    worth: Decimal
    colour: Colour | None = None


class Post(Document, collection="posts"):
    likes: Annotated[list[Like], Outlier(limit=2, overflow="like_overflow", page_size=2, unique=True)] = []
    numbers: Annotated[
        list[Decimal | None],
        Outlier(limit=2, overflow="number_overflow", page_size=2, unique=True, flag="more"),
    ] = []
    more: bool = False


def test_items_may_be_models_and_odd_values(run):
    """Sub-documents, Decimals, enums and None, in both parts; equal as the server compares."""
    store = run.store([Post])
    store.setup()
    post = store.insert(Post())
    likes = store.array(Post, "likes", post.id)
    given = [Like(who=f"w{n}", worth=Decimal(n), colour=Colour.RED if n % 2 else None) for n in range(5)]
    assert 5 == likes.extend(given)
    assert given == list(likes)
    assert not likes.append(given[1])
    assert not likes.append(given[4].model_dump())
    assert likes.contains(given[4])
    assert not likes.contains(Like(who="w4", worth=Decimal(5)))
    assert 1 == likes.remove(given[3])
    numbers = store.array(Post, "numbers", post.id)
    assert 4 == numbers.extend([None, Decimal("1.10"), Decimal(2), Decimal(3)])
    assert not numbers.append(None)
    assert not numbers.append(Decimal("1.1"))
    assert not numbers.append(Decimal("3.0"))
    assert numbers.contains(None)
    assert 1 == numbers.remove(None)
    assert not numbers.contains(None)
    assert [Decimal("1.10"), Decimal(2), Decimal(3)] == list(numbers)
    assert [] == store.verify()


def test_a_bad_item_changes_nothing(run, model, database):
    store = run.store([model])
    store.insert(model(id=1, members=range(6)))
    array = store.array(model, "members", 1)
    for bad in ({"$ne": 1}, "x", None, [1]):
        with pytest.raises(UsageError, match="no item of"):
            array.extend([7, bad])
        with pytest.raises(UsageError, match="no item of"):
            array.remove(bad)
    assert list(range(6)) == items(database, model, 1)


# -- cost -------------------------------------------------------------------------------------


def test_an_ordinary_document_costs_one_update_per_append(heard):
    database, listener = heard
    store = Store(database, [Plain, Unique])
    store.setup()
    for model in (Plain, Unique):
        store.insert(model(id=1))
        array = store.array(model, "members", 1)
        listener.clear()
        for number in range(LIMIT):
            array.append(number)
        assert ["update"] * LIMIT == listener.names
        assert not any("startTransaction" in command for _, command in listener.commands)
        listener.clear()
        array.remove(2)
        assert ["findAndModify"] == listener.names
    # Several at once need a look at what is there; the next single one does not.
    several = store.array(Unique, "members", 1)
    several.extend([1, 2])
    listener.clear()
    several.append(2)
    several.remove(1)
    assert "findAndModify" == listener.names[-1]
    listener.clear()
    several.append(50)
    assert ["update"] == listener.names
    listener.clear()
    store.insert(Plain(id=2, members=[1]))
    store.update(Plain, 2, {"$set": {"other": 1}})
    assert ["insert", "findAndModify"] == listener.names


def test_an_append_to_overflow_costs_two_writes_and_a_commit(heard):
    database, listener = heard
    store = Store(database, [Plain])
    store.setup()
    store.insert(Plain(id=1, members=range(LIMIT + 1)))
    array = store.array(Plain, "members", 1)
    array.append(100)
    listener.clear()
    array.append(101)
    assert ["update", "update", "commitTransaction"] == listener.names


# -- the invariant ------------------------------------------------------------------------------


def test_every_length_is_right_on_the_way_up_and_down(run, model, database):
    """Counts, flags, order and pages of every size, for each number of items."""
    store = run.store([model])
    store.setup()
    store.insert(model(id=1))
    array = store.array(model, "members", 1)
    expected: list[int] = []
    for number in [*range(12), *[-each for each in (3, 0, 4, 1, 7, 2, 10, 5, 8, 6, 11, 9)]]:
        if number > 0 or not expected:
            assert array.append(number)
            expected.append(number)
        else:
            assert 1 == array.remove(-number)
            expected.remove(-number)
        assert [] == wrong(database, model, 1)
        assert expected == items(database, model, 1) == list(array)
        assert len(expected) == array.count()
        pages = [array.page(page, 2) for page in range(1, 8)]
        assert expected == [item for page in pages for item in page]
    assert 0 == database[overflow_of(model)].count_documents({})
    assert [] == store.verify()


def test_items_come_back_well_below_the_limit_and_not_before(run, model, database):
    """Hysteresis: one removal below the limit moves nothing; at half of it the embedded part is refilled."""
    store = run.store([model])
    store.insert(model(id=1, members=range(LIMIT + 2)))
    array = store.array(model, "members", 1)
    for number in range(2):
        array.remove(number)
        owner, pages = stored(database, model, 1)
        assert (LIMIT - 1 - number, True) == (len(owner["members"]), owner["has_overflow"])
        assert pages
    array.remove(2)
    owner, pages = stored(database, model, 1)
    assert ([3, 4, 5], False, []) == (owner["members"], owner["has_overflow"], pages)
    assert array.append(6)
    assert [3, 4, 5, 6] == stored(database, model, 1)[0]["members"]


def test_new_items_go_to_the_end_although_the_embedded_part_has_room(run, model, database):
    store = run.store([model])
    store.insert(model(id=1, members=range(LIMIT + 3)))
    array = store.array(model, "members", 1)
    array.remove(0)
    array.append(100)
    assert [1, 2, 3, 4, 5, 6, 100] == items(database, model, 1)


def test_repetitions_are_kept_unless_unique(run, database):
    store = run.store([Plain, Unique])
    store.insert(Plain(id=1))
    given = [1, 2, 1, 3, 1, 4, 1, 5, 1]
    assert 9 == store.array(Plain, "members", 1).extend(given)
    assert given == items(database, Plain, 1)
    assert 5 == store.array(Plain, "members", 1).remove(1)
    assert 0 == store.array(Plain, "members", 1).remove(1)
    assert [2, 3, 4, 5] == items(database, Plain, 1)
    store.insert(Unique(id=1))
    array = store.array(Unique, "members", 1)
    assert 5 == array.extend(given)
    assert 1 == array.extend([5, 1, 9, 9])
    assert not array.append(9)
    assert [1, 2, 3, 4, 5, 9] == items(database, Unique, 1)
    assert 8 == array.ignored


def test_an_insert_with_a_long_list_is_split(run, model, database):
    store = run.store([model])
    shown = store.insert(model(id=1, members=range(10), member_count=77, has_overflow=False))
    assert ([0, 1, 2, 3], 10, True) == (shown.members, shown.member_count, shown.has_overflow)
    store.insert_many([model(id=number, members=range(number)) for number in range(2, 9)])
    for number in range(2, 9):
        assert [] == wrong(database, model, number)
        assert list(range(number)) == items(database, model, number)


def test_an_insert_under_a_taken_id_leaves_no_overflow(run, model, database):
    from pymongo.errors import DuplicateKeyError

    store = run.store([model])
    store.insert(model(id=1, members=range(6)))
    with pytest.raises(DuplicateKeyError):
        store.insert(model(id=1, members=range(100, 120)))
    assert list(range(6)) == items(database, model, 1)


def test_a_unique_array_is_made_so_on_insert(run, database):
    store = run.store([Unique, UniqueRows])
    for model in (Unique, UniqueRows):
        store.insert(model(id=1, members=[1, 2, 1, 3, 4, 5, 5, 6, 2]))
        assert [1, 2, 3, 4, 5, 6] == items(database, model, 1)
        assert [] == wrong(database, model, 1)


def test_replace_keeps_the_stored_array(run, model, database):
    """The array belongs to its handle; a model that was read before an append does not undo it."""
    store = run.store([model])
    for number in (2, 9):
        stale = store.insert(model(id=number, members=range(number)))
        store.array(model, "members", number).append(100)
        stale.members = []
        stale.member_count = 0
        shown = store.replace(stale)
        assert [*range(number), 100][:LIMIT] == shown.members
        assert [*range(number), 100] == items(database, model, number)
        assert [] == wrong(database, model, number)


def test_replace_of_an_old_document_does_not_smuggle_an_array_in(run, database):
    database["plain"].insert_one({"_id": 1})
    store = run.store([Plain])
    assert [] == store.replace(Plain(id=1, members=[1, 2], member_count=5)).members
    assert [] == wrong(database, Plain, 1)


@pytest.mark.parametrize(
    "update",
    [
        {"$push": {"members": 9}},
        {"$set": {"members": []}},
        {"$set": {"members.0": 9}},
        {"$unset": {"members": ""}},
        {"$inc": {"member_count": 1}},
        {"$set": {"has_overflow": False}},
        {"$rename": {"other": "members"}},
        [{"$set": {"members": []}}],
        [{"$replaceWith": {"_id": 1}}],
    ],
)
def test_plain_updates_of_the_array_are_refused_with_what_to_call(run, database, update):
    store = run.store([Plain])
    store.insert(Plain(id=1, members=range(6)))
    for call in (store.update, store.update_many):
        with pytest.raises(UsageError) as refused:
            call(Plain, {"_id": 1}, update)
        assert "field-maintained" == refused.value.code
    if isinstance(update, dict):
        assert "call store.array(Plain, 'members', id) instead" in str(refused.value)
    assert list(range(6)) == items(database, Plain, 1)


def test_the_overflow_goes_with_its_owner(run, model, database):
    store = run.store([model])
    store.insert_many([model(id=number, members=range(9)) for number in range(5)])
    assert 0 == store.delete(model, 0).id
    assert 2 == store.delete_many(model, {"_id": {"$in": [1, 2]}})
    assert {3, 4} == set(database[overflow_of(model)].distinct(f"{overflow_of(model)[:-9]}_id"))
    with pytest.raises(DataError) as gone:
        store.array(model, "members", 0).append(1)
    assert "array-owner-missing" == gone.value.code


def test_everything_takes_the_callers_transaction(run, model, database):
    store = run.store([model])
    store.setup()
    store.insert(model(id=1, members=range(6)))
    array = store.array(model, "members", 1)
    with pytest.raises(ZeroDivisionError), store.transaction() as session:
        array.append(6, session=session)
        array.extend([7, 8, 9], session=session)
        array.remove(0, session=session)
        assert (9, True) == (array.count(session=session), array.contains(9, session=session))
        assert [1, 2, 3] == array.page(1, 3, session=session)
        _ = 1 / 0
    assert list(range(6)) == items(database, model, 1)
    with store.transaction() as session:
        array.extend([6, 7, 8, 9], session=session)
        store.insert(model(id=2, members=range(9)), session=session)
        store.delete(model, 2, session=session)
    assert list(range(10)) == items(database, model, 1)
    assert [] == wrong(database, model, 1)
    assert [] == store.verify()


def test_pages_are_checked_and_count_from_one(run):
    store = run.store([Plain])
    store.insert(Plain(id=1, members=range(9)))
    array = store.array(Plain, "members", 1)
    assert [3, 4, 5] == array.page(2, 3)
    assert [] == array.page(4, 3)
    for number, size in ((0, 1), (1, 0), (-1, 5), (True, 1), (1, 10**9), ("1", 2)):
        with pytest.raises(UsageError) as refused:
            array.page(number, size)
        assert "page-invalid" == refused.value.code


def test_an_unknown_array_is_named(run):
    store = run.store([Plain])
    with pytest.raises(UsageError, match="it has 'members'") as refused:
        store.array(Plain, "member", 1)
    assert "array-unknown" == refused.value.code
    with pytest.raises(UsageError):
        store.array(Plain, "members", {"$ne": 1})


# -- what others are fed by ---------------------------------------------------------------------


class Club(Document, collection="clubs"):
    member_total: Annotated[int, Sum("Team", "member_count", by="club_id")] = 0


class Team(Document, collection="teams"):
    club_id: Id
    members: Annotated[list[int], Outlier(limit=2, overflow="team_overflow", page_size=2)] = []
    member_count: int = 0
    has_overflow: bool = False
    twice: Annotated[int | None, Formula({"$multiply": ["$member_count", 2]})] = None


def test_counts_feed_formulas_and_other_documents(run):
    store = run.store([Club, Team])
    store.setup()
    club = store.insert(Club())
    team = store.insert(Team(club_id=club.id, members=range(5)))
    array = store.array(Team, "members", team.id)
    for number in range(5, 9):
        array.append(number)
    array.remove(0)
    assert (8, 16) == (store.get(Club, club.id).member_total, store.get(Team, team.id).twice)
    assert [] == store.verify()
    store.delete(Team, team.id)
    assert 0 == store.get(Club, club.id).member_total


# -- races ---------------------------------------------------------------------------------------


def test_sixteen_threads_on_one_array(database, model):
    """Check-then-push would overshoot the limit, and store more members than there are."""
    store = Store(database, [model])
    store.setup()
    store.insert(model(id=1))
    other = Store(database, [model])

    def write(number: int) -> None:
        array = (store if number % 2 else other).array(model, "members", 1)
        for turn in range(6):
            assert array.append(number * 100 + turn)
        array.extend([number * 100 + 50, number * 100 + 51])
        assert 1 == array.remove(number * 100 + 3)

    race(*[lambda number=number: write(number) for number in range(THREADS)])
    wanted = {number * 100 + turn for number in range(THREADS) for turn in (0, 1, 2, 4, 5, 50, 51)}
    found = items(database, model, 1)
    assert len(wanted) == len(found)
    assert wanted == set(found)
    assert [] == wrong(database, model, 1)
    for number in range(THREADS):
        own = [each for each in found if each // 100 == number]
        assert sorted(own) == own


@pytest.mark.parametrize("model", [Unique, UniqueRows])
def test_sixteen_threads_with_the_same_items_store_each_once(database, model):
    store = Store(database, [model])
    store.setup()
    store.insert(model(id=1))
    added: list[int] = []

    def write(number: int) -> None:
        array = store.array(model, "members", 1)
        for item in range(12):
            if array.append((item + number) % 12):
                added.append((item + number) % 12)

    race(*[lambda number=number: write(number) for number in range(THREADS)])
    assert list(range(12)) == sorted(items(database, model, 1)) == sorted(added)
    assert [] == wrong(database, model, 1)


def test_iteration_sees_one_moment_while_others_write(database, model):
    """Also while items come back from the overflow, which a reader without a snapshot would pass over."""
    store = Store(database, [model])
    store.setup()
    store.insert(model(id=1, members=range(60)))
    array = store.array(model, "members", 1)
    reading = iter(array)
    seen = [next(reading) for _ in range(LIMIT)]
    for number in range(40):
        array.remove(number)
    array.extend(range(100, 110))
    assert list(range(60)) == [*seen, *reading]
    assert [*range(40, 60), *range(100, 110)] == list(array)


def test_a_reader_never_sees_an_item_twice_or_too_few(database, model):
    store = Store(database, [model])
    store.setup()
    store.insert(model(id=1, members=range(20)))
    stop = threading.Event()
    bad: list[Any] = []

    def read() -> None:
        array = Store(database, [model]).array(model, "members", 1)
        while not stop.is_set():
            found = list(array)
            # One item at a time is taken from the beginning and put to the end.
            if len(found) not in (19, 20) or len(set(found)) < len(found) or found != sorted(found):
                bad.append(found)
            if len([each for number in range(1, 8) for each in array.page(number, 3)]) < 15:
                bad.append("page")

    def write() -> None:
        try:
            array = store.array(model, "members", 1)
            for number in range(25):
                array.remove(number)
                array.append(20 + number)
        finally:
            stop.set()

    race(read, read, write)
    assert [] == bad


def test_replaces_and_appends_at_once_lose_nothing(database):
    store = Store(database, [Plain])
    store.insert(Plain(id=1))

    def replace() -> None:
        for _ in range(15):
            store.replace(Plain(id=1, members=[999]))

    def append(number: int) -> None:
        for turn in range(10):
            store.array(Plain, "members", 1).append(number * 100 + turn)

    race(replace, *[lambda number=number: append(number) for number in range(4)])
    assert 40 == len(items(database, Plain, 1))
    assert [] == wrong(database, Plain, 1)


# -- adoption, proof and repair -----------------------------------------------------------------


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
    collection.insert_many([{"_id": number, "members": list(range(9))} for number in range(30)])
    store = Store(database, [model])
    store.setup()

    def append(number: int) -> None:
        for key in range(30):
            store.array(model, "members", key).append(100 + number)

    race(store.rebuild, *[lambda number=number: append(number) for number in range(4)])
    for key in range(30):
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
    assert {"outlier"} == {each.pattern for each in found}
    assert 1 == store.repair()
    assert [] == store.verify()
    for key in (1, 2, 77):
        assert [] == wrong(database, Unique, key)
    store.array(Unique, "members", 1).append(1000)
    assert 1000 == items(database, Unique, 1)[-1]


# -- changed declarations ------------------------------------------------------------------------


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


# -- large items ----------------------------------------------------------------------------------


class Album(Document, collection="albums"):
    pictures: Annotated[list[bytes], Outlier(limit=2, overflow="pictures")] = []
    picture_count: int = 0


def test_pages_are_cut_by_bytes_too(run, database):
    """A page ends before its document is too large, whichever way items come to it."""
    store = run.store([Album])
    store.setup()
    pictures = [bytes([number]) * 3_000_000 for number in range(8)]
    inserted = store.array(Album, "pictures", store.insert(Album(pictures=pictures)).id)
    album = store.insert(Album())
    array = store.array(Album, "pictures", album.id)
    for picture in pictures[:5]:
        array.append(picture)
    assert 3 == array.extend(pictures[5:])
    for each in (inserted, array):
        assert (8, True) == (each.count(), pictures == list(each))
    counts = {page["count"] for page in database["pictures"].find({}, {"count": 1})}
    assert {1, 2} >= counts
    assert [] == store.verify()
    # What comes back to the owner must fit there as well.
    assert [1, 1] == [array.remove(pictures[number]) for number in (0, 1)]
    assert pictures[2:] == list(array)
    assert [] == store.verify()


def test_an_owner_that_would_be_too_large_is_told_so(run):
    class Heavy(Document, collection="heavy"):
        parts: Annotated[list[bytes], Outlier(limit=50, overflow="parts")] = []

    store = run.store([Heavy])
    array = store.array(Heavy, "parts", store.insert(Heavy()).id)
    with pytest.raises(UsageError) as refused:
        array.extend([bytes(6_000_000)] * 3)
    assert "document-too-large" == refused.value.code
    assert array.count() in (1, 2)
    assert [] == store.verify()


# -- declarations --------------------------------------------------------------------------------


def declared(annotation: Any, **fields: Any) -> Any:
    body = {"__annotations__": {"items": annotation, **fields}, "__module__": __name__}
    return type(Document)("Thing", (Document,), body, collection="things")


@pytest.mark.parametrize(
    ("annotation", "code"),
    [
        (Annotated[list[int], Outlier(limit=0, overflow="o")], "pattern-keyword"),
        (Annotated[list[int], Outlier(limit=True, overflow="o")], "pattern-keyword"),
        (Annotated[list[int], Outlier(limit=5, overflow="o", page_size=0)], "pattern-keyword"),
        (Annotated[list[int], Outlier(limit=5, overflow="o", layout="rows")], "pattern-keyword"),
        (Annotated[int, Outlier(limit=5, overflow="o")], "maintained-type"),
        (Annotated[set[int], Outlier(limit=5, overflow="o")], "maintained-type"),
        (Annotated[list[int] | None, Outlier(limit=5, overflow="o")], "maintained-type"),
        (Annotated[list[list[int]], Outlier(limit=5, overflow="o")], "array-of-arrays"),
        (Annotated[list[int], Outlier(limit=5, overflow="things")], "collection-shared"),
        (Annotated[list[int], Outlier(limit=5, overflow="treadle.x")], "collection-name-invalid"),
        (Annotated[list[int], Outlier(limit=5, overflow="o", count="nothing")], "source-field-missing"),
        (Annotated[list[int], Outlier(limit=5, overflow="o", flag="items")], "maintained-type"),
        (Annotated[list[int], Outlier(limit=5, overflow="o", owner="page")], "stored-name-clash"),
        (
            Annotated[list[int], Outlier(limit=5, overflow="o", layout="documents", item="position")],
            "stored-name-clash",
        ),
    ],
)
def test_wrong_declarations_are_refused(annotation, code, database):
    with pytest.raises(DeclarationError) as refused:
        Store(database, [declared(annotation)])
    assert code == refused.value.code


class Row(BaseModel):
    tags: Annotated[list[int], Outlier(limit=5, overflow="o")] = []


def test_an_array_inside_an_array_is_refused(database):
    with pytest.raises(DeclarationError) as refused:
        Store(database, [declared(list[Row])])
    assert "maintained-in-array" == refused.value.code


def test_setup_makes_the_overflow_with_its_unique_indexes(run, database, model):
    store = run.store([model])
    told = [str(action) for action in store.setup()]
    assert f"create collection {overflow_of(model)}" in told
    keys = [list(index["key"]) for index in database[overflow_of(model)].index_information().values()]
    assert [] == store.setup()
    unique = [
        list(index["key"]) for index in database[overflow_of(model)].list_indexes() if index.get("unique")
    ]
    assert len(unique) == (2 if model in (Unique, UniqueRows) else 1)
    assert len(keys) == len(unique) + 1


def test_the_validator_of_the_overflow_refuses_other_things(run, database):
    store = run.store([Plain])
    store.setup()
    with pytest.raises(OperationFailure):
        database["plain_overflow"].insert_one({"plain_id": 1, "page": 2, "members": ["x"], "count": 1})


def test_tasks_of_one_loop_share_an_array(server, database):
    """Sixteen tasks on one array of an AsyncStore."""
    import asyncio

    from pymongo import AsyncMongoClient

    async def main() -> None:
        async with AsyncMongoClient(server.uri) as client:
            store = AsyncStore(client[database.name], [Unique])
            await store.setup()
            await store.insert(Unique(id=1))

            async def write(number: int) -> int:
                return sum(
                    [await store.array(Unique, "members", 1).append((number + n) % 20) for n in range(20)]
                )

            assert 20 == sum(await asyncio.gather(*[write(number) for number in range(THREADS)]))
            assert list(range(20)) == sorted([item async for item in store.array(Unique, "members", 1)])

    asyncio.run(main())
    assert [] == wrong(database, Unique, 1)


def test_a_lost_reply_does_not_append_twice(server, database):
    """The driver sends the update again, and the server knows it."""
    from tests import faults

    with faults.Proxy(server.port) as proxy, MongoClient[Any](proxy.uri) as client:
        store = Store(client[database.name], [Plain])
        store.setup()
        store.insert(Plain(id=1, members=range(LIMIT - 2)))
        array = store.array(Plain, "members", 1)
        for number in range(6):
            for command in ("update", "findAndModify", "commitTransaction"):
                with proxy.drop_reply(0, names=[command]):
                    array.append(100 * number)
    assert LIMIT - 2 + 18 == len(items(database, Plain, 1))
    assert [] == wrong(database, Plain, 1)


class Thing(Document, collection="things", discriminator="type"):
    fans: Annotated[list[int], Outlier(limit=2, overflow="thing_fans", page_size=2)] = []
    fan_count: int = 0


class Book(Thing, kind="book"):
    readers: Annotated[list[int], Outlier(limit=2, overflow="book_readers", page_size=2)] = []
    reader_count: int = 0


def test_a_kind_has_the_arrays_of_its_base(run, database):
    """Split, found and deleted, whichever of the two classes is named."""
    store = run.store([Thing, Book])
    store.setup()
    book = store.insert(Book(fans=range(5), readers=range(6)))
    assert (
        list(range(5))
        == list(store.array(Book, "fans", book.id))
        == list(store.array(Thing, "fans", book.id))
    )
    store.array(Book, "fans", book.id).append(9)
    store.array(Book, "readers", book.id).append(9)
    stale = store.get(Thing, book.id)
    stale.fans = stale.readers = []
    assert ([0, 1], [0, 1], 6, 7) == (
        (kept := store.replace(stale)).fans, kept.readers, kept.fan_count, kept.reader_count,
    )  # fmt: skip
    assert [] == store.verify()
    store.delete(Thing, book.id)
    assert (0, 0) == tuple(database[name].count_documents({}) for name in ("thing_fans", "book_readers"))
