"""Models as users write them: each survives set-up, a write, a read, and a second set-up.

Covers: model/codec, model/dump, model/shape
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import gc
import ipaddress
import pathlib
import sys
import threading
import uuid
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import pytest
import typing_extensions
from bson import ObjectId
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    IPvAnyAddress,
    Json,
    JsonValue,
    MongoDsn,
    NaiveDatetime,
    PlainSerializer,
    PlainValidator,
    RootModel,
    Secret,
    SecretBytes,
    SecretStr,
    SerializeAsAny,
    field_serializer,
    field_validator,
)
from pydantic.alias_generators import to_camel
from pymongo import TEXT, IndexModel
from pymongo.collation import Collation

from tests.support import Leaf
from treadle import DataError, DeclarationError, Document, Id, Indexed, Store, Sum, UsageError
from treadle.model.codec import codec_of
from treadle.model.dump import encoder_of, field_encoder


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)
    x: int


@dataclass(frozen=True)
class Point:
    x: int


class Version:
    """A class that Pydantic does not know; its serializer and validator stand on the fields."""

    def __init__(self, major: int, minor: int) -> None:
        self.parts = (major, minor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and other.parts == self.parts

    def __hash__(self) -> int:
        return hash(self.parts)


Versioned = Annotated[
    Any,
    PlainValidator(lambda value: value if isinstance(value, Version) else Version(*value)),
    PlainSerializer(lambda value: list(value.parts), return_type=list[int]),
]


class Movie(typing_extensions.TypedDict):
    title: str


class Kind(enum.Enum):
    CAT = "cat"
    DOG = "dog"


class Cat(BaseModel):
    kind: Literal[Kind.CAT] = Kind.CAT
    lives: int = 9


class Dog(BaseModel):
    kind: Literal[Kind.DOG] = Kind.DOG
    price: decimal.Decimal = decimal.Decimal("1.5")


class Number(enum.Enum):
    ONE = 1
    TWO = 2


class Token(enum.Enum):
    A = uuid.UUID(int=1)


class Holiday(enum.Enum):
    NEW_YEAR = dt.date(2026, 1, 1)


class Pair(enum.Enum):
    LEFT = (1, 2)


class Weight(enum.Enum):
    LIGHT = decimal.Decimal("0.5")
    HEAVY = decimal.Decimal("5")


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Spoken(BaseModel):
    town: str = Field(serialization_alias="ort")


class Crossed(BaseModel):
    a: int = Field(serialization_alias="b")
    b: int = Field(serialization_alias="a")


class Animal(BaseModel):
    name: str


class Pet(Animal):
    owner: str


def model_of(annotation: Any, **options: Any) -> type[Document]:
    namespace = {"__annotations__": {"x": annotation}, "__module__": __name__, **options}
    return type(Document)("Odd", (Document,), namespace, collection="odd", validation="strict")


ODD = [
    (set[Frozen], {Frozen(x=1), Frozen(x=2)}),
    (frozenset[Frozen], frozenset({Frozen(x=1)})),
    (list[Point], [Point(1)]),
    (dict[str, Point], {"a": Point(1)}),
    (Point | int, Point(1)),
    (list[Annotated[int, PlainSerializer(str)]], [1, 2]),
    (Movie, {"title": "M"}),
    (Literal["a", None], None),
    (JsonValue, {"a": [1, None]}),
    (None, None),
    (Literal[Kind.CAT], Kind.CAT),
    (Annotated[Cat | Dog, Field(discriminator="kind")], Dog()),
    (list[Annotated[Cat | Dog, Field(discriminator="kind")]], [Cat(), Dog()]),
    (Token, Token.A),
    (Holiday, Holiday.NEW_YEAR),
    (Pair, Pair.LEFT),
    (Weight, Weight.HEAVY),
    (Leaf, Leaf(name="a", children=[Leaf(name="b", children=[Leaf(name="c")])])),
    (Rights, Rights.READ | Rights.WRITE),
    (dict[Number, int], {Number.ONE: 1}),
    (dict[Literal[1, 2], int], {2: 1}),
    (dict[Holiday, int], {Holiday.NEW_YEAR: 1}),
    (Spoken | int, Spoken(town="Bern")),
    (Crossed, Crossed(a=1, b=2)),
    (RootModel[list[int]], RootModel[list[int]]([1])),
    (Annotated[float, Field(gt=0), AfterValidator(round)], 3.7),
    (SerializeAsAny[Animal], Pet(name="Rex", owner="Ann")),
    (Json[dict[str, int]] | None, '{"a": 1}'),
    (Json, '"text"'),
    (list[Json[int]], ["1", "2"]),
    (Versioned, Version(1, 2)),
    (dict[str, Versioned], {"a": Version(1, 2)}),
]


@pytest.mark.parametrize(("annotation", "value"), ODD, ids=lambda each: str(each)[:50])
def test_odd_annotations_survive(database, annotation, value):
    model = model_of(annotation)
    store = Store(database, [model])
    store.setup()
    assert [] == store.setup()
    stored = store.insert(model(x=value))
    read = store.get(model, stored.id)
    if annotation == SerializeAsAny[Animal]:
        # The subclass's own fields are kept; which class it was is not.
        assert {"name": "Rex", "owner": "Ann"} == store.collection(model).find_one()["x"]
    else:
        assert stored == read


@pytest.mark.parametrize(
    ("annotation", "path", "first", "second"),
    [
        (Versioned, "x", Version(1, 2), Version(3, 4)),
        (list[Versioned], "x.0", [Version(1, 2)], Version(3, 4)),
        (dict[str, Versioned], "x.a", {"a": Version(1, 2)}, Version(3, 4)),
        (Annotated[str, PlainSerializer(str.upper)], "x", "A", "b"),
        (list[Annotated[int, PlainSerializer(str)]], "x.0", [1], 2),
        (Json[int], "x", "1", "2"),
    ],
    ids=["field", "list", "dict", "text", "list of text", "json"],
)
def test_a_value_is_encoded_alike_in_every_position(annotation, path, first, second):
    model = model_of(annotation)
    codec = codec_of(model)
    (field,) = [each for each in codec.fields if each.name == "x"]
    shape = field.shape if path == "x" else field.shape.items[-1]
    encode = field_encoder(codec, field) if path == "x" else encoder_of(codec, shape)
    whole = {"x": second, "x.0": [second], "x.a": {"a": second}}[path]
    value = model(x=whole).x
    alone = value if path == "x" else value[0 if path == "x.0" else "a"]
    stored = codec.dump(model(x=whole), [])["x"]
    assert encode(alone, []) == (stored if path == "x" else stored[0 if path == "x.0" else "a"])
    assert encode(alone, []) != codec.dump(model(x=first), [])["x"]


def test_a_serializer_method_encodes_a_single_value(run, database):
    class Doubled(Document, collection="odd"):
        n: int = 1
        factor: int = 2

        @field_serializer("n")
        def multiply(self, value: int) -> int:
            return value * self.factor

    store = run.store([Doubled])
    stored = store.insert(Doubled(n=3))
    assert 6 == database["odd"].find_one()["n"]
    store.update(Doubled, stored.id, {"$set": {"n": 5}})
    assert 10 == database["odd"].find_one()["n"]


def test_the_error_of_a_serializer_names_its_field(run):
    class Broken(Document, collection="odd"):
        n: Annotated[int, PlainSerializer(lambda value: 1 // value)]

    with pytest.raises(UsageError, match="serializer of") as caught:
        run.store([Broken]).insert(Broken(n=0))
    assert "value-not-storable" == caught.value.code


class Site(HttpUrl):
    pass


@pytest.mark.parametrize(
    "annotation",
    [
        collections.deque, collections.deque[int], list[collections.deque[int]], pathlib.Path,
        pathlib.PurePosixPath | None, HttpUrl, Site, MongoDsn, IPvAnyAddress, ipaddress.IPv4Address,
        ipaddress.IPv6Address, SecretStr, SecretBytes, Secret[int], complex,
    ],
    ids=str,
)  # fmt: skip
def test_types_without_a_bson_form_are_refused(annotation):
    with pytest.raises(DeclarationError, match="no BSON form") as caught:
        codec_of(model_of(annotation))
    assert "type-not-storable" == caught.value.code


@pytest.mark.parametrize(
    "value",
    [collections.deque([1]), pathlib.Path("a"), ipaddress.IPv4Address("127.0.0.1"), SecretStr("hidden")],
    ids=lambda each: type(each).__name__,
)
def test_values_without_a_bson_form_are_refused(run, value):
    model = model_of(Any)
    with pytest.raises(UsageError, match="no form") as caught:
        run.store([model]).insert(model(x=value))
    assert "value-not-storable" == caught.value.code
    assert "hidden" not in str(caught.value)


STRICT = [
    (dt.time, dt.time(1, 2)),
    (dt.timedelta, dt.timedelta(seconds=5)),
    (dict[int, str], {1: "a"}),
    (dict[uuid.UUID, str], {uuid.UUID(int=3): "a"}),
    (dict[dt.date, str], {dt.date(2026, 1, 1): "a"}),
    (Pair, Pair.LEFT),
    (set[str], {"a"}),
    (tuple[int, str], (1, "b")),
    (dt.date, dt.date(2026, 1, 1)),
    (uuid.UUID, uuid.UUID(int=7)),
    (Id, ObjectId("65a000000000000000000001")),
]


@pytest.mark.parametrize(("annotation", "value"), STRICT, ids=lambda each: str(each)[:40])
def test_strict_models_read_what_they_wrote(database, annotation, value):
    model = model_of(annotation, model_config=ConfigDict(strict=True))
    store = Store(database, [model])
    stored = store.insert(model(x=value))
    assert stored == store.get(model, stored.id)


@pytest.mark.parametrize(
    ("annotation", "default"),
    [
        (str, None),
        (Annotated[int, Field(ge=1)], 0),
        (Annotated[decimal.Decimal, Field(lt=1)], decimal.Decimal(1)),
    ],
)
def test_a_default_that_breaks_its_own_rules_is_accepted(database, annotation, default):
    """Pydantic does not validate defaults, so a model can write them."""
    model = model_of(annotation, x=default)
    store = Store(database, [model])
    store.setup()
    store.insert(model())


def test_a_validator_that_returns_something_else_opens_the_schema(database):
    class Split(Document, collection="odd", validation="strict"):
        tags: str

        @field_validator("tags")
        @classmethod
        def parts(cls, value: str) -> Any:
            return value.split(",")

    store = Store(database, [Split])
    store.setup()
    store.insert(Split(tags="a,b"))


def test_an_alias_generator_leaves_the_id_alone(run, database):
    class Camel(Document, collection="odd"):
        model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True)
        first_name: str

    store = run.store([Camel])
    stored = store.insert(Camel(first_name="a"))
    assert {"_id": stored.id, "firstName": "a"} == database["odd"].find_one()
    assert stored == store.get(Camel, stored.id)


class Later(Document, collection="odd", naming="camel"):
    id: str
    line_items: list[LineLater] = []


class LineLater(BaseModel):
    n: int


def test_forward_references_go_with_own_ids_and_camel_names(run, database):
    store = run.store([Later])
    stored = store.insert(Later(id="a", line_items=[LineLater(n=1)]))
    assert {"_id": "a", "lineItems": [{"n": 1}]} == database["odd"].find_one()
    assert stored == store.get(Later, "a")


def test_indexes_inside_unions_and_nested_models(run, database):
    class Address(BaseModel):
        city: Annotated[str, Indexed()]

    class Person(Document, collection="odd"):
        email: Optional[Annotated[str, Indexed(unique=True)]] = None  # noqa: UP045
        address: Address | None = None

    store = run.store([Person])
    store.setup()
    assert {"_id_", "email_1", "address.city_1"} == set(database["odd"].index_information())
    assert [] == store.setup()


@pytest.mark.parametrize(
    "index",
    [
        IndexModel([("title", TEXT)]),
        IndexModel([("title", TEXT), ("body", TEXT), ("n", 1)], weights={"title": 5}, name="words"),
        IndexModel([("title", 1)], collation=Collation("en", strength=2)),
        IndexModel(
            [("n", 1)], partialFilterExpression={"at": {"$gt": dt.datetime(2026, 1, 1, tzinfo=dt.UTC)}}
        ),
        IndexModel(
            [("n", 1)], partialFilterExpression={"price": {"$gt": decimal.Decimal("1.5")}}, name="dear"
        ),
        IndexModel([("$**", 1)], wildcardProjection={"title": 1}),
        IndexModel([("place", "2dsphere")]),
        IndexModel([("n", "hashed")]),
    ],
    ids=lambda index: index.document["name"],
)
def test_every_kind_of_index_is_made_once(run, index):
    model = type(Document)("Odd", (Document,), {"__module__": __name__}, collection="odd", indexes=[index])
    store = run.store([model])
    assert 2 == len(store.setup())
    assert [] == store.setup()


def test_a_dropped_collation_is_a_conflict_and_not_silence(run, database):
    database["odd"].create_index("n", unique=True, collation=Collation("en", strength=2))
    model = type(Document)(
        "Odd", (Document,), {"__module__": __name__, "__annotations__": {"n": str}}, collection="odd",
        indexes=[IndexModel([("n", 1)], unique=True)],
    )  # fmt: skip
    with pytest.raises(DataError, match="n_1"):
        run.store([model]).setup()


@pytest.mark.parametrize("documents", [[{"n": [1, 2]}, {"n": [2, 3]}], [{"n": 1}, {"n": 1}, {}]])
def test_duplicates_are_named_wherever_they_stand(run, database, documents):
    database["odd"].insert_many(documents)
    model = type(Document)(
        "Odd", (Document,), {"__module__": __name__}, collection="odd",
        indexes=[IndexModel([("n", 1)], unique=True, sparse=True)],
    )  # fmt: skip
    with pytest.raises(DataError, match=r"more than once: n=[12]") as caught:
        run.store([model]).setup()
    assert "None" not in str(caught.value)


def test_what_could_not_be_read_back_is_refused_before_it_is_written(run):
    class Naive(Document, collection="odd"):
        at: NaiveDatetime

    class Span(Document, collection="odd2"):
        start: dt.datetime
        end: dt.datetime

        @field_validator("end")
        @classmethod
        def later(cls, value: dt.datetime, info: Any) -> dt.datetime:
            if value <= info.data["start"]:
                raise ValueError("the end comes after the start")
            return value

    store = run.store([Naive, Span])
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    for document in (
        Naive(at=dt.datetime(2026, 1, 1)),
        Span(start=start, end=start + dt.timedelta(microseconds=5)),
    ):
        for call in (store.insert, lambda each: store.insert_many([each])):
            with pytest.raises(UsageError, match="read back"):
                call(document)
        assert 0 == store.count(type(document))


@pytest.mark.parametrize("value", [dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-5)))])
def test_a_date_beyond_the_calendar_is_a_clear_error(run, value):
    with pytest.raises(UsageError, match="years 1 to 9999"):
        model = model_of(dt.datetime)
        run.store([model]).insert(model(x=value))


def test_sorts_may_be_mappings_and_none_is_no_filter_for_bulk_writes(run):
    model = model_of(int)
    store = run.store([model])
    store.insert_many([model(x=1), model(x=2)])
    assert [2, 1] == [each.x for each in store.find(model, sort={"x": -1})]
    for call in (
        lambda: store.delete_many(model, None),
        lambda: store.update_many(model, None, {"$set": {"x": 3}}),
    ):
        with pytest.raises(UsageError, match="which Odd documents"):
            call()
    assert 2 == store.count(model)


def test_leaving_a_find_early_closes_its_cursor(heard):
    database, listener = heard
    model = model_of(int)
    store = Store(database, [model])
    store.insert_many([model(x=number) for number in range(500)])
    gc.disable()
    try:
        for _ in store.find(model):
            break
        assert "killCursors" in listener.names
    finally:
        gc.enable()


def test_threads_that_meet_a_new_model_at_once_all_see_it_whole(database):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(10):
            inner = type(BaseModel)(
                "Inner", (BaseModel,), {"__annotations__": {"n": int}, "__module__": __name__}
            )
            model = model_of(list[inner])
            seen = []
            threads = [
                threading.Thread(target=lambda made=model, out=seen: out.append(len(codec_of(made).fields)))
                for _ in range(6)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [2] * 6 == seen
    finally:
        sys.setswitchinterval(interval)


def test_state_that_a_caller_gives_is_not_taken_for_treadles(run, database):
    class Open(Document, collection="odd"):
        model_config = ConfigDict(extra="allow")

    run.store([Open]).insert(Open(_treadle={"n": 5}, other=ObjectId()))
    assert "_treadle" not in database["odd"].find_one()


def test_what_is_stored_of_a_subclass_is_what_is_returned(run):
    class Home(Document, collection="odd"):
        pet: Animal

    store = run.store([Home])
    stored = store.insert(Home(pet=Pet(name="Rex", owner="Ann")))
    assert type(stored.pet) is Animal
    assert stored == store.get(Home, stored.id)


class Net(BaseModel):
    net: int = 0


class Year(Document, collection="years"):
    total_id: int
    sold: int = Field(0, alias="2024")
    next: Net = Field(Net(), alias="2025")


class Total(Document, collection="totals"):
    id: int
    sold: Annotated[int, Sum(Year, "sold", by="total_id")] = 0
    later: Annotated[int, Sum(Year, {"$add": ["$2025.net", 0]}, by="total_id", maintain="stream")] = 0


@pytest.mark.parametrize("name", ["2024", "2025.net"])
def test_names_that_are_numbers_are_no_positions(run, database, name):
    store = run.store([Year, Total])
    store.setup()
    store.insert(Total(id=1))
    year = store.insert(Year(total_id=1))
    worker = store.worker()
    worker.run_until_idle()
    store.update(Year, year.id, {"$set": {name: 5}})
    worker.run_until_idle()
    total = store.get(Total, 1)
    assert (5, 0) == (total.sold, total.later) if name == "2024" else (0, 5) == (total.sold, total.later)
    assert [] == store.verify()
