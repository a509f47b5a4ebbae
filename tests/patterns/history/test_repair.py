"""What verify finds in a history, what repair makes of it, and what keep= removes."""

from __future__ import annotations

import datetime as dt

import pytest

from tests.patterns.history.models import SMALL, UTC, Followed, Policy, disorder, rows, states
from treadle import Document, History, Limits


@pytest.fixture
def store(run):
    store = run.store([Policy])
    store.setup()
    store.insert(Policy(id=1, premium=1))
    for premium in range(2, 6):
        store.update(Policy, 1, {"$set": {"premium": premium}})
    return store


def broken(database, what, key):
    kept, history = rows(database, key), database["policies_history"]
    second, third, last = kept[1], kept[2], kept[-1]
    ms = dt.timedelta(milliseconds=1)
    {
        "no open row": lambda: history.delete_one({"_id": last["_id"]}),
        "no rows": lambda: history.delete_many({"document_id": key}),
        "another state": lambda: history.update_one({"_id": last["_id"]}, {"$set": {"document.premium": 9}}),
        "raw update": lambda: database["policies"].update_one({"_id": key}, {"$set": {"premium": 9}}),
        "no end": lambda: history.update_one({"_id": last["_id"]}, {"$unset": {"valid_to": 1}}),
        "raw delete": lambda: database["policies"].delete_one({"_id": key}),
        "gap": lambda: history.update_one(
            {"_id": second["_id"]}, {"$set": {"valid_to": second["valid_from"] + ms / 2}}
        ),
        "overlap": lambda: history.update_one(
            {"_id": second["_id"]}, {"$set": {"valid_to": third["valid_to"] + ms}}
        ),
        "hole": lambda: history.delete_one({"_id": third["_id"]}),
        "number twice": lambda: history.update_one({"_id": third["_id"]}, {"$set": {"revision": 2}}),
        "never ended": lambda: history.update_one(
            {"_id": second["_id"]}, {"$set": {"valid_to": second["valid_from"] - ms}}
        ),
        "ended": lambda: history.update_one(
            {"_id": last["_id"]}, {"$set": {"valid_to": last["valid_from"] + ms}}
        ),
    }[what]()


BREAKS = [
    "no open row", "no rows", "another state", "raw update", "raw delete", "no end", "gap", "overlap", "hole",
    "number twice", "never ended", "ended",
]  # fmt: skip


def test_verify_names_each_damage_and_repair_puts_it_right(store, database):
    """One document after the other; each has five states when it is damaged."""
    for key, what in enumerate(BREAKS, start=2):
        store.insert(Policy(id=key, premium=1))
        for premium in range(2, 6):
            store.update(Policy, key, {"$set": {"premium": premium}})
        assert [] == store.verify()
        broken(database, what, key)
        (finding,) = store.verify()
        assert ("history", "Policy", key) == (finding.pattern, finding.model, finding.document_id), what
        assert 1 == store.repair(), what
        assert [] == store.verify(), what
        assert 0 == store.repair(), what
    store.rebuild()
    assert [] == store.verify()
    left = {BREAKS[int(each.partition(":")[0]) - 2] for each in disorder(database, Policy)}
    assert left <= {"hole", "no open row"}


def test_a_finding_tells_what_is_stored_from_what_should_be(store, database):
    database["policies_history"].delete_one({"document_id": 1, "revision": 2})
    (finding,) = store.verify()
    assert ({"missed": None}, {"missed": 1}) == (finding.stored, finding.expected)


def test_a_lost_state_is_named_by_the_row_after_it(store, database):
    broken(database, "hole", 1)
    store.repair()
    found = list(store.history(Policy, 1))
    assert [0, 1, 0, 0] == [state.missed for state in found]
    assert [5, 4, 2, 1] == [state.revision for state in found]


def test_a_write_of_a_document_without_rows_records_what_it_ends(run, database):
    database["policies"].insert_many([{"_id": key, "holder": "old", "premium": 1} for key in (1, 2, 3)])
    store = run.store([Policy])
    store.setup()
    store.update(Policy, 1, {"$set": {"premium": 2}})
    store.update_many(Policy, {"_id": {"$gt": 1}}, {"$set": {"premium": 3}})
    store.delete(Policy, 3)
    assert [1, 2] == [each["premium"] for each in states(store, Policy, 1)]
    assert [1, 3] == [each["premium"] for each in states(store, Policy, 2)]
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


