"""An update that its model refuses has changed nothing: neither the document nor what follows from it.

Covers: engine/documents, engine/updates
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from pydantic import AfterValidator, BaseModel, Field, field_validator, model_validator
from pydantic_core import core_schema

from treadle import Count, Document, ExtendedReference, Formula, Id, Sum, UsageError


def even(value: int) -> int:
    if value % 2:
        raise ValueError("must be even")
    return value


Even = Annotated[int, AfterValidator(even)]


class Part(BaseModel):
    size: Even
    name: str = ""


class Plain(Document, collection="plain", validation="off"):
    n: Even = 0
    bounded: Annotated[int, Field(ge=0, le=10)] = 0
    price: Decimal = Decimal(0)
    tags: Annotated[list[str], Field(max_length=2)] = []
    parts: list[Part] = []
    by_name: dict[str, Even] = {}
    other: Id | None = None
    part: Part | None = None
    date: datetime | None = None
    low: int = 0
    high: int = 100
    needed: str = "x"

    @field_validator("needed")
    @classmethod
    def _letters(cls, value: str) -> str:
        if not value.isalpha():
            raise ValueError("letters only")
        return value


class Ordered(Document, collection="ordered", validation="off"):
    low: int
    high: int

    @model_validator(mode="after")
    def _in_order(self) -> Ordered:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class Owner(Document, collection="owners"):
    id: str
    total: Annotated[int, Sum("Fed", "n", by="owner_id")] = 0
    number: Annotated[int, Count("Fed", by="owner_id")] = 0


class Fed(Document, collection="fed", validation="off"):
    owner_id: str
    n: Even = 0
    bounded: Annotated[int, Field(le=10)] = 0


MODELS = [Plain, Ordered, Owner, Fed]

REFUSED: list[Any] = [
    {"$set": {"n": 3}},
    {"$set": {"n": "three"}},
    {"$max": {"n": 3}},
    {"$set": {"bounded": 11}},
    {"$inc": {"bounded": 11}},
    {"$inc": {"bounded": 1.5}},
    {"$mul": {"bounded": "2"}},
    {"$inc": {"n": 1}},
    {"$set": {"price": Decimal("NaN")}},
    {"$inc": {"price": Decimal("NaN")}},
    {"$set": {"price": Decimal("Infinity")}},
    {"$push": {"tags": 7}},
    {"$push": {"tags": {"$each": ["a", "b", "c"]}}},
    {"$addToSet": {"tags": {"$each": ["a", 1]}}},
    {"$push": {"parts": {"size": 3}}},
    {"$push": {"parts": {"name": "a"}}},
    {"$set": {"parts": [{"size": 1}]}},
    {"$set": {"parts.0.size": 5}},
    {"$set": {"parts.$[].size": 5}},
    {"$set": {"parts.7.name": "beyond the end"}},
    {"$set": {"by_name.a": 3}},
    {"$set": {"other": "no id"}},
    {"$set": {"needed": "123"}},
    {"$set": {"date": "soon"}},
    {"$rename": {"needed": "n"}},
    {"$unset": {"parts.0.size": ""}},
    [{"$set": {"n": {"$add": ["$n", 1]}}}],
    [{"$set": {"bounded": {"$literal": 11}}}],
]


@pytest.fixture
def store(run):
    return run.store(MODELS)


def test_a_plain_model(store, database):
    made = store.insert(Plain(parts=[Part(size=2)]))
    raw = database["plain"].find_one({"_id": made.id})
    for update in REFUSED:
        for call, chosen in ((store.update, made.id), (store.update_many, {})):
            with pytest.raises(UsageError) as caught:
                call(Plain, chosen, update)
            assert ("document-invalid", update) == (caught.value.code, update)
            assert raw == database["plain"].find_one({"_id": made.id})


def test_what_follows_does_not_follow(store):
    """Sums stay what they were, and every document can still be read."""
    store.insert(Owner(id="a"))
    made = store.insert(Fed(owner_id="a", n=2))
    for update in ({"$set": {"n": 3}}, {"$inc": {"n": 3}}, {"$inc": {"bounded": 11}}):
        for call, chosen in ((store.update, made.id), (store.update_many, {})):
            with pytest.raises(UsageError):
                call(Fed, chosen, update)
            assert made == store.get(Fed, made.id)
            assert (2, 1) == (store.get(Owner, "a").total, store.get(Owner, "a").number)
    assert [] == store.verify()


def test_what_the_server_refuses_is_our_error(store):
    """A path that does not fit what is stored, and what only looks like an update."""
    made = store.insert(Plain())
    for update in (
        {"$set": {"part.name": "made of nothing"}},
        {"$set": {"n": 2, "n.x": 2}},
        {"$inc": {"needed": 1}},
        {"$push": {"needed": "a"}},
        {"$rename": {"needed": 5}},
        {"$rename": {"needed": "needed"}},
        {"$pop": {"tags": 7}},
        {"$set": {"": 1}},
        {"$set": {"a..b": 1}},
        {"$set": {"_id": 1}},
        {"$odd": {"n": 1}},
        {"$pullAll": {"tags": 1}},
        {"$set": {"parts.$[i].size": 2}},
        [],
    ):
        for call, chosen in ((store.update, made.id), (store.update_many, {})):
            with pytest.raises(UsageError):
                call(Plain, chosen, update)
    assert made == store.get(Plain, made.id)


def test_a_validator_of_the_whole_model(store):
    made = store.insert(Ordered(low=1, high=5))
    with pytest.raises(UsageError):
        store.update(Ordered, made.id, {"$set": {"low": 9}})
    assert made == store.get(Ordered, made.id)
    assert 9 == store.update(Ordered, made.id, {"$set": {"low": 9, "high": 10}}).low


class Small(Document, collection="small", validation="off"):
    """Judged by a schema of its own around Pydantic's."""

    n: int = 0
    weight: float = 0.0

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        def small(value: Any) -> Any:
            if value.n > 5:
                raise ValueError("too large")
            return value

        return core_schema.no_info_after_validator_function(small, handler(source))


