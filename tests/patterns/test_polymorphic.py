"""Polymorphic: several kinds in one collection, each read and written as its own class."""

from __future__ import annotations

import enum
import threading
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.patterns.stock import (
    MODELS,
    Book,
    Comic,
    Customer,
    Electronics,
    Item,
    Media,
    Voucher,
)
from treadle import DataError, Document, Store, UsageError


def stocked(run: Any) -> tuple[Any, list[Any]]:
    store = run.store(MODELS)
    store.setup()
    documents = [
        Book(title="Dune", isbn="1", pages=412),
        Comic(title="Asterix", isbn="2", colours={"red", "blue"}),
        Electronics(title="Mouse", brand="Click", price=Decimal("9.90")),
        Voucher(title="Ten off"),
    ]
    return store, store.insert_many(documents)


# -- reading -----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_each_document_is_read_as_its_own_class(run):
    store, documents = stocked(run)
    assert documents == list(store.find(Item, sort="_id"))
    assert documents == [store.get(Item, each.id) for each in documents]
    assert [Book, Comic] == [type(each) for each in store.find(Media, sort="_id")]
    assert [Book, Comic] == [type(each) for each in store.find(Book, sort="_id")]
    assert [Comic] == [type(each) for each in store.find(Comic)]
    assert [4, 2, 2, 1, 1] == [store.count(each) for each in (Item, Media, Book, Comic, Electronics)]


def test_a_kind_does_not_find_documents_of_another(run):
    store, (book, _, mouse, _) = stocked(run)
    assert store.get(Electronics, book.id) is None
    assert store.get(Media, mouse.id) is None
    assert store.find_one(Electronics, {"title": "Dune"}) is None
    assert book == store.find_one(Book, {"title": "Dune", "type": "book"})
    assert store.find_one(Electronics, {"type": "book"}) is None
    assert 0 == store.count(Electronics, {"$or": [{"type": "book"}, {"type": "comic"}]})


def test_the_base_is_known_even_if_only_kinds_were_given(run):
    store = run.store([Book, Electronics])
    store.setup()
    store.insert(Book(title="Dune"))
    assert ["Dune"] == [each.title for each in store.find(Item)]


@pytest.mark.parametrize("kind", ["spaceship", None, [1], {"a": 1}, True])
def test_an_unknown_kind_is_an_error_that_names_it(run, database, kind):
    identity = database["items"].insert_one({"type": kind, "title": "x"}).inserted_id
    store = run.store([Item, Book])
    for read in (lambda: store.get(Item, identity), lambda: list(store.find(Item))):
        with pytest.raises(DataError) as caught:
            read()
        assert "kind-unknown" == caught.value.code
        assert repr(kind) in str(caught.value)
        assert repr(identity) in str(caught.value)


# -- writing -----------------------------------------------------------------------------------------


def test_an_abstract_model_cannot_be_stored(run, database):
    store = run.store(MODELS)
    store.setup()
    for document in (Item(title="x"), Media(title="x")):
        with pytest.raises(UsageError) as caught:
            store.insert(document)
        assert "kind-missing" == caught.value.code
    with pytest.raises(UsageError):
        store.insert_many([Book(title="x"), Media(title="y")])
    assert 0 == database["items"].count_documents({})


def test_a_base_with_a_kind_is_concrete(run):
    class Animal(Document, collection="animals", discriminator="species", kind="animal"):
        name: str

    class Dog(Animal, kind="dog"):
        tricks: int = 0

    store = run.store([Animal, Dog])
    both = store.insert_many([Animal(name="a"), Dog(name="b")])
    assert both == list(store.find(Animal, sort="_id"))
    assert [both[1]] == list(store.find(Dog))


def test_writes_on_a_kind_do_not_reach_another(run, database):
    store, (book, _, mouse, _) = stocked(run)
    before = database["items"].find_one({"_id": book.id})
    assert store.update(Electronics, book.id, {"$set": {"price": Decimal(1)}}) is None
    assert store.update(Electronics, {"title": "Dune"}, {"$set": {"price": Decimal(1)}}) is None
    assert 0 == store.update_many(Electronics, {"type": "book"}, {"$set": {"title": "x"}})
    assert store.delete(Electronics, book.id) is None
    assert 0 == store.delete_many(Electronics, {"title": "Dune"})
    with pytest.raises(DataError) as caught:
        store.replace(Electronics(id=book.id, title="x", brand="y"))
    assert "document-gone" == caught.value.code
    assert before == database["items"].find_one({"_id": book.id})
    assert 1 == store.delete_many(Electronics, {})
    assert store.get(Item, mouse.id) is None
    assert 3 == store.count(Item)


def test_a_subclass_is_no_substitute_in_replace(run):
    """A comic is found as a book, but a book written over it would lose what makes it a comic."""
    store, (_, comic, _, _) = stocked(run)
    with pytest.raises(DataError):
        store.replace(Book(id=comic.id, title="x"))
    assert comic == store.get(Item, comic.id)


