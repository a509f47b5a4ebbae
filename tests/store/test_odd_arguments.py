"""Values that the driver cannot encode, or that no program means: our own error, short, whatever the call."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest

from treadle import AncestorArray, Bucket, Count, Document, History, Id, Outlier, UsageError
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


class Owner(Document, collection="owners"):
    number: Annotated[int, Count("Counted", by="owner_id")] = 0


class Counted(Document, collection="counted", validation="off"):
    id: Any = None
    owner_id: Id | None = None
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
    "a key with NUL": {"a\0b": 1},
    "a set with more than 64 bits": {1, 2**64},
}
CALLS = {
    "get": lambda store, odd: store.get(Node, odd),
    "get_many": lambda store, odd: store.get_many(Fan, [odd]),
    "find": lambda store, odd: list(store.find(Loose, {"value": odd})),
    "find_one": lambda store, odd: store.find_one(Counted, {"value": odd}),
    "count": lambda store, odd: store.count(Loose, {"value": odd}),
    "exists": lambda store, odd: store.exists(Loose, {"value": odd}),
    "distinct": lambda store, odd: store.distinct(Loose, "value", {"value": odd}),
    "page": lambda store, odd: store.page(Loose, {"value": odd}, sort="_id"),
    "require": lambda store, odd: store.require(Loose, {"value": odd}),
    "of readings": lambda store, odd: store.require(Reading, {"value": odd}),
    "sort": lambda store, odd: list(store.find(Loose, sort=odd)),
    "limit": lambda store, odd: list(store.find(Loose, limit=odd)),
    "size": lambda store, odd: store.page(Loose, size=odd),
    "after": lambda store, odd: store.page(Loose, after=odd),
    "aggregate": lambda store, odd: list(store.aggregate(Loose, [{"$match": {"value": odd}}])),
    "insert": lambda store, odd: store.insert(Loose.model_construct(id=1, value=odd)),
    "insert an id": lambda store, odd: store.insert(Fan.model_construct(id=odd)),
    "insert counted": lambda store, odd: store.insert(Counted(value=odd)),
    "insert_many": lambda store, odd: store.insert_many([Counted(), Counted(value=odd)]),
    "replace": lambda store, odd: store.replace(Counted(id=1, value=odd)),
    "update counted": lambda store, odd: store.update(Counted, 1, {"$set": {"value": odd}}),
    "update by": lambda store, odd: store.update(Loose, {"value": odd}, {"$set": {"value": 1}}),
    "push": lambda store, odd: store.update_many(Counted, {}, {"$push": {"value": odd}}),
    "delete": lambda store, odd: store.delete(Counted, {"value": odd}),
    "delete_many": lambda store, odd: store.delete_many(Counted, {"value": odd}),
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
    store = run.store([Loose, Node, Fan, Reading, Owner, Counted])
    counted = store.insert(Counted(id=1))
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
    assert [counted] == store.find(Counted).to_list()


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


def test_a_limit_of_none_at_all_is_refused(run):
    store = run.store([Loose])
    for limit in (0, -1, True, 1.5, 2**64):
        with pytest.raises(UsageError):
            list(store.find(Loose, limit=limit))
    for skip in (-1, 2**64):
        with pytest.raises(UsageError):
            list(store.find(Loose, skip=skip))


def test_treadles_own_and_names_with_a_dollar_are_refused_in_plain_models(run, database):
    store = run.store([Loose])
    made = store.insert(Loose(id=1))
    raw = database["loose"].find_one({})
    for update in (
        {"$set": {"_treadle": 1}},
        {"$set": {"_treadle.n": 1}},
        {"$unset": {"_treadle": ""}},
        {"$rename": {"value": "_treadle"}},
        {"$set": {"$x": 1}},
        {"$set": {"value.$x": 1}},
        [{"$set": {"_treadle.n": 1}}],
    ):
        with pytest.raises(UsageError):
            store.update(Loose, made.id, update)
        with pytest.raises(UsageError):
            store.update_many(Loose, {}, update)
    assert raw == database["loose"].find_one({})
