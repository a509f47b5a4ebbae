"""Declarations that cannot work are refused when the Store is made, before it speaks to a server.

Each row of `REFUSED` is one wrong declaration: the code of its error, text of
the message that names the place, and a function that declares the models. What
a server lacks is refused when its capabilities are known: `LACKING`.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime as dt
import enum
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from pydantic import AliasPath, BaseModel, ConfigDict, Field
from pymongo import IndexModel, MongoClient

from tests.outside import Slug
from treadle import (
    AncestorArray,
    Approximate,
    Archive,
    Attributes,
    Average,
    Bucket,
    ChildReferences,
    Collect,
    Count,
    CreatedAt,
    Day,
    DeclarationError,
    Document,
    ExtendedReference,
    Formula,
    History,
    Hour,
    Id,
    Indexed,
    Links,
    MaterializedPath,
    Max,
    Minute,
    Outlier,
    ParentReference,
    Rollup,
    Store,
    Subset,
    Sum,
    TimeSeries,
    Total,
    UpdatedAt,
    migration,
)
from treadle.graph.graph import Graph
from treadle.graph.rule import Pattern, Place, Rule
from treadle.plan.capabilities import Capabilities

ROOT = Path(__file__).parent.parent
HOUR, YEAR = dt.timedelta(hours=1), dt.timedelta(days=365)
Models = list[Any]


class Refusal(NamedTuple):
    """A wrong declaration: its error's code, where the message says it is, and how to declare it."""

    code: str
    place: str
    declare: Callable[[], Models]
    # Options of the Store that are wrong with it.
    options: Callable[[Models], dict[str, Any]] = lambda models: {}


def wrong(fields: dict[str, Any] | None = None, /, **keywords: Any) -> Any:
    """Declare a document class `Wrong` with these annotations, and `None` where a default is needed."""
    annotations = fields or {}
    defaults = {name: None for name, each in annotations.items() if "| None" in str(each)}
    body = {"__annotations__": annotations, "__module__": __name__, **defaults}
    return type(Document)("Wrong", (Document,), body, **{"collection": "wrong", **keywords})


def field(code: str, place: str, annotation: Any, *others: Any, **more: Any) -> Refusal:
    """A refusal of one annotated field, `Wrong.value`, beside other models and fields."""
    return Refusal(code, place, lambda: [*others, wrong({**more, "value": annotation})])


# -- models that the declarations below speak of ------------------------------------------------------


class Customer(Document, collection="customers"):
    name: str
    tier: str = "silver"


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    price: Decimal = Decimal(0)
    tags: list[str] = []
    lines: list[Part] = []


class Part(BaseModel):
    tags: list[str] = []


class Sale(Document, collection="sales"):
    product_id: int
    amount: Decimal
    created_at: dt.datetime | None = None
    shop: str | None = None


class Priced(Document, collection="priced"):
    specs: Annotated[dict[str, int], Attributes()] = {}


class Reading(Document, collection="readings", bucket=Bucket(key="sensor", time="at", span=HOUR)):
    sensor: str
    at: dt.datetime


class Item(Document, collection="items", discriminator="type"):
    title: str = ""


class Book(Item, kind="book"):
    pages: Annotated[dict[str, int], Attributes()] = {}


class User(Document, collection="users", version=3):
    name: str = ""


for number in (1, 2):
    migration(User, number, up=lambda document: document, down=lambda document: document)


class Piped(Document, collection="piped", version=2):
    name: str = ""


migration(Piped, 1, up=[{"$set": {"name": "x"}}])


class NameCard(BaseModel):
    name: str


class TypoCard(BaseModel):
    teir: str


class NumberCard(BaseModel):
    name: int


class RatingCard(BaseModel):
    rating: int


class Colour(enum.Enum):
    RED = "red"


# -- models and their fields --------------------------------------------------------------------------


def opaque() -> Models:
    class Opaque: ...

    class Wrong(Document, collection="wrong"):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        value: Opaque

    return [Wrong]


def stored_twice() -> Models:
    class Wrong(Document, collection="wrong"):
        a: int
        b: int = Field(alias="a")

    return [Wrong]


def read_through_a_path() -> Models:
    class Nested(BaseModel):
        inner: int = Field(validation_alias=AliasPath("outer", "inner"))

    return [wrong({"value": Nested})]


def without_a_collection() -> Models:
    class Wrong(Document): ...

    return [Wrong]


def class_names_of_kinds() -> Models:
    class Book(Item, kind="novel"):
        author: str = ""

    return [globals()["Book"], Book]


def other_id_of_a_kind() -> Models:
    class Wrong(Item, kind="numbered"):
        id: int

    return [Item, Wrong]


class Dated(BaseModel):
    at: Annotated[dt.datetime | None, UpdatedAt()] = None


