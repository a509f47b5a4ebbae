"""Validators on live collections: what they carry, and which documents they would refuse."""

from __future__ import annotations

import datetime as dt
import enum
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from bson import ObjectId
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    WrapValidator,
)
from pymongo.errors import OperationFailure

from tests.support import annotated_values
from treadle import Document, Formula, Store, migration
from treadle.model.bson_types import to_bson
from treadle.model.codec import codec_of
from treadle.model.json_schema import model_schema
from treadle.upkeep.collection_schema import collection_schema


class Colour(enum.Enum):
    RED = "red"


class Part(BaseModel):
    code: str = Field(min_length=2)


class Bound(Document, collection="bound", validation="strict"):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=2, max_length=4)
    word: Annotated[str, StringConstraints(max_length=3)]
    step: int = Field(multiple_of=5, ge=0)
    tags: list[str] = Field(min_length=1, max_length=2)
    unique: set[int] = Field(max_length=2)
    words: dict[str, int] = Field(min_length=1)
    part: Part
    colour: Colour
    size: Literal["S", "M"]
    maybe: Annotated[str, Field(min_length=3)] | None = None


def good() -> dict[str, Any]:
    return {
        "_id": ObjectId(), "name": "ab", "word": "axb", "step": 10, "tags": ["x"], "unique": [1],
        "words": {"a": 1}, "part": {"code": "xy"}, "colour": "red", "size": "S", "maybe": None,
    }  # fmt: skip


FAULTS: list[tuple[str, Any]] = [
    ("name", "a"), ("name", "abcde"), ("name", "äöüßé"), ("word", "abcd"), ("step", 7), ("step", -5),
    ("tags", []), ("tags", ["a", "b", "c"]), ("tags", [1]), ("unique", [1, 2, 3]), ("words", {}),
    ("words", {"a": "b"}), ("part", {"code": "x"}), ("part", {}), ("colour", "blue"), ("size", "L"),
    ("maybe", "ab"), ("more", 1), ("step", 2.5),
]  # fmt: skip


def test_constraints_carry_over_and_faults_are_found(database):
    store = Store(database, [Bound])
    store.setup()
    bound = database["bound"]
    for path, value in FAULTS:
        bound.insert_one({**good(), path: value}, bypass_document_validation=True)
        assert [("validation", "Bound", path)] == [
            (each.pattern, each.model, each.path) for each in store.verify()
        ], value
        with pytest.raises(OperationFailure, match="validation"):
            bound.insert_one({**good(), path: value})
        bound.delete_many({})
    bound.insert_one(good())
    assert [] == store.verify()


def test_lengths_are_counted_in_characters_on_both_sides(database):
    store = Store(database, [Bound])
    store.setup()
    made = {**good(), "name": "äß😀é"}
    made.pop("_id")
    store.insert(Bound(**made))
    assert [] == store.verify()


class Odd(Document, collection="odd"):
    short: str = Field("x", min_length=3)
    empty: list[int] = Field(default_factory=list, min_length=1)
    made: str = Field(default_factory=lambda: "y", min_length=3)
    low: int = Field(0, ge=1, multiple_of=7)


def test_a_default_that_breaks_its_own_rules_is_accepted(database):
    """Pydantic does not validate defaults, so the model can write them."""
    store = Store(database, [Odd])
    store.setup()
    store.insert(Odd())
    assert [] == store.verify()


def test_a_pattern_is_left_to_the_model(database):
    class Texts(Document, collection="texts", validation="strict"):
        word: str = Field(pattern="^[a-z]+$")

    Store(database, [Texts]).setup()
    schema = database["texts"].options()["validator"]["$jsonSchema"]
    assert {"bsonType": "string"} == schema["properties"]["word"]


def shout(value: Any) -> str:
    return str(value)


class Spelled(BaseModel):
    model_config = ConfigDict(str_max_length=2, str_min_length=1)

    word: str


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (list[Annotated[int, AfterValidator(shout)]], [1]),
        (dict[str, Annotated[int, AfterValidator(shout)]], {"a": 1}),
        (tuple[Annotated[int, WrapValidator(lambda value, handler: shout(value))], int], (1, 2)),
        (Annotated[int, PlainValidator(shout)] | bytes, 1),
        (Annotated[Decimal, Field(ge=0.1)], Decimal("0.1")),
        (Annotated[Decimal, Field(le=0.3)], Decimal("0.3")),
        (Annotated[float, Field(le=Decimal("0.1"))], 0.1),
    ],
)
def test_the_validator_takes_what_pydantic_makes_of_a_value(database, annotation, value):
    """Validators inside arrays, and numbers that the server reads otherwise."""
    body = {"__annotations__": {"x": annotation}, "__module__": __name__}
    model = type(Document)("Made", (Document,), body, collection="made", validation="strict")
    store = Store(database, [model])
    store.setup()
    made = store.insert(model(x=value))
    assert [] == store.verify()
    assert made.id == database["made"].find_one({}, {"_id": 1})["_id"]


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Annotated[Decimal, Field(ge=0.1)], Decimal("0.09")),
        (Spelled, {"word": ""}),
        (Spelled, {"word": "abc"}),
    ],
)
def test_the_validator_refuses_what_the_model_refuses(database, annotation, value):
    body = {"__annotations__": {"x": annotation}, "__module__": __name__}
    model = type(Document)("Made", (Document,), body, collection="made", validation="strict")
    with pytest.raises(ValidationError):
        model(x=value)
    store = Store(database, [model])
    store.setup()
    raw = {"x": to_bson(value, [])}
    with pytest.raises(OperationFailure, match="validation"):
        database["made"].insert_one(raw)
    database["made"].insert_one(raw, bypass_document_validation=True)
    (finding,) = store.verify()
    assert "x" == finding.path.split(".")[0]


