"""Whatever the client's read preference is, Treadle decides by what the primary has.

One secondary applies nothing, and the client prefers just that one: whoever
reads from it sees an empty database.
"""

from __future__ import annotations

import datetime as dt
from datetime import timedelta
from typing import Annotated, Any

import pytest
from benchmarks.torture.replica_set import Cluster, Member
from pymongo.read_preferences import SecondaryPreferred

from tests.cluster.conftest import Open
from treadle import AncestorArray, Approximate, Bucket, Count, Document, Outlier, migration

pytestmark = [pytest.mark.all, pytest.mark.heavy, pytest.mark.server]
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class Review(Document, collection="reviews"):
    id: int
    product_id: int
    rating: int


class Product(Document, collection="products"):
    id: int
    review_count: Annotated[int, Count(Review, by="product_id")] = 0
    views: Annotated[int, Approximate(buffer="durable", within=None)] = 0


class Reading(
    Document,
    collection="sensor_data",
    bucket=Bucket(key="sensor", time="ts", span=timedelta(hours=1), limit=5),
):
    sensor: str
    ts: dt.datetime
    temperature: int


class Category(Document, collection="categories", tree=AncestorArray(parent="parent_id", ancestors="up")):
    id: int
    parent_id: int | None = None
    up: list[int] = []


class Club(Document, collection="clubs"):
    id: int
    members: Annotated[list[int], Outlier(limit=3, overflow="club_overflow", page_size=3)] = []


class Old(Document, collection="users", version=1):
    id: int


class User(Document, collection="users", version=2):
    id: int
    name: str


@migration(User, from_version=1)
def name_it(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "name": "somebody"}


@pytest.fixture
def prefers(lagging: Member) -> Any:
    """The read preference for the secondary that lags."""
    return SecondaryPreferred([{"member": str(lagging.number)}])


@pytest.fixture
def preferring(prefers: Any) -> dict[str, Any]:
    """The same as options of a client."""
    return {
        "readPreference": "secondaryPreferred",
        "readPreferenceTags": f"member:{prefers.tag_sets[0]['member']}",
    }


def test_bulk_writes_see_what_was_inserted(
    open_store: Open, preferring: Any, cluster: Cluster, name: str
) -> None:
    store = open_store([Review, Product], **preferring)
    store.setup()
    store.insert(Product(id=1))
    store.insert_many([Review(id=number, product_id=1, rating=1) for number in range(20)])
    assert 20 == store.update_many(Review, {"rating": 1}, {"$set": {"rating": 2}})
    assert 20 == store.delete_many(Review, {"rating": 2})
    assert 0 == cluster.client[name]["products"].find_one()["review_count"]


def test_the_callers_own_reads_follow_the_preference(open_store: Open, preferring: Any) -> None:
    store = open_store([Review, Product, Category, Club], **preferring)
    store.setup()
    store.insert(Product(id=1))
    store.tree(Category).insert(Category(id=1))
    assert store.get(Product, 1) is None
    assert store.find_one(Product, {}) is None
    assert 0 == store.count(Product)
    assert [] == list(store.find(Product))
    assert [] == list(store.tree(Category).roots())
    assert store.counter(Product, "views").read(1) is None


def test_proof_and_repair_look_at_the_primary(
    open_store: Open, preferring: Any, cluster: Cluster, name: str
) -> None:
    store = open_store([Review, Product], **preferring)
    store.setup()
    store.insert(Product(id=1))
    store.insert(Review(id=1, product_id=1, rating=1))
    raw = cluster.client[name]["products"]
    raw.update_one({}, {"$set": {"review_count": 7}})
    assert [1] == [finding.document_id for finding in store.verify()]
    assert 1 == store.repair()
    assert 1 == raw.find_one()["review_count"]


def test_a_migration_is_finished_when_it_says_so(
    open_store: Open, preferring: Any, cluster: Cluster, name: str
) -> None:
    cluster.client[name]["users"].insert_many([{"_id": number, "schema_version": 1} for number in range(10)])
    store = open_store([User], **preferring)
    store.migrate(User)
    assert 0 == cluster.client[name]["users"].count_documents({"schema_version": 1})
    assert {2: 10} == store.migration_status(User)


def test_a_large_move_reaches_every_descendant(
    open_store: Open, preferring: Any, cluster: Cluster, name: str
) -> None:
    store = open_store([Category], **preferring)
    store.setup()
    tree = store.tree(Category)
    tree.insert(Category(id=0))
    tree.insert(Category(id=1))
    for number in range(2, 30):
        tree.insert(Category(id=number), parent=number - 1 if number < 5 else 4)
    tree.move(1, 0)
    moved = cluster.client[name]["categories"].count_documents({"up.0": 0, "up.1": 1})
    assert 28 == moved


def test_readings_and_arrays_are_changed_where_they_are(
    open_store: Open, preferring: Any, cluster: Cluster, name: str
) -> None:
    store = open_store([Reading, Club], **preferring)
    store.setup()
    store.insert_many(
        [
            Reading(sensor="a", ts=START + timedelta(minutes=number), temperature=number)
            for number in range(12)
        ]
    )
    assert 12 == store.update_many(Reading, {"sensor": "a"}, {"$set": {"temperature": 1}})
    assert 12 == store.delete_many(Reading, {"temperature": 1})
    store.insert(Club(id=1))
    array = store.array(Club, "members", 1)
    assert 10 == array.extend(range(10))
    assert 1 == array.remove(9)
    assert [] == store.verify()


def test_an_exact_count_and_a_flush_see_all_events(
    open_store: Open, preferring: Any, cluster: Cluster, name: str
) -> None:
    store = open_store([Review, Product], **preferring)
    store.setup()
    store.insert(Product(id=1))
    counter = store.counter(Product, "views")
    counter.add(1, 3)
    assert 3 == counter.read(1, exact=True)
    assert {1: 3} == counter.pending()
    counter.flush()
    assert 3 == cluster.client[name]["products"].find_one()["views"]
