"""A state for each write, whatever the write is, in its very commit."""

from __future__ import annotations

import datetime as dt
import itertools
import threading

import pytest
from pymongo.errors import DuplicateKeyError

from tests.patterns.history.models import (
    SMALL,
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
    Truck,
    Vehicle,
    disorder,
    rows,
    states,
)
from tests.support import race
from treadle import Document, History, Store, Update, UsageError, migration


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
    assert [1, 2, 3, 4] == [row["revision"] for row in kept]
    assert [10, 20, 21, 5] == [row["document"]["premium"] for row in kept]
    assert [row["valid_to"] for row in kept[:-1]] == [row["valid_from"] for row in kept[1:]]
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


def test_states_are_read_newest_first_and_as_of_a_moment(run, database):
    store = run.store([Policy], limits=SMALL)
    store.setup()
    before = dt.datetime.now(UTC) - dt.timedelta(minutes=1)
    store.insert(Policy(id=1, premium=1))
    for premium in range(2, 8):
        store.update(Policy, 1, {"$set": {"premium": premium}})
    found = list(store.history(Policy, 1))
    assert [7, 6, 5, 4, 3, 2, 1] == [state.revision for state in found]
    assert [7, 6, 5, 4, 3, 2, 1] == [state.premium for state in found]
    for state in found:
        assert state.document == store.at(Policy, 1, state.valid_from)
        if state.valid_to is not None:
            last = state.valid_to - dt.timedelta(milliseconds=1)
            assert state.document == store.at(Policy, 1, last)
    assert store.at(Policy, 1, before) is None
    assert 7 == store.at(Policy, 1, dt.datetime.now(UTC) + dt.timedelta(days=1)).premium
    store.delete(Policy, 1)
    assert store.at(Policy, 1, dt.datetime.now(UTC) + dt.timedelta(days=1)) is None


def test_find_at_gives_the_documents_that_matched_then(run, database):
    store = run.store([Policy], limits=SMALL)
    store.setup()
    store.insert_many([Policy(id=key, premium=key) for key in range(7)])
    moment = max(row["valid_from"] for row in database["policies_history"].find())
    store.update_many(Policy, {"premium": {"$gte": 3}}, {"$inc": {"premium": 100}})
    store.delete(Policy, 4)
    found = list(store.find_at(Policy, {"premium": {"$gte": 3}}, moment))
    assert [3, 4, 5, 6] == [each.id for each in found]
    assert [3, 4, 5, 6] == [each.premium for each in found]
    assert 6 == len(list(store.find_at(Policy, {}, dt.datetime.now(UTC) + dt.timedelta(days=1))))


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


def test_several_writes_in_one_transaction_make_one_state(run, database):
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1, premium=1))
    with store.transaction() as session:
        store.update(Policy, 1, {"$set": {"premium": 2}}, session=session)
        store.update(Policy, 1, {"$set": {"premium": 3}}, session=session)
        store.insert(Policy(id=2, premium=1), session=session)
        store.update(Policy, 2, {"$set": {"premium": 2}}, session=session)
    assert [1, 3] == [row["document"]["premium"] for row in rows(database, 1)]
    assert [2] == [row["document"]["premium"] for row in rows(database, 2)]
    assert [] == store.verify()


def test_a_transaction_whose_writes_cancel_out_makes_no_state(run, database):
    store = run.store([Policy])
    store.setup()
    history = "policies_history"
    store.insert(Policy(id=1, premium=1))
    store.update(Policy, 1, {"$set": {"premium": 2}})
    before = rows(database, 1, history)
    with store.transaction() as session:
        store.update(Policy, 1, {"$set": {"premium": 3}}, session=session)
        store.update(Policy, 1, {"$set": {"premium": 2}}, session=session)
    assert before == rows(database, 1, history)
    with store.transaction() as session:
        store.insert(Policy(id=2), session=session)
        store.delete(Policy, 2, session=session)
    assert [] == rows(database, 2, history)
    with store.transaction() as session:
        store.delete(Policy, 1, session=session)
        store.insert(Policy(id=1, premium=2), session=session)
    assert before == rows(database, 1, history)
    with store.transaction() as session:
        store.delete(Policy, 1, session=session)
        store.insert(Policy(id=1, premium=9), session=session)
    with store.transaction() as session:
        store.update(Policy, 1, {"$set": {"premium": 10}}, session=session)
        store.delete(Policy, 1, session=session)
    assert [1, 2, 9] == [each["premium"] for each in states(store, Policy, 1)]
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


def test_an_aborted_transaction_leaves_no_state(run, database):
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1))
    with pytest.raises(RuntimeError), store.transaction() as session:
        store.update(Policy, 1, {"$set": {"premium": 2}}, session=session)
        raise RuntimeError
    assert 1 == len(rows(database, 1))
    assert [] == store.verify()