def test_numbers_that_are_none_are_found_and_not_stumbled_over(database):
    class Measured(Document, collection="measured"):
        id: int
        x: float = Field(0, ge=0)
        d: Decimal = Field(Decimal(0), ge=0, le=5)

    store = Store(database, [Measured])
    store.setup()
    odd = [{"x": float("nan")}, {"d": Decimal128("NaN")}, {"d": Decimal128("sNaN")}, {"x": float("-inf")}]
    raws = [{"_id": number, **each} for number, each in enumerate(odd)]
    database["measured"].insert_many(raws, bypass_document_validation=True)
    assert [(0, "x"), (1, "d"), (2, "d"), (3, "x")] == [
        (each.document_id, each.path) for each in store.verify()
    ]


def test_a_decimal_may_have_a_whole_number_as_its_default(run):
    class Priced(Document, collection="priced", validation="strict"):
        price: Decimal = 0
        rate: Decimal = 0.1

    store = run.store([Priced])
    store.setup()
    made = store.insert(Priced())
    assert (Decimal(0), Decimal("0.1")) == (
        store.get(Priced, made.id).price,
        store.get(Priced, made.id).rate,
    )


# -- a live collection, from none to moderate to strict ------------------------------------------


def at_level(level: str, action: str = "error") -> type[Document]:
    class Live(Document, collection="live", validation=level, validation_action=action):
        n: Annotated[int, Field(ge=0)]
        name: str = ""

    return Live


@pytest.mark.quick
def test_a_live_collection_goes_from_none_to_moderate_to_strict(run, database):
    identities = [ObjectId() for _ in range(9)]
    database["live"].insert_many(
        [{"_id": each, "n": -1 if number < 7 else 1} for number, each in enumerate(identities)]
    )
    assert [] == run.store([at_level("off")]).setup()
    moderate = run.store([at_level("moderate")])
    for done in (moderate.setup(dry_run=True), moderate.setup()):
        (action,) = done
        assert "change validator" == action.what
        assert action.detail.startswith("none to moderate, only warns; 7 documents do not validate: ")
        assert f"_id {identities[0]!r} (n)" in action.detail
        assert 5 == action.detail.count("_id ")
        assert action.detail.endswith("; …; setup(validation='enforce') makes it binding")
    assert [] == moderate.setup()
    database["live"].update_one({"_id": identities[7]}, {"$set": {"n": -2}})
    database["live"].update_one({"_id": identities[7]}, {"$set": {"n": 1}})
    (action,) = moderate.setup(validation="enforce")
    assert action.detail.startswith("moderate; 7 documents do not validate")
    assert [] == moderate.setup()
    # Moderate: what is invalid may stay so, what is valid may not become so.
    database["live"].update_one({"_id": identities[0]}, {"$set": {"n": -2}})
    with pytest.raises(OperationFailure, match="validation"):
        database["live"].update_one({"_id": identities[8]}, {"$set": {"n": -2}})
    strict = run.store([at_level("strict")])
    (action,) = strict.setup()
    assert action.detail.startswith("moderate to strict; 7 documents")
    with pytest.raises(OperationFailure, match="validation"):
        database["live"].update_one({"_id": identities[0]}, {"$set": {"n": -3}})
    found = strict.verify()
    assert set(identities[:7]) == {each.document_id for each in found}
    assert {("validation", "Live", "n")} == {(each.pattern, each.model, each.path) for each in found}
    assert [-2, -1] == sorted({each.stored for each in found})
    database["live"].update_many({"n": {"$lt": 0}}, {"$set": {"n": 0}})
    assert [] == strict.verify()
    assert 0 == strict.repair()


def test_a_validator_may_only_warn(run, database):
    store = run.store([at_level("strict", "warn")])
    assert ["create collection live"] == [str(each) for each in store.setup()]
    assert [] == store.setup()
    database["live"].insert_one({"n": "text"})
    assert "warn" == database["live"].options()["validationAction"]
    assert 1 == len(store.verify())
    (action,) = run.store([at_level("strict")]).setup()
    assert action.detail.startswith("strict; 1 document does not validate")
    (action,) = run.store([at_level("moderate", "warn")]).setup()
    assert action.detail.startswith("strict to moderate, only warns; 1 document")


