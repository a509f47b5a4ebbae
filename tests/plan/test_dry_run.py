"""The dry run performs reads and lists writes."""

from __future__ import annotations

import pytest
from pymongo import DeleteOne

from treadle import UsageError
from treadle.plan import bulk_write, find, find_one, insert_one, transact, update_many, wait
from treadle.plan.dry_run import dry


def test_reads_are_performed_and_writes_are_listed(run, database):
    database["numbers"].insert_one({"_id": 1})

    def plan():
        found = yield from find("numbers", {})
        result = yield from update_many("numbers", {}, {"$set": {"n": 1}})
        yield from wait(3600)
        yield from insert_one("numbers", {"_id": 2})
        bulk = yield from bulk_write("numbers", [DeleteOne({"_id": 1})])
        return len(found), result.matched_count, bulk.deleted_count

    writes = []
    assert (1, 0, 0) == run(dry(plan(), writes))
    assert ["update_many", "insert_one", "bulk_write"] == [each.method for each in writes]
    assert [{"_id": 1}] == list(database["numbers"].find())


def test_transactions_are_listed_too(run, database):
    def inside():
        found = yield from find_one("numbers", {})
        yield from insert_one("numbers", {"_id": 1})
        return found

    def plan():
        return (yield from transact(inside))

    writes = []
    assert run(dry(plan(), writes)) is None
    assert [("numbers", "insert_one", ({"_id": 1},))] == [
        (each.collection, each.method, each.arguments) for each in writes
    ]
    assert [] == database.list_collection_names()


def test_a_spent_plan_is_refused(run):
    plan = find_one("numbers", {})
    run(plan)
    with pytest.raises(UsageError, match="already been started"):
        run(dry(plan, []))


def test_errors_of_reads_reach_the_plan(run):
    def plan():
        try:
            yield from find_one("numbers", {"$nonsense": 1})
        except Exception as error:
            return type(error).__name__

    assert "OperationFailure" == run(dry(plan(), []))