@pytest.mark.parametrize(
    "update",
    [
        {"$set": {"type": "electronics"}},
        {"$unset": {"type": ""}},
        {"$rename": {"title": "type"}},
        {"$rename": {"type": "title"}},
        [{"$set": {"type": "x"}}],
        [{"$replaceWith": {"_id": "$_id", "type": "comic"}}],
    ],
)
def test_an_update_cannot_change_the_kind(run, update):
    store, (book, *_) = stocked(run)
    for call in (store.update, store.update_many):
        for model in (Item, Book):
            with pytest.raises(UsageError) as caught:
                call(model, {"_id": book.id}, update)
            assert "field-maintained" == caught.value.code
    assert book == store.get(Item, book.id)


def test_the_kind_changes_by_an_explicit_call_only(run, database):
    store, (book, _, mouse, _) = stocked(run)
    changed = store.change_kind(Comic(id=book.id, title="Dune", colours={"sand"}), was=Book)
    assert changed == store.get(Item, book.id)
    assert isinstance(changed, Comic)
    with pytest.raises(DataError) as caught:
        store.change_kind(Electronics(id=book.id, title="Dune", brand="x"), was=Book)
    assert "kind-differs" == caught.value.code
    assert "'comic'" in str(caught.value)
    with pytest.raises(DataError) as caught:
        store.change_kind(Comic(title="new"), was=Book)
    assert "document-gone" == caught.value.code
    for was in (Item, Media):
        with pytest.raises(UsageError) as refused:
            store.change_kind(Comic(id=mouse.id, title="x"), was=was)
        assert "kind-change" == refused.value.code
    assert "electronics" == database["items"].find_one({"_id": mouse.id})["type"]


def test_of_two_changes_of_kind_one_wins(database):
    store = Store(database, MODELS)
    store.setup()
    for _ in range(10):
        book = store.insert(Book(title="x"))
        outcomes: list[str] = []

        def change(document: Any, outcomes: list[str] = outcomes) -> None:
            try:
                outcomes.append(type(store.change_kind(document, was=Book)).__name__)
            except DataError as error:
                outcomes.append(error.code)

        threads = [
            threading.Thread(target=change, args=(each,))
            for each in (Comic(id=book.id, title="c"), Electronics(id=book.id, title="e", brand="b"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 1 == outcomes.count("kind-differs")
        assert {type(store.get(Item, book.id)).__name__} == set(outcomes) - {"kind-differs"}


def test_documents_of_several_kinds_are_inserted_in_one_command(heard):
    database, listener = heard
    store = Store(database, MODELS)
    store.setup()
    listener.clear()
    store.insert_many([Book(title="a"), Electronics(title="b", brand="c")])
    assert ["insert", "commitTransaction"] == listener.names[-2:]
    with pytest.raises(UsageError):
        store.insert_many([Book(title="a"), Customer(name="Ada")])


# -- embedded values that are one of several models --------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Card(BaseModel):
    method: Literal["card"] = "card"
    number: str = Field(alias="no")
    limit: Decimal = Decimal(1)
    colours: set[Colour] = set()


class Transfer(BaseModel):
    method: Literal["transfer"] = "transfer"
    number: int = Field(alias="no")
    day: date


class Cash(BaseModel):
    how: Literal["cash", "coins"]
    at: dict[date, Decimal] = {}


Payment = Annotated[Card | Transfer, Field(discriminator="method")]


class Bill(Document, collection="bills"):
    payment: Payment
    others: list[Payment] = []
    named: dict[str, Payment] = {}
    either: Cash | Card | None = None


def test_an_embedded_value_may_be_one_of_several_models(run, database):
    store = run.store([Bill])
    store.setup()
    card = Card(no="1", limit=Decimal("2.5"), colours={Colour.RED})
    transfer = Transfer(no=7, day=date(2026, 3, 1))
    cash = Cash(how="coins", at={date(2026, 1, 2): Decimal("1.10")})
    bills = [
        Bill(payment=card, others=[transfer, card], named={"a": transfer}, either=cash),
        Bill(payment=transfer, either=card),
        Bill(payment=transfer),
    ]
    store.insert_many(bills)
    assert bills == list(store.find(Bill, sort="_id"))
    assert [Card, Transfer] == [type(each.payment) for each in bills[:2]]
    raw = database["bills"].find_one({"_id": bills[1].id})
    assert {"method": "transfer", "no": 7, "day": datetime(2026, 3, 1)} == raw["payment"]


@pytest.mark.parametrize(
    "payment",
    [
        {"method": "cheque", "no": "1"},
        {"method": "transfer", "no": "not a number", "day": datetime(2026, 3, 1)},
        {"method": "transfer", "no": 1},
        {"no": "1", "limit": 1},
        5,
    ],
)
def test_the_validator_refuses_what_no_member_is(run, database, payment):
    run.store([Bill]).setup()
    with pytest.raises(Exception, match="validation"):
        database["bills"].insert_one({"payment": payment})
