"""The account of the torture: what an error tells of its write, and what a journal allows to be stored."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.torture.journal import ABSENT, Journal, outcome_of
from benchmarks.torture.rounds import longest_gap
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    DuplicateKeyError,
    NetworkTimeout,
    OperationFailure,
    WriteConcernError,
)

from treadle import TimedOut, UsageError


def labelled(error: Any, label: str) -> Any:
    error._add_error_label(label)
    return error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UsageError("no", code="id-invalid"), "refused"),
        (DuplicateKeyError("twice"), "refused"),
        (OperationFailure("no", 121), "refused"),
        (TimedOut("late", code="deadline-passed"), "refused"),
        (TimedOut("late", code="write-outcome-unknown"), "unknown"),
        (AutoReconnect("gone"), "unknown"),
        (NetworkTimeout("late"), "unknown"),
        (WriteConcernError("late", 64), "unknown"),
        (BulkWriteError({"writeErrors": [], "writeConcernErrors": [{"code": 64}]}), "unknown"),
        (BulkWriteError({"writeErrors": [{"code": 11000}], "writeConcernErrors": [{"code": 64}]}), "unknown"),
        (BulkWriteError({"writeErrors": [{"code": 11000}], "writeConcernErrors": []}), "refused"),
        (labelled(AutoReconnect("gone"), "TransientTransactionError"), "refused"),
        (labelled(OperationFailure("gone", 50), "UnknownTransactionCommitResult"), "unknown"),
    ],
)
def test_an_error_says_whether_anything_can_have_been_written(error: Exception, outcome: str) -> None:
    assert outcome == outcome_of(error)


def test_an_error_of_another_kind_is_nobodys_outcome() -> None:
    with pytest.raises(ZeroDivisionError):
        outcome_of(ZeroDivisionError())


def test_a_cell_is_certain_unless_an_outcome_was_unknown() -> None:
    journal, cell = Journal(), ("orders", 1)
    journal.write("refused", {cell: "a"})
    assert journal.settled(cell) is ABSENT
    journal.write("unknown", {cell: "a"})
    assert {ABSENT, "a"} == journal.states[cell]
    with pytest.raises(KeyError):
        journal.settled(cell)
    journal.write("acknowledged", {cell: "b"})
    assert {"a", "b"} == journal.states[cell], "the unknown one may still arrive"
    journal.write("acknowledged", {("orders", 2): "b"})
    assert "b" == journal.settled(("orders", 2))


def test_a_stall_is_the_longest_time_without_an_acknowledgement() -> None:
    assert 4.0 == longest_gap([1.0, 2.0, 6.0, 6.5], 3.0, 7.0)
    assert 5.0 == longest_gap([1.0, 2.0], 3.0, 7.0), "up to the end, where nothing came"