class Animal(Document, collection="animals", discriminator="species", kind="animal", validation="off"):
    n: int = 0


class Dog(Animal, kind="dog"):
    @field_validator("n")
    @classmethod
    def _even(cls, value: int) -> int:
        return even(value)


@pytest.mark.parametrize("update", [{"$set": {"n": 7}}, {"$inc": {"n": 7}}])
@pytest.mark.parametrize(("model", "made"), [(Small, Small()), (Animal, Dog())])
def test_what_the_shape_of_a_field_does_not_tell(run, model, made, update):
    """A schema around the whole model, and a validator that only one kind has."""
    store = run.store([Small, Animal, Dog])
    store.insert(made)
    for call, chosen in ((store.update, made.id), (store.update_many, {})):
        with pytest.raises(UsageError):
            call(model, chosen, update)
        assert made == store.get(model, made.id)
    assert 4 == store.update(model, made.id, {"$set": {"n": 4}}).n


def test_a_decimal_added_to_a_float_leaves_a_float(run, database):
    store = run.store([Small])
    made = store.insert(Small(weight=0.5))
    assert 2.0 == store.update(Small, made.id, {"$inc": {"weight": Decimal("1.5")}}).weight
    store.update_many(Small, {}, {"$mul": {"weight": Decimal128("2")}})
    assert 4.0 == database["small"].find_one()["weight"]


def test_a_replacement_that_its_model_refuses(store):
    """Assigning to a field does not validate it; storing it does."""
    store.insert(Owner(id="a"))
    for model, given in ((Plain, {"n": 2}), (Fed, {"owner_id": "a", "n": 2})):
        made = store.insert(model(**given))
        changed = made.model_copy(deep=True)
        changed.n = 3
        with pytest.raises(UsageError) as caught:
            store.replace(changed)
        assert "document-invalid" == caught.value.code
        assert made == store.get(model, made.id)
    assert [] == store.verify()


def test_one_of_many_refuses(store):
    """What is done in one transaction is done for all or none."""
    first, second = store.insert_many([Plain(bounded=1), Plain(bounded=9)])
    with pytest.raises(UsageError):
        store.update_many(Plain, {}, {"$inc": {"bounded": 5}})
    assert [first, second] == list(store.find(Plain))


