"""What is stored of an outlier array, and what an append costs.

Covers: patterns/outlier/declaration, patterns/outlier/overflow_format, patterns/outlier/writes
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

import pytest
from pydantic import BaseModel
from pymongo.errors import OperationFailure

from tests.members import LIMIT, Plain, Unique, UniqueRows, items, overflow_of
from tests.support import Colour
from treadle import Document, Outlier, Store, Unchecked, UsageError
from treadle.patterns.outlier import writes

# -- stored shapes -----------------------------------------------------------------------------------


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


def test_setup_makes_the_overflow_with_its_unique_indexes(run, database, model):
    store = run.store([model])
    done = [str(action) for action in store.setup()]
    assert f"create collection {overflow_of(model)}" in done
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


# -- cost --------------------------------------------------------------------------------------------


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
    store.update(Plain, 2, Unchecked({"$set": {"other": 1}}))
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


def test_what_many_callers_append_is_weighed_once(database, monkeypatch):
    """Appends that share a transaction are merged one by one; each item is measured when it comes."""
    measured = []
    monkeypatch.setattr(writes, "bson_size_bound", lambda item: measured.append(item) or 1)
    (rule,) = Store(database, [Plain]).graph.entry(Plain).rules
    both = writes.Extend(rule, 1, [0])
    for number in range(1, 100):
        other = writes.Extend(rule, 1, [number])
        assert both.merges(other)
        both = both.merged(other)
    assert (list(range(100)), list(range(100))) == (measured, both.items)


# -- large items -------------------------------------------------------------------------------------


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
    assert [1, 1] == [array.remove(pictures[number]) for number in (0, 1)]
    # What a rebuild puts into the owner must fit there as well.
    store.rebuild()
    assert pictures[2:] == list(array)
    assert 2 == len(store.get(Album, album.id).pictures)
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
