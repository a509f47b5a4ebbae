"""What verify finds in a history, and what repair makes of it."""

from __future__ import annotations

import datetime as dt

import pytest

from tests.patterns.history.models import Policy, disorder, rows


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
