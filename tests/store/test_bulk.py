"""bulk: mixed writes of several models in few commits.

Covers: engine/bulk, graph/operations
"""

from __future__ import annotations

import datetime as dt
import random
from typing import Annotated

import pytest
from bson import ObjectId

from tests.support import race
from treadle import (
    Bucket,
    Bulk,
    BulkFailed,
    Count,
    Delete,
    DeleteMany,
    Document,
    DuplicateKey,
    ExtendedReference,
    Id,
    Indexed,
    Insert,
    Limits,
    Replace,
    Store,
    Sum,
    Update,
    UpdateMany,
    Upsert,
    UsageError,
)


class Parent(Document, collection="parents"):
    name: str = ""
    children: Annotated[int, Count("Child", by="parent_id")] = 0
    weight: Annotated[int, Sum("Child", "weight", by="parent_id")] = 0


class Child(Document, collection="children"):
    parent_id: Id
    parent_name: Annotated[str | None, ExtendedReference(Parent, by="parent_id", field="name")] = None
    number: Annotated[int, Indexed(unique=True)]
    weight: int = 1


class Plain(Document, collection="plain"):
    number: Annotated[int, Indexed(unique=True)]
    label: str = ""


class Reading(
    Document, collection="readings", bucket=Bucket(key="sensor", time="ts", span=dt.timedelta(hours=1))
):
    sensor: str
    ts: dt.datetime
    value: float = 0


MODELS = [Parent, Child, Plain]


@pytest.fixture
def store(run):
    store = run.store(MODELS)
    store.setup()
    return store


@pytest.mark.quick
def test_bulk_does_each_kind_of_write(store):
    one, two = store.insert_many([Parent(name="one"), Parent(name="two")])
    old = store.insert_many([Child(parent_id=one.id, number=n) for n in range(4)])
    old[1].weight = 10
    done = store.bulk(
        [
            Insert(Child(parent_id=two.id, number=100)),
            Insert(Plain(number=1)),
            Update(Child, old[0].id, {"$set": {"weight": 5}}),
            UpdateMany(Child, {"number": {"$in": [2, 3]}}, {"$inc": {"weight": 1}}),
            Replace(old[1]),
            Upsert(Plain, {"number": 2}, {"$set": {"label": "x"}}, insert=Plain(number=2)),
            Upsert(Plain, {"number": 1}, {"$set": {"label": "x"}}, insert=Plain(number=1)),
            Delete(Child, {"number": 3}),
            DeleteMany(Plain, {"label": "x"}),
            Update(Parent, one.id, {"$set": {"name": "ONE"}}),
            Delete(Child, {"number": 999}),
        ]
    )
    assert Bulk(inserted=3, updated=6, deleted=2) == done
    assert (3, 17) == (store.get(Parent, one.id).children, store.get(Parent, one.id).weight)
    assert 1 == store.get(Parent, two.id).children
    assert {"ONE", "two"} == set(store.distinct(Child, "parent_name"))
    assert [] == store.verify()


def test_each_target_is_updated_once_per_chunk(heard):
    database, listener = heard
    store = Store(database, MODELS, limits=Limits(bulk_chunk=60))
    store.setup()
    parents = store.insert_many([Parent() for _ in range(10)])
    children = store.insert_many(
        [Child(parent_id=parents[n % 10].id, number=n, weight=n) for n in range(120)]
    )
    chance = random.Random(5)
    operations = []
    for n, child in enumerate(children):
        to = chance.choice(parents).id
        operations.append(
            chance.choice(
                [
                    Update(Child, child.id, {"$set": {"parent_id": to}}),
                    Update(Child, {"number": n}, {"$inc": {"weight": 1}}),
                    Delete(Child, child.id),
                    UpdateMany(Child, {"number": n}, {"$set": {"parent_id": to}}),
                ]
            )
        )
        operations.append(Insert(Child(parent_id=to, number=1000 + n)))
    listener.clear()
    done = store.bulk(operations)
    assert 240 == done.inserted + done.updated + done.deleted
    assert 4 == listener.names.count("commitTransaction")
    updated: dict[object, int] = {}
    for name, command in listener.commands:
        if name == "update" and command["update"] == "parents":
            for each in command["updates"]:
                if isinstance(each["u"], list):
                    updated[each["q"]["_id"]] = updated.get(each["q"]["_id"], 0) + 1
    assert set(updated.values()) <= {1, 2, 3, 4}
    assert [] == store.verify()