MODELS = [
    *[
        field("union-ambiguous", "Wrong.value", annotation)
        for annotation in (
            dt.date | dt.datetime,
            set[int] | list[int],
            Colour | str,
            dt.timedelta | float,
            dt.time | str,
            int | dt.timedelta,
            list[dt.date] | list[dt.datetime],
            dict[str, dt.date] | dict[str, dt.datetime],
        )
    ],
    Refusal("type-not-storable", "Wrong.value is a Opaque", opaque),
    field("key-not-storable", "Wrong.value", dict[bytes, int]),
    field("stored-name-invalid", "Wrong.value", Annotated[int, Field(alias="$x")]),
    Refusal("stored-name-clash", "both stored as 'a'", stored_twice),
    Refusal("alias-not-readable", "Nested.inner", read_through_a_path),
    *[
        Refusal("id-invalid", "Wrong.id", lambda each=each: [wrong({"id": each})])
        for each in (Id | None, list[int])
    ],
    Refusal("id-invalid", "Wrong and Item", other_id_of_a_kind),
    Refusal("collection-missing", "Wrong", without_a_collection),
    Refusal("collection-shared", "Wrong", lambda: [User, wrong(collection="users")]),
    Refusal(
        "model-name-shared",
        f"{__name__}.User and {__name__}.User",
        lambda: [User, type(Document)("User", (Document,), {"__module__": __name__}, collection="other")],
    ),
    Refusal(
        "model-name-shared", f"{__name__}.Book and {__name__}.class_names_of_kinds", class_names_of_kinds
    ),
    Refusal("model-invalid", "int", lambda: [int]),
    *[
        Refusal("collection-name-invalid", "Wrong", lambda name=name: [wrong(collection=name)])
        for name in ("", "a$b", "system.x", "treadle.x")
    ],
    Refusal("keyword-unknown", "did you mean 'collection'", lambda: [wrong(colection="x")]),
    Refusal("keyword-unknown", "did you mean 'indexes'", lambda: [wrong(indexs=[])]),
    Refusal("keyword-unknown", "naming='kebab'", lambda: [wrong(naming="kebab")]),
    Refusal("keyword-unknown", "IndexModel", lambda: [wrong(indexes=["x"])]),
    Refusal("keyword-unknown", "whole='no'", lambda: [wrong(whole="no")]),
    # -- revision, soft delete, dates
    Refusal("source-field-missing", "Wrong", lambda: [wrong(revision="nowhere")]),
    Refusal("maintained-type", "Wrong.number", lambda: [wrong({"number": str}, revision="number")]),
    Refusal("maintained-type", "Wrong.gone", lambda: [wrong({"gone": dt.datetime}, soft_delete="gone")]),
    field("maintained-type", "Wrong.value", Annotated[int, CreatedAt()]),
    field("maintained-in-array", "Wrong.value.at", list[Dated]),
]


# -- kinds --------------------------------------------------------------------------------------------


def of_item(**keywords: Any) -> Callable[[], Models]:
    def declare() -> Models:
        class Wrong(Item, **keywords): ...

        return [Item, Wrong]

    return declare


def a_kind_twice() -> Models:
    class Wrong(Item, kind="book"): ...

    return [Book, Wrong]


def a_literal_of_another_kind() -> Models:
    class Wrong(Item, kind="wrong"):
        type: Literal["right"] = "right"

    return [Item, Wrong]


def no_such_default() -> Models:
    class Thing(Document, collection="things", discriminator="type", default_kind="none"): ...

    class One(Thing, kind="one"): ...

    return [Thing, One]


def a_date_of_one_kind() -> Models:
    class Base(Document, collection="bases", discriminator="t"): ...

    class Wrong(Base, kind="w"):
        at: Annotated[dt.datetime | None, UpdatedAt()] = None

    return [Base, Wrong]


def redeclared_by_a_kind() -> Models:
    class Base(Document, collection="bases", discriminator="t"):
        n: Annotated[int, Count(Review, by="product_id")] = 0

    class Wrong(Base, kind="w"):
        n: Annotated[int, Sum(Review, "rating", by="product_id")] = 0

    return [Review, Base, Wrong]


def stored_in_two_ways() -> Models:
    class Game(Item, kind="game"):
        pages: dict[str, int] = {}

    return [Item, Book, Game]


def inside_a_union() -> Models:
    class Line(BaseModel):
        t: Literal["line"] = "line"
        customer_id: Id
        name: Annotated[str | None, ExtendedReference(Customer, by="customer_id", field="name")] = None

    class Note(BaseModel):
        t: Literal["note"] = "note"

    return [Customer, wrong({"parts": list[Line | Note]})]


