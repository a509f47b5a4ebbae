"""Arguments that no program means, and that a request may carry: our own error, short, whatever the call."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest

from treadle import AncestorArray, Bucket, Document, History, Outlier, UsageError
from treadle.errors import MESSAGE_LENGTH_MAX, TreadleError


class Loose(Document, collection="loose", validation="off"):
    id: Any = None
    value: Any = None


class Node(Document, collection="nodes", tree=AncestorArray(parent="up", ancestors="above")):
    id: int
    up: int | None = None
    above: list[int] = []


class Fan(Document, collection="fans", history=History()):
    id: int
    idols: Annotated[list[int], Outlier(limit=3, overflow="idols_overflow")] = []
    idol_count: int = 0
    has_overflow: bool = False


class Reading(
    Document, collection="readings", bucket=Bucket(key="sensor", time="at", span=timedelta(hours=1))
):
    sensor: str
    at: datetime
    value: Any = None


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


ROUND: list[Any] = []
ROUND.append(ROUND)
ODD = {
    "beyond 64 bits": 2**70,
    "a lone surrogate": "\ud800",
    "17 MB": "x" * 17_000_000,
    "nested too deeply": nested(3_000),
    "a list of itself": ROUND,
    "no value": object(),
}
CALLS = {
    "get": lambda store, odd: store.get(Node, odd),
    "get_many": lambda store, odd: store.get_many(Fan, [odd]),
    "find": lambda store, odd: list(store.find(Loose, {"value": odd})),
    "require": lambda store, odd: store.require(Loose, {"value": odd}),
    "of readings": lambda store, odd: store.require(Reading, {"value": odd}),
    "sort": lambda store, odd: list(store.find(Loose, sort=odd)),
    "limit": lambda store, odd: list(store.find(Loose, limit=odd)),
    "size": lambda store, odd: store.page(Loose, size=odd),
    "after": lambda store, odd: store.page(Loose, after=odd),
    "aggregate": lambda store, odd: list(store.aggregate(Loose, [{"$match": {"value": odd}}])),
    "insert": lambda store, odd: store.insert(Loose.model_construct(id=1, value=odd)),
    "insert an id": lambda store, odd: store.insert(Fan.model_construct(id=odd)),
    "upsert": lambda store, odd: store.upsert(
        Loose, {"_id": 1}, {"$set": {"value": odd}}, insert=Loose(id=1)
    ),
    "update": lambda store, odd: store.update_many(Loose, {"_id": 7}, {"$set": {"value": odd}}),
    "contains": lambda store, odd: store.array(Fan, "idols", 1).contains(odd),
    "remove": lambda store, odd: store.array(Fan, "idols", 1).remove(odd),
    "max_depth": lambda store, odd: list(store.tree(Node).descendants(1, max_depth=odd)),
    "move": lambda store, odd: store.tree(Node).move(1, odd),
    "revert": lambda store, odd: store.revert(Fan, 1, odd),
    "pause": lambda store, odd: store.pause(odd),
    "retry": lambda store, odd: store.retry(odd),
    "discard": lambda store, odd: store.discard(odd),
}


@pytest.mark.parametrize("call", CALLS)
def test_odd_arguments(run, call):
    store = run.store([Loose, Node, Fan, Reading])
    store.insert_many([Node(id=1)])
    store.insert(Fan(id=1))
    store.insert(Reading(sensor="a", at=datetime(2026, 1, 1, tzinfo=UTC)))
    refused = 0
    for odd in ODD.values():
        try:
            CALLS[call](store, odd)
        except TreadleError as error:
            refused += 1
            assert len(str(error)) < MESSAGE_LENGTH_MAX + 100
    assert refused


@pytest.mark.parametrize("identity", [[1], {"$x": 1}])
def test_what_is_no_id(run, identity):
    store = run.store([Loose])
    with pytest.raises(UsageError) as caught:
        store.insert(Loose(id=identity))
    assert "value-not-storable" == caught.value.code


def test_no_skip_is_none(run):
    store = run.store([Loose])
    store.insert(Loose(id=1))
    assert 1 == len(list(store.find(Loose, skip=None)))
