"""Writes of documents of older versions: brought up first, with what follows from them."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from bson import ObjectId

from tests.patterns.schema_versioning.users import User, old_users
from treadle import (
    Approximate,
    Count,
    Document,
    Id,
    Limits,
    Outlier,
    Store,
    Sum,
    UsageError,
    migration,
)

# -- updates -----------------------------------------------------------------------------------------


def test_an_update_brings_an_old_document_up_first(run, database):
    old_users(database, 3)
    store = run.store([User])
    identity = ObjectId(f"{0:024x}")
    after = store.update(User, identity, {"$push": {"phones": "9"}})
    assert ["0", "1", "9"] == after.phones
    assert 3 == database["users"].find_one({"_id": identity})["schema_version"]
    assert store.update(User, ObjectId(), {"$inc": {"n": 1}}) is None
    assert 2 == store.update_many(
        User, {"n": 0, "_id": {"$ne": identity}}, {"$push": {"phones": "9"}, "$inc": {"n": 5}}
    )
    assert [["0", "1", "9"], ["7", "9"], ["5", "9"]] == [each.phones for each in store.find(User, sort="_id")]
    assert [0, 5, 5] == [each.n for each in store.find(User, sort="_id")]


def test_an_update_of_a_current_document_is_one_command(heard):
    database, listener = heard
    store = Store(database, [User])
    user = store.insert(User(name="a"))
    listener.clear()
    store.update(User, user.id, {"$inc": {"n": 1}})
    store.get(User, user.id)
    assert ["findAndModify", "find"] == listener.names


def test_the_version_cannot_be_updated(run):
    store = run.store([User])
    user = store.insert(User(name="a"))
    for update in ({"$set": {"schema_version": 1}}, [{"$unset": "schema_version"}]):
        with pytest.raises(UsageError) as caught:
            store.update(User, user.id, update)
        assert "field-maintained" == caught.value.code


# -- kinds -------------------------------------------------------------------------------------------


class Shape(Document, collection="shapes", discriminator="kind", version=3):
    name: str = ""


class Circle(Shape, kind="circle"):
    radius: float


class Square(Shape, kind="square"):
    side: float
    colour: str


@migration(Shape, from_version=1)
def name_kind(document: dict) -> dict:
    if "kind" not in document:
        document["kind"] = "circle" if "radius" in document else "square"
    return document


@name_kind.down
def keep_kind(document: dict) -> dict:
    return document


@migration(Shape, from_version=2)
def colour(document: dict) -> dict:
    if document["kind"] == "square":
        document["colour"] = "red"
    return document


@colour.down
def bleach(document: dict) -> dict:
    document.pop("colour", None)
    return document


def test_kinds_share_the_versions_of_their_collection(run, database):
    store = run.store([Shape, Circle, Square])
    store.setup()
    database["shapes"].insert_many(
        [
            {"kind": "circle", "radius": 1.0},
            {"kind": "square", "side": 1.0},
            {"kind": "square", "side": 1.0, "schema_version": 2},
            # From before there were kinds.
            {"radius": 2.0},
            {"side": 2.0},
        ]
    )
    store.insert_many([Circle(radius=3), Square(side=3, colour="blue")])
    expected = [Circle, Square, Square, Circle, Square, Circle, Square]
    found = list(store.find(Shape, sort="_id"))
    assert expected == [type(each) for each in found]
    assert ["red", "red", "red", "blue"] == [each.colour for each in found if isinstance(each, Square)]
    assert store.migrate(Shape).finished
    assert found == list(store.find(Shape, sort="_id"))
    assert {3: 7} == store.migration_status(Shape)
    assert {3: 4} == store.migration_status(Square)
    store.update_many(Shape, {}, {"$set": {"name": "x"}})
    assert 7 == store.count(Shape, {"name": "x"})
    assert 4 == store.migrate(Square, to=2).migrated
    assert {2: 4, 3: 3} == store.migration_status(Shape)


# -- models that others follow -----------------------------------------------------------------------


class Mark(Document, collection="marks", version=2, validation="strict"):
    id: int
    product_id: int
    stars: Any


@migration(Mark, from_version=1)
def rename_mark(document: dict) -> dict:
    document["stars"] = document.pop("rating")
    if document["stars"] == 3:
        document["stars"] = object()
    return document


class Marked(Document, collection="marked"):
    id: int
    marks: Annotated[int, Count(Mark, by="product_id", where={"stars": {"$gte": 1}})] = 0


def test_what_cannot_be_written_where_others_follow_is_set_aside(database):
    """It undoes a transaction, and must not stop the run for ever."""
    store = Store(database, [Mark, Marked])
    store.setup()
    store.insert(Marked(id=1))
    database["marks"].insert_many(
        [{"_id": number, "product_id": 1, "rating": number} for number in range(1, 6)]
    )
    database["marks"].create_index("stars", unique=True, partialFilterExpression={"stars": {"$gte": 0}})
    database["marks"].insert_one({"_id": 9, "product_id": 1, "stars": 5, "schema_version": 2})
    store.rebuild(Marked)
    result = store.migrate(Mark)
    assert (3, 2, True) == (result.migrated, result.remaining, result.finished)
    reasons = {each.document_id: each.reason for each in result.set_aside}
    assert {3, 5} == set(reasons)
    assert "stars" in reasons[3]
    assert "duplicate" in reasons[5]
    assert [] == store.verify()
    # The one that cannot be stored in the current version can be read in it; the other cannot.
    assert 5 == store.get(Marked, 1).marks


# -- what follows from a document that a write brings to the current version -------------------------


class Kept(Document, collection="kept", version=2):
    category_id: int
    label: str = ""
    seen: Annotated[int, Approximate(every=100)] = 0
    tags: Annotated[list[str], Outlier(limit=2, overflow="kept_overflow")] = []


@migration(Kept, from_version=1)
def name_the_category(document: dict[str, Any]) -> dict[str, Any]:
    document["category_id"] = document.pop("cat")
    return document


class Shelf(Document, collection="kept_shelves"):
    id: int
    kept: Annotated[int, Count(Kept, by="category_id")] = 0


@pytest.mark.parametrize("write", ["append", "counter"])
def test_whoever_brings_a_document_up_takes_along_what_follows(run, database, write):
    store = run.store([Kept, Shelf])
    store.setup()
    store.insert(Shelf(id=1))
    key = database.kept.insert_one({"cat": 1, "label": "a", "schema_version": 1}).inserted_id
    assert ["kept"] == [each.path for each in store.verify(Shelf)]
    if write == "append":
        store.array(Kept, "tags", key).append("x")
    else:
        counter = store.counter(Kept, "seen")
        counter.add(key, 3)
        counter.flush()
    assert 1 == store.get(Shelf, 1).kept
    assert [] == store.verify(Shelf)


def test_a_document_that_cannot_be_brought_up_stops_no_counter_and_no_repair(run, database):
    store = run.store([Kept, Shelf])
    store.setup()
    good = store.insert(Kept(category_id=1)).id
    bad = database.kept.insert_one({"label": "no category", "schema_version": 1}).inserted_id
    counter = store.counter(Kept, "seen")
    counter.add(bad, 2)
    counter.add(good, 3)
    flushed = counter.flush()
    assert {bad: 2} == flushed.unknown
    assert {} == counter.pending()
    assert 3 == store.get(Kept, good).seen
    store.repair()
    store.rebuild()
    assert {bad} == {each.document_id for each in store.verify()}


def test_an_update_of_very_many_old_documents_is_no_contention(run, database):
    store = run.store([User], limits=Limits(upgrade_chunk=2))
    store.setup()
    database.users.insert_many([{"name": "a", "phone": "1,2"} for _ in range(70)])
    assert 70 == store.update_many(User, {}, {"$set": {"name": "b"}})


class Payer(Document, collection="payers"):
    paid: Annotated[int, Sum("Payment", "amount", by="payer_id")] = 0


class Payment(Document, collection="payments", version=2):
    payer_id: Id
    amount: int = 0


@migration(Payment, from_version=1)
def rename_amount(document: dict[str, Any]) -> dict[str, Any]:
    document["amount"] = document.pop("old_amount")
    return document


def test_a_document_that_an_update_brought_up_and_then_did_not_match_is_followed(run, database):
    store = run.store([Payer, Payment])
    store.setup()
    payer = store.insert(Payer())
    database.payments.insert_one({"payer_id": payer.id, "old_amount": 5})
    store.update(Payment, {"old_amount": 5}, {"$set": {"amount": 6}})
    assert [] == store.verify()