KINDS = [
    Refusal("kind-invalid", "Wrong", lambda: [wrong(kind="x")]),
    Refusal("kind-invalid", "Wrong", lambda: [wrong(default_kind="one")]),
    Refusal("kind-invalid", "Wrong", of_item(kind="x", discriminator="other")),
    Refusal("kind-invalid", "Wrong", of_item(kind="")),
    Refusal("kind-invalid", "Wrong", of_item(kind="level", validation="strict")),
    Refusal("kind-invalid", "Wrong", a_literal_of_another_kind),
    Refusal("kind-invalid", "Thing", no_such_default),
    Refusal("kind-invalid", "Wrong.at", a_date_of_one_kind),
    Refusal("kind-twice", "Wrong", a_kind_twice),
    Refusal("stored-name-invalid", "a.b", lambda: [wrong(discriminator="a.b")]),
    Refusal("path-maintained-twice", "n", redeclared_by_a_kind),
    Refusal("maintained-type", "pages", stored_in_two_ways),
    Refusal("pattern-in-union", "Wrong.parts", inside_a_union),
]


# -- versions -----------------------------------------------------------------------------------------


def migrations(*steps: tuple[int, Any], version: Any = 2) -> Callable[[], Models]:
    def declare() -> Models:
        model = wrong(version=version)
        for number, up in steps:
            migration(model, number, up=up)
        return [model]

    return declare


def same(document: Any) -> Any:
    return document


def a_kind_of_another_version() -> Models:
    class Base(Document, collection="bases", discriminator="kind", version=1): ...

    class Wrong(Base, kind="later", version=2): ...

    return [Base, Wrong]


def migration_of_a_kind() -> Models:
    class Base(Document, collection="bases", discriminator="kind", version=1): ...

    class Wrong(Base, kind="other"): ...

    migration(Wrong, 1, up=same)
    return [Base, Wrong]


def migration_of_a_dict() -> Models:
    migration(dict, 2, up=same)  # type: ignore[type-var]
    return []


VERSIONS = [
    Refusal("migration-missing", "2 to 3", migrations((1, same), (3, same), version=4)),
    Refusal("migration-twice", "Wrong", migrations((1, same), (1, [{"$set": {"a": 1}}]))),
    Refusal("version-invalid", "Wrong", migrations((0, [{"$set": {"a": 1}}]))),
    Refusal("version-invalid", "Wrong", migrations(version="2")),
    Refusal("version-invalid", "dict", migration_of_a_dict),
    Refusal("kind-invalid", "declare it on the base", a_kind_of_another_version),
    Refusal("version-invalid", "declare them on Base", migration_of_a_kind),
    Refusal("migration-invalid", "Wrong", migrations((1, [{"$match": {}}]))),
    Refusal("migration-invalid", "Wrong", migrations((1, []))),
    *[
        Refusal(code, model.__name__, lambda model=model: [model], lambda models, to=to: {"write_versions": {models[0]: to}})
        for code, model, to in (
            ("version-invalid", User, 4),
            ("version-invalid", User, 0),
            ("version-invalid", Customer, 1),
            ("migration-no-way-down", Piped, 1),
        )
    ],
    *[
        Refusal(
            code,
            "rollup= and",
            lambda keyword=keyword: [
                Sale,
                wrong({"id": int, "n": Annotated[int, Count()]}, rollup=Rollup(Sale, keys={"id": "product_id"}), **keyword),
            ],
        )
        for code, keyword in (("version-invalid", {"version": 1}), ("kind-invalid", {"discriminator": "kind"}))
    ],
]  # fmt: skip


# -- computed fields, subsets and collections ---------------------------------------------------------


class CountedPart(BaseModel):
    count: Annotated[int, Count(Review, by="product_id")] = 0


def of_reviews(code: str, place: str, kind: Any, pattern: Any) -> Refusal:
    return field(code, place, Annotated[kind, pattern], Review)


def reads_a_derived_field() -> Models:
    return [
        wrong(
            {
                "text": str,
                "loud": Annotated[str | None, Formula({"$toUpper": "$text"})],
                "slug": Annotated[str | None, Slug("loud")],
            }
        )
    ]