@pytest.mark.parametrize("ordered", [True, False])
def test_operations_by_id_go_in_one_round_of_commands(heard, ordered):
    database, listener = heard
    store = Store(database, MODELS)
    store.setup()
    one, two = store.insert_many([Parent(name="one"), Parent(name="two")])
    children = store.insert_many([Child(parent_id=one.id, number=n) for n in range(40)])
    updates = [Update(Child, each.id, {"$set": {"parent_id": two.id}}) for each in children[:20]]
    deletes = [Delete(Child, each.id) for each in children[10:30]]
    missing = [Delete(Child, one.id), Update(Child, two.id, {"$inc": {"weight": 1}})]
    operations = [*updates, *deletes, *missing]
    if not ordered:
        # Like operations are found wherever they stand.
        operations = [each for pair in zip(updates, deletes, strict=True) for each in pair] + missing
    listener.clear()
    done = store.bulk(operations, ordered=ordered)
    assert Bulk(0, 20, 20) == done
    assert len(listener.names) < 25
    assert [10, 10] == [store.get(Parent, each.id).children for each in (one, two)]
    assert 10 == store.count(Child, {"parent_name": "two"})
    twice = store.bulk([Update(Child, children[0].id, {"$inc": {"weight": 1}})] * 3)
    assert (Bulk(0, 3, 0), 4) == (twice, store.get(Child, children[0].id).weight)
    assert [] == store.verify()


def test_an_ordered_bulk_ends_at_the_refused_operation(store):
    parent = store.insert(Parent())
    store.insert(Plain(number=1))
    with pytest.raises(DuplicateKey):
        store.bulk([Insert(Child(parent_id=parent.id, number=1)), Insert(Plain(number=1))])
    assert (0, 0) == (store.count(Child), store.get(Parent, parent.id).children)


def test_an_unordered_bulk_goes_on(store):
    parent = store.insert(Parent())
    store.insert(Plain(number=1))
    with pytest.raises(BulkFailed) as caught:
        store.bulk(
            [
                Insert(Child(parent_id=parent.id, number=1)),
                Insert(Plain(number=1)),
                Update(Parent, parent.id, {"$set": {"children": 5}}),
                Insert(Child(parent_id=parent.id, number=2)),
            ],
            ordered=False,
        )
    assert [(1, "duplicate-key"), (2, "field-maintained")] == [
        (each.position, each.code) for each in caught.value.failures
    ]
    assert (2, 2) == (store.count(Child), store.get(Parent, parent.id).children)


def test_an_operation_on_many_documents_has_commits_of_its_own(run):
    store = run.store(MODELS, limits=Limits(write_chunk=10))
    store.setup()
    parent, other = store.insert_many([Parent(), Parent()])
    store.insert_many([Child(parent_id=parent.id, number=n) for n in range(35)])
    done = store.bulk(
        [
            Insert(Plain(number=1)),
            UpdateMany(Child, {}, {"$set": {"parent_id": other.id}}),
            Delete(Child, {"number": 0}),
        ]
    )
    assert Bulk(1, 35, 1) == done
    assert [0, 34] == [store.get(Parent, each.id).children for each in (parent, other)]


