"""The dry run performs reads and lists writes."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo import DeleteOne

from treadle import UsageError
from treadle.plan import (
    aggregate,
    bulk_write,
    find,
    find_one,
    insert_one,
    is_inside,
    outside,
    server_facts,
    share,
    transact,
    update_many,
    wait,
)
from treadle.plan.dry_run import list_writes

SERVER: Any = object()


def dry(plan, writes):
    return list_writes(plan, writes, SERVER)


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


def test_nothing_but_reads_reaches_the_runner(run, database):
    """A runner that performs these would write, however it is asked."""
    database["numbers"].insert_one({"_id": 1})

    def plan():
        server = yield from server_facts()
        inside = yield from is_inside()
        yield from outside(lambda: insert_one("numbers", {"_id": 2}))
        yield from aggregate("numbers", [{"$set": {"n": 1}}, {"$merge": "others"}])
        with pytest.raises(TypeError, match="a dry run cannot perform"):
            yield from share("a write")
        return server, inside

    writes = []
    assert (SERVER, False) == run(dry(plan(), writes))
    assert ["insert_one", "aggregate"] == [each.method for each in writes]
    assert ["numbers"] == database.list_collection_names()
    assert [{"_id": 1}] == list(database["numbers"].find())


def test_an_error_inside_of_a_transaction_reaches_the_plan_that_asked_for_it(run):
    def inside():
        yield from find_one("numbers", {})
        raise ValueError("refused")

    def plan():
        with pytest.raises(ValueError, match="refused"):
            yield from transact(inside)
        return "went on"

    assert "went on" == run(dry(plan(), []))