def test_values_are_stored_as_an_insert_stores_them(store, database):
    made, other = store.insert(Plain()), ObjectId()
    update = {
        "$set": {"other": str(other), "price": 2, "n": "4", "part": {"size": 2}},
        "$push": {"parts": {"$each": [{"size": "6"}], "$slice": -5}},
    }
    store.update(Plain, made.id, update)
    raw = database["plain"].find_one({"_id": made.id})
    assert (other, Decimal128("2"), 4) == (raw["other"], raw["price"], raw["n"])
    assert ([{"size": 6, "name": ""}], {"size": 2, "name": ""}) == (raw["parts"], raw["part"])


def test_what_fits_is_one_command(heard):
    """Nothing but the update itself is sent where its values prove enough."""
    from treadle import Store

    database, listener = heard
    store = Store(database, [Plain])
    made = store.insert(Plain(parts=[Part(size=2)]))
    listener.clear()
    store.update(Plain, made.id, {"$set": {"n": 4, "parts.$[].size": 4, "date": datetime.now(UTC)}})
    store.update(
        Plain, made.id, {"$inc": {"low": 1, "price": Decimal("1.5")}, "$push": {"parts": {"size": 2}}}
    )
    assert ["findAndModify"] * 2 == listener.names


class Card(BaseModel):
    name: str


class Line(BaseModel):
    owner_id: str
    owner: Annotated[Card, ExtendedReference("Named", by="owner_id")]
    n: Even = 0


class Named(Document, collection="named"):
    id: str
    name: str


class Bill(Document, collection="bills"):
    lines: list[Line] = []


def test_what_treadle_fills_in_need_not_be_given(run):
    """A required copy is no reason to refuse the element that it will be part of."""
    store = run.store([Named, Bill])
    store.insert(Named(id="a", name="Ann"))
    made = store.insert(Bill())
    after = store.update(Bill, made.id, {"$push": {"lines": {"owner_id": "a"}}})
    assert "Ann" == after.lines[0].owner.name
    with pytest.raises(UsageError):
        store.update(Bill, made.id, {"$push": {"lines": {"owner_id": "a", "n": 3}}})
    assert after == store.get(Bill, made.id)


class Shape(Document, collection="shapes", discriminator="kind", validation="off"):
    size: int


class Square(Shape, kind="square"):
    size: Even
    side: Even = 0


class Circle(Shape, kind="circle"):
    size: int


def test_kinds(run):
    """What the base leaves open, the document's own class decides."""
    store = run.store([Shape, Square, Circle])
    square, circle = store.insert(Square(size=2)), store.insert(Circle(size=2))
    for update in ({"$set": {"size": 3}}, {"$set": {"side": 3}}, {"$inc": {"size": 1}}):
        with pytest.raises(UsageError):
            store.update(Shape, square.id, update)
        assert square == store.get(Shape, square.id)
    assert 3 == store.update(Shape, circle.id, {"$set": {"size": 3}}).size


class Faulty(Document, collection="faulty", validation="off"):
    """Nothing follows from it: its updates are one command where their values prove enough."""

    id: int
    n: Even = 0
    name: str = ""
    bounded: Annotated[int, Field(le=10)] = 0


class FaultySource(Document, collection="faulty_sources", validation="off"):
    """Its updates are followed, and run in a transaction."""

    id: int
    n: Even = 0
    name: str = ""
    bounded: Annotated[int, Field(le=10)] = 0


class Followed(Document, collection="followed"):
    id: int
    total: Annotated[int, Sum(FaultySource, "n", by="id")] = 0


WRONG = {"n": 3, "name": 5, "bounded": 99}


