"""A state for each write, of any kind, in the commit of the write.

Covers: patterns/history/rows
"""

from __future__ import annotations

import datetime as dt
import itertools
import threading

import pytest
from bson import ObjectId
from pymongo import UpdateOne
from pymongo.errors import DuplicateKeyError

from tests.patterns.history.models import (
    UTC,
    Bundle,
    Car,
    Claim,
    Contract,
    Fan,
    Insurer,
    Node,
    Part,
    Policy,
    PolicyV1,
    PolicyV2,
    Truck,
    Vehicle,
    disorder,
    rows,
    states,
)
from tests.support import race
from treadle import Store, Update
from treadle.patterns.history.track import NOW, Track

START = dt.datetime(2026, 1, 1)
SECOND = dt.timedelta(seconds=1)


def track(**last) -> Track:
    """A track of a document whose newest row is this one."""

    class Rules:
        @staticmethod
        def row(identity, revision, begins, document):
            return {"revision": revision, "valid_from": begins, "valid_to": None, "document": document}

    row = {"_id": 1, "revision": 1, "valid_from": START, "valid_to": None, "document": {"n": 1}, **last}
    return Track(Rules(), 7, row if last else None)


# -- without a server --------------------------------------------------------------------------------


def test_states_follow_each_other_without_a_gap():
    followed = track(revision=4)
    for number in (2, 3):
        followed.become({"n": number}, START + number * SECOND)
    followed.become(None, START + 9 * SECOND)
    assert [5, 6] == [row["revision"] for row in followed.begun]
    times = [(row["valid_from"], row["valid_to"]) for row in followed.begun]
    assert [(START + 2 * SECOND, START + 3 * SECOND), (START + 3 * SECOND, START + 9 * SECOND)] == times
    assert [None, True] == [row.get("deleted") for row in followed.begun]
    assert 1 == len(followed.ended)


def test_a_state_ends_after_it_began_whatever_the_clock_says():
    ahead = track(valid_from=START + SECOND)
    ahead.become({"n": 2}, START)
    assert START + SECOND + dt.timedelta(milliseconds=1) == ahead.begun[0]["valid_from"]
    ended = track(valid_to=START + SECOND)
    ended.become({"n": 2}, START)
    assert START + SECOND == ended.begun[0]["valid_from"]


def test_in_one_command_the_end_and_the_next_beginning_are_the_same_expression():
    followed = track(revision=1)
    followed.become({"n": 2}, NOW)
    assert [(1, {"valid_to": followed.begun[0]["valid_from"]})] == followed.ended


def test_a_state_that_was_not_recorded_is_adopted_until_the_change():
    for last in ({}, {"valid_to": START}):
        for at in (NOW, START + SECOND):
            adopting = track(**last)
            adopting.adopt({"n": 1}, at)
            adopting.become({"n": 2}, at)
            first, second = adopting.begun
            assert first["valid_to"] == second["valid_from"]
            assert [] == adopting.ended
            assert first["revision"] + 1 == second["revision"]


# -- the server's clock ------------------------------------------------------------------------------


def test_all_statements_of_one_update_command_have_one_time(database):
    """What `track.py` relies on: the server fixes $$NOW once per command."""
    keys = [ObjectId() for _ in range(2_000)]
    stamp = [{"$set": {"at": NOW}}]
    database["times"].bulk_write([UpdateOne({"_id": key}, stamp, upsert=True) for key in keys])
    assert 1 == len(database["times"].distinct("at"))


def test_times_are_the_server_s_and_never_go_back(run, database):
    """A clock that was set back, here a row that lies ahead, ends no state before it began."""
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1, premium=1))
    ahead = dt.datetime.now(UTC).replace(microsecond=0) + dt.timedelta(hours=1)
    database["policies_history"].update_many({}, {"$set": {"valid_from": ahead}})
    store.update(Policy, 1, {"$set": {"premium": 2}})
    store.update(Policy, 1, {"$set": {"premium": 3}})
    store.delete(Policy, 1)
    store.insert_many([Policy(id=key, premium=4) for key in (1, 2)])
    store.update_many(Policy, {}, {"$set": {"premium": 5}})
    assert [1, 2, 3, 4, 5] == [row["document"]["premium"] for row in rows(database, 1)]
    assert [] == disorder(database, Policy)


# -- one write, one state ----------------------------------------------------------------------------


@pytest.mark.quick
def test_each_write_begins_a_state_where_the_last_one_ended(run, database):
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1, premium=10))
    store.update(Policy, 1, {"$set": {"premium": 20}})
    store.update_many(Policy, {}, {"$inc": {"premium": 1}})
    store.replace(Policy(id=1, holder="Ben", premium=5))
    store.delete(Policy, 1)
    kept = rows(database, 1)
    assert [(1, 10), (2, 20), (3, 21), (4, 5)] == [
        (row["revision"], row["document"]["premium"]) for row in kept
    ]
    assert [row["valid_to"] for row in kept[:-1]] == [row["valid_from"] for row in kept[1:]]
    store.insert(Policy(id=1, premium=2))
    assert 5 == rows(database, 1)[-1]["revision"]
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


