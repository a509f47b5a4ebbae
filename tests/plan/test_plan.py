"""Plans and runners, with the five traps of generators that drive I/O.

Covers: store/async_runner
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import DuplicateKeyError, OperationFailure, WriteError

from treadle import UsageError
from treadle.plan import (
    Call,
    Wait,
    aggregate,
    by_id,
    delete_many,
    find,
    find_one,
    insert_one,
    transact,
    update_one,
    wait,
)
from treadle.store.async_runner import AsyncRunner
from treadle.store.blocking.runner import Runner


def add_one(collection="numbers", value=1):
    yield from insert_one(collection, {"_id": value})
    return value


def test_a_plan_returns_its_result(run, database):
    assert 1 == run(add_one())
    assert [{"_id": 1}] == list(database["numbers"].find())


def test_a_plan_runs_once(run, database):
    """Trap 1: a spent generator would silently return None."""
    plan = add_one()
    run(plan)
    with pytest.raises(UsageError, match="already been started") as caught:
        run(plan)
    assert "plan-not-fresh" == caught.value.code


def test_a_started_plan_is_refused(run):
    plan = add_one()
    next(plan)
    with pytest.raises(UsageError, match="already been started"):
        run(plan)


def test_a_retried_transaction_makes_its_plan_again(run, database):
    """Trap 1, in a transaction: the second attempt does the work, too."""
    database["numbers"].insert_one({"_id": "seed"})
    attempts = []

    def make():
        attempts.append(len(attempts))
        yield from insert_one("numbers", {"_id": len(attempts)})
        if len(attempts) == 1:
            error = OperationFailure("try again", 112)
            error._add_error_label("TransientTransactionError")
            raise error
        return "done"

    assert "done" == run(transact(make))
    assert [0, 1] == attempts
    assert {"seed", 2} == {each["_id"] for each in database["numbers"].find()}


def test_a_transaction_that_is_given_a_plan_instead_of_a_maker_fails_loudly(run, database):
    plan = add_one()

    def make():
        return plan

    run(transact(make))
    with pytest.raises(UsageError, match="already been started"):
        run(transact(make))


def test_cancellation_closes_the_plan(server):
    """Trap 2: a cancelled task must not leave a plan suspended."""
    closed = []

    def waiting():
        try:
            yield Wait(60)
        finally:
            closed.append(True)

    async def main():
        async with AsyncMongoClient(server.uri) as client:
            task = asyncio.create_task(AsyncRunner(client["x"]).run(waiting()))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert [True] == closed

    asyncio.run(main())


def test_keyboard_interrupt_closes_the_plan(database):
    closed = []

    def interrupted():
        try:
            yield Call("numbers", "find_one", ({},), {}, writes=False)
        finally:
            closed.append(True)

    class Interrupting(Runner):
        def _perform(self, command, session, answers=False):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupting(database).run(interrupted())
    assert [True] == closed


def test_driver_errors_are_thrown_into_the_plan(run, database):
    """Trap 3: a pattern can answer them."""

    def insert_or_count():
        try:
            yield from insert_one("numbers", {"_id": 1})
            return "inserted"
        except DuplicateKeyError:
            yield from update_one("numbers", {"_id": 1}, {"$inc": {"n": 1}})
            return "counted"

    assert ["inserted", "counted"] == [run(insert_or_count()), run(insert_or_count())]
    assert {"_id": 1, "n": 1} == database["numbers"].find_one()


def test_an_error_that_the_plan_does_not_answer_reaches_the_caller(run):
    run(add_one())
    with pytest.raises(DuplicateKeyError):
        run(add_one())


def test_inside_a_transaction_an_error_cannot_be_swallowed(run, database):
    """Trap 4: the server has aborted; going on would commit nothing."""
    database["numbers"].insert_one({"_id": 1})

    def swallow():
        yield from insert_one("numbers", {"_id": 2})
        with contextlib.suppress(DuplicateKeyError):
            yield from insert_one("numbers", {"_id": 1})
        yield from insert_one("numbers", {"_id": 3})
        return "looks fine"

    with pytest.raises(DuplicateKeyError):
        run(transact(swallow))
    assert [1] == [each["_id"] for each in database["numbers"].find()]


def test_inside_a_transaction_a_clearer_error_may_be_raised(run, database):
    database["numbers"].insert_one({"_id": 1})

    def explain():
        try:
            yield from insert_one("numbers", {"_id": 1})
        except DuplicateKeyError as error:
            raise UsageError("taken", code="plan-not-fresh") from error

    with pytest.raises(UsageError, match="taken"):
        run(transact(explain))


def test_a_conflict_is_retried_even_if_the_plan_would_translate_it(database):
    """Trap 4: only the caller of the whole transaction can try again."""
    database["numbers"].insert_one({"_id": 1, "n": 0})
    runner = Runner(database)
    first_read = threading.Event()
    other_wrote = threading.Event()
    attempts = []

    def make():
        attempts.append(1)
        yield from find_one("numbers", {"_id": 1})
        first_read.set()
        other_wrote.wait(5)
        try:
            yield from update_one("numbers", {"_id": 1}, {"$inc": {"n": 1}})
        except (OperationFailure, WriteError) as error:
            raise UsageError("translated", code="plan-not-fresh") from error

    def other():
        first_read.wait(5)
        database["numbers"].update_one({"_id": 1}, {"$inc": {"n": 10}})
        other_wrote.set()

    thread = threading.Thread(target=other)
    thread.start()
    runner.run(transact(make))
    thread.join()
    assert 2 == len(attempts)
    assert 11 == database["numbers"].find_one()["n"]


def test_a_no_op_update_takes_no_lock_but_a_real_one_does(database):
    """Trap 5: what recomputes from a read must really modify what it guards."""
    outcomes = {}
    for name, recompute in {
        "no-op": {"$set": {"total": 4}},
        "real": {"$set": {"total": 4}, "$inc": {"_treadle.n": 1}},
    }.items():
        database["totals"].drop()
        database["totals"].insert_one({"_id": 1, "total": 4})
        with database.client.start_session() as session:
            session.start_transaction()
            database["totals"].find_one({"_id": 1}, session=session)
            database["totals"].update_one({"_id": 1}, {"$inc": {"total": 1}})
            try:
                database["totals"].update_one({"_id": 1}, recompute, session=session)
                session.commit_transaction()
                outcomes[name] = "committed"
            except OperationFailure as error:
                outcomes[name] = "conflict"
                assert error.has_error_label("TransientTransactionError")
    assert {"no-op": "committed", "real": "conflict"} == outcomes


def test_plans_nest_transactions_into_the_one_under_way(run, database):
    def inner():
        yield from insert_one("numbers", {"_id": 2})

    def outer():
        yield from insert_one("numbers", {"_id": 1})
        yield from transact(inner)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        run(transact(outer))
    assert [] == list(database["numbers"].find())


def test_reads_and_waits(run, database):
    database["numbers"].insert_many([{"_id": n} for n in range(5)])

    def read():
        found = yield from find("numbers", {"_id": {"$gt": 1}}, sort=[("_id", -1)], limit=2)
        yield from wait(0.001)
        removed = yield from delete_many("numbers", {})
        return [each["_id"] for each in found], removed.deleted_count

    assert ([4, 3], 5) == run(read())


def test_what_fits_into_one_reply_takes_one(heard):
    """By default the server's first reply would end at 101 documents."""
    database, listener = heard
    database["numbers"].insert_many([{"_id": n} for n in range(500)])
    listener.clear()

    def read():
        found = yield from find("numbers", {})
        counted = yield from aggregate("numbers", [{"$group": {"_id": "$_id"}}])
        return len(found), len(counted)

    assert (500, 500) == Runner(database).run(read())
    assert ["find", "aggregate"] == listener.names


def test_an_unknown_command_is_refused(run):
    def odd():
        yield "not a command"

    with pytest.raises(TypeError, match="not a command"):
        run(odd())


@pytest.mark.parametrize("identity", [{"$gt": ""}, {"a": 1}, None, re.compile("a"), [1]])
def test_the_id_of_a_caller_never_becomes_an_operator(identity):
    assert {"_id": {"$eq": identity}} == by_id(identity)
    assert {"_id": "$gt"} == by_id("$gt")