COMPUTED = [
    of_reviews("maintained-type", "Wrong.value is a str; a count is an int", str, Count(Review, by="product_id")),
    of_reviews("maintained-type", "Review.product_id, which is a ObjectId", int, Sum(Review, "product_id", by="product_id")),
    of_reviews("maintained-type", "cannot hold a sum of Review.price, which is a Decimal", int, Sum(Review, "price", by="product_id")),
    of_reviews("maintained-type", "is a int, but Review.price is a Decimal", int | None, Max(Review, "price", by="product_id")),
    of_reviews("maintained-type", "Wrong.value", float, Average(Review, "rating", by="product_id")),
    of_reviews("maintained-type", "Wrong.value", float, Formula({"$add": [1, 2]})),
    of_reviews("reference-field-missing", "Wrong.value", int, Count(Review)),
    of_reviews("reference-field-missing", "Wrong.value", int, Count(Review, by="produkt_id")),
    of_reviews("reference-type", "Wrong.value", int, Count(Review, by="rating")),
    of_reviews("source-field-missing", "Wrong.value", int, Sum(Review, "ratng", by="product_id")),
    of_reviews("source-field-in-array", "Wrong.value", list[str] | None, Max(Review, "lines.tags", by="product_id")),
    of_reviews("source-unknown", "Wrong.value", int, Count("Reviews", by="product_id")),
    of_reviews("maintenance-cycle", "Wrong.value", float | None, Formula({"$add": ["$value", 2]})),
    Refusal("path-maintained-twice", "Wrong.value", lambda: [
        Review, wrong({"value": Annotated[int, Count(Review, by="product_id"), Sum(Review, "rating", by="product_id")]})
    ]),
    field("maintained-in-array", "Wrong.value", list[CountedPart], Review),
    field("source-unknown", "only inside a rollup", Annotated[int, Count()]),
    Refusal("local-derived", "Wrong.slug", reads_a_derived_field),
    *[
        of_reviews(code, "Wrong.value", kind, Subset(Review, **{"by": "product_id", "sort": "-rating", "size": 3, **options}))
        for code, kind, options in (
            ("source-field-missing", list[RatingCard], {"sort": "-ratng"}),
            ("pattern-keyword", list[RatingCard], {"size": 0}),
            ("maintained-type", RatingCard, {}),
            ("reference-field-missing", list[RatingCard], {"by": "nope"}),
        )
    ],
    *[
        of_reviews(code, "Wrong.value", kind, Collect(Review, name, by="product_id", **options))
        for code, kind, name, options in (
            ("maintained-type", int, "rating", {}),
            ("maintained-type", list[str], "rating", {}),
            ("maintained-type", list[int] | None, "rating", {}),
            ("pattern-keyword", list[int], "rating", {"size": 0}),
            ("pattern-keyword", list[int], "rating", {"size": 5000}),
            ("source-field-missing", list[int], "ratng", {}),
        )
    ],
    field("attributes-path", "specs.size", Annotated[int, Sum(Priced, "specs.size", by="id")], Priced),
]  # fmt: skip


# -- extended references ------------------------------------------------------------------------------


def reference(
    code: str, words: str, kind: Any = NameCard | None, by_type: Any = Id, to: Any = Customer, **options: Any
) -> Refusal:
    pattern = ExtendedReference(to, **{"by": "customer_id", **options})
    return field(code, words, Annotated[kind, pattern], Customer, customer_id=by_type)


def a_circle() -> Models:
    class A(Document, collection="a"):
        b_id: Id
        b: Annotated[str | None, ExtendedReference("B", by="b_id", field="a")] = None

    class B(Document, collection="b"):
        a_id: Id
        a: Annotated[str | None, ExtendedReference(A, by="a_id", field="b")] = None

    return [A, B]


def by_another_key(to: str) -> Callable[[], Models]:
    class Person(Document, collection="people"):
        emails: list[str] = []
        age: int = 0
        posts: Annotated[str | None, Formula({"$toString": "$age"})] = None

    def declare() -> Models:
        pattern = ExtendedReference(Person, by="person", to=to, field="age")
        return [Person, wrong({"person": str, "age": Annotated[int | None, pattern]})]

    return declare


REFERENCES = [
    reference("embedded-field-missing", "did you mean 'tier'", TypoCard | None),
    reference("reference-field-missing", "did you mean 'customer_id'", by="custmer_id"),
    reference("source-unknown", "did you mean 'Customer'", to="Custmer"),
    reference("source-unknown", "add it to models=", to=Sale),
    reference("maintained-type", "'name' as a int, but Customer.name is a str", NumberCard | None),
    reference("maintained-type", "no card", str | None),
    reference("reference-type", "ObjectId", by_type=str),
    reference("pattern-keyword", "policy", policy="sink"),
    reference("maintained-type", "None", NameCard, on_delete="clear"),
    Refusal("maintenance-cycle", "A.b -> B.a -> A.b", a_circle),
    reference("reference-field-in-array", "by='customer_id', which is an array", by_type=list[Id]),
    *[
        field("maintained-type", "Wrong.value", Annotated[kind, ExtendedReference(Review, by="ref", field=name)], Review, ref=Id)
        for kind, name in ((str | None, "tags"), (list[int], "tags"), (list[list[str]], "lines.tags"))
    ],
    Refusal("reference-key", "Wrong.age", by_another_key("emails")),
    Refusal("reference-key", "Wrong.age", by_another_key("mail")),
    Refusal("reference-type", "Wrong.age", by_another_key("age")),
    Refusal("reference-key", "Person.posts", by_another_key("posts")),
]  # fmt: skip


# -- rollups ------------------------------------------------------------------------------------------


class Figures(BaseModel):
    count: Annotated[int, Count()] = 0
    unit: str


BOTH = {"product_id": "product_id", "day": Day("created_at")}


def rollup(
    code: str, keys: dict[str, Any], fields: dict[str, Any] | None = None, source: Any = Sale, **options: Any
) -> Refusal:
    annotations = {"product_id": int, "day": dt.datetime, **(fields or {})}
    return Refusal(
        code,
        "Wrong",
        lambda: [Sale, Customer, wrong(annotations, rollup=Rollup(source, keys=keys, **options))],
    )


