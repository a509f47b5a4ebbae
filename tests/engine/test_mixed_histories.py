"""Random histories of writes over cards, computed values and subsets that feed each other."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from pydantic import BaseModel

from tests.engine.histories import (
    POOL,
    Copy,
    Machine,
    check_copies,
    check_values,
    first,
    ids,
    known,
    maybe_ids,
    names,
    play,
    ratings,
    simple,
)
from treadle import Average, Count, Document, ExtendedReference, Formula, Id, Max, Subset, Sum


class Person(Document, collection="persons"):
    name: str | None = "p"
    notes: Annotated[int, Count("Note", by="author_id")] = 0
    spent: Annotated[Decimal, Sum("Purchase", "total", by="person_id")] = Decimal(0)


class Note(Document, collection="notes"):
    thing_id: Id | None = None
    author_id: Id | None = None
    author: Annotated[
        str | None, ExtendedReference(Person, by="author_id", field="name", on_delete="cascade")
    ] = None
    rating: int | None = None


class NoteCard(BaseModel):
    rating: int | None = None
    author: str | None = None


class Thing(Document, collection="things"):
    name: str | None = "t"
    price: Decimal = Decimal(1)
    notes: Annotated[int, Count(Note, by="thing_id")] = 0
    average: Annotated[float | None, Average(Note, "rating", by="thing_id")] = None
    best: Annotated[int | None, Max(Note, "rating", by="thing_id", where={"author": {"$ne": None}})] = None
    recent: Annotated[list[NoteCard], Subset(Note, by="thing_id", sort="-rating", size=2)] = []
    taxed: Annotated[Decimal | None, Formula({"$multiply": ["$price", Decimal("1.2")]})] = None


class ThingCard(BaseModel):
    name: str | None = None
    average: float | None = None
    taxed: Decimal | None = None


class PurchaseLine(BaseModel):
    number: int
    thing_id: Id | None = None
    thing: Annotated[ThingCard | None, ExtendedReference(Thing, by="thing_id", snapshot=["taxed"])] = None


class PersonCard(BaseModel):
    name: str | None = None
    spent: Decimal | None = None


class Purchase(Document, collection="purchases"):
    person_id: Id | None = None
    # Shows the sum that this very purchase is a part of.
    person: Annotated[PersonCard | None, ExtendedReference(Person, by="person_id")] = None
    lines: list[PurchaseLine] = []
    net: Decimal = Decimal(0)
    total: Annotated[Decimal | None, Formula({"$multiply": ["$net", Decimal("1.1")]})] = None


TOGETHER = [
    Copy("notes", (), ("author_id",), "author", "persons", ("name",), flat=True, on_delete="cascade"),
    Copy("purchases", ("lines",), ("thing_id",), "thing", "things", ("name", "average"), ("taxed",)),
    Copy("purchases", (), ("person_id",), "person", "persons", ("name", "spent")),
]


class TogetherMachine(Machine):
    """A rename reaches a note, through it a thing's subset, and through that a purchase."""

    models: ClassVar = [Person, Note, Thing, Purchase]

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def check(self) -> None:
        after = {name: {key: simple(raw) for key, raw in each.items()} for name, each in self.read().items()}
        before = {name: {key: simple(raw) for key, raw in each.items()} for name, each in self.state.items()}
        check_copies(TOGETHER, before, after)
        notes, purchases = list(after["notes"].values()), list(after["purchases"].values())
        for key, person in after["persons"].items():
            totals = [each.get("total") for each in purchases if each.get("person_id") == key]
            expected = {
                "notes": len([each for each in notes if each.get("author_id") == key]),
                "spent": sum(known(totals), Decimal(0)),
            }
            check_values(expected, person)
        for key, thing in after["things"].items():
            mine = [each for each in notes if each.get("thing_id") == key]
            given = known(each.get("rating") for each in mine)
            expected = {
                "notes": len(mine),
                "average": sum(given) / len(given) if given else None,
                "best": max(
                    known(each.get("rating") for each in mine if each.get("author") is not None), default=None
                ),
                "recent": first(mine, [("rating", -1)], 2, ["rating", "author"]),
                "taxed": thing["price"] * Decimal("1.2"),
            }
            check_values(expected, thing)
        for purchase in purchases:
            check_values({"total": purchase["net"] * Decimal("1.1")}, purchase)
        self.state = self.read()

    @initialize()
    def begin(self):
        for at, key in enumerate(POOL[:3]):
            self.store.insert(Person(id=key, name=f"person {at}"))
            self.store.insert(Thing(id=key, name=f"thing {at}", price=Decimal(at)))
        for at, key in enumerate(POOL[:3]):
            self.store.insert(Note(id=key, thing_id=POOL[0], author_id=POOL[at], rating=at))
            self.count += 1
            line = PurchaseLine(number=self.count, thing_id=POOL[at % 2])
            self.add(Purchase(id=key, person_id=POOL[0], lines=[line], net=Decimal(at)))

    @rule(model=st.sampled_from([Person, Thing]), id=ids, name=names)
    def insert_source(self, model, id, name):
        self.add(model(id=id, name=name))

    @rule(model=st.sampled_from([Person, Thing]), id=ids, name=names, many=st.booleans())
    def rename(self, model, id, name, many):
        if many:
            self.store.update_many(model, {"name": {"$ne": name}}, {"$set": {"name": name}})
        else:
            self.store.update(model, id, [{"$set": {"name": {"$literal": name}}}])

    @rule(id=ids, price=st.sampled_from([Decimal("0.1"), Decimal(5)]))
    def price(self, id, price):
        self.store.update(Thing, id, {"$set": {"price": price}})

    @rule(id=ids, thing=maybe_ids, author=maybe_ids, rating=ratings)
    def insert_note(self, id, thing, author, rating):
        self.add(Note(id=id, thing_id=thing, author_id=author, rating=rating))

    @rule(chosen=st.lists(st.tuples(maybe_ids, maybe_ids, ratings), max_size=3))
    def insert_notes(self, chosen):
        self.store.insert_many([Note(thing_id=t, author_id=a, rating=r) for t, a, r in chosen])

    @rule(id=ids, thing=maybe_ids, author=maybe_ids, rating=ratings, how=st.integers(0, 4))
    def update_note(self, id, thing, author, rating, how):
        updates: list[Any] = [
            {"$set": {"thing_id": thing}},
            {"$set": {"author_id": author}},
            {"$set": {"rating": rating}},
            {"$set": {"thing_id": thing, "author_id": author, "rating": rating}},
            [{"$set": {"rating": {"$add": [{"$ifNull": ["$rating", 0]}, 1]}}}, {"$unset": "author_id"}],
        ]
        self.store.update(Note, id, updates[how])

    @rule(old=maybe_ids, new=maybe_ids)
    def move_notes(self, old, new):
        self.store.update_many(Note, {"thing_id": old}, {"$set": {"thing_id": new, "author_id": new}})

    @rule(
        id=ids,
        person=maybe_ids,
        things=st.lists(maybe_ids, max_size=2),
        net=st.sampled_from([Decimal("0.1"), Decimal(7)]),
    )
    def insert_purchase(self, id, person, things, net):
        self.count += len(things)
        lines = [PurchaseLine(number=self.count - at, thing_id=each) for at, each in enumerate(things)]
        self.add(Purchase(id=id, person_id=person, lines=lines, net=net))

    @rule(id=ids, person=maybe_ids, thing=maybe_ids, how=st.integers(0, 4))
    def update_purchase(self, id, person, thing, how):
        self.count += 1
        updates: list[Any] = [
            {"$set": {"person_id": person}},
            {"$inc": {"net": Decimal("0.5")}},
            {"$push": {"lines": {"number": self.count, "thing_id": thing}}},
            {"$pull": {"lines": {"thing_id": thing}}},
            {"$push": {"lines": {"$each": [{"number": self.count, "thing_id": thing}], "$position": 0}}},
        ]
        self.store.update(Purchase, id, updates[how])

    @rule(model=st.sampled_from([Person, Thing, Note, Purchase]), id=ids, many=st.booleans())
    def delete(self, model, id, many):
        if many:
            self.store.delete_many(model, {"_id": {"$in": [id, POOL[0]]}})
        else:
            self.store.delete(model, id)

    @rule(model=st.sampled_from([Person, Thing, Note, Purchase]), id=ids)
    def remember(self, model, id):
        self.keep(model, id)

    @rule(which=st.integers(0, 3), name=names, other=maybe_ids, rating=ratings)
    def replace(self, which, name, other, rating):
        self.replace_kept(Person, which, name=name)
        self.replace_kept(Thing, which, name=name)
        self.replace_kept(Note, which, thing_id=other, rating=rating)
        self.replace_kept(Purchase, which, person_id=other)


@pytest.mark.heavy
def test_all_three_patterns_together(run, database):
    play(TogetherMachine, run, database, examples=6)
