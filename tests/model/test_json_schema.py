"""Validators accept what the models write, and refuse other types.

Covers: model/codec
"""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Annotated, Any, Literal

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from hypothesis import given
from pydantic import BaseModel, ConfigDict, Field
from pymongo.errors import WriteError

from tests.support import Colour, Level, Point, models_with_documents
from treadle import Document, Store
from treadle.model.codec import codec_of
from treadle.model.json_schema import model_schema


@given(made=models_with_documents())
def test_the_validator_accepts_every_document_that_the_model_writes(made, database):
    model, documents = made
    database["things"].drop()
    store = Store(database, [model])
    store.setup()
    store.insert_many(documents)
    schema = database["things"].options()["validator"]
    assert 0 == database["things"].count_documents({"$nor": [schema]})


class Strict(Document, collection="things", validation="strict"):
    text: str
    whole: Annotated[int, Field(ge=1, lt=10)]
    real: float
    flag: bool
    money: Annotated[decimal.Decimal, Field(gt=0, le=100)]
    at: dt.datetime
    ref: Annotated[ObjectId | None, Field(default=None)]
    colour: Colour
    level: Level
    size: Literal["S", "M", 5]
    point: Point
    points: list[Point]
    pair: tuple[int, str]
    either: int | str
    words: dict[str, int]
    optional: int | None = None

    model_config = ConfigDict(arbitrary_types_allowed=True)


def good() -> dict[str, Any]:
    return codec_of(Strict).dump(
        Strict(
            text="t", whole=3, real=1.5, flag=True, money=decimal.Decimal("9.5"), at=dt.datetime.now(dt.UTC),
            colour=Colour.RED, level=Level.LOW, size="S", point=Point(x=1), points=[Point(x=2)], pair=(1, "a"),
            either="x", words={"a": 1},
        ),
        [],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text", 1), ("text", None), ("whole", "3"), ("whole", 0), ("whole", 10), ("whole", 1.5), ("real", "1.5"),
        ("real", Decimal128("1")), ("flag", 1), ("money", 9.5), ("money", Decimal128("0")), ("money", Decimal128("101")),
        ("at", "2026-01-01"), ("ref", "x"), ("colour", "green"), ("level", 3), ("size", "L"), ("point", 1),
        ("point", {"x": "far"}), ("point", {}), ("points", {"x": 1.0}), ("points", [{"x": None}]), ("pair", [1]),
        ("pair", ["a", "a"]), ("either", 1.5), ("words", {"a": "b"}), ("words", []), ("optional", "x"),
    ],
)  # fmt: skip
def test_wrong_types_and_bounds_are_refused(database, path, value):
    Store(database, [Strict]).setup()
    database["things"].insert_one(good())
    with pytest.raises(WriteError, match="failed validation"):
        database["things"].insert_one({**good(), path: value})


@pytest.mark.parametrize("path", ["text", "points", "either"])
def test_fields_without_a_default_are_required(database, path):
    Store(database, [Strict]).setup()
    document = good()
    del document[path]
    with pytest.raises(WriteError, match="failed validation"):
        database["things"].insert_one(document)


def test_fields_with_a_default_may_be_absent_and_others_may_be_added(database):
    Store(database, [Strict]).setup()
    document = good()
    del document["optional"]
    database["things"].insert_one({**document, "added_by_another_service": 1, "_treadle": {}})


def test_a_model_that_forbids_extra_fields_says_so_to_the_server(database):
    class Closed(Document, collection="things"):
        model_config = ConfigDict(extra="forbid")
        n: int

    store = Store(database, [Closed])
    store.setup()
    stored = store.insert(Closed(n=1))
    database["things"].update_one({}, {"$set": {"_treadle": {"n": 1}}})
    assert stored == store.get(Closed, stored.id)
    with pytest.raises(WriteError, match="failed validation"):
        database["things"].insert_one({"n": 1, "other": 2})


def test_moderate_spares_documents_that_were_invalid_before(database):
    class Person(Document, collection="things"):
        id: int
        age: int

    database["things"].insert_one({"_id": 1, "age": "old"})
    Store(database, [Person]).setup(validation="enforce")
    database["things"].update_one({"_id": 1}, {"$set": {"age": "older"}})
    database["things"].insert_one({"_id": 2, "age": 3})
    with pytest.raises(WriteError, match="failed validation"):
        database["things"].update_one({"_id": 2}, {"$set": {"age": "old"}})


def test_draft_4_has_boolean_exclusive_bounds_and_no_references():
    schema = model_schema(codec_of(Strict))
    assert {"bsonType": ["int", "long"], "minimum": 1, "maximum": 10, "exclusiveMaximum": True} == schema[
        "properties"
    ]["whole"]
    assert "$ref" not in str(schema)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


@pytest.mark.parametrize(
    "annotation",
    [
        Annotated[Cat | Dog, Field(discriminator="kind")],
        list[Annotated[Cat | Dog, Field(discriminator="kind")]],
    ],
)
def test_the_discriminator_of_a_union_is_required(database, annotation):
    """Pydantic cannot read a member without it, although the field has a default."""
    body = {"__annotations__": {"pet": annotation}, "__module__": __name__}
    model = type(Document)("Owner", (Document,), body, collection="things", validation="strict")
    Store(database, [model]).setup()
    dog: Any = {"kind": "dog"}
    without: Any = {}
    if annotation.__class__ is type(list[int]):
        dog, without = [dog], [without]
    database["things"].insert_one({"pet": dog})
    with pytest.raises(WriteError, match="failed validation"):
        database["things"].insert_one({"pet": without})