def test_a_write_that_changes_nothing_makes_no_state(run, database):
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1, premium=10))
    store.update(Policy, 1, {"$set": {"premium": 10}})
    store.update_many(Policy, {}, {"$inc": {"premium": 0}})
    store.replace(store.get(Policy, 1))
    assert 1 == len(rows(database, 1))
    # The smallest change is one.
    store.update(Policy, 1, {"$set": {"notes": ["a"]}})
    store.update(Policy, 1, {"$set": {"notes": ["b"]}})
    assert 3 == len(rows(database, 1))


def test_the_writes_of_a_transaction_make_one_state_or_none(run, database):
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1, premium=1))
    with store.transaction() as session:
        store.update(Policy, 1, {"$set": {"premium": 2}}, session=session)
        store.update(Policy, 1, {"$set": {"premium": 3}}, session=session)
        store.insert(Policy(id=2, premium=1), session=session)
        store.update_many(Policy, {}, {"$inc": {"premium": 1}}, session=session)
    assert [1, 4] == [row["document"]["premium"] for row in rows(database, 1)]
    assert [2] == [row["document"]["premium"] for row in rows(database, 2)]
    before = rows(database, 1)
    with store.transaction() as session:
        store.update(Policy, 1, {"$set": {"premium": 3}}, session=session)
        store.update(Policy, 1, {"$set": {"premium": 4}}, session=session)
    with store.transaction() as session:
        store.insert(Policy(id=3), session=session)
        store.delete(Policy, 3, session=session)
    with store.transaction() as session:
        store.delete(Policy, 1, session=session)
        store.insert(Policy(id=1, premium=4), session=session)
    assert (before, []) == (rows(database, 1), rows(database, 3))
    with pytest.raises(RuntimeError), store.transaction() as session:
        store.update(Policy, 1, {"$set": {"premium": 2}}, session=session)
        raise RuntimeError
    assert before == rows(database, 1)
    with store.transaction() as session:
        store.delete(Policy, 1, session=session)
        store.insert(Policy(id=1, premium=9), session=session)
    with store.transaction() as session:
        store.update(Policy, 1, {"$set": {"premium": 10}}, session=session)
        store.delete(Policy, 1, session=session)
    assert [1, 4, 9] == [each["premium"] for each in states(store, Policy, 1)]
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


def test_sixteen_racing_writers_leave_no_hole(database):
    store = Store(database, [Policy])
    store.setup()
    store.insert(Policy(id=1))

    def write() -> None:
        for _ in range(5):
            store.update(Policy, 1, {"$inc": {"premium": 1}})

    race(*[write] * 16)
    assert list(range(81)) == [row["document"]["premium"] for row in rows(database, 1)]
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


def test_update_many_records_what_it_changed_and_not_what_it_read(database):
    """A write between the reading and the writing of a chunk is a state of its own."""
    store, other = Store(database, [Policy]), Store(database, [Policy])
    store.setup()
    store.insert_many([Policy(id=key) for key in range(20)])
    stop = threading.Event()

    def many() -> None:
        for _ in range(6):
            store.update_many(Policy, {}, {"$inc": {"premium": 1}})
        stop.set()

    def single() -> None:
        key = 0
        while not stop.is_set():
            other.update(Policy, key % 20, {"$inc": {"premium": 100}})
            key += 1

    race(many, single)
    for key in range(20):
        premiums = [row["document"]["premium"] for row in rows(database, key)]
        assert {1, 100} >= {b - a for a, b in itertools.pairwise(premiums)}
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


def test_an_update_costs_two_commands_more_and_looks_at_one_row(heard, database):
    other, listener = heard
    store = Store(other, [Policy])
    store.setup()
    store.insert(Policy(id=1))
    for premium in range(1, 12):
        store.update(Policy, 1, {"$set": {"premium": premium}})
    listener.clear()
    store.update(Policy, 1, {"$inc": {"premium": 1}})
    sent = ["findAndModify", "find", "update", "commitTransaction"]
    assert sent == [name for name in listener.names if name != "hello"]
    reading = next(command for name, command in listener.commands if command.get(name) == "policies_history")
    explained = {"explain": {name: reading[name] for name in ("find", "filter", "sort", "limit")}}
    assert 1 == database.command(explained)["executionStats"]["totalDocsExamined"]
    assert [] == disorder(database, Policy)


# -- rows that other programs removed or changed -----------------------------------------------------