ROLLUPS = [
    rollup("rollup-keys", {}),
    rollup("rollup-keys", {"nothing": "product_id"}),
    rollup("rollup-keys", {"product_id": "shop", "day": Day("created_at")}),
    rollup("rollup-keys", {"product_id": "product_id", "day": Day("amount")}),
    rollup("rollup-keys", {"product_id": Day("created_at"), "day": Day("created_at")}),
    rollup("rollup-keys", {"product_id": "product_id", "day": Day("created_at", timezone="Mars/North")}),
    rollup("rollup-keys", {"product_id": Total()}),
    rollup("rollup-keys", {"name": Total(5)}, {"name": str}),
    rollup("rollup-keys", {"day": Minute("created_at", size=7)}),
    rollup("rollup-keys", {"day": Hour("created_at", size=5)}),
    rollup("rollup-keys", {"on": Minute("created_at")}, {"on": dt.date}),
    rollup("rollup-keys", {"product_id": "product_id", "day": 5}),
    rollup("rollup-keys", {**BOTH, "id": "shop"}),
    rollup("rollup-keys", BOTH, {"id": str}),
    rollup("rollup-keys", {**BOTH, "on": Day("created_at", timezone="Asia/Tokyo")}, {"on": dt.date}),
    rollup("rollup-field", BOTH, {"note": str}),
    rollup("rollup-field", BOTH, {"figures": Figures}),
    rollup("rollup-source", BOTH, {"n": Annotated[int, Count(Customer)]}),
    rollup("rollup-source", BOTH, {"n": Annotated[int, Count(by="product_id")]}),
    rollup("rollup-source", BOTH, {"n": Annotated[list[int], Collect("product_id")]}),
    rollup("source-field-missing", {"product_id": "produkt_id", "day": Day("created_at")}),
    rollup("source-field-missing", BOTH, {"n": Annotated[Decimal, Sum()]}),
    rollup("source-field-missing", BOTH, {"n": Annotated[Decimal, Sum("amuont")]}),
    rollup("source-field-missing", {"product_id": "product_id", "day": Day(None)}),  # type: ignore[arg-type]
    rollup("source-field-missing", {"product_id": "product_id", "day": Day(3)}),  # type: ignore[arg-type]
    rollup("pattern-keyword", BOTH, maintain="sometimes"),
    rollup("pattern-keyword", BOTH, maintain="schedule"),
    rollup("pattern-keyword", BOTH, {"n": Annotated[int, Count(maintain="stream")]}),
    rollup("rollup-maintained", BOTH, {"at": Annotated[dt.datetime | None, UpdatedAt()]}),
    rollup("maintenance-cycle", {"product_id": "product_id"}, source="Wrong"),
    rollup("source-unknown", BOTH, source="Slae"),
]


# -- buckets and time series --------------------------------------------------------------------------

MEASURED = {"sensor": str, "ts": dt.datetime, "temp": float, "tags": list[str]}


def bucket(
    words: str, code: str = "bucket-declaration", fields: Any = None, keywords: Any = None, **options: Any
) -> Refusal:
    annotations = {**MEASURED, **(fields or {})}
    declared = {"key": "sensor", "time": "ts", "span": HOUR, **options}
    return Refusal(code, words, lambda: [wrong(annotations, bucket=Bucket(**declared), **(keywords or {}))])


def series(
    words: str, fields: Any = None, keywords: Any = None, code: str = "bucket-declaration", **options: Any
) -> Refusal:
    annotations = {"a": str, "b": str, "ts": dt.datetime, **(fields or {})}
    declared = {"time": "ts", "key": "a", **options}
    return Refusal(
        code, words, lambda: [wrong(annotations, timeseries=TimeSeries(**declared), **(keywords or {}))]
    )


