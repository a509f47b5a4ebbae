"""What is made of a joint answer, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from bson import ObjectId
from pymongo.errors import AutoReconnect, BulkWriteError, OperationFailure, ServerSelectionTimeoutError

from treadle import DuplicateKey, TimedOut
from treadle.plan import Call, Read
from treadle.store.shared_commands import copy_error, perform_together


def _asking(key: Any) -> Call:
    return Call("people", "find_one", ({"_id": key},), writes=False, ids=(key,))


def _answered(commands: list[Any], rows: list[dict[str, Any]]) -> list[Any]:
    """The outcomes of reads whose one query finds these rows."""
    plan = perform_together(commands)
    asked = next(plan)
    assert isinstance(asked, Read)
    try:
        plan.send(rows)
    except StopIteration as stop:
        outcomes: list[Any] = stop.value
        return outcomes
    raise AssertionError("a second command for one question")


def test_an_id_and_the_same_bytes_are_two_ids() -> None:
    key = ObjectId()
    by_id, by_bytes = {"_id": key, "name": "id"}, {"_id": key.binary, "name": "bytes"}
    rows = [by_bytes, by_id]
    assert [by_id, by_bytes] == _answered([_asking(key), _asking(key.binary)], rows)


def test_who_asks_for_what_is_not_there_gets_nothing_and_others_their_own() -> None:
    keys = [ObjectId() for _ in range(3)]
    first, last = {"_id": keys[0]}, {"_id": keys[2]}
    assert [first, None, last] == _answered([_asking(key) for key in keys], [last, first])


def test_two_who_ask_for_one_document_do_not_share_it() -> None:
    key, other = ObjectId(), ObjectId()
    rows = [{"_id": key, "tags": ["a"]}, {"_id": other}]
    one, two, _ = _answered([_asking(key), _asking(key), _asking(other)], rows)
    assert one == two
    one["tags"].append("b")
    assert ["a"] == two["tags"]


@pytest.mark.parametrize(
    "error",
    [
        AutoReconnect("gone", ["one"]),
        BulkWriteError({"writeErrors": [{"index": 0, "code": 11000}]}),
        DuplicateKey("Product", {"errmsg": "E11000 … index: slot_1 dup key: …", "keyPattern": {"slot": 1}}),
        OperationFailure("refused", 13, {"code": 13, "errorLabels": ["TransientTransactionError"]}),
        ServerSelectionTimeoutError("nobody"),
        TimedOut("late", code="deadline-passed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_copied_error_says_the_same_and_shares_nothing(error: Exception) -> None:
    error.__cause__ = ValueError("why")
    other = copy_error(error)
    assert other is not error
    assert (type(error), str(error), repr(error)) == (type(other), str(other), repr(other))
    assert vars(error) == vars(other)
    assert error.__cause__ is other.__cause__
    assert getattr(error, "_error_labels", None) == getattr(other, "_error_labels", None)
    other.add_note("mine")
    assert not hasattr(error, "__notes__")