# -- keep ----------------------------------------------------------------------------------------


class Few(Document, collection="few", history=History(keep=2)):
    id: int
    premium: int = 0


class Recent(Document, collection="recent", history=History(keep=dt.timedelta(days=30))):
    id: int
    premium: int = 0


def test_keep_holds_so_many_ended_states(run, database):
    store = run.store([Few], limits=SMALL)
    store.setup()
    store.insert_many([Few(id=1), Few(id=2)])
    for premium in range(1, 9):
        store.update_many(Few, {}, {"$set": {"premium": premium}})
    store.delete(Few, 2)
    assert ["history"] == [ran.pattern for ran in store.run_due(dry_run=True)]
    assert 18 == database["few_history"].count_documents({})
    store.run_due()
    assert [6, 7, 8] == [each["premium"] for each in states(store, Few, 1)]
    assert [7, 8] == [each["premium"] for each in states(store, Few, 2)]
    assert [] == store.verify()
    store.update(Few, 1, {"$set": {"premium": 99}})
    assert 10 == next(iter(store.history(Few, 1))).revision


def test_keep_holds_states_of_an_age(run, database):
    store = run.store([Recent])
    store.setup()
    store.insert(Recent(id=1))
    for premium in range(1, 4):
        store.update(Recent, 1, {"$set": {"premium": premium}})
    old = dt.datetime.now(UTC) - dt.timedelta(days=40)
    for number, row in enumerate(rows(database, 1, "recent_history")[:2]):
        times = {
            "valid_from": old + dt.timedelta(days=number),
            "valid_to": old + dt.timedelta(days=number + 1),
        }
        database["recent_history"].update_one({"_id": row["_id"]}, {"$set": times})
    third = rows(database, 1, "recent_history")[2]
    database["recent_history"].update_one(
        {"_id": third["_id"]}, {"$set": {"valid_from": old + dt.timedelta(days=2)}}
    )
    store.run_due()
    assert [2, 3] == [each["premium"] for each in states(store, Recent, 1)]
    store.run_due(now=dt.datetime.now(UTC) + dt.timedelta(days=31))
    assert [3] == [each["premium"] for each in states(store, Recent, 1)]
    assert [] == store.verify()


def followed(run, database):
    """A store, its worker, and the collection that others write, with one document that was followed."""
    store = run.store([Followed])
    store.setup()
    worker = store.worker()
    raw = database["followed"]
    raw.insert_one({"_id": 1, "name": "a"})
    worker.run_until_idle()
    return store, worker, raw


# -- by the worker ---------------------------------------------------------------------------------


def test_the_worker_records_what_others_write(run, database):
    store, worker, raw = followed(run, database)
    for name in "bcd":
        raw.update_one({"_id": 1}, {"$set": {"name": name}})
    raw.update_one({"_id": 1}, {"$set": {"name": "d"}})
    raw.replace_one({"_id": 1}, {"name": "e"})
    store.update(Followed, 1, {"$set": {"name": "f"}})
    raw.insert_one({"_id": 2, "name": "x"})
    raw.delete_one({"_id": 2})
    worker.run_until_idle()
    assert list("abcdef") == [each["name"] for each in states(store, Followed, 1)]
    assert ["x"] == [each["name"] for each in states(store, Followed, 2)]
    assert [] == disorder(database, Followed)
    assert [] == store.verify()
    raw.delete_one({"_id": 1})
    raw.insert_one({"_id": 1, "name": "g"})
    worker.run_until_idle()
    assert list("abcdefg") == [each["name"] for each in states(store, Followed, 1)]
    assert [] == store.verify()


