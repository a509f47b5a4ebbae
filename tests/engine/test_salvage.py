"""A document that cannot be handled stops no other; a bug of ours is no bad document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pymongo.errors import BulkWriteError

from treadle.engine import salvage as module
from treadle.engine.salvage import Contended, attempting, divide, salvage
from treadle.errors import DataError
from treadle.plan import Plan

REFUSED = BulkWriteError({"writeErrors": [{"index": 0, "code": 121, "errmsg": "refused"}]})


def finish(plan: Plan[Any]) -> tuple[Any, list[Any]]:
    """The result of a plan whose commands succeed, and the keys that it quarantined."""
    keys = []
    try:
        command = next(plan)
        while True:
            keys.append(command.arguments[0]["_id"]["$eq"]["key"])
            command = plan.send(type("Result", (), {"matched_count": 1})())
    except StopIteration as stop:
        return stop.value, keys


@pytest.mark.parametrize("bad", [set(), {3}, {0, 7}, set(range(8))])
def test_each_document_that_fails_is_quarantined_and_all_others_succeed(bad):
    def attempt(some: Sequence[int]) -> Plan[list[int]]:
        if bad & set(some):
            raise REFUSED
        return [each * 10 for each in some]
        yield

    result, quarantined = finish(salvage("Order", "orders", range(8), attempt, lost=lambda key, _: [-key]))
    assert sorted(bad) == sorted(quarantined)
    assert [-each if each in bad else each * 10 for each in range(8)] == result


def test_a_bug_is_raised_and_quarantines_nothing():
    def attempt(some: Sequence[int]) -> Plan[list[int]]:
        raise KeyError("ours")
        yield

    with pytest.raises(KeyError):
        finish(salvage("Order", "orders", range(8), attempt))


def test_a_contended_batch_is_split_into_more_pieces_than_two():
    sizes = []

    def attempt(some: Sequence[int]) -> Plan[list[int]]:
        sizes.append(len(some))
        if len(some) > 8:
            raise Contended
        return []
        yield

    def alone(item: int, error: Exception) -> Plan[list[int]]:
        raise error
        yield

    finish(divide(range(64), attempt, alone))
    assert [64, *[8] * module.CONTENDED_PIECES] == sizes


def test_documents_are_written_first_after_a_conflict_and_split_after_several():
    held = []

    def attempt() -> Plan[str]:
        return "done"
        yield

    def hold() -> Plan[None]:
        held.append(True)
        return
        yield

    body = attempting(attempt, hold, 2)
    for number in range(module.CONTENDED_ATTEMPTS_MAX):
        assert ("done", []) == finish(body())
        assert number == len(held)
    with pytest.raises(Contended):
        finish(body())


def test_what_a_users_function_refuses_is_quarantined():
    def attempt(some: Sequence[int]) -> Plan[list[int]]:
        if 1 in some:
            raise DataError("the migration refused it", code="migration-failed")
        return list(some)
        yield

    assert ([0, 2], [1]) == finish(salvage("Order", "orders", [0, 1, 2], attempt))
