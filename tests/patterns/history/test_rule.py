"""Which states `keep=` removes."""

from __future__ import annotations

import datetime as dt

from tests.patterns.history.models import SMALL, UTC, rows, states
from treadle import Document, History


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
