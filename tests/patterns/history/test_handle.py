"""What is asked of a history: states, documents as of a moment, and the way back."""

from __future__ import annotations

import datetime as dt

import pytest

from tests.patterns.history.models import SMALL, UTC, Claim, Contract, Policy, rows
from treadle import Document, History, Store, UsageError

DAY = dt.timedelta(days=1)


def test_states_are_read_newest_first_and_as_of_a_moment(run):
    store = run.store([Policy], limits=SMALL)
    store.setup()
    before = dt.datetime.now(UTC) - dt.timedelta(minutes=1)
    store.insert(Policy(id=1, premium=1))
    for premium in range(2, 8):
        store.update(Policy, 1, {"$set": {"premium": premium}})
    found = list(store.history(Policy, 1))
    assert [(number, number) for number in range(7, 0, -1)] == [
        (each.revision, each.premium) for each in found
    ]
    for state in found:
        assert state.document == store.at(Policy, 1, state.valid_from)
        if state.valid_to is not None:
            assert state.document == store.at(Policy, 1, state.valid_to - dt.timedelta(milliseconds=1))
    assert store.at(Policy, 1, before) is None
    assert 7 == store.at(Policy, 1, dt.datetime.now(UTC) + DAY).premium
    store.delete(Policy, 1)
    assert store.at(Policy, 1, dt.datetime.now(UTC) + DAY) is None


def test_find_at_gives_the_documents_that_matched_then(run, database):
    store = run.store([Policy], limits=SMALL)
    store.setup()
    store.insert_many([Policy(id=key, premium=key) for key in range(7)])
    moment = max(row["valid_from"] for row in database["policies_history"].find())
    store.update_many(Policy, {"premium": {"$gte": 3}}, {"$inc": {"premium": 100}})
    store.delete(Policy, 4)
    found = list(store.find_at(Policy, {"premium": {"$gte": 3}}, moment))
    assert [(key, key) for key in (3, 4, 5, 6)] == [(each.id, each.premium) for each in found]
    assert [] == list(store.find_at(Policy, {}, moment - DAY))
    assert 6 == len(list(store.find_at(Policy, {}, dt.datetime.now(UTC) + DAY)))


def test_find_at_looks_at_one_row_of_each_document(heard, database):
    other, listener = heard
    store = Store(other, [Policy])
    store.setup()
    store.insert_many([Policy(id=key) for key in range(10)])
    for _ in range(9):
        store.update_many(Policy, {}, {"$inc": {"premium": 1}})
    listener.clear()
    moment = dt.datetime.now(UTC) + DAY
    assert 10 == len(list(store.find_at(Policy, {}, moment)))
    stages = next(command["pipeline"] for name, command in listener.commands if name == "aggregate")
    explained = database.command(
        {
            "explain": {"aggregate": "policies_history", "pipeline": stages, "cursor": {}},
            "verbosity": "executionStats",
        }
    )
    assert 10 == explained["stages"][0]["$cursor"]["executionStats"]["totalDocsExamined"]


# -- revert ------------------------------------------------------------------------------------------


def test_revert_is_a_new_state_and_brings_back_what_was_deleted(run, database):
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1, premium=1))
    store.update(Policy, 1, {"$set": {"premium": 2}})
    assert 1 == store.revert(Policy, 1, 1).premium
    store.delete(Policy, 1)
    assert 2 == store.revert(Policy, 1, 2).premium
    assert [1, 2, 1, 2] == [row["document"]["premium"] for row in rows(database, 1)]
    with pytest.raises(UsageError) as raised:
        store.revert(Policy, 1, 17)
    assert "revision-unknown" == raised.value.code
    assert [] == store.verify()


def test_a_revert_keeps_what_treadle_maintains(run):
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
    owners = [row["document"]["owner"] for row in rows(database, 1, "deeds_history")]
    assert ["Ada", "Ben", "Ada", "Ben"] == owners
    assert [] == store.verify()


# -- kinds -------------------------------------------------------------------------------------------


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
