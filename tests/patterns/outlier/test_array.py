"""Outlier arrays: order, count and flag are right at every length.

Covers: patterns/outlier/handle, patterns/outlier/stored_array, patterns/outlier/writes, store/async_array
"""

from __future__ import annotations

from typing import Annotated

import pytest

from tests.members import Plain, Unique, items, overflow_of, stored, wrong
from treadle import DataError, Document, Formula, Id, Outlier, Sum, Unchecked, UsageError

# -- the invariant -----------------------------------------------------------------------------------


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


def test_removals_move_nothing_and_a_rebuild_packs_the_array(run, model, database):
    """Until then the order stays, because new items go to the end although the embedded part has room."""
    store = run.store([model])
    store.setup()
    store.insert(model(id=1, members=range(20)))
    array = store.array(model, "members", 1)
    pages = len(stored(database, model, 1)[1])
    for number in (0, 1, 2, 5, 8, 9, 11, 12, 15, 16):
        array.remove(number)
    array.append(20)
    left = [3, 4, 6, 7, 10, 13, 14, 17, 18, 19, 20]
    owner, overflow = stored(database, model, 1)
    assert ([3], left, []) == (owner["members"], items(database, model, 1), store.verify())
    assert len(overflow) >= pages - 6
    store.rebuild()
    owner, overflow = stored(database, model, 1)
    assert ([3, 4, 6, 7], left) == (owner["members"], items(database, model, 1))
    assert len(overflow) == (7 if "position" in overflow[0] else 3)
    assert ([], []) == (wrong(database, model, 1), store.verify())


@pytest.mark.quick
def test_duplicates_under_unique_are_ignored_and_counted(run):
    store = run.store([Unique])
    store.insert(Unique(id=1))
    array = store.array(Unique, "members", 1)
    assert 5 == array.extend([1, 2, 1, 3, 1, 4, 1, 5, 1])
    assert 1 == array.extend([5, 1, 9, 9])
    assert not array.append(9)
    assert ([1, 2, 3, 4, 5, 9], 8) == (list(array), array.ignored)


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
        Unchecked({"$rename": {"other": "members"}}),
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


# -- what others are fed by --------------------------------------------------------------------------


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