def test_the_worker_makes_one_state_of_a_transaction(run, database):
    store = run.store([Followed])
    store.setup()
    worker = store.worker()
    worker.run_until_idle()
    followed = database["followed"]
    followed.insert_one({"_id": 1, "name": "a"})
    with database.client.start_session() as session:
        with session.start_transaction():
            for name in ("b", "c"):
                followed.update_one({"_id": 1}, {"$set": {"name": name}}, session=session)
            followed.insert_one({"_id": 2, "name": "a"}, session=session)
            followed.update_one({"_id": 2}, {"$set": {"name": "b"}}, session=session)
            followed.insert_one({"_id": 3, "name": "a"}, session=session)
            followed.delete_one({"_id": 3}, session=session)
        with session.start_transaction():
            followed.delete_one({"_id": 2}, session=session)
            followed.insert_one({"_id": 2, "name": "c"}, session=session)
    worker.run_until_idle()
    kept = {key: [each["name"] for each in states(store, Followed, key)] for key in (1, 2, 3)}
    assert {1: ["a", "c"], 2: ["b", "c"], 3: []} == kept
    assert [] == disorder(database, Followed)
    with database.client.start_session() as session, session.start_transaction():
        followed.delete_one({"_id": 2}, session=session)
        followed.insert_one({"_id": 2, "name": "d"}, session=session)
        followed.delete_one({"_id": 2}, session=session)
    worker.run_until_idle()
    assert ["b", "c"] == [each["name"] for each in states(store, Followed, 2)]
    assert [] == disorder(database, Followed)
    assert [] == store.verify()


def test_a_new_document_that_its_transaction_updates_is_seen_without_images(run, database):
    store, worker, raw = followed(run, database)
    database.command("collMod", "followed", changeStreamPreAndPostImages={"enabled": False})
    with database.client.start_session() as session, session.start_transaction():
        raw.insert_one({"_id": 2, "name": "a"}, session=session)
        raw.update_one({"_id": 2}, {"$set": {"name": "b"}}, session=session)
    worker.run_until_idle()
    assert ["b"] == [each["name"] for each in states(store, Followed, 2)]
    assert [] == store.verify()


def test_the_worker_goes_on_where_somebody_removed_the_end_of_a_row(run, database):
    store, worker, raw = followed(run, database)
    database["followed_history"].update_one({"valid_to": None}, {"$unset": {"valid_to": 1}})
    raw.update_one({"_id": 1}, {"$set": {"name": "b"}})
    worker.run_until_idle()
    assert list("ab") == [each["name"] for each in states(store, Followed, 1)]
    assert [] == disorder(database, Followed)


def test_events_are_recorded_once_however_often_they_are_read(run, database):
    store = run.store([Followed], limits=Limits(worker_batch_max=2))
    store.setup()
    worker = store.worker()
    database["followed"].insert_one({"_id": 1, "name": "0"})
    worker.run_until_idle()
    for number in range(1, 9):
        database["followed"].update_one({"_id": 1}, {"$set": {"name": str(number)}})
        if number % 3 == 0:
            worker = store.worker()
            worker.run_until_idle()
    worker.run_until_idle()
    assert list("012345678") == [each["name"] for each in states(store, Followed, 1)]
    assert [] == store.verify()


def test_a_state_that_the_worker_could_not_see_is_named(run, database):
    store, worker, raw = followed(run, database)
    database.command("collMod", "followed", changeStreamPreAndPostImages={"enabled": False})
    raw.update_one({"_id": 1}, {"$set": {"name": "b"}})
    raw.update_one({"_id": 1}, {"$set": {"name": "c"}})
    worker.run_until_idle()
    newest, *_ = store.history(Followed, 1)
    assert ("c", 1) == (newest.name, newest.missed)
    assert [] == store.verify()


def test_repair_does_not_mistake_what_the_worker_has_yet_to_read(run, database):
    """A row that repair writes is newer than the events that wait; these are passed over."""
    store, worker, raw = followed(run, database)
    for name in "bc":
        raw.update_one({"_id": 1}, {"$set": {"name": name}})
    store.repair()
    raw.update_one({"_id": 1}, {"$set": {"name": "d"}})
    worker.run_until_idle()
    assert list("acd") == [each["name"] for each in states(store, Followed, 1)]
    assert [] == store.verify()
