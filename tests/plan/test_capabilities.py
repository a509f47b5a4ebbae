"""What a server can do: what it says of itself, what it is asked, and what is concluded from its answers."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from bson import ObjectId
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, OperationFailure

from tests.support import shared_standalone, transaction_lifetime
from treadle import (
    Count,
    Document,
    Id,
    Store,
    UsageError,
)
from treadle.plan.capabilities import EVERYTHING, NOWHERE, Capabilities, describe, read_capabilities


class Review(Document, collection="reviews"):
    product_id: Id


class Product(Document, collection="products"):
    name: str = ""
    reviews: Annotated[int, Count(Review, by="product_id")] = 0


HELLO = {"maxWireVersion": 17, "setName": "rs0", "logicalSessionTimeoutMinutes": 30}


@pytest.mark.parametrize(
    ("hello", "standalone", "sharded"),
    [
        ({"setName": "rs0"}, False, False),
        ({"msg": "isdbgrid"}, False, True),
        ({"serviceId": 1}, False, False),
        ({}, True, False),
    ],
)
def test_a_server_says_what_kind_it_is(hello, standalone, sharded):
    found = describe(hello)
    assert (standalone, sharded) == (found.standalone, found.sharded)


def test_a_replica_set_has_what_probes_find(run, database):
    found = run(read_capabilities())
    missing = {name for name in EVERYTHING if not getattr(found, name)}
    assert missing <= {"split_events"}
    assert 60 == found.transaction_seconds
    assert [] == database.list_collection_names()


@pytest.mark.server
def test_a_standalone_server_has_no_history():
    with shared_standalone() as server, MongoClient(server.uri) as client:
        store = Store(client["alone"], [Review])
        store.insert(Review(product_id=ObjectId()))
        known = store._capabilities()
        whole = store.runner.run(read_capabilities())
        assert NOWHERE not in client["alone"].list_collection_names()
    assert known.standalone
    assert not known.transactions
    assert known.retryable_writes  # The driver sends none there, so none is refused.
    lacks = {name for name in EVERYTHING if not getattr(whole, name)}
    assert {"transactions", "streams", "pre_images", "snapshots"} <= lacks
    assert {"merges", "unions", "graph_lookups", "validators", "time_series"}.isdisjoint(lacks)


def answered(answers: dict[str, Any]) -> Capabilities:
    """What is concluded when the commands with these names are answered so, and others succeed."""
    plan = read_capabilities()
    command = next(plan)
    while True:
        document = getattr(command, "document", None)
        name = next(iter(document)) if document else getattr(command, "method", "transact")
        answer = answers.get(name, {"cursor": {"id": 1}, "ok": 1})
        try:
            command = plan.throw(answer) if isinstance(answer, Exception) else plan.send(answer)
        except StopIteration as stop:
            return stop.value


def test_an_older_server_is_refused_by_name():
    with pytest.raises(UsageError, match=r"older than MongoDB 6\.0 .* upgrade it") as refused:
        answered({"hello": {**HELLO, "maxWireVersion": 13}})
    assert "server-too-old" == refused.value.code


def test_want_of_rights_says_nothing_about_the_server():
    no_rights = OperationFailure("not authorized", 13)
    names = ("update_one", "explain", "aggregate", "collMod", "find", "transact")
    found = answered({"hello": HELLO, **dict.fromkeys(names, no_rights)})
    assert found.transactions
    assert found.retryable_writes
    assert found.graph_lookups
    assert found.streams


def test_nothing_is_concluded_from_an_error_that_passes():
    for error in (
        AutoReconnect("gone"),
        OperationFailure("stepped down", 11602),
        OperationFailure("full", 14031),
    ):
        with pytest.raises(type(error)):
            answered({"hello": HELLO, "explain": error})


def test_a_refusal_says_that_it_is_missing():
    unknown = OperationFailure("no such command", 59)
    found = answered({"hello": HELLO, **dict.fromkeys(("explain", "update_one"), unknown)})
    assert not any((found.graph_lookups, found.merges, found.retryable_writes))


def test_a_server_without_retryable_writes_is_refused(database):
    store = Store(database, [Review])
    with pytest.raises(UsageError) as refused:
        store.graph.check_server(Capabilities(pipeline_updates=True))
    assert "retryable-writes-missing" == refused.value.code


def test_a_store_asks_once_and_again_after_a_failover(database):
    store = Store(database, [Review, Product])
    store.insert(Product())
    known = store._known
    store.insert(Product())
    assert known is store._known
    # As after a failover: somebody else took the writes before.
    store._primaries, store._topology = frozenset({("elsewhere", 1)}), None
    store.insert(Product())
    assert known is not store._known
    assert known == store._known
    assert 3 == store.count(Product)


@pytest.mark.parametrize(
    ("lifetime", "seconds"), [(None, 100), (60, 100), (30, 55), (1, 11.5), (120, 190), (600, 670)]
)
def test_locks_of_a_killed_client_last_for_the_lifetime_half_of_it_and_a_margin(lifetime, seconds):
    """The server looks for expired transactions every half of the lifetime, and at least every minute."""
    assert seconds == Capabilities(transaction_seconds=lifetime).lock_seconds


def test_every_store_knows_the_lifetime_of_transactions(database):
    with transaction_lifetime(database.client, 20):
        store = Store(database, [Review])
        store.with_transaction(lambda session: None)
    assert 40 == store.runner.lock_seconds


def test_a_server_that_does_not_say_its_lifetime_has_the_default():
    for code in (13, 59):
        found = answered({"hello": HELLO, "getParameter": OperationFailure("no", code)})
        assert (None, 100) == (found.transaction_seconds, found.lock_seconds)