BUCKETS = [
    bucket("neither span= nor limit=", span=None),
    bucket("whole milliseconds", span=dt.timedelta(0)),
    bucket("whole milliseconds", span=dt.timedelta(microseconds=1500)),
    bucket("whole number from 1", limit=0),
    bucket("whole number from 1", limit=True),
    bucket("no field 'censor'", key="censor"),
    bucket("no key", key=()),
    bucket("one part to play", key=("sensor", "sensor")),
    bucket("list 'tags'", key="tags"),
    bucket("one part to play", key="id"),
    bucket("must be a datetime", time="temp"),
    bucket("no number", stats="sensor"),
    bucket("no number", stats=("tags",)),
    bucket("one part to play", metadata="ts"),
    bucket("measured single value", unique="sensor"),
    bucket("measured single value", unique="tags"),
    bucket("it renames start", names={"begin": "hour"}),
    bucket("different names", names={"start": "end"}),
    bucket("different names", names={"start": "_id"}),
    bucket("beside a part of that name", names={"start": "sensor"}),
    bucket("add span=", unique="temp", span=None, limit=5),
    bucket("its own collection; rename", adopt="wrong"),
    bucket("a second or more", expire_after=dt.timedelta(milliseconds=3)),
    bucket("keep one", keywords={"timeseries": TimeSeries(time="ts")}),
    bucket("readings have none", keywords={"discriminator": "type"}),
    bucket("readings have none", keywords={"version": 1}),
    bucket("readings have none", keywords={"rollup": Rollup(Sale, keys={"id": "product_id"})}),
    bucket("Wrong", "layout-derived", {"gone": dt.datetime | None}, {"soft_delete": "gone"}),
    bucket("not stored one by one", "layout-derived", {"x": Annotated[float | None, Formula({"$abs": "$temp"})]}),
    bucket("Wrong.odd", "layout-derived", {"odd": Annotated[int, Approximate()]}),
    bucket("Wrong.odd", "layout-derived", {"odd": Annotated[list[int], Outlier(3, "more")]}),
    bucket("Wrong", "archive-declaration", {"made": dt.datetime}, {"archive": Archive(by="made", after=YEAR, into="old")}),
    field("layout-derived", "statistics of its buckets", Annotated[int, Count(Reading, by="sensor")], Reading, id=str),
    field("pattern-keyword", "class keyword bucket=", Annotated[int, Bucket(key="a", time="b", limit=1)]),
    field("pattern-keyword", "class keyword timeseries=", Annotated[int, TimeSeries(time="ts")]),
    series("nested model", key=("a", "b")),
    series("one field", key="missing"),
    series("must be a datetime", time="a"),
    series("'seconds' or 'minutes' or 'hours'", granularity="days"),
    series("timedelta", expire_after=5),
    series("its own collection; rename", adopt="wrong"),
    series("validates nothing", keywords={"validation": "strict"}),
    series("unique index", {"c": Annotated[str, Indexed(unique=True)]}),
    series("unique index", keywords={"indexes": [IndexModel("a", unique=True)]}),
]  # fmt: skip


# -- trees --------------------------------------------------------------------------------------------

NODE = {"name": str, "parent_id": Id | None, "ancestors": list[Id], "path": str, "number": int}
ANCESTORS = AncestorArray(parent="parent_id", ancestors="ancestors")


class Upward(BaseModel):
    up: Id | None = None


def tree(code: str, place: str, declared: Any, **fields: Any) -> Refusal:
    return Refusal(code, place, lambda: [wrong({**NODE, **fields}, tree=declared)])


TREES = [
    tree("tree-field-missing", "'parent'", AncestorArray(parent="parent", ancestors="ancestors")),
    tree("tree-field-missing", "Wrong", AncestorArray(parent=None, ancestors="ancestors")),  # type: ignore[arg-type]
    tree("tree-field-type", "Wrong.name", AncestorArray(parent="parent_id", ancestors="name")),
    tree("tree-field-type", "Wrong.ancestors", ANCESTORS, ancestors=set[Id]),
    tree("tree-field-type", "Wrong", AncestorArray(parent="ancestors", ancestors="ancestors")),
    tree("tree-field-type", "Wrong", AncestorArray(parent="id", ancestors="ancestors")),
    tree("tree-field-type", "Wrong.parent_id", ANCESTORS, parent_id=Id),
    tree("reference-type", "Wrong (tree=) parent=", ANCESTORS, parent_id=int | None),
    tree("keyword-unknown", "tree='parent_id'", "parent_id"),
    tree("tree-declaration", "Wrong", [ANCESTORS] * 2),
    tree("tree-declaration", "Wrong", ChildReferences(children="ancestors", sort="name")),
    tree("tree-field-type", "is not text", MaterializedPath(path="path", segment="number")),
    tree("tree-field-type", "lies in a list", ParentReference(parent="links.up"), links=list[Upward]),
    tree("path-maintained-twice", "Wrong.ancestors", ANCESTORS, ancestors=Annotated[list[Id], Collect("Wrong", "parent_id", by="parent_id")]),
    *[
        tree(code, "ancestors" if code == "tree-field-type" else "Wrong (tree=) children=", ChildReferences(children="ancestors"), ancestors=kind)
        for code, kind in (
            ("reference-type", list[int]),
            ("tree-field-type", Id),
            ("array-of-arrays", list[list[Id]]),
            ("tree-field-type", set[Id]),
        )
    ],
    Refusal("tree-declaration", "Wrong", lambda: [
        wrong({**NODE, "at": dt.datetime}, tree=ANCESTORS, bucket=Bucket(key="name", time="at", span=HOUR))
    ]),
]  # fmt: skip


# -- outlier arrays, counters, attributes, links ------------------------------------------------------


def outlier(code: str, kind: Any, place: str = "Wrong.value", **options: Any) -> Refusal:
    return field(code, place, Annotated[kind, Outlier(**{"limit": 5, "overflow": "more", **options})])


class Row(BaseModel):
    tags: Annotated[list[int], Outlier(limit=5, overflow="o")] = []


class Counted(BaseModel):
    n: Annotated[int, Approximate()] = 0


class Key(BaseModel):
    a: int


