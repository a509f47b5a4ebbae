"""Polymorphic: documents without a discriminator are of the default kind, for whoever looks at them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel

from treadle import Count, Document, Formula, Id, Indexed


class Loan(Document, collection="loans"):
    item_id: Id


class Item(Document, collection="items", discriminator="type", default_kind="book"):
    title: str
    loans: Annotated[int, Count(Loan, by="item_id")] = 0


class Book(Item, kind="book"):
    type: Literal["book"]
    isbn: Annotated[str | None, Indexed(unique=True)] = None
    label: Annotated[str | None, Formula({"$concat": ["Book: ", "$title"]})] = None


class Film(Item, kind="film"):
    minutes: int = 0


class Card(BaseModel):
    title: str


MODELS: list[type[Document]] = [Loan, Item, Book, Film]


@pytest.fixture
def opened(run, database) -> Any:
    """A store with a document from before there were kinds, and one of each kind."""
    old = {"title": "Old", "isbn": "1"}
    database["items"].insert_one(old)
    store = run.store(MODELS)
    store.setup()
    store.insert(Book(type="book", title="New", isbn="2"))
    store.insert(Film(title="Film"))
    return store, old["_id"]


@pytest.mark.quick
def test_it_is_read_as_the_default_kind(opened, database):
    store, old = opened
    assert {"Old": Book, "New": Book, "Film": Film} == {each.title: type(each) for each in store.find(Item)}
    assert {"Old", "New"} == {each.title for each in store.find(Book)}
    assert (2, 1, 3) == (store.count(Book), store.count(Film), store.count(Item))
    assert "1" == store.get(Book, old).isbn
    assert store.get(Film, old) is None
    assert "Old" == store.get(Item, old, into=Card).title
    assert "type" not in database["items"].find_one({"_id": old})


def test_it_is_written_and_maintained_as_that(opened, database):
    store, old = opened
    store.rebuild()
    assert "Book: Old" == database["items"].find_one({"_id": old})["label"]
    assert "label" not in database["items"].find_one({"type": "film"})
    store.insert(Loan(item_id=old))
    assert 1 == store.get(Book, old).loans
    assert "Book: Older" == store.update(Book, old, {"$set": {"title": "Older"}}).label
    assert 2 == store.update_many(Book, {"title": {"$exists": True}}, {"$unset": {"isbn": ""}})
    book = store.get(Book, old)
    book.title = "Oldest"
    store.replace(book)
    assert ("book", "Book: Oldest") == tuple(
        database["items"].find_one({"_id": old})[name] for name in ("type", "label")
    )
    assert [] == store.verify()


def test_its_index_and_its_validator_hold_it(opened, database):
    store, _ = opened
    with pytest.raises(Exception, match="duplicate"):
        store.insert(Book(type="book", title="Twice", isbn="1"))
    assert [] == [each for each in store.verify() if each.pattern == "validation"]
    database["items"].insert_one({"title": "Raw", "isbn": "9"})
    assert [] == store.setup()


def test_it_can_become_another_kind(opened, database):
    store, old = opened
    store.change_kind(Film(id=old, title="Film of it"), Book)
    assert "film" == database["items"].find_one({"_id": old})["type"]
    assert {"New"} == {each.title for each in store.find(Book)}