def test_readings_go_by_calls_of_their_own(run):
    store = run.store([*MODELS, Reading])
    store.setup()
    start = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
    readings = [Reading(sensor="a", ts=start + dt.timedelta(minutes=n)) for n in range(3)]
    done = store.bulk(
        [
            Insert(Plain(number=1)),
            *map(Insert, readings),
            UpdateMany(Reading, {"sensor": "a"}, {"$set": {"value": 2.0}}),
            Delete(Reading, {"ts": start}),
            Insert(Plain(number=2)),
        ]
    )
    assert (Bulk(5, 3, 1), 2, 2) == (done, store.count(Reading, {"value": 2.0}), store.count(Plain))
    for call in (
        lambda: store.upsert(Reading, {"sensor": "a"}, {"$set": {"value": 1.0}}, insert=readings[0]),
        lambda: store.restore(Reading, ObjectId()),
        lambda: store.insert_many(readings, ordered=False),
    ):
        with pytest.raises(UsageError, match="Reading") as caught:
            call()
        assert "layout-missing" == caught.value.code


@pytest.mark.parametrize("given", [[5], {"a": 1}, [Plain(number=1)], "Insert"])
def test_what_is_no_operation_is_refused(store, given):
    with pytest.raises(UsageError) as caught:
        store.bulk(given)
    assert "bulk-invalid" == caught.value.code


def test_racing_bulks_leave_everything_right(database):
    store = Store(database, MODELS)
    store.setup()
    parents = store.insert_many([Parent() for _ in range(3)])

    def body(number: int) -> None:
        store.bulk(
            [
                operation
                for n in range(10)
                for operation in (
                    Insert(Child(parent_id=parents[n % 3].id, number=100 * number + n)),
                    Upsert(Plain, {"number": n}, {"$set": {"label": "y"}}, insert=Plain(number=n)),
                    UpdateMany(Child, {"number": n}, {"$inc": {"weight": 1}}),
                )
            ]
        )

    race(*[lambda number=number: body(number) for number in range(1, 6)])
    assert (10, 50) == (store.count(Plain), store.count(Child))
    assert 50 == sum(each.children for each in store.find(Parent))
    assert [] == store.verify()


def test_where_the_order_matters_it_is_kept(store):
    # A number that must be unique is free only after the deletion, and taken only after the insert.
    old = store.insert(Plain(number=1))
    new = Plain(number=1, label="new")
    assert Bulk(1, 0, 1) == store.bulk([Delete(Plain, old.id), Insert(new)])
    with pytest.raises(DuplicateKey):
        store.bulk([Insert(Plain(number=1)), Delete(Plain, new.id)])
    # The same document several times.
    parent = store.insert(Parent())
    child = Child(parent_id=parent.id, number=1)
    change = Update(Child, child.id, {"$inc": {"weight": 4}})
    again = Child(id=child.id, parent_id=parent.id, number=1, weight=9)
    assert Bulk(2, 1, 1) == store.bulk([Insert(child), change, Delete(Child, child.id), Insert(again)])
    assert (1, 9) == (store.get(Parent, parent.id).children, store.get(Parent, parent.id).weight)


def test_an_index_that_was_made_by_hand_is_met_in_the_order_given(run, database):
    class Seat(Document, collection="seats"):
        place: str = ""

    store = run.store([Seat])
    store.setup()
    database.seats.create_index("place", unique=True)
    before, after = Seat(place="1A"), Seat(place="1A")
    store.insert(before)
    writes = [Delete(Seat, before.id), Insert(after)]
    assert Bulk(inserted=1, deleted=1) == store.bulk(writes)
    assert [after.id] == [each["_id"] for each in database.seats.find()]
    writes = [Update(Seat, after.id, {"$set": {"place": "1B"}}), Insert(Seat(place="1A"))]
    with store.transaction():
        store.bulk(writes)
    assert {"1A", "1B"} == set(database.seats.distinct("place"))
    # Refused in either order: all or nothing.
    with pytest.raises(DuplicateKey):
        store.bulk([Delete(Seat, after.id), Insert(Seat(place="1A"))])
    assert {"1A", "1B"} == set(database.seats.distinct("place"))
