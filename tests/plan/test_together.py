"""What is made of a joint answer, without a server."""

from __future__ import annotations

from typing import Any

from bson import ObjectId

from treadle.plan import Call, Read
from treadle.plan.together import perform_together


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


def test_answers_go_by_id_whatever_their_order() -> None:
    keys = [ObjectId() for _ in range(5)]
    rows = [{"_id": key} for key in keys]
    assert rows == _answered([_asking(key) for key in keys], rows[::-1])


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
