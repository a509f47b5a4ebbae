"""Derived values that feed each other, level by level, after each step of a random history.

A rename reaches a note, through it a thing's subset, and through that a purchase. A purchase shows a
sum that it is a part of.
"""

from __future__ import annotations

import random
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from treadle import Average, Count, Document, ExtendedReference, Formula, Max, Store, Subset, Sum

IDS = [1, 2, 3]


class Person(Document, collection="persons"):
    id: int
    name: str | None = "p"
    notes: Annotated[int, Count("Note", by="author_id")] = 0
    spent: Annotated[int, Sum("Purchase", "total", by="person_id")] = 0


class Note(Document, collection="notes"):
    id: int
    thing_id: int | None = None
    author_id: int | None = None
    author: Annotated[
        str | None, ExtendedReference(Person, by="author_id", field="name", on_delete="cascade")
    ] = None
    rating: int | None = None


class NoteCard(BaseModel):
    rating: int | None = None
    author: str | None = None


class Thing(Document, collection="things"):
    id: int
    name: str | None = "t"
    average: Annotated[float | None, Average(Note, "rating", by="thing_id")] = None
    best: Annotated[int | None, Max(Note, "rating", by="thing_id", where={"author": {"$ne": None}})] = None
    recent: Annotated[list[NoteCard], Subset(Note, by="thing_id", sort="-rating", size=2)] = []


class ThingCard(BaseModel):
    name: str | None = None
    average: float | None = None


class Line(BaseModel):
    thing_id: int | None = None
    thing: Annotated[ThingCard | None, ExtendedReference(Thing, by="thing_id")] = None


class PersonCard(BaseModel):
    name: str | None = None
    spent: int | None = None


class Purchase(Document, collection="purchases"):
    id: int
    person_id: int | None = None
    person: Annotated[PersonCard | None, ExtendedReference(Person, by="person_id", on_delete="clear")] = None
    lines: list[Line] = []
    net: int = 0
    total: Annotated[int | None, Formula({"$multiply": ["$net", 2]})] = None


MODELS: list[Any] = [Person, Note, Thing, Purchase]


def check(database: Any) -> None:
    """Compare each derived value with what plain Python makes of the documents."""
    persons, notes, things, purchases = (
        {raw["_id"]: raw for raw in database[model.__treadle__.collection].find()} for model in MODELS
    )
    for key, person in persons.items():
        mine = [each["total"] for each in purchases.values() if each["person_id"] == key]
        expected = len([each for each in notes.values() if each["author_id"] == key]), sum(mine)
        assert expected == (person["notes"], person["spent"])
    for note in notes.values():
        assert (persons[note["author_id"]]["name"] if note["author_id"] else None) == note["author"]
    for key, thing in things.items():
        mine = sorted(
            (each for each in notes.values() if each["thing_id"] == key), key=lambda raw: raw["_id"]
        )
        given = [each["rating"] for each in mine if each["rating"] is not None]
        authored = [each["rating"] for each in mine if each["author"] and each["rating"] is not None]
        ranked = sorted(mine, key=lambda raw: (raw["rating"] is None, -(raw["rating"] or 0), raw["_id"]))
        cards = [{name: each[name] for name in ("_id", "rating", "author")} for each in ranked[:2]]
        assert (sum(given) / len(given) if given else None) == thing["average"]
        assert (max(authored, default=None), cards) == (thing["best"], thing["recent"])
    for purchase in purchases.values():
        person = persons.get(purchase["person_id"])
        card = None if person is None else {"name": person["name"], "spent": person["spent"]}
        assert (purchase["net"] * 2, card) == (purchase["total"], purchase["person"])
        for line in purchase["lines"]:
            source = things.get(line["thing_id"])
            if source is not None:
                assert {name: source[name] for name in ("name", "average")} == line["thing"]


def step(store: Store, choice: random.Random, number: int) -> None:
    one, other = choice.choice([*IDS, None]), choice.choice([*IDS, None])
    rating, name = choice.choice([None, 0, 2, 2, 5]), choice.choice(["ann", "$secret", None])
    model = choice.choice(MODELS)
    acts = [
        lambda: store.insert(Note(id=number, thing_id=one, author_id=other, rating=rating)),
        lambda: store.insert_many([Note(id=number + at, thing_id=at, author_id=1) for at in IDS]),
        lambda: store.update(Note, {}, {"$set": {"thing_id": one, "author_id": other, "rating": rating}}),
        lambda: store.update_many(Note, {"thing_id": one}, {"$set": {"thing_id": other, "author_id": other}}),
        lambda: store.update(Person, choice.choice(IDS), {"$set": {"name": name}}),
        lambda: store.update_many(Thing, {}, [{"$set": {"name": {"$literal": name}}}]),
        lambda: store.insert(Purchase(id=number, person_id=one, lines=[Line(thing_id=other)], net=number)),
        lambda: store.update(Purchase, {}, {"$inc": {"net": 1}, "$push": {"lines": {"thing_id": one}}}),
        lambda: store.update(Purchase, {}, {"$pull": {"lines": {"thing_id": one}}}),
        lambda: store.update_many(Purchase, {"net": {"$gt": number - 50}}, {"$set": {"person_id": one}}),
        lambda: store.delete_many(model, {"_id": {"$gt": max(IDS), "$lt": number - 60}}),
    ]
    choice.choice(acts)()


@pytest.mark.parametrize("seed", range(3))
def test_every_level_follows_each_write(database, seed):
    store, choice = Store(database, MODELS), random.Random(seed)
    store.setup()
    for key in IDS:
        store.insert(Person(id=key))
        store.insert(Thing(id=key))
    for number in range(10, 260, 10):
        step(store, choice, number)
        check(database)
    store.delete(Person, 2)
    check(database)
    assert [] == store.verify()
