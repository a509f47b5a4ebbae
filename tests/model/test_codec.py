"""Models survive the way into the database and back, whatever they hold.

Covers: model/adapt, model/bson_types, model/dump
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
from typing import Annotated, Any

import bson
import pytest
from bson.decimal128 import Decimal128
from hypothesis import given
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, RootModel, create_model, field_serializer
from pymongo import MongoClient

from tests.support import Point, models_with_documents
from treadle import DataError, Document, Indexed, Store, UsageError
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.model.codec import codec_of

UTC = dt.UTC


def dumped(document: BaseModel) -> dict[str, Any]:
    return codec_of(type(document)).dump(document, [])


@given(made=models_with_documents())
def test_any_model_reads_back_equal(made, database):
    """Random fields, kinds and values, through the real server."""
    model, documents = made
    database["things"].drop()
    store = Store(database, [model])
    inserted = store.insert_many(documents)
    read = list(store.find(model, sort="_id"))
    assert sorted(inserted, key=lambda each: each.id) == read


def test_a_client_that_is_not_tz_aware_still_gives_aware_dates(server):
    class Event(Document, collection="events"):
        at: dt.datetime

    with MongoClient(server.uri, tz_aware=False) as client:
        store = Store(client["tz_test"], [Event])
        stored = store.insert(
            Event(at=dt.datetime(2026, 3, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=2))))
        )
        read = store.get(Event, stored.id)
        client.drop_database("tz_test")
    assert dt.datetime(2026, 3, 1, 10, tzinfo=UTC) == read.at
    assert dt.timedelta(0) == read.at.utcoffset()
    assert read == stored


def test_insert_shows_that_dates_are_cut_to_milliseconds(run):
    class Event(Document, collection="events"):
        at: dt.datetime
        more: list[dt.datetime] = []

    store = run.store([Event])
    precise = dt.datetime(2026, 1, 1, 0, 0, 0, 123456, tzinfo=UTC)
    given_event = Event(at=precise, more=[precise])
    stored = store.insert(given_event)
    assert 123000 == stored.at.microsecond == stored.more[0].microsecond
    assert 123456 == given_event.at.microsecond
    assert [stored] == list(store.find(Event))
    # A naive date is one in UTC.
    assert dt.datetime(2026, 1, 1, tzinfo=UTC) == store.insert(Event(at=dt.datetime(2026, 1, 1))).at


def test_decimals_are_stored_exactly_or_refused():
    class Price(Document, collection="prices"):
        amount: decimal.Decimal

    assert Decimal128("1.10") == dumped(Price(amount="1.10"))["amount"]
    with pytest.raises(UsageError, match="34 significant digits") as caught:
        dumped(Price(amount=decimal.Decimal("1." + "1" * 34)))
    assert "decimal-too-long" == caught.value.code


@pytest.mark.parametrize(
    ("annotation", "value"),
    [(str, "a"), (int, 7), (uuid.UUID, uuid.UUID(int=5)), (Point, Point(x=1.0, label="p"))],
)
def test_ids_of_other_types(run, annotation, value):
    """A string, a number, a UUID or a sub-document can be the `_id`."""
    model = type(Document)(
        "Thing",
        (Document,),
        {"__annotations__": {"id": annotation, "n": int}, "__module__": __name__},
        collection="things",
    )
    store = run.store([model])
    stored = store.insert(model(id=value, n=1))
    assert stored == store.get(model, value)
    assert 2 == store.update(model, value, {"$set": {"n": 2}}).n
    assert store.delete(model, value).id == value


def test_none_is_stored_as_null_and_absence_reads_as_the_default(run):
    class Thing(Document, collection="things"):
        maybe: int | None = 5

    store = run.store([Thing])
    stored = store.insert(Thing(maybe=None))
    assert store.get(Thing, stored.id).maybe is None
    store.update(Thing, stored.id, {"$unset": {"maybe": ""}})
    assert 5 == store.get(Thing, stored.id).maybe


def test_pydantic_aliases_are_the_stored_names():
    class Inner(BaseModel):
        model_config = ConfigDict(populate_by_name=True)
        zip_code: str = Field(alias="zipCode")
        town: str = Field(serialization_alias="ort")

    class Thing(Document, collection="things", naming="camel"):
        first_name: str
        own: str = Field(alias="OWN")
        inner: Inner

    thing = Thing(first_name="a", own="b", inner=Inner(zip_code="1", town="t"))
    raw = dumped(thing)
    assert {"_id": thing.id, "firstName": "a", "OWN": "b", "inner": {"zipCode": "1", "ort": "t"}} == raw
    assert thing == codec_of(Thing).load(raw)


def test_the_id_is_called_id_in_json():
    class Thing(Document, collection="things"):
        n: int

    thing = Thing(n=1)
    assert {"id", "n"} == set(thing.model_dump(mode="json", by_alias=True))
    assert thing == Thing.model_validate_json(thing.model_dump_json())


def test_excluded_fields_are_stored_all_the_same():
    class User(Document, collection="users"):
        password_hash: str = Field(exclude=True)

    assert "x" == dumped(User(password_hash="x"))["password_hash"]


def test_serializers_that_are_not_for_json_are_heeded():
    class Thing(Document, collection="things"):
        shouted: Annotated[str, PlainSerializer(str.upper)]
        for_json: Annotated[int, PlainSerializer(str, when_used="json")]
        by_method: int

        @field_serializer("by_method")
        def twice(self, value: int) -> int:
            return value * 2

    raw = dumped(Thing(shouted="a", for_json=1, by_method=2))
    assert ("A", 1, 4) == (raw["shouted"], raw["for_json"], raw["by_method"])


def test_root_models_and_extra_fields_survive(run):
    class Tags(RootModel[list[str]]):
        pass

    class Thing(Document, collection="things"):
        model_config = ConfigDict(extra="allow")
        tags: Tags

    store = run.store([Thing])
    stored = store.insert(Thing(tags=Tags(["a"]), price=decimal.Decimal("2.5")))
    assert stored == store.get(Thing, stored.id)


def test_none_under_a_unique_index_is_left_out(run):
    class Book(Document, collection="books"):
        isbn: Annotated[str | None, Indexed(unique=True)] = None

    store = run.store([Book])
    store.setup()
    store.insert_many([Book(), Book(), Book(isbn="1")])
    assert "isbn" not in dumped(Book())
    assert 3 == store.count(Book)


def test_a_stored_document_that_does_not_fit_is_named_without_its_values(run, database):
    class User(Document, collection="users"):
        age: int

    store = run.store([User])
    stored = store.insert(User(age=3))
    database["users"].update_many({}, {"$set": {"age": "secret"}})
    with pytest.raises(DataError) as caught:
        store.get(User, stored.id)
    assert "document-invalid" == caught.value.code
    assert "age" in str(caught.value)
    assert str(stored.id) in str(caught.value)
    assert "secret" not in str(caught.value)


class Switch(enum.StrEnum):
    ON = "on"
    YES = "true"


class Level(enum.IntEnum):
    NONE = 0
    SOME = 1


@pytest.mark.parametrize(
    ("annotation", "values"),
    [
        (Level | bool, [True, False, Level.NONE, Level.SOME]),
        (Level | float, [1.0, 0.5, Level.SOME]),
        (dt.date | dt.timedelta, [dt.date(2026, 1, 2), dt.timedelta(days=3), dt.timedelta(seconds=5)]),
        (dt.datetime | dt.timedelta, [dt.datetime(2026, 1, 2, tzinfo=dt.UTC), dt.timedelta(seconds=5)]),
        (decimal.Decimal | dt.timedelta, [decimal.Decimal("1.5"), dt.timedelta(seconds=5)]),
        (bool | dt.timedelta, [True, dt.timedelta(seconds=1), dt.timedelta(0)]),
        (bool | Switch, [True, False, Switch.ON, Switch.YES]),
        (bytes | Switch, [b"on", Switch.ON]),
        (dt.date | Switch | None, [dt.date(2026, 1, 2), Switch.YES, None]),
        (list[bool | Switch], [[True, Switch.ON]]),
        (dict[str, bytes | Switch], [{"a": Switch.ON, "b": b"on"}]),
    ],
    ids=str,
)
def test_members_of_a_union_come_back_as_what_they_were(annotation, values):
    model = create_model("Held", value=(annotation, ...))
    codec = codec_of(model)
    for value in values:
        stored = codec.dump(model(value=value), [])
        back = codec.load(bson.decode(bson.encode(stored), codec_options=CODEC_OPTIONS)).value
        assert (value, type(value)) == (back, type(back))
        if isinstance(value, (list, dict)):
            items = [*value.values()] if isinstance(value, dict) else value
            assert list(map(type, items)) == list(
                map(type, back.values() if isinstance(back, dict) else back)
            )


def test_an_extra_field_never_overrides_a_declared_one():
    class Person(Document, collection="people", naming="camel"):
        model_config = ConfigDict(extra="allow")
        first_name: str

    person = Person(first_name="Ann")
    person.firstName = person.other = "Eve"
    person.__pydantic_extra__["_id"] = 5
    stored = codec_of(Person).dump(person, [])
    assert ("Ann", person.id, "Eve") == (stored["firstName"], stored["_id"], stored["other"])
    assert ["_id", "firstName", "other"] == list(stored)