def test_a_write_of_a_document_without_rows_records_what_it_ends(run, database):
    """Where another program stored the document, removed its row, or the row's end."""
    raws = [{"_id": key, "holder": "old", "premium": 1, "notes": []} for key in range(5)]
    database["policies"].insert_many(raws)
    store = run.store([Policy])
    store.setup()
    history = database["policies_history"]
    store.update(Policy, 0, {"$set": {"premium": 1}})
    assert [] == list(history.find())
    store.update(Policy, 0, {"$set": {"premium": 2}})
    store.update_many(Policy, {"_id": {"$gt": 0}}, {"$set": {"premium": 3}})
    store.delete(Policy, 3)
    found = [[each["premium"] for each in states(store, Policy, key)] for key in range(4)]
    assert [[1, 2], [1, 3], [1, 3], [1, 3]] == found
    history.delete_one({"document_id": 0, "valid_to": None})
    store.update(Policy, 0, {"$set": {"premium": 7}})
    history.update_one({"document_id": 0, "valid_to": None}, {"$unset": {"valid_to": 1}})
    with store.transaction() as session:
        store.update(Policy, 0, {"$set": {"premium": 8}}, session=session)
    store.bulk([Update(Policy, 0, {"$set": {"premium": 9}}), Update(Policy, 0, {"$inc": {"premium": 0}})])
    assert [1, 2, 7, 8, 9] == [each["premium"] for each in states(store, Policy, 0)]
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


def test_a_document_that_another_program_deleted_can_be_inserted_again(run, database):
    store = run.store([Policy])
    store.setup()
    store.insert_many([Policy(id=number, premium=1) for number in range(3)])
    database["policies"].delete_many({})
    store.insert(Policy(id=0, premium=2))
    store.insert_many([Policy(id=number, premium=2) for number in (1, 2)])
    for number in range(3):
        assert [1, 2] == [each["premium"] for each in states(store, Policy, number)]
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


def test_a_second_open_row_cannot_be_stored(run, database):
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1))
    second = {"document_id": 1, "revision": 2, "valid_from": dt.datetime.now(UTC), "valid_to": None}
    with pytest.raises(DuplicateKeyError):
        database["policies_history"].insert_one(second)


# -- beside other patterns ---------------------------------------------------------------------------


def test_values_that_treadle_maintains_make_no_state(run, database):
    store = run.store([Claim, Contract])
    store.setup()
    store.insert(Contract(id=1))
    claims = [store.insert(Claim(contract_id=1)) for _ in range(2)]
    store.delete(Claim, claims[0].id)
    assert [0] == [row["document"]["claims"] for row in rows(database, 1, "contracts_history")]
    assert 1 == store.get(Contract, 1).claims
    assert [] == store.verify()


def test_a_rename_of_a_source_is_no_state_of_its_targets(database):
    """Neither of a copy in the document nor of one in an element."""
    store = Store(database, [Insurer, Bundle])
    store.setup()
    store.insert(Insurer(id=1, name="old"))
    store.insert(Bundle(id=1, parts=[Part(insurer_id=1)]))
    store.update(Insurer, 1, {"$set": {"name": "new"}})
    bundle, kept = store.require(Bundle, 1), rows(database, 1, "bundles_history")
    assert ("new", "new", 1) == (bundle.insurer, bundle.parts[0].name, len(kept))
    assert [] == store.verify()


def test_calls_on_arrays_and_trees_are_states(run, database):
    store = run.store([Fan, Node])
    store.setup()
    store.insert(Fan(id=1))
    array = store.array(Fan, "idols", 1)
    for idol in "abcde":
        array.append(idol)
    array.remove("a")
    found = [row["document"]["idol_count"] for row in rows(database, 1, "fans_history")]
    assert [0, 1, 2, 3, 4, 5, 4] == found
    tree = store.tree(Node)
    tree.insert(Node(id=1), parent=None)
    tree.insert(Node(id=2), parent=None)
    tree.insert(Node(id=3), parent=1)
    tree.move(3, 2)
    assert [[1], [2]] == [row["document"]["above"] for row in rows(database, 3, "nodes_history")]
    assert [] == store.verify()


def test_a_change_of_kind_ends_the_history_of_a_kind_or_begins_it(run, database):
    store = run.store([Vehicle, Car, Truck])
    store.setup()
    store.insert_many([Car(id=1), Truck(id=2)])
    store.change_kind(Truck(id=1, load=3), was=Car)
    store.update(Truck, 1, {"$set": {"load": 9}})
    store.change_kind(Car(id=2, seats=2), was=Truck)
    store.update(Vehicle, 2, {"$set": {"wheels": 3}})
    assert [True] == [row["valid_to"] is not None for row in rows(database, 1, "cars_history")]
    assert [4, 3] == [row["document"]["wheels"] for row in rows(database, 2, "cars_history")]
    assert [] == store.verify()
    assert 5 == store.revert(Car, 1, 1).seats
    assert isinstance(store.get(Vehicle, 1), Car)
    assert [] == store.verify()


def test_a_migration_is_a_state_and_older_ones_are_read_through_it(run, database):
    old = run.store([PolicyV1])
    old.setup()
    old.insert_many([PolicyV1(id=1, name="Ada"), PolicyV1(id=2, name="Ben")])
    store = run.store([PolicyV2])
    store.setup()
    store.update(PolicyV2, 2, {"$set": {"holder": "Cid"}})
    store.migrate(PolicyV2)
    first = rows(database, 1, "versioned_history")
    assert [1, 2] == [row["document"]["schema_version"] for row in first]
    assert ["Ada", "Ada"] == [each["holder"] for each in states(store, PolicyV2, 1)]
    assert ["Ben", "Cid"] == [each["holder"] for each in states(store, PolicyV2, 2)]
    assert [] == store.verify()