def test_a_document_that_comes_back_goes_on_with_its_numbers(run, database):
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1, premium=1))
    store.delete(Policy, 1)
    store.insert(Policy(id=1, premium=2))
    kept = rows(database, 1)
    assert [1, 2] == [row["revision"] for row in kept]
    assert kept[0]["valid_to"] <= kept[1]["valid_from"]
    assert [] == store.verify()


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
    store.insert(Policy(id=1, premium=4))
    store.update_many(Policy, {}, {"$set": {"premium": 5}})
    kept = rows(database, 1)
    assert [1, 2, 3, 4, 5] == [row["document"]["premium"] for row in kept]
    assert [] == disorder(database, Policy)


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
    """A writer who comes between the reading and the writing of a chunk is a state of its own."""
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


def test_a_second_open_row_cannot_be_stored(run, database):
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1))
    (row,) = rows(database, 1)
    with pytest.raises(DuplicateKeyError):
        database["policies_history"].insert_one(
            {"document_id": 1, "revision": 2, "valid_from": dt.datetime.now(UTC), "valid_to": None}
        )
    assert row["valid_to"] is None


# -- other writes --------------------------------------------------------------------------------


def test_values_that_treadle_maintains_make_no_state(run, database):
    store = run.store([Claim, Contract])
    store.setup()
    store.insert(Contract(id=1))
    claims = [store.insert(Claim(contract_id=1)) for _ in range(2)]
    store.delete(Claim, claims[0].id)
    assert [0] == [row["document"]["claims"] for row in rows(database, 1, "contracts_history")]
    assert 1 == store.get(Contract, 1).claims
    assert [] == store.verify()


def test_appending_to_an_array_is_a_state(run, database):
    store = run.store([Fan])
    store.setup()
    store.insert(Fan(id=1))
    array = store.array(Fan, "idols", 1)
    for idol in "abcde":
        array.append(idol)
    array.remove("a")
    found = [row["document"]["idol_count"] for row in rows(database, 1, "fans_history")]
    assert [0, 1, 2, 3, 4, 5, 4] == found
    assert [] == store.verify()


def test_moves_in_a_tree_are_states(run, database):
    store = run.store([Node])
    store.setup()
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
    first, second = rows(database, 1, "cars_history"), rows(database, 2, "cars_history")
    assert [True] == [row["valid_to"] is not None for row in first]
    assert [4, 3] == [row["document"]["wheels"] for row in second]
    assert [] == store.verify()
    assert 5 == store.revert(Car, 1, 1).seats
    assert isinstance(store.get(Vehicle, 1), Car)
    assert [] == store.verify()


class PolicyV1(Document, collection="versioned", version=1, history=History()):
    id: int
    name: str


class PolicyV2(Document, collection="versioned", version=2, history=History()):
    id: int
    holder: str


def test_a_rename_of_a_source_is_no_state_of_its_targets(database):
    """Neither of a copy in the document nor of one in an element."""
    store = Store(database, [Insurer, Bundle])
    store.setup()
    store.insert(Insurer(id=1, name="old"))
    store.insert(Bundle(id=1, parts=[Part(insurer_id=1)]))
    store.update(Insurer, 1, {"$set": {"name": "new"}})
    bundle = store.require(Bundle, 1)
    assert ("new", "new", 1) == (
        bundle.insurer,
        bundle.parts[0].name,
        len(rows(database, 1, "bundles_history")),
    )
    assert [] == store.verify()


@migration(PolicyV2, from_version=1)
def rename(raw):
    raw["holder"] = raw.pop("name")
    return raw


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


# -- the way back -------------------------------------------------------------------------------


def test_revert_is_a_new_state_and_brings_back_what_was_deleted(run, database):
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1, premium=1))
    store.update(Policy, 1, {"$set": {"premium": 2}})
    assert 1 == store.revert(Policy, 1, 1).premium
    assert [1, 2, 1] == [row["document"]["premium"] for row in rows(database, 1)]
    store.delete(Policy, 1)
    assert 2 == store.revert(Policy, 1, 2).premium
    assert [1, 2, 1, 2] == [row["document"]["premium"] for row in rows(database, 1)]
    with pytest.raises(UsageError) as raised:
        store.revert(Policy, 1, 17)
    assert "revision-unknown" == raised.value.code
    assert [] == store.verify()