class Sheet(BaseModel):
    specs: Annotated[dict[str, int], Attributes()] = {}


def counter(
    code: str, kind: Any = int, place: str = "Wrong.value", key: Any = str, **options: Any
) -> Refusal:
    return field(code, place, Annotated[kind, Approximate(**options)], key=key)


FIELDS = [
    outlier("pattern-keyword", list[int], limit=0),
    outlier("pattern-keyword", list[int], limit=True),
    outlier("pattern-keyword", list[int], page_size=0),
    outlier("pattern-keyword", list[int], layout="rows"),
    outlier("maintained-type", int),
    outlier("maintained-type", set[int]),
    outlier("maintained-type", list[int] | None),
    outlier("array-of-arrays", list[list[int]]),
    outlier("collection-shared", list[int], "wrong", overflow="wrong"),
    outlier("collection-name-invalid", list[int], "treadle.x", overflow="treadle.x"),
    outlier("source-field-missing", list[int], count="nothing"),
    outlier("maintained-type", list[int], flag="value"),
    outlier("stored-name-clash", list[int], owner="page"),
    outlier("stored-name-clash", list[int], layout="documents", item="position"),
    field("maintained-in-array", "Wrong.value", list[Row]),
    counter("pattern-keyword", every=0),
    counter("pattern-keyword", every=True, keys_max=77),
    counter("pattern-keyword", keys_max=0),
    counter("pattern-keyword", within=dt.timedelta(0)),
    counter("pattern-keyword", within=5),
    counter("pattern-keyword", buffer="disk"),
    counter("pattern-keyword", collection="x"),
    counter("collection-shared", place="wrong", buffer="durable", collection="wrong"),
    counter("maintained-type", int | None),
    counter("maintained-type", str),
    counter("reference-field-missing", by="nothing"),
    counter("counter-key", by="key", key=Key),
    counter("counter-key", by="key", key=list[int]),
    counter("source-field-missing", flushed_at="nothing"),
    field("maintained-in-array", "Wrong.value", list[Counted]),
    field("maintained-type", "Wrong.value", Annotated[list[str], Attributes()]),
    field("maintained-type", "Wrong.value", Annotated[dict[int, str], Attributes()]),
    field("maintained-type", "Wrong.value", list[Sheet]),
    *[
        Refusal(code, "Wrong", lambda fields=fields: [wrong({"id": str, **fields}, links=Links())])
        for code, fields in (
            ("links-declaration", {"links": str}),
            ("links-declaration", {"links": list[int]}),
            ("source-field-missing", {}),
        )
    ],
]


# -- history and archive ------------------------------------------------------------------------------


def archive(
    code: str, place: str = "Wrong", fields: Any = None, keywords: Any = None, **options: Any
) -> Refusal:
    declared = {"by": "date", "after": YEAR, "into": "old", **options}
    annotations = {"date": dt.datetime, **(fields or {})}
    return Refusal(code, place, lambda: [wrong(annotations, archive=Archive(**declared), **(keywords or {}))])


PASTS = [
    *[
        Refusal("pattern-keyword", "Wrong", lambda each=each: [wrong(history=History(**each))])
        for each in ({"maintain": "schedule"}, {"keep": 0}, {"keep": dt.timedelta(0)}, {"keep": "all"})
    ],
    archive("source-field-missing", by="name"),
    archive("maintained-type", fields={"name": str}, by="name"),
    archive("pattern-keyword", after=5),
    archive("pattern-keyword", archived="maybe"),
    archive("pattern-keyword", into=""),
    archive("archive-expires", fields={"when": Annotated[dt.datetime, Indexed(expire_after=YEAR)]}),
    # The pairs that are refused.
    archive("archive-declaration", fields={"tags": Annotated[list[str], Outlier(limit=3, overflow="o")]}),
    archive("archive-declaration", fields={"n": Annotated[int, Approximate()]}),
    archive("archive-declaration", fields={"up": Id | None}, keywords={"tree": ParentReference(parent="up")}),
    archive("links-declaration", fields={"links": list[Id]}, keywords={"links": Links()}),
    archive("archive-declaration", keywords={"history": History()}, counted=False),
]  # fmt: skip


# -- shards -------------------------------------------------------------------------------------------


def sharded(
    code: str, words: str, fields: dict[str, Any], key: Any = ("region",), **keywords: Any
) -> Refusal:
    return Refusal(code, words, lambda: [wrong({"region": str, **fields}, shard_key=key, **keywords)])


SHARDS = [
    sharded("shard-key-index", "unique index 'email_1' does not begin with that", {"email": Annotated[str, Indexed(unique=True)]}),
    sharded("shard-key-pattern", "ancestor-array cannot be kept in wrong", {"parent_id": Id | None, "ancestors": list[Id]}, tree=ANCESTORS),
    sharded("shard-key-pattern", "outlier cannot be kept in wrong", {"items": Annotated[list[int], Outlier(limit=3, overflow="o")]}),
    sharded("shard-key-invalid", "did you mean 'region'", {}, ("reigon",)),
    sharded("shard-key-invalid", "may be None", {"region": str | None}),
    sharded("shard-key-invalid", "takes a tuple of field names", {}, "region"),
]  # fmt: skip


