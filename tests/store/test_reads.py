"""require, get_many, exists, distinct, into=, aggregate: reads beyond get and find.

Covers: graph/query, engine/reads, engine/document_reads, store/async_reads, store/async_results
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel, ConfigDict, Field

from tests.support import Colour
from treadle import (
    Bucket,
    Count,
    DataError,
    Document,
    Id,
    Indexed,
    NotFound,
    Store,
    TimeSeries,
    Unchecked,
    UsageError,
    migration,
)

UTC = dt.UTC


class Line(BaseModel):
    sku: str
    price: Decimal
    note: str = ""


class Address(BaseModel):
    model_config = ConfigDict(validate_by_name=True)
    city: str
    zip_code: str = Field("", alias="zipCode")


class Order(Document, collection="orders"):
    customer_id: Id
    total: Decimal = Decimal(0)


class Customer(Document, collection="customers", naming="camel"):
    full_name: Annotated[str, Indexed(text=True)]
    blob: str = ""
    lines: list[Line] = []
    places: dict[str, Address] = {}
    home: Address | None = None
    colour: Colour = Colour.RED
    stock: dict[str, int] = {}
    order_count: Annotated[int, Count(Order, by="customer_id")] = 0


class LineCard(BaseModel):
    sku: str
    price: float


class HomeCard(BaseModel):
    zip_code: str


class CustomerCard(BaseModel):
    id: ObjectId
    name: str = Field(alias="fullName")
    lines: list[LineCard] = []
    places: dict[str, HomeCard] = {}
    home: HomeCard | None = None
    colour: Colour
    order_count: int

    model_config = ConfigDict(arbitrary_types_allowed=True)


class Item(Document, collection="items", discriminator="type"):
    title: str


class Book(Item, kind="book"):
    isbn: str


class Film(Item, kind="film"):
    minutes: int


class ItemCard(BaseModel):
    type: str
    title: str
    isbn: str | None = None


class Person(Document, collection="people", version=2):
    name: str
    padding: str = ""


@migration(Person, from_version=1)
def join_names(document: dict) -> dict:
    document["name"] = f"{document.pop('first')} {document.pop('last')}"
    return document


class NameCard(BaseModel):
    name: str


@pytest.fixture
def store(run):
    store = run.store([Customer, Order, Item, Book, Film, Person])
    store.setup()
    return store


@pytest.fixture
def ada(store):
    ada = store.insert(
        Customer(
            full_name="Ada",
            blob="x" * 1000,
            lines=[Line(sku="a", price=Decimal("1.5"), note="long")],
            places={"work": Address(city="Bern", zip_code="3000")},
            home=Address(city="Basel", zip_code="4000"),
            colour=Colour.BLUE,
            stock={"left": 3},
        )
    )
    store.insert(Order(customer_id=ada.id))
    return ada


def test_require_gives_the_document_or_raises(store, ada):
    assert ada.id == store.require(Customer, ada.id).id
    assert ada.id == store.require(Customer, {"fullName": "Ada"}).id
    with pytest.raises(NotFound) as raised:
        store.require(Customer, ObjectId())
    assert isinstance(raised.value, UsageError)
    assert "document-missing" == raised.value.code
    with pytest.raises(NotFound, match="no Customer matches the filter"):
        store.require(Customer, {"fullName": "Eve"})


def test_get_many_keeps_the_order_and_shows_gaps(store):
    people = store.insert_many([Person(name=str(number)) for number in range(5)])
    missing = ObjectId()
    ids = [people[3].id, missing, str(people[0].id), people[3].id]
    assert ["3", None, "0", "3"] == [each and each.name for each in store.get_many(Person, ids)]
    assert [] == store.get_many(Person, [])
    with pytest.raises(UsageError, match="is not an id of Person"):
        store.get_many(Person, [{"$ne": None}])


def test_distinct_gives_python_values(store, ada):
    assert [Decimal("1.5")] == store.distinct(Customer, "lines.price")
    assert [Colour.BLUE] == store.distinct(Customer, "colour")
    assert ["Ada"] == store.distinct(Customer, "full_name")
    assert [3] == store.distinct(Customer, "stock.left")
    assert [] == store.distinct(Customer, "full_name", {"fullName": "Eve"})
    with pytest.raises(UsageError, match="did you mean 'full_name'") as raised:
        store.distinct(Customer, "ful_name")
    assert "field-unknown" == raised.value.code


# -- into= ------------------------------------------------------------------------------------


def expected_card(ada: Customer) -> CustomerCard:
    return CustomerCard(
        id=ada.id,
        fullName="Ada",
        lines=[LineCard(sku="a", price=1.5)],
        places={"work": HomeCard(zip_code="3000")},
        home=HomeCard(zip_code="4000"),
        colour=Colour.BLUE,
        order_count=1,
    )


@pytest.mark.quick
def test_a_card_nests_renames_and_holds_maintained_fields(store, ada):
    card = expected_card(ada)
    assert card == store.get(Customer, ada.id, into=CustomerCard)
    assert card == store.require(Customer, ada.id, into=CustomerCard)
    assert card == store.find_one(Customer, {"fullName": "Ada"}, into=CustomerCard)
    assert [card, None] == store.get_many(Customer, [ada.id, ObjectId()], into=CustomerCard)
    assert [card] == store.find(Customer, into=CustomerCard).to_list()
    assert [card] == store.search(Customer, "ada", into=CustomerCard).to_list()
    assert [card] == store.page(Customer, sort="blob", into=CustomerCard).items


def test_the_server_is_asked_for_the_card_alone(heard):
    database, listener = heard
    store = Store(database, [Customer, Order])
    store.insert(Customer(full_name="Ada", blob="x" * 1_000_000))
    listener.clear()
    store.find(Customer, into=CustomerCard).to_list()
    store.get(Customer, ObjectId(), into=CustomerCard)
    for _, command in listener.commands:
        asked = set(command["projection"])
        assert {"_id", "fullName", "lines.sku", "lines.price", "places", "home.zipCode"} < asked
        assert not asked & {"blob", "lines", "lines.note", "home", "stock"}


def test_a_card_of_a_base_reads_each_kind(store):
    store.insert_many([Book(title="a", isbn="1"), Film(title="b", minutes=2)])
    cards = store.find(Item, sort="title", into=ItemCard).to_list()
    assert [ItemCard(type="book", title="a", isbn="1"), ItemCard(type="film", title="b")] == cards
    assert [cards[0]] == store.find(Book, into=ItemCard).to_list()


def test_an_unknown_kind_is_named_in_a_card_too(store, database):
    unknown = {"_id": 1, "type": "map", "title": "c"}
    database.items.insert_one(unknown, bypass_document_validation=True)
    with pytest.raises(DataError, match="it knows 'book', 'film'") as raised:
        store.find(Item, into=ItemCard).to_list()
    assert "kind-unknown" == raised.value.code


def test_an_older_document_is_converted_first(store, database):
    database.people.insert_one({"_id": ObjectId(), "first": "Ada", "last": "L", "padding": "x"})
    store.insert(Person(name="Eve"))
    assert ["Ada L", "Eve"] == sorted(each.name for each in store.find(Person, into=NameCard))
    older = database.people.find_one({"first": "Ada"})["_id"]
    assert NameCard(name="Ada L") == store.get(Person, older, into=NameCard)
    assert [NameCard(name="Ada L")] == store.get_many(Person, [older], into=NameCard)


class Wrong(BaseModel):
    ful_name: str = ""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    full_name: int


def test_a_card_that_cannot_be_read_is_refused(store, ada):
    with pytest.raises(
        UsageError, match="'ful_name', but Customer has no such field; did you mean"
    ) as raised:
        store.find(Customer, into=Wrong)
    assert "card-invalid" == raised.value.code
    with pytest.raises(UsageError, match="no Pydantic model"):
        store.find(Customer, into=dict)
    with pytest.raises(DataError, match=f"does not fit Strict .*{ada.id}"):
        store.find_one(Customer, into=Strict)


class Node(BaseModel):
    name: str
    children: list[Node] = []


class Root(Document, collection="roots"):
    node: Node


class Short(BaseModel):
    name: str
    children: list[Short] = []


class RootCard(BaseModel):
    node: Short


def test_a_card_that_contains_itself(run):
    store = run.store([Root])
    store.insert(Root(node=Node(name="a", children=[Node(name="b", children=[Node(name="c")])])))
    card = store.find_one(Root, into=RootCard)
    assert "c" == card.node.children[0].children[0].name


class Spoilt(Document, collection="spoilt"):
    id: int
    n: int


class SpoiltCard(BaseModel):
    n: int


@pytest.mark.quick
def test_a_spoilt_document_is_named_or_passed_over(run, database):
    store = run.store([Spoilt])
    database["spoilt"].insert_many([{"_id": i, "n": n} for i, n in enumerate([1, "two", 3, 5])])
    for into in (None, SpoiltCard):
        with pytest.raises(DataError, match="_id 1"):
            store.find(Spoilt, sort="_id", into=into).to_list()
        results = store.find(Spoilt, sort="_id", invalid="skip", into=into)
        assert [1, 3, 5] == [each.n for each in results]
        (error,) = results.invalid
        assert ("document-invalid", True) == (error.code, "_id 1" in str(error))
    with pytest.raises(UsageError):
        store.find(Spoilt, invalid="ignore")


# -- readings ---------------------------------------------------------------------------------


class Reading(Document, collection="readings"):
    sensor: str
    ts: dt.datetime
    value: float
    note: str = ""


LAYOUTS: dict[str, Any] = {
    "buckets": {"bucket": Bucket(key="sensor", time="ts", span=dt.timedelta(hours=1), limit=3)},
    "native": {"timeseries": TimeSeries(time="ts", key="sensor")},
}


class ReadingCard(BaseModel):
    ts: dt.datetime
    value: float


@pytest.mark.parametrize("layout", LAYOUTS)
def test_readings_as_cards_distinct_and_in_pipelines(run, layout):
    class Measured(Reading, collection=f"readings_{layout}", **LAYOUTS[layout]):
        pass

    store = run.store([Measured])
    store.setup()
    times = [dt.datetime(2026, 1, 1, 0, minute, tzinfo=UTC) for minute in range(8)]
    store.insert_many([Measured(sensor="a", ts=ts, value=ts.minute % 3) for ts in times])
    cards = store.find(Measured, {"value": 2.0}, sort="ts", into=ReadingCard).to_list()
    assert [ReadingCard(ts=times[2], value=2), ReadingCard(ts=times[5], value=2)] == cards
    assert [0.0, 1.0, 2.0] == sorted(store.distinct(Measured, "value"))
    assert ["a"] == store.distinct(Measured, "sensor", {"ts": {"$gt": times[1]}})
    assert store.exists(Measured, {"value": 2.0})
    assert not store.exists(Measured, {"value": 3.0})
    group = {"$group": {"_id": "$sensor", "total": {"$sum": "$value"}}}
    pipeline = [{"$match": {"ts": {"$gte": times[3]}}}, group]
    assert [{"_id": "a", "total": 4.0}] == store.aggregate(Measured, pipeline).to_list()


# -- aggregate ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "code"),
    [
        ([{"$out": "other"}], "operator-forbidden"),
        ([{"$merge": {"into": "other"}}], "operator-forbidden"),
        (
            [{"$lookup": {"from": "x", "pipeline": [{"$match": {"$where": "1"}}], "as": "y"}}],
            "operator-forbidden",
        ),
        ([{"$project": {"a": {"$function": {}}}}], "operator-forbidden"),
        ({"$match": {}, "$limit": 1}, "pipeline-invalid"),
        ("$match", "pipeline-invalid"),
        ([{"match": {}}], "pipeline-invalid"),
        ([None], "pipeline-invalid"),
    ],
)
def test_a_pipeline_that_writes_or_runs_code_is_refused(store, pipeline, code):
    with pytest.raises(UsageError) as raised:
        store.aggregate(Order, pipeline)
    assert code == raised.value.code


class GroupCard(BaseModel):
    id: Id
    total: Decimal


def test_aggregate_streams_python_values_or_models_that_name_the_id_as_cards_do(store, ada):
    store.insert(Order(customer_id=ada.id, total=Decimal("2.50")))
    pipeline = [
        {"$match": {"total": {"$gt": Decimal(1)}}},
        {"$group": {"_id": "$customer_id", "total": {"$sum": "$total"}}},
    ]
    assert [{"_id": ada.id, "total": Decimal("2.50")}] == store.aggregate(Order, pipeline).to_list()
    assert [GroupCard(id=ada.id, total="2.50")] == store.aggregate(Order, pipeline, into=GroupCard).to_list()
    with pytest.raises(UsageError, match="no Pydantic model"):
        store.aggregate(Order, pipeline, into=dict)


def test_the_first_conditions_of_a_pipeline_are_filters(store, ada):
    count = {"$count": "n"}
    by_text = {"$match": {"customer_id": {"$in": [str(ada.id)]}}}
    assert [{"n": 1}] == store.aggregate(Order, [by_text, by_text, count]).to_list()
    misspelt = {"custmer_id": ada.id}
    with pytest.raises(UsageError, match="did you mean 'customer_id'"):
        store.aggregate(Order, [{"$match": misspelt}, count])
    assert [] == store.aggregate(Order, [{"$match": Unchecked(misspelt)}, count]).to_list()
    # What a later stage names may be an earlier one's.
    renamed = [{"$project": {"who": "$customer_id"}}, {"$match": {"who": ada.id}}, count]
    assert [{"n": 1}] == store.aggregate(Order, renamed).to_list()


class Place(BaseModel):
    city: str


class Nulls(Document, collection="nulls"):
    required: Address | None
    home: Address | None = None
    work: Address | None = Address(city="Bern")
    places: list[Address | None] = []
    tier: str = "silver"
    made: list[str] = Field(default_factory=lambda: ["new"])


class NullsCard(BaseModel):
    required: Place | None
    home: Place | None
    work: Place | None
    places: list[Place | None]
    tier: str = "bronze"
    made: list[str]


class TierCard(BaseModel):
    tier: str = "bronze"


def test_a_card_reads_nulls_and_what_is_missing_as_the_model_does(run, database):
    store = run.store([Nulls])
    store.insert(Nulls(required=None, work=None, places=[None, Address(city="Genf")]))
    database.nulls.insert_one({"required": None})
    for whole in store.find(Nulls):
        card = store.get(Nulls, whole.id, into=NullsCard)
        fields = whole.model_dump(include=set(NullsCard.model_fields))
        assert NullsCard.model_validate(fields) == card
        assert whole.tier == store.get(Nulls, whole.id, into=TierCard).tier
    assert "Bern" == card.work.city


def test_get_many_and_sorts_say_what_they_take(store, ada):
    for wrong in (str(ada.id), None, 5, {"_id": ada.id}):
        with pytest.raises(UsageError, match="get_many takes a list of ids of Customer"):
            store.get_many(Customer, wrong)
    with pytest.raises(UsageError, match="sort= takes") as raised:
        store.find(Customer, sort=5)
    assert "sort-invalid" == raised.value.code


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_fields_that_a_card_asks_for_are_read(heard, layout):
    class Measured(Reading, collection=f"asked_{layout}", **LAYOUTS[layout]):
        extra: float = 0

    database, listener = heard
    store = Store(database, [Measured])
    store.setup()
    times = [dt.datetime(2026, 1, 1, 0, minute, tzinfo=UTC) for minute in range(8)]
    shuffled = [times[place] for place in (3, 0, 7, 1, 5, 2, 6, 4)]
    store.insert_many([Measured(sensor="a", ts=ts, value=1, note="x" * 100, extra=0.1) for ts in shuffled])
    listener.clear()
    assert times == [each.ts for each in store.find(Measured, into=ReadingCard)]
    (command,) = [command for name, command in listener.commands if name in ("find", "aggregate")]
    asked = command["projection"] if layout == "native" else command["pipeline"][-1]["$project"]
    assert {"_id", "ts", "value"} == set(asked) - {"sensor", "_treadle"}
    narrow = store.find(Measured, {"note": "x" * 100, "extra": 0.1}, sort="-extra", into=ReadingCard)
    assert 8 == len(narrow.to_list())
    assert not store.exists(Measured, {"extra": 0.2})
    either = {"$or": [{"extra": 0.1}, {"note": "y"}]}
    assert 8 == len(store.find(Measured, either, into=ReadingCard).to_list())
    assert times == [each.ts for each in store.find(Measured)]