@pytest.mark.parametrize("model", [Faulty, FaultySource])
def test_what_was_wrong_before_is_mended_step_by_step(run, database, model):
    """An update either returns and has written, or it raises and has not; whatever else is wrong."""
    store = run.store([Faulty, FaultySource, Followed])
    store.setup()
    collection = database[model.__treadle__.collection]
    collection.insert_one({"_id": 1, **WRONG})

    def stored() -> dict[str, Any]:
        return {name: value for name, value in collection.find_one().items() if name in WRONG}

    for update, expected in (
        # In its own field it must be right.
        ({"$set": {"n": 5}}, None),
        ({"$inc": {"n": 2}}, None),
        ({"$inc": {"bounded": -5}}, None),
        ([{"$set": {"n": {"$add": ["$n", 2]}}}], None),
        ({"$set": {"n": 4}}, {"n": 4, "name": 5, "bounded": 99}),
        ({"$inc": {"n": 2}}, {"n": 6, "name": 5, "bounded": 99}),
        ([{"$set": {"n": {"$add": ["$n", 2]}}}], {"n": 8, "name": 5, "bounded": 99}),
        ({"$inc": {"bounded": -90}}, {"n": 8, "name": 5, "bounded": 9}),
        ({"$set": {"name": "a"}}, {"n": 8, "name": "a", "bounded": 9}),
    ):
        before = stored()
        if expected is None:
            with pytest.raises(UsageError) as caught:
                store.update(model, 1, update)
            assert ("document-invalid", before) == (caught.value.code, stored())
        else:
            after = store.update(model, 1, update)
            assert isinstance(after, model)
            assert expected == stored() == {name: getattr(after, name) for name in WRONG}
    assert "a" == store.get(model, 1).name


@pytest.mark.parametrize("model", [Faulty, FaultySource])
def test_what_was_wrong_before_is_returned_and_deleted(run, database, model):
    store = run.store([Faulty, FaultySource, Followed])
    store.setup()
    collection = database[model.__treadle__.collection]
    collection.insert_one({"_id": 1, **WRONG})
    before = store.update(model, 1, {"$set": WRONG | {"n": 2, "name": "a", "bounded": 1}}, returns="before")
    assert WRONG == {name: getattr(before, name) for name in WRONG}
    assert 2 == store.get(model, 1).n
    collection.update_one({"_id": 1}, {"$set": WRONG})
    assert 1 == store.update_many(model, {}, {"$set": {"n": 4}})
    deleted = store.delete(model, 1)
    assert (5, 4) == (deleted.name, deleted.n)
    assert 0 == collection.count_documents({})


class Spoilt(Document, collection="spoilt", validation="off"):
    id: int
    name: str = ""


class SpoiltCard(BaseModel):
    name: str


class Referring(Document, collection="referring", validation="off"):
    id: int
    spoilt_id: int
    spoilt: Annotated[SpoiltCard | None, ExtendedReference(Spoilt, by="spoilt_id")] = None
    n: Even = 0
    number: Annotated[int | None, Formula({"$divide": ["$n", 4]})] = None


def test_what_would_be_copied_or_computed_is_looked_at_too(run, database):
    """A source that another writer spoilt is no part of a new document; who referred to it goes on."""
    store = run.store([Spoilt, Referring])
    store.setup()
    store.insert_many([Spoilt(id=1, name="a"), Spoilt(id=2, name="b")])
    store.insert(Referring(id=1, spoilt_id=1))
    database["spoilt"].update_one({"_id": 1}, {"$set": {"name": 5}})
    for call in (
        lambda: store.insert(Referring(id=2, spoilt_id=1)),
        lambda: store.insert_many([Referring(id=2, spoilt_id=2), Referring(id=3, spoilt_id=1)]),
        # A quarter of 2 is no whole number.
        lambda: store.insert(Referring(id=2, spoilt_id=2, n=2)),
        lambda: store.update(Referring, 1, {"$set": {"n": 2}}),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert "document-invalid" == caught.value.code
        assert [{"name": "a"}] == [each["spoilt"] for each in database["referring"].find()]
    after = store.update(Referring, 1, {"$set": {"n": 8}})
    assert (8, 2, "a") == (after.n, after.number, after.spoilt.name)
    with pytest.raises(UsageError):
        store.replace(Referring(id=1, spoilt_id=1, n=2))
    assert "b" == store.update(Referring, 1, {"$set": {"spoilt_id": 2}}).spoilt.name
    with pytest.raises(UsageError):
        store.update(Referring, 1, {"$set": {"spoilt_id": 1}})
    assert "b" == store.get(Referring, 1).spoilt.name
