"""Histories that the worker writes, of what any program writes.

Covers: graph/events
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.patterns.history.models import Followed, disorder, states
from treadle import Limits, UsageError
from treadle.graph.events import Event
from treadle.patterns.history.stream import net


def event(kind: str, time: int, after: Any = None, before: Any = None, key: int = 1) -> Event:
    return Event(
        kind, key, None, {"clusterTime": time, "fullDocument": after, "fullDocumentBeforeChange": before}
    )


def test_the_changes_of_one_transaction_to_one_document_are_one():
    """They have one time; other times, and other documents, are changes of their own."""
    cases = [
        ([event("insert", 1, "a"), event("update", 1, "b", "a")], [("insert", None, "b")]),
        ([event("insert", 1, "a"), event("delete", 1, None, "a")], []),
        ([event("delete", 1, None, "a"), event("insert", 1, "b")], [("replace", "a", "b")]),
        ([event("update", 1, "b", "a"), event("delete", 1, None, "b")], [("delete", "a", None)]),
        ([event("insert", 1), event("update", 1)], [("update", None, None)]),
        ([event("update", 1, "b"), event("update", 2, "c")], [("update", None, "b"), ("update", None, "c")]),
        (
            [event("update", 1, "b"), event("update", 1, "c", key=2)],
            [("update", None, "b"), ("update", None, "c")],
        ),
    ]
    for events, expected in cases:
        assert expected == [(each.kind, each.before, each.after) for each in net(events)]


def test_a_history_of_the_stream_cannot_be_paused(run):
    """What passes during a pause no backfill could recover."""
    store = run.store([Followed])
    (rule,) = (rule.place.label for rule in store.graph.rules if rule.pattern == "history")
    with pytest.raises(UsageError) as refused:
        store.pause(rule)
    assert "rule-not-pausable" == refused.value.code


def followed(run, database):
    """A store, its worker, and the collection that others write, with one document that was followed."""
    store = run.store([Followed])
    store.setup()
    worker = store.worker()
    raw = database["followed"]
    raw.insert_one({"_id": 1, "name": "a"})
    worker.run_until_idle()
    return store, worker, raw


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