def test_a_revert_keeps_what_treadle_maintains(run, database):
    store = run.store([Claim, Contract])
    store.setup()
    store.insert(Contract(id=1, name="a"))
    store.update(Contract, 1, {"$set": {"name": "b"}})
    store.insert(Claim(contract_id=1))
    assert ("a", 1) == (store.revert(Contract, 1, 1).name, store.get(Contract, 1).claims)
    assert [] == store.verify()


class Deed(Document, collection="deeds", history=History(), revision="written", soft_delete="deleted_at"):
    id: int
    owner: str = ""
    written: int = 0
    deleted_at: dt.datetime | None = None


def test_a_revert_is_no_conflict_and_brings_back_what_was_deleted_softly(run, database):
    store = run.store([Deed])
    store.setup()
    store.insert(Deed(id=1, owner="Ada"))
    store.update(Deed, 1, {"$set": {"owner": "Ben"}})
    reverted = store.revert(Deed, 1, 1)
    assert ("Ada", 3) == (reverted.owner, reverted.written)
    store.delete(Deed, 1)
    assert store.get(Deed, 1) is None
    assert "Ben" == store.revert(Deed, 1, 2).owner
    assert ("Ben", None) == (store.get(Deed, 1).owner, store.get(Deed, 1).deleted_at)
    assert ["Ada", "Ben", "Ada", "Ben"] == [
        row["document"]["owner"] for row in rows(database, 1, "deeds_history")
    ]
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
    sent = ["findAndModify", "findAndModify", "insert", "commitTransaction"]
    assert sent == [name for name in listener.names if name != "hello"]
    ending = next(command for name, command in listener.commands if command.get(name) == "policies_history")
    explained = {"explain": {"find": "policies_history", "filter": ending["query"]}}
    assert 1 == database.command(explained)["executionStats"]["totalDocsExamined"]
    assert [] == disorder(database, Policy)


def test_an_update_of_a_document_without_its_row_records_what_it_ends(run, database):
    """Where somebody else stored the document, removed its row, or its row's end."""
    store = run.store([Policy])
    store.setup()
    history = database["policies_history"]
    raw = {"_id": 1, "holder": "Ada", "premium": 5, "notes": []}
    database["policies"].insert_one(raw)
    store.update(Policy, 1, {"$set": {"premium": 5}})
    assert [] == list(history.find())
    store.update(Policy, 1, {"$set": {"premium": 6}})
    assert [5, 6] == [each["premium"] for each in states(store, Policy, 1)]
    history.delete_one({"document_id": 1, "valid_to": None})
    store.update(Policy, 1, {"$set": {"premium": 7}})
    assert [5, 6, 7] == [each["premium"] for each in states(store, Policy, 1)]
    history.update_one({"document_id": 1, "valid_to": None}, {"$unset": {"valid_to": 1}})
    store.update(Policy, 1, {"$set": {"premium": 8}})
    store.bulk([Update(Policy, 1, {"$set": {"premium": 9}}), Update(Policy, 1, {"$inc": {"premium": 0}})])
    assert [5, 6, 7, 8, 9] == [each["premium"] for each in states(store, Policy, 1)]
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


def test_a_document_that_another_writer_deleted_can_be_inserted_again(run, database):
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


def test_a_transaction_writes_where_somebody_removed_the_end_of_a_row(run, database):
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1, premium=1))
    database["policies_history"].update_one({}, {"$unset": {"valid_to": 1}})
    assert 1 == store.at(Policy, 1, dt.datetime.now(UTC)).premium
    with store.transaction():
        store.update(Policy, 1, {"$set": {"premium": 2}})
    assert [1, 2] == [each["premium"] for each in states(store, Policy, 1)]
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


class Piece(Document, collection="pieces", discriminator="kind", history=History()):
    id: int


class Loom(Piece, kind="loom"):
    shafts: int = 4


class Reed(Piece, kind="reed"):
    dents: int = 12


def test_what_was_is_asked_for_by_kind(run, database):
    """The history is that of all kinds; a question about one is answered with its documents alone."""
    store = run.store([Piece, Loom, Reed])
    store.setup()
    store.insert_many([Loom(id=1), Reed(id=2)])
    then = max(row["valid_from"] for row in database["pieces_history"].find())
    assert [1, 2] == [each.id for each in store.find_at(Piece, {}, then)]
    assert [Loom(id=1)] == list(store.find_at(Loom, {}, then))
    assert [] == list(store.find_at(Loom, {"shafts": 8}, then))
    assert (Loom(id=1), None) == (store.at(Loom, 1, then), store.at(Reed, 1, then))
    store.change_kind(Reed(id=1), Loom)
    assert [Reed(id=1), Loom(id=1)] == [state.document for state in store.history(Reed, 1)]
    assert Loom(id=1) == store.revert(Reed, 1, 1)
    assert [] == store.verify()
