"""Defects of two features that meet, which no world of test_pairs.py shows: one test for each, until it is repaired.

The other ones of the same list are cells of the matrix; tests/world/known.py names them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Json, PlainSerializer, PlainValidator

from treadle import (
    AncestorArray,
    Archive,
    Average,
    Bucket,
    Conflict,
    Count,
    Document,
    ExtendedReference,
    Formula,
    History,
    Links,
    Store,
    Subset,
    Sum,
)

START = datetime(2026, 3, 1, tzinfo=UTC)


def started(database: Any, *models: type[Any]) -> Any:
    store = Store(database, models)
    store.setup()
    return store


class Key(BaseModel):
    site: str
    number: int


class ByDecimal(Document, collection="by_decimal"):
    id: Decimal
    x: int = 0


def test_change_of_a_document_whose_id_is_a_decimal(database):
    store = started(database, ByDecimal)
    document = store.insert(ByDecimal(id=Decimal("1.5")))
    assert 2 == store.change(document, x=2).x


class Node(Document, collection="nodes", links=Links("links"), revision="revision"):
    id: str
    title: str = ""
    links: list[str] = []
    revision: int = 0


def test_a_stale_replacement_does_not_undo_a_link(database):
    store = started(database, Node)
    mine = store.insert(Node(id="math"))
    store.insert(Node(id="ada", links=["math"]))
    mine.title = "Mathematics"
    with pytest.raises(Conflict):
        store.replace(mine)
    assert ["math"] == store.get(Node, "ada").links


class Reading(Document, collection="readings"):
    id: int
    owner_id: int
    size: int


class Owner(Document, collection="owners"):
    id: int
    average: Annotated[float | None, Average(Reading, "size", by="owner_id")] = None


def test_an_average_of_large_integers_does_not_drift(database):
    store = started(database, Reading, Owner)
    store.insert(Owner(id=1))
    store.insert(Reading(id=1, owner_id=1, size=1))
    store.insert(Reading(id=2, owner_id=1, size=2**60))
    store.delete(Reading, 2)
    assert 1.0 == store.get(Owner, 1).average


class Point:
    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y


class Marker(Document, collection="markers"):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    id: int
    point: Annotated[
        Any,
        PlainValidator(lambda value: value if isinstance(value, Point) else Point(*value)),
        PlainSerializer(lambda point: [point.x, point.y], return_type=list[int]),
    ]


def test_an_update_stores_a_custom_type_as_an_insert_does(database):
    store = started(database, Marker)
    store.insert(Marker(id=1, point=Point(1, 2)))
    store.update(Marker, 1, {"$set": {"point": Point(5, 6)}})
    assert [5, 6] == database["markers"].find_one()["point"]


class Holder(Document, collection="holders"):
    id: int
    value: Json[dict[str, int]] | None = None


def test_a_json_field_is_read_as_it_was_stored(database):
    store = started(database, Holder)
    stored = store.insert(Holder(id=1, value='{"a": 1}'))
    assert stored == store.get(Holder, 1)


class Card(BaseModel):
    size: int = 0


class Shelf(Document, collection="shelves"):
    id: int
    top: Annotated[list[Card], Subset(Reading, by="owner_id", sort="-size", size=3)] = []


def test_a_source_of_a_wrong_type_does_not_stop_its_neighbours(database):
    """Beside a Max, which quarantines the target, it does not; the worlds with hostile values hold that."""
    store = started(database, Reading, Shelf)
    store.insert(Shelf(id=1))
    store.insert(Reading(id=1, owner_id=1, size=5))
    wrong = {"_id": 2, "owner_id": 1, "size": "many"}
    database["readings"].insert_one(wrong, bypass_document_validation=True)
    store.update(Reading, 1, {"$set": {"size": 4}})
    store.delete(Reading, 1)
    assert {("Shelf.top", "extreme-invalid")} == {(each.rule, each.code) for each in store.set_aside()}
    database["readings"].delete_one({"_id": 2})
    store.repair()
    assert ([], []) == (store.get(Shelf, 1).top, store.verify())


class Sample(
    Document,
    collection="samples",
    bucket=Bucket(key="sensor", time="at", span=timedelta(hours=1), unique="at"),
    archive=Archive(by="at", after=timedelta(days=1), into="samples_archive"),
):
    sensor: str
    at: datetime
    value: float


def test_a_reading_is_unique_across_archived_buckets(database):
    store = started(database, Sample)
    store.insert(Sample(sensor="a", at=START, value=1.0))
    assert 1 == store.archive(Sample, now=START + timedelta(days=3))
    assert 1 == store.insert_many([Sample(sensor="a", at=START, value=1.0)]).duplicates
    assert 1 == len(list(store.find(Sample, archived=True)))


class Author(Document, collection="authors"):
    id: int
    name: str


class Book(Document, collection="books"):
    id: int
    author_id: int
    author: Annotated[str | None, ExtendedReference(Author, by="author_id", field="name")] = None
    author_then: Annotated[
        str | None, ExtendedReference(Author, by="author_id", field="name", policy="snapshot")
    ] = None


def test_a_late_source_leaves_no_finding_about_an_adopted_snapshot(database):
    database["books"].insert_one({"_id": 1, "author_id": 7})
    store = started(database, Author, Book)
    store.rebuild()
    store.insert(Author(id=7, name="Ada"))
    assert "Ada" == store.get(Book, 1).author
    assert [] == store.verify()


class Task(
    Document,
    collection="tasks",
    archive=Archive(by="at", after=timedelta(days=1), into="tasks_archive"),
):
    id: int
    team_id: int = 1
    at: datetime = START
    points: int = 0
    score: Annotated[int | None, Formula({"$multiply": ["$points", 2]}, maintain="stream")] = None


class Team(Document, collection="teams"):
    id: int
    scores: Annotated[int, Sum(Task, "score", by="team_id", maintain="stream")] = 0


def test_the_formula_of_a_document_that_is_archived_counts(database):
    store = started(database, Task, Team)
    store.insert(Team(id=1))
    store.insert(Task(id=1, points=1))
    store.worker().run_until_idle()
    database["tasks"].update_one({"_id": 1}, {"$set": {"points": 5}})
    store.archive(Task, now=START + timedelta(days=3))
    store.worker().run_until_idle()
    assert 10 == store.get(Team, 1).scores


class Seller(Document, collection="sellers", soft_delete="deleted_at"):
    id: int
    name: str
    balance: Decimal = Decimal("1.5")
    deleted_at: datetime | None = None


class Offer(Document, collection="offers"):
    id: int
    seller_id: int
    seller: Annotated[
        str | None, ExtendedReference(Seller, by="seller_id", field="name", maintain="stream")
    ] = None


def gone_seller(database: Any) -> Any:
    """A seller is deleted, and an offer inserted before it returns; the worker follows each step."""
    store = started(database, Seller, Offer)
    store.insert(Seller(id=7, name="Ada"))
    store.worker().run_until_idle()
    store.delete(Seller, 7)
    store.worker().run_until_idle()
    store.insert(Offer(id=1, seller_id=7))
    store.worker().run_until_idle()
    return store


def test_the_worker_follows_the_return_of_a_source(database):
    """The worlds with soft_delete on the owner meet r02 before this."""
    store = gone_seller(database)
    store.restore(Seller, 7)
    store.worker().run_until_idle()
    assert "Ada" == store.get(Offer, 1).seller


def test_the_worker_follows_the_raw_return_of_a_source(database):
    store = gone_seller(database)
    database["sellers"].update_one({"_id": 7}, {"$set": {"deleted_at": None}})
    store.worker().run_until_idle()
    assert "Ada" == store.get(Offer, 1).seller


class Unit(Document, collection="units", history=History(), tree=AncestorArray("parent_id", "ancestors")):
    id: int
    name: str
    parent_id: int | None = None
    ancestors: list[int] = []


def test_a_revert_leaves_the_place_in_a_tree(database):
    store = started(database, Unit)
    store.insert_many([Unit(id=1, name="root"), Unit(id=2, name="old"), Unit(id=3, name="other")])
    store.tree(Unit).move(2, 1)
    store.update(Unit, 2, {"$set": {"name": "new"}})
    reverted = store.revert(Unit, 2, 1)
    assert ("old", 1, [1]) == (reverted.name, reverted.parent_id, reverted.ancestors)
    assert [] == store.verify()


class Vehicle(Document, collection="vehicles", discriminator="type"):
    id: int
    plate: str
    trips: Annotated[int, Count("Trip", by="plate", to="plate")] = 0


class Truck(Vehicle, kind="truck"):
    loads: Annotated[int, Count("Load", by="plate", to="plate")] = 0


class Trip(Document, collection="trips"):
    id: int
    plate: str


class Load(Document, collection="loads"):
    id: int
    plate: str


def test_an_alternate_key_of_a_class_and_of_its_kind_takes_one_index(database):
    store = started(database, Vehicle, Truck, Trip, Load)
    assert {"_id_", "plate_1"} == set(database["vehicles"].index_information())
    store.insert(Truck(id=1, plate="B 1"))
    store.insert(Trip(id=1, plate="B 1"))
    store.insert(Load(id=1, plate="B 1"))
    truck = store.require(Truck, 1)
    assert (1, 1) == (truck.trips, truck.loads)