# -- patterns from outside ----------------------------------------------------------------------------


class Inert(Pattern):
    pattern = "inert"

    def bind(self, place: Place, graph: object) -> Rule:
        return Rule(place)


class Whole(Pattern):
    pattern = "whole"
    keyword = "whole"

    def bind(self, place: Place, graph: object) -> Rule:
        return Rule(place)


class NeverDue(Rule):
    def run_due(self, server: Any, now: Any, dry_run: bool) -> Any:
        yield from ()


class Due(Pattern):
    pattern = "due"
    keyword = "due"

    def bind(self, place: Place, graph: object) -> Rule:
        return NeverDue(place)


OUTSIDE = [
    field("rule-not-carried-out", "Wrong.value: Rule", Annotated[str, Inert()]),
    Refusal("rule-not-carried-out", "Wrong", lambda: [wrong(due=Due())]),
    # The parentheses were forgotten.
    Refusal("pattern-keyword", "with its parentheses", lambda: [wrong(whole=Whole)]),
    field("pattern-keyword", "class keyword whole=Whole", Annotated[str, Whole()]),
]

REFUSED = [
    *MODELS, *KINDS, *VERSIONS, *COMPUTED, *REFERENCES, *ROLLUPS, *BUCKETS, *TREES, *FIELDS, *PASTS, *SHARDS,
    *OUTSIDE,
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: f"{refusal.code} {refusal.place}")
def test_a_wrong_declaration_is_refused_by_name_before_the_server_is_asked(refusal):
    database = MongoClient("mongodb://localhost:1", connect=False)["never_asked"]
    with pytest.raises(DeclarationError) as raised:
        models = refusal.declare()
        Store(database, models, **refusal.options(models))
    assert (refusal.code, True) == (raised.value.code, refusal.place in str(raised.value)), str(raised.value)


# -- servers that lack something ----------------------------------------------------------------------


class Node(Document, collection="nodes", tree=ParentReference(parent="parent_id")):
    parent_id: Id | None = None


class Series(Document, collection="series", timeseries=TimeSeries(time="ts")):
    ts: dt.datetime


class Policy(Document, collection="policies", history=History(collection="former", maintain="stream")):
    title: str = ""


class Followed(Document, collection="followed"):
    customer_id: Id
    name: Annotated[
        str | None, ExtendedReference(Customer, by="customer_id", field="name", maintain="stream")
    ] = None


class Counted(Document, collection="counted"):
    orders: Annotated[int, Count(Customer, by="id", maintain="stream")] = 0


# A server that has everything; what a test takes away is the only thing it lacks.
COMPLETE = Capabilities(
    **{each.name: True for each in dataclasses.fields(Capabilities) if each.default is False}
    | {"standalone": False, "sharded": False}
)
LACKING = [
    ("capability-missing", "Node (tree=): parent-reference needs $graphLookup", "graph_lookups", Node),
    ("transactions-needed", "Node (tree=): parent-reference needs transactions", "transactions", Node),
    ("transactions-needed", "Followed.name: extended-reference", "transactions", Followed),
    ("streams-unavailable", "Followed.name: maintain='stream'", "streams", Followed),
    ("capability-missing", "use MongoDB 6.0 or newer, which keeps them", "pre_images", Counted),
    ("capability-missing", "declare bucket= instead", "time_series", Series),
    ("capability-missing", 'declare maintain="write"', "pre_images", Policy),
]


@pytest.mark.parametrize(("code", "place", "missing", "model"), LACKING)
def test_a_declaration_that_the_server_cannot_keep_is_refused_by_name(code, place, missing, model):
    graph = Graph([model, Customer])
    graph.check_server(COMPLETE)
    with pytest.raises(DeclarationError) as raised:
        graph.check_server(dataclasses.replace(COMPLETE, **{missing: False}))
    assert (code, True) == (raised.value.code, place in str(raised.value)), str(raised.value)


# -- the codes ----------------------------------------------------------------------------------------

# Codes of errors that are not raised for a declaration alone, with the test that meets them.
ELSEWHERE = {
    "upsert-incomplete": "patterns/approximation/test_declarations.py",
    "layout-twice": "only a user's own layout can meet it",
}


def raised_codes() -> set[str]:
    """The codes that the source passes to DeclarationError."""
    calls = [
        node
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "DeclarationError"
    ]
    values = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "code"]
    return {value.value for value in values if isinstance(value, ast.Constant)}


def test_each_code_of_a_refusal_is_in_the_table_and_documented():
    table = {refusal.code for refusal in REFUSED} | {code for code, *_ in LACKING}
    assert set() == raised_codes() - table - ELSEWHERE.keys()
    headings = re.findall(r"^## `([a-z0-9-]+)`$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert set() == table - set(headings)