def test_verify_reaches_every_page_and_every_type_of_id(database):
    class Any_(Document, collection="anys"):
        id: Any
        n: int

    database["anys"].insert_many([{"_id": number} for number in range(700)])
    database["anys"].insert_many([{"_id": each} for each in (None, "a", {"x": 1}, 2.5)])
    found = Store(database, [Any_]).verify()
    assert 704 == len(found)
    assert {"n"} == {each.path for each in found}


class Doubled(Document, collection="doubled"):
    id: Any
    n: int = 0
    double: Annotated[int | None, Formula({"$multiply": ["$n", 2]})] = None


@pytest.mark.parametrize("identities", [[None], [None, 1, "a"]])
def test_verify_and_rebuild_end_where_an_id_is_null(database, identities):
    """None is an id as well, not only the beginning."""
    database["doubled"].insert_many([{"_id": each, "n": 2} for each in identities])
    store = Store(database, [Doubled])
    assert identities == [each.document_id for each in store.verify()]
    assert len(identities) == store.rebuild(Doubled)
    assert [] == store.verify()


def test_validation_off_is_nobodys_business(run, database):
    database["live"].insert_one({"n": "text"})
    assert [] == run.store([at_level("off")]).verify()


# -- kinds and versions -----------------------------------------------------------------------------


class Base(Document, collection="family", discriminator="kind", version=2, validation="strict"):
    name: str = ""


class Left(Base, kind="left"):
    n: int


class Right(Base, kind="right"):
    word: str


migration(Base, 1, up=lambda document: document)


BRANCHES: list[tuple[dict[str, Any], str | None]] = [
    ({"kind": "left", "n": 1, "schema_version": 2}, None),
    ({"kind": "left", "anything": 1, "schema_version": 1}, None),
    ({"kind": "left"}, None),
    ({"kind": "right", "word": "a"}, None),
    ({"kind": "right", "word": "a", "schema_version": 1}, None),
    ({"kind": "left", "n": "x", "schema_version": 2}, "n"),
    ({"kind": "left", "schema_version": 2}, "n"),
    ({"kind": "left", "n": 1, "schema_version": 3}, "schema_version"),
    ({"kind": "right", "word": 1}, None),
    ({"kind": "right", "word": 1, "schema_version": 2}, "word"),
    ({"kind": "right", "word": "a", "schema_version": 2}, None),
]


def test_each_kind_and_version_has_its_branch(database):
    store = Store(database, [Base, Left, Right])
    schema = collection_schema(store.graph.entry(Base))
    family = database["family"]
    for raw, path in BRANCHES:
        family.insert_one(dict(raw))
        assert ([] if path is None else [path]) == [each.path for each in store.verify()], raw
        assert (path is None) == (0 == family.count_documents({"$nor": [{"$jsonSchema": schema}]})), raw
        family.delete_many({})
    for raw in ({"kind": "up", "n": 1, "schema_version": 2}, {"kind": "up", "schema_version": 3}):
        family.insert_one(raw)
        assert 1 == len(store.verify()), raw
        family.delete_many({})


def test_verify_of_one_kind_looks_at_that_kind(database):
    store = Store(database, [Base, Left, Right])
    database["family"].insert_many(
        [
            {"kind": "left", "schema_version": 2},
            {"kind": "right", "schema_version": 2},
            {"kind": "left", "schema_version": 2, "n": 1},
        ]
    )
    assert ["Left"] == [each.model for each in store.verify(Left)]
    assert ["Left", "Right"] == sorted(each.model for each in store.verify(Base))


# -- findings agree with the server ---------------------------------------------------------


broken = st.sampled_from(
    [
        None,
        True,
        1,
        -1,
        2**40,
        1.5,
        "text",
        "",
        Decimal128("1.5"),
        dt.datetime(2026, 1, 1),
        ObjectId(),
        b"x",
        [],
        [1],
        {},
        {"a": 1},
        Int64(3),
        float("nan"),
        Decimal128("NaN"),
    ]
)


@given(fields=st.lists(annotated_values(), min_size=1, max_size=3), data=st.data())
def test_a_finding_names_the_field_that_the_server_refuses(fields, data, database):
    annotations = {f"f{number}": annotation for number, (annotation, _) in enumerate(fields)}
    model = type(Document)(
        "Thing", (Document,), {"__annotations__": annotations, "__module__": __name__}, collection="things"
    )
    document = model(**{f"f{number}": data.draw(values) for number, (_, values) in enumerate(fields)})
    raw = codec_of(model).dump(document, [])
    path = data.draw(st.sampled_from(sorted(annotations)))
    raw[path] = data.draw(broken)
    database["things"].drop()
    store = Store(database, [model])
    store.collection(model).insert_one(raw)
    refused = database["things"].count_documents({"$nor": [{"$jsonSchema": model_schema(codec_of(model))}]})
    assert [path] * refused == [each.path for each in store.verify()]
